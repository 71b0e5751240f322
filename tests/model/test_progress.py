"""Progress is drawn on a terminal, and nowhere else."""

import io
import sys

from model.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(text):
    """What a terminal line shows after the text."""
    line = ""
    for part in text.split("\r"):
        line = part.partition("\x1b[K")[0]
    return line


def test_a_terminal_sees_the_work_and_is_clean_afterwards():
    out = Terminal()
    with Progress("round 1", 4, out) as progress:
        assert screen(out.getvalue()) == f"round 1 [{'.' * 24}] 0/4 0 s"
        progress._drawn_s -= 1
        progress.advance(2)
        assert screen(out.getvalue()).startswith(f"round 1 [{'#' * 12}{'.' * 12}] 2/4")
    assert screen(out.getvalue()) == ""


def test_it_is_drawn_at_most_ten_times_a_second():
    out = Terminal()
    with Progress("work", 1000, out) as progress:
        for _ in range(1000):
            progress.advance()
        drawn = out.getvalue().count("work")
    assert 1 <= drawn <= 1 + 10 * (progress._drawn_s - progress._begin_s + 0.1)


def test_a_pipe_and_a_missing_stderr_see_nothing(monkeypatch):
    pipe = io.StringIO()
    with Progress("work", 2, pipe) as progress:
        progress.advance()
    assert pipe.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    with Progress("work", 2) as progress:
        progress.advance()
