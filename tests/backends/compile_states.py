"""Compile the kernels over recurrent states for sm_80 and sm_90 without a GPU; run by test_triton.

A state is moved 16 bytes a thread at a time, and no kernel spills. A program of its own, because
under TRITON_INTERPRET there is nothing to compile.
Usage: python -m tests.backends.compile_states [--verbose]
"""

import itertools
import sys

from backends.triton_gpu.state import linear_attention, short_conv, slots
from tests.backends.compile_kernels import CAPABILITIES, bound, copies_16_bytes, make

CHUNK = linear_attention.CHUNK
LAYERS = {  # by_channel, delta_rule, l2norm, has_gate, has_bias, has_skip
    "delta": (False, True, True, True, True, False),
    "KDA": (True, True, True, False, False, False),
    "mamba": (False, False, False, True, True, True),
}


def check_linear_attention(capability, element, kind, size, layer, *, single, in_chunks=False):
    (key_dim, value_dim), step = size, linear_attention._step
    options = linear_attention.OPTIONS
    if in_chunks:
        step, options = linear_attention._step_chunks, linear_attention.CHUNK_OPTIONS
    width, tile = linear_attention.tile_of(key_dim, value_dim)
    flags = LAYERS[layer]
    heads = (key_dim, key_dim, value_dim, key_dim if flags[0] else 1, value_dim)
    form = linear_attention.Form(
        40 * key_dim * value_dim, heads, 2, key_dim, value_dim, width, tile, -(-value_dim // tile),
        *flags, single, not single, CHUNK * in_chunks,
    )  # fmt: skip
    kinds = dict.fromkeys(step.indices - set(slots.INDICES), f"*{element}")
    kinds |= dict.fromkeys(("a", "bias", "skip"), "*fp32")
    if not form.has_gate:
        kinds["decay"] = "*fp32"
    made = make(step, capability, element, form, cache=kind, kinds=kinds, **options)
    if in_chunks:
        bound(made, registers=255, shared=48 << 10, spills=4)  # 3 with Triton 3.7
        return
    bound(made, registers=128 if single else 168, shared=48 << 10)  # of two warps: 6 programs or 8
    wide = [n for n in made.instructions if n.startswith("STG") and "128" in n.split(".")]
    assert wide, "no store of 16 bytes"
    assert made.count("LDG", "E", "128") >= len(wide)


def check_conv(capability, element, width, *, single):
    taps = 1 << (width - 2).bit_length()
    form = short_conv.Form(
        80000, 8192, width, taps, short_conv.CHANNELS, 16, has_bias=True, silu=True, single=single,
        has_drafts=not single, rows=1 if single else short_conv.ROWS,
    )  # fmt: skip
    options = short_conv.OPTIONS | {"num_warps": 1 if single else 4}
    made = make(short_conv._step, capability, element, form, cache=element, **options)
    bound(made, registers=255, shared=16 << 10)
    if single:
        copies_16_bytes(made, "STG")
    else:  # but for a state, which is short
        assert made.count("STG", "E", "128") >= 4


def main():
    for capability in CAPABILITIES:
        for kind, layer, single in itertools.product(("fp32", "bf16"), LAYERS, (False, True)):
            check_linear_attention(capability, "bf16", kind, (128, 128), layer, single=single)
        for layer in ("delta", "mamba") if capability >= 90 else ():  # older GPUs take none
            check_linear_attention(
                capability, "bf16", "fp32", (128, 128), layer, single=False, in_chunks=True
            )
        for size in ((96, 192), (256, 256)):
            check_linear_attention(capability, "fp16", "fp32", size, "delta", single=False)
        for element, width in (("bf16", 2), ("bf16", 4), ("fp16", 7)):
            for single in (False, True):
                check_conv(capability, element, width, single=single)
    sys.stdout.write("all kernels over states compile within their bounds\n")


if __name__ == "__main__":
    main()
