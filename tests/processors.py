"""`python -m tests.processors`: tests as other processors run them.

Libraries choose their code by the processor: which instructions it has, and who made it. So a test
may pass on one and fail on another, most often one that compares results to the bit. Each setting
below makes the libraries choose as they do elsewhere; what this processor lacks is left out.

    python -m tests.processors                          # every folder that computes, every setting
    python -m tests.processors --quick                  # as the gate does: under a minute
    python -m tests.processors --only avx2-amd tests/model/sample -k draw

Decides: the settings, and the tests that depend on them. What follows the flags goes to pytest.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "avx2-amd": {
        "OPENBLAS_CORETYPE": "Zen", "ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "znver2",
        "NUMBA_CPU_FEATURES": "", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "avx2-intel": {
        "OPENBLAS_CORETYPE": "Haswell", "ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "avx": {
        "OPENBLAS_CORETYPE": "Sandybridge", "ATEN_CPU_CAPABILITY": "default",
        "NUMBA_CPU_NAME": "ivybridge", "NUMBA_CPU_FEATURES": "",
        "MKL_ENABLE_INSTRUCTIONS": "AVX", "ONEDNN_MAX_CPU_ISA": "AVX",
    },
    "sse": {
        "OPENBLAS_CORETYPE": "Prescott", "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    "avx512": {
        "OPENBLAS_CORETYPE": "SkylakeX", "ATEN_CPU_CAPABILITY": "avx512",
        "NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": "",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    },
}  # fmt: skip
"""By name: what each library is told. The first is what the gate runs.

The CPU kernels need F16C, which every processor with AVX has had since 2012: numba's "generic" ends
with LLVM's "Symbol not found: __extendhfsf2" at the first float16.
"""

NEEDS = {
    "avx2-amd": "avx2", "avx2-intel": "avx2", "avx": "f16c", "sse": "sse4_2", "avx512": "avx512f",
}  # fmt: skip
"""The flag of the processor that each setting's instructions need, as Linux names it."""

FOLDERS = (
    "tests/backends", "tests/adapters", "tests/model/attention", "tests/model/caches",
    "tests/model/compile", "tests/model/forward", "tests/model/load", "tests/model/sample",
    "tests/model/test_engine.py",
)  # fmt: skip
_ROWS = "tests/model/forward/test_batch_invariant.py"
QUICK = (
    f"{_ROWS}::test_a_row_is_the_same_among_any_others_in_the_kernels_of_a_gpu",
    f"{_ROWS}::test_without_it_the_check_has_something_to_find",
    "tests/backends/test_oracle.py",
)
"""Tests that compare bits of products, and compile no kernel."""


def can_run(name, flags):
    """Whether a processor with these flags has the instructions of a setting."""
    return NEEDS[name] in flags


def flags_of_this_processor():
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def run(name, arguments):
    """Run pytest under a setting; its exit code."""
    print(f"== {name}: {' '.join(f'{key}={value}' for key, value in SETTINGS[name].items())}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, **SETTINGS[name]}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.processors", description=__doc__)
    parser.add_argument("--only", action="append", choices=SETTINGS, help="repeatable")
    parser.add_argument("--quick", action="store_true", help="the first setting, few tests")
    options, arguments = parser.parse_known_args()
    flags = flags_of_this_processor()
    names = options.only or [*SETTINGS][: 1 if options.quick else None]
    arguments = arguments or (["-n0", *QUICK] if options.quick else [*FOLDERS])
    failed = []
    for name in names:
        if not can_run(name, flags):
            print(f"== {name}: left out, this processor has no {NEEDS[name]}")
        elif run(name, arguments):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
