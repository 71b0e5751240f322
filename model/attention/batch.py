"""The bridge: from the tables of the control plane to the tensors of a step.

Decides: the order of a step's tokens (chunk after chunk), where each tensor lives, and which rows
of the block tables have to be written again. This is the one file that sees both a block table and
a tensor.

Invariants: what a step is given does not depend on the steps before it, but for entries of a block
table that no kernel reads; rows are padded with the null block, and no token is ever written there.
Buffers are written anew with every step: whoever copies from them is done by then.

Does not know: which requests run or why, what the network does with the tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import backends
import kvcore
from model.attention.chunks import chunked_batch
from model.attention.shared_prefix import Shared, Worth, shared_run
from model.control.request import Request
from model.control.step import Chunk, Step


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step, ready for the network once it is on its device.

    Attributes:
        input_ids: int64 [1, num_tokens], all chunks one after the other.
        position_ids: int64 [1, num_tokens], each token's position in its own sequence.
        logit_rows: int64 [num_sampled], the last known token of each chunk that samples, once for
            each request that samples from it; then each draft, chunk by chunk.
        paged: for each layer group where the tokens' keys and values are; what does not depend on
            the group is the same tensor in all of them. For a group with chunks a sequence there is
            a piece of one (`chunks.py`). A backend keeps with it what serves all layers of a step.
        sources: int64 [1, num_tokens]; where it is not negative, the token is that entry of what
            the step before has drawn, and `input_ids` has another; None: it is negative everywhere.
        is_long: bool [1, num_tokens], whether the token's request is long; None: none is.
    """

    input_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    paged: tuple[backends.PagedBatch, ...]
    sources: Tensor | None = None
    is_long: Tensor | None = None

    def to(self, device: torch.device) -> "StepTensors":
        """The same on a device, where it may arrive later than this returns. O(its bytes)."""
        if device.type == "cpu":
            return self
        sent: dict[int, Tensor] = {}  # what several groups share is sent once

        def send(tensor: Tensor) -> Tensor:
            if id(tensor) not in sent:
                sent[id(tensor)] = tensor.to(device, non_blocking=True)
            return sent[id(tensor)]

        return StepTensors(
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            logit_rows=self.logit_rows.to(device, non_blocking=True),
            paged=tuple(
                backends.PagedBatch(
                    query_start_loc=send(batch.query_start_loc),
                    seq_lens=send(batch.seq_lens),
                    block_table=send(batch.block_table),
                    slot_mapping=send(batch.slot_mapping),
                    max_query_len=batch.max_query_len,
                    max_seq_len=batch.max_seq_len,
                    shared_prefix=batch.shared_prefix,
                    kept={},
                )
                for batch in self.paged
            ),
            sources=None if self.sources is None else send(self.sources),
            is_long=None if self.is_long is None else send(self.is_long),
        )


