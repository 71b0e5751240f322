"""Hopper's kernels, and the portable one of prefill, under compute-sanitizer.

Run by test_triton_prefill.

memcheck has to find nothing. racecheck does report hazards of kernels whose warps have parts of
their own, because it loses sight of what orders these parts, so hazards are looked at one by one,
each case alone. All have to be of one of three kinds, and all are a read after a write:

- Triton's hand-over. Bytes at the end of shared memory tell each warp past the fourth which part of
  the program to run. The first four warps write them twice, as constants, and each other warp reads
  its own byte, with a barrier of all warps in between. A hazard passes if its address is there, one
  of the first four warps wrote it, the warp that it belongs to read it, and what was read is what
  is written there: the number of a part, or the one that ends the program.
- What a part is given. The first four warps leave it at fixed addresses, before the same barrier.
  A hazard passes if its address is one of those, one of these warps wrote it, and another read it.
- What one group of four warps stores for the other, which waits for a barrier before it reads: with
  wide latents, the first group stores its factors for the second. A hazard passes if the right
  group wrote it, in a function that stores this, and the other group read it, in the function that
  waits.

Three small kernels stand beside them. One has parts that wait for a barrier and share nothing else:
it gets the first reports, so that nothing of ours is needed for them. One hands numbers over as the
groups of wide latents do, and gets such reports too, though its numbers are always right. The last
has a race of its own, of plain loads and stores: it is reported, so that another race of ours would
be.
(What racecheck does not follow are the copies of the copy engine and what matrix instructions read;
for those stand the tests whose second run must be equal bit by bit.)

Usage: python -m tests.backends.sanitize_hopper, on a Hopper GPU
"""

# ruff: noqa: N803, N806 - compile-time values are upper case, as everywhere in Triton

import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import backends
from backends.conformance import AttentionCase
from backends.conformance.cases import build
from backends.triton_gpu.hopper import prefill as hopper_prefill
from backends.triton_gpu.latent import hopper as hopper_latent
from backends.triton_gpu.latent import wide
from backends.triton_gpu.prefill import prefill

