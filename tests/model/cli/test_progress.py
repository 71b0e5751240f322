"""Progress is drawn on a terminal, and nowhere else."""

import functools
import io
import sys
from types import SimpleNamespace

import pytest

from model.cli import progress
from model.cli.bars import bar
from model.cli.progress import telling


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_the_work_and_is_clean_afterwards(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with bar("round 1", 1) as advance:
        advance()
    drawn = out.getvalue().split("\r")
    assert any(line.startswith("round 1: ") and "/1" in line for line in drawn)
    assert [line.strip() for line in drawn[-2:]] == ["", ""]


def test_what_is_not_wanted_and_what_is_not_seen_is_not_drawn(monkeypatch):
    for stream, is_wanted in ((io.StringIO(), True), (Terminal(), False), (None, True)):
        monkeypatch.setattr(sys, "stderr", stream)
        with bar("work", 2, is_wanted=is_wanted) as advance:
            advance()
            advance(1)
        assert stream is None or stream.getvalue() == ""


@pytest.fixture
def timers(monkeypatch):
    """Those that were started, in place of threads that wait: each fires when it is called."""
    made = []

    class Timer:
        def __init__(self, wait_s, function, arguments):
            self.wait_s, self.state = wait_s, "made"
            self.function = functools.partial(function, *arguments)

        def start(self):
            self.state = "started"
            made.append(self)

        def cancel(self):
            self.state = "cancelled"

        def __call__(self):
            assert self.state == "started"
            self.function()

    monkeypatch.setattr(progress, "threading", SimpleNamespace(Timer=Timer))
    return made


def test_work_that_takes_longer_than_two_seconds_is_told_of_in_one_line(timers, capsys):
    with telling("loading the weights"):
        [timer] = timers
        assert timer.wait_s == 2.0
        assert timer.daemon  # a process that ends does not wait for it
        assert capsys.readouterr().err == ""
        timer()
        assert capsys.readouterr().err == "loading the weights ...\n"
    assert timers[-1].state == "cancelled"
    timers[-1].function()  # it fired while it was cancelled
    assert capsys.readouterr().err == ""
    assert len(timers) == 2


def test_work_that_takes_minutes_is_told_of_again(timers, capsys):
    with telling("compiling"):
        for _ in range(3):
            timers[-1]()
        lines = ["compiling ...", "compiling ... 22 s so far", "compiling ... 42 s so far"]
        assert capsys.readouterr().err.splitlines() == lines
        late = timers[-1]
    assert late.state == "cancelled"
    late.state = "started"  # it fired just before it was cancelled
    number = len(timers)
    late()
    assert len(timers) == number


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_work_that_is_done_sooner_is_not_told_of(timers, capsys, error):
    try:
        with telling("loading the weights"):
            if error is not None:
                raise error
    except KeyboardInterrupt:
        pass
    [timer] = timers
    assert timer.state == "cancelled"
    assert capsys.readouterr().err == ""


def test_a_line_that_cannot_be_written_ends_nothing(timers, monkeypatch):
    with telling("loading the weights"):
        for stream in (None, io.StringIO()):
            monkeypatch.setattr(sys, "stderr", stream)
            if stream is not None:
                stream.close()
            timers[0]()
