"""From the times of tokens to the numbers of a benchmark, under the names that vLLM gives them.

Decides what each number means: `ttft` is from a request's arrival to its first token; `itl` the
time between one token and the next, over all tokens; `tpot` a request's mean of it; `e2el` from
arrival to the last token; a throughput is a total over the duration, which ends with the last
token.

Does not know: engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request: its lengths, and when what happened, in seconds from the begin of the run.

    Attributes:
        num_prompt_tokens: what it sent.
        num_cached_tokens: how much of that was found in the cache.
        arrival_s: when it was due.
        token_s: when each of its tokens came, at least one.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    arrival_s: float
    token_s: tuple[float, ...]


def summarize(timelines: Sequence[Timeline]) -> dict[str, float]:
    """The numbers of a run, named as `vllm bench serve` names them. O(tokens * log(tokens))."""
    duration = max(line.token_s[-1] for line in timelines)
    num_input = sum(line.num_prompt_tokens for line in timelines)
    num_output = sum(len(line.token_s) for line in timelines)
    numbers: dict[str, float] = {
        "duration": duration,
        "completed": len(timelines),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(timelines) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }
    samples = {
        "ttft": [line.token_s[0] - line.arrival_s for line in timelines],
        "tpot": [
            (line.token_s[-1] - line.token_s[0]) / (len(line.token_s) - 1)
            for line in timelines
            if len(line.token_s) > 1
        ],
        "itl": [gap for line in timelines for gap in np.diff(line.token_s).tolist()],
        "e2el": [line.token_s[-1] - line.arrival_s for line in timelines],
    }
    for name, seconds in samples.items():
        numbers |= _distribution(name, seconds)
    return numbers


def _distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and 99th percentile, in ms; zeros where there is nothing."""
    values = np.asarray(seconds or [0.0]) * 1000
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }
