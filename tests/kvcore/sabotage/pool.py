"""The pool, driven directly, broken."""

import itertools

import kvcore
from kvcore.content_tree import ContentTree
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import sabotage


@sabotage(machines.PoolMachine, "P3", rows=(3,))
class pool_accepts_a_negative_count(kvcore.BlockPool):
    def take(self, num_blocks):
        return super().take(max(0, num_blocks))


@sabotage(machines.PoolMachine, "P3", "P2", rows=(2,))
class pool_accepts_a_double_free(kvcore.BlockPool):
    def release(self, blocks):
        super().release([block for block in blocks if block.ref_count])


@sabotage(machines.PoolMachine, "P3", "P1", "P15", rows=(2,))
class pool_frees_a_block_named_twice_twice(kvcore.BlockPool):
    def release(self, blocks):
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count <= 0 and block.next_free is None:
                block.next_free = block
                self.empty_blocks.append(block)


@sabotage(machines.PoolMachine, "P1", "P15", rows=(4,))
class pool_queues_a_block_with_every_release(kvcore.BlockPool):
    def release(self, blocks):
        super().release(blocks)
        for block in dict.fromkeys(blocks):
            if block.ref_count:
                self.empty_blocks.append(block)


@sabotage(machines.PoolMachine, "P2", "P3", rows=(21,))
class pool_hands_out_blocks_that_nobody_holds(kvcore.BlockPool):
    def take(self, num_blocks):
        taken = super().take(num_blocks)
        for block in taken:
            block.ref_count = 0
        return taken


@sabotage(machines.PoolMachine, "P4", rows=(56,))
class pool_undoes_half_of_a_refused_release(kvcore.BlockPool):
    def release(self, blocks):
        self._check_own(blocks)
        for block in blocks:
            if block.ref_count == 0:
                raise kvcore.DoubleFreeError("too late")
            super().release([block])


@sabotage(machines.PoolMachine, "P4")
class pool_undoes_a_refused_release_from_a_shared_block_on(kvcore.BlockPool):
    """The blocks before it were counted in another loop, and stay free."""

    def _uncount(self, released, *, is_own):
        alone = list(itertools.takewhile(lambda block: block.ref_count == 1, released))
        is_shared = [block.ref_count > 1 for block in released[len(alone) :]][:1] == [True]
        try:
            return super()._uncount(released, is_own=is_own)
        except kvcore.MisuseError:
            for block in alone if is_shared else ():
                block.ref_count = 0
            raise


@sabotage(machines.PoolMachine, "P4", rows=(17,))
class pool_takes_what_there_is_before_it_refuses(kvcore.BlockPool):
    def take(self, num_blocks):
        if num_blocks > self.num_free_blocks:
            super().take(self.num_free_blocks)
            raise kvcore.OutOfBlocksError(num_blocks, 0)
        return super().take(num_blocks)


@sabotage(machines.PoolMachine, "P13", rows=(91,))
class pool_hands_out_fewer_than_it_was_asked_for(kvcore.BlockPool):
    def take(self, num_blocks):
        return super().take(min(num_blocks, self.num_free_blocks))


@sabotage(machines.PoolMachine, "P3", rows=(11,))
class pool_frees_the_null_block(kvcore.BlockPool):
    def _check_own(self, blocks):
        super()._check_own([block for block in blocks if block is not self.blocks[0]])

    def release(self, blocks):
        self._check_own(blocks)
        super().release([block for block in blocks if block is not self.blocks[0]])


@sabotage(machines.PoolMachine, "P1", "P2", "P15")
class pool_revives_without_leaving_the_queue(kvcore.BlockPool):
    def hold(self, blocks, kept=()):
        free = [block for block in dict.fromkeys(blocks) if block.ref_count == 0]
        super().hold(blocks)
        for block in free:
            self.idle_blocks.queue.push_back(block)


@sabotage(machines.PoolMachine, "P6", "P7", rows=(52,))
class pool_forgets_what_it_revives(kvcore.BlockPool):
    def hold(self, blocks, kept=()):
        free = [block for block in dict.fromkeys(blocks) if block.ref_count == 0]
        super().hold(blocks)
        for block in free:
            self.trees[block.group].detach(block)


@sabotage(machines.PoolMachine, "P6", "P7", "P11", rows=(85,))
class pool_forgets_all_copies_with_the_first(kvcore.BlockPool):
    def take(self, num_blocks):
        nodes = [block.node for block in self.free_blocks()][:num_blocks]
        taken = super().take(num_blocks)
        for node in nodes:
            while node is not None and node.first_copy is not None:
                self.trees[0].detach(node.first_copy)
        return taken


@sabotage(machines.PoolMachine, "P3", "P6", "P11", rows=(8,))
class pool_publishes_a_block_again(kvcore.BlockPool):
    def publish(self, blocks, namespace_key, parent, contents, group=0):
        old = [(block, block.node) for block in blocks]
        for block, _ in old:
            block.node = None
        try:
            super().publish(blocks, namespace_key, parent, contents, group)
        except kvcore.KVCoreError:
            for block, node in old:
                block.node = node
            raise


class NoTree(ContentTree):
    def detach(self, block):
        pass


@sabotage(machines.PoolMachine, "P6", "P7", "P11", rows=(23, 24))
class pool_hands_out_blocks_with_their_content(kvcore.BlockPool):
    def take(self, num_blocks):
        trees, self.trees = self.trees, (NoTree(1),)
        try:
            return super().take(num_blocks)
        finally:
            self.trees = trees
