"""What can be hit, and from when on, broken."""

import kvcore
from kvcore.verbs.step import commit
from tests.kvcore import machines
from tests.kvcore.sabotage.groups import WINDOWS
from tests.kvcore.sabotage.registry import sabotage


def publish_until(manager, seq, num_tokens):
    """Let others hit the first tokens of a sequence, computed or not."""
    computed = seq.num_computed_tokens
    room = len(seq.tables[0].blocks) * manager.block_size
    if seq.namespace_key is not None:
        count = min(num_tokens, len(seq.packed), room) - seq.num_computed_tokens
        commit(manager.pool, seq, count, manager.max_model_len)
        manager.pool.num_computed_tokens -= seq.num_computed_tokens - computed
        seq.num_computed_tokens = computed


@sabotage(machines.ManagerMachine, "P9", "P6", "P7", rows=(67,))
class manager_publishes_what_is_only_reserved(kvcore.KVCacheManager):
    def reserve(self, seq, num_tokens):
        new = super().reserve(seq, num_tokens)
        publish_until(self, seq, seq.num_computed_tokens + num_tokens)
        return new


@sabotage(machines.ManagerMachine, "P9", "P6", "P7", rows=(68,))
class manager_publishes_what_a_step_only_schedules(kvcore.KVCacheManager):
    def reserve_step(self, seqs, num_tokens):
        grown = super().reserve_step(seqs, num_tokens)
        for seq, count in zip(seqs, num_tokens, strict=True):
            publish_until(self, seq, seq.num_computed_tokens + count)
        return grown


@sabotage(machines.ManagerMachine, "P9", "P6", "P7", rows=(70,))
class manager_publishes_by_the_length_of_the_prompt(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        super().commit(seq, num_tokens)
        publish_until(self, seq, seq.num_tokens)


@sabotage(machines.ManagerMachine, "P9", "P6", "P7", rows=(69, 72))
class manager_publishes_a_half_full_block(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        super().commit(seq, num_tokens)
        full = -(-seq.num_computed_tokens // self.block_size) * self.block_size
        if full <= seq.num_tokens:
            publish_until(self, seq, full)


@sabotage(machines.ManagerMachine, "P3", "P7", "P14", "P9", "P16", rows=(73,))
class manager_commits_the_rejected_drafts_too(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        super().commit(seq, num_tokens)
        room = len(seq.tables[0].blocks) * self.block_size
        if num_tokens:
            super().commit(seq, min(seq.num_tokens, room) - seq.num_computed_tokens)


@sabotage(machines.ManagerMachine, "P6", "P9", "P10", "P15", "P24", rows=(30,))
class manager_publishes_with_caching_off(kvcore.KVCacheManager):
    def open(self, tokens, **options):
        self.enable_caching = True
        return super().open(tokens, **options)


@sabotage(machines.ManagerMachine, "P9", "P14", rows=(97,), layouts=WINDOWS)
class window_publishes_nothing_after_its_first_null(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        key = seq.namespace_key
        if seq.is_open and any(table.num_null for table in seq.tables):
            seq.namespace_key = None
        try:
            super().commit(seq, num_tokens)
        finally:
            seq.namespace_key = key
