"""From the logits of a step to the tokens of its requests.

Decides: which rows are changed before a token is chosen (penalties, bias, bad words, the mask of
structured outputs, in this order), which rows draw and how, and which log-probabilities are
returned. They are those of the model: of its unchanged logits.

Invariants: a step in which every request takes its most likely token, without changes and
log-probabilities, costs no more than finding those tokens; rows that no captured graph can draw
(`draw_graphs.py`) leave the other rows in theirs; terms are computed again only when the requests
of a step change. Tokens are counted on the device where they are drawn, so a request can be
sampled before its last token has been read.

Does not know: how requests are scheduled, what becomes of a token, how a row is drawn
(`sampler.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.control.params import SamplingParams
from model.control.request import Request
from model.control.step import TokenLogprobs
from model.errors import RequestStateError
from model.ranks.ranks import Ranks
from model.sample.draw_graphs import DrawGraphs, Place, RowTerms, is_captured, row_terms
from model.sample.grammars import Grammars
from model.sample.passes import Passes
from model.sample.sampler import (
    DrawTerms,
    choose,
    column,
    draw_terms,
    index_of,
    passes_for,
    stream_of,
    uniforms,
)

_IN_PROMPT = 1 << 24  # added to a count if the prompt has the token


class Drawn:
    """The tokens of a step, on the device and on their way to the host.

    Args:
        best: [num_rows], the largest logit of each row.
        tokens: int64 [num_rows].
        logprobs: log-probabilities of the rows that ask; None: no row does.

    Attributes:
        tokens: as above.
    """

    __slots__ = ("_best", "_copied", "_logprobs", "_read", "tokens")

    def __init__(
        self, best: Tensor, tokens: Tensor, logprobs: "_StepLogprobs | None" = None
    ) -> None:
        self.tokens = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.device.type == "cpu":
            self._best, self._read, self._logprobs = best, tokens, logprobs
        else:
            self._best, self._read = to_host(best), to_host(tokens)
            self._logprobs = None if logprobs is None else logprobs.to_host()
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[int | None]:
        """Return the tokens, once the device has computed them. O(num_rows).

        None for a row that holds NaN, +inf or only -inf.
        """
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._best.tolist()
        tokens: list[int | None] = self._read.tolist()
        if not all(map(math.isfinite, values)):
            return [
                token if math.isfinite(value) else None
                for token, value in zip(tokens, values, strict=True)
            ]
        return tokens

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Return log-probabilities of each row that asks, once `read` has returned. O(rows)."""
        return {} if self._logprobs is None else self._logprobs.logprobs()


