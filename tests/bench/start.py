"""`python -m tests.bench start`: how long a user waits, from a command to its first result.

Each is a process of its own, by the clock on the wall; the first of each, which also reads files
from the disk and compiles, is not counted but with `--quick`.
"""

import subprocess
import sys
import time

from tests.bench.measure import BenchError, Case, Round, Subject, measure
from tests.bench.server import serving

HEADINGS = {"start": "From the start of a process to its first result."}
_COMMANDS = {
    "`import kvcore`": ["-c", "import kvcore"],
    "`import model`": ["-c", "import model"],
    "`model.minimal` writes 24 tokens": ["-m", "model.minimal", "A tuple is"],
    "`model.run` writes a token": ["-m", "model.run", "--prompt", "A tuple", "--max-tokens", "1"],
}


def add_flags(parser):
    parser.add_argument("--rounds", type=int, default=5)


def rows(options):
    runs = {name: lambda flags=flags: _run(flags) for name, flags in _COMMANDS.items()}
    for name, run in {**runs, "`model.serve` is ready": _serve}.items():
        timed = [(Subject("here", None, is_ours=True), lambda run=run: _timed(run))]
        rounds, warm_up = (1, 0) if options.quick else (options.rounds, 1)
        yield from measure(Case("start", f"{name}.", timed, rounds, warm_up))


def _timed(run):
    begin = time.perf_counter_ns()
    return Round(run() - begin)


def _run(flags):
    done = subprocess.run([sys.executable, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(done.stderr.strip())
    return time.perf_counter_ns()


def _serve():
    with serving([]):
        return time.perf_counter_ns()
