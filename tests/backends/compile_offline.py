"""Compile the prefill kernels for sm_80 and sm_90 without a GPU; run by test_triton.

What the compiler made of each is bounded: no spills where matrices are multiplied, registers,
shared memory, 16-byte copies or the copy engine; and for Hopper's kernel, that exponentials are
computed while a product runs. A program of its own, because under TRITON_INTERPRET there is nothing
to compile. The other kernels: `compile_kernels`. Usage: python -m tests.backends.compile_offline
"""

import math
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource

from backends.triton_gpu.hopper import prefill as hopper_prefill
from backends.triton_gpu.prefill import order as prefill_order
from backends.triton_gpu.prefill import prefill
from backends.triton_gpu.shared.layer import Layer
from backends.triton_gpu.shared.place import power_of_two

INT32 = (
    "q_stride", "q_head", "num_seqs", "table_stride", "window", "shortest", "most_items",
    "programs",
)  # fmt: skip
POINTERS = {
    "query_start_loc": "*i32",
    "seq_lens": "*i32",
    "tables": "*i32",
    "work": "*i32",
    "sinks": "*fp32",
    "partial": "*fp32",
    "k_scale": "*fp32",
    "v_scale": "*fp32",
}
ALIGNED = ("query", "k_cache", "v_cache", "out", "partial")  # as torch allocates: on 16 bytes
SMALLEST, AMPERE, HOPPER = 99 << 10, 163 << 10, 227 << 10  # bytes that a program may have


@dataclass(frozen=True)
class Made:
    """What the compiler made of a kernel."""

    code: tuple[tuple[int, str], ...]
    """Address and text of each instruction."""
    registers: int
    shared: int

    def count(self, name):
        return sum(_name(text).startswith(name) for _, text in self.code)

    def loops(self):
        """The innermost loops that multiply matrices, as texts."""
        at = {address: i for i, (address, _) in enumerate(self.code)}
        spans = []
        for i, (address, text) in enumerate(self.code):
            jump = re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", text)
            if jump and int(jump[1], 16) <= address and int(jump[1], 16) in at:
                spans.append((at[int(jump[1], 16)], i))
        inner = [
            (a, b)
            for a, b in spans
            if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in spans)
        ]
        loops = [[text for _, text in self.code[a : b + 1]] for a, b in inner]
        return [loop for loop in loops if any("MMA" in _name(text) for text in loop)]


def _name(text):
    return re.sub(r"^@!?U?P\w+ ", "", text).split(" ")[0]


