"""Requests of mixed lengths in batch-invariant mode, computed in every way: one digest.

python -m tests.model.same_digest      # 10,000 requests on the shape of Qwen3-0.6B, on a GPU
"""

import functools
import hashlib
import random
import time

from model import EngineConfig, SamplingParams
from model.cli.start import start
from model.engine import Engine
from tests.bench.engine.networks import loader

AT_ONCE = 256


def requests(count, vocab_size, longest):
    """Prompts of 1 to `longest` tokens, half of which begin like others; some repeat themselves."""
    rng = random.Random(count)
    prefixes = [[rng.randrange(vocab_size) for _ in range(64)] for _ in range(16)]
    prompts, params = [], []
    for number in range(count):
        own = rng.randint(longest // 2, longest) if number % 200 == 199 else rng.randint(1, 60)
        prompt = [rng.randrange(vocab_size) for _ in range(own)]
        if number % 2 and number % 200 != 199:
            prompt = rng.choice(prefixes) + prompt
        if number % 3 == 0:
            prompt = prompt[:20] * 3
        prompts.append(prompt)
        drawn = {"temperature": 0.9, "top_p": 0.95, "seed": number} if number % 4 else {}
        shown = {"logprobs": 2} if number % 5 == 0 else {}
        most = 4 + number % 61
        params.append(SamplingParams(max_tokens=most, ignore_eos=True, **drawn, **shown))
    return prompts, params


def digests(engine, prompts, params):
    """Of each request: its tokens and their log-probabilities."""
    done = engine.generate(prompts, params)
    return [hashlib.sha256(repr(one.tokens).encode()).hexdigest() for one in done]


def check(model, backend, count, *, few_blocks, at_once=AT_ONCE, report=lambda _: None, **fields):
    """Compute requests in batches, with hits, in chunks, preempted, drafted, alone; one digest.

    Args:
        model: on the backend's device.
        backend: of the engines.
        count: of the requests in batches, and with hits; a fifth of them in the other ways (the
            longest where they are preempted), and a hundredth alone.
        few_blocks: KV blocks of the engines that are to preempt requests.
        at_once: requests of a batch.
        report: is called with a line about each way.
        fields: of every engine.

    Raises:
        AssertionError: a request has other bits in one way, or a way was not what it should be.
    """
    config = model.network.config
    longest = min(1500, config.max_position_embeddings - 64)
    prompts, params = requests(count, config.vocab_size, longest)

    def engine_of(**more):
        sizes = {"max_num_seqs": at_once, "max_num_batched_tokens": 2048, **fields, **more}
        engine = Engine(model, backend, EngineConfig(batch_invariant=True, **sizes))
        engine.prepare()
        return engine

    def same(way, engine, numbers):
        began = time.perf_counter()
        found = digests(engine, [prompts[n] for n in numbers], [params[n] for n in numbers])
        differ = [n for n, one in zip(numbers, found, strict=True) if one != wanted[n]]
        assert not differ, f"{way}: {len(differ)} of {len(numbers)} differ, first {differ[0]}"
        report(f"{way}: {len(numbers)} requests are equal, {time.perf_counter() - began:.1f} s")
        return engine.stats

    engine = engine_of()
    wanted = digests(engine, prompts, params)
    hit_tokens = engine.stats.num_hit_tokens
    report(f"in batches: digest {hashlib.sha256(''.join(wanted).encode()).hexdigest()[:16]}")
    assert same("again, with hits", engine, range(count)).num_hit_tokens > 2 * hit_tokens
    some = range(count // 5)
    long = sorted(range(count), key=lambda n: -params[n].max_tokens)[: count // 5]
    for way, more, did in (
        (
            "in chunks",
            {"max_num_batched_tokens": at_once + 7},
            lambda _: max(len(prompts[n]) for n in some) > 2 * (at_once + 7),
        ),
        (
            "preempted, recomputed",
            {"num_blocks": few_blocks, "swap_memory_bytes": 0},
            lambda stats: stats.num_preemptions and not stats.num_swaps,
        ),
        (
            "preempted, swapped",
            {"num_blocks": few_blocks, "swap_memory_bytes": 1 << 30},
            lambda stats: stats.num_swaps,
        ),
        ("with drafts", {"drafts": "ngram"}, lambda stats: stats.num_draft_tokens),
    ):
        stats = same(way, engine_of(**more), long if "preempted" in way else some)
        assert did(stats), (way, stats)
    same("alone", engine_of(max_num_seqs=1), range(count // 100))


def main():
    """On a GPU, with random weights."""
    kind = "qwen3-0.6b"
    model, backend = start(kind, "triton", "bfloat16", load=loader(kind))
    report = functools.partial(print, flush=True)
    check(model, backend, 10_000, few_blocks=600, num_blocks=4000, report=report)


if __name__ == "__main__":
    main()
