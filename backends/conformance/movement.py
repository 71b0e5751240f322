"""Checks of the operations that only move: stores, block copies, slots. Exact, over whole caches.

Every element has a different pattern, the rest of memory another one, and the whole memory is
compared bit by bit, so that a stray write shows wherever it lands.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from backends import oracle
from backends.conformance.cases import AttentionCase, bits, build
from backends.conformance.report import Finding
from backends.contract import Backend, KVCache, KVLayout, PagedBatch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FINITE = 0x7B00  # bit patterns 1 .. this are finite numbers, halves included


def check_movement(backend: Backend, *, quick: bool) -> Iterator[Finding]:
    """All checks of `store_kv`, `copy_blocks`, `move_blocks` and `compute_slot_mapping`."""
    for dtype in backend.capabilities.dtypes:
        for strided in (False, True):
            name = f"{str(dtype)[6:]}{', strided' if strided else ''}"
            yield _stores(backend, name, dtype, strided=strided, slots=(5, -1, 11, 0, -7, 4, 3))
            if backend.capabilities.max_latent_dim >= 10:
                yield _stores(
                    backend, f"{name}, latents", dtype, strided=strided, slots=(5, -1, 11, 0, -7),
                    is_latent=True,
                )  # fmt: skip
            yield _stores(backend, f"{name}, nothing", dtype, strided=strided, slots=())
            nowhere = (-1, -(1 << 62), -4)
            yield _stores(backend, f"{name}, nowhere", dtype, strided=strided, slots=nowhere)
        if not quick:
            slots = tuple(torch.randperm(4 * 60, generator=_generator()).tolist()[:200])
            yield _stores(backend, f"{str(dtype)[6:]}, many", dtype, strided=False, slots=slots)
        yield _copies(backend, str(dtype)[6:], dtype, ((1, 4), (1, 0), (3, 2)))
        yield _copies(backend, f"{str(dtype)[6:]}, none", dtype, ())
        for shapes in (((4, 2, 8), (2, 24)), ((4, 2, 8), (3,))):
            for to_host in (True, False):
                case = f"{str(dtype)[6:]}, {shapes[1]} {'to' if to_host else 'from'} host memory"
                yield _moves(backend, case, dtype, shapes, ((1, 6), (4, 0), (3, 2)), to_host)
        yield _moves(backend, f"{str(dtype)[6:]}, none", dtype, ((4, 2, 8),), (), to_host=True)
        for kind in backend.capabilities.quantised:
            for scales in ("none", "tensor", "head"):
                name = f"{str(dtype)[6:]} as {str(kind)[6:]}, scales: {scales}"
                yield _quantises(backend, name, dtype, kind, scales)
    mixed = AttentionCase("mixed, padded", ((1, 9), (5, 5), (0, 0), (3, 71), (2, 4)), block_size=4)
    yield _slots(backend, mixed, padding=3)
    if not quick:
        yield _slots(backend, mixed.with_(name="many", seqs=((1, 17),) * 300), padding=0)
        yield _slots(backend, mixed.with_(name="none", seqs=()), padding=5)
    yield _far_slots(backend)


def _stores(
    backend: Backend,
    case: str,
    dtype: torch.dtype,
    *,
    strided: bool,
    slots: tuple[int, ...],
    is_latent: bool = False,
) -> Finding:
    layout = KVLayout(1 if is_latent else 3, 10, 6 if is_latent else 10, dtype, is_latent)
    row, block_size = (layout.num_kv_heads, layout.head_dim), 4
    num_blocks = 3 + max((0, *slots)) // block_size
    firsts = [7001 * i for i in range(len(layout.row_bytes))]
    rows = [_pattern((len(slots), *row), dtype, i, strided=strided) for i in firsts]
    shape = (num_blocks, block_size, *row)
    caches = [_pattern(shape, dtype, 14002 + i, strided=strided) for i in firsts]
    wanted = [(memory.clone(), view) for memory, view in caches]
    for (_, content), (memory, like) in zip(rows, wanted, strict=True):
        view = memory.as_strided(like.size(), like.stride(), like.storage_offset())
        for i, slot in enumerate(slots):
            if slot >= 0:
                view[slot // block_size, slot % block_size] = content[i]
    there = [(memory.clone().to(backend.device), view) for memory, view in (*rows, *caches)]
    views = [
        memory.as_strided(view.size(), view.stride(), view.storage_offset())
        for memory, view in there
    ]
    (key, *values), tensors = views[: len(rows)], views[len(rows) :]
    mapping = torch.tensor(slots, dtype=torch.int64, device=backend.device)
    backend.store_kv(key, values[0] if values else None, layout.over(tensors), mapping)
    names = ("key", "cache.k") if is_latent else ("key", "value", "cache.k", "cache.v")
    problems = [
        name
        for name, (memory, _), (old, _) in zip(names, there, (*rows, *wanted), strict=True)
        if not torch.equal(bits(memory), bits(old))
    ]
    if mapping.tolist() != list(slots):
        problems.append("slot_mapping")
    return _finding("store_kv", case, problems)


def _quantises(
    backend: Backend, case: str, dtype: torch.dtype, kind: torch.dtype, scales: str
) -> Finding:
    """Stored bytes, over every size that e4m3 has, between them, beyond them, and NaN."""
    heads, size, block_size = 3, 128, 4
    generator = _generator()
    sizes = torch.arange(127, dtype=torch.uint8).view(kind).float()
    middles = (sizes[1:] + sizes[:-1]) / 2
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 465.0, 1e-9, 500.0])
    values = [sizes, -sizes, middles, -middles, middles * 1.001, middles * 0.999, special]
    values.append(torch.randn(2048, generator=generator) * 100)
    flat = torch.cat(values)
    flat = flat[torch.randperm(flat.numel(), generator=generator)]
    num_tokens = flat.numel() // (heads * size)
    flat = flat[: num_tokens * heads * size]
    count = {"none": 0, "tensor": 1, "head": heads}[scales]
    factors = [0.37 * 1.9 ** torch.arange(count), 2.0 ** (3 - torch.arange(count))]
    k_scale, v_scale = (factor if count else None for factor in factors)
    rows = [
        (flat.view(num_tokens, heads, size) * (1 if factor is None else factor[:, None])).to(dtype)
        for factor in (k_scale, v_scale)
    ]
    slots = torch.randperm(2 * num_tokens, generator=generator)[:num_tokens]
    slots[1] = -3
    shape = (-(-2 * num_tokens // block_size), block_size, heads, size)
    wanted = [torch.full(shape, fill, dtype=torch.uint8) for fill in (5, 6)]
    there = [memory.clone().to(backend.device).view(kind) for memory in wanted]
    device = backend.device
    given = [None if scale is None else scale.to(device) for scale in (k_scale, v_scale)]
    cache = KVCache(there[0], there[1], *given)
    backend.store_kv(rows[0].to(device), rows[1].to(device), cache, slots.to(device))
    live = slots >= 0
    for row, memory, scale in zip(rows, wanted, (k_scale, v_scale), strict=True):
        memory.view(-1, heads, size)[slots[live]] = oracle.quantise(row[live], scale)
    problems = [
        f"{name}: {int((bits(came) != memory).sum())} bytes"
        for name, came, memory in zip(("k_cache", "v_cache"), there, wanted, strict=True)
        if not torch.equal(bits(came), memory)
    ]
    return _finding("store_kv, quantised", case, problems)


def _copies(
    backend: Backend, case: str, dtype: torch.dtype, copies: tuple[tuple[int, int], ...]
) -> Finding:
    caches = [_pattern((5, *shape), dtype, 0, strided=False)[0] for shape in ((4, 2, 8), (3,))]
    whole = _pattern((5, 2, 4, 8), dtype, 50, strided=False)[0]
    there = [memory.clone().to(backend.device) for memory in (*caches, whole)]
    pairs = torch.tensor(copies, dtype=torch.int64, device=backend.device).reshape(-1, 2)
    backend.copy_blocks([there[0], there[1], there[2][:, 0]], pairs)
    for source, target in copies:
        for cache in (caches[0], caches[1], whole[:, 0]):
            cache[target] = cache[source]
    problems = [
        f"cache {i}"
        for i, (came, wanted) in enumerate(zip(there, (*caches, whole), strict=True))
        if not torch.equal(bits(came), bits(wanted))
    ]
    return _finding("copy_blocks", case, problems)


def _moves(
    backend: Backend,
    case: str,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], ...],
    moves: tuple[tuple[int, int], ...],
    to_host: bool,  # noqa: FBT001
) -> Finding:
    """Return two caches of different shapes, and one whose blocks do not follow each other."""
    whole = _pattern((5, 2, *shapes[0]), dtype, 50, strided=False)[0]
    memories = [*(_pattern((5, *shape), dtype, 0, strided=False)[0] for shape in shapes), whole]
    there = [memory.clone().to(backend.device) for memory in memories]
    sizes = [memory[0].numel() * dtype.itemsize for memory in (*memories[:-1], whole[:, 0])]
    rows = torch.arange(9 * sum(sizes)).mul(37).add(11).to(torch.uint8).reshape(9, -1)
    host = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=backend.device.type == "cuda")
    host.copy_(rows)
    pairs = torch.tensor(moves, dtype=torch.int64).reshape(-1, 2)
    sums = torch.full((len(moves),), 7, dtype=torch.int64, device=backend.device)
    backend.move_blocks([*there[:-1], there[-1][:, 0]], host[1:8], pairs, sums, to_host=to_host)
    wanted = []
    for block_id, host_id in moves:
        parts = [memory[block_id] for memory in (*memories[:-1], whole[:, 0])]
        parts = [part.view(torch.uint8).reshape(-1) for part in parts]
        for part, row in zip(parts, torch.split(rows[1 + host_id], sizes), strict=True):
            (row if to_host else part).copy_(part if to_host else row)
        wanted.append(oracle.block_sum(parts))
    pairs_of_sums = zip(sums.tolist(), wanted, strict=True)
    problems = [f"sum {i}" for i, (came, sum_) in enumerate(pairs_of_sums) if came != sum_]
    problems += [] if torch.equal(host, rows) else ["host memory"]
    problems += [
        f"cache {i}"
        for i, (each, memory) in enumerate(zip(there, memories, strict=True))
        if not torch.equal(bits(each), bits(memory))
    ]
    return _finding("move_blocks", case, problems)


def _slots(backend: Backend, case: AttentionCase, *, padding: int) -> Finding:
    batch = build(case, backend.device).batch
    size = sum(count for count, _ in case.seqs) + padding
    return _compare_slots(backend, case.name, batch, case.block_size, size)


def _far_slots(backend: Backend) -> Finding:
    """Slots past 2^31 and block ids past 65,535 need 64 bits."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=backend.device)

    batch = PagedBatch(
        query_start_loc=ints(0, 3, 4),
        seq_lens=ints(130, 65),
        block_table=torch.stack([ints(7, 70_000, (1 << 31) - 1), ints(-1, 1 << 27, 1 << 30)]),
        slot_mapping=torch.full((4,), -1, dtype=torch.int64, device=backend.device),
        max_query_len=3,
        max_seq_len=130,
    )
    return _compare_slots(backend, "past 2^31", batch, 64, 4)


