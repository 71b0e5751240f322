"""`python -m tests.bench tiers`: what host memory and disk behind the prefix cache gain and cost.

`first`: the first token of a prompt that is computed, in the pool, in host memory or on disk, by
its length; of a disk with its files in the page cache, and without. `beside`: a decode step of
many requests while all is stored, and while a prompt loads. `restart`: the first token of a prompt
that an engine of another process life has stored on disk, beside computing it. `agents`: the hit
rate of agents whose contexts need several times the pool, counted. `miss`: looking for a prompt
that is nowhere, beside a step that decodes one token.
"""

import os
import random
import tempfile
import time
from pathlib import Path

from model.cli.start import start, warm_up
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.control.submission import Submission
from model.engine import Engine
from tests.bench.engine.networks import CONFIGS, loader
from tests.bench.measure import Row, spread

HEADINGS = {
    "first": "The first token of a prompt, by where its KV is.",
    "beside": "A decode step of many requests, by what moves meanwhile.",
    "restart": "The first token of a prompt that is on disk.",
    "agents": "Agents in turn; tokens that are found, of those that an unbounded pool finds.",
    "miss": "A prompt that is nowhere.",
}
_ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def add_flags(parser):
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-0.6b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt (default: 4000)")
    parser.add_argument("--rounds", type=int, default=3, help="restarts (default: 3)")
    parser.add_argument(
        "--lengths",
        type=lambda text: [*map(int, text.split(","))],
        default=[1000, 4000, 16_000],
        help="tokens of the prompts of `first` and `beside` (default: 1000,4000,16000)",
    )
    parser.add_argument(
        "--decodes", type=int, default=64, help="requests that decode (default: 64)"
    )
    parser.add_argument("--only", choices=HEADINGS)


