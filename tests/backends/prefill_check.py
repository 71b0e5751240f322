"""Prefill in Triton's interpreter: the order of work on random lengths, and scales of any sign.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
Run by test_triton_prefill.
"""

import sys
from dataclasses import replace

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import backends
from backends import oracle
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.conformance.cases import build
from backends.triton_gpu import prefill_order
from backends.triton_gpu.place import Place

BASE = AttentionCase("", ((20, 40), (1, 9), (3, 3)), num_kv_heads=1, head_dim=16, padding=1)
BYTES = BASE.with_(cache_dtype=torch.float8_e4m3fn, scales="head", num_kv_heads=2)
QUANTISED = (
    BYTES.with_(name="scales", dtype=torch.float16),
    BYTES.with_(name="no scales, float32", scales="none", soft_cap=2.0),
    BYTES.with_(name="one scale, a window, sinks", scales="tensor", window=7, sinks=True),
)
PLACE = Place(interpreting=True)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=9),
    st.sampled_from((1, 8, 16)),
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
    work = prefill_order.order_tiles(PLACE, batch, tokens=tokens, shortest=shortest).tolist()
    wanted, live = [], [s for s in range(len(seqs)) if counts[s] >= shortest]
    for s in sorted(live, key=lambda s: (lengths[s], -s)):  # the last first, from the end
        before, own = lengths[s] - counts[s], []
        for t in range(0, counts[s], tokens):
            here = (min(tokens, counts[s] - t), before + t, lengths[s], before)
            own.append((s, int(starts[s]) + t, *here))
        wanted = (own if len({each[0] for each in wanted}) % 2 else own[::-1]) + wanted
    entry = prefill_order.ENTRY.value
    assert work[0] == len(wanted)
    assert [tuple(work[entry * (1 + i) :][:6]) for i in range(work[0])] == wanted


def check_scale(case, scale):
    """Any finite scale, below 0 and 0 included."""
    backend, inputs = backends.get_backend("triton"), build(case, PLACE.device)
    caches = (inputs.query, inputs.k_cache, inputs.v_cache, inputs.batch)
    features = {"window": case.window, "soft_cap": case.soft_cap, "sinks": inputs.sinks}
    expected = oracle.attention(*caches, scale=scale, **features)
    out = backend.paged_attention(*caches, scale=scale, **features, out=inputs.out)
    assert expected.worst_ratio(out) <= 1, (case.name, scale)


if __name__ == "__main__":
    check_order()
    for number in (-0.3, 0.0, 0.3):
        check_scale(BASE, number)
        check_scale(BASE.with_(soft_cap=2.0, window=7, sinks=True, dtype=torch.float16), number)
    triton = backends.get_backend("triton")
    triton._capabilities = replace(triton.capabilities, quantised=(torch.float8_e4m3fn,))
    for case in QUANTISED:
        for finding in check_attention(triton, case):
            assert finding.passed, finding
    sys.stdout.write("prefill is right\n")
