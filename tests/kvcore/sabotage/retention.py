"""Retention, broken."""

import kvcore
from kvcore.eviction.idle_blocks import IdleBlocks
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import changed, in_manager, sabotage


class DeafShelf(IdleBlocks):
    def merged_terms(self, block, terms):
        return ()


class ClingingShelf(IdleBlocks):
    def expire(self, now):
        pass


class ForgetfulShelf(IdleBlocks):
    """Remembers the strongest term alone, so what is below it may outlive its prefix."""

    def merged_terms(self, block, terms):
        return super().merged_terms(block, terms)[:1]


class LostShelf(IdleBlocks):
    """Assumes that every free block is in the queue of blocks without retention."""

    def remove(self, block):
        self.queue.remove(block)


class MiscountingShelf(IdleBlocks):
    def remove(self, block):
        before = self.num_shelved
        super().remove(block)
        self.num_shelved = before


def with_shelf(shelf_class):
    def change(manager):
        manager.pool.idle_blocks = shelf_class()

    return change


for shelf, name, properties, rows in (
    (DeafShelf, "retention_is_ignored", ("P15",), ()),
    (ClingingShelf, "retention_never_ends", ("P15",), ()),
    (ForgetfulShelf, "retention_forgets_the_weaker_wish", ("P15",), ()),
    (LostShelf, "retention_takes_blocks_from_the_other_queue", ("P1", "P3", "P13", "P15"), (6,)),
    (MiscountingShelf, "retention_loses_count_of_its_shelf", ("P1", "P13", "P15"), (25,)),
):
    changed(name, with_shelf(shelf), *properties, rows=rows)


@in_manager("P15")
class retention_keeps_a_range_without_its_prefix(kvcore.BlockPool):
    def keep(self, block, terms):
        if block.node.parent.parent is not None:
            super().keep(block, terms)

    def revive(self, blocks, kept=()):
        super().revive(blocks, [term for term in kept if term[0].node.parent.parent is not None])


@sabotage(machines.ManagerMachine, "P15")
class retention_starts_anew_with_a_fork(kvcore.KVCacheManager):
    def fork(self, seq):
        child, orders = super().fork(seq)
        child.opened_at = self.pool.step
        return child, orders