def make(kernel, source, capability, element, constants, kinds=None, **options):
    """Compile a kernel as it is launched, and take it apart."""
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("scale", "soft_cap"):
            signature[name] = "fp32"
        elif name in INT32:
            signature[name] = "i32"
        else:
            signature[name] = (kinds or {}).get(name) or POINTERS.get(name, f"*{element}")
            if name in ALIGNED:
                aligned[index,] = [["tt.divisibility", 16]]
    compiled = compile_kernel(
        source(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        code, usage = (
            subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", code)
    instructions = tuple((int(address, 16), text) for address, text in lines)
    return Made(instructions, int(re.search(r"REG:(\d+)", usage)[1]), compiled.metadata.shared)


@dataclass(frozen=True)
class Case:
    """A shape of prefill."""

    element: str = "bf16"
    head_dim: int = 128
    group: int = 4
    block_size: int = 16
    split: bool = False
    three: bool = False
    """Groups multiply, not two."""
    features: bool = False
    """A window and sinks."""
    sinks: bool = False
    cap: bool = False
    e4m3: bool = False
    alike: bool = False
    longest: int = 100
    registers: int = 255
    """At most; of the portable kernel."""


PORTABLE = (
    Case(longest=1),
    Case(),
    Case("fp16", 80, 5, features=True, cap=True),
    Case("fp32", 256, 1, features=True, cap=True),
    Case(e4m3=True),
)
ON_HOPPER = (  # every size of tiles, and every feature with another
    Case(),
    Case("fp16", 80, 5, 32, features=True),
    Case(group=48, split=True, longest=1),
    Case(split=True, features=True, cap=True),
    Case(cap=True, e4m3=True, alike=True),
    Case(head_dim=256, group=1, block_size=128, split=True),
    Case(head_dim=96, group=3),
    Case("fp16", 160, cap=True, split=True),
    Case(head_dim=192, features=True, cap=True),
    Case("fp16", 64, 5, features=True),
    Case(head_dim=64, group=8, three=True, sinks=True),
    Case("fp16", 64, 6, 8, three=True),
    Case(head_dim=64, group=8, three=True, features=True),
    Case("fp16", 64, 1, 128, three=True, features=True, cap=True),
    Case(head_dim=64, group=8, e4m3=True, split=True, features=True),
)


def check_portable(case, capability, shared):
    """Every copy of K and V is asynchronous and as wide as can be; nothing spills in a loop."""
    head_dim, group = case.head_dim, case.group
    itemsize = 4 if case.element == "fp32" else 2
    width = max(16, power_of_two(head_dim))
    rows, keys, warps, stages = prefill.shape_of_tiles(
        width * itemsize, itemsize, group, case.longest, shared
    )
    strides = (case.block_size * 8 * head_dim, 8 * head_dim, head_dim)
    layer = Layer(
        16, head_dim, strides, strides, case.block_size, 8 * group, group, head_dim, 0,
        math.gcd(16, *strides), case.cap, case.features, case.features, case.e4m3,
        capability >= 89, *((1, 0) if case.e4m3 else (-1, -1)),
    )  # fmt: skip
    token = 8 * group * head_dim
    constants = {"FORM": prefill.Form(layer, token, False, rows, keys)}
    kinds = dict.fromkeys(("k_cache", "v_cache"), "*u8") if case.e4m3 else None
    made = make(
        prefill._attend.kernel, ASTSource, capability, case.element, constants, kinds,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    assert made.shared <= shared, made.shared
    assert made.registers <= case.registers, made.registers
    if case.element == "fp32":  # which has no matrix instruction at full precision
        return
    multiply = "HGMMA" if capability >= 90 and rows >= 64 else "HMMA"
    assert made.count(multiply)
    for loop in made.loops():
        assert not any(_name(text).startswith(("LDL", "STL")) for text in loop)
    copies = [_name(text) for _, text in made.code if _name(text).startswith("LDGSTS")]
    assert copies
    widths = {"128", "64"} if case.e4m3 else {"128"}  # a byte's worth goes to where two are wanted
    assert all(widths & set(name.split(".")) for name in copies), set(copies)


def check_hopper(case, *, planned):
    """Loads by the copy engine alone, nothing spills in a loop, softmax and products overlap."""
    shape = hopper_prefill.shape_for(case.head_dim, split=case.split, e4m3=case.e4m3)
    if case.three:
        shape = hopper_prefill.THREE_GROUPS[case.head_dim, case.features or case.cap]
    pack = hopper_prefill.heads_an_item(case.group, case.longest, shape.rows)
    copy = min(case.block_size, shape.tile)
    stored = "fp8e4nv" if case.e4m3 else case.element
    kinds, none = {}, {}
    for width, names in (
        (shape.width, ("q_desc", "k_desc", "v_desc")), (shape.tail, ("q_tail", "k_tail", "v_tail"))
    ):  # fmt: skip
        if width == 0:
            none = dict.fromkeys(names)
            continue
        for name in names:
            rows, element = (64 // pack, pack), case.element
            if name[0] != "q":
                rows, element = (copy, 1), stored
            layout = hopper_prefill.layout_of(width, 1 if element == "fp8e4nv" else 2)
            kinds[name] = f"tensordesc<{element}{[*rows, width]},{layout!r}>"
    form = hopper_prefill.Form(
        8 * case.group * case.head_dim, case.head_dim, case.block_size, case.block_size,
        case.block_size, 8 * case.group, case.group, case.head_dim,
        case.cap, case.features, case.features or case.sinks,
        *((1, 0) if case.e4m3 else (-1, -1)),
        planned, case.split, case.alike, pack, shape,
    )  # fmt: skip
    made = make(
        hopper_prefill._attend.kernel, GluonASTSource, 90, case.element,
        none | {"FORM": form}, kinds, num_warps=4,
    )  # fmt: skip
    assert made.shared <= HOPPER, made.shared
    assert made.registers * 128 * (shape.groups + 1) <= 65536  # what warps share before they trade
    size, copies = 1 if case.e4m3 else 2, 2 * shape.tile // copy
    messages = shape.groups * -(-shape.width // 64) + copies * -(-shape.width * size // 128)
    messages += (shape.groups + copies) * (shape.tail > 0)
    assert made.count("UTMALDG") == messages, made.count("UTMALDG")
    assert made.count("LDGSTS") == 0
    assert made.count("ATOMG") == 2 * case.split  # where each group says that its pieces are there
    loops = made.loops()
    assert len(loops) == shape.groups * (3 if case.features else 2), len(loops)
    for loop in loops:
        check_overlap(loop, products=count_products(case, shape))
    if case.cap:  # exponentials, reciprocals and issuing are what a capped step waits for
        shortest, numbers = min(loops, key=len), 64 * shape.tile // 128
        sums = 64 * shape.tail // 128  # of the tail, each of which is rescaled
        assert len(shortest) <= 14 * numbers + sums + 40, len(shortest)
        slow = sum(_name(text).startswith("MUFU") for text in shortest)
        assert slow <= (3 if case.alike else 2.25) * numbers + 4, slow


def count_products(case, shape):
    """Matrix instructions of a step: of a tile of keys, and of one of values."""
    keys = -(-shape.width // 16) + shape.tail // 16
    if case.e4m3:
        keys = shape.width // 32 * 2
    return keys + shape.tile // 16 * (1 + (shape.tail > 0))


def check_overlap(loop, *, products):
    """One step: its products are issued at once; the exponentials stand between the two waits."""
    names = [_name(text) for text in loop]
    assert not any(name.startswith(("LDL", "STL")) for name in names)
    multiplied = [i for i, name in enumerate(names) if name.startswith(("HGMMA", "QGMMA"))]
    assert len(multiplied) == products, len(multiplied)
    waits = [i for i, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
    exponentials = [i for i, name in enumerate(names) if name == "MUFU.EX2"]
    assert len(waits) == 2
    assert multiplied[-1] < waits[0]
    hidden = sum(waits[0] < i < waits[1] for i in exponentials)
    assert hidden >= len(exponentials) - 2, (hidden, len(exponentials))


def main():
    for case in PORTABLE:
        check_portable(case, 90, HOPPER)
    for case, shared in ((1, AMPERE), (1, SMALLEST), (2, SMALLEST), (4, SMALLEST)):
        check_portable(PORTABLE[case], 80, shared)
    for capability in (80, 90):
        for split in (False, True):
            constants = {"CUT": prefill_order.Cut(32, 8, 128, split, split, prefill_order.SEQS)}
            kernel = prefill_order._rank.kernel
            made = make(kernel, ASTSource, capability, "i32", constants, num_warps=1)
            assert made.registers <= 128, made.registers
    for i, case in enumerate(ON_HOPPER):
        check_hopper(case, planned=i % 2 == 0)
    sys.stdout.write("all kernels of prefill compile within their bounds\n")


if __name__ == "__main__":
    main()
