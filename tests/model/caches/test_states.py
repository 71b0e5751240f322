"""Where the states of recurrent layers lie in the pages of the KV cache."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.adapters.recurrent import StateKey, StateShape, num_pieces, state_places
from model import EngineConfig
from model.caches.kv_caches import KVCaches
from model.caches.layout import LayerShape, plan_layout
from model.caches.memory import plan_memory
from model.errors import InvalidArgumentError

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def delta_layers(num_layers, num_heads, channels):
    """What layers of gated delta attention keep, with heads of 128 by 128."""
    return [
        shape
        for layer in range(num_layers)
        for shape in (
            StateShape(StateKey(layer, "conv", 0), (channels, 4), BF16),
            StateShape(StateKey(layer, "recurrent", 0), (num_heads, 128, 128), torch.float32),
        )
    ]


@pytest.mark.parametrize(
    ("attention", "states", "block_size", "pieces"),
    [
        ([LayerShape(2, 256, BF16)] * 12, delta_layers(36, 32, 8192), 176, 18),  # Qwen3-Next-80B
        ([LayerShape(4, 256, BF16)] * 8, delta_layers(24, 32, 8192), 144, 12),  # Qwen3.5-4B
    ],
)
def test_pages_of_known_networks_are_small(attention, states, block_size, pieces):
    layout = plan_layout(attention, None, states)
    assert layout.fitting_block_size(16) == block_size
    assert layout.blocks_per_state(block_size) == pieces
    assert layout.groups(block_size) == (
        kvcore.FullAttention(block_size),
        kvcore.RecurrentState(pieces),
    )
    wasted = pieces * layout.page_bytes(block_size) - layout.state_bytes
    assert wasted < 0.1 * layout.state_bytes


def test_a_block_size_stays_where_its_pages_hold_the_state_of_a_layer():
    states = [StateShape(StateKey(n, "conv", 0), (64, 3), BF16) for n in range(5)]
    layout = plan_layout([LayerShape(2, 16, BF16)], None, states)
    assert layout.fitting_block_size(4) == 4
    assert layout.blocks_per_state(4) == 5  # 384 bytes each, in pages of 512
    assert layout.fitting_block_size(2) > 2


def test_a_network_without_states_has_the_blocks_that_it_is_asked_for():
    layout = plan_layout([LayerShape(2, 16, BF16)])
    assert layout.fitting_block_size(1) == 1
    assert layout.blocks_per_state(1) == 0
    assert len(layout.groups(1)) == 1
    assert len(KVCaches.allocate(layout, 3, 1, CPU).storages) == 2  # keys, and values


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
STATES = st.lists(
    st.builds(
        StateShape,
        st.builds(StateKey, st.integers(0, 6), st.sampled_from(["conv", "recurrent"]), st.just(0)),
        st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
        DTYPES,
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda shape: shape.key,
).map(lambda shapes: sorted(shapes, key=lambda shape: shape.key))


@given(states=STATES, block_size=st.integers(1, 4), heads=st.integers(1, 3), dtype=DTYPES)
def test_no_two_tensors_of_a_page_overlap_and_a_layer_is_never_cut(
    states, block_size, heads, dtype
):
    layout = plan_layout([LayerShape(heads, 3, dtype)] * 2, [1, 5], states)
    block_size = layout.fitting_block_size(block_size)
    page = layout.page_bytes(block_size)
    pieces = layout.blocks_per_state(block_size)
    places = [*state_places(states, page)]
    assert {piece for _, piece, _ in places} == set(range(pieces))
    assert num_pieces(states, page) == pieces
    for layer in {shape.key.layer for shape in states}:
        assert len({piece for shape, piece, _ in places if shape.key.layer == layer}) == 1
    ends = [0] * pieces
    for shape, piece, begin in places:
        assert begin >= ends[piece]
        ends[piece] = begin + shape.num_bytes
    assert max(ends) <= page


@given(states=STATES, block_size=st.integers(1, 4))
def test_a_page_holds_keys_and_values_or_a_piece_and_nothing_of_its_neighbours(states, block_size):
    layout = plan_layout([LayerShape(2, 3, torch.float32)] * 2, [1, 5], states)
    block_size = layout.fitting_block_size(block_size)
    caches = KVCaches.allocate(layout, 4, block_size, CPU)
    (pages,) = caches.storages
    assert pages.numel() == layout.kv_bytes(4, block_size)
    views = [tensor for cache in caches.layers for tensor in cache.tensors]
    for view in (*views, *(state.blocks for state in caches.states.values())):
        pages.zero_()
        view[2] = 1.0
        assert bool(view[2].eq(1).all())
        assert bool(pages[2].any())
        assert not bool(pages[[0, 1, 3]].any())
    for number, state in enumerate(caches.states.values()):
        state.blocks[1] = float(number + 1)
    pages[3] = pages[1]  # as a block moves
    for state in caches.states.values():
        assert torch.equal(state.blocks[3], state.blocks[1])


def test_a_pool_that_cannot_hold_a_state_is_refused_by_the_flag_that_sizes_it():
    layout = plan_layout([LayerShape(4, 256, BF16)] * 8, None, delta_layers(24, 32, 8192))
    sizes = EngineConfig(block_size=144, num_blocks=13)
    with pytest.raises(InvalidArgumentError, match=r"^num_blocks: wanted at least 14, .*12 blocks"):
        plan_memory(sizes, layout, is_gpu=False, free_bytes=None)
    small = EngineConfig(block_size=144, kv_memory_bytes=1 << 25)
    with pytest.raises(InvalidArgumentError, match=r"14 blocks of 144 tokens take .*--kv-memory"):
        plan_memory(small, layout, is_gpu=False, free_bytes=None)
    plan = plan_memory(
        EngineConfig(block_size=144, num_blocks=14), layout, is_gpu=False, free_bytes=None
    )
    assert "24 recurrent with 49.5 MiB a state" in plan.describe(layout)
