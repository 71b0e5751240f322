"""The prompts of a run: from flags, files, standard input or the tiny model's own.

Decides: what a line of a file means, and which sampling parameters a prompt gets: its own fields
over the command line's; a field that is null counts as not given. Files and standard input are
UTF-8, with or without a byte order mark, whatever the locale says. Invariants: an error names the
flag, or the file and the line; a prompt is text that UTF-8 can encode.

Does not know: tokens, models.
"""

import dataclasses
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from model.cli.args import Options, parse_args
from model.cli.chat_lines import Message, text_of, unpacked, without_nulls
from model.cli.options import RequestOptions
from model.control.grammar import Grammar
from model.control.params import MAX_INT, SamplingParams
from model.control.settings import settings_of
from model.control.submission import Retained
from model.errors import InvalidArgumentError, UsageError, shown
from model.tiny import DEMO_PROMPTS

_OF_REQUESTS = frozenset(one.name for one in settings_of(RequestOptions))
_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - _OF_REQUESTS
_INPUTS = {"prompt", "images", "messages", "custom_id"}
_DRAWS = ("top_k", "top_p", "min_p", "seed", "n")
_CHANGES = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "grammar",
    "min_tokens",
    "bad_words",
)
_MAX_BYTES = 256 << 20
_MAX_PROMPTS = 100_000
_MAX_LINES = 1_000_000


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One prompt.

    Attributes:
        where: its source, for messages.
        text: the prompt; of a chat, its messages as text.
        params: how its tokens are chosen.
        request: its priority, LoRA adapter, cache salt and retained ranges.
        images: paths of its images.
        messages: the chat that the prompt is made of; empty: the text is the prompt.
        custom_id: the name that a file gives the prompt; None: it gives none.
    """

    where: str
    text: str
    params: SamplingParams
    request: RequestOptions
    images: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    custom_id: str | None = None


def read_command_line(
    argv: Sequence[str] | None = None,
) -> tuple[Options, list[PromptSpec]]:
    """Read a command line, the process's own if None, and the prompts it names.

    Raises:
        ModelError: it does not say what to do.
    """
    options = parse_args(argv)
    return options, read_prompts(options, sys.stdin.buffer if sys.stdin else None)


def read_prompts(options: Options, stdin: BinaryIO | None) -> list[PromptSpec]:
    """Collect the prompts: of `--prompt`, then of the file; the tiny model's own if there are none.

    Args:
        options: the command line.
        stdin: the input for a prompt of `-`; None: it is closed.

    Raises:
        UsageError: an empty prompt, one that is not UTF-8, a file that cannot be read or
            understood, or sampling fields that `--verify` or a greedy choice excludes.
    """
    named: dict[str, str] = {}
    specs = []
    for index, (where, line) in enumerate(list(_entries(options, stdin))):
        spec = _spec(where, index, options, line)
        if spec.custom_id is not None and named.setdefault(spec.custom_id, where) != where:
            first = named[spec.custom_id]
            raise UsageError(f"{where}: custom_id: {shown(spec.custom_id)} is that of {first}, too")
        specs.append(spec)
    return specs


def _spec(where: str, index: int, options: Options, line: Mapping[str, object]) -> PromptSpec:
    """Return the prompt of an entry."""
    line = without_nulls(line)
    entry = unpacked(where, line)
    _check_known(where, entry)
    messages = cast("tuple[Message, ...]", entry.get("messages", ()))
    text = text_of(messages) if messages else entry.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{where}: wanted a prompt that is not empty, got {shown(text)}")
    _check_encodable(where, text)
    params, beside = _params(where, index, options, entry, is_batch="body" in line)
    for name in ("stop", "bad_words"):
        for value in getattr(params, name):
            _check_encodable(f"{where}: {name}", value)
    custom_id = cast("str | None", entry.get("custom_id"))
    _check_encodable(f"{where}: custom_id", custom_id or "")
    return PromptSpec(where, text, params, beside, _images(where, entry), messages, custom_id)


def _entries(
    options: Options, stdin: BinaryIO | None
) -> Iterator[tuple[str, Mapping[str, object]]]:
    for number, text in enumerate(options.prompts.prompt, start=1):
        if text == "-":
            where = "--prompt - (stdin)"
            prompt = _stdin_text(where, stdin).rstrip("\n")
        else:
            where, prompt = f"--prompt (number {number})", text
        yield where, {"prompt": prompt, "images": [*options.prompts.image]}
    if options.prompts.prompts_file is not None:
        yield from _file_entries(options.prompts.prompts_file)
    elif not options.prompts.prompt:
        for number, text in enumerate(DEMO_PROMPTS, start=1):
            yield f"built-in prompt {number}", {"prompt": text}


def _file_entries(name: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    path = Path(name)
    if path.suffix not in {".txt", ".jsonl"}:
        raise UsageError(f"--prompts-file: wanted a .txt or .jsonl file, got {name!r}")
    try:
        with path.open("rb") as file:
            data = _bounded(f"--prompts-file: {name!r}", file)
    except OSError as error:
        raise UsageError(f"--prompts-file: cannot read {name!r}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"--prompts-file: cannot read {name!r}: {error}") from error
    num_prompts = 0
    lines = io.StringIO(_decoded(f"--prompts-file: {name!r}", data), newline="\n")
    for number, line in enumerate(lines, 1):
        num_prompts += bool(line.strip())
        if number > _MAX_LINES or num_prompts > _MAX_PROMPTS:
            raise UsageError(
                f"--prompts-file: {name!r}: wanted at most {_MAX_PROMPTS:,} prompts in "
                f"{_MAX_LINES:,} lines, got more"
            )
        if line.strip():
            where, text = f"{name} line {number}", line.removesuffix("\n")
            yield where, {"prompt": text} if path.suffix == ".txt" else _parsed(where, text)
    if not num_prompts:
        raise UsageError(f"--prompts-file: {name!r} has no prompts")


def _stdin_text(where: str, stdin: BinaryIO | None) -> str:
    if stdin is None:
        raise UsageError(f"{where}: stdin is closed")
    try:
        data = _bounded(where, stdin)
    except OSError as error:
        raise UsageError(f"{where}: cannot read: {error.strerror or error}") from error
    return _decoded(where, data)


def _bounded(what: str, file: BinaryIO) -> bytes:
    """Return all of a file that may have no end."""
    data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{what}: wanted at most {_MAX_BYTES >> 20} MiB, got more")
    return data


def _decoded(what: str, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_encodable(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: wanted text that UTF-8 can encode, got {text[error.start]!r} "
            f"at character {error.start + 1}"
        ) from error


def _parsed(where: str, line: str) -> Mapping[str, object]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise UsageError(f"{where}: an integer has more digits than Python reads") from error
    except RecursionError as error:
        raise UsageError(f"{where}: its lists or objects are nested too deeply") from error
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: wanted an object with a prompt, got {type(entry).__name__}")
    return entry


def _check_known(where: str, entry: Mapping[str, object]) -> None:
    unknown = sorted(entry.keys() - _FIELDS - _OF_REQUESTS - _INPUTS)
    if unknown:
        known = ", ".join(sorted(_FIELDS | _OF_REQUESTS | _INPUTS - {"prompt"}))
        raise UsageError(f"{where}: unknown field {shown(unknown[0])}; known: prompt, {known}")


def _images(where: str, entry: Mapping[str, object]) -> tuple[str, ...]:
    paths = entry.get("images") or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise UsageError(f"{where}: images: wanted a list of paths, got {shown(paths)}")
    return tuple(paths)


def _params(
    where: str, index: int, options: Options, entry: Mapping[str, object], *, is_batch: bool
) -> tuple[SamplingParams, RequestOptions]:
    """Return the sampling parameters and the other options of an entry."""
    try:
        own = {
            name: _value(name, value)
            for name, value in entry.items()
            if name not in _INPUTS and value is not None
        }
    except InvalidArgumentError as error:
        raise UsageError(f"{where}: {error}") from error
    if is_batch:
        own = _batch_sampling(own, options)
    if options.output.verify:
        names = ("temperature", *_DRAWS, *_CHANGES)
        _refuse(where, [name for name in names if name in own], "--verify")
    merged = {**options.sampling, **own}
    if merged.get("temperature", 0) == 0:
        _refuse(where, [name for name in _DRAWS if name in merged], "a temperature of 0")
    elif "seed" not in own:
        base = merged.get("seed", 0)
        if isinstance(base, int) and 0 <= base <= MAX_INT:  # any other is refused below
            merged["seed"] = (base + index) % (MAX_INT + 1)
    beside = {name: merged.pop(name) for name in _OF_REQUESTS if name in merged}
    try:  # the constructors check each
        if "grammar" in merged:
            merged["grammar"] = Grammar.of(merged["grammar"])
        return SamplingParams(**merged), RequestOptions(**beside)  # type: ignore[arg-type]
    except InvalidArgumentError as error:
        raise UsageError(f"{where}: {error}") from error


def _batch_sampling(own: Mapping[str, object], options: Options) -> dict[str, object]:
    """Return the fields of a line of a batch file, sampled as OpenAI's interface has it.

    The temperature is 1 if neither the line nor the command line gives one; fields that a
    temperature of 0 leaves without effect may stand in the line.
    """
    found, given = dict(own), options.sampling.get("temperature")
    if given is None and not options.output.verify:
        found.setdefault("temperature", 1.0)
    if found.get("temperature", given or 0) == 0:
        without = ("top_k", "top_p", "min_p", "seed", *["temperature"] * options.output.verify)
        return {name: value for name, value in found.items() if name not in without}
    return found


def _value(name: str, value: object) -> object:
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "retain":
        each = value if isinstance(value, list) else [value]
        return tuple([Retained.from_text(one) for one in each])
    if name == "logit_bias" and isinstance(value, dict):  # JSON's keys are texts
        return tuple((int(key) if key.isdecimal() else key, bias) for key, bias in value.items())
    return tuple(value) if isinstance(value, list) else value


def _refuse(where: str, names: Iterable[str], because: str) -> None:
    for name in names:
        raise UsageError(f"{where}: {name} has no effect with {because}; remove it")
