"""Requests on their way: added, scheduled step by step, updated, ended.

Decides: when a step's tokens count (all chunks are committed, then samples fork from their leaders,
then tokens end requests), and which requests are accepted at all. What a step computes is decided
in `planner.py`.

A step's tokens may be read one step late: `advance` when the step is on its way, `accept` when its
tokens are known, after the next `schedule` at the latest; `update` is both at once. In between
everyone who samples has an entry that stands in for its token. Nothing is committed that holds one:
a token is committed when it is computed, a step after it was drawn. What a request that ends by a
stop token has been planned to do meanwhile is dropped.

Further samples of a prompt start by a fork when it is computed; where there is no seat or block for
one, it waits its turn like any other request and draws the same token then.

Invariants:
- what `add` accepts ends, whatever comes after it, unless blocks of the pool are held from outside;
- nothing is committed of a request that has ended;
- no block is copied from or to twice in one update, because no token ends a request before all have
  forked.

Does not know: torch, text, how a token is computed or sampled, how a block is copied.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial

import kvcore
from model.control.config import SchedulerConfig
from model.control.drafts import Drafter
from model.control.planner import StepPlanner
from model.control.request import FinishReason, Request, Status
from model.control.step import Chunk, Step
from model.errors import InvalidArgumentError, RequestTooLongError, SchedulerStateError


class Scheduler(StepPlanner):
    """Moves requests from waiting to finished; owns their sequences in `kv`.

    `schedule` and `update` alternate, or `schedule`, `accept` of the step before and `advance`;
    `add` and `abort` may come at any moment between or within them.
    """

    def __init__(
        self, kv: kvcore.KVCacheManager, config: SchedulerConfig, drafter: Drafter | None = None
    ) -> None:
        super().__init__(kv, config, drafter)
        self._unfinished: dict[int, Request] = {}
        self._num_added = 0
        # Whether anything is kept for a number of steps, or counted in them.
        self._keeps_time = kv.stats().lifetimes is not None
        self._in_flight: Step | None = None
        self._expecting: tuple[Request, ...] = ()  # what the last step draws for, unread
        self._drafts: dict[int, tuple[int, ...]] = {}  # which drafts it has computed, likewise

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running. O(1)."""
        return bool(self._unfinished)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Every request that waits or runs, and any that a broken plan left between. O(those)."""
        return tuple(self._unfinished.values())

    @property
    def guesses(self) -> bool:
        """Whether requests bring drafts. O(1)."""
        return self._drafter is not None

    @cached_property
    def max_model_len(self) -> int:
        """Tokens that a request may come to for sure, its prompt included. O(log blocks), once.

        No more than positions, than an otherwise empty pool has room for in all KV cache groups,
        and no more than there are slots, because block tables are as wide.
        """
        size, groups, blocks = self._kv.block_size, self._kv.groups, self._kv.num_usable_blocks
        peak = partial(kvcore.peak_blocks, block_size=size, groups=groups, chunk=1)
        room = bisect_right(range(blocks * size + 1), blocks, key=peak)  # the last needs none
        edges = (
            self.config.max_model_len,
            None if self.config.may_cross else self.config.long_above,
        )
        return min([room, *[edge for edge in edges if edge is not None]])

    def add(self, request: Request) -> None:
        """Queue a new request, behind all others of its priority. O(num_waiting).

        Raises:
            InvalidArgumentError: the request is not new, another unfinished one has its id, or its
                leader is no request of the same prompt here that has still to be computed.
            RequestTooLongError: it could never finish here, even with the pool to itself; nothing
                has changed.
        """
        if request.status is not Status.WAITING or request.request_id in self._unfinished:
            raise InvalidArgumentError(f"request: wanted a new one, got {request!r}")
        leader = request.leader
        if leader is not None and not (
            request.is_led
            and self._unfinished.get(leader.request_id) is leader
            and (leader.tokens, leader.priority, leader.namespace)
            == (request.tokens, request.priority, request.namespace)
        ):
            raise InvalidArgumentError(
                f"leader: wanted an unfinished request of the same prompt, priority and namespace "
                f"that has no token yet, got {leader!r}"
            )
        self._check_length(request)
        number = self._num_added
        self._num_added += 1
        request.order = (number + request.priority * self.config.priority_span, number)
        self._unfinished[request.request_id] = request
        self._keeps_time |= any(wish.max_steps for wish in request.retain)
        if leader is not None:
            self._followers.setdefault(leader.request_id, []).append(request)
        self._enqueue(request)

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
        self._followers.pop(request.request_id, None)
        for queue in (self._running, self._waiting):
            if request in queue:  # of none, if a plan was broken off while it changed its place
                queue.remove(request)
        self._room.drop_copy(request)
        sequence = request.finish(reason)
        if sequence is not None:
            self._kv.close(sequence)
        if self._drafter is not None:
            self._drafter.discard(request)
        return True

    def schedule(self) -> Step:
        """Plan the next step and take its blocks. O(num_running + tokens of the admitted prompts).

        Raises:
            SchedulerStateError: the last step has not been updated yet.
        """
        if self._in_flight is not None:
            raise SchedulerStateError(
                "schedule: the last step has not been updated; call update or advance first"
            )
        if self._drafts:
            raise SchedulerStateError(
                "schedule: the last step had draft tokens; call accept with its tokens first"
            )
        if self._keeps_time:
            self._kv.tick(1)
        self._in_flight = self.plan()
        return self._in_flight

    def update(
        self,
        step: Step,
        sampled: Mapping[int, int],
        further: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[kvcore.CopyOrder, ...]:
        """Commit a computed step and hand out its tokens: `advance`, then `accept`.

        Args:
            step: what `schedule` returned last.
            sampled: request_id -> the token drawn for it, for everyone in the `sampling` of a chunk
                whose own request was not aborted.
            further: as `accept` takes it.

        Returns:
            Blocks to be copied before the next step.

        Raises:
            SchedulerStateError: this is not the step in flight, the one before it has not been
                accepted, or a token is missing or not what was computed; nothing has changed.
        """
        self._check_in_flight(step)
        live = _live(step)
        _check_drawn(_samplers(live), sampled)
        _check_held(_drafts(live), _samplers(live), sampled, further or {})
        orders = self._advance(step, live)
        self.accept(sampled, further)
        return orders

    def advance(self, step: Step) -> tuple[kvcore.CopyOrder, ...]:
        """Take a step that is on its way for computed, its tokens for drawn. O(step.num_tokens).

        Whatever the device does for a later step comes after it.

        Args:
            step: what `schedule` returned last; the tokens of the step before have been accepted.

        Returns:
            Blocks to be copied before the next step.

        Raises:
            SchedulerStateError: this is not the step in flight, or the one before it has not been
                accepted; nothing has changed.
        """
        self._check_in_flight(step)
        return self._advance(step, _live(step))

    def _advance(self, step: Step, live: Sequence[Chunk]) -> tuple[kvcore.CopyOrder, ...]:
        self._in_flight = None
        self._room.end_transfers(step.stores, step.loads)
        self._stores, self._loads = [], []
        self._commit(live)
        # All forks come before the first token ends a request: no block is copied from or to twice.
        orders: list[kvcore.CopyOrder] = []
        expecting = _samplers(live)
        leading = [chunk for chunk in live if chunk.followers]
        for chunk in leading:
            for follower in chunk.followers:
                self._fork(chunk.request, follower, orders)
        if leading:  # a follower that found no room to fork draws when it is its turn
            expecting = [request for request in expecting if request.sequence is not None]
        self._expecting = tuple(expecting)
        self._drafts = _drafts(live)
        return tuple(orders)

    def drop(self, step: Step) -> None:
        """Let go of a step that was not carried out, or not even planned to its end.

        Its requests have been aborted. O(transfers).

        Args:
            step: what `schedule` returned last, anything if it has raised.
        """
        if self._in_flight is not None:
            self.advance(step)
        else:
            self._room.end_transfers(self._stores, self._loads)
            self._stores, self._loads = [], []
        self._drafts, self._expecting = {}, ()  # no request is left to take a token

    def accept(
        self, sampled: Mapping[int, int], further: Mapping[int, Sequence[int]] | None = None
    ) -> list[Request]:
        """Hand out the tokens of the step that was advanced last. O(num_sampled).

        Drafts that did not hold leave nothing: no room, no token, nothing that can be found.

        Args:
            sampled: request_id -> the token drawn for it, for everyone who still expects one.
            further: request_id -> the tokens drawn behind that one, where the drafts between them
                held (`drafts.held` tells).

        Returns:
            Those who did, in the order of the step; some may have finished by it.

        Raises:
            SchedulerStateError: a token is missing, or follows what was not computed; nothing has
                changed.
        """
        expecting = [request for request in self._expecting if request.is_expecting]
        _check_drawn(expecting, sampled)
        further = further or {}
        _check_held(self._drafts, expecting, sampled, further)
        self._expecting = ()
        running, told = [], []
        for request in expecting:
            token = sampled[request.request_id]
            if request.sequence is None:
                request.tell(token)
            else:
                running.append(request.sequence)
                told.append(token)
        self._kv.tell_step(running, told)
        if self._drafts:
            self._follow(expecting, further)
            self._drafts = {}
        for request in expecting:
            number = request.request_id
            reason = request.ending((further.get(number) or (sampled[number],))[-1])
            if reason is not None:
                self.finish(request, reason)
        return expecting

    def _check_in_flight(self, step: Step) -> None:
        if step is not self._in_flight:
            raise SchedulerStateError("update: this is not the step in flight")
        if any(request.is_expecting for request in self._expecting):
            raise SchedulerStateError(
                "update: the tokens of the previous step have not been accepted; call accept first"
            )

    def _commit(self, chunks: Sequence[Chunk]) -> None:
        """What was planned is computed, and each that samples expects a token.

        There is room for that token when it is planned to be computed.
        """
        if not chunks:
            return
        requests, _, computed, samples, _, drafts = zip(*chunks, strict=True)
        if any(drafts):  # which of them hold is not known yet
            computed = tuple([chunk.num_known for chunk in chunks])
        self._kv.step(
            [request.running_sequence for request in requests],
            computed,
            None,
            num_joining=None if all(samples) else [int(one) for one in samples],
            room=[0] * len(chunks),
        )

    def _follow(self, expecting: Sequence[Request], further: Mapping[int, Sequence[int]]) -> None:
        """The drafts that held are computed, what was drawn behind them joins; the rest is cut."""
        for request in expecting:
            drafts, more = self._drafts.get(request.request_id, ()), further.get(request.request_id)
            sequence = request.sequence
            if sequence is None or not drafts:
                continue
            if more:
                self._kv.step([sequence], [len(more)], more, num_joining=[len(more)], room=[0])
                self.stats.num_accepted_tokens += len(more)
            self._kv.truncate(sequence, sequence.num_tokens)  # room that was for the others

    def _fork(self, leader: Request, follower: Request, orders: list[kvcore.CopyOrder]) -> None:
        """Start a sample from its leader's blocks, or let it wait its turn."""
        if follower.is_finished or len(self._running) >= self.config.max_num_seqs:
            return
        try:
            sequence, copies = self._kv.fork(leader.running_sequence)
        except kvcore.OutOfBlocksError:
            return
        orders += copies
        self._waiting.remove(follower)
        self._kv.expect(sequence, 1)  # what the leader expects is not in a fork
        follower.start(sequence)
        follower.is_long = leader.is_long
        self._run(follower)
        self.stats.num_forks += 1

    def _check_length(self, request: Request) -> None:
        total, limit = request.max_total_tokens, self.config.max_model_len
        prompt, new = request.num_prompt_tokens, request.params.max_tokens
        what = f"prompt of {prompt} tokens plus max_tokens {new}"
        if limit is not None and total > limit:
            raise RequestTooLongError(f"{what} exceeds the model's {limit} positions")
        edge = self.config.long_above
        if edge is not None and not self.config.may_cross and prompt <= edge < total - 1:
            raise RequestTooLongError(
                f"{what}: beyond {edge} tokens this model uses other rotary embeddings for every "
                f"token, so a text cannot grow past them; use max_tokens={edge - prompt + 1}"
            )
        # The last token is handed out and never computed, so it needs no slot.
        size, groups = self._kv.block_size, self._kv.groups
        needed = kvcore.peak_blocks(total - 1, size, groups=groups, chunk=1)
        if needed > self._kv.num_usable_blocks:
            raise RequestTooLongError(
                f"{what} needs {needed} blocks of {size} tokens: "
                f"the KV cache has {self._kv.num_usable_blocks} (--num-blocks, --kv-memory-bytes)"
            )


