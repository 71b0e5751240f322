"""How many blocks there are: what was asked for, what is free, what can be used."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import backends
from model import EngineConfig, InvalidArgumentError
from model.attention.batch import prompt_step
from model.caches.layout import LayerShape, plan_layout
from model.caches.memory import cgroup_rooms, host_free_bytes, plan_memory, show_bytes
from model.cli.settings import num_bytes
from model.engine import Engine
from model.forward import warm_up
from model.forward.network import PagedNetwork
from model.forward.warm_up import compile_network
from tests.model.networks import build
from tests.model.reference import ReferenceBackend

MIB, GIB = 1 << 20, 1 << 30
# 1024 bytes a token: 16 KiB a block of 16.
LAYOUT = plan_layout([LayerShape(2, 64, torch.float32)])
READING = [LayerShape(2, 64, torch.float32, reads=number) for number in (None, 0, 0)]
HYBRID = plan_layout([LayerShape(2, 64, torch.float32, window) for window in (None, 32)])


def plan(free_bytes, *, layout=LAYOUT, is_gpu=False, beside=None, **sizes):
    return plan_memory(
        EngineConfig(**sizes), layout, is_gpu=is_gpu, free_bytes=free_bytes, beside=beside
    )


@pytest.mark.parametrize(
    ("free", "is_gpu", "sizes", "num_blocks", "reason"),
    [
        (GIB, False, {"num_blocks": 9}, 9, "as asked for"),
        (GIB, True, {"num_blocks": 9}, 9, "as asked for"),
        (None, False, {"num_blocks": 9}, 9, "as asked for"),
        (GIB, False, {"kv_memory_bytes": 100 * MIB}, 6400, "as asked for"),
        (GIB, True, {"kv_memory_bytes": 100 * MIB + 1}, 6400, "as asked for"),
        (GIB, True, {"kv_memory_fraction": 0.25}, 16384, "0.25 of the free memory"),
        (GIB, False, {"kv_memory_fraction": 0.25}, 16384, "0.25 of the free memory"),
        (10 * GIB, True, {}, 589824, "0.9 of the free memory"),
        (10 * GIB, False, {}, 65536, "default"),
        (None, False, {}, 65536, "default"),
        (MIB, False, {}, 32, "0.5 of the free memory, by default"),
        (GIB, False, {"expected_lengths": (16, 17)}, 4, "all that the requests can use"),
        (
            MIB,
            False,
            {"expected_lengths": (10**6,)},
            32,
            "0.5 of the free memory, by default",
        ),
    ],
)
def test_what_was_asked_for_decides_and_else_what_is_free(free, is_gpu, sizes, num_blocks, reason):
    decided = plan(free, is_gpu=is_gpu, **sizes)
    assert (decided.num_blocks, decided.reason) == (num_blocks, reason)
    assert decided.kv_bytes == LAYOUT.kv_bytes(num_blocks, 16)


def test_requests_that_are_expected_count_their_windows_and_a_chunk():
    # 1000 tokens in chunks of 64: 63 blocks for all of them; a window of 32 and a chunk: 7.
    decided = plan(GIB, layout=HYBRID, expected_lengths=(1000,), max_num_batched_tokens=64)
    assert decided.num_blocks == 1 + 63 + 7


def test_a_block_costs_what_it_takes_in_the_draft_models_cache_too():
    small = plan_layout([LayerShape(1, 64, torch.float32)])  # 512 bytes a token
    asked = {"kv_memory_bytes": 96 * MIB, "draft_model": "small"}
    both = plan(GIB, beside=small, **asked)
    assert (both.num_blocks, both.kv_bytes) == (4096, 96 * MIB)
    line = both.describe(LAYOUT, small)
    assert line.endswith("; layers: 1 full-attention; draft model's layers: 1 full-attention")
    with pytest.raises(InvalidArgumentError, match=r"40000 blocks of 16 tokens take 937\.5 MiB"):
        plan(900 * MIB, beside=small, num_blocks=40_000)
    assert plan(900 * MIB, num_blocks=40_000).num_blocks == 40_000


def test_each_request_of_a_step_has_a_row_and_one_for_each_draft():
    assert EngineConfig(max_num_seqs=64).max_rows == 64
    assert [
        EngineConfig(**how).most_drafts for how in ({"drafts": "ngram"}, {"draft_model": "t"})
    ] == [8, 4]
    for how in ({"drafts": "ngram"}, {"draft_model": "small"}):
        assert EngineConfig(max_num_seqs=64, draft_tokens=8, **how).max_rows == 64 * 9
        limits = EngineConfig(max_num_seqs=64, max_num_batched_tokens=100, **how)
        assert limits.max_rows == 100


class _Gpu:
    """Of a network as `free_bytes` sees it, and of torch.cuda, on a machine without one."""

    def __init__(self, monkeypatch):
        for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, 2 * GIB))
        for name in ("compile_network", "prompt_step", "sample"):
            monkeypatch.setattr(warm_up, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peaks.pop(0))
        self.peaks = [3 * MIB, 2 * MIB]
        self.done = []

    def compile_network(self, network, _):
        self.done.append(("compile", network.num_blocks))
        compile_network(network, EngineConfig(compile=True))

    def prompt_step(self, num_tokens, num_rows, block_size, num_groups, _):
        self.done.append(("step", num_tokens, num_rows))
        return prompt_step(num_tokens, num_rows, block_size, num_groups, torch.device("cpu"))

    def sample(self, logits, _):
        self.done.append(("sample", len(logits)))


def networks_on_a_gpu(monkeypatch, count):
    """Networks whose device is a GPU where it is first asked for."""
    backend = backends.get_backend("numba")
    networks = [PagedNetwork(build("qwen3", 25), backend) for _ in range(count)]
    kinds = iter([SimpleNamespace(type="cuda")])
    cpu = torch.device("cpu")
    monkeypatch.setattr(PagedNetwork, "device", property(lambda _: next(kinds, cpu)))
    return networks


@pytest.mark.parametrize("guess", [None, "ngram"])
def test_the_largest_step_is_measured_with_all_its_rows_when_all_networks_are_ready(
    guess, monkeypatch
):
    gpu, networks = _Gpu(monkeypatch), networks_on_a_gpu(monkeypatch, 2)
    rows = 20 * 9 if guess else 20
    config = EngineConfig(max_num_seqs=20, max_num_batched_tokens=300, drafts=guess)
    assert warm_up.free_bytes(networks, config) == GIB - 3 * MIB
    measured = [("step", 300, rows), ("sample", rows)]
    assert gpu.done == [("compile", 1), ("compile", 1), *measured, *measured]
    assert [each.mode for each in networks] == ["traced", "traced"]
    assert [each.num_blocks for each in networks] == [0, 0]


def test_a_step_that_does_not_fit_is_told_and_leaves_no_cache(monkeypatch):
    def fail(*_):
        raise torch.cuda.OutOfMemoryError

    _Gpu(monkeypatch)
    monkeypatch.setattr(warm_up, "prompt_step", fail)
    (network,) = networks_on_a_gpu(monkeypatch, 1)
    with pytest.raises(InvalidArgumentError, match="max_num_batched_tokens: a step of 300 tokens"):
        warm_up.free_bytes([network], EngineConfig(max_num_batched_tokens=300))
    assert network.num_blocks == 0


@pytest.mark.parametrize(
    ("free", "sizes", "message"),
    [
        (MIB, {"num_blocks": 64}, "num_blocks: 64 blocks of 16 tokens take 1.0 MiB, and 972.8 KiB"),
        (MIB, {"block_size": 2**20, "num_blocks": 2}, "2 blocks of 1048576 tokens take 2.0 GiB"),
        (MIB, {"kv_memory_bytes": MIB}, "kv_memory_bytes: wanted at most 972.8 KiB, .* 1.0 MiB"),
        (
            MIB,
            {"kv_memory_bytes": 32767},
            "two blocks of 16 tokens take 32.0 KiB, the cache has 32.0 KiB",
        ),
        (MIB, {"kv_memory_fraction": 0.01}, "kv_memory_fraction: two blocks of 16 .* has 10.2 KiB"),
        (
            GIB,
            {"block_size": 2**20},
            "two blocks of 1048576 tokens take 2.0 GiB, the cache has 512.0 MiB",
        ),
        (None, {"kv_memory_fraction": 0.5}, "kv_memory_fraction: free memory is unknown"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_allocated(free, sizes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        plan(free, **sizes)


@given(
    free=st.integers(0, 1 << 40),
    is_gpu=st.booleans(),
    block_size=st.sampled_from([1, 16, 4096]),
    size=st.one_of(
        st.just({}),
        st.builds(lambda n: {"num_blocks": n}, st.integers(2, 1 << 30)),
        st.builds(lambda n: {"kv_memory_bytes": n}, st.integers(1, 1 << 41)),
        st.builds(lambda f: {"kv_memory_fraction": f}, st.floats(0.001, 1)),
    ),
)
def test_a_plan_has_two_blocks_and_never_more_than_is_free(free, is_gpu, block_size, size):
    try:
        decided = plan(free, is_gpu=is_gpu, block_size=block_size, **size)
    except InvalidArgumentError:
        return
    assert decided.num_blocks >= 2
    assert decided.kv_bytes == decided.num_blocks * block_size * 1024 <= free


def test_the_line_says_what_was_decided_and_what_layers_see():
    line = plan(GIB, layout=HYBRID, num_blocks=1000).describe(HYBRID)
    assert line == (
        "KV cache: 1,000 blocks of 16 tokens, 15.6 MiB of 1.0 GiB free (as asked for); "
        "layers: 1 full-attention, 1 sliding-window of 32 tokens; in 2 layer groups"
    )
    reading = plan_layout(READING)
    line = plan(GIB, layout=reading, num_blocks=1000).describe(reading)
    assert " 15.6 MiB of " in line
    assert line.endswith("; layers: 1 full-attention, 2 shared-KV")


def test_on_a_cpu_an_engine_asks_the_system_and_refuses_what_is_not_there(monkeypatch):
    monkeypatch.setattr(warm_up, "host_free_bytes", lambda: 100_000)
    config = EngineConfig(num_blocks=2, block_size=2**20)
    with pytest.raises(
        InvalidArgumentError, match=r"blocks of 1048576 tokens take 1\.0 GiB, and 9"
    ):
        Engine(build("qwen3"), ReferenceBackend(), config)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_the_largest_step_runs_on_a_cache_of_the_null_block_alone_and_writes_nothing(architecture):
    network = PagedNetwork(build(architecture), backends.get_backend("numba"))
    network.allocate(1, 4)
    step = prompt_step(50, 3, 4, len(network.layout.windows), network.device)
    assert network.logits(step).shape == (3, 320)
    assert not any(storage.any() for storage in network.caches.storages)


def test_the_system_says_what_is_free():
    assert host_free_bytes() > MIB


@pytest.mark.parametrize(
    ("membership", "files", "rooms"),
    [
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "max",
                "a/memory.max": "1000",
                "a/memory.current": "700",
                "a/memory.stat": "anon 5\ninactive_file 200",
            },
            [500],
        ),
        (
            "5:cpu:/a\n4:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "1000",
                "memory/a/memory.usage_in_bytes": "900",
                "memory/a/memory.stat": "total_inactive_file 100",
                "memory/memory.limit_in_bytes": "5000",
                "memory/memory.usage_in_bytes": "1000",
            },
            [200, 4000],
        ),
        ("0::/gone\n", {}, []),
    ],
)
def test_a_control_group_leaves_its_limit_less_what_it_cannot_drop(
    tmp_path, membership, files, rooms
):
    (tmp_path / "membership").write_text(membership, encoding="utf-8")
    root = tmp_path / "root"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    assert list(cgroup_rooms(tmp_path / "membership", root)) == rooms


def test_a_size_is_bytes_with_a_unit_or_without():
    assert [num_bytes(text) for text in ("1", "2K", "3MiB", "4GB", " 5T ")] == [
        1,
        2 * 1024,
        3 * MIB,
        4 * GIB,
        5 << 40,
    ]
    for wrong in ("", "-1", "1.5G", "1X", "1 KB", "9" * 20, "\u0663"):
        with pytest.raises(ValueError, match="wanted bytes"):
            num_bytes(wrong)
    assert [show_bytes(size) for size in (5, 2048, 3 * GIB, 5 << 50)] == [
        "5 B",
        "2.0 KiB",
        "3.0 GiB",
        "5120.0 TiB",
    ]
