"""kvcore behind the protocol that other allocators are measured by, and a cache that does nothing.

Ours makes the calls that an engine makes, argument checks included. The empty cache costs what the
driver of a trace costs, and is subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack, cast

import kvcore
from kvcore.bench.peer import WORKLOADS, Cache, Options, Release, Subject, Take, TokenFormat, Tokens


class OurCache:
    """A `KVCacheManager`, of one full-attention group unless there are windows.

    Attributes:
        manager: what is measured.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Sequence[int] = (),
        events: bool = False,
        by_request: bool = False,
        by_step: bool = False,
        caching: bool = True,
        prefault: bool = False,
    ) -> None:
        self.manager = kvcore.KVCacheManager(
            num_blocks,
            block_size,
            groups=[kvcore.FullAttention(), *[kvcore.SlidingWindow(span) for span in windows]],
            record_events="xxh3-128" if events else None,
            enable_caching=caching,
            prefault=prefault,
        )
        self._by_request = by_request
        self._by_step = by_step
        self._has_stepped = False
        self._begun: list[int] = []  # tokens that the requests begun by the last `mixed` compute

    def start(self, tokens: Tokens) -> kvcore.KVSequence:
        """Open, reserve and commit a whole prompt."""
        manager = self.manager
        seq = manager.open(tokens)
        todo = len(tokens) - seq.num_computed_tokens
        manager.reserve(seq, todo)
        manager.commit(seq, todo)
        return seq

    def decode(self, requests: Sequence[kvcore.KVSequence], tokens: Sequence[int]) -> None:
        """Commit what was computed, append a token to each, and make room for it."""
        manager = self.manager
        if self._by_step:  # all requests have begun before the first step
            manager.step(requests, [int(self._has_stepped)] * len(requests), tokens)
            self._has_stepped = True
            return
        if not self._by_request:
            manager.decode_step(requests, tokens)
            return
        for request, token in zip(requests, tokens, strict=True):
            manager.commit(request, request.num_tokens - request.num_computed_tokens)
            manager.append(request, token)
            manager.reserve(request, 1)

    def mixed(
        self,
        requests: Sequence[kvcore.KVSequence],
        tokens: Sequence[int],
        prompts: Sequence[Tokens],
    ) -> list[kvcore.KVSequence]:
        """Take all to the next forward pass, and make room in it for new prompts."""
        manager = self.manager
        num_computed = [1] * (len(requests) - len(self._begun)) + self._begun
        manager.step(requests, num_computed, tokens)
        new = [manager.open(prompt) for prompt in prompts]
        self._begun = [seq.num_tokens - seq.num_computed_tokens for seq in new]
        manager.reserve_step(new, self._begun)
        return new

    def finish(self, request: kvcore.KVSequence) -> None:
        """Close."""
        self.manager.close(request)

    def num_hit_tokens(self) -> int:
        """Return the manager's own count."""
        return self.manager.stats().num_hit_tokens

    def take_events(self) -> tuple[kvcore.Event, ...]:
        """Return the events, names made and tokens packed."""
        return () if self.manager.events is None else self.manager.events.take()

    def reset(self) -> None:
        """Reset."""
        self.manager.reset()


class OurPeer:
    """kvcore as a `Peer`. One that takes packed prompts and one that takes lists are the same."""

    name = "kvcore"
    workloads = frozenset(WORKLOADS)

    def __init__(self, tokens: TokenFormat = "packed") -> None:
        self.tokens: TokenFormat = tokens

    def make_pool(self, num_blocks: int, block_size: int) -> tuple[Take, Release]:
        """Return `take` and `release` of a `BlockPool`."""
        pool = kvcore.BlockPool(num_blocks, block_size)
        return pool.take, cast("Release", pool.release)  # it is given only what `take` returned

    def make_cache(self, num_blocks: int, block_size: int, **options: Unpack[Options]) -> Cache:
        """Return an `OurCache`."""
        # The protocol cannot name each allocator's own type of request; it only hands them back.
        return cast("Cache", OurCache(num_blocks, block_size, **options))


class EmptyCache:
    """Does nothing: driving it costs what the driver costs."""

    def start(self, tokens: Tokens) -> object:
        """Return the prompt as the request."""
        return tokens

    def decode(self, requests: Sequence[object], tokens: Sequence[int]) -> None:
        """Do nothing."""

    def finish(self, request: object) -> None:
        """Do nothing."""

    def num_hit_tokens(self) -> int:
        """Return 0: nothing is ever found."""
        return 0

    def take_events(self) -> object:
        """Return nothing: there are none."""

    def reset(self) -> object:
        """Do nothing."""


def our_subjects() -> list[Subject]:
    """Return kvcore with packed prompts, and with lists of ints."""
    return [
        Subject("kvcore", OurPeer("packed"), "packed", is_ours=True),
        Subject("kvcore, list[int]", OurPeer("list"), "list", is_ours=True),
    ]
