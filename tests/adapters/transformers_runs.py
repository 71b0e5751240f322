"""Transformers' continuous batching with the stock cache and with kvcore's, beside each other.

`python -m tests.adapters.transformers_runs` prints what both compute for the same requests, and
how many texts of networks with soft caps, and with layers that keep a state, are those of plain
`generate`.
"""

import random
import time
import warnings
from operator import eq

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, logging

import kvcore
from kvcore.adapters.transformers import install
from tests.adapters.tiny import draw_tokens, gemma_2, network, recurrent

RECURRENT = (
    "Qwen3_5", "Qwen3_5MoeText", "Qwen3Next", "Lfm2", "Lfm2Moe", "FalconH1", "Jamba", "NemotronH",
    "Bamba", "GraniteMoeHybrid", "Zamba2", "OlmoHybrid", "MiniMax", "Zaya", "KimiLinear",
    "BailingHybrid", "Zamba", "Mamba2", "InklingText", "Rwkv",
)  # fmt: skip
WAIT_S = 60
PAGE = 4


def sizes(num_blocks, **more):
    return ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=num_blocks,
        **{"max_batch_tokens": 32, "max_requests_per_batch": 6, **more},
    )


def greedy(num_return_sequences=1):
    made = GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=-1)
    made.num_return_sequences = num_return_sequences  # twins, which its own check refuses
    return made


class Run:
    """What a model's continuous batching makes of some prompts, and what that took."""

    def __init__(self, model, prompts, config, generation=None, cancelled=()):
        self.computed = self.starved = 0
        self.tokens = {}
        generation = generation or greedy()
        manager = model.init_continuous_batching(generation, config)
        processor = manager.batch_processor = manager._create_batch_processor()
        self._count(processor)
        self.cache = processor.cache
        self.request_ids = [manager.add_request(list(prompt)) for prompt in prompts]
        for number in cancelled:
            manager.cancel_request(self.request_ids[number])
        wanted = generation.num_return_sequences * len(prompts) - len(cancelled)
        wall, cpu = time.perf_counter(), time.process_time()
        manager.start()  # with all of it in the queue: every run schedules the same
        try:
            self._collect(manager, wanted)
            self.wall_s, self.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        finally:
            manager.stop()
            manager.destroy()

    def _collect(self, manager, wanted):
        while len(self.tokens) < wanted:
            result = manager.get_result(timeout=WAIT_S)
            assert result is not None, manager.background_thread_status.fatal_error
            assert result.error is None, result.error
            if result.is_finished():
                self.tokens[result.request_id] = result.generated_tokens

    def _count(self, processor):
        batches = processor.inputs_and_outputs
        prepare = batches.prepare_batch_tensors

        def counted(requests_in_batch, **more):
            self.starved += len(processor.scheduler.starved_requests)
            self.computed += sum(future.query_length for future in requests_in_batch)
            prepare(requests_in_batch=requests_in_batch, **more)

        batches.prepare_batch_tensors = counted


def prompts_that_share(count, seed=1):
    numbers = random.Random(seed)
    prefixes = [draw_tokens(seed + n, 24) for n in range(3)]
    return [
        numbers.choice(prefixes)[: numbers.choice([24, 20, 13])]
        + draw_tokens(seed * 1000 + n, numbers.randrange(1, 12))
        for n in range(count)
    ]


def both(kind, prompts, num_blocks, generation=None, backend=None, **more):
    """The stock cache's run, and ours."""
    model = network(kind)
    stock = Run(model, prompts, sizes(num_blocks, **more), generation)
    install(model, backend=backend)
    return stock, Run(model, prompts, sizes(num_blocks, **more), generation)


def hot_and_cold(count):
    """Every third prompt has the same first 32 tokens; the others come once."""
    hot = draw_tokens(0, 32)
    return [
        (hot if n % 3 == 0 else draw_tokens(100 + n, 32)) + draw_tokens(n, 3) for n in range(count)
    ]


def texts_alone(model, prompts, generation=None):
    """What plain `generate` writes for each prompt."""
    return [
        model.generate(torch.tensor([prompt]), generation_config=generation or greedy())[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def texts_that_are_right(model, prompts, backends=("stock", None, "numba")):
    """How many texts are those of plain `generate`: stock, with kvcore, with a backend in it."""
    wanted = texts_alone(model, prompts)
    counts = []
    for backend in backends:
        if backend != "stock":
            install(model, backend=backend)
        made = Run(model, prompts, sizes(200))
        texts = [made.tokens[request_id] for request_id in made.request_ids]
        counts.append(sum(map(eq, texts, wanted)))
    return counts


def what_states_do(kind):
    """How many texts of a family are those of `generate`, and the hits; or why it is refused."""
    model, base = recurrent(kind), draw_tokens(0, 70)
    prompts = [base[: 70 - 20 * (n % 3)] + draw_tokens(n, 5 + n) for n in range(20)]
    try:
        install(model)
    except kvcore.InvalidArgumentError as error:
        return f"refused: {error}"
    wanted = texts_alone(model, prompts)
    config = sizes(20, max_batch_tokens=40)
    config.page_size = 32
    made = Run(model, prompts, config)
    kvcore.check(made.cache.kv)
    right = sum(map(eq, [made.tokens[request_id] for request_id in made.request_ids], wanted))
    return f"{right} of {len(prompts)}, {made.cache.kv.stats().num_hit_tokens} tokens hit"


def main():
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("layers  requests              blocks  computed: stock  kvcore  gave way  same, numba")
    for kind in ("full", "hybrid"):
        for name, prompts, num_blocks, more in (
            ("240 of 3 prefixes", prompts_that_share(240), 200, {}),
            ("240 of 3 prefixes", prompts_that_share(240), 16, {}),
            ("60 hot and cold", hot_and_cold(60), 40, {"max_requests_per_batch": 1}),
        ):
            stock, ours = both(kind, prompts, num_blocks, **more)
            _, with_kernels = both(kind, prompts, num_blocks, backend="numba", **more)
            kvcore.check(ours.cache.kv)
            print(
                f"{kind:7} {name:21} {num_blocks:6}  {stock.computed:15}  {ours.computed:6}"
                f"  {ours.starved:8}  {ours.tokens == stock.tokens}"
                f"  {with_kernels.tokens == stock.tokens}"
            )
    print("Gemma 2, texts that are plain generate's: stock  kvcore  with numba")
    for soft_cap in (1.5, 5.0, None):
        counts = texts_that_are_right(gemma_2(soft_cap), prompts_that_share(60))
        stock, ours, with_kernels = [f"{count} of 60" for count in counts]
        print(f"soft cap {soft_cap!s:31} {stock}  {ours}  {with_kernels}")
    print("Layers that keep a state, in chunks of 40 tokens: texts that are plain generate's")
    for kind in RECURRENT:
        print(f"{kind:18} {what_states_do(kind)}")


if __name__ == "__main__":
    main()
