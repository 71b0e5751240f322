"""Attention over the paged cache on a GPU: chooses the kernel for each sequence.

Sequences with one query token go to `decode`, which splits long ones over programs, and all others
to prefill: to `hopper` where that can serve the call and there are more than a few rows, else to
`prefill`. If no sequence of the batch has more than a few query tokens (`longest_decoded`), decode
takes the whole batch. The host chooses by max_query_len and num_seqs: a batch of decode alone or of
one sequence launches one of the two kernels; any other batch launches both, and each skips the
other's rows. float32 always goes to prefill, because decode has no matrix instruction for it, and
is never split. `cascade` reads a shared prefix where that pays.

Batch-invariant: decode takes every sequence of one query token and cuts it by its own length.
Prefill chooses its tiles by what all calls of a layer have in common, not by the batch. No cascade.

A cache of latents has other kernels (`latent`).

A quantised cache reaches the kernels as bytes (uint8), with its scales beside it.

Blocks of a size that is no power of two are seen as smaller ones (`shared/blocks.py`).

A call whose tensors have the shapes, strides, dtypes and devices of an earlier call is not checked
and planned again; only its numbers are read.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from backends.checks import check_paged_attention
from backends.contract import AttentionTerms, Backend, KVCache, PagedBatch
from backends.triton_gpu.decode.cascade import cascade
from backends.triton_gpu.decode.decode import Plan, decode, plan_decode, rows_a_program
from backends.triton_gpu.decode.splits import MAX_PLANNED
from backends.triton_gpu.hopper import prefill as hopper_prefill
from backends.triton_gpu.latent import latent
from backends.triton_gpu.prefill import prefill
from backends.triton_gpu.shared.blocks import in_small_blocks
from backends.triton_gpu.shared.launch import Launch
from backends.triton_gpu.shared.place import Place, ceil_div, sign

MOST_ROWS = 128
"""Rows of a sequence and KV head that decode takes at most."""
LONGEST = max(MOST_ROWS, latent.MOST_ROWS) + 1
"""Query tokens from which calls are planned alike."""
FEW_SLICES = 4
"""Programs that they take at most where prefill does not cut keys."""
FEW_SEQS = 16
"""Up to which prefill may take a whole batch."""


def paged_attention(
    backend: Backend,
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    terms: AttentionTerms,
    out: Tensor | None,
) -> Tensor:
    """Attention of every query row; see `Backend.paged_attention`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    cache, batch = in_small_blocks(cache, batch)
    alike, reach = terms.batch_invariant, batch.max_seq_len
    addresses = query.data_ptr()
    if out is not None:
        addresses |= out.data_ptr()
    signature = (
        "attention", sign(query), sign(out), cache.form, batch.form, terms.form,
        hopper_prefill.is_large_cap(terms),
        min(batch.max_query_len, LONGEST), reach if alike else reach >= hopper_prefill.LONG,
        addresses & 15,
    )  # fmt: skip
    known = cast("Known | latent.Plan | None", place.plan(signature))
    if known is None or reach > known.room:
        check_paged_attention(backend, query, cache, batch, terms, out)
    if out is None:
        shape = (*query.shape[:2], cache.v.shape[3])
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
    if known is None:
        if batch.num_seqs == 0 or batch.num_tokens == 0:
            return out
        known = plan_attention(place, query, cache, batch, out, terms)
        place.keep(signature, known)
    if isinstance(known, latent.Plan):
        latent.attend_latents(known, query, cache, batch, out, terms)
        return out
    if known.decode is not None:
        if batch.shared_prefix is None or alike:
            decode(known.decode, query, cache, batch, out, terms)
        else:
            shared = cascade(place, query, cache, batch, terms)
            plan = plan_decode(place, query, cache, batch, out, terms, shared=shared)
            decode(plan, query, cache, batch, out, terms, shared)
    if known.prefill is not None:
        _prefill(known.prefill, query, cache, batch, out, terms, shortest=known.shortest)
    return out


