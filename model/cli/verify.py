"""Every token of a paged run against Transformers' own dense generation.

Decides: what "the same" means: each prompt generated alone, greedily, by the same network with the
attention it came with and a dense cache, gives token for token the same output, and ends at the
same place. Where `generate` contradicts itself, the run is compared with the side that is defined:
without its cache, and with equal scores of an index taken in the order of their positions.

Invariants: the network has its paged attention back when a call returns.

Does not know: how the paged run was scheduled, or on which backend.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig

from model.attention.attention import IMPLEMENTATION
from model.control.request import FinishReason, Request
from model.forward.lora import Adapters
from model.load.images import ImagePrompt
from model.load.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first token in which a request differs.

    Attributes:
        index: the number of the request in the run, from 0.
        position: of the token in the output, from 0.
        paged: the token that the paged run gave; None: it had ended before.
        dense: the token of the dense one; None likewise.
    """

    index: int
    position: int
    paged: int | None
    dense: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing a request with the dense network.

    Attributes:
        mismatch: the first difference, or None.
        note: the contradiction of `generate`, and the side that the request was compared with.
    """

    mismatch: Mismatch | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to generate that gives the same tokens as any other, unless `generate` is at fault."""

    uses_cache: bool = True
    takes_lower: bool = False
    note: str = ""


_WITHOUT_CACHE = _Way(
    uses_cache=False,
    note="generate gives other tokens with its cache than without: compared with those without",
)
_LOWER_FIRST = _Way(
    uses_cache=False,
    takes_lower=True,
    note="scores of the index are equal at the cut, where torch.topk takes any: compared with the "
    "lower positions",
)


class _LowerFirst(TorchFunctionMode):
    """A mode in which `topk` takes the lower positions of equal scores: PyTorch takes any."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401  # as PyTorch calls it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Call a function of PyTorch; in place of `topk` sort, which keeps the order of equals."""
        del types
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk) or kwargs.get("largest") is False:
            return func(*args, **kwargs)
        return _stable_topk(*args, **kwargs)


def _stable_topk(scores: Tensor, k: int, dim: int = -1, **_: object) -> object:
    found = scores.sort(dim=dim, descending=True, stable=True)
    values, indices = (part.narrow(dim, 0, k) for part in (found.values, found.indices))
    return torch.return_types.topk((values, indices))


def dense_tokens(
    model: LoadedModel,
    prompt: Sequence[int],
    max_tokens: int,
    stop_token_ids: Sequence[int],
    images: ImagePrompt | None = None,
    way: _Way = _Way(),
) -> list[int]:
    """Generate greedily with Transformers alone. One dense pass a token."""
    network = model.network
    inherited = network.generation_config
    plain = GenerationConfig(  # type: ignore[no-untyped-call]  # Transformers states no types
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=0,
        use_cache=way.uses_cache,
    )
    input_ids = torch.tensor([list(prompt)], device=network.device)
    try:
        network.set_attn_implementation(model.dense_implementation)
    except ValueError:  # one that a part of the network, which makes no text, does not have
        network.set_attn_implementation("eager")
    # No penalty of the checkpoint's own joins in.
    network.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        with torch.inference_mode(), _LowerFirst() if way.takes_lower else nullcontext():
            output = network.generate(  # type: ignore[operator]  # a mixin of every decoder
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=plain,
                **({} if images is None else images.on(network.device, network.dtype)),
            )
    finally:
        network.generation_config = inherited
        network.set_attn_implementation(IMPLEMENTATION)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def compare(
    model: LoadedModel, index: int, request: Request, adapters: Adapters | None = None
) -> Comparison:
    """Compare a finished greedy request with the dense network.

    One that was ended from outside is left out; one that ended at a stop string is compared as far
    as it goes. Costs a dense generation, and two more where it differs.

    Args:
        model: of the run.
        index: the number of the request in the run.
        request: greedy.
        adapters: of the run; a request's own is applied to the dense network too.
    """
    if request.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
        return Comparison()
    paged = request.output_tokens
    stops = set(request.params.stop_token_ids)
    if not request.params.ignore_eos:
        stops |= model.eos_token_ids

    def generated(way: _Way) -> list[int]:
        images = request.images if isinstance(request.images, ImagePrompt) else None
        limit = request.params.max_tokens
        with nullcontext() if adapters is None else adapters.choosing_for_all(request.namespace):
            dense = dense_tokens(model, request.prompt_tokens, limit, sorted(stops), images, way)
        return dense[: len(paged)] if request.params.stop else dense

    dense, note = generated(_Way()), ""
    for way in _other_ways(model):
        if dense == paged:
            break
        with suppress(Exception):  # any error of a class that cannot go without its cache
            other = generated(way)
            if other != dense:
                dense, note = other, way.note
    position = _first_difference(paged, dense)
    if position is None:
        return Comparison(note=note)
    return Comparison(Mismatch(index, position, _at(paged, position), _at(dense, position)), note)


def _other_ways(model: LoadedModel) -> Iterator[_Way]:
    """Yield the ways to generate that are tried where a request differs, the best defined last."""
    yield _WITHOUT_CACHE
    if any(name.endswith("indexer") for name, _ in model.network.named_modules()):
        yield _LOWER_FIRST


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for position in range(max(len(left), len(right))):
        if _at(left, position) != _at(right, position):
            return position
    return None


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
