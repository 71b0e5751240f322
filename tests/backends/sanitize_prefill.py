"""Prefill's kernels under compute-sanitizer; run by test_triton_prefill.

memcheck has to find nothing. racecheck does report hazards of Hopper's kernel, so they are looked
at address by address, each case alone. All have to be Triton's own hand-over: the bytes at the end
of shared memory that tell each warp past the fourth which part of the program to run. The first
four warps write them twice, as constants, and each other warp reads its own byte, with a barrier of
all warps in between that racecheck loses sight of. So a hazard passes if its address is there, one
of the first four warps wrote it, the warp that it belongs to read it, and what was read is what is
written there: the number of a part, or the one that ends the program.

Two small kernels stand beside them. One has parts that wait for a barrier and share nothing else:
it gets the same reports, so that nothing of ours is needed for them. The other has a race of its
own, of plain loads and stores: it is reported, so that another race of ours would be. (What
racecheck does not follow are the copies of the copy engine and what matrix instructions read; for
those stand the tests whose second run must be equal bit by bit.)

Usage: python -m tests.backends.sanitize_prefill, on a Hopper GPU
"""

# ruff: noqa: N803, N806 - compile-time values are upper case, as everywhere in Triton

import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import backends
from backends.conformance import AttentionCase
from backends.conformance.cases import build
from backends.triton_gpu import hopper_prefill, prefill

SEQS = ((1, 37), (9, 9), (40, 133), (150, 150), (70, 400))
BASE = AttentionCase("", SEQS, padding=3, dtype=torch.bfloat16, group=4, head_dim=128)
CASES = {
    "plain": BASE,
    "everything": BASE.with_(window=100, soft_cap=5.0, sinks=True, strided=True, head_dim=64),
    "wide heads, one sequence": BASE.with_(seqs=((300, 300),), head_dim=256, group=1),
    "more items than programs": BASE.with_(seqs=((700, 900),), num_kv_heads=8, group=3),
    "heads in two parts": BASE.with_(head_dim=96, group=3),
    "pieces": BASE.with_(seqs=((40, 1500), (17, 2100), (1, 90))),
    "e4m3": BASE.with_(cache_dtype=torch.float8_e4m3fn, scales="head"),
    "e4m3, pieces": BASE.with_(
        seqs=((40, 1500),), cache_dtype=torch.float8_e4m3fn, scales="tensor", window=900
    ),
    "portable": BASE.with_(sinks=True),
}
WAIT, RACE = "a wait and nothing else", "a race of its own"
RESERVED = 1024  # bytes at the start of shared memory that are the system's, from sm_90 on
STORE = re.compile(r"st\.shared\S*\s+\[global_smem\+(\d+)\], \{?([\d, ]+)\}?;")
HAZARD = re.compile(
    r"Potential (?P<kind>\w+) hazard detected at __shared__ 0x(?P<at>\w+) .*\n"
    r"=+\s+(?:Write|Read) Thread \((?P<before>\d+),0,0\) at .*\n"
    r"=+\s+(?:Write|Read) Thread \((?P<after>\d+),0,0\) at .*\n"
    r"(?:=+\s+Current Value : (?P<value>\d+))?"
)


@gluon.jit
def _part(out, shared, barrier, PART: gl.constexpr, WARPS: gl.constexpr, RACES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.arange(0, 128, LAYOUT)
    if PART == 0:
        mbarrier.arrive(barrier.index(0), count=1)
        if RACES:
            shared.store(at.to(gl.int64))
    else:
        mbarrier.wait(barrier.index(0), 0)
        if RACES:
            gl.store(out + PART * 128 + at, shared.load(LAYOUT))


@gluon.jit
def _parts(out, RACES: gl.constexpr):
    """Two parts wait until the first has been somewhere; with RACES not until its data is there."""
    shared = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier.index(0), count=1)
    gl.warp_specialize(
        [
            (_part, (out, shared, barrier, 0, 4, RACES)),
            (_part, (out, shared, barrier, 1, 4, RACES)),
            (_part, (out, shared, barrier, 2, 1, RACES)),
        ],
        [4, 1],
        [240, 24],
    )


def run(name):
    """Run a case, and print where the hand-over's bytes start and what is written there."""
    if name in CASES:
        backend = backends.get_backend("triton")
        if name == "portable":
            hopper_prefill.can_attend = lambda *_: False
        build(CASES[name], backend.device).run(backend)
        kernel = (prefill if name == "portable" else hopper_prefill)._attend.kernel
    else:
        out = torch.zeros(384, dtype=torch.int64, device="cuda")
        _parts[1 if name == RACE else 132,](out, name == RACE, num_warps=4, maxnreg=168)
        kernel = _parts
    torch.cuda.synchronize()
    (compiled,) = (each for cache in kernel.device_caches.values() for each in cache[0].values())
    if name == "portable":
        sys.stdout.write("hand-over 0\n")
        return
    start, written = hand_over(compiled.asm["ptx"])
    assert {start + len(each) for each in written} == {compiled.metadata.shared}
    sys.stdout.write(f"hand-over {start} {' '.join(each.hex() for each in written)}\n")


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


def sort_hazards(name, text):
    """(those of Triton's hand-over, the others)."""
    start, *written = re.search(r"^hand-over (.*)$", text, re.MULTILINE)[1].split()
    written = [bytes.fromhex(each) for each in written]
    hazards = [found.groupdict() for found in HAZARD.finditer(text)]
    displayed = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", text)[1]
    assert len(hazards) == int(displayed), (name, len(hazards), displayed)
    theirs, ours = [], []
    for hazard in hazards:
        (theirs if _is_hand_over(hazard, int(start), written) else ours).append(hazard)
    return theirs, ours


def _is_hand_over(hazard, start, written):
    place = int(hazard["at"], 16) - RESERVED - start
    return (
        hazard["kind"] == "RAW"
        and any(0 <= place < len(each) and each[place] == int(hazard["value"]) for each in written)
        and int(hazard["before"]) // 32 < 4
        and int(hazard["after"]) // 32 == 4 + place
    )


def main():
    names = (*CASES, WAIT, RACE)
    with ThreadPoolExecutor() as pool:
        raced = pool.map(sanitize, ("racecheck",) * len(names), names)
        checked = pool.map(sanitize, ("memcheck",) * len(CASES), CASES)
        reports = dict(zip(names, raced, strict=True))
        assert all("ERROR SUMMARY: 0 errors" in text for text in checked)
    for name, text in reports.items():
        theirs, ours = sort_hazards(name, text)
        sys.stdout.write(f"{name}: {len(theirs)} hazards of the hand-over, {len(ours)} others\n")
        assert bool(ours) == (name == RACE), Counter(tuple(each.items()) for each in ours)
    sys.stdout.write("memcheck finds nothing, racecheck the hand-over alone\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        main()