class RequestSampler:
    """Chooses the tokens of one engine's requests.

    Args:
        vocab_size: of the logits.
        device: of the logits.
        seed: for requests that have no seed.
        grammars: structured outputs.
        ranks: the processes with the same logits; rank 0's tokens count. None: only this one.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        seed: int,
        grammars: Grammars,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._vocab_size = vocab_size
        self._device = device
        self._seed = seed
        self._grammars = grammars
        self._passes = passes_for(device.type)
        self._draws: DrawGraphs | None = None
        self._streams: dict[int, int] = {}
        self._counts = _TokenCounts(vocab_size, device)
        self._terms = self._terms_of((), has_graphs=False)

    def use(self, draws: DrawGraphs | None) -> None:
        """Replay these graphs from now on, where they apply. O(1)."""
        self._draws = draws

    def draw(
        self,
        logits: Tensor,
        sampling: tuple[Request, ...],
        most_likely: tuple[Tensor, Tensor] | None = None,
        newest: Callable[[], Mapping[int, int | None]] = dict,
        place: Place | None = None,
        ahead: Sequence[int] = (),
    ) -> Drawn:
        """Choose a token for each request. O(requests * vocab_size).

        Nothing is waited for, except for structured outputs and bad words of several tokens, which
        need the last token.

        Args:
            logits: [num_requests, vocab_size].
            sampling: the request of each row; none knows its next token. A request with draft
                tokens has a further row for each of them.
            most_likely: see `Passes.most_likely`, if already computed.
            newest: waits for the last tokens that the host does not know yet.
            place: the buffer of the logits, if draws from it may be captured; then the tokens are
                valid until the next call.
            ahead: for each row the number of drafts of its request before it; empty: no drafts.
        """
        if not sampling:  # there may still be transfers to wait for
            return Drawn(logits.new_empty(0), logits.new_empty(0, dtype=torch.int64))
        draws = None if place is None else self._draws
        if self._terms.sampling != sampling or self._terms.has_graphs != (draws is not None):
            self._terms = self._terms_of(sampling, has_graphs=draws is not None)
        terms = self._terms
        best, tokens = most_likely or self._passes.most_likely(logits)
        numbers = np.zeros(0)
        if terms.drawing:
            indexes = np.array([request.num_output_tokens for request in terms.drawing])
            if ahead:
                indexes += np.array(ahead)[terms.drawing_rows]
            numbers = uniforms(terms.streams, indexes)
        raw = best, tokens
        if draws is not None and place is not None and terms.captured is not None:
            tokens = draws.choose(place, terms.captured, numbers[~terms.is_apart])
        if terms.apart is not None:
            own = terms.apart.choose(logits, raw, numbers[terms.is_apart], newest, self._passes)
            best, tokens = terms.apart.put(best, own[0]), terms.apart.put(tokens, own[1])
        if self._ranks is not None:
            tokens = self._ranks.broadcast_tensor(tokens)
        if terms.apart is not None:
            terms.apart.count(tokens)
        logprobs = (
            None if terms.logprob_rows is None else terms.logprob_rows.compute(logits, tokens)
        )
        return Drawn(best, tokens, logprobs)

    def discard(self, request: Request) -> None:
        """Drop all state of a request. O(1)."""
        self._streams.pop(request.request_id, None)
        self._counts.discard(request)
        self._grammars.discard(request)

    def _terms_of(self, sampling: tuple[Request, ...], *, has_graphs: bool) -> "_StepTerms":
        """Return the rows of a step's requests by the way they are sampled. O(requests)."""
        drawing: list[int] = []
        apart: list[int] = []
        logprob_rows: list[int] = []
        staying: list[SamplingParams | None] = []
        for row, request in enumerate(sampling):
            params = request.params
            leaves = not (has_graphs and is_captured(params, self._vocab_size))
            staying.append(None if leaves else params)
            if params.temperature:
                drawing.append(row)
            if leaves and (params.temperature or params.changes_logits):
                apart.append(row)
            if params.logprobs is not None:
                logprob_rows.append(row)
        streams = [self._stream(sampling[row]) for row in drawing]
        return _StepTerms(
            sampling,
            has_graphs,
            tuple([sampling[row] for row in drawing]),
            drawing,
            np.array(streams, np.uint64),
            np.isin(drawing, apart),
            row_terms(staying, self._vocab_size) if has_graphs else None,
            self._apart(apart, sampling) if apart else None,
            _LogprobRows(logprob_rows, sampling, self._device) if logprob_rows else None,
        )

    def _apart(self, rows: Sequence[int], sampling: Sequence[Request]) -> "_Apart":
        requests = [sampling[row] for row in rows]
        drawing = [place for place, each in enumerate(requests) if each.params.temperature]
        changed = [place for place, each in enumerate(requests) if each.params.changes_logits]
        device, size = self._device, self._vocab_size
        how = [requests[place].params for place in drawing]
        return _Apart(
            None if len(rows) == len(sampling) else index_of(rows, device),
            draw_terms(drawing, how, len(rows), size, device) if drawing else None,
            _Changes(changed, requests, self._counts, self._grammars, device) if changed else None,
        )

    def _stream(self, request: Request) -> int:
        number = request.request_id
        if number not in self._streams:
            seeds = (request.params.seed, self._seed)
            self._streams[number] = stream_of(*seeds, number, request.sample)
        return self._streams[number]


