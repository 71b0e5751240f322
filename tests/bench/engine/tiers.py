"""`python -m tests.bench tiers`: what host memory and disk behind the prefix cache gain and cost.

`restart`: the first token of a prompt that an engine of another process life has stored on disk,
beside computing it. `agents`: the hit rate of agents whose contexts need several times the pool,
counted. `miss`: looking for a prompt that is nowhere, beside a step that decodes one token.
"""

import random
import tempfile
import time

from model.cli.start import start, warm_up
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.control.submission import Submission
from model.engine import Engine
from tests.bench.engine.networks import CONFIGS, loader
from tests.bench.measure import Row, spread

HEADINGS = {
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
    parser.add_argument("--only", choices=HEADINGS)


def rows(options):
    if options.only in (None, "agents"):
        yield from _agents()
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
