"""The page on properties: every function, test, rule and planted bug that it names exists."""

import ast
import functools
import re
from pathlib import Path

import pytest

import kvcore
from tests.kvcore import machines
from tests.kvcore.sabotage import SABOTAGES
from tests.kvcore.tiers.machine import TierMachine
from tests.kvcore.tiers.planted import PLANTED, UNAIDED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "properties.md").read_text(encoding="utf-8")
PROPERTIES, RULES = PAGE.split("## The rules of the machine")
ROWS = {
    cells[1]: cells[2:6]
    for line in PROPERTIES.splitlines()
    if re.match(r"\| P\d+ ", line)
    for cells in [[cell.strip() for cell in line.split("|")]]
}

MACHINES = {name: getattr(machines, name) for name in machines.__all__}
MACHINES["TierMachine"] = TierMachine
CAUGHT_BY = {name: planted.properties for name, planted in SABOTAGES.items()}
CAUGHT_BY |= {name: {*properties.split()} for name, (properties, *_) in (PLANTED | UNAIDED).items()}


@functools.cache
def known_tests():
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return found


def named(cell):
    return re.findall(r"`([\w.]+)`", cell)


def test_the_page_has_every_property_once():
    assert list(ROWS) == [f"P{number}" for number in range(1, 43)]


@pytest.mark.parametrize("prop", ROWS)
def test_a_property_is_a_named_function_or_a_named_test(prop):
    _, function, tests, _ = ROWS[prop]
    checked = kvcore.PROPERTIES.get(prop)
    assert named(function) == ([checked.__name__] if checked else [])
    assert named(tests)
    known = known_tests()
    for name in named(tests):
        owner, _, member = name.partition(".")
        if name.startswith("test_") and name.endswith(".py"):
            assert (ROOT / "tests" / "kvcore" / name).exists(), name
        elif owner in MACHINES:
            assert hasattr(MACHINES[owner], member), name
        elif name not in {"refused", "refusal.py"}:
            assert name in known, name


@pytest.mark.parametrize("prop", ROWS)
def test_the_planted_bugs_beside_a_property_are_caught_by_it(prop):
    cell = ROWS[prop][3]
    wanted = set(re.findall(r"P\d+", cell.split(":")[0])) if "seen as" in cell else {prop}
    for name in named(cell):
        assert wanted & CAUGHT_BY[name], name
    assert named(cell) or prop in {"P26", "P28"}


def test_every_planted_bug_of_tiers_is_on_the_page():
    assert {*PLANTED, *UNAIDED} <= {*named(PROPERTIES)}


def test_every_rule_that_bugs_ask_for_is_a_method_of_the_machine():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", RULES, re.MULTILINE)
    assert len(rows) > 30
    for _, cell in rows[1:]:
        for name in named(cell):
            assert callable(getattr(machines.ManagerMachine, name)), name


def test_every_rule_of_the_machine_is_on_the_page():
    rules = {
        name
        for name in dir(machines.ManagerMachine)
        if hasattr(getattr(machines.ManagerMachine, name), "hypothesis_stateful_rule")
    }
    assert len(rules) > 25
    assert rules <= set(named(RULES))
