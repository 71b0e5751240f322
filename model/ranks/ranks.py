"""The processes that share one network, one per device, and the watchdog that notices a lost one.

Decides: how they meet (`torchrun` sets the environment variables that `torch.distributed` reads),
and what travels how: tensors of the network by NCCL between GPUs and by gloo between CPUs, small
messages of the first rank to all others by gloo.

A collective between CPUs fails when a process is gone. One between GPUs waits for it, in a call
that cannot be interrupted. So a thread watches connections: rank 0 has one to each other rank. A
process that ends in order, or has reported its own error, says so over its connection; if the
connection just ends, the process is lost. Rank 0 reports in one line which one, and notifies the
other ranks, which stay silent; if rank 0 is lost, each of them reports it. After that a process has
`_GRACE_S` to end by itself, then it is ended; one that has clients tells them first.

Invariants: a lost rank is an error on all others, not a wait, even while they wait for a GPU;
no message of a step says which blocks.

Does not know: the network, requests, what a message means.
"""

import hmac
import os
import pickle
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from model.errors import RankLostError, UsageError

LOST = "another of the processes that share the network is gone"

_TIMEOUT = timedelta(days=365)  # rank 0 may have no work for long; the watchdog notices its loss
_LOSSES = ("closed by peer", "reset by peer", "broken pipe", "remote process", "connection refused")
_GRACE_S = 1.5
_TELLING_S = 5.0  # the same where clients are told, which ends the process earlier
_NOTICE_S = 5.0
_CONNECT_S = 60.0
_FAILED = 3  # the exit code after a loss, as in `model.cli.exits`
_KEY_BYTES = 16
_NUMBER = struct.Struct("<i")  # a message: the rank that is lost, or one of these
_ENDED = -1
_FAILED_ALONE = -2


class Watchdog:
    """Watches connections, and ends this process some time after one of them has ended.

    Args:
        connections: to the other processes, by rank.
        end: ends this process; None: exit with code 3.
        grace_s: the time between the loss and that call.
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
        self._on_loss: Callable[[RankLostError], object] | None = None
        self._disarmed = threading.Event()
        self._noticed = threading.Event()
        self._line = LOST
        self._thread = threading.Thread(target=self._mind, name="watchdog", daemon=True)
        self._thread.start()

    def disarm(self) -> None:
        """Watch no longer: from now on the others may end. A second call does nothing. O(ranks)."""
        if not self._disarmed.is_set():
            self._disarmed.set()
            self._tell(_ENDED)

    def when_lost(self, tell: Callable[[RankLostError], object]) -> None:
        """Call `tell` on the thread of the watchdog when a process is lost. O(1).

        It has to end this process within some seconds, also while a collective never ends.
        """
        self._on_loss = tell
        if self._noticed.is_set():
            tell(self.loss())

    def fail(self) -> None:
        """Tell the others that this process ends with an error that it reports itself. O(ranks)."""
        self._tell(_FAILED_ALONE)

    def loss(self) -> RankLostError:
        """Return the error of a collective that has lost a process, naming that process.

        Waits up to some seconds until the connection has ended too and the line is written.
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
                    if number == _ENDED or self._disarmed.is_set():
                        selector.unregister(key.fileobj)
                    else:
                        self._lose(key.data, number)
                        return
        self._close()

    def _lose(self, rank: int, number: int | None) -> None:
        """Note that a process is lost, or ends with an error.

        Args:
            rank: the other end of the connection.
            number: the message that came; None: the connection has ended.
        """
        lost = number if number is not None and number >= 0 else rank
        self._line = f"rank {lost} of the processes that share the network is gone"
        if number is None:
            _say(f"error: {self._line}")
        self._tell(lost)
        self._close()  # so that the others notice no later than this one
        self._noticed.set()
        grace_s = self._grace_s
        if self._on_loss is not None:
            self._on_loss(self.loss())
            grace_s = _TELLING_S
        if not self._disarmed.wait(grace_s):
            self._end()

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _tell(self, number: int) -> None:
        for connection in self._connections.values():
            with suppress(OSError):  # it is gone, or the connection is closed
                connection.sendall(_NUMBER.pack(number))


def _read(connection: socket.socket) -> int | None:
    """Return the message of another process; None: its connection has ended."""
    try:
        found = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return int(_NUMBER.unpack(found)[0]) if len(found) == _NUMBER.size else None


