"""Transformers' own ways to generate, on the requests that an engine has answered.

Both get whole prompts at once and generate exactly the tokens that are asked for, with the
attention that the network came with. `generate` runs groups of requests, padded on the left, until
the longest of a group ends. `generate_batch` is Transformers' continuous batching, with a cache for
what runs at once: by itself it takes what memory there is, which makes every step slow on a CPU.
"""

import logging
import time
from contextlib import contextmanager

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from model.attention.attention import IMPLEMENTATION
from tests.bench.measure import BenchError


def generate(model, jobs, at_once):
    """The seconds that `generate` takes for (prompt, number of tokens) jobs."""
    with _own_attention(model):
        begin = time.perf_counter()
        for first in range(0, len(jobs), at_once):
            group = jobs[first : first + at_once]
            width, longest = (max(column) for column in zip(*map(_lengths, group), strict=True))
            ids = torch.zeros((len(group), width), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, (prompt, _) in enumerate(group):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            device = model.network.device
            with torch.inference_mode():
                output = model.network.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    generation_config=_config(longest, eos_token_id=None),
                ).cpu()
            _check("generate", output.shape[1] - width, longest)
        return time.perf_counter() - begin


def generate_batch(model, jobs, at_once):
    """The seconds of continuous batching; its manager is made and warmed before."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    sizes = ContinuousBatchingConfig(max_requests_per_batch=at_once)
    page = sizes.page_size if hasattr(sizes, "page_size") else sizes.block_size
    pages = sorted((-(-sum(_lengths(job)) // page) + 1 for job in jobs), reverse=True)
    sizes.max_blocks_per_request = pages[0] + pages[0] % 2
    sizes.num_blocks = sum(pages[:at_once])
    sizes.max_batch_tokens = max(2048, *[len(prompt) for prompt, _ in jobs])
    longest = max(count for _, count in jobs)
    with (
        _own_attention(model),
        model.network.continuous_batching_context_manager(
            generation_config=_config(longest, eos_token_id=-1), continuous_batching_config=sizes
        ) as manager,
    ):
        begin = time.perf_counter()
        wanted = {
            manager.add_request(list(prompt), max_new_tokens=count): count for prompt, count in jobs
        }
        while wanted:
            result = manager.get_result(timeout=300)
            if result is None or result.error is not None:
                raise BenchError(f"generate_batch: no answer: {getattr(result, 'error', None)}")
            if result.is_finished():
                count = wanted.pop(result.request_id)
                _check("generate_batch", len(result.generated_tokens), count)
        return time.perf_counter() - begin


PEERS = {"generate": generate, "generate_batch": generate_batch}


def _lengths(job):
    return len(job[0]), job[1]


def _check(name, came, wanted):
    if came != wanted:
        raise BenchError(f"{name}: wanted {wanted} tokens, got {came}")


def _config(max_new_tokens, eos_token_id):
    return GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, pad_token_id=0, do_sample=False
    )


@contextmanager
def _own_attention(model):
    network = model.network
    inherited = network.generation_config
    network.set_attn_implementation(model.dense_implementation)
    network.generation_config = GenerationConfig()  # no penalty of the checkpoint's own joins in
    try:
        yield
    finally:
        network.generation_config = inherited
        network.set_attn_implementation(IMPLEMENTATION)
