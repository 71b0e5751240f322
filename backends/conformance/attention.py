"""The checks that every attention case passes through, and the cases themselves.

accuracy: within the oracle's distance. poison: no NaN, which only a forbidden read can bring.
untouched: arguments, gaps and padding keep every bit. repeatable: a second run is bitwise equal, a
moving error is a race. permutation: so is a run with the blocks elsewhere.
"""

from collections.abc import Iterator

import torch

from backends.conformance.cases import AttentionCase, AttentionInputs, bits, build
from backends.conformance.report import Finding
from backends.conformance.spread import spread_cases
from backends.contract import Backend

_LARGEST, _LARGEST_ON_A_GPU = 1 << 25, 1 << 30  # the cost of a case, about: its oracle is on a CPU
RELATIVE_LIMIT = {torch.float32: 1e-5, torch.float16: 4e-4, torch.bfloat16: 3e-3}
"""||out - exact|| / ||exact|| at most, whatever the rows say."""


def check_attention(backend: Backend, case: AttentionCase) -> Iterator[Finding]:
    """Run a case three times and compare everything that has to be compared."""
    inputs = build(case, backend.device)
    before = [bits(memory) for memory in inputs.guarded]
    edges = bits(inputs.out_memory)
    expected = inputs.expected()
    out = inputs.run(backend).clone()
    live = sum(count for count, _ in case.seqs)
    nans = int(out[:live].isnan().sum())
    yield _finding("poison", case, "" if nans == 0 else f"{nans} NaN in the output")
    if nans == 0:
        ratio, relative = expected.worst_ratio(out), expected.relative_error(out)
        limit = RELATIVE_LIMIT[case.dtype]
        good = ratio <= 1 and relative <= limit
        detail = f"the error of a row is {ratio:.2f} times the tolerance"
        detail += f"; of all rows {relative:.1e}, at most {limit}"
        yield _finding("accuracy", case, "" if good else detail, ratio)
    yield _finding("untouched", case, _strays(inputs, before, edges, live))
    inputs.run(backend)
    same = torch.equal(bits(inputs.out), bits(out))
    yield _finding("repeatable", case, "" if same else "a second run gave other bits")
    moved = build(case, backend.device, layout=1).run(backend)
    same = torch.equal(bits(moved[:live]), bits(out[:live]))
    yield _finding("permutation", case, "" if same else "other bits with the blocks elsewhere")


def attention_cases(backend: Backend, *, quick: bool) -> tuple[AttentionCase, ...]:
    """The cases that the backend's capabilities allow; quick: the fewest that cover each feature.

    Quick cases stay small enough for an interpreter; the whole has larger ones where
    there is a GPU.
    """
    can = backend.capabilities
    largest = _LARGEST if backend.device.type == "cpu" else _LARGEST_ON_A_GPU
    cases = () if quick else tuple(spread_cases(can, largest))
    for dtype in can.dtypes:
        plain = _quick_cases() if quick else _all_cases()
        for case in (*plain, *_latent_cases(quick=quick)):
            cases += (case.with_(dtype=dtype, name=f"{case.name}, {str(dtype)[6:]}"),)
        for kind in can.quantised:
            quantised = _quantised_cases(quick=quick)
            for case in (*quantised, *_latent_cases(quick=quick, quantised=True)):
                name = f"{case.name}, {str(dtype)[6:]} beside {str(kind)[6:]}"
                cases += (case.with_(dtype=dtype, cache_dtype=kind, name=name),)
    return tuple(
        case
        for case in cases
        if case.head_dim <= (can.max_latent_dim if case.value_dim else can.max_head_dim)
        and (case.group <= can.max_group_size or case.value_dim)
        and (case.window is None or "window" in can.features)
        and (case.soft_cap is None or "soft_cap" in can.features)
        and (not case.sinks or "sinks" in can.features)
        and (not case.batch_invariant or "batch_invariant" in can.features)
    )


def _quick_cases() -> tuple[AttentionCase, ...]:
    small = AttentionCase("", (), num_kv_heads=1, head_dim=16, block_size=4)
    mixed, small_leads = ((1, 9), (5, 5), (0, 0), (3, 71)), ((1, 9), (2, 7))
    return (
        small.with_(name="decode, prefill and chunk", seqs=mixed, padding=2),
        small.with_(name="window", seqs=mixed, window=4),
        small.with_(name="soft cap", seqs=((1, 9), (4, 7)), soft_cap=2.0),
        small.with_(name="sinks, strided", seqs=((1, 5), (3, 4)), sinks=True, strided=True),
        small.with_(name="sinks that lead by 90", seqs=small_leads, sinks=True, sink_lead=90.0),
        small.with_(name="sinks that lead by 12", seqs=small_leads, sinks=True, sink_lead=12.0),
        small.with_(name="values of 0", seqs=small_leads, values="zero"),
        small.with_(name="group 3, head_dim 24", seqs=((2, 6),), group=3, head_dim=24),
        small.with_(name="two KV heads", seqs=((1, 8), (2, 3)), num_kv_heads=2),
        small.with_(name="a shared prefix", seqs=((1, 9), (2, 12), (1, 30)), shared=8),
        small.with_(
            name="a prefix told late", seqs=((1, 9), (1, 30)), shared=8, shared_now=(0, 2, 8)
        ),
    )


