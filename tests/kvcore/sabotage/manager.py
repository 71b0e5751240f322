"""The manager's handles, tables and cuts, broken."""

from array import array

import kvcore
from kvcore.identity.multimodal import cut_items
from kvcore.tables.slots import slot_of, slots_of
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import patched, sabotage


def keep_the_cut_block(manager, seq, num_tokens):
    """Cut a sequence and go on writing in the block that the cut goes through."""
    for table in seq.tables:
        keep = -(-num_tokens // table.block_size)
        manager.pool.release(table.beyond(keep)[::-1])
        table.cut(keep)
    seq.num_unknown_tokens = max(0, num_tokens - len(seq.packed))
    seq.num_reserved_tokens = seq.next_boundary = seq.fast_decode_limit = 0
    del seq.packed[num_tokens:]
    seq.items = cut_items(seq.items, num_tokens)
    computed = min(seq.num_computed_tokens, num_tokens)
    manager.pool.num_computed_tokens -= seq.num_computed_tokens - computed
    seq.num_computed_tokens = computed
    seq.num_cached_tokens = min(seq.num_cached_tokens, num_tokens)


@sabotage(machines.ManagerMachine, "P7", "P10", "P9", "P6", "P16", rows=(27,))
class manager_cuts_tokens_and_keeps_their_identity(kvcore.KVCacheManager):
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


@sabotage(machines.ManagerMachine, "P10", rows=(27,))
class manager_names_blocks_by_tokens_long_gone(kvcore.KVCacheManager):
    def truncate(self, seq, num_tokens):
        chain, seq.chain = seq.chain, None
        super().truncate(seq, num_tokens)
        seq.chain = chain


@sabotage(machines.ManagerMachine, "P15", "P16", "P10", "P9", "P7", rows=(65,))
class manager_cuts_off_the_first_blocks(kvcore.KVCacheManager):
    def truncate(self, seq, num_tokens):
        for table in seq.tables:
            beyond = len(table.blocks) - -(-num_tokens // table.block_size)
            if seq.is_open and 0 < beyond < len(table.blocks):
                table.blocks = table.blocks[beyond:] + table.blocks[:beyond]
                table._ids = None
        super().truncate(seq, num_tokens)


@sabotage(machines.ManagerMachine, "P16", rows=(62,))
class manager_grants_a_block_and_does_not_say_so(kvcore.KVCacheManager):
    def reserve(self, seq, num_tokens):
        (new,) = super().reserve(seq, num_tokens)
        return (new[1:] if num_tokens == 1 else new,)


@sabotage(machines.ManagerMachine, "P3", rows=(51,))
class manager_accepts_a_stale_handle(kvcore.KVCacheManager):
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


@sabotage(machines.ManagerMachine, "P2", rows=(1,))
class manager_counts_what_a_fork_shares_twice(kvcore.KVCacheManager):
    def fork(self, seq):
        child, orders = super().fork(seq)
        full = child.num_computed_tokens // self.block_size
        self.pool.hold(child.tables[0].blocks[:full])
        return child, orders


@sabotage(machines.ManagerMachine, "P2", "P18", "P1", "P3", rows=(83,))
class manager_frees_duplicates_and_goes_on_naming_them(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        before = seq.tables[0].num_published
        super().commit(seq, num_tokens)
        table = seq.tables[0]
        new = table.blocks[before : table.num_published]
        self.pool.release([block for block in new if block.node.first_copy is not block])


@sabotage(machines.ManagerMachine, "P13", "P16", "P15", rows=(83,))
class manager_swaps_duplicates_and_does_not_say_so(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        before = seq.tables[0].num_published
        super().commit(seq, num_tokens)
        table = seq.tables[0]
        for place in range(before, table.num_published):
            mine, first = table.blocks[place], table.blocks[place].node.first_copy
            if first is not mine:
                self.pool.hold([first])
                self.pool.release([mine])
                table.blocks[place], table.block_ids[place] = first, first.block_id


@sabotage(machines.ManagerMachine, "P22", "P6", "P9", "P10", rows=(92,))
class manager_publishes_old_content_after_a_reset(kvcore.KVCacheManager):
    def reset(self, *, canonical_order=False):
        keys = {number: seq.namespace_key for number, seq in self.sequences.items()}
        report = super().reset(canonical_order=canonical_order)
        for number, key in keys.items():
            self.sequences[number].namespace_key = key
        return report


@sabotage(machines.ManagerMachine, "P22", rows=(92,))
class manager_says_reset_and_does_nothing(kvcore.KVCacheManager):
    def reset(self, *, canonical_order=False):
        return kvcore.ResetReport(0, 0, 0)


@sabotage(machines.ManagerMachine, "P15", rows=(93,))
class manager_keeps_a_scrambled_order_at_a_reset(kvcore.KVCacheManager):
    def reset(self, *, canonical_order=False):
        return super().reset()


@sabotage(machines.ManagerMachine, "P6", "P9", "P10", "P15", "P24", rows=(94,))
class manager_resets_itself_when_an_epoch_is_new(kvcore.KVCacheManager):
    epoch = 0

    def open(self, tokens, *, namespace=kvcore.DEFAULT_NAMESPACE, **options):
        if namespace is not None and namespace.weight_epoch > self.epoch:
            self.epoch = namespace.weight_epoch
            self.reset()
        return super().open(tokens, namespace=namespace, **options)


@sabotage(machines.ManagerMachine, "P24", rows=(90,))
class manager_counts_what_was_preempted_as_hits(kvcore.KVCacheManager):
    def open(self, tokens, *, resumed=False, **options):
        return super().open(tokens, **options)


@sabotage(machines.ManagerMachine, "P13", "P24")
class manager_counts_what_the_closed_have_computed(kvcore.KVCacheManager):
    def close(self, seq):
        super().close(seq)
        self.pool.num_computed_tokens += seq.num_computed_tokens


@sabotage(machines.ManagerMachine, "P13", "P24")
class manager_counts_one_token_of_whoever_decodes(kvcore.KVCacheManager):
    def decode_step(self, seqs, tokens):
        before = self.pool.num_computed_tokens
        growths = super().decode_step(seqs, tokens)
        self.pool.num_computed_tokens = before + len(seqs)
        return growths


@sabotage(machines.ManagerMachine, "P6", "P10", "P24")
class manager_keeps_from_others_what_was_not_looked_up(kvcore.KVCacheManager):
    def open(self, tokens, *, namespace=kvcore.DEFAULT_NAMESPACE, skip_reading=False, **options):
        return super().open(tokens, namespace=None if skip_reading else namespace, **options)


@sabotage(machines.ManagerMachine, "P24")
class manager_hits_what_a_draft_model_computes_again(kvcore.KVCacheManager):
    def open(self, tokens, *, recompute=0, **options):
        return super().open(tokens, recompute=min(recompute, 1), **options)


@sabotage(machines.ManagerMachine, "P25", rows=(103,))
class manager_reads_what_is_shared_from_ref_counts(kvcore.KVCacheManager):
    def num_common_blocks(self, seqs, *, group=0):
        super().num_common_blocks(seqs, group=group)
        count = 0
        for block in seqs[0].tables[group].blocks:
            if block.ref_count < len(seqs):
                break
            count += 1
        return count


@patched(slot_of, "P23", rows=(63,), layouts=("window",))
def slots_wrap_around_in_a_window(block_table, position, block_size):
    return slot_of(block_table, position % (2 * block_size), block_size)


@patched(slots_of, "P23")
def slots_of_a_chunk_go_on_past_its_first_block(block_table, start, stop, block_size):
    slots = slots_of(block_table, start, stop, block_size)
    return array("q", range(slots[0], slots[0] + len(slots))) if slots else slots


@sabotage(machines.ManagerMachine, "P23")
class manager_writes_one_slot_for_each_prompt(kvcore.KVCacheManager):
    def write_step(self, seqs, block_tables, slot_mapping, *, counts=None, **options):
        ones = [1] * len(seqs) if counts is None else counts
        super().write_step(seqs, block_tables, slot_mapping, counts=ones, **options)
