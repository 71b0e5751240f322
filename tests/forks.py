"""Python programs that need no start: forked from a process that has imported the engine already.

To import torch, Transformers and the engine takes seconds, more than most programs of the tests run
for. `Forks` starts one process that does it once. For each program that process forks a keeper, and
the keeper the program, whose end it reports. What is read from the environment while these packages
are imported is the same for all programs.
"""

import contextlib
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.hang import HANG_S

ROOT = Path(__file__).parents[1]
LOADED = ("torch.distributed", "transformers", "model.engine", "model.cli.session", "backends")
MOST_BYTES = 1 << 17  # of arguments and environment


class Program:
    """A program that runs, and what it has written when it has ended.

    What it writes goes to files. Where `is_open`, its three streams are pipes to `stdin`, `stdout`
    and `stderr`, which a context closes; an exception kills it.
    """

    def __init__(self, forks, arguments, environment, *, stdin="", is_open=False):
        self.arguments, self.returncode = arguments, None
        self._told, theirs = socket.socketpair()
        if is_open:
            (end, write), (out, out_end), (err, err_end) = (os.pipe() for _ in range(3))
            ends = [end, out_end, err_end]
            self.stdin = os.fdopen(write, "w", encoding="utf-8", buffering=1)
            self.stdout, self.stderr = (os.fdopen(fd, encoding="utf-8") for fd in (out, err))
        else:
            self._files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115  # the end reads
            self._files[0].write(stdin.encode())
            self._files[0].seek(0)
            ends = [file.fileno() for file in self._files]
        with theirs:
            asked = json.dumps([arguments, environment]).encode()
            socket.send_fds(forks, [asked], [theirs.fileno(), *ends])
        if is_open:
            for fd in ends:
                os.close(fd)
        self._told.settimeout(HANG_S)
        self.pid = int.from_bytes(self._told.recv(8), "little")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            with contextlib.suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()
        self.wait()

    def send_signal(self, number):
        """The program must still run."""
        os.kill(self.pid, number)

    def wait_for(self, pattern, timeout_s=HANG_S):
        """The first match in what it has written to stderr so far; it may end before."""
        end_s = time.monotonic() + timeout_s
        while (found := re.search(pattern, self._written(2))) is None:
            self._told.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                self._told.recv(1, socket.MSG_PEEK)  # its end
                return re.search(pattern, self._written(2))
            assert time.monotonic() < end_s, self._written(2)
        return found

    def _written(self, number):
        fd = self._files[number].fileno()  # its place in the file is also the program's
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def wait(self, timeout_s=HANG_S):
        """Its exit code."""
        if self.returncode is None:
            self._told.settimeout(timeout_s)
            with self._told:
                self.returncode = int(b"".join(iter(lambda: self._told.recv(16), b"")))
        return self.returncode

    def end(self, timeout_s=HANG_S):
        """Wait; a `subprocess.CompletedProcess` with texts."""
        self.wait(timeout_s)
        written = [self._written(number) for number in (1, 2)]
        for file in self._files:
            file.close()
        return subprocess.CompletedProcess(self.arguments, self.returncode, *written)


class Forks:
    """The process that has imported everything and `more`, in an environment; a context ends it."""

    def __init__(self, *more, **environment):
        self._more, self._environment = more, environment

    def __enter__(self):
        self._asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._asks.setsockopt(socket.SOL_SOCKET, size, 2 * MOST_BYTES)
        with theirs:
            command = [sys.executable, "-m", "tests.forks", str(theirs.fileno()), *self._more]
            environment = {**os.environ, **self._environment}
            self._process = subprocess.Popen(
                command, cwd=ROOT, pass_fds=[theirs.fileno()], env=environment
            )
        return self

    def __exit__(self, *_):
        self._asks.close()
        self._process.wait()

    def start(self, *arguments, stdin="", is_open=False, **environment):
        """Start `python ARGUMENTS...`: `-m`, `-c` or a path first; more is its environment."""
        environment = {**os.environ, **self._environment, **environment}
        arguments = [*map(str, arguments)]
        return Program(self._asks, arguments, environment, stdin=stdin, is_open=is_open)

    def run(self, *arguments, **more):
        """Start a program and wait for its end."""
        return self.start(*arguments, **more).end()


def next_program(asks):
    """In each program, once: its arguments. The process that forks stays here to its end."""
    while True:
        asked, fds, *_ = socket.recv_fds(asks, MOST_BYTES, 4)
        _reap()
        if not asked:
            while _reap(wait=True):
                pass
            os._exit(0)
        if os.fork() == 0:
            asks.close()
            child = os.fork()
            if child:
                os.write(fds[0], child.to_bytes(8, "little"))
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os.write(fds[0], str(status).encode())
                os._exit(0)
            os.close(fds[0])
            for number, fd in enumerate(fds[1:]):
                os.dup2(fd, number)
                os.close(fd)
            sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, too
            arguments, environment = json.loads(asked)
            os.environ.clear()
            os.environ.update(environment)
            return arguments
        for fd in fds:
            os.close(fd)


def _reap(*, wait=False):
    """Whether a keeper had ended."""
    try:
        return os.waitpid(-1, 0 if wait else os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def main():
    """Serve; in a program, run it."""
    for name in (*LOADED, *sys.argv[2:]):
        importlib.import_module(name)
    arguments = next_program(socket.socket(fileno=int(sys.argv[1])))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})  # noqa: S102  # as Python does
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
