"""A small scheduler in vLLM's manner, over a memory that knows what every slot holds.

It makes the calls that vLLM's scheduler makes, in their order (`test_vllm_plugin.py` compares them
where vLLM is installed); a step copies recurrent states to the columns where it ends and writes
them there, writes the KV of its tokens and then reads all that its queries see. What is read must
be what the request's own tokens give: a block that is another's, not written, or written over, is
found there. No vLLM is needed.

After each pass the manager's word is taken too: which blocks it names as fresh, and how much of
what runs others can hit.
"""

from copy import copy
from types import SimpleNamespace

import kvcore
from kvcore.adapters.vllm.manager import Manager, Settings
from kvcore.adapters.vllm.states import StateManager

PLAIN = (kvcore.FullAttention(4),)
WINDOWS = (kvcore.FullAttention(4), kvcore.SlidingWindow(6, 4))
STATES = (kvcore.FullAttention(4), kvcore.RecurrentState(1, 0, 4))
PIECES = (kvcore.FullAttention(8), kvcore.SlidingWindow(6, 4), kvcore.RecurrentState(3, 0, 8))
DENSE = (kvcore.FullAttention(4), kvcore.RecurrentState(2, 4, 4))
CHUNKS = (kvcore.FullAttention(8), kvcore.ChunkedLocal(8, 4))


def settings(groups=PLAIN, num_blocks=40, **options):
    pieces = sum(getattr(group, "num_blocks", 0) for group in groups[-1:])
    attention = len(groups) - (pieces > 0)
    places = tuple(range(attention + pieces))
    return Settings(
        num_blocks=num_blocks, groups=groups, places=places, specs=(None,) * len(places),
        caps=(None,) * attention, max_model_len=200, **options,
    )  # fmt: skip


class Request:
    """What vLLM's `Request` is to a manager, and to this scheduler."""

    def __init__(
        self, request_id, prompt, *, max_tokens=4, salt=None, lora=None, image=None, limit=None
    ):  # fmt: skip
        self.request_id = request_id
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.stop = len(prompt) + max_tokens
        self.junction = 0
        self.column = None  # where the worker has its state
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_output_placeholders = 0
        self.num_preemptions = self.stale = 0
        self.drops_stale = False
        self.drafts = []
        self.skip_reading_prefix_cache = self.resumable = False
        self.block_hashes = []
        self.limit = limit  # the most tokens that it may hit
        self.num_hits = 0
        self.cache_salt = salt
        self.lora_request = lora and SimpleNamespace(lora_name=lora, lora_int_id=1)
        self.mm_features = []
        if image:
            place = SimpleNamespace(offset=2, length=5, is_embed=None)
            self.mm_features.append(SimpleNamespace(identifier=image, mm_position=place))
        self.prompt_embeds = None
        self.status = SimpleNamespace(name="WAITING")
        self.identity = (salt, lora, image)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def value(self, position):
        """What the KV at a position is a function of."""
        seen = self.identity if position >= 2 else (*self.identity[:2], None)
        return seen, tuple(self.all_token_ids[: position + 1])


