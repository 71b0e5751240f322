"""The bridge from the block tables of the control plane to the tensors of a step.

Decides: the order of a step's tokens (chunk after chunk), and where each tensor is allocated. Only
this file sees both block tables and tensors.

Invariants: the tensors of a step do not depend on earlier steps, except for block table entries
that no kernel reads; rows are padded with the null block, which is never written. Buffers are
rewritten in every step: copies from them must be done by then.

Does not know: how requests are scheduled, what the network does with the tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import backends
import kvcore
from kvcore.adapters.recurrent import Run, StateRows, StateStep
from model.attention.ahead import Ahead
from model.attention.chunks import chunked_batch
from model.attention.shared_prefix import Shared, Worth, shared_run
from model.control.request import Request
from model.control.step import Chunk, Step


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step, ready for the network once it is on its device.

    Attributes:
        input_ids: int64 [1, num_tokens], all chunks one after another.
        position_ids: int64 [1, num_tokens], each token's position in its sequence; for some images
            [num_axes, 1, num_tokens].
        logit_rows: int64 [num_sampled], the last known token of each chunk that samples, once per
            request that samples from it; then each draft token, chunk by chunk.
        paged: for each KV cache group where keys and values of the tokens are; all groups share the
            tensors that do not depend on the group. In a group with chunked attention each piece is
            a sequence (`chunks.py`). A backend keeps in it what serves all layers of a step.
        sources: int64 [1, num_tokens]; where not negative, the token is that entry of the tokens
            drawn by the previous step, not the one in `input_ids`; None: negative everywhere.
        is_long: bool [1, num_tokens], whether the token's request is long; None: no request is.
        states: which states of recurrent layers are read and written; rows if the host does not
            know the lengths; None: none is.
        images: makes the further arguments of a pass with images from its input_ids; None: it has
            none.
        ahead: the tokens that see some behind them, on the network's device; None: there are none.
        adapter_slots: int64 [num_tokens], the slot of each token's LoRA adapter, -1: it has none;
            None: no token has one.
    """

    input_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    paged: tuple[backends.PagedBatch, ...]
    sources: Tensor | None = None
    is_long: Tensor | None = None
    states: StateStep | StateRows | None = None
    images: Callable[[Tensor], Mapping[str, object]] | None = None
    ahead: Ahead | None = None
    adapter_slots: Tensor | None = None

    def to(self, device: torch.device) -> "StepTensors":
        """Return the same on a device; the copies may still run on return. O(its bytes)."""
        if device.type == "cpu":
            return self
        sent: dict[int, Tensor] = {}  # tensors that groups share are sent once

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
            states=self.states.to(device) if isinstance(self.states, StateStep) else self.states,
            images=self.images,
            ahead=self.ahead,
            adapter_slots=None if self.adapter_slots is None else send(self.adapter_slots),
        )

    def adapted(self) -> "StepTensors":
        """Return the same with the adapter of the first slot for all tokens. O(num_tokens)."""
        return replace(self, adapter_slots=torch.zeros_like(self.input_ids[0]))


def prompt_step(
    num_tokens: int, num_rows: int, block_size: int, num_groups: int, device: torch.device
) -> StepTensors:
    """Return a step of one prompt that stores nothing and reads only the null block. O(num_tokens).

    Args:
        num_tokens: of the prompt.
        num_rows: the number of logits, of its first tokens.
        block_size: tokens per block.
        num_groups: KV cache groups.
        device: of the tensors.
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
        position_ids=torch.zeros_like(tokens),  # one tensor twice would be compiled as such
        logit_rows=torch.arange(num_rows, device=device),
        paged=(batch,) * num_groups,
    )


def chosen_ids(input_ids: Tensor, sources: Tensor, drawn: Tensor) -> Tensor:
    """Return the tokens of a step, with those that the previous step has drawn. O(num_tokens).

    Args:
        input_ids: int64 [1, num_tokens].
        sources: int64 [1, num_tokens]: entries of `drawn`, or negative.
        drawn: int64, at least one entry per drawn token.
    """
    return torch.where(sources < 0, input_ids, drawn[sources.clamp(min=0)])


class _Buffer:
    """A flat host buffer that grows by doubling; page-locked if a GPU copies from it.

    The view and the tensor stay while the shape stays the same, as it does from decode to decode.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._memory = self._tensor = self._allocate(256)
        self._view: NDArray[Any] = self._memory.numpy()

    def of(self, *shape: int) -> tuple[NDArray[Any], Tensor]:
        """Return the first entries, flat to be written, and as a tensor of this shape. O(1).

        O(entries) when the buffer grows.
        """
        if self._tensor.shape != shape:
            size = math.prod(shape)
            if size > self._memory.numel():
                self._memory = self._allocate(max(size, 2 * self._memory.numel()))
            self._view = self._memory[:size].numpy()
            self._tensor = self._memory[:size].view(shape)
        return self._view, self._tensor

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, pin_memory=self._device.type == "cuda")


