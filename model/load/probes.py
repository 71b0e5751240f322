"""What a network does, found by running it: before any request, and before any cache.

Decides: what each layer stores and sees, by one pass in which the network builds its masks; and
that a token's queries, keys and values depend on that token and its position alone, by two passes
in which each token is alone. The second is what makes it right to compute tokens of many requests
side by side, in pieces: rotary factors that follow the longest text of a batch, positions that are
counted and not given, convolutions and recurrent states all fail it.

Invariants: a network that passes both gives in a paged cache what it gives alone; what is refused
is refused by the name of its class, with the layer and the reason.

Does not know: caches, requests, which backend will run.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

import backends
from model.attention.attention import IMPLEMENTATION, attend
from model.attention.positions import ReportedLength, RowsElsewhere, report_positions
from model.attention.rope import RopeSwitch
from model.caches.layout import LayerShape
from model.errors import UnsupportedModelError
from model.load.sight import MaskFunction, Sight, sight_of

PROBING = "kvcore_probing"
"""An implementation whose layers are given masks, and tell the pass of them."""


@dataclass(slots=True)
class Probe:
    """A pass that stores nothing and notes what each layer would store and see."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    soft_caps: dict[int, float | None] = field(default_factory=dict)
    sights: dict[int, Sight] = field(default_factory=dict)
    known: dict[object, Sight] = field(default_factory=dict)  # of each mask function

    def see(self, layer: int, mask: Tensor | None) -> None:
        """Note what a layer's mask lets it see.

        Raises:
            UnsupportedModelError: it is no mask that a paged cache can take the place of.
        """
        if mask is None:
            raise UnsupportedModelError(f"layer {layer} has no mask: what it sees is not known")
        made = getattr(mask, "made_by", None)
        if made is None:
            raise UnsupportedModelError(f"layer {layer} makes a mask of its own")
        if made not in self.known:
            try:
                self.known[made] = sight_of(made, mask.device)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"layer {layer}: {error}") from error
        self.sights[layer] = self.known[made]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: backends.AttentionTerms
    ) -> Tensor:
        """Note the layer's shape; zeros."""
        if layer in self.shapes:
            raise UnsupportedModelError(f"layer {layer} attends twice in one pass")
        sight = self.sights.get(layer, Sight())
        if terms.window not in (None, sight.window):
            raise UnsupportedModelError(
                f"layer {layer} asks for a window of {terms.window}, and its mask is {sight}"
            )
        self.shapes[layer] = LayerShape(
            key.shape[1],
            key.shape[2],
            key.dtype,
            sight.window,
            sight.chunk,
            value_dim=value.shape[2] if value.shape[2] < key.shape[2] else None,
        )
        self.soft_caps[layer] = terms.soft_cap
        return query.new_zeros(*query.shape[:2], value.shape[2])


