"""The mutation score: change one thing in a file, run the tests, and see whether one fails.

The changes are those of cosmic-ray; this runs them quickly. Each mutant is imported in a process of
its own, forked from one that has loaded pytest already, so no file on the disk is ever changed.
What differs in annotations or in `@final` alone is no mutant: nothing evaluates those.

    python -m tests.kvcore.mutation kvcore/pool.py
    python -m tests.kvcore.mutation --sample 20
    python -m tests.kvcore.mutation --changed main --minutes 3 --minimum 75

The second scores every file of kvcore and of model/control by twenty of its mutants; without a
sample all of them are tried. The third takes the files that differ from a revision, one mutant of
each after another, until the time is over. The order of a file's mutants is always the same. Every
mutant that no test catches is printed, and the score.

`AREAS` says which tests are run: first those named after the file, then the rounds of its area.
With `--tests` these are run instead, on a mutant of any file. A mutant that never ends is stopped:
a round of tests may take `PATIENCE` times the CPU time that it takes on the file as it is.
"""

import argparse
import ast
import contextlib
import difflib
import gc
import importlib.abc
import importlib.util
import io
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import hypothesis.stateful
import hypothesis.strategies
import numpy as np  # noqa: F401  # loaded once, for all mutants
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[2]
NOT_SCORED = {"__init__", "__main__", "build_hook"}


class Area(NamedTuple):
    """Some files, and the rounds of tests that are run on their mutants, the fast ones first.

    `loads` are the modules that take long to import and are not ours: loaded once, for all mutants.
    """

    files: tuple[str, ...]
    tests: str
    rounds: tuple[str, ...]
    loads: tuple[str, ...] = ()


ALLOCATOR = (
    "kvcore/*.py",
    *(f"kvcore/{folder}/*.py" for folder in ("identity", "eviction", "tables", "verbs", "inspect")),
)

AREAS = (  # a file belongs to the first that matches
    Area(("kvcore/wire/*.py",), "tests/kvcore/wire", ("messages stream", "sockets"), ("zmq",)),
    Area(
        ("kvcore/adapters/vllm/*.py",),
        "tests/adapters",
        ("vllm_prompts vllm_lookahead vllm_register vllm_manager",),
        ("torch",),
    ),
    Area(
        ("kvcore/adapters/transformers/*.py",),
        "tests/adapters",
        ("transformers_cache transformers_ledger",),
        ("torch", "transformers"),
    ),
    Area(
        ALLOCATOR,
        "tests/kvcore",
        (
            "manager capabilities decode_step unknown_tokens step load bad_transfers",
            "machines pool_properties",
            "block free_queue groups namespace pool content_tree idle_blocks deadlines",
            "peaks pool_map hostile invariants tokens slots look_ups",
            "block_hash inexpressible determinism",
            "cost",
            "faults",
            "small_scope",
        ),
    ),
    Area(
        ("model/control/*.py",),
        "tests/model",
        (
            "scheduler scheduler_late scheduler_order scheduler_waits swap control/request pace",
            "scheduler_machine control/settings cli/args sample/grammar drafts view/pool_frames",
            "async_engine engine_sampling shared_prefix attention/batch flags",
        ),
        ("torch", "transformers", "llguidance"),
    ),
)
DEFAULT = (*ALLOCATOR, "model/control/*.py")  # scored where no file is named
OPTIONS = ["-x", "-q", "--tb=no", "--assert=plain", "--hypothesis-profile=mutation"]
OPTIONS += ["-o", "addopts=", "-m", "not slow and not walk", "-p", "no:cacheprovider"]
OPTIONS += ["-p", "_hypothesis_pytestplugin"]
PATIENCE = 5  # times what a round takes, and
SECONDS = 20  # seconds of CPU besides, because a busy machine is slower
GIGABYTES = 4
FEW = 30  # fewer mutants than that give no verdict
MANY = 8  # more files than that are not scored, where those that changed are asked for

