"""Our attention inside Transformers' models.

Decides: what an attention layer of any decoder means in the terms of a backend: its scale, its
window, its soft cap, its sinks. Transformers calls `attend` from each layer because it is
registered under `IMPLEMENTATION`; the keyword argument `paged` of a pass travels down to it.

Invariants: a layer that asks for something a paged cache cannot give is refused by name; a window
or a soft cap that the configuration declares is one that the layer asked for, or the model is
refused; no mask is ever built, because the batch says who sees whom (an implementation without a
registered mask function gets none from Transformers, and no synchronisation with the GPU).

Does not know: requests, tables, which backend runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

import backends
from model.caches import KVCaches
from model.errors import UnsupportedModelError
from model.layout import CacheLayout, LayerShape

IMPLEMENTATION = "kvcore_paged"


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """One layer's attention: logit = scale * q.k, then soft cap, window and sinks."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


class Attending(Protocol):
    """What a forward pass carries to its attention layers."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: AttentionTerms
    ) -> Tensor:
        """Attention of one layer.

        Args:
            layer: index of the layer.
            query: [num_tokens, num_q_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            value: like `key`.
            terms: what the layer asks for.

        Returns:
            Like `query`.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedPass:
    """A real pass: keys and values go into the cache, queries read it there.

    Attributes:
        backend: runs it.
        caches: of every layer.
        layout: which group a layer belongs to.
        batches: for each group where the step's tokens are.
    """

    backend: backends.Backend
    caches: KVCaches
    layout: CacheLayout
    batches: tuple[backends.PagedBatch, ...]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: AttentionTerms
    ) -> Tensor:
        """Store this step's keys and values, then attend over all of the sequences'."""
        k_cache, v_cache = self.caches.layers[layer]
        batch = self.batches[self.layout.places[layer][0]]
        self.backend.store_kv(key, value, k_cache, v_cache, batch.slot_mapping)
        return self.backend.paged_attention(
            query,
            k_cache,
            v_cache,
            batch,
            scale=terms.scale,
            window=terms.window,
            soft_cap=terms.soft_cap,
            sinks=terms.sinks,
        )


@dataclass(slots=True)
class Probe:
    """A pass that stores nothing and notes what each layer would store."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    soft_caps: dict[int, float | None] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: AttentionTerms
    ) -> Tensor:
        """Note the layer's shape; zeros."""
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise UnsupportedModelError(
                f"layer {layer}: wanted queries, keys and values of one head_dim, got "
                f"{query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]}"
            )
        if layer in self.shapes:
            raise UnsupportedModelError(f"layer {layer} attends twice in one pass")
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], key.dtype, terms.window)
        self.soft_caps[layer] = terms.soft_cap
        return torch.zeros_like(query)


def probe_layers(model: PreTrainedModel, device: torch.device) -> tuple[LayerShape, ...]:
    """Run one token through the model and note what every layer stores. One forward pass.

    This is also the proof that every layer comes through here; a model with a layer that keeps
    another kind of state (Mamba, linear attention, latent KV) is refused.

    Args:
        model: its attention is switched to ours.
        device: where it is; the meta device will do, for a model without weights.

    Raises:
        UnsupportedModelError: the model cannot run with a paged cache, and why.
    """
    name = type(model).__name__
    probe = Probe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False, paged=probe)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    config = model.config.get_text_config()
    num_layers: int = config.num_hidden_layers
    if sorted(probe.shapes) != list(range(num_layers)):
        missing = sorted(set(range(num_layers)) - set(probe.shapes))
        raise UnsupportedModelError(
            f"{name}: wanted every one of {num_layers} layers to attend through "
            f"Transformers' AttentionInterface with a cache of its own, layers {missing} do not"
        )
    shapes = tuple(probe.shapes[layer] for layer in range(num_layers))
    declared = declared_windows(config)
    soft_cap = getattr(config, "attn_logit_softcapping", None)
    for layer, shape in enumerate(shapes):
        if shape.window != declared[layer]:
            raise UnsupportedModelError(
                f"{name}: layer {layer} is configured for {_window(declared[layer])} and "
                f"asks its attention for {_window(shape.window)}"
            )
        if probe.soft_caps[layer] != soft_cap:
            raise UnsupportedModelError(
                f"{name}: layer {layer} is configured for a soft cap of {soft_cap} and "
                f"asks its attention for {probe.soft_caps[layer]}"
            )
    return shapes


def declared_windows(config: PreTrainedConfig) -> list[int | None]:
    """What a configuration says of each layer: its window, or None for all. O(num_layers).

    Where a mask alone would cut the window, a layer would not ask its attention for it, and would
    see too much here: so the two are compared.
    """
    window: int | None = getattr(config, "sliding_window", None)
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if types is None:
        return [window] * int(config.num_hidden_layers)
    return [window if kind == "sliding_attention" else None for kind in types]


def _window(window: int | None) -> str:
    return "full attention" if window is None else f"a window of {window}"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Attending | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls in each layer.

    Args:
        module: the attention layer; has `layer_idx`.
        query: [1, num_q_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        value: like `key`.
        attention_mask: None: the batch says who sees whom.
        paged: the pass, as it was given to the model.
        scaling: of the logits; None: 1 / sqrt(head_dim).
        sliding_window: keys a query sees, itself included; None: all.
        softcap: Gemma 2's cap on the logits.
        s_aux: [num_q_heads], GPT-OSS's sinks.

    Returns:
        [1, num_tokens, num_q_heads, head_dim], and None in place of the weights.

    Raises:
        UnsupportedModelError: the model did not pass `paged` on, built a mask, or has no
            `layer_idx`.
    """
    layer = getattr(module, "layer_idx", None)
    if paged is None or attention_mask is not None or layer is None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: wanted an attention layer that has layer_idx, passes "
            f"keyword arguments on and makes no mask of its own"
        )
    terms = AttentionTerms(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]: views, the kernels take any stride.
    out = paged.attend(layer, _tokens_first(query), _tokens_first(key), _tokens_first(value), terms)
    return out.unsqueeze(0), None


def _tokens_first(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1)


AttentionInterface.register(IMPLEMENTATION, attend)
