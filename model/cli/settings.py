"""Flags of a command line, made from declared settings.

    flags = Flags("python -m model.run", "Generate text.")
    flags.add("how large the cache is", CacheConfig, block_size=32)  # this command's own default
    said = flags.parse()
    said.of(CacheConfig), said.given(CacheConfig)

Decides: how a setting becomes a flag. `block_size` is `--block-size`; a setting that is true or
false has `--no-...` too; one that takes several is repeated; the last one counts where a flag that
takes one value is. Invariants: a value is checked where it is read, so an error names the flag,
what was wanted and what came; a wrong flag raises, it never exits or prints by itself (`--help`
and `--help-all` alone do).

argparse reads them, with the short way from a declaration to a flag below. Of the libraries that
make flags from dataclasses, pydantic-settings takes texts apart at commas, jsonargparse wants a
value after a flag that is true or false, tyro prints several lines and ends the process, and
cyclopts refuses a flag that is given twice, and an alias that is overridden with it. None of them
knows ranges without being imported by the classes that have settings.

Does not know: which settings there are, files, models.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol, TypeVar, get_args, get_origin

from model.control.settings import Setting, check_needs, settings_of
from model.errors import InvalidArgumentError, UsageError, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Declared = TypeVar("_Declared", bound="DataclassInstance")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})(?:([KMGT])(?:i?B)?)?", re.ASCII)
_BYTES = "bytes, such as 1073741824, 512M or 2GiB"
_METAVARS = {int: "N", float: "X", str: "TEXT"}


class Said:
    """A command line, parsed: what was given, by the class that declares it."""

    def __init__(
        self,
        given: Mapping[type, Mapping[str, object]],
        defaults: Mapping[type, Mapping[str, object]],
    ) -> None:
        self._given = given
        self._defaults = defaults

    def given(self, declared: type["DataclassInstance"]) -> dict[str, object]:
        """Return the settings of a class that the command line gives, no defaults. O(settings)."""
        return dict(self._given[declared])

    def of(self, declared: type[_Declared], **defaults: object) -> _Declared:
        """Return the settings of a class: given ones, else the command's defaults, else its own.

        Args:
            declared: the class.
            defaults: before the command's, where they depend on what was given.

        Raises:
            UsageError: a flag that does nothing without another one.
            InvalidArgumentError: settings that mean nothing together.
        """
        values = {**self._defaults[declared], **defaults, **self._given[declared]}
        try:
            check_needs(declared, values, flag_name)
        except InvalidArgumentError as error:
            raise UsageError(str(error)) from error
        return declared(**values)

    def over(self, settings: _Declared) -> _Declared:
        """Return the same over other defaults: an instance, and the given settings in their place.

        Raises:
            InvalidArgumentError: settings that mean nothing together.
        """
        return replace(settings, **self._given[type(settings)])


@dataclass(frozen=True, slots=True)
class FlagRow:
    """A flag as a page describes it."""

    flag: str
    value: str
    default: str
    help: str


class Flags:
    """The flags of one command."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        self.prog = prog
        self._parser = _Parser(
            prog=prog,
            usage=f"{prog} [flags]",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )
        self._rare: list[argparse.Action] = []
        for names, shown_flags, hidden in (
            (("-h", "--help"), "common", self._rare),
            (("--help-all",), "all", []),
        ):
            words = f"show {shown_flags} flags and exit"
            self._parser.add_argument(
                *names, dest=argparse.SUPPRESS, action=_Help, nargs=0, const=hidden, help=words
            )
        self._titles: dict[type, str] = {}
        self._defaults: dict[type, dict[str, object]] = {}
        self._flagged: dict[type, list[Setting]] = {}

    def add(
        self,
        title: str,
        declared: type["DataclassInstance"],
        without: Collection[str] = (),
        **defaults: object,
    ) -> None:
        """Add a flag for each setting of a class. O(settings).

        Args:
            title: the subject of the flags; those of one title stand together.
            declared: the class.
            without: its settings that mean nothing to this command.
            defaults: the defaults of this command that differ from the class's.
        """
        groups = self._parser._action_groups  # noqa: SLF001  # no other way to find one again
        group = next((one for one in groups if one.title == title), None)
        group = group or self._parser.add_argument_group(title)
        self._titles[declared] = title
        self._defaults[declared] = defaults
        self._flagged[declared] = [
            one for one in settings_of(declared) if one.flag != "" and one.name not in without
        ]
        for one in self._flagged[declared]:
            dest = f"{declared.__name__}.{one.name}"
            default = _default_text(one, defaults.get(one.name, one.default))
            words = f"{_help(one)} (default: {default})" if default else _help(one)
            name, text = flag_name(one), words.replace("%", "%%")
            if one.takes is bool:
                how = argparse.BooleanOptionalAction
                action = group.add_argument(name, dest=dest, action=how, help=text)
            else:
                action = group.add_argument(
                    name,
                    dest=dest,
                    action="append" if _is_repeated(one) else "store",
                    nargs="+" if one.unit == "words" else None,
                    type=_reader(one),
                    metavar=_metavar(one),
                    help=text,
                )
            if not one.is_common:
                self._rare.append(action)

    def parse(self, argv: Sequence[str] | None = None) -> Said:
        """Parse a command line; None: the process's own. O(argv).

        Raises:
            UsageError: an unknown flag, or a value that is not allowed.
        """
        parsed, unknown = self._parser.parse_known_args(argv)
        if unknown:
            raise UsageError(self._unknown(unknown))
        found = vars(parsed)
        given: dict[type, dict[str, object]] = {}
        for declared in self._defaults:
            values = {
                one.name: found[dest]
                for one in self._flagged[declared]
                if (dest := f"{declared.__name__}.{one.name}") in found
            }
            given[declared] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
            }
        return Said(given, self._defaults)

    def _unknown(self, words: list[str]) -> str:
        """Return the error for words that are no flags, with the flag that may have been meant."""
        flags = self._parser._option_string_actions  # noqa: SLF001  # no other way to list them
        asked = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
        near = difflib.get_close_matches(asked, flags, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}?" if near else "--help-all shows all flags"
        return f"unrecognized arguments: {' '.join(words)}; {hint}"

    def rows(self) -> dict[str, list[FlagRow]]:
        """Return every flag as a page describes it, by title. O(settings)."""
        rows: dict[str, list[FlagRow]] = {}
        for declared, title in self._titles.items():
            for one in self._flagged[declared]:
                default = self._defaults[declared].get(one.name, one.default)
                negated = f"`{flag_name(one)}`, `--no-{flag_name(one)[2:]}`"
                rows.setdefault(title, []).append(
                    FlagRow(
                        flag=negated if one.takes is bool else f"`{flag_name(one)}`",
                        value="" if one.takes is bool else _value_text(one),
                        default=_default_text(one, default),
                        help=_help(one),
                    )
                )
        return rows


