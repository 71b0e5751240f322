"""`python -m tests.bench turns`: prefix cache hits of chats in turns, by how full the pool is.

Each request goes on from the text of an earlier one; requests run one at a time. The size of the
pool is chosen so that what the next hits need is a given share of it: of full attention all blocks
of each text, of a window or a chunk those before its end, of recurrent states the last one. The hit
rate is compared with that of a pool without bounds. All is counted: the same on every machine.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import kvcore
from tests.bench.measure import Row, Spread

HEADINGS = {"turns": "Hit tokens, as a share of those in a pool without bounds."}
SHARES = (0.5, 0.8, 0.9)
BAR = 0.9
CHUNK = 256
UNIQUE = 1 << 20


class Layout(NamedTuple):
    """The layer groups of a published model, as `model.caches.layout` makes them.

    Attributes:
        groups: the layer groups.
        block_size: tokens a block.
        num_tokens: the length of a first prompt, more than a window.
        num_chats: the number of chats.
    """

    groups: tuple[kvcore.LayerGroup, ...]
    block_size: int = 16
    num_tokens: int = 2048
    num_chats: int = 6


FULL = (kvcore.FullAttention(),)
LAYOUTS = {
    "Gemma 3 1B": Layout(FULL + 6 * (kvcore.SlidingWindow(512),)),
    "Gemma 3 27B": Layout(FULL + 6 * (kvcore.SlidingWindow(1024),)),
    "Gemma 4 31B": Layout(FULL + 5 * (kvcore.SlidingWindow(1024),)),
    "gpt-oss-20b": Layout(FULL + 1 * (kvcore.SlidingWindow(128),)),
    "Llama 4 Scout": Layout(FULL + 3 * (kvcore.ChunkedLocal(8192),), num_tokens=8700, num_chats=20),
    "Qwen3-Next-80B-A3B": Layout(
        (*FULL, kvcore.RecurrentState(18)), block_size=176, num_tokens=4096, num_chats=32
    ),
}


class Turn(NamedTuple):
    """One request.

    Attributes:
        chat: which chat it belongs to.
        prompt: its tokens.
        answer: the tokens that it generates.
    """

    chat: int
    prompt: list[int]
    answer: list[int]


class Traffic:
    """Chats in turns: a prompt is the last one, its answer and a question.

    Args:
        layout: the layout of the model, for lengths.
        lengths: the share of the layout's length that each chat begins with, in turn.
        shared: tokens of a prefix that all chats share.
        answer: tokens of an answer; the lengths are no multiples of a block.
        kept: the last tokens of an answer that stay in the next prompt; None: all.
        resent: whether prompts come again as they are.
        order: the chats of the requests, from the number of chats.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        lengths: tuple[float, ...] = (1,),
        shared: int = 0,
        answer: int = 67,
        kept: int | None = None,
        resent: bool = False,
        order: Callable[[int], list[int]] | None = None,
    ) -> None:
        self.count = layout.num_chats
        self.shared = shared
        self.answer = answer
        self.kept = kept
        self.resent = resent
        self.order = in_turns if order is None else order
        self.texts = []
        for chat in range(self.count):
            own = int(layout.num_tokens * lengths[chat % len(lengths)]) - shared
            first = [(chat + 1) * UNIQUE + place for place in range(own)]
            self.texts.append(list(range(shared)) + first)

    def turns(self) -> Iterator[Turn]:
        """Yield the requests."""
        for number, chat in enumerate(self.order(self.count)):
            prompt = self.texts[chat]
            fresh = UNIQUE * (self.count + 1 + number)
            answer = list(range(fresh, fresh + self.answer))
            yield Turn(chat, list(prompt), answer)
            if not self.resent:
                left = answer if self.kept is None else answer[-self.kept :]
                self.texts[chat] = [*prompt, *left, *range(fresh + 1000, fresh + 1059)]


