"""Relations between runs that hold whatever the right answer is, so that the oracle is not alone.

Each compares two runs of the backend on related inputs, row by row, within the distance that the
oracle allows both of them. The names are the claims.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from backends import oracle
from backends.conformance.cases import AttentionCase, AttentionInputs, bits, build
from backends.conformance.report import Finding
from backends.contract import Backend, KVCache, PagedBatch

_NO_SINK = -1e4


def check_relations(backend: Backend, base: AttentionCase) -> Iterator[Finding]:
    """Every relation on one case without features; its sequences must have several tokens each."""
    for name, relation in _RELATIONS.items():
        worst = relation(backend, base)
        passed = worst <= 1
        detail = "" if passed else f"the runs differ by {worst:.2f} times what is allowed"
        yield Finding(f"relation: {name}", base.name, passed, detail, worst)


def _run(backend: Backend, inputs: AttentionInputs) -> Tensor:
    live = int(inputs.batch.query_start_loc[-1])
    return inputs.run(backend)[:live].double().cpu()


def _allowed(inputs: AttentionInputs) -> Tensor:
    return 2 * inputs.expected().allowed[: int(inputs.batch.query_start_loc[-1])]


def _worst(a: Tensor, b: Tensor, allowed: Tensor) -> float:
    """The largest distance of two rows over the distance allowed; NaN counts as infinite."""
    ratio = (a - b).norm(dim=-1) / allowed
    return float(ratio.nan_to_num(nan=torch.inf).max())


def _same(backend: Backend, base: AttentionCase, other: AttentionCase) -> float:
    inputs = build(base, backend.device)
    changed = build(other, backend.device)
    return _worst(_run(backend, inputs), _run(backend, changed), _allowed(inputs))


def _window_of_the_length(backend: Backend, base: AttentionCase) -> float:
    longest = max(length for _, length in base.seqs)
    return _same(backend, base, base.with_(window=longest))


def _endless_soft_cap(backend: Backend, base: AttentionCase) -> float:
    return _same(backend, base, base.with_(soft_cap=1e4)) if _has(backend, "soft_cap") else 0.0


def _sink_of_nothing(backend: Backend, base: AttentionCase) -> float:
    if not _has(backend, "sinks"):
        return 0.0
    inputs = build(base.with_(sinks=True), backend.device)
    if inputs.terms.sinks is not None:
        inputs.terms.sinks.fill_(_NO_SINK)
    plain = build(base, backend.device)
    return _worst(_run(backend, plain), _run(backend, inputs), _allowed(plain))


def _other_block_size(backend: Backend, base: AttentionCase) -> float:
    return _same(backend, base, base.with_(block_size=2 * base.block_size))


def _alone_or_batched(backend: Backend, base: AttentionCase) -> float:
    inputs = build(base, backend.device)
    together, starts = _run(backend, inputs), inputs.batch.query_start_loc.tolist()
    allowed, worst = _allowed(inputs), 0.0
    for s in range(len(base.seqs)):
        rows = slice(starts[s], starts[s + 1])
        alone = backend.paged_attention(
            inputs.query[rows],
            inputs.cache,
            _one_sequence(inputs.batch, s, base.seqs[s]),
            inputs.terms,
        )
        worst = max(worst, _worst(together[rows], alone.double().cpu(), allowed[rows]))
    return worst


def _batch_invariant(backend: Backend, base: AttentionCase) -> float:
    """Bitwise: with others, alone, and among others that are longer and shorter."""
    if not _has(backend, "batch_invariant"):
        return 0.0
    decoding = tuple((1, length) for _, length in base.seqs)
    kinds = (None, *backend.capabilities.quantised)
    for seqs, kind in itertools.product((base.seqs, decoding), kinds):
        case = base.with_(seqs=seqs, cache_dtype=kind, batch_invariant=True)
        inputs = build(case, backend.device)
        together, starts = inputs.run(backend).clone(), inputs.batch.query_start_loc.tolist()
        for s, seq in enumerate(seqs):
            rows = slice(starts[s], starts[s + 1])
            one = _one_sequence(inputs.batch, s, seq)
            alone = backend.paged_attention(inputs.query[rows], inputs.cache, one, inputs.terms)
            if not torch.equal(bits(alone), bits(together[rows])):
                return torch.inf
    return 0.0


def _one_sequence(batch: PagedBatch, s: int, seq: tuple[int, int]) -> PagedBatch:
    count, length = seq
    return PagedBatch(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=batch.device),
        seq_lens=batch.seq_lens[s : s + 1],
        block_table=batch.block_table[s : s + 1],
        slot_mapping=batch.slot_mapping[:count],
        max_query_len=count,
        max_seq_len=length,
    )


def _one_more_token(backend: Backend, base: AttentionCase) -> float:
    """Without each sequence's last token, the other rows are the same."""
    inputs = build(base, backend.device)
    full, allowed = _run(backend, inputs), _allowed(inputs)
    starts, worst = inputs.batch.query_start_loc.tolist(), 0.0
    for s, (count, length) in enumerate(base.seqs):
        rows = slice(starts[s], starts[s + 1] - 1)
        batch = _one_sequence(inputs.batch, s, (count - 1, length - 1))
        shorter = PagedBatch(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens - 1,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
            max_query_len=count - 1,
            max_seq_len=length - 1,
        )
        part = backend.paged_attention(inputs.query[rows], inputs.cache, shorter, inputs.terms)
        worst = max(worst, _worst(full[rows], part.double().cpu(), allowed[rows]))
    return worst


