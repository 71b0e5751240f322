"""Attention over the paged cache on a GPU: which kernel takes which sequence.

Sequences with one query token go to `decode`, which splits long ones over programs, the others to
`prefill`. A batch of decode alone or of one sequence is told by what the host knows, max_query_len
and num_seqs, and launches one of the two; any other batch launches both, and each leaves the
other's rows alone. float32, which decode's products have no matrix instruction for, is prefill's
whatever its query length, and is never split. Formulas, layouts and grids stand in the two files.
"""

import torch
from torch import Tensor

from backends.checks import check_paged_attention
from backends.contract import Backend, PagedBatch
from backends.triton_gpu.decode import decode
from backends.triton_gpu.place import Place
from backends.triton_gpu.prefill import prefill


def paged_attention(
    backend: Backend,
    place: Place,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every query row; see `Backend.paged_attention`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    check_paged_attention(
        backend, query, k_cache, v_cache, batch,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, out=out,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if batch.num_seqs == 0 or batch.num_tokens == 0:
        return out
    if sinks is not None:
        sinks = sinks.float().contiguous()
    if window is not None:
        window = min(window, batch.max_seq_len + 1)
    decodes = query.element_size() == 2 and (batch.max_query_len <= 1 or batch.num_seqs > 1)
    if decodes:
        decode(
            place, query, k_cache, v_cache, batch, out,
            scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip
    if batch.max_query_len > 1 or not decodes:
        prefill(
            place, query, k_cache, v_cache, batch, out, shortest=2 if decodes else 1,
            scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip
    return out
