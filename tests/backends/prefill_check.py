"""Prefill in Triton's interpreter: the order of work on random lengths, and scales of any sign.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
Run by test_triton_prefill.
"""

import sys
from dataclasses import replace

import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import backends
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.conformance.cases import bits, build
from backends.triton_gpu.decode import cascade
from backends.triton_gpu.prefill import order as prefill_order
from backends.triton_gpu.prefill.order import Items
from backends.triton_gpu.shared.place import Place
from backends.triton_gpu.shared.soft_cap import tanh

BASE = AttentionCase("", ((20, 40), (1, 9), (3, 3)), num_kv_heads=1, head_dim=16, padding=1)
BYTES = BASE.with_(cache_dtype=torch.float8_e4m3fn, scales="head", num_kv_heads=2)
QUANTISED = (
    BYTES.with_(name="scales", dtype=torch.float16),
    BYTES.with_(name="no scales, float32", scales="none", soft_cap=2.0),
    BYTES.with_(name="one scale, a window, sinks", scales="tensor", window=7, sinks=True),
)
PLACE = Place(interpreting=True)
TILE = 128


def order(batch, items, shortest, window):
    """The list of work."""
    plan = prefill_order.plan_order(PLACE, batch.device, items, has_window=window is not None)
    return prefill_order.keep_order(plan, batch, shortest=shortest, window=window or 0)


