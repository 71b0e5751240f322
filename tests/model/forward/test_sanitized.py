"""`--sanitize` finds nothing in the runner, changes no token, and finds what is planted."""

import re
import statistics
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import backends
from kvcore.sanitize import SanitizerError
from model import EngineConfig, InvalidArgumentError, SamplingParams, Submission
from model.attention.batch import BatchBuilder
from model.caches.swap import BlockMover
from model.engine import Engine
from model.forward.sanitized import _Owners
from model.load.loader import wrap_network
from tests.model.networks import CONFIGS, build
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

PROMPTS = ["a prompt that both begin with", "a prompt that both begin with, and", "another one"]
SIZES = {"num_blocks": 60, "block_size": 4, "sanitize": True}


def make(architecture="qwen3", backend=None, **sizes):
    inner = backend or backends.get_backend("numba")
    if architecture in CONFIGS:
        model = build(architecture, 3)
    else:
        model = build_network(make_config(architecture, ""), 3)
    if inner.device.type != "cpu":
        model = wrap_network(architecture, model.network.to(inner.device), model.codec)
    return Engine(model, inner, EngineConfig(**{**SIZES, **sizes}))


def tokens(engine, max_tokens=20, num_samples=1, prompts=PROMPTS):
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=4)
    requests = [
        request
        for prompt in prompts
        for request in engine.submit(Submission(prompt, replace(params, n=num_samples)))
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
@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gemma2", "gemma4"])
def test_nothing_is_found_in_the_runner_and_no_token_changes(architecture, sizes):
    engine = make(architecture, **sizes)
    assert tokens(engine) == tokens(make(architecture, **sizes, sanitize=False))
    if "num_blocks" in sizes and architecture == "qwen3":
        assert engine.stats.num_preemptions > 0
        assert (engine.stats.num_loads > 0) == (sizes["swap_memory_bytes"] > 0)


@pytest.mark.parametrize("architecture", ["Llama4TextConfig", "DeepseekV3Config"])
def test_nothing_is_found_in_chunks_and_in_latents(architecture):
    sizes = {"max_num_batched_tokens": 9, "num_blocks": 80}
    engine = make(architecture, **sizes)
    assert tokens(engine) == tokens(make(architecture, **sizes, sanitize=False))
    shape = engine.network.layout
    assert any(shape.chunks) or shape.layers[0].slot.is_latent


def test_nothing_is_found_in_forks():
    engine = make()
    assert tokens(engine, 8, num_samples=3) == tokens(make(sanitize=False), 8, num_samples=3)
    assert engine.stats.num_forks > 0


def test_compiled_passes_are_refused():
    with pytest.raises(InvalidArgumentError, match="sanitize: cannot be combined with compile"):
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


class ReadsAnotherRequestsBlock(Planted):
    """Of the same batch: the first block of its last sequence, for the first."""

    def paged_attention(self, query, cache, batch, terms):
        table = batch.block_table.clone()
        table[0, 0] = table[-1, 0]
        return self.inner.paged_attention(query, cache, changed(batch, block_table=table), terms)


class ReadsABlockOfARequestThatHasEnded(Planted):
    """One that it has seen before and that no sequence of the batch has now."""

    def __init__(self, name="numba"):
        super().__init__(name)
        self.seen = {}

    def paged_attention(self, query, cache, batch, terms):
        table = batch.block_table.clone()
        now = set(table.flatten().tolist())
        if batch.kept is not None:  # a step's, not one that is tried before any
            self.seen |= dict.fromkeys(now - {0})
        stale = [block_id for block_id in self.seen if block_id not in now]
        if stale:
            table[0, 0] = stale[0]
        return self.inner.paged_attention(query, cache, changed(batch, block_table=table), terms)


class ReadsTheNextRowsFirstEntry(Planted):
    """For the last entry of a full row, as where the table is indexed one too far."""

    def paged_attention(self, query, cache, batch, terms):
        table, width = batch.block_table.clone(), batch.block_table.shape[1]
        size = cache.k.shape[1]
        for row, length in enumerate(batch.seq_lens.tolist()[:-1]):
            last = -(-length // size) - 1
            if last == width - 1 or batch.block_table.device.type == "cuda":
                table[row, last] = batch.block_table[row + 1, 0]
        return self.inner.paged_attention(query, cache, changed(batch, block_table=table), terms)


class GivesOtherBits(Planted):
    """Each time, as where it reads what it has not written."""

    calls = 0

    def paged_attention(self, query, cache, batch, terms):
        self.calls += 1
        return self.inner.paged_attention(query, cache, batch, terms) + self.calls


def test_a_kernel_that_gives_other_bits_each_time_is_found():
    with pytest.raises(SanitizerError, match="different bits when it was called again"):
        tokens(make(backend=GivesOtherBits()))


FOREIGN = [
    ReadsAnotherRequestsBlock,
    ReadsABlockOfARequestThatHasEnded,
    ReadsTheNextRowsFirstEntry,
]
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


@pytest.mark.parametrize("kernel", FOREIGN, ids=lambda kernel: kernel.__name__)
def test_a_read_of_another_requests_block_is_named(kernel):
    with pytest.raises(SanitizerError) as caught:
        tokens(make(backend=kernel()))
    found = re.fullmatch(
        r"paged_attention of layer 0: request (\d+) \(s\d+\) has read block (\d+) of (.*)",
        caught.value.message,
    )
    assert found is not None, caught.value.message
    reader, block_id, owner = found.groups()
    if kernel is ReadsABlockOfARequestThatHasEnded:
        assert re.fullmatch(r"no sequence, last written by s\d+", owner)
    else:
        assert re.fullmatch(r"request \d+ \(s\d+\)", owner)
        assert f"request {reader} " not in owner
    assert int(block_id) > 0


OWNERS = st.dictionaries(st.integers(1, 30), st.integers(1, (1 << 7) - 1), max_size=12)


@given(num_rows=st.integers(1, 7), owners=OWNERS)
def test_each_sequence_is_run_without_each_block_that_it_may_not_read(num_rows, owners):
    everyone = (1 << num_rows) - 1
    owners = {block_id: mask & everyone for block_id, mask in owners.items() if mask & everyone}
    found = _Owners(tuple((row, row + 1) for row in range(num_rows)), owners)
    for row in range(num_rows):
        runs = [set(found.readable(kept)) for kept in found.kept() if kept >> row & 1]
        own = {block_id for block_id, mask in owners.items() if mask >> row & 1}
        assert runs
        assert all(own <= run for run in runs)
        assert set.intersection(*runs) == own


def test_a_batch_costs_few_runs_of_attention():
    alone = _Owners(tuple((row, row + 1) for row in range(64)), {n: 1 << n for n in range(64)})
    assert len(alone.kept()) == 12
    shared = _Owners(alone.rows, alone.of | {64: (1 << 64) - 1, 65: (1 << 40) - 1})
    assert len(shared.kept()) == 13  # all share a block: no other sequence is left


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
    "architecture",
    [
        pytest.param(name, marks=ON_A_GPU)
        for name in ("mistral", "gemma2", "gpt_oss", "DeepseekV3Config", "Llama4TextConfig")
    ],
)
def test_nothing_is_found_on_a_gpu_in_windows_chunks_and_latents(architecture):
    sizes = {"eager": True, "block_size": 8, "max_num_batched_tokens": 20}
    backend = backends.get_backend("triton")
    engine = make(architecture, backend, **sizes)
    assert tokens(engine) == tokens(make(architecture, backend, **sizes, sanitize=False))


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(kernel, marks=ON_A_GPU, id=kernel.__name__) for kernel in [*KERNELS, *FOREIGN]],
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


