"""Decode in Triton's interpreter: the plan on random lengths, and cases that it splits.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
Run by test_triton_decode.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

import sys

import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import backends
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.triton_gpu import splits
from backends.triton_gpu.splits import count_splits

TILE = 32
BASE = AttentionCase("", (), num_kv_heads=1, head_dim=16, dtype=torch.float16)
SEQS = ((1, 200), (0, 9), (1, 33), (1, 1))
CASES = (
    BASE.with_(name="split", seqs=SEQS),
    BASE.with_(name="window, cap, sinks", seqs=SEQS, window=40, soft_cap=2.0, sinks=True, group=3),
    BASE.with_(name="block size 48, strided", seqs=SEQS, block_size=48, strided=True),
    BASE.with_(name="block size 5, head_dim 24", seqs=SEQS, block_size=5, head_dim=24),
    BASE.with_(name="a group of 20", seqs=((1, 70),), group=20),
    BASE.with_(name="a head_dim of 160", seqs=((1, 70),), group=12, head_dim=160),
    BASE.with_(name="among prefill", seqs=((1, 100), (40, 50), (1, 64)), padding=2),
)


@triton.jit
def _count(
    starts, seq_lens, out, num_seqs, target, window, first, last, tokens,
    HAS_WINDOW: tl.constexpr, HAS_SHARED: tl.constexpr,
):  # fmt: skip
    counts = count_splits(
        starts, seq_lens, num_seqs, target, window, (first, last, tokens),
        HAS_WINDOW, HAS_SHARED, 32, 8,
    )  # fmt: skip
    tl.store(out + tl.arange(0, 8), counts)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(3, 5000)), min_size=1, max_size=8),
    st.integers(1, 40),
    st.none() | st.integers(1, 5000),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
def check_plan(seqs, target, window):
    starts = torch.tensor([0, *(count for count, _ in seqs)], dtype=torch.int32).cumsum(0).int()
    lengths = torch.tensor([length for _, length in seqs], dtype=torch.int32)
    out = torch.full((8,), -1, dtype=torch.int32)
    _count[(1,)](
        starts, lengths, out, len(seqs), target, window or 0, 0, 0, 0, window is not None, False
    )
    counts = out.tolist()
    tiles = [
        -(-length // TILE) - (0 if window is None else max(length - window, 0) // TILE)
        for _, length in seqs
    ]
    assert counts[len(seqs) :] == [0] * (8 - len(seqs))
    for (count, _), most, chunks in zip(seqs, tiles, counts, strict=False):
        assert (chunks > 0) == (count == 1)
        assert chunks <= min(most, target)
    assert sum(counts) <= len(seqs) + target
    alone = [most for (count, _), most in zip(seqs, tiles, strict=True) if count == 1]
    if len(alone) == 1:
        assert max(counts) == -(-alone[0] // -(-alone[0] // target))


def check_case(case):
    for finding in check_attention(backends.get_backend("triton"), case):
        assert finding.passed, finding


if __name__ == "__main__":
    check_plan()
    for one in CASES:
        check_case(one)
    splits.MAX_PLANNED = 2  # of which plan_grid asks
    check_case(CASES[0].with_(name="more sequences than are planned"))
    sys.stdout.write("decode is right\n")