hypothesis.settings.register_profile(
    "mutation",
    max_examples=8,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    report_multiple_bugs=False,
    deadline=None,
)


class Planted(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from other source."""

    def __init__(self, path, source):
        self.path, self.source = path, source
        self.name = path.with_suffix("").relative_to(ROOT).as_posix().replace("/", ".")

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_filename(self, fullname):
        return str(self.path)

    def get_data(self, path):
        return self.source.encode()


def meaning(source):
    """What of a source is evaluated, to compare."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            node.decorator_list = [d for d in node.decorator_list if ast.dump(d) != FINAL]
        for field in {"annotation", "returns"} & set(node._fields):
            setattr(node, field, ast.Constant(0) if field == "annotation" else None)
    return ast.dump(tree)


FINAL = ast.dump(ast.parse("final", mode="eval").body)


def mutants(source):
    """Yield every different mutant of a source, as source, in an order that is always the same."""
    places = []
    tree = get_ast(source)
    for name in sorted(operator_names()):
        operator = get_operator(name)
        if not operator.arguments():
            counts = [len(list(operator().mutation_positions(node))) for node in ast_nodes(tree)]
            places += [(operator, occurrence) for occurrence in range(sum(counts))]
    random.Random(0).shuffle(places)
    seen = {meaning(source)}
    for operator, occurrence in places:
        try:
            mutant = mutate_code(source, operator(), occurrence)
            meant = meaning(mutant)
        except (AttributeError, SyntaxError):  # cosmic-ray stumbles over `except a.b`
            continue
        if meant not in seen:
            seen.add(meant)
            yield mutant


def files_of(patterns):
    """The files that are scored, of those that fit the patterns."""
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [p for p in dict.fromkeys(found) if p.stem not in NOT_SCORED]


def changed_since(base):
    """The files that are scored and differ from a revision."""
    git = ["git", "-C", str(ROOT), "diff", "--name-only", base, "--", "*.py"]
    names = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split()
    return [
        p
        for p in files_of([pattern for area in AREAS for pattern in area.files])
        if str(p.relative_to(ROOT)) in names
    ]


def area_of(path):
    """The area of a file, None if it has none."""
    return next((area for area in AREAS if path in files_of(area.files)), None)


def rounds_for(path):
    """The tests to run on a mutant of a file, those that are named after it first."""
    area = area_of(path)
    if area is None:
        raise SystemExit(f"{path}: AREAS has no tests for it: name some with --tests")
    folder = ROOT / area.tests
    own = sorted(folder.rglob(f"test_{path.stem}*.py"))
    named = [[test_file(folder, name) for name in names.split()] for names in area.rounds]
    return [tuple(map(str, tests)) for tests in (own, *named) if tests]


def test_file(folder, name):
    """The tests of this name, in the folder or below it."""
    place, _, stem = name.rpartition("/")
    [path] = (folder / place).glob(f"test_{stem}.py") if place else folder.rglob(f"test_{stem}.py")
    return path


def begin(path, source, rounds, limits):
    """Run rounds of tests on a file with other source, in a process of its own; return its id.

    `limits` are seconds of CPU, and of the clock, for each round.
    """
    child = os.fork()
    if child:
        return child
    os.setsid()  # what it starts can be ended with it
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES << 30, GIGABYTES << 30))
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, Planted(path, source))
    for tests, (cpu, clock) in zip(rounds, limits, strict=True):
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + cpu), hard))
        signal.alarm(int(clock))
        if pytest.main([*OPTIONS, *tests]):
            os._exit(1)
    os._exit(0)


