"""Loads of KV from outside, broken."""

import kvcore
from kvcore.identity.block_hash import block_contents
from kvcore.verbs import load as loading
from kvcore.verbs.rewind import tail_first
from tests.kvcore import machines
from tests.kvcore.sabotage.groups import WINDOWS
from tests.kvcore.sabotage.registry import patched, sabotage

BESIDE = ("full and window", "three", "chunked and full")


@sabotage(machines.ManagerMachine, "P30", "P13", layouts=WINDOWS)
class loads_keep_too_few_blocks_of_a_window(kvcore.KVCacheManager):
    def begin_load(self, seq, num_tokens, **options):
        lease = super().begin_load(seq, num_tokens, **options)
        load = lease.load
        for number, table in enumerate(seq.tables):
            if table.forgets and len(load.blocks[number]) > 1:
                gone = load.blocks[number].pop(0)
                firsts = list(load.first_blocks)
                firsts[number] += 1
                load.first_blocks = tuple(firsts)
                lease.blocks.remove(gone)
                self.pool.release([gone])
        return lease


@sabotage(machines.ManagerMachine, "P30", "P6", layouts=("full", *WINDOWS))
class loads_are_found_before_they_arrive(kvcore.KVCacheManager):
    def begin_load(self, seq, num_tokens, **options):
        lease = super().begin_load(seq, num_tokens, **options)
        load, own = lease.load, seq.num_computed_tokens // seq.tables[0].block_size
        if seq.namespace_key is not None and load.first_blocks[0] == own:
            size, above = seq.tables[0].block_size, None
            if own:
                above = seq.tables[0].blocks[own - 1]
            stop = num_tokens // size
            contents = block_contents(seq.packed, seq.items, own, stop, size)
            blocks = load.blocks[0][: stop - own]
            self.pool.publish(blocks, seq.namespace_key, above, contents)
        return lease


@patched(loading._fits, "P30", "P7", "P10", "P14", layouts=("full", *WINDOWS))
def loads_join_whatever_the_tokens_are_now(load):
    seq = load.seq
    if not seq.is_open or not seq.num_computed_tokens < load.num_tokens <= len(seq.packed):
        return False
    return all(
        load.first_blocks[number] <= table.first_loaded(seq.num_computed_tokens, load.num_tokens)
        for number, table in enumerate(seq.tables)
    )


@patched(loading._fits, "P30", "P14", "P16", "P18", "P9", layouts=("full", *WINDOWS))
def loads_join_after_a_gap(load):
    """The sequence was cut, or set back, to before what it had computed when the load began."""
    seq = load.seq
    is_ahead = seq.num_computed_tokens < load.num_tokens
    return seq.is_open and is_ahead and seq.packed[: load.num_tokens] == load.packed


@patched(loading._publish, "P10", "P15", "P24", "P6", layouts=BESIDE)
def loads_hang_a_window_below_what_it_does_not_follow(pool, load, number, entries, published):
    """Missing blocks are left out of the path."""
    seq = load.seq
    table = seq.tables[number]
    own, full = seq.num_computed_tokens // table.block_size, load.num_tokens // table.block_size
    first = max(own, load.first_blocks[number])
    contents = block_contents(seq.packed, seq.items, first, full, table.block_size)
    above = table.blocks[own - 1].node if own else None
    published += entries[first:full]
    pool.attach(entries[first:full], seq.namespace_key, above, contents, number)


@patched(loading._publish, "P9", "P10", "P24", "P6", layouts=("full", *BESIDE))
def loads_are_never_found(pool, load, number, entries, published):
    pass


@patched(loading._released, "P2", "P5", layouts=WINDOWS)
def loads_keep_what_is_out_of_sight(lease, load):
    seq = load.seq
    own = [seq.num_computed_tokens // table.block_size for table in seq.tables]
    late = [
        block
        for number, run in enumerate(load.blocks)
        for block in run[: max(0, own[number] - load.first_blocks[number])]
    ]
    beyond = [
        (max(own[number], table.num_null), table.block_size, table.beyond(own[number]))
        for number, table in enumerate(seq.tables)
    ]
    return [block for block in lease.blocks if block in late] + tail_first(beyond)


@sabotage(machines.ManagerMachine, "P30", "P2", "P5", "P20", layouts=("full", *WINDOWS))
class loads_leak_what_comes_too_late(kvcore.KVCacheManager):
    def commit_load(self, lease):
        load = lease.load
        if load is not None and lease.is_active and not load.seq.is_open:
            lease.is_active = False
            del self.leases.active[lease.lease_id]
            return False
        return super().commit_load(lease)


@sabotage(machines.ManagerMachine, "P13", layouts=("full", *WINDOWS))
class loads_are_planned_as_if_computed(kvcore.KVCacheManager):
    def plan(self, tokens, *, num_external=0, **options):
        return super().plan(tokens, **options)


@sabotage(machines.ManagerMachine, "P13", layouts=WINDOWS)
class loads_are_planned_with_room_for_all(kvcore.KVCacheManager):
    def num_missing_blocks(self, seq, num_tokens, *, num_external=0, **options):
        more = max(num_tokens, num_external - seq.num_computed_tokens)
        return super().num_missing_blocks(seq, more, **options)
