"""Cases that vary everything at once, over long contexts too: every pair of sizes meets.

The n-th case has the n-th size of each list, going round. Lists whose lengths have no common factor
meet in all pairs within the product of two lengths, so 99 cases stand for 1.5 million. What goes
with them (company, features, dtype) changes every few cases.
"""

from collections.abc import Iterator
from typing import TypeVar

import torch

from backends.conformance.cases import AttentionCase
from backends.contract import Capabilities

_T = TypeVar("_T")

QUERY_LENS = (1, 2, 3, 4, 8, 17, 32, 64, 128)
GROUPS = (1, 2, 3, 4, 5, 6, 8, 16)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
CONTEXTS = (300, 32700, 700, 8200, 1000, 4100, 1500, 16500, 2100, 6000, 3000)
_COUNT = 99  # 9 x 11: query lengths and contexts

LATENT_QUERY_LENS = (1, 2, 3, 4, 8, 17, 40)
LATENT_HEADS = (16, 5, 128, 32, 64)
LATENT_BLOCKS = (64, 16, 8, 128)
_LATENT_COUNT = 35

AS_MET = ((4, 32000), (32, 8100), (128, 32768))
"""To verify, the end of a prompt, a chunk of one: as engines have them, in every dtype."""

_FEATURES: dict[int, dict[str, object]] = {
    2: {"window": 1000},
    4: {"soft_cap": 5.0},
    6: {"sinks": True},
    8: {"strided": True},
    10: {"batch_invariant": True},
    12: {"window": 70, "sinks": True},
}
_SCALES = ("head", "tensor", "none")


def spread_cases(can: Capabilities, largest: int) -> Iterator[AttentionCase]:
    """Each size with each other, once in a cache of the query's dtype and once in each quantised.

    Args:
        can: the capabilities, with their dtypes.
        largest: no case costs much more (`AttentionCase.cost`): contexts are as short as it asks.
    """
    for cache_dtype in (None, *can.quantised):
        cases = (*map(_pairs, range(_COUNT)), *map(_latents, range(_LATENT_COUNT)))
        for number, (base, count, company) in enumerate(cases):
            case = _filled(base, number, count, company, largest)
            scales = _of(_SCALES, number // 11)
            yield _typed(case, _of(can.dtypes, number // 9), cache_dtype, scales)
        for count, length in AS_MET:
            case = AttentionCase(f"{count} of {length}", ((count, length),), group=4)
            if case.cost <= 2 * largest:
                for dtype in can.dtypes:
                    yield _typed(case, dtype, cache_dtype, "head")


def _typed(
    case: AttentionCase, dtype: torch.dtype, cache_dtype: torch.dtype | None, scales: str
) -> AttentionCase:
    if cache_dtype is None:
        return case.with_(dtype=dtype, name=f"{case.name}, {str(dtype)[6:]}")
    name = f"{case.name}, {str(dtype)[6:]} beside {str(cache_dtype)[6:]}"
    return case.with_(dtype=dtype, cache_dtype=cache_dtype, scales=scales, name=name)


def _pairs(number: int) -> tuple[AttentionCase, int, int]:
    """A case without sequences, its query length, and which others are in its batch."""
    base = AttentionCase(
        "",
        (),
        num_kv_heads=1 + number // 5 % 2,
        group=_of(GROUPS, number),
        head_dim=_of(HEAD_DIMS, number),
        block_size=_of(BLOCK_SIZES, number),
    )
    return base, _of(QUERY_LENS, number), number // 7


def _latents(number: int) -> tuple[AttentionCase, int, int]:
    """The same of latents as DeepSeek has them."""
    base = AttentionCase(
        "latents, ",
        (),
        num_kv_heads=1,
        group=_of(LATENT_HEADS, number),
        head_dim=576,
        value_dim=512,
        block_size=_of(LATENT_BLOCKS, number),
    )
    return base, _of(LATENT_QUERY_LENS, number), number // 3


def _filled(
    base: AttentionCase, number: int, count: int, company: int, largest: int
) -> AttentionCase:
    """With sequences, features and a name."""
    features = _FEATURES.get(number % 13, {})
    a_key = count * base.num_kv_heads * base.group * base.head_dim
    length = count + min(_of(CONTEXTS, number), max(largest // a_key, 40))
    beside: tuple[tuple[tuple[int, int], ...], ...] = (
        (),
        ((count, count + length // 3),),
        ((1, 500),) * 6,
        ((1, 20),) * 20,
    )
    others = _of(beside, company)
    heads = f"{base.num_kv_heads * base.group}/{base.num_kv_heads} heads of {base.head_dim}"
    parts = [f"{base.name}{count} of {length}", *([f"beside {len(others)}"] if others else [])]
    parts += [heads, f"blocks of {base.block_size}"]
    parts += [name if value is True else f"{name} {value}" for name, value in features.items()]
    seqs = ((count, length), *others)
    return base.with_(name=", ".join(parts), seqs=seqs, seed=number, **features)


def _of(options: tuple[_T, ...], number: int) -> _T:
    return options[number % len(options)]
