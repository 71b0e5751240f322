"""`python -m tests.bench host`: what a decode step costs the host, beside the network.

Every phase of a step of the real engine but `forward`, with a network so small that it takes no
time, all requests decoding; and the allocator's share: `step_ahead` and `StepTables` for as many
sequences. Lengths are spread, so in every step one sequence in 16 takes a block.
"""

from functools import partial
from time import thread_time_ns

import numpy as np

import kvcore
from model.cli.start import start
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.control.step import FORWARD, PHASES
from model.engine import Engine
from tests.bench.allocator.ours import OurCache, begin_ahead, step_ahead
from tests.bench.engine.networks import loader
from tests.bench.measure import Row, spread

HEADINGS = {"host": "The processor's time of a decode step; the network takes none."}
_BLOCK_SIZE = 16


def add_flags(parser):
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=128)


def rows(options):
    count, steps = options.num_requests, 16 if options.quick else options.steps
    lengths = [64 + number % _BLOCK_SIZE for number in range(count)]
    num_blocks = 1 + count * ((80 + 2 * steps + count) // _BLOCK_SIZE + 2)
    row = partial(Row, "host", unit="ns", per=(count, "request-step"))
    records = _engine_steps(lengths, steps, num_blocks)
    phases = {name: [] for name in PHASES if name != FORWARD}
    for record in records:
        for name, begin, end in record.phases():
            if name != FORWARD:
                phases[name].append(end - begin)
    for name, times in phases.items():
        yield row(case=f"The phase `{name}`.", subject="engine", cost=spread(times))
    together = list(map(sum, zip(*phases.values(), strict=True)))
    yield row(case="All phases but the network.", subject="engine", cost=spread(together))
    times = _allocator_steps(lengths, steps, num_blocks)
    yield row(case="The allocator alone, for such a step.", subject="kvcore", cost=spread(times))


def _engine_steps(lengths, steps, num_blocks):
    """The records of the steps in which all requests decode."""
    model, backend = start("nothing", "auto", "float32", load=loader("nothing"))
    count = len(lengths)
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_seqs=count,
        max_num_batched_tokens=max(2048, count),
    )
    engine = Engine(model, backend, config)
    terms = SamplingParams(max_tokens=steps + count + 8, ignore_eos=True)
    requests = [  # no two begin alike, or they would share blocks
        engine.add_request([number % 256, number // 256, *[0] * (length - 2)], terms)
        for number, length in enumerate(lengths)
    ]
    while any(request.num_output_tokens == 0 for request in requests):
        engine.step()
    recorder = engine.record()
    for _ in range(steps):
        engine.step()
    for request in requests:
        engine.abort(request)
    return [record for record in recorder.steps if record.num_decode_tokens == count]


def _allocator_steps(lengths, steps, num_blocks):
    cache = OurCache(num_blocks, _BLOCK_SIZE)
    kv = cache.manager
    seqs = [cache.start([number, *[0] * (length - 1)]) for number, length in enumerate(lengths)]
    tokens = [1] * len(seqs)
    begin_ahead(kv, seqs, tokens)
    tables = kvcore.StepTables(lambda rows, width: np.zeros((rows, width), dtype=np.int32))
    tables.update(seqs)
    times = []
    for _ in range(steps):
        begin = thread_time_ns()
        step_ahead(kv, seqs, tokens)
        tables.update(seqs)
        times.append(thread_time_ns() - begin)
    return times
