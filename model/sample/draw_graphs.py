"""Draws as CUDA graphs: from logits to tokens, captured once per buffer of logits.

A draw is about thirty small kernels, which take a GPU less time than their launches take the host.
The parameters of each row (`RowTerms`) are in tensors that never move, so a graph serves any
requests. A greedy row takes its most likely token whatever else is computed for it.

Decides: which kinds of draw are captured (`Cuts`): a cut costs a pass over the logits or several,
so a kind of cut that no request of the step needs is left out. Rows with a `top_k` above `MOST` are
left to `sampler.choose`, and so are rows whose logits are changed first.

Invariants: tokens are those of `sampler.choose`, because they are its own launches.

Does not know: requests, the network.
"""

import gc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.control.params import SamplingParams
from model.sample.sampler import Cut, DrawTerms, choose, passes_for, reach_of, sharpness_of

_T = TypeVar("_T")

MOST = 64
"""The largest top_k that is captured."""


class Cuts(NamedTuple):
    """The kinds of cut that the rows of a step need: by rank, or by mass without a rank."""

    ranked: bool
    nuclear: bool


ALL_CUTS = tuple(Cuts(ranked, nuclear) for ranked in (False, True) for nuclear in (False, True))


class Place(NamedTuple):
    """The buffer that logits are in.

    Attributes:
        rows: the number of rows.
        is_single: True if the steps have one token per sequence.
        shares: True if their sequences share a prefix.
        adapted: True if some have LoRA adapters.
    """

    rows: int
    is_single: bool
    shares: bool = False
    adapted: bool = False


@dataclass(frozen=True, slots=True)
class RowTerms:
    """The terms by which every row of a step is drawn.

    Attributes:
        cuts: the cuts that any row needs.
        drawing: int64 [num_draws], the rows that draw.
        columns: int64 [4, num_rows], see `_Columns`, without the numbers.
    """

    cuts: Cuts
    drawing: NDArray[np.int64]
    columns: NDArray[np.int64]


def is_captured(params: SamplingParams, vocab_size: int) -> bool:
    """Return True if a captured graph can draw rows with these parameters. O(1)."""
    ranked = params.temperature > 0 and params.top_k is not None and params.top_k < vocab_size
    return not params.changes_logits and (not ranked or (params.top_k or 0) <= MOST)


def row_terms(params: Sequence[SamplingParams | None], vocab_size: int) -> RowTerms | None:
    """Return the terms of rows; None: no row draws. O(rows).

    Args:
        params: of each row, all captured; None: the result of the row is not used.
        vocab_size: of the logits.
    """
    columns = np.zeros((4, len(params)), np.int64)
    is_drawn, top_k = columns[0], columns[1]
    top_p = columns[2].view(np.float64)
    factors = columns[3].view(np.float32).reshape(-1, 2)
    asked = set()
    for row, how in enumerate(params):
        if how is None or not how.temperature:
            top_p[row], factors[row] = 1.0, (1, 0)
            continue
        is_drawn[row] = True
        top_k[row] = how.top_k if how.top_k is not None and how.top_k < vocab_size else 0
        top_p[row] = how.top_p
        factors[row] = sharpness_of(how), reach_of(how)
        asked.add(Cuts(top_k[row] > 0, top_k[row] == 0 and how.top_p < 1))
    if not asked:
        return None
    cuts = Cuts(any(each.ranked for each in asked), any(each.nuclear for each in asked))
    return RowTerms(cuts, np.flatnonzero(is_drawn), columns)


class _Columns(NamedTuple):
    """The parameters of each row, as views of one int64 tensor: a column each."""

    numbers: Tensor
    is_drawn: Tensor
    top_k: Tensor
    top_p: Tensor
    factors: Tensor

    @classmethod
    def of(cls, words: Tensor) -> "_Columns":
        """Return views of int64 [5, rows]."""
        numbers, is_drawn, top_k, top_p, factors = words
        return cls(
            numbers.view(torch.float64)[:, None],
            is_drawn,
            top_k[:, None],
            top_p.view(torch.float64)[:, None],
            factors.view(torch.float32).view(-1, 2),
        )

    def first(self, rows: int) -> "_Columns":
        """Return the columns of the first rows."""
        return _Columns(*[part[:rows] for part in self])


