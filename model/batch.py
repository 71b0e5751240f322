"""The bridge: from the tables of the control plane to the tensors of a step.

Decides: the order of a step's tokens (chunk after chunk) and where each tensor lives. This is the
one file that sees both a block table and a tensor.

Invariants: rows of the block table are padded with the null block; buffers are written only while
no copy from them is under way, because the engine reads a step's tokens before it builds the next.

Does not know: which requests run or why, what the network does with the tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import backends
from model.step import Step


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step, ready for the network.

    Attributes:
        input_ids: int64 [1, num_tokens], all chunks one after the other.
        position_ids: int64 [1, num_tokens], each token's position in its own sequence.
        logit_rows: int64 [num_sampled], the last token of each chunk that samples.
        paged: for each layer group where the tokens' keys and values are; what does not depend on
            the group is the same tensor in all of them.
    """

    input_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    paged: tuple[backends.PagedBatch, ...]


class _Buffer:
    """A flat host buffer that grows by doubling; page-locked where a GPU copies from it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._tensor = self._allocate(256)

    def view(self, size: int) -> NDArray[Any]:
        """The first `size` entries, to be written. O(1), O(size) when the buffer grows."""
        if size > self._tensor.numel():
            self._tensor = self._allocate(max(size, 2 * self._tensor.numel()))
        written: NDArray[Any] = self._tensor[:size].numpy()
        return written

    def send(self, *shape: int) -> Tensor:
        """What was written, on the device; on a CPU it is the buffer itself. O(entries)."""
        tensor = self._tensor[: math.prod(shape)].view(shape)
        return tensor.to(self._device, non_blocking=True)

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, pin_memory=self._device.type == "cuda")


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
        self._block_tables = [_Buffer(torch.int32, device) for _ in range(num_groups)]
        self._slot_mappings = [_Buffer(torch.int64, device) for _ in range(num_groups)]

    def build(self, step: Step) -> StepTensors:
        """Write the step's tokens, positions, tables and slots, and send them to the device.

        The tensors are valid until the next call. O(num_tokens + num_seqs * max_blocks), tables and
        slots for each group.
        """
        chunks = step.chunks
        num_seqs, num_tokens = len(chunks), step.num_tokens
        ends = np.cumsum([chunk.num_tokens for chunk in chunks])
        starts = self._query_start_loc.view(num_seqs + 1)
        starts[0] = 0
        starts[1:] = ends
        lengths = self._seq_lens.view(num_seqs)
        lengths[:] = [chunk.start + chunk.num_tokens for chunk in chunks]
        max_seq_len = int(lengths.max())
        self._write_tokens(step, num_tokens)
        rows = [int(end) - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        self._logit_rows.view(len(rows))[:] = rows
        query_start_loc = self._query_start_loc.send(num_seqs + 1)
        seq_lens = self._seq_lens.send(num_seqs)
        max_query_len = max(chunk.num_tokens for chunk in chunks)
        return StepTensors(
            input_ids=self._input_ids.send(1, num_tokens),
            position_ids=self._position_ids.send(1, num_tokens),
            logit_rows=self._logit_rows.send(len(rows)),
            paged=tuple(
                backends.PagedBatch(
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens,
                    block_table=self._send_block_table(step, group),
                    slot_mapping=self._send_slot_mapping(step, group),
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                )
                for group in range(len(self._block_tables))
            ),
        )

    def _send_block_table(self, step: Step, group: int) -> Tensor:
        sequences = [chunk.request.running_sequence for chunk in step.chunks]
        width = max(len(sequence.tables[group].block_ids) for sequence in sequences)
        buffer = self._block_tables[group]
        table = buffer.view(len(sequences) * width).reshape(len(sequences), width)
        for row, sequence in zip(table, sequences, strict=True):
            row[sequence.write_block_table(row, group) :] = 0
        return buffer.send(len(sequences), width)

    def _send_slot_mapping(self, step: Step, group: int) -> Tensor:
        buffer = self._slot_mappings[group]
        slots = buffer.view(step.num_tokens)
        first = 0
        for chunk in step.chunks:
            last = first + chunk.num_tokens
            chunk.request.running_sequence.write_slot_mapping(
                chunk.start, chunk.start + chunk.num_tokens, slots[first:last], group
            )
            first = last
        return buffer.send(step.num_tokens)

    def _write_tokens(self, step: Step, num_tokens: int) -> None:
        input_ids = self._input_ids.view(num_tokens)
        positions = self._position_ids.view(num_tokens)
        first = 0
        for chunk in step.chunks:
            last, stop = first + chunk.num_tokens, chunk.start + chunk.num_tokens
            input_ids[first:last] = chunk.request.tokens[chunk.start : stop]
            positions[first:last] = np.arange(chunk.start, stop)
            first = last