def prompt_step(
    num_tokens: int, num_rows: int, block_size: int, num_groups: int, device: torch.device
) -> StepTensors:
    """A step of one prompt, which writes nowhere and reads the null block. O(num_tokens).

    Args:
        num_tokens: of the prompt.
        num_rows: logits that are wanted, of its first tokens.
        block_size: tokens a block.
        num_groups: layer groups of the cache.
        device: where it runs.
    """
    width = -(-num_tokens // block_size)
    tokens = torch.zeros((1, num_tokens), dtype=torch.int64, device=device)
    batch = backends.PagedBatch(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_table=torch.zeros((1, width), dtype=torch.int32, device=device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    return StepTensors(
        input_ids=tokens,
        position_ids=torch.zeros_like(tokens),  # the same tensor would be taken for a rule
        logit_rows=torch.arange(num_rows, device=device),
        paged=(batch,) * num_groups,
    )


def chosen_ids(input_ids: Tensor, sources: Tensor, drawn: Tensor) -> Tensor:
    """The tokens of a step, those that the step before has drawn in their places. O(num_tokens).

    Args:
        input_ids: int64 [1, num_tokens].
        sources: int64 [1, num_tokens]: entries of `drawn`, or negative.
        drawn: int64 [at least as many as were drawn].
    """
    return torch.where(sources < 0, input_ids, drawn[sources.clamp(min=0)])


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

    def shaped(self, *shape: int) -> Tensor:
        """What was written, as a tensor on the host. O(1).

        Args:
            shape: as many entries as the view that was written.
        """
        if self._shaped.shape != shape:
            self._shaped = self._tensor[: math.prod(shape)].view(shape)
        return self._shaped

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, pin_memory=self._device.type == "cuda")


class _Tables:
    """The block tables of one layer group, kept from step to step: a row a sequence.

    A table of a running sequence only grows, so a row is written when a sequence comes, and again
    when it has taken a block; entries that a window has left behind may stay until then, because no
    kernel reads them. What was taken for drafts may go back, and another block come in its place:
    such entries are not known any more after the step.
    """

    def __init__(self, group: int, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sequences: list[kvcore.KVSequence] = []  # of each row
        self._filled: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # entries known of each row
        self._shaped: Tensor = torch.empty(0)  # the rows as they were sent last
        self._run: Shared | None = None  # of these sequences; None: nobody has looked
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

    def expire(self, row: int, num_tokens: int) -> None:
        """Have what a row has beyond so many tokens written anew when it is needed. O(1)."""
        block_size = self._sequences[row].tables[self._group].block_size
        self._filled[row] = min(int(self._filled[row]), -(-num_tokens // block_size))

    def shared_prefix(
        self, starts: NDArray[np.int64], worth: Worth
    ) -> backends.SharedPrefix | None:
        """What neighbours have in common before the tokens of this step, if that is worth a word.

        O(rows), and where others are in the batch than before O(what they have in common).

        Args:
            starts: [num_seqs] the tokens of each that come before.
            worth: from where on it is.
        """
        if self._run is None:
            rows = len(self._sequences)
            self._run = shared_run(self._table[:rows], self._filled[:rows])
        first, count, blocks = self._run
        if not count:
            return None
        block_size = self._sequences[first].tables[self._group].block_size
        tokens = min(blocks * block_size, int(starts[first : first + count].min()))
        if not worth.is_reached(count, tokens):
            return None
        return backends.SharedPrefix(first, count, tokens)

    def shaped(self) -> Tensor:
        """The rows, as wide as the widest; for a GPU wider, so that they lie without gaps. O(1)."""
        is_read_here = self._device.type == "cpu"
        width = int(self._filled.max()) if is_read_here else self._tensor.shape[1]
        if self._shaped.shape != (len(self._sequences), width):
            self._shaped = self._tensor[: len(self._sequences), :width]
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
        self._run = None

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
    """Turns a step into tensors on the host, in buffers that it keeps.

    Args:
        device: where the tensors go; for a GPU the buffers are page-locked.
        num_groups: the layer groups of the cache.
        chunks: for each group the chunk that its layers see; None: they have none.
        worth: for each from where on it is told what its sequences share; None: nowhere.
        is_ahead: whether tokens are computed that may be taken back, with the blocks that they
            have; those of a request's own are not.
    """

    def __init__(
        self,
        device: torch.device,
        num_groups: int = 1,
        chunks: Sequence[int | None] | None = None,
        worth: Sequence[Worth | None] | None = None,
        *,
        is_ahead: bool = False,
    ) -> None:
        self._is_ahead = is_ahead
        self._chunks = chunks or [None] * num_groups
        self._worth = worth or [None] * num_groups
        self._input_ids = _Buffer(torch.int64, device)
        self._sources = _Buffer(torch.int64, device)
        self._position_ids = _Buffer(torch.int64, device)
        self._logit_rows = _Buffer(torch.int64, device)
        self._query_start_loc = _Buffer(torch.int32, device)
        self._seq_lens = _Buffer(torch.int32, device)
        self._tables = [_Tables(group, device) for group in range(num_groups)]
        self._slot_mappings = [_Buffer(torch.int64, device) for _ in range(num_groups)]
        self._rows = np.arange(0)

    def build(self, step: Step, rows_drawn: Mapping[int, int] | None = None) -> StepTensors:
        """Write the step's tokens, positions, tables and slots.

        The tensors are valid until the next call. O(num_tokens + num_seqs + blocks that are new),
        tables and slots for each group.

        Args:
            step: what is computed.
            rows_drawn: request_id -> where in what the last step has drawn its token is, for
                requests that expect one.

        Raises:
            NotReservedError: a sequence has no room for its tokens.
        """
        columns = zip(*step.chunks, strict=True)  # at the price of one pass over the step
        requests, first_positions, counted, samples, followers, drafts = columns
        sequences = [request.running_sequence for request in requests]
        num_seqs, num_tokens = len(requests), sum(counted)
        if len(self._rows) != num_seqs:
            self._rows = np.arange(num_seqs)
        rows, firsts = self._rows, self._rows
        starts = positions = np.array(first_positions)
        max_query_len, ends, lengths = 1, rows + 1, starts + 1
        if num_tokens > num_seqs:
            counts = np.array(counted)
            max_query_len, ends, lengths = int(counts.max()), counts.cumsum(), starts + counts
            rows, firsts = np.repeat(rows, counts), ends - counts
            positions = np.arange(num_tokens) + np.repeat(lengths - ends, counts)
        query_starts = self._query_start_loc.view(num_seqs + 1)
        query_starts[0] = 0
        query_starts[1:] = ends
        self._seq_lens.view(num_seqs)[:] = lengths
        self._write_input_ids(step.chunks, sequences, first_positions, firsts, num_tokens)
        self._position_ids.view(num_tokens)[:] = positions
        is_plain = all(samples) and not (any(followers) or any(drafts))
        sampled = ends - 1 if is_plain else _sampled_rows(step.chunks, ends)
        self._logit_rows.view(len(sampled))[:] = sampled
        query_start_loc = self._query_start_loc.shaped(num_seqs + 1)
        max_seq_len = int(lengths.max())
        paged = []
        for group, tables in enumerate(self._tables):
            table = tables.update(sequences, lengths)
            slots = self._slot_mappings[group]
            block_size = sequences[0].tables[group].block_size
            slots.view(num_tokens)[:] = _slots(table, rows, positions, block_size)
            if not slots.view(num_tokens).min() >= block_size:  # the null block is nobody's
                _check_room(sequences, starts, lengths, group)
            chunk = self._chunks[group]
            if chunk is not None:
                mapping = slots.shaped(num_tokens)
                paged.append(chunked_batch(table, starts, lengths, mapping, chunk, block_size))
                continue
            worth = self._worth[group] if max_query_len == 1 else None
            paged.append(
                backends.PagedBatch(
                    query_start_loc=query_start_loc,
                    seq_lens=self._seq_lens.shaped(num_seqs),
                    block_table=tables.shaped(),
                    slot_mapping=slots.shaped(num_tokens),
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                    shared_prefix=None if worth is None else tables.shared_prefix(starts, worth),
                    kept={},
                )
            )
        self._expire_drafts(step.chunks if self._is_ahead or any(drafts) else ())
        return StepTensors(
            input_ids=self._input_ids.shaped(1, num_tokens),
            position_ids=self._position_ids.shaped(1, num_tokens),
            logit_rows=self._logit_rows.shaped(len(sampled)),
            paged=tuple(paged),
            sources=self._write_sources(requests, sequences, ends, num_tokens, rows_drawn or {}),
            is_long=_long_tokens(requests, rows),
        )

    def _expire_drafts(self, chunks: Sequence[Chunk]) -> None:
        for row, chunk in enumerate(chunks):
            for tables in self._tables if self._is_ahead or chunk.drafts else ():
                tables.expire(row, len(chunk.request.tokens))

    def _write_sources(
        self,
        requests: Sequence[Request],
        sequences: Sequence[kvcore.KVSequence],
        ends: NDArray[np.int64],
        num_tokens: int,
        rows_drawn: Mapping[int, int],
    ) -> Tensor | None:
        if not rows_drawn:
            return None
        sources = self._sources.view(num_tokens)
        if num_tokens > len(requests):
            sources[:] = -1
        sources[ends - 1] = [  # what is expected is the last of all, and of its chunk
            rows_drawn[request.request_id] if sequence.num_unknown_tokens else -1
            for request, sequence in zip(requests, sequences, strict=True)
        ]
        return self._sources.shaped(1, num_tokens)

    def _write_input_ids(
        self,
        chunks: Sequence[Chunk],
        sequences: Sequence[kvcore.KVSequence],
        starts: Sequence[int],
        firsts: NDArray[np.int64],
        num_tokens: int,
    ) -> None:
        input_ids = self._input_ids.view(num_tokens)
        # What is expected is not known here: the device has it.
        input_ids[firsts] = [
            packed[start] if start < len(packed := sequence.packed) else 0
            for sequence, start in zip(sequences, starts, strict=True)
        ]
        if num_tokens > len(chunks):
            for chunk, first in zip(chunks, firsts.tolist(), strict=True):
                if chunk.num_tokens > 1:
                    stop = chunk.start + chunk.num_tokens
                    tokens = chunk.request.tokens[chunk.start : stop]
                    input_ids[first : first + len(tokens)] = tokens
                    if chunk.drafts:
                        input_ids[first + chunk.num_known : first + chunk.num_tokens] = chunk.drafts


def _sampled_rows(chunks: Sequence[Chunk], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens whose logits are drawn from: the last known ones, then the drafts."""
    counts = np.array([len(chunk.drafts) for chunk in chunks])
    known = (ends - 1 - counts).repeat([len(chunk.sampling) for chunk in chunks])
    begins = np.repeat(ends - counts, counts)
    return np.append(
        known, begins + np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    )


def _long_tokens(requests: Sequence[Request], rows: NDArray[np.int64]) -> Tensor | None:
    """Which tokens are of long texts; their rows are those of their requests."""
    are_long = [request.is_long for request in requests]
    return torch.from_numpy(np.array(are_long)[rows])[None] if any(are_long) else None


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
