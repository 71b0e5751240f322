"""kvcore.wire: KV events over ZeroMQ in vLLM's format, and an index of several caches.

A `Publisher` publishes the KV events of a manager; routers that read vLLM's events can read them
without a change. A `Subscriber` follows any number of publishers, of kvcore or of other engines,
and returns the longest prefix of a prompt that each of them has. docs/how-to/kv-events.md shows
both.

Needs pyzmq and msgspec (`pip install 'kvcore[events]'`). Nothing else of kvcore imports it.
"""

from kvcore.wire.encoder import Encoder, HashForm, wire_hashes
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
    WireHash,
    decode,
    encode,
)
from kvcore.wire.publisher import Publisher, PublisherStats
from kvcore.wire.subscriber import Source, SourceStatus, Subscriber
from kvcore.wire.transport import Socket, Transport, ZmqTransport, check_endpoint

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
    "HashForm",
    "History",
    "Index",
    "IndexStats",
    "MalformedError",
    "Publisher",
    "PublisherStats",
    "Removed",
    "Sent",
    "Socket",
    "Source",
    "SourceStatus",
    "Stored",
    "Subscriber",
    "Transport",
    "WireError",
    "WireEvent",
    "WireHash",
    "ZmqTransport",
    "check_endpoint",
    "decode",
    "encode",
    "wire_hashes",
]
