"""Rows for people and for machines: a table that grows as it is measured, and one JSON object."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict

import kvcore
from kvcore.bench.measure import Row, Spread

HEADER = (
    f"{'':<3} {'case':<48} {'subject':<18} {'median':>10} {'':<11} {'low .. high':>21}"
    f" {'hits / all there':>17}  faster than"
)


def line(row: Row) -> str:
    """Return a row of the table."""
    cost = row.cost
    between = f"{_number(cost.low)} .. {_number(cost.high)}"
    against = "  ".join(f"{peer} {_ratio(ratio)}" for peer, ratio in sorted(row.speedup.items()))
    text = (
        f"{row.workload:<3} {row.case:<48} {row.subject:<18} {_number(cost.median):>10} "
        f"{row.unit:<11} {between:>21} {_hits(row):>17}  {against}"
    )
    return text.rstrip()


def as_json(rows: Sequence[Row], *, quick: bool) -> dict[str, object]:
    """Return plain values for `json.dumps`; docs/how-to/benchmark.md names the keys."""
    return {
        "kvcore": kvcore.__version__,
        "build": build(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "quick": quick,
        "rows": [asdict(row) for row in rows],
    }


def build() -> str:
    """Return "python" where kvcore runs from source, "compiled" where it is an extension."""
    source = getattr(sys.modules[kvcore.BlockPool.__module__], "__file__", None) or ""
    return "python" if source.endswith((".py", ".pyc")) else "compiled"


def _number(value: float) -> str:
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:,.{digits}f}"


def _ratio(ratio: Spread) -> str:
    return f"{ratio.median:.1f}x ({ratio.low:.1f} .. {ratio.high:.1f})"


def _hits(row: Row) -> str:
    if row.hit_rate is None:
        return ""
    wanted = "" if row.wanted_hit_rate is None else f" / {100 * row.wanted_hit_rate:.1f}"
    return f"{100 * row.hit_rate:.1f}{wanted} %"
