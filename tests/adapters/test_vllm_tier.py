"""kvcore's tier under vLLM's own `TieringOffloadingManager`. Run where vLLM 0.32 is installed.

python -m pytest -o addopts= -o filterwarnings= tests/adapters/test_vllm_tier.py

vLLM's wheel has no tests of tiers, so these follow what `SecondaryTierManager` documents. Rows of
host memory are written and read as a worker does it; a ghost knows what belongs to every key.
"""

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering", reason="vLLM 0.32 is not installed")

import json
import re
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvcore
from kvcore.adapters import vllm_tier
from kvcore.tiers import TierError
from tests.hang import HANG_S

ROW = 4096
NUM_ROWS = 8
CAPACITY = 16 * (ROW + 1024)


def config(path, capacity=CAPACITY, **options):
    tier = {"type": "kvcore", "module_path": "kvcore.adapters.vllm_tier"}
    tier |= {"path": str(path), "capacity": capacity} | options
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("0", "1"), group_id=0),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": NUM_ROWS * ROW, "secondary_tiers": [tier]},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(name="m", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1,
            data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        kv_cache_layout="NHD",
    )  # fmt: skip


def key(number, group=0):
    return make_offload_key(number.to_bytes(32, "big"), group)


def content(number, about="a"):
    return (f"{number} of {about}, ".encode() * ROW)[:ROW]


