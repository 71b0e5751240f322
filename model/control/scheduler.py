"""The scheduler: the requests that run, and the tokens that each step computes.

Requests have an order, fixed when they arrive: clients take turns (`clients.py`), the requests of
one go by arrival, and one level of priority moves a request ahead by `priority_span` turns and no
more, so that no stream of others can starve it. Under a budget of tokens a step,
decodes go first; what is left goes in order to prefills, in pieces (chunked prefill, as in
Sarathi-Serve, Agrawal et al. 2024, arXiv:2403.02310), and to waiting requests. While there are
several clients the budget is smaller, and each has a share of it (`shares.py`). Blocks are taken
chunk by chunk, so that a window group never holds more than a window and a chunk.

Where a running request finds no block, the last in order is preempted (recomputation or swapping,
as in vLLM, Kwon et al. 2023, arXiv:2309.06180; `admission.py` has the rule); so is a running one
that comes after a waiting one which would fit then.

A step reads in this order: `schedule` plans it and takes its blocks; `advance` commits what it
computes, once it is on its way to the device; `accept` takes its tokens, after the next `schedule`
at the latest; `update` is `advance` and `accept` at once. Until then every request that samples
expects a token, which is committed when it is computed, a step after it was sampled. Tokens that
were planned meanwhile for a request that ends by a stop token are dropped.

Further samples of a prompt start by a fork when it is computed. One without room waits like any
other request.

Invariants:
- what `add` accepts ends, whatever comes after it, unless blocks of the pool are held from outside;
- `running` and `waiting` are each in order; a start never overtakes one that waits, but for samples
  that wait for their leader, requests that wait for KV from a tier (`tier_transfers.py`), and those
  of another client that has had its share of the step;
- the first in order runs in every step, except while its blocks or those that it waits for are
  copied, or the last token of a request before it is read: a token of the budget is kept for it and
  all others can be preempted for it;
- a step never exceeds the budget, and a request that does not run holds no blocks, but for those
  that its KV is being loaded into;
- nothing is committed of a request that has ended;
- all chunks are committed, then samples fork, then tokens end requests: no block is copied from or
  to twice in one update.

Does not know: torch, text, how a token is computed or sampled, how a block is copied.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter

import kvcore
from model.control.admission import Admission
from model.control.clients import FairOrder, turns_of
from model.control.config import SchedulerConfig
from model.control.drafts import Drafter, may_have_drafts
from model.control.request import FinishReason, Request, Status
from model.control.shares import LEAST_TOKENS, RECENT_STEPS, Shares, StepBudget, wanted_tokens
from model.control.step import (
    Chunk,
    SchedulerStats,
    Step,
    Transfer,
    alike,
    check_accepted,
    check_drawn,
    drafts_of,
    samplers,
)
from model.control.tier_transfers import TierTransfers
from model.errors import InvalidArgumentError, RequestTooLongError, SchedulerStateError


class Scheduler:
    """Moves requests from waiting to finished; owns their sequences in `kv`.

    `schedule` and `update` alternate, or `schedule`, `accept` of the step before and `advance`;
    `add` and `abort` may come at any moment between or within them.
    """

    def __init__(
        self,
        kv: kvcore.KVCacheManager,
        config: SchedulerConfig,
        drafter: Drafter | None = None,
        tiers: TierTransfers | None = None,
    ) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self.shared_budget = StepBudget(config.max_num_batched_tokens)
        self._kv = kv
        self._drafter = drafter
        self._tiers = tiers
        self._admission = Admission(kv, config, tiers)
        states = [group for group in kv.groups if isinstance(group, kvcore.RecurrentState)]
        self._keeps_states = bool(states)
        self._stride = math.gcd(*[each.block_size for each in kv.groups if each not in states])
        self._unfinished: dict[int, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._followers: dict[int, list[Request]] = {}  # by leader: samples of its prompt
        self._num_added = 0
        self._clients = FairOrder(config.priority_span)
        self._keeps_time = kv.stats().lifetimes is not None  # or blocks are kept for some steps
        self._budget = 0
        self._num_shared = 0  # steps for which the clients share; several were there lately
        self._last_client: str | None = None  # of the last request that was added
        self._shares: Shares | None = None  # of this step, while prefills are planned
        self._planned: dict[int, Chunk] = {}
        self._stores: list[Transfer] = []
        self._loads: list[Transfer] = []
        self._no_room: tuple[Request, int, kvcore.Plan] | None = None  # request, length, its plan
        self._in_flight: Step | None = None
        self._expecting: tuple[Request, ...] = ()  # what the last step samples, unread
        self._read: dict[Request, int] = {}  # tokens that sequences get when the next step advances
        self._drafts: dict[int, tuple[int, ...]] = {}  # draft tokens that it verifies, likewise

    @property
    def tiers(self) -> TierTransfers | None:
        """The tiers behind the pool; None: there are none. O(1)."""
        return self._tiers

    @property
    def running(self) -> tuple[Request, ...]:
        """The running requests, in order. O(num_running)."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The waiting and preempted requests, in order. O(num_waiting)."""
        return tuple(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """True if any request is waiting or running. O(1)."""
        return bool(self._unfinished)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """The requests that wait or run, and any that a broken plan left between. O(those)."""
        return tuple(self._unfinished.values())

    @property
    def is_speculative(self) -> bool:
        """True if speculative decoding is on. O(1)."""
        return self._drafter is not None

    @cached_property
    def max_model_len(self) -> int:
        """The number of tokens that a request may surely come to, prompt included.

        O(log blocks), once.

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
        """Queue a new request, behind all others of its client and priority. O(num_waiting).

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
            and request.shares_prompt_with(leader)
        ):
            raise InvalidArgumentError(
                f"leader: wanted an unfinished request of the same prompt, priority, client and "
                f"namespace that has no token yet, got {leader!r}"
            )
        self._check_length(request)
        number = self._num_added
        self._num_added += 1
        if number and request.client != self._last_client:
            self._num_shared = RECENT_STEPS
        self._last_client = request.client
        turns = 1 if leader is not None else turns_of(request.num_prompt_tokens)
        request.order = (self._clients.add(request.client, request.priority, turns), number)
        self._unfinished[request.request_id] = request
        self._keeps_time |= any(one.max_steps for one in request.retain)
        if leader is not None:
            self._followers.setdefault(leader.request_id, []).append(request)
        self._enqueue(request)

    def abort(self, request: Request) -> bool:
        """End a request wherever it stands; its blocks go back at once. O(num_unfinished).

        Returns:
            True if it was unfinished. Aborting a finished request changes nothing.
        """
        return self.finish(request, FinishReason.ABORTED)

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End a request for a reason found outside, a stop string for one. O(num_unfinished).

        Returns:
            True if it was unfinished.

        Raises:
            InvalidArgumentError: the request is not one of this scheduler.
        """
        if request.is_finished:
            return False
        if self._unfinished.get(request.request_id) is not request:
            raise InvalidArgumentError(f"request: {request!r} was not added to this scheduler")
        del self._unfinished[request.request_id]
        asked, got = turns_of(request.num_prompt_tokens), turns_of(request.num_tokens)
        turns = 1 if request.leader is not None else asked
        has_run, place = request.status is not Status.WAITING, request.order[0]
        about = request.client, request.priority, place, turns
        self._clients.end(*about, has_run=has_run, more=got - asked)
        self._followers.pop(request.request_id, None)
        for queue in (self._running, self._waiting):
            if request in queue:  # of none, if a plan was broken off while it changed its place
                queue.remove(request)
        self._admission.drop_copy(request)
        if self._tiers is not None:
            self._tiers.forget(request)
        if (token := self._read.pop(request, None)) is not None:
            self._kv.resolve(request.running_sequence, [token])
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
        if self._tiers is not None and self._tiers.settle():
            self._no_room = None
        self._budget = self.config.max_num_batched_tokens
        self._planned, self._stores, self._loads = {}, [], []
        self._num_shared -= 1
        if self._clients.num_clients > 1:
            self._num_shared = RECENT_STEPS
        self._admission.begin_step()
        if self.config.long_above is not None:
            self._restart_long()
        self._plan_decodes()
        self._plan_others()
        if self._drafter is not None:
            self._plan_drafts(self._drafter)
        if self._followers:
            self._plan_followers()
        chunks = tuple(self._planned.values())
        self._in_flight = Step(chunks, tuple(self._stores), tuple(self._loads))
        self.stats.num_steps += bool(chunks)
        self.stats.peak_running = max(self.stats.peak_running, len(self._running))
        return self._in_flight

    def _restart_long(self) -> None:
        """Restart requests that have become long: all their keys and values change."""
        for request in self.running:
            if self._admission.is_long(request) > request.is_long and not request.is_complete:
                self._running.remove(request)
                self._kv.close(request.preempt())
                self._enqueue(request)
                self.stats.num_preemptions += 1

    def _plan_decodes(self) -> None:
        """Plan the requests with one token to compute, a token kept for the first in order."""
        first = self._first_waiting()[0]
        going = next((request for request in self._running if not request.is_complete), None)
        if going is not None and (first is None or going.order < first.order):
            first = going
        decodes = [
            (request, sequence, start)
            for request in self._running
            if (sequence := request.sequence) is not None
            and (start := sequence.num_computed_tokens) == (length := sequence.num_tokens) - 1
            and length < request.max_total_tokens  # else its last token is still to be read
        ]
        kept = first is not None and (not decodes or decodes[0][0] is not first)
        decodes = decodes[: self._budget - kept]
        # Inside a block of every group there is room: the token before has it too. A state may
        # have been published after any token; then the next one needs room for another.
        growing = [
            sequence
            for _, sequence, start in decodes
            if self._keeps_states
            or (start % self._stride == 0 and start >= sequence.num_reserved_tokens)
        ]
        try:
            if growing:
                self._kv.step(growing, 0, num_known=0, num_reserved=1)
        except kvcore.OutOfBlocksError:
            for request, _, _ in decodes:
                if request.status is Status.RUNNING:
                    self._plan_chunk(request)
        else:
            self._budget -= len(decodes)
            chunk = Chunk._make  # a step has hundreds: the quickest way to make one
            for request, _, start in decodes:
                self._planned[request.request_id] = chunk((request, start, 1, True, (), (), 0))

    def _plan_others(self) -> None:
        """Plan prefills and starts, in the shares of their clients while there are several."""
        if self._num_shared <= 0:
            self._plan_in_order()
            return
        wanted = wanted_tokens(self._running, self._waiting)
        least, left = LEAST_TOKENS * len(wanted), self.shared_budget.tokens - len(self._planned)
        budget = min(self._budget, max(least, left))
        self._shares = Shares(wanted, budget)
        self._plan_in_order()
        # A request that is swapped in by this step can no longer be preempted for others.
        if 0 < self._shares.left < budget and not self._loads:
            self._shares.join()
            self._plan_in_order()
        self._budget = max(0, min(self._budget, self._shares.left))  # what drafts may have
        self._shares = None

    def _plan_in_order(self) -> None:
        """Plan prefills and starts in order; the first that cannot start holds up those behind."""
        prefills: list[Request] = []
        if len(self._planned) < len(self._running):
            prefills = [
                r
                for r in self._running
                if r.num_uncomputed_tokens > 1
                and r.request_id not in self._planned
                and r.load is None
            ]
            prefills.reverse()
        may_start = True
        while self._budget:
            while prefills and not self._may_plan(prefills[-1]):
                prefills.pop()
            request, num_forks = self._first_waiting() if may_start else (None, 0)
            if prefills and (request is None or prefills[-1].order < request.order):
                self._plan_chunk(prefills.pop())
            elif request is None:
                return
            elif self._admit(request, num_forks):
                self._start(request)
            else:
                may_start = False

    def _may_plan(self, request: Request) -> bool:
        """Return True if a request runs, and its client has something left of its share. O(1)."""
        return request.status is Status.RUNNING and self._share_of(request) > 0

    def _share_of(self, request: Request) -> int:
        """Return the tokens that its client may still have in this step. O(1)."""
        return self._budget if self._shares is None else self._shares.of(request.client)

    def _plan_drafts(self, drafter: Drafter) -> None:
        """Give decodes draft tokens, as far as budget and blocks are left after all other plans.

        No request is preempted for draft tokens; only a follower that would fork after this step
        may find no block left and then starts like any other request.
        """
        # Accepted drafts are computed again where states are kept: those are decodes too.
        most_known = 1 + self.config.draft_tokens * self._keeps_states
        wanted = [
            (chunk.request, most)
            for chunk in self._planned.values()
            if chunk.num_tokens <= most_known
            and chunk.samples
            and (most := self._most_drafts(chunk.request))
        ]
        if not wanted or not self._budget:
            return
        for (request, _), drafts in zip(wanted, drafter.propose(wanted), strict=True):
            number = request.request_id
            known = self._planned[number].num_tokens
            count = min(len(drafts), self._budget)
            count = self._admission.num_reservable(request, known + count) - known
            if count > 0:
                self._kv.reserve(request.running_sequence, known + count)
                self._budget -= count
                self._planned[number] = self._planned[number]._replace(
                    num_tokens=known + count, drafts=tuple(drafts[:count])
                )
                self.stats.num_drafts += 1
                self.stats.num_draft_tokens += count

    def _most_drafts(self, request: Request) -> int:
        """Return how many draft tokens could be accepted; 0 while the last token is unread."""
        if request.is_expecting or not may_have_drafts(request):
            return 0
        most = request.max_total_tokens - request.num_tokens - 1
        edge = self.config.long_above
        if edge is not None and not request.is_long:  # beyond it they would be computed otherwise
            most = min(most, edge - request.num_tokens)
        return max(0, min(most, self.config.draft_tokens))

    def _first_waiting(self) -> tuple[Request | None, int]:
        """Return the first request that could start, and how many before it wait for leaders.

        Its client has something left of its share.
        """
        num_forks, loading = 0, () if self._tiers is None else self._tiers
        for request in self._waiting:
            if request.is_led:
                num_forks += 1
            elif request not in loading and (
                self._shares is None or self._shares.of(request.client) > 0
            ):
                return request, num_forks
        return None, num_forks

    def _admit(self, request: Request, num_forks: int) -> bool:
        """Make room for a waiting request by preempting those behind it; True if it can start."""
        if request.is_expecting or any(store.request is request for store in self._stores):
            return False  # it has just given way itself
        while True:
            has_place = len(self._running) + num_forks < self.config.max_num_seqs
            has_victim = bool(self._running) and request.order < self._running[-1].order
            if not has_victim and (not has_place or self._still_has_no_room(request, num_forks)):
                return False
            plan = self._admission.plan(request)
            missing = self._admission.num_wanted(plan) - plan.num_free_blocks
            if missing > self._admission.num_freeing and not has_victim:
                self._note_no_room(request, plan)
                return False
            missing += self._admission.num_to_leave_free(self._running, num_forks)
            if has_place and missing <= 0:
                return request.host_copy is not None or not self._is_prefix_in_flight(
                    request, plan.num_cached_tokens
                )
            if has_place and missing <= self._admission.num_freeing:
                return False
            if not has_victim:
                self._note_no_room(request, plan)
                return False
            if not self._helps_to_preempt(request, plan, num_forks):
                return False
            self._preempt(self._running[-1])

    def _note_no_room(self, request: Request, plan: kvcore.Plan) -> None:
        """Remember the blocks that a request lacked, unless it may come to need fewer.

        It needs fewer once more of its prefix is found, or once a block that it would revive is in
        use by a running request: one that starts with it (`_run`), or one that has computed the
        same block itself and is found in its place once the idle copy is evicted. Apart from
        `_run`, only a running request that begins with the same tokens can bring that about.
        O(num_running), and O(tokens) of those that begin alike.
        """
        revives = plan.num_revived_blocks > 0
        end = self._stride if revives else plan.num_cached_tokens + self._stride
        for other in self._running if self._kv.enable_caching else ():
            known = min(len(other.tokens), len(request.tokens), end)
            if other.namespace == request.namespace and (
                other.tokens[:known] == request.tokens[:known]
            ):
                return
        self._no_room = (request, request.num_tokens, plan)

    def _still_has_no_room(self, request: Request, num_forks: int) -> bool:
        """Return True if a request that found no room finds none now either, without a look-up."""
        if self._no_room is None or self._no_room[:2] != (request, request.num_tokens):
            return False
        missing = self._admission.num_wanted(self._no_room[2]) - self._kv.num_free_blocks
        if missing <= 0:
            missing += self._admission.num_to_leave_free(self._running, num_forks)
        return missing > 0

    def _helps_to_preempt(self, request: Request, plan: kvcore.Plan, num_forks: int) -> bool:
        """Return True if a waiting request fits once all behind it are preempted."""
        victims = [r for r in self._running if r.order >= request.order]
        if not victims or len(self._running) - len(victims) + num_forks >= self.config.max_num_seqs:
            return False
        gained = self._admission.num_freeing + sum(map(self._admission.num_exclusive, victims))
        to_leave_free = self._admission.num_to_leave_free(self._running, num_forks, victims)
        missing = self._admission.num_wanted(plan) + to_leave_free - plan.num_free_blocks
        return len(victims) == len(self._running) or missing <= gained

    def _is_prefix_in_flight(self, request: Request, num_cached_tokens: int) -> bool:
        """Return True if a request before it will compute the next block that it could hit."""
        end = num_cached_tokens + self._kv.block_size
        if not self._kv.enable_caching or request.is_scoring or end >= request.num_tokens:
            return False
        prefix, is_long = request.tokens[:end], self._admission.is_long(request)
        return any(
            other.tokens[:end] == prefix  # first what few have in common: every start asks it
            and other.num_computed_tokens < end
            and (other.namespace, other.items) == (request.namespace, request.items)
            and other.is_long == is_long
            and other.order < request.order
            for other in (*self._running, *(() if self._tiers is None else self._tiers.requests))
        )

    def _start(self, request: Request) -> None:
        self._waiting.remove(request)
        load = self._admission.open_sequence(request)
        if request.sequence is None:  # it waits for its KV
            self._enqueue(request)
            return
        self._run(request)
        if request.num_preemptions == 0:
            self.stats.num_prompt_tokens += request.num_prompt_tokens
            self.stats.num_hit_tokens += request.num_cached_tokens
        if load is None:
            self._plan_chunk(request)
        else:
            self._loads.append(load)
            self.stats.num_loads += 1

    def _plan_chunk(self, request: Request) -> None:
        """Plan the next tokens of a running request that budget and blocks allow, maybe none."""
        if self._has_room(request):
            # An image is computed whole, whatever the share.
            most = min(self._budget, max(self._share_of(request), request.least_chunk))
            wanted = self._admission.num_plannable(request, most, self._planned.values())
            if wanted and self._keeps_states:
                wanted = self._kv.chunk_length(request.running_sequence, wanted)
            if num_tokens := self._admission.num_reservable(request, wanted):
                self._kv.reserve(request.running_sequence, num_tokens)
                self._add_chunk(request, request.num_computed_tokens, num_tokens)

    def _has_room(self, request: Request) -> bool:
        """Make room for the least chunk of a running request by preempting those behind it.

        True if it has room now.
        """
        while not self._kv.can_reserve(request.running_sequence, request.least_chunk):
            if self._tiers is not None and self._tiers.give_way(request.order):
                continue
            last = self._running[-1]
            if last is request or self._admission.is_coming(request):
                return False
            self._preempt(last)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        if chunk := self._planned.pop(request.request_id, None):
            self._budget += chunk.num_tokens
        transfer = self._admission.close_sequence(request)
        if transfer is not None:
            self._stores.append(transfer)
            self.stats.num_swaps += 1
        self._enqueue(request)
        self.stats.num_preemptions += 1

    def _enqueue(self, request: Request) -> None:
        insort(self._waiting, request, key=_order)

    def _run(self, request: Request) -> None:
        self._no_room = None
        insort(self._running, request, key=_order)

    def _add_chunk(self, request: Request, start: int, num_tokens: int) -> None:
        how = (start + num_tokens == request.num_tokens, (), (), request.num_to_score(num_tokens))
        self._planned[request.request_id] = Chunk(request, start, num_tokens, *how)
        self._budget -= num_tokens
        if self._shares is not None:
            self._shares.take(request.client, num_tokens)

    def _plan_followers(self) -> None:
        """Give each chunk that ends a prompt the further samples that wait for it."""
        for number, chunk in self._planned.items():
            if chunk.samples and number in self._followers:
                followers = self._followers.pop(number)
                waiting = tuple(r for r in followers if r.status is Status.WAITING)
                self._planned[number] = chunk._replace(followers=waiting)

    def update(
        self,
        step: Step,
        sampled: Mapping[int, int],
        further: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[kvcore.CopyOrder, ...]:
        """Commit a computed step and hand out its tokens: `advance`, then `accept`.

        Args:
            step: the step that `schedule` returned last.
            sampled: request_id -> the token drawn for it, of all in the `sampling` of a chunk
                whose own request was not aborted.
            further: as `accept` takes it.

        Returns:
            Blocks to be copied before the next step.

        Raises:
            SchedulerStateError: this is not the step in flight, the one before it has not been
                accepted, or a token is missing or not what was computed; nothing has changed.
        """
        self._check_in_flight(step)
        live = step.running()
        check_drawn(samplers(live), sampled)
        check_accepted(drafts_of(live), samplers(live), sampled, further or {})
        orders = self._advance(step, live)
        self.accept(sampled, further)
        return orders

    def advance(self, step: Step) -> tuple[kvcore.CopyOrder, ...]:
        """Treat a step that was sent as computed, and its tokens as drawn. O(step.num_tokens).

        The device runs every later step after it.

        Args:
            step: the step that `schedule` returned last; the tokens of the one before are accepted.

        Returns:
            Blocks to be copied before the next step.

        Raises:
            SchedulerStateError: this is not the step in flight, or the one before it has not been
                accepted; nothing has changed.
        """
        self._check_in_flight(step)
        return self._advance(step, step.running())

    def _advance(self, step: Step, live: Sequence[Chunk]) -> tuple[kvcore.CopyOrder, ...]:
        self._in_flight = None
        if step.stores or step.loads:
            self._admission.end_transfers(step.stores, step.loads)
            self._stores, self._loads = [], []
        self._commit(live)
        # All forks come before the first token ends a request: no block is copied from or to twice.
        orders: list[kvcore.CopyOrder] = []
        expecting = samplers(live)
        leading = [chunk for chunk in live if chunk.followers]
        for chunk in leading:
            for follower in chunk.followers:
                self._fork(chunk.request, follower, orders)
        if leading:  # a follower that found no room to fork draws when it is its turn
            expecting = [request for request in expecting if request.sequence is not None]
        self._expecting = tuple(expecting)
        self._drafts = {} if self._drafter is None else drafts_of(live)
        return tuple(orders)

    def drop(self, step: Step) -> None:
        """Drop a step that was not run, or not even planned to its end.

        Its requests have been aborted. O(transfers).

        Args:
            step: the step that `schedule` returned last, or anything if it has raised.
        """
        if self._in_flight is not None:
            self.advance(step)
        else:
            self._admission.end_transfers(self._stores, self._loads)
            self._stores, self._loads = [], []
        self._drafts, self._expecting = {}, ()  # no request is left to take a token

    def accept(
        self,
        sampled: Mapping[int, int],
        further: Mapping[int, Sequence[int]] | None = None,
        *,
        advances: bool = False,
    ) -> list[Request]:
        """Hand out the tokens of the step that was advanced last. O(num_sampled).

        Rejected drafts are removed with their blocks and are never in the prefix cache.

        Args:
            sampled: request_id -> the token drawn for it, of all that still expect one.
            further: request_id -> the tokens sampled after that one, where the drafts between them
                were accepted (see `drafts.accepted_tokens`).
            advances: `advance` follows, with the next step: the sequences get the tokens there, in
                one call with all that this step computes. Until then `Request.tokens` lacks them.

        Returns:
            The requests that got a token, in the order of the step; some may have finished by it.

        Raises:
            SchedulerStateError: a token is missing, or follows what was not computed; nothing has
                changed.
        """
        expecting = [request for request in self._expecting if request.is_expecting]
        check_drawn(expecting, sampled)
        further = further or {}
        if further:
            check_accepted(self._drafts, expecting, sampled, further)
        self._expecting = ()
        self._read = {r: sampled[r.request_id] for r in expecting if r.sequence is not None}
        for request in expecting if len(self._read) < len(expecting) else ():
            if request.sequence is None:
                request.tell(sampled[request.request_id])
        if not advances:
            sequences = [request.running_sequence for request in self._read]
            self._kv.resolve_step(sequences, list(self._read.values()))
            self._read = {}
        if self._drafts:
            self._accept_drafts(expecting, further)
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
        if self._expecting and any(request.is_expecting for request in self._expecting):
            raise SchedulerStateError(
                "update: the tokens of the previous step have not been accepted; call accept first"
            )

    def _commit(self, chunks: Sequence[Chunk]) -> None:
        """Commit the planned tokens; each chunk that samples expects a token.

        Tokens that were read become known in the same call, and with them the expected ones get
        room, if blocks are free; otherwise they get it when they are planned.
        """
        read, self._read = self._read, {}
        requests = [chunk.request for chunk in chunks]
        # Which drafts hold is not known yet. The last token of a request is never computed.
        computed = [chunk.num_tokens - len(chunk.drafts) for chunk in chunks]
        expected = [int(chunk.samples) for chunk in chunks]
        if not read:
            seqs = [request.running_sequence for request in requests]
            self._kv.step(
                seqs, alike(computed), num_known=0, num_expected=alike(expected), num_reserved=0
            )
            return
        rooms = [
            int(chunk.samples and chunk.start + count + 1 < chunk.request.max_total_tokens)
            for chunk, count in zip(chunks, computed, strict=True)
        ]
        known = [1] * len(chunks)
        if [*read] != requests:
            planned = {*requests}
            requests += [request for request in read if request not in planned]
            known = [int(request in read) for request in requests]
        none = [0] * len(requests)
        columns = [alike((one + none)[: len(none)]) for one in (computed, expected, rooms)]
        seqs = [request.running_sequence for request in requests]
        tokens = [read[request] for request in requests if request in read]
        step = partial(self._kv.step, seqs, columns[0], tokens, num_known=alike(known))
        try:
            step(num_expected=columns[1], num_reserved=columns[2])
        except kvcore.OutOfBlocksError:  # `schedule` finds room for them, or preempts
            step(num_expected=columns[1], num_reserved=0)

    def _accept_drafts(
        self, expecting: Sequence[Request], further: Mapping[int, Sequence[int]]
    ) -> None:
        """Commit accepted drafts, and append the tokens drawn after them; remove the others.

        Where states are kept, no draft is computed: no state has been stored behind one.
        """
        for request in expecting:
            drafts, more = self._drafts.get(request.request_id, ()), further.get(request.request_id)
            sequence = request.sequence
            if sequence is None or not drafts:
                continue
            if more:
                count = len(more)
                computed = 0 if self._keeps_states else count
                self._kv.step([sequence], computed, more, num_known=count, num_reserved=0)
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

    def check_positions(self, prompt: int, new: int) -> None:
        """Refuse a request with more tokens than the model has positions. O(1).

        Args:
            prompt: the number of tokens of its prompt.
            new: the most tokens of its output.

        Raises:
            RequestTooLongError: it has more.
        """
        limit = self.config.max_model_len
        if limit is not None and prompt + new > limit:
            raise RequestTooLongError(
                f"prompt of {prompt} tokens plus max_tokens {new} exceeds the model's {limit} "
                "positions"
            )

    def _check_length(self, request: Request) -> None:
        total = request.max_total_tokens
        prompt, new = request.num_prompt_tokens, request.params.max_tokens
        self.check_positions(prompt, new)
        what = f"prompt of {prompt} tokens plus max_tokens {new}"
        edge = self.config.long_above
        if edge is not None and not self.config.may_cross and prompt <= edge < total - 1:
            raise RequestTooLongError(
                f"{what}: beyond {edge} tokens this model uses other rotary embeddings for every "
                f"token, so a text cannot grow past them; use max_tokens={edge - prompt + 1}"
            )
        # The last token is handed out and never computed, so it needs no slot.
        size, groups, chunk = self._kv.block_size, self._kv.groups, request.longest_whole
        needed = kvcore.peak_blocks(total - 1, size, groups=groups, chunk=chunk)
        if needed > self._kv.num_usable_blocks:
            raise RequestTooLongError(
                f"{what} needs {needed} blocks of {size} tokens: "
                f"the KV cache has {self._kv.num_usable_blocks} (--num-blocks, --kv-memory-bytes)"
            )


_order = attrgetter("order")
