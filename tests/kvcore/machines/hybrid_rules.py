"""What engines do with sequences that have recurrent states, as rules."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import kvcore
import kvcore.pool
from tests.kvcore.machines.hybrid import HYBRIDS, Entry, HybridChecks, first_kept
from tests.kvcore.machines.outlook import IS_COMPILED, copied
from tests.kvcore.machines.refusal import refused
from tests.kvcore.machines.requests import NAMESPACES, lowered, with_image
from tests.kvcore.views import PropertyError, expect

PROMPTS = st.builds(
    lambda common, own, other: [0] * common + [other] * own,
    st.integers(0, 26),
    st.integers(1, 7),
    st.sampled_from([0, 1, 1, 2]),
)
"""Prompts that agree up to some position, and then go one of three ways."""
IMAGES = st.sampled_from([None, None, None, (b"cat", 1, 3, False), (b"cow", 1, 3, False)])
NAMES = st.sampled_from(["default"] * 6 + ["salt", "none"])
BOUNDARIES = st.sampled_from([(), (), (), (5,), (9, 4), (14,), (99,)])
RETAIN = st.sampled_from([(), (), (kvcore.Retention(0, 40, 2, 3),), (kvcore.Retention(0, 9),)])
WHICH = st.integers(0, 5)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
CHUNKS = st.sampled_from([None, 1, 2, 3, 5, 8])
IDS = st.lists(st.integers(1, 12), min_size=1, max_size=2)
LONGEST = 40


def some(predicate=lambda _: True):
    """A rule for an open sequence, where there is one that it is for."""
    return precondition(lambda self: any(map(predicate, self.live)))


def run_to_the_end(kv, seq, total, chunk, *, stops):
    """Compute a sequence in steps of at most `chunk` tokens; what is unknown stays as many."""
    lag = seq.num_computed_tokens - seq.num_settled_tokens
    kv.expect(seq, max(0, total - seq.num_tokens))
    while seq.num_computed_tokens < total:
        count = min(chunk, total - seq.num_computed_tokens)
        count = kv.chunk_length(seq, count) if stops else count
        kv.reserve(seq, count)
        kv.commit(seq, count)
        late = seq.num_computed_tokens - lag - seq.num_settled_tokens
        kv.resolve(seq, [7] * min(late, seq.num_unknown_tokens))


class HybridMachine(HybridChecks):
    """A manager of full attention, windows and states."""

    def pick(self, which, predicate=lambda _: True):
        those = [entry for entry in self.live if predicate(entry)]
        return those[which % len(those)]

    # One verb each.

    @precondition(lambda self: len(self.live) < 6)
    @rule(
        prompt=PROMPTS,
        image=IMAGES,
        name=NAMES,
        boundaries=BOUNDARIES,
        retain=RETAIN,
        how=st.sampled_from(["", "", "", "resumed", "blind"]),
        recompute=st.sampled_from([0, 0, 0, 1, 5]),
    )
    def open(self, prompt, image, name, boundaries, retain, how, recompute):
        self.begin(with_image(prompt, image), name, boundaries, retain, how, recompute)

    def begin(self, elements, name, boundaries=(), retain=(), how="", recompute=0):
        """Open a sequence, beside the plan for it, which is exact."""
        kv, tokens_items = self.kv, lowered(elements)
        tokens, items = tokens_items
        about = {"namespace": NAMESPACES[name], "items": items, "skip_reading": how == "blind"}
        about["recompute"] = recompute
        before = self.view()
        plan = kv.plan(tokens, **about)
        expect("P4", self.view(), before, "state after a plan")
        cached = NAMESPACES[name] is not None and self.caching
        key = kvcore.encode_namespace(NAMESPACES[name]) if cached else None
        looks = cached and how != "blind"
        hit, junction = self.hits(elements, key, recompute) if looks else (0, 0)
        branches, stops = self.branches(elements, key, recompute) if looks else ([], [])
        free = kv.num_free_blocks
        stops = stops if recompute else [hit] * len(self.groups)
        had = hit and self.goes_on(elements, key, hit, stops)
        real = kv.open(
            tokens, **about, boundaries=boundaries, retain=retain, resumed=how == "resumed"
        )
        expect("P24", real.num_cached_tokens, hit, "cached tokens")
        expect("P24", plan.num_cached_tokens, hit, "cached tokens planned")
        expect("P13", plan.num_revived_blocks, free - kv.num_free_blocks, "blocks revived")
        length, size = len(elements), self.common
        ends = [min(end, length) for end in boundaries] + [length - 1, junction, *branches]
        ends += [length // size * size - recompute] if recompute else []
        wanted = frozenset(end // size * size for end in ends if end // size * size > hit)
        entry = Entry(real, elements, self.origin(name), cached, length, wanted, retain=retain)
        entry.opened_at = kv.pool.step
        goes_on = {hit} if had else set()
        entry.branches = frozenset(end // size * size for end in branches) | goes_on
        expected = [*boundaries, length - (recompute == 0)]
        expected += [length // size * size - recompute] if recompute else []
        entry.expected = frozenset(min(end, length) // size * size for end in expected)
        self.live.append(entry)
        need, _ = self.needs(entry, 0, length)
        expect("P13", plan.num_new_blocks, need, "new blocks planned")
        expect("P36", plan.fits, kv.can_reserve(real, length - hit), "whether the plan fits")
        self.check_stop(entry)
        if hit:
            self.retain(entry, self.key_of(entry, hit), hit, {*()} if retain else self.retained)
        return entry

    def check_stop(self, entry):
        """P24: a step should end at the next position whose state is wanted."""
        ends = range(entry.computed + 1, LONGEST + 50)
        stop = next((end for end in ends if self.is_wanted(entry, end)), None)
        for count in (1, 5, 100):
            wanted = count if stop is None or not entry.cached else stop - entry.computed
            wanted = min(count, wanted)
            expect("P24", self.kv.chunk_length(entry.real, count), wanted, "the next chunk")

    @some()
    @rule(which=WHICH, chunk=CHUNKS, stops=st.booleans(), least=st.sampled_from([0, 0, 1]))
    def run(self, which, chunk, stops=True, least=0):
        """Compute what there is, in chunks that end where a state is wanted, or not."""
        self.run_all(self.pick(which), chunk, stops, least)

    def run_all(self, entry, chunk=None, stops=True, least=0):
        while entry.todo > least:
            count = min(chunk or entry.todo, entry.todo - least)
            count = self.kv.chunk_length(entry.real, count) if stops else count
            if not self.compute(entry, count):
                return False
            self.agree()
        return True

    @some()
    @rule(which=WHICH, count=st.integers(1, 9))
    def reserve_some(self, which, count):
        self.reserve(self.pick(which), count)

    @some(lambda e: e.todo and e.real.state.write)
    @rule(which=WHICH, count=st.integers(1, 4))
    def commit_some(self, which, count):
        """What is reserved is computed, as far as there is room."""
        entry = self.pick(which, lambda e: e.todo and e.real.state.write)
        room = min(len(table.blocks) * table.block_size for table in entry.real.tables)
        self.commit(entry, min(count, entry.todo, room - entry.computed))

    @some(lambda e: not e.future)
    @rule(which=WHICH, tokens=TOKENS)
    def append(self, which, tokens):
        entry = self.pick(which, lambda e: not e.future)
        if len(entry.known) < LONGEST:
            self.kv.extend(entry.real, tokens)
            entry.known += tokens

    @some()
    @rule(which=WHICH, tokens=TOKENS)
    def expect_some(self, which, tokens):
        entry = self.pick(which)
        if len(entry.tokens) < LONGEST:
            self.kv.expect(entry.real, len(tokens))
            entry.future += tokens

    @some(lambda e: e.future)
    @rule(which=WHICH, count=st.integers(1, 5))
    def resolve(self, which, count):
        entry = self.pick(which, lambda e: e.future)
        tokens, before = entry.future[:count], self.found()[-1]
        self.kv.resolve(entry.real, tokens)
        entry.known += tokens
        del entry.future[:count]
        self.check_due(entry, self.settle(entry, 0), before)

    @some()
    @rule(which=WHICH, length=st.integers(0, LONGEST), back=st.none() | st.integers(0, 6))
    def truncate(self, which, length, back):
        """To a length, or by a few tokens."""
        entry = self.pick(which)
        length = length if back is None else len(entry.tokens) - back
        self.cut(entry, max(0, min(length, len(entry.tokens))))

    @some(lambda e: e.kept)
    @rule(which=WHICH)
    def drop_kept_state(self, which):
        """Its blocks are free then, but those that the next step reads, or others hold."""
        entry = self.pick(which, lambda e: e.kept)
        state, free = entry.real.state, self.kv.num_free_blocks
        own = [] if state.kept is state.read else state.kept
        freed = sum(block.ref_count == 1 for block in own)
        expect(
            "P36", self.kv.drop_kept_state(entry.real), freed, "the blocks that it says it frees"
        )
        expect("P36", self.kv.num_free_blocks - free, freed, "the blocks that are free in addition")
        entry.kept = 0

    @precondition(lambda self: 0 < len(self.live) < 6)
    @rule(which=WHICH)
    def fork(self, which):
        self.split(self.pick(which))

    def split(self, entry):
        kv = self.kv
        where = self.resume(entry, entry.real.num_settled_tokens)
        copies = sum(where % table.block_size > 0 for table in entry.real.tables)
        if copies > kv.num_free_blocks:
            refused("P36", kvcore.OutOfBlocksError, self.view, lambda: kv.fork(entry.real))
            return None
        child, orders = kv.fork(entry.real)
        expect("P34", child.num_computed_tokens, where, "the computed tokens of a fork")
        for order in orders:
            slots = self.memory.get(order.src, {})
            rows = {n: slots[n] for n in range(order.num_tokens)}
            self.memory[order.dst] = rows
        self.live.append(
            Entry(
                child,
                entry.known[:],
                entry.origin,
                entry.cached,
                entry.prompt,
                entry.wanted,
                retain=entry.retain,
                opened_at=entry.opened_at,
                branches=entry.branches,
                expected=entry.expected,
            )
        )
        self.check_stop(self.live[-1])
        return self.live[-1]

    @some()
    @rule(
        which=WHICH,
        kind=st.sampled_from(["step", "store"]),
        first=st.none() | st.integers(0, 20),
        steps=st.none() | st.integers(1, 3),
    )
    def lease(self, which, kind, first, steps):
        self.take_lease(self.pick(which), kind, first, steps)

    def take_lease(self, entry, kind, first=None, steps=None):
        lease = self.kv.lease(entry.real, kind, num_tokens=first, max_steps=steps)
        state = entry.real.state
        written = set(state.write).intersection(lease.blocks if kind != "step" else ())
        expect("P33", written, set(), "leased blocks that the next step writes a state to")
        held = {}  # what is computed, not what former holders have left in reserved blocks
        for table in entry.real.tables:
            for place, block in enumerate(table.blocks):
                rows = range(min(table.block_size, entry.computed - place * table.block_size))
                if block in lease.blocks:
                    held[block.block_id] = {n: self.memory[block.block_id][n] for n in rows}
        for block in [*state.read, *state.kept]:
            if block in lease.blocks:
                held[block.block_id] = self.memory[block.block_id]
        self.leased[lease.lease_id] = kind, held
        if first is None or first >= entry.computed:
            pieces = {*state.read, *state.kept, *(state.blocks() if kind == "step" else ())}
            pieces.difference_update(lease.blocks)
            expect("P17", pieces, set(), "pieces of states that a lease does not hold")
        return lease

    @precondition(lambda self: self.leased)
    @rule(which=WHICH)
    def end_lease(self, which):
        number = list(self.leased)[which % len(self.leased)]
        expect("P17", self.kv.leases.end(number), True, "whether a lease was active")
        del self.leased[number]
        self.loads.pop(number, None)

    @rule(steps=st.integers(1, 2))
    def tick(self, steps):
        for lease in self.kv.tick(steps):
            del self.leased[lease.lease_id]
            self.loads.pop(lease.lease_id, None)

    @some(lambda e: e.computed < len(e.known))
    @rule(which=WHICH, length=st.integers(1, LONGEST), steps=st.none() | st.integers(1, 3))
    def begin_load(self, which, length, steps):
        entry = self.pick(which, lambda e: e.computed < len(e.known))
        self.start_load(entry, max(entry.computed + 1, min(length, len(entry.known))), steps)

    def start_load(self, entry, length, steps=None):
        need = self.pieces
        for group in self.groups:
            first = max(entry.computed // group.block_size, first_kept(group, length))
            need += -(-length // group.block_size) - first

        def call():
            return self.kv.begin_load(entry.real, length, max_steps=steps)

        free = self.kv.num_free_blocks
        if need > free:
            refused("P36", kvcore.OutOfBlocksError, self.view, call)
            return None
        lease = self.takes(call)
        expect("P36", free - self.kv.num_free_blocks, need, "the blocks that a load takes")
        self.leased[lease.lease_id] = "load", {}
        self.loads[lease.lease_id] = entry, entry.known[:length]
        return lease

    @precondition(lambda self: self.loads)
    @rule(which=WHICH)
    def commit_load(self, which):
        number = list(self.loads)[which % len(self.loads)]
        self.finish_load(self.kv.leases.active[number])

    def finish_load(self, lease):
        """The KV arrives, and the state after it."""
        entry, elements = self.loads.pop(lease.lease_id)
        del self.leased[lease.lease_id]
        prefix = tuple(elements)
        for number, (first, run) in enumerate(
            zip(lease.load.first_blocks, lease.load.blocks[:-1], strict=False)
        ):
            size = self.groups[number].block_size
            for place, block in enumerate(run, first):
                stop = min((place + 1) * size, len(prefix))
                self.memory[block.block_id] = {
                    position % size: (number, entry.origin, prefix[: position + 1])
                    for position in range(place * size, stop)
                }
        for number, block in enumerate(lease.load.blocks[-1]):
            self.memory[block.block_id] = "state", number, entry.origin, prefix
        before = self.found()[-1]
        joined = self.kv.commit_load(lease)
        fits = entry in self.live and entry.prefix(len(prefix)) == prefix
        if joined:
            expect("P30", (fits, entry.computed), (True, len(prefix)), "what a load has joined")
            entry.kept = 0
            self.end_pass(entry, len(prefix))
            if entry.cached and len(prefix) % self.common == 0:
                self.check_due(entry, [len(prefix)], before)

    @some()
    @rule(which=WHICH, kept=st.integers(0, LONGEST), back=st.none() | st.integers(0, 5))
    def fail_load(self, which, kept, back):
        """KV that was committed turns out never to have arrived."""
        entry = self.pick(which)
        kept = max(0, min(kept if back is None else entry.computed - back, entry.computed))
        starts = {entry: kept}
        if kept < entry.real.num_settled_tokens:
            prefix = entry.prefix(kept + 1)
            starts = dict.fromkeys(self.agreeing(entry.real.namespace_key, prefix), kept)
        if kept < entry.computed:
            self.spoil(entry.origin, entry.prefix(kept + 1))
        self.set_back(lambda: self.kv.fail_load(entry.real, kept), starts)

    @precondition(lambda self: self.leased)
    @rule(which=WHICH)
    def fail_transfer(self, which):
        number = list(self.leased)[which % len(self.leased)]
        lease = self.kv.leases.active[number]
        starts = self.starts_of(lease.blocks)
        self.set_back(lambda: self.kv.fail_transfer(lease), starts)
        del self.leased[number]
        self.loads.pop(number, None)

    @rule(ids=IDS)
    def fail_blocks(self, ids):
        ids = [block_id for block_id in ids if block_id < self.kv.num_blocks]
        starts = self.starts_of([self.kv.pool.blocks[block_id] for block_id in ids])
        self.set_back(lambda: self.kv.fail_blocks(ids), starts)

    @precondition(lambda self: self.live)
    @rule(chance=st.integers(0, 2), canonical=st.booleans())
    def reset(self, chance, canonical):
        if chance:
            return
        self.kv.reset(canonical_order=canonical)
        self.epoch += 1
        self.ended.clear()
        self.retained.clear()
        for entry in self.live:
            entry.cached = False

    @some()
    @rule(which=WHICH)
    def close(self, which):
        self.end(self.pick(which))

    def end(self, entry):
        """P24: the state that it has kept is found afterwards."""
        before = self.found()[-1]
        is_due = entry.cached and 0 < entry.kept <= len(entry.known)
        self.kv.close(entry.real)
        self.live.remove(entry)
        if is_due:
            entry.real.namespace_key = kvcore.encode_namespace(NAMESPACES[entry.origin[0]])
            self.check_due(entry, [entry.kept], before)

    @rule()
    def close_all(self):
        """P5: with nothing open and nothing in flight all blocks are free."""
        for entry in self.live[:]:
            self.end(entry)
        for number in list(self.leased):
            self.kv.leases.end(number)
        self.leased, self.loads = {}, {}
        expect("P5", self.kv.num_free_blocks, self.kv.num_usable_blocks, "free blocks")

    # Lives of requests.

    @some()
    @rule(which=WHICH, tokens=TOKENS)
    def next_turn(self, which, tokens):
        """A request ends, and its conversation comes back with one turn more."""
        entry = self.pick(which)
        self.run_all(entry)
        known, name = entry.known, entry.origin[0]
        self.end(entry)
        again = self.begin((known + tokens)[:LONGEST], name)
        self.run_all(again)

    @rule(
        layout=st.integers(0, len(HYBRIDS) - 1),
        size=st.integers(2, 4),
        prompt=st.integers(1, 13),
        answer=TOKENS,
        steps=st.integers(1, 12),
        is_ahead=st.booleans(),
    )
    def answer_a_turn(self, layout, size, prompt, answer, steps, is_ahead):
        """P24: the next turn finds the last full block of the answer, and the state after it."""
        machine = type(self)()
        machine.start(layout, size, 1, 0, 80, caching=True, events=False)
        entry = machine.begin([0] * prompt, "default")
        machine.ready(entry)
        for number in range(steps):
            token = [answer[number % len(answer)]]
            if is_ahead:
                machine.step([entry], [([], 1, token, 1)])
            machine.step([entry], [(token, int(not is_ahead), [], 1)])
        machine.agree()
        machine.end(entry)
        wanted = entry.computed // machine.common * machine.common
        again = machine.begin([*entry.known, 2, 2], "default")
        expect("P24", again.computed, wanted, "what the next turn finds")

    @precondition(lambda self: len(self.live) < 5)
    @rule(prompt=PROMPTS, tokens=TOKENS, more=st.integers(1, 6))
    def part(self, prompt, tokens, more):
        """Two prompts part somewhere; a third that parts there too hits what they share."""
        for last in range(3):
            entry = self.begin([*prompt, *[3 + last] * more, *tokens], "default")
            if not self.run_all(entry):
                return
            self.end(entry)
            self.agree()

    @some()
    @rule(which=WHICH)
    def preempt(self, which):
        """Its blocks are given back, and it begins again with what is found."""
        entry = self.pick(which)
        elements, name = entry.known, entry.origin[0]
        self.end(entry)
        if elements:
            self.run_all(self.begin(elements, name, how="resumed"))

    @some(lambda e: not e.future)
    @rule(
        which=WHICH,
        steps=st.integers(1, 8),
        then=st.sampled_from(["fork", "cut", "close", "lease"]),
    )
    def pass_a_boundary(self, which, steps, then):
        """A state is kept at the end of a block; then a sequence parts, goes back or ends."""
        entry = self.pick(which, lambda e: not e.future)
        more = [0] * (-max(len(entry.known), 1) % self.common)
        if len(entry.known) > LONGEST:
            return
        self.kv.extend(entry.real, more)
        entry.known += more
        if not self.run_all(entry, stops=False):
            return
        if then == "fork" and len(self.live) < 6:
            self.split(entry)
        elif then == "lease":
            self.take_lease(entry, "store")
        for _ in range(steps):
            if not self.ready(entry) or not self.step([entry], [([1], 1, [], 1)]):
                return
            self.agree()
        if then == "cut":
            self.cut(entry, len(entry.known) - steps // 2)
        elif then == "close":
            self.end(entry)

    @some()
    @rule(first=TOKENS, steps=st.integers(1, 14), together=st.integers(1, 3), room=st.booleans())
    def decode(self, first, steps, together, room):
        """Each step computes a token of each, and one becomes known."""
        entries = [e for e in self.live if not e.future and self.ready(e)][:together]
        for number in range(steps):
            entries = [entry for entry in entries if len(entry.tokens) < LONGEST]
            moves = [([first[number % len(first)]], 1, [], 1) for _ in entries]
            if not self.step(entries, moves, for_all=room):
                return
            self.agree()

    def ready(self, entry):
        """Compute all but the last token, and reserve for that one."""
        if not entry.todo and entry.future:
            self.kv.expect(entry.real, 1)
            entry.future.append(0)
        elif not entry.todo:
            self.kv.append(entry.real, 0)
            entry.known.append(0)
        least = 1
        return self.run_all(entry, least=least) and self.reserve(entry, 1)

    @some()
    @rule(
        first=TOKENS,
        steps=st.integers(1, 14),
        together=st.integers(1, 3),
        late=st.integers(0, 2),
        halves=st.booleans(),
    )
    def run_ahead(self, first, steps, together, late, halves):
        """Each step is sent before the tokens of the last ones are known, or room is made."""
        entries = [entry for entry in self.live if self.ready(entry)][:together]
        for number in range(steps):
            entries = [entry for entry in entries if len(entry.tokens) < LONGEST]
            token = first[number % len(first)]
            told = [e.future[:1] if len(e.future) > late else [] for e in entries]
            if halves:
                if not all(self.reserve(entry, 1) for entry in entries):
                    return
                self.step(entries, [([], 1, [token], 0) for _ in entries])
                self.agree()
                self.step(entries, [(one, 0, [], 0) for one in told])
            elif not self.step(entries, [(one, 1, [token], 1) for one in told]):
                return
            self.agree()

    @some(lambda e: not e.future)
    @rule(which=WHICH, drafts=TOKENS, accepted=st.integers(0, 5), chunk=CHUNKS)
    def speculate(self, which, drafts, accepted, chunk):
        """Draft tokens join and are computed; some are rejected, and the others stay."""
        entry = self.pick(which, lambda e: not e.future)
        if not self.ready(entry) or len(entry.known) > LONGEST:
            return
        length = len(entry.known)
        self.kv.extend(entry.real, drafts)
        entry.known += drafts
        if self.run_all(entry, chunk):
            self.cut(entry, min(len(entry.known), length + accepted))
            self.agree()
            self.run_all(entry)

    @some()
    @rule(moves=st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=3))
    def serve(self, moves):
        """A step of several sequences, each with moves of its own."""
        entries, going = [], []
        for entry, (joins, count, later, room) in zip(self.live, moves, strict=False):
            if len(entry.tokens) > LONGEST:
                continue
            told = entry.future[:joins]
            told += [1] * (joins - len(told)) if len(entry.future) <= joins else []
            have = min(len(t.blocks) * t.block_size for t in entry.real.tables)
            have = max(0, have - entry.computed) if entry.real.state.write else 0
            most = entry.todo + max(0, len(told) - len(entry.future))
            entries.append(entry)
            going.append((told, min(count, most, have), [0] * later, room))
        self.step(entries, going)

    @rule(number=st.integers(1, 4), length=st.integers(1, 30))
    def churn(self, number, length):
        """Other requests take blocks and give them back, and what was found goes."""
        for _ in range(number):
            entry = self.begin([4] * length, "none")
            self.reserve(entry, length)
            self.end(entry)

    # What is said of blocks, in a copy of the manager that has no more than that.

    @some()
    @rule(
        which=WHICH,
        more=st.integers(1, 20),
        chunk=st.integers(1, 9),
        load=st.booleans(),
        stops=st.booleans(),
    )
    def foresee(self, which, more, chunk, load, stops):
        """P13: what an open sequence still takes, in chunks, is enough."""
        entry = self.pick(which)
        external = len(entry.known) if load and entry.computed < len(entry.known) else 0
        said = self.kv.num_missing_blocks(entry.real, more, chunk=chunk, num_external=external)
        if not IS_COMPILED and said <= self.kv.num_free_blocks:
            kv, seq = copied((self.kv, entry.real))
            self.run_with(kv, seq, said, (seq.num_computed_tokens + more, chunk, external), stops)

    @rule(
        prompt=PROMPTS,
        name=NAMES,
        chunk=st.integers(1, 9),
        external=st.sampled_from([0, 0, 3, 8, 12]),
        stops=st.booleans(),
        skips=st.booleans(),
    )
    def foresee_a_prompt(self, prompt, name, chunk, external, stops, skips):
        """P13: so is what a plan says of a prompt that is not opened yet."""
        external = min(external, len(prompt))
        about = {"namespace": NAMESPACES[name], "skip_reading": skips}
        plan = self.kv.plan(prompt, **about, chunk=chunk, num_external=external)
        if not IS_COMPILED and plan.fits:
            kv = copied(self.kv)
            seq = kv.open(prompt, **about)
            self.run_with(kv, seq, plan.num_new_blocks, (len(prompt), chunk, external), stops)

    @staticmethod
    def run_with(kv, seq, said, way, stops):
        """Compute a sequence in a pool that has `said` free blocks."""
        total, chunk, external = way
        kv.pool.take(kv.num_free_blocks - said)
        try:
            if external > seq.num_computed_tokens:
                kv.commit_load(kv.begin_load(seq, external))
            run_to_the_end(kv, seq, max(total, external), chunk, stops=stops)
        except kvcore.OutOfBlocksError as error:
            raise PropertyError("P13", f"{said} blocks were said to be enough: {error}") from error