class Life:
    """One process: vLLM's manager, its host memory, and the tier below."""

    def __init__(self, about):
        self.spec = TieringOffloadingSpec(about)
        self.manager = self.spec.get_manager()
        [self.tier] = self.manager.secondary_tiers
        self.rows = np.frombuffer(self.spec._scheduler_mmap.mmap_obj, np.uint8).reshape(-1, ROW)
        self.num_requests = 0

    def request(self):
        self.num_requests += 1
        context = ReqContext(f"r{self.num_requests}")
        self.manager.on_new_request(context)
        return context

    def step(self):
        """The end of a step, and of what it has sent on its way."""
        self.manager.on_schedule_end(ScheduleEndContext([], []))
        while self.manager.has_pending_work():
            self.manager.on_schedule_end(ScheduleEndContext([], []))

    def store(self, numbers, about="a"):
        """Compute these chunks and offload them; return whether host memory took them."""
        context = self.request()
        made = self.manager.prepare_store([key(number) for number in numbers], context)
        if made is not None and made.keys_to_store:
            for one, row in zip(made.keys_to_store, made.store_spec.block_ids, strict=True):
                number = int.from_bytes(one[:32], "big")
                self.rows[row] = np.frombuffer(content(number, about), np.uint8)
            self.manager.complete_store(made.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.step()
        return made is not None

    def load(self, number):
        """Return what vLLM would load for a chunk; None: it is nowhere."""
        context = self.request()
        found = self.manager.lookup(key(number), context)
        if found is LookupResult.HIT_PENDING:
            self.step()
            found = self.manager.lookup(key(number), context)
        data = None
        if found is LookupResult.HIT:
            [row] = self.manager.prepare_load([key(number)], context).block_ids
            data = self.rows[row].tobytes()
            self.manager.complete_load([key(number)], context)
        self.manager.on_request_finished(context)
        self.step()
        return data

    def faults(self):
        return self.tier.disk.stats.faults.total()

    def end(self):
        del self.rows
        self.manager.shutdown()


@pytest.fixture
def begin(tmp_path):
    lives = []

    def begin(**changes):
        if lives and hasattr(lives[-1], "rows"):
            lives[-1].end()
        options = changes.pop("options", {})
        lives.append(Life(replace(config(tmp_path / "tier", **options), **changes)))
        return lives[-1]

    yield begin
    if hasattr(lives[-1], "rows"):
        lives[-1].end()


def test_a_restart_finds_what_was_written(begin):
    life = begin()
    for start in (0, 4):
        life.store(range(start, start + 4))
    life = begin()
    assert [life.load(number) for number in range(8)] == [content(number) for number in range(8)]
    assert life.tier.disk.stats.num_hits == 8


PARALLEL = config("").parallel
MODEL = config("").model
GROUP = config("").groups[0]
OTHERS = {
    "model": {"model": replace(MODEL, name="n")},
    "dtype": {"model": replace(MODEL, dtype="float16")},
    "weights": {"options": {"weights": "step 2"}},
    "layout": {"kv_cache_layout": "HND"},
    "ranks": {"parallel": replace(PARALLEL, tp_size=2)},
    "pipeline": {"parallel": replace(PARALLEL, pp_size=2)},
    "block size": {"groups": (replace(GROUP, tokens_per_block=32),)},
    "layers": {"groups": (replace(GROUP, layer_names=("0", "2")),)},
    "hashes": {"cache": OffloadingCacheConfig(tokens_per_hash=8, blocks_per_chunk=1)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_was_written_with_another_meaning_is_a_miss_and_is_counted(begin, name):
    begin().store([1, 2])
    life = begin(**OTHERS[name])
    assert life.load(1) is None
    assert life.tier.disk.stats.faults == {"foreign": 2}
    assert life.tier.get_stats().reduce() == {f"{vllm_tier.FAULTS}:('foreign',)": 2}
    assert life.tier.get_stats() is None
    life.store([1], "b")
    assert life.load(1) == content(1, "b")
    assert begin().load(2) == content(2)


def test_the_files_of_a_local_model_belong_to_the_meaning(begin, tmp_path):
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"old")
    model = replace(MODEL, name=str(weights.parent))
    begin(model=model).store([1])
    assert begin(model=model).load(1) == content(1)
    weights.write_bytes(b"newer")
    assert begin(model=model).load(1) is None


@pytest.mark.parametrize("place", [32 + 128 + 7, 32 + 60, 20])
def test_a_flipped_bit_is_a_miss_and_is_counted(begin, tmp_path, place):
    begin().store([1])
    life = begin()
    life.end()
    [segment] = tmp_path.rglob("*.kvseg")
    data = bytearray(segment.read_bytes())
    data[place] ^= 8
    segment.write_bytes(data)
    life = begin()
    assert life.load(1) is None
    assert life.faults() == 1
    assert life.store([1])


def test_the_capacity_holds_over_restarts(begin, tmp_path):
    for _ in range(3):
        life = begin()
        for number in range(60):
            life.store([number + life.num_requests * 100])
            held = sum(path.stat().st_size for path in tmp_path.rglob("*.kvseg"))
            assert held <= CAPACITY
        assert life.tier.disk.stats.num_records >= 8


def test_a_reset_forgets_what_was_written_because_the_weights_may_be_others(begin):
    life = begin()
    life.store([1])
    life.manager.reset_cache()
    assert life.load(1) is None
    life.store([1], "new weights")
    assert life.load(1) == content(1, "new weights")
    assert begin().load(1) == content(1, "new weights")


def test_the_configured_detector_of_back_pressure_is_asked(begin):
    slow = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}
    limits = {"high_water_s": 1e-9, "low_water_s": 1e-10, "warmup_completions": 1}
    life = begin(options={"backpressure": slow | limits})
    for number in range(9):
        life.store([number])
    assert life.tier.bp_detector.is_under_pressure()
    assert life.tier.bp_detector.stats["store_latency_ema"] > 0
    assert life.tier.disk.stats.num_stored < 9
    life.manager.reset_cache()
    assert not life.tier.bp_detector.is_under_pressure()


def test_the_scheduler_waits_for_nothing_but_a_reset_waits_for_all(begin):
    life = begin()
    go_on, put = threading.Event(), life.tier.disk.put

    def slow(*arguments):
        assert threading.current_thread() is not threading.main_thread()
        go_on.wait(HANG_S)
        return put(*arguments)

    life.tier.disk.put = slow
    jobs = [TransferJob(n, [key(n)], np.array([n]), False, ReqContext("r")) for n in range(3)]
    for job in jobs:
        life.tier.submit_store(job)
    assert life.tier.lookup(key(0), ReqContext("r")) is LookupResult.MISS
    assert [*life.tier.get_finished_jobs()] == []
    threading.Timer(0.05, go_on.set).start()
    life.tier.drain_jobs()
    ended = [*life.tier.get_finished_jobs()]
    assert [one.job_id for one in ended] == [0, 1, 2]
    assert [*life.tier.get_finished_jobs()] == []
    assert life.tier.lookup(key(0), ReqContext("r")) is LookupResult.HIT


def test_a_load_of_which_a_part_is_gone_names_the_rest(begin):
    life = begin()
    life.store([1, 3])
    job = TransferJob(7, [key(1), key(2), key(3)], np.array([5, 6, 7]), True, ReqContext("r"))
    life.tier.submit_load(job)
    [*_, ended] = [life.tier._running[7].result(), *life.tier.get_finished_jobs()]
    assert not ended.success
    assert {*ended.successful_keys} == {key(1), key(3)}
    assert ended.transfer_bytes == 2 * ROW
    assert life.rows[5].tobytes() == content(1)


def test_a_transfer_that_raises_has_failed(begin, monkeypatch):
    life = begin()
    monkeypatch.setattr(life.tier.disk, "get", lambda *_: 1 / 0)
    life.tier.submit_load(TransferJob(7, [key(1)], np.array([5]), True, ReqContext("r")))
    ended = []
    while not ended:
        ended = [*life.tier.get_finished_jobs()]
    assert not ended[0].success


def test_hashes_that_collide_are_not_stored(begin):
    life = begin()
    short = make_offload_key(bytes(16), 0)
    context = life.request()
    made = life.manager.prepare_store([short], context)
    life.manager.complete_store(made.keys_to_store, context)
    life.step()
    assert life.tier.disk.stats.num_records == 0


def test_groups_have_keys_of_their_own(begin):
    life = begin()
    life.store([1])
    assert life.tier.lookup(key(1, 0), ReqContext("r")) is LookupResult.HIT
    assert life.tier.lookup(key(1, 1), ReqContext("r")) is LookupResult.MISS


def test_the_configuration_on_the_page_makes_this_tier(begin):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "vllm.md").read_text(encoding="utf-8")
    told = json.loads(re.search(r"--kv-transfer-config '(.*?)'\n", page, re.DOTALL)[1])
    transfer = KVTransferConfig(**told)
    extra = transfer.kv_connector_extra_config
    assert OffloadingSpecFactory.get_spec_cls(extra) is TieringOffloadingSpec
    [tier] = extra["secondary_tiers"]
    assert vllm_tier.FAULTS in TieringOffloadingSpec.build_metric_definitions(extra)
    del tier["path"]
    life = begin(options=tier)
    assert life.tier.disk.stats.capacity_bytes == 100 << 30
    assert type(life.tier) is vllm_tier.DiskTierManager


