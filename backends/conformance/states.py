"""Operations on recurrent states: cases as data, their tensors in poisoned memory, the checks.

accuracy, states: outputs and written states within the oracle's distance. poison: no NaN, which
only a forbidden read can bring. untouched: arguments, gaps, padding and every byte outside the
slots to be written stay as they are. repeatable, permutation: the same bits again, also where the
slots lie elsewhere. together or apart: a call with up to `EXACT_TOKENS` tokens of each sequence
gives the bits of calls with one, and so does any convolution.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from backends import state_oracle
from backends.conformance.cases import bits
from backends.conformance.report import Finding
from backends.contract import Backend
from backends.states import (
    EXACT_TOKENS,
    DecayGate,
    LinearAttentionTerms,
    LinearRows,
    ShortConvTerms,
    StateBackend,
    StateBatch,
    StateTerms,
)

MODES = ("new", "same", "first", "peek", "shared", "nowhere")
"""The modes of a sequence: it reads its slot and writes another one; reads and writes the same one;
reads none; writes none; reads the first sequence's slot; neither reads nor writes."""
LAYERS = ("conv", "delta", "KDA", "mamba")
"""A short convolution; the delta rule; with a decay per channel; a gate without the delta rule."""


@dataclass(frozen=True, slots=True)
class StateCase:
    """A call of an operation on states, as plain data."""

    name: str
    layer: str
    """One of LAYERS."""
    seqs: tuple[str, ...]
    """The mode of each sequence."""
    dims: tuple[int, int] = (16, 16)
    """Of a head's state: key_dim, value_dim; of a convolution: width - 1, channels."""
    num_heads: int = 4
    num_key_heads: int = 2
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    options: bool = True
    """Bias and SiLU; norms, or the gate's bias and limits and a skip. False for the delta rule: a
    gate computes the decays instead of the norms."""
    extreme: bool = False
    """Decays that keep all or nothing, beta of 0 to 2, large inputs."""
    pages: str = "whole"
    """The layout of slots: whole (side by side); aligned (in larger pages); odd (in pages at no
    multiple of anything, and rows are views with gaps)."""
    query_len: int = 1
    """The most rows of a sequence. From 2 on every third one has one less, and behind all of them
    lies a row that belongs to none."""
    num_drafts: int = 0
    """The last rows of each sequence, after which no state is written."""
    seed: int = 0

    @property
    def is_ragged(self) -> bool:
        """True if the lengths of the sequences are given."""
        return self.query_len > 1

    @property
    def lengths(self) -> list[int]:
        """Rows of each sequence."""
        return [self.query_len - (self.is_ragged and s % 3 == 2) for s in range(len(self.seqs))]

    @property
    def live(self) -> int:
        """Rows of sequences."""
        return sum(self.lengths)

    def with_(self, **changes: object) -> "StateCase":
        """The same case but for these fields."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The tensors of a case, and the memory they are views of."""

    rows: tuple[Tensor, ...]
    state: Tensor
    batch: StateBatch
    terms: StateTerms
    out: Tensor
    memory: Tensor
    """Whole memory of the states."""
    out_memory: Tensor
    guarded: tuple[Tensor, ...]
    """The memory behind all inputs; a call must not change it."""
    kept: tuple[tuple[int, int], ...]
    """(row, slot) of every state to be written."""

    def run(self, backend: StateBackend) -> Tensor:
        """Call the operation once."""
        return self._call(backend, self.rows, self.batch, self.out)

    def run_apart(self, backend: StateBackend) -> None:
        """One call per token, whose states travel through slots at the end of the tensor."""
        spare, kept = self.state.shape[0] - self.batch.num_seqs, dict(self.kept)
        for s, of_seq in enumerate(state_oracle.rows_of(self.batch)):
            read = self.batch.read_slots[s : s + 1]
            for t in of_seq:
                one, write = slice(t, t + 1), torch.full_like(read, spare + s)
                rows = tuple(each[one] for each in self.rows)
                self._call(backend, rows, StateBatch(read, write), self.out[one])
                if t in kept:
                    self.state[kept[t]] = self.state[spare + s]
                read = write

    def _call(
        self, backend: StateBackend, rows: tuple[Tensor, ...], batch: StateBatch, out: Tensor
    ) -> Tensor:
        state, terms = self.state, self.terms
        if isinstance(terms, ShortConvTerms):
            return backend.short_conv_step(rows[0], state, batch, terms, out=out)
        return backend.linear_attention_step(*_five(rows), state, batch, terms, out=out)

    def expected(self) -> state_oracle.Expected:
        """The oracle's answer; before the call, which may overwrite what it reads."""
        state, batch, terms = self.state, self.batch, self.terms
        if isinstance(terms, ShortConvTerms):
            return state_oracle.short_conv(self.rows[0], state, batch, terms)
        return state_oracle.linear_attention(_five(self.rows), state, batch, terms)

    def written(self) -> Tensor:
        """The states at the slots to be written."""
        return self.state[[slot for _, slot in self.kept]]

    def wipe(self) -> None:
        """NaN in all that is to be written."""
        self.state[[slot for _, slot in self.kept]] = math.nan
        for of_seq in state_oracle.rows_of(self.batch):
            self.out[of_seq.start : of_seq.stop] = math.nan


