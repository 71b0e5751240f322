"""Cut-down networks with eight heads for many ranks, and a run that uses all of an engine at once.

`one_and_many` compares the tokens of a network on one process with those of all ranks: prefixes
that hit, prompts in chunks, preempted requests, draft tokens, and host memory behind a pool that is
too small.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedConfig

import backends
from model import EngineConfig, SamplingParams, Submission
from model.control.tier_transfers import TransferCosts
from model.engine import Engine, TwinEngine
from model.load.images import NoImages
from model.load.loader import LoadedModel
from model.ranks.parallel import Sums, check_cut, shard_network
from model.ranks.ranks import Ranks
from tests.model import vision
from tests.model.networks import KnowingDrafter, preempt_in_steps
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

Tokens = list[list[int]]
Load = Callable[[Ranks | None], LoadedModel]

NUM_TOKENS = 10
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4}
_KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "repeated heads": ("Qwen3Config", _HEADS),
    "experts": ("Qwen3MoeConfig", _HEADS | _EXPERTS),
    "latents": (
        "DeepseekV3Config",
        _EXPERTS | {"num_attention_heads": 8, "num_key_value_heads": 8},
    ),
    "recurrent": ("Qwen3NextConfig", _HEADS | _EXPERTS),
    "images": ("Qwen3VLConfig", _HEADS),
}
KINDS = tuple(_KINDS)


def load(kind: str, device: torch.device, ranks: Ranks | None, seed: int = 1) -> LoadedModel:
    """Return the network of a kind, in float32, whole or as a rank has it."""
    name, sizes = _KINDS[kind]
    if kind == "images":
        with mock.patch.object(vision, "make_parts", _with_sizes(vision.make_parts, sizes)):
            model, _ = vision.build(name, seed)
    else:
        model = build_network(_sized(make_config(name, ""), sizes), seed)
    if ranks is None:
        nn.Module.to(model.network, device)
        return model
    sums = Sums(device, ranks)
    cuts = shard_network(model.network, ranks, sums)
    nn.Module.to(model.network, device)
    check_cut(model.network, ranks)
    return dataclasses.replace(model, ranks=ranks, cuts=cuts)


def _sized(config: PreTrainedConfig, sizes: dict[str, int]) -> PreTrainedConfig:
    own = copy.deepcopy(config)
    text = own.get_text_config()
    for name, value in sizes.items():
        if hasattr(text, name):
            setattr(text, name, value)
    return own


def _with_sizes(
    make: Callable[[str], tuple[Any, Any]], sizes: dict[str, int]
) -> Callable[[str], tuple[Any, Any]]:
    def made(name: str) -> tuple[Any, Any]:
        config, processor = make(name)
        return _sized(config, sizes), processor

    return made


def asked(engine: Engine, block_size: int) -> list[Submission]:
    """Return prompts of one to five blocks, most of which share their first blocks.

    For a network with a vision tower they are texts with images.
    """
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    vocab_size, codec = engine.vocab_size, engine.model.images
    if not isinstance(codec, NoImages):
        found = []
        for text, images in vision.PROMPTS:
            if not images:
                found.append(Submission(engine.model.codec.encode(text), params))
                continue
            marked = text.replace("#", codec.mark)
            tokens, items = codec.encode(marked, images, engine.config)
            found.append(Submission(tokens, params, images=items))
        return found
    shared = [(7 * place) % (vocab_size - 9) + 5 for place in range(3 * block_size)]
    every = [[*shared, number, 2 * number] for number in (3, 4, 5)]
    every += [[*shared[: block_size + 1], 6], [8] * (block_size + 2)]
    every.append([*range(11, 11 + 4 * block_size + 3)])
    return [Submission(prompt, params) for prompt in every]


def _others(engine: Engine, block_size: int, count: int) -> Iterator[Submission]:
    """Yield prompts that share nothing, and take the blocks of all that is cached."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    vocab_size, length = engine.vocab_size, 4 * block_size
    for number in range(count):
        prompt = [(13 * number + 5 * place) % (vocab_size - 9) + 5 for place in range(length)]
        yield Submission(prompt, params)


