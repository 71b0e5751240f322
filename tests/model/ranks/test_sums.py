"""The kernels that add up over GPUs, interpreted: each GPU's sum is that of all parts."""

import json
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from model.ranks import parallel, sum_kernels


def run(interpreting, *arguments):
    ended = interpreting.run("-m", "tests.model.ranks.sums_main", *arguments)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


def test_every_gpu_has_the_sum_of_all_parts_whatever_came_before(interpreting):
    assert run(interpreting) == {"wrong": [], "of": 12}


def test_a_gpu_that_writes_where_another_one_does_is_seen(interpreting):
    assert len(run(interpreting, "planted")["wrong"]) == 12


def test_parts_that_no_line_fits_are_added_up_by_nccl():
    fits = torch.zeros(64, dtype=torch.bfloat16)
    assert sum_kernels.takes(fits, 4)
    assert not sum_kernels.takes(fits[:60], 4)  # three lines and a half for each GPU
    assert not sum_kernels.takes(fits[1:33], 4)  # no address of 16 bytes
    assert not sum_kernels.takes(fits.double(), 4)
    assert not sum_kernels.takes(fits[:0], 4)
    large = torch.empty(sum_kernels.MOST_BYTES // 2 + 64, dtype=torch.bfloat16)
    assert not sum_kernels.takes(large, 4)


@pytest.mark.parametrize("broken", ["empty", "rendezvous", "begin"])
def test_gpus_that_cannot_write_each_others_memory_have_none_that_is_shared(broken, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no access")

    shared = torch.zeros(64, dtype=torch.int64)
    found = {
        "empty": lambda *_, **__: shared,
        "rendezvous": lambda *_: SimpleNamespace(buffer_ptrs=[1]),
    }
    for name, fake in found.items():
        monkeypatch.setattr(parallel.symmetric_memory, name, fake)
    monkeypatch.setattr(sum_kernels, "begin", lambda *_: None)
    assert parallel._shared_memory(torch.device("cuda"), "all") is shared
    where = sum_kernels if broken == "begin" else parallel.symmetric_memory
    monkeypatch.setattr(where, broken, fail)
    assert parallel._shared_memory(torch.device("cuda"), "all") is None


@pytest.mark.parametrize(("capability", "size"), [(80, 8), (90, 4)])
@pytest.mark.parametrize("name", ["_sum_once", "_sum_twice"])
def test_a_gpu_waits_once_for_each_line_of_each_gpu(name, capability, size):
    kernel = getattr(sum_kernels, name)
    fixed = {"RANK": 1, "SIZE": size, "MOST": 4096, "DTYPE": tl.bfloat16, "TILE": sum_kernels.TILE}
    fixed |= {"HEAD": sum_kernels._HEAD, "FIRST": sum_kernels._MOST_SIZE}
    kinds = {"part": "*i32", "out": "*i32", "shared": "*i64", "num_lines": "i32"}
    names = [*kinds, *fixed]
    made = compile_kernel(
        ASTSource(
            fn=kernel,
            signature=kinds | dict.fromkeys(fixed, "constexpr"),
            constexprs={(names.index(key),): value for key, value in fixed.items()},
            attrs={(index,): [["tt.divisibility", 16]] for index in range(3)},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 8},
    )
    num_reads = made.asm["ptx"].count("ld.volatile.global.v4")
    assert num_reads == size * (1 if name == "_sum_once" else 2)
