"""How a process ends: the code and the line, whatever goes wrong."""

import errno
import io
import sys

import pytest

from model.cli.exits import exits
from model.errors import UsageError


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


class FullWhenFlushed(io.StringIO):
    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def code_of(error):
    with pytest.raises(SystemExit) as ending, exits():
        raise error
    return ending.value.code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("two\nlines"), 2, "error: two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.EACCES, "Permission denied", "x"), 3, "error: [Errno 13] .* 'x'"),
        (MemoryError(), 3, "error: out of memory"),
    ],
)
def test_an_error_is_one_line_and_its_code(capsys, error, code, line):
    assert code_of(error) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == line.replace(".*", "Permission denied:") + "\n"


def test_a_bug_keeps_its_traceback_and_does_not_exit_like_a_difference(capsys):
    assert code_of(ZeroDivisionError("of ours")) == 3
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    *_, error, report = err.splitlines()
    assert error == "ZeroDivisionError: of ours"
    assert "please report" in report


def test_a_line_is_one_write_because_processes_that_share_a_network_share_a_terminal(monkeypatch):
    writes = []
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "write", writes.append)
    assert code_of(UsageError("two\nlines")) == 2
    assert writes == ["error: two lines\n"]


def test_a_body_that_ends_well_goes_on():
    with exits():
        pass


def test_a_code_that_the_body_chose_is_kept():
    assert code_of(SystemExit(1)) == 1


def test_output_that_cannot_be_written_is_never_a_success(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", FullWhenFlushed())
    assert code_of(SystemExit(0)) == 3
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_a_closed_stdout_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert code_of(SystemExit(0)) == 3
    assert capsys.readouterr().err == "error: stdout is closed\n"


@pytest.mark.parametrize("stderr", [None, FullDisk()])
def test_where_nothing_can_be_told_the_code_still_is(capsys, monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    assert code_of(UsageError("unheard")) == 2
    assert capsys.readouterr().out == ""
