"""Publishers that name the same content differently, and what an index says of them.

Their streams are made up, not a manager's: a block may go before what follows it, and a window may
follow what is gone. Each has a group that sees everything and one with a window. Beside the index
stands what each has told, as sets of paths. Of windows the index may know less: what they follow is
known by a name alone.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcore import wire
from tests.kvcore.wire.machine import IndexDiffersError

WINDOW = 2
WHO = st.sampled_from("ABC")
PATHS = st.sampled_from(["010", "01", "011", "0100", "0", "1"])


class IndexMachine(RuleBasedStateMachine):
    """Blocks are of one token, and a path is its tokens; a name is its publisher and its path."""

    make_index = wire.Index

    @initialize()
    def start(self):
        self.index = self.make_index()
        self.full = {who: set() for who in "ABC"}
        self.window = {who: set() for who in "ABC"}
        self.groups = {who: set() for who in "ABC"}  # that something was told of

    @rule(who=WHO, path=PATHS, begin=st.sampled_from([0, 0, 1, 2]))
    def store(self, who, path, begin=0):
        """Tell of the blocks of a path from some place on: known where what they follow is."""
        self.groups[who].add("full")
        begin = min(begin, len(path) - 1)
        if not begin or path[:begin] in self.full[who]:
            self.full[who] |= {path[:end] for end in range(begin + 1, len(path) + 1)}
        self.tell(who, self.stored(who, path, begin, "full_attention"))

    @rule(path=PATHS)
    def store_everywhere(self, path):
        for who in "ABC":
            self.store(who, path)

    @rule(who=WHO, path=PATHS)
    def store_in_window(self, who, path):
        """Tell of the last block of a path."""
        self.groups[who].add("window")
        self.window[who].add(path)
        self.tell(who, self.stored(who, path, len(path) - 1, "sliding_window", WINDOW))

    @rule(who=WHO, path=PATHS)
    def remove(self, who, path):
        """Tell that a block is gone; nothing can hit what follows it."""
        self.full[who] = {held for held in self.full[who] if not held.startswith(path)}
        self.tell(who, wire.Removed([name(who, path)], group_idx=0))

    @rule(who=WHO, place=st.integers(0, 3))
    def remove_one_from_window(self, who, place):
        if held := sorted(self.window[who]):
            self.remove_from_window(who, held[place % len(held)])

    def remove_from_window(self, who, path):
        self.window[who].discard(path)
        self.tell(who, wire.Removed([name(who, path)], group_idx=1))

    @rule(path=st.sampled_from(["0", "01"]))
    def remove_everywhere(self, path):
        for who in "ABC":
            for held in sorted(self.window[who]):
                self.remove_from_window(who, held)
            self.remove(who, path)

    @rule(who=WHO, clear=st.booleans())
    def forget(self, who, clear=False):
        if clear:
            self.tell(who, wire.Cleared())
        else:
            self.index.forget(who)
        self.full[who], self.window[who], self.groups[who] = set(), set(), set()

    def tell(self, who, event):
        self.index.apply(who, wire.Batch(0.0, (event,)))

    @staticmethod
    def stored(who, path, begin, kind, window=None):
        names = [name(who, path[:end]) for end in range(begin + 1, len(path) + 1)]
        parent = name(who, path[:begin]) if begin else None
        return wire.Stored(
            names, parent, [int(token) for token in path[begin:]], 1,
            group_idx=int(window is not None), kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )  # fmt: skip

    @invariant()
    def it_says_what_was_told(self):
        if not hasattr(self, "index"):
            return
        for path in set().union(*self.full.values(), *self.window.values()):
            found = self.index.match([int(token) for token in path])
            for who in "ABC":
                longest, said = self.truth(who, path), found.get(who, 0)
                if said > longest or (said < longest and "window" not in self.groups[who]):
                    raise IndexDiffersError(f"{who} holds {longest} of {path}, got {said}")
        held = sum(map(len, self.full.values())) + sum(map(len, self.window.values()))
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
        for length in range(len(path), 0, -1):
            seen = range(max(0, length - WINDOW + 1), length)
            needed = {path[: place + 1] for place in [*seen, length - 1]}
            served = {"full": path[:length] in self.full[who], "window": needed <= self.window[who]}
            if self.groups[who] and all(served[group] for group in self.groups[who]):
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


def name(who, path):
    return f"{who}{path}".encode()
