"""How a process ends: the code and the line, whatever goes wrong."""

import errno
import io
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from model.cli import limits, start
from model.cli.exits import exits
from model.cli.progress import say
from model.cli.writer import StreamWriter, show
from model.errors import InvalidArgumentError, RankLostError, UsageError, visible
from model.serve.process import _Visible

ROOT = Path(__file__).parents[3]
HOSTILE = "\x1b]0;title\x07 \x9b31m \r \x7f \u202e \u2028"


OPEN_FILES = (
    "error: too many open files: this process is limited to 20 (ulimit -n): raise the limit, such "
    "as by ulimit -n 65536"
)
THREADS = (
    "error: no more threads or processes: this process is limited to 7 (ulimit -u): raise the "
    "limit, such as by ulimit -u 65536"
)
MEMORY = (
    "error: out of memory: this process is limited to 2,048 (ulimit -v): raise the limit, such as "
    "by ulimit -v unlimited"
)


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
    assert "Please report" in report


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "x"), OPEN_FILES),
        (RuntimeError("unable to open file <a> in read-only mode: Too many open files (24)"),
         OPEN_FILES),
        (ImportError("a.so: cannot open shared object file: Too many open files"), OPEN_FILES),
        (caused(UsageError("model: cannot read x"), OSError(errno.EMFILE, "Too many open files")),
         OPEN_FILES),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)),
         "error: [Errno 23] Too many open files in system"),
        (RuntimeError("can't start new thread"), THREADS),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), THREADS),
        (RuntimeError(os.strerror(errno.EAGAIN)), THREADS),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), "kv/lock"),
         "error: [Errno 11] Resource temporarily unavailable: 'kv/lock'"),
        (MemoryError(), MEMORY),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: "
                      "you tried to allocate 8 bytes. Error code 12"), MEMORY),
        (ImportError("libx.so: failed to map segment from shared object"), MEMORY),
        (BlockingIOError(errno.EAGAIN, "write could not complete without blocking"),
         "error: [Errno 11] write could not complete without blocking"),
    ],
)  # fmt: skip
def test_a_limit_of_the_system_is_one_line_that_names_it(monkeypatch, capsys, error, line):
    values = {"NOFILE": 20, "NPROC": 7, "AS": 2048 << 10}
    monkeypatch.setattr(limits, "_value", values.get)
    assert code_of(error) == 3
    assert capsys.readouterr().err == line + "\n"


def test_a_socket_that_is_not_ready_is_not_taken_for_a_limit(monkeypatch, capsys):
    monkeypatch.setattr(limits, "_value", {"NPROC": 7}.get)
    assert code_of(pytest.importorskip("zmq").Again()) == 3
    assert capsys.readouterr().err.startswith("Traceback")


def test_a_users_words_about_a_limit_are_no_limit(monkeypatch, capsys):
    monkeypatch.setattr(limits, "_value", {"NOFILE": 20}.get)
    assert code_of(UsageError("prompt: wanted x, got 'Too many open files'")) == 2
    assert capsys.readouterr().err == "error: prompt: wanted x, got 'Too many open files'\n"