class _Tables:
    """The block tables of one KV cache group, kept from step to step: one row per sequence."""

    def __init__(self, group: int, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sequences: Sequence[kvcore.KVSequence] = ()  # of each row
        self._run: Shared | None = None  # of these sequences; None: not computed
        self._rows = kvcore.StepTables(self._allocate, group)
        self._shaped = self._tensor  # the rows as last sent

    def update(self, sequences: list[kvcore.KVSequence]) -> NDArray[np.int32]:
        """Write the rows that changed since the last step. O(rows + changes).

        Args:
            sequences: each once.

        Returns:
            The tables, [num_seqs, at least the blocks of any sequence].
        """
        if self._rows.update(sequences):
            self._run = None
        self._sequences = sequences
        return self._table[: len(sequences)]

    def shared_prefix(
        self, starts: NDArray[np.int64], worth: Worth
    ) -> backends.SharedPrefix | None:
        """Return the prefix that neighbours share before this step's tokens, if that pays.

        O(rows), and O(shared entries) when the sequences of the batch have changed.

        Args:
            starts: [num_seqs], the tokens of each before this step.
            worth: the least saving that pays.
        """
        if self._run is None:
            rows = len(self._sequences)
            self._run = shared_run(self._table[:rows], np.array(self._rows.lengths))
        first, count, blocks = self._run
        if not count:
            return None
        block_size = self._sequences[first].tables[self._group].block_size
        tokens = min(blocks * block_size, int(starts[first : first + count].min()))
        if not worth.is_reached(count, tokens):
            return None
        return backends.SharedPrefix(first, count, tokens)

    def shaped(self) -> Tensor:
        """Return rows of the widest one's width; for a GPU wider, to be contiguous. O(rows)."""
        is_read_here = self._device.type == "cpu"
        width = max(self._rows.lengths) if is_read_here else self._tensor.shape[1]
        if self._shaped.shape != (len(self._sequences), width):
            self._shaped = self._tensor[: len(self._sequences), :width]
        return self._shaped

    def _allocate(self, num_rows: int, width: int) -> NDArray[np.int32]:
        is_pinned = self._device.type == "cuda"
        self._tensor = torch.zeros((num_rows, width), dtype=torch.int32, pin_memory=is_pinned)
        self._table: NDArray[np.int32] = self._tensor.numpy()
        self._shaped = self._tensor
        return self._table


class BatchBuilder:
    """Turns a step into tensors on the host, in buffers that it reuses.

    Args:
        device: the target of the tensors; for a GPU the buffers are page-locked.
        num_groups: KV cache groups.
        chunks: for each group the chunk of its layers; None: no chunks.
        worth: for each group the least saving for a shared prefix; None: never.
        has_states: True if sequences have states of recurrent layers.
    """

    def __init__(
        self,
        device: torch.device,
        num_groups: int = 1,
        chunks: Sequence[int | None] | None = None,
        worth: Sequence[Worth | None] | None = None,
        *,
        has_states: bool = False,
    ) -> None:
        self._chunks = chunks or [None] * num_groups
        self._worth = worth or [None] * num_groups
        self._input_ids = _Buffer(torch.int64, device)
        self._sources = _Buffer(torch.int64, device)
        self._position_ids = _Buffer(torch.int64, device)
        self._logit_rows = _Buffer(torch.int64, device)
        self._query_start_loc = _Buffer(torch.int32, device)
        self._seq_lens = _Buffer(torch.int32, device)
        self._tables = [_Tables(group, device) for group in range(num_groups)]
        self._states = [_Buffer(torch.int64, device) for _ in range(2 * has_states)]
        self._slot_mappings = [_Buffer(torch.int64, device) for _ in range(num_groups)]
        self._rows = np.arange(0)

    def build(self, step: Step, rows_drawn: Mapping[int, int] | None = None) -> StepTensors:
        """Write the step's tokens, positions, tables and slots.

        The tensors are valid until the next call. O(num_tokens + num_seqs + new blocks); tables and
        slots once per group.

        Args:
            step: to be computed.
            rows_drawn: request_id -> the row of its token among those that the previous step has
                drawn, for requests that expect one.

        Raises:
            NotReservedError: a sequence has not reserved blocks for its tokens.
        """
        columns = zip(*step.chunks, strict=True)  # in one pass over the step
        requests, first_positions, counted, samples, followers, drafts, scored = columns
        sequences = [request.running_sequence for request in requests]
        num_seqs, num_tokens = len(requests), sum(counted)
        if len(self._rows) != num_seqs:
            self._rows = np.arange(num_seqs)
        rows = firsts = self._rows
        starts = positions = np.array(first_positions)
        max_query_len, ends, lengths = 1, rows + 1, starts + 1
        if num_tokens > num_seqs:
            counts = np.array(counted)
            max_query_len, ends, lengths = int(counts.max()), counts.cumsum(), starts + counts
            rows, firsts = np.repeat(rows, counts), ends - counts
            positions = np.arange(num_tokens) + np.repeat(lengths - ends, counts)
        query_starts, query_start_loc = self._query_start_loc.of(num_seqs + 1)
        query_starts[0], query_starts[1:] = 0, ends
        written, seq_lens = self._seq_lens.of(num_seqs)
        written[:] = lengths
        input_ids = self._input_ids_of(step.chunks, sequences, first_positions, firsts, num_tokens)
        written, position_ids = self._position_ids.of(1, num_tokens)
        written[:] = positions
        is_plain = all(samples) and not (any(followers) or any(drafts) or any(scored))
        sampled = ends - 1 if is_plain else _sampled_rows(step.chunks, ends)
        written, logit_rows = self._logit_rows.of(len(sampled))
        written[:] = sampled
        paged = []
        for group, tables in enumerate(self._tables):
            table = tables.update(sequences)
            block_size = sequences[0].tables[group].block_size
            slots = _slots(table, rows, positions, block_size)
            if not slots.min() >= block_size:  # slots of the null block
                _check_room(sequences, starts, lengths, group)
            written, slot_mapping = self._slot_mappings[group].of(num_tokens)
            written[:] = slots
            chunk = self._chunks[group]
            if chunk is not None:
                paged.append(chunked_batch(table, starts, lengths, slot_mapping, chunk, block_size))
                continue
            worth = self._worth[group] if max_query_len == 1 else None
            paged.append(
                backends.PagedBatch(
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens,
                    block_table=tables.shaped(),
                    slot_mapping=slot_mapping,
                    max_query_len=max_query_len,
                    max_seq_len=int(lengths.max()),
                    shared_prefix=None if worth is None else tables.shared_prefix(starts, worth),
                    kept={},
                )
            )
        return StepTensors(
            input_ids=input_ids,
            position_ids=position_ids,
            logit_rows=logit_rows,
            paged=tuple(paged),
            sources=self._write_sources(requests, sequences, ends, num_tokens, rows_drawn or {}),
            is_long=_long_tokens(requests, rows),
            states=self._write_states(step.chunks, sequences) if self._states else None,
        )

    def _write_states(
        self, chunks: Sequence[Chunk], sequences: Sequence[kvcore.KVSequence]
    ) -> StateStep:
        """Write the blocks of the states that chunks read, and of those after known tokens."""
        shape = (len(sequences), len(sequences[0].state_blocks[1]))
        (reads, before), (writes, after) = [buffer.of(*shape) for buffer in self._states]
        kvcore.write_states(sequences, reads, writes)
        has_state = reads[:: shape[1]] >= 0
        runs, start = [], 0
        for chunk, known in zip(chunks, has_state.tolist(), strict=True):
            runs.append(Run(start, chunk.num_known, len(chunk.drafts), known))
            start += chunk.num_tokens
        return StateStep(tuple(runs), before, after)

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
        sources, tensor = self._sources.of(1, num_tokens)
        if num_tokens > len(requests):
            sources[:] = -1
        sources[ends - 1] = [  # an expected token is the last one of its chunk
            rows_drawn[request.request_id] if sequence.num_unknown_tokens else -1
            for request, sequence in zip(requests, sequences, strict=True)
        ]
        return tensor

    def _input_ids_of(
        self,
        chunks: Sequence[Chunk],
        sequences: Sequence[kvcore.KVSequence],
        starts: Sequence[int],
        firsts: NDArray[np.int64],
        num_tokens: int,
    ) -> Tensor:
        input_ids, tensor = self._input_ids.of(1, num_tokens)
        # Expected tokens are not known here: the device has them.
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
        return tensor


def _sampled_rows(chunks: Sequence[Chunk], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens whose logits are used: the last known, the draft and the scored ones."""
    counts = np.array([len(chunk.drafts) for chunk in chunks])
    known = (ends - 1 - counts).repeat([len(chunk.sampling) for chunk in chunks])
    begins = ends - np.array([chunk.num_tokens for chunk in chunks])
    scored = np.array([chunk.num_scored for chunk in chunks])
    return np.concatenate([known, _runs(ends - counts, counts), _runs(begins, scored)])


def _runs(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return runs of `counts` numbers from each of `begins` on, one after the other."""
    return np.repeat(begins - counts.cumsum() + counts, counts) + np.arange(counts.sum())


def _long_tokens(requests: Sequence[Request], rows: NDArray[np.int64]) -> Tensor | None:
    """Return True for each token that belongs to a long text; None: there is none."""
    are_long = [request.is_long for request in requests]
    return torch.from_numpy(np.array(are_long)[rows])[None] if any(are_long) else None


def _slots(
    table: NDArray[np.int32], rows: NDArray[np.int64], positions: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Return the slot of each position in the sequence of its row. O(positions)."""
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
    """Let kvcore raise for the sequence without slots for its tokens. O(num_tokens)."""
    for sequence, start, stop in zip(sequences, starts.tolist(), lengths.tolist(), strict=True):
        out = np.empty(stop - start, dtype=np.int64)
        sequence.write_slot_mapping(start, stop, out, group)
