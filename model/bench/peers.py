"""Transformers' own ways to generate, on the requests that an engine has answered.

Decides: what a fair turn of each is. Both get whole prompts at once and generate exactly the tokens
that are asked for, with the attention that the network came with.

- `generate`: groups of `batch` requests in their order, prompts padded on the left. A group runs
  until its longest request ends; only the tokens that were asked for are counted.
- `generate_batch`: Transformers' continuous batching, through the manager that it is made of,
  which alone takes a length for each request. The manager is made and warmed before the clock
  starts.
- `generate_batch_sized`: the same with a cache for what runs at once. By itself it takes what
  memory there is, which on a CPU makes every step slow.

Invariants: the network has its paged attention back when a turn is over; a turn that gives fewer
tokens than it should raises.

Does not know: our engine.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from model.attention.attention import IMPLEMENTATION
from model.errors import ModelError
from model.load.loader import LoadedModel

_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """One request for a peer: a whole prompt, and how many tokens to generate."""

    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """How a peer generates.

    Attributes:
        temperature: 0: the most likely token.
        batch_size: the requests of a group, or that run at once.
    """

    temperature: float
    batch_size: int


def run_generate(
    model: LoadedModel,
    jobs: Sequence[Job],
    settings: PeerSettings,
    on_finish: Callable[[int], None] = lambda _: None,
) -> float:
    """The seconds that `generate` takes for the jobs, group after group."""
    with _own_attention(model):
        begin = time.perf_counter()
        for first in range(0, len(jobs), settings.batch_size):
            group = jobs[first : first + settings.batch_size]
            _generate_group(model, group, settings)
            on_finish(len(group))
        return time.perf_counter() - begin


def _generate_group(model: LoadedModel, group: Sequence[Job], settings: PeerSettings) -> None:
    device = model.network.device
    width = max(len(job.prompt) for job in group)
    longest = max(job.max_tokens for job in group)
    input_ids = torch.zeros((len(group), width), dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, job in enumerate(group):
        input_ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    with torch.inference_mode():
        output = model.network.generate(  # type: ignore[operator]  # a mixin of every decoder
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            generation_config=_generation_config(settings, max_new_tokens=longest),
        )
    tokens = output[:, width:].cpu()
    if tokens.shape[1] != longest:
        raise ModelError(f"generate: wanted {longest} tokens a row, got {tokens.shape[1]}")


def run_generate_batch(
    model: LoadedModel,
    jobs: Sequence[Job],
    settings: PeerSettings,
    on_finish: Callable[[int], None] = lambda _: None,
) -> float:
    """The seconds that Transformers' continuous batching takes for the jobs, as it comes."""
    return _batch_continuously(model, jobs, settings, _sizes(jobs, settings), on_finish)


def run_generate_batch_sized(
    model: LoadedModel,
    jobs: Sequence[Job],
    settings: PeerSettings,
    on_finish: Callable[[int], None] = lambda _: None,
) -> float:
    """The seconds that it takes with a cache for `batch_size` of the longest jobs."""
    sizes = _sizes(jobs, settings)
    sizes.num_blocks = sum(sorted(_num_pages(jobs), reverse=True)[: settings.batch_size])
    sizes.max_batch_tokens = max(2048, *[len(job.prompt) for job in jobs])
    return _batch_continuously(model, jobs, settings, sizes, on_finish)


def _num_pages(jobs: Sequence[Job]) -> list[int]:
    """Pages of Transformers' cache that each job takes, one to spare."""
    config: Any = ContinuousBatchingConfig()
    page_size: int = config.page_size if hasattr(config, "page_size") else config.block_size
    return [-(-(len(job.prompt) + job.max_tokens) // page_size) + 1 for job in jobs]


def _sizes(jobs: Sequence[Job], settings: PeerSettings) -> ContinuousBatchingConfig:
    """What `generate_batch` finds from its inputs: the sizes of a batch, none of the cache."""
    longest = max(_num_pages(jobs))
    return ContinuousBatchingConfig(
        max_requests_per_batch=settings.batch_size,
        max_blocks_per_request=longest + longest % 2,
    )


def _batch_continuously(
    model: LoadedModel,
    jobs: Sequence[Job],
    settings: PeerSettings,
    sizes: ContinuousBatchingConfig,
    on_finish: Callable[[int], None],
) -> float:
    longest = max(job.max_tokens for job in jobs)
    network: Any = model.network  # a mixin of every decoder, without types
    with (
        _own_attention(model),
        network.continuous_batching_context_manager(
            generation_config=_generation_config(settings, max_new_tokens=longest, eos_token_id=-1),
            continuous_batching_config=sizes,
        ) as manager,
    ):
        begin = time.perf_counter()
        wanted = {
            manager.add_request(list(job.prompt), max_new_tokens=job.max_tokens): job.max_tokens
            for job in jobs
        }
        while wanted:
            result = manager.get_result(timeout=_WAIT_S)
            if result is None or result.error is not None:
                reason = "no answer" if result is None else result.error
                raise ModelError(f"generate_batch: wanted {len(wanted)} more answers, got {reason}")
            if result.is_finished():
                count = wanted.pop(result.request_id)
                if len(result.generated_tokens) != count:
                    raise ModelError(
                        f"generate_batch: wanted {count} tokens, got {len(result.generated_tokens)}"
                    )
                on_finish(1)
        return time.perf_counter() - begin


PEERS = {
    "generate": run_generate,
    "generate_batch": run_generate_batch,
    "generate_batch_sized": run_generate_batch_sized,
}
"""What can run beside us, by name."""


@contextmanager
def _own_attention(model: LoadedModel) -> Iterator[None]:
    network = model.network
    inherited = network.generation_config
    network.set_attn_implementation(model.dense_implementation)
    # No penalty and no end of the checkpoint's own joins in.
    network.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        network.generation_config = inherited
        network.set_attn_implementation(IMPLEMENTATION)


def _generation_config(
    settings: PeerSettings, *, max_new_tokens: int, eos_token_id: int | None = None
) -> GenerationConfig:
    sampling: dict[str, object] = {"do_sample": False}
    if settings.temperature > 0:
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 0}
    return GenerationConfig(  # type: ignore[no-untyped-call]  # Transformers states no types
        max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, pad_token_id=0, **sampling
    )
