"""Publishers that name the same content differently, and what an index says of them.

Their streams are made up, not a manager's: a block may go before what follows it, and a window may
follow what is gone. Each has a group that sees everything and two with windows, whose blocks may
have other sizes and whose hashes may cover tokens after them, as an engine's do if a draft model
reads ahead: a block is told once these are known, and is hit where the same ones follow. Beside the
index stands what each has told, as sets of paths. Of windows the index may know less: what they
follow is known by a name alone.

`TierMachine` has one publisher with tiers behind its cache, near and far, some of one medium.
"""

from itertools import cycle
from math import lcm

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcore import wire
from tests.kvcore.wire.machine import IndexDiffersError

GROUPS = {2: 1, 4: 2}  # by the window, in tokens
WIDTHS = st.sampled_from([*GROUPS])
EQUAL = {"A": (1, 1), "B": (1, 1), "C": (1, 1)}
SIZES = st.sampled_from([
    EQUAL, {"A": (2, 1), "B": (1, 2), "C": (2, 2)}, {"A": (1, 1), "B": (2, 3), "C": (1, 3)}
])  # fmt: skip
AHEAD = {"A": 0, "B": 0, "C": 0}
LOOKAHEADS = st.sampled_from([
    AHEAD, {"A": 1, "B": 1, "C": 1}, {"A": 1, "B": 0, "C": 1}, {"A": 1, "B": 2, "C": 2}
])  # fmt: skip
WHO = st.sampled_from("ABC")
ALL_PATHS = ("010", "01", "011", "0100", "0", "1", "010011", "010012")
PATHS = st.sampled_from(ALL_PATHS)


