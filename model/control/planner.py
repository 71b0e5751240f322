"""The plan of a step: who computes what, who starts, who gives way.

Requests have an order: by arrival, one level of priority moving a request ahead of the next
`priority_span` arrivals and no more, so that no stream of others can starve it. Under a budget of
tokens a step, decodes go first; what is left goes in order to prefills, in pieces (chunked prefill,
as in Sarathi-Serve, Agrawal et al. 2024, arXiv:2403.02310), and to waiting requests. Blocks are
taken chunk by chunk, so that a window group never holds more than a window and a chunk.

Where a running request finds no block, the last in order gives up its own (recomputation or
swapping, as in vLLM, Kwon et al. 2023, arXiv:2309.06180; `admission.py` has the rule); so does one
that runs although a waiting one comes before it and would fit then.

Invariants:
- `running` and `waiting` are each in order; a start never overtakes one that waits, but for samples
  that wait for their leader;
- the first in order goes on in every step, but for those in which its blocks or those that it waits
  for are copied, or a request before it has its last token read: a token of the budget is kept for
  it and all others can be preempted for it;
- a step never exceeds the budget, and a request that does not run holds no blocks.

Does not know: how requests come and end (`scheduler.py`), how a token is computed or sampled, how a
block is copied.
"""

import math
from bisect import insort

import kvcore
from model.control.admission import Room
from model.control.config import SchedulerConfig
from model.control.drafts import Drafter, may_have_drafts
from model.control.request import Request, Status
from model.control.step import Chunk, SchedulerStats, Step, Transfer