def _all_cases() -> tuple[AttentionCase, ...]:
    base = AttentionCase("", ((1, 37), (9, 9), (5, 133), (0, 0), (1, 1), (2, 64)), padding=3)
    cases = [
        base.with_(name="decode, prefill and chunk"),
        base.with_(name="decode alone", seqs=((1, 300), (1, 16), (1, 17), (1, 15), (1, 1))),
        base.with_(name="long prefill", seqs=((150, 150), (70, 200))),
        base.with_(name="strided", strided=True),
        base.with_(name="soft cap", soft_cap=3.0),
        base.with_(name="sinks", sinks=True),
        base.with_(name="all features", window=20, soft_cap=5.0, sinks=True, strided=True),
        base.with_(name="all logits equal", values="equal"),
        base.with_(name="one huge logit", values="huge"),
        base.with_(name="one huge logit, capped", values="huge", soft_cap=30.0),
        base.with_(name="nothing to do", seqs=((0, 0), (0, 5))),
        base.with_(name="window, long prefill", seqs=((100, 170),), window=33),
        base.with_(name="tiny values", values="tiny"),
        base.with_(name="tiny values, sinks", values="tiny", sinks=True, sink_lead=12.0),
        *_shared(base),
        base.with_(name="batch-invariant", batch_invariant=True),
    ]
    cases += [
        base.with_(name=f"sinks that lead by {n:g}", sinks=True, sink_lead=n)
        for n in (-1e30, -90.0, 9.0, 15.0, 80.0, 87.0, 90.0, 110.0, 1e4, 1e30)
    ]
    cases += [base.with_(name=f"window {w}", window=w) for w in (1, 2, 16, 17, 63, 1000)]
    cases += [
        base.with_(
            name=f"lengths around {n}", seqs=((1, n - 1), (1, n), (1, n + 1), (n, n), (3, n))
        )
        for n in (16, 32, 64)
    ]
    return (*cases, *_shapes(base))


def _shared(base: AttentionCase) -> tuple[AttentionCase, ...]:
    return (
        base.with_(name="a shared prefix", seqs=((1, 65), (9, 90), (1, 300)), shared=64),
        base.with_(
            name="a prefix told late",
            seqs=((1, 65), (1, 90), (1, 99), (1, 300)),
            shared=64,
            shared_now=(1, 3, 64),
        ),
        base.with_(
            name="no prefix, told late",
            seqs=((1, 65), (1, 90), (1, 300)),
            shared=64,
            shared_now=(0, 0, 0),
        ),
    )


def _shapes(base: AttentionCase) -> list[AttentionCase]:
    """Return cases of all shapes: mixed batches, few tokens over long contexts, all sizes."""
    many = ((1, 2100), (1, 9), (1, 700), (1, 1), (1, 260), (1, 33))
    cases = [
        base.with_(name="ragged", seqs=many),
        base.with_(name="one long, many short", seqs=((1, 3000), *[(1, 20)] * 20)),
        base.with_(name="to verify", seqs=((4, 700), (1, 90), (3, 3), (2, 1300)), group=4),
        base.with_(name="a mixed step", seqs=(*[(1, 500)] * 6, (4, 900), (70, 1100))),
        base.with_(name="a mixed step, skewed", seqs=(*many, (33, 2900), (128, 128)), group=4),
    ]
    cases += [base.with_(name=f"block size {n}", block_size=n) for n in (1, 5, 8, 32, 64, 128)]
    cases += [base.with_(name=f"group {g}", group=g) for g in (1, 3, 5, 8, 16)]
    dims = (8, 16, 80, 96, 112, 128, 192, 256)
    return cases + [base.with_(name=f"head_dim {d}", head_dim=d) for d in dims]


def _quantised_cases(*, quick: bool) -> tuple[AttentionCase, ...]:
    if quick:
        small = AttentionCase("", ((1, 9), (4, 7)), head_dim=16, block_size=4)
        return (
            small.with_(name="a scale a head", scales="head", soft_cap=2.0, sinks=True),
            small.with_(name="a scale a cache, strided", scales="tensor", strided=True, window=4),
            small.with_(
                name="a prefix told late", seqs=((1, 9), (1, 30)), shared=8, shared_now=(0, 2, 8)
            ),
        )
    base = AttentionCase("", ((1, 37), (9, 9), (5, 133), (0, 0), (1, 1)), padding=3, scales="head")
    cases = (
        base.with_(name="a scale a head"),
        base.with_(name="a scale a cache", scales="tensor"),
        base.with_(name="no scales", scales="none"),
        base.with_(name="tiny scales", scales="tiny"),
        base.with_(name="tiny scales, sinks", scales="tiny", sinks=True, sink_lead=20.0),
        base.with_(name="decode alone", seqs=((1, 300), (1, 16), (1, 17), (1, 1))),
        base.with_(name="long prefill", seqs=((150, 150), (70, 200))),
        base.with_(name="all features", window=20, soft_cap=5.0, sinks=True, strided=True),
        base.with_(name="window, long prefill", seqs=((100, 170),), window=33),
        base.with_(name="one huge logit", values="huge"),
        base.with_(name="all logits equal", values="equal", seqs=((1, 37), (70, 900))),
        base.with_(name="batch-invariant", batch_invariant=True),
        *_shared(base),
    )
    return (*cases, *_shapes(base))


