"""A step: the scheduler's plan, its counters, the step on its way through the device, its watch.

Decides: the phases of a step. `schedule` plans it, `prepare` builds its tensors, `forward` is the
network, `sample` draws the tokens, `commit` updates the cache and decodes text.

Invariants: a plan is a value; nothing in it changes after it was made, but for the payload of a
host copy, which belongs to the `BlockMover` that carries out the transfers.

Does not know: how the plan came about (`scheduler.py`), or how it is computed (`batch.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import kvcore
from model.control.request import HostCopy, Request, SampledToken
from model.errors import SchedulerStateError

SCHEDULE, PREPARE, FORWARD, SAMPLE, COMMIT = PHASES = (
    "schedule",
    "prepare",
    "forward",
    "sample",
    "commit",
)
_NOTHING = nullcontext()


class Chunk(NamedTuple):
    """Tokens `start` to `start + num_tokens - 1` of a request, to be computed in one step.

    Attributes:
        samples: True if the chunk ends at the last known token: its logits give the next one.
        followers: further samples of the same prompt; the same logits give the first token of each.
        drafts: the last of its tokens, where those are guesses of what follows the last known one;
            tokens are drawn from the logits of that and of each guess.
        num_scored: the number of its first tokens that give the log-probability of the next one.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    followers: tuple[Request, ...] = ()
    drafts: tuple[int, ...] = ()
    num_scored: int = 0

    @property
    def num_known(self) -> int:
        """The number of tokens that are no guesses. O(1)."""
        return self.num_tokens - len(self.drafts)

    @property
    def sampling(self) -> tuple[Request, ...]:
        """The requests that a token is drawn for from the chunk's last logits. O(1)."""
        return (self.request, *self.followers) if self.samples else ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks that move between the cache and a copy in host memory, in order.

    Attributes:
        request: the request that they belong to.
        block_ids: in the cache.
        copy: the copy in host memory.
        ranges: the entries of the copy, from each first one to before the second, in order: not all
            where the request has found its beginning in the cache.
        lease: holds the blocks until the step is updated.
    """

    request: Request
    block_ids: tuple[int, ...]
    copy: HostCopy
    ranges: tuple[tuple[int, int], ...]
    lease: kvcore.Lease


@dataclass(frozen=True, slots=True)
class Step:
    """The plan of one forward pass, and the transfers before it.

    Every request appears at most once among the chunks and loads. `stores` come first, then
    `loads`, then the pass.
    """

    chunks: tuple[Chunk, ...]
    stores: tuple[Transfer, ...] = ()
    loads: tuple[Transfer, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The tokens of the step. O(num_chunks)."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    def running(self) -> list[Chunk]:
        """Return the chunks of requests that still run. O(num_chunks)."""
        return [chunk for chunk in self.chunks if chunk.request.sequence is not None]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do. O(1)."""
        return not (self.chunks or self.stores or self.loads)


def samplers(chunks: Sequence[Chunk]) -> list[Request]:
    """Return the requests that get a token from these chunks, each leader before its followers."""
    requests: list[Request] = []
    for chunk in chunks:
        if chunk.followers:
            requests += chunk.sampling
        elif chunk.samples:
            requests.append(chunk.request)
    return requests


def drafts_of(chunks: Sequence[Chunk]) -> dict[int, tuple[int, ...]]:
    """Return request_id -> draft tokens, of the requests that have any."""
    return {chunk.request.request_id: chunk.drafts for chunk in chunks if chunk.drafts}


def check_accepted(
    drafts: Mapping[int, tuple[int, ...]],
    requests: Iterable[Request],
    sampled: Mapping[int, int],
    further: Mapping[int, Sequence[int]],
) -> None:
    """Raise unless further tokens follow accepted drafts, and none follows a token that ends."""
    for request in requests if further else ():
        number = request.request_id
        tokens = [sampled[number], *further.get(number, ())][:-1]
        if tokens != [*drafts.get(number, ())[: len(tokens)]] or any(map(request.ends_by, tokens)):
            raise SchedulerStateError(
                f"further: wanted accepted draft tokens of {request!r}, got what follows {tokens}"
            )