def _live(step: Step) -> list[Chunk]:
    """The chunks of requests that still run."""
    return [chunk for chunk in step.chunks if chunk.request.sequence is not None]


def _samplers(chunks: Sequence[Chunk]) -> list[Request]:
    """The requests that get a token, each leader before its followers."""
    requests: list[Request] = []
    for chunk in chunks:
        if chunk.followers:
            requests += chunk.sampling
        elif chunk.samples:
            requests.append(chunk.request)
    return requests


def _drafts(chunks: Sequence[Chunk]) -> dict[int, tuple[int, ...]]:
    """request_id -> its drafts, of those that have any."""
    return {chunk.request.request_id: chunk.drafts for chunk in chunks if chunk.drafts}


def _check_held(
    drafts: Mapping[int, tuple[int, ...]],
    requests: Iterable[Request],
    sampled: Mapping[int, int],
    further: Mapping[int, Sequence[int]],
) -> None:
    """Raise unless what is told was drawn behind drafts that held, and nothing behind an end."""
    for request in requests if further else ():
        number = request.request_id
        told = [sampled[number], *further.get(number, ())][:-1]
        if told != [*drafts.get(number, ())[: len(told)]] or any(map(request.ends_by, told)):
            raise SchedulerStateError(
                f"further: wanted drafts of {request!r} that held, got what follows {told}"
            )


def _check_drawn(requests: Sequence[Request], sampled: Mapping[int, int]) -> None:
    """Raise unless there is a token for each of them."""
    if not sampled.keys() >= {request.request_id for request in requests}:
        request = next(r for r in requests if r.request_id not in sampled)
        raise SchedulerStateError(f"sampled: no token for {request!r}")
