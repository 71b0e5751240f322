"""What the server costs beside the engine alone: `python -m model.serve.cost`.

Decides: the same requests, a fixed number at once or at random arrival times, are run by the engine
alone and through HTTP, in turns, in one process, whose CPU time is counted beside the clock's; the
client is a process of its own (`load.py`). Where requests come in time, what counts is how long the
first token takes.

Does not know: how either works.
"""

import asyncio
import json
import math
import statistics
import subprocess  # the client is ours
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import uvicorn

from model.async_engine import AsyncEngine
from model.bench.networks import load
from model.bench.options import WeightOptions
from model.bench.serve import Arrivals, Served
from model.bench.serve import serve as run_alone
from model.bench.workloads import BenchRequest
from model.cli.exits import leaves
from model.cli.options import ModelOptions
from model.cli.settings import Flags
from model.cli.start import make_engine
from model.control.config import EngineConfig
from model.control.settings import check_settings, setting
from model.engine import Engine
from model.errors import ModelError
from model.serve.app import create_app
from model.serve.config import ServeConfig
from model.serve.head import BoundedProtocol
from model.serve.listener import listen
from model.serve.load import Job, Loaded
from model.serve.process import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """What is sent, and how often."""

    rounds: int = setting(3, help="measurements of each", least=1)
    num_requests: int = setting(256, help="requests of a measurement", least=2)
    concurrency: int = setting(64, help="requests at once", least=1)
    input_len: int = setting(32, help="prompt tokens of a request", least=1)
    output_len: int = setting(64, help="output tokens of a request", least=1)
    whole: bool = setting(False, help="do not stream answers")
    request_rate: float = setting(
        math.inf,
        help="requests per second with random arrival times; inf: as soon as there is room",
        above=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of one turn: by the clock, of the processor, until each first token.

    Attributes:
        client_s: of the processor for the client, which `processor_s` does not have.
    """

    clock_s: float
    processor_s: float
    first_s: list[float]
    client_s: float = 0.0


def measure(engine: Engine, options: CostOptions) -> list[tuple[Turn, Turn]]:
    """The turns: of the engine alone, and through the server. Seconds each."""
    config = ServeConfig(port=0, max_waiting=options.num_requests)
    listener = listen(config)
    host, port = listener.getsockname()[:2]
    job = Job(
        host=host,
        port=port,
        num_requests=options.num_requests,
        concurrency=options.concurrency,
        input_len=options.input_len,
        output_len=options.output_len,
        vocab_size=engine.vocab_size,
        streams=not options.whole,
    )
    arrivals = Arrivals(rate=options.request_rate, max_concurrency=options.concurrency)
    if math.isfinite(options.request_rate):
        job = replace(job, due_s=arrivals.due(options.num_requests))
    requests = [BenchRequest(tuple(prompt), job.output_len) for prompt in job.prompts()]

    def alone(one: Engine) -> Turn:
        _empty(one)
        return _timed(lambda: _first(run_alone(one, requests, arrivals)))

    async def turns() -> list[tuple[Turn, Turn]]:
        asynchronous = AsyncEngine(engine, max_waiting=options.num_requests)
        server = Server(
            uvicorn.Config(
                create_app(asynchronous, config),
                http=BoundedProtocol,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        asynchronous.start()
        await asynchronous.ready()
        found = []
        try:
            for _ in range(options.rounds):
                first = await asynchronous.call(alone)
                await asynchronous.call(_empty)
                # The engine serves meanwhile, so this runs beside it.
                found.append((first, await asyncio.to_thread(_timed, lambda: _send(job))))
        finally:
            server.should_exit = True
            await serving
        return found

    with asyncio.Runner(loop_factory=uvicorn.Config(None).get_loop_factory()) as runner:  # type: ignore[arg-type]
        return runner.run(turns())


def _empty(engine: Engine) -> None:
    """Let no turn find what one before it computed."""
    engine.empty_cache(enable_caching=engine.config.enable_prefix_caching)


def _timed(run: Callable[[], tuple[list[float], Loaded | None]]) -> Turn:
    """Time a run, by the client's clock if there is one."""
    clock_s, processor_s = time.perf_counter(), time.process_time()
    first_s, loaded = run()
    took_s = time.perf_counter() - clock_s if loaded is None else loaded.duration_s
    client_s = 0.0 if loaded is None else loaded.processor_s
    return Turn(took_s, time.process_time() - processor_s, first_s, client_s)


def _first(served: Sequence[Served]) -> tuple[list[float], None]:
    """How long the first tokens took."""
    return [one.timeline.token_s[0] - one.timeline.arrival_s for one in served], None


def _send(job: Job) -> tuple[list[float], Loaded]:
    """Have the client send its requests; the seconds until each answer began, and for all.

    Raises:
        ModelError: an answer was not whole.
    """
    command = [sys.executable, "-m", "model.serve.load"]
    ran = subprocess.run(  # noqa: S603  # likewise
        command, input=json.dumps(asdict(job)), capture_output=True, text=True, check=True
    )
    loaded = Loaded(**json.loads(ran.stdout))
    if loaded.num_failed:
        raise ModelError(f"{loaded.num_failed} of {job.num_requests} answers were not whole")
    return loaded.first_s, loaded


def _run() -> None:
    flags = Flags("python -m model.serve.cost", "What the server costs beside the engine.", "")
    flags.add("what is sent", CostOptions)
    flags.add("what runs", ModelOptions)
    flags.add("what runs", WeightOptions)
    flags.add("how large the cache and a step are, and how it runs", EngineConfig)
    said = flags.parse()
    options = said.of(CostOptions)
    of_weights = partial(load, dummy_weights=said.of(WeightOptions).dummy_weights)
    engine = make_engine(said.of(ModelOptions), said.of(EngineConfig), load=of_weights)
    tokens = options.num_requests * options.output_len
    if math.isfinite(options.request_rate):
        print("ms to the first token, mean, median, 99th percentile: engine alone | served")
        for alone, served in measure(engine, options):
            print(f"{_milliseconds(alone.first_s)} | {_milliseconds(served.first_s)}")
        return
    print(
        "engine alone, tokens/s | served | ratio | "
        "processor us a token, alone | served | ratio | and of the client"
    )
    for alone, served in measure(engine, options):
        print(
            f"{tokens / alone.clock_s:,.0f} | {tokens / served.clock_s:,.0f} | "
            f"{alone.clock_s / served.clock_s:.3f} | {alone.processor_s / tokens * 1e6:.0f} | "
            f"{served.processor_s / tokens * 1e6:.0f} | "
            f"{alone.processor_s / served.processor_s:.3f} | {served.client_s / tokens * 1e6:.0f}"
        )


def _milliseconds(seconds: Sequence[float]) -> str:
    """Mean, median and 99th percentile."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    numbers = (statistics.fmean(seconds), cuts[49], cuts[98])
    return " ".join(f"{1000 * each:.2f}" for each in numbers)


if __name__ == "__main__":
    with leaves():
        _run()
