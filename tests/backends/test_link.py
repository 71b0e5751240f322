"""Copies over the link, with a driver that copies at once: every list becomes the right calls."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.triton_gpu.shared import link

NUM_BLOCKS, NUM_HOST = 40, 50


class Driver:
    """The calls of CUDA's driver, on a CPU."""

    def __init__(self):
        self.calls = []

    def cuMemcpy2DAsync_v2(self, about, stream):  # noqa: N802
        one = about._obj
        self.calls.append((stream.value, one.height))
        for row in range(one.height):
            target = one.dst_device + row * one.dst_pitch
            ctypes.memmove(target, one.src_device + row * one.src_pitch, one.width)
        return 0

    def cuMemcpyBatchAsync(self, targets, sources, sizes, count, *others):  # noqa: N802
        self.calls.append((others[-1].value, count.value))
        lists = [
            np.ctypeslib.as_array(
                ctypes.cast(each, ctypes.POINTER(ctypes.c_uint64)), (count.value,)
            )
            for each in (targets, sources, sizes)
        ]
        for target, source, size in zip(*(each.tolist() for each in lists), strict=True):
            ctypes.memmove(target, source, size)
        return 0


def moved(pairs, *, to_host, stream, is_locked):
    """Move between patterns; the calls, and whether every byte is where it belongs."""
    whole = torch.arange(NUM_BLOCKS * 2 * 24, dtype=torch.int32).reshape(NUM_BLOCKS, 2, 24)
    caches = [torch.arange(NUM_BLOCKS * 7).mul(5).int().reshape(NUM_BLOCKS, 7), whole[:, 1]]
    host = torch.arange(NUM_HOST * 124).mul(11).to(torch.uint8).reshape(NUM_HOST, 124)
    wanted = [each.clone() for each in (*caches, host)]
    for block_id, host_id in pairs:
        parts = [cache[block_id].view(torch.uint8) for cache in wanted[:2]]
        for part, row in zip(parts, wanted[2][host_id].split([28, 96]), strict=True):
            (row if to_host else part).copy_(part if to_host else row)
    driver = Driver()
    sides = link.Sides.of(caches, host)._replace(is_locked=is_locked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_driver", lambda: driver)
        link.move(stream, sides, np.array(pairs, np.int64).reshape(-1, 2), to_host=to_host)
    return driver.calls, all(map(torch.equal, (*caches, host), wanted))


@given(
    st.permutations(range(NUM_BLOCKS)), st.permutations(range(NUM_HOST)), st.integers(0, 40),
    st.integers(0, 40), st.booleans(), st.booleans(), st.sampled_from([0, 7]),
)  # fmt: skip
def test_blocks_move_whatever_their_order(blocks, hosts, count, run, to_host, is_locked, stream):
    pairs = [(n, n + 3) for n in range(run)]
    taken = {block for block, _ in pairs}, {host for _, host in pairs}
    others = [n for n in blocks if n not in taken[0]], [n for n in hosts if n not in taken[1]]
    pairs = (pairs + [*zip(*others, strict=False)][:count])[::-1]
    _, is_right = moved(pairs, to_host=to_host, stream=stream, is_locked=is_locked)
    assert is_right


def test_a_run_is_one_call_a_cache_and_scattered_blocks_are_a_list():
    run = [(n + 1, n + 9) for n in range(32)]
    calls, _ = moved(run, to_host=True, stream=7, is_locked=True)
    assert calls == [(7, 32)] * 2
    scattered = [(n, 49 - n) for n in range(40)]
    calls, _ = moved(scattered, to_host=False, stream=7, is_locked=True)
    assert calls == [(7, 80)]
    calls, _ = moved(scattered, to_host=False, stream=7, is_locked=False)
    assert calls == [(7, 1)] * 80  # a list takes page-locked memory alone


def test_a_driver_that_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(Driver, "cuMemcpy2DAsync_v2", lambda *_: 1)
    with pytest.raises(RuntimeError, match="error 1"):
        moved([(1, 1)], to_host=True, stream=0, is_locked=False)
