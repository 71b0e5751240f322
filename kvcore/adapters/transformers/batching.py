"""Transformers' continuous batching with kvcore in the place of its ledger of blocks.

Decides which blocks of the cache that Transformers has made hold which tokens of which request, or
its recurrent state; the tensor, the scheduler and, unless a backend is named, the indices and the
attention stay theirs.
`install` gives a model this cache; `generate_batch`, `init_continuous_batching` and the context
manager are called as ever.

What is different from the stock cache:

- a block that holds content is given up when its room is needed, least recently used first; the
  stock one drops all content at once when fewer blocks are free than the safety margin wants;
- a hit is found by comparing tokens, where the stock one trusts a digest of 8 bytes;
- layers with a sliding window keep their content in blocks too, not in a ring, so that prefixes
  are shared where the stock cache shares nothing;
- layers that keep a recurrent state are served, which the stock cache refuses (`states.py`).

Invariants: a request's sequence is open while its cache is wanted; what is committed was computed
by a batch that has been read back, or is about to be, in the order of the stream that runs all.

Does not know: weights, sampling, threads (the loop that Transformers starts is the only caller).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from math import ceil, gcd
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as stock
from transformers.generation.continuous_batching import continuous_api, initialization
from transformers.generation.continuous_batching.cache import (
    PagedAttentionCache,
    group_layers_by_attn_type,
)
from transformers.generation.continuous_batching.cache_allocators import (
    CacheAllocator,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

import kvcore
from kvcore.adapters.transformers.states import RecurrentModel, States, is_recurrent

if TYPE_CHECKING:
    from kvcore.adapters.transformers.attention import Attention, Installed

# The model whose cache, kvcore's, is being made.
_SERVED: ContextVar[Any] = ContextVar("kvcore_served_model", default=None)

# What a generation config may have of continuous batching.
_CONFIG = "continuous_batching_config"

# Where `FutureRequestState.complete_blocks` says how many tokens are computed after its batch.
_COMPUTED = "computed tokens"


def install(
    model: Any,  # noqa: ANN401  # a mixin without types
    *,
    namespace: kvcore.Namespace | None = kvcore.DEFAULT_NAMESPACE,
    backend: str | None = None,
) -> None:
    """Let kvcore look after the cache of this model's continuous batching, from now on.

    Args:
        model: a model of Transformers.
        namespace: its prompts share blocks within it; None: they share none, not even with each
            other.
        backend: whose attention runs over the blocks: "numba" on a CPU, "triton" on a GPU, "auto",
            or one that is registered; None: the model's own attention.

    Raises:
        InvalidArgumentError: the model has no continuous batching, its layers cannot be served, or
            a backend is named and the package `backends` is not here.
        BackendError: of `backends`: it knows no such backend, or that one cannot run here.
    """
    if not hasattr(type(model), "init_continuous_batching"):
        name = type(model).__name__
        raise kvcore.InvalidArgumentError(f"model: wanted one that can generate, got {name}")
    installed = None if backend is None else _attending(model, backend)
    uninstall(model)
    model.destroy_cached_continuous_batching_manager()
    operations = None if installed is None else installed.operations
    recurrent = RecurrentModel(model, operations) if is_recurrent(model) else None
    vars(continuous_api)["PagedAttentionCache"] = _new_cache  # the name that managers make it by
    for module in (stock, initialization):
        vars(module)["group_layers_by_attn_type"] = _group_layers
    model._kvcore_namespace = namespace  # noqa: SLF001  # ours, on their object
    model._kvcore_recurrent = recurrent  # noqa: SLF001  # likewise
    model._kvcore_attention = installed  # noqa: SLF001  # likewise
    model.init_continuous_batching = MethodType(_init_continuous_batching, model)


def uninstall(model: Any) -> None:  # noqa: ANN401  # a mixin without types
    """Give the model its stock cache, and its attention, back."""
    if "init_continuous_batching" in vars(model):
        model.destroy_cached_continuous_batching_manager()
        if model._kvcore_attention is not None:  # noqa: SLF001
            model._kvcore_attention.leave()  # noqa: SLF001
        if model._kvcore_recurrent is not None:  # noqa: SLF001
            model._kvcore_recurrent.leave()  # noqa: SLF001
        del model.init_continuous_batching
        del model._kvcore_namespace, model._kvcore_attention, model._kvcore_recurrent  # noqa: SLF001


def _attending(model: Any, backend: str) -> Installed:  # noqa: ANN401
    try:
        attention = import_module("kvcore.adapters.transformers.attention")
    except ModuleNotFoundError as error:
        if error.name != "backends":
            raise
        raise kvcore.InvalidArgumentError(
            f"backend: wanted None where the package `backends` is not installed (a checkout has "
            f"it: pip install -e '.[cpu]'), got {backend!r}"
        ) from None
    installed: Installed = attention.Installed(model, backend)
    return installed


@contextmanager
def _serving(model: Any) -> Iterator[None]:  # noqa: ANN401
    token = _SERVED.set(model)
    try:
        yield
    finally:
        _SERVED.reset(token)


def _new_cache(*args: Any, **kwargs: Any) -> PagedAttentionCache:  # noqa: ANN401
    model = _SERVED.get()
    if model is None:
        return PagedAttentionCache(*args, **kwargs)
    return KVCoreCache(*args, recurrent=model._kvcore_recurrent, **kwargs)  # noqa: SLF001


def _group_layers(config: Any) -> dict[str, list[int]]:  # noqa: ANN401
    """Which layers have a cache of keys and values, by type."""
    model = _SERVED.get()
    recurrent = None if model is None else model._kvcore_recurrent  # noqa: SLF001
    return group_layers_by_attn_type(config) if recurrent is None else recurrent.groups


def _init_continuous_batching(
    model: Any,  # noqa: ANN401
    generation_config: Any = None,  # noqa: ANN401
    continuous_batching_config: Any = None,  # noqa: ANN401
    workload_hints: Any = None,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    attention, recurrent = model._kvcore_attention, model._kvcore_recurrent  # noqa: SLF001
    before = model.config._attn_implementation  # noqa: SLF001  # ours, if a manager never stopped
    own = getattr(generation_config or model.generation_config, _CONFIG, None)
    config = continuous_batching_config or own
    if recurrent is not None:
        config = recurrent.asked(config or ContinuousBatchingConfig())
    if attention is not None:
        config = attention.asked(config or ContinuousBatchingConfig())
        attention.leave()  # Transformers knows the stock ones alone
    with _serving(model):
        manager = type(model).init_continuous_batching(
            model, generation_config, config, workload_hints
        )
    if recurrent is not None:
        recurrent.check(manager.continuous_batching_config)
    manager._create_batch_processor = MethodType(_create_batch_processor, manager)  # noqa: SLF001
    if attention is not None:
        try:
            attention.enter(manager)
        except kvcore.InvalidArgumentError:
            model.set_attn_implementation(before)
            raise
    return manager


def _create_batch_processor(manager: Any) -> Any:  # noqa: ANN401
    with _serving(manager.model):
        processor = type(manager)._create_batch_processor(manager)  # noqa: SLF001
    cache, batches = processor.cache, processor.inputs_and_outputs
    cache.namespace = manager.model._kvcore_namespace  # noqa: SLF001
    if processor is not manager.batch_processor:  # else it was kept from an earlier call
        batches.prepare_batch_tensors = partial(cache.prepare, batches.prepare_batch_tensors)
        if cache.states is not None:
            cache.states.join(processor)
    if manager.model._kvcore_attention is not None:  # noqa: SLF001
        manager.model._kvcore_attention.tell(processor)  # noqa: SLF001
    return processor


class _WindowAllocator(SlidingAttentionCacheAllocator):
    """Layers with a sliding window, in blocks that are written once: no ring."""

    supports_block_sharing = True

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Where the tokens lie that the new ones see, and the new ones."""
        first = past_length - min(past_length, self.sliding_window - 1)
        return self._places(request_id, first, past_length + query_length)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Where the new tokens are written."""
        return self._places(request_id, past_length, past_length + query_length)

    def _places(self, request_id: str, first: int, last: int) -> list[int]:
        blocks = self.block_table[request_id]
        size, stride = self.tokens_per_page, self.block_physical_stride
        return [blocks[at // size] * stride + at % size for at in range(first, last)]

    update = FullAttentionCacheAllocator.update  # writes first, then reads
    get_cache_for_block_table = FullAttentionCacheAllocator.get_cache_for_block_table
    _compute_blocks_needed = FullAttentionCacheAllocator._compute_blocks_needed  # noqa: SLF001


class _Tables(Mapping[str, list[int]]):
    """A group's block tables, read from the sequences: what the allocator looks up."""

    def __init__(self, cache: KVCoreCache, group: int, pages: int, first: int) -> None:
        self._cache = cache
        self._group = group
        self.pages = pages
        self.first = first

    def __getitem__(self, request_id: str) -> list[int]:
        """The request's blocks; O(blocks)."""
        seq = self._cache.sequences[request_id]
        ids = seq.tables[self._group].block_ids
        if self.pages == 1:
            return [self.first_of(block_id) for block_id in ids]
        return [page for block_id in ids for page in self.pages_of(block_id)]

    def pages_of(self, block_id: int) -> range:
        """Transformers' blocks that make up one of kvcore's."""
        first = self.first_of(block_id)
        return range(first, first + self.pages)

    def first_of(self, block_id: int) -> int:
        """The first of them; the null block is their trash, which is never written."""
        return self.first + block_id * self.pages if block_id else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._cache.sequences)

    def __len__(self) -> int:
        return len(self._cache.sequences)