def in_turns(count: int) -> list[int]:
    """Each chat once, and again: the worst order for an LRU cache."""
    return list(range(count)) * 4


def revisited(count: int) -> list[int]:
    """Each chat once, and then some more often than others, as Zipf's law has it."""
    draws = random.Random(7)
    weights = [1 / (rank + 1) for rank in range(count)]
    return [*range(count), *draws.choices(range(count), weights, k=4 * count)]


TRAFFIC = {
    "chats in turns": Traffic,
    "chats of different lengths, long answers": lambda layout: Traffic(
        layout, lengths=(1, 0.6, 0.3), answer=301
    ),
    "chats revisited by Zipf's law": lambda layout: Traffic(layout, order=revisited),
    "agents with one system prompt": lambda layout: Traffic(
        layout, shared=int(0.45 * layout.num_tokens), order=revisited
    ),
    "chats whose prompts leave out the reasoning": lambda layout: Traffic(
        layout, answer=150, kept=30
    ),
    "prompts sent again": lambda layout: Traffic(layout, resent=True),
}


def needed_blocks(layout: Layout, traffic: Traffic) -> int:
    """Return how many blocks the next hit of every chat needs, shared ones once."""
    found = 0
    size = layout.block_size
    lengths = {}
    for turn in traffic.turns():
        lengths[turn.chat] = len(turn.prompt) + (0 if traffic.resent else len(turn.answer))
    ends = [*lengths.values(), *([traffic.shared] if traffic.shared else [])]
    for end in ends:
        for group in layout.groups:
            full = end // size
            if isinstance(group, kvcore.RecurrentState):
                found += group.num_blocks
            elif isinstance(group, kvcore.FullAttention):
                found += full - (0 if end == traffic.shared else traffic.shared // size)
            else:
                found += full - group.first_visible(full * size) // size
    return found


def hit_tokens(layout: Layout, traffic: Traffic, num_blocks: int) -> int:
    """Return how many tokens the requests of a traffic hit."""
    kv = kvcore.KVCacheManager(num_blocks, layout.block_size, groups=layout.groups)
    for turn in traffic.turns():
        seq = kv.open(turn.prompt)
        while seq.num_computed_tokens < seq.num_tokens:
            count = min(CHUNK, seq.num_tokens - seq.num_computed_tokens)
            count = kv.chunk_length(seq, count)
            kv.reserve(seq, count)
            kv.commit(seq, count)
        for token in turn.answer:
            kv.append(seq, token)
            kv.reserve(seq, 1)
            kv.commit(seq, 1)
        kv.close(seq)
    return kv.stats().num_hit_tokens


def hit_shares(
    layout: Layout, make: Callable[[Layout], Traffic], shares: Sequence[float] = SHARES
) -> dict[float, float]:
    """Return the share of the hits of a pool without bounds, by how full the pool is."""
    needed = needed_blocks(layout, make(layout))
    endless = hit_tokens(layout, make(layout), 100 * needed)
    return {
        share: hit_tokens(layout, make(layout), int(needed / share) + 1) / endless
        for share in shares
    }


def add_flags(parser):
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--traffic", choices=TRAFFIC, action="append")


def rows(options):
    traffic = options.traffic or list(TRAFFIC)[: 1 if options.quick else None]
    for case in traffic:
        for name in options.layout or LAYOUTS:
            shares = hit_shares(LAYOUTS[name], TRAFFIC[case])
            yield Row(
                group="turns",
                case=f"{case}.",
                subject=name,
                unit="",
                cost=Spread(*[min(shares.values())] * 3),
                rates={f"needs fill {share:.0%}": round(shares[share], 2) for share in SHARES},
            )


def summary(found, *, quick):
    """Say whether the bar is met."""
    worst = min(found, key=lambda row: row.cost.median)
    yield f"least: {worst.cost.median:.2f} of the hits, {worst.subject}, {worst.case} bar: {BAR}"
