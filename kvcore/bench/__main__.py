"""`python -m kvcore.bench [--workload W3 ...] [--peer MODULE:FACTORY] [--json] [--profile]`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Final

from kvcore.bench.engines import w7, w8, w9, w11
from kvcore.bench.measure import Case, Row, measure
from kvcore.bench.mixed import w12
from kvcore.bench.ours import our_subjects
from kvcore.bench.peer import WORKLOADS, PeerError, Subject, Workload, load_peer
from kvcore.bench.pools import w1, w2, w6
from kvcore.bench.profiling import profile
from kvcore.bench.report import HEADER, as_json, line
from kvcore.bench.requests import w3, w4, w5
from kvcore.bench.tail import w10

_CASES: Final[dict[Workload, Callable[..., Iterator[Case]]]] = {
    "W1": w1,
    "W2": w2,
    "W3": w3,
    "W4": w4,
    "W5": w5,
    "W6": w6,
    "W7": w7,
    "W8": w8,
    "W9": w9,
    "W10": w10,
    "W11": w11,
    "W12": w12,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, or profile, and print; 2 if a peer cannot be measured."""
    options = _parser().parse_args(arguments)
    try:
        if options.profile:
            for text in profile(quick=options.quick):
                _say(text)
        else:
            subjects = our_subjects() + [load_peer(where) for where in options.peer]
            _measure_all(subjects, options.workload, quick=options.quick, as_table=not options.json)
    except PeerError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcore.bench",
        description="Speed of the allocator, alone or in turns with others. W1: a block; W2: many "
        "blocks; W3: the life of a request; W4: a decode step; W5: a chat trace; W6: a new pool; "
        "W7: window groups; "
        "W8: events; W9: request by request; W10: the slowest calls; "
        "W11: larger blocks; W12: steps in which requests begin and end.",
    )
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="W1"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="MODULE:FACTORY")
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--profile", action="store_true", help="show where our own time goes")
    return parser


def _measure_all(
    subjects: list[Subject], workloads: list[Workload], *, quick: bool, as_table: bool
) -> None:
    rows: list[Row] = []
    if as_table:
        _say(HEADER)
    for workload in dict.fromkeys(workloads):
        for case in _CASES[workload](subjects, quick=quick):
            for row in measure(case):
                rows.append(row)
                if as_table:
                    _say(line(row))
    if not as_table:
        _say(json.dumps(as_json(rows, quick=quick), indent=1))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # a reader that goes away ends this like any other tool
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    raise SystemExit(main())
