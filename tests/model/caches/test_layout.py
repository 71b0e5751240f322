"""Which layers share a table and memory, what that takes, and what a window saves."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import backends
import kvcore
from model import EngineConfig, SamplingParams
from model.caches.kv_caches import KVCaches
from model.caches.layout import LayerShape, plan_layout
from model.engine import Engine
from tests.model.networks import build

CPU = torch.device("cpu")
WINDOWS = st.sampled_from([None, None, 4, 9])


def layers(*windows):
    return [LayerShape(2, 16, torch.float32, window) for window in windows]


def pattern(num_layers, every, window=512):
    """Window layers, but one in each `every` layers sees all."""
    return layers(*[None if n % every == 0 else window for n in range(1, num_layers + 1)])


@pytest.mark.parametrize(
    ("num_layers", "every", "depth", "num_groups"),
    [
        (26, 2, 13, 2),  # Gemma 2, 2B: 13 and 13
        (24, 2, 12, 2),  # GPT-OSS, 20B
        (26, 6, 4, 7),  # Gemma 3, 1B: 4 see all, 22 a window: 1 and 6 groups, 2 places unused
        (62, 6, 11, 6),  # Gemma 3, 27B: 10 and 52: 1 and 5
        (36, 100, 36, 1),  # windows alone
    ],
)
def test_known_networks_have_few_groups_and_little_waste(num_layers, every, depth, num_groups):
    layout = plan_layout(pattern(num_layers, every))
    assert (len(layout.place_bytes), len(layout.windows)) == (depth, num_groups)


def test_a_long_text_in_gemma_3_takes_a_sixth_of_what_layers_without_windows_would_take():
    """The numbers of the page on hybrid models: Gemma 3 1B, 32,768 tokens, blocks of 16."""
    every = range(1, 27)
    shapes = [LayerShape(1, 256, torch.bfloat16, 512 if n % 6 else None) for n in every]
    layout = plan_layout(shapes)
    needed = kvcore.peak_blocks(32768, 16, groups=layout.groups(16), chunk=1)
    assert layout.kv_bytes(needed, 16) == 140.375 * 2**20
    assert layout.token_bytes * 32768 == 832 * 2**20


@given(windows=st.lists(WINDOWS, min_size=1, max_size=40))
def test_every_layer_has_a_place_of_its_own_among_those_that_see_the_same(windows):
    layout = plan_layout(layers(*windows))
    assert len(set(layout.places)) == len(windows)
    for window, (group, place) in zip(windows, layout.places, strict=True):
        assert layout.windows[group] == window
        assert 0 <= place < len(layout.place_bytes)
    assert {group for group, _ in layout.places} == set(range(len(layout.windows)))
    assert list(layout.windows) == sorted(layout.windows, key=lambda w: (w is not None, w or 0))
    for window in set(windows):
        size = windows.count(window)
        held = layout.windows.count(window) * len(layout.place_bytes)
        assert size <= held <= size + size / 8


@given(
    windows=st.lists(WINDOWS, min_size=1, max_size=12),
    read=st.lists(st.integers(0, 11), max_size=12),
    block_size=st.integers(1, 5),
)
def test_a_layer_that_reads_another_has_its_place_and_costs_nothing(windows, read, block_size):
    own = layers(*windows)
    readers = [replace(own[n % len(own)], reads=n % len(own)) for n in read]
    alone, layout = plan_layout(own), plan_layout([*own, *readers])
    same = {"layers": alone.layers, "numbers": alone.numbers, "places": alone.places}
    assert replace(layout, **same) == alone
    assert layout.token_bytes == alone.token_bytes
    caches = KVCaches.allocate(layout, 3, block_size, CPU)
    for number, reader in enumerate(readers, start=len(own)):
        assert layout.places[number] == layout.places[reader.reads]
        caches.layers[reader.reads].k[2] = number
        assert bool((caches.layers[number].k[2] == number).all())


SHAPES = st.one_of(
    st.builds(LayerShape, st.integers(1, 3), st.integers(1, 5), st.just(torch.float16), WINDOWS),
    st.builds(
        LayerShape, st.just(1), st.integers(4, 6), st.just(torch.float16), WINDOWS,
        value_dim=st.integers(1, 4),
    ),
)  # fmt: skip


@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=12),
    num_blocks=st.integers(1, 5),
    block_size=st.integers(1, 5),
)
def test_the_footprint_is_what_is_allocated(shapes, num_blocks, block_size):
    layout = plan_layout(shapes)
    caches = KVCaches.allocate(layout, num_blocks, block_size, CPU)
    allocated = sum(storage.untyped_storage().nbytes() for storage in caches.storages)
    assert layout.kv_bytes(num_blocks, block_size) == allocated
    for shape, cache in zip(shapes, caches.layers, strict=True):
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        assert all(tensor.shape == size for tensor in cache.tensors)
        assert cache.layout == shape.slot
        assert len(cache.tensors) == (1 if shape.value_dim else 2)
    # Written through a layer, a block is found in the storage of its place, and in no other block.
    group, place = layout.places[-1]
    tensors = caches.layers[-1].tensors
    tensors[-1][-1] = 1.0
    written = [storage.any(dim=1).tolist() for storage in caches.storages]
    nothing = [False] * num_blocks
    before = sum(len(sizes) for sizes in layout.place_bytes[:place])
    assert written[before + len(tensors) - 1] == [*nothing[1:], True]
    assert sum(row == nothing for row in written) == len(written) - 1
    assert 0 <= group < len(layout.windows)


def test_a_latent_takes_the_bytes_of_its_numbers_and_no_more():
    """DeepSeek-V3: 512 + 64 numbers; in full 128 keys of 192 and as many values of 128."""
    latents = plan_layout([LayerShape(1, 576, torch.bfloat16, value_dim=512)] * 61)
    assert latents.token_bytes == latents.slot_bytes == 61 * 576 * 2


@functools.cache
def long_run(architecture, **sizes):
    """Blocks held by each group before each of the last steps of 120 tokens, window 7."""
    backend = backends.get_backend("numba")
    engine = Engine(build(architecture), backend, EngineConfig(block_size=4, **sizes))
    request = engine.add_request(list(range(100)), SamplingParams(max_tokens=20))
    held = []
    while engine.has_unfinished:
        engine.step()
        if not request.is_finished:
            tables = request.running_sequence.tables
            held.append([len(table.blocks) - table.num_null for table in tables])
    return engine, held


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "gpt_oss"])
def test_a_long_sequence_holds_only_a_window_in_the_window_group(architecture):
    engine, held = long_run(architecture, num_blocks=60, max_num_batched_tokens=16)
    assert engine.network.layout.windows == (None, 7)
    # Every token of the 119 computed: 30 blocks of 4. Of a window of 7: two or three.
    assert held[-1][0] == 30
    assert all(window <= 3 for _, window in held)
    # A chunk of 16 is written beside the window: at the peak 30 blocks and less than 7.
    assert engine.kv.stats().peak_used_blocks < 30 + 7
    # With one table for all layers the same pool would have to hold every layer's every token.
    assert engine.kv.stats().peak_used_blocks < 0.62 * 2 * 30


def test_a_network_of_windows_alone_runs_in_a_pool_smaller_than_its_text():
    engine, held = long_run("mistral", num_blocks=8, max_num_batched_tokens=16)
    assert engine.kv.num_usable_blocks * 4 < 120
    assert held[-1][0] <= 3
    assert engine.stats.num_preemptions == 0
