"""Steps as CUDA graphs: captured once per size, replayed for every batch that fits.

A step launches hundreds of kernels; with few tokens each runs shorter than its launch takes. A CUDA
graph launches them all at once, but has fixed addresses and shapes. So it is captured for a number
of tokens and rows (a bucket), on tensors that never move, and a step is copied into the tensors of
the smallest bucket that fits. Surplus tokens store nothing; surplus rows are sequences without a
query token, and their logits are ignored.

Decides: the buckets. Steps in which every sequence computes one token have their own, whose
attention needs no prefill kernels; all others, with prompts, chunked prefill and draft tokens,
share buckets by tokens and rows. The assignment of tokens to sequences is read on the device, so
one graph serves all of them. Tokens that the previous step has drawn are read inside the graph, so
the host never waits for them. Surplus rows read no recurrent state and write none. A network that
may have LoRA adapters has each bucket twice, and only steps that have some use the second.

Invariants: what a graph reads beside the tensors of a step (weights, caches) never moves; a replay
gives the network's own results, because it consists of the network's own launches.

Does not know: what the network is, which requests are in a batch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import backends
from kvcore.adapters.recurrent import StateRows, StateStep
from model.attention.batch import StepTensors, chosen_ids
from model.compile.few_rows import FEW_ROWS
from model.forward.network import PagedNetwork
from model.sample.draw_graphs import DrawGraphs, GraphCapturer, Place
from model.sample.sampler import passes_for

_FEW = (2, 4, 8, 16, 24, 32, 48, 64)  # one sequence uses two rows, like a compiled network
_STEP = 32
_DOUBLED = (16, 32, 64, 128, 256)  # tokens: so few that reading the weights dominates
_ROWS = (1, 16, 64)  # of steps with several tokens per sequence


class Bucket(NamedTuple):
    """A size that is captured.

    Attributes:
        tokens: the most tokens.
        rows: the most sequences, and the most rows of logits.
        longest: the most query tokens of a sequence.
        shares: True if sequences may share a prefix, which is then read once.
        adapted: True if sequences may have LoRA adapters.
    """

    tokens: int
    rows: int
    longest: int
    shares: bool = False
    adapted: bool = False


class Buckets:
    """The buckets of a network.

    Args:
        max_num_seqs: the most sequences of a step.
        max_tokens: the most tokens of captured steps with several tokens per sequence; 0: none.
        max_rows: the most rows of a step with draft tokens; 0: one per sequence.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int, max_rows: int = 0) -> None:
        self._singles = _bucket_sizes(max_num_seqs)
        self._tokens = _token_sizes(max_tokens)
        most = max(max_num_seqs, max_rows)
        self._rows = (*[size for size in _ROWS if size < most], most)

    @property
    def singles(self) -> tuple[Bucket, ...]:
        """Buckets of steps with one token per sequence, the smallest first. O(buckets)."""
        return tuple(Bucket(size, size, 1) for size in self._singles)

    @property
    def mixed(self) -> tuple[Bucket, ...]:
        """All other buckets, the smallest first. O(buckets)."""
        return tuple(
            dict.fromkeys(
                Bucket(tokens, min(rows, tokens), tokens)
                for tokens in self._tokens
                for rows in self._rows
            )
        )

    def smallest(self, tokens: int, rows: int, longest: int) -> Bucket | None:
        """Return the smallest bucket that a step fits into; None: there is none. O(log buckets).

        Args:
            tokens: of the step.
            rows: its sequences or its rows of logits, whichever are more.
            longest: the most query tokens of a sequence.
        """
        if longest == 1:
            place = bisect_left(self._singles, max(tokens, rows))
            if place < len(self._singles):
                size = self._singles[place]
                return Bucket(size, size, 1)
        place, which = bisect_left(self._tokens, max(tokens, rows)), bisect_left(self._rows, rows)
        if place == len(self._tokens) or which == len(self._rows):
            return None
        size = self._tokens[place]
        return Bucket(size, min(self._rows[which], size), size)


