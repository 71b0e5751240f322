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
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOADED = ("torch.distributed", "transformers", "model.engine", "model.cli.session", "backends")
MOST_BYTES = 1 << 17  # of arguments and environment


class Program:
    """A program that runs, and what it has written when it has ended."""

    def __init__(self, forks, arguments, environment):
        self.arguments = arguments
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  # the end reads
        self._told, theirs = socket.socketpair()
        with theirs:
            asked = json.dumps([arguments, environment]).encode()
            fds = [theirs.fileno(), *(file.fileno() for file in self._files)]
            socket.send_fds(forks, [asked], fds)

    def wait_for(self, pattern, timeout_s=200):
        """The first match in what it has written to stderr so far; it may end before."""
        end_s = time.monotonic() + timeout_s
        while (found := re.search(pattern, self._written(1))) is None:
            self._told.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                self._told.recv(1, socket.MSG_PEEK)  # its end
                return re.search(pattern, self._written(1))
            assert time.monotonic() < end_s, self._written(1)
        return found

    def _written(self, number):
        fd = self._files[number].fileno()  # its place in the file is also the program's
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def end(self, timeout_s=200):
        """Wait; a `subprocess.CompletedProcess` with texts."""
        self._told.settimeout(timeout_s)
        with self._told:
            status = b"".join(iter(lambda: self._told.recv(16), b""))
        written = [self._written(number) for number in range(2)]
        for file in self._files:
            file.close()
        return subprocess.CompletedProcess(self.arguments, int(status), *written)


class Forks:
    """The process that has imported everything; a context that ends it."""

    def __enter__(self):
        self._asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._asks.setsockopt(socket.SOL_SOCKET, size, 2 * MOST_BYTES)
        with theirs:
            command = [sys.executable, "-m", "tests.forks", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        return self

    def __exit__(self, *_):
        self._asks.close()
        self._process.wait()

    def start(self, *arguments, **environment):
        """Start `python ARGUMENTS...`, which begin with `-m` or a path; more is its environment."""
        return Program(self._asks, [*map(str, arguments)], {**os.environ, **environment})

    def run(self, *arguments, **environment):
        """Start a program and wait for its end."""
        return self.start(*arguments, **environment).end()


def next_program(asks):
    """In each program, once: its arguments. The process that forks stays here to its end."""
    while True:
        asked, fds, *_ = socket.recv_fds(asks, MOST_BYTES, 3)
        _reap()
        if not asked:
            while _reap(wait=True):
                pass
            os._exit(0)
        if os.fork() == 0:
            asks.close()
            child = os.fork()
            if child:
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os.write(fds[0], str(status).encode())
                os._exit(0)
            os.close(fds[0])
            for number, fd in enumerate(fds[1:], 1):
                os.dup2(fd, number)
                os.close(fd)
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
    for name in LOADED:
        importlib.import_module(name)
    arguments = next_program(socket.socket(fileno=int(sys.argv[1])))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
