"""Prompts of which a draft model has read ahead: `num_hash_lookahead_tokens` of vLLM 0.33.

A draft model of EAGLE's kind computes the KV at a position from the token there and the next
`count`. vLLM hashes those with a block, so that a prompt hits it only where the same tokens follow.
Here kvcore is told at each position the token `count` later, and the first `count` tokens belong to
the namespace: two prefixes are equal exactly where their tokens and the next `count` are, and
nothing in kvcore has to know of it. An event is spelled with the tokens as they stand: those that a
block begins with are at the end of the block before it.

Invariants: the last `count` tokens of a sequence are never told, because what follows them is not
known; a block is published once the tokens after it are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from kvcore import BlocksStored, MultimodalItem, Namespace
from kvcore.adapters.vllm.prompts import Prompt

_TOKEN: Final = array("I").itemsize


class Told(NamedTuple):
    """A block as it stands in its prompt.

    Attributes:
        tokens: the tokens of the block.
        after: the next tokens, which its hash covers too.
        items: the encoded items of the block before it and of the block, as kvcore knows them.
    """

    tokens: list[int]
    after: list[int]
    items: tuple[bytes, bytes]


def look_ahead(prompt: Prompt, count: int) -> Prompt:
    """Return a prompt as kvcore is told it: at each position the token `count` later. O(tokens).

    A prompt that is no longer than that, or has an image among its first tokens, is not cached.
    """
    first, packed = prompt.packed[:count], prompt.packed[count:]
    namespace = prompt.namespace
    if namespace is not None and (not packed or any(one.start < count for one in prompt.items)):
        namespace = None
    if namespace is None:
        return Prompt(packed, None, ())
    salted = replace(namespace, salt=first.tobytes() + namespace.salt)
    return Prompt(packed, salted, shifted(prompt.items, count))


def shifted(items: tuple[MultimodalItem, ...], count: int) -> tuple[MultimodalItem, ...]:
    """Return items `count` positions before where they stand. O(items)."""
    return tuple([replace(item, start=item.start - count) for item in items])


def as_it_stands(
    run: BlocksStored, namespace: Namespace, count: int
) -> tuple[Namespace, Iterator[Told]]:
    """Return the namespace of a request and its blocks, from what kvcore was told. O(tokens)."""
    width, rest = run.block_size * _TOKEN, namespace.salt[count * _TOKEN :]
    before = run.before or bytes(width - count * _TOKEN) + namespace.salt[: count * _TOKEN]

    def blocks() -> Iterator[Told]:
        above = before
        for content in run.contents:
            tokens = array("I", above[width - count * _TOKEN : width] + content[:width]).tolist()
            items = above[width:], content[width:]
            yield Told(tokens[: run.block_size], tokens[run.block_size :], items)
            above = content

    return replace(namespace, salt=rest), blocks()