class _Mask(Tensor):
    """A mask that remembers which function it stands for, also when it is cut or cast."""

    made_by: MaskFunction | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Call an operator; a mask cut, cast or moved is the same mask."""
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, cls) and getattr(func, "__name__", "") in _KEEPING:
            result.made_by = getattr(args[0], "made_by", None)
        return result


_KEEPING = {"__getitem__", "to", "contiguous", "clone", "unsqueeze", "expand", "narrow"}


def _build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *_: object,
    mask_function: MaskFunction,
    device: torch.device | str = "cpu",
    **__: object,
) -> Tensor:
    """What Transformers calls for each kind of mask."""
    shape = (batch_size, 1, q_length, kv_length)
    mask = torch.ones(shape, dtype=torch.bool, device=device).as_subclass(_Mask)
    mask.made_by = mask_function
    return mask


def _attend_probing(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Probe | None = None,
    **asked: Any,  # noqa: ANN401  # as `attend` takes them
) -> tuple[Tensor, None]:
    """`attend`, after the mask was noted."""
    layer = getattr(module, "layer_idx", None)
    if paged is not None and layer is not None:
        paged.see(layer, attention_mask)
        attention_mask = None
    return attend(module, query, key, value, attention_mask, paged=paged, **asked)


AttentionInterface.register(PROBING, _attend_probing)
AttentionMaskInterface.register(PROBING, _build_mask)


def probe_layers(model: PreTrainedModel, device: torch.device) -> tuple[LayerShape, ...]:
    """Run a token through the model and note what every layer stores and sees. One pass.

    This is also the proof that every layer comes through here; a model with a layer that keeps
    another kind of state (Mamba, linear attention) is refused.

    Args:
        model: left with our attention.
        device: where it is; the meta device will do, for a model without weights.

    Raises:
        UnsupportedModelError: the model cannot run with a paged cache, and why.
    """
    name = type(model).__name__
    probe = Probe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    # A mask of padding is given where no value can be looked at, so that none is.
    mask = torch.ones_like(token) if device.type == "meta" else None
    model.set_attn_implementation(PROBING)
    try:
        with torch.no_grad():
            model(
                input_ids=token,
                position_ids=token,
                attention_mask=mask,
                use_cache=False,
                paged=probe,
            )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    except Exception as error:
        if device.type == "meta":  # which not every network can run on
            raise
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise UnsupportedModelError(
            f"{name}: Transformers' own class fails on this configuration: {reason}"
        ) from error
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    config = model.config.get_text_config()
    num_layers: int = config.num_hidden_layers
    if sorted(probe.shapes) != list(range(num_layers)):
        missing = sorted(set(range(num_layers)) - set(probe.shapes))
        raise UnsupportedModelError(
            f"{name}: wanted every one of {num_layers} layers to attend through "
            f"Transformers' AttentionInterface with a cache of its own, layers {missing} do not"
        )
    _check_declared(name, config, probe)
    return tuple(probe.shapes[layer] for layer in range(num_layers))


def _check_declared(name: str, config: PreTrainedConfig, probe: Probe) -> None:
    """Refuse layers that do not do what their configuration says.

    Transformers' own cache keeps as much as the configuration declares: where a mask lets a query
    see more, `generate` gives other tokens with its cache than without, and neither can be ours.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    for layer, shape in probe.shapes.items():
        if kinds is not None and kinds[layer] != "sliding_attention":
            continue
        if window is not None and shape.window != window:
            raise UnsupportedModelError(
                f"{name}: layer {layer} is configured for a window of {window}, and its mask is "
                f"{probe.sights[layer]}"
            )
    soft_cap = getattr(config, "attn_logit_softcapping", None)
    for layer, asked in probe.soft_caps.items():
        if asked != soft_cap:
            raise UnsupportedModelError(
                f"{name}: layer {layer} is configured for a soft cap of {soft_cap} and "
                f"asks its attention for {asked}"
            )


class _Alone:
    """A pass in which no token sees another; notes what one of them asks, keys and says.

    With `elsewhere` it also notes what that would be many rows on.
    """

    def __init__(self, row: int, elsewhere: RowsElsewhere | None = None) -> None:
        self._row = row
        self._elsewhere = elsewhere
        self.noted: dict[int, tuple[Tensor, ...]] = {}
        self.noted_elsewhere: dict[int, tuple[Tensor, ...]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: backends.AttentionTerms
    ) -> Tensor:
        """Note a row; of every row something of its own."""
        parts = (query, key, value)
        self.noted[layer] = tuple(part[self._row].float() for part in parts)
        if self._elsewhere is not None:
            twins = (self._elsewhere.twin(part) for part in parts)
            self.noted_elsewhere[layer] = tuple(part[self._row].float() for part in twins)
        group = query.shape[1] // key.shape[1]
        size = value.shape[2]
        own = (key[..., :size] + value).repeat_interleave(group, 1)
        return query[..., :size] * min(terms.scale, 1.0) + own


