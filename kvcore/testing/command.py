"""The command line of `python -m kvcore.testing`, and what it prints and writes.

Exit codes: 0 nothing found; 1 a failure found; 2 the command line or the adapter is wrong; 3 only
known failures were met.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO, cast
from xml.etree import ElementTree as ET

import kvcore
from kvcore.testing.answers import check_adapter
from kvcore.testing.errors import AdapterError
from kvcore.testing.hunt import PROFILES, Finding, Result, hunt
from kvcore.testing.machine import AllocatorMachine
from kvcore.testing.machines import machines_for

NOTHING, FOUND, MISUSED, KNOWN = 0, 1, 2, 3

BEGINS = {
    "--json": '{\n  "adapter": "',
    "--junit": "<?xml version='1.0' encoding='utf-8'?>\n<testsuite name=\"kvcore.testing ",
}
"""The first characters of the files that these flags write: no other file is overwritten."""

TO_SEE = {
    "hits": "prompts that hit",
    "evictions": "cached blocks that were reused",
    "no space": "calls that found no space",
}
"""The events that a search must have seen for its result to mean something."""


def main(arguments: Sequence[str], out: TextIO | None = None) -> int:
    """Run the command, print what was found, and return the exit code."""
    options = _parser().parse_args(arguments)
    show = out or sys.stdout
    try:
        _check_files({"--json": options.json, "--junit": options.junit})
        make = load(options.adapter)
        machines = _chosen(options.machine, machines_for(check_adapter(_made(make))))
        result = hunt(
            make,
            machines,
            block_sizes=options.block_size or AllocatorMachine.block_sizes,
            profile=options.profile,
            seconds=options.seconds,
            seed=options.seed,
            known=options.known,
            go_on=options.go_on,
        )
    except AdapterError as error:
        print(f"{options.adapter}: {error}", file=sys.stderr)  # noqa: T201  # a command prints
        return MISUSED
    print(report(options.adapter, result, options), file=show)
    if options.json:
        text = json.dumps(as_json(options.adapter, result, options), indent=2)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    if options.junit:
        as_junit(options.adapter, result).write(options.junit, "utf-8", xml_declaration=True)
    return FOUND if result.findings else KNOWN if result.known else NOTHING


def load(name: str) -> Callable[[], object]:
    """Return what MODULE:FACTORY names. The current directory is looked through first.

    Raises:
        AdapterError: there is no such module, importing it raises, or nothing in it that can be
            called.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise AdapterError("adapter: wanted MODULE:FACTORY, such as my.engine:Adapter")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise AdapterError(f"adapter: {error}") from error
    except Exception as error:
        raise AdapterError(f"adapter: importing it raised {error!r}") from error
    if not callable(found):
        raise AdapterError(f"adapter: wanted something to call, got {found!r}")
    return cast("Callable[[], object]", found)


def _made(make: Callable[[], object]) -> object:
    try:
        return make()
    except Exception as error:
        raise AdapterError(f"adapter: making it raised {error!r}") from error


def _chosen(
    names: Sequence[str] | None, all_of_them: tuple[type[AllocatorMachine], ...]
) -> tuple[type[AllocatorMachine], ...]:
    if not names:
        return all_of_them
    by_name = {machine.__name__: machine for machine in all_of_them}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise AdapterError(f"--machine: wanted some of {', '.join(by_name)}, got {unknown[0]}")
    return tuple(by_name[name] for name in names)


