"""Layer groups, broken."""

import kvcore
from kvcore.groups import first_kept_block
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import in_manager, sabotage

WINDOWS = ("window", "full and window", "three")


@sabotage(machines.ManagerMachine, "P19", "P7", layouts=WINDOWS)
class window_is_released_on_scheduled_tokens(kvcore.KVCacheManager):  # vLLM PR #47728
    def reserve(self, seq, num_tokens):
        new = super().reserve(seq, num_tokens)
        for table in seq.tables:
            scheduled = seq.num_computed_tokens + num_tokens
            kept = first_kept_block(table.group, table.block_size, scheduled)
            unseen = min(kept, table.num_published)
            self.pool.release(table.before(unseen))
            table.forget(self.pool.blocks[0], unseen)
        return new


@sabotage(machines.ManagerMachine, "P19", "P15", "P16", layouts=WINDOWS)
class window_is_one_block_short(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        super().commit(seq, num_tokens)
        for table in seq.tables:
            if num_tokens and len(table.blocks) > table.num_null + 2:
                self.pool.release(table.before(table.num_null + 1))
                table.forget(self.pool.blocks[0], table.num_null + 1)


@in_manager("P7", "P24", "P18", "P1", "P2", layouts=("full and window",))
class window_hits_the_blocks_of_another_group(kvcore.BlockPool):  # vLLM #55600
    def path(self, namespace_key, packed, max_blocks, group, items=None):
        return super().path(namespace_key, packed, max_blocks, 0, items)


@in_manager("P24", layouts=("full and window", "three", "chunked and full"))
class groups_never_agree_on_a_prefix(kvcore.BlockPool):  # vLLM #51771: a silent 0 %
    def path(self, namespace_key, packed, max_blocks, group, items=None):
        return super().path(namespace_key, packed, max_blocks - group, group, items)
