"""The processes that run one network together, each on a device of its own.

Decides: how they find each other (`torchrun` says it by environment variables, as
`torch.distributed` reads them), what goes over which wire: tensors of the network by NCCL between
GPUs and gloo between CPUs, small messages of the first rank to all by gloo.

Invariants: a rank that is gone is an error on the others, not a wait, also where they wait for
their GPU; nothing is ever said about blocks.

Does not know: the network, requests, what a message means.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from model.errors import RankLostError, UsageError
from model.ranks.lifeline import LOST, Lifeline, meet

_PATIENCE = timedelta(days=365)  # a leader may have nothing to say for long; a dead one is noticed
_LOST = ("closed by peer", "reset by peer", "broken pipe", "remote process", "connection refused")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among those that share a network.

    Attributes:
        rank: this one's number, from 0.
        size: how many there are.
        expert_parallel: whether each has some experts whole, not a part of each.
    """

    rank: int
    size: int
    _control: dist.ProcessGroup
    _lifeline: Lifeline
    expert_parallel: bool = False

    @property
    def leads(self) -> bool:
        """Whether this is the one that has the requests. O(1)."""
        return self.rank == 0

    def least(self, number: int) -> int:
        """The smallest of the numbers that the ranks bring; every rank calls it. One round trip.

        Raises:
            RankLostError: another rank is gone.
        """
        value = torch.tensor(number)
        with self.noticing():
            dist.all_reduce(value, dist.ReduceOp.MIN, group=self._control)
        return int(value)

    def told(self, message: object = None) -> object:
        """What the first rank says; every rank calls it, and the first one's `message` counts.

        None costs one message of 8 bytes, anything else a second one.

        Raises:
            RankLostError: another rank is gone.
        """
        with self.noticing():
            return _told(self._control, self.rank, message)

    def all_of(self, content: bytes) -> list[bytes]:
        """What each rank brings, by rank: as many bytes of each. One round trip.

        Raises:
            RankLostError: another rank is gone.
        """
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.noticing():
            dist.all_gather(found, mine, group=self._control)
        return [each.numpy().tobytes() for each in found]

    def wait_turn(self) -> None:
        """Wait until the ranks before this one have had their turn; then `end_turn`.

        Raises:
            RankLostError: another rank is gone.
        """
        for _ in range(self.rank):
            self.least(0)

    def end_turn(self) -> None:
        """Let the next rank have its turn, and wait until all have had theirs.

        Raises:
            RankLostError: another rank is gone.
        """
        for _ in range(self.size - self.rank):
            self.least(0)

    def shared(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor, on its device, in the order of the device's stream.

        Args:
            tensor: [n], of the same shape and type on every rank.

        Raises:
            RankLostError: another rank is gone.
        """
        own = tensor.clone()
        with self.noticing():
            dist.broadcast(own, 0)
        return own

    @contextmanager
    def noticing(self, *, or_fail: bool = False) -> Iterator[None]:
        """Run what all ranks run together; the loss of one becomes an error that names it.

        Args:
            or_fail: any other error ends this process, which says why; the others are told, so
                that they say nothing.

        Raises:
            RankLostError: another rank is gone.
        """
        try:
            yield
        except Exception as error:
            if getattr(error, "was_told", False):
                raise
            if _is_loss(error):
                raise self._lifeline.loss() from error
            if or_fail:
                self._lifeline.fail()
            raise

    def leave(self) -> None:
        """Be one of them no longer. O(1)."""
        self.let_go()
        dist.destroy_process_group()

    def let_go(self) -> None:
        """Take it for granted from now on that the others end. O(1)."""
        self._lifeline.let_go()


def join_ranks(size: int, *, expert_parallel: bool = False) -> Ranks | None:
    """Meet the other processes; None if there are none. Waits until all are there.

    Args:
        size: how many the user wants.
        expert_parallel: how they share the network's experts.

    Raises:
        UsageError: there are not as many processes, or fewer devices than that, or only one to
            share experts.
        RankLostError: one is gone before all have met.
    """
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != size:
        raise UsageError(
            f"--tp: wanted as many as there are processes, which is {found}, got {size}: start it "
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
        control = dist.new_group(backend="gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:  # an address in use, a variable that is missing
        line = str(error).strip().split("\n")[0]
        raise UsageError(f"--tp: the processes do not find each other: {line}") from error
    rank = dist.get_rank()
    try:
        lifeline = Lifeline(meet(rank, size, lambda said: _told(control, rank, said)))
    except RuntimeError as error:
        if _is_loss(error):
            raise RankLostError(LOST) from error
        raise
    return Ranks(rank, size, control, lifeline, expert_parallel)


def _told(control: dist.ProcessGroup, rank: int, message: object) -> object:
    content = b"" if message is None else pickle.dumps(message)
    size = torch.tensor(len(content))
    dist.broadcast(size, 0, group=control)
    if not size:
        return None
    data = torch.empty(int(size), dtype=torch.uint8)
    if rank == 0:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(data, 0, group=control)
    # From a process of this very run, over a connection that `torchrun` has set up.
    return pickle.loads(data.numpy().tobytes())  # noqa: S301


def _is_loss(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, is of a process that is gone."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, RankLostError):
            return True
        if isinstance(chain, RuntimeError) and any(word in str(chain).lower() for word in _LOST):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
