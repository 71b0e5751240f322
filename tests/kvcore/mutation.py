"""The mutation score: change one thing in a file, run the tests, and see whether one notices.

The changes are those of cosmic-ray (`pip install cosmic-ray`); this runs them quickly. Each mutant
is imported in a process of its own, forked from one that has loaded pytest already, so no file on
the disk is ever changed. What differs in annotations or in `@final` alone is no mutant: nothing
evaluates those.

    python -m tests.kvcore.mutation kvcore/pool.py
    python -m tests.kvcore.mutation --sample 20

The second scores every file of the core by twenty of its mutants, always the same ones, and a
larger sample begins with a smaller one; without a sample all of them are tried. Every mutant that
no test notices is printed, and the score. A mutant that never ends is stopped: a round of tests may
take `PATIENCE` times the CPU time that it takes on the file as it is.
"""

import argparse
import ast
import contextlib
import difflib
import gc
import importlib.abc
import importlib.util
import io
import os
import random
import resource
import sys
from itertools import islice
from pathlib import Path

import hypothesis.stateful
import hypothesis.strategies
import numpy as np  # noqa: F401  # loaded once, for all mutants
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[2]
NOT_SCORED = {"__init__", "build_hook"}
FILES = sorted(p.stem for p in (ROOT / "kvcore").glob("*.py") if p.stem not in NOT_SCORED)
# After those of the file itself; first the fast ones that most mutants die of, then the slow ones.
TESTS = (
    ("manager", "capabilities", "decode_step", "untold", "loads", "bad_transfers"),
    ("machines", "pool_properties"),
    ("block", "free_queue", "groups", "hashing", "pool", "content_tree", "idle_blocks"),
    ("peaks", "pool_map", "hostile", "invariants", "tokens", "slots", "short_ways", "look_ups"),
    ("block_keys", "inexpressible", "determinism"),
    ("cost",),
    ("faults",),
    ("small_scope",),
)
OPTIONS = ["-x", "-q", "--tb=no", "--assert=plain", "--hypothesis-profile=mutation"]
OPTIONS += ["-o", "addopts=", "-m", "not slow and not walk", "-p", "no:cacheprovider"]
OPTIONS += ["-p", "_hypothesis_pytestplugin"]
PATIENCE = 5  # times what a round takes, and
SECONDS = 20  # seconds of CPU besides, because a busy machine is slower
GIGABYTES = 4

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


def cpu_time():
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def survives(path, source, rounds, limits):
    """Run rounds of tests on a file with other source, in a process of its own."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, Planted(path, source))
    for tests, limit in zip(rounds, limits, strict=True):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_time() + limit), hard))
        if pytest.main([*OPTIONS, *tests]):
            os._exit(1)
    os._exit(0)


def limits_of(path, rounds):
    """How much CPU time each round may take: by what it takes when nothing is wrong."""
    limits = []
    for tests in rounds:
        begun = resource.getrusage(resource.RUSAGE_CHILDREN)
        if not survives(path, path.read_text(encoding="utf-8"), [tests], [3600]):
            raise SystemExit(f"the tests fail without any mutation: {' '.join(tests)}")
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        limits.append(PATIENCE * (sum(ended[:2]) - sum(begun[:2])) + SECONDS)
    return limits


def shown(source, mutant):
    """The lines that differ."""
    lines = list(difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm=""))
    return "\n".join(["  " + line for line in lines[2:]])


def tell(line):
    print(line, flush=True)  # noqa: T201  # a command line prints


def rounds_for(path):
    """The tests to run on a mutant of a file, those of the file itself first."""
    tests = ROOT / "tests" / "kvcore"
    rounds = [[tests / f"test_{name}.py" for name in names] for names in ((path.stem,), *TESTS)]
    rounds = [[str(test) for test in names if test.exists()] for names in rounds]
    return [names for names in rounds if names]


def score(path, sample=None):
    """Run mutants of a file; print those that survive; return how many there are of both."""
    source = path.read_text(encoding="utf-8")
    rounds = rounds_for(path)
    limits = limits_of(path, rounds)
    number = survived = 0
    for number, mutant in enumerate(islice(mutants(source), sample), 1):  # the last is the count
        if survives(path, mutant, rounds, limits):
            survived += 1
            tell(shown(source, mutant))
        if number % 100 == 0:
            sys.stderr.write(f"{path.name}: {number} mutants so far\n")
    tell(f"{path.name}: {number} mutants, {survived} survived")
    return number, survived


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=[f"kvcore/{n}.py" for n in FILES])
    parser.add_argument("--sample", type=int, help="so many mutants of each file, not all")
    options = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of others take longer than a round
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*OPTIONS, "--markers"])  # loads pytest, once for all
    gc.collect()
    gc.freeze()
    totals = [score(ROOT / path, options.sample) for path in options.files]
    number, survived = map(sum, zip(*totals, strict=True))
    tell(f"{number} mutants, {survived} survived: {100 * (number - survived) / number:.1f} %")


if __name__ == "__main__":
    main()
