"""A setting is declared once: a field of a dataclass with its default, its range and its words.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class CacheConfig:
        block_size: int = setting(16, help="tokens of a block", least=1, most=1 << 20)

        def __post_init__(self) -> None:
            check_settings(self)

Decides: the parts of a declaration, the values that it allows, and the error for a wrong one. Flags
(`model/cli/settings.py`), fields of files and of requests and the page of flags are made from what
`settings_of` returns; `check_settings` is the check. A setting names those that it needs; a class
with two settings that exclude each other checks them.

Invariants: a value that is allowed has the type of its annotation, NaN is no number and a bool no
integer; an error names the setting, what was wanted and what came.

Does not know: torch, command lines, requests.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import (
    TYPE_CHECKING,
    Literal,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from model.errors import InvalidArgumentError, InvalidSettingError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value")
_NOUNS = {int: "integer", float: "number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The declaration of a setting, with the name and the type of its field.

    Attributes:
        default: its value when none is given; shown in every description unless it is None.
        help: its meaning for the user: a phrase without a full stop.
        name: the name of the field.
        takes: its annotation without None.
        is_optional: True if None is allowed.
        least: the smallest allowed number, of each value if it takes several; 1 of a text: it
            is not empty.
        most: the largest, likewise.
        above: numbers must be above this.
        below: numbers must be below this; `math.inf` asks for a finite one.
        unit: "bytes": a command line takes 2GiB for it too; "list" and "words": it takes all of
            several values at once, with commas or spaces between them, where else the flag is
            repeated.
        flag: its name on a command line, where that is not the field's; "": it is no flag.
        metavar: the word for its value in a description of the flag; None: N for a number, and
            so on.
        is_common: True if the short description of a command line (`--help`) has it.
        needs: settings of the same class without which this one does nothing; one of them must be
            given too. `"name"` is given by any value but its default, `"name=value"` by that value.
    """

    default: object
    help: str
    name: str = ""
    takes: object = object
    is_optional: bool = False
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    flag: str | None = None
    metavar: str | None = None
    is_common: bool = False
    needs: tuple[str, ...] = ()

    @property
    def takes_several(self) -> bool:
        """True if it takes a tuple of values. O(1)."""
        return get_origin(self.takes) is tuple

    @property
    def takes_each(self) -> object:
        """The type of one value, also if it takes several. O(1)."""
        return get_args(self.takes)[0] if self.takes_several else self.takes

    def check(self, value: object) -> None:
        """Raise unless the value is allowed. O(1), O(values) where it takes several.

        Raises:
            InvalidSettingError: it is not.
        """
        if value is None:
            is_allowed = self.is_optional
        elif self.takes_several:
            is_allowed = isinstance(value, tuple) and all(map(self.allows_each, value))
        else:
            is_allowed = self.allows_each(value)
        if not is_allowed:
            each = self.wanted_each
            raise InvalidSettingError(
                self.name, f"a list, each {each}" if self.takes_several else each, value
            )

    def allows_each(self, value: object) -> bool:
        """Return True if one value is allowed, also if it takes several. O(1)."""
        kind = self.takes_each
        if get_origin(kind) is Literal:
            return any(type(value) is type(one) and value == one for one in get_args(kind))
        if kind is bool:
            return isinstance(value, bool)
        if kind is str:
            return isinstance(value, str) and len(value) >= (self.least or 0)
        if kind is int or kind is float:
            is_number = isinstance(value, int if kind is int else (int, float))
            return is_number and not isinstance(value, bool) and self._is_in_range(value)
        return isinstance(value, kind) if isinstance(kind, type) else True

    def _is_in_range(self, value: object) -> bool:
        number = cast("float", value)  # exact for an integer of any size
        return (
            number == number  # noqa: PLR0124  # NaN is not
            and (self.least is None or self.least <= number)
            and (self.most is None or number <= self.most)
            and (self.above is None or self.above < number)
            and (self.below is None or number < self.below)
        )

    @property
    def wanted_each(self) -> str:
        """The allowed values in words: "an integer from 1 to 8". O(1)."""
        kind = self.takes_each
        if get_origin(kind) is Literal:
            return "one of " + ", ".join(map(repr, get_args(kind)))
        if kind is bool:
            return "true or false"
        if kind is str:
            return "text that is not empty" if self.least == 1 else "text"
        noun = _NOUNS.get(cast("type", kind))
        if noun is None:
            return str(getattr(kind, "WANTED", "another value"))
        if self.below == math.inf:
            noun = f"finite {noun}"
        article = "an" if noun[0] in "ai" else "a"
        if kind is int and self.least is not None and self.most is not None:
            return f"{article} {noun} from {self.least} to {self.most}"
        below = None if self.below == math.inf else self.below
        limits = (
            ("at least", self.least), ("above", self.above), ("at most", self.most),
            ("below", below),
        )  # fmt: skip
        text = " and ".join(f"{word} {limit}" for word, limit in limits if limit is not None)
        of = "of " if text.startswith("at ") else ""
        return f"{article} {noun} {of}{text}".rstrip()


