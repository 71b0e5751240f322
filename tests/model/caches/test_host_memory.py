"""Host memory for blocks: how it is allocated for a GPU, and how blocks move on a CPU."""

import logging
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import backends
from model.caches import host_memory
from model.caches.host_memory import HostPool, allocate_host


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_cannot_be_page_locked_is_used_with_one_warning(code, monkeypatch, caplog):
    asked = []

    def register(address, size, flags):
        asked.append((address, size, flags))
        return code

    def fail(*_, **__):
        raise RuntimeError("an error that an earlier call has left")

    runtime = SimpleNamespace(cudart=lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(host_memory, "_cuda", runtime)
    monkeypatch.setattr(host_memory, "_STEP_BYTES", 8192)
    monkeypatch.setattr(torch, "zeros", fail)
    with caplog.at_level(logging.INFO, logger=host_memory.__name__):
        found = allocate_host(9, 3000, torch.device("cuda"))
    assert found.shape == (9, 3000)
    assert not found.any()
    assert asked == [(found.data_ptr(), 27_000, 0)]
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == (code != 0)
    assert all("cannot be page-locked (CUDA error 2)" in each for each in warnings)
    assert sum("are allocated" in one.getMessage() for one in caplog.records) == 3


@pytest.mark.parametrize("sizes", [(64, 32), (6, 10), (7,)])
def test_blocks_come_back_as_they_were_and_have_the_sum_of_where_they_are(sizes):
    storages = [torch.randint(0, 255, (9, size), dtype=torch.uint8) for size in sizes]
    wanted = [storage.clone() for storage in storages]
    pool = HostPool(backends.get_backend("numba"), storages)
    memory = pool.allocate(5)
    assert len(memory) == 5 * sum(sizes)
    sums = pool.store([3, 8, 1], [4, 0, 2])()
    assert [*pool.sums([4, 0, 2])] == sums
    for storage in storages:
        storage[[3, 8, 1]] = 0
    wait = pool.load([4, 0, 2], [3, 8, 1])
    assert wait() == wait() == sums
    assert all(map(torch.equal, storages, wanted))
    memory[0] ^= 1
    assert pool.load([0], [8])() == [*pool.sums([0])] != sums[1:2]
    pool.free()
    with pytest.raises(RuntimeError, match="was freed"):
        pool.load([4], [3])


def test_memory_that_was_freed_goes_before_other_memory_is_allocated(monkeypatch):
    """As where one of several ranks has not got a folder, and all try the next one."""
    pool = HostPool(backends.get_backend("numba"), [torch.ones(9, 64, dtype=torch.uint8)])
    pool.allocate(5)
    first = weakref.ref(pool._host)
    pool.free()
    held = []

    def allocate(*given):
        held.append(first())
        return allocate_host(*given)

    monkeypatch.setattr(host_memory, "allocate_host", allocate)
    pool.allocate(5)
    assert held == [None]
    assert pool.store([3], [4])() == pool.load([4], [3])()


@pytest.mark.parametrize("to_host", [True, False])
def test_a_move_that_fails_half_way_has_ended_when_it_raises(to_host):
    waited = []

    class Refusing:
        def move_blocks(self, *_, **__):
            raise RuntimeError("the driver refuses a copy of blocks")

    def stream(name):
        return SimpleNamespace(synchronize=lambda: waited.append(name))

    pool = HostPool(Refusing(), [torch.zeros(9, 64, dtype=torch.uint8)])
    pool.allocate(5)
    pool._torch = SimpleNamespace(stream=lambda _: nullcontext())
    pool._streams = stream("to host memory"), stream("from it")
    with pytest.raises(RuntimeError, match="refuses"):
        (pool.store if to_host else pool.load)([3], [4])
    assert waited == ["to host memory" if to_host else "from it"]
