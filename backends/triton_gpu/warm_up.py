"""Compile what layers need before the first request: every variant that their calls can ask for.

Each operation is called as layers will call it, on batches in which no sequence has a query token,
so that kernels start and return. Which variants of attention there are, the planners say: batches
of every number of sequences and of query tokens by which plans may differ are planned, which
compiles nothing, and those are called whose plans ask for a variant that none before did.

Where kernels are compiled, other processes compile them while the calls are made (`ahead.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from threading import Thread
from typing import cast

import torch

from backends.contract import (
    AttentionTerms,
    Backend,
    IndexCall,
    LayerCall,
    PagedBatch,
    SharedPrefix,
)
from backends.sparse import SparseBackend
from backends.triton_gpu import ahead
from backends.triton_gpu.decode import cascade, decode
from backends.triton_gpu.decode.splits import VECTORS
from backends.triton_gpu.hopper.prefill import LONG, ROWS, heads_an_item
from backends.triton_gpu.latent import latent
from backends.triton_gpu.paged_attention import MOST_ROWS, Known, plan_attention
from backends.triton_gpu.shared.blocks import small_blocks
from backends.triton_gpu.shared.launch import Variant, find_names
from backends.triton_gpu.shared.place import Place
from backends.triton_gpu.sparse.choose_tokens import level_widths


def warm_up(
    backend_at: Callable[[Place], Backend],
    place: Place,
    layers: Sequence[LayerCall],
    max_num_seqs: int,
    max_query_len: int,
) -> None:
    """Call every operation in every way that asks for a variant; see `Backend.warmup`.

    Args:
        backend_at: the backend's class.
        place: the place of the launches.
        layers: how layers will call; none: they are not known yet.
        max_num_seqs: the most sequences of a batch.
        max_query_len: the most query tokens of a sequence.
    """
    if not layers:
        if place.launches:
            ahead.expect()
            with suppress(RuntimeError):  # no threads
                Thread(target=find_names, daemon=True).start()
        return
    calls = partial(calls_at, backend_at, tuple(layers), max_num_seqs, max_query_len)
    if place.launches:
        ahead.make(calls, place, place.gpu(layers[0].cache.tensors[0].device))
    else:
        for call in calls(place):
            call()


def calls_at(
    backend_at: Callable[[Place], Backend],
    layers: Sequence[LayerCall],
    max_num_seqs: int,
    max_query_len: int,
    place: Place,
) -> list[Callable[[], object]]:
    """The calls of a warm-up; of each layer those that take longest to compile first."""
    backend = backend_at(place)
    calls: list[Callable[[], object]] = []
    for layer in layers:
        calls += _calls(backend, place, layer, max_num_seqs, max_query_len)
    caches = [tensor for layer in layers for tensor in layer.cache.tensors]
    first = torch.zeros(1, 2, dtype=torch.int64, device=caches[0].device)  # onto itself
    return [*calls, partial(backend.copy_blocks, caches, first)]


def _calls(
    backend: Backend, place: Place, layer: LayerCall, max_num_seqs: int, max_query_len: int
) -> Iterator[Callable[[], object]]:
    """Those of a layer; what takes longest to compile first."""
    written, met = layer, set[Variant]()
    layer = replace(layer, cache=small_blocks(layer.cache))  # as attention sees them
    for batch in _batches(place, layer, max_num_seqs, max_query_len):
        for alike in {False, layer.terms.batch_invariant}:
            terms = replace(layer.terms, batch_invariant=alike)
            asked = variants_asked(place, layer, batch, terms)
            if not asked <= met:
                met |= asked
                yield partial(_attend, backend, layer, batch, terms)
    for num_seqs in batch_sizes(max_num_seqs):
        if layer.shared_prefix and num_seqs <= VECTORS[-1]:
            batch = _idle(layer.cache.k.device, num_seqs, num_seqs, 1)
            yield partial(_share, place, layer, batch)
    if layer.num_chosen:
        for rows in batch_sizes(max_num_seqs * max_query_len):
            batch = _idle(layer.cache.k.device, rows, rows, 1)
            yield partial(_attend_chosen, backend, layer, batch)
    if layer.index is not None:
        yield partial(_choose, backend, layer, layer.index)
    yield partial(_write, backend, written, _idle(layer.cache.k.device, 1, 1, 1))


def _batches(
    place: Place, layer: LayerCall, max_num_seqs: int, max_query_len: int
) -> Iterator[PagedBatch]:
    """Batches among whose plans are all that calls can ask for; prefill's first."""
    device, group = layer.cache.k.device, layer.num_q_heads // layer.cache.k.shape[2]
    most = latent.MOST_ROWS if layer.cache.is_latent else MOST_ROWS
    few = range(2, min(max_query_len, most // group + 1) + 1)
    for num_seqs in (1, 2) if max_query_len > 1 else ():
        for query_len in sorted({2, max_query_len}):
            yield _idle(device, num_seqs, query_len, query_len)
        query_len = min(max_query_len, MOST_ROWS + 1)
        yield _idle(device, num_seqs, query_len, query_len, LONG)
    yield from _many_rows(place, layer, max_num_seqs, max_query_len)
    for num_seqs in batch_sizes(max_num_seqs):
        for reach in (1, LONG):  # which decode does not ask for, but heads that prefill takes
            yield _idle(device, num_seqs, num_seqs, 1, reach)
        for query_len in few:
            yield _idle(device, num_seqs, 2 * num_seqs, query_len)
    for query_len in few if layer.shared_prefix else ():  # decode takes no several tokens then
        batch = _idle(device, 2, 4, query_len, max_seq_len=2)
        yield replace(batch, shared_prefix=SharedPrefix(0, 2, 1))


def _many_rows(
    place: Place, layer: LayerCall, max_num_seqs: int, max_query_len: int
) -> Iterator[PagedBatch]:
    """Batches for every pack of query heads, of up to two rounds of Hopper's programs.

    Of short sequences and of long ones, and of as few and as many as make the rows: the shape of
    items and whether keys are cut depend on all of these.
    """
    device, group = layer.cache.k.device, layer.num_q_heads // layer.cache.k.shape[2]
    tokens = ROWS // heads_an_item(group, 1, ROWS)
    a_round = ROWS * place.num_multiprocessors(device) // layer.num_q_heads
    by_pack: dict[int, list[int]] = {}
    for query_len in (*range(tokens, max(2 * a_round, ROWS * group), tokens), max_query_len):
        if query_len <= max_query_len:
            by_pack.setdefault(heads_an_item(group, query_len, ROWS), []).append(query_len)
    step = max(1, a_round // tokens // 8)
    for lengths in by_pack.values():
        longest = max(lengths)
        most_rows = min(longest * max_num_seqs, 2 * a_round)
        for reach in (1, LONG) if lengths[0] < LONG else (LONG,):
            for query_len in (*lengths[::step], longest):
                yield _idle(device, 1, query_len, query_len, reach)
            for rows in (*range(lengths[0], most_rows, step * tokens), most_rows):
                for num_seqs in sorted({min(2, max_num_seqs), min(rows, max_num_seqs)}):
                    yield _idle(device, num_seqs, rows, longest, reach)


def variants_asked(
    place: Place, layer: LayerCall, batch: PagedBatch, terms: AttentionTerms
) -> set[Variant]:
    """The variants that a call of attention launches."""
    query, cache = _queries(layer, batch), layer.cache
    out = query.new_empty((*query.shape[:2], cache.v.shape[3]))
    plan = plan_attention(place, query, cache, batch, out, terms)
    if isinstance(plan, Known):
        return {*_variants(plan.decode), *_variants(plan.prefill)}
    few = (plan.part, plan.merge) if plan.most else ()
    tiles = (plan.tile, plan.order) if batch.max_query_len > plan.most else ()
    return {*_variants(few), *_variants(tiles)}


def _variants(plan: object) -> Iterator[Variant]:
    """Those in a plan, and in the plans within it."""
    if isinstance(plan, Variant):
        yield plan
    elif isinstance(plan, tuple):
        for each in plan:
            yield from _variants(each)
    elif is_dataclass(plan):
        for field in fields(plan):
            yield from _variants(getattr(plan, field.name))


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The smallest and the largest batch of each planning vector, and one that is not planned."""
    sizes, last = set(), 0
    for vector in VECTORS:
        if last < max_num_seqs:
            sizes |= {last + 1, min(vector, max_num_seqs)}
        last = vector
    if max_num_seqs > last:
        sizes.add(last + 1)
    return sorted(sizes)


def _idle(
    device: torch.device, num_seqs: int, rows: int, query_len: int, max_seq_len: int = 1
) -> PagedBatch:
    """A batch of sequences without query tokens, whose host-side numbers say otherwise."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
    table = zeros(num_seqs, max(cascade.WHOLE.value, max_seq_len))
    return PagedBatch(zeros(num_seqs + 1), zeros(num_seqs), table, slots, query_len, max_seq_len)


def _write(backend: Backend, layer: LayerCall, batch: PagedBatch) -> None:
    block_size, num_kv_heads, head_dim = layer.cache.k.shape[1:]
    rows = torch.zeros(1, num_kv_heads, head_dim, dtype=layer.dtype, device=batch.device)
    values = None if layer.cache.is_latent else rows
    backend.store_kv(rows, values, layer.cache, batch.slot_mapping)
    backend.compute_slot_mapping(
        batch.query_start_loc, batch.seq_lens, batch.block_table, block_size, batch.slot_mapping
    )


def _queries(layer: LayerCall, batch: PagedBatch) -> torch.Tensor:
    shape = (batch.num_tokens, layer.num_q_heads, layer.cache.k.shape[3])
    return torch.empty(shape, dtype=layer.dtype, device=batch.device)  # no token of them is read


def _attend(backend: Backend, layer: LayerCall, batch: PagedBatch, terms: AttentionTerms) -> None:
    backend.paged_attention(_queries(layer, batch), layer.cache, batch, terms)


def _attend_chosen(backend: Backend, layer: LayerCall, batch: PagedBatch) -> None:
    shape = (batch.num_tokens, layer.num_chosen)
    chosen = torch.zeros(shape, dtype=torch.int32, device=batch.device)
    sparse = cast("SparseBackend", backend)
    sparse.attend_chosen(_queries(layer, batch), layer.cache, batch, chosen, layer.terms)


def _choose(backend: Backend, layer: LayerCall, index: IndexCall) -> None:
    """Score, and choose on rows of one level, two and more."""
    sparse, cache = cast("SparseBackend", backend), index.cache
    batch, shape = _idle(cache.k.device, 1, 1, 1), (1, index.num_heads, cache.k.shape[3])
    query = torch.zeros(shape, dtype=cache.k.dtype, device=batch.device)
    weights = torch.zeros(shape[:2], device=batch.device)
    chosen = torch.empty((1, layer.num_chosen), dtype=torch.int32, device=batch.device)
    sparse.store_kv(query[:, :1], None, cache, batch.slot_mapping)
    for width in level_widths(layer.num_chosen):
        scores = torch.zeros((1, width), device=batch.device)
        sparse.score_index(query, weights, cache, batch, 0, scores)
        sparse.choose_tokens(scores, batch, 0, chosen)


def _share(place: Place, layer: LayerCall, batch: PagedBatch) -> None:
    """Decode behind a short prefix, whether or not that pays."""
    terms, cache = replace(layer.terms, batch_invariant=False), layer.cache
    if terms.window is not None or layer.dtype.itemsize != 2 or cache.is_latent:
        return
    query = _queries(layer, batch)
    out = torch.empty_like(query)
    prefix = SharedPrefix(0, batch.num_seqs, cascade.WHOLE.value)
    shared = cascade.attend_prefix(place, query, cache, batch, terms, prefix)
    plan = decode.plan_decode(place, query, cache, batch, out, terms, shared=shared)
    decode.decode(plan, query, cache, batch, out, terms, shared)