def run(tasks, jobs):
    """Run tasks, at most `jobs` at once; yield (key, status, CPU, clock) of each as it ends.

    A task is a key and the arguments of `begin`.
    """
    tasks, running = iter(tasks), {}
    while True:
        for key, *arguments in itertools.islice(tasks, jobs - len(running)):
            running[begin(*arguments)] = key, time.monotonic()
        if not running:
            return
        child, status, used = os.wait4(-1, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        key, begun = running.pop(child)
        yield key, status, used.ru_utime + used.ru_stime, time.monotonic() - begun


def limits_of(rounds, jobs):
    """How long each round may take: by what it takes when nothing is wrong."""
    tasks = []
    for path, all_tests in rounds.items():
        source = path.read_text(encoding="utf-8")
        known = {key for key, *_ in tasks}
        new = [tests for tests in all_tests if tests not in known]
        tasks += [(tests, path, source, [tests], [(3600, 3600)]) for tests in new]
    limits = {}
    for tests, status, cpu, clock in run(tasks, jobs):
        if status:
            raise SystemExit(f"the tests fail without any mutation: {' '.join(tests)}")
        limits[tests] = PATIENCE * cpu + SECONDS, 2 * PATIENCE * clock + 3 * SECONDS
    return limits


def tasks_for(rounds, limits, sample, until):
    """Mutants to run, one of each file after another, until the time is over."""
    waiting = [
        (path, itertools.islice(mutants(path.read_text(encoding="utf-8")), sample))
        for path in rounds
    ]
    while waiting:
        left = []
        for path, more in waiting:
            if time.monotonic() > until:
                return
            mutant = next(more, None)
            if mutant is not None:
                left.append((path, more))
                patience = [limits[tests] for tests in rounds[path]]
                yield (path, mutant), path, mutant, rounds[path], patience
        waiting = left


def shown(path, mutant):
    """The lines that differ."""
    source = path.read_text(encoding="utf-8")
    lines = difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm="")
    return "\n".join(["  " + line for line in [*lines][2:]])


def tell(line):
    print(line, flush=True)  # noqa: T201  # a command line prints


def score(rounds, options):
    """Run mutants of files; print those that survive, and the scores; return the one of all."""
    for area in filter(None, map(area_of, rounds)):
        for module in area.loads:
            importlib.import_module(module)
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*OPTIONS, "--markers"])  # loads pytest, once for all
    gc.collect()
    gc.freeze()
    until = time.monotonic() + 60 * options.minutes
    limits = limits_of(rounds, options.jobs)
    tried, survived = Counter(), Counter()
    tasks = tasks_for(rounds, limits, options.sample, until)
    for (path, mutant), status, _, _ in run(tasks, options.jobs):
        tried[path] += 1
        if status == 0:
            survived[path] += 1
            tell(f"{path.relative_to(ROOT)} survived:\n{shown(path, mutant)}")
    for path in rounds:
        tell(f"{path.relative_to(ROOT)}: {tried[path]} mutants, {survived[path]} survived")
    number, alive = tried.total(), survived.total()
    percent = 100 * (number - alive) / max(1, number)
    tell(f"{number} mutants, {alive} survived: {percent:.1f} %")
    return number, percent


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="what to score; none: all of DEFAULT")
    parser.add_argument("--changed", metavar="BASE", help="score what differs from this revision")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants of each file")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no more then")
    parser.add_argument(
        "--minimum", type=float, default=0, help="fail below this score, in percent"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--tests", nargs="+", help="run these instead of those of the area")
    options = parser.parse_args()
    files = [path.resolve() for path in options.files]
    if options.changed:
        files = changed_since(options.changed)
        if len(files) > MANY:  # the tests of each have to be run without a mutant first
            tell(f"{len(files)} files have changed; {MANY} of them are scored")
            files = random.Random(0).sample(files, MANY)
    files = files or ([] if options.changed else files_of(DEFAULT))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of others take longer than a round
    own = [tuple(options.tests)] if options.tests else None
    number, percent = score({path: own or rounds_for(path) for path in files}, options)
    if number < FEW:
        tell(f"fewer than {FEW} mutants: no verdict")
    elif percent < options.minimum:
        raise SystemExit(f"wanted a score of {options.minimum:g} % at least")


if __name__ == "__main__":
    main()
