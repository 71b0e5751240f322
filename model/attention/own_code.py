"""Networks that bypass Transformers' attention interface: their modules call ours instead.

Bloom, Falcon, MPT and some older classes compute attention without Transformers' interface, or do
not pass a layer the arguments of a pass. `OWN_CODE` says for each how queries, keys and values are
made; the rest of the module runs unchanged, and without `paged` so does its attention.

ALiBi (Press et al., 2021) adds slope * key position to a logit. No kernel knows of it: keys get
eight numbers more, three digits of their position to the base of 256, and queries the slope times
what a digit counts. Digits are exact in every dtype; a slope is the sum of two numbers, so that one
in bfloat16 errs by 2^-16. Caches are wider by that much: by an eighth for heads of 64.

Invariants: a bias is the class's own formula, with the positions of the pass in place of counted
ones; positions are below 2^24.

Does not know: caches, requests, backends.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcore.adapters.recurrent import CACHE_ARGUMENT
from model.errors import UnsupportedModelError

_EXTRA = 8  # numbers of a key that say where it is; six are used, and rows stay aligned
_SLOPES = "alibi_slopes"


@dataclass(slots=True)
class _Passing:
    """The arguments of the current pass, for layers that get none of them.

    Attributes:
        paged: the pass's argument `paged`; None: the class's own attention computes.
        positions: int64 [1, num_tokens].
    """

    network: PreTrainedModel
    paged: object = None
    positions: Tensor | None = None

    def enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]]:
        """Note the arguments before a pass of the network."""
        known = inspect.signature(type(module).forward).parameters
        self.paged, self.positions = kwargs.pop("paged", None), kwargs.get("position_ids")
        takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
        given = {name: value for name, value in kwargs.items() if takes_all or name in known}
        return args, given if self.paged is not None else kwargs

    def leave(self, *_: object) -> None:
        """Forget the arguments after a pass, also one that failed."""
        self.paged = self.positions = None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        alibi_scale: float | None = None,
    ) -> Tensor:
        """Compute the network's attention: [1, num_tokens, num_q_heads, value_dim].

        Args:
            module: the layer.
            query: [1, num_q_heads, num_tokens, head_dim].
            key: [1, num_kv_heads, num_tokens, head_dim].
            value: like `key`.
            mask: Transformers' mask; None: the batch says which keys a query sees.
            scale: of the logits.
            alibi_scale: of ALiBi's slopes; None: there are none.
        """
        if alibi_scale is not None:
            if self.positions is None:
                raise UnsupportedModelError(f"{type(module).__name__}: wanted position_ids")
            slopes = getattr(module, _SLOPES) * (alibi_scale / scale)
            query, key = add_alibi(query, key, slopes, self.positions[0])
        name = str(self.network.config._attn_implementation)  # noqa: SLF001
        function = ALL_ATTENTION_FUNCTIONS[name]
        out: Tensor = function(module, query, key, value, mask, paged=self.paged, scaling=scale)[0]
        return out


def add_alibi(
    query: Tensor, key: Tensor, slopes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose products add slope * key position. O(their size).

    Args:
        query: [1, num_q_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        slopes: float32 [num_q_heads].
        positions: int64 [num_tokens], below 2^24.

    Returns:
        Both with a head_dim that is larger by 8.
    """
    most = slopes.to(query.dtype)
    pair = torch.stack([most, (slopes - most.float()).to(query.dtype)], -1)  # [num_q_heads, 2]
    weights = torch.cat([pair * 256, pair * 256, pair, torch.zeros_like(pair)], -1)
    digits = (positions // 65536 * 256, positions // 256 % 256, positions % 256)
    places = torch.stack([digit for digit in (*digits, digits[2]) for _ in range(2)], -1)
    wider = weights[None, :, None].expand(1, query.shape[1], query.shape[2], _EXTRA)
    placed = places.to(key.dtype)[None, None].expand(1, key.shape[1], key.shape[2], _EXTRA)
    return torch.cat([query, wider], -1), torch.cat([key, placed], -1)


def _alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head, which all classes here compute alike."""
    near = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (n + 1) / near) for n in range(near)]
    return slopes + [2 ** (-4 * (2 * n + 1) / near) for n in range(num_heads - near)]


def has_alibi(network: nn.Module) -> bool:
    """Return True if keys hold positions for ALiBi, so no scale may change them. O(modules)."""
    return any(hasattr(module, _SLOPES) for module in network.modules())


def _bloom(
    passing: _Passing,
    module: Any,  # noqa: ANN401  # a class of Transformers
    hidden_states: Tensor,
    residual: Tensor,
    *,
    attention_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))  # noqa: SLF001
    scale = module.inv_norm_factor
    out = passing.attend(module, query, key, value, attention_mask, scale, alibi_scale=1.0)
    return module.dense(out.flatten(2)) + residual, None


def _falcon(
    passing: _Passing,
    module: Any,  # noqa: ANN401  # a class of Transformers
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    parts = module._split_heads(module.query_key_value(hidden_states))  # noqa: SLF001
    query, key, value = (part.transpose(1, 2) for part in parts)
    if module.new_decoder_architecture:  # repeats them for each query head
        group = module.num_heads // module.num_kv_heads
        key, value = key[:, ::group], value[:, ::group]
    scale, alibi_scale = module.inv_norm_factor, None
    if hasattr(module, _SLOPES):
        alibi_scale = scale  # it scales the sum
    elif position_embeddings is not None:
        query, key = (_rotated(part, *position_embeddings) for part in (query, key))
    out = passing.attend(module, query, key, value, attention_mask, scale, alibi_scale)
    return module.dense(out.flatten(2)), None


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotary embeddings, as Llama has them; cos and sin: [1, num_tokens, head_dim]."""
    low, high = states.chunk(2, -1)
    return states * cos.unsqueeze(1) + torch.cat([-high, low], -1) * sin.unsqueeze(1)


def _falcon_model(
    passing: _Passing,
    module: Any,  # noqa: ANN401  # a class of Transformers
    *args: object,
    **kwargs: object,
) -> object:
    """Run the model without ALiBi of counted positions in its mask, which `use_alibi` would add."""
    del passing
    was, module.use_alibi = module.use_alibi, False
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module.use_alibi = was


def _mpt(
    passing: _Passing,
    module: Any,  # noqa: ANN401  # a class of Transformers
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    states = module.Wqkv(hidden_states)
    if module.clip_qkv:
        states = states.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    parts = (part.unflatten(2, (module.n_heads, -1)) for part in states.chunk(3, 2))
    query, key, value = (part.transpose(1, 2) for part in parts)
    scale = module.softmax_scale
    out = passing.attend(module, query, key, value, attention_mask, scale, alibi_scale=1.0)
    return module.out_proj(out.flatten(2)), None


def _mpt_model(
    passing: _Passing,
    module: Any,  # noqa: ANN401  # a class of Transformers
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    **_: object,
) -> BaseModelOutputWithPastAndCrossAttentions:
    """Run the model without ALiBi of counted positions, which the class would compute."""
    del passing
    states = module.wte(input_ids)
    no_cache: Any = {CACHE_ARGUMENT: None}
    mask = create_causal_mask(
        config=module.config, inputs_embeds=states, attention_mask=attention_mask, **no_cache
    )
    for block in module.blocks:
        states = block(states, position_bias=None, attention_mask=mask)[0]
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=module.norm_f(states))


def _unreached(
    passing: _Passing,
    module: Any,  # noqa: ANN401  # a class of Transformers
    *args: object,
    **kwargs: object,
) -> object:
    """Run a layer that calls Transformers' interface, but gets no arguments from its model."""
    return type(module).forward(module, *args, **kwargs, paged=passing.paged)


def _eager(
    passing: _Passing,
    module: Any,  # noqa: ANN401  # a class of Transformers
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Run `_attn` of the classes after GPT-J, which rotate queries and keys before it."""
    norm = module.norm_factor if hasattr(module, "norm_factor") else module.scale_attn
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = passing.attend(module, query, key, value, attention_mask, 1 / float(norm))
    return out.transpose(1, 2), None


def _xglm(
    passing: _Passing,
    module: Any,  # noqa: ANN401  # a class of Transformers
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    parts = (one(hidden_states) for one in (module.q_proj, module.k_proj, module.v_proj))
    query, key, value = (
        part.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for part in parts
    )
    out = passing.attend(module, query, key, value, attention_mask, module.scaling)
    return module.out_proj(out.flatten(2)), None


def _gpt_neo(
    passing: _Passing,
    module: Any,  # noqa: ANN401  # a class of Transformers
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,  # noqa: ANN401  # a mask that says how it was made
) -> tuple[Tensor, None]:
    module.layer_idx = module.layer_id
    made, window = getattr(attention_mask, "made_by", None), module.config.window_size
    if made is not None and module.attention_type == "local":  # the class makes another mask
        attention_mask = attention_mask[:]
        attention_mask.made_by = lambda *at: made(*at) & (at[3] > at[2] - window)
    out = passing.attend(module, query, key, value, attention_mask, scale=1.0)
    return out.transpose(1, 2), None


_Form = tuple[str, str, Callable[..., object]]

OWN_CODE: dict[str, tuple[_Form, ...]] = {
    "bloom": (("BloomAttention", "forward", _bloom),),
    "codegen": (("CodeGenAttention", "_attn", _eager),),
    "falcon": (
        ("FalconModel", "forward", _falcon_model),
        ("FalconAttention", "forward", _falcon),
    ),
    "gpt_neo": (("GPTNeoSelfAttention", "_attn", _gpt_neo),),
    "gpt_neox_japanese": (("GPTNeoXJapaneseAttention", "_attn", _eager),),
    "gptj": (("GPTJAttention", "_attn", _eager),),
    "mpt": (("MptModel", "forward", _mpt_model), ("MptAttention", "forward", _mpt)),
    "nemotron": (("NemotronAttention", "forward", _unreached),),
    "stablelm": (("StableLmAttention", "forward", _unreached),),
    "xglm": (("XGLMAttention", "forward", _xglm),),
}
"""By model_type: the class of a module, its method, and what stands in for that in our passes."""


def follow_own_code(network: PreTrainedModel) -> None:
    """Have a network of `OWN_CODE` attend through the interface in our passes. O(modules).

    Args:
        network: its modules are changed for its whole life; a second call does nothing.
    """
    config, passing = network.config, _Passing(network)
    replaced = [
        (module, method, own)
        for module in network.modules()
        for kind, method, own in OWN_CODE.get(config.model_type, ())
        # GPT-J and CodeGen have no `_attn` since Transformers 5.24: they call the interface.
        if type(module).__name__ == kind and hasattr(module, method)
    ]
    if not replaced or hasattr(network, "attends_for"):
        return
    network.attends_for = passing  # type: ignore[assignment]
    # Transformers' own method leaves such classes as they are.
    network.set_attn_implementation = partial(setattr, config, "_attn_implementation")  # type: ignore[method-assign]
    network.register_forward_pre_hook(passing.enter, with_kwargs=True)
    network.register_forward_hook(passing.leave, always_call=True)
    is_alibi = config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False)
    for module, method, own in replaced:
        original = getattr(module, method)
        setattr(module, method, partial(_either, passing, original, partial(own, passing, module)))
        if is_alibi and hasattr(module, "layer_idx"):
            slopes = _alibi_slopes(config.num_attention_heads)
            device = next(module.parameters()).device
            module.register_buffer(_SLOPES, torch.tensor(slopes, device=device), persistent=False)


def _either(
    passing: _Passing,
    original: Callable[..., object],
    own: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> object:
    """Run the method of the class, or in our passes its replacement."""
    return (original if passing.paged is None else own)(*args, **kwargs)