class GraphCapturer:
    """Captures CUDA graphs one after another, in one memory pool.

    As a context manager it turns Python's garbage collector off: freeing GPU memory would end a
    capture, and a collection before each one takes longer than all captures together.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._collected = gc.isenabled()
        self._known: set[Hashable] = set()

    def __enter__(self) -> Self:
        gc.collect()
        gc.disable()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return self

    def __exit__(self, *_: object) -> None:
        if self._collected:
            gc.enable()
        torch.cuda.synchronize()

    def capture(self, run: Callable[[], _T], kind: Hashable) -> tuple[torch.cuda.CUDAGraph, _T]:
        """Return a graph of the launches of a call, and the tensors that each replay writes.

        Runs the call under capture, and as a replay, because the first replay of a graph takes
        longer than later ones. Before that the first call of a kind runs normally.

        Args:
            run: launches kernels.
            kind: calls of one kind launch the same kernels, but for those that a size chooses;
                they were launched before, or are loaded in the capture.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            if kind not in self._known:
                self._known.add(kind)
                run()  # compiles kernels, and makes what the library of products works in
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")  # kernels load
            try:
                found = run()
            finally:
                graph.capture_end()
            graph.replay()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, found


class DrawGraphs:
    """The captured draws of an engine."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._passes = passes_for(device.type)
        self._words = torch.zeros((5, max_rows), dtype=torch.int64, device=device)
        is_pinned = device.type == "cuda"
        self._sent = [torch.zeros_like(self._words, device="cpu") for _ in range(2)]
        if is_pinned:
            self._sent = [words.pin_memory() for words in self._sent]
        self._columns = _Columns.of(self._words)
        self._graphs: dict[tuple[Place, Cuts], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(
        self,
        place: Place,
        logits: Tensor,
        most_likely: tuple[Tensor, Tensor],
        capturer: GraphCapturer,
    ) -> None:
        """Capture every kind of draw from these logits.

        Args:
            place: of the logits; captured once.
            logits: [rows, vocab_size].
            most_likely: `logits.max(dim=-1)`.
            capturer: of the steps.
        """
        if (place, ALL_CUTS[0]) not in self._graphs:
            for cuts in ALL_CUTS:
                run = partial(self._run, cuts, logits, most_likely)
                self._graphs[place, cuts] = capturer.capture(run, cuts)

    def choose(self, place: Place, terms: RowTerms, numbers: NDArray[np.float64]) -> Tensor:
        """Return the tokens of all rows: int64 [num_rows], valid until the next call.

        Args:
            place: of the step's logits.
            terms: of its rows.
            numbers: float64 [num_draws], of the rows that draw, in [0, 1).
        """
        rows = self._load(terms, numbers)
        graph, tokens = self._graphs[place, terms.cuts]
        graph.replay()
        return tokens[:rows]

    def _load(self, terms: RowTerms, numbers: NDArray[np.float64]) -> int:
        """Load the columns of a step's rows; surplus rows keep their old ones."""
        self._sent.reverse()
        sent, rows = self._sent[0].numpy(), len(terms.columns[0])
        sent[1:, :rows] = terms.columns
        sent[0].view(np.float64)[terms.drawing] = numbers
        self._words.copy_(self._sent[0], non_blocking=True)
        return rows

    def _run(self, cuts: Cuts, logits: Tensor, most_likely: tuple[Tensor, Tensor]) -> Tensor:
        own = self._columns.first(len(logits))
        made = []
        if cuts.ranked:
            most = min(MOST, logits.shape[1])
            made.append(Cut(rows=None, top_p=own.top_p, top_k=own.top_k, most=most))
        if cuts.nuclear:
            top_p = own.top_p.masked_fill(own.top_k > 0, 1.0) if cuts.ranked else own.top_p
            made.append(Cut(rows=None, top_p=top_p, top_k=own.top_k, most=0))
        terms = DrawTerms(None, own.factors[:, :1], own.factors[:, 1:], tuple(made))
        chosen = choose(logits, most_likely, terms, own.numbers, self._passes)
        return torch.where(own.is_drawn > 0, chosen, most_likely[1])
