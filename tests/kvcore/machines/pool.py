"""The pool against lists: any holder, any order of release, any parent."""

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

import kvcore
from tests.kvcore.machines.refusal import refused
from tests.kvcore.naive import NaivePool
from tests.kvcore.views import expect, pool_view


class PoolMachine(RuleBasedStateMachine):
    """The pool against lists: any holder, any order of release, any parent.

    It holds and releases blocks as no well-behaved manager would, because another engine's may.
    """

    make_pool = kvcore.BlockPool
    NUM_BLOCKS = 7
    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.pool = self.make_pool(self.NUM_BLOCKS, 1)
        self.naive = NaivePool(self.NUM_BLOCKS)

    def view(self):
        return pool_view(self.pool)

    def blocks(self, ids):
        return [self.pool.blocks[block_id] for block_id in ids]

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def take(self, count):
        if count > len(self.naive.order()):
            refused("P13", kvcore.OutOfBlocksError, self.view, lambda: self.pool.take(count))
            return
        blocks = self.pool.take(count)
        expect("P6", [b for b in blocks if b.node is not None], [], "content of blocks taken")
        taken = [block.block_id for block in blocks]
        expect("P15", taken, self.naive.take(count), "the blocks taken")

    @rule(count=st.integers(-3, -1))
    def take_a_negative_number(self, count):
        refused("P3", kvcore.InvalidArgumentError, self.view, lambda: self.pool.take(count))

    @rule(ids=st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=4))
    def hold(self, ids):
        idle = [b for b in ids if not self.naive.refs[b] and self.naive.content_of(b) is None]
        if idle:
            refused(
                "P3", kvcore.BlockStateError, self.view, lambda: self.pool.hold(self.blocks(ids))
            )
            return
        if len(set(ids)) != len(ids):
            refused(
                "P3", kvcore.BlockStateError, self.view, lambda: self.pool.hold(self.blocks(ids))
            )
            return
        self.pool.hold(self.blocks(ids))
        self.naive.hold(ids)

    @rule(ids=st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=5))
    def release(self, ids):
        if any(ids.count(block_id) > self.naive.refs[block_id] for block_id in ids):
            refused(
                "P3", kvcore.DoubleFreeError, self.view, lambda: self.pool.release(self.blocks(ids))
            )
            return
        self.pool.release(self.blocks(ids))
        self.naive.release(ids)

    @rule(data=st.data(), twice=st.booleans())
    def release_what_is_held(self, data, twice):
        ids = [block_id for block_id, refs in self.naive.refs.items() if refs]
        if ids:
            chosen = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=5, unique=True))
            self.release(chosen * 2 if twice else chosen)

    @rule(
        foreign=st.sampled_from(["null", "other", "id"]), call=st.sampled_from(["hold", "release"])
    )
    def a_block_that_cannot_be_owned(self, foreign, call):
        other = kvcore.BlockPool(self.NUM_BLOCKS, 1)
        block = {"null": self.pool.blocks[0], "other": other.take(1)[0], "id": kvcore.Block(-1)}
        refused(
            "P3",
            kvcore.ForeignBlockError,
            self.view,
            lambda: getattr(self.pool, call)([block[foreign]]),
        )

    @rule(
        block_id=st.integers(1, NUM_BLOCKS - 1),
        parent_id=st.integers(0, NUM_BLOCKS - 1),
        token=st.integers(0, 2),
        namespace=st.sampled_from([b"a", b"b"]),
    )
    def publish(self, block_id, parent_id, token, namespace):
        block = self.pool.blocks[block_id]
        parent = self.pool.blocks[parent_id] if parent_id else None
        packed = kvcore.pack([token]).tobytes()
        above = self.naive.content_of(parent_id) if parent_id else (namespace, ())
        allowed = (
            self.naive.refs[block_id]
            and self.naive.content_of(block_id) is None
            and above is not None
        )
        if not allowed:
            refused(
                "P3",
                kvcore.BlockStateError,
                self.view,
                lambda: self.pool.publish([block], namespace, parent, [packed]),
            )
            return
        self.pool.publish([block], namespace, parent, [packed])
        self.naive.publish(block_id, (above[0], (*above[1], token)))

    @rule(data=st.data(), token=st.integers(0, 1), deeper=st.booleans())
    def publish_what_is_held(self, data, token, deeper):
        """Most publications are allowed ones; with few tokens, many are copies."""
        published = [block_id for _, block_id in self.naive.published]
        ready = [b for b, refs in self.naive.refs.items() if refs and b not in published]
        if ready:
            parent = data.draw(st.sampled_from(published)) if deeper and published else 0
            self.publish(data.draw(st.sampled_from(ready)), parent, token, b"a")

    @rule(token=st.integers(0, 1))
    def two_copies(self, token):
        """Two requests compute the same block; the first one ends."""
        if len(self.naive.order()) > 1:
            ids = self.naive.order()[:2]
            self.take(2)
            for block_id in ids:
                self.publish(block_id, 0, token, b"a")
            self.release(ids[:1])

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        namespace=st.sampled_from([b"a", b"b"]),
    )
    def match(self, tokens, namespace):
        hits = self.pool.match(namespace, kvcore.pack(tokens).tobytes(), len(tokens))
        wanted = self.naive.match(namespace, tokens, 1, len(tokens))
        expect("P7", [block.block_id for block in hits], wanted, "the blocks hit")

    @invariant()
    def agree(self):
        order = [block.block_id for block in self.pool.free_blocks()]
        expect("P15", order, self.naive.order(), "the order of reuse")
        expect("P1", self.pool.num_free_blocks, len(order), "the free counter")
        refs = {block.block_id: block.ref_count for block in self.pool.blocks[1:]}
        expect("P2", refs, self.naive.refs, "the ref counts")
        expect("P13", self.pool.num_evicted_blocks, self.naive.num_evicted, "evictions")
        expect("P13", self.pool.peak_used_blocks, self.naive.peak, "the peak")
        copies = pool_view(self.pool)["copies"]
        seen = {content: holders for content, holders in copies.items() if holders}
        wanted = {}
        for (namespace, prefix), block_id in self.naive.published:
            key = (0, namespace, kvcore.pack(prefix).tobytes())
            wanted.setdefault(key, []).append(block_id)
        expect("P6", seen, wanted, "the published content")
