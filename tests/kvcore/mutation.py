"""The mutation score: change one thing in a file, run the tests, and see whether one notices.

The changes are those of cosmic-ray (`pip install cosmic-ray`); this runs them quickly. Each mutant
is imported in a process of its own, forked from one that has loaded pytest already, so no file on
the disk is ever changed. What differs in annotations or in `@final` alone is no mutant: nothing
evaluates those.

    python -m tests.kvcore.mutation kvcore/pool.py
    python -m tests.kvcore.mutation --sample 20

The second scores every file of the core by twenty of its mutants, always the same ones; without a
sample all of them are tried. Every mutant that no test notices is printed, and the score.
"""

import argparse
import ast
import difflib
import importlib.abc
import importlib.util
import os
import random
import resource
import sys
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
# After those of the file itself; fast ones first, because most mutants die there.
TESTS = (
    ("block", "free_queue", "groups", "hashing", "pool", "content_tree", "idle_blocks"),
    ("pool_properties", "manager", "capabilities", "peaks", "pool_map"),
    ("decode_step", "untold", "hostile", "invariants", "tokens", "slots", "short_ways", "faults"),
    ("bad_transfers", "look_ups"),
    ("block_keys", "inexpressible", "determinism", "package", "cost"),
    ("machines", "small_scope"),
)
SECONDS = 120
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
    """Yield every different mutant of a source, as source."""
    seen = {meaning(source)}
    for name in sorted(operator_names()):
        operator = get_operator(name)
        if operator.arguments():
            continue
        tree = get_ast(source)
        count = sum(len(list(operator().mutation_positions(node))) for node in ast_nodes(tree))
        for occurrence in range(count):
            try:
                mutant = mutate_code(source, operator(), occurrence)
                meant = meaning(mutant)
            except (AttributeError, SyntaxError):  # cosmic-ray stumbles over `except a.b`
                continue
            if meant not in seen:
                seen.add(meant)
                yield mutant


def survives(path, source, rounds):
    """Run rounds of tests on a file with other source, in a process of its own."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, Planted(path, source))
    options = [
        "-x",
        "-q",
        "--assert=plain",
        "-p",
        "no:cacheprovider",
        "-n0",
        "--hypothesis-profile=mutation",
    ]
    for tests in rounds:
        if pytest.main([*options, *tests]):
            os._exit(1)
    os._exit(0)


def shown(source, mutant):
    """The lines that differ."""
    lines = list(difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm=""))
    return "\n".join(["  " + line for line in lines[2:]])


def tell(line):
    print(line, flush=True)  # noqa: T201  # a command line prints


def chosen(source, sample):
    """All mutants of a source, or so many of them, spread over all kinds."""
    everything = list(mutants(source))
    if sample is None or sample >= len(everything):
        return everything
    return random.Random(0).sample(everything, sample)


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
    number = survived = 0
    for number, mutant in enumerate(chosen(source, sample), 1):  # the last one is the count
        if survives(path, mutant, rounds):
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
    first = ROOT / options.files[0]
    if not survives(first, first.read_text(encoding="utf-8"), rounds_for(first)):
        raise SystemExit("the tests fail without any mutation")
    totals = [score(ROOT / path, options.sample) for path in options.files]
    number, survived = map(sum, zip(*totals, strict=True))
    tell(f"{number} mutants, {survived} survived: {100 * (number - survived) / number:.1f} %")


if __name__ == "__main__":
    main()
