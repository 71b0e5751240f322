"""Attention over latents in Triton's interpreter; run by test_triton_latent.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
"""

import sys

import torch

import backends
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.triton_gpu.decode import merge as merging
from backends.triton_gpu.decode import splits
from backends.triton_gpu.latent import latent

TRITON = backends.get_backend("triton")
BASE = AttentionCase(
    "", (), num_kv_heads=1, head_dim=24, value_dim=16, dtype=torch.float16, group=5, block_size=8
)
E4M3 = torch.float8_e4m3fn
CASES = (
    BASE.with_(name="mixed", seqs=((1, 150), (5, 5), (0, 9), (3, 71)), padding=2),
    BASE.with_(name="block size 5, strided", seqs=((1, 130), (1, 1)), block_size=5, strided=True),
    BASE.with_(name="all", seqs=((2, 90), (1, 70)), sinks=True, window=40, soft_cap=2.0, group=17),
    BASE.with_(name="prefill, all", seqs=((20, 70),), sinks=True, window=9, group=17),
    BASE.with_(name="float32", seqs=((7, 60), (1, 30)), dtype=torch.float32),
    BASE.with_(name="alike", seqs=((1, 600), (3, 30)), batch_invariant=True, sinks=True),
    BASE.with_(name="quantised", seqs=((1, 70), (3, 30)), cache_dtype=E4M3, scales="head"),
    BASE.with_(name="nothing but values", seqs=((1, 70), (3, 30)), head_dim=16),
    BASE.with_(name="odd sizes", seqs=((1, 70), (3, 30)), head_dim=21, value_dim=19, strided=True),
)


def check_case(case):
    for finding in check_attention(TRITON, case):
        assert finding.passed, finding


if __name__ == "__main__":
    for one in CASES:
        check_case(one)
    merging.WIDEST = merging.PIECE = latent.PROGRAMS_A_MULTIPROCESSOR = 4
    for merging.WIDE_PROGRAMS, seqs in ((1000, 2), (100, 3), (20, 4)):  # pieces, rows, many rows
        lengths = ((1, 1300), *[(1, 150)] * (seqs - 1))  # no plan of another case fits
        check_case(BASE.with_(name=f"rows are merged, {seqs}", group=6, seqs=lengths))
    splits.MAX_PLANNED = latent.MAX_PLANNED = 2
    check_case(CASES[0].with_(name="more sequences than are planned"))
    latent.MOST_ROWS = 4
    check_case(CASES[0].with_(name="no sequence with several tokens is cut"))
    sys.stdout.write("attention over latents is right\n")
