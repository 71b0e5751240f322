"""A small set of every kernel but prefill's, for compute-sanitizer; run by test_triton_kernels.

Usage: compute-sanitizer --tool memcheck|racecheck python -m tests.backends.sanitize_set
"""

import sys

import torch

import backends
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.triton_gpu import cascade

BASE = AttentionCase("", (), num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
SEQS = ((1, 200), (0, 9), (1, 33), (1, 1))
E4M3 = torch.float8_e4m3fn
CASES = (
    BASE.with_(name="split", seqs=SEQS, head_dim=80),
    BASE.with_(name="all", seqs=SEQS, window=40, soft_cap=2.0, sinks=True, strided=True, group=3),
    BASE.with_(name="alike", seqs=((1, 700),), batch_invariant=True),
    BASE.with_(name="quantised", seqs=SEQS, cache_dtype=E4M3, scales="head"),
    BASE.with_(name="shared", seqs=((1, 33), (1, 90), (1, 400)), shared=32, group=3),
)


def main():
    backend = backends.get_backend("triton")
    cascade.WORTH_BYTES = cascade.WORTH_BYTES_A_SEQUENCE = cascade.FEWEST = 0
    for case in CASES:
        for finding in check_attention(backend, case):
            assert finding.passed, finding
    caches = [torch.zeros(9, 5, 2, 24, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    rows = torch.randn(7, 2, 24, device="cuda").bfloat16()
    starts = torch.tensor([0, 3, 7], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([9, 4], dtype=torch.int32, device="cuda")
    table = torch.tensor([[3, 8], [1, 0]], dtype=torch.int32, device="cuda")
    slots = torch.empty(9, dtype=torch.int64, device="cuda")
    backend.compute_slot_mapping(starts, lengths, table, 5, slots)
    backend.store_kv(rows, rows, backends.KVCache(*caches), slots[:7])
    quantised = backends.KVCache(*(cache.to(E4M3) for cache in caches))
    backend.store_kv(rows, rows, quantised, slots[:7])
    backend.copy_blocks(caches, torch.tensor([[3, 4], [8, 2]], device="cuda"))
    torch.cuda.synchronize()
    sys.stdout.write("every kernel ran\n")


if __name__ == "__main__":
    main()
