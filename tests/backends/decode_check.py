"""Decode in Triton's interpreter: the plan on random lengths, and cases that it splits.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
Run by test_triton_decode.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

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
from backends.triton_gpu import cascade, splits
from backends.triton_gpu.splits import count_tiles, cut_sequence, find_parts, find_work

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
def _plan(
    starts, seq_lens, work, parts, num_seqs, target, most, window,
    HAS_WINDOW: tl.constexpr, VECTOR: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """What each program has of each sequence, and which parts the merge looks for."""
    item = tl.program_id(0)
    nobody = (0, 0, 0)
    first, last, before, size, extra = find_work(
        starts, seq_lens, num_seqs, item, target, most, window, nobody,
        HAS_WINDOW, False, 32, VECTOR, ALIKE,
    )  # fmt: skip
    for s in range(first, last):
        query_len = tl.load(starts + s + 1) - tl.load(starts + s)
        length = tl.load(seq_lens + s)
        _, tiles = count_tiles(s, query_len, length, most, window, nobody, HAS_WINDOW, False, 32)
        begin, end, part = cut_sequence(
            item, s, tiles, before, size, extra, target, 32, VECTOR, ALIKE
        )
        before += tl.where(tiles > 0, tiles + extra, 0)
        to = work + (item * num_seqs + s) * 3
        tl.store(to, begin)
        tl.store(to + 1, end)
        tl.store(to + 2, part)
    if item < num_seqs:
        first, count = find_parts(
            starts, seq_lens, item, num_seqs, target, most, window, nobody,
            HAS_WINDOW, False, 32, VECTOR, ALIKE,
        )  # fmt: skip
        tl.store(parts + item * 2, first)
        tl.store(parts + item * 2 + 1, count)


def plan(seqs, target, most, window, vector, *, alike):
    """(programs, for each: {sequence: (begin, end, part)}, for each sequence: (first, count))."""
    starts = torch.tensor([0, *(count for count, _ in seqs)], dtype=torch.int32).cumsum(0).int()
    lengths = torch.tensor([length for _, length in seqs], dtype=torch.int32)
    if alike:
        target = splits.alike_grid(len(seqs), max(length for _, length in seqs)).target
    programs = target * len(seqs) if alike else target + len(seqs)
    work = torch.zeros((programs, len(seqs), 3), dtype=torch.int32)
    parts = torch.full((len(seqs), 2), -1, dtype=torch.int32)
    _plan[(programs,)](
        starts, lengths, work, parts, len(seqs), target, most, window or 0,
        window is not None, 0 if alike else vector, alike,
    )  # fmt: skip
    ranges = [
        {s: tuple(row) for s, row in enumerate(rows) if row[1] > row[0]} for rows in work.tolist()
    ]
    return programs, ranges, parts.tolist()


def tiles_of(seqs, most, window):
    """Tiles of keys that decode visits of each sequence."""
    return [
        -(-length // TILE)
        - (0 if window is None else max(length - count + 1 - window, 0) // TILE)
        if 0 < count <= most
        else 0
        for count, length in seqs
    ]


LENGTHS = st.integers(4, 40) | st.integers(4, 5000) | st.sampled_from((32, 64, 1024, 200_000))
SEQS_OF = st.lists(st.tuples(st.integers(0, 4), LENGTHS), min_size=1, max_size=9)
QUICK = settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip


@given(SEQS_OF, st.integers(1, 33), st.integers(1, 3), st.none() | st.integers(1, 5000))
@example([(1, 100_000)] + [(1, 20)] * 15, 33, 1, None)
@QUICK
def check_plan(seqs, target, most, window):
    """Every tile belongs to one program, the merge finds every part, the work is equal."""
    wanted = tiles_of(seqs, most, window)
    for alike in (False, True):
        programs, ranges, parts = plan(seqs, target, most, window, 16, alike=alike)
        for s, (tiles, (first, count)) in enumerate(zip(wanted, parts, strict=True)):
            mine = [work[s] for work in ranges if s in work]
            ends = [0, *(end for _, end, _ in mine)]
            assert [begin for begin, _, _ in mine] == ends[:-1]
            assert ends[-1] == tiles
            if not alike:
                assert [part for _, _, part in mine] == list(range(first, first + count))
            assert len(mine) <= count
        assert len({part for work in ranges for *_, part in work.values()}) == sum(
            len(work) for work in ranges
        )
        assert all(part < programs + len(seqs) for work in ranges for *_, part in work.values())
    live = sum(tiles > 0 for tiles in wanted)
    ranges = plan(seqs, target, most, window, 16, alike=False)[1]
    used = sum(1 for work in ranges if work)
    assert used <= live + target
    if live:
        wide = live * max(1, -(-(8 * target - live) // (8 * live)))
        fair = -(-sum(wanted) // min(wide, sum(wanted)))
        assert max(sum(end - begin for begin, end, _ in work.values()) for work in ranges) <= (
            fair + 2 + 2 * live * (fair >= 8)
        )


@given(st.integers(1, 16), st.integers(1, 3000), st.integers(1, 33))
@QUICK
def check_equal_sequences(num_seqs, length, target):
    """Equal sequences are cut evenly, and not at all where they are as many as programs."""
    _, ranges, parts = plan([(1, length)] * num_seqs, target, 1, None, 16, alike=False)
    tiles = -(-length // TILE)
    each = max(1, -(-(8 * target - num_seqs) // (8 * num_seqs)))
    if each <= tiles:
        assert all(count == each for _, count in parts)
        sizes = {end - begin for work in ranges for begin, end, _ in work.values()}
        assert max(sizes) <= -(-tiles // each) + 1, sizes
    assert all(len(work) <= 1 for work in ranges) or each > tiles


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
    check_equal_sequences()
    check_the_rule()
    cascade.WORTH_BYTES = cascade.WORTH_BYTES_A_SEQUENCE = cascade.FEWEST = 0
    for one in CASES:
        check_case(one)
    splits.MAX_PLANNED = 2
    cascade.MAX_PLANNED = 2
    check_case(CASES[0].with_(name="more sequences than are planned"))
    sys.stdout.write("decode is right\n")
