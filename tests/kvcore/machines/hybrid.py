"""Managers with recurrent states, beside a ghost of the memory and the rules of states.

The ghost says what each block holds: for each slot of KV, or for a piece of a state, the namespace
and the whole prefix that were computed into it. A state is right if and only if all its pieces are
the ghosts of the sequence's own computed tokens.

What a step does with states is predicted from the rules: a pass that ends at a wanted position
publishes its state, one that ends at a later boundary keeps it until the next boundary or the end,
and a sequence that is set back goes to the last state that exists.
"""

from dataclasses import dataclass, field
from math import lcm

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

import kvcore
from kvcore.eviction.retention import retention_terms
from kvcore.identity.block_hash import block_contents
from tests.kvcore.machines.refusal import refused
from tests.kvcore.machines.requests import NAMESPACES, lowered
from tests.kvcore.views import PropertyError, expect, manager_view, spelled

HYBRIDS = {
    "full and state": lambda size, m, every: (size, [kvcore.FullAttention()], m, every),
    "full and three pieces": lambda size, m, every: (size, [kvcore.FullAttention()], 2 + m, every),
    "full, window, state": lambda size, m, every: (
        4 if size > 3 else 2,
        [kvcore.FullAttention(4), kvcore.SlidingWindow(6)],
        m,
        every,
    ),
    "six, four, state": lambda size, m, every: (
        2,
        [kvcore.FullAttention(6), kvcore.FullAttention(4)],
        m,
        every,
    ),
}
"""By name what a manager of the layout gets: block size, groups, blocks of a state, its grid."""
BAD = ("never arrived",)


@dataclass(eq=False)
class Entry:
    """What is known of a sequence.

    Attributes:
        real: the sequence.
        known: its known tokens, with images as in `requests`.
        origin: whose KV and states it computes.
        cached: whether others may find them.
        prompt: the number of tokens when it was opened.
        wanted: the positions at which its states are to be found by others.
        future: the expected tokens.
        kept: the position of the state that it keeps for its end; 0: none.
        retain: its retention.
        opened_at: the step at which it was opened.
        branches: the lengths at which cached KV branched off from its prompt.
        expected: the end of its prompt, and the boundaries that were given.
    """

    real: kvcore.KVSequence
    known: list
    origin: tuple
    cached: bool
    prompt: int
    wanted: frozenset
    future: list = field(default_factory=list)
    kept: int = 0
    retain: tuple = ()
    opened_at: int = 0
    branches: frozenset = frozenset()
    expected: frozenset = frozenset()

    @property
    def tokens(self):
        return [*self.known, *self.future]

    @property
    def computed(self):
        return self.real.num_computed_tokens

    @property
    def todo(self):
        return len(self.known) + len(self.future) - self.computed

    def prefix(self, length):
        return tuple(self.tokens[:length])


def is_writable(pieces):
    return bool(pieces) and pieces[0].ref_count == 1 and pieces[0].node is None


