"""Operations of sparse attention: cases as data, their tensors in poisoned memory, the checks.

scores, attention: within the oracle's distance. choice: exactly the oracle's, for the backend's own
scores and for scores of which many are equal. poison: no NaN, which only a forbidden read can
bring; before attention every slot that no row has chosen holds NaN. untouched: arguments, gaps and
padding keep every bit. permutation: the same bits with the blocks elsewhere. in parts: so do the
rows of a step that is scored some rows at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backends import sparse_oracle
from backends.conformance.cases import AttentionCase, AttentionInputs, bits, build
from backends.conformance.report import Finding
from backends.contract import Backend, KVCache
from backends.sparse import SparseBackend

_KEPT = -7.0
"""In memory of scores that must not be written."""


@dataclass(frozen=True, slots=True)
class SparseCase:
    """A layer's call of all three operations, as plain data."""

    attention: AttentionCase
    """The batch, the cache and the attention terms; no window and no shared prefix."""
    count: int = 6
    num_heads: int = 4
    """Of the index."""
    index_dim: int = 16
    seed: int = 1

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.attention.name}, {self.count} of {self.num_heads} x {self.index_dim}"

    def with_(self, **changes: object) -> "SparseCase":
        """The same case but for these fields, its own or those of attention."""
        own = {name: value for name, value in changes.items() if name in SparseCase.__slots__}
        others = {name: value for name, value in changes.items() if name not in own}
        return replace(self, attention=self.attention.with_(**others), **own)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SparseInputs:
    """The tensors of a case."""

    attention: AttentionInputs
    query: Tensor
    weights: Tensor
    cache: KVCache
    """Of the index."""
    scores: Tensor
    live: int
    """Rows that belong to a sequence."""

    def score(self, backend: SparseBackend, first_row: int = 0, rows: int | None = None) -> Tensor:
        """The scores of some rows, all by default."""
        rows = self.attention.batch.num_tokens - first_row if rows is None else rows
        out, batch = torch.full_like(self.scores[:rows], _KEPT), self.attention.batch
        backend.score_index(self.query, self.weights, self.cache, batch, first_row, out)
        return out

    def choose(self, backend: SparseBackend, scores: Tensor, count: int) -> Tensor:
        """The choice of all rows; rows that belong to no sequence keep -2."""
        shape, batch = (scores.shape[0], count), self.attention.batch
        chosen = torch.full(shape, -2, dtype=torch.int32, device=scores.device)
        backend.choose_tokens(scores, batch, 0, chosen)
        return chosen

    def attend(self, backend: SparseBackend, chosen: Tensor) -> Tensor:
        """Attend into the output."""
        one = self.attention
        return backend.attend_chosen(
            one.query, one.cache, one.batch, chosen, one.terms, out=one.out
        )


