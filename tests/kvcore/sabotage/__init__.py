"""Allocators with one bug each, every bug one that an engine has shipped, or might.

The rows beside them are those of the corpus of real bugs (docs/reference/corpus.md), the
properties those of docs/reference/properties.md: a machine that does not catch them proves nothing.
"""

from tests.kvcore.sabotage import (
    closing,
    events,
    groups,
    identity,
    leases,
    loads,
    managed_pool,
    manager,
    planning,
    pool,
    queue,
    retention,
    steps,
    unknown_tokens,
    visibility,
)
from tests.kvcore.sabotage.registry import SABOTAGES, Sabotage

PARTS = (
    closing,
    events,
    groups,
    identity,
    leases,
    loads,
    managed_pool,
    manager,
    planning,
    pool,
    queue,
    retention,
    steps,
    unknown_tokens,
    visibility,
)

__all__ = ["PARTS", "SABOTAGES", "Sabotage"]