def check_states(backend: StateBackend, case: StateCase) -> Iterator[Finding]:
    """Run a case several times and compare everything that has to be compared."""
    inputs, live = build(case, backend.device), case.live
    guarded, expected = [bits(each) for each in inputs.guarded], inputs.expected()
    out, slots = inputs.run(backend).clone(), inputs.written()
    nans = int(out[:live].isnan().sum()) + int(slots.isnan().sum())
    yield _finding("poison", case, "" if nans == 0 else f"{nans} NaN in outputs and states")
    if nans == 0:
        rows = [row for row, _ in inputs.kept]
        states = state_oracle.Number(expected.states.value[rows], expected.states.error[rows])
        for check, numbers, came in (("accuracy", expected.out, out), ("states", states, slots)):
            ratio = numbers.worst_ratio(came)
            detail = "" if ratio <= 1 else f"the largest error is {ratio:.2f} times the allowed one"
            yield _finding(check, case, detail, ratio)
    strays = [i for i, each in enumerate(inputs.guarded) if not torch.equal(bits(each), guarded[i])]
    detail = f"arguments changed: {strays}" if strays else ""
    before = build(case, backend.device)
    before.wipe()
    inputs.wipe()
    if not torch.equal(bits(inputs.memory), bits(before.memory)):
        detail = "bytes outside the slots to be written changed"
    if not torch.equal(bits(inputs.out_memory), bits(before.out_memory)):
        detail = "rows or gaps of the output that no sequence has changed"
    yield _finding("untouched", case, detail)
    for check, layout in (("repeatable", 0), ("permutation", 1), ("together or apart", 0)):
        other = build(case, backend.device, layout)
        if check != "together or apart":
            other.run(backend)
        elif case.is_ragged and (case.layer == "conv" or case.query_len <= EXACT_TOKENS):
            other.run_apart(backend)
        else:
            continue
        same = torch.equal(bits(other.out[:live]), bits(out[:live]))
        same = same and torch.equal(bits(other.written()), bits(slots))
        yield _finding(check, case, "" if same else "other bits")


