"""The manager itself, broken."""

from dataclasses import replace

import kvcore
from kvcore.items import cut_items
from kvcore.prefix import advance_to
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import sabotage


@sabotage(machines.ManagerMachine, "P2", "P5", "P15")
class manager_leaks_the_last_block_on_close(kvcore.KVCacheManager):  # TRT-LLM PR #15018
    def close(self, seq):
        self._check_open(seq)
        for table in seq.tables:
            del table.blocks[-1:]
        super().close(seq)


@sabotage(machines.ManagerMachine, "P9", "P6", "P7")
class manager_publishes_what_is_only_reserved(kvcore.KVCacheManager):  # TGI PR #2489, vLLM R10
    def reserve(self, seq, num_tokens):
        new = super().reserve(seq, num_tokens)
        if seq.namespace_key is not None:
            computed = seq.num_computed_tokens
            room = len(seq.tables[0].blocks) * self.block_size
            seq.num_computed_tokens = min(len(seq.packed), room)
            advance_to(self.pool, seq, seq.num_computed_tokens)
            seq.num_computed_tokens = computed
        return new


def keep_the_cut_block(manager, seq, num_tokens):
    """Cut a sequence and go on writing in the block that the cut goes through."""
    for table in seq.tables:
        keep = -(-num_tokens // table.block_size)
        manager.pool.release(table.beyond(keep)[::-1])
        table.cut(keep)
    del seq.packed[num_tokens:]
    seq.items = cut_items(seq.items, num_tokens)
    seq.num_computed_tokens = min(seq.num_computed_tokens, num_tokens)
    seq.num_cached_tokens = min(seq.num_cached_tokens, num_tokens)


@sabotage(machines.ManagerMachine, "P7", "P10", "P9", "P6", "P16")
class manager_cuts_tokens_and_keeps_their_identity(kvcore.KVCacheManager):  # vLLM #49377
    def truncate(self, seq, num_tokens):
        if seq.is_open and 0 < num_tokens <= seq.num_tokens:
            keep_the_cut_block(self, seq, num_tokens)
        else:
            super().truncate(seq, num_tokens)


@sabotage(machines.ManagerMachine, "P7", "P14", "P16")
class manager_overwrites_what_a_fork_shares(kvcore.KVCacheManager):
    def truncate(self, seq, num_tokens):
        if seq.is_open and seq.namespace_key is None and 0 < num_tokens <= seq.num_tokens:
            keep_the_cut_block(self, seq, num_tokens)
        else:
            super().truncate(seq, num_tokens)


@sabotage(machines.ManagerMachine, "P10")
class manager_names_blocks_by_tokens_long_gone(kvcore.KVCacheManager):  # vLLM #49377
    def truncate(self, seq, num_tokens):
        chain, seq.chain = seq.chain, None
        super().truncate(seq, num_tokens)
        seq.chain = chain


@sabotage(machines.ManagerMachine, "P13", "P4")
class manager_counts_hits_as_free_room(kvcore.KVCacheManager):  # vLLM PR #6849
    def plan(self, tokens, **options):
        return replace(super().plan(tokens, **options), num_revived_blocks=0)


@sabotage(machines.ManagerMachine, "P13")
class manager_says_there_is_room_for_one_more(kvcore.KVCacheManager):  # nano-vllm PR #66
    def can_reserve(self, seq, num_tokens):
        missing = seq.tables[0].num_missing(self._room_wanted(seq, num_tokens))
        return missing <= self.pool.num_free_blocks + 1


@sabotage(machines.ManagerMachine, "P16")
class manager_grants_a_block_and_does_not_say_so(kvcore.KVCacheManager):  # vllm-rbln PR #662
    def reserve(self, seq, num_tokens):
        (new,) = super().reserve(seq, num_tokens)
        return (new[1:] if num_tokens == 1 else new,)


@sabotage(machines.ManagerMachine, "P3")
class manager_accepts_a_stale_handle(kvcore.KVCacheManager):  # vLLM #37076, R4
    def _check_open(self, seq):
        if seq.owner is self and not seq.is_open:
            return
        super()._check_open(seq)

    def close(self, seq):
        if seq.is_open:
            super().close(seq)


@sabotage(machines.ManagerMachine, "P18", "P7", "P15", "P16")
class manager_forks_a_half_full_block_without_a_copy(kvcore.KVCacheManager):
    def fork(self, seq):
        child, orders = super().fork(seq)
        for order in orders:
            child.tables[0].block_ids[-1] = order.src
        return child, ()


@sabotage(machines.ManagerMachine, "P22", "P6", "P9")
class manager_publishes_old_content_after_a_reset(kvcore.KVCacheManager):  # SkyRL PR #1824
    def reset(self, *, canonical_order=False):
        keys = {number: seq.namespace_key for number, seq in self.sequences.items()}
        report = super().reset(canonical_order=canonical_order)
        for number, key in keys.items():
            self.sequences[number].namespace_key = key
        return report


@sabotage(machines.ManagerMachine, "P22")
class manager_says_reset_and_does_nothing(kvcore.KVCacheManager):  # vLLM #9744
    def reset(self, *, canonical_order=False):
        return kvcore.ResetReport(0, 0, 0)
