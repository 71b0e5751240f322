"""Models with recurrent layers in Transformers' continuous batching, which has no cache for them.

Decides: which layers attend and which keep a state (a probe finds out), where a request's state
lies (in blocks of kvcore, beside those of keys and values) and where a chunk of a prompt ends, so
that its state can be hit.

Invariants: a batch reads the state that the request's last batch has written; between two batches
everything is committed, so batches run one at a time.

Does not know: keys and values, who schedules, sampling.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
    stream_context,
)

import kvcore
from kvcore.adapters.recurrent import (
    Operations,
    Recurrence,
    RecurrentPass,
    Run,
    StateStep,
    layer_bytes,
    num_pieces,
    probe_recurrence,
    state_views,
    undivide,
)
from kvcore.adapters.transformers_versions import CACHE_ARGUMENT, INSTALLED, cache_argument

if TYPE_CHECKING:
    from kvcore.adapters.transformers.batching import KVCoreCache

_PROBE = "kvcore_probe"
_STATES = "layers that keep a recurrent state"

_ATTENDING = {"full_attention", "hybrid"}
"""Layers that attend to all tokens; hybrid ones keep a state too."""

# What a layer may ask of attention: Transformers' paged one heeds it, or it changes nothing.
_HEEDED = {
    "scaling", "is_causal", "position_ids", "use_cache", "cache_position",
    "output_attentions", "output_hidden_states", "output_router_logits",
}  # fmt: skip

# What a pass says of its packed rows, and a module with a state is not to hear.
_PACKED = frozenset(PagedAttentionArgs.__annotations__) - {
    "input_ids", "position_ids", CACHE_ARGUMENT,
}  # fmt: skip


def is_recurrent(model: Any) -> bool:  # noqa: ANN401  # a mixin without types
    """Whether some layers of a model may keep something else than keys and values. O(layers)."""
    return bool(model._is_stateful or {*_layer_types(model)} - {*ATTN_TYPE_TO_ALLOCATOR})  # noqa: SLF001


def _layer_types(model: Any) -> list[str]:  # noqa: ANN401
    """The types of a model's layers; empty where it has one type only."""
    return list(getattr(model.config.get_text_config(), "layer_types", None) or ())


def asked(config: ContinuousBatchingConfig, reason: str) -> ContinuousBatchingConfig:
    """A copy with what Transformers would turn on by itself left off, where it was not asked.

    Raises:
        InvalidArgumentError: as `check`.
    """
    check(config, reason)
    config = copy(config)
    if config.use_cuda_graph is None:
        config.use_cuda_graph = (False, False)
    if config.max_blocks_per_request is None:
        config.max_blocks_per_request = 0
    return config


def check(config: ContinuousBatchingConfig, reason: str, *names: str) -> None:
    """Refuse what would record or compile a pass, or pad it, because each batch has other tensors.

    Args:
        config: as asked for, or resolved.
        reason: what cannot be recorded.
        names: more fields that must be off.

    Raises:
        InvalidArgumentError: with the name of the field.
    """
    compiled = ("varlen_compile_config", "decode_compile_config", "default_compile_level")
    for name in ("use_cuda_graph", *compiled, *names):
        given = getattr(config, name)
        if given not in (None, False, (False, False)):  # or 0, which is no less False
            raise kvcore.InvalidArgumentError(f"{name}: wanted none beside {reason}, got {given!r}")