def _latent_cases(*, quick: bool, quantised: bool = False) -> tuple[AttentionCase, ...]:
    """Latents: small ones, and those of DeepSeek, whose last 64 numbers are rotated."""
    mixed = ((1, 9), (5, 5), (0, 0), (3, 71))
    small = AttentionCase(
        "latents",
        mixed,
        num_kv_heads=1,
        group=5,
        head_dim=24,
        value_dim=16,
        block_size=4,
        padding=2,
    )
    features = {"window": 9, "soft_cap": 2.0, "sinks": True, "strided": True}
    if quantised:
        few = (small.with_(name="latents, a scale", scales="head", group=2),)
        wide = small.with_(head_dim=576, value_dim=512, block_size=16, scales="tensor")
        short = ((1, 300), (9, 90))
        more = (
            wide.with_(name="latents of 512 + 64", seqs=short),
            wide.with_(name="latents, all features", seqs=short, **features),
            wide.with_(name="latents, batch-invariant", seqs=short, batch_invariant=True),
            wide.with_(name="latents, ragged", seqs=((1, 2100), (1, 9), (1, 700), (1, 1))),
            wide.with_(name="latents, a shared prefix", seqs=((1, 65), (9, 90)), shared=64),
        )
        return few if quick else (*few, *more)
    if quick:
        all_ = small.with_(name="latents, all features", seqs=((1, 9), (4, 17)), **features)
        return small, all_
    base = small.with_(group=16, head_dim=576, value_dim=512, block_size=16)
    cases = [
        base.with_(name="latents", seqs=((1, 300), (9, 90), (0, 0), (1, 1), (70, 133))),
        base.with_(name="latents, all features", seqs=((1, 400), (4, 170), (70, 90)), **features),
        base.with_(name="latents, ragged", seqs=((1, 2100), (1, 9), (1, 700), (1, 1), (1, 65))),
        base.with_(name="latents, one long", seqs=((1, 3000), *[(1, 20)] * 20)),
        base.with_(name="latents, to verify", seqs=((4, 700), (1, 90), (3, 3), (2, 1300))),
        base.with_(name="latents, a window", seqs=((1, 900), (40, 300)), window=100),
        base.with_(name="latents, batch-invariant", seqs=((1, 900), (9, 30)), batch_invariant=True),
        base.with_(name="latents, one huge logit", seqs=((1, 300), (5, 40)), values="huge"),
        base.with_(name="latents, a shared prefix", seqs=((1, 65), (9, 90)), shared=64),
    ]
    cases += [
        base.with_(name=f"latents, {n} heads", group=n, seqs=((1, 700), (3, 170), (40, 65)))
        for n in (1, 5, 32, 64, 128)
    ]
    cases += [
        base.with_(name=f"latents, block size {n}", block_size=n, seqs=((1, 200), (9, 65)))
        for n in (1, 5, 64, 128)
    ]
    cases += [
        base.with_(name=f"latents of {v} + {rest}", head_dim=v + rest, value_dim=v, seqs=mixed)
        for v, rest in ((16, 0), (48, 20), (64, 8), (256, 32))
    ]
    return tuple(cases)


def _strays(
    inputs: AttentionInputs, before: list[torch.Tensor], edges: torch.Tensor, live: int
) -> str:
    """Return the name of memory that changed without a reason, or "" if none did."""
    caches = ["cache.k", "cache.v"][: len(inputs.cache.tensors)]
    names = ["query", *caches, "query_start_loc", "seq_lens", "block_table", "slot_mapping"]
    names += ["sinks or scales"] * (len(inputs.guarded) - len(names))
    strays = [
        name
        for name, memory, old in zip(names, inputs.guarded, before, strict=True)
        if not torch.equal(bits(memory), old)
    ]
    out, memory = inputs.out, inputs.out_memory.clone()
    memory.as_strided(out.size(), out.stride(), out.storage_offset())[:live] = torch.nan
    if not torch.equal(bits(memory), edges):
        strays.append("the memory around the output's live rows")
    return "changed: " + ", ".join(strays) if strays else ""


def _finding(check: str, case: AttentionCase, detail: str, ratio: float | None = None) -> Finding:
    return Finding(check, case.name, passed=not detail, detail=detail, ratio=ratio)