class IndexMachine(RuleBasedStateMachine):
    """A path is its tokens; a name is its publisher, the size of its block, and its path.

    The path of a block ends where its hash does: `ahead` has the tokens after it. `sizes` has
    tokens a block: of the group that sees everything, and of those with windows. A message is
    encoded and decoded on its way, in both forms.
    """

    make_index = wire.Index

    @initialize(sizes=SIZES, ahead=LOOKAHEADS)
    def start(self, sizes=EQUAL, ahead=AHEAD):
        self.sizes, self.ahead, self.forms = sizes, ahead, cycle(["map", "array"])
        self.index = self.make_index()
        self.full = {who: set() for who in "ABC"}
        self.windows = {who: {width: set() for width in GROUPS} for who in "ABC"}
        self.groups = {who: set() for who in "ABC"}  # that something was told of

    @rule(who=WHO, path=PATHS, begin=st.sampled_from([0, 0, 1, 2]))
    def store(self, who, path, begin=0):
        """Tell of the blocks of a path from some place on: known where what they follow is."""
        size, ahead = self.sizes[who][0], self.ahead[who]
        stop = whole(len(path) - ahead, size)
        begin = min(whole(begin, size), stop - size)
        if stop <= 0:
            return
        self.groups[who].add("full")
        if not begin or path[: begin + ahead] in self.full[who]:
            ends = range(begin + size, stop + 1, size)
            self.full[who] |= {path[: end + ahead] for end in ends}
        self.tell(who, self.stored(who, path, begin, stop, size, "full_attention"))

    @rule(path=PATHS)
    def store_everywhere(self, path):
        for who in "ABC":
            self.store(who, path)

    @rule(who=WHO, path=PATHS, width=WIDTHS)
    def store_in_window(self, who, path, width=2):
        """Tell of the last block of a path."""
        size, ahead = self.sizes[who][1], self.ahead[who]
        stop = whole(len(path) - ahead, size)
        if stop > 0:
            self.groups[who].add(width)
            self.windows[who][width].add(path[: stop + ahead])
            begin = stop - size
            self.tell(who, self.stored(who, path, begin, stop, size, "sliding_window", width))

    @rule(who=WHO, path=PATHS)
    def remove(self, who, path):
        """Tell that a block is gone; nothing can hit what follows it."""
        size, ahead = self.sizes[who][0], self.ahead[who]
        stop = whole(len(path) - ahead, size)
        if stop > 0:
            path = path[: stop + ahead]
            self.full[who] = {held for held in self.full[who] if not held.startswith(path)}
            self.tell(who, wire.Removed([name(who, size, path)], group_idx=0))

    @rule(who=WHO, place=st.integers(0, 3), width=WIDTHS)
    def remove_one_from_window(self, who, place, width):
        if held := sorted(self.windows[who][width]):
            self.remove_from_window(who, held[place % len(held)], width)

    def remove_from_window(self, who, path, width=2):
        self.windows[who][width].discard(path)
        removed = [name(who, self.sizes[who][1], path)]
        self.tell(who, wire.Removed(removed, group_idx=GROUPS[width]))

    @rule(path=st.sampled_from(["0", "01"]))
    def remove_everywhere(self, path):
        for who in "ABC":
            for width in GROUPS:
                for held in sorted(self.windows[who][width]):
                    self.remove_from_window(who, held, width)
            self.remove(who, path)

    @rule(who=WHO, clear=st.booleans())
    def forget(self, who, clear=False):
        if clear:
            self.tell(who, wire.Cleared())
        else:
            self.index.forget(who)
        self.full[who], self.groups[who] = set(), set()
        self.windows[who] = {width: set() for width in GROUPS}

    def tell(self, who, event):
        batch = wire.decode(wire.encode(0.0, [event], 0, next(self.forms)))
        if batch.num_malformed:
            raise IndexDiffersError(f"not read: {event}")
        self.index.apply(who, batch)

    def stored(self, who, path, begin, stop, size, kind, window=None):
        """The blocks of a path from `begin` to `stop`, with the tokens after each."""
        ahead, ends = self.ahead[who], range(begin + size, stop + 1, size)
        after = [tokens(path[end : end + ahead]) for end in ends] if ahead else None
        parent = name(who, size, path[: begin + ahead]) if begin else None
        return wire.Stored(
            [name(who, size, path[: end + ahead]) for end in ends], parent,
            tokens(path[begin:stop]), size, group_idx=GROUPS.get(window, 0),
            kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window,
            lookahead_token_ids=after,
        )  # fmt: skip

    @invariant()
    def it_says_what_was_told(self):
        if not hasattr(self, "index"):
            return
        for path in ALL_PATHS:
            found = self.index.match(tokens(path))
            for who in "ABC":
                longest, said = self.truth(who, path), found.get(who, 0)
                if said > longest or (said < longest and self.groups[who] == {"full"}):
                    raise IndexDiffersError(f"{who} holds {longest} of {path}, got {said}")
        held = sum(map(len, self.full.values()))
        held += sum(len(some) for each in self.windows.values() for some in each.values())
        if not 0 <= (stats := self.index.stats()).num_contents <= stats.num_held <= held:
            raise IndexDiffersError(f"{held} contents were told of, got {stats}")

    @invariant()
    def what_is_held_is_in_the_tree(self):
        if not hasattr(self, "index"):
            return
        nodes = [child for root in self.index._roots.values() for child in root.below()]
        for node in nodes:  # it grows
            nodes += node.below()
        found = sum(node.holders.bit_count() for node in nodes)
        needed = all(node.holders or node.below() for node in nodes)
        if found != (stats := self.index.stats()).num_held or not needed:
            raise IndexDiffersError(f"the tree has {found} of what is held, got {stats}")

    def truth(self, who, path):
        """The longest beginning of a path that each of its groups can serve."""
        groups, (full, size), ahead = self.groups[who], self.sizes[who], self.ahead[who]
        step = lcm(*[full if group == "full" else size for group in groups])
        for length in range(whole(len(path) - ahead, step), 0, -step):
            served = {"full": path[: length + ahead] in self.full[who]}
            for width, held in self.windows[who].items():
                first = min(max(0, length - width + 1) // size, max(0, length // size - 1))
                ends = range((first + 1) * size, length + 1, size)
                served[width] = {path[: end + ahead] for end in ends} <= held
            if groups and all(served[group] for group in groups):
                return length
        return 0

    def teardown(self):
        """Nothing is left when all are forgotten."""
        if hasattr(self, "index"):
            for who in "ABC":
                self.forget(who)
            stats = self.index.stats()
            if stats.num_held or stats.num_contents or self.index._names or self.index._roots:
                raise IndexDiffersError(f"all are forgotten, and left is {stats}")


TIERS = {
    "cache": ("GPU", None, None), "memory": ("CPU", None, "LOCAL"), "disk": ("STORAGE", None, None),
    "a second disk": ("DISK", "second", "LOCAL"), "far": ("STORAGE", None, "REMOTE"),
}  # fmt: skip
NEAR = ("cache", "memory", "disk", "a second disk")


class TierMachine(RuleBasedStateMachine):
    """A chain of blocks of one token, each with the places where a copy is.

    The cache stores a beginning and a tier copies what the cache has. Whatever goes is nowhere else
    near, or nothing follows it: what follows a block that is gone cannot be hit, and an index need
    not remember it.
    """

    make_index = wire.Index
    LONGEST = 2

    @initialize()
    def start(self):
        self.index = self.make_index()
        self.places = [set() for _ in range(self.LONGEST)]

    @rule(count=st.integers(1, LONGEST), session=st.sampled_from([None, "one", "two"]))
    def store(self, count=1, session=None):
        for places in self.places[:count]:
            places.add("cache")
        ids = [*range(count)]
        self.tell(wire.Stored(ids, None, ids, 1, medium="GPU", group_idx=0, session_id=session))

    @rule(block=st.integers(0, LONGEST - 1), tier=st.sampled_from([*TIERS][1:]))
    def copy(self, tier, block=0):
        if "cache" in self.places[block]:
            self.places[block].add(tier)
            medium, ownership, locality = TIERS[tier]
            where = {"medium": medium, "locality": locality, "ownership": ownership}
            self.tell(wire.Stored([block], None, [], 0, group_idx=0, **where))

    @rule(block=st.integers(0, LONGEST - 1), tier=st.sampled_from([*TIERS]))
    def remove(self, tier, block=0):
        """A copy goes, perhaps one that is not there."""
        near = self.places[block].intersection(NEAR)
        if near != {tier} or self.length() == block + 1:
            self.places[block].discard(tier)
            medium, ownership, locality = TIERS[tier]
            self.tell(wire.Removed([block], medium, 0, locality, ownership))

    def tell(self, event):
        self.index.apply("p", wire.decode(wire.encode(0.0, [event], 0, "map")))

    def length(self):
        """The blocks of which each has a copy near by."""
        near = [bool(places.intersection(NEAR)) for places in self.places]
        return [*near, False].index(False)

    @invariant()
    def it_counts_what_is_near(self):
        if not hasattr(self, "index"):
            return
        found = self.index.match([*range(self.LONGEST)]).get("p", 0)
        if found != self.length():
            raise IndexDiffersError(f"near are {self.length()} of {self.places}, got {found}")


def tokens(path):
    return [int(token) for token in path]


def name(who, size, path):
    return f"{who}{size}{path}".encode()


def whole(length, size):
    """What of a length is in whole blocks."""
    return length - length % size
