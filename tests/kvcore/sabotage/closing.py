"""Who lets go of what, and when, broken."""

import kvcore
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import in_manager, sabotage


@sabotage(machines.ManagerMachine, "P2", "P5", "P15", rows=(19,))
class manager_leaks_the_last_block_on_close(kvcore.KVCacheManager):
    def close(self, seq):
        self._check_open(seq)
        for table in seq.tables:
            del table.blocks[-1:]
        super().close(seq)


@sabotage(machines.ManagerMachine, "P2", "P5", rows=(20,))
class manager_closes_without_letting_go(kvcore.KVCacheManager):
    def close(self, seq):
        self._check_open(seq)
        for table in seq.tables:
            table.blocks.clear()
        super().close(seq)


@sabotage(machines.ManagerMachine, "P2", "P5", "P13", rows=(13,))
class manager_leaks_the_hits_of_what_ends_before_it_reserves(kvcore.KVCacheManager):
    def close(self, seq):
        self._check_open(seq)
        if len(seq.tables[0].blocks) * self.block_size == seq.num_cached_tokens:
            seq.tables[0].blocks.clear()
        super().close(seq)


@sabotage(machines.ManagerMachine, "P2", "P5", rows=(18,))
class manager_leaks_the_half_full_block_on_close(kvcore.KVCacheManager):
    def close(self, seq):
        self._check_open(seq)
        del seq.tables[0].blocks[seq.num_computed_tokens // self.block_size :]
        super().close(seq)


@sabotage(machines.ManagerMachine, "P3", "P2", "P1", rows=(7,))
class manager_lets_go_of_the_last_block_on_two_paths(kvcore.KVCacheManager):
    def truncate(self, seq, num_tokens):
        self._check_open(seq)
        table = seq.tables[0]
        if 0 <= num_tokens < seq.num_computed_tokens < len(table.blocks) * self.block_size:
            self.pool.release(table.blocks[-1:])
        super().truncate(seq, num_tokens)


@sabotage(machines.ManagerMachine, "P3", "P2", "P1", rows=(9,))
class manager_closes_in_two_parts_that_share_a_block(kvcore.KVCacheManager):
    def close(self, seq):
        self._check_open(seq)
        full, rest = divmod(seq.num_computed_tokens, self.block_size)
        if rest:
            self.pool.release([seq.tables[0].blocks[full]])
        super().close(seq)


@in_manager("P1", "P13", "P15", "P22", rows=(10,))
class manager_frees_what_is_held_at_a_reset(kvcore.BlockPool):
    def clear(self, *, canonical_order=False):
        forgotten = super().clear(canonical_order=canonical_order)
        for block in self.blocks[1:]:
            if block.ref_count:
                block.next_free = block
                self.empty_blocks.append(block)
        return forgotten
