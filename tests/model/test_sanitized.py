"""`--sanitize` finds nothing in the runner, changes no token, and finds what is planted."""

import statistics
import time

import numpy as np
import pytest
import torch

import backends
from kvcore.sanitize import SanitizerError
from model import EngineConfig, InvalidArgumentError, SamplingParams, Submission
from model.device.batch import BatchBuilder
from model.device.swap import BlockMover
from model.engine import Engine
from model.loader import wrap_network
from tests.model.networks import build

PROMPTS = ["a prompt that both begin with", "a prompt that both begin with, and", "another one"]
SIZES = {"num_blocks": 60, "block_size": 4, "sanitize": True}


def make(architecture="qwen3", backend=None, **sizes):
    inner = backend or backends.get_backend("numba")
    model = build(architecture, 3)
    if inner.device.type != "cpu":
        model = wrap_network(architecture, model.network.to(inner.device), model.codec)
    return Engine(model, inner, EngineConfig(**{**SIZES, **sizes}))


def tokens(engine, max_tokens=20, num_samples=1):
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=4)
    requests = [
        request
        for prompt in PROMPTS
        for request in engine.submit(Submission(prompt, params, num_samples=num_samples))
    ]
    while engine.has_unfinished:
        engine.step()
    return [request.output_tokens for request in requests]


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"async_scheduling": True},
        {"num_blocks": 22, "swap_memory_bytes": 0},
        {"num_blocks": 22, "swap_memory_bytes": 1 << 20, "async_scheduling": True},
        {"max_num_batched_tokens": 5},
    ],
    ids=["plain", "late", "preempted", "swapped", "chunks"],
)
@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gemma2"])
def test_nothing_is_found_in_the_runner_and_no_token_changes(architecture, sizes):
    engine = make(architecture, **sizes)
    assert tokens(engine) == tokens(make(architecture, **sizes, sanitize=False))
    if "num_blocks" in sizes and architecture == "qwen3":
        assert engine.stats.num_preemptions > 0
        assert (engine.stats.num_loads > 0) == (sizes["swap_memory_bytes"] > 0)


def test_nothing_is_found_in_forks():
    engine = make()
    assert tokens(engine, 8, num_samples=3) == tokens(make(sanitize=False), 8, num_samples=3)
    assert engine.stats.num_forks > 0


def test_compiled_passes_are_refused():
    with pytest.raises(InvalidArgumentError, match="sanitize: wanted this or compile, got both"):
        EngineConfig(sanitize=True, compile=True)


class Planted:
    """A backend with a fault."""

    def __init__(self, name="numba"):
        self.inner = backends.get_backend(name)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class DropsTheLastToken(Planted):
    def store_kv(self, key, value, cache, slot_mapping):
        self.inner.store_kv(key[:-1], value[:-1], cache, slot_mapping[:-1])


class WritesASlotTooFar(Planted):
    def store_kv(self, key, value, cache, slot_mapping):
        self.inner.store_kv(key, value, cache, slot_mapping + 1)


class WritesOneMore(Planted):
    """The row behind the last one, as where a grid is rounded up."""

    def store_kv(self, key, value, cache, slot_mapping):
        self.inner.store_kv(key, value, cache, slot_mapping)
        cache.k.view(-1, *cache.k.shape[2:])[int(slot_mapping[-1]) + 1] = 1.0


class WritesValuesForKeys(Planted):
    def store_kv(self, key, value, cache, slot_mapping):
        self.inner.store_kv(value, key, cache, slot_mapping)


class ForgetsTheValues(Planted):
    def store_kv(self, key, value, cache, slot_mapping):
        before = cache.v.clone()
        self.inner.store_kv(key, value, cache, slot_mapping)
        cache.v.copy_(before)


def changed(batch, **fields):
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    names += ("max_query_len", "max_seq_len")
    return backends.PagedBatch(**{name: getattr(batch, name) for name in names} | fields)


class ReadsATokenTooMany(Planted):
    def paged_attention(self, query, cache, batch, terms):
        longer = changed(batch, seq_lens=batch.seq_lens + 1, max_seq_len=batch.max_seq_len + 1)
        if longer.block_table.shape[1] * cache.k.shape[1] < longer.max_seq_len:
            longer = batch
        return self.inner.paged_attention(query, cache, longer, terms)


