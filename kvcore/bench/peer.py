"""What an allocator must offer to be measured, and how it is loaded and checked.

An adapter is a module with a factory, `--peer MODULE:FACTORY`; calling it returns a `Peer`. The
calls below are all that is timed, so an adapter should do in them what an engine that uses the
allocator would do for the same purpose, and nothing else. A peer that cannot do a workload leaves
it out of `workloads`; one that promises a workload and lacks a method is a `PeerError`.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import (
    Final,
    Literal,
    Protocol,
    TypeAlias,
    TypedDict,
    Unpack,
    cast,
    get_args,
    runtime_checkable,
)

import kvcore

Workload = Literal["W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W9", "W10", "W11", "W12"]
WORKLOADS: Final[tuple[Workload, ...]] = get_args(Workload)

Tokens: TypeAlias = "array[int] | list[int]"
"""A prompt: `array("I")` for a peer whose `tokens` is "packed", `list[int]` for "list"."""

TokenFormat = Literal["packed", "list"]

Take = Callable[[int], object]
"""Takes blocks out of a pool and returns them, in any form."""

Release = Callable[[object], object]
"""Gives back what one call of `Take` returned; what it returns is ignored."""


class Options(TypedDict, total=False):
    """What a cache of W7 to W12 is beside a pool of one full-attention group; W1 to W6 give none.

    Attributes:
        windows: a layer group of its own, beside the full one, for each of these window sizes.
        events: what is stored and removed is recorded, as a router wants it.
        by_request: where there are calls for whole steps, they are not used: each request is
            decoded by calls of its own.
        caching: whether anything is published and found.
        by_step: the call for a step of any kind decodes, in place of that for decoders alone. Given
            to ours alone, which has two.
        prefault: all blocks are made at once. Given to ours alone, which makes them later.
    """

    windows: tuple[int, ...]
    events: bool
    by_request: bool
    by_step: bool
    caching: bool
    prefault: bool


PLAIN: Final[Options] = {}
"""What W1 to W6 give."""

_OURS: Final = frozenset({"by_step", "prefault"})
OPTIONS: Final = frozenset(Options.__annotations__)
"""Every option there is."""


class PeerError(kvcore.KVCoreError):
    """A peer cannot be loaded, lacks a method, or hits what was never written."""


class Cache(Protocol):
    """A pool of blocks with prefix caching: what W3 to W6 drive."""

    def start(self, tokens: Tokens) -> object:
        """Begin a request and prefill it whole.

        Hash or pack the prompt, look it up, hold what hits (never the last token), take blocks for
        the rest and publish every full one. It must raise if the pool is too small.

        Returns:
            The request, for the other calls; the measuring never looks inside.
        """

    def decode(self, requests: Sequence[object], tokens: Sequence[int]) -> None:
        """Decode one step: append `tokens[i]` to `requests[i]` and compute it.

        Take a block where one is needed and publish each that is full. Wanted by W4 and W5.
        """

    def finish(self, request: object) -> object:
        """End a request: its blocks are free, and can be hit until they are reused."""

    def num_hit_tokens(self) -> int:
        """Return how many prompt tokens were found cached so far. Not timed, but in W10."""

    def take_events(self) -> object:
        """Return what was stored and removed since the last call. Wanted by W8."""

    def reset(self) -> object:
        """Forget all cached content. Wanted by W10."""


@runtime_checkable
class StepCache(Cache, Protocol):
    """A cache with one call for a whole step. Of another, W12 calls `decode` and `start`."""

    def mixed(
        self, requests: Sequence[object], tokens: Sequence[int], prompts: Sequence[Tokens]
    ) -> Sequence[object]:
        """Decode as `decode` does, and begin requests whose prompts are computed in the same step.

        All of `requests` have been decoded before, or are what the last call returned, at the end.

        Returns:
            The new requests.
        """


class Peer(Protocol):
    """An allocator that can be measured.

    Attributes:
        name: what tables call it.
        tokens: the form in which it wants prompts.
        workloads: those that it can do.

    One that cannot do every option has an attribute `options` too, the names of those that it can;
    what asks for others is measured without it.
    """

    name: str
    tokens: TokenFormat
    workloads: frozenset[Workload]

    def make_pool(self, num_blocks: int, block_size: int) -> tuple[Take, Release]:
        """Return the functions of a new pool with caching on, best unwrapped. For W1 and W2."""

    def make_cache(self, num_blocks: int, block_size: int, **options: Unpack[Options]) -> Cache:
        """Return a new cache of `num_blocks` blocks, all of them free. For W3 on; W6 times it.

        One block may be set aside, as a null block is. `options` are fields of `Options`, and none
        are given in W1 to W6.
        """


@dataclass(frozen=True, slots=True)
class Subject:
    """A peer and the form in which it is given prompts: one line of a table.

    Attributes:
        label: what the line is called.
        peer: what is measured.
        tokens: the form of its prompts.
        is_ours: whether it is compared with the others, rather than they with it.
        options: the fields of `Options` that it can do.
    """

    label: str
    peer: Peer
    tokens: TokenFormat
    is_ours: bool = False
    options: frozenset[str] = OPTIONS

    def can(self, workload: Workload, options: Options = PLAIN) -> bool:
        """Return whether it can do a workload with these options."""
        return workload in self.peer.workloads and self.options.issuperset(self._given(options))

    def _given(self, options: Options) -> Options:
        """Return those of the options that it is given."""
        given = {
            name: value for name, value in options.items() if self.is_ours or name not in _OURS
        }
        return cast("Options", given)

    def make_pool(self, num_blocks: int, block_size: int) -> tuple[Take, Release]:
        """Make a pool. Raises PeerError where there is no method for it."""
        _require(self.label, "peer", self.peer, ("make_pool",), "W1 and W2")
        return self.peer.make_pool(num_blocks, block_size)

    def make_cache(
        self,
        num_blocks: int,
        block_size: int,
        *,
        decodes: bool = False,
        options: Options = PLAIN,
    ) -> Cache:
        """Make a cache. Raises PeerError where it, or one of its methods, is missing."""
        _require(self.label, "peer", self.peer, ("make_cache",), "W3 to W6")
        cache = self.peer.make_cache(num_blocks, block_size, **self._given(options))
        if options.get("events"):
            _require(self.label, "cache", cache, ("take_events",), "W8")
        _require(self.label, "cache", cache, ("start", "finish", "num_hit_tokens"), "W3 to W6")
        if decodes:
            _require(self.label, "cache", cache, ("decode",), "W4 and W5")
        return cache


def load_peer(where: str) -> Subject:
    """Load `MODULE:FACTORY` and call the factory.

    Raises:
        PeerError: not of that form, no such module or factory, or not a `Peer`.
    """
    module_name, colon, factory_name = where.partition(":")
    if not (module_name and colon and factory_name):
        raise PeerError(f"--peer: wanted MODULE:FACTORY, got {where!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PeerError(f"--peer {where}: cannot import {module_name}: {error}") from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise PeerError(f"--peer {where}: {module_name} has no factory {factory_name}")
    return subject_of(cast("Peer", factory()), where)


def subject_of(peer: Peer, where: str) -> Subject:
    """Check what a factory returned. Raises PeerError where it is not a `Peer`."""
    for attribute in ("name", "tokens", "workloads"):
        if not hasattr(peer, attribute):
            raise PeerError(f"{where}: a peer has an attribute {attribute!r}, this one has none")
    if peer.tokens not in get_args(TokenFormat):
        raise PeerError(f"{where}: tokens: wanted 'packed' or 'list', got {peer.tokens!r}")
    unknown = sorted(set(peer.workloads) - set(WORKLOADS))
    if unknown:
        raise PeerError(f"{where}: workloads: wanted some of {list(WORKLOADS)}, got {unknown}")
    options = frozenset(getattr(peer, "options", OPTIONS))
    if not options <= OPTIONS:
        raise PeerError(
            f"{where}: options: wanted some of {sorted(OPTIONS)}, got {sorted(options - OPTIONS)}"
        )
    return Subject(peer.name, peer, peer.tokens, options=options)


def _require(label: str, kind: str, owner: object, methods: Sequence[str], what_for: str) -> None:
    for method in methods:
        if not callable(getattr(owner, method, None)):
            raise PeerError(
                f"{label}: {what_for} need a method {method!r} of its {kind}, and there is none: "
                "define it, or leave them out of its `workloads`"
            )
