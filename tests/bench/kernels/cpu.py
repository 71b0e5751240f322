"""CPU cases: ours and the yardsticks take turns in one process, so that a busy machine hits all."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backends.contract import AttentionTerms, Backend, KVCache
from tests.bench.kernels.cases import BLOCK_SIZE, HEAD_DIM, DecodeCase, Row, row_of

GATHER, DENSE, COPY = "gather + SDPA", "SDPA on contiguous K/V", "copy"


def bench_cpu(backend: Backend, *, quick: bool) -> list[Row]:
    """Attention and movement on the CPU against torch; quick: small cases, few rounds."""
    rounds = 3 if quick else 21
    half, single, brain = torch.float16, torch.float32, torch.bfloat16
    cases = [DecodeCase(4, 256, head_dim=64, dtype=single)]
    cases += [DecodeCase(1, 128, new=128, dtype=dtype) for dtype in (single, brain)]
    if not quick:
        cases += [DecodeCase(8, 2048, dtype=dtype) for dtype in (single, brain, half)]
        cases += [DecodeCase(8, 2048, cache_dtype=kind) for kind in backend.capabilities.quantised]
        for new, length in ((512, 512), (2048, 2048), (256, 2048)):
            cases += [DecodeCase(1, length, new=new, dtype=dtype) for dtype in (single, brain)]
        cases += [DecodeCase(1, 512, new=512, dtype=half)]
    rows = [_attention_on_cpu(backend, case, rounds) for case in cases]
    tokens = 256 if quick else 8192
    key, value = (torch.randn(tokens, 8, HEAD_DIM).bfloat16() for _ in range(2))
    cache = KVCache(
        *[torch.zeros(2 * tokens // BLOCK_SIZE, BLOCK_SIZE, 8, HEAD_DIM).bfloat16()] * 2
    )
    slots = torch.randperm(2 * tokens)[:tokens]
    size = 2 * key.nbytes
    flat = torch.empty_like(key)

    def copy() -> None:
        flat.copy_(key)
        flat.copy_(value)

    def store() -> None:
        backend.store_kv(key, value, cache, slots)

    copies = torch.randperm(2 * tokens // BLOCK_SIZE).view(-1, 2)

    def copy_blocks() -> None:
        backend.copy_blocks([cache.k], copies)

    def copy_once() -> None:
        flat.copy_(key)

    rows.append(_compare(f"store_kv, {tokens} tokens, bf16", store, {COPY: copy}, 2 * size, rounds))
    name = f"copy_blocks, {len(copies)} blocks, bf16"
    rows.append(_compare(name, copy_blocks, {COPY: copy_once}, size, rounds))
    return rows


def _attention_on_cpu(backend: Backend, case: DecodeCase, rounds: int) -> Row:
    query, cache, batch = case.inputs(backend.device)
    shape = (case.batch, case.new, case.num_q_heads, case.head_dim)
    rows = query.view(shape).transpose(1, 2)
    mask = torch.ones(case.new, case.length, dtype=torch.bool).tril(case.length - case.new)
    table = batch.block_table.long()

    def gather(blocks: Tensor) -> Tensor:
        return blocks[table].flatten(1, 2)[:, : case.length].transpose(1, 2).to(case.dtype)

    k, v = gather(cache.k).contiguous(), gather(cache.v).contiguous()
    terms = AttentionTerms(case.head_dim**-0.5)

    def ours() -> object:
        return backend.paged_attention(query, cache, batch, terms)

    def attend(k: Tensor, v: Tensor) -> Tensor:
        if case.new in {1, case.length}:  # without a mask, which costs torch the keys that it hides
            causal = case.new > 1
            return scaled_dot_product_attention(rows, k, v, is_causal=causal, enable_gqa=True)
        return scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=True)

    others: dict[str, Callable[[], object]] = {
        GATHER: lambda: attend(gather(cache.k), gather(cache.v)),
        DENSE: lambda: attend(k, v),
    }
    return _compare(case.name, ours, others, case.kv_bytes, rounds)


def _compare(
    case: str,
    ours: Callable[[], object],
    others: dict[str, Callable[[], object]],
    size: int,
    rounds: int,
) -> Row:
    """Time all of them in turns, `rounds` times, after one untimed turn."""
    contestants = {"ours": ours, **others}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, contestant in contestants.items():
            start = time.perf_counter_ns()
            contestant()
            if turn:
                times[name].append((time.perf_counter_ns() - start) / 1e3)
    mine = times.pop("ours")
    ratios = {
        name: statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
        for name, theirs in times.items()
    }
    medians = {name: statistics.median(theirs) for name, theirs in times.items()}
    return row_of(case, mine, size, medians, ratios)
