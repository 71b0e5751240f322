"""The prompts of a run: from flags, files, standard input or the tiny model's own.

Decides: what a line of a file means, and which sampling parameters a prompt gets: its own fields
over the command line's. Invariants: an error names the flag, or the file and the line.

Does not know: tokens, models.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TextIO

from model.args import Options
from model.errors import InvalidArgumentError, UsageError
from model.params import SamplingParams
from model.tiny import DEMO_PROMPTS

_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_DRAWS = ("top_k", "top_p", "seed")


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One prompt with its parameters; `where` says where it came from."""

    where: str
    text: str
    params: SamplingParams


def read_prompts(options: Options, stdin: TextIO) -> list[PromptSpec]:
    """Collect the prompts: of `--prompt`, then of the file; the tiny model's own if there are none.

    Raises:
        UsageError: an empty prompt, a file that cannot be read or understood, or sampling fields
            that `--verify` or a greedy choice excludes.
    """
    found = list(_entries(options, stdin))
    specs = []
    for index, (where, entry) in enumerate(found):
        text = entry.get("prompt")
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"{where}: wanted a prompt with some text in it, got {text!r}")
        specs.append(PromptSpec(where, text, _params(where, index, options, entry)))
    return specs


def _entries(options: Options, stdin: TextIO) -> Iterator[tuple[str, Mapping[str, object]]]:
    for number, text in enumerate(options.prompts, start=1):
        if text == "-":
            yield "--prompt - (stdin)", {"prompt": stdin.read().rstrip("\n")}
        else:
            yield f"--prompt (number {number})", {"prompt": text}
    if options.prompts_file is not None:
        yield from _file_entries(options.prompts_file)
    elif not options.prompts:
        for number, text in enumerate(DEMO_PROMPTS, start=1):
            yield f"built-in prompt {number}", {"prompt": text}


def _file_entries(name: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    path = Path(name)
    if path.suffix not in {".txt", ".jsonl"}:
        raise UsageError(f"--prompts-file: wanted a .txt or .jsonl file, got {name!r}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"--prompts-file: cannot read {name!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompts-file: {name!r} is not UTF-8: {error.reason}") from error
    numbered = [(f"{name} line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"--prompts-file: {name!r} has no prompts")
    for where, line in numbered:
        yield where, {"prompt": line} if path.suffix == ".txt" else _parsed(where, line)


def _parsed(where: str, line: str) -> Mapping[str, object]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: wanted an object with a prompt, got {type(entry).__name__}")
    unknown = sorted(entry.keys() - _FIELDS - {"prompt"})
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise UsageError(f"{where}: unknown field {unknown[0]!r}; known: prompt, {known}")
    return entry


def _params(
    where: str, index: int, options: Options, entry: Mapping[str, object]
) -> SamplingParams:
    own = {name: _value(name, value) for name, value in entry.items() if name != "prompt"}
    if options.verify:
        _refuse(where, [name for name in ("temperature", *_DRAWS) if name in own], "--verify")
    merged = {**options.sampling, **own}
    temperature = merged.get("temperature", 0)
    if temperature == 0:
        _refuse(where, [name for name in _DRAWS if name in merged], "a temperature of 0")
    elif "seed" not in own:
        base = merged.get("seed", 0)
        merged["seed"] = base + index if isinstance(base, int) else base
    try:
        return SamplingParams(**merged)  # type: ignore[arg-type]  # the constructor checks each one
    except InvalidArgumentError as error:
        raise UsageError(f"{where}: {error}") from error


def _value(name: str, value: object) -> object:
    if name == "stop" and isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _refuse(where: str, names: Iterable[str], because: str) -> None:
    for name in names:
        raise UsageError(f"{where}: {name} has no meaning with {because}")