def _values_plus_one(backend: Backend, base: AttentionCase) -> float:
    """Adding 1 to every value adds 1 to every output; values on a grid, so that it is exact."""
    inputs = build(base, backend.device)
    inputs.cache.v.copy_((inputs.cache.v * 8).round().clamp(-16, 16) / 8)
    plain = _run(backend, inputs)
    allowed = _allowed(inputs)
    inputs.cache.v.add_(1)
    return _worst(plain + 1, _run(backend, inputs), allowed + _allowed(inputs))


def _repeated_heads(backend: Backend, base: AttentionCase) -> float:
    """Grouped heads are KV heads repeated."""
    inputs = build(base, backend.device)
    cache = KVCache(*(each.repeat_interleave(base.group, dim=2) for each in inputs.cache.tensors))
    repeated = backend.paged_attention(inputs.query, cache, inputs.batch, inputs.terms)
    return _worst(_run(backend, inputs), repeated.double().cpu(), _allowed(inputs))


def _same_values_quantised(backend: Backend, base: AttentionCase) -> float:
    """A quantised cache is the values it stands for; scales of 2^n, so that those are exact."""
    worst = 0.0
    for kind in backend.capabilities.quantised:
        inputs = build(base.with_(cache_dtype=kind, scales="head"), backend.device)
        cache = inputs.cache
        scaled = ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        for power, (_, scale) in enumerate(scaled):
            if scale is not None:
                scale.copy_(2.0 ** (power - 4 - torch.arange(len(scale))))
        widened = KVCache(
            *(oracle.stands_for(*each).to(base.dtype).to(backend.device) for each in scaled)
        )
        plain = backend.paged_attention(inputs.query, widened, inputs.batch, inputs.terms)
        live = int(inputs.batch.query_start_loc[-1])
        there = plain[:live].double().cpu()
        worst = max(worst, _worst(_run(backend, inputs), there, _allowed(inputs)))
    return worst


def _pairs_of_latents(backend: Backend, base: AttentionCase) -> float:
    """Latents are keys, and values that are their first numbers and then zeros."""
    size = base.head_dim - base.head_dim // 4
    if backend.capabilities.max_latent_dim < base.head_dim:
        return 0.0
    inputs = build(base.with_(num_kv_heads=1, value_dim=size), backend.device)
    values = inputs.cache.k.clone()
    values[..., size:] = 0
    pairs = KVCache(inputs.cache.k, values)
    plain = backend.paged_attention(inputs.query, pairs, inputs.batch, inputs.terms)
    live = int(inputs.batch.query_start_loc[-1])
    there = plain[:live, :, :size].double().cpu()
    return _worst(_run(backend, inputs), there, _allowed(inputs))


def _has(backend: Backend, feature: str) -> bool:
    return feature in backend.capabilities.features


_RELATIONS: dict[str, Callable[[Backend, AttentionCase], float]] = {
    "a window of the length is no window": _window_of_the_length,
    "an endless soft cap is none": _endless_soft_cap,
    "a sink of nothing is none": _sink_of_nothing,
    "another block size": _other_block_size,
    "alone or batched": _alone_or_batched,
    "batch-invariant: alone or batched, bit by bit": _batch_invariant,
    "one more token changes no earlier row": _one_more_token,
    "values plus one": _values_plus_one,
    "grouped heads are repeated heads": _repeated_heads,
    "a quantised cache is the values it stands for": _same_values_quantised,
    "latents are keys whose first numbers are values": _pairs_of_latents,
}
