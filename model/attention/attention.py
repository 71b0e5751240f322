"""Our attention inside Transformers' models.

Decides: what an attention layer of any decoder means in the terms of a backend: its scale, its
soft cap, its sinks; heads whose values are of another size than their keys are filled up with
zeros, and those that hand on latents are absorbed (`latents`). Transformers calls `attend` from
each layer because it is registered under `IMPLEMENTATION`; the keyword argument `paged` of a pass
travels down to it.

Invariants: a layer that asks for something a paged cache cannot give is refused by name, and an
argument that is not known is refused, never passed over; no mask is ever built, because the batch
says who sees whom (an implementation without a registered mask function gets none from
Transformers, and no synchronisation with the GPU).

Does not know: requests, tables, which backend runs.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

import backends
from model.attention.latents import absorbed
from model.caches.kv_caches import KVCaches
from model.caches.layout import CacheLayout
from model.errors import UnsupportedModelError

IMPLEMENTATION = "kvcore_paged"


class Attending(Protocol):
    """What a forward pass carries to its attention layers."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: backends.AttentionTerms
    ) -> Tensor:
        """Attention of one layer.

        Args:
            layer: index of the layer.
            query: [num_tokens, num_q_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            value: like `key`; if it is narrower, the first numbers of a latent that is the key.
            terms: what the layer asks for. The window is what it says, and may say nothing where
                a mask would cut it; what holds stands in the layout.

        Returns:
            [num_tokens, num_q_heads, size of a value].
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
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: backends.AttentionTerms
    ) -> Tensor:
        """Store this step's keys and values, then attend over all of the sequences'."""
        cache, window = self.caches.layers[layer], self.layout.layers[layer].window
        batch = self.batches[self.layout.places[layer][0]]
        if terms.window != window:
            terms = replace(terms, window=window)
        self.backend.store_kv(key, None if cache.is_latent else value, cache, batch.slot_mapping)
        return self.backend.paged_attention(query, cache, batch, terms)


_HARMLESS = {
    "position_ids": "queries and keys are rotated already",
    "cache_position": "the batch says where tokens are",
    "use_cache": "the cache is ours",
    "output_attentions": "nobody asks for the weights",
    "output_hidden_states": "nothing for attention to do",
    "output_router_logits": "nothing for attention to do",
}
"""Keyword arguments that an attention function may pass over, each for its reason."""


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
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls in each layer.

    Args:
        module: the attention layer; has `layer_idx`.
        query: [1, num_q_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        value: like `key`; its head_dim may be another one.
        attention_mask: None: the batch says who sees whom.
        paged: the pass, as it was given to the model.
        scaling: of the logits; None: 1 / sqrt(head_dim).
        sliding_window: keys a query sees, itself included; None: all.
        softcap: Gemma 2's cap on the logits.
        s_aux: [num_q_heads], GPT-OSS's sinks.
        dropout: 0: a network in evaluation drops nothing.
        is_causal: not False; None: what the layer says of itself.
        others: refused, unless they are None, False or known to be harmless.

    Returns:
        [1, num_tokens, num_q_heads, head_dim of values], and None in place of the weights.

    Raises:
        UnsupportedModelError: the model did not pass `paged` on, built a mask, has no `layer_idx`,
            or asks for what a paged cache does not do.
    """
    layer = getattr(module, "layer_idx", None)
    name = type(module).__name__
    if paged is None or layer is None:
        raise UnsupportedModelError(
            f"{name}: wanted an attention layer that has layer_idx and is given the keyword "
            f"arguments of a pass, {'those do not reach it' if paged is None else 'it has none'}"
        )
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name}: wanted no mask, it is given one that is its own")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if is_causal is False:
        raise UnsupportedModelError(f"{name}: wanted causal attention, it is bidirectional")
    if dropout:
        raise UnsupportedModelError(f"{name}: wanted a network in evaluation, got {dropout=}")
    for argument, given in others.items():
        if given is not None and given is not False and argument not in _HARMLESS:
            raise UnsupportedModelError(
                f"{name}: its attention is given {argument}, which a paged cache does nothing with"
            )
    terms = backends.AttentionTerms(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]: views, the kernels take any stride.
    query, key, states = _tokens_first(query), _tokens_first(key), _tokens_first(value)
    size, record = value.shape[-1], absorbed(module)
    if record is not None:
        out = paged.attend(layer, record.queries(query), key, states, terms)
        return record.values(out).unsqueeze(0), None
    if size != query.shape[-1]:
        # A zero in queries and keys adds nothing to a logit, one in values a zero to the output.
        widest = max(size, query.shape[-1])
        query, key, states = (_widened(part, widest) for part in (query, key, states))
    out = paged.attend(layer, query, key, states, terms)
    return out[..., :size].unsqueeze(0), None


def _tokens_first(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1)


def _widened(states: Tensor, size: int) -> Tensor:
    return nn.functional.pad(states, (0, size - states.shape[-1]))


AttentionInterface.register(IMPLEMENTATION, attend)
