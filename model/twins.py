"""One engine on several ranks: all ranks take the steps of the first one.

Decides: the messages between the ranks. Before each step the first rank sends the requests that
have come and gone since the last, and nothing else: everything that follows (which blocks, which
tables, which tokens run) each rank computes, and all come to the same, because the allocator and
the scheduler know no clock, no `hash` and no order of sets. The progress of tiers differs between
ranks: they agree on it (`control/tier_transfers.py`).

Invariants: every rank takes the same steps; no message names blocks. Sizes are agreed once, and
with `is_checked` digests of the tables are compared.

Does not know: how a network is cut (`ranks/parallel.py`), where requests come from.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

from model.control.request import Request
from model.control.step import Flight, Step
from model.control.submission import Submission
from model.engine_core import EngineCore, Output
from model.errors import RanksDivergedError, StalledError

_DIGEST_BYTES = 16


class _Aborted(NamedTuple):
    request_id: int


class _Emptied(NamedTuple):
    enable_caching: bool


class _Tended(NamedTuple):
    """A turn of transfers while no step runs."""


class _Paced(NamedTuple):
    """The budget of steps that several clients share, which the first rank has measured."""

    tokens: int


class _Ended(NamedTuple):
    goes_on: bool


class _Aside(list[object]):
    """A message of commands that no step follows."""


def _forget(requests: list[Request]) -> None:
    del requests


class Group(Protocol):
    """The processes that take the same steps, such as `Ranks`."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def leads(self) -> bool:
        """True if this rank has the requests."""
        ...

    def broadcast(self, message: object = None) -> object:
        """Give all ranks the message of the first one; return it."""
        ...

    def all_gather(self, content: bytes) -> Sequence[bytes]:
        """Return the content that each rank has given, by rank."""
        ...

    def disarm(self) -> None:
        """State that this process ends in order: its end is no loss."""
        ...

    def when_lost(self, tell: Callable[[Exception], object]) -> None:
        """Call `tell` on another thread when a process is lost."""
        ...

    def detecting_loss(self, *, or_fail: bool = False) -> AbstractContextManager[None]:
        """Raise errors of the body as the loss of another process, if one is gone."""
        ...


