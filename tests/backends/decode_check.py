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
from backends.conformance.cases import build
from backends.triton_gpu import cascade, splits
from backends.triton_gpu.splits import count_splits

TRITON = backends.get_backend("triton")
TILE = 32
E4M3 = torch.float8_e4m3fn
BASE = AttentionCase("", (), num_kv_heads=1, head_dim=16, dtype=torch.float16)
SEQS = ((1, 200), (0, 9), (1, 33), (1, 1))
CASES = (
    BASE.with_(name="split", seqs=SEQS),
    BASE.with_(name="window, cap, sinks", seqs=SEQS, window=40, soft_cap=2.0, sinks=True, group=3),
    BASE.with_(name="block size 48, strided", seqs=SEQS, block_size=48, strided=True),
    BASE.with_(name="block size 5, head_dim 24", seqs=SEQS, block_size=5, head_dim=24),
    BASE.with_(name="a group of 20", seqs=((1, 70),), group=20),
    BASE.with_(name="a head_dim of 160", seqs=((1, 70),), group=12, head_dim=160),
    BASE.with_(name="alike", seqs=(*SEQS, (1, 700)), batch_invariant=True, sinks=True),
    BASE.with_(name="alike, window", seqs=SEQS, batch_invariant=True, window=40),
    BASE.with_(name="quantised", seqs=SEQS, num_kv_heads=2, cache_dtype=E4M3, scales="head"),
    BASE.with_(name="quantised, window", seqs=SEQS, cache_dtype=E4M3, scales="tensor", window=9),
    BASE.with_(name="shared", seqs=((1, 33), (1, 90), (1, 400)), shared=32, group=3),
    BASE.with_(
        name="shared, quantised",
        seqs=((1, 81), (1, 90)),
        shared=80,
        cache_dtype=E4M3,
        scales="head",
        num_kv_heads=2,
        soft_cap=2.0,
        sinks=True,
    ),
    BASE.with_(name="shared among prefill", seqs=((1, 81), (3, 90)), shared=80, strided=True),
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
        chunk = -(-alone[0] // target)
        assert max(counts) in (-(-alone[0] // chunk), alone[0] // chunk)
        assert max(counts) == -(-alone[0] // chunk) or alone[0] % chunk <= chunk // 8


def check_case(case):
    for finding in check_attention(TRITON, case):
        assert finding.passed, finding


def check_the_rule():
    """What is shared is used where it pays, and nowhere else."""
    base = BASE.with_(seqs=((1, 81), (1, 90), (1, 100)), shared=80)
    used = []
    real = cascade.attend_prefix
    cascade.attend_prefix = lambda *arguments: used.append(arguments) or real(*arguments)
    for worth, case in (
        (1 << 30, base),
        (0, base.with_(window=1000)),
        (0, base.with_(batch_invariant=True)),
        (0, base.with_(shared=0)),
        (0, base.with_(seqs=base.seqs[:2])),
    ):
        cascade.WORTH_BYTES, cascade.WORTH_BYTES_A_SEQUENCE = worth, 0
        build(case, torch.device("cpu")).run(TRITON)
        assert not used, case
    build(base, torch.device("cpu")).run(TRITON)
    assert len(used) == 1
    cascade.attend_prefix = real


if __name__ == "__main__":
    check_plan()
    check_the_rule()
    cascade.WORTH_BYTES = cascade.WORTH_BYTES_A_SEQUENCE = cascade.FEWEST = 0
    for one in CASES:
        check_case(one)
    splits.MAX_PLANNED = 2
    cascade.MAX_PLANNED = 2
    check_case(CASES[0].with_(name="more sequences than are planned"))
    sys.stdout.write("decode is right\n")