class Passed(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: [num_rows, vocab_size].
        most_likely: `logits.max(dim=-1)`; None: not computed.
        place: the buffer of the logits; None: they get new memory.
    """

    logits: Tensor
    most_likely: tuple[Tensor, Tensor] | None = None
    place: Place | None = None


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    most_likely: tuple[Tensor, Tensor]


class CudaGraphs:
    """The CUDA graphs of a network whose caches are allocated.

    Args:
        network: on a GPU; launches the same kernels for every batch of a shape, and never waits.
        drawn: int64 [max_num_seqs], the tokens of the previous step.
        widths: for each KV cache group the most blocks of a sequence.
        block_size: tokens per block, of all groups.
        max_num_seqs: see `Buckets`.
        max_tokens: see `Buckets`.
        draws: captured beside the steps, for the buffers of their logits.
        max_rows: see `Buckets`.
    """

    def __init__(
        self,
        network: PagedNetwork,
        drawn: Tensor,
        widths: Sequence[int],
        block_size: int,
        max_num_seqs: int,
        max_tokens: int,
        draws: DrawGraphs,
        max_rows: int = 0,
    ) -> None:
        self._network = network
        self.draws = draws
        self._passes = passes_for(network.device.type)
        self._drawn = drawn
        self.buckets = Buckets(max_num_seqs, max_tokens, max_rows)
        device = network.device
        self._inputs: dict[bool, _Inputs] = {}  # by whether each sequence has one token
        for buckets in (self.buckets.singles, self.buckets.mixed):
            if buckets:
                rows = max(bucket.rows for bucket in buckets)
                largest = buckets[-1]
                self._inputs[largest.longest == 1] = _Inputs(
                    largest.tokens, rows, len(widths), device
                )
        most = max(inputs.num_rows for inputs in self._inputs.values())
        self._tables = [
            torch.zeros((most, width), dtype=torch.int32, device=device) for width in widths
        ]
        self._max_seq_lens = [width * block_size for width in widths]
        pieces = network.blocks_per_state
        self._states = _StateInputs(most, pieces, device) if pieces else None
        self._worth = network.shared_worth()
        # For steps with several tokens per sequence: logits and the largest of each row.
        self._logits, self._best = torch.empty(0), torch.empty(0)
        self._likely = torch.empty(0)
        self._graphs: dict[Bucket, _Graph] = {}

    def capture(self) -> int:
        """Capture every bucket and the draws from it, the largest first. Two forward passes each.

        Returns:
            The number of buckets.
        """
        with GraphCapturer(self._network.device) as capturer:
            buckets = [*self._sharing(), *self.buckets.singles, *self.buckets.mixed]
            if self._network.adapters is not None:
                buckets += [bucket._replace(adapted=True) for bucket in buckets]
            for bucket in sorted(buckets, reverse=True):
                is_few = bucket.tokens in FEW_ROWS
                kind = bucket.longest == 1, bucket.shares, bucket.adapted, is_few
                graph, (logits, most_likely) = capturer.capture(partial(self._run, bucket), kind)
                self._graphs[bucket] = _Graph(graph, logits, most_likely)
                self.draws.capture(_place(bucket), logits, most_likely, capturer)
        return len(self._graphs)

    def _sharing(self) -> list[Bucket]:
        """Return buckets of one token a sequence in which reading a shared prefix once can pay."""
        pairs = [
            (worth, length)
            for worth, length in zip(self._worth, self._max_seq_lens, strict=True)
            if worth is not None
        ]
        return [
            bucket._replace(shares=True)
            for bucket in self.buckets.singles
            if any(worth.is_reached(bucket.rows, length - 1) for worth, length in pairs)
        ]

    def bucket_of(self, step: StepTensors) -> Bucket | None:
        """Return the bucket that a step is replayed in; None: it is too large. O(log buckets)."""
        batch = step.paged[0]
        rows = max(batch.num_seqs, len(step.logit_rows))
        bucket = self.buckets.smallest(batch.num_tokens, rows, batch.max_query_len)
        if bucket is not None and bucket.longest == 1:
            shares = any(one.shared_prefix is not None for one in step.paged)
            bucket = bucket._replace(shares=shares)
        if bucket is not None and step.adapter_slots is not None:
            bucket = bucket._replace(adapted=True)
        return bucket

    def replay(self, step: StepTensors, bucket: Bucket) -> Passed:
        """Compute a step: its logits and the largest of each row, valid until the next call.

        Returns before the device is done. O(bytes of the step's tensors) to copy them.
        """
        self._load(step, bucket)
        graph = self._graphs[bucket]
        graph.graph.replay()
        return _passed(len(step.logit_rows), graph.logits, graph.most_likely, bucket)

    def _load(self, step: StepTensors, bucket: Bucket) -> None:
        self._inputs[bucket.longest == 1].load(step, bucket)
        rows = step.paged[0].num_seqs
        for table, batch in zip(self._tables, step.paged, strict=True):
            sent = batch.block_table.to(table.device, non_blocking=True)
            width = min(sent.shape[1], table.shape[1])
            table[:rows, :width].copy_(sent[:, :width])
        if self._states is not None and isinstance(step.states, StateStep):
            self._states.load(step.states, bucket.rows)

    def _run(self, bucket: Bucket) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        size, rows, longest, shares, adapted = bucket
        inputs = self._inputs[longest == 1].whole
        ids = chosen_ids(inputs.input_ids[None, :size], inputs.sources[None, :size], self._drawn)
        paged = tuple(
            backends.PagedBatch(
                query_start_loc=inputs.query_start_loc[: rows + 1],
                seq_lens=inputs.seq_lens[:rows],
                block_table=table[:rows],
                slot_mapping=slots[:size],
                max_query_len=longest,
                max_seq_len=max_seq_len,
                shared_prefix=backends.SharedPrefix(0, rows, max_seq_len - 1, now)
                if shares and worth is not None
                else None,
                kept={},
            )
            for table, slots, max_seq_len, now, worth in zip(
                self._tables,
                inputs.slots,
                self._max_seq_lens,
                inputs.shared,
                self._worth,
                strict=True,
            )
        )
        positions = inputs.position_ids[:size][None]  # with the strides of a whole tensor
        starts = None if longest == 1 else inputs.query_start_loc[: rows + 1]
        states = None if self._states is None else self._states.of(rows, starts)
        slots = inputs.adapter_slots[:size] if adapted else None
        step = StepTensors(
            ids, positions, inputs.logit_rows[:rows], paged, states=states, adapter_slots=slots
        )
        logits = self._network.logits(step)
        best, tokens = self._passes.most_likely(logits)
        return (logits, (best, tokens)) if longest == 1 else self._kept(logits, best, tokens)

    def _kept(
        self, logits: Tensor, best: Tensor, tokens: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Copy the results into buffers that all buckets of several tokens per sequence share."""
        if len(self._logits) < len(logits):  # in the first run, which is the largest
            self._logits, self._best = torch.empty_like(logits), torch.empty_like(best)
            self._likely = torch.empty_like(tokens)
        kept = (self._logits, self._best, self._likely)
        whole, most, likely = (
            place[: len(logits)].copy_(value)
            for place, value in zip(kept, (logits, best, tokens), strict=True)
        )
        return whole, (most, likely)


def _place(bucket: Bucket) -> Place:
    is_single = bucket.longest == 1
    return Place(bucket.rows, is_single, bucket.shares, bucket.adapted and is_single)


def _passed(
    rows: int, logits: Tensor, most_likely: tuple[Tensor, Tensor], bucket: Bucket
) -> Passed:
    """Return the results of the rows that the step really has."""
    best, tokens = most_likely
    return Passed(logits[:rows], (best[:rows], tokens[:rows]), _place(bucket))


class _Parts(NamedTuple):
    """The inputs of a step except its block tables, as views of one int64 tensor."""

    input_ids: Tensor
    position_ids: Tensor
    sources: Tensor
    adapter_slots: Tensor
    slots: tuple[Tensor, ...]
    logit_rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    shared: tuple[Tensor, ...]

    @classmethod
    def of(cls, words: Tensor, tokens: int, rows: int, num_groups: int) -> "_Parts":
        sizes = [*[tokens] * (4 + num_groups), rows, rows + 1, 2 * num_groups]
        ids, positions, sources, adapters, *rest = words.split(sizes)  # type: ignore[no-untyped-call]
        *slots, logit_rows, halves, shared = rest
        halves, shared = halves.view(torch.int32), shared.view(torch.int32).view(num_groups, 4)
        starts, lengths = halves[: rows + 1], halves[rows + 1 : -1]
        prefixes = tuple(shared[:, :3])
        tokens_first = ids, positions, sources, adapters, tuple(slots)
        return cls(*tokens_first, logit_rows, starts, lengths, prefixes)


class _Inputs:
    """The parts on the device, filled by one copy from the host.

    Two steps may be in flight, so there are two host tensors, page-locked for a GPU.
    """

    def __init__(self, tokens: int, rows: int, num_groups: int, device: torch.device) -> None:
        count = (4 + num_groups) * tokens + 2 * rows + 1 + 2 * num_groups
        self.num_rows = rows
        self._words = torch.zeros(count, dtype=torch.int64, device=device)
        is_pinned = device.type == "cuda"
        self._sent = [torch.zeros(count, dtype=torch.int64, pin_memory=is_pinned) for _ in range(2)]
        self._host = [_Parts.of(words, tokens, rows, num_groups) for words in self._sent]
        self.whole = _Parts.of(self._words, tokens, rows, num_groups)
        for slots in self.whole.slots:
            slots.fill_(-1)

    def load(self, step: StepTensors, bucket: Bucket) -> None:
        """Copy a step's inputs to the front, and clear the surplus rows and tokens."""
        self._sent.reverse()
        self._host.reverse()
        host, first, size = self._host[0], step.paged[0], bucket.tokens
        tokens, rows, sampled = first.num_tokens, first.num_seqs, len(step.logit_rows)
        host.input_ids[:tokens] = step.input_ids[0]
        host.position_ids[:tokens] = step.position_ids[0]
        host.sources[:tokens] = -1 if step.sources is None else step.sources[0]
        if step.adapter_slots is not None:
            host.adapter_slots[:tokens] = step.adapter_slots
            host.adapter_slots[tokens:size] = -1
        host.logit_rows[:sampled] = step.logit_rows
        host.logit_rows[sampled : bucket.rows] = 0
        host.query_start_loc[: rows + 1] = first.query_start_loc
        host.query_start_loc[rows + 1 : bucket.rows + 1] = tokens
        host.seq_lens[:rows] = first.seq_lens
        host.seq_lens[rows : bucket.rows] = 0
        for slots, batch in zip(host.slots, step.paged, strict=True):
            slots[:tokens] = batch.slot_mapping
            slots[tokens:size] = -1
        for prefix_terms, batch in zip(host.shared, step.paged, strict=True):
            prefix = batch.shared_prefix if bucket.shares else None
            if prefix is not None:
                last = prefix.first_seq + prefix.num_seqs
                prefix_terms[:] = torch.tensor((prefix.first_seq, last, prefix.num_tokens))
            elif bucket.shares:
                prefix_terms.zero_()
        self._words.copy_(self._sent[0], non_blocking=True)


class _StateInputs:
    """The states that a step reads and writes, on the device, filled by one copy from the host.

    The last row of words has the number of stored tokens of each sequence.
    """

    def __init__(self, rows: int, blocks_per_state: int, device: torch.device) -> None:
        shape, is_pinned = (2 * blocks_per_state + 1, rows), device.type == "cuda"
        self._pieces = blocks_per_state
        self._words = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._words[-1].zero_()
        self._sent = [torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned) for _ in range(2)]

    def load(self, step: StateStep, rows: int) -> None:
        """Copy a step's block ids to the front; the surplus rows have none and store nothing."""
        self._sent.reverse()
        sent, count, pieces = self._sent[0], len(step.runs), self._pieces
        sent[:-1, count:rows] = -1
        sent[-1, count:rows] = 0
        sent[:pieces, :count] = step.read.t()
        sent[pieces:-1, :count] = -1 if step.write is None else step.write.t()
        sent[-1, :count] = torch.tensor([run.num_known for run in step.runs], dtype=torch.int32)
        self._words.copy_(sent, non_blocking=True)

    def of(self, rows: int, query_start_loc: Tensor | None) -> StateRows:
        """Return a step of the first rows; without their starts each has one token."""
        read, write = self._words[:-1, :rows].split(self._pieces)  # type: ignore[no-untyped-call]
        if query_start_loc is None:
            return StateRows(read, write)
        return StateRows(read, write, query_start_loc, self._words[-1, :rows])


def _bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the rows of steps with one token a sequence, closest where a row costs most."""
    last = max(2, max_num_seqs)
    sizes = [size for size in (*_FEW, *range(_FEW[-1] + _STEP, last, _STEP)) if size < last]
    return (*sizes, last)


def _token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Return the tokens of other steps: doubled while they cost little, then by 1/2 and 1/3.

    O(log max_tokens).
    """
    if max_tokens < 2:
        return ()
    sizes = list(_DOUBLED)
    while sizes[-1] < max_tokens:
        sizes += (sizes[-1] * 3 // 2, sizes[-1] * 2)
    return (*[size for size in sizes if size < max_tokens], max_tokens)