class ReadsFromTheStartOfThePool(Planted):
    """As where a table is not looked at."""

    def paged_attention(self, query, cache, batch, terms):
        table = torch.arange(batch.block_table.shape[1], dtype=torch.int32, device=batch.device)
        table = table.expand(batch.block_table.shape).contiguous()
        return self.inner.paged_attention(query, cache, changed(batch, block_table=table), terms)


KERNELS = [
    DropsTheLastToken,
    WritesASlotTooFar,
    WritesOneMore,
    WritesValuesForKeys,
    ForgetsTheValues,
    ReadsATokenTooMany,
    ReadsFromTheStartOfThePool,
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_a_planted_kernel_fault_is_found(kernel):
    with pytest.raises(SanitizerError, match=r"store_kv|paged_attention") as caught:
        tokens(make(backend=kernel()))
    assert caught.value.kind == "kernel"
    assert any(" writes " in call for call in caught.value.calls)


ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("name", ["numba", pytest.param("triton", marks=ON_A_GPU)])
@pytest.mark.parametrize("num_blocks", [60, 8])
def test_nothing_is_found_with_larger_blocks_and_no_token_changes(name, num_blocks):
    backend = backends.get_backend(name)
    sizes = {"num_blocks": num_blocks, "block_size": 16, "swap_memory_bytes": 1 << 20}
    sizes |= {"async_scheduling": True, "eager": True}
    engine = make(backend=backend, **sizes)
    assert tokens(engine) == tokens(make(backend=backend, **sizes, sanitize=False))
    assert bool(engine.stats.num_preemptions) == (num_blocks == 8)


@pytest.mark.parametrize(
    "kernel", [pytest.param(kernel, marks=ON_A_GPU, id=kernel.__name__) for kernel in KERNELS]
)
def test_a_planted_kernel_fault_is_found_on_a_gpu(kernel):
    with pytest.raises(SanitizerError, match=r"store_kv|paged_attention") as caught:
        tokens(make(backend=kernel("triton"), block_size=16))
    assert caught.value.kind == "kernel"


def swaps_two_entries(table, slots):
    if table.shape[1] > 1:
        table[:, [0, 1]] = table[:, [1, 0]]


def shifts_the_rows(table, slots):
    table[:] = np.roll(table, 1, axis=0)


def leaves_a_row_as_it_was(table, slots):
    table[-1] = 0


def moves_the_slots(table, slots):
    slots += 1


def writes_nowhere(table, slots):
    slots[-1] = -1


def writes_into_the_null_block(table, slots):
    slots[0] = 0


BATCHES = [
    swaps_two_entries,
    shifts_the_rows,
    leaves_a_row_as_it_was,
    moves_the_slots,
    writes_nowhere,
    writes_into_the_null_block,
]


@pytest.mark.parametrize("fault", BATCHES, ids=lambda fault: fault.__name__)
def test_a_planted_fault_of_a_batch_is_found(monkeypatch, fault):
    right = BatchBuilder.build

    def wrong(self, step, rows_drawn=None):
        built = right(self, step, rows_drawn)
        fault(built.paged[0].block_table.numpy(), built.paged[0].slot_mapping.numpy())
        return built

    monkeypatch.setattr(BatchBuilder, "build", wrong)
    with pytest.raises(SanitizerError) as caught:
        tokens(make())
    assert caught.value.kind != "kernel"


def test_the_copies_of_forks_that_are_not_made_are_found(monkeypatch):
    monkeypatch.setattr(BlockMover, "copy", lambda self, orders: None)
    with pytest.raises(SanitizerError, match="paged_attention"):
        tokens(make(), 8, num_samples=3)


def test_a_load_that_is_not_made_is_found(monkeypatch):
    right = BlockMover.transfer
    monkeypatch.setattr(BlockMover, "transfer", lambda self, stores, _: right(self, stores, []))
    engine = make(num_blocks=22, swap_memory_bytes=1 << 20)
    with pytest.raises(SanitizerError, match="paged_attention"):
        tokens(engine)


@pytest.mark.slow
def test_it_takes_at_most_three_times_as_long():
    """Interleaved, so that both meet the same machine."""
    ratios = []
    for _ in range(5):
        took = []
        for sanitize in (False, True):
            engine = make(sanitize=sanitize, num_blocks=400, block_size=16)
            tokens(engine, 4)
            begun = time.process_time()
            tokens(engine, 60)
            took.append(time.process_time() - begun)
        ratios.append(took[1] / took[0])
    assert statistics.median(ratios) < 3, ratios
