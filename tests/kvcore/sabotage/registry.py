"""How a planted bug is registered: what it breaks, who must notice, on which groups it shows."""

from dataclasses import dataclass
from typing import Any

import kvcore
from tests.kvcore import machines

SABOTAGES = {}


@dataclass(frozen=True)
class Sabotage:
    """One planted bug: what it breaks, who must notice, and on which layer groups it shows."""

    make: Any
    machine: type
    properties: frozenset
    layouts: tuple


def sabotage(machine, *properties, layouts=("full",)):
    """Register a queue, pool or manager class (or factory) as a planted bug."""

    def register(make):
        SABOTAGES[make.__name__] = Sabotage(make, machine, frozenset(properties), layouts)
        return make

    return register


def managed(pool_class):
    """Return a factory of managers over a sabotaged pool."""

    def make(num_blocks, block_size, **options):
        manager = kvcore.KVCacheManager(num_blocks, block_size, **options)
        sizes = [group.block_size for group in manager.groups]
        manager.pool = pool_class(num_blocks, *sizes, log=manager.events)
        manager.leases = kvcore.LeaseBook(manager.pool)
        return manager

    make.__name__ = pool_class.__name__
    return make


def in_manager(*properties, layouts=("full",)):
    """Register a pool class as a planted bug that the manager's machine must notice."""

    def register(pool_class):
        sabotage(machines.ManagerMachine, *properties, layouts=layouts)(managed(pool_class))
        return pool_class

    return register
