"""Rows for people and for machines: a text that grows as it is measured, and one JSON object."""

import datetime as dt
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import kvcore

_SCALES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns"))


def header():
    """What the numbers depend on: machine, Python, kvcore and its build, commit, date."""
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "kvcore": kvcore.__version__,
        "build": kvcore.build,
        "commit": _commit(),
    }


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit():
    """The commit of the tree that kvcore is imported from; "none" for a wheel."""
    folder = Path(kvcore.__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "none"
    return done.stdout.strip() or "none"


class Text:
    """Prints rows as they come, under the heading of their group."""

    def __init__(self, headings, write=sys.stdout.write):
        self._headings = headings
        self._write = write
        self._group = self._case = None
        self.say("; ".join(f"{name} {value}" for name, value in header().items()))

    def say(self, line=""):
        self._write(line + "\n")
        sys.stdout.flush()

    def row(self, row):
        if row.group != self._group:
            self._group, self._case = row.group, None
            self.say()
            self.say(f"{row.group}. {self._headings.get(row.group, '')}".rstrip())
        if row.case != self._case:
            self._case = row.case
            self.say(f"  {row.case}")
        self.say(line(row))


def line(row):
    """One subject: its cost, the cost of one of what it covers, hits, rates, and the others."""
    cost = shown(row.cost.median, row.unit)
    parts = [f"    {row.subject:<22} {cost:>12}"]
    each = row.per and f"{shown(row.cost.median / row.per[0], row.unit)} a {row.per[1]}"
    parts.append(f"{each or '':<26}")
    if row.hit_rate is not None and (row.hit_rate, row.wanted_hit_rate) != (0, 0):
        wanted = "" if row.wanted_hit_rate is None else f" of {100 * row.wanted_hit_rate:.1f}"
        parts.append(f"hits {100 * row.hit_rate:.1f}{wanted} %")
    parts += [f"{value:,.1f} {name}" for name, value in row.rates.items()]
    for name, one in sorted(row.ratios.items()):
        between = "" if one.low == one.high else f" ({one.low:.2f}-{one.high:.2f})"
        parts.append(f"{name} {one.median:.2f}x{between}")
    return "  ".join(parts).rstrip()


def shown(value, unit):
    """A number with three digits; nanoseconds in the unit that fits."""
    if unit == "ns":
        size, unit = next((one for one in _SCALES if abs(value) >= one[0]), _SCALES[-1])
        value /= size
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def as_json(command, rows, *, quick):
    """Plain values for `json.dumps`."""
    return {"bench": command, **header(), "quick": quick, "rows": [asdict(row) for row in rows]}
