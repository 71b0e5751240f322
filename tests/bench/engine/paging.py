"""`python -m tests.bench paging`: how much memory paging saves, for the choice of a block size.

A workload goes through the real scheduler and the real cache with the same memory cut into blocks
of several sizes; tokens come out of the air. A flat cache, which gives each sequence a row for the
longest, is a cache whose blocks are rows. A slot is idle where it belongs to a sequence and holds
no token of it; a free block serves any sequence, so nothing else can be wasted. All is counted:
the same on every machine.
"""

from statistics import fmean
from typing import NamedTuple

import kvcore
from model.control.config import SchedulerConfig
from model.control.request import Request
from model.control.scheduler import Scheduler
from tests.bench.engine.requests import SHAPES, make_requests, serve, total_lengths
from tests.bench.measure import Row, Spread

HEADINGS = {"paging": "Steps until all requests of a workload are answered, with the same memory."}


def add_flags(parser):
    parser.add_argument("--workload", choices=SHAPES, default="uniform")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--memory-rows", type=int, default=32, help="of the longest request")


def rows(options):
    shape = SHAPES[options.workload]
    shape = shape._replace(num_requests=16) if options.quick else shape
    requests = make_requests(shape, 10_001)
    longest = max(total_lengths(requests))
    num_slots = options.memory_rows * longest // (8 if options.quick else 1)
    for size in (*[size for size in options.block_sizes if size < longest], longest):
        replayed = Replay(kvcore.KVCacheManager(1 + num_slots // size, size))
        serve(replayed, requests)
        running, used, idle = zip(*replayed.samples, strict=True)
        stats = replayed.scheduler.stats
        kind = "a row for each sequence, as in a flat cache" if size == longest else "blocks"
        yield Row(
            group="paging",
            case=f"{num_slots:,} slots in {kind} of {size:,} tokens.",
            subject="kvcore",
            unit="steps",
            cost=Spread(*[float(stats.num_steps)] * 3),
            rates={
                "% of used slots idle": 100 * sum(idle) / sum(used),
                "requests run in the mean": fmean(running),
                "at most": max(running),
                "preempted": stats.num_preemptions,
            },
        )


class _Output(NamedTuple):
    request: Request
    token_ids: tuple[int, ...] = (0,)

    def take_text(self):
        return ""


class Replay:
    """Takes requests and runs steps as an engine does; `samples`: running, used and idle slots."""

    def __init__(self, kv):
        self.samples = []
        limits = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=256)
        self.scheduler = Scheduler(kv, limits)
        self._kv = kv
        self._num_requests = 0

    def add_request(self, prompt, params):
        request = Request(self._num_requests, prompt, params)
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    def step(self):
        step = self.scheduler.schedule()
        sampling = [chunk.request for chunk in step.chunks if chunk.samples]
        planned = {chunk.request.request_id: chunk.num_tokens for chunk in step.chunks}
        stats = self._kv.stats()
        written = sum(
            one.num_computed_tokens + planned.get(one.request_id, 0)
            for one in self.scheduler.running
        )
        blocks = sum(len(one.running_sequence.block_table) for one in self.scheduler.running)
        used = self._kv.num_usable_blocks - stats.num_free_blocks
        size = self._kv.block_size
        self.samples.append((len(self.scheduler.running), used * size, blocks * size - written))
        tokens = {
            one.request_id: (7919 * one.request_id + one.num_tokens) % 50_000 for one in sampling
        }
        self.scheduler.update(step, tokens)
        return [_Output(request) for request in sampling]