@dataclass(frozen=True, slots=True)
class _StepTerms:
    """The rows of a step's requests by the way they are sampled.

    Attributes:
        sampling: the requests.
        has_graphs: True if there are captured draws.
        drawing: the requests that draw.
        drawing_rows: their rows.
        streams: the start of each one's random numbers.
        is_apart: True for those that no graph draws.
        captured: terms of the rows that a graph draws; None: there are none.
        apart: all other rows that draw or are changed; None: there are none.
        logprob_rows: rows that ask for log-probabilities; None: there are none.
    """

    sampling: tuple[Request, ...]
    has_graphs: bool
    drawing: tuple[Request, ...]
    drawing_rows: Sequence[int]
    streams: NDArray[np.uint64]
    is_apart: NDArray[np.bool_]
    captured: RowTerms | None
    apart: "_Apart | None"
    logprob_rows: "_LogprobRows | None"


@dataclass(frozen=True, slots=True)
class _Apart:
    """The rows of a step that no graph draws; the other rows cost nothing here.

    Attributes:
        rows: int64 [num_apart], of the logits; None: all.
        draws: the terms of those that draw; None: none does.
        changes: to their logits; None: there are none.
    """

    rows: Tensor | None
    draws: DrawTerms | None
    changes: "_Changes | None"

    def choose(
        self,
        logits: Tensor,
        most_likely: tuple[Tensor, Tensor],
        numbers: NDArray[np.float64],
        newest: Callable[[], Mapping[int, int | None]],
        passes: Passes,
    ) -> tuple[Tensor, Tensor]:
        """Return the largest logit and the token of each row. O(num_apart * vocab_size).

        Args:
            logits: of all rows of the step.
            most_likely: of all rows of the step.
            numbers: of the rows that draw here.
            newest: see `RequestSampler.draw`.
            passes: over the logits.
        """
        best, tokens = likely = self._of(most_likely[0]), self._of(most_likely[1])
        some = self._of(logits)
        if self.changes is not None:
            some, likely = self.changes.apply(some, likely, newest)
            best, tokens = best.where(~best.isfinite(), likely[0]), likely[1]
        if self.draws is not None:
            own = torch.from_numpy(numbers).unsqueeze(-1)
            if logits.device.type == "cuda":
                own = own.pin_memory().to(logits.device, non_blocking=True)
            tokens = choose(some, likely, self.draws, own, passes)
        return best, tokens

    def put(self, whole: Tensor, own: Tensor) -> Tensor:
        """Return the values of all rows, with those of these rows replaced."""
        return own if self.rows is None else whole.to(own.dtype).index_put((self.rows,), own)

    def count(self, tokens: Tensor) -> None:
        """Count the tokens of all rows of the step. O(num_apart)."""
        if self.changes is not None:
            self.changes.count(self._of(tokens))

    def _of(self, whole: Tensor) -> Tensor:
        return whole if self.rows is None else whole[self.rows]


