"""Tiers behind the prefix cache: host memory and disk that keep copies of KV by content.

A `TierManager` stores the blocks that the pool publishes and loads those that a prompt can use,
also after the pool has evicted them or the process has ended. It needs the standard library and
xxhash.
"""

from kvcore.tiers.disk import DiskTier
from kvcore.tiers.folder import Folder, Segments
from kvcore.tiers.host import HostTier
from kvcore.tiers.jobs import BlockMover, LoadJob, Part, StoreJob
from kvcore.tiers.record import Fault, Key, Meaning, key_of, meaning_of
from kvcore.tiers.tier import EvictionOrder, Tier, TierError, TierInUseError, TierStats
from kvcore.tiers.tier_manager import Found, TierManager

__all__ = [
    "BlockMover",
    "DiskTier",
    "EvictionOrder",
    "Fault",
    "Folder",
    "Found",
    "HostTier",
    "Key",
    "LoadJob",
    "Meaning",
    "Part",
    "Segments",
    "StoreJob",
    "Tier",
    "TierError",
    "TierInUseError",
    "TierManager",
    "TierStats",
    "key_of",
    "meaning_of",
]
