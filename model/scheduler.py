"""Which tokens of which requests the next step computes.

First come, first served, under a budget of tokens a step. Decodes go first, oldest request first;
what is left of the budget goes to prefills in pieces (chunked prefill, as in Sarathi-Serve, Agrawal
et al. 2024, arXiv:2403.02310); what is left then admits waiting requests. Blocks are taken chunk by
chunk, so that a window group never holds more than a window and a chunk; an admission counts what
every running prompt will still take, so that prompts do not run out half way. Where a running
request finds no block, the newest one gives up its own and is computed again later (recomputation,
as in vLLM, Kwon et al. 2023, arXiv:2309.06180), from whatever the prefix cache still holds of it.

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
from model.needs import missing_blocks, needed_blocks, peak_blocks
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
        self._planned: dict[int, Chunk] = {}
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
        self._planned = {}
        for planned in (self._decodes, self._prefills, self._admissions):
            for request in planned():
                num_tokens = self._reserve(request)
                if num_tokens:
                    self._planned[request.request_id] = _chunk(request, num_tokens)
                if self._budget_left() == 0:
                    break
            if self._budget_left() == 0:
                break
        chunks = tuple(self._planned.values())
        self._in_flight = Step(chunks)
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
        """Running requests with one token to compute, oldest first."""
        for request in self.running:
            if request.status is Status.RUNNING and _num_uncomputed(request) == 1:
                yield request

    def _prefills(self) -> Iterator[Request]:
        """Running requests with more to compute, oldest first."""
        for request in self.running:
            if request.status is Status.RUNNING and _num_uncomputed(request) > 1:
                yield request

    def _admissions(self) -> Iterator[Request]:
        """Waiting requests that can start, in order; the first that cannot holds up the others."""
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            request = self._waiting[0]
            plan = self._kv.plan(request.tokens)
            # Blocks in hand for all that run: no start just to be preempted again.
            promised = sum(map(self._outlook, self._running))
            wanted = self._num_wanted(request, plan) + promised
            if wanted > plan.num_free_blocks:
                return
            if self._is_prefix_in_flight(request, plan.num_cached_tokens):
                return
            self._start(self._waiting.popleft())
            yield request

    def _num_wanted(self, request: Request, plan: kvcore.Plan) -> int:
        """Free blocks that a start takes until all known tokens are computed."""
        length = len(request.tokens)
        chunk = min(self.config.max_num_batched_tokens, length)
        blocks = plan.num_revived_blocks
        for group in self._kv.groups:
            new = -(-length // group.block_size) - plan.num_cached_tokens // group.block_size
            blocks += min(new, peak_blocks(group, length, chunk))
        return blocks

    def _start(self, request: Request) -> None:
        sequence = self._kv.open(request.tokens, resumed=request.num_preemptions > 0)
        request.start(sequence)
        self._running.append(request)
        if request.num_preemptions == 0:
            self.stats.num_prompt_tokens += request.num_prompt_tokens
            self.stats.num_hit_tokens += request.num_cached_tokens

    def _outlook(self, request: Request) -> int:
        """Blocks a running request may come to take: for all it knows, and one more a group."""
        sequence, length = request.running_sequence, len(request.tokens)
        chunk = min(self.config.max_num_batched_tokens, _num_uncomputed(request))
        room = -(-length // self._kv.block_size) * self._kv.block_size
        grows = request.max_total_tokens - 1 > room
        return missing_blocks(sequence, length, chunk) + grows * len(self._kv.groups)

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

    def _budget_left(self) -> int:
        spent = sum([chunk.num_tokens for chunk in self._planned.values()])
        return self.config.max_num_batched_tokens - spent

    def _reserve(self, request: Request) -> int:
        """Take blocks for the next tokens of a running request, preempting newer ones.

        Returns:
            How many tokens there is room for, within the budget; 0: it waits, with all it has.
        """
        sequence = request.running_sequence
        wanted = min(_num_uncomputed(request), self._budget_left())
        while not self._kv.can_reserve(sequence, 1):
            newest = self._running[-1]
            if newest is request:
                return 0
            self._preempt(newest)
        fitting = self._num_reservable(sequence, wanted)
        self._kv.reserve(sequence, fitting)
        return fitting

    def _num_reservable(self, sequence: kvcore.KVSequence, wanted: int) -> int:
        """The most tokens, from 1 to `wanted`, that the free blocks have room for."""
        if self._kv.can_reserve(sequence, wanted):
            return wanted
        fits, too_many = 1, wanted
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._kv.can_reserve(sequence, middle):
                fits = middle
            else:
                too_many = middle
        return fits

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._planned.pop(request.request_id, None)
        self._kv.close(request.preempt())
        self._waiting.appendleft(request)
        self.stats.num_preemptions += 1

    def _check_length(self, request: Request) -> None:
        total, limit = request.max_total_tokens, self.config.max_model_len
        prompt, new = request.num_prompt_tokens, request.params.max_tokens
        what = f"prompt of {prompt} tokens plus max_tokens {new}"
        if limit is not None and total > limit:
            raise RequestTooLongError(f"{what}: the model has positions for {limit} tokens")
        # The last token is handed out and never computed, so it needs no slot.
        needed = needed_blocks(self._kv.groups, max(1, total - 1))
        if needed > self._kv.num_usable_blocks:
            raise RequestTooLongError(
                f"{what} needs {needed} blocks of {self._kv.block_size} tokens: "
                f"the pool has {self._kv.num_usable_blocks}"
            )


def _num_uncomputed(request: Request) -> int:
    return len(request.tokens) - request.running_sequence.num_computed_tokens


def _chunk(request: Request, num_tokens: int) -> Chunk:
    start = request.running_sequence.num_computed_tokens
    return Chunk(request, start, num_tokens, samples=start + num_tokens == len(request.tokens))