class RecurrentModel:
    """A model with recurrent layers, while `install` is in force.

    Args:
        model: a model of Transformers.
        operations: step its states where they can; None: its modules do.

    Attributes:
        recurrence: what its layers keep.
        groups: the layers that attend, by the type of their cache.

    Raises:
        InvalidArgumentError: its layers cannot be served; the message says why.
    """

    def __init__(self, model: Any, operations: Operations | None) -> None:  # noqa: ANN401  # a mixin without types
        self._model = model
        own = model.config._attn_implementation  # noqa: SLF001
        try:
            model.set_attn_implementation(_PROBE)
            refusal = kvcore.InvalidArgumentError
            self.recurrence = probe_recurrence(model, model.device, refusal, operations)
            self.groups = _groups(model, self.recurrence)
        except BaseException:
            undivide(model)
            raise
        finally:
            model.set_attn_implementation(own)
        shapes = [shape for pair in self.recurrence.attending.values() for shape in pair]
        self._bytes_per_token = sum(map(math.prod, shapes)) * model.dtype.itemsize
        self._argument = cache_argument(model)
        self._hook = model.register_forward_pre_hook(self._with_states, with_kwargs=True)

    def asked(self, config: ContinuousBatchingConfig) -> ContinuousBatchingConfig:
        """A copy with what cannot be recorded left off, where it was not asked for.

        Raises:
            InvalidArgumentError: as `check`, or a block would be smaller than the state of a layer.
        """
        self.check(config)
        largest = max(layer_bytes(self.recurrence.shapes))
        least = -(-largest // self._bytes_per_token)
        if config.page_size < least:
            raise kvcore.InvalidArgumentError(
                f"page_size: wanted at least {least}, because the state of a layer takes {largest} "
                f"bytes and a token in all layers {self._bytes_per_token}, got {config.page_size}"
            )
        return asked(config, _STATES)

    def check(self, config: ContinuousBatchingConfig) -> None:
        """Refuse what does not ask for the rows of each batch, or prepares one too early.

        Raises:
            InvalidArgumentError: with the name of the field.
        """
        check(config, _STATES, "use_async_batching", "max_blocks_per_request")

    def leave(self) -> None:
        """Give the modules with states their own forwards back."""
        self._hook.remove()
        undivide(self._model)

    def _with_states(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        cache = kwargs.get("cache")
        states = getattr(cache, "states", None)
        if states is not None:
            passing = states.of_batch()
            passing.kv_cache = cache if INSTALLED.modules_store else None
            kwargs = kwargs | {self._argument: passing}
        return args, kwargs


def _groups(model: Any, recurrence: Recurrence) -> dict[str, list[int]]:  # noqa: ANN401
    """The layers that attend, by type.

    Raises:
        InvalidArgumentError: the model's layers cannot be served.
    """
    config = model.config.get_text_config()
    types, name = _layer_types(model), type(model).__name__
    if isinstance(recurrence.error, kvcore.InvalidArgumentError):
        raise kvcore.InvalidArgumentError(f"{name}: {recurrence.error}") from recurrence.error
    if not recurrence.shapes:
        others = ", ".join(sorted({*types} - {*ATTN_TYPE_TO_ALLOCATOR}))
        raise kvcore.InvalidArgumentError(
            f"model: wanted layers that attend, or keep a state in Transformers' cache, {name} has "
            f"others{': ' * bool(others)}{others}"
        ) from recurrence.error
    if not recurrence.attending:
        raise kvcore.InvalidArgumentError(
            f"model: wanted a layer that attends, all layers of {name} keep a state"
        )
    wanted = (find_num_key_value_heads(config), find_head_dim(config))
    for layer, shapes in sorted(recurrence.attending.items()):
        if types and types[layer] not in _ATTENDING:
            raise kvcore.InvalidArgumentError(
                f"model: wanted full attention, layer {layer} of {name} has {types[layer]}"
            )
        for heads, head_dim in shapes:
            if (heads, head_dim) != wanted:
                raise kvcore.InvalidArgumentError(
                    f"model: wanted keys and values of {wanted[0]} heads of {wanted[1]}, as "
                    f"Transformers' paged cache has them, layer {layer} of {name} has {heads} of "
                    f"{head_dim}"
                )
    return {"full_attention": sorted(recurrence.attending)}


class States:
    """The states of one cache's requests.

    Args:
        cache: whose blocks they lie in.
        recurrence: what the model's layers keep.
        pages: uint8 [num_blocks, bytes of a block], the cache's memory by kvcore's blocks.

    Attributes:
        num_blocks: the blocks that a request's state takes.
    """

    def __init__(self, cache: KVCoreCache, recurrence: Recurrence, pages: Tensor) -> None:
        self.num_blocks = num_pieces(recurrence.shapes, pages.shape[1])
        self._cache = cache
        self._pages = pages
        self._tensors = state_views(recurrence.shapes, pages)
        self._recurrence = recurrence
        self._offloaded: dict[str, Tensor] = {}

    def of_batch(self) -> RecurrentPass:
        """What the modules of a pass read and write: the states of the cache's batch. O(rows)."""
        rows = self._cache.rows
        shape = (len(rows), self.num_blocks)
        reads, writes = (array("q", bytes(8 * shape[0] * shape[1])) for _ in range(2))
        kvcore.write_states([seq for seq, _, _ in rows], reads, writes)
        read, write = (torch.tensor(ids).view(shape) for ids in (reads, writes))
        runs, start = [], 0
        for number, (_, past_length, count) in enumerate(rows):
            if past_length and read[number, 0] < 0:  # it has come back from the host
                read[number] = write[number]
            runs.append(Run(start, count, 0, has_state=past_length > 0))
            start += count
        step = StateStep(tuple(runs), read, write).to(self._pages.device)
        return self._recurrence.passing(self._tensors, step, _PACKED)

    def join(self, processor: Any) -> None:  # noqa: ANN401
        """Have a processor end chunks where a state is wanted, and offload states with the rest."""
        scheduler, offloading = processor.scheduler, processor.offloading_manager
        scheduler._schedule_request = partial(self._schedule, scheduler._schedule_request)  # noqa: SLF001
        offload = offloading._offload_to_cpu  # noqa: SLF001
        offloading._offload_to_cpu = partial(self._offload, offload, offloading)  # noqa: SLF001
        restore = offloading.restore_scheduled_requests
        offloading.restore_scheduled_requests = partial(self._restore, restore, offloading)

    def _schedule(
        self,
        theirs: Callable[..., None],
        state: Any,  # noqa: ANN401  # a RequestState
        tokens: list[int],
        budget: int,
        scheduled: set[str],
    ) -> None:
        seq = self._cache.sequences[state.request_id]
        theirs(state, tokens, self._cache.kv.chunk_length(seq, min(len(tokens), budget)), scheduled)

    def _offload(
        self,
        theirs: Callable[..., set[str]],
        offloading: Any,  # noqa: ANN401
        victims: list[Any],
        tables: Mapping[str, object],
    ) -> set[str]:
        """Copy the states of requests that leave for the host, whose blocks are free already."""
        done = theirs(victims, tables)
        held = offloading._request_id_to_cpu_blocks  # noqa: SLF001  # without cancelled ones
        self._offloaded = {name: pages for name, pages in self._offloaded.items() if name in held}
        with stream_context(offloading._compute_stream):  # noqa: SLF001
            for request_id in done:
                pages = self._pages[self._cache.left[request_id]]
                self._offloaded[request_id] = pages.cpu()
        self._cache.left.clear()
        return done

    def _restore(
        self,
        theirs: Callable[..., None],
        offloading: Any,  # noqa: ANN401
        batch: list[Any],
    ) -> None:
        """Copy states that come back to where their requests' next batch writes."""
        with stream_context(offloading._compute_stream):  # noqa: SLF001
            for request in [future.state for future in batch if future.state.is_cpu_offloaded]:
                _, write = self._cache.sequences[request.request_id].state_blocks
                pages = self._offloaded.pop(request.request_id)
                self._pages[list(write)] = pages.to(self._pages.device)
        theirs(batch)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Any,  # noqa: ANN401  # what the probe attends with
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention of a probe's pass.

    Raises:
        InvalidArgumentError: a layer asks for something that Transformers' paged attention ignores.
    """
    asked: dict[str, object] = {"a mask": attention_mask, "dropout": dropout or None, **others}
    for argument, given in asked.items():
        if given is not None and given is not False and argument not in _HEEDED:
            raise kvcore.InvalidArgumentError(
                f"{type(module).__name__}: its attention gets {argument}, which Transformers' "
                "paged attention ignores"
            )
    if module.layer_idx is None:
        raise kvcore.InvalidArgumentError(
            f"{type(module).__name__}: wanted a layer_idx, it serves several layers"
        )
    rows = [each[0].transpose(0, 1) for each in (query, key, value)]
    return paged.attend(module.layer_idx, *rows, None).unsqueeze(0), None


AttentionInterface.register(_PROBE, _attend)