def check_kept_order():
    """The list is made once for a batch that keeps it, and the same for one that does not."""
    batch = build(BASE, PLACE.device).batch
    items = Items(8, 1, TILE, len(batch.slot_mapping), 4, split=False)
    keeping = replace(batch, kept={})
    work = order(keeping, items, 1, None)
    assert order(keeping, items, 1, None) is work
    assert order(keeping, items, 2, None) is not work
    anew = order(replace(batch, kept=None), items, 1, None)
    assert anew is not work
    entry = prefill_order.ENTRY.value
    ranks = slice(entry, entry * (1 + int(work[0])))
    assert anew[0] == work[0] > 0
    assert torch.equal(anew[ranks], work[ranks])


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=9),
    st.sampled_from((1, 8, 16, 24)),
    st.integers(1, 2),
    st.sampled_from((4, 128)),
    st.integers(0, 3),
)
@settings(max_examples=15, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
def check_order(seqs, tokens, shortest, at_once, padding):
    counts = [count for count, _ in seqs]
    lengths = [count + before for count, before in seqs]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    rows = int(starts[-1]) + padding
    batch = backends.PagedBatch(
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        torch.zeros(len(seqs), 1, dtype=torch.int32),
        torch.full((rows,), -1, dtype=torch.int64),
        max(counts),
        max(lengths),
    )
    prefill_order.SEQS = at_once
    items = Items(tokens, 1, 128, rows // tokens + len(seqs), 4, split=False)
    work = order(batch, items, shortest, None).tolist()
    wanted, live = [], [s for s in range(len(seqs)) if counts[s] >= shortest]
    for s in sorted(live, key=lambda s: (lengths[s], -s)):  # the last first, from the end
        before, own = lengths[s] - counts[s], []
        for t in range(0, counts[s], tokens):
            here = (min(tokens, counts[s] - t), before + t, lengths[s], before)
            own.append((s, int(starts[s]) + t, *here))
        wanted = (own if len({each[0] for each in wanted}) % 2 else own[::-1]) + wanted
    entry = prefill_order.ENTRY.value
    assert work[:2] == [len(wanted), 0]
    assert [tuple(work[entry * (1 + i) :][:6]) for i in range(work[0])] == wanted


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9000)), min_size=1, max_size=6),
    st.sampled_from((8, 16, 24)),
    st.integers(1, 9),
    st.sampled_from((1, 2, 8)),
    st.none() | st.integers(1, 3000),
)
@settings(max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
def check_pieces(seqs, tokens, programs, slices, window):
    """Each tile has all its pieces, side by side, none empty."""
    counts = [count for count, _ in seqs]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    lengths = torch.tensor([count + before for count, before in seqs], dtype=torch.int32)
    rows = torch.full((int(starts[-1]),), -1, dtype=torch.int64)
    table = torch.zeros(len(seqs), 1, dtype=torch.int32)
    batch = backends.PagedBatch(starts, lengths, table, rows, 40, 9040)
    items = Items(tokens, slices, TILE, len(rows) // tokens + len(seqs), programs, split=True)
    work = order(batch, items, 1, window).tolist()
    entry = prefill_order.ENTRY.value
    ranks = [tuple(work[entry * (1 + i) :][:entry]) for i in range(work[0])]
    assert len(ranks) <= items.ranks
    found = {}
    for rank, (s, row, count, position, *_, piece, pieces) in enumerate(ranks):
        low = 0 if window is None else max(position - window + 1, 0) // TILE
        assert 1 <= pieces <= -(-(position + count) // TILE) - low
        found.setdefault((s, row, count, pieces), []).append((rank, piece))
    for (*_, pieces), each in found.items():
        assert each == [(each[0][0] + piece, piece) for piece in range(pieces)]
    wanted = [
        (s, int(starts[s]) + t, min(tokens, counts[s] - t))
        for s in range(len(seqs))
        for t in range(0, counts[s], tokens)
    ]
    assert sorted(key[:3] for key in found) == wanted


def check_scale(case, scale):
    """Any finite scale, below 0 and 0 included."""
    backend, inputs = backends.get_backend("triton"), build(case, PLACE.device)
    inputs = replace(inputs, terms=replace(inputs.terms, scale=scale))
    assert inputs.expected().worst_ratio(inputs.run(backend)) <= 1, (case.name, scale)


@triton.jit
def _tanh_of(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tanh(tl.load(x + at)))


def check_tanh():
    """Within 5e-7 of the value, as a share of it, near 0 as well as where it is 1."""
    sizes = torch.cat([torch.logspace(-6, 3, 4095), torch.tensor([torch.inf])])
    x = torch.cat([sizes, -sizes])
    out = torch.empty_like(x)
    _tanh_of[(1,)](x, out, x.numel())
    errors = (out.double() / x.double().tanh() - 1).abs()
    assert errors.max() < 6e-7, errors.max()


HEADS_FIRST = (
    BASE.with_(name="decode", seqs=((1, 40), (1, 9)), num_kv_heads=2, group=3),
    BASE.with_(name="a few tokens", seqs=((3, 40), (2, 9)), num_kv_heads=2, group=2),
    BASE.with_(name="prefill", seqs=((40, 50), (1, 9)), num_kv_heads=2, group=2),
    BASE.with_(name="shared", seqs=((1, 400), (1, 390)), shared=384, group=2),
    BASE.with_(name="latents", seqs=((3, 40), (1, 9)), group=3, head_dim=24, value_dim=16),
    BASE.with_(name="tiles of latents", seqs=((40, 50),), group=64, head_dim=24, value_dim=16),
)


def check_heads_first():
    """A query whose heads come first gives the same bits, wherever its heads are."""
    for case in HEADS_FIRST:
        inputs = build(case.with_(dtype=torch.float16), PLACE.device)
        live = sum(count for count, _ in case.seqs)
        wanted = bits(inputs.run(backends.get_backend("triton"))[:live])
        query = inputs.query
        for gap in (0, 5):
            memory = query.new_full((query.shape[1], len(query) + gap, query.shape[2]), torch.nan)
            moved = memory.transpose(0, 1)[: len(query)].copy_(query)
            assert moved.stride(0) < moved.stride(1)
            inputs.out.fill_(torch.nan)
            got = replace(inputs, query=moved).run(backends.get_backend("triton"))[:live]
            assert torch.equal(bits(got), wanted), (case.name, gap)


if __name__ == "__main__":
    cascade.WORTH_BYTES = cascade.WORTH_BYTES_A_SEQUENCE = cascade.FEWEST = 0
    check_heads_first()
    check_tanh()
    check_kept_order()
    check_order()
    check_pieces()
    for number in (-0.3, 0.0, 0.3):
        check_scale(BASE, number)
        check_scale(BASE.with_(soft_cap=2.0, window=7, sinks=True, dtype=torch.float16), number)
    backend = backends.get_backend("triton")
    backend._capabilities = replace(backend.capabilities, quantised=(torch.float8_e4m3fn,))
    for case in QUANTISED:
        for finding in check_attention(backend, case):
            assert finding.passed, finding
    sys.stdout.write("prefill is right\n")