def meet(rank: int, size: int, tell: Callable[[object], object]) -> dict[int, socket.socket]:
    """Connect rank 0 with all other ranks; every process calls it.

    Args:
        rank: of this process.
        size: the number of processes.
        tell: broadcasts what rank 0 passes to it, and returns that on every rank.

    Returns:
        The connections of this process, by the rank at their other end.

    Raises:
        RankLostError: a process does not connect.
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
                    each.close()  # not one of the processes
            return found
    except OSError as error:
        raise RankLostError(f"the processes that share the network do not meet: {error}") from error


def _checked(said: object) -> tuple[int, bytes]:
    match said:
        case (int(port), bytes(key)):
            return port, key
    raise RankLostError("the processes that share the network sent different messages")


def _say(line: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        sys.stderr.write(f"{line}\n")  # one call: other processes write there too
        sys.stderr.flush()


def _end_process() -> None:
    os._exit(_FAILED)


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of the processes that share a network.

    Every rank calls the methods that communicate; they raise RankLostError if another rank is gone.

    Attributes:
        rank: its number, from 0.
        size: the number of processes.
        expert_parallel: True if each rank holds some experts whole, not a part of each expert.
    """

    rank: int
    size: int
    _control: dist.ProcessGroup
    _watchdog: Watchdog
    expert_parallel: bool = False

    @property
    def leads(self) -> bool:
        """True if this is rank 0, which has the requests. O(1)."""
        return self.rank == 0

    def all_reduce_min(self, number: int) -> int:
        """Return the smallest of the ranks' numbers. One round trip."""
        value = torch.tensor(number)
        with self.detecting_loss():
            dist.all_reduce(value, dist.ReduceOp.MIN, group=self._control)
        return int(value)

    def broadcast(self, message: object = None) -> object:
        """Return the `message` of rank 0, on every rank.

        None costs one message of 8 bytes, anything else a second one.
        """
        with self.detecting_loss():
            return _broadcast(self._control, self.rank, message)

    def all_gather(self, content: bytes) -> list[bytes]:
        """Return the content of each rank, all of one length. One round trip."""
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.detecting_loss():
            dist.all_gather(found, mine, group=self._control)
        return [each.numpy().tobytes() for each in found]

    def when_lost(self, tell: Callable[[RankLostError], object]) -> None:
        """Call `tell` on another thread when a rank is lost; see `Watchdog.when_lost`. O(1)."""
        self._watchdog.when_lost(tell)

    def wait_turn(self) -> None:
        """Wait until the ranks before this one have had their turn; `end_turn` must follow."""
        for _ in range(self.rank):
            self.all_reduce_min(0)

    def end_turn(self) -> None:
        """Give the next rank its turn, and wait until all have had theirs."""
        for _ in range(self.size - self.rank):
            self.all_reduce_min(0)

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, in stream order on its device: [n], one type on every rank."""
        own = tensor.clone()
        with self.detecting_loss():
            dist.broadcast(own, 0)
        return own

    @contextmanager
    def detecting_loss(self, *, or_fail: bool = False) -> Iterator[None]:
        """Run what all ranks run together; if one is lost, the error names it.

        Args:
            or_fail: any other error ends this process, which reports it and notifies the other
                ranks, so that they stay silent.

        Raises:
            RankLostError: another rank is gone.
        """
        try:
            yield
        except Exception as error:
            if getattr(error, "was_told", False):
                raise
            if _is_loss(error):
                raise self._watchdog.loss() from error
            if or_fail:
                self._watchdog.fail()
            raise

    def leave(self) -> None:
        """Leave the group. O(1)."""
        self.disarm()
        dist.destroy_process_group()

    def disarm(self) -> None:
        """Treat the end of the other ranks as normal from now on. O(1)."""
        self._watchdog.disarm()


def join_ranks(size: int, *, expert_parallel: bool = False) -> Ranks | None:
    """Meet the other processes; None if there are none. Waits until all are there.

    Args:
        size: the number of processes that --tp names.
        expert_parallel: how they share the network's experts.

    Raises:
        UsageError: the number of processes differs, is larger than the number of devices, or is 1
            with `expert_parallel`.
        RankLostError: a process is gone before all have met.
    """
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != size:
        raise UsageError(
            f"--tp: wanted the number of processes, which is {found}, got {size}: start it "
            f"as torchrun --nproc-per-node {max(size, 2)} -m model.run --tp {max(size, 2)}"
        )
    if size == 1:
        if expert_parallel:
            raise UsageError("--expert-parallel: wanted --tp with several processes, got 1")
        return None
    backends = "cpu:gloo"
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"--tp: wanted at most {torch.cuda.device_count()}, the GPUs of this machine, "
                f"got {size}"
            )
        torch.cuda.set_device(local)
        backends += ",cuda:nccl"
    try:
        dist.init_process_group(backends)
        control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:  # an address in use, a missing variable
        line = str(error).strip().split("\n")[0]
        raise UsageError(f"--tp: the processes do not find each other: {line}") from error
    rank = dist.get_rank()
    try:
        watchdog = Watchdog(meet(rank, size, lambda said: _broadcast(control, rank, said)))
    except RuntimeError as error:
        if _is_loss(error):
            raise RankLostError(LOST) from error
        raise
    return Ranks(rank, size, control, watchdog, expert_parallel)


def _broadcast(control: dist.ProcessGroup, rank: int, message: object) -> object:
    content = b"" if message is None else pickle.dumps(message)
    size = torch.tensor(len(content))
    dist.broadcast(size, 0, group=control)
    if not size:
        return None
    data = torch.empty(int(size), dtype=torch.uint8)
    if rank == 0:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(data, 0, group=control)
    # From a process of this run, over a connection that `torchrun` has set up.
    return pickle.loads(data.numpy().tobytes())  # noqa: S301


def _is_loss(error: BaseException) -> bool:
    """Return True if an error, or one of its causes, comes from a lost process."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, RankLostError):
            return True
        if isinstance(chain, RuntimeError) and any(word in str(chain).lower() for word in _LOSSES):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
