"""A setting is declared once: its default, its range and its words hold wherever it is read."""

import dataclasses
import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.control.settings import check_settings, setting, settings_of
from model.errors import InvalidArgumentError, InvalidSettingError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One of each kind."""

    count: int = setting(3, help="how many", least=1, most=2**63 - 1)
    share: float | None = setting(None, help="of all", above=0, most=1)
    heat: float = setting(0.0, help="of the draws", least=0, below=math.inf)
    form: Literal["auto", "wide"] = setting("auto", help="how it looks")
    is_on: bool = setting(False, help="whether", flag="on")
    words: tuple[str, ...] = setting((), help="what is said", least=1)
    ids: tuple[int, ...] = setting((), help="of tokens", least=0, most=9)
    beside: object = None

    def __post_init__(self):
        check_settings(self)


ALLOWED = {
    "count": st.integers(1, 2**63 - 1),
    "share": st.none() | st.floats(0, 1, exclude_min=True),
    "heat": st.floats(0, allow_infinity=False) | st.integers(0, 10**400),
    "form": st.sampled_from(["auto", "wide"]),
    "is_on": st.booleans(),
    "words": st.lists(st.text(min_size=1)).map(tuple),
    "ids": st.lists(st.integers(0, 9)).map(tuple),
}
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([2**63, -1, 0, 0.0, 10, math.nan, [], ["a"], {}, ("",), (10,), (True,), (3,)]),
)


@given(st.fixed_dictionaries({}, optional=ALLOWED))
def test_what_is_in_range_is_taken_as_it_is(given_values):
    made = Example(**given_values)
    for name, value in given_values.items():
        assert getattr(made, name) is value


def is_allowed(name, value):
    """The declarations above, written out by hand."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "count": lambda: is_number and isinstance(value, int) and 1 <= value < 2**63,
        "share": lambda: value is None or (is_number and 0 < value <= 1),
        "heat": lambda: is_number and 0 <= value < math.inf,
        "form": lambda: value in ("auto", "wide"),
        "is_on": lambda: isinstance(value, bool),
        "words": lambda: value == (),
        "ids": lambda: value in ((), (3,)),
    }[name]()


@given(name=st.sampled_from(sorted(ALLOWED)), value=ANYTHING)
def test_what_is_not_in_range_is_refused_by_name(name, value):
    if is_allowed(name, value):
        Example(**{name: value})
    else:
        with pytest.raises(InvalidSettingError, match=f"^{name}: wanted .*, got ") as told:
            Example(**{name: value})
        assert told.value.name == name
        assert told.value.got is value


def test_what_is_wanted_is_said_in_words():
    def wanted(name):
        with pytest.raises(InvalidSettingError) as told:
            Example(**{name: object()})
        return told.value.wanted

    assert {name: wanted(name) for name in ALLOWED} == {
        "count": f"an integer from 1 to {2**63 - 1}",
        "share": "a number above 0 and at most 1",
        "heat": "a finite number of at least 0",
        "form": "one of 'auto', 'wide'",
        "is_on": "true or false",
        "words": "a list, each text that is not empty",
        "ids": "a list, each an integer from 0 to 9",
    }


def test_a_declaration_tells_all_that_was_declared_and_of_no_other_field():
    count, share, *_ = settings_of(Example)
    assert (count.help, count.default, count.is_optional, count.takes) == (
        "how many",
        3,
        False,
        int,
    )
    assert (share.default, share.is_optional, share.takes) == (None, True, float)
    assert {one.name for one in settings_of(Example)} == set(ALLOWED)
    assert settings_of(Example)[4].flag == "on"
    assert Example() == Example(count=3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependent:
    """Settings that do nothing alone."""

    mode: Literal["plain", "wide", "long"] = setting("plain", help="how")
    base: int | None = setting(None, help="what stands below", flag="the-base")
    either: int = setting(4, help="of one of them", needs=("base", "mode=wide"))

    def __post_init__(self):
        check_settings(self)


@pytest.mark.parametrize(
    "given_values",
    [{}, {"either": 4}, {"either": 5, "base": 1}, {"either": 5, "mode": "wide"}, {"base": 0}],
)
def test_a_setting_is_taken_with_one_that_it_needs_or_at_its_default(given_values):
    Dependent(**given_values)


@pytest.mark.parametrize("given_values", [{}, {"mode": "long"}])
def test_a_setting_that_would_do_nothing_alone_is_refused_and_names_what_it_needs(given_values):
    message = "^either: has no effect without base or mode wide$"
    with pytest.raises(InvalidArgumentError, match=message):
        Dependent(either=5, **given_values)