def _check_files(files: Mapping[str, Path | None]) -> None:
    """Raise unless each file is a new one, an empty one, or one that its flag has written."""
    for flag, path in files.items():
        if path is None or not path.is_file():
            continue
        begins = BEGINS[flag].encode()
        with path.open("rb") as there:
            head = there.read(len(begins))
        if head not in {b"", begins}:
            raise AdapterError(
                f"{flag}: {str(path)!r} holds something that {flag} has not written: name another "
                "file, or remove it"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcore.testing",
        description="Search for what is wrong with an allocator, through an adapter.",
        epilog="Exit codes: 0 no failure, 1 a failure, 2 wrong command or adapter, 3 known ones.",
    )
    add = parser.add_argument
    add("adapter", metavar="MODULE:FACTORY", help="makes an adapter")
    add("--profile", choices=PROFILES, default="default", help="how much a round does")
    add("--seconds", type=_positive, default=0.0, help="keep running rounds for this many seconds")
    add("--seed", type=int, default=0, help="random seed of the first round")
    add("--machine", action="append", metavar="NAME", help="run this machine; repeatable")
    add("--block-size", action="append", type=int, metavar="N", help="block size; repeatable")
    add("--known", action="append", default=[], metavar="KEY", help="continue past 'P9: begin'")
    add("--go-on", action="store_true", help="continue past each failure that is found")
    add("--no-pictures", action="store_true", help="print the calls alone")
    add("--json", type=Path, metavar="FILE", help="write the result as JSON")
    add("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"wanted a number of seconds, got {text}")
    return value


def report(adapter: str, result: Result, options: argparse.Namespace) -> str:
    """Return what the command prints."""
    how = f"profile {options.profile}, seed {options.seed}, rounds {result.num_rounds}"
    lines = [
        f"{adapter}, kvcore {kvcore.__version__}, {how}",
        f"promises: {', '.join(result.promises).lower() or 'none'}",
    ]
    for finding in result.findings:
        lines += ["", *_shown(finding, pictures=not options.no_pictures)]
    lines.append("")
    for name in result.machines:
        found = [finding.key for finding in result.findings if finding.machine == name]
        lines.append(
            f"{name:16} {result.seconds[name]:6.1f} s  {', '.join(found) or 'nothing found'}"
        )
    for key, count in sorted(result.known.items()):
        lines.append(f"known: {key}, met {count} times")
    seen = ", ".join(f"{what} {count}" for what, count in sorted(result.seen.items()) if count)
    lines.append(f"seen: {seen or 'nothing to the end'}")
    missing = [text for what, text in TO_SEE.items() if not result.seen[what]]
    if missing and not result.findings:
        lines.append(f"not tested, because not seen: {', '.join(missing)}")
    return "\n".join(lines)


def _shown(finding: Finding, *, pictures: bool) -> list[str]:
    """Return a finding as a program that can be pasted, with its pictures as comments."""
    program = finding.drawn if pictures else finding.program
    legend = "3:ab[0 1]* is block 3, held by a and b, with the KV of tokens 0 and 1, to be hit"
    drawn = pictures and "]* " in finding.drawn
    head = [f"{finding.message}", f"({finding.machine}, seed {finding.seed}, key '{finding.key}')"]
    return [*head, "", *program.splitlines(), *([f"    # {legend}"] if drawn else [])]


def as_json(adapter: str, result: Result, options: argparse.Namespace) -> dict[str, object]:
    """Return all of it, for another program to read."""
    return {
        "adapter": adapter,
        "kvcore": kvcore.__version__,
        "profile": options.profile,
        "seed": options.seed,
        "promises": result.promises,
        "machines": result.machines,
        "findings": [asdict(finding) for finding in result.findings],
        "seen": dict(result.seen),
        "known": dict(result.known),
        "num_rounds": result.num_rounds,
        "seconds": result.seconds,
    }


def as_junit(adapter: str, result: Result) -> ET.ElementTree[ET.Element]:
    """Return a test suite with a test case for each machine."""
    failed = {finding.machine for finding in result.findings}
    suite = ET.Element("testsuite", name=f"kvcore.testing {adapter}", errors="0")
    suite.set("tests", str(len(result.machines)))
    suite.set("failures", str(len(failed)))
    for name in result.machines:
        took = str(result.seconds[name])
        case = ET.SubElement(suite, "testcase", classname=adapter, name=name, time=took)
        for finding in result.findings:
            if finding.machine == name:
                failure = ET.SubElement(case, "failure", type=finding.key, message=finding.message)
                failure.text = finding.drawn
    return ET.ElementTree(suite)
