"""Decode in Triton's interpreter: the plan on random lengths, and cases that it splits.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
Run by test_triton_decode.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

import dataclasses
import math
import sys

import torch
import triton
import triton.language as tl
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import backends
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.conformance.cases import build
from backends.triton_gpu.decode import cascade, splits
from backends.triton_gpu.decode.splits import Cut, Lengths, find_part, find_parts

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
    BASE.with_(
        name="shared, told late",
        seqs=((1, 99), (1, 95), (1, 90), (1, 400)),
        shared=80,
        group=3,
        shared_now=(2, 4, 79),
    ),
    BASE.with_(
        name="told late, too short", seqs=((1, 200), (1, 33)), shared=32, shared_now=(0, 2, 31)
    ),
    BASE.with_(name="shared among prefill", seqs=((1, 81), (3, 90)), shared=80, strided=True),
    BASE.with_(name="among prefill", seqs=((1, 100), (40, 50), (1, 64)), padding=2),
    BASE.with_(name="to verify", seqs=((4, 200), (0, 9), (1, 33), (3, 3)), sinks=True),
    BASE.with_(name="to verify, alone, 3 slices", seqs=((8, 150),), group=5, num_kv_heads=2),
    BASE.with_(name="to verify, window", seqs=((4, 200), (3, 130)), window=40, soft_cap=2.0),
    BASE.with_(name="to verify, window of 1", seqs=((3, 200), (2, 31)), window=1, strided=True),
    BASE.with_(
        name="to verify, quantised", seqs=((2, 99), (4, 70)), cache_dtype=E4M3, scales="head"
    ),
    BASE.with_(name="long and many short", seqs=((1, 500), *[(1, 9)] * 9), block_size=8),
)


@triton.jit
def _plan(starts, seq_lens, work, parts, num_seqs, target, most, window, CUT: tl.constexpr):
    """Which split of which sequence each program has, and which parts the merge looks for."""
    item = tl.program_id(0)
    lengths = Lengths(starts, seq_lens, num_seqs, most, window, target, 0)
    s, split, splits = find_part(item, tl.arange(0, CUT.vector or 1), lengths, CUT)
    tl.store(work + item * 3, s)
    tl.store(work + item * 3 + 1, split)
    tl.store(work + item * 3 + 2, splits)
    if item < num_seqs:
        first, count = find_parts(item, lengths, CUT)
        tl.store(parts + item * 2, first)
        tl.store(parts + item * 2 + 1, count)


def plan(seqs, target, most, window, *, alike):
    """For each program (sequence, split, splits), for each sequence (first part, how many)."""
    starts = torch.tensor([0, *(count for count, _ in seqs)], dtype=torch.int32).cumsum(0).int()
    lengths = torch.tensor([length for _, length in seqs], dtype=torch.int32)
    vector = 1 if len(seqs) == 1 else splits.MANY_SEQS.value
    programs = len(seqs) + (target if vector == 1 else splits.FINER.value * target)
    if alike:
        target = splits.alike_grid(len(seqs), max(length for _, length in seqs)).target
        programs = target * len(seqs)
    work = torch.full((programs, 3), -1, dtype=torch.int32)
    parts = torch.full((len(seqs), 2), -1, dtype=torch.int32)
    _plan[(programs,)](
        starts, lengths, work, parts, len(seqs), target, most, window or 0,
        Cut(TILE, 0 if alike else vector, alike, window is not None),
    )  # fmt: skip
    return work.tolist(), parts.tolist()


def tiles_of(seqs, most, window):
    """Tiles of keys that decode visits of each sequence."""
    return [
        -(-length // TILE) - (0 if window is None else max(length - count + 1 - window, 0) // TILE)
        if 0 < count <= most
        else 0
        for count, length in seqs
    ]


LENGTHS = st.integers(4, 40) | st.integers(4, 5000) | st.sampled_from((32, 64, 1024, 200_000))
SEQS_OF = st.lists(st.tuples(st.integers(0, 4), LENGTHS), min_size=1, max_size=9)
QUICK = settings(
    max_examples=30, deadline=None, derandomize=True, database=None,
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip


@given(SEQS_OF, st.integers(1, 40), st.integers(1, 3), st.none() | st.integers(1, 5000))
@example([(1, 100_000)] + [(1, 20)] * 15, 33, 1, None)
@example([(2, 19), (1, 1500), (2, 32), (1, 200_000)], 30, 2, None)  # 47 tiles are not long
@QUICK
def check_plan(seqs, target, most, window):
    """Every split is one program's, the merge finds it there, and no tile is left out."""
    wanted = tiles_of(seqs, most, window)
    for alike in (False, True):
        work, parts = plan(seqs, target, most, window, alike=alike)
        mine = [[] for _ in seqs]
        for item, (s, split, count) in enumerate(work):
            if s < len(seqs) and (wanted[s] or not alike):
                mine[s].append((item, split, count))
        for s, (tiles, (first, count)) in enumerate(zip(wanted, parts, strict=True)):
            assert count <= tiles
            assert (count > 0) == (tiles > 0)
            assert mine[s] == [(first + split, split, count) for split in range(count)]
    check_balance(plan(seqs, target, most, window, alike=False)[0], wanted, target)


def check_balance(work, wanted, target):
    """Where lengths differ much, parts of sequences longer than half a chunk come first."""
    live = [tiles for tiles in wanted if tiles]
    if len(live) > 1 and max(live) * len(live) > 1.25 * sum(live):
        chunk = -(-sum(live) // target)
        finer = max(-(-chunk // splits.FINER.value), min(chunk, splits.SHORT.value))
        small = [2 * wanted[s] <= finer for s, _, _ in work if s < len(wanted)]
        assert small == sorted(small), (work, finer)


@given(st.integers(1, 16), st.integers(1, 3000), st.integers(1, 40))
@settings(QUICK, max_examples=15)
def check_equal_sequences(num_seqs, length, target):
    """Equal sequences are cut alike, and not at all where they are as many as programs."""
    _, parts = plan([(1, length)] * num_seqs, target, 1, None, alike=False)
    tiles = -(-length // TILE)
    chunk = -(-num_seqs * tiles // target)
    assert {count for _, count in parts} == {max(1, -(-(tiles - chunk // 8) // chunk))}


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


def check_sharing_after_not_sharing():
    """A batch that shares is planned anew, though one of its shapes that did not came before."""
    case = BASE.with_(seqs=((2, 36), (2, 40), (1, 33)), shared=32)
    inputs = build(case, torch.device("cpu"))
    alone = dataclasses.replace(inputs.batch, shared_prefix=None)
    dataclasses.replace(inputs, batch=alone).run(TRITON).fill_(math.nan)
    assert inputs.expected().worst_ratio(inputs.run(TRITON)) <= 1


if __name__ == "__main__":
    check_plan()
    check_equal_sequences()
    check_the_rule()
    cascade.WORTH_BYTES = cascade.WORTH_BYTES_A_SEQUENCE = cascade.FEWEST = 0
    check_sharing_after_not_sharing()
    for one in CASES:
        check_case(one)
    splits.MAX_PLANNED = 2
    cascade.MAX_PLANNED = 2
    check_case(CASES[0].with_(name="more sequences than are planned"))
    sys.stdout.write("decode is right\n")