class KVCoreCache(PagedAttentionCache):
    """Transformers' paged cache, its blocks looked after by a `kvcore.KVCacheManager`.

    Where all layers attend alike, a block of kvcore is a block of theirs; else it is a sector,
    which all kinds of layers divide evenly.

    Attributes:
        kv: the manager, for its numbers and events.
        sequences: what is open, by the id of the request.
        states: those of recurrent layers, or None: there are none.
        rows: of the batch that is being prepared or runs: each request's sequence, how many tokens
            it has computed before and how many it computes.
        left: the blocks of the states of requests that have left for the host, or begin anew.
        namespace: with whom what is opened from now on shares.
        attention: the backend that attends, or None: Transformers does.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401  # as theirs
        recurrent: RecurrentModel | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*args, **kwargs)
        self.states: States | None = None
        self.rows: list[tuple[kvcore.KVSequence, int, int]] = []
        self.left: dict[str, list[int]] = {}
        self._is_recurrent = recurrent is not None
        self.namespace: kvcore.Namespace | None = kvcore.DEFAULT_NAMESPACE
        self.attention: Attention | None = None
        self.sequences: dict[str, kvcore.KVSequence] = {}
        for name, allocator in self.cache_allocators.items():
            if type(allocator) is SlidingAttentionCacheAllocator:
                self._take_window(name, allocator)
        self._tables: list[_Tables] = []
        groups: list[kvcore.LayerGroup] = []
        usable = 0
        for group, allocator in enumerate(self.cache_allocators.values()):
            pages = self._num_pages(allocator)
            # Two sectors are trash, and kvcore counts from one.
            table = _Tables(self, group, pages, first=2 * allocator.blocks_per_sector - pages)
            allocator.block_table = table  # type: ignore[assignment]
            allocator.needs_new_blocks = partial(self._needs, group)  # type: ignore[method-assign]
            self._tables.append(table)
            usable = self.num_sectors * allocator.blocks_per_sector // pages  # the same for all
            size = pages * allocator.tokens_per_page
            groups.append(
                kvcore.SlidingWindow(window=allocator.sliding_window, block_size=size)
                if isinstance(allocator, _WindowAllocator)
                else kvcore.FullAttention(block_size=size)
            )
        self._sizes = [group.block_size for group in groups]
        if recurrent is not None:
            # kvcore's block 0 is their second sector of trash.
            blocks = self.cache_tensor.view(-1, self.bytes_per_sector)[1:]
            self.states = States(self, recurrent.recurrence, blocks)
            groups.append(kvcore.RecurrentState(self.states.num_blocks))
        self.kv = kvcore.KVCacheManager(usable + 1, gcd(*self._sizes), groups=groups)
        self.use_prefix_sharing = self.allow_block_sharing

    def _num_pages(self, allocator: CacheAllocator) -> int:
        """How many of an allocator's blocks are one of kvcore's."""
        is_divided = len(self.cache_allocators) > 1 or self._is_recurrent
        return allocator.blocks_per_sector if is_divided else 1

    def _take_window(self, name: str, allocator: SlidingAttentionCacheAllocator) -> None:
        taken = _WindowAllocator(
            index=allocator.index,
            config=self.config,
            num_key_value_heads=allocator.num_key_value_heads,
            cache_dtype=self.dtype,
            page_size=allocator.tokens_per_page,
            layer_indices=allocator.layer_indices,
            allow_block_sharing=self.allow_block_sharing,
        )
        trash_bytes = 2 * self.bytes_per_sector
        taken.register_cache_tensor(
            self.bytes_per_sector,
            self.cache_tensor.numel() - trash_bytes,
            self.cache_tensor,
            self.pool,
        )
        self.cache_allocators[name] = taken
        self.layer_to_allocator |= dict.fromkeys(allocator.layer_indices, taken)

    # --- what a batch is told ------------------------------------------------------------------

    def prepare(
        self,
        theirs: Callable[..., None],
        *batch: Any,  # noqa: ANN401  # as theirs
        **named: Any,  # noqa: ANN401
    ) -> None:
        """Let Transformers prepare a batch, and note its rows."""
        self.rows.clear()
        theirs(*batch, **named)

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """Say where a request's tokens are read and written, unless a backend attends."""
        self.rows.append((self.sequences[request_id], past_length, query_length))
        if self.attention is None:
            super().extend_read_and_write_indices(
                request_id, past_length, query_length, read_index, write_index
            )

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys and values, unless a backend attends: its attention stores them.

        Args:
            key_states: [1, num_kv_heads, num_tokens, head_dim].
            value_states: like `key_states`.
            layer_idx: index of the layer.
            kwargs: the arguments of the layer's attention, where the backend finds this cache.
        """
        if self.attention is None:
            key_states, value_states = super().update(key_states, value_states, layer_idx, kwargs)
        else:
            kwargs["cache"] = self
        return key_states, value_states

    def layer_memory(self, layer: int) -> tuple[int, int, torch.Tensor, torch.Tensor]:
        """Where a layer's keys and values lie, both [pages, page_size, num_kv_heads, head_dim].

        Returns:
            The layer's group; how many pages make up a block of kvcore: the block `b` is the pages
            from `b` times as many on, and block 0 their trash; keys; values.
        """
        group = self.layer_to_allocator[layer].index
        allocator = list(self.cache_allocators.values())[group]
        table = self._tables[group]
        stride = allocator.block_physical_stride // allocator.tokens_per_page
        keys, values = allocator.get_cache_for_block_table(layer)
        first = table.first * stride
        return group, table.pages, keys[first::stride], values[first::stride]

    # --- what the scheduler asks ---------------------------------------------------------------

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Open the request with the longest prefix that is cached, and hold it; O(tokens)."""
        self.free_blocks(request_id)
        seq = self.kv.open(prompt_ids, namespace=self.namespace)
        self.sequences[request_id] = seq
        return seq.num_cached_tokens

    def can_store_request_tokens(
        self,
        state: Any,  # noqa: ANN401  # a RequestState
        request_len: int,
        dry_run: bool = False,  # noqa: FBT001, FBT002  # as theirs
    ) -> bool:
        """Make room for the next tokens of a request, or say that there is none.

        A warm-up asks, dry, for a request of no tokens: who is unknown then is counted, not opened.
        """
        known = state.request_id in self.sequences
        total: int = state.current_len() + request_len
        if dry_run and not known:
            return self._blocks_anew(total) <= self.kv.num_free_blocks
        seq = self.sequences[state.request_id] if known else self._open_anew(state)
        fits = self.kv.can_reserve(seq, max(0, total - seq.num_computed_tokens))
        if fits and not dry_run:
            self.kv.reserve_to(seq, total)
        elif not known:
            self.free_blocks(state.request_id)
        return fits

    def _blocks_anew(self, total: int) -> int:
        """The blocks of a request of `total` tokens that shares nothing."""
        states = 0 if self.states is None or not total else self.states.num_blocks
        return sum(ceil(total / size) for size in self._sizes) + states

    def _open_anew(self, state: Any) -> kvcore.KVSequence:  # noqa: ANN401
        """Open a request that nothing was looked up for, or whose KV comes back from the host.

        What comes back says nothing of blocks behind a window, so with several kinds of layers it
        is not published.
        """
        shared = self.use_prefix_sharing and not (state.is_cpu_offloaded and len(self._tables) > 1)
        seq = self.kv.open(
            state.initial_tokens + state.generated_tokens,
            namespace=self.namespace if shared else None,
            skip_reading=True,
        )
        self.sequences[state.request_id] = seq
        return seq

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:  # noqa: ANN401
        """Remember how many tokens are computed once the batch has run."""
        return {_COMPUTED: state.current_len() + request_len}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:  # noqa: ANN401
        """Commit what a batch has computed, now that its tokens are known; O(new tokens)."""
        if complete_blocks and state.request_id in self.sequences:
            self._commit(state, complete_blocks[_COMPUTED])

    def _commit(self, state: Any, num_tokens: int) -> None:  # noqa: ANN401
        seq = self.sequences[state.request_id]
        told = state.generated_tokens[seq.num_tokens - len(state.initial_tokens) :]
        if told:
            self.kv.extend(seq, told)
        self.kv.commit(seq, max(0, min(num_tokens, seq.num_tokens) - seq.num_computed_tokens))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:  # noqa: FBT001, FBT002  # as theirs
        """Close a request in whatever state; what it has computed can be hit until it is reused."""
        seq = self.sequences.pop(request_id, None)
        if seq is not None:
            if no_cache and seq.state is not None:  # it may be copied to the host next
                self.left[request_id] = [block.block_id for block in seq.state.read]
            self.kv.close(seq)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:  # noqa: FBT001, FBT002  # as theirs
        """Close all requests; with `clear_ledgers` nothing that is cached is hit any more."""
        for request_id in list(self.sequences):
            self.free_blocks(request_id)
        if clear_ledgers:
            self.kv.reset()

    def evict_cached_blocks(self) -> bool:
        """Nothing: content goes when its block is needed."""
        return False

    def compute_free_capacity(self, relative: bool = True) -> int | float:  # noqa: FBT001, FBT002  # as theirs
        """What is free, with what can still be hit: a part of all, or bytes."""
        part = self.kv.num_free_blocks / self.kv.num_usable_blocks
        return part if relative else part * self.num_sectors * self.bytes_per_sector

    def _needs(self, group: int, request_id: str, past_length: int, query_length: int) -> int:
        """What an allocator says a request needs: kvcore's blocks, all of them at the first."""
        total, seq = past_length + query_length, self.sequences.get(request_id)
        if group > 0:
            return 0
        if seq is None:
            return self._blocks_anew(total)
        return self.kv.num_missing_blocks(seq, max(0, total - seq.num_computed_tokens))

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """How many requests of these needs (`_needs`), in order, have room now."""
        free = self.kv.num_free_blocks
        for count, needs in enumerate(list_blocks_needed):
            free -= sum(needs.values())
            if free < 0:
                return count
        return len(list_blocks_needed)

    def prepare_fork_request(
        self,
        src_state: Any,  # noqa: ANN401  # a RequestState
        dst_req_ids: list[str],
        copy_src_and_dst: dict[str, tuple[list[int], list[int]]],
    ) -> list[str]:
        """Fork a request while there is room; what is half full is copied by the caller."""
        self._commit(src_state, src_state.current_len())
        seq = self.sequences[src_state.request_id]
        forked: list[str] = []
        for request_id in dst_req_ids:
            try:
                child, orders = self.kv.fork(seq)
            except kvcore.OutOfBlocksError:
                break
            self.sequences[request_id] = child
            forked.append(request_id)
            for order in orders:
                sources, targets = copy_src_and_dst[list(self.cache_allocators)[order.group]]
                sources.extend(self._tables[order.group].pages_of(order.src))
                targets.extend(self._tables[order.group].pages_of(order.dst))
        return forked
