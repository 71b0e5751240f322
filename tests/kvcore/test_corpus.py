"""No row of the corpus of real bugs is forgotten."""

import ast
from pathlib import Path

import pytest

from tests.kvcore.corpus import counts, verdict
from tests.kvcore.corpus_rows import ROWS
from tests.kvcore.sabotage import SABOTAGES

ROOT = Path(__file__).parents[2]


def defined(test):
    """Whether a test, as path::name, exists."""
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def test_every_row_is_there_and_planted_bugs_re_create_rows_that_exist():
    assert list(ROWS) == list(range(1, 104))
    for name, planted in SABOTAGES.items():
        assert set(planted.rows) <= set(ROWS), name


@pytest.mark.parametrize("number", ROWS)
def test_a_row_meets_a_planted_bug_or_a_test_that_exists_or_a_reason(number):
    met = verdict(number)
    assert met.mutants or met.tests or met.reason
    for test in met.tests:
        assert defined(test), test


def test_a_test_that_does_not_exist_is_noticed():
    assert not defined("tests/kvcore/test_corpus.py::test_that_is_not_there")


def test_most_rows_are_planted_or_tried():
    mutants, tests, reasons = counts()
    assert mutants >= 90
    assert mutants + tests + reasons == 103
