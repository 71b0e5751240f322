"""Which tokens of which requests the next step computes.

First come, first served, under a budget of tokens a step. Decodes go first, oldest request first;
what is left of the budget goes to prefills in pieces (chunked prefill, as in Sarathi-Serve, Agrawal
et al. 2024, arXiv:2403.02310); what is left then admits waiting requests. An admission reserves the
blocks of the whole prompt, so that a prefill never runs out of them half way. Only a decode can:
then the newest running request gives up its blocks and is computed again later (recomputation, as
in vLLM, Kwon et al. 2023, arXiv:2309.06180), from whatever the prefix cache still holds of it.

Invariants:
- `running` and `waiting` are each in order of arrival, and everything running arrived before
  everything waiting;
- the oldest running request can always go on: all others can be preempted for it, and `add` refuses
  what does not fit into the pool alone;
- a step never exceeds the budget, and a request that does not run holds no blocks.

Does not know: torch, text, how a token is computed or sampled.
"""

from collections import deque
from collections.abc import Iterator, Mapping

import kvcore
from model.config import SchedulerConfig
from model.errors import InvalidArgumentError, RequestTooLongError, SchedulerStateError
from model.request import FinishReason, Request, Status
from model.step import Chunk, SchedulerStats, Step


class Scheduler:
    """Moves requests from waiting to finished; owns their sequences in `kv`.

    `schedule` and `update` alternate; `add` and `abort` may come at any moment between or within
    them.
    """

    def __init__(self, kv: kvcore.KVCacheManager, config: SchedulerConfig) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self._kv = kv
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._unfinished: dict[int, Request] = {}
        self._in_flight: Step | None = None

    @property
    def running(self) -> tuple[Request, ...]:
        """The running requests, oldest first. O(num_running)."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The waiting and preempted requests, oldest first. O(num_waiting)."""
        return tuple(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running. O(1)."""
        return bool(self._unfinished)

    def add(self, request: Request) -> None:
        """Queue a new request behind all others. O(1).

        Raises:
            InvalidArgumentError: the request is not new, or another unfinished one has its id.
            RequestTooLongError: it could never finish here, even with the pool to itself; nothing
                has changed.
        """
        if request.status is not Status.WAITING or request.request_id in self._unfinished:
            raise InvalidArgumentError(f"request: wanted a new one, got {request!r}")
        self._check_length(request)
        self._unfinished[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request: Request) -> bool:
        """End a request wherever it stands; its blocks go back at once. O(num_unfinished).

        Returns:
            Whether it was unfinished. Aborting a finished request changes nothing.
        """
        return self.finish(request, FinishReason.ABORTED)

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End a request for a reason found outside, a stop string for one. O(num_unfinished).

        Returns:
            Whether it was unfinished.

        Raises:
            InvalidArgumentError: the request is not one of this scheduler.
        """
        if request.is_finished:
            return False
        if self._unfinished.get(request.request_id) is not request:
            raise InvalidArgumentError(f"request: {request!r} was not added to this scheduler")
        del self._unfinished[request.request_id]
        queue = self._running if request.status is Status.RUNNING else self._waiting
        queue.remove(request)
        sequence = request.finish(reason)
        if sequence is not None:
            self._kv.close(sequence)
        return True

    def schedule(self) -> Step:
        """Plan the next step and take its blocks. O(num_running + tokens of the admitted prompts).

        Raises:
            SchedulerStateError: the last step has not been updated yet.
        """
        if self._in_flight is not None:
            raise SchedulerStateError("schedule: the last step wants its update first")
        budget = self.config.max_num_batched_tokens
        chunks: list[Chunk] = []
        for planned in (self._decodes, self._prefills, self._admissions):
            for request in planned():
                chunk = _chunk(request, budget)
                chunks.append(chunk)
                budget -= chunk.num_tokens
                if budget == 0:
                    break
            if budget == 0:
                break
        self._in_flight = Step(tuple(chunks))
        self.stats.num_steps += bool(chunks)
        self.stats.peak_running = max(self.stats.peak_running, len(self._running))
        return self._in_flight

    def update(self, step: Step, sampled: Mapping[int, int]) -> None:
        """Commit a computed step and hand out its tokens. O(step.num_tokens).

        Args:
            step: what `schedule` returned last.
            sampled: request_id -> the token drawn for it, for every chunk that samples and was not
                aborted.

        Raises:
            SchedulerStateError: this is not the step in flight, or a token is missing; nothing has
                changed.
        """
        if step is not self._in_flight:
            raise SchedulerStateError("update: wanted the step in flight, got another")
        live = [chunk for chunk in step.chunks if not chunk.request.is_finished]
        for chunk in live:
            if chunk.samples and chunk.request.request_id not in sampled:
                raise SchedulerStateError(f"sampled: no token for {chunk.request!r}")
        self._in_flight = None
        for chunk in live:
            request = chunk.request
            self._kv.commit(request.running_sequence, chunk.num_tokens)
            if chunk.samples:
                self._accept(request, sampled[request.request_id])

    def _accept(self, request: Request, token: int) -> None:
        reason = request.accept(token)
        if reason is None:
            self._kv.append(request.running_sequence, token)
        else:
            self.finish(request, reason)

    def _decodes(self) -> Iterator[Request]:
        """Running requests with one token to compute, each with room for it, oldest first."""
        for request in self.running:
            if (
                request.status is Status.RUNNING
                and _num_uncomputed(request) == 1
                and self._make_room(request)
            ):
                yield request

    def _prefills(self) -> Iterator[Request]:
        """Running requests with more to compute; their admission reserved the room."""
        return (request for request in self.running if _num_uncomputed(request) > 1)

    def _admissions(self) -> Iterator[Request]:
        """Waiting requests that can start, in order; the first that cannot holds up the others."""
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            request = self._waiting[0]
            plan = self._kv.plan(request.tokens)
            # A block in hand for each that can still grow: no start just to be preempted again.
            growing = sum(map(self._can_grow, self._running))
            needed = plan.num_new_blocks + plan.num_revived_blocks + growing
            if needed > plan.num_free_blocks:
                return
            if self._is_prefix_in_flight(request, plan.num_cached_tokens):
                return
            self._start(self._waiting.popleft())
            yield request

    def _start(self, request: Request) -> None:
        sequence = self._kv.open(request.tokens, resumed=request.num_preemptions > 0)
        self._kv.reserve(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        request.start(sequence)
        self._running.append(request)
        if request.num_preemptions == 0:
            self.stats.num_prompt_tokens += request.num_prompt_tokens
            self.stats.num_hit_tokens += request.num_cached_tokens

    def _can_grow(self, request: Request) -> bool:
        """Whether a running request may come to need another block."""
        room = request.running_sequence.num_blocks * self._kv.block_size
        return request.max_total_tokens - 1 > room

    def _is_prefix_in_flight(self, request: Request, num_cached_tokens: int) -> bool:
        """Whether a running request is about to compute the next block this one could hit."""
        end = num_cached_tokens + self._kv.block_size
        if not self._kv.enable_caching or end >= len(request.tokens):
            return False
        prefix = request.tokens[:end]
        return any(
            other.running_sequence.num_computed_tokens < end and other.tokens[:end] == prefix
            for other in self._running
        )

    def _make_room(self, request: Request) -> bool:
        """Reserve one token, preempting newer requests; False if it had to give way itself."""
        sequence = request.running_sequence
        while not self._kv.can_reserve(sequence, 1):
            newest = self._running.pop()
            self._kv.close(newest.preempt())
            self._waiting.appendleft(newest)
            self.stats.num_preemptions += 1
            if newest is request:
                return False
        self._kv.reserve(sequence, 1)
        return True

    def _check_length(self, request: Request) -> None:
        total, limit = request.max_total_tokens, self.config.max_model_len
        prompt, new = request.num_prompt_tokens, request.params.max_tokens
        what = f"prompt of {prompt} tokens plus max_tokens {new}"
        if limit is not None and total > limit:
            raise RequestTooLongError(f"{what}: the model has positions for {limit} tokens")
        # The last token is handed out and never computed, so it needs no slot.
        needed = -(-(total - 1) // self._kv.block_size)
        if needed > self._kv.num_usable_blocks:
            raise RequestTooLongError(
                f"{what} needs {needed} blocks of {self._kv.block_size} tokens: "
                f"the pool has {self._kv.num_usable_blocks}"
            )


def _num_uncomputed(request: Request) -> int:
    return len(request.tokens) - request.running_sequence.num_computed_tokens


def _chunk(request: Request, budget: int) -> Chunk:
    remaining = _num_uncomputed(request)
    num_tokens = min(remaining, budget)
    start = request.running_sequence.num_computed_tokens
    return Chunk(request, start, num_tokens, samples=num_tokens == remaining)
