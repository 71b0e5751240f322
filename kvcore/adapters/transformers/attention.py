"""Our attention in Transformers' continuous batching, over the paged cache that it has made.

Decides how a batch of theirs is told to a backend: the tables are kvcore's, the memory is a view of
their tensor, each layer's keys and values as pages. Decoding, prompts and chunks of them are one
call a layer; no mask is built and no cached key is gathered, so that a step no longer makes a list
of every token that its requests have cached.

Invariants: the tensors of a batch are made in the stream that its pass runs in, before it; a layer
that asks for something that a paged cache cannot give is refused by name.

Does not know: which backend runs, weights, who schedules. It needs the package `backends`, which is
in a checkout of kvcore and not in its wheel; nothing imports this file before a backend is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, ContinuousBatchingConfig
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs
from transformers.generation.continuous_batching.utils import stream_context

import backends
import kvcore
from kvcore.adapters.recurrent.state_functions import BackendOperations
from kvcore.adapters.transformers.states import asked, check

if TYPE_CHECKING:
    from kvcore.adapters.transformers.batching import KVCoreCache

IMPLEMENTATION = "kvcore_continuous"

_ATTENTION = "a backend's attention"

# What else a layer may be given: the batch says the same, or attention has nothing to do with it.
_PASSED_OVER = frozenset(PagedAttentionArgs.__annotations__) | {
    "sliding_window", "cache_position", "output_attentions", "output_hidden_states",
}  # fmt: skip


class Installed:
    """A backend with which a model's continuous batching attends.

    Attributes:
        operations: its operations on recurrent states; None: it has none.

    Raises:
        BackendError: there is no such backend, or it cannot run here.
    """

    def __init__(self, model: Any, backend: str) -> None:  # noqa: ANN401  # a mixin without types
        self._backend = backends.get_backend(backend)
        self.operations = BackendOperations.of(self._backend)
        self._model = model
        earlier = getattr(model, "_kvcore_attention", None)  # whose manager may not have stopped
        own = model.config._attn_implementation if earlier is None else earlier._own  # noqa: SLF001
        self._own: str = own
        if model.device.type != self._backend.device.type:
            raise kvcore.InvalidArgumentError(
                f"backend: wanted one that runs on {model.device}, where the model is, got "
                f"{self._backend.name!r}"
            )

    def asked(self, config: ContinuousBatchingConfig) -> ContinuousBatchingConfig:
        """A copy with what Transformers would turn on by itself left off, where it was not asked.

        Raises:
            InvalidArgumentError: it asks for what `check` refuses.
        """
        config = asked(config, _ATTENTION)
        config.auto_switch_to_flash = False
        return config

    def enter(self, manager: Any) -> None:  # noqa: ANN401
        """Have the model attend with the backend until the manager stops.

        Raises:
            InvalidArgumentError: Transformers has resolved its configuration to what `check`
                refuses.
        """
        check(manager.continuous_batching_config, _ATTENTION, "max_blocks_per_request")
        self._model.set_attn_implementation(IMPLEMENTATION)
        manager._original_attn_impl = self._own  # noqa: SLF001  # `stop` gives it back

    def leave(self) -> None:
        """Give the model its own attention back."""
        self._model.set_attn_implementation(self._own)

    def tell(self, processor: Any) -> None:  # noqa: ANN401
        """Tell the backend of every batch that the processor prepares."""
        cache, batches = processor.cache, processor.inputs_and_outputs
        if cache.attention is None:  # else it was kept from an earlier call
            cache.attention = Attention(cache, self._backend)
            batches.prepare_batch_tensors = partial(
                cache.attention.prepare, batches.prepare_batch_tensors, batches.compute_stream
            )


class Attention:
    """What a backend is told of the batches of one cache.

    Attributes:
        backend: runs attention.
    """

    def __init__(self, cache: KVCoreCache, backend: backends.Backend) -> None:
        self.backend = backend
        self._cache = cache
        self._batches: list[backends.PagedBatch] = []
        self._layers: dict[int, tuple[int, backends.KVCache, int | None]] = {}
        self._pages = [1] * len(cache.cache_allocators)
        for layer, allocator in cache.layer_to_allocator.items():
            group, pages, keys, values = cache.layer_memory(layer)
            window = getattr(allocator, "sliding_window", None)
            self._layers[layer] = (group, backends.KVCache(keys, values), window)
            self._pages[group] = pages

    def prepare(
        self,
        theirs: Callable[..., None],
        stream: Any,  # noqa: ANN401  # of whatever device, or None
        **batch: Any,  # noqa: ANN401  # as theirs
    ) -> None:
        """Let Transformers prepare a batch, and make of it what the kernels read. O(blocks)."""
        theirs(**batch)
        with stream_context(stream):
            self._batches = self._told()

    def _told(self) -> list[backends.PagedBatch]:
        """The batch as each group of layers has it, on the device; one copy to it a tensor."""
        starts, lengths = [0], []
        for _, past, new in self._cache.rows:
            starts.append(starts[-1] + new)
            lengths.append(past + new)
        query_start_loc, seq_lens = self._sent(starts), self._sent(lengths)
        made = []
        for group, allocator in enumerate(self._cache.cache_allocators.values()):
            table = self._table(group)
            size = allocator.tokens_per_page
            slots = torch.empty(starts[-1], dtype=torch.int64, device=table.device)
            self.backend.compute_slot_mapping(query_start_loc, seq_lens, table, size, slots)
            longest = max(new for _, _, new in self._cache.rows)
            made.append(
                backends.PagedBatch(
                    query_start_loc, seq_lens, table, slots, longest, max(lengths), kept={}
                )
            )
        return made

    def _table(self, group: int) -> Tensor:
        """The batch's block table, a row a request; in pages, where several make up a block."""
        seqs = [seq for seq, _, _ in self._cache.rows]
        longest = max([len(seq.tables[group].block_ids) for seq in seqs])
        table = torch.zeros(len(seqs), longest, dtype=torch.int32)
        for seq, row in zip(seqs, table.numpy(), strict=True):
            seq.write_block_table(row, group)
        pages = self._pages[group]
        if pages > 1:
            within = torch.arange(pages, dtype=torch.int32)
            table = (table[:, :, None] * pages + within).flatten(1)
        return self._to_device(table)

    def _sent(self, numbers: list[int]) -> Tensor:
        return self._to_device(torch.tensor(numbers, dtype=torch.int32))

    def _to_device(self, tensor: Tensor) -> Tensor:
        device = torch.device(self._cache.device)
        if device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: backends.AttentionTerms
    ) -> Tensor:
        """Store the batch's keys and values, then attend over all of its requests'.

        Args:
            layer: index of the layer.
            query: [num_tokens, num_q_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            value: like `key`.
            terms: what the layer asks for, but for its window, which the cache knows.
        """
        group, cache, window = self._layers[layer]
        batch = self._batches[group]
        self.backend.store_kv(key, value, cache, batch.slot_mapping)
        return self.backend.paged_attention(query, cache, batch, replace(terms, window=window))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: KVCoreCache | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls in each layer.

    Args:
        module: the attention layer; has `layer_idx`.
        query: [1, num_q_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        value: like `key`.
        attention_mask: None: the batch says who sees whom.
        cache: the cache of continuous batching, whose batch this is.
        scaling: of the logits; None: 1 / sqrt(head_dim).
        softcap: Gemma 2's cap on the logits.
        s_aux: [num_q_heads], GPT-OSS's sinks.
        dropout: 0.
        others: what the batch says too; anything else is refused.

    Returns:
        [1, num_tokens, num_q_heads, head_dim], and None in place of the weights.

    Raises:
        InvalidArgumentError: it is not called by continuous batching, or asks for what a paged
            cache does not do.
    """
    name = type(module).__name__
    told = None if cache is None else cache.attention
    layer = getattr(module, "layer_idx", None)
    if told is None or layer is None:
        raise kvcore.InvalidArgumentError(
            f"attention: wanted a batch of continuous batching over kvcore's cache, {name} is "
            "called without one; uninstall(model) gives the model its own attention back"
        )
    asked: dict[str, object] = {"a mask": attention_mask, "dropout": dropout or None, **others}
    for argument, what in asked.items():
        if what is not None and what is not False and argument not in _PASSED_OVER:
            raise kvcore.InvalidArgumentError(
                f"attention: {name} is given {argument}, which a paged cache does nothing with"
            )
    terms = backends.AttentionTerms(
        query.shape[-1] ** -0.5 if scaling is None else scaling, soft_cap=softcap, sinks=s_aux
    )
    # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]: views, the kernels take any stride.
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return told.attend(layer, query, key, value, terms).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attend)
