"""The Triton backend: in the interpreter, through the compiler without a GPU, and on one.

The interpreter has to be chosen before triton is first imported, so it runs in programs of its own.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import backends
from backends.conformance import AttentionCase
from backends.conformance.cases import bits, build
from backends.conformance.parallel import run_in_processes
from backends.triton_gpu import interpreter_fault

has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="triton is not installed here")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def _python(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter_it_passes_the_quick_conformance_kit(interpreting):
    done = interpreting.run("-m", "backends.conformance", "triton", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "triton on cpu conforms" in done.stdout


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter_it_agrees_with_numba_and_the_oracle(interpreting):
    done = interpreting.run("-m", "tests.backends.cross_check", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "triton and numba agree\n"


@pytest.mark.slow
@needs_triton
def test_after_a_warm_up_no_call_needs_a_kernel_that_has_not_been_met(interpreting):
    done = interpreting.run("-m", "tests.backends.warm_up_check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "nothing is left to compile\n"


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter_the_sanitizers_small_set_meets_every_kernel(interpreting):
    done = interpreting.run("-m", "tests.backends.sanitize_set")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "every kernel ran\n"


@needs_triton
def test_what_breaks_the_contract_is_refused_also_after_calls_that_kept_it(interpreting):
    done = interpreting.run("-m", "tests.backends.contract_check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "nothing bad is accepted\n"


@needs_triton
def test_the_interpreter_refuses_bfloat16_which_it_computes_wrongly(interpreting):
    code = (
        "import backends, torch; b = backends.get_backend('triton');"
        "c = torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16);"
        "k = backends.KVCache(c, c); slots = torch.zeros(1, dtype=torch.int64);"
        "b.store_kv(c[0, :1], c[0, :1], k, slots)"
    )
    done = interpreting.run("-c", code)
    assert (
        "UnsupportedError: cache.k: wanted a dtype of torch.float32, torch.float16" in done.stderr
    )


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("program", ["compile_kernels", "compile_offline", "compile_states"])
def test_every_kernel_compiles_within_its_bounds_for_sm_80_and_sm_90_without_a_gpu(program):
    done = _python("-m", f"tests.backends.{program}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("compile within their bounds\n")


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so_and_what_to_choose_instead():
    done = _python("-m", "backends.conformance", "triton")
    assert done.returncode == 2
    assert "there is no CUDA device" in done.stderr
    assert "the backend numba" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr


@needs_triton
def test_an_interpreter_asked_for_too_late_is_refused():
    code = (
        "import triton, os; os.environ['TRITON_INTERPRET'] = '1';"
        "import backends; backends.get_backend('triton')"
    )
    done = _python("-c", code)
    assert "TRITON_INTERPRET changed after triton was first imported" in done.stderr


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0", "2.4.0", False),
        ("3.7.1", "2.5.2", True),
        ("3.10.0+git1", "2.4", True),
    ],
)
def test_versions_whose_interpreter_cannot_loop_are_refused(triton, numpy, works):
    assert (interpreter_fault(triton, numpy) == "") == works


def test_without_triton_it_says_so():
    code = (
        "import sys, backends, importlib.util as u; f = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'triton' else f(name, *a);"
        "backends.get_backend('triton')"
    )
    done = _python("-c", code)
    assert "triton is not installed" in done.stderr


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_it_passes_the_whole_conformance_kit():
    report = run_in_processes("triton", jobs=os.cpu_count() or 1)  # most of it is compiling
    assert report.passed, report.as_text()


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_block_ids_past_65535_and_offsets_past_2_to_the_31_elements():
    backend = backends.get_backend("triton")
    num_blocks, block_size, heads, size = 140_000, 16, 8, 128
    assert num_blocks * block_size * heads * size > 1 << 31
    shape = (num_blocks, block_size, heads, size)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    case = AttentionCase("far", ((2, 40),), num_kv_heads=heads, head_dim=size, dtype=torch.bfloat16)
    near = build(case, torch.device("cuda"))
    table = torch.tensor([[139_999, 65_536, 3]], dtype=torch.int32, device="cuda")
    slots = torch.empty(40, dtype=torch.int64, device="cuda")
    whole = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    backend.compute_slot_mapping(whole, near.batch.seq_lens, table, block_size, slots)
    assert int(slots.max()) == 139_999 * 16 + 15
    rows = [
        cache[near.batch.block_table[0, :3].long()].flatten(0, 1)[:40].contiguous()
        for cache in near.cache.tensors
    ]
    cache = backends.KVCache(*caches)
    backend.store_kv(*rows, cache, slots)
    backend.copy_blocks(caches, torch.tensor([[139_999, 139_998]], device="cuda"))
    assert torch.equal(caches[0][139_998], caches[0][139_999])
    batch = backends.PagedBatch(
        near.batch.query_start_loc, near.batch.seq_lens, table, near.batch.slot_mapping, 2, 40
    )
    far = backend.paged_attention(near.query, cache, batch, near.terms)
    assert torch.equal(bits(far), bits(near.run(backend)))
