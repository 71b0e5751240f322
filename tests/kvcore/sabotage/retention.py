"""Retention, broken."""

import kvcore
from kvcore.retention import FOREVER, RetentionShelf
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import in_manager, sabotage


def with_shelf(shelf_class):
    def make(num_blocks, block_size, **options):
        manager = kvcore.KVCacheManager(num_blocks, block_size, **options)
        manager.pool.shelf = shelf_class()
        return manager

    return make


class DeafShelf(RetentionShelf):
    def keep(self, block, wishes):
        pass


class ClingingShelf(RetentionShelf):
    def expire(self, now):
        return super().expire(now) if now == FOREVER else []


class ForgetfulShelf(RetentionShelf):
    """Remembers the strongest wish alone, so what is below it may outlive its prefix."""

    def keep(self, block, wishes):
        super().keep(block, wishes)
        if block.block_id in self.kept:
            self.kept[block.block_id] = self.kept[block.block_id][:1]


for shelf, name in (
    (DeafShelf, "retention_is_ignored"),
    (ClingingShelf, "retention_never_ends"),
    (ForgetfulShelf, "retention_forgets_the_weaker_wish"),
):
    maker = with_shelf(shelf)
    maker.__name__ = name
    sabotage(machines.ManagerMachine, "P15")(maker)


@in_manager("P15")
class retention_keeps_a_range_without_its_prefix(kvcore.BlockPool):
    def keep(self, block, wishes):
        if block.node.parent.parent is not None:
            super().keep(block, wishes)
