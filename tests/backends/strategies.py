"""Random ragged cases of attention and of operations on states."""

from hypothesis import strategies as st

from backends.conformance import AttentionCase
from backends.conformance.states import LAYERS, MODES, StateCase


@st.composite
def attention_cases(
    draw, dtypes, *, quantised=(), longest=90, most_seqs=5, head_dims=(4, 16, 24, 64, 80)
):
    """Any mix of decode, prefill, chunks and padding, with any features and kind of cache."""
    kind = draw(st.sampled_from((None, None, *quantised)))
    seqs = []
    for _ in range(draw(st.integers(1, most_seqs))):
        length = draw(st.integers(0, longest))
        seqs.append((draw(st.integers(0, min(length, 20))), length))
    head_dim, value_dim = draw(st.sampled_from(head_dims)), 0
    if draw(st.integers(0, 3)) == 0:  # latents
        value_dim = draw(st.integers(1, head_dim))
    return AttentionCase(
        name="random",
        seqs=tuple(seqs),
        num_kv_heads=1 if value_dim else draw(st.integers(1, 3)),
        group=draw(st.sampled_from((1, 2, 3, 4, 5, 8))),
        head_dim=head_dim,
        value_dim=value_dim,
        block_size=draw(st.sampled_from((1, 2, 3, 4, 8, 16, 32))),
        dtype=draw(st.sampled_from(dtypes)),
        cache_dtype=kind,
        scales="none" if kind is None else draw(st.sampled_from(("none", "tensor", "head"))),
        window=draw(st.none() | st.integers(1, longest + 5)),
        soft_cap=draw(st.none() | st.sampled_from((0.5, 5.0, 50.0))),
        sinks=draw(st.booleans()),
        sink_lead=draw(st.sampled_from((0.0, 0.0, 0.0, 12.0, 90.0, -90.0))),
        values=draw(st.sampled_from(("random", "random", "equal", "huge", "tiny", "zero"))),
        strided=draw(st.booleans()),
        padding=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**20)),
    )


@st.composite
def state_cases(draw, dtypes):
    """Any mix of modes, some tokens, any layer, dtypes, sizes and pages."""
    seqs = ["new", *draw(st.lists(st.sampled_from(MODES), max_size=5))]
    layer, dtype = draw(st.sampled_from(LAYERS)), draw(st.sampled_from(dtypes))
    groups, key_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    query_len = draw(st.sampled_from([1, 2, 3, 5, 9, 20]))
    return StateCase(
        name="random",
        layer=layer,
        seqs=tuple(seqs),
        dims=(draw(st.integers(1, 6 if layer == "conv" else 40)), draw(st.integers(1, 40))),
        num_heads=groups * key_heads,
        num_key_heads=key_heads,
        dtype=dtype,
        state_dtype=dtype if layer == "conv" else draw(st.sampled_from(dtypes)),
        options=draw(st.booleans()),
        extreme=draw(st.booleans()),
        pages=draw(st.sampled_from(("whole", "aligned", "odd"))),
        query_len=query_len,
        num_drafts=draw(st.integers(0, max(0, query_len - 2))),
        seed=draw(st.integers(0, 2**20)),
    )