class TwinCore(EngineCore):
    """A mixin before the class of an engine: all ranks take the same steps.

    The first rank is used as any engine is, and `end`ed at last; the others `follow`.

    Args:
        ranks: the processes that take the same steps.
        is_checked: compare the block tables of all ranks before every pass; one round trip each.
        made: the arguments of the engine's class.
    """

    def __init__(self, *made: Any, ranks: Group, is_checked: bool = False) -> None:  # noqa: ANN401
        self._ranks = ranks
        with ranks.detecting_loss(or_fail=True):
            super().__init__(*made)
        self._is_checked = is_checked
        self._said: list[object] = []

    @property
    def leads(self) -> bool:
        """True if this rank has the requests. O(1)."""
        return self._ranks.leads

    def submit(self, asked: Submission) -> list[Request]:
        """Submit as an engine does, on the other ranks before their next step.

        O(samples * prompt).
        """
        requests = super().submit(asked)
        self._said.append(dataclasses.replace(asked, prompt=list(requests[0].tokens)))
        return requests

    def abort(self, request: Request) -> bool:
        """Abort as an engine does, on the other ranks before their next step. O(num_unfinished)."""
        is_ended = super().abort(request)
        if is_ended:
            self._said.append(_Aborted(request.request_id))
            if self.tiers is not None and not self.has_unfinished:
                self.tiers.wake()  # no step tells the others, where its KV may be on its way
        return is_ended

    def step(self) -> list[Output]:
        """Run a step as an engine does, on all ranks.

        Raises:
            StalledError: nothing can run although something is unfinished.
            RankLostError: another rank is gone.
            RanksDivergedError: the ranks' block tables differ.
        """
        self._ranks.broadcast(self._said or None)
        self._said = []
        outputs = self._step()
        overrun = self._end_overrun()  # time is measured by this rank alone
        self._said += [_Aborted(output.request.request_id) for output in overrun]
        return [*outputs, *overrun]

    def note_time(self, took_s: float) -> None:
        """Note the seconds as an engine does; the other ranks get the budget with the next step."""
        budget = self._scheduler.shared_budget
        before = budget.tokens
        super().note_time(took_s)
        if budget.tokens != before:
            self._said.append(_Paced(budget.tokens))

    def empty_cache(self, *, enable_caching: bool) -> None:
        """Empty the cache as an engine does, on the other ranks before their next step.

        O(contents).
        """
        super().empty_cache(enable_caching=enable_caching)
        self._said.append(_Emptied(enable_caching))

    def tend(self) -> None:
        """Go on with transfers on all ranks; while requests are unfinished, steps do it."""
        if self.tiers is None or self.has_unfinished:
            return
        if self._said or self.tiers.has_work:
            self._tell(_Tended())
            super().tend()

    def woken_by(self, wake: Callable[[], None], lose: Callable[[Exception], object]) -> None:
        """As an engine's: the watchdog notices a loss while a GPU waits for a rank without end."""
        super().woken_by(wake, lose)
        self._ranks.when_lost(lose)

    def end(self, *, goes_on: bool = False) -> None:
        """Let the other ranks come back from `follow`. One message; tiers close as an engine's.

        Args:
            goes_on: True if the network is used once more; `follow` returns it on other ranks.
        """
        self._ranks.broadcast(_Ended(goes_on))
        super().end(goes_on=goes_on)
        if not goes_on:
            self._ranks.disarm()

    def follow(self, note: Callable[[list[Request]], object] = _forget) -> bool:
        """Do what the first rank does, until it ends; return the `goes_on` of its `end`.

        Args:
            note: gets the requests as they come, in order; no reference to ended ones is kept here.

        Raises:
            RankLostError: another rank is gone.
            RanksDivergedError: the ranks' block tables differ.
        """
        while not isinstance(said := self._ranks.broadcast(), _Ended):
            for each in said if isinstance(said, list) else ():
                self._obey(each, note)
            if not isinstance(said, _Aside):
                with suppress(StalledError):  # the first rank's caller decides what becomes of it
                    self._step()
        super().end(goes_on=said.goes_on)
        if not said.goes_on:
            self._ranks.disarm()
        return said.goes_on

    def _tell(self, said: object) -> None:
        """Have the other ranks do this now, not before their next step. One message."""
        self._ranks.broadcast(_Aside([*self._said, said]))
        self._said = []

    def _obey(self, said: object, note: Callable[[list[Request]], object]) -> None:
        """Do what the first rank has done."""
        match said:
            case Submission():
                note(super().submit(said))
            case _Emptied():
                super().empty_cache(enable_caching=said.enable_caching)
            case _Tended():
                super().tend()
            case _Paced():
                self._scheduler.shared_budget.tokens = said.tokens
            case _Aborted():
                super().abort(self._unfinished(said.request_id))

    def _unfinished(self, request_id: int) -> Request:
        """Return the request of this number, unfinished on the first rank. O(num_unfinished).

        Raises:
            RanksDivergedError: it has ended here.
        """
        for request in (*self.running, *self.waiting):
            if request.request_id == request_id:
                return request
        raise RanksDivergedError(
            f"rank {self._ranks.rank} has finished request {request_id}, rank 0 has not"
        )

    def _step(self) -> list[Output]:
        with self._ranks.detecting_loss():
            return super()._run_step()

    def _launch(self, step: Step, previous: Flight | None) -> Flight:
        if self._is_checked:
            self._compare(step)
        return super()._launch(step, previous)

    def _compare(self, step: Step) -> None:
        """Raise unless all ranks plan the same and hold the same blocks. O(block tables).

        Called before a pass: ranks that run different ones wait for each other without end.
        """
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for chunk in step.chunks:
            digest.update(f"{chunk.request.request_id} {chunk.start} {chunk.num_tokens};".encode())
        digest.update(f"{self.kv.num_free_blocks} free".encode())
        for request in self.running:
            sequence = request.running_sequence
            digest.update(f"{request.request_id} {sequence.num_tokens}".encode())
            digest.update(sequence.packed)
            for table in sequence.tables:
                digest.update(table.block_ids)
        found = self._ranks.all_gather(digest.digest())
        for rank, other in enumerate(found):
            if other != found[0]:
                raise RanksDivergedError(
                    f"rank {rank} and rank 0 have different block tables after the same calls"
                )
