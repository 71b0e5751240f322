"""Tiers behind the prefix cache: host memory, disk and peers that have copies of KV by content.

A `TierManager` stores the blocks that the pool publishes and loads those that a prompt can use,
also after the pool has evicted them or the process has ended; a `PeerServer` serves them to the
`PeerTier` of another process. It needs the standard library and xxhash.
"""

from kvcore.tiers.disk import DiskTier
from kvcore.tiers.folder import Folder, Segments
from kvcore.tiers.host import HostTier
from kvcore.tiers.host_blocks import BlockMover, HostMover, OneByOne, Wait
from kvcore.tiers.jobs import LoadJob, Part, StoreJob
from kvcore.tiers.link import Channel, LinkError, is_loopback, parse_address
from kvcore.tiers.memory import MemoryLink, MemoryReader, Nixl, SharedMemory
from kvcore.tiers.peer import PeerTier
from kvcore.tiers.peer_server import PeerServer, PeerServerStats, PeerSession
from kvcore.tiers.record import Fault, Key, Meaning, group_of, is_private, key_of, meaning_of
from kvcore.tiers.tier import (
    Changes,
    EvictionOrder,
    KeepingTier,
    Tier,
    TierError,
    TierInUseError,
    TierStats,
)
from kvcore.tiers.tier_manager import Found, TierManager

__all__ = [
    "BlockMover",
    "Changes",
    "Channel",
    "DiskTier",
    "EvictionOrder",
    "Fault",
    "Folder",
    "Found",
    "HostMover",
    "HostTier",
    "KeepingTier",
    "Key",
    "LinkError",
    "LoadJob",
    "Meaning",
    "MemoryLink",
    "MemoryReader",
    "Nixl",
    "OneByOne",
    "Part",
    "PeerServer",
    "PeerServerStats",
    "PeerSession",
    "PeerTier",
    "Segments",
    "SharedMemory",
    "StoreJob",
    "Tier",
    "TierError",
    "TierInUseError",
    "TierManager",
    "TierStats",
    "Wait",
    "group_of",
    "is_loopback",
    "is_private",
    "key_of",
    "meaning_of",
    "parse_address",
]
