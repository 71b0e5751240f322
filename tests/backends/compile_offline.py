"""Compile every Triton kernel for sm_80 and sm_90 without a GPU; run by test_triton.

For decode also what the compiler made of it: no spills, K and V in 16-byte asynchronous copies.
A program of its own, because under TRITON_INTERPRET there is nothing to compile.
"""

import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from backends.triton_gpu import (
    copy_blocks,
    decode,
    merge,
    prefill,
    slot_mapping,
    store_kv,
)

INT32 = (
    "num_seqs", "num_rows", "num_tokens", "table_stride", "steps", "window", "shortest", "target",
    "items",
)  # fmt: skip
POINTERS = {
    "query_start_loc": "*i32",
    "seq_lens": "*i32",
    "tables": "*i32",
    "slots": "*i64",
    "copies": "*i64",
    "sinks": "*fp32",
    "partial": "*fp32",
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
    if kernel.arg_names[3] == "out" and "steps" in signature:
        signature["out"] = "*i64"
    for index, name in enumerate(kernel.arg_names):  # as torch allocates: on 16 bytes
        if signature[name].startswith("*"):
            aligned[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = compile_kernel(source, target=target, options=options)
    assert compiled.metadata.shared <= limit, compiled.metadata
    assert compiled.asm["cubin"]
    return compiled


def machine_code(compiled):
    """The instructions' names, and bytes of stack a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        outputs = [
            subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        ]
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", outputs[0])
    return names, int(re.search(r"STACK:(\d+)", outputs[1])[1])


def check_decode(element, head_dim, group, block_size, seqs, capability, *, features):
    width = max(16, 1 << (head_dim - 1).bit_length())
    warps = decode.warps_a_program(head_dim, 2)
    strides = (block_size * 8 * head_dim, 8 * head_dim, head_dim)
    rows = (8 * group * head_dim, head_dim)
    shared = {
        "O_STRIDES": rows, "NUM_HEADS": 8 * group, "HEAD_DIM": head_dim, "HAS_WINDOW": features,
        "SEQS": seqs, "WIDTH": width, "CHAINED": capability >= 90,
    }  # fmt: skip
    constants = shared | {
        "Q_STRIDES": rows, "K_STRIDES": strides, "V_STRIDES": strides, "BLOCK_SIZE": block_size,
        "GROUP": group, "HAS_CAP": features, "HAS_SINKS": features, "ALIGN": math.gcd(16, *strides),
        "WARPS": warps, "ROWS": decode.rows_a_program(group, head_dim),
    }  # fmt: skip
    options = {"num_warps": warps, "num_stages": decode.STAGES}
    compiled = compile_one(decode._attend_chunk, element, capability, constants, **options)
    names, stack = machine_code(compiled)
    copies = [name for name in names if name.startswith("LDGSTS")]
    assert stack == 0
    assert not {"LDL", "STL"} & {name.split(".")[0] for name in names}
    assert any(name.startswith("HMMA") for name in names)
    assert copies
    assert all(name.endswith(".128") or ".128." in name for name in copies), copies
    if seqs:
        constants = shared | {"TILE": 16 * warps, "HEADS": group, "MOST": 64}
        constants["STEP"] = merge.chunks_at_once(64, head_dim)
        compiled = compile_one(
            merge._merge_chunks, element, capability, constants, num_warps=merge.WARPS
        )
        assert machine_code(compiled)[1] == 0


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
        for element, head_dim, group, block_size, seqs, features in (
            ("bf16", 128, 4, 16, 1, False),
            ("bf16", 128, 4, 16, 256, True),
            ("fp16", 128, 16, 32, 8, True),
            ("bf16", 64, 8, 5, 8, True),
            ("fp16", 80, 5, 16, 0, True),
            ("bf16", 256, 16, 16, 64, True),
        ):
            check_decode(
                element, head_dim, group, block_size, seqs, capability, features=features
            )  # fmt: skip
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
