"""Every token of a paged run against Transformers' own dense generation.

Decides: what "the same" means: each prompt generated alone, greedily, by the same network with the
attention it came with and a dense cache, gives token for token the same output, and ends at the
same place.

Invariants: the network has its paged attention back when a call returns.

Does not know: how the paged run was scheduled, or on which backend.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from model.attention.attention import IMPLEMENTATION
from model.control.request import FinishReason, Request
from model.forward.lora import Adapters
from model.load.images import ImagePrompt
from model.load.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a request first differs.

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


def dense_tokens(
    model: LoadedModel,
    prompt: Sequence[int],
    max_tokens: int,
    stop_token_ids: Sequence[int],
    images: ImagePrompt | None = None,
) -> list[int]:
    """Generate greedily with Transformers alone. One dense pass a token."""
    network = model.network
    inherited = network.generation_config
    plain = GenerationConfig(  # type: ignore[no-untyped-call]  # Transformers states no types
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=0,
    )
    input_ids = torch.tensor([list(prompt)], device=network.device)
    try:
        network.set_attn_implementation(model.dense_implementation)
    except ValueError:  # one that a part of the network, which makes no text, does not have
        network.set_attn_implementation("eager")
    # No penalty of the checkpoint's own joins in.
    network.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        with torch.inference_mode():
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


def find_mismatch(
    model: LoadedModel, index: int, request: Request, adapters: Adapters | None = None
) -> Mismatch | None:
    """Compare a finished greedy request with the dense network; the first difference, if any.

    One that was ended from outside is left out; one that ended at a stop string is compared as far
    as it goes. Costs a dense generation.

    Args:
        model: of the run.
        index: which request of the run it is.
        request: greedy.
        adapters: of the run; a request's own is applied to the dense network too.
    """
    if request.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
        return None
    paged = request.output_tokens
    stops = set(request.params.stop_token_ids)
    if not request.params.ignore_eos:
        stops |= model.eos_token_ids
    with nullcontext() if adapters is None else adapters.choosing_for_all(request.namespace):
        images = request.images if isinstance(request.images, ImagePrompt) else None
        dense = dense_tokens(
            model, request.prompt_tokens, request.params.max_tokens, sorted(stops), images
        )
    if request.params.stop:
        dense = dense[: len(paged)]
    position = _first_difference(paged, dense)
    if position is None:
        return None
    return Mismatch(index, position, _at(paged, position), _at(dense, position))


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for position in range(max(len(left), len(right))):
        if _at(left, position) != _at(right, position):
            return position
    return None


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
