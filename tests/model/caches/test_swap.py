"""When a preempted request's blocks are worth moving, and that they arrive."""

import copy

import pytest
import torch
from torch import nn

import backends
import kvcore
from model import EngineConfig, InvalidArgumentError, SamplingParams
from model.caches import swap
from model.caches.kv_caches import KVCaches
from model.caches.layout import LayerShape, plan_layout
from model.caches.memory import MemoryPlan
from model.caches.swap import BlockMover, plan_host_blocks
from model.control.request import HostCopy
from model.control.step import Transfer
from model.engine import Engine
from tests.kvcore.sabotage.registry import _with_edit
from tests.model.networks import build
from tests.model.reference import ReferenceBackend

CPU = torch.device("cpu")
MIB, GIB = 1 << 20, 1 << 30
LAYERS = [LayerShape(2, 16, torch.float32)] * 3
LAYOUT = plan_layout(LAYERS)
HYBRID = plan_layout([LayerShape(2, 16, torch.float32, 7), *LAYERS])
MEMORY = MemoryPlan(1024, 16, 1024 * 16 * LAYOUT.slot_bytes, None, "as asked for")


LATENT = plan_layout([LayerShape(1, 24, torch.float32, 7, value_dim=16), *LAYERS])


@pytest.fixture(params=[LAYOUT, LATENT], ids=["pairs", "latents among pairs"])
def caches(request):
    caches = KVCaches.allocate(request.param, num_blocks=6, block_size=4, device=CPU)
    for storage in caches.storages:
        storage.random_(100)  # no NaN, which equals nothing
    return caches


def transfer(blocks, host_copy, first=0):
    return Transfer(None, blocks, host_copy, ((first, first + len(blocks)),), None)


@pytest.mark.parametrize("backend", ["numba"])
def test_stored_blocks_come_back_to_other_places_bit_by_bit(caches, backend):
    mover = BlockMover(backends.get_backend(backend), caches)
    before = copy.deepcopy(caches)
    host = HostCopy(num_tokens=10, places=((0, 3),))
    mover.transfer([transfer((4, 1, 2), host)], [])
    for storage in caches.storages:
        storage.zero_()
    mover.transfer([], [transfer((3, 5), host, first=1)])  # the first was found in the cache
    for cache, old in zip(caches.layers, before.layers, strict=True):
        for now, then in zip(cache.tensors, old.tensors, strict=True):
            assert torch.equal(now[3], then[1])
            assert torch.equal(now[5], then[2])
            assert not now[[0, 1, 2, 4]].any()


GROUPS = [  # stored entries of a group, and how many of them were found in the cache
    ((3, 0), (2, 0)),
    ((3, 2), (2, 1)),
    ((1, 0), (2, 0), (3, 0)),
    ((3, 3), (1, 0), (2, 1)),  # of the first one nothing is missing
]


def check_a_swap(groups):
    """A group with a window has fewer blocks than one that sees all, and each comes back apart."""
    caches = KVCaches.allocate(HYBRID, num_blocks=14, block_size=4, device=CPU)
    for number, storage in enumerate(caches.storages):
        for block in range(14):
            storage[block] = 100 * number + block
    num_stored = sum(count for count, _ in groups)
    stored, free = range(1, 1 + num_stored), iter(range(7, 14))
    places, ranges, into, end = [], [], {}, 0
    for count, found in groups:
        places.append((0, count))
        ranges.append((end + found, end + count))
        into |= {next(free): stored[entry] for entry in range(*ranges[-1])}
        end += count
    host = HostCopy(num_tokens=9, places=tuple(places))
    mover = BlockMover(backends.get_backend("numba"), caches)
    mover.transfer([transfer(tuple(stored), host)], [])
    for storage in caches.storages:
        storage[:7] = -1
    mover.transfer([], [Transfer(None, tuple(into), host, tuple(ranges), None)])
    for number, storage in enumerate(caches.storages):
        for block in range(7, 14):
            assert (storage[block] == 100 * number + into.get(block, block)).all(), block


