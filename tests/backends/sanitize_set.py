"""A small set of the plain kernels but prefill's, for compute-sanitizer.

Run by test_triton_kernels.

It fails if a kernel has not run that there is, with one query token a sequence and with several
where it has a form for each; those of `sanitize_hopper` are left to it. In Triton's interpreter,
in float16 and without Hopper's, it shows that the calls are right.

Usage: compute-sanitizer --tool memcheck|racecheck python -m tests.backends.sanitize_set
"""

import importlib
import pkgutil
import sys

import torch

import backends
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.conformance.sparse import SparseCase, check_sparse
from backends.conformance.states import LAYERS, MODES, StateCase, check_states
from backends.triton_gpu.decode import cascade, decode, merge
from backends.triton_gpu.latent import hopper as hopper_latent
from backends.triton_gpu.latent import wide
from backends.triton_gpu.shared.launch import Launcher

BACKEND = backends.get_backend("triton")
DEVICE = BACKEND.device
HALF = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
BASE = AttentionCase("", (), num_kv_heads=2, head_dim=64, dtype=HALF)
SEQS = ((1, 200), (0, 9), (1, 33), (1, 1))
MANY = ((3, 400), (2, 70), (1, 1))
E4M3 = torch.float8_e4m3fn
LATENTS = BASE.with_(num_kv_heads=1, head_dim=576, value_dim=512, group=16)
CASES = (
    BASE.with_(name="split", seqs=SEQS, head_dim=80),
    BASE.with_(name="all", seqs=SEQS, window=40, soft_cap=2.0, sinks=True, strided=True, group=3),
    BASE.with_(name="alike", seqs=((1, 700),), batch_invariant=True),
    BASE.with_(name="quantised", seqs=SEQS, cache_dtype=E4M3, scales="head"),
    BASE.with_(name="shared", seqs=((1, 33), (1, 90), (1, 400)), shared=32, group=3),
    BASE.with_(name="several tokens", seqs=((3, 400), (0, 9), (2, 33), (1, 1)), group=2),
    BASE.with_(name="several tokens, all", seqs=MANY, window=40, soft_cap=2.0, sinks=True, group=3),
    LATENTS.with_(name="latents", seqs=((1, 400), (0, 9), (1, 33))),
    LATENTS.with_(name="latents, several tokens", seqs=MANY, sinks=True),
    LATENTS.with_(name="latents, many heads", seqs=MANY, group=40, window=70),
    LATENTS.with_(name="latents, alike", seqs=((1, 700), (3, 30)), batch_invariant=True),
    LATENTS.with_(name="latents, quantised", seqs=MANY, cache_dtype=E4M3, scales="head"),
    LATENTS.with_(name="latents, a prompt", seqs=((70, 90), (1, 200)), strided=True),
)
ELSEWHERE = {
    "hopper.prefill._attend",
    "latent.hopper.attend_rows",
    "latent.wide.attend_part",
    "latent.wide.attend_tile",
    "prefill.order._rank",
    "prefill.prefill._attend",
}


def launchers():
    """Every kernel that there is, by file and name."""
    for module in pkgutil.walk_packages(backends.triton_gpu.__path__, "backends.triton_gpu."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Launcher):
                yield f"{module.name.removeprefix('backends.triton_gpu.')}.{name}", value


def forms(launcher):
    """Of a kernel: one, or whether sequences have several query tokens."""
    return {False, True} if launcher in (decode._attend_chunk, merge._merge_parts) else {None}


def forms_that_ran(launcher):
    """Those of them that have been launched."""
    return {getattr(key[3][0], "many", None) for key, _ in launcher.compiled()}


def main():
    cascade.WORTH_BYTES = cascade.WORTH_BYTES_A_SEQUENCE = cascade.FEWEST = 0
    hopper_latent.can_attend = wide.can_attend = lambda *_: False
    for case in CASES:
        for finding in check_attention(BACKEND, case):
            assert finding.passed, finding
    sparse = SparseCase(
        LATENTS.with_(name="sparse", seqs=((2, 40), (0, 9), (1, 1100)), group=5), count=30
    )
    for finding in check_sparse(BACKEND, sparse):
        assert finding.passed, finding
    for layer in LAYERS:
        state = HALF if layer == "conv" else torch.float32
        case = StateCase(layer, layer, MODES[:3], dtype=HALF, state_dtype=state)
        for each in (case, case.with_(name=f"{layer}, many tokens", query_len=17)):
            for finding in check_states(BACKEND, each):
                assert finding.passed, finding
    caches = [torch.zeros(9, 5, 2, 24, dtype=HALF, device=DEVICE) for _ in range(2)]
    rows = torch.randn(7, 2, 24, device=DEVICE).to(HALF)
    starts = torch.tensor([0, 3, 7], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([9, 4], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[3, 8], [1, 0]], dtype=torch.int32, device=DEVICE)
    slots = torch.empty(9, dtype=torch.int64, device=DEVICE)
    BACKEND.compute_slot_mapping(starts, lengths, table, 5, slots)
    BACKEND.store_kv(rows, rows, backends.KVCache(*caches), slots[:7])
    quantised = backends.KVCache(*(cache.to(E4M3) for cache in caches))
    BACKEND.store_kv(rows, rows, quantised, slots[:7])
    BACKEND.copy_blocks(caches, torch.tensor([[3, 4], [8, 2]], device=DEVICE))
    blocks = sum(cache[0].numel() * 2 for cache in caches)
    host = torch.zeros(5, blocks, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
    moves, sums = torch.tensor([[3, 4], [8, 2]]), torch.zeros(2, device=DEVICE).long()
    for to_host in (True, False):
        BACKEND.move_blocks(caches, host, moves, sums, to_host=to_host)
    missing = {
        name: left
        for name, launcher in launchers()
        if name not in ELSEWHERE and (left := forms(launcher) - forms_that_ran(launcher))
    }
    assert not missing, missing
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    sys.stdout.write("every kernel ran\n")


if __name__ == "__main__":
    main()
