"""Decode steps as CUDA graphs: recorded once for a number of rows, replayed for any batch.

A step in which every request computes one token launches hundreds of kernels, each shorter than its
launch. Recorded in a graph they are launched at once. A graph has fixed addresses and shapes, so it
is recorded for so many rows (a bucket), in tensors that stay where they are, and a step is copied
into those of the smallest bucket that has room. Rows to spare are sequences of no query token: they
store nothing, attend to nothing, and their logits are nobody's.

Decides: the buckets. Tokens that the step before has drawn are picked inside the graph, from where
it has left them, so nothing waits for the host.

Invariants: what a graph reads beside a step's tensors (weights, caches) never moves; a replay gives
what the network gives, because it is the network's own launches.

Does not know: what the network is, who is in a batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import backends
from model.control.step import Step
from model.device.batch import StepTensors, chosen_ids
from model.device.network import PagedNetwork

_FEW = (2, 4, 8, 16, 24, 32, 48, 64)  # a batch of one takes two rows, as those that are compiled
_STEP = 32


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    most_likely: tuple[Tensor, Tensor]


class DecodeGraphs:
    """The graphs of a network whose caches are allocated.

    Args:
        network: on a GPU; launches the same for any batch of a shape, and waits for nothing.
        drawn: int64 [max_num_seqs], where the tokens of the step before are.
        widths: for each layer group the most blocks that a sequence can have.
        block_size: tokens of a block, of all groups.
        max_num_seqs: the most rows of a step.
    """

    def __init__(
        self,
        network: PagedNetwork,
        drawn: Tensor,
        widths: Sequence[int],
        block_size: int,
        max_num_seqs: int,
    ) -> None:
        self._network = network
        self._drawn = drawn
        self._sizes = bucket_sizes(max_num_seqs)
        rows, device = self._sizes[-1], network.device
        self._inputs = _Inputs(rows, len(widths), device)
        self._rows = torch.arange(rows, device=device)
        self._tables = [
            torch.zeros((rows, width), dtype=torch.int32, device=device) for width in widths
        ]
        self._max_seq_lens = [width * block_size for width in widths]
        self._graphs: dict[int, _Graph] = {}

    def record(self) -> int:
        """Record every bucket, the largest first, in memory that all share. Two passes each.

        Returns:
            How many there are.

        The first pass of each is not recorded: it compiles what there is to compile.
        """
        pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream(self._network.device)  # type: ignore[no-untyped-call]
        for size in reversed(self._sizes):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run(size)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits, most_likely = self._run(size)
            self._graphs[size] = _Graph(graph, logits, most_likely)
        return len(self._graphs)

    def fits(self, step: Step) -> bool:
        """Whether a step was recorded: everyone computes and draws one token. O(num_chunks)."""
        if len(step.chunks) > self._sizes[-1]:
            return False
        _, _, counts, samples, followers = zip(*step.chunks, strict=True)
        return sum(counts) == len(counts) and all(samples) and not any(followers)

    def replay(self, step: StepTensors) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute a step that fits: its logits and each row's largest, valid until the next call.

        Returns before it is done. O(bytes of the step's tensors) to copy them.
        """
        rows = step.paged[0].num_seqs
        size = next(size for size in self._sizes if size >= rows)
        self._load(step, rows, size)
        graph = self._graphs[size]
        graph.graph.replay()
        best, tokens = graph.most_likely
        return graph.logits[:rows], (best[:rows], tokens[:rows])

    def _load(self, step: StepTensors, rows: int, size: int) -> None:
        self._inputs.load(step, rows, size)
        for table, batch in zip(self._tables, step.paged, strict=True):
            sent = batch.block_table.to(table.device, non_blocking=True)
            width = min(sent.shape[1], table.shape[1])
            table[:rows, :width].copy_(sent[:, :width])

    def _run(self, size: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        inputs = self._inputs.whole
        ids = chosen_ids(inputs.input_ids[None, :size], inputs.sources[None, :size], self._drawn)
        paged = tuple(
            backends.PagedBatch(
                query_start_loc=inputs.query_start_loc[: size + 1],
                seq_lens=inputs.seq_lens[:size],
                block_table=table[:size],
                slot_mapping=slots[:size],
                max_query_len=1,
                max_seq_len=max_seq_len,
            )
            for table, slots, max_seq_len in zip(
                self._tables, inputs.slots, self._max_seq_lens, strict=True
            )
        )
        positions = inputs.position_ids[None, :size]
        logits = self._network.logits(StepTensors(ids, positions, self._rows[:size], paged))
        best, tokens = logits.max(dim=-1)
        return logits, (best, tokens)


class _Parts(NamedTuple):
    """What a step brings beside its block tables, as parts of one int64 tensor."""

    input_ids: Tensor
    position_ids: Tensor
    sources: Tensor
    slots: tuple[Tensor, ...]
    query_start_loc: Tensor
    seq_lens: Tensor

    @classmethod
    def of(cls, words: Tensor, rows: int) -> "_Parts":
        ids, positions, sources, *slots = words[: -rows - 1].split(rows)  # type: ignore[no-untyped-call]
        halves = words[-rows - 1 :].view(torch.int32)
        return cls(ids, positions, sources, tuple(slots), halves[: rows + 1], halves[rows + 1 : -1])


class _Inputs:
    """The parts on the device, filled by one copy from the host.

    Two steps may be on their way, so there are two tensors to copy from, page-locked for a GPU.
    """

    def __init__(self, rows: int, num_groups: int, device: torch.device) -> None:
        count = (4 + num_groups) * rows + 1
        self._words = torch.zeros(count, dtype=torch.int64, device=device)
        is_pinned = device.type == "cuda"
        self._sent = [torch.zeros(count, dtype=torch.int64, pin_memory=is_pinned) for _ in range(2)]
        self._host = [_Parts.of(words, rows) for words in self._sent]
        self.whole = _Parts.of(self._words, rows)
        for slots in self.whole.slots:
            slots.fill_(-1)

    def load(self, step: StepTensors, rows: int, size: int) -> None:
        """Have the inputs of a step in the first rows, and nothing in those up to `size`."""
        self._sent.reverse()
        self._host.reverse()
        host, first = self._host[0], step.paged[0]
        host.input_ids[:rows] = step.input_ids[0]
        host.position_ids[:rows] = step.position_ids[0]
        host.sources[:rows] = -1 if step.sources is None else step.sources[0]
        host.query_start_loc[: rows + 1] = first.query_start_loc
        host.query_start_loc[rows + 1 : size + 1] = rows
        host.seq_lens[:rows] = first.seq_lens
        host.seq_lens[rows:size] = 0
        for slots, batch in zip(host.slots, step.paged, strict=True):
            slots[:rows] = batch.slot_mapping
            slots[rows:size] = -1
        self._words.copy_(self._sent[0], non_blocking=True)


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the graphs: close together where a row costs most. O(max_num_seqs)."""
    last = max(2, max_num_seqs)
    sizes = [size for size in (*_FEW, *range(_FEW[-1] + _STEP, last, _STEP)) if size < last]
    return (*sizes, last)
