"""When a preempted request's blocks are worth moving, and that they arrive."""

import copy

import pytest
import torch
from torch import nn

import backends
import kvcore
from model import EngineConfig, InvalidArgumentError
from model.caches import swap
from model.caches.kv_caches import KVCaches
from model.caches.layout import LayerShape, plan_layout
from model.caches.memory import MemoryPlan
from model.caches.swap import BlockMover, plan_host_blocks
from model.control.request import HostCopy
from model.control.step import Transfer
from tests.model.networks import build

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