def flag_name(one: Setting) -> str:
    """Return a setting's flag: --block-size. O(1)."""
    return "--" + (one.flag or one.name).replace("_", "-")


def num_bytes(text: str) -> int:
    """Return the bytes of a size such as 512M or 2GiB; K, M, G and T are powers of 1024. O(text).

    Raises:
        ValueError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"wanted {_BYTES}, got {text!r:.60}")
    return int(found[1]) * _UNITS[found[2] or ""]


class _Writable(Protocol):
    def write(self, text: str, /) -> object: ...


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        raise UsageError(message.removeprefix("argument "))

    def print_help(self, file: _Writable | None = None) -> None:
        """Write the help; unlike the original, an output that cannot be written is an error."""
        (sys.stdout if file is None else file).write(self.format_help())


class _Help(argparse.Action):
    """Shows the flags but those that `const` has, and ends the process."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: object,  # noqa: ARG002
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        for rare in self.const:
            rare.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def _is_repeated(one: Setting) -> bool:
    return one.takes_several and one.unit not in {"list", "words"}


def _help(one: Setting) -> str:
    return f"{one.help}; repeatable" if _is_repeated(one) else one.help


def _metavar(one: Setting) -> str:
    kind, word = one.takes_each, one.metavar
    if word is None and get_origin(kind) is Literal:
        word = "{" + ",".join(map(str, get_args(kind))) + "}"
    if word is None and one.unit == "bytes":
        word = "SIZE"
    word = word or _METAVARS.get(kind, "VALUE") if isinstance(kind, type) else word or "VALUE"
    return f"{word},..." if one.unit == "list" else word


def _value_text(one: Setting) -> str:
    """The values of a flag as a page shows them."""
    return f"{_metavar(one)} ..." if one.unit == "words" else _metavar(one)


def _default_text(one: Setting, default: object) -> str:
    """Return a default as help shows it; nothing where that is nothing."""
    if default is True:
        return "on"
    if one.unit == "bytes" and isinstance(default, int) and default >= 1024:
        unit = max((u for u in _UNITS if default % _UNITS[u] == 0), key=_UNITS.__getitem__)
        return f"{default // _UNITS[unit]}{unit}{unit and 'iB'}"
    if default is None or default is False or default == ():
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default)


def _reader(one: Setting) -> Callable[[str], object]:
    """Return the function that makes a value of a flag's text, and checks it."""

    def read(text: str) -> object:
        if one.unit == "list":
            return tuple(map(read_one, text.split(",")))
        return read_one(text)

    def read_one(text: str) -> object:
        try:
            value = _value(one, text)
        except (ValueError, InvalidArgumentError) as error:
            wanted = _BYTES if one.unit == "bytes" else one.wanted_each
            raise argparse.ArgumentTypeError(f"wanted {wanted}, got {shown(text)}") from error
        if not one.allows_each(value):
            raise argparse.ArgumentTypeError(f"wanted {one.wanted_each}, got {shown(value)}")
        return value

    return read


def _value(one: Setting, text: str) -> object:
    kind = one.takes_each
    if one.unit == "bytes":
        return num_bytes(text)
    if kind is int or kind is float:
        return int(text) if kind is int else float(text)
    made: object = kind.from_text(text) if hasattr(kind, "from_text") else text
    return made
