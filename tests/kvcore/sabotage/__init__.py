"""Allocators with one bug each, every bug one that an engine has shipped.

The numbers after the names are rows of the corpus of real bugs (properties of P1 to P26 beside
them): a machine that does not catch them proves nothing.
"""

from tests.kvcore.sabotage import (
    groups,
    identity,
    leases,
    managed_pool,
    manager,
    pool,
    queue,
    retention,
)
from tests.kvcore.sabotage.registry import SABOTAGES, Sabotage

PARTS = (groups, identity, leases, managed_pool, manager, pool, queue, retention)

__all__ = ["PARTS", "SABOTAGES", "Sabotage"]