def check_sparse(backend: SparseBackend, case: SparseCase) -> Iterator[Finding]:
    """Run a case, and compare everything that has to be compared."""
    inputs, count = build_sparse(case, backend.device), case.count
    live, batch = inputs.live, inputs.attention.batch
    guarded = (*inputs.attention.guarded, inputs.query, inputs.weights, inputs.cache.k)
    before = [bits(each) for each in guarded]
    expected = sparse_oracle.score_index(inputs.query, inputs.weights, inputs.cache, batch)
    scores = inputs.score(backend)
    ratio = expected.worst_ratio(scores[:live, : batch.max_seq_len])
    detail = "" if ratio <= 1 else f"the largest error is {ratio:.2f} times the allowed one"
    yield _finding("scores", case, detail, ratio)
    unseen = torch.ones_like(scores, dtype=torch.bool)
    for t, (_, length) in enumerate(sparse_oracle.rows_of(batch)):
        unseen[t, :length] = False
    detail = "scores past a position changed" if bool((scores[unseen] != _KEPT).any()) else ""
    yield _finding("untouched scores", case, detail)
    part = inputs.score(backend, first_row=live // 2, rows=live - live // 2)
    same = torch.equal(bits(part), bits(scores[live // 2 : live]))
    yield _finding("in parts", case, "" if same else "other bits")
    coarse = -(scores / scores[~unseen].abs().max()).mul(1.5).round() if live else scores
    for name, each in (("choice", scores), ("choice of equals", coarse)):
        chosen = inputs.choose(backend, torch.where(unseen, math.nan, each), count)
        wanted = sparse_oracle.choose_tokens(each, batch, count)
        wrong = (chosen[:live].cpu() != wanted).any(1).nonzero().flatten().tolist()
        detail = f"other tokens in rows {wrong[:4]}" if wrong else ""
        yield _finding(name, case, detail or ("padding" * bool((chosen[live:] != -2).any())))
    chosen = inputs.choose(backend, scores, count)
    yield from _check_attention(backend, case, inputs, chosen)
    strays = [i for i, each in enumerate(guarded) if not torch.equal(bits(each), before[i])]
    strays = [i for i in strays if i not in (1, 2)]  # which hold NaN since then
    yield _finding("untouched", case, f"arguments changed: {strays}" if strays else "")
    moved = build_sparse(case, backend.device, layout=1)
    again = moved.score(backend)
    same = torch.equal(bits(again[:live]), bits(scores[:live]))
    out = moved.attend(backend, moved.choose(backend, again, count))
    same = same and torch.equal(bits(out[:live]), bits(inputs.attention.out[:live]))
    yield _finding("permutation", case, "" if same else "other bits with the blocks elsewhere")


def _check_attention(
    backend: SparseBackend, case: SparseCase, inputs: SparseInputs, chosen: Tensor
) -> Iterator[Finding]:
    one, live = inputs.attention, inputs.live
    expected = sparse_oracle.attend_chosen(one.query, one.cache, one.batch, chosen, one.terms)
    _poison_unchosen(one, chosen)
    edges, kept = bits(one.out_memory), [bits(each) for each in one.cache.tensors]
    out = inputs.attend(backend, chosen).clone()
    nans = int(out[:live].isnan().sum())
    yield _finding("poison", case, f"{nans} NaN in the output" if nans else "")
    if not nans:
        ratio = expected.worst_ratio(out)
        detail = "" if ratio <= 1 else f"the error of a row is {ratio:.2f} times the tolerance"
        yield _finding("attention", case, detail, ratio)
    memory = one.out_memory.clone()
    memory.as_strided(one.out.size(), one.out.stride(), one.out.storage_offset())[:live] = math.nan
    same = torch.equal(bits(memory), edges)
    same = same and all(map(torch.equal, kept, map(bits, one.cache.tensors)))
    yield _finding("untouched by attention", case, "" if same else "memory around it changed")


def _poison_unchosen(inputs: AttentionInputs, chosen: Tensor) -> None:
    """NaN in every slot that no row has chosen."""
    cache, table = inputs.cache, inputs.batch.block_table.cpu()
    kept = torch.zeros(cache.k.shape[:2], dtype=torch.bool)
    for t, (s, _) in enumerate(sparse_oracle.rows_of(inputs.batch)):
        at = chosen[t][chosen[t] >= 0].cpu().long()
        kept[table[s, at // cache.k.shape[1]].long(), at % cache.k.shape[1]] = True
    for tensor in cache.tensors:
        words = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        words[~kept.to(tensor.device)] = 0x7F if words is not tensor else math.nan


def build_sparse(case: SparseCase, device: torch.device, layout: int = 0) -> SparseInputs:
    """Lay a case out over blocks in the order of the seed `layout`, and poison the rest."""
    attention = build(case.attention, device, layout)
    batch, block_size = attention.batch, case.attention.block_size
    generator, dtype = torch.Generator().manual_seed(case.seed), case.attention.dtype
    live = sum(count for count, _ in case.attention.seqs)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query = torch.full((batch.num_tokens, case.num_heads, case.index_dim), math.nan, dtype=dtype)
    query[:live] = random(live, case.num_heads, case.index_dim).to(dtype)
    weights = torch.full(query.shape[:2], math.nan)
    weights[:live] = random(live, case.num_heads)
    shape = (attention.cache.k.shape[0], block_size, 1, case.index_dim)
    keys = torch.full(shape, math.nan, dtype=dtype)
    for (count, length), table in zip(case.attention.seqs, batch.block_table.cpu(), strict=True):
        rows, at = random(length, 1, case.index_dim).to(dtype), torch.arange(length * bool(count))
        keys[table[at // block_size].long(), at % block_size] = rows[: len(at)]
    keys = keys.to(device)
    scores = torch.full((batch.num_tokens, batch.max_seq_len + 3), _KEPT, device=device)
    cache = KVCache(keys, keys, is_latent=True)
    return SparseInputs(attention, query.to(device), weights.to(device), cache, scores, live)


def sparse_cases(backend: Backend, *, quick: bool) -> Iterator[SparseCase]:
    """The cases that the backend's capabilities allow."""
    can = backend.capabilities
    for dtype in can.dtypes:
        for case in _cases(quick=quick):
            one = case.attention
            limit = can.max_latent_dim if one.value_dim else can.max_head_dim
            fits = case.index_dim <= can.max_index_dim and case.count <= can.max_chosen
            if fits and one.head_dim <= limit and (not one.sinks or "sinks" in can.features):
                yield case.with_(dtype=dtype, name=f"{one.name}, {str(dtype)[6:]}")


def _cases(*, quick: bool) -> Iterator[SparseCase]:
    mixed = ((1, 9), (5, 5), (0, 0), (3, 71))
    latents = AttentionCase(
        "latents", mixed, num_kv_heads=1, group=5, head_dim=24, value_dim=16, block_size=4,
        padding=2,
    )  # fmt: skip
    small = SparseCase(latents)
    yield small
    yield small.with_(name="sinks, strided", sinks=True, strided=True, num_heads=3, index_dim=20)
    yield small.with_(name="pairs", value_dim=0, num_kv_heads=2, group=2, seqs=((2, 40), (1, 3)))
    yield small.with_(name="all are chosen", count=80, seqs=((2, 40), (1, 3)))
    if quick:
        return
    long = ((1, 3000), (1, 5), (4, 900), (1, 70))
    wide = small.with_(group=16, head_dim=576, value_dim=512, block_size=16, seqs=long, padding=1)
    wide = wide.with_(num_heads=64, index_dim=128, count=256)
    yield wide
    yield wide.with_(name="one", count=1)
    yield wide.with_(name="not a power of two", count=300, num_heads=6, index_dim=96)
    yield wide.with_(name="levels", count=32, seqs=((1, 20000), (2, 700)), num_heads=8)
    yield wide.with_(name="long prefill", seqs=((150, 350), (70, 70)), count=64)
    yield wide.with_(name="batch-invariant", batch_invariant=True)
    yield wide.with_(name="nothing to do", seqs=((0, 0), (0, 5)))
    yield wide.with_(name="block size 5", block_size=5, seqs=long[1:])
    yield wide.with_(name="block size 64", block_size=64, group=64)
    yield wide.with_(name="pairs", value_dim=0, num_kv_heads=2, group=4, head_dim=128)


def _finding(check: str, case: SparseCase, detail: str, ratio: float | None = None) -> Finding:
    return Finding(check, case.name, passed=not detail, detail=detail, ratio=ratio)
