"""The corpus of real bugs, row by row, and what each of them meets here.

A row is a bug that was reported against a KV-block allocator, a prefix cache or a paged scheduler:
what went wrong, in our words, and the public threads. Beside it stand the planted bugs that
re-create it (`sabotage`, by their `rows`) and the tests that try to express it and cannot. The site
shows the table in docs/reference/corpus.md.
"""

from dataclasses import dataclass

from tests.kvcore.corpus_rows import ROWS
from tests.kvcore.sabotage import SABOTAGES


@dataclass(frozen=True)
class Verdict:
    """What a row meets: planted bugs and the properties that see them; tests; or a reason."""

    mutants: tuple
    tests: tuple
    reason: str


def verdict(number):
    """Return what a row meets."""
    mutants = tuple(name for name, planted in SABOTAGES.items() if number in planted.rows)
    return Verdict(mutants, ROWS[number].tests, ROWS[number].reason)


def counts():
    """Return how many rows have a planted bug, how many only a test, how many only a reason."""
    found = [verdict(number) for number in ROWS]
    with_mutant = sum(bool(v.mutants) for v in found)
    with_test = sum(bool(v.tests) and not v.mutants for v in found)
    return with_mutant, with_test, len(found) - with_mutant - with_test


def page():
    """Return the table, in Markdown."""
    mutants, tests, reasons = counts()
    lines = [
        f"{len(ROWS)} bugs: {mutants} planted, {tests} tried by a test, {reasons} of no allocator.",
        "",
        "| | what went wrong | where | what it meets here |",
        "|---|---|---|---|",
    ]
    for number, row in ROWS.items():
        met = verdict(number)
        parts = [
            f"planted: `{name}` ({', '.join(_in_order(SABOTAGES[name].properties))})"
            for name in met.mutants
        ]
        parts += [f"test: `{test}`" for test in met.tests]
        parts += [met.reason] if met.reason else []
        lines.append(f"| {number} | {row.bug} | {row.source} | {'; '.join(parts)} |")
    return "\n".join(lines) + "\n"


def _in_order(properties):
    return sorted(properties, key=lambda name: int(name[1:]))