def limited(most, *command):
    return subprocess.run(
        ["/bin/sh", "-c", f"ulimit -n {most}; exec {sys.executable} -m {' '.join(command)}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_command_that_may_open_too_few_files_is_one_line():
    done = limited(5, "model.run", "--prompt", "ab")
    *others, line = done.stderr.splitlines()
    assert line == OPEN_FILES.replace("20", "5"), done.stderr
    assert all(other.endswith(" ...") for other in others)  # progress
    assert done.returncode == 3


@pytest.mark.parametrize("most", [8, 20, 63])
def test_a_server_that_may_open_too_few_files_does_not_start(most):
    done = limited(most, "model.serve", "--port", "0")
    wanted = "error: open files (ulimit -n): wanted a limit of at least 64, as each connection "
    wanted += f"takes one, got {most}: raise the limit, such as by ulimit -n 65536\n"
    assert (done.returncode, done.stderr) == (2, wanted)


@pytest.mark.parametrize(
    ("soft", "hard", "after"), [(20, 1 << 20, 65_536), (20, 300, 300), (70_000, 1 << 20, 70_000)]
)
def test_a_server_raises_its_limit_of_open_files_as_far_as_it_may(monkeypatch, soft, hard, after):
    now = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: now.__setitem__(slice(2), both))
    limits.allow_open_files(64)
    assert now == [after, hard]


def test_an_error_about_a_setting_names_its_flag(capsys):
    assert code_of(InvalidArgumentError("num_blocks: cannot be combined with kv_dtype; x")) == 2
    assert code_of(InvalidArgumentError("prompt: wanted kv_dtype")) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: --num-blocks: cannot be combined with --kv-dtype; x"
    assert second == "error: prompt: wanted kv_dtype"


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


def test_a_lost_rank_is_told_once(capsys):
    lost = RankLostError("rank 1 is gone")
    assert code_of(lost) == 3
    assert capsys.readouterr().err == "error: rank 1 is gone\n"
    lost.was_told = True
    assert code_of(lost) == 3
    assert capsys.readouterr().err == ""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that reads its environment when it is imported, and our code that imports it."""
    monkeypatch.syspath_prepend(tmp_path)

    def made(source, ours="import brokenlib"):
        (tmp_path / "brokenlib.py").write_text(source, encoding="utf-8")
        sys.modules.pop("brokenlib", None)
        return lambda: exec(ours, {"__name__": "model.ours"})  # noqa: S102  # as a module of ours

    yield made
    sys.modules.pop("brokenlib", None)


def ended(run):
    with pytest.raises(SystemExit) as ending, exits():
        run()
    return ending.value.code


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "raise ValueError('\\nno such setting:\\n' + 'see BROKENLIB_LOGS ' * 99)",
            "error: brokenlib does not load: ValueError: no such setting: see BROKENLIB_LOGS see",
        ),
        (
            "import libthatisnotthere",
            "error: brokenlib does not load: ModuleNotFoundError: No module named 'libthatis",
        ),
    ],
)
def test_a_library_that_cannot_be_imported_is_bad_input_and_no_bug_of_ours(
    library, capsys, source, line
):
    assert ended(library(source)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(line)
    assert len(said) < 400


def test_a_library_that_is_not_there_is_named(library, capsys):
    assert ended(library("", "import libthatisnotthere.part")) == 2
    assert capsys.readouterr().err.startswith("error: libthatisnotthere does not load: Module")


@pytest.mark.parametrize(
    ("source", "ours"),
    [
        ("def call(): raise ValueError", "import brokenlib; brokenlib.call()"),
        ("", "import model.thatisnotthere"),
        ("", "1 / 0"),
    ],
)
def test_what_fails_otherwise_is_a_bug_of_ours(library, capsys, source, ours):
    assert ended(library(source, ours)) == 3
    assert "Please report" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_wrong_setting_of_torch_is_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "model.run", "--prompt", "ab"],
        cwd=ROOT, env={**os.environ, "TORCH_LOGS": "nonsense"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: torch does not load: ValueError: Invalid log settings: nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_python_without_docstrings_is_refused_before_transformers_fails(monkeypatch):
    monkeypatch.setattr(start, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    with pytest.raises(UsageError, match="PYTHONOPTIMIZE=2"):
        start.start("model", "numba", "auto")


@pytest.mark.parametrize("moment", ["model.cli", "model.errors", "model.cli.prompts"])
def test_a_command_heeds_a_signal_from_its_first_line_on(tmp_path, moment):
    """The signal comes when a module is looked for; `model.cli` is the first of ours."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def heard(event, arguments):\n"
        f"    if event == 'import' and arguments[0] == {moment!r}:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.addaudithook(heard)\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "model.run", "--help"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert done.stdout == ""


def test_importing_the_package_leaves_signals_alone():
    # Set first: a shell's background jobs ignore it.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import model; "
        "print(signal.getsignal(signal.SIGINT).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "default_int_handler\n"


def test_text_is_visible_and_no_terminal_acts_on_it():
    escaped = visible(HOSTILE)
    assert escaped == r"\x1b]0;title\x07 \x9b31m \r \x7f \u202e \u2028"
    for plain in ("a\n\tb", "é 日本　語", "👩\u200d🚀", "א\u200fב"):
        assert visible(plain) == plain


def test_errors_log_records_prompts_and_texts_are_visible(capsys):
    code_of(UsageError(HOSTILE))
    code_of(ZeroDivisionError(HOSTILE))
    say(HOSTILE)
    record = logging.LogRecord("a", logging.ERROR, "", 1, "%s", (HOSTILE,), None)
    out = io.StringIO()
    writer = StreamWriter([("1", HOSTILE)], out)
    for character in HOSTILE:
        writer.write(0, character, is_last=False)
    writer.write(0, "", is_last=True)
    assert out.getvalue() == show("1", HOSTILE, HOSTILE)
    for text in (capsys.readouterr().err, _Visible().format(record), out.getvalue()):
        assert r"title\x07" in text
        assert visible(text) == text
