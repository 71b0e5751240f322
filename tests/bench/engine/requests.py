"""Which requests are sent, and sending them to an engine.

- `uniform` is nano-vLLM's: lengths drawn evenly, tokens drawn evenly below 10,001, from Python's
  generator, in the same order; with 256 requests of 100 to 1024 tokens and seed 0 they are the very
  requests of its benchmark, with 133,966 output tokens.
- `chat`: conversations that begin with one shared system prompt; a turn is sent when the one before
  has been answered, and contains it, its answer and a new message.
- `shared-prefix`: one long beginning, and an ending for each request.
- `copy`: prompts that say the same several times, for drafts that look it up.
"""

import random
import time
from dataclasses import replace
from typing import NamedTuple

from model.control.params import SamplingParams


class Shape(NamedTuple):
    """The parameters of a workload; lengths are (least, most)."""

    num_requests: int = 256
    input_len: tuple[int, int] = (100, 1024)
    output_len: tuple[int, int] = (100, 1024)
    prefix_len: int = 0
    turns: int = 1
    copies: int = 1


SHAPES = {
    "uniform": Shape(),
    "chat": Shape(128, (16, 96), (16, 128), prefix_len=96, turns=4),
    "shared-prefix": Shape(64, (16, 64), (16, 64), prefix_len=512),
    "copy": Shape(8, (32, 64), (128, 128), copies=4),
}


class BenchRequest(NamedTuple):
    """Its own tokens, how many to generate, and the request whose prompt and answer come before."""

    tokens: list[int]
    max_tokens: int
    follows: int | None = None


class Served(NamedTuple):
    """A whole prompt, its answer, and the seconds at which it was sent and its tokens came."""

    prompt: list[int]
    output: list[int]
    sent_s: float
    token_s: list[float]


def make_requests(shape, vocab_size, seed=0):
    """The requests of a shape, in the order in which they are sent. O(all tokens)."""
    draw = random.Random(seed)

    def tokens(count):
        return [draw.randint(0, 10_000) % vocab_size for _ in range(count)]

    prefix = tokens(shape.prefix_len)
    count = shape.num_requests
    prompts = [tokens(draw.randint(*shape.input_len)) * shape.copies for _ in range(count)]
    outputs = [draw.randint(*shape.output_len) for _ in range(count)]
    first = -(-count // shape.turns)
    return [
        BenchRequest(prefix + prompt, output)
        if number < first
        else BenchRequest(prompt, output, follows=number - first)
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def total_lengths(requests):
    """The tokens that each request comes to, what it follows included."""
    totals = []
    for one in requests:
        before = 0 if one.follows is None else totals[one.follows]
        totals.append(before + len(one.tokens) + one.max_tokens)
    return totals


def serve(engine, requests, params=None, most_at_once=None):
    """Send requests to an engine that has nothing else to do; in their order, what was answered."""
    params = params or SamplingParams()
    ready = [number for number, one in enumerate(requests) if one.follows is None][::-1]
    sent, times, in_flight = {}, {}, {}
    clock = time.perf_counter
    begin = clock()
    while ready or in_flight:
        while ready and len(in_flight) < (most_at_once or len(requests)):
            number = ready.pop()
            own = requests[number]
            before = [] if own.follows is None else sent[own.follows][0].tokens
            terms = replace(params, max_tokens=own.max_tokens, ignore_eos=True)
            request = engine.add_request([*before, *own.tokens], terms)
            sent[number] = request, clock() - begin
            in_flight[request.request_id], times[number] = number, []
        outputs = engine.step()
        now = clock() - begin
        for output in outputs:
            number = in_flight[output.request.request_id]
            times[number] += [now] * len(output.token_ids)
            if output.request.is_finished:
                output.take_text()  # decoded, as for any client
                del in_flight[output.request.request_id]
                ready += [n for n, one in enumerate(requests) if one.follows == number]
    return [
        Served(request.prompt_tokens, request.output_tokens, at, times[number])
        for number, (request, at) in sorted(sent.items())
    ]
