"""Compile decode, stores and copies for sm_80 and sm_90 without a GPU; run by test_triton.

What the compiler made of each is bounded: no spills, registers, shared memory, 16-byte copies.
A program of its own, because under TRITON_INTERPRET there is nothing to compile.
Usage: python -m tests.backends.compile_kernels [--verbose]
"""

import math
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource

from backends.oracle import SUM_HIGH, SUM_LOW
from backends.triton_gpu import copy_blocks, move_blocks, slot_mapping, store_kv
from backends.triton_gpu.decode import cascade, decode, merge
from backends.triton_gpu.decode.splits import Cut
from backends.triton_gpu.hopper.prefill import layout_of
from backends.triton_gpu.latent import hopper as hopper_latent
from backends.triton_gpu.latent import latent, wide
from backends.triton_gpu.shared.layer import Layer
from backends.triton_gpu.shared.place import power_of_two
from backends.triton_gpu.sparse import choose_tokens, score_index

CAPABILITIES = (80, 90)
SHARED_LIMIT = 96 << 10  # bytes: what the smallest supported GPUs have is 99 KiB
INT64 = ("slots", "copies", "distances", "moves", "places", "sums")
FLOAT32 = ("partial", "shared_partial", "k_scale", "v_scale", "scales", "sinks")
FLOATS = ("scale", "soft_cap", "low", "high")


@dataclass(frozen=True)
class Made:
    """What the compiler made of a kernel."""

    instructions: tuple[str, ...]
    registers: int
    stack: int
    shared: int
    ptx: str

    def count(self, *names):
        """Instructions whose name starts with these parts."""
        return sum(name.split(".")[: len(names)] == list(names) for name in self.instructions)


