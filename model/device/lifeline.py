"""Whether the other processes are there: a connection to each, which ends when it does.

A collective between CPUs fails when a process is gone; one between GPUs waits for it, and so does
whoever waits for the GPU, in a call that nothing interrupts. So a thread of its own minds the
connections: the first process has one to each of the others.

Decides: that a process which has lost another one may end by itself for some seconds, and is ended
then, with one line.

Does not know: what the processes do.
"""

import hmac
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from model.errors import RankLostError

_GRACE_S = 5.0
_CONNECT_S = 60.0
_FAILED = 3  # the exit code of a run that was lost, as `model.cli.exits` has it
_KEY_BYTES = 16

LOST = "another of the processes that share the network is gone"


class Lifeline:
    """Minds connections, and ends the process a while after one of them has ended.

    Args:
        connections: to the other processes; nothing is sent over them.
        end: is called then.
        grace_s: after so long.
    """

    def __init__(
        self,
        connections: Sequence[socket.socket],
        end: Callable[[], None] | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._connections = list(connections)
        self._end = _end_process if end is None else end
        self._grace_s = grace_s
        self._let_go = threading.Event()
        self._thread = threading.Thread(target=self._mind, name="lifeline", daemon=True)
        self._thread.start()

    def let_go(self) -> None:
        """Mind them no more: that they end is in order from now on. Again: nothing. O(1)."""
        self._let_go.set()

    def _mind(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ)
            selector.select()  # nothing is ever sent, so what can be read is an end
        for connection in self._connections:
            connection.close()  # the others need not wait longer than this one
        if not self._let_go.wait(self._grace_s):
            self._end()


def meet(rank: int, size: int, tell: Callable[[object], object]) -> list[socket.socket]:
    """Connect the first process with all others; every process calls it.

    Args:
        rank: of this process.
        size: how many there are.
        tell: gives all processes what the first one gives it.

    Raises:
        RankLostError: one of them does not come.
    """
    host = os.environ.get("MASTER_ADDR", "localhost")
    try:
        if rank:
            port, key = _checked(tell(None))
            made = socket.create_connection((host, port), _CONNECT_S)
            made.sendall(key)
            return [made]
        with socket.create_server((host, 0), backlog=size) as listener:
            listener.settimeout(_CONNECT_S)
            key = os.urandom(_KEY_BYTES)
            tell((listener.getsockname()[1], key))
            found: list[socket.socket] = []
            while len(found) < size - 1:
                each, _ = listener.accept()
                each.settimeout(_CONNECT_S)
                if hmac.compare_digest(each.recv(_KEY_BYTES, socket.MSG_WAITALL), key):
                    found.append(each)
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


def _end_process() -> None:
    sys.stderr.write(f"error: {LOST}\n")  # in one go: other processes write there too
    sys.stderr.flush()
    os._exit(_FAILED)
