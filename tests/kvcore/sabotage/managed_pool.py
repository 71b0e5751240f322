"""The manager over a broken pool."""

import kvcore
from kvcore.content_tree import ContentTree
from kvcore.eviction.idle_blocks import IdleBlocks
from tests.kvcore.sabotage.registry import changed, in_manager


@in_manager("P1", "P18", "P15")
class manager_hands_out_the_null_block(kvcore.BlockPool):
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        self.empty_blocks.append(self.blocks[0])


@in_manager("P7", "P10", "P6", rows=(22, 100))
class manager_finds_what_was_evicted(kvcore.BlockPool):
    def hand_out(self, blocks):
        stale = [(block, block.node) for block in blocks]
        super().hand_out(blocks)
        for block, node in stale:
            if node is not None:
                block.node, node.first_copy, node.last_copy = node, block, block


@in_manager("P2", "P3", "P7", "P1", "P13", rows=(47,))
class manager_uses_hits_that_it_does_not_hold(kvcore.BlockPool):
    def revive(self, blocks, kept=()):
        pass


@in_manager("P13", "P2", "P4", "P17", "P7", rows=(10, 16))
class manager_evicts_what_is_held_when_it_is_full(kvcore.BlockPool):
    def next_blocks(self, count):
        held = [block for block in self.blocks if block.ref_count and block.node is not None]
        if count == self.num_free_blocks + 1 and held:
            self.forget(held[:1])
            held[0].ref_count, held[0].next_free = 0, held[0]
            self.empty_blocks.append(held[0])
        return super().next_blocks(count)


@in_manager("P7", "P10")
class manager_ignores_the_namespace(kvcore.BlockPool):
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        for root in self.trees[0].roots():
            hits = super().match(root.tokens, packed, max_blocks, group, items)
            if hits:
                return hits
        return []


class CollidingTree(ContentTree):
    """Compares one token of a block instead of all."""

    @staticmethod
    def _child(node, tokens):
        for child in [*(node.children or {}).values(), node.last_child]:
            if child is not None and child.tokens[:4] == tokens[:4]:
                return child
        return None


@in_manager("P7", "P10", rows=(42,))
class manager_trusts_a_digest_that_collides(kvcore.BlockPool):
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        self.trees = (CollidingTree(*block_sizes),)


# P24: where the last tokens of a hit are computed again, its hits are not the longest.
@in_manager("P3", "P7", "P10", "P24", rows=(32,))
class manager_forgets_what_stands_before_a_block(kvcore.BlockPool):
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        hits = []
        size = self.block_sizes[0] * 4
        for start in range(0, max_blocks * size, size):
            tokens = packed[start : start + size]
            same = [n for n in self.trees[0].nodes() if n.tokens == tokens and n.first_copy]
            if not same:
                break
            hits.append(same[-1].first_copy)
        return hits


# P13: where the last tokens of a hit are computed again, a plan counts other blocks than are taken.
@in_manager("P13", "P14", rows=(57, 58))
class manager_hits_the_whole_prompt(kvcore.BlockPool):
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        whole = len(packed) // (self.block_sizes[0] * 4) if items is None else max_blocks
        return super().match(namespace_key, packed, whole, group, items)


@in_manager("P24", rows=(45,))
class manager_never_hits(kvcore.BlockPool):
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        return []


@in_manager("P15", rows=(95,))
class manager_releases_the_head_first(kvcore.BlockPool):
    def give_back(self, blocks):
        super().give_back(blocks[::-1])


@in_manager("P4", "P6", rows=(64,))
class manager_leaves_an_empty_node_where_it_missed(kvcore.BlockPool):
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        hits = super().match(namespace_key, packed, max_blocks, group, items)
        if hits and len(hits) < max_blocks and items is None:
            size = self.block_sizes[0] * 4
            missed = packed[len(hits) * size : (len(hits) + 1) * size]
            if self.trees[0]._child(hits[-1].node, missed) is None:
                self.trees[0]._grow(kvcore.Block(-3), hits[-1].node, missed)
        return hits


class TwinTree(ContentTree):
    """The second copy of a content takes the place of the first."""

    def attach(self, blocks, namespace_key, parent, contents):
        super().attach(blocks, namespace_key, parent, contents)
        for block in blocks:
            block.node.first_copy = block


@in_manager("P11", "P6", "P24", rows=(87,))
class manager_lets_twins_overwrite_each_other(kvcore.BlockPool):
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        self.trees = (TwinTree(*block_sizes),)


@in_manager("P3", "P9", "P6", rows=(86,))
class manager_gives_a_second_copy_no_identity(kvcore.BlockPool):
    def attach(self, blocks, namespace_key, above, contents, group, passing=b""):
        super().attach(blocks, namespace_key, above, contents, group, passing)
        for block in blocks:
            if block.prev_copy is not None:
                self.trees[group].detach(block)


class CarelessTree(ContentTree):
    """A block publishes in its own node although that still stands for what it held before."""

    def attach(self, blocks, namespace_key, parent, contents):
        for block in blocks:
            block.parent = None
        super().attach(blocks, namespace_key, parent, contents)


@in_manager("P6", "P7", "P10", "P11", "P24")
class manager_uses_a_node_that_stands_for_something(kvcore.BlockPool):
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        self.trees = (CarelessTree(*block_sizes),)


class RestlessQueue(IdleBlocks):
    """Puts back what was found where it stood, although others have come back since."""

    found_before = None

    def push_run(self, blocks):
        self.found = self.found or self.found_before
        self.found_before = self.found
        super().push_run(blocks)

    def cut_front(self, blocks):
        self.found_before = None
        super().cut_front(blocks)


def with_restless_queue(manager):
    manager.pool.idle_blocks = RestlessQueue()


changed("look_ups_make_what_was_used_old", with_restless_queue, "P15", "P1")


class YoungQueue(IdleBlocks):
    def find_run(self, blocks):
        self.remove_run(blocks)


def with_young_queue(manager):
    manager.pool.idle_blocks = YoungQueue()


changed("look_ups_make_what_they_find_young", with_young_queue, "P15")


class HastyQueue(IdleBlocks):
    """Puts what was found back in the order in which it left."""

    def _put_back(self, found):
        super()._put_back(found[::-1])


def with_hasty_queue(manager):
    manager.pool.idle_blocks = HastyQueue()


changed("look_ups_are_undone_from_their_first_block_on", with_hasty_queue, "P15", "P1", "P3")


class ForgivingQueue(IdleBlocks):
    """Puts back what was found although it is kept for something else since."""

    def set_terms(self, block, front):
        found = self.found
        super().set_terms(block, front)
        self.found = found


def with_forgiving_queue(manager):
    manager.pool.idle_blocks = ForgivingQueue()


changed("look_ups_forget_what_they_were_asked_to_keep", with_forgiving_queue, "P15", "P1")
