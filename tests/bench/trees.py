"""`--against TREE`: the same benchmark on the product of another tree, process by process in turns.

Both sides run this tree's `tests`; only `kvcore`, `backends` and `model` come from the other one,
which may be a checkout or a folder that a wheel was installed into (`pip install --target`). Each
process measures one side alone; a ratio is the other tree's cost over this one's, so above 1 this
tree is faster. A peer that is measured in both shows what the machine alone does.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import kvcore
from tests.bench.measure import BenchError, Row, ratio, spread

PACKAGES = ("kvcore", "backends", "model")
TESTS = Path(__file__).resolve().parents[1]
HERE = Path(kvcore.__file__).resolve().parents[1]


def against(arguments, other, rounds):
    """Yield a row for each row of the benchmark: this tree's cost, beside the other's."""
    other = Path(other).resolve()
    if not (other / "kvcore" / "__init__.py").is_file():
        raise BenchError(f"--against: wanted a folder that has kvcore, got {other}")
    trees = (HERE, other)
    found = ([], [])
    with tempfile.TemporaryDirectory() as work:
        places = [_linked(Path(work) / str(side), tree) for side, tree in enumerate(trees)]
        for number in range(rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                print(f"turn {number + 1} of {rounds}: {trees[side]}", file=sys.stderr)
                found[side].append(_run(arguments, places[side]))
    rows = [[_by_key(report) for report in each] for each in found]
    about = found[1][0]
    label = f"{other} ({about['build']}, {about['commit']})"
    for key, row in rows[0][0].items():
        ours = [one[key]["cost"][0] for one in rows[0]]
        theirs = [one[key]["cost"][0] for one in rows[1] if key in one]
        per = row["per"] and tuple(row["per"])
        ratios = {label: ratio(theirs, ours)} if len(theirs) == len(ours) else {}
        yield Row(*key, row["unit"], spread(ours), per, ratios=ratios)


def _linked(place, tree):
    """A folder with this tree's tests and that tree's packages."""
    place.mkdir()
    (place / "tests").symlink_to(TESTS)
    for package in PACKAGES:
        if (tree / package).is_dir():
            (place / package).symlink_to(tree / package)
    for library in tree.glob("*__mypyc*"):  # what a compiled wheel's modules share
        (place / library.name).symlink_to(library)
    return place


def _run(arguments, place):
    command = [sys.executable, "-m", "tests.bench", *arguments, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise BenchError(f"--against: exit code {done.returncode} in {place.resolve()}")
    return json.loads(done.stdout)


def _by_key(report):
    return {(row["group"], row["case"], row["subject"]): row for row in report["rows"]}
