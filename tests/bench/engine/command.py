"""`python -m tests.bench engine`: requests through the engine, and the same through others.

Everything that a server does before its first request happens before the clock starts. Subjects
take turns in one process, each on an empty cache and, but for a peer named after a flag, with the
flags of `model.run` that the command line has. `no-batch-invariant` is a second engine, with a
cache of its own: give `--num-blocks` on a GPU.
"""

from dataclasses import replace
from functools import partial
from statistics import fmean, quantiles

from model.cli.options import ModelOptions
from model.cli.settings import Flags
from model.cli.start import input_errors, start, warm_up
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.engine import TwinEngine, engine_of
from model.errors import ModelError
from tests.bench.engine.networks import CONFIGS, loader
from tests.bench.engine.peers import PEERS
from tests.bench.engine.requests import SHAPES, make_requests, serve, total_lengths
from tests.bench.measure import BenchError, Case, Round, Row, Subject, measure, spread

TAKES_MORE = True
HEADINGS = {
    "all": "All requests are answered; each gets exactly the tokens that it asks for.",
    "each": "Of the engine's last turn: what one request waits for.",
}
UNCACHED, PLAIN = "no-prefix-cache", "no-batch-invariant"


def add_flags(parser):
    parser.add_argument("--workload", choices=SHAPES, default="uniform")
    parser.add_argument(
        "--peer", action="append", default=[], choices=(*PEERS, UNCACHED, PLAIN), help="repeatable"
    )
    parser.add_argument("--rounds", type=int, default=1, help="turns of each")
    for name, kind in (
        ("num_requests", int), ("input_len", _span), ("output_len", _span), ("prefix_len", int),
        ("turns", int), ("copies", int),
    ):  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="else the workload's")
    parser.add_argument("--max-concurrency", type=int, help="requests in flight (default: all)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=1.0)


def _span(text):
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def engine_options(rest):
    """The model's and the engine's options from flags of `model.run`; a name of `CONFIGS` too."""
    flags = Flags("python -m tests.bench", "", f"--model may also be one of {', '.join(CONFIGS)}.")
    flags.add("model", ModelOptions)
    flags.add("engine", EngineConfig, max_num_seqs=256, compile=True)
    said = flags.parse(rest)
    compiles = not said.given(EngineConfig).get("eager", False)
    return said.of(ModelOptions), said.of(EngineConfig, compile=compiles)


def rows(options):
    try:
        with input_errors():
            yield from _rows(options)
    except ModelError as error:
        raise BenchError(str(error)) from error


def _rows(options):
    what, config = engine_options(options.rest)
    given = {name: getattr(options, name) for name in SHAPES["uniform"]._fields}
    shape = SHAPES[options.workload]._replace(
        **{"num_requests": 4, "output_len": (16, 32)} if options.quick else {}
    )
    shape = shape._replace(**{name: one for name, one in given.items() if one is not None})
    model, backend = start(
        what.path, what.backend, what.dtype, draft_name=config.draft_model,
        num_ranks=what.tp, expert_parallel=what.expert_parallel, load=loader(what.path),
    )  # fmt: skip
    requests = make_requests(shape, model.network.config.get_text_config().vocab_size)
    lengths = tuple([total - 1 for total in total_lengths(requests)])  # the last is not computed
    config = replace(config, expected_lengths=lengths)
    engine = engine_of(model, backend, config)
    how = warm_up(engine)
    if what.follows and isinstance(engine, TwinEngine):
        engine.follow()
        return
    params = SamplingParams(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
    )
    settings = (requests, params, options.max_concurrency)
    served = []
    run = partial(_turn, engine, *settings, served, is_cached=True)
    runs = [(Subject("engine", None, is_ours=True), run)]
    at_once = min(options.max_concurrency or len(requests), config.max_num_seqs, len(requests))
    for name in options.peer:
        if name == UNCACHED:
            run = partial(_turn, engine, *settings, [], is_cached=False)
        elif name == PLAIN:
            plain = engine_of(model, backend, replace(config, batch_invariant=False))
            warm_up(plain)
            run = partial(_turn, plain, *settings, [], is_cached=True)
        else:
            run = partial(_peer_turn, PEERS[name], model, served, at_once)
        runs.append((Subject(name, None), run))
    num_output = sum(one.max_tokens for one in requests)
    name = f"{options.workload}: {len(requests)} requests, {num_output:,} tokens; {how}."
    num_prompt = sum(lengths) + len(lengths) - num_output
    case = Case("all", name, runs, options.rounds, 0, (num_output, "token"), queried=num_prompt)
    case.possible = num_prompt
    for row in measure(case):
        row.rates = {"output tokens/s": num_output / row.cost.median * 1e9}
        yield row
    yield from _each(served[-1])
    engine.end()


def _turn(engine, requests, params, most_at_once, into, *, is_cached):
    """Serve all on an empty cache; wall-clock nanoseconds until the last token, and hits."""
    engine.empty_cache(enable_caching=is_cached and engine.config.enable_prefix_caching)
    before = engine.stats.num_hit_tokens
    try:
        served = serve(engine, requests, params, most_at_once)
    finally:
        engine.empty_cache(enable_caching=engine.config.enable_prefix_caching)
    into.append(served)
    hits = engine.stats.num_hit_tokens - before
    return Round(max(one.token_s[-1] for one in served) * 1e9, hits)


def _peer_turn(peer, model, served, at_once):
    jobs = [(one.prompt, len(one.output)) for one in served[0]]
    return Round(peer(model, jobs, at_once) * 1e9)


def _each(served):
    """Times under the meanings that `vllm bench serve` gives them, of requests sent at once."""
    firsts = [one.token_s[0] - one.sent_s for one in served]
    gaps = [b - a for one in served for a, b in zip(one.token_s, one.token_s[1:], strict=False)]
    for name, values in (("The first token (ttft).", firsts), ("A token after it (itl).", gaps)):
        if len(values) > 1:
            nanoseconds = [1e9 * value for value in values]
            p99 = quantiles(nanoseconds, n=100, method="inclusive")[98]
            rates = {"ms in the mean": fmean(nanoseconds) / 1e6, "ms at the 99th": p99 / 1e6}
            yield Row("each", name, "engine", "ns", spread(nanoseconds), rates=rates)