def make(
    launcher, capability, element, form, *, cache=None, kinds=None, source=ASTSource, **options
):
    """Compile a kernel as it is launched: data pointers on 16 bytes, indices anywhere."""
    kernel = launcher.kernel
    constants = form if isinstance(form, dict) else {"FORM": form}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name in launcher.integers:
            signature[name] = "i32"
        elif name in (kinds or {}):
            signature[name] = kinds[name]
        elif name in launcher.indices and name not in FLOAT32:
            wide = name in INT64 or (name == "out" and launcher is slot_mapping._fill)
            signature[name] = "*i64" if wide else "*i32"
        else:
            kind = cache if cache and name in ("k_cache", "v_cache", "cache", "state") else element
            signature[name] = "*fp32" if name in FLOAT32 else f"*{kind}"
            if name not in launcher.indices:
                attributes[index,] = [["tt.divisibility", 16]]
    made_of = source(kernel, signature, constants, attributes)
    compiled = compile_kernel(made_of, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        code, usage = (
            subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code)
    found = {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK")}
    shared, ptx = compiled.metadata.shared, compiled.asm["ptx"]
    made = Made(tuple(names), found["REG"], found["STACK"], shared, ptx)
    if "--verbose" in sys.argv:
        copies = sorted({n for n in names if n.startswith(("LDGSTS", "LDG", "STG"))})
        sys.stdout.write(
            f"sm_{capability} {kernel.fn.__name__} {element} {cache or ''} {made.registers}"
            f" registers, {made.shared} bytes, {len(names)} instructions {copies}\n"
        )
    return made


def bound(made, *, registers, shared=SHARED_LIMIT, spills=0):
    """Limits: spilled words, registers a thread, bytes a program."""
    assert made.count("LDL") <= spills, made.count("LDL")
    assert made.stack <= 8 * spills, made.stack
    assert made.registers <= registers, made.registers
    assert made.shared <= shared, made.shared


def copies_16_bytes(made, *kinds):
    """Every copy of these kinds moves 16 bytes a thread, and there are some of each kind."""
    for kind in kinds:
        widths = [n for n in made.instructions if n.split(".")[0] == kind]
        assert widths, kind
        assert all("128" in name.split(".") for name in widths), widths


@dataclass(frozen=True)
class Decode:
    """A shape of decode."""

    element: str
    head_dim: int
    group: int
    registers: int
    """At most."""
    block_size: int = 16
    vector: int = 16
    features: bool = False
    shared: bool = False
    many: bool = False
    alike: bool = False
    e4m3: bool = False
    spills: int = 0


DECODES = (  # of which the older capability takes every third
    Decode("bf16", 128, 4, registers=192, vector=128, features=True),
    Decode("bf16", 128, 4, registers=168, vector=1),
    Decode("bf16", 128, 4, registers=168, vector=0, alike=True),
    Decode("bf16", 128, 4, registers=192, vector=16, e4m3=True),
    Decode("fp16", 128, 16, registers=255, vector=16, features=True, block_size=32),
    Decode("bf16", 64, 8, registers=192, vector=16, features=True, block_size=5),
    Decode("bf16", 128, 4, registers=192, vector=16, shared=True),
    Decode("fp16", 80, 5, registers=192, vector=0, features=True),
    Decode("bf16", 128, 4, registers=255, vector=16, many=True, features=True),
    Decode("bf16", 128, 4, registers=255, vector=64, many=True, e4m3=True, spills=1),
    Decode("bf16", 256, 16, registers=255, vector=128, features=True),
)


def check_decode(case, capability):
    """Decode, its merge and the pass over a shared prefix."""
    head_dim, group = case.head_dim, case.group
    warps = decode.warps_a_program(head_dim, 1 if case.e4m3 else 2)
    strides = (case.block_size * 8 * head_dim, 8 * head_dim, head_dim)
    features = (case.features,) * 3
    scales = (1, 0) if case.e4m3 else (-1, -1)
    layer = Layer(
        16, head_dim, strides, strides, case.block_size, 8 * group, group, head_dim, 0,
        math.gcd(16, *strides), *features, case.e4m3, capability >= 89, *scales,
    )  # fmt: skip
    cut = Cut(16 * warps, case.vector, case.alike, case.features, case.shared)
    chained = capability >= 90
    rows = decode.rows_a_program(group, head_dim, many=case.many)
    kind = "u8" if case.e4m3 else case.element
    made = make(
        decode._attend_chunk, capability, case.element,
        decode.Form(layer, cut, case.many, 16, warps, rows, chained), cache=kind,
        num_warps=warps, num_stages=decode.stages_a_program(case.vector, e4m3=case.e4m3),
    )  # fmt: skip
    bound(made, registers=case.registers, spills=case.spills)
    if case.e4m3:  # half of them go where the products want 8 bytes at a time
        assert made.count("LDGSTS", "E", "BYPASS", "128") * 2 >= made.count("LDGSTS", "E", "64")
    else:
        copies_16_bytes(made, "LDGSTS")
    assert made.count("HMMA")
    if case.vector or case.alike:
        warps = merge.MANY_WARPS if case.vector >= merge.MANY_SEQS else merge.WARPS
        step = merge.parts_at_once(64, head_dim, warps)
        is_few = case.vector >= merge.MANY_SEQS or case.many
        form = merge.Form(
            cut, head_dim, 8 * group, head_dim, case.many, 1 if case.alike else group,
            min(step, merge.FEW_PARTS * warps) if is_few else step,
            layer.width, layer.width, min(power_of_two(group), merge.AT_ONCE // layer.width),
            chained, cascade.keys_a_tile(head_dim),
        )  # fmt: skip
        made = make(merge._merge_parts, capability, case.element, form, num_warps=warps)
        bound(made, registers=128 if is_few and head_dim <= 128 else 255, shared=16 << 10)
    if case.shared:
        made = make(
            cascade._attend_prefix, capability, case.element,
            cascade.Form(layer, cascade.ROWS, cascade.keys_a_tile(head_dim)), cache=kind,
            num_warps=cascade.WARPS, num_stages=cascade.STAGES,
        )  # fmt: skip
        bound(made, registers=255)
        copies_16_bytes(made, "LDGSTS")


@dataclass(frozen=True)
class Latents:
    """A shape of attention over latents of 512 + 64."""

    heads: int
    spills: tuple[int, int] = (0, 60)
    """Words at most, of parts and of tiles: 64 rows of sums fill the registers."""
    vector: int = 64
    block_size: int = 16
    features: bool = False
    e4m3: bool = False
    element: str = "bf16"


LATENTS = (
    Latents(16),
    Latents(32, vector=16, spills=(60, 60)),
    Latents(16, vector=0, block_size=5, features=True),
    Latents(128, spills=(60, 60)),
    Latents(16, spills=(200, 200), e4m3=True),
)


def check_latents(case, capability):
    """Both portable kernels, and on Hopper the one for few rows, whose products are wgmma."""
    strides, scale = (576 * case.block_size, 576, 0), 0 if case.e4m3 else -1
    layer = Layer(
        16, 512, strides, strides, case.block_size, case.heads, case.heads, 512, 64, 16,
        *(case.features,) * 3, case.e4m3, capability >= 89, scale, scale,
    )  # fmt: skip
    chained = capability >= 90
    room = 227 << 10 if chained else 163 << 10
    kernels = ((latent._attend_part, 1), (latent._attend_tile, 64))
    for (kernel, tokens), spills in zip(kernels, case.spills, strict=True):
        shape = latent.shape_for(case.heads, tokens, 1152, 2, room)
        cut = Cut(shape.tile, max(32, case.vector) if case.vector else 0, False, case.features)
        parts = (cut, chained) if kernel is latent._attend_part else (None, False)
        made = make(
            kernel, capability, case.element,
            latent.Form(layer, shape.tile, shape.rows, shape.heads, *parts),
            cache="u8" if case.e4m3 else None, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        assert made.count("HGMMA" if capability >= 90 else "HMMA")
        bound(made, registers=255, shared=room, spills=spills if capability >= 90 else 80)
    if capability >= 90 and not case.e4m3:
        check_hopper_latents(case, layer, room)


def check_hopper_latents(case, layer, room):
    """The kernel for few query tokens."""
    shape = latent.hopper_shape(case.heads, 1)
    cut = Cut(shape.tile, max(32, case.vector) if case.vector else 0, False, case.features)
    form = hopper_latent.Form(layer, cut, shape.rows, shape.heads, chained=True)
    made = make(
        hopper_latent.attend_rows, 90, case.element, form,
        source=GluonASTSource, num_warps=shape.warps, maxnreg=form.registers.launch,
    )  # fmt: skip
    copies_16_bytes(made, "LDGSTS")
    assert made.count("HGMMA") == 2 * (36 + 32)  # of both groups: a tile's logits, and sums
    spills = 100 if shape.rows == hopper_latent.ROWS_OF_LARGE_SUMS else 24
    bound(made, registers=form.registers.launch, shared=room, spills=spills)
    by_each_thread = "cp.async.mbarrier.arrive"
    assert unordered_arrivals(made.ptx.replace(by_each_thread, "")) == 0
    # for the kernel before: both groups and the copies, and one way out for programs without work
    assert (made.count("ACQBULK"), made.count("EXIT")) == (4, 3)
    if shape.rows < hopper_latent.ROWS_OF_LARGE_SUMS:
        check_merge_of_one(cut, (1 << 16) - 3 * 128 * form.registers.launch)


def check_merge_of_one(cut, registers):
    """The merge of one sequence's latents: a program of it runs beside one of the parts."""
    step = merge.parts_at_once(256, merge.PIECE, merge.MANY_WARPS)
    form = merge.Form(
        cut._replace(vector=1, alike=False), 512, 16, 512, False, 1, step, merge.PIECE, 512, 1,
        True, 0,
    )  # fmt: skip
    made = make(merge._merge_parts, 90, "bf16", form, num_warps=merge.MANY_WARPS)
    bound(made, registers=registers // (32 * merge.MANY_WARPS), shared=4 << 10)


def check_wide_latents():
    """The kernels for many rows: their tiles, and parts that are cut."""
    strides = (576 * 16, 576, 0)
    layer = Layer(
        16, 512, strides, strides, 16, 16, 16, 512, 64, 16, *(False,) * 4, True, -1, -1
    )  # fmt: skip
    for kernel, cut in ((wide.attend_tile, None), (wide.attend_part, Cut(64, 64, False, False))):
        form = wide.Form(layer, 16, 16, 16 * 512, cut, chained=cut is not None)
        kinds = {}
        for name, rows in (("q", [form.tokens, form.heads]), ("c", [16, 1])):
            for part, width in (("wide", form.half), ("rest", wide.REST)):
                layout = layout_of(width, 2)
                kinds[f"{name}_{part}"] = f"tensordesc<bf16{[*rows, width]},{layout!r}>"
        made = make(
            kernel, 90, "bf16", form, kinds=kinds, source=GluonASTSource, num_warps=wide.WARPS
        )
        assert made.count("HGMMA") == 2 * 36 + 3 * 4  # keys twice, values in turn, and the last
        assert made.count("UTMALDG") == 9 * (1 + 4)
        assert made.count("STG", "E", "128") == 2 * 16
        bound(made, registers=168, shared=227 << 10, spills=80)
        assert unordered_arrivals(made.ptx) == 0
        assert unordered_arrivals(re.sub(r"bar\.sync\s+[02], 128;", "", made.ptx)) >= 9


def unordered_arrivals(ptx):
    """Arrivals, by one thread of a group of warps, that no barrier of its group comes before.

    Such a thread speaks for its group: what the others have read or written must be behind them.
    """
    barrier = r"bar\.(?:warp\.)?sync|mbarrier\.(?:arrive\.expect_tx|arrive|try)"
    found = re.findall(rf"{barrier}|(?:st|ld)\.shared|stmatrix|wgmma|fence\.proxy", ptx)
    return sum(
        after == "mbarrier.arrive" and not before.startswith("bar.")
        for before, after in pairwise(found)
    )


def check_sparse(capability):
    """Scores, and the choice of both kinds of levels: in registers alone."""
    kinds = {"weights": "*fp32", "scores": "*fp32"}
    form = score_index.Form(128, 64, 128, 16, 16 * 128, 128, 16, 128)
    made = make(
        score_index._score, capability, "bf16", form, kinds=kinds,
        num_warps=4, num_stages=score_index.STAGES,
    )  # fmt: skip
    bound(made, registers=168, shared=128 << 10)
    copies_16_bytes(made, "LDGSTS")
    assert made.count("HGMMA" if capability >= 90 else "HMMA")
    for before, room in ((1, 4096), (4096, 2048)):
        form = choose_tokens.Form(2048, before, room, 16384, before == 1)
        made = make(choose_tokens._choose, capability, "fp32", form, kinds=kinds, num_warps=16)
        bound(made, registers=128, shared=4 << 10)


def check_moves(capability):
    """Stores, block copies, slots."""
    sizes = {
        "KEY_HEAD": 128, "VALUE_HEAD": 128, "K_STRIDES": (16384, 1024, 128),
        "V_STRIDES": (16384, 1024, 128), "BLOCK_SIZE": 16, "NUM_HEADS": 8, "HEAD_DIM": 128,
        "ALIGN": 16, "TOKENS": 1, "HEADS": 8, "WIDTH": 128, "E4M3": False,
        "NATIVE": capability >= 89, "K_SCALE": -1, "V_SCALE": -1, "LATENT": False,
    }  # fmt: skip
    options = {"num_warps": store_kv.WARPS}
    made = make(store_kv._scatter, capability, "bf16", sizes, **options)
    bound(made, registers=40, shared=0)
    assert made.count("LDG", "E", "128") == made.count("STG", "E", "128") == 2
    quantised = sizes | {"E4M3": True, "K_SCALE": 1, "V_SCALE": 0}
    made = make(store_kv._scatter, capability, "bf16", quantised, cache="u8", **options)
    bound(made, registers=64, shared=256)
    assert made.count("LDG", "E", "128") == made.count("STG", "E", "64") == 2
    sizes = {
        "STRIDE": 4096, "SIZE": 4096, "ALIGN": 2, "PIECES": 4, "WIDTH": 1024,
    }  # fmt: skip
    made = make(copy_blocks._copy, capability, "i64", sizes, num_warps=copy_blocks.WARPS)
    bound(made, registers=48, shared=0)
    assert made.count("LDG", "E", "128") == made.count("STG", "E", "128") > 0
    sizes |= {
        "HOST_STRIDE": 72 * 4096, "CACHES": 72, "PIECES": 2, "WIDTH": 2048, "MASK": -1,
        "LOW": SUM_LOW, "HIGH": SUM_HIGH,
    }  # fmt: skip
    for copies in (True, False):
        about = sizes | {"TO_HOST": copies, "FROM_HOST": False}
        made = make(move_blocks._move, capability, "i64", about, num_warps=move_blocks.WARPS)
        bound(made, registers=48, shared=256)
        assert made.count("LDG", "E", "128") == 4
        assert made.count("STG", "E", "128") == 4 * copies
    made = make(slot_mapping._fill, capability, "i64", {"BLOCK_SIZE": 16, "TILE": 128})
    bound(made, registers=40, shared=0)


def main():
    for capability in CAPABILITIES:
        for case in DECODES if capability == max(CAPABILITIES) else DECODES[::3]:
            check_decode(case, capability)
        for case in LATENTS if capability == max(CAPABILITIES) else LATENTS[:1]:
            check_latents(case, capability)
        check_moves(capability)
    check_wide_latents()
    sys.stdout.write("all kernels compile within their bounds\n")


if __name__ == "__main__":
    main()