def _prefill(
    plan: Launch | hopper_prefill.Plan,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
    *,
    shortest: int,
) -> None:
    if isinstance(plan, hopper_prefill.Plan):
        hopper_prefill.attend(plan, query, cache, batch, out, terms, shortest=shortest)
    else:
        prefill.prefill(plan, query, cache, batch, out, terms, shortest=shortest)


class Known(NamedTuple):
    """The plan of calls with one signature, whose arguments have been checked."""

    room: int
    """Positions that a row of the block table has entries for."""
    decode: Plan | None
    prefill: Launch | hopper_prefill.Plan | None
    shortest: int
    """Query tokens of a sequence from which on prefill takes it."""


def plan_attention(
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
) -> Known | latent.Plan:
    """Plan a call whose arguments have been checked; compiles nothing."""
    if cache.is_latent:
        return latent.plan_latents(place, query, cache, batch, out, terms)
    room, longest = batch.block_table.shape[1] * cache.k.shape[1], batch.max_query_len
    plain = not terms.batch_invariant and batch.shared_prefix is None
    most = longest_decoded(place, query, cache, out, batch, terms) if plain else 1
    if query.element_size() == 2 and longest <= most:
        plan = plan_decode(place, query, cache, batch, out, terms, most=most)
        return Known(room, plan, None, 0)
    rest: Launch | hopper_prefill.Plan
    rows = (prefill.LONG if terms.batch_invariant else longest) * query.shape[1] // cache.k.shape[2]
    few = rows <= prefill.FEW and not (plain and most < longest)
    if not few and hopper_prefill.can_attend(place, query, cache, out, terms):
        rest = hopper_prefill.plan_attend(place, query, cache, batch, out, terms)
    else:
        rest = prefill.plan_prefill(place, query, cache, batch, out, terms)
    alone = batch.num_seqs == 1 and not terms.batch_invariant
    if query.element_size() != 2 or most == 0 or alone or (plain and cuts_keys(rest, batch)):
        return Known(room, None, rest, 1)
    return Known(room, plan_decode(place, query, cache, batch, out, terms), rest, 2)


def cuts_keys(plan: Launch | hopper_prefill.Plan, batch: PagedBatch) -> bool:
    """Return True if prefill serves sequences of one query token too: decode is not launched.

    Where it may cut the keys of a few sequences: it reads those of one token more slowly than
    decode does, and that costs less than two more launches.
    """
    is_cut = isinstance(plan, hopper_prefill.Plan) and plan.partial_size > 0
    return is_cut and batch.num_seqs <= FEW_SEQS


def longest_decoded(
    place: Place,
    query: Tensor,
    cache: KVCache,
    out: Tensor,
    batch: PagedBatch,
    terms: AttentionTerms,
) -> int:
    """Query tokens of a sequence up to which decode takes it: all of the batch's, or one, or none.

    None where each has one, and more heads than rows of a program, and Hopper's prefill serves: it
    reads the keys once for 64 heads. One where sequences are few and that may cut their keys: its
    pieces are as many as the programs, decode's are not. All where decode reads the keys no more
    often than prefill would: a program of decode reads them for 8 or 16 rows, and an item of
    Hopper's prefill for up to 128, in about the same time.
    """
    group, longest = query.shape[1] // cache.k.shape[2], batch.max_query_len
    rows = longest * group
    if longest < 1 or rows > MOST_ROWS or query.element_size() != 2:
        return 1
    many = longest > 1
    slices = ceil_div(rows, rows_a_program(group, query.shape[2], many=many))
    on_hopper = hopper_prefill.can_attend(place, query, cache, out, terms)
    if not many:
        return int(slices == 1 or rows <= prefill.FEW or not on_hopper)
    if on_hopper and 1 < batch.num_seqs <= FEW_SEQS and batch.max_seq_len >= hopper_prefill.LONG:
        return 1
    items = FEW_SLICES
    if on_hopper:
        items = hopper_prefill.items_a_kv_head(group, longest)
    return longest if slices <= items and batch.num_seqs <= MAX_PLANNED else 1
