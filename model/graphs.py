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
from model.batch import StepTensors, chosen_ids
from model.network import PagedNetwork
from model.step import Step

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
        tokens = torch.zeros((3, 1, rows), dtype=torch.int64, device=device)
        query_start_loc = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._whole = StepTensors(
            input_ids=tokens[0],
            position_ids=tokens[1],
            logit_rows=torch.arange(rows, device=device),
            paged=tuple(
                backends.PagedBatch(
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens,
                    block_table=torch.zeros((rows, width), dtype=torch.int32, device=device),
                    slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
                    max_query_len=1,
                    max_seq_len=width * block_size,
                )
                for width in widths
            ),
        )
        self._sources = tokens[2].fill_(-1)
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
        return len(step.chunks) <= self._sizes[-1] and all(
            samples and num_tokens == 1 and not followers
            for _, _, num_tokens, samples, followers in step.chunks
        )

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
        whole, first = self._whole, step.paged[0]
        whole.input_ids[:, :rows].copy_(step.input_ids, non_blocking=True)
        whole.position_ids[:, :rows].copy_(step.position_ids, non_blocking=True)
        if step.sources is None:
            self._sources.fill_(-1)
        else:
            self._sources[:, :rows].copy_(step.sources, non_blocking=True)
        whole.paged[0].query_start_loc[: rows + 1].copy_(first.query_start_loc, non_blocking=True)
        whole.paged[0].seq_lens[:rows].copy_(first.seq_lens, non_blocking=True)
        if rows < size:
            whole.paged[0].query_start_loc[rows + 1 : size + 1].fill_(rows)
            whole.paged[0].seq_lens[rows:size].zero_()
        for ours, batch in zip(whole.paged, step.paged, strict=True):
            ours.slot_mapping[:rows].copy_(batch.slot_mapping, non_blocking=True)
            if rows < size:
                ours.slot_mapping[rows:size].fill_(-1)
            table = batch.block_table.to(ours.block_table.device, non_blocking=True)
            width = min(table.shape[1], ours.block_table.shape[1])
            ours.block_table[:rows, :width].copy_(table[:, :width])

    def _run(self, size: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        whole = self._whole
        ids = chosen_ids(whole.input_ids[:, :size], self._sources[:, :size], self._drawn)
        logits = self._network.logits(
            StepTensors(
                input_ids=ids,
                position_ids=whole.position_ids[:, :size],
                logit_rows=whole.logit_rows[:size],
                paged=tuple(_part(batch, size) for batch in whole.paged),
            )
        )
        best, tokens = logits.max(dim=-1)
        return logits, (best, tokens)


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the graphs: close together where a row costs most. O(max_num_seqs)."""
    last = max(2, max_num_seqs)
    sizes = [size for size in (*_FEW, *range(_FEW[-1] + _STEP, last, _STEP)) if size < last]
    return (*sizes, last)


def _part(batch: backends.PagedBatch, size: int) -> backends.PagedBatch:
    return backends.PagedBatch(
        query_start_loc=batch.query_start_loc[: size + 1],
        seq_lens=batch.seq_lens[:size],
        block_table=batch.block_table[:size],
        slot_mapping=batch.slot_mapping[:size],
        max_query_len=1,
        max_seq_len=batch.max_seq_len,
    )
