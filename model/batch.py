"""The bridge: from the tables of the control plane to the tensors of a step.

Decides: the order of a step's tokens (chunk after chunk), where each tensor lives, and which rows
of the block tables have to be written again. This is the one file that sees both a block table and
a tensor.

Invariants: what a step is given does not depend on the steps before it, but for entries of a block
table that no kernel reads; rows are padded with the null block, and no token is ever written there;
buffers are written only while no copy from them is under way, because the engine reads a step's
tokens before it builds the next.

Does not know: which requests run or why, what the network does with the tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import backends
import kvcore
from model.step import Chunk, Step


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step, ready for the network.

    Attributes:
        input_ids: int64 [1, num_tokens], all chunks one after the other.
        position_ids: int64 [1, num_tokens], each token's position in its own sequence.
        logit_rows: int64 [num_sampled], the last token of each chunk that samples, once for each
            request that samples from it.
        paged: for each layer group where the tokens' keys and values are; what does not depend on
            the group is the same tensor in all of them.
    """

    input_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    paged: tuple[backends.PagedBatch, ...]


class _Buffer:
    """A flat host buffer that grows by doubling; page-locked where a GPU copies from it.

    Views of it are kept while the sizes stay the same, as they do from decode to decode.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._tensor = self._allocate(256)
        self._view: NDArray[Any] = self._tensor.numpy()
        self._shaped = self._tensor

    def view(self, size: int) -> NDArray[Any]:
        """The first `size` entries, to be written. O(1), O(size) when the buffer grows."""
        if size != len(self._view):
            if size > self._tensor.numel():
                self._tensor = self._allocate(max(size, 2 * self._tensor.numel()))
            self._view = self._tensor[:size].numpy()
            self._shaped = self._tensor[:size]
        return self._view

    def send(self, *shape: int) -> Tensor:
        """What was written, on the device; on a CPU it is the buffer itself. O(entries).

        Args:
            shape: as many entries as the view that was written.
        """
        if self._shaped.shape != shape:
            self._shaped = self._tensor[: math.prod(shape)].view(shape)
        if self._device.type == "cpu":
            return self._shaped
        return self._shaped.to(self._device, non_blocking=True)

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, pin_memory=self._device.type == "cuda")


class _Tables:
    """The block tables of one layer group, kept from step to step: a row a sequence.

    A table of a running sequence only grows, so a row is written when a sequence comes, and again
    when it has taken a block; entries that a window has left behind may stay until then, because no
    kernel reads them.
    """

    def __init__(self, group: int, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sequences: list[kvcore.KVSequence] = []  # of each row
        self._filled: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # entries known of each row
        self._shaped: Tensor = torch.empty(0)  # the rows as they were sent last
        self._allocate(8, 16)

    def update(
        self, sequences: Sequence[kvcore.KVSequence], lengths: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """Have a row for each sequence, in their order, up to its length. O(rows + what changed).

        Args:
            sequences: each once.
            lengths: [num_seqs] the tokens that each has room for.

        Returns:
            The tables, [num_seqs, at least as many as any has].
        """
        self._arrange(list(sequences))
        block_size = sequences[0].tables[self._group].block_size
        needed = -(-lengths // block_size)
        for row in np.flatnonzero(self._filled < needed).tolist():
            self._write(row, sequences[row].tables[self._group].block_ids)
        return self._table[: len(sequences)]

    def send(self) -> Tensor:
        """The rows on the device, as wide as the widest. O(rows * width)."""
        shape = (len(self._sequences), int(self._filled.max()))
        if self._device.type != "cpu":
            rows = self._tensor[: shape[0]].to(self._device, non_blocking=True)
            return rows[:, : shape[1]]
        if self._shaped.shape != shape:
            self._shaped = self._tensor[: shape[0], : shape[1]]
        return self._shaped

    def _arrange(self, sequences: list[kvcore.KVSequence]) -> None:
        """Move the rows of known sequences to their new places; the others are empty."""
        if sequences == self._sequences:
            return
        rows = {sequence: row for row, sequence in enumerate(self._sequences)}
        sources = np.array([rows.get(sequence, -1) for sequence in sequences])
        table, filled = self._table, np.append(self._filled, 0)  # -1 is the one at the end
        if len(sequences) > len(table):
            self._allocate(max(len(sequences), 2 * len(table)), table.shape[1])
        self._table[: len(sequences)] = table[sources]
        self._filled = filled[sources]
        self._sequences = sequences

    def _write(self, row: int, block_ids: Sequence[int]) -> None:
        count, (num_rows, width) = len(block_ids), self._table.shape
        if count > width:
            before = self._table
            self._allocate(num_rows, max(count, 2 * width))
            self._table[:, :width] = before
        self._table[row, :count] = block_ids
        self._table[row, count:] = 0
        self._filled[row] = count

    def _allocate(self, num_rows: int, width: int) -> None:
        is_pinned = self._device.type == "cuda"
        self._tensor = torch.zeros((num_rows, width), dtype=torch.int32, pin_memory=is_pinned)
        self._table: NDArray[np.int32] = self._tensor.numpy()
        self._shaped = self._tensor


class BatchBuilder:
    """Turns a step into tensors, in buffers that it keeps.

    Args:
        device: where the tensors go.
        num_groups: the layer groups of the cache.
    """

    def __init__(self, device: torch.device, num_groups: int = 1) -> None:
        self._input_ids = _Buffer(torch.int64, device)
        self._position_ids = _Buffer(torch.int64, device)
        self._logit_rows = _Buffer(torch.int64, device)
        self._query_start_loc = _Buffer(torch.int32, device)
        self._seq_lens = _Buffer(torch.int32, device)
        self._tables = [_Tables(group, device) for group in range(num_groups)]
        self._slot_mappings = [_Buffer(torch.int64, device) for _ in range(num_groups)]
        self._rows = np.arange(0)

    def build(self, step: Step) -> StepTensors:
        """Write the step's tokens, positions, tables and slots, and send them to the device.

        The tensors are valid until the next call. O(num_tokens + num_seqs + blocks that are new),
        tables and slots for each group.

        Raises:
            NotReservedError: a sequence has no room for its tokens.
        """
        chunks = step.chunks
        sequences = [chunk.request.running_sequence for chunk in chunks]
        num_seqs, num_tokens = len(chunks), step.num_tokens
        if len(self._rows) != num_seqs:
            self._rows = np.arange(num_seqs)
        rows, firsts = self._rows, self._rows
        starts = positions = np.array([chunk.start for chunk in chunks])
        max_query_len, ends, lengths = 1, rows + 1, starts + 1
        if num_tokens > num_seqs:
            counts = np.array([chunk.num_tokens for chunk in chunks])
            max_query_len, ends, lengths = int(counts.max()), counts.cumsum(), starts + counts
            rows, firsts = np.repeat(rows, counts), ends - counts
            positions = np.arange(num_tokens) + np.repeat(lengths - ends, counts)
        query_starts = self._query_start_loc.view(num_seqs + 1)
        query_starts[0] = 0
        query_starts[1:] = ends
        self._seq_lens.view(num_seqs)[:] = lengths
        self._write_input_ids(chunks, firsts, num_tokens)
        self._position_ids.view(num_tokens)[:] = positions
        num_sampled = [chunk.samples and 1 + len(chunk.followers) for chunk in chunks]
        sampled = np.repeat(ends, num_sampled) - 1
        self._logit_rows.view(len(sampled))[:] = sampled
        query_start_loc = self._query_start_loc.send(num_seqs + 1)
        seq_lens = self._seq_lens.send(num_seqs)
        max_seq_len = int(lengths.max())
        paged = []
        for group, tables in enumerate(self._tables):
            table = tables.update(sequences, lengths)
            slots = self._slot_mappings[group]
            block_size = sequences[0].tables[group].block_size
            slots.view(num_tokens)[:] = _slots(table, rows, positions, block_size)
            if not slots.view(num_tokens).min() >= block_size:  # the null block is nobody's
                _check_room(sequences, starts, lengths, group)
            paged.append(
                backends.PagedBatch(
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens,
                    block_table=tables.send(),
                    slot_mapping=slots.send(num_tokens),
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                )
            )
        return StepTensors(
            input_ids=self._input_ids.send(1, num_tokens),
            position_ids=self._position_ids.send(1, num_tokens),
            logit_rows=self._logit_rows.send(len(sampled)),
            paged=tuple(paged),
        )

    def _write_input_ids(
        self, chunks: Sequence[Chunk], firsts: NDArray[np.int64], num_tokens: int
    ) -> None:
        input_ids = self._input_ids.view(num_tokens)
        input_ids[firsts] = [chunk.request.tokens[chunk.start] for chunk in chunks]
        if num_tokens > len(chunks):
            for chunk, first in zip(chunks, firsts.tolist(), strict=True):
                if chunk.num_tokens > 1:
                    stop = chunk.start + chunk.num_tokens
                    tokens = chunk.request.tokens[chunk.start : stop]
                    input_ids[first : first + chunk.num_tokens] = tokens


def _slots(
    table: NDArray[np.int32], rows: NDArray[np.int64], positions: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """The slot of each position in its row's sequence. O(positions)."""
    blocks, offsets = np.divmod(positions, block_size)
    inside = np.minimum(blocks, table.shape[1] - 1)
    slots: NDArray[np.int64] = table[rows, inside].astype(np.int64) * block_size + offsets
    return slots


def _check_room(
    sequences: Sequence[kvcore.KVSequence],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    group: int,
) -> None:
    """Let kvcore say which sequence has no room for its tokens. O(num_tokens)."""
    for sequence, start, stop in zip(sequences, starts.tolist(), lengths.tolist(), strict=True):
        out = np.empty(stop - start, dtype=np.int64)
        sequence.write_slot_mapping(start, stop, out, group)
