"""Leases and failed loads, broken."""

import kvcore
from kvcore import prefix
from kvcore.prefix import distrust_from
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import sabotage


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


def with_book(book_class):
    def make(num_blocks, block_size, **options):
        manager = kvcore.KVCacheManager(num_blocks, block_size, **options)
        manager.leases = book_class(manager.pool)
        return manager

    return make


for book, name in (
    (ForgetfulBook, "leases_are_a_flag"),  # vLLM #46240, #43226
    (CarelessBook, "leases_end_twice"),  # vLLM #46240
    (EndlessBook, "leases_never_expire"),  # vLLM #46283
):
    maker = with_book(book)
    maker.__name__ = name
    sabotage(machines.ManagerMachine, "P17", "P20", "P15", "P2", "P3")(maker)


@sabotage(machines.ManagerMachine, "P17", "P2", "P20")
class leases_hold_nothing(kvcore.KVCacheManager):  # vLLM PR #45357, PR #32255
    def lease(self, seq, kind="step", **options):
        lease = super().lease(seq, kind, **options)
        self.pool.release(lease.blocks)
        return lease


@sabotage(machines.ManagerMachine, "P7", "P9", "P14", "P16")
class loads_fail_for_one_sequence_only(kvcore.KVCacheManager):  # vLLM PR #19330
    def fail_load(self, seq, num_tokens):
        if not 0 <= num_tokens <= seq.num_computed_tokens:
            return super().fail_load(seq, num_tokens)
        return distrust_from(self.pool, seq, num_tokens, [seq])


@sabotage(machines.ManagerMachine, "P7", "P9", "P14")
class loads_fail_without_the_copies_of_forks(kvcore.KVCacheManager):
    def fail_load(self, seq, num_tokens):
        if not 0 <= num_tokens <= seq.num_computed_tokens:
            return super().fail_load(seq, num_tokens)
        doubtful = prefix._doubtful(seq, num_tokens)
        return prefix._take_from_all(self.pool, doubtful, list(self.sequences.values()))