def rows(options):
    if options.only in (None, "agents"):
        yield from _agents()
    if options.only in (None, "first", "beside"):
        model, backend = start(options.model, "auto", options.dtype, load=loader(options.model))
        lengths = [400] if options.quick else options.lengths
        for length in lengths if options.only != "beside" else ():
            yield from _first(model, backend, options, length)
        if options.only != "first":
            num_decodes = 4 if options.quick else options.decodes
            yield from _beside(model, backend, options, lengths[-1], num_decodes)
    if options.only in (None, "restart", "miss"):
        model, backend = start(options.model, "auto", options.dtype, load=loader(options.model))
        count = 400 if options.quick else options.tokens

        def make(path):
            config = EngineConfig(num_blocks=count // 16 + 40, compile=True, disk=path)
            engine = Engine(model, backend, config)
            warm_up(engine)
            return engine

        with tempfile.TemporaryDirectory() as path:
            yield from _restarts(make, path, options, random.Random(0).choices(range(256), k=count))


def _first_token_ns(engine, prompt):
    begin = time.perf_counter_ns()
    [request] = engine.submit(Submission(prompt, _ONE))
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter_ns() - begin, request


def _made(model, backend, num_blocks, **config):
    engine = Engine(model, backend, EngineConfig(num_blocks=num_blocks, compile=False, **config))
    warm_up(engine)
    return engine


def _settle(engine):
    """Wait until everything is stored."""
    while engine.tiers is not None and (engine.tiers.is_busy or engine.tiers.tiers.num_published):
        engine.tiers.wait()
        engine.tiers.tend()


def _empty_pool(engine):
    """Forget what the pool has, but not what the tiers have."""
    watcher, engine.kv.pool.watcher = engine.kv.pool.watcher, None
    engine.kv.reset()
    engine.kv.pool.watcher = watcher


def _drop_page_cache(path):
    for file in Path(path).rglob("*.kvseg"):
        number = os.open(file, os.O_RDWR)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def _first(model, backend, options, length):
    """Prompts of which the pool holds one: each time they come, their KV is elsewhere."""
    draw, case = random.Random(length), f"{options.model}, {length:,} tokens."
    prompts = [draw.choices(range(256), k=length) for _ in range(max(2, options.rounds))]
    room = length // 16 + 24

    def took(engine, prompts, before=None):
        times, loaded = [], 0
        for prompt in prompts:
            _settle(engine)
            if before is not None:
                before()
            ns, request = _first_token_ns(engine, prompt)
            times.append(ns)
            loaded += request.num_loaded_tokens
        _settle(engine)
        return times, loaded

    def row(name, times, loaded=0):
        ratios = {"computing": spread([computed / each for each in times])}
        rates = {"of the tokens loaded": loaded / length / len(times)}
        return Row("first", case, name, "ns", spread(times), ratios=ratios, rates=rates)

    engine = _made(model, backend, room)
    took(engine, prompts[:1])
    times, _ = took(engine, prompts)
    computed = spread(times).median
    yield row("computed", times)
    yield row("in the pool", took(engine, prompts[-1:] * options.rounds)[0])
    engine.end()
    size = engine.network.layout.kv_bytes(room * (len(prompts) + 1), 16)
    with tempfile.TemporaryDirectory() as path:
        for tier, config in {
            "host memory": {"host_memory_bytes": size},
            "disk": {"disk": path, "disk_bytes": 4 * size},
        }.items():
            engine = _made(model, backend, room, **config)
            yield row(f"computed, with {tier}", took(engine, prompts)[0])
            cached = " (page cache)" if tier == "disk" else ""
            for number in range(2):
                again = ", again" if number else ""
                yield row(f"from {tier}{cached}{again}", *took(engine, prompts))
            if tier == "disk":
                yield row(
                    "from disk (cold)", *took(engine, prompts, lambda: _drop_page_cache(path))
                )
            engine.end()


def _beside(model, backend, options, length, num_decodes, context=500, num_steps=160):
    """Steps of requests that decode, in engines with and without host memory, in turns."""
    room = num_decodes * ((context + 4 * num_steps) // 16 + 2) + length // 16 + 60
    draw, long = random.Random(1), random.Random(2).choices(range(256), k=length)
    engines = {"without tiers": _made(model, backend, room)}
    size = engines["without tiers"].network.layout.kv_bytes(3 * room, 16)
    engines["all is stored"] = _made(model, backend, room, host_memory_bytes=size)
    case = f"{options.model}, {num_decodes} requests of {context} tokens."
    stored = engines["all is stored"]
    _first_token_ns(stored, long)
    _settle(stored)
    times = {name: [] for name in (*engines, "a prompt loads")}
    for _ in range(options.rounds):
        _empty_pool(stored)
        for name, engine in engines.items():
            ends = SamplingParams(max_tokens=num_steps, ignore_eos=True)
            for _ in range(num_decodes):
                engine.submit(Submission(draw.choices(range(256), k=context), ends))
            steps, waiting = [], None
            while engine.has_unfinished:
                if len(steps) == num_steps // 2 and engine is stored:
                    [waiting] = engine.submit(Submission(long, _ONE))
                is_loading = waiting is not None and waiting in engine.tiers
                begin = time.perf_counter_ns()
                engine.step()
                steps.append(time.perf_counter_ns() - begin)
                if is_loading:
                    times["a prompt loads"].append(steps[-1])
            times[name] += steps[num_steps // 4 : num_steps // 2]
            _settle(engine)
    plain = spread(times["without tiers"]).median
    for name, found in times.items():
        if found:
            ratios = {"without tiers": spread([plain / spread(found).median])}
            yield Row("beside", case, name, "ns", spread(found), ratios=ratios)
    for engine in engines.values():
        engine.end()


def _restarts(make, path, options, prompt):
    engine = make(path)
    misses = []
    begin_load = engine.tiers.begin

    def timed(request):
        begin = time.perf_counter_ns()
        begin_load(request)
        misses.append(time.perf_counter_ns() - begin)
        return False

    engine.tiers.begin = timed
    computed_ns, _ = _first_token_ns(engine, prompt)
    looked = {}
    for name, common in (("nothing in the pool", 0), ("all but 40 in the pool", len(prompt) - 40)):
        misses.clear()
        for number in range(8):
            other = (prompt[common] + 1 + number) % 256
            _first_token_ns(engine, [*prompt[:common], other, *range(39)])
        looked[name] = spread(misses)
    [request] = engine.submit(
        Submission(prompt[:64], SamplingParams(max_tokens=8, ignore_eos=True))
    )
    steps = []
    while engine.has_unfinished:
        begin = time.perf_counter_ns()
        engine.step()
        steps.append(time.perf_counter_ns() - begin)
    engine.end()
    if options.only != "miss":
        loaded = []
        for _ in range(options.rounds):
            engine = make(path)
            took_ns, request = _first_token_ns(engine, prompt)
            loaded.append(took_ns)
            stats = engine.tiers.stats
            engine.end()
        case = f"{options.model}, {len(prompt):,} tokens, {request.num_loaded_tokens:,} loaded."
        computing = spread([computed_ns])
        ratios = {"computing": spread([computed_ns / each for each in loaded])}
        yield Row("restart", case, "computed", "ns", computing)
        rates = {"s of it loading": stats.loading_s}
        yield Row("restart", case, "from disk", "ns", spread(loaded), ratios=ratios, rates=rates)
    step, case = spread(steps[2:]), f"{options.model}, {len(prompt):,} tokens."
    for name, found in looked.items():
        ratios = {"decode step": spread([step.median / found.median])}
        yield Row("miss", case, name, "ns", found, ratios=ratios)


def _agents(num_agents=12, num_turns=6, turn=96):
    """The same trace in an unbounded pool, in a quarter of it, and there with each tier."""
    model, backend = start("nothing", "auto", "auto", load=loader("nothing"))
    num_blocks = num_agents * (num_turns * turn // 16 + 1)
    with tempfile.TemporaryDirectory() as path:
        hits = {}
        for name, sizes in {
            "unbounded pool": {"num_blocks": num_blocks + 8},
            "a quarter": {"num_blocks": num_blocks // 4},
            "a quarter, host": {"num_blocks": num_blocks // 4, "host_memory_bytes": 1 << 30},
            "a quarter, disk": {"num_blocks": num_blocks // 4, "disk": path},
        }.items():
            engine = Engine(model, backend, EngineConfig(**sizes))
            draw = random.Random(1)
            contexts = [draw.choices(range(256), k=turn) for _ in range(num_agents)]
            found = total = 0
            took = []
            for _ in range(num_turns):
                for context in contexts:
                    took_ns, request = _first_token_ns(engine, context)
                    took.append(took_ns)
                    found += request.num_cached_tokens
                    total += len(context)
                    context.extend(draw.choices(range(256), k=turn))
            hits[name] = found / total
            engine.end()
            case = f"{num_agents} agents, {num_turns} turns of {turn} tokens, {total:,} in all."
            whole = hits["unbounded pool"]
            row = Row("agents", case, name, "ns", spread(took))
            row.hit_rate, row.wanted_hit_rate = hits[name], whole
            yield row
