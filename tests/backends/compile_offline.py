"""Compile the prefill kernels for sm_80 and sm_90 without a GPU; run by test_triton.

A program of its own, because under TRITON_INTERPRET there is nothing to compile. The other kernels:
`compile_kernels`.
"""

import math
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from backends.triton_gpu import prefill

INT32 = ("num_seqs", "table_stride", "window", "shortest")
POINTERS = {
    "query_start_loc": "*i32",
    "seq_lens": "*i32",
    "tables": "*i32",
    "sinks": "*fp32",
}
SHARED_LIMIT = 96 << 10  # bytes: what the smallest supported GPUs have is 99 KiB


def compile_one(kernel, element, capability, constants, limit=SHARED_LIMIT, **options):
    signature, aligned = {}, {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("scale", "soft_cap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if name in INT32 else POINTERS.get(name, f"*{element}")
    for index, name in enumerate(kernel.arg_names):  # as torch allocates: on 16 bytes
        if signature[name].startswith("*"):
            aligned[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = compile_kernel(source, target=target, options=options)
    assert compiled.metadata.shared <= limit, compiled.metadata
    assert compiled.asm["cubin"]
    return compiled


def attention_constants(element, head_dim, group, longest, shared, *, features):
    width = max(16, 1 << (head_dim - 1).bit_length())
    row_bytes = width * (4 if element == "fp32" else 2)
    itemsize = 4 if element == "fp32" else 2
    rows, keys, _, _ = prefill.shape_of_tiles(row_bytes, itemsize, group, longest, shared)
    strides = {"K_STRIDES": (64 * head_dim, 4 * head_dim, head_dim)}
    return {
        "Q_STRIDES": (4 * group * head_dim, head_dim),
        "K_STRIDES": strides["K_STRIDES"],
        "V_STRIDES": strides["K_STRIDES"],
        "O_STRIDES": (4 * group * head_dim, head_dim),
        "BLOCK_SIZE": 16,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HAS_CAP": features,
        "HAS_WINDOW": features,
        "HAS_SINKS": features,
        "ROWS": rows,
        "TOKENS": rows // group,
        "ALIGN": math.gcd(16, 4 * head_dim, head_dim),
        "TILE": keys,
        "WIDTH": width,
    }


def main():
    for capability in (80, 90):
        for element, head_dim, group, longest, features in (
            ("bf16", 128, 4, 1, False),
            ("bf16", 128, 4, 100, False),
            ("fp16", 80, 5, 100, True),
            ("fp32", 256, 1, 100, True),
        ):
            for shared, stages in ((SHARED_LIMIT, 2), (prefill.DEEP, 3)):
                constants = attention_constants(
                    element, head_dim, group, longest, shared, features=features
                )
                options = {"num_warps": 4, "num_stages": stages if element != "fp32" else 2}
                compile_one(
                    prefill._attend, element, capability, constants, limit=shared, **options
                )
    sys.stdout.write("all kernels compile\n")


if __name__ == "__main__":
    main()