@pytest.mark.parametrize(
    ("architecture", "fault"),
    [("qwen3", fault) for fault in BATCHES]
    + [("Llama4TextConfig", fault) for fault in (swaps_two_entries, shifts_the_rows)],
)
def test_a_planted_fault_of_a_batch_is_found(monkeypatch, architecture, fault):
    right = BatchBuilder.build

    def wrong(self, step, rows_drawn=None):
        built = right(self, step, rows_drawn)
        chunks = built.paged[-1]  # where there are any: a table of each chunk
        fault(chunks.block_table.numpy(), chunks.slot_mapping.numpy())
        return built

    monkeypatch.setattr(BatchBuilder, "build", wrong)
    with pytest.raises(SanitizerError) as caught:
        tokens(make(architecture))
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
@pytest.mark.parametrize(("num_requests", "most"), [(1, 3), (3, 4), (16, 7)])
def test_a_run_takes_at_most_so_many_times_as_long(num_requests, most):
    """Interleaved, so that both meet the same machine; `pytest -m slow -s` shows the ratios."""
    prompts = [f"{number} prompt, of which each is another one" for number in range(num_requests)]
    ratios = []
    for _ in range(5):
        took = []
        for sanitize in (False, True):
            engine = make(sanitize=sanitize, num_blocks=400, block_size=16)
            tokens(engine, 4, prompts=prompts)
            begun = time.process_time()
            tokens(engine, 60, prompts=prompts)
            took.append(time.process_time() - begun)
        ratios.append(took[1] / took[0])
    print(f"\n{num_requests} requests: {statistics.median(ratios):.1f} times as long")  # noqa: T201
    assert statistics.median(ratios) < most, ratios
