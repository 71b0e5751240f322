"""The manager over a broken pool."""

import kvcore
from kvcore.content_tree import ContentTree
from tests.kvcore.sabotage.registry import in_manager


@in_manager("P1", "P18", "P15")
class manager_hands_out_the_null_block(kvcore.BlockPool):  # vLLM PR #19330
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        self.empty_blocks.append(self.blocks[0])


@in_manager("P7", "P10", "P6")
class manager_finds_what_was_evicted(kvcore.BlockPool):  # vLLM PR #4764
    def take(self, num_blocks):
        stale = [(block, block.node) for block in self.free_blocks()][:num_blocks]
        taken = super().take(num_blocks)
        for block, node in stale:
            if node is not None:
                block.node, node.first_copy, node.last_copy = node, block, block
        return taken


@in_manager("P2", "P7", "P1", "P13")
class manager_uses_hits_that_it_does_not_hold(kvcore.BlockPool):  # vLLM PR #10507
    def hold(self, blocks, kept=()):
        pass


@in_manager("P7", "P10")
class manager_ignores_the_namespace(kvcore.BlockPool):  # vLLM #3264, #44701
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


@in_manager("P7", "P10")
class manager_trusts_a_digest_that_collides(kvcore.BlockPool):  # vllm-mlx PR #444
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        self.trees = (CollidingTree(*block_sizes),)


@in_manager("P7", "P10")
class manager_forgets_what_stands_before_a_block(kvcore.BlockPool):  # vLLM PR #12621's shape
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


@in_manager("P14")
class manager_hits_the_whole_prompt(kvcore.BlockPool):  # nano-vllm #144
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        whole = len(packed) // (self.block_sizes[0] * 4) if items is None else max_blocks
        return super().match(namespace_key, packed, whole, group, items)


@in_manager("P24")
class manager_never_hits(kvcore.BlockPool):  # LMCache #2979: a silent 0 %
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        return []


@in_manager("P15")
class manager_releases_the_head_first(kvcore.BlockPool):  # vLLM #42948
    def release(self, blocks):
        super().release(blocks[::-1])
