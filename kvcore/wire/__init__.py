"""kvcore.wire: a cache's events over ZeroMQ, in vLLM's format, and an index of who holds what.

A `Publisher` tells the network what a manager's cache can be hit for; routers that follow vLLM
follow it as they are. A `Subscriber` follows any number of publishers, ours or engines' own, and
answers who has the longest prefix of a prompt. docs/how-to/kv-events.md shows both.

Needs pyzmq and msgspec (`pip install 'kvcore[events]'`). Nothing else of kvcore imports it.
"""

from kvcore.wire.encoder import Encoder, NameForm, wire_names
from kvcore.wire.errors import ClosedError, EndpointError, MalformedError, WireError
from kvcore.wire.follower import Follower, FollowerStats
from kvcore.wire.history import History, Sent
from kvcore.wire.index import INDEXED_KINDS, Index, IndexStats
from kvcore.wire.messages import (
    END,
    SNAPSHOT,
    Batch,
    Cleared,
    Form,
    Removed,
    Stored,
    WireEvent,
    WireName,
    decode,
    encode,
)
from kvcore.wire.publisher import Publisher, PublisherStats, check_endpoint
from kvcore.wire.subscriber import Source, SourceStatus, Subscriber

__all__ = [
    "END",
    "INDEXED_KINDS",
    "SNAPSHOT",
    "Batch",
    "Cleared",
    "ClosedError",
    "Encoder",
    "EndpointError",
    "Follower",
    "FollowerStats",
    "Form",
    "History",
    "Index",
    "IndexStats",
    "MalformedError",
    "NameForm",
    "Publisher",
    "PublisherStats",
    "Removed",
    "Sent",
    "Source",
    "SourceStatus",
    "Stored",
    "Subscriber",
    "WireError",
    "WireEvent",
    "WireName",
    "check_endpoint",
    "decode",
    "encode",
    "wire_names",
]
