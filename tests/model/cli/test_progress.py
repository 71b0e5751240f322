"""Progress is drawn on a terminal, and nowhere else."""

import io
import sys

from model.cli.bars import bar


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
