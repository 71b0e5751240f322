"""`python -m tests.bench recurrent`: a network with recurrent layers beside one that attends only.

Both have random weights, nearly as many. `decode`: steps of the whole engine in which all requests
decode, beside the time that moving weights, states and keys and values takes at the speed at which
this GPU reads 1 GiB. `turn`: the first token of the second turn of a long chat; the first turn has
been computed and is found in the cache as far as it was kept.
"""

import random
import sys
import time
from functools import partial

import torch

from model.cli.start import start, warm_up
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.engine import Engine
from tests.bench.engine.networks import CONFIGS, loader
from tests.bench.kernels.gpu import ceilings
from tests.bench.measure import BenchError, Case, Round, Row, Subject, measure, spread

HEADINGS = {
    "decode": "All requests decode; a step of the whole engine.",
    "turn": "The first token of a chat's second turn.",
}
_PEER = "-attending"


def add_flags(parser):
    known = [name for name in CONFIGS if name + _PEER in CONFIGS]
    parser.add_argument("--model", choices=known, default=known[-1])
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each (default: 1024)")
    parser.add_argument("--steps", type=int, default=64, help="of a round")
    parser.add_argument("--chat", type=int, default=16_384, help="tokens of the first turn")
    parser.add_argument(
        "--message", type=int, nargs="+", default=[8, 64, 256], help="tokens of a second turn"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=HEADINGS)
    parser.add_argument("--no-compile", action="store_true", help="ready half a minute earlier")
    parser.add_argument("--kv-gigabytes", type=float, default=16.0, help="caches of each network")


def rows(options):
    speed = _read_gb_per_s()
    engines = {}
    for name in (options.model, options.model + _PEER):
        begin = time.monotonic()
        model, backend = start(name, "auto", "auto", load=loader(name))
        _tell(f"{name}: loaded in {time.monotonic() - begin:.0f} s; compiles and captures graphs")
        config = EngineConfig(
            kv_memory_bytes=int(options.kv_gigabytes * 1e9),
            max_num_seqs=options.num_requests,
            compile=not options.no_compile,
        )
        engines[name] = Engine(model, backend, config)
        how = warm_up(engines[name])
        _tell(f"{name}: {how}; ready after {time.monotonic() - begin:.0f} s")
        if options.only != "turn":
            yield _decode(name, engines[name], how, options, speed)
            engines[name].empty_cache(enable_caching=True)
    if options.only != "decode":
        yield from _turns(engines, options)


def _tell(line):
    print(line, file=sys.stderr, flush=True)


def _read_gb_per_s():
    if not torch.cuda.is_available():
        return None
    return ceilings(torch.device("cuda"))[0].gb_per_s


def _tokens(engine, count, seed):
    draw, size = random.Random(seed), engine.network.vocab_size
    return [draw.randrange(size) for _ in range(count)]


def _wait(engine):
    if engine.network.device.type == "cuda":
        torch.cuda.synchronize(engine.network.device)


def _decode(name, engine, how, options, speed):
    """Nanoseconds of a step; its share of the bound."""
    count, steps = options.num_requests, 4 if options.quick else options.steps
    rounds = 2 if options.quick else options.rounds
    params = SamplingParams(max_tokens=(rounds + 1) * steps + 64 + count, ignore_eos=True)
    requests = [
        engine.add_request(_tokens(engine, options.context, seed), params) for seed in range(count)
    ]
    while any(request.num_output_tokens == 0 for request in requests):
        engine.step()
    if len(engine.running) < count:
        raise BenchError(f"--kv-gigabytes: {len(engine.running)} of {count} requests fit")
    times, lengths = [], []
    for number in range(rounds + 1):
        _wait(engine)
        begin = time.perf_counter_ns()
        for _ in range(steps):
            engine.step()
        _wait(engine)
        if number:
            times.append((time.perf_counter_ns() - begin) / steps)
            lengths += [request.num_tokens for request in requests]
    for request in requests:
        engine.abort(request)
    while engine.has_unfinished:
        engine.step()
    layout, network = engine.network.layout, engine.model.network
    size = {
        "weights": sum(one.nbytes for one in network.parameters()),
        "states": 2 * count * layout.state_bytes,
        "KV": sum(lengths) // rounds * layout.token_bytes,
    }
    row = Row(
        group="decode",
        case=f"{count} requests of {options.context} tokens; {how}.",
        subject=name,
        unit="ns",
        cost=spread(times),
        per=(count, "token"),
        rates={f"GB of {what}": number / 1e9 for what, number in size.items()},
    )
    if speed is not None:
        bound = sum(size.values()) / speed
        row.ratios = {"bound": spread([bound / one for one in times])}
    return row


def _turns(engines, options):
    first, rounds = (256, 1) if options.quick else (options.chat, options.rounds)
    for message in options.message[: 1 if options.quick else None]:
        runs = [
            (
                Subject(name, None, is_ours=name == options.model),
                partial(_turn, engine, first, message),
            )
            for name, engine in engines.items()
        ]
        most, name = first + 8 + message, f"{first} tokens, 8 of an answer, {message} of a message."
        yield from measure(Case("turn", name, runs, rounds, 1, queried=most, possible=most))


def _turn(engine, first, message):
    """Nanoseconds from the second turn's request to its first token, and the tokens that it hit."""
    seed = engine.stats.num_steps
    prompt = _tokens(engine, first, seed)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    [done] = engine.generate([prompt], params)
    prompt += [*done.request.output_tokens, *_tokens(engine, message, seed + 1)]
    before = engine.stats.num_hit_tokens
    _wait(engine)
    begin = time.perf_counter_ns()
    request = engine.add_request(prompt, params)
    while not request.num_output_tokens:
        engine.step()
    cost = time.perf_counter_ns() - begin
    while engine.has_unfinished:
        engine.step()
    return Round(cost, engine.stats.num_hit_tokens - before)