def check_drawn(requests: Sequence[Request], sampled: Mapping[int, int]) -> None:
    """Raise unless there is a token for each of them."""
    for request in requests:
        if request.request_id not in sampled:
            raise SchedulerStateError(f"sampled: no token for {request!r}")


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was made.

    `num_hit_tokens` counts prompt tokens found in the cache when a request is first admitted; what
    a preempted request finds of itself is not a hit, and neither is what a sample shares with the
    first one of its prompt: those are `num_forks`. `num_swaps` counts the preemptions that stored
    blocks in host memory, `num_loads` the stored blocks' ways back. `num_drafts` counts the chunks
    with draft tokens, `num_draft_tokens` the tokens, `num_accepted_tokens` the accepted ones.
    """

    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    peak_running: int = 0
    num_forks: int = 0
    num_swaps: int = 0
    num_loads: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def alike(numbers: list[int]) -> int | list[int]:
    """Return the number if all are equal, because kvcore is faster with one, or else all."""
    first = numbers[0] if numbers else 0
    return first if numbers.count(first) == len(numbers) else numbers


TokenLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The log-probability of a token, and the most likely tokens with their log-probabilities."""


class ScoredPrompts(Protocol):
    """The log-probabilities of prompt tokens, on their way to the host."""

    def tokens(self) -> Iterable[tuple[Request, int, list[SampledToken]]]:
        """Return each request, the position of the first of its tokens, and the tokens.

        Only after the drawn tokens of the step are read. O(tokens * tops).
        """
        ...


class DrawnTokens(Protocol):
    """The tokens of a step, on the device or on their way to the host."""

    def read(self) -> Sequence[int | None]:
        """Return the token of each row, None if its logits are not finite; waits for the step."""
        ...

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return row -> log-probabilities, of the rows that ask; only after `read`."""
        ...


@dataclass(slots=True)
class Flight:
    """A step in flight, and the tokens it draws.

    Attributes:
        sampling: the requests that get a token, in the order of the rows.
        drawn: the tokens, once they are read.
        drafted: requests with their draft tokens; their rows follow in this order, one per draft.
        scored: log-probabilities of prompt tokens; None: no request asks.
    """

    sampling: tuple[Request, ...]
    drawn: DrawnTokens
    drafted: tuple[tuple[Request, tuple[int, ...]], ...] = ()
    scored: ScoredPrompts | None = None
    _tokens: dict[int, int | None] | None = None  # once they are read

    def rows(self) -> dict[int, int]:
        """Return request_id -> its row. O(num_sampled)."""
        return {request.request_id: row for row, request in enumerate(self.sampling)}

    def read(self) -> dict[int, int | None]:
        """Return request_id -> its token, None if its logits are not finite; waits for the step.

        O(num_sampled), once.
        """
        if self._tokens is None:
            drawn = zip(self.sampling, self.drawn.read(), strict=False)
            self._tokens = {request.request_id: token for request, token in drawn}
        return self._tokens

    def ahead(self) -> Iterator[tuple[Request, tuple[int, ...], Sequence[int | None]]]:
        """Yield each request with draft tokens, the drafts, and the token drawn after each.

        O(drafts).
        """
        tokens, row = self.drawn.read(), len(self.sampling)
        for request, drafts in self.drafted:
            yield request, drafts, tokens[row : row + len(drafts)]
            row += len(drafts)

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Return request_id -> log-probabilities of its tokens, if it asks; only after `read`.

        O(num_sampled that ask).
        """
        drawn, found = self.drawn.logprobs(), dict[int, list[TokenLogprobs]]()
        if drawn:
            rows = (*self.sampling, *rows_behind(self.drafted))
            for row, logprobs in drawn.items():
                found.setdefault(rows[row].request_id, []).append(logprobs)
        return found


def rows_behind(drafted: Sequence[tuple[Request, tuple[int, ...]]]) -> Iterator[Request]:
    """Yield the request of each draft token. O(drafts)."""
    return (request for request, drafts in drafted for _ in drafts)


class StepWatch(Protocol):
    """An observer that the engine calls in a step: `begin`, `scheduled`, `done` ..., `end`."""

    def begin(self) -> None:
        """Record that a step begins."""
        ...

    def scheduled(self, step: Step) -> None:
        """Record that the step is planned."""
        ...

    def done(self, phase: str) -> None:
        """Record that a phase is over; the next one begins."""
        ...

    def on_device(self, phase: str) -> AbstractContextManager[object]:
        """Record that all that the body sends to the device belongs to this phase."""
        ...

    def end(self) -> None:
        """Record that the last phase and the step are over."""
        ...


class Unwatched:
    """A watch that records nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def scheduled(self, step: Step) -> None:
        """Do nothing."""

    def done(self, phase: str) -> None:
        """Do nothing."""

    def on_device(self, phase: str) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        del phase
        return _NOTHING

    def end(self) -> None:
        """Do nothing."""
