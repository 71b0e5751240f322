"""Our attention inside Transformers' models.

Decides: how a backend gets what an attention layer of any decoder asks for: its scale, soft cap and
sinks; heads whose values and keys differ in size are padded with zeros, and layers that pass on
latents are absorbed (`latents.py`). Transformers calls `attend` in each layer because it is
registered under `IMPLEMENTATION`; the keyword argument `paged` of a forward pass reaches it.

Invariants: a layer that asks for something a paged cache cannot do is refused by name, and so is
an unknown argument; no mask is ever built, because the batch says which keys a query sees
(Transformers builds no mask for an implementation without a mask function, so it does not
synchronise with the GPU either).

Does not know: requests, block tables, which backend runs.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

import backends
from model.attention.ahead import Ahead
from model.attention.compressed import PagedEntries
from model.attention.indexer import NoChoice, SeenTokens
from model.attention.latents import absorbed
from model.caches.kv_caches import KVCaches
from model.caches.layout import CacheLayout
from model.errors import UnsupportedModelError

IMPLEMENTATION = "kvcore_paged"


class Attending(Protocol):
    """The pass that a layer hands its queries, keys and values to."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of one layer.

        Args:
            layer: index of the layer.
            query: [num_tokens, num_q_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            value: like `key`; if narrower, the first numbers of a latent that is the key.
            terms: the layer's constants. Its window may be None where only a mask defines it; the
                layout has the true one.
            chosen: int32 [num_tokens, count], the positions that each token attends to, as `choose`
                gave them for this layer or an earlier one; None: all that it sees.

        Returns:
            [num_tokens, num_q_heads, value_dim].
        """
        ...

    def choose(self, layer: int, query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
        """Return the positions with the highest scores of an index: int32 [num_tokens, count].

        Args:
            layer: index of the layer.
            query: [num_tokens, num_index_heads, index_dim], in any floating dtype.
            weights: float32 [num_tokens, num_index_heads].
            key: [num_tokens, 1, index_dim], of the index.
            count: positions chosen for each token.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedPass:
    """A forward pass on paged caches.

    Attributes:
        backend: the backend that computes it.
        caches: of every layer.
        layout: the group of each layer.
        batches: for each group the places of the step's tokens.
        ahead: the tokens that see some behind them; None: there are none.
        entries: compressed keys; None: no layer has any.
    """

    backend: backends.Backend
    caches: KVCaches
    layout: CacheLayout
    batches: tuple[backends.PagedBatch, ...]
    ahead: Ahead | None = None
    entries: PagedEntries | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Store the keys and values of the step, then attend to each sequence, or what is chosen.

        A layer that reads those of an earlier layer stores nothing.
        """
        ahead = self.ahead if self.ahead is not None and layer in self.ahead.layers else None
        layer = self.layout.numbers[layer]
        cache, shape = self.caches.layers[layer], self.layout.layers[layer]
        batch = self.batches[self.layout.places[layer][0]]
        if terms.window != shape.window:
            terms = replace(terms, window=shape.window)
        if shape.reads is None:
            rows = None if cache.is_latent else value
            self.backend.store_kv(key, rows, cache, batch.slot_mapping)
        if self.entries is not None and layer in self.layout.beside:
            return self.entries.attend(layer, query, terms)
        if chosen is not None and batch.max_seq_len > chosen.shape[1]:
            sparse: Any = self.backend
            found: Tensor = sparse.attend_chosen(query, cache, batch, chosen, terms)
            return found
        out = self.backend.paged_attention(query, cache, batch, terms)
        if ahead is not None:
            group = self.layout.places[layer][0]
            ahead.attend(out, self.backend, query, cache, group, terms)
        return out

    def choose(self, layer: int, query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
        """Store the index keys of the step, then score and choose.

        Where no sequence has more than `count` tokens, nothing is written: all are attended to.
        """
        layer = self.layout.numbers[layer]
        cache, batch = self.caches.indexes[layer], self.batches[self.layout.places[layer][0]]
        self.backend.store_kv(key, None, cache, batch.slot_mapping)
        if batch.max_seq_len <= count:
            return torch.empty((len(key), count), dtype=torch.int32, device=key.device)
        sparse: Any = self.backend
        return backends.choose(sparse, query.to(cache.k.dtype), weights, cache, batch, count)


_HARMLESS = {
    "position_ids": "queries and keys are rotated already",
    "cache_position": "the batch says where tokens are",
    "use_cache": "the cache is ours",
    "output_attentions": "the weights are never returned",
    "output_hidden_states": "irrelevant for attention",
    "output_router_logits": "irrelevant for attention",
    "logits_to_keep": "the head computes logits after the layers",
}
"""Keyword arguments that an attention function may pass over, each for its reason."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | SeenTokens | None,
    *,
    paged: Attending | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | NoChoice | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute attention: Transformers calls this function in each layer.

    Args:
        module: the attention layer; has `layer_idx`.
        query: [1, num_q_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        value: like `key`; its head_dim may differ.
        attention_mask: None: the batch says which keys a query sees.
        paged: the argument of the forward pass.
        scaling: of the logits; None: 1 / sqrt(head_dim).
        sliding_window: the keys that a query sees, its own included; None: all.
        softcap: Gemma 2's cap on the logits.
        s_aux: [num_q_heads], GPT-OSS's sinks.
        indices: [1, num_tokens, count], what an indexer has chosen (`indexer.py`).
        dropout: 0, as in evaluation mode.
        is_causal: not False; None: as the layer declares.
        others: refused, unless None, False or known to be harmless.

    Returns:
        [1, num_tokens, num_q_heads, value_dim], and None instead of the weights.

    Raises:
        UnsupportedModelError: the model does not pass `paged` on, builds a mask, has no
            `layer_idx`, or asks for something a paged cache does not support.
    """
    layer = getattr(module, "layer_idx", None)
    name = type(module).__name__
    if paged is None or layer is None:
        raise UnsupportedModelError(
            f"{name}: wanted an attention layer that has layer_idx and gets the keyword arguments "
            f"of a pass, {'they do not reach it' if paged is None else 'it has no layer_idx'}"
        )
    if attention_mask is not None and not isinstance(attention_mask, SeenTokens):
        raise UnsupportedModelError(f"{name}: wanted no mask, the network builds one of its own")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if is_causal is False:
        raise UnsupportedModelError(f"{name}: wanted causal attention, it is bidirectional")
    if dropout:
        raise UnsupportedModelError(f"{name}: wanted a network in evaluation, got {dropout=}")
    for argument, given in others.items():
        if given is not None and given is not False and argument not in _HARMLESS:
            raise UnsupportedModelError(
                f"{name}: its attention gets {argument}, which a paged cache does not support"
            )
    terms = backends.AttentionTerms(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim] as views.
    query, key, states = _tokens_first(query), _tokens_first(key), _tokens_first(value)
    size, record = value.shape[-1], absorbed(module)
    chosen = (indices[0],) if isinstance(indices, Tensor) else ()
    if record is not None:
        out = paged.attend(layer, record.queries(query), key, states, terms, *chosen)
        return record.values(out).unsqueeze(0), None
    if size != query.shape[-1]:
        # Zeros in queries and keys add nothing to a logit; zeros in values give zeros.
        widest = max(size, query.shape[-1])
        query, key, states = (_widened(part, widest) for part in (query, key, states))
    out = paged.attend(layer, query, key, states, terms, *chosen)
    return out[..., :size].unsqueeze(0), None


def logits_of(
    network: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    rows: Tensor,
    **passing: object,
) -> Tensor:
    """Run a network and return the logits of some rows. One forward pass.

    Args:
        network: with our attention.
        input_ids: [1, num_tokens].
        position_ids: like `input_ids`.
        rows: [num_sampled], the rows whose logits are wanted.
        passing: further arguments of the network: `paged`, and its states.

    Returns:
        [num_sampled, vocab_size].
    """
    chooses = "logits_to_keep" in inspect.signature(type(network).forward).parameters
    choice = {"logits_to_keep": rows} if chooses else {}
    output = network(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, **choice, **passing
    )
    logits: Tensor = output.logits[0]
    return logits if chooses else logits[rows]


def follow_layers(network: nn.Module) -> None:
    """Have modules that serve several layers know the one of each call. O(modules).

    A module that several layers share (Zamba) has no layer index, and is given one.

    Args:
        network: its modules are changed for its whole life.
    """

    def note(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        del args
        if "layer_idx" in kwargs:
            module.layer_idx = kwargs["layer_idx"]  # type: ignore[assignment]

    for module in network.modules():
        own = getattr(module, "layer_idx", 0)
        is_shared = own is None or (isinstance(own, int) and own < 0)
        if is_shared and "layer_idx" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(note, with_kwargs=True)


def _tokens_first(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1)


def _widened(states: Tensor, size: int) -> Tensor:
    return nn.functional.pad(states, (0, size - states.shape[-1]))


AttentionInterface.register(IMPLEMENTATION, attend)
