"""Compile every Triton kernel for sm_80 and sm_90 without a GPU; run by test_triton.

A program of its own, because under TRITON_INTERPRET there is nothing to compile.
"""

import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from backends.triton_gpu import copy_blocks, paged_attention, slot_mapping, store_kv

INT32 = ("num_seqs", "num_rows", "num_tokens", "table_stride", "steps", "window")
POINTERS = {
    "query_start_loc": "*i32",
    "seq_lens": "*i32",
    "tables": "*i32",
    "slots": "*i64",
    "copies": "*i64",
    "sinks": "*fp32",
}
SHARED_LIMIT = 96 << 10  # bytes: what the smallest supported GPUs have is 99 KiB


def compile_one(kernel, element, capability, constants, **options):
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("scale", "soft_cap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if name in INT32 else POINTERS.get(name, f"*{element}")
    if kernel.arg_names[3] == "out" and "steps" in signature:
        signature["out"] = "*i64"
    source = ASTSource(kernel, signature, constants)
    target = GPUTarget("cuda", capability, 32)
    compiled = compile_kernel(source, target=target, options=options)
    assert compiled.metadata.shared <= SHARED_LIMIT, compiled.metadata
    assert compiled.asm["cubin"]


def attention_constants(element, head_dim, group, longest, *, features):
    width = max(16, 1 << (head_dim - 1).bit_length())
    row_bytes = width * (4 if element == "fp32" else 2)
    rows = paged_attention.rows_a_program(row_bytes, group, longest)
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
        "TILE": paged_attention.keys_a_tile(row_bytes),
        "WIDTH": width,
    }


def main():
    for capability in (80, 90):
        for element, head_dim, group, longest, features in (
            ("bf16", 128, 4, 1, False),
            ("fp16", 80, 5, 100, True),
            ("fp32", 256, 1, 100, True),
        ):
            constants = attention_constants(element, head_dim, group, longest, features=features)
            kernel = paged_attention._attend
            compile_one(kernel, element, capability, constants, num_warps=4, num_stages=2)
        pair = dict.fromkeys(("KEY_STRIDES", "VALUE_STRIDES"), (512, 128))
        triple = dict.fromkeys(("K_STRIDES", "V_STRIDES"), (8192, 512, 128))
        sizes = {"BLOCK_SIZE": 16, "HEAD_DIM": 128, "ROW": 512, "TOKENS": 4, "WIDTH": 512}
        compile_one(store_kv._scatter, "bf16", capability, pair | triple | sizes)
        sizes = {"STRIDE": 8192, "SIZE": 8192, "PAIR_STRIDE": 2, "WIDTH": 4096}
        compile_one(copy_blocks._copy, "i16", capability, sizes)
        compile_one(slot_mapping._fill, "i64", capability, {"BLOCK_SIZE": 16, "TILE": 128})
    sys.stdout.write("all kernels compile\n")


if __name__ == "__main__":
    main()
