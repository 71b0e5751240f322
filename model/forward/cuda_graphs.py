"""Steps as CUDA graphs: recorded once for a size, replayed for any batch that fits into it.

A step launches hundreds of kernels, and while its tokens are few each is shorter than its launch.
Recorded in a graph they are launched at once. A graph has fixed addresses and shapes, so it is
recorded for so many tokens and rows (a bucket), in tensors that stay where they are, and a step is
copied into those of the smallest bucket that has room. Tokens to spare store nothing and belong to
nobody; rows to spare are sequences of no query token, and their logits are nobody's.

Decides: the buckets. Steps in which every sequence computes one token have their own, in which
attention needs no kernels for more; all others, with prompts, parts of prompts and drafts, share
those of their tokens and rows. Who computes which token is read on the device, so what is recorded
is the same for all of them. Tokens that the step before has drawn are picked inside the graph, from
where it has left them, so nothing waits for the host.

Invariants: what a graph reads beside a step's tensors (weights, caches) never moves; a replay gives
what the network gives, because it is the network's own launches.

Does not know: what the network is, who is in a batch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import backends
from model.attention.batch import StepTensors, chosen_ids
from model.forward.network import PagedNetwork
from model.sample.draw_graphs import DrawGraphs, GraphCapturer, Place
from model.sample.sampler import passes_for

_FEW = (2, 4, 8, 16, 24, 32, 48, 64)  # a batch of one takes two rows, as those that are compiled
_STEP = 32
_DOUBLED = (16, 32, 64, 128, 256)  # tokens: up to here a step takes as long as its weights
_ROWS = (1, 16, 64)  # of steps of several tokens a sequence; one that is alone needs no plan


class Bucket(NamedTuple):
    """A size that is recorded.

    Attributes:
        tokens: at most.
        rows: at most so many sequences, and so many rows of logits.
        longest: query tokens of a sequence, at most.
        shares: whether sequences may share what they begin with, which is read once then.
    """

    tokens: int
    rows: int
    longest: int
    shares: bool = False


class Buckets:
    """Those of a network.

    Args:
        max_num_seqs: the most sequences of a step.
        max_tokens: the most tokens of steps that are recorded, but for those of one a sequence;
            0: no others are.
        max_rows: the most rows of a step, where sequences bring drafts; 0: one a sequence.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int, max_rows: int = 0) -> None:
        self._singles = bucket_sizes(max_num_seqs)
        self._tokens = token_sizes(max_tokens)
        most = max(max_num_seqs, max_rows)
        self._rows = (*[size for size in _ROWS if size < most], most)

    @property
    def singles(self) -> tuple[Bucket, ...]:
        """Of steps of one token a sequence, the smallest first. O(buckets)."""
        return tuple(Bucket(size, size, 1) for size in self._singles)

    @property
    def mixed(self) -> tuple[Bucket, ...]:
        """The others, the smallest first. O(buckets)."""
        return tuple(
            dict.fromkeys(
                Bucket(tokens, min(rows, tokens), tokens)
                for tokens in self._tokens
                for rows in self._rows
            )
        )

    def smallest(self, tokens: int, rows: int, longest: int) -> Bucket | None:
        """The smallest with room for a step; None: there is none. O(log buckets).

        Args:
            tokens: of the step.
            rows: its sequences, or its rows of logits, if those are more.
            longest: query tokens of a sequence.
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
    """What a pass gives.

    Attributes:
        logits: [num_rows, vocab_size].
        most_likely: `logits.max(dim=-1)`; None: nobody has looked.
        place: where they lie; None: in memory of their own.
    """

    logits: Tensor
    most_likely: tuple[Tensor, Tensor] | None = None
    place: Place | None = None


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    most_likely: tuple[Tensor, Tensor]


class CudaGraphs:
    """The graphs of a network whose caches are allocated.

    Args:
        network: on a GPU; launches the same for any batch of a shape, and waits for nothing.
        drawn: int64 [max_num_seqs], where the tokens of the step before are.
        widths: for each layer group the most blocks that a sequence can have.
        block_size: tokens of a block, of all groups.
        max_num_seqs: as `Buckets` takes it.
        max_tokens: likewise.
        draws: are recorded beside the steps, from where their logits lie.
        max_rows: as `Buckets` takes it.
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
        self._inputs: dict[bool, _Inputs] = {}  # whether a sequence has one token
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
        self._worth = network.shared_worth()
        # Of the steps that are not of one token a sequence, with each row's largest.
        self._logits, self._best = torch.empty(0), torch.empty(0)
        self._likely = torch.empty(0)
        self._graphs: dict[Bucket, _Graph] = {}

    def capture(self) -> int:
        """Record every bucket and the draws from it, the largest first. A few passes each.

        Returns:
            How many buckets there are.
        """
        with GraphCapturer(self._network.device) as capturer:
            buckets = (*self._sharing(), *self.buckets.singles, *self.buckets.mixed)
            for bucket in sorted(buckets, reverse=True):
                graph, (logits, most_likely) = capturer.capture(partial(self._run, bucket))
                self._graphs[bucket] = _Graph(graph, logits, most_likely)
                self.draws.capture(_place(bucket), logits, most_likely, capturer)
        return len(self._graphs)

    def _sharing(self) -> list[Bucket]:
        """Those of one token a sequence in which it can be worth to read once what is shared."""
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
        """Which one a step is replayed in; None: it is too large. O(log buckets)."""
        batch = step.paged[0]
        rows = max(batch.num_seqs, len(step.logit_rows))
        bucket = self.buckets.smallest(batch.num_tokens, rows, batch.max_query_len)
        if bucket is not None and bucket.longest == 1:
            shares = any(one.shared_prefix is not None for one in step.paged)
            bucket = bucket._replace(shares=shares)
        return bucket

    def replay(self, step: StepTensors, bucket: Bucket) -> Passed:
        """Compute a step: its logits and each row's largest, valid until the next call.

        Returns before it is done. O(bytes of the step's tensors) to copy them.
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

    def _run(self, bucket: Bucket) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        size, rows, longest, shares = bucket
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
        positions = inputs.position_ids[:size][None]  # strided as a tensor of its own
        logits = self._network.logits(StepTensors(ids, positions, inputs.logit_rows[:rows], paged))
        best, tokens = self._passes.most_likely(logits)
        return (logits, (best, tokens)) if longest == 1 else self._kept(logits, best, tokens)

    def _kept(
        self, logits: Tensor, best: Tensor, tokens: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The same where all buckets of several tokens a sequence leave theirs, to save memory."""
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
    return Place(bucket.rows, bucket.longest == 1, bucket.shares)


