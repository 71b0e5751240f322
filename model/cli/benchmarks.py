"""Latency and throughput of an engine in this process.

Decides: that prompts are new in each batch, so that none is found in the prefix cache.

Does not know: servers (`load_client.py`), flags.
"""

import random
import time

from model.cli.bars import bar
from model.cli.measured import COMMON_TOKENS, Report
from model.cli.options import LatencyOptions, ThroughputOptions
from model.control.params import SamplingParams
from model.control.submission import Submission
from model.engine import Engine


def sized(asked: LatencyOptions | ThroughputOptions) -> tuple[int, ...]:
    """Return the computed tokens of all requests that run at once, for the cache. O(them)."""
    count = asked.batch_size if isinstance(asked, LatencyOptions) else asked.num_prompts
    return (asked.input_len + asked.output_len - 1,) * count


def measured(engine: Engine, asked: LatencyOptions | ThroughputOptions) -> Report:
    """Run the measurement that the options name. O(its steps).

    Raises:
        ModelError: a request ended with an error.
    """
    return (
        latency(engine, asked) if isinstance(asked, LatencyOptions) else throughput(engine, asked)
    )


def latency(engine: Engine, asked: LatencyOptions) -> Report:
    """Run one batch after another. All its steps."""
    draw, times = random.Random(0), []  # noqa: S311  # prompts
    total = asked.num_iters_warmup + asked.num_iters
    with bar("batches", total) as advance:
        for _ in range(total):
            times.append(_run(engine, draw, asked.batch_size, asked.input_len, asked.output_len))
            advance()
    report = Report()
    report.lines.append(
        f"latency: {asked.num_iters} batches of {asked.batch_size} requests, each "
        f"{asked.input_len} tokens in and {asked.output_len} out"
    )
    counted = times[asked.num_iters_warmup :]
    report.add_times("latency_ms", "a batch", counted)
    report.add_times("token_ms", "a step", [each / asked.output_len for each in counted])
    return report


def throughput(engine: Engine, asked: ThroughputOptions) -> Report:
    """Run all requests together. All their steps."""
    draw = random.Random(0)  # noqa: S311  # prompts
    seconds = _run(
        engine, draw, asked.num_prompts, asked.input_len, asked.output_len, is_shown=True
    )
    report = Report()
    report.lines.append(
        f"throughput: {asked.num_prompts} requests at once, each {asked.input_len} tokens in and "
        f"{asked.output_len} out"
    )
    num_in, num_out = (asked.num_prompts * each for each in (asked.input_len, asked.output_len))
    report.add_rates(
        seconds,
        {"requests": asked.num_prompts, "tokens": num_in + num_out, "output tokens": num_out},
    )
    return report


def _run(
    engine: Engine,
    draw: random.Random,
    count: int,
    input_len: int,
    output_len: int,
    *,
    is_shown: bool = False,
) -> float:
    """Run new requests to their ends; the seconds that it takes."""
    tokens = range(min(COMMON_TOKENS, engine.vocab_size))
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    asked = [Submission(draw.choices(tokens, k=input_len), params) for _ in range(count)]
    began_s = time.perf_counter()
    requests = engine.submit_all(asked)
    with bar("requests", count, is_wanted=is_shown) as advance:
        while engine.has_unfinished:
            for output in engine.step():
                output.take_text()
                advance(int(output.request.is_finished))
    took_s = time.perf_counter() - began_s
    for request in requests:
        if request.error is not None:
            raise request.error
    return took_s
