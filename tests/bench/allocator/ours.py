"""kvcore as a peer, with every call that an engine makes; and a cache that does nothing.

Driving the empty cache costs what the driver of a trace costs, which is subtracted.
"""

import kvcore
from tests.bench.measure import Subject

HASHES = {"sha256": "sha256", "xxh3": "xxh3-128"}


def step_ahead(manager, seqs, tokens):
    """One step as the runner makes it: the tokens of the pass before, while the next one runs."""
    return manager.step(seqs, 1, tokens, num_expected=1)


def begin_ahead(manager, seqs, tokens):
    """The first token of each is known, and the pass that computes it runs."""
    manager.decode_step(seqs, tokens)
    manager.step(seqs, 1, num_known=0, num_expected=1)


class OurCache:
    """A `KVCacheManager`: full attention and a group for each window."""

    def __init__(
        self, num_blocks, block_size, *, windows=(), events=False, hashing="xxh3", how="step",
        caching=True, prefault=False,
    ):  # fmt: skip
        self.manager = kvcore.KVCacheManager(
            num_blocks,
            block_size,
            groups=[kvcore.FullAttention(), *map(kvcore.SlidingWindow, windows)],
            record_events=HASHES[hashing] if events else None,
            enable_caching=caching,
            prefault=prefault,
        )
        self.finish = self.manager.close
        self.reset = self.manager.reset
        self.decode = {
            "step": self.manager.decode_step,
            "requests": self._decode_each,
            "whole": self._decode_whole,
            "ahead": self._decode_ahead,
        }[how]
        self.mixed = self._mixed_each if how == "requests" else self._mixed
        self._has_stepped = False
        self._begun = []  # tokens that the requests begun by the last `mixed` compute

    def start(self, tokens):
        manager = self.manager
        seq = manager.open(tokens)
        todo = len(tokens) - seq.num_computed_tokens
        manager.reserve(seq, todo)
        manager.commit(seq, todo)
        return seq

    def _decode_each(self, requests, tokens):
        manager = self.manager
        for request, token in zip(requests, tokens, strict=True):
            manager.commit(request, request.num_tokens - request.num_computed_tokens)
            manager.append(request, token)
            manager.reserve(request, 1)

    def _decode_whole(self, requests, tokens):
        """By the verb for steps of any kind; all requests have begun before the first step."""
        self.manager.step(requests, [int(self._has_stepped)] * len(requests), tokens)
        self._has_stepped = True

    def _decode_ahead(self, requests, tokens):
        if not self._has_stepped:
            self._has_stepped = True
            begin_ahead(self.manager, requests, tokens)
        else:
            step_ahead(self.manager, requests, tokens)

    def _mixed(self, requests, tokens, prompts):
        """Take all to the next forward pass, and make room in it for new prompts."""
        manager = self.manager
        manager.step(requests, [1] * (len(requests) - len(self._begun)) + self._begun, tokens)
        new = [manager.open(prompt) for prompt in prompts]
        self._begun = [seq.num_tokens - seq.num_computed_tokens for seq in new]
        manager.reserve_step(new, self._begun)
        return new

    def _mixed_each(self, requests, tokens, prompts):
        self._decode_each(requests, tokens)
        return [self.start(prompt) for prompt in prompts]

    def num_hit_tokens(self):
        return self.manager.stats().num_hit_tokens

    def take_events(self):
        return self.manager.events.take()


class OurPeer:
    """kvcore; with packed prompts, or with lists of ints."""

    name = "kvcore"
    can = frozenset({
        "pool", "windows", "events", "hashing", "caching", "requests", "whole", "ahead", "reset",
    })  # fmt: skip
    make_cache = OurCache

    def __init__(self, *, packed=True):
        self.packed = packed

    def make_pool(self, num_blocks, block_size):
        pool = kvcore.BlockPool(num_blocks, block_size)
        return pool.take, pool.release


class EmptyCache:
    """Does nothing."""

    def start(self, tokens):
        return tokens

    def decode(self, requests, tokens):
        pass

    def finish(self, request):
        pass


def our_subjects():
    """kvcore with packed prompts, and with lists of ints."""
    return [
        Subject("kvcore", OurPeer(), is_ours=True),
        Subject("kvcore, list[int]", OurPeer(packed=False), is_ours=True),
    ]