def state_cases(backend: Backend, *, quick: bool) -> tuple[StateCase, ...]:
    """The cases that the backend's capabilities allow; none if it has no operations on states.

    If `quick`, a layer and a dtype of its rows have one dtype of states: together these have every
    pair of the three (a Latin square, where there are no more of either than layers).
    """
    can = backend.capabilities

    def kinds(layer: str, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        if layer == "conv":
            return tuple(kind for kind in can.state_dtypes if kind == dtype)
        first = (LAYERS.index(layer) + can.dtypes.index(dtype)) % max(1, len(can.state_dtypes))
        return can.state_dtypes[first : first + 1] if quick else can.state_dtypes

    return tuple(
        case.with_(
            name=f"{case.layer}: {case.name}, {str(dtype)[6:]}, {str(kind)[6:]}",
            dtype=dtype, state_dtype=kind,
        )
        for dtype in can.dtypes
        for case in _cases(quick=quick)
        if case.layer == "conv" or max(case.dims) <= can.max_state_dim
        for kind in kinds(case.layer, dtype)
    )  # fmt: skip


def _cases(*, quick: bool) -> Iterator[StateCase]:
    for layer in LAYERS:
        small = StateCase("", layer, MODES, (3, 40) if layer == "conv" else (16, 8))
        odd = (2, 21) if layer == "conv" else (12, 20)
        yield small.with_(name="every mode", pages="aligned")
        yield small.with_(name="draft tokens", query_len=4, num_drafts=2, pages="odd")
        yield small.with_(name="a chunk and draft tokens", query_len=21, num_drafts=1)
        yield small.with_(name="odd dims", dims=odd, options=False)
        yield small.with_(name="extreme", extreme=True)
        if quick:
            continue
        base = small.with_(dims=(64, 64))
        sizes = [(128, 128), (96, 192), (64, 256), (256, 64), (80, 100), (256, 256)]
        if layer == "conv":
            base = small.with_(dims=(3, 300))
            sizes = [(1, 72), (2, 72), (4, 72), (6, 72), (3, 5000)]
        yield base.with_(name="many sequences", seqs=MODES * 9, pages="aligned")
        yield base.with_(name="many tokens", seqs=MODES[:3], query_len=17)
        yield small.with_(name="many extreme tokens", query_len=40, extreme=True, pages="odd")
        yield small.with_(name="many tokens, no options", query_len=33, options=False)
        yield base.with_(name="nothing to do", seqs=())
        yield base.with_(name="no options", options=False, pages="odd")
        for dims in sizes:
            name = f"{dims[0]} x {dims[1]}"
            yield base.with_(name=name, dims=dims, pages="aligned", query_len=4)


def build(case: StateCase, device: torch.device, layout: int = 0) -> StateInputs:
    """Lay a case out over slots in the order of the seed `layout`, and poison the rest."""
    generator, odd = torch.Generator().manual_seed(case.seed), case.pages == "odd"
    rows, terms = _contents(case, generator, device)
    shape = case.dims if case.layer == "conv" else (case.num_heads, *case.dims)
    befores = [torch.randn(shape, generator=generator) for _ in case.seqs]
    reads, writes, num_slots = _place(case, layout)
    memory, state = _slots(case, num_slots, shape, device)
    for slot, mode, before in zip(reads, case.seqs, befores, strict=True):
        if slot >= 0 and mode != "shared":
            state[slot] = before.to(case.state_dtype).to(device)
    made = [_gapped(each, case.live, device, odd=odd) for each in rows]
    out_memory, out = _gapped(rows[0 if case.layer == "conv" else 2], 0, device, odd=odd)
    indices = [torch.tensor(each, dtype=torch.int32, device=device) for each in (reads, writes)]
    guarded = (*(each for each, _ in made), *indices, *_tensors(terms))
    views = tuple(view for _, view in made)
    starts, stored = [0, *accumulate(case.lengths)], [n - case.num_drafts for n in case.lengths]
    last = [start + count - 1 for start, count in zip(starts, stored, strict=False)]
    kept = tuple((t, slot) for t, slot in zip(last, writes, strict=True) if slot >= 0)
    if case.is_ragged:
        indices += [
            torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, stored)
        ]
    batch = StateBatch(*indices)
    return StateInputs(views, state, batch, terms, out, memory, out_memory, guarded, kept)