_TOLERANCES = {torch.float32: 0.02, torch.float64: 0.02}
"""How far a token may be from itself, as a share of its size; elsewhere rounding adds up sooner."""
_SAME_SHAPE_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Likewise in two passes of one token each, which round alike; 0.02 in other dtypes."""
_TOKENS = ((11, 5, 7), (2, 9, 3), (13, 1, 8))
_PARTS = ("queries", "keys", "values")


def check_tokens_alone(
    model: PreTrainedModel,
    device: torch.device,
    num_positions: int,
    rope: RopeSwitch | None = None,
) -> None:
    """Check that what a token gives depends on the token and its position. A few short passes.

    A token is run beside one far away, and beside another near by and in the other order. Where
    rounding sends it to other experts it may differ once, so it has to differ for every token that
    is tried.

    Its position has to come from `position_ids`: at the last position a token is run as `generate`
    would, with a cache that reports how many tokens came before, and in another row. A network that
    counts positions from the cache and the row is given such a cache in every pass from then on.

    Args:
        model: has our attention.
        device: where it is.
        num_positions: the most that a request may come to.
        rope: chooses its rotary factors; a token far away is one of a long text.

    Raises:
        UnsupportedModelError: with the layer, and what differs in it.
    """
    last = num_positions - 1
    reason = _misplaced(model, device, last, rope)
    if reason:
        report_positions(model)
        reason = _misplaced(model, device, last, rope)
    edge = last if rope is None else rope.num_tokens - 1
    # Near the beginning no text is long yet; farther on a rotation shows more.
    for near in sorted({min(3, last), min(500, last // 2, edge)}):
        reasons = _reasons(model, device, near, last, rope)
        if all(reasons):
            raise UnsupportedModelError(
                f"{type(model).__name__}: wanted layers that compute each token from itself and "
                f"its position, {reasons[0]}: a batch of other requests would change its result"
            )
    if reason:
        raise UnsupportedModelError(
            f"{type(model).__name__}: wanted layers that take a token's position from "
            f"position_ids, {reason}: its result would change with the step that computes it"
        )


def _misplaced(
    model: PreTrainedModel, device: torch.device, position: int, rope: RopeSwitch | None
) -> str:
    """What else than `position_ids` tells a layer where a token is, in words; empty: nothing."""
    vocab_size = model.config.get_text_config().vocab_size
    is_long = torch.ones((1, 1), dtype=torch.bool, device=device)
    tolerance = _SAME_SHAPE_TOLERANCES.get(model.dtype, 0.02)
    reason = ""
    for numbers in _TOKENS:
        token = [numbers[0] % vocab_size]
        cached, alone = _Alone(row=0), _Alone(row=0, elsewhere=(rows := RowsElsewhere(1, position)))
        with nullcontext() if rope is None else rope.choosing(is_long):
            length = ReportedLength(position)
            _run(model, device, token, [position], cached, past_key_values=length)
            with rows:
                _run(model, device, token, [position], alone)
        reason = _difference(
            cached.noted, alone.noted, tolerance, "the length that a cache reports"
        ) or _difference(alone.noted, alone.noted_elsewhere, tolerance, "its row in a step")
        if not reason:
            break
    return reason


def _reasons(
    model: PreTrainedModel, device: torch.device, near: int, far: int, rope: RopeSwitch | None
) -> list[str]:
    """For each token that is tried how it follows others; the last may be empty: it does not."""
    vocab_size = model.config.get_text_config().vocab_size
    is_long = torch.tensor([[False, True]], device=device)
    reasons: list[str] = []
    for numbers in _TOKENS:
        token, first, second = (number % vocab_size for number in numbers)
        with nullcontext() if rope is None else rope.choosing(is_long):
            one = _noted(model, device, [token, first], [near, far], row=0)
        two = _noted(model, device, [second, token], [0, near], row=1)
        tolerance = _TOLERANCES.get(model.dtype, 0.25)
        reasons.append(_difference(one, two, tolerance, "other tokens"))
        if not reasons[-1]:
            break
    return reasons


def _noted(
    model: PreTrainedModel,
    device: torch.device,
    tokens: list[int],
    positions: list[int],
    row: int,
) -> dict[int, tuple[Tensor, ...]]:
    alone = _Alone(row)
    _run(model, device, tokens, positions, alone)
    return alone.noted


def _run(
    model: PreTrainedModel,
    device: torch.device,
    tokens: list[int],
    positions: list[int],
    alone: _Alone,
    **more: object,
) -> None:
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            paged=alone,
            **more,
        )


def _difference(
    one: dict[int, tuple[Tensor, ...]],
    two: dict[int, tuple[Tensor, ...]],
    tolerance: float,
    cause: str,
) -> str:
    for layer in sorted(one):
        for name, left, right in zip(_PARTS, one[layer], two[layer], strict=True):
            if float((left - right).norm()) > tolerance * float(left.norm()):
                return f"the {name} of layer {layer} follow {cause} too"
    return ""
