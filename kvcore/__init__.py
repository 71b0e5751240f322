"""kvcore: a paged KV-cache allocator with prefix caching for LLM inference.

It decides which block of a KV cache holds which tokens of which sequence, and which sequences
share a block. It needs the standard library and xxhash, and imports no tensor library.
"""

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Final, Literal

from kvcore.block import NULL_BLOCK, Block, BlockId, Node
from kvcore.content_tree import ContentTree
from kvcore.errors import (
    BlockStateError,
    DoubleFreeError,
    ForeignBlockError,
    ForeignSequenceError,
    InvalidArgumentError,
    InvariantError,
    KVCoreError,
    MisuseError,
    NotExpectedError,
    NotReservedError,
    OutOfBlocksError,
    SequenceTooLongError,
    StaleSequenceError,
    UnknownTokensError,
)
from kvcore.events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventLog,
    EventsLost,
    Snapshot,
    fold,
)
from kvcore.eviction.free_queue import FreeQueue
from kvcore.eviction.retention import Retention
from kvcore.identity.block_hash import (
    BlockHash,
    HashAlgorithm,
    HashChain,
    block_hashes,
    digest,
    encode_block,
)
from kvcore.identity.multimodal import MultimodalItem
from kvcore.identity.namespace import (
    DEFAULT_NAMESPACE,
    Namespace,
    decode_namespace,
    encode_namespace,
)
from kvcore.identity.tokens import Tokens, pack
from kvcore.lease import Lease, LeaseBook, Load
from kvcore.manager import KVCacheManager
from kvcore.pool import BlockPool
from kvcore.reports import CopyOrder, Growth, Plan, ResetReport, Stats
from kvcore.sequence import KVSequence
from kvcore.tables.block_table import BlockTable
from kvcore.tables.groups import (
    ChunkedLocal,
    FullAttention,
    LayerGroup,
    RecurrentState,
    SlidingWindow,
)
from kvcore.tables.slots import Slot, slot_of, slots_of
from kvcore.tables.state_table import StateTable
from kvcore.verbs.peaks import peak_blocks
from kvcore.verbs.write import StepTables, write_states

if TYPE_CHECKING:
    from kvcore.eviction.lifetimes import Histogram, LifetimeRecorder, LifetimeStats
    from kvcore.inspect.invariants import PROPERTIES, check
    from kvcore.inspect.pool_map import CACHED, EMPTY, HELD, BlockReport, describe_block, pool_map

__version__ = "0.2.0"

build: Final[Literal["compiled", "python"]] = (
    "python" if isinstance(KVCacheManager.open, FunctionType) else "compiled"
)
"""The kind of this installation: compiled by mypyc, or plain Python, several times slower."""

_WHERE = {  # the modules of names that are imported on first use: serving does not need them
    **dict.fromkeys(["Histogram", "LifetimeRecorder", "LifetimeStats"], "eviction.lifetimes"),
    **dict.fromkeys(["PROPERTIES", "check"], "inspect.invariants"),
    **dict.fromkeys(["CACHED", "EMPTY", "HELD", "BlockReport"], "inspect.pool_map"),
    **dict.fromkeys(["describe_block", "pool_map"], "inspect.pool_map"),
}


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name not in _WHERE:
        raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"kvcore.{_WHERE[name]}"), name)
    return value


__all__ = [
    "CACHED",
    "DEFAULT_NAMESPACE",
    "EMPTY",
    "HELD",
    "NULL_BLOCK",
    "PROPERTIES",
    "AllCleared",
    "Block",
    "BlockHash",
    "BlockId",
    "BlockPool",
    "BlockReport",
    "BlockStateError",
    "BlockTable",
    "BlocksRemoved",
    "BlocksStored",
    "ChunkedLocal",
    "ContentTree",
    "CopyOrder",
    "DoubleFreeError",
    "Event",
    "EventLog",
    "EventsLost",
    "ForeignBlockError",
    "ForeignSequenceError",
    "FreeQueue",
    "FullAttention",
    "Growth",
    "HashAlgorithm",
    "HashChain",
    "Histogram",
    "InvalidArgumentError",
    "InvariantError",
    "KVCacheManager",
    "KVCoreError",
    "KVSequence",
    "LayerGroup",
    "Lease",
    "LeaseBook",
    "LifetimeRecorder",
    "LifetimeStats",
    "Load",
    "MisuseError",
    "MultimodalItem",
    "Namespace",
    "Node",
    "NotExpectedError",
    "NotReservedError",
    "OutOfBlocksError",
    "Plan",
    "RecurrentState",
    "ResetReport",
    "Retention",
    "SequenceTooLongError",
    "SlidingWindow",
    "Slot",
    "Snapshot",
    "StaleSequenceError",
    "StateTable",
    "Stats",
    "StepTables",
    "Tokens",
    "UnknownTokensError",
    "block_hashes",
    "build",
    "check",
    "decode_namespace",
    "describe_block",
    "digest",
    "encode_block",
    "encode_namespace",
    "fold",
    "pack",
    "peak_blocks",
    "pool_map",
    "slot_of",
    "slots_of",
    "write_states",
]
