"""Leases and failed loads, broken."""

import kvcore
from kvcore.verbs import rewind
from kvcore.verbs.rewind import _invalid_prefix, _nodes_past, invalidate_from
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import changed, in_manager, patched, sabotage


class ForgetfulBook(kvcore.LeaseBook):
    """Counts one lease a block, as a flag would."""

    def begin(self, blocks, kind, owner, max_steps):
        leased = {b.block_id for lease in self.active.values() for b in lease.blocks}
        fresh = [block for block in blocks if block.block_id not in leased]
        return super().begin(fresh, kind, owner, max_steps)


class CarelessBook(kvcore.LeaseBook):
    """Ends a lease as often as it is told to."""

    def end(self, lease_id):
        lease = self.active.get(lease_id)
        ended = super().end(lease_id)
        if lease is not None:
            lease.is_active = True
            self.active[lease_id] = lease
            lease.blocks = [block for block in lease.blocks if block.ref_count]
        return ended


class EndlessBook(kvcore.LeaseBook):
    """Knows no deadline."""

    def due(self, step):
        return ()


class HastyBook(kvcore.LeaseBook):
    """Ends every lease with the next step, in flight or not."""

    def due(self, step):
        return tuple(self.active.values())


class KeepingBook(kvcore.LeaseBook):
    """Ends leases and keeps what they held."""

    def end(self, lease_id):
        blocks = self.active[lease_id].blocks if lease_id in self.active else []
        self._pool.hold(blocks)
        return super().end(lease_id)


class MatchingBook(kvcore.LeaseBook):
    """Holds the block that a look-up finds, and lets go of the one that the sequence has."""

    def begin(self, blocks, kind, owner, max_steps):
        lease = super().begin(blocks, kind, owner, max_steps)
        self._pool.release(blocks)
        self._pool.hold([b if b.node is None else b.node.first_copy for b in blocks])
        return lease


class ShuffledBook(kvcore.LeaseBook):
    """Frees in the order of the ids what it held back."""

    def begin(self, blocks, kind, owner, max_steps):
        return super().begin(sorted(blocks, key=lambda b: b.block_id), kind, owner, max_steps)


class SecretiveBook(kvcore.LeaseBook):
    """Does not count what will be free when the leases end."""

    def num_deferred_blocks(self):
        return 0


class CountingBook(kvcore.LeaseBook):
    """Counts what an ended lease held among what leases alone hold."""

    def _uncount(self, blocks):
        deferred = self._pool.num_deferred_blocks
        super()._uncount(blocks)
        self._pool.num_deferred_blocks = deferred


def with_book(book_class):
    def change(manager):
        manager.leases = book_class(manager.pool)

    return change


for book, name, properties, rows in (
    (ForgetfulBook, "leases_are_a_flag", ("P17", "P20", "P15", "P2", "P9"), (79,)),
    (CarelessBook, "leases_end_twice", ("P17", "P2", "P3"), (79,)),
    (EndlessBook, "leases_never_expire", ("P17",), (12,)),
    (HastyBook, "leases_end_with_the_next_step", ("P17",), (81,)),
    (KeepingBook, "leases_end_and_keep_what_they_held", ("P2", "P5"), (15,)),
    (MatchingBook, "leases_hold_the_block_that_a_look_up_finds", ("P2", "P17", "P3"), (5,)),
    (ShuffledBook, "leases_free_in_another_order", ("P15",), (89,)),
    (CountingBook, "leases_count_what_an_ended_one_held", ("P20",), ()),
    (SecretiveBook, "leases_hide_what_will_be_free", ("P20",), (84,)),
):
    changed(name, with_book(book), *properties, rows=rows)


class StaleCount(kvcore.BlockPool):
    """Leaves the number of blocks that leases alone hold as it was."""

    def unchanged(self, call, *args):
        deferred = self.num_deferred_blocks
        call(*args)
        self.num_deferred_blocks = deferred


@in_manager("P20")
class leases_miss_what_a_close_leaves_to_them(StaleCount):
    def give_back(self, blocks):
        self.unchanged(super().give_back, blocks)


@in_manager("P20")
class leases_count_what_a_look_up_found(StaleCount):
    def revive(self, blocks, kept=()):
        self.unchanged(super().revive, blocks, kept)


@sabotage(machines.ManagerMachine, "P17", "P2", "P20", rows=(10, 76))
class leases_hold_nothing(kvcore.KVCacheManager):
    def lease(self, seq, kind="step", **options):
        lease = super().lease(seq, kind, **options)
        self.pool.release(lease.blocks)
        return lease


@sabotage(machines.ManagerMachine, "P17", "P20", "P15", rows=(78,))
class leases_end_with_their_sequence(kvcore.KVCacheManager):
    def close(self, seq):
        self._check_open(seq)
        owned = set(seq.block_table)
        super().close(seq)
        for lease in list(self.leases.active.values()):
            if any(block.block_id in owned for block in lease.blocks):
                lease.end()


@sabotage(machines.ManagerMachine, "P17", "P20", "P15", "P22", rows=(82,))
class leases_end_with_a_reset(kvcore.KVCacheManager):
    def reset(self, *, canonical_order=False):
        for lease in list(self.leases.active.values()):
            lease.end()
        return super().reset(canonical_order=canonical_order)


@sabotage(machines.ManagerMachine, "P7", "P9", "P14", "P16", rows=(71,))
class loads_fail_for_one_sequence_only(kvcore.KVCacheManager):
    def fail_load(self, seq, num_tokens):
        if not 0 <= num_tokens <= seq.num_computed_tokens:
            return super().fail_load(seq, num_tokens)
        return invalidate_from(self.pool, seq, num_tokens, [seq])


@patched(_nodes_past, "P7", "P9", rows=(71,))
def loads_fail_where_whole_blocks_agree(pool, prefix, number):
    size = pool.block_sizes[number]
    start = prefix.start // size * size
    whole = prefix.packed[start : start + size].tobytes()
    found = _nodes_past(pool, prefix, number)
    return [node for node in found if node.tokens.startswith(whole) and len(whole) == 4 * size]


@sabotage(machines.ManagerMachine, "P7", "P9", "P14")
class loads_fail_without_the_copies_of_forks(kvcore.KVCacheManager):
    def fail_load(self, seq, num_tokens):
        if not 0 <= num_tokens <= seq.num_computed_tokens:
            return super().fail_load(seq, num_tokens)
        prefixes = []
        valid_up_to = {}
        rewind._computed_from(seq, num_tokens, valid_up_to, prefixes)
        rewind._add_invalid(self.pool, valid_up_to, prefixes, [])
        return rewind._take_from_all(self.pool, valid_up_to, list(self.sequences.values()), [])


@sabotage(machines.ManagerMachine, "P7", "P9")
class transfers_fail_in_their_own_blocks_alone(kvcore.KVCacheManager):
    """What was computed on top of them, or copied from them, is still found."""

    def fail_transfer(self, lease):
        for block in lease.blocks if lease.is_active else ():
            self.pool.forget([block])
        lease.end()
        return ()


@sabotage(machines.ManagerMachine, "P9", "P15", "P17", "P20")
class transfers_fail_and_hold_their_blocks(kvcore.KVCacheManager):
    def fail_transfer(self, lease):
        return self.fail_blocks([block.block_id for block in lease.blocks])


@patched(_invalid_prefix, "P7", "P9", "P24")
def transfers_fail_after_the_block_that_was_bad(node, size):
    """One block too far: what others computed of the bad one itself is trusted."""
    prefix = _invalid_prefix(node, size)
    prefix.start += size - 1
    return prefix