@contextmanager
def _worth_loading() -> Iterator[None]:
    """Load all that is found: networks this small compute faster."""
    with (
        mock.patch.object(TransferCosts, "is_worth", return_value=True),
        mock.patch.object(TransferCosts, "deadline_s", return_value=60.0),
    ):
        yield


def alone(model: LoadedModel, block_size: int) -> Tokens:
    """Return the tokens of each prompt by an engine that has room for all, and reuses nothing."""
    config = EngineConfig(num_blocks=200, block_size=block_size, enable_prefix_caching=False)
    engine = Engine(model, backends.get_backend("auto"), config)
    return _generated(engine, asked(engine, block_size))


def _generated(engine: Engine, every: Sequence[Submission]) -> Tokens:
    requests = [request for each in every for request in engine.submit(each)]
    while engine.has_unfinished:
        engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [list(request.output_tokens) for request in requests]


def together(
    model: LoadedModel, texts: Tokens, block_size: int, *, with_drafts: bool, prepares: bool
) -> dict[str, object]:
    """Return the tokens of all ranks' engine and how often each of its parts was used.

    Args:
        model: as a rank has it.
        texts: the tokens that each prompt should give: drafts are taken from them.
        block_size: of the caches.
        with_drafts: verify draft tokens; else steps may be sent before tokens are read.
        prepares: compile the network, and capture CUDA graphs on a GPU.
    """
    config = EngineConfig(
        num_blocks=32,
        block_size=block_size,
        max_num_batched_tokens=block_size + 7,
        host_memory_bytes=1 << 30,
        swap_memory_bytes=0,
        drafts="ngram" if with_drafts else None,
        compile=prepares,
    )
    with _worth_loading():
        backend = backends.get_backend("auto")
        engine = TwinEngine(model, backend, config, is_checked=True)
        if prepares:
            engine.prepare()
        every = asked(engine, block_size)
        if with_drafts:
            known = [(*one.prompt, *own) for one, own in zip(every, texts, strict=True)]
            engine._scheduler._drafter = KnowingDrafter(known)
        preempt_in_steps(engine, {6, 9, 14})
        if not engine.leads:
            engine.follow()
            return {}
        first = _generated(engine, every)
        for other in _others(engine, block_size, 8):
            _generated(engine, [other])
            _drain(engine)
        second = _generated(engine, every)
        _drain(engine)
        stats = engine.stats
        loads = 0 if engine.tiers is None else engine.tiers.stats.num_loads
        engine.end(goes_on=True)
    return {
        "drafts": with_drafts,
        "equal": sum(one == two == own for one, two, own in zip(first, second, texts, strict=True)),
        "of": len(texts),
        "hits": stats.num_hit_tokens,
        "preemptions": stats.num_preemptions,
        "accepted": stats.num_accepted_tokens,
        "loads": loads,
        "lost blocks": engine.kv.num_usable_blocks - engine.kv.num_free_blocks,
    }


def _drain(engine: Engine) -> None:
    while engine.tiers is not None and engine.tiers.is_busy:
        engine.tiers.wait()
        engine.tend()


def one_and_many(
    load_it: Load,
    ranks: Ranks,
    block_size: int,
    *,
    drafts: Sequence[bool] = (True,),
    prepares: bool = False,
) -> list[dict[str, object]]:
    """Compare one process with all ranks, for each of `drafts`; rank 0 has the results.

    Every rank calls it.
    """
    wanted: Tokens = []
    if ranks.leads:
        wanted = alone(load_it(None), block_size)
    if torch.cuda.is_available():
        gc.collect()  # an engine is in cycles, and its network takes most of the memory
        torch.cuda.empty_cache()
    wanted = cast("Tokens", ranks.broadcast(wanted))
    model = load_it(ranks)
    return [
        together(model, wanted, block_size, with_drafts=each, prepares=prepares) for each in drafts
    ]


def are_all_used(found: dict[str, object]) -> bool:
    """Return True if tokens are equal, no block is lost, and every part of the engine was used."""
    used = [found[name] for name in ("hits", "preemptions", "loads")]
    used.append(found["accepted"] or not found["drafts"])
    return found["equal"] == found["of"] and not found["lost blocks"] and all(used)
