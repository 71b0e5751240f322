"""`python -m tests.bench start`: how long a user waits, from a command to its first result.

Each is a process of its own, by the clock on the wall; the first of each, which also reads files
from the disk and compiles, is not counted but with `--quick`.

With flags of a server (`--model PATH`, say) it starts that server again and again instead: from the
process to its first answer, once with empty caches and once with full ones in each round, and the
parts of each start on stderr.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request

from tests.bench.measure import BenchError, Case, Round, Row, Spread, Subject, measure
from tests.bench.server import serving

TAKES_MORE = True
HEADINGS = {"start": "From the start of a process to its first result."}
_CACHES = ("KVCORE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")
_SERVER = """
import logging, runpy, sys
logging.basicConfig(format="  %(relativeCreated)6.0f ms  %(message)s")
logging.getLogger("model.start").setLevel("DEBUG")
runpy.run_module("model.serve", run_name="__main__", alter_sys=True)
"""  # the time since Python was ready
_COMMANDS = {
    "`import kvcore`": ["-c", "import kvcore"],
    "`import model`": ["-c", "import model"],
    "`model.minimal` writes 24 tokens": ["-m", "model.minimal", "A tuple is"],
    "`model.run` writes a token": ["-m", "model.run", "--prompt", "A tuple", "--max-tokens", "1"],
}


def add_flags(parser):
    parser.add_argument("--rounds", type=int, default=5)


def rows(options):
    if options.rest:
        yield from _servers(options)
        return
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


def _servers(options):
    """Starts with empty and with full caches, in turns."""
    found = {"nothing on disk": [], "a second start": []}
    for _ in range(1 if options.quick else options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: f"{folder}/{name}" for name in _CACHES}
            for name, times in found.items():
                times.append(_first_answer(name, options.rest, {**os.environ, **caches}))
    for name, times in found.items():
        clock, work = (sorted(each) for each in zip(*times, strict=True))
        middle = len(clock) // 2
        cost = Spread(clock[middle], clock[0], clock[-1])
        yield Row("start", f"{name}.", "server", "ns", cost, rates={"s of CPU": work[middle]})


def _first_answer(name, flags, environment):
    """Nanoseconds of a start, and seconds of processor time of the process and its helpers."""
    begin, before = time.perf_counter_ns(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.NamedTemporaryFile() as errors:
        with serving(flags, environment, errors, ("-c", _SERVER)) as url:
            body = b'{"prompt": "a", "max_tokens": 1}'
            head = {"Content-Type": "application/json"}
            asked = urllib.request.Request(f"{url}/v1/completions", body, head)  # noqa: S310  # ours
            with urllib.request.urlopen(asked, timeout=300) as answer:  # noqa: S310
                answer.read()
            took = time.perf_counter_ns() - begin
        errors.seek(0)
        print(f"{name}: {took / 1e9:.2f} s", errors.read().decode(), sep="\n", file=sys.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
