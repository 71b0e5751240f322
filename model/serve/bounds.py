"""How much a request may hold, found out before any of it is looked at closely.

Decides: the most entries of every list and object of a request, and the most characters of what is
searched for or compiled. A body may have megabytes; what is told of each wrong entry would take
minutes, so the first is enough.

Does not know: which fields there are, what they mean.
"""

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from model.control.params import MAX_BAD_WORDS, MAX_BAD_WORDS_CHARACTERS
from model.serve.errors import ApiError

MAX_PROMPTS = 2048
MAX_TOKENS = 1 << 20
"""Of all prompts together, and of what is made to text."""

_Item = TypeVar("_Item")
Many = Annotated[list[_Item], Field(fail_fast=True)]
"""A list of which the first wrong entry alone is told."""

_MOST_ENTRIES = {
    "prompt": MAX_TOKENS, "tokens": MAX_TOKENS, "messages": 16_384, "input": 16_384,
    "content": 16_384, "logit_bias": 4096, "stop": 16, "retain": 16,
    "bad_words": MAX_BAD_WORDS,
}  # fmt: skip
_MOST_OF_OTHERS = 1024
_MOST_CHARACTERS = {
    "stop": 1024, "bad_words": MAX_BAD_WORDS_CHARACTERS, "guided_choice": 65_536,
    "guided_json": 65_536, "guided_regex": 65_536,
    "guided_grammar": 65_536, "json": 65_536, "regex": 65_536, "choice": 65_536,
    "grammar": 65_536,
}  # fmt: skip
"""Of a text, or of all texts of a list."""
_MOST_VALUES = 32_768
_NESTED = ("schema", "json", "guided_json", "tools")
"""Objects of objects, which are written as JSON again: as many values in all of them together."""


def check_sizes(given: Mapping[str, object]) -> None:
    """Refuse what is longer than anything that means something. O(fields + messages).

    Raises:
        ApiError: it is; the field is named.
    """
    for name, value in given.items():
        if isinstance(value, list | dict):
            _check(name, len(value), _MOST_ENTRIES.get(name, _MOST_OF_OTHERS), "entries")
        if name in _MOST_CHARACTERS:
            texts = value if isinstance(value, list) else [value]
            length = sum(len(text) for text in texts if isinstance(text, str))
            _check(name, length, _MOST_CHARACTERS[name], "characters")
        if name in _NESTED and isinstance(value, list | dict):
            _check_values(name, value)
    messages = given.get("messages")
    if isinstance(messages, list):
        parts = [message.get("content") for message in messages if isinstance(message, dict)]
        count = sum(len(content) for content in parts if isinstance(content, list))
        _check("messages", count, _MOST_ENTRIES["messages"], "parts")


class Strict(BaseModel):
    """An object of a request: bounded, of exact types, without unknown fields."""

    MOST_STRANGERS: ClassVar[int] = 1
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        check_sizes(given)
        if len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return with_few_strangers(given, known, cls.MOST_STRANGERS)

    def prepare(self) -> None:
        """Do what takes long if this is large, on any thread."""


class Lenient(Strict):
    """An object that has other fields too in other implementations; nothing follows from them."""

    model_config = ConfigDict(extra="ignore")


class Other(Lenient):
    """An object of a type that means nothing here; it is left out, and named."""

    type: Annotated[str, Field(max_length=256)]


KNOWN, OTHER = Tag("of a known type"), Tag("of another type")
"""The tags of the members of a union that `by_type` chooses from."""


def of_type(kind: str) -> Tag:
    """Return the tag of the member of a union that has objects of this type alone. O(1)."""
    return Tag(f"of type {kind}")  # no name of a field, so that no error takes it for one


def by_type(*known: str, apart: bool = False) -> Discriminator:
    """Return what takes an object of a known type, or of none, as `KNOWN`, else as `OTHER`.

    Clients invent types faster than servers learn them, so their other fields may have any form.

    Args:
        known: the types.
        apart: True if each of them has a member of its own, with the tag `of_type`.
    """

    def chosen(given: Any) -> str:  # noqa: ANN401
        is_object = isinstance(given, dict)
        kind = given.get("type") if is_object else getattr(given, "type", None)
        if isinstance(kind, str) and kind not in known:
            return OTHER.tag
        return of_type(kind if isinstance(kind, str) else known[0]).tag if apart else KNOWN.tag

    return Discriminator(chosen)


def with_few_strangers(
    given: dict[str, object], known: Collection[str], most: int
) -> dict[str, object]:
    """An object without its unknown fields but a few: enough to name them. O(fields)."""
    strangers = [name for name in given if name not in known]
    return {name: given[name] for name in (*(given.keys() & known), *strangers[:most])}


def checked_prompt(value: object) -> object:
    """A prompt of any of the four forms; each entry is looked at once. O(prompt).

    Raises:
        ApiError: it is too long.
        PydanticCustomError: it is none.
    """
    if isinstance(value, str):
        return _checked_text(value)
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds <= {int}:
            return value
        _check("prompt", len(value), MAX_PROMPTS, "prompts")
        if kinds == {str}:
            return [_checked_text(text) for text in value]
        if kinds == {list}:
            _check("prompt", sum(map(len, value)), MAX_TOKENS, "tokens")
            if set(map(type, chain.from_iterable(value))) <= {int}:
                return value
    raise PydanticCustomError(
        "prompt_form", "input should be a text, a list of token ids, or a list of either"
    )


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "text", "input should be text that UTF-8 has: a surrogate stands alone in it"
        ) from error
    return text


Text = Annotated[str, AfterValidator(_checked_text)]
"""A text that can be cut into tokens."""


def _check_values(name: str, value: object) -> None:
    """Count the values inside of a value, as far as they are allowed."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        inside = each.values() if isinstance(each, dict) else each
        if isinstance(inside, Collection):
            count += len(inside)
            if count > _MOST_VALUES:
                wanted = f"wanted at most {_MOST_VALUES} values in all of its lists and objects"
                raise ApiError(400, f"{name}: {wanted}, got more", param=name)
            left += [one for one in inside if isinstance(one, list | dict)]


def _check(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise ApiError(400, f"{name}: wanted at most {most} {what}, got {count}", param=name)