def _passed(
    rows: int, logits: Tensor, most_likely: tuple[Tensor, Tensor], bucket: Bucket
) -> Passed:
    """What was computed of the rows that a step has."""
    best, tokens = most_likely
    return Passed(logits[:rows], (best[:rows], tokens[:rows]), _place(bucket))


class _Parts(NamedTuple):
    """What a step brings beside its block tables, as parts of one int64 tensor."""

    input_ids: Tensor
    position_ids: Tensor
    sources: Tensor
    slots: tuple[Tensor, ...]
    logit_rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    shared: tuple[Tensor, ...]

    @classmethod
    def of(cls, words: Tensor, tokens: int, rows: int, num_groups: int) -> "_Parts":
        sizes = [*[tokens] * (3 + num_groups), rows, rows + 1, 2 * num_groups]
        ids, positions, sources, *rest = words.split(sizes)  # type: ignore[no-untyped-call]
        *slots, logit_rows, halves, shared = rest
        halves, shared = halves.view(torch.int32), shared.view(torch.int32).view(num_groups, 4)
        starts, lengths = halves[: rows + 1], halves[rows + 1 : -1]
        told = tuple(shared[:, :3])
        return cls(ids, positions, sources, tuple(slots), logit_rows, starts, lengths, told)


class _Inputs:
    """The parts on the device, filled by one copy from the host.

    Two steps may be on their way, so there are two tensors to copy from, page-locked for a GPU.
    """

    def __init__(self, tokens: int, rows: int, num_groups: int, device: torch.device) -> None:
        count = (3 + num_groups) * tokens + 2 * rows + 1 + 2 * num_groups
        self.num_rows = rows
        self._words = torch.zeros(count, dtype=torch.int64, device=device)
        is_pinned = device.type == "cuda"
        self._sent = [torch.zeros(count, dtype=torch.int64, pin_memory=is_pinned) for _ in range(2)]
        self._host = [_Parts.of(words, tokens, rows, num_groups) for words in self._sent]
        self.whole = _Parts.of(self._words, tokens, rows, num_groups)
        for slots in self.whole.slots:
            slots.fill_(-1)

    def load(self, step: StepTensors, bucket: Bucket) -> None:
        """Have a step's inputs in the first places, and nothing in those that are to spare."""
        self._sent.reverse()
        self._host.reverse()
        host, first, size = self._host[0], step.paged[0], bucket.tokens
        tokens, rows, sampled = first.num_tokens, first.num_seqs, len(step.logit_rows)
        host.input_ids[:tokens] = step.input_ids[0]
        host.position_ids[:tokens] = step.position_ids[0]
        host.sources[:tokens] = -1 if step.sources is None else step.sources[0]
        host.logit_rows[:sampled] = step.logit_rows
        host.logit_rows[sampled : bucket.rows] = 0
        host.query_start_loc[: rows + 1] = first.query_start_loc
        host.query_start_loc[rows + 1 : bucket.rows + 1] = tokens
        host.seq_lens[:rows] = first.seq_lens
        host.seq_lens[rows : bucket.rows] = 0
        for slots, batch in zip(host.slots, step.paged, strict=True):
            slots[:tokens] = batch.slot_mapping
            slots[tokens:size] = -1
        for told, batch in zip(host.shared, step.paged, strict=True):
            prefix = batch.shared_prefix if bucket.shares else None
            if prefix is not None:
                last = prefix.first_seq + prefix.num_seqs
                told[:] = torch.tensor((prefix.first_seq, last, prefix.num_tokens))
            elif bucket.shares:
                told.zero_()
        self._words.copy_(self._sent[0], non_blocking=True)


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of steps of one token each: close together where a row costs most. O(max_num_seqs)."""
    last = max(2, max_num_seqs)
    sizes = [size for size in (*_FEW, *range(_FEW[-1] + _STEP, last, _STEP)) if size < last]
    return (*sizes, last)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Tokens of the others: doubled while they cost little, then in steps of a half and a third.

    O(log max_tokens).
    """
    if max_tokens < 2:
        return ()
    sizes = list(_DOUBLED)
    while sizes[-1] < max_tokens:
        sizes += (sizes[-1] * 3 // 2, sizes[-1] * 2)
    return (*[size for size in sizes if size < max_tokens], max_tokens)