class StepPlanner:
    """The requests of a scheduler, and the step that is being planned."""

    def __init__(
        self, kv: kvcore.KVCacheManager, config: SchedulerConfig, drafter: Drafter | None = None
    ) -> None:
        self.config = config
        self._drafter = drafter
        self.stats = SchedulerStats()
        self._kv = kv
        self._room = Room(kv, config)
        self._stride = math.gcd(*[group.block_size for group in kv.groups])
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._followers: dict[int, list[Request]] = {}  # of each prompt that is still to be sampled
        self._budget = 0
        self._planned: dict[int, Chunk] = {}
        self._stores: list[Transfer] = []
        self._loads: list[Transfer] = []
        self._waits: tuple[Request, int, kvcore.Plan] | None = None  # who, how long, what it wants

    @property
    def running(self) -> tuple[Request, ...]:
        """The running requests, in order. O(num_running)."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The waiting and preempted requests, in order. O(num_waiting)."""
        return tuple(self._waiting)

    def plan(self) -> Step:
        """Plan the next step and take its blocks. O(num_running + tokens of the admitted prompts).

        The step before has been updated.
        """
        self._budget = self.config.max_num_batched_tokens
        self._planned, self._stores, self._loads = {}, [], []
        if self.config.long_above is not None:
            self._begin_again()
        self._plan_decodes()
        self._plan_others()
        if self._drafter is not None:
            self._plan_drafts(self._drafter)
        step = Step(self._with_followers(), tuple(self._stores), tuple(self._loads))
        self.stats.num_steps += bool(step.chunks)
        self.stats.peak_running = max(self.stats.peak_running, len(self._running))
        return step

    def _begin_again(self) -> None:
        """Let those wait that have become long: their keys and values are no longer theirs."""
        for request in self.running:
            if self._room.is_long(request) > request.is_long and not request.is_complete:
                self._running.remove(request)
                self._kv.close(request.preempt())
                self._enqueue(request)
                self.stats.num_preemptions += 1

    def _plan_decodes(self) -> None:
        """Plan the requests with one token to compute, a token kept for the first in order."""
        first = self._head(0)[0]
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
        # Inside a block of every group there is room: the token before has it too.
        growing = [sequence for _, sequence, start in decodes if start % self._stride == 0]
        try:
            self._kv.reserve_step(growing, [1] * len(growing))
        except kvcore.OutOfBlocksError:
            for request, _, _ in decodes:
                if request.status is Status.RUNNING:
                    self._plan(request)
        else:
            self._budget -= len(decodes)
            chunk = Chunk._make  # a step has hundreds: the quickest way to make one
            for request, _, start in decodes:
                self._planned[request.request_id] = chunk((request, start, 1, True, (), ()))

    def _plan_others(self) -> None:
        """Plan prefills and starts in order; the first that cannot start holds up those behind."""
        prefills: list[Request] = []
        if len(self._planned) < len(self._running):
            prefills = [r for r in self._running if r.num_uncomputed_tokens > 1]
            prefills.reverse()
        may_start = True
        while self._budget:
            while prefills and prefills[-1].status is not Status.RUNNING:
                prefills.pop()
            request, num_led = self._head(0) if may_start else (None, 0)
            if prefills and (request is None or prefills[-1].order < request.order):
                self._plan(prefills.pop())
            elif request is None:
                return
            elif self._make_way(request, num_led):
                self._start(request)
            else:
                may_start = False

    def _plan_drafts(self, drafter: Drafter) -> None:
        """Let decodes bring drafts, as far as budget and blocks are left when all else is planned.

        No request is preempted for draft tokens; only a follower that would fork after this step
        may find no block left and then starts like any other request.
        """
        wanted = [
            (chunk.request, most)
            for chunk in self._planned.values()
            if chunk.num_tokens == 1
            and chunk.samples
            and (most := self._most_drafts(chunk.request))
        ]
        if not wanted or not self._budget:
            return
        proposed = drafter.propose(wanted)
        for (request, _), drafts in zip(wanted, proposed, strict=True):
            count = min(len(drafts), self._budget)
            count = self._room.num_reservable(request, 1 + count) - 1
            if count:
                self._kv.reserve(request.running_sequence, 1 + count)
                self._budget -= count
                number = request.request_id
                self._planned[number] = self._planned[number]._replace(
                    num_tokens=1 + count, drafts=tuple(drafts[:count])
                )
                self.stats.num_drafts += 1
                self.stats.num_draft_tokens += count

    def _most_drafts(self, request: Request) -> int:
        """The most drafts that could all be told; none where the last token is still unread."""
        if request.is_expecting or not may_have_drafts(request):
            return 0
        most = request.max_total_tokens - request.num_tokens - 1
        edge = self.config.long_above
        if edge is not None and not request.is_long:  # beyond it they would be computed otherwise
            most = min(most, edge - request.num_tokens)
        return max(0, min(most, self.config.draft_tokens))

    def _head(self, num_led: int) -> tuple[Request | None, int]:
        """The first that could start, and how many before it wait for their leaders."""
        for request in self._waiting:
            if not request.is_led:
                return request, num_led
            num_led += 1
        return None, num_led

    def _make_way(self, request: Request, num_led: int) -> bool:
        """Whether a waiting request can start now, after preempting what comes behind it."""
        if request.is_expecting or any(store.request is request for store in self._stores):
            return False  # it has just given way itself
        while True:
            has_seat = len(self._running) + num_led < self.config.max_num_seqs
            has_victim = bool(self._running) and request.order < self._running[-1].order
            if not (has_seat or has_victim):
                return False
            if not has_victim and self._still_waits(request, num_led):
                return False
            plan = self._room.plan(request)
            missing = self._room.wanted(plan) - plan.num_free_blocks
            if missing > self._room.num_freeing and not has_victim:
                self._keep(request, plan)
                return False
            missing += self._room.promised(self._running, num_led)
            if has_seat and missing <= 0:
                return request.host_copy is not None or not self._is_prefix_in_flight(
                    request, plan.num_cached_tokens
                )
            if has_seat and missing <= self._room.num_freeing:
                return False
            if not has_victim:
                self._keep(request, plan)
                return False
            if not self._helps_to_preempt(request, plan, num_led):
                return False
            self._preempt(self._running[-1])

    def _keep(self, request: Request, plan: kvcore.Plan) -> None:
        """Remember what a request wants that found no room, unless it may come to want less.

        It wants less once more of its prefix is found, or once a block that it would revive is
        found in the hands of a running request: one that starts with it (`_run`), or one that has
        computed the same block itself and is found in its place once the idle copy is evicted.
        Apart from `_run`, only a running request that begins with the same tokens can bring that
        about. O(num_running), and O(tokens) of those that begin alike.
        """
        revives = plan.num_revived_blocks > 0
        end = self._stride if revives else plan.num_cached_tokens + self._stride
        for other in self._running if self._kv.enable_caching else ():
            known = min(len(other.tokens), len(request.tokens), end)
            if other.namespace == request.namespace and (
                other.tokens[:known] == request.tokens[:known]
            ):
                return
        self._waits = (request, request.num_tokens, plan)

    def _still_waits(self, request: Request, num_led: int) -> bool:
        """Whether a request that found no room finds none now, so that nothing is looked up."""
        if self._waits is None or self._waits[:2] != (request, request.num_tokens):
            return False
        missing = self._room.wanted(self._waits[2]) - self._kv.num_free_blocks
        if missing <= 0:
            missing += self._room.promised(self._running, num_led)
        return missing > 0

    def _helps_to_preempt(self, request: Request, plan: kvcore.Plan, num_led: int) -> bool:
        """Whether a waiting request fits once all that come behind it have given way."""
        stay = [r for r in self._running if r.order < request.order]
        victims = self._running[len(stay) :]
        if not victims or len(stay) + num_led >= self.config.max_num_seqs:
            return False
        gained = self._room.num_freeing + sum(map(self._room.num_exclusive, victims))
        wanted = self._room.wanted(plan) + self._room.promised(stay, num_led)
        return not stay or wanted <= plan.num_free_blocks + gained

    def _is_prefix_in_flight(self, request: Request, num_cached_tokens: int) -> bool:
        """Whether a request before it is about to compute the next block this one could hit."""
        end = num_cached_tokens + self._kv.block_size
        if not self._kv.enable_caching or end >= request.num_tokens:
            return False
        prefix = request.tokens[:end]
        return any(
            other.order < request.order
            and other.is_long == self._room.is_long(request)
            and other.namespace == request.namespace
            and other.num_computed_tokens < end
            and other.tokens[:end] == prefix
            for other in self._running
        )

    def _start(self, request: Request) -> None:
        self._waiting.remove(request)
        load = self._room.enter(request)
        self._run(request)
        if request.num_preemptions == 0:
            self.stats.num_prompt_tokens += request.num_prompt_tokens
            self.stats.num_hit_tokens += request.num_cached_tokens
        if load is None:
            self._plan(request)
        else:
            self._loads.append(load)
            self.stats.num_loads += 1

    def _plan(self, request: Request) -> None:
        """Plan what fits of a running request into budget and blocks; it may have to wait."""
        if self._find_room(request):
            wanted = min(request.num_uncomputed_tokens, self._budget)
            num_tokens = self._room.num_reservable(request, wanted)
            self._kv.reserve(request.running_sequence, num_tokens)
            self._add_chunk(request, num_tokens)

    def _find_room(self, request: Request) -> bool:
        """Whether a running request can have a token, after preempting what comes behind it."""
        while not self._kv.can_reserve(request.running_sequence, 1):
            last = self._running[-1]
            if last is request or self._room.is_coming(request):
                return False
            self._preempt(last)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        chunk = self._planned.pop(request.request_id, None)
        if chunk is not None:
            self._budget += chunk.num_tokens
        transfer = self._room.give_up(request)
        if transfer is not None:
            self._stores.append(transfer)
            self.stats.num_swaps += 1
        self._enqueue(request)
        self.stats.num_preemptions += 1

    def _enqueue(self, request: Request) -> None:
        insort(self._waiting, request, key=_order)

    def _run(self, request: Request) -> None:
        self._waits = None
        insort(self._running, request, key=_order)

    def _add_chunk(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        samples = start + num_tokens == request.num_tokens
        self._planned[request.request_id] = Chunk(request, start, num_tokens, samples)
        self._budget -= num_tokens

    def _with_followers(self) -> tuple[Chunk, ...]:
        """The planned chunks, each with the samples that wait for its prompt."""
        chunks = list(self._planned.values())
        for index, chunk in enumerate(chunks) if self._followers else ():
            if chunk.samples and chunk.request.request_id in self._followers:
                followers = self._followers.pop(chunk.request.request_id)
                waiting = tuple(r for r in followers if r.status is Status.WAITING)
                chunks[index] = chunk._replace(followers=waiting)
        return tuple(chunks)


def _order(request: Request) -> tuple[int, int]:
    return request.order