class _Changes:
    """The changes to the logits of some rows before a token is chosen.

    Args:
        rows: of the logits.
        sampling: the requests of all rows.
        counts: of their tokens.
        grammars: of their structured outputs.
        device: of the logits.
    """

    def __init__(
        self,
        rows: Sequence[int],
        sampling: Sequence[Request],
        counts: "_TokenCounts",
        grammars: Grammars,
        device: torch.device,
    ) -> None:
        requests = [sampling[row] for row in rows]
        self._counts = counts
        self._grammars = grammars
        self._is_all = len(rows) == len(sampling)
        self._rows = index_of(rows, device)
        places = [place for place, r in enumerate(requests) if r.params.counts_tokens]
        self._counting = [requests[place] for place in places]
        if places:
            self._places = index_of(places, device)
            self._own_rows = index_of([rows[place] for place in places], device)
            how = [request.params for request in self._counting]
            penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
            self._penalties = tuple(
                column([getattr(one, name) for one in how], device, torch.float32)
                for name in penalties
            )
        pairs = [
            (place, token, bias)
            for place, request in enumerate(requests)
            for token, bias in request.params.logit_bias
        ]
        self._bias: tuple[Tensor, Tensor, Tensor] | None = None
        if pairs:
            at, tokens, values = zip(*pairs, strict=True)
            added = column(values, device, torch.float32).squeeze(-1)
            self._bias = (index_of(at, device), index_of(tokens, device), added)
        always = [
            (place, token)
            for place, request in enumerate(requests)
            for token in (request.bad_words.always if request.bad_words else ())
        ]
        self._barred = _places_of(always, device)
        self._worded = [
            (place, request, request.bad_words)
            for place, request in enumerate(requests)
            if request.bad_words and request.bad_words.has_longer
        ]
        self._young = [(place, r) for place, r in enumerate(requests) if r.params.min_tokens]
        guided = [place for place, r in enumerate(requests) if r.params.grammar is not None]
        self._guided = [requests[place] for place in guided]
        self._guided_places = index_of(guided, device)

    def apply(
        self,
        logits: Tensor,
        most_likely: tuple[Tensor, Tensor],
        newest: Callable[[], Mapping[int, int | None]],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the changed logits, float32, and the largest of each row. O(rows * vocab_size)."""
        some = logits.float() if self._is_all else logits[self._rows].float()
        if some is logits:
            some = logits.clone()
        if self._counting:
            counts = self._counts.of(self._counting)
            own = penalised(some[self._places], counts, *self._penalties)
            some.index_put_((self._places,), own)
        if self._bias is not None:
            at, tokens, added = self._bias
            some.index_put_((at, tokens), added, accumulate=True)
        for barred in (self._barred, _places_of(self._barred_now(newest), some.device)):
            if barred is not None:
                some.index_put_(barred, some.new_tensor(-torch.inf))
        if self._guided:
            mask = self._grammars.mask(self._guided, newest())
            own = masked(some[self._guided_places], mask.to(some.device, non_blocking=True))
            some.index_put_((self._guided_places,), own)
        best, tokens = some.max(dim=-1)
        if self._is_all:
            return some, (best, tokens)
        most, likely = most_likely
        whole = logits.float().index_put((self._rows,), some)
        return whole, (
            most.float().index_put((self._rows,), best),
            likely.index_put((self._rows,), tokens),
        )

    def _barred_now(self, newest: Callable[[], Mapping[int, int | None]]) -> list[tuple[int, int]]:
        """Return the tokens that may not follow those that there are, each with its row."""
        barred = [
            (place, token)
            for place, request in self._young
            if request.num_output_tokens < request.params.min_tokens
            for token in request.end_token_ids
        ]
        if self._worded:
            unread = newest()
            for place, request, words in self._worded:
                token = unread.get(request.request_id) if request.is_expecting else None
                output = request.tokens[request.num_prompt_tokens :]
                barred += [(place, last) for last in words.after(output, token)]
        return barred

    def count(self, tokens: Tensor) -> None:
        """Count the drawn tokens. O(rows)."""
        if self._counting:
            self._counts.add(self._counting, tokens[self._own_rows])


def _places_of(
    pairs: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return rows and tokens as an index; None: there are none. O(pairs)."""
    if not pairs:
        return None
    at, tokens = zip(*pairs, strict=True)
    return index_of(at, device), index_of(tokens, device)


def penalised(
    logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Return logits with penalties for tokens that occur already. O(rows * vocab_size).

    Args:
        logits: float32 [num_rows, vocab_size].
        counts: int32 [num_rows, vocab_size]: how often the output has each token, plus 2**24 if
            the prompt has it.
        repetition: float32 [num_rows, 1], divides positive and multiplies negative logits of tokens
            in prompt or output (Keskar et al. 2019, arXiv:1909.05858).
        presence: float32 [num_rows, 1], subtracted once for tokens in the output.
        frequency: float32 [num_rows, 1], subtracted for each occurrence in the output.
    """
    own = counts & (_IN_PROMPT - 1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits.where(counts == 0, repeated) - frequency * own - presence * (own > 0)


def masked(logits: Tensor, words: Tensor) -> Tensor:
    """Return logits of the allowed tokens, -inf for all others. O(rows * vocab_size).

    Args:
        logits: [num_rows, vocab_size].
        words: int32 [num_rows, vocab_size / 32 rounded up], a bit per token, the lowest first.
    """
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    may_come = (bits & 1).view(len(words), -1)[:, : logits.shape[1]]
    return logits.masked_fill(may_come == 0, -torch.inf)


class _TokenCounts:
    """The counts of each token in each request, for requests whose logits depend on them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._table = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}  # row of each request
        self._counted: dict[int, int] = {}  # its tokens counted so far
        self._free: list[int] = []

    def of(self, requests: Sequence[Request]) -> Tensor:
        """Return the counts as `penalised` takes them: int32 [requests, vocab_size].

        O(requests * vocab_size), and O(tokens) for a new request.
        """
        for request in requests:
            if self._counted.get(request.request_id) != request.num_tokens:
                self._bring(request)
        return self._table[self._rows(requests)]

    def add(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """Count one more token of each request that `of` was called for. O(requests)."""
        slots = self._rows(requests)
        ones = torch.ones_like(tokens, dtype=torch.int32)
        self._table.index_put_((slots, tokens), ones, accumulate=True)
        for request in requests:
            self._counted[request.request_id] += 1

    def discard(self, request: Request) -> None:
        """Free the row of a request, if it has one. O(1)."""
        slot = self._slots.pop(request.request_id, None)
        if slot is not None:
            del self._counted[request.request_id]
            self._free.append(slot)

    def _rows(self, requests: Sequence[Request]) -> Tensor:
        return index_of([self._slots[r.request_id] for r in requests], self._table.device)

    def _bring(self, request: Request) -> None:
        """Count all tokens of a request; all of them have been read."""
        if request.is_expecting:
            raise RequestStateError(f"{request!r}: its last token was drawn but not counted")
        number = request.request_id
        if number not in self._slots:
            if not self._free:
                self._grow()
            self._slots[number] = self._free.pop()
        tokens = np.frombuffer(request.tokens, np.uint32).astype(np.int64)
        counts = np.bincount(tokens[request.num_prompt_tokens :], minlength=self._table.shape[1])
        counts[np.unique(tokens[: request.num_prompt_tokens])] += _IN_PROMPT
        self._table[self._slots[number]] = torch.from_numpy(counts.astype(np.int32))
        self._counted[number] = len(tokens)

    def _grow(self) -> None:
        old = len(self._table)
        added = max(old, 4)
        self._free += range(old, old + added)
        self._table = torch.cat([self._table, self._table.new_zeros(added, self._table.shape[1])])


class _LogprobRows:
    """The rows that ask for log-probabilities."""

    def __init__(
        self, rows: Sequence[int], sampling: Sequence[Request], device: torch.device
    ) -> None:
        self._rows = tuple(rows)
        self._counts = tuple([sampling[row].params.logprobs or 0 for row in rows])
        self._index = index_of(rows, device)

    def compute(self, logits: Tensor, tokens: Tensor) -> "_StepLogprobs":
        """Compute the log-probabilities. O(rows * vocab_size)."""
        values, ids = log_probabilities(logits[self._index], tokens[self._index], max(self._counts))
        return _StepLogprobs(self._rows, self._counts, values, ids)


def log_probabilities(logits: Tensor, tokens: Tensor, num_tops: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the tokens and of the `num_tops` most likely ones; ids of those.

    float32 [num_rows, 1 + num_tops] and int64 [num_rows, num_tops]. O(num_rows * vocab_size).
    """
    sums, logits = passes_for(logits.device.type).log_sums(logits), logits.float()
    tops, ids = logits.topk(min(num_tops, logits.shape[-1]), dim=-1)
    chosen = logits.gather(1, tokens[:, None])
    return torch.cat([chosen, tops], dim=-1) - sums, ids


@dataclass(frozen=True, slots=True)
class _StepLogprobs:
    """Log-probabilities of some rows: the result of `log_probabilities`.

    Attributes:
        rows: of the step.
        counts: the number of most likely tokens that each row asks for.
        values: float32 [num_rows, 1 + the largest count].
        ids: int64 [num_rows, the largest count].
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    values: Tensor
    ids: Tensor

    def to_host(self) -> "_StepLogprobs":
        """Return a copy on its way to the host. O(bytes)."""
        return _StepLogprobs(self.rows, self.counts, to_host(self.values), to_host(self.ids))

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities by row. O(values)."""
        lists = zip(self.rows, self.counts, self.values.tolist(), self.ids.tolist(), strict=True)
        return {
            row: (values[0], tuple(zip(ids[:count], values[1:], strict=False)))
            for row, count, values, ids in lists
        }


def to_host(content: Tensor) -> Tensor:
    """Return a copy in page-locked memory, complete once the stream has come so far. O(bytes)."""
    host = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
    return host.copy_(content, non_blocking=True)