def _compare_slots(
    backend: Backend, case: str, batch: PagedBatch, block_size: int, size: int
) -> Finding:
    memory = torch.full((size + 2,), 1 << 40, dtype=torch.int64, device=backend.device)
    backend.compute_slot_mapping(
        batch.query_start_loc, batch.seq_lens, batch.block_table, block_size, memory[1:-1]
    )
    wanted = oracle.slot_mapping(batch, block_size, size)
    came = memory.tolist()
    problems = [f"row {i}" for i in range(size) if came[i + 1] != wanted[i]]
    if {came[0], came[-1]} != {1 << 40}:
        problems.append("memory around out")
    return _finding("compute_slot_mapping", case, problems[:5])


def _pattern(
    shape: tuple[int, ...], dtype: torch.dtype, first: int, *, strided: bool
) -> tuple[Tensor, Tensor]:
    """(whole memory, the tensor in it), each element's bits a running number."""
    *outer, heads, size = shape
    whole = (*outer, heads + 1, size + 6) if strided and len(shape) > 2 else shape
    number = torch.arange(first, first + torch.Size(whole).numel()) % _FINITE + 1
    memory = number.to(_INTEGERS[dtype.itemsize]).view(dtype).reshape(whole)
    return memory, memory[..., :heads, :size] if whole != shape else memory


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _finding(check: str, case: str, problems: list[str]) -> Finding:
    detail = "wrong: " + ", ".join(problems) if problems else ""
    return Finding(check, case, passed=not problems, detail=detail)