def first_kept(group, num_tokens):
    """The first block of a group that a hit of so many tokens needs."""
    full = num_tokens // group.block_size
    if isinstance(group, kvcore.FullAttention):
        return 0
    return max(0, min((num_tokens - group.window + 1) // group.block_size, full - 1))


class HybridChecks(RuleBasedStateMachine):
    """A manager with states, the ghost of its memory, and what must hold after every rule."""

    make_manager = kvcore.KVCacheManager
    layouts = tuple(HYBRIDS)
    with_events = True  # sometimes; or "always", or "never"

    @initialize(
        layout=st.integers(0, len(HYBRIDS) - 1),
        size=st.integers(2, 4),
        pieces=st.integers(1, 2),
        grid=st.sampled_from([0, 0, 2]),
        num_blocks=st.integers(7, 41),
        caching=st.sampled_from([True, True, True, False]),
        events=st.booleans(),
    )
    def start(self, layout, size, pieces, grid, num_blocks, caching, events):
        make = HYBRIDS[self.layouts[layout % len(self.layouts)]]
        size, groups, self.pieces, grid = make(size, pieces, grid)
        self.common = lcm(*[group.block_size or size for group in groups])
        self.every = grid * self.common
        states = kvcore.RecurrentState(self.pieces, self.every)
        self.kv = self.make_manager(
            num_blocks,
            size,
            groups=[*groups, states],
            enable_caching=caching,
            record_events="xxh3-128" if self.with_events in {events, "always"} else None,
        )
        self.groups = self.kv.groups[:-1]
        self.caching = caching
        self.memory = {}
        self.ended = {}  # (namespace key, content): (origin, prefix) where a pass ended
        self.retained = {}  # the same key: the last step at which that state is retained
        self.leased = {}  # lease id: (kind, what each of its blocks held when it began)
        self.loads = {}  # lease id: (entry, its tokens)
        self.events = []
        self.live = []
        self.epoch = self.num_opened = 0

    def view(self):
        return manager_view(self.kv)

    # What can be found.

    @staticmethod
    def contents(elements, size):
        """For each number of whole blocks the path that spells them, as bytes."""
        tokens, items = lowered(elements)
        packed = kvcore.pack(tokens)
        return [
            b"".join(block_contents(packed, items, 0, count, size))
            for count in range(len(elements) // size + 1)
        ]

    def key_of(self, entry, length):
        return entry.real.namespace_key, self.contents(entry.known[:length], self.common)[-1]

    def found(self):
        """For each group what can be found, by namespace key and content; states: their pieces."""
        found = [
            {spelled(node) for node in tree.nodes() if node.first_copy is not None}
            for tree in self.kv.pool.trees[:-1]
        ]
        states = {}
        for node in self.kv.pool.trees[-1].nodes():
            if node.first_copy is not None and len(node.tokens) != 2:
                pieces, below = [node.first_copy], node
                for number in range(1, self.pieces):
                    key = number.to_bytes(2, "big")
                    below = next((n for n in below.child_nodes() if n.tokens == key), below)
                    pieces.append(below.last_copy)
                states[spelled(node)] = pieces
        return [*found, states]

    def hits(self, elements, key, recompute=0):
        """The longest prefix that all groups have, and the longest that those with KV have.

        With `recompute` those with KV have so many tokens more.
        """
        found = self.found()
        paths = [self.contents(elements, group.block_size) for group in self.groups]
        state = self.contents(elements, self.common)

        def whole(length):
            return all(
                (key, paths[number][place + 1]) in found[number]
                for number, group in enumerate(self.groups)
                for place in range(first_kept(group, length), length // group.block_size)
            )

        last = len(elements) - (recompute == 0)
        lengths = [n for n in range(self.common, last + 1, self.common) if whole(n)]
        lengths = [n for n in lengths if n <= lengths[-1] - recompute]
        served = [n for n in lengths if (key, state[n // self.common]) in found[-1]]
        return served[-1] if served else 0, lengths[-1] if lengths else 0

    def branches(self, elements, key, recompute):
        """Where the cached KV of a group ends and other KV goes on; and where that of each ends."""
        found = self.found()
        last = len(elements) - (recompute == 0)
        lengths, stops = [], []
        for number, group in enumerate(self.groups):
            size, depth = group.block_size, 0
            paths = self.contents(elements, size)
            for path in paths[1 : last // size + 1]:
                below = [p for k, p in found[number] if k == key and p.startswith(path)]
                if not below or (first_kept(group, 99) == 0 and path not in below):
                    break
                depth += 1
            if not depth:
                break
            below = [p for k, p in found[number] if k == key and p.startswith(paths[depth])]
            if depth < last // size and below != [paths[depth]]:
                lengths.append(depth * size)
            stops.append(depth * size)
            last = min(last, depth * size)
        return lengths, stops

    def goes_on(self, elements, key, length, stops):
        """Whether a group has other KV cached behind so many tokens, or behind one up to a stop."""
        tokens, items = lowered(elements)
        for tree, group, stop in zip(self.kv.pool.trees, self.groups, stops, strict=False):
            size = group.block_size
            for end in range(length, stop + 1, size):
                contents = block_contents(kvcore.pack(tokens), items, 0, end // size, size)
                node = tree.find(key, contents)
                is_end = end == stop
                if len([*node.child_nodes()]) > (not is_end) and (is_end or node.first_copy):
                    return True
        return False

    def check_left(self, entry, pieces, length):
        """P42: a state that a sequence has left goes first, unless a known end needs it."""
        settled = min(entry.computed, len(entry.known))
        ends = entry.real.ends
        if not pieces or not ends or length == settled // self.common * self.common:
            return
        kept = self.kv.pool.idle_blocks.kept
        first = pieces[0]
        if first.node is None or first.ref_count or kept.get(first.block_id):
            return
        counts = self.kv.pool.idle_blocks.num_continued <= 3 or entry.real.ends.recompute
        is_expected = counts and length in entry.expected
        if length in entry.branches or is_expected:
            expect("P42", first.last_end < 0, False, "whether a state that is needed goes first")
        elif first.last_end <= ends.num_known:
            expect("P42", first.last_end < 0, True, "whether a state of no known end goes first")

    # What must hold.

    @invariant()
    def agree(self):
        if not hasattr(self, "kv"):
            return
        kvcore.check(self.kv)
        for entry in self.live:
            self.check_entry(entry)
        found = self.found()
        self.check_states(found[-1])
        for kind, before in self.leased.values():
            for block_id, content in before.items():
                self.check_leased(kind, block_id, content)
        self.fold()

    def check_entry(self, entry):
        """P7, P31: what is computed is the entry's own, in every block of it."""
        real, state = entry.real, entry.real.state
        expect("P27", real.num_tokens, len(entry.tokens), "its tokens")
        expect("P34", state.kept_at if state.kept else 0, entry.kept, "the state that it keeps")
        tokens = entry.prefix(entry.computed)
        for number, table in enumerate(real.tables):
            size = table.block_size
            for position in range(table.num_null * size, entry.computed):
                block_id = table.blocks[position // size].block_id
                content = self.memory.get(block_id)
                got = content.get(position % size) if isinstance(content, dict) else content
                wanted = (number, entry.origin, tokens[: position + 1])
                expect("P7", got, wanted, f"the KV of group {number} behind position {position}")
        self.check_pieces(state.read, entry.origin, tokens)
        if state.kept:
            self.check_pieces(state.kept, entry.origin, entry.prefix(state.kept_at))

    def check_pieces(self, pieces, origin, prefix):
        """P31: a state is that of a prefix; P35: it is nothing left by a former holder."""
        wanted = self.pieces if prefix else 0
        expect("P35" if pieces else "P34", len(pieces), wanted, "pieces of a state")
        for number, block in enumerate(pieces):
            content = self.memory.get(block.block_id)
            own = isinstance(content, tuple) and content[2:3] == (origin,)
            prop = "P31" if own or content == BAD else "P35"
            expect(prop, content, ("state", number, origin, prefix), f"{block!r}, a piece to read")

    def check_states(self, states):
        """P32: a state is found where a pass ended; P31: and it is the state of that prefix."""
        for key, pieces in states.items():
            if key not in self.ended:
                raise PropertyError("P32", f"a state is found where no pass ended: {key}")
            if None in pieces or len(set(pieces)) < self.pieces:
                raise PropertyError("P32", f"a state is found by some of its pieces: {pieces}")
            self.check_pieces(pieces, *self.ended[key])
            if self.retained.get(key, 0) > self.kv.pool.step:
                kept = [block.block_id in self.kv.pool.idle_blocks.kept for block in pieces]
                expect("P15", all(kept), True, "whether a retained state is kept")

    def check_leased(self, kind, block_id, content):
        """P33: what a transfer reads stays as it was; a step may replace its own state."""
        now = self.memory.get(block_id)
        if content is None or now == BAD:
            return
        if isinstance(content, dict):
            now = now if isinstance(now, dict) else {}
            expect(
                "P17",
                [now.get(n) in (c, BAD) for n, c in content.items() if c != BAD].count(False),
                0,
                "slots of a lease that were written again",
            )
        elif kind != "step" and content != BAD:
            expect("P33", now, content, "a leased piece of a state")

    def fold(self):
        """P21: the events add up to what can be found: of a state the first piece."""
        if self.kv.events is None:
            return
        for event in self.kv.events.take():
            if isinstance(event, kvcore.BlocksRemoved):
                gone = {(event.group, name) for name in event.block_hashes}
                expect("P21", gone <= kvcore.fold(self.events), True, "whether it was stored")
            self.events.append(event)
        wanted = set()
        for number, tree in enumerate(self.kv.pool.trees):
            names = {id(root): kvcore.digest(root.tokens, "xxh3-128") for root in tree.roots()}
            for node in tree.nodes():
                if len(node.tokens) == 2:
                    continue
                size = self.kv.groups[number].block_size
                encoded = kvcore.encode_block(names[id(node.parent)], node.tokens, size)
                names[id(node)] = kvcore.digest(encoded, "xxh3-128")
                if node.first_copy is not None:
                    wanted.add((number, names[id(node)]))
        expect("P21", kvcore.fold(self.events), wanted, "what the events add up to")
        expect("P21", kvcore.fold((), self.kv.snapshot()), wanted, "the snapshot")

    # What passes do.

    def write(self, entry, count):
        """Carry out a pass: read one state, write KV and the next state."""
        if not count:
            return
        real, before = entry.real, entry.computed
        read, write = real.state_blocks
        blocks = self.kv.pool.blocks
        self.check_pieces([blocks[i] for i in read], entry.origin, entry.prefix(before))
        expect("P18", len(set(write)), self.pieces, "blocks to write a state to")
        for block_id in write:
            self.check_exclusive(entry, blocks[block_id])
        prefix = entry.prefix(before + count)
        for number, table in enumerate(real.tables):
            size = table.block_size
            for position in range(before, before + count):
                block = table.blocks[position // size]
                if block.node is not None:
                    raise PropertyError("P7", f"{block!r} is written and can be found")
                slots = self.memory.get(block.block_id)
                slots = self.memory[block.block_id] = slots if isinstance(slots, dict) else {}
                slots[position % size] = (number, entry.origin, prefix[: position + 1])
        for number, block_id in enumerate(write):
            self.memory[block_id] = ("state", number, entry.origin, prefix)
        self.end_pass(entry, len(prefix))

    def check_exclusive(self, entry, block):
        """P33: what is written can be found by no look-up, and is read by nothing else."""
        if block.node is not None:
            raise PropertyError("P33", f"{block!r} is to be written and can be found")
        for other in self.live:
            held = [b for t in other.real.tables for b in t.blocks[t.num_null :]]
            if other is not entry and block in held + other.real.state.blocks():
                raise PropertyError("P33", f"{block!r} is to be written and is held by another")
        for kind, before in self.leased.values():
            if kind != "step" and before.get(block.block_id) not in (None, BAD):
                raise PropertyError("P33", f"{block!r} is to be written and is leased")

    def end_pass(self, entry, length):
        if length % self.common == 0 and entry.cached:
            content = self.contents(entry.tokens[:length], self.common)[-1]
            self.ended[entry.real.namespace_key, content] = entry.origin, entry.prefix(length)

    def is_wanted(self, entry, length):
        return length in entry.wanted or (self.every > 0 and length % self.every == 0)

    def outcome(self, entry, done):
        """What becomes of the state after a pass: published, kept, or only read."""
        if done % self.common or not entry.cached:
            return "read"
        if self.is_wanted(entry, done) and done <= len(entry.known):
            return "publish"
        return "keep" if done >= entry.prompt or self.is_wanted(entry, done) else "read"

    def is_pending(self, entry):
        """Whether the state that it keeps is wanted, and its last token has become known."""
        known = entry.kept <= len(entry.known)
        return entry.kept > 0 and entry.cached and known and self.is_wanted(entry, entry.kept)

    def needs(self, entry, count, total):
        """The blocks to take for `total` tokens once `count` more are computed; and optional ones.

        The tokens of the step have joined, the pass is not committed yet.
        """
        state, done = entry.real.state, entry.computed + count
        need = sum(
            max(0, -(-total // table.block_size) - len(table.blocks)) for table in entry.real.tables
        )
        if total <= done:
            return need, 0
        kept = [] if self.is_pending(entry) else state.kept
        read, write = state.read, state.write
        if count:
            read, write = state.write, []
            outcome = self.outcome(entry, done)
            if outcome == "publish":
                return need + self.pieces, 0
            if outcome == "keep" and is_writable(kept):
                return need, 0
            kept = read if outcome == "keep" else kept
        elif read is state.kept and read is not kept:
            return need + (0 if write else self.pieces), 0
        if write or (is_writable(read) and read is not kept):
            return need, 0
        return (need, self.pieces) if is_writable(read) else (need + self.pieces, 0)

    def settle(self, entry, count):
        """Note what a pass of `count` tokens, or a token that became known, has published."""
        due = []
        if self.is_pending(entry):
            due.append(entry.kept)
            entry.kept = 0
        if count:
            outcome = self.outcome(entry, entry.computed)
            if outcome == "publish":
                due.append(entry.computed)
                entry.kept = 0
            elif outcome == "keep":
                entry.kept = entry.computed
        return due

    def check_due(self, entry, due, before):
        """P24: the states after these positions can be found; a retained one is kept."""
        states = self.found()[-1] if due else {}
        for length in due:
            key = self.key_of(entry, length)
            if key not in states:
                raise PropertyError("P24", f"the state after {length} tokens is not found")
            self.retain(entry, key, length, before)

    def retain(self, entry, key, length, before):
        """Note how long a state is retained that was not found before."""
        start = length - self.common
        terms = retention_terms(entry.retain, start, entry.opened_at, self.kv.pool.step)
        if terms and key not in before:
            self.retained[key] = max(end for _, end in terms)
        elif key not in before:
            self.retained.pop(key, None)

    def reserve(self, entry, count):
        """Reserve, or be refused exactly when there are too few blocks."""
        kv, real = self.kv, entry.real
        need, optional = self.needs(entry, 0, entry.computed + count)
        free = kv.num_free_blocks
        said = kv.can_reserve(real, count), kv.num_missing_blocks(real, count)
        if need > free:
            expect("P13", said, (False, need), "whether it can reserve, and what is missing")
            refused("P36", kvcore.OutOfBlocksError, self.view, lambda: kv.reserve(real, count))
            return False
        had = real.state.write
        appended = self.takes(lambda: kv.reserve(real, count))
        kvcore.check(kv)
        expect("P13", said, (True, need), "whether it can reserve, and what is missing")
        if need + optional > free and optional:
            entry.kept, optional = 0, 0
        expect("P36", free - kv.num_free_blocks, need + optional, "the blocks it takes")
        new = real.state.write if real.state.write is not had else ()
        new = () if real.state.write is real.state.read else new
        wanted = tuple(block.block_id for block in new)
        expect("P16", appended[-1], wanted, "the blocks of a state that it says were taken")
        return True

    @staticmethod
    def takes(call):
        """A call for which there are enough blocks."""
        try:
            return call()
        except kvcore.OutOfBlocksError as error:
            raise PropertyError("P36", f"refused, with enough blocks free: {error}") from error

    def commit(self, entry, count):
        self.write(entry, count)
        before, left = self.found()[-1], (entry.real.state.read, entry.computed)
        self.kv.commit(entry.real, count)
        self.check_due(entry, self.settle(entry, count), before)
        self.check_left(entry, *left)

    def compute(self, entry, count):
        """Reserve, compute and commit; whether there was room."""
        count = min(count, entry.todo)
        if not self.reserve(entry, count):
            return False
        self.commit(entry, count)
        return True

    def step(self, entries, moves, *, for_all=False):
        """A step of several: (tokens that became known, computed, expected, room) of each.

        `for_all`: there is room for all tokens of each. Returns whether there was room.
        """
        for entry, (joins, _, _, _) in zip(entries, moves, strict=True):
            told = min(len(entry.future), len(joins))
            expect("P27", entry.future[:told], joins[:told], "the tokens that are told")
            entry.known += joins
            del entry.future[:told]
        need = optional = 0
        for entry, (_, count, later, room) in zip(entries, moves, strict=True):
            total = entry.computed + count + room
            total = len(entry.tokens) + len(later) if for_all else total
            mine, more = self.needs(entry, count, total)
            need, optional = need + mine, optional + more
            self.write(entry, count)

        def call(rooms):
            return self.kv.step(
                [entry.real for entry in entries],
                [count for _, count, _, _ in moves],
                [token for joins, *_ in moves for token in joins],
                num_known=[len(joins) for joins, *_ in moves],
                num_expected=[len(later) for _, _, later, _ in moves],
                num_reserved=rooms,
            )

        free, before = self.kv.num_free_blocks, self.found()[-1]
        left = [(entry.real.state.read, entry.computed) for entry in entries]
        rooms = None if for_all else [room for *_, room in moves]
        fits = need <= free
        if not fits:
            refused("P36", kvcore.OutOfBlocksError, self.view, lambda: call(rooms))
            rooms = 0
        self.takes(lambda: call(rooms))
        lacks = fits and need + optional > free
        for entry, (pieces, length) in zip(entries, left, strict=True):
            self.check_left(entry, pieces, length)
        for entry, (_, count, later, _) in zip(entries, moves, strict=True):
            due = self.settle(entry, count)
            entry.future += later
            if lacks and not entry.real.state.kept:
                entry.kept = 0
            self.check_due(entry, due, before)
        return fits

    # Where a sequence can resume.

    def resume(self, entry, limit):
        """P34: the last position up to `limit` whose state exists and that its tables cover."""
        if limit == entry.computed:
            return limit
        found = self.found()[-1]
        last = 0
        for length in range(self.common, limit + 1, self.common):
            is_known = entry.cached and length <= len(entry.known)
            if (is_known and self.key_of(entry, length) in found) or length == entry.kept:
                last = length
        return last if self.is_in_sight(entry, last) else 0

    def is_in_sight(self, entry, length):
        return all(
            table.num_null <= first_kept(group, length)
            for group, table in zip(self.groups, entry.real.tables, strict=True)
        )

    def whole(self, entry, limit):
        """The last position up to `limit` outside blocks that must not be written again."""
        lower = min(limit, entry.computed)
        if lower == entry.computed:
            return lower
        while True:
            limit = lower
            for table in entry.real.tables:
                full, rest = divmod(lower, table.block_size)
                block = table.blocks[full] if rest else None
                if block is not None and (block.node is not None or block.ref_count > 1):
                    lower -= rest
            if lower == limit:
                return lower if self.is_in_sight(entry, lower) else 0

    def cut(self, entry, length):
        where = self.resume(entry, self.whole(entry, length))
        unchanged = where == entry.computed
        self.kv.truncate(entry.real, length)
        expect("P34", entry.computed, where, "the tokens that are computed after a cut")
        del entry.future[max(0, length - len(entry.known)) :]
        del entry.known[length:]
        entry.kept = entry.kept if unchanged else 0

    # What turns out to be wrong.

    def spoil(self, origin, prefix, *, beyond=False):
        """What a prefix ends with is wrong, and what follows; `beyond`: its state alone is."""

        def is_wrong(its_origin, its_prefix):
            return its_origin == origin and its_prefix[: len(prefix)] == prefix

        for block_id, content in self.memory.items():
            if isinstance(content, dict):
                for place, slot in content.items():
                    is_after = slot != BAD and len(slot[2]) > len(prefix) - (not beyond)
                    if is_after and is_wrong(*slot[1:]):
                        content[place] = BAD
            elif content != BAD and is_wrong(*content[2:]):
                self.memory[block_id] = BAD
        for key in [key for key, content in self.ended.items() if is_wrong(*content)]:
            del self.ended[key]

    def agreeing(self, key, prefix):
        """The entries that have settled a prefix in a namespace."""
        return [
            entry
            for entry in self.live
            if entry.real.namespace_key == key
            and entry.real.num_settled_tokens >= len(prefix)
            and entry.prefix(len(prefix)) == prefix
        ]

    def set_back(self, call, starts):
        """Let a call set back the entries of `starts`, each to its number of sound tokens."""
        wanted = {
            entry: self.resume(entry, start)
            for entry, start in starts.items()
            if start < entry.computed
        }
        wanted = {e: where if self.is_in_sight(e, starts[e]) else 0 for e, where in wanted.items()}
        for entry in wanted:
            entry.kept = 0
        hit = call()
        got = {entry for entry in self.live if entry.real in hit}
        expect("P9", len(got - set(wanted)), 0, "sequences set back that are sound")
        expect("P9", len(set(wanted) - got), 0, "sequences that go on with what is wrong")
        for entry, where in wanted.items():
            expect("P34", entry.computed, where, "the tokens computed after a failure")

    def starts_of(self, blocks):
        """For each entry that blocks concern how many of its tokens are sound; they are spoiled."""
        starts, doubts = {}, []
        for entry in self.live:
            real, state = entry.real, entry.real.state
            for pieces, length in ((state.read, entry.computed), (state.kept, entry.kept)):
                if not set(pieces).isdisjoint(blocks):
                    self.doubt(entry, length - 1, starts, doubts)
                    self.spoil(entry.origin, entry.prefix(length), beyond=True)
            places = [
                place * table.block_size
                for table in real.tables
                for place, block in enumerate(table.blocks)
                if block in blocks and place * table.block_size < entry.computed
            ]
            for start in places:
                self.doubt(entry, start, starts, doubts)
                self.spoil(entry.origin, entry.prefix(start + 1))
        for block in blocks:
            if block.node is not None:
                self.doubt_content(block, doubts)
        for key, prefix in doubts:
            for entry in self.agreeing(key, prefix):
                starts[entry] = min(starts.get(entry, len(prefix) - 1), len(prefix) - 1)
        return starts

    @staticmethod
    def doubt(entry, start, starts, doubts):
        starts[entry] = min(starts.get(entry, start), start)
        if start < entry.real.num_settled_tokens:
            doubts.append((entry.real.namespace_key, entry.prefix(start + 1)))

    def doubt_content(self, block, doubts):
        """A published block is wrong: its tokens, and what follows them."""
        content, key = self.memory[block.block_id], block.node.root().tokens
        if isinstance(content, dict):
            size = self.kv.groups[block.group].block_size
            if content[size - 1] != BAD:
                _, origin, prefix = content[size - 1]
                doubts.append((key, prefix[: len(prefix) - size + 1]))
                self.spoil(origin, doubts[-1][1])
        elif content != BAD:
            _, _, origin, prefix = content
            doubts.append((key, prefix[: len(prefix) - self.common + 1]))
            self.spoil(origin, prefix, beyond=True)

    def origin(self, name):
        self.num_opened += 1
        alone = NAMESPACES[name] is None or not self.caching
        return (name, self.epoch, self.num_opened if alone else 0)