class _Rules(TypedDict, total=False):
    """The rules of a setting; `Setting` says what each means."""

    least: float
    most: float
    above: float
    below: float
    unit: str
    flag: str
    metavar: str
    is_common: bool
    needs: tuple[str, ...]


def setting(
    default: _Value,
    *,
    help: str,  # noqa: A002  # argparse's, click's and cyclopts' word for it
    **rules: Unpack[_Rules],
) -> _Value:
    """Declare a field of a dataclass as a setting. O(1).

    The annotation says what it takes: `bool`, `int`, `float`, `str`, a `Literal`, a `tuple[T, ...]`
    of one of these, and any of them `| None`, where None means that nothing was said. A class that
    has `WANTED`, words, and `from_text`, a class method, can stand on a command line too. A field
    that takes anything else is declared all the same, and checked by the class that has it.

    Args:
        default: as in `Setting`.
        help: as in `Setting`.
        rules: as in `Setting`.
    """
    said = Setting(default=default, help=help, **rules)
    return field(default=default, metadata={"help": help, "setting": said})


@functools.cache
def settings_of(declared: type["DataclassInstance"]) -> tuple[Setting, ...]:
    """Return the settings of a dataclass, in order, without other fields. O(fields), once."""
    hints = get_type_hints(declared)
    found = []
    for each in fields(declared):
        said = each.metadata.get("setting")
        if isinstance(said, Setting):
            kind = hints[each.name]
            is_optional = type(None) in get_args(kind)
            if is_optional:
                (kind,) = [one for one in get_args(kind) if one is not type(None)]
            found.append(replace(said, name=each.name, takes=kind, is_optional=is_optional))
    return tuple(found)


def check_settings(declared: "DataclassInstance") -> None:
    """Raise unless every setting of a dataclass's instance is allowed. O(settings).

    Raises:
        InvalidSettingError: the first that is not.
        InvalidArgumentError: the first that does nothing without another one.
    """
    values = {one.name: getattr(declared, one.name) for one in settings_of(type(declared))}
    for one in settings_of(type(declared)):
        one.check(values[one.name])
    check_needs(type(declared), values, lambda one: one.name)


def check_needs(
    declared: type["DataclassInstance"],
    values: Mapping[str, object],
    name_of: Callable[[Setting], str],
) -> None:
    """Raise if a setting was given that does nothing without another one. O(settings).

    Args:
        declared: the class.
        values: by the name of the setting; a setting that is missing has its default.
        name_of: returns the user's name of a setting.

    Raises:
        InvalidArgumentError: names both settings.
    """
    known = {one.name: one for one in settings_of(declared)}

    def is_given(need: str) -> bool:
        name, _, wanted = need.partition("=")
        value = values.get(name, known[name].default)
        return str(value) == wanted if wanted else value != known[name].default

    for one in known.values():
        value = values.get(one.name, one.default)
        if one.needs and value != one.default and not any(map(is_given, one.needs)):
            parts = [need.partition("=") for need in one.needs]
            wanted = [f"{name_of(known[name])} {value}".strip() for name, _, value in parts]
            raise InvalidArgumentError(
                f"{name_of(one)}: has no effect without {' or '.join(wanted)}"
            )