class World:
    """Runs requests to their end.

    Args:
        manager: what is tested.
        ahead: steps are scheduled before the one before is processed.
        budget: tokens a step.
        defers: what a step reads must stay until it has been processed, also where its request
            has ended; otherwise until the next one is executed.
        num_drafts: guesses that a decode brings; not with `ahead`. Some of them are wrong.
        looks_twice: a request that is not admitted at once is looked up a second time.
        recompute: a draft model writes KV beside, of each token and so many after it.
        lookahead: the same, and a block is hit only where those tokens follow, so what a draft
            model reads is always that of the request's own tokens.
    """

    def __init__(
        self, manager, *, ahead=False, budget=16, defers=False, num_drafts=0, looks_twice=False,
        recompute=0, lookahead=0,
    ):  # fmt: skip
        self.manager = manager
        self.recompute, self.lookahead = recompute or lookahead, lookahead
        groups = manager.settings.groups
        self.state = groups[-1] if isinstance(groups[-1], kvcore.RecurrentState) else None
        self.groups = groups if self.state is None else groups[:-1]
        self.drafted = set()
        self.content = {}  # block id: what was written to it last
        self.ahead = ahead
        self.num_drafts = num_drafts
        self.looks_twice = looks_twice
        self.budget = budget
        self.defers = defers
        self.waiting, self.running, self.flying = [], [], []
        self.deferred = []
        self.num_sent = self.num_processed = self.num_deferred = 0
        self.memory, self.tables = {}, {}
        self.finished = {}
        self.num_hits = self.num_accepted = 0

    def add(self, request):
        self.waiting.append(request)

    def abort(self, request):
        """As a client that goes away, at any moment."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status.name = "FINISHED_ABORTED"
        self.free(request)

    def reset(self, *, preempts=False):
        """Forget the cache, as vLLM does: where requests run, they give way or it is refused."""
        while preempts and self.running:
            one = self.running.pop()
            self.preempt(one)
            one.drops_stale = one.stale > 0
        done = self.manager.reset_prefix_cache()
        assert done == (not self.running and not self.deferred), "reset"
        if done:
            probe = [self.lookup_of(one) for one in self.waiting]
            assert not any(probe), "hit after a reset"
        return done

    def lookup_of(self, one):
        """How many tokens of a request a new one would hit."""
        twin = copy(one)
        twin.request_id = "probe"
        hits = self.manager.get_computed_blocks(twin)[1]
        self.manager.free(twin)
        return hits

    def free(self, one):
        if self.defers and one.num_in_flight_tokens:
            self.num_deferred += 1
            self.deferred.append((self.num_sent, self.manager.pop_blocks_for_free(one)))
        else:
            self.manager.free(one)

    def step(self):
        """Schedule a step; process it, or the one before."""
        scheduled = self.schedule()
        step = [(one, count, self.execute_later(one)) for one, count in scheduled]
        self.num_sent += 1
        self.flying.append((step, self.execute(step)))
        for one, count in scheduled:
            one.num_computed_tokens += count
            one.num_in_flight_tokens += count
            if (
                self.ahead
                and one.num_computed_tokens >= one.num_tokens + one.num_output_placeholders
            ):
                one.num_output_placeholders += 1
        while len(self.flying) > (1 if self.ahead and scheduled else 0):
            self.process(*self.flying.pop(0))

    def schedule(self):
        """Decide a step: how many tokens of whom. What runs comes first, then what waits."""
        self.manager.new_step_starts()
        scheduled, handed_out = {}, []
        budget, gave_way = self.schedule_running(scheduled, handed_out)
        if not gave_way:
            self.schedule_waiting(scheduled, handed_out, budget)
        self.check_fresh(handed_out, gave_way)
        self.check_findable(scheduled)
        return list(scheduled.items())

    def schedule_running(self, scheduled, handed_out):
        """Return what is left of the budget, and whether one gave way."""
        budget, gave_way, place = self.budget, False, 0
        while place < len(self.running) and budget:
            one = self.running[place]
            todo = one.num_tokens + one.num_output_placeholders - one.num_computed_tokens
            todo += len(one.drafts)
            known = one.num_computed_tokens + 2 - one.num_output_placeholders
            done = one.num_output_placeholders > 0 and known >= one.stop
            count = 0 if done else min(todo, budget)
            count = self.aligned(one, one.num_computed_tokens, count)
            if not count:
                place += 1
                continue
            while (appended := self.manager.allocate_slots(one, count)) is None:
                victim = self.running.pop()
                self.preempt(victim)
                gave_way = True
                if victim is one:
                    break
            else:
                for group, ids in enumerate(appended.get_block_ids()):
                    self.tables[one][group] += ids
                    handed_out += ids if group < len(self.groups) else []
                scheduled[one] = count
                budget -= count
                place += 1
        return budget, gave_way

    def schedule_waiting(self, scheduled, handed_out, budget):
        while self.waiting and budget:
            one = self.waiting[0]
            for _ in range(1 + self.looks_twice):
                blocks, hits, *more = self.manager.get_computed_blocks(one, one.limit)
            assert one.limit is None or hits <= one.limit
            one.junction = more[0] if more else 0
            count = self.aligned(one, hits, min(one.num_tokens - hits, budget))
            if not count or self.manager.allocate_slots(
                one, count, hits, blocks, full_sequence_must_fit=True,
                has_scheduled_reqs=bool(self.running),
            ) is None:  # fmt: skip
                break
            self.num_hits += hits
            self.running.append(self.waiting.pop(0))
            one.status.name = "RUNNING"
            one.num_computed_tokens, one.num_hits, one.column = hits, hits, None
            self.tables[one] = list(self.manager.get_block_ids(one.request_id))
            found = blocks.get_block_ids()
            for group, ids in enumerate(self.tables[one]):
                assert ids[: len(found[group])] == found[group], "hit and not in the table"
                if group < len(self.groups):
                    handed_out += ids[len(found[group]) :]
            scheduled[one] = count
            budget -= count

    def aligned(self, one, start, count):
        """Cut a chunk of a prompt where a state is to be kept, as vLLM's scheduler does."""
        end, prompt_end = start + count, max(one.num_prompt_tokens, one.num_tokens - 1)
        if self.state is None or not self.manager.enable_caching or start >= prompt_end:
            return count
        size = self.state.block_size
        whole = end // size * size
        if end < prompt_end and (whole > start or size <= self.budget):
            end = whole
        floored = start + (one.junction - start) // size * size
        stops = (
            (start // size + 1) * size if start % size else 0,
            (one.num_tokens - 1) // size * size,
            floored if start < one.junction < end else 0,
        )
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(end - start, 0)

    def check_fresh(self, handed_out, gave_way):
        """Blocks are named as fresh once, when they are handed out, and what is hit is not."""
        fresh = self.manager.take_new_block_ids()
        if not self.manager.settings.keep_fresh:
            assert not fresh
            return
        if gave_way:  # what was handed out to one that gave way is named too
            named, wanted = {*fresh} & {*handed_out}, {*handed_out}
        else:
            named, wanted = sorted(fresh), sorted(handed_out)
        assert named == wanted, f"handed out are {handed_out}, named {fresh}"
        assert not self.manager.take_new_block_ids(), "named twice"

    def check_findable(self, scheduled):
        """What a step computes can be hit in it, in whole blocks, and nothing that is not known."""
        is_plain = len(self.manager.settings.groups) == 1
        for one in self.running:
            count = scheduled.get(one, 0)
            computed = min(one.num_computed_tokens + count, one.num_tokens)
            told = self.manager.estimate_cached_tokens(one)
            size = self.manager._common
            if self.lookahead:
                computed = min(computed - self.lookahead + 1, one.num_tokens - self.lookahead)
                computed = max(one.num_hits, computed)
            if not self.manager.enable_caching:
                assert told == 0
            elif count and (is_plain or self.state or (count > 1 and not one.drafts)):
                assert told == computed - computed % size, f"{one.request_id}: {told} findable"
            else:
                assert told <= computed

    def preempt(self, one):
        self.free(one)
        one.status.name = "PREEMPTED"
        one.num_computed_tokens = one.num_output_placeholders = 0
        one.drafts = []
        one.stale = one.num_in_flight_tokens
        one.num_preemptions += 1
        self.waiting.insert(0, one)

    def execute_later(self, one):
        """What the step is sent with: its first position, and the worker's tables."""
        return one.num_computed_tokens, self.tables[one]

    def execute(self, step):
        """Write all KV of a step, and then read what its queries see; return what that was."""
        seen_there = {}
        groups = self.groups
        self.move_states(step)
        for one, count, (start, tables) in step:
            self.foresee(one, start + count)
            for number, group in enumerate(groups):
                for position in range(start, start + count):
                    place = slot(group, tables[number], position)
                    self.memory[number, place] = one.value(position)
                    self.content[place // group.block_size] = number
            self.write_state(one, start, count, tables)
            self.draft(one, start, count, tables)
        for one, count, (start, tables) in step:
            for number, group in enumerate(groups):
                for position in range(start, start + count):
                    for seen in range(group.first_visible(position), position + 1):
                        place = number, slot(group, tables[number], seen)
                        assert self.content[place[1] // group.block_size] == number, "another's"
                        found = seen_there[place] = self.memory.get(place)
                        assert found == one.value(seen), (
                            f"{one.request_id} reads at {seen} of group {number}: {found}"
                        )
            unread = getattr(one, "unread", 0)
            if unread:
                del one.all_token_ids[-unread:]
                one.unread = 0
        return seen_there

    @staticmethod
    def foresee(one, length):
        """Give a request the tokens that a step has beyond the known ones, until it is over."""
        drafts = iter(one.drafts)
        while one.num_tokens < length:  # a draft, or what the device has sampled already
            one.all_token_ids.append(next(drafts, sampled(one, one.num_tokens)))
            one.unread = getattr(one, "unread", 0) + 1

    def move_states(self, step):
        """Copy states to the columns where the step ends, all of them before anything else."""
        moved, sources = {}, set()
        for one, count, (start, tables) in step if self.state else ():
            size = self.state.block_size if self.manager.enable_caching else 10**6
            before = (start - 1) // size if one.column is None else one.column
            one.column = -(-(start + count) // size) - 1
            for table in tables[len(self.groups) :]:
                assert len(table) == one.column + 1, f"{one.request_id} has columns {table}"
                target = table[one.column]
                assert target, f"{one.request_id} has no block to write a state to"
                assert target not in moved, "two write a state to one block"
                moved[target] = target if before in (-1, one.column) else table[before]
                sources.add((moved[target], target))
        for source, target in sources:
            assert source == target or source not in moved, "a state is read and replaced at once"
        states = {target: self.content.get(source) for target, source in moved.items()}
        self.content.update(states)

    def write_state(self, one, start, count, tables):
        for piece, table in enumerate(tables[len(self.groups) :]):
            found = self.content[table[one.column]]
            wanted = ("state", piece, one.value(start - 1))
            assert not start or found == wanted, f"{one.request_id} begins at {start} with {found}"
            self.content[table[one.column]] = ("state", piece, one.value(start + count - 1))

    def draft(self, one, start, count, tables):
        """Let a draft model write its KV of a step, after it has read what is before it.

        A twin of the block before may be hit, whose last draft KV was made from other tokens; so it
        is in vLLM, and it costs a draft. But some request has made it from the right ones.
        """
        if not self.recompute:
            return
        known = one.num_tokens - getattr(one, "unread", 0)
        text = one.all_token_ids[:known]  # without drafts that may be wrong
        text += [sampled(one, place) for place in range(known, start + count + self.recompute)]
        for position in range(start + count):
            own = one.value(position)[0], text[: position + 1 + self.recompute]
            place = "drafts", slot(self.groups[0], tables[0], position)
            if position >= start:
                self.drafted.add(str(own))
                self.memory[place] = own
            elif self.lookahead:
                assert self.memory[place] == own, f"{one.request_id} drafts with another's"
            else:
                assert str(own) in self.drafted, f"{one.request_id} drafts with what none wrote"

    def process(self, step, seen):
        if self.defers:
            for place, value in seen.items():
                assert self.memory[place] == value, f"{place} is written while a step reads it"
        self.num_processed += 1
        for one, count, (start, _) in step:
            self.read(one, count, start)
        while self.deferred and self.deferred[0][0] <= self.num_processed:
            self.manager.block_pool.free_blocks(reversed(self.deferred.pop(0)[1]))

    def read(self, one, count, start):
        """Take what a step has drawn for a request."""
        one.num_in_flight_tokens -= count
        was_stale = one.stale > 0  # it gave way since: its token counts, its counts do not
        if was_stale:
            one.stale -= count
            if one.drops_stale:
                one.drops_stale = one.stale > 0
                return
        if one.status.name.startswith("FINISHED") or start + count < one.num_tokens:
            return
        drafts = one.drafts[: start + count - one.num_tokens] if self.num_drafts else []
        tokens = drawn(one, drafts)
        if not was_stale:
            one.num_computed_tokens -= len(drafts) + 1 - len(tokens)
        self.num_accepted += len(tokens) - 1
        one.all_token_ids += tokens[: one.stop - one.num_tokens]
        if self.ahead and not was_stale:
            one.num_output_placeholders -= 1
            self.manager.cache_blocks(one, one.num_computed_tokens - one.num_output_placeholders)
        if one.num_tokens >= one.stop:
            one.status.name = "FINISHED_STOPPED"
            (self.waiting if was_stale else self.running).remove(one)
            self.finished[one.request_id] = tuple(one.all_token_ids)
            self.free(one)
            return
        one.drafts = guessed(one, self.num_drafts)


def slot(group, table, position):
    return table[position // group.block_size] * group.block_size + position % group.block_size


def drawn(one, drafts):
    """What the device draws: behind a draft only where it was right."""
    tokens = [sampled(one, one.num_tokens)]
    for place, draft in enumerate(drafts, 1):
        if draft != tokens[-1]:
            break
        tokens.append(sampled(one, one.num_tokens + place))
    return tokens


def guessed(one, count):
    """Drafts of which some are wrong, by their place."""
    places = range(one.num_tokens, one.num_tokens + count)
    return [(sampled(one, place) + (place % 4 == 1)) % 3 for place in places]


def sampled(one, position):
    """A token that depends on the request's identity and its place."""
    return (position * 5 + len(str(one.identity))) % 3


def manager_of(groups=PLAIN, num_blocks=40, kind=Manager, **options):
    if kind is Manager and isinstance(groups[-1], kvcore.RecurrentState):
        kind = StateManager
    return kind(settings(groups, num_blocks, **options))
