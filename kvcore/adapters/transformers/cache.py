"""A `Cache` of Transformers over kvcore's blocks, for plain `generate`.

Decides where the keys and values of every token of a batch lie, and what of a prompt is there
already. `PagedPool` has the memory and the manager, `PagedPool.open` gives a `PagedCache` for one
batch: its prompts are looked up then, what is cached is not computed again, and what it computes
can be hit by the next one. Rows that are reordered (beams) share all but their last block; a crop
(drafts, assisted decoding) gives blocks back.

A cache is told keys and values only, so the pool hooks itself in front of the model's `forward` to
hear their tokens. What a forward pass has written is committed when the next one begins, so that a
crop after it finds nothing published that it takes back.

Invariants: column `c` of the batch is token `c - padding` of its row; a row's blocks hold the KV
of all columns below the length; a slot that others can read is never written.

Does not know: attention, masks, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

import kvcore
from kvcore.adapters.transformers_versions import CACHE_ARGUMENT, EmptyLayer


class PagedPool:
    """The memory that the caches of one model share.

    Attributes:
        kv: the manager, for its numbers, its events and `reset`.
        block_size: tokens a block.
        windows: of each layer group, None where attention is full.
    """

    def __init__(self, model: Any, *, num_blocks: int, block_size: int = 16) -> None:  # noqa: ANN401  # a module without types
        """Look after `num_blocks` blocks of a model's keys and values, one of which stays empty.

        Raises:
            InvalidArgumentError: some layer keeps more than keys and values, or sizes are wrong.
        """
        stock = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        self.block_size = block_size
        self._groups: list[int | None] = []  # of each layer
        windows: list[int | None] = []
        for index, layer in enumerate(stock):
            if type(layer) is EmptyLayer:
                self._groups.append(None)
                continue
            if type(layer) not in {DynamicLayer, DynamicSlidingWindowLayer}:
                raise kvcore.InvalidArgumentError(
                    f"model: wanted layers with full or sliding-window attention, "
                    f"got {type(layer).__name__} at {index}"
                )
            window = getattr(layer, "sliding_window", None)
            if window not in windows:
                windows.append(window)
            self._groups.append(windows.index(window))
        self.windows = windows
        self.kv = kvcore.KVCacheManager(
            num_blocks,
            block_size,
            groups=[
                kvcore.FullAttention() if window is None else kvcore.SlidingWindow(window=window)
                for window in windows
            ],
        )
        self._num_slots = num_blocks * block_size
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._hook = model.register_forward_pre_hook(_hear_tokens, with_kwargs=True)

    def open(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        namespace: kvcore.Namespace | None = kvcore.DEFAULT_NAMESPACE,
    ) -> PagedCache:
        """Return a cache for a batch of prompts, padded on the left, that has what is cached.

        Args:
            input_ids: [rows, columns].
            attention_mask: 0 for padding, 1 for tokens; none says that there is no padding.
            namespace: the batch shares blocks within it; None: it shares none.

        Raises:
            InvalidArgumentError: shapes differ, or padding does not stand on the left.
        """
        padding = _padding(input_ids, attention_mask)
        rows: list[_Row] = []
        try:
            for ids, left in zip(input_ids.tolist(), padding, strict=True):
                rows.append(_Row(self.kv.open(ids[left:], namespace=namespace), left))
        except BaseException:
            for row in rows:
                self.kv.close(row.seq)
            raise
        return PagedCache(self, rows, input_ids.shape[1])

    def layers(self, cache: PagedCache, length: int) -> list[Any]:
        """Return the layers of a new cache that has `length` columns."""
        return [
            EmptyLayer() if group is None else PagedLayer(cache, index, self.windows[group], length)
            for index, group in enumerate(self._groups)
        ]

    def group_of(self, layer: int) -> int:
        """Return the layer group of a layer that has keys and values."""
        return self._groups[layer] or 0

    def memory_of(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, [slots, heads, head_dim], made when first written."""
        if layer not in self._memory:
            self._memory[layer] = (self._new(keys), self._new(values))
        return self._memory[layer]

    def _new(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, head_dim = states.shape
        return states.new_zeros((self._num_slots, heads, head_dim), requires_grad=False)

    def copy(self, sources: list[list[int]], targets: list[list[int]]) -> None:
        """Copy slots, given for each group, in all layers of that group; O(slots)."""
        for layer, tensors in self._memory.items():
            group = self.group_of(layer)
            if sources[group]:
                for tensor in tensors:
                    at = torch.tensor([sources[group], targets[group]], device=tensor.device)
                    tensor[at[1]] = tensor[at[0]]

    @property
    def num_bytes(self) -> int:
        """What the keys and values of all blocks take, of the layers that were written so far."""
        return sum(tensor.nbytes for pair in self._memory.values() for tensor in pair)

    def close(self) -> None:
        """Leave the model alone; its caches cannot be used any more."""
        self._hook.remove()


def _padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise kvcore.InvalidArgumentError(
            f"input_ids: wanted [rows, columns], got {tuple(input_ids.shape)}"
        )
    if attention_mask is None:
        return [0] * input_ids.shape[0]
    if attention_mask.shape != input_ids.shape:
        raise kvcore.InvalidArgumentError(
            f"attention_mask: wanted {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask.bool()
    if not bool((mask[:, 1:] | ~mask[:, :-1]).all() & mask[:, -1].all()):
        raise kvcore.InvalidArgumentError("attention_mask: wanted padding on the left alone")
    return [int(count) for count in (~mask).sum(1)]


@dataclass(slots=True)
class _Row:
    """One row of a batch: its sequence, and how many columns before it are padding."""

    seq: kvcore.KVSequence
    padding: int


@dataclass(slots=True)
class _Step:
    """Where one forward pass writes and reads; [rows, columns], by group.

    Attributes:
        start: the first column that it computes.
        num_columns: how many those are.
        skipped: what is padding or there already, and is not written.
    """

    start: int
    num_columns: int
    writes: list[torch.Tensor]
    reads: list[torch.Tensor]
    skipped: torch.Tensor | None
    placed: dict[tuple[int, torch.device], Any] = field(default_factory=dict)

    def places(
        self, group: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Slots to write, slots to read, which of the new columns are written (None: all)."""
        if (group, device) not in self.placed:
            kept = None if self.skipped is None else ~self.skipped
            writes = self.writes[group] if kept is None else self.writes[group][kept]
            self.placed[group, device] = (
                writes.reshape(-1).to(device),
                self.reads[group].to(device),
                None if kept is None else kept.to(device),
            )
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] = self.placed[group, device]
        return found


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # it registers layers
    """One layer's view of a `PagedCache`."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int, window: int | None, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._index = index
        self._window = window
        self.is_sliding = window is not None
        self.length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the memory, if no cache of the pool has."""
        self._cache.pool.memory_of(self._index, key_states, value_states)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401, ARG002  # as theirs
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new columns and return all that their queries may see.

        Raises:
            InvalidArgumentError: the pool has not heard the tokens of this forward pass.
        """
        step = self._cache.step
        length = self.length + key_states.shape[-2]
        if step is None or (step.start, step.start + step.num_columns) != (self.length, length):
            raise kvcore.InvalidArgumentError(
                f"{CACHE_ARGUMENT}: wanted the model that the pool was made for, and input_ids, "
                "so that the pool hears which tokens these are"
            )
        self.length = length
        pool = self._cache.pool
        group = pool.group_of(self._index)
        writes, reads, kept = step.places(group, key_states.device)
        outputs = []
        memory = pool.memory_of(self._index, key_states, value_states)
        for tensor, states in zip(memory, (key_states, value_states), strict=True):
            new = states.detach().transpose(1, 2)
            tensor.index_copy_(0, writes, new[kept] if kept is not None else new.flatten(0, 1))
            outputs.append(tensor[reads].transpose(1, 2))
        return outputs[0], outputs[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns `update` will return, and the first of them."""
        first = 0 if self._window is None else max(0, self.length - self._window + 1)
        return self.length - first + query_length, first

    def get_seq_length(self) -> int:
        """Return how many columns are there."""
        return self.length

    def get_max_length(self) -> int:
        """Return the window, or -1 where there is none."""
        return self._window or -1


class PagedCache(Cache):
    """The cache of one batch; close it, or use it as a context, when the batch is done.

    Attributes:
        pool: where its blocks are.
        step: the forward pass that is running.
    """

    def __init__(self, pool: PagedPool, rows: list[_Row], num_columns: int) -> None:
        self.pool = pool
        self.step: _Step | None = None
        self._rows = rows
        self._is_fresh = True  # no forward pass has begun
        self._repeats = 1  # how many rows of the batch each of ours stands for, until the next pass
        self._num_columns = num_columns  # of the prompts
        length = min(row.padding + row.seq.num_cached_tokens for row in rows)
        super().__init__(layers=pool.layers(self, length))

    @property
    def length(self) -> int:
        """How many columns all layers have, padding included; O(layers)."""
        return min([layer.length for layer in self.layers if isinstance(layer, PagedLayer)])

    # --- a forward pass ------------------------------------------------------------------------

    def begin(self, input_ids: torch.Tensor) -> None:
        """Hear the tokens of a forward pass, and make room for them; the pool's hook calls this.

        Raises:
            InvalidArgumentError: other tokens than the cache was opened for, or other rows.
            OutOfBlocksError: no room; nothing has changed.
        """
        count, columns = input_ids.shape
        self._settle()
        repeats = count // len(self._rows) if self._is_fresh else 1  # as generate does for beams
        if count != len(self._rows) * repeats:
            raise kvcore.InvalidArgumentError(
                f"input_ids: wanted {len(self._rows)} rows, got {count}"
            )
        start = self.length
        if self._is_fresh and columns > self._num_columns - start:
            start = 0  # assisted decoding sends the whole prompt, whatever is cached
        tokens = input_ids.tolist()
        self._compare(tokens, start, repeats)
        kv = self.pool.kv
        seqs = [row.seq for row in self._rows]
        ends = [max(0, start + columns - row.padding) for row in self._rows]
        kv.reserve_step(
            seqs,
            [max(0, e - seq.num_computed_tokens) for seq, e in zip(seqs, ends, strict=True)],
        )
        for row, ids in zip(self._rows, tokens[::repeats], strict=True):
            known = row.padding + row.seq.num_tokens - start
            if known < columns:
                kv.extend(row.seq, ids[max(0, known) :])
        self._set_length(start)  # layers that a failed forward pass has reached go back
        self._repeats = repeats
        self.step = self._places(start, columns)
        self._is_fresh = False

    def _compare(self, tokens: list[list[int]], start: int, repeats: int) -> None:
        """Refuse tokens that are not those that the cache was opened for."""
        for number, ids in enumerate(tokens):
            row = self._rows[number // repeats]
            first = max(row.padding, start)
            last = max(first, start + len(ids))
            known = list(row.seq.packed[first - row.padding : last - row.padding])
            given = ids[first - start : first - start + len(known)]
            if given != known:
                raise kvcore.InvalidArgumentError(
                    f"input_ids: row {number} has other tokens than the cache was opened for"
                )

    def _settle(self) -> None:
        """Commit the written KV: from now on a crop copies; O(blocks filled).

        Raises:
            OutOfBlocksError: no room for rows to become several; nothing has changed.
        """
        length = self.length
        for row in self._rows:
            written = length - row.padding
            if written > row.seq.num_computed_tokens:
                self.pool.kv.commit(row.seq, written - row.seq.num_computed_tokens)
        if self._repeats > 1:
            self._choose([row for row in range(len(self._rows)) for _ in range(self._repeats)])
            self._repeats = 1

    def _places(self, start: int, columns: int) -> _Step:
        size = self.pool.block_size
        rows = [row for row in self._rows for _ in range(self._repeats)]
        padding = torch.tensor([row.padding for row in rows])[:, None]
        computed = torch.tensor([row.seq.num_computed_tokens for row in rows])[:, None]
        new = torch.arange(start, start + columns)[None] - padding
        skipped = (new < 0) | (new < computed)
        skipped |= (torch.arange(len(rows)) % self._repeats != 0)[:, None]  # the first one writes
        writes, reads = [], []
        for group in range(len(self.pool.windows)):
            ids = [torch.tensor(row.seq.tables[group].block_ids.tolist()) for row in rows]
            table = torch.nn.utils.rnn.pad_sequence([*ids, torch.zeros(1)], batch_first=True)
            window = self.pool.windows[group]
            first = 0 if window is None else max(0, start - window + 1)
            seen = torch.arange(first, start + columns)[None] - padding
            slots = torch.where(
                seen < 0, 0, table.long().gather(1, seen.clamp(min=0) // size) * size + seen % size
            )
            reads.append(slots)
            writes.append(slots[:, start - first :])
        return _Step(start, columns, writes, reads, skipped if bool(skipped.any()) else None)

    # --- changes -------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last columns, given as a negative number; O(blocks given back).

        A cut through a block that others can hit copies what is kept of it.

        Raises:
            InvalidArgumentError: more than there are, or what a window has left behind.
            OutOfBlocksError: no room for such a copy; nothing has changed.
        """
        if not -self.length <= tokens_to_remove <= 0:
            raise kvcore.InvalidArgumentError(
                f"tokens_to_remove: wanted -{self.length} to 0, got {tokens_to_remove}"
            )
        if tokens_to_remove == 0:
            return
        length = self.length + tokens_to_remove
        if self._repeats > 1:
            self._settle()
        keeps = [max(0, length - row.padding) for row in self._rows]
        self._check_cut(keeps)
        for row, keep in zip(self._rows, keeps, strict=True):
            self._cut(row.seq, keep)
            row.padding = min(row.padding, length)
        self._set_length(length)

    def _check_cut(self, keeps: list[int]) -> None:
        size, free = self.pool.block_size, self.pool.kv.num_free_blocks
        copies = 0
        for row, keep in zip(self._rows, keeps, strict=True):
            full = row.seq.num_computed_tokens // size
            is_inside = keep // size < full and keep % size > 0  # a block that others may read
            copies += len(self.pool.windows) if is_inside else 0
            stays = keep - keep % size if is_inside else keep
            for window, table in zip(self.pool.windows, row.seq.tables, strict=True):
                if window and keep and max(0, stays - window + 1) // size < table.num_null:
                    raise kvcore.InvalidArgumentError(
                        f"tokens_to_remove: the window has left what is before {keep}"
                    )
        if copies > free:
            raise kvcore.OutOfBlocksError(copies, free)

    def _cut(self, seq: kvcore.KVSequence, keep: int) -> None:
        kv, size = self.pool.kv, self.pool.block_size
        tables = [list(table.block_ids) for table in seq.tables]
        kv.truncate(seq, keep)
        first = seq.num_computed_tokens
        if any(len(table.block_ids) * size < keep for table in seq.tables):
            kv.reserve_to(seq, keep)
            sources, targets = (
                [[ids[at // size] * size + at % size for at in range(first, keep)] for ids in given]
                for given in (tables, [list(table.block_ids) for table in seq.tables])
            )
            self.pool.copy(sources, targets)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put the rows in another order, some more than once; O(blocks), copies half-full ones."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows alone, in this order."""
        kept = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(kept.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._settle()
        self._choose([row for row in range(len(self._rows)) for _ in range(repeats)])

    def _select(self, chosen: Sequence[int]) -> None:
        self._settle()
        self._choose(chosen)

    def _choose(self, chosen: Sequence[int]) -> None:
        kv, size = self.pool.kv, self.pool.block_size
        used = set(chosen)
        dropped = [row for index, row in enumerate(self._rows) if index not in used]
        needed = len(self.pool.windows) * (len(chosen) - len(used))
        free = kv.num_free_blocks + sum(kv.num_exclusive_blocks(row.seq) for row in dropped)
        if needed > free:
            raise kvcore.OutOfBlocksError(needed, free)
        for row in dropped:
            kv.close(row.seq)
        rows: list[_Row] = []
        taken: set[int] = set()
        sources: list[list[int]] = [[] for _ in self.pool.windows]
        targets: list[list[int]] = [[] for _ in self.pool.windows]
        for index in chosen:
            row = self._rows[index]
            if index in taken:
                child, orders = kv.fork(row.seq)
                row = _Row(child, row.padding)
                for order in orders:
                    for at, slots in ((order.src, sources), (order.dst, targets)):
                        slots[order.group].extend(range(at * size, at * size + order.num_tokens))
            taken.add(index)
            rows.append(row)
        self.pool.copy(sources, targets)
        self._rows = rows

    def reset(self) -> None:
        """Forget all columns, as stock caches do; what others can hit stays."""
        self._settle()
        for row in self._rows:
            self.pool.kv.truncate(row.seq, 0)
            row.padding = 0
        self._set_length(0)

    def _set_length(self, length: int) -> None:
        self.step = None
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.length = length

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all blocks back; what was computed can be hit until its blocks are reused."""
        self._repeats = 1
        self._settle()
        for row in self._rows:
            self.pool.kv.close(row.seq)
        self._rows = []
        self.step = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _hear_tokens(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ANN401, ARG001  # a hook's
    cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, PagedCache)), None)
    if cache is not None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            raise kvcore.InvalidArgumentError("input_ids: wanted token ids, got none")
        cache.begin(ids)