def _contents(
    case: StateCase, generator: torch.Generator, device: torch.device
) -> tuple[list[Tensor], StateTerms]:
    """Rows on the CPU and terms, from the seed alone."""
    heads, (first, second), options = case.num_heads, case.dims, case.options
    size = 4 if case.extreme else 1

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def rows(*shape: int) -> Tensor:
        return (random(case.live + case.is_ragged, *shape) * size).to(case.dtype)

    if case.layer == "conv":
        weight, bias = (
            random(*each).to(case.dtype).to(device) for each in ((second, first + 1), (second,))
        )
        return [rows(second)], ShortConvTerms(weight, bias if options else None, options)
    query, key, value = (
        rows(case.num_key_heads, first),
        rows(case.num_key_heads, first),
        rows(heads, second),
    )
    a, bias, skip = (random(heads).to(device) for _ in range(3))
    limits = (0.01, 2.0) if options and not case.extreme else (0.0, math.inf)
    gate = DecayGate(-a.exp(), bias if options else None, limits)
    if case.layer == "mamba":
        terms = LinearAttentionTerms(
            1.0, delta_rule=False, gate=gate, skip=skip if options else None
        )
        return [query, key, value, rows(heads)], terms
    beta = random(value.shape[0], heads).sigmoid()
    decay = -random(value.shape[0], heads, *[first] * (case.layer == "KDA")).abs()
    if case.extreme:
        decay = torch.where(random(*decay.shape) > 0, decay * 0, decay * 200)
        beta = (4 * beta - 1).clamp(0, 2)
    gated = case.layer == "delta" and not options
    if not options:
        query, key = query / math.sqrt(first), key / math.sqrt(first)
    terms = LinearAttentionTerms(
        first**-0.5, delta_rule=True, l2norm=options, gate=gate if gated else None
    )
    return [query, key, value, rows(heads) if gated else decay, beta.to(case.dtype)], terms


def _place(case: StateCase, layout: int) -> tuple[list[int], list[int], int]:
    """Slots read and written, in a random order among unused ones; last a spare one a sequence."""
    generator = torch.Generator().manual_seed(1_000_003 + layout)
    most = 3 * len(case.seqs) + 5  # with it the second layout of MODES writes slot 0
    free = torch.randperm(most, generator=generator).tolist()
    reads: list[int] = []
    writes: list[int] = []
    for mode in case.seqs:
        read = -1 if mode in {"first", "nowhere"} else free.pop()
        if mode == "shared":
            read = reads[0]
        write = -1
        if mode not in {"peek", "nowhere"}:
            write = read if mode == "same" else free.pop()
        reads.append(read)
        writes.append(write)
    return reads, writes, most + len(case.seqs)


def _slots(
    case: StateCase, num_slots: int, shape: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """(whole memory, the states in it), NaN everywhere."""
    size = math.prod(shape)
    aligned = -(-2 * size // 64) * 64
    page, offset = {"whole": (size, 0), "aligned": (aligned, 64), "odd": (size + 7, 5)}[case.pages]
    length = offset + num_slots * page
    memory = torch.full((length,), math.nan, dtype=case.state_dtype, device=device)
    inside = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return memory, memory.as_strided((num_slots, *shape), (page, *inside), offset)


def _gapped(rows: Tensor, live: int, device: torch.device, *, odd: bool) -> tuple[Tensor, Tensor]:
    """(whole memory, rows in it) on a device, NaN in the rows from `live` on and in gaps."""
    *outer, last = rows.shape
    whole = (outer[0], *(size + 1 for size in outer[1:]), last + 3) if odd else tuple(rows.shape)
    memory = torch.full(whole, math.nan, dtype=rows.dtype, device=device)
    view = memory[tuple(slice(0, size) for size in rows.shape)]
    view[:live] = rows[:live].to(device)
    return memory, view


def _five(rows: tuple[Tensor, ...]) -> LinearRows:
    """Rows of linear attention; the last may be missing."""
    query, key, value, decay, *beta = rows
    return query, key, value, decay, beta[0] if beta else None


def _tensors(terms: StateTerms) -> Iterator[Tensor]:
    """Those of the terms."""
    gate = getattr(terms, "gate", None)
    names = ("weight", "bias", "skip", "a")
    for each in (getattr(record, name, None) for record in (terms, gate) for name in names):
        if isinstance(each, Tensor):
            yield each


def _finding(check: str, case: StateCase, detail: str, ratio: float | None = None) -> Finding:
    return Finding(check, case.name, passed=not detail, detail=detail, ratio=ratio)