SEQS = ((1, 37), (9, 9), (40, 133), (150, 150), (70, 400))
BASE = AttentionCase("", SEQS, padding=3, dtype=torch.bfloat16, group=4, head_dim=128)
LATENTS = BASE.with_(num_kv_heads=1, head_dim=576, value_dim=512, group=16, padding=0)
CASES = {
    "plain": BASE,
    "everything": BASE.with_(window=100, soft_cap=5.0, sinks=True, strided=True, head_dim=64),
    "wide heads, one sequence": BASE.with_(seqs=((300, 300),), head_dim=256, group=1),
    "more items than programs": BASE.with_(seqs=((700, 900),), num_kv_heads=8, group=3),
    "heads in two parts": BASE.with_(head_dim=96, group=3),
    "three groups, large tiles": BASE.with_(head_dim=64, batch_invariant=True),
    "pieces": BASE.with_(seqs=((40, 1500), (17, 2100), (1, 90))),
    "e4m3": BASE.with_(cache_dtype=torch.float8_e4m3fn, scales="head"),
    "e4m3, pieces": BASE.with_(
        seqs=((40, 1500),), cache_dtype=torch.float8_e4m3fn, scales="tensor", window=900
    ),
    "portable": BASE.with_(sinks=True),
    "latents": LATENTS.with_(seqs=((1, 400), (0, 9), (1, 33))),
    "latents, more rows": LATENTS.with_(seqs=((2, 90), (1, 70)), sinks=True, window=70),
    "wide latents": LATENTS.with_(seqs=((70, 400), (30, 30), (90, 90)), sinks=True, window=90),
    "wide latents in parts": LATENTS.with_(seqs=((1, 400), (0, 9), (1, 33)), group=64),
}
KERNELS = {
    "portable": prefill._attend.kernel,
    "latents": hopper_latent.attend_rows.kernel,
    "latents, more rows": hopper_latent.attend_rows.kernel,
    "wide latents": wide.attend_tile.kernel,
    "wide latents in parts": wide.attend_part.kernel,
}
WAIT, HANDED, RACE = "a wait and nothing else", "numbers handed over", "a race of its own"
RESERVED = 1024  # bytes at the start of shared memory that are the system's, from sm_90 on
STORE = re.compile(r"st\.shared\S*\s+\[global_smem\+(\d+)\], \{?([\d, ]+)\}?;")
GIVEN = re.compile(r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[global_smem\+(\d+)\], \{?%")
HAZARD = re.compile(
    r"Potential (?P<kind>\w+) hazard detected at __shared__ 0x(?P<at>\w+) .*\n"
    r"=+\s+(?:Write|Read) Thread \((?P<before>\d+),0,0\) at .*?(?P<wrote>\d*)\n"
    r"=+\s+(?:Write|Read) Thread \((?P<after>\d+),0,0\) at .*?(?P<read>\d*)\n"
    r"(?:=+\s+Current Value : (?P<value>\d+))?"
)


@gluon.jit
def _part(out, shared, barrier, PART: gl.constexpr, WARPS: gl.constexpr, DOES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.arange(0, 128, LAYOUT)
    if PART == 0:
        mbarrier.arrive(barrier.index(0), count=1)
        if DOES == "race":
            shared.store(at.to(gl.int64))
        if DOES == "hand":
            mbarrier.wait(barrier.index(1), 0)
            gl.store(out + at, shared.load(LAYOUT))
    else:
        mbarrier.wait(barrier.index(0), 0)
        if DOES == "race":
            gl.store(out + PART * 128 + at, shared.load(LAYOUT))
        if (DOES == "hand") & (PART == 1):
            shared.store(at.to(gl.int64) * 3)
            mbarrier.arrive(barrier.index(1), count=1)


@gluon.jit
def _parts(out, DOES: gl.constexpr):
    """Two parts wait until the first has been somewhere; what else they do is wrong or right."""
    shared = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier.index(0), count=1)
    mbarrier.init(barrier.index(1), count=1)
    gl.warp_specialize(
        [
            (_part, (out, shared, barrier, 0, 4, DOES)),
            (_part, (out, shared, barrier, 1, 4, DOES)),
            (_part, (out, shared, barrier, 2, 1, DOES)),
        ],
        [4, 1],
        [240, 24],
    )


def run(name):
    """Run a case, and print where the hand-over's bytes start, and what lies where."""
    if name in CASES:
        backend = backends.get_backend("triton")
        if name == "portable":
            hopper_prefill.can_attend = lambda *_: False
        build(CASES[name], backend.device).run(backend)
        kernel = KERNELS.get(name, hopper_prefill._attend.kernel)
    else:
        out = torch.zeros(384, dtype=torch.int64, device="cuda")
        does = {WAIT: "wait", HANDED: "hand", RACE: "race"}[name]
        _parts[1 if does == "race" else 132,](out, does, num_warps=4, maxnreg=168)
        kernel = _parts
        assert does != "hand" or out[:128].equal(3 * torch.arange(128, device="cuda"))
    torch.cuda.synchronize()
    (compiled,) = (each for cache in kernel.device_caches.values() for each in cache[0].values())
    if name == "portable":
        sys.stdout.write("hand-over 0\n")
        return
    start, written = hand_over(compiled.asm["ptx"])
    assert len(set(map(len, written))) == 1
    assert start + len(written[0]) <= compiled.metadata.shared
    sys.stdout.write(f"hand-over {start} {' '.join(each.hex() for each in written)}\n")
    sys.stdout.write(f"given {' '.join(map(str, given(compiled.asm['ptx'])))}\n")


def given(ptx):
    """The addresses of what the first warps leave for the others: numbers at fixed places."""
    found = set()
    for many, bits, at in GIVEN.findall(ptx):
        found.update(range(int(at), int(at) + int(many or 1) * int(bits) // 8))
    return sorted(found)


def hand_over(ptx):
    """Where in shared memory the bytes of the hand-over start, and all that is written there."""
    stores = [
        (int(at), b"".join(int(word).to_bytes(4, "little") for word in words.split(",")))
        for at, words in STORE.findall(ptx)
    ]
    start, written = min(at for at, _ in stores), []
    for at, each in stores:  # more than two words are stored in several parts
        if at == start:
            written.append(each)
        else:
            assert at == start + len(written[-1]), stores
            written[-1] += each
    return start, written


def sanitize(tool, name):
    """What compute-sanitizer prints of a case."""
    options = ["--racecheck-report", "hazard"] if tool == "racecheck" else ["--error-exitcode", "9"]
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "100000", *options]
    command += [sys.executable, "-m", __spec__.name, name]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "hand-over" in done.stdout, done.stdout[-3000:] + done.stderr
    return done.stdout


def lines_of(function):
    """The lines of a kernel's function."""
    first = function.starting_line_number
    return range(first, first + len(function.src.splitlines()))


def sort_hazards(name, text):
    """How many hazards are of each kind; those of none."""
    start, *written = re.search(r"^hand-over (.*)$", text, re.MULTILINE)[1].split()
    written = [bytes.fromhex(each) for each in written]
    found = re.search(r"^given (.*)$", text, re.MULTILINE)
    places = set(map(int, found[1].split())) if found else set()
    awaited = _awaited(name)
    hazards = [found.groupdict() for found in HAZARD.finditer(text)]
    displayed = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", text)[1]
    assert len(hazards) == int(displayed), (name, len(hazards), displayed)
    counts, ours = Counter(), []
    for hazard in hazards:
        at = int(hazard["at"], 16) - RESERVED
        before, after = (int(hazard[which]) // 32 for which in ("before", "after"))
        if hazard["kind"] != "RAW":
            ours.append(hazard)
        elif before < 4 and _is_hand_over(at - int(start), after, hazard["value"], written):
            counts["of the hand-over"] += 1
        elif before < 4 <= after and at in places:
            counts["of what parts are given"] += 1
        elif awaited and awaited.has(hazard, before // 4, after // 4):
            counts["of what is waited for"] += 1
        else:
            ours.append(hazard)
    return counts, ours


def _is_hand_over(place, reader, value, written):
    is_there = any(0 <= place < len(each) and each[place] == int(value) for each in written)
    return is_there and reader == 4 + place


class _Awaited(NamedTuple):
    """What is left by one group of warps and waited for by another."""

    writer: int
    """The group of four warps; likewise the reader."""
    writes: tuple[object, ...]
    """The functions that leave it."""
    reader: int
    reads: object
    """The function that waits."""

    def has(self, hazard, writer, reader):
        written = any(int(hazard["wrote"]) in lines_of(each) for each in self.writes)
        read = int(hazard["read"]) in lines_of(self.reads)
        return written and read and (writer, reader) == (self.writer, self.reader)


def _awaited(name):
    if name == HANDED:
        return _Awaited(1, (_part,), 0, _part)
    if name.startswith("wide"):
        return _Awaited(0, (wide._publish, wide._lead_rows), 1, wide._follow)
    return None


def main():
    names = (*CASES, WAIT, HANDED, RACE)
    with ThreadPoolExecutor() as pool:
        raced = pool.map(sanitize, ("racecheck",) * len(names), names)
        checked = pool.map(sanitize, ("memcheck",) * len(CASES), CASES)
        reports = dict(zip(names, raced, strict=True))
        assert all("ERROR SUMMARY: 0 errors" in text for text in checked)
    for name, text in reports.items():
        counts, ours = sort_hazards(name, text)
        told = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        sys.stdout.write(f"{name}: hazards {told or 'none'}, {len(ours)} others\n")
        assert bool(ours) == (name == RACE), Counter(tuple(each.items()) for each in ours)
        assert name != HANDED or counts["of what is waited for"]
    sys.stdout.write("memcheck finds nothing, racecheck what it cannot follow alone\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        main()