@pytest.mark.parametrize("groups", GROUPS)
def test_each_group_comes_back_to_its_own_blocks(groups):
    check_a_swap(groups)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("place += stop - first", "place += 0"),  # the second group over the first
        ("content[first:stop]", "content[: stop - first]"),  # all with the first one's content
    ],
)
def test_a_group_that_is_written_over_another_is_seen(groups, old, new, monkeypatch):
    broken = _with_edit("swap", BlockMover.transfer, old, new)
    monkeypatch.setattr(BlockMover, "transfer", broken)
    with pytest.raises((AssertionError, RuntimeError)):
        check_a_swap(groups)


def test_a_network_with_windows_writes_the_same_after_a_swap():
    def written(**sizes):
        config = EngineConfig(block_size=4, **sizes)
        engine = Engine(build("gemma2", 25), ReferenceBackend(), config)
        assert len(engine.kv.groups) > 1
        params = SamplingParams(max_tokens=20, temperature=0)
        texts = engine.generate(["first", "second", "third one"], params)
        return [text.request.output_tokens for text in texts], engine.stats

    small, stats = written(num_blocks=24, swap_memory_bytes=MIB)
    assert stats.num_loads > 0
    assert small == written(num_blocks=90, swap_memory_bytes=0)[0]


def test_copies_of_forks_reach_every_layer(caches):
    before = copy.deepcopy(caches)
    orders = [kvcore.CopyOrder(2, 4, 3, 0), kvcore.CopyOrder(2, 5, 3, 0)]
    BlockMover(backends.get_backend("numba"), caches).copy(orders)
    for now, then in zip(caches.layers, before.layers, strict=True):
        assert torch.equal(now.k[[4, 5]], then.k[[2, 2]])
        assert torch.equal(now.tensors[-1][[0, 1, 2, 3]], then.tensors[-1][[0, 1, 2, 3]])


def test_what_was_never_stored_cannot_be_loaded(caches):
    mover = BlockMover(backends.get_backend("numba"), caches)
    with pytest.raises(InvalidArgumentError, match="loads: nothing was stored"):
        mover.transfer([], [transfer((1,), HostCopy(1, ((0, 1),)))])


@pytest.mark.parametrize(
    ("weights", "num_blocks"),
    [
        (10 * LAYOUT.token_bytes, 0),  # as dear to move as to compute: compute
        (11 * LAYOUT.token_bytes, 256),  # a quarter of the cache
    ],
)
def test_swapping_is_chosen_where_a_byte_of_keys_and_values_costs_many_weights(weights, num_blocks):
    network = nn.Linear(weights, 1, bias=False)
    assert plan_host_blocks(EngineConfig(), network, LAYOUT, MEMORY) == num_blocks


def test_weights_count_that_a_token_goes_through():
    network = build("gpt_oss").network  # 2 of 4 experts a token
    experts = sum(p.numel() for name, p in network.named_parameters() if ".experts." in name)
    ends = sum(p.numel() for p in network.get_input_embeddings().parameters())
    ends += sum(p.numel() for p in network.get_output_embeddings().parameters())
    total = sum(p.numel() for p in network.parameters())
    assert experts > 0
    assert swap._weights_a_token(network) == total - ends - experts / 2


def test_what_is_asked_for_is_used_unless_it_cannot(monkeypatch):
    network = nn.Linear(1, 1)
    block_bytes = LAYOUT.kv_bytes(1, 16)

    def planned(asked, layout=LAYOUT):
        return plan_host_blocks(EngineConfig(swap_memory_bytes=asked), network, layout, MEMORY)

    assert [planned(asked) for asked in (0, block_bytes - 1, 5 * block_bytes)] == [0, 0, 5]
    assert planned(MIB, HYBRID) == MIB // HYBRID.kv_bytes(1, 16)
    monkeypatch.setattr(swap, "host_free_bytes", lambda: 1000)
    with pytest.raises(InvalidArgumentError, match=r"at most the 1000 bytes .*, got 1001"):
        planned(1001)