def test_a_second_engine_on_a_folder_is_refused_in_one_line(begin, tmp_path):
    begin()
    with pytest.raises(TierError, match="in use by another process") as error:
        TieringOffloadingSpec(config(tmp_path / "tier")).get_manager()
    assert "\n" not in str(error.value)
    two = replace(PARALLEL, data_parallel_size=2)
    about = replace(config(tmp_path / "tier"), parallel=two)
    Life(about).end()


@pytest.mark.parametrize("given", ["", "100", "2KiB", "3 GiB"])
def test_a_capacity_is_a_number_or_a_text_with_a_unit(given):
    wanted = {"100": 100, "2KiB": 2048, "3 GiB": 3 << 30}
    if given:
        assert vllm_tier.bytes_of(given) == wanted[given]
    for wrong in ("", "1 GB", "-1", 0, -5, "0"):
        with pytest.raises(kvcore.InvalidArgumentError, match="capacity"):
            vllm_tier.bytes_of(wrong)


class Machine(RuleBasedStateMachine):
    """Chunks of two weights come, go, are lost and come again; whatever is loaded is right."""

    folder = None

    @initialize()
    def begin(self):
        self.about, self.epochs = "a", {"a": 0, "b": 0}
        self.path = self.folder / uuid.uuid4().hex
        self.life = Life(config(self.path, weights="a"))

    @property
    def truth(self):
        return f"{self.about} {self.epochs[self.about]}"

    @rule(start=st.integers(0, 12), count=st.integers(1, 5))
    def store(self, start, count):
        self.life.store(range(start, start + count), self.truth)

    @rule(number=st.integers(0, 15), count=st.integers(1, 4))
    def load(self, number, count):
        for one in range(number, number + count):
            data = self.life.load(one)
            assert data is None or data == content(one, self.truth)

    @rule()
    def new_weights(self):
        """In the same process, as in reinforcement learning."""
        self.epochs[self.about] += 1
        self.life.manager.reset_cache()

    @rule(about=st.sampled_from("aab"))
    def restart(self, about):
        self.life.end()
        self.about = about
        self.life = Life(config(self.path, weights=about))

    @rule(place=st.integers(0), bit=st.integers(0, 7))
    def a_bit_flips(self, place, bit):
        self.life.end()
        for segment in sorted(self.path.rglob("*.kvseg"))[:1]:
            data = bytearray(segment.read_bytes())
            if data:
                data[place % len(data)] ^= 1 << bit
            segment.write_bytes(data)
        self.life = Life(config(self.path, weights=self.about))

    def teardown(self):
        if hasattr(self, "life"):
            self.life.end()


def run_machine(folder, count, phases=tuple(Phase)):
    Machine.folder = folder
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=count, stateful_step_count=20, deadline=None, database=None, phases=phases
        ),
    )


def test_nothing_wrong_is_ever_loaded(tmp_path):
    run_machine(tmp_path, 30)


BUGS = {
    "a reset keeps the files": ("DiskTierManager", "_hear_of", lambda _, reset: reset),
    "weights mean nothing": ("", "fields_of", lambda *_: {}),
    "keys leave out the hash": ("", "_key_of", lambda one: vllm_tier.key_of(0, bytes(32))),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_machine_sees_a_planted_bug(tmp_path, monkeypatch, name):
    owner, function, broken = BUGS[name]
    monkeypatch.setattr(getattr(vllm_tier, owner) if owner else vllm_tier, function, broken)
    with pytest.raises(AssertionError):
        run_machine(tmp_path, 60, [Phase.generate])
