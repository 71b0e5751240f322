"""Flags are made from declared settings: their names, values, errors and help."""

import dataclasses
import re
from functools import partial
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.bench import MEASUREMENTS, bench_flags
from model.chat import chat_flags
from model.cli.args import run_flags
from model.cli.settings import Flags, flag_name
from model.cluster.args import cluster_flags
from model.control.settings import check_settings, setting, settings_of
from model.errors import UsageError
from model.serve.args import serve_flags

BENCHES = [partial(bench_flags, name) for name in MEASUREMENTS if name != "serve"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One of each kind."""

    count: int = setting(3, help="how many", least=-4, most=9, is_common=True)
    share: float | None = setting(None, help="50 % of all", above=0, most=1)
    form: Literal["auto", "wide"] = setting("auto", help="how it looks")
    is_wanted: bool = setting(True, help="whether", flag="wanted")
    words: tuple[str, ...] = setting((), help="what is said", least=1)
    sizes: tuple[int, ...] = setting((1, 2), help="of blocks", least=1, unit="list")
    room: int | None = setting(None, help="in bytes", least=1, unit="bytes")
    secret: int = setting(0, help="no flag", flag="")

    def __post_init__(self):
        check_settings(self)


def flags():
    made = Flags("python -m example", "An example.")
    made.add("all of them", Example, count=5)
    return made


def parse(*argv):
    return flags().parse(argv).of(Example)


TEXTS = {
    "count": lambda value: ["--count", str(value)],
    "share": lambda value: [f"--share={value!r}"],
    "form": lambda value: ["--form", value],
    "is_wanted": lambda value: ["--wanted" if value else "--no-wanted"],
    "words": lambda value: [f"--words={word}" for word in value],
    "sizes": lambda value: ["--sizes", ",".join(map(str, value))],
    "room": lambda value: ["--room", str(value)],
}
VALUES = {
    "count": st.integers(-4, 9),
    "share": st.floats(0, 1, exclude_min=True),
    "form": st.sampled_from(["auto", "wide"]),
    "is_wanted": st.booleans(),
    "words": st.lists(st.text(min_size=1), min_size=1).map(tuple),
    "sizes": st.lists(st.integers(1, 99), min_size=1).map(tuple),
    "room": st.integers(1, 2**40),
}


@given(st.fixed_dictionaries({}, optional=VALUES), st.randoms())
def test_what_is_written_as_flags_is_read_as_it_was(values, random):
    names = list(values)
    random.shuffle(names)
    said = flags().parse([part for name in names for part in TEXTS[name](values[name])])
    assert said.given(Example) == values
    assert said.of(Example) == Example(**{"count": 5, **values})
    assert said.over(Example(count=7)) == Example(**{"count": 7, **values})


def test_the_last_one_counts_where_a_flag_takes_one_value():
    assert parse("--count", "1", "--count", "2", "--wanted", "--no-wanted").count == 2
    assert parse("--words", "a", "--words", "-").words == ("a", "-")
    assert parse("--room", "2KiB").room == 2048


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--count x", r"--count: wanted an integer from -4 to 9, got 'x'"),
        ("--count 10", r"--count: wanted an integer from -4 to 9, got 10"),
        (f"--count {'9' * 5000}", r"--count: wanted an integer from -4 to 9, got '9+\.\.\."),
        ("--count 1.0", r"--count: wanted an integer from -4 to 9, got '1.0'"),
        ("--count", r"--count: expected one argument"),
        ("--count --wanted", r"--count: expected one argument"),
        ("--share nan", r"--share: wanted a number above 0 and at most 1, got nan"),
        ("--form tall", r"--form: wanted one of 'auto', 'wide', got 'tall'"),
        ("--words=", r"--words: wanted text that is not empty, got ''"),
        ("--words --form", r"--words: expected one argument"),
        ("--sizes 4,0", r"--sizes: wanted an integer of at least 1, got 0"),
        ("--sizes 4,", r"--sizes: wanted an integer of at least 1, got ''"),
        ("--room 1.5G", r"--room: wanted bytes, such as 1073741824, 512M or 2GiB, got '1.5G'"),
        ("--room 0", r"--room: wanted an integer of at least 1, got 0"),
        ("--wanted=yes", r"--wanted/--no-wanted: ignored explicit argument 'yes'"),
        ("--secret 1", r"unrecognized arguments: --secret 1; --help-all shows all flags"),
        ("--cou 1", r"unrecognized arguments: --cou 1; did you mean --count\?"),
        ("--rom=1", r"unrecognized arguments: --rom=1; did you mean --room\?"),
        ("7", r"unrecognized arguments: 7; --help-all shows all flags"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it_what_was_wanted_and_what_came(argv, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        parse(*argv.split(" "))


def test_help_has_the_settings_that_are_declared_common(capsys):
    with pytest.raises(SystemExit) as ending:
        parse("--help")
    assert ending.value.code == 0
    out = capsys.readouterr().out
    assert "--count N" in out
    assert "--help-all" in out
    assert "--share" not in out


@pytest.mark.parametrize("command", [run_flags, serve_flags, cluster_flags, chat_flags, *BENCHES])
def test_a_commands_help_fits_on_a_few_screens(command, capsys):
    sizes = []
    for argument in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            command().parse([argument])
        sizes.append(capsys.readouterr().out.count("\n  --"))
    assert 4 <= sizes[0] <= 25 < sizes[1]


def shown_flags(made, argument, capsys):
    with pytest.raises(SystemExit):
        made.parse([argument])
    return re.findall(r"^  (?:-h, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("command", [run_flags, serve_flags, cluster_flags, chat_flags, *BENCHES])
def test_help_has_the_order_of_the_declarations_title_by_title(command, capsys):
    made = command()
    titles = list(dict.fromkeys(made._titles.values()))
    classes = sorted(made._titles, key=lambda one: titles.index(made._titles[one]))
    declared = [flag_name(one) for each in classes for one in settings_of(each)]
    known = made._parser._option_string_actions
    expected = ["--help", "--help-all", *[flag for flag in declared if flag in known]]
    every, common = (shown_flags(made, name, capsys) for name in ("--help-all", "--help"))
    assert every == expected
    assert common == [flag for flag in expected if flag in common]
    groups = made._parser._action_groups
    groups.append(groups.pop(groups.index(next(one for one in groups if one.title == titles[0]))))
    assert shown_flags(made, "--help-all", capsys) != expected  # the first title stands last now


@pytest.mark.parametrize("command", [run_flags, serve_flags, chat_flags])
def test_help_begins_with_the_model(command, capsys):
    assert shown_flags(command(), "--help", capsys)[2] == "--model"


def test_help_is_what_was_declared(capsys):
    with pytest.raises(SystemExit) as ending:
        parse("--help-all")
    assert ending.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--count N how many (default: 5)" in out
    assert "--share X 50 % of all" in out
    assert "--form {auto,wide} how it looks (default: auto)" in out
    assert "--words TEXT what is said; repeatable" in out
    assert "--sizes N,... of blocks (default: 1,2)" in out
    assert "--wanted, --no-wanted whether (default: on)" in out
    assert "--secret" not in out


COMMANDS = [run_flags(), serve_flags(), cluster_flags()]


@pytest.mark.parametrize("made", COMMANDS, ids=lambda made: made.prog)
def test_every_declared_setting_of_a_command_is_a_flag_once(made):
    names = [row.flag for rows in made.rows().values() for row in rows]
    assert len(names) == len(set(names)) > 20
    declared = {one for cls in made._titles for one in settings_of(cls) if one.flag != ""}
    assert len(names) == len(declared)
    for one in declared:
        if one.default is not None:
            one.check(one.default)
        assert one.help, one.name
        assert not one.help.endswith("."), one.name
