"""Whether the other processes are there: a connection to each, which ends when it does.

A collective between CPUs fails when a process is gone; one between GPUs waits for it, and so does
whoever waits for the GPU, in a call that nothing interrupts. So a thread of its own minds the
connections: the first process has one to each of the others.

Decides: that a process which ends in order, or has said itself what went wrong, says so over its
connection; one whose connection just ends is lost. The first process says in one line which one
that is and tells the others, which say nothing; if the first one is lost, each of the others says
so. A process that has lost another one may end by itself for some seconds, and is ended then.

Does not know: what the processes do.
"""

import hmac
import os
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from model.errors import RankLostError

_GRACE_S = 5.0
_NOTICE_S = 5.0
_CONNECT_S = 60.0
_FAILED = 3  # the exit code of a run that was lost, as `model.cli.exits` has it
_KEY_BYTES = 16
_NUMBER = struct.Struct("<i")  # over a connection: the rank that is lost, or one of these
_ENDED = -1
_FAILED_ALONE = -2

LOST = "another of the processes that share the network is gone"


class Lifeline:
    """Minds connections, and ends the process a while after one of them has ended.

    Args:
        connections: to the other processes, by their rank.
        end: is called then.
        grace_s: after so long.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        end: Callable[[], None] | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._connections = dict(connections)
        self._end = _end_process if end is None else end
        self._grace_s = grace_s
        self._let_go = threading.Event()
        self._noticed = threading.Event()
        self._line = LOST
        self._thread = threading.Thread(target=self._mind, name="lifeline", daemon=True)
        self._thread.start()

    def let_go(self) -> None:
        """Mind them no more: that they end is in order from now on. Again: nothing. O(ranks)."""
        if not self._let_go.is_set():
            self._let_go.set()
            self._tell(_ENDED)

    def fail(self) -> None:
        """Say that this process ends by an error of its own, which it tells itself. O(ranks)."""
        self._tell(_FAILED_ALONE)

    def loss(self) -> RankLostError:
        """The error of a collective that has lost a process, which names the process.

        Waits some seconds until the connection has ended too, and the line is written.
        """
        was_told = self._noticed.wait(_NOTICE_S)
        error = RankLostError(self._line)
        error.was_told = was_told
        return error

    def _mind(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    number = _read(self._connections[key.data])
                    if number == _ENDED or self._let_go.is_set():
                        selector.unregister(key.fileobj)
                    else:
                        self._lose(key.data, number)
                        return
        self._close()

    def _lose(self, rank: int, number: int | None) -> None:
        """A process is lost, or ends by an error.

        Args:
            rank: who says so, or says nothing any more.
            number: what it says; None: its connection has ended.
        """
        lost = number if number is not None and number >= 0 else rank
        self._line = f"rank {lost} of the processes that share the network is gone"
        if number is None:
            _say(f"error: {self._line}")
        self._tell(lost)
        self._close()  # the others need not wait longer than this one
        self._noticed.set()
        if not self._let_go.wait(self._grace_s):
            self._end()

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _tell(self, number: int) -> None:
        for connection in self._connections.values():
            with suppress(OSError):  # it is gone, or was told enough
                connection.sendall(_NUMBER.pack(number))


def _read(connection: socket.socket) -> int | None:
    """What another process says; None: it says nothing any more."""
    try:
        found = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return int(_NUMBER.unpack(found)[0]) if len(found) == _NUMBER.size else None


def meet(rank: int, size: int, tell: Callable[[object], object]) -> dict[int, socket.socket]:
    """Connect the first process with all others; every process calls it.

    Args:
        rank: of this process.
        size: how many there are.
        tell: gives all processes what the first one gives it.

    Returns:
        The connections of this process, by the rank at their other end.

    Raises:
        RankLostError: one of them does not come.
    """
    host = os.environ.get("MASTER_ADDR", "localhost")
    try:
        if rank:
            port, key = _checked(tell(None))
            made = socket.create_connection((host, port), _CONNECT_S)
            made.sendall(key + _NUMBER.pack(rank))
            return {0: made}
        with socket.create_server((host, 0), backlog=size) as listener:
            listener.settimeout(_CONNECT_S)
            key = os.urandom(_KEY_BYTES)
            tell((listener.getsockname()[1], key))
            found: dict[int, socket.socket] = {}
            while len(found) < size - 1:
                each, _ = listener.accept()
                each.settimeout(_CONNECT_S)
                if hmac.compare_digest(each.recv(_KEY_BYTES, socket.MSG_WAITALL), key):
                    found[_read(each) or 0] = each
                else:
                    each.close()  # a stranger
            return found
    except OSError as error:
        raise RankLostError(f"the processes that share the network do not meet: {error}") from error


def _checked(said: object) -> tuple[int, bytes]:
    match said:
        case (int(port), bytes(key)):
            return port, key
    raise RankLostError("the processes that share the network do not say the same")


def _say(line: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        sys.stderr.write(f"{line}\n")  # in one go: other processes write there too
        sys.stderr.flush()


def _end_process() -> None:
    os._exit(_FAILED)
