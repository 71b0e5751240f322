"""Broken input: one line, its exit code, and nothing that runs and answers wrongly."""

import contextlib
import io
import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from model.cli import prompts, session
from model.cli.exits import exits
from model.cli.session import execute
from model.cli.signals import StopRequest
from model.engine import Engine
from model.errors import UsageError, visible
from model.load import loader
from tests.hang import HANG_S
from tests.model import broken_inputs
from tests.model.broken_inputs import CONFIG, GROUPS, MORE_FIELDS, VALUES, Broken

USUAL = ("--backend", "numba", "--block-size", "4", "--max-tokens", "4")


def code_of(*argv):
    """The exit code of a command line, run in this process."""
    with pytest.raises(SystemExit) as ending, exits():
        sys.exit(execute(*prompts.read_command_line(argv)))
    return ending.value.code


def files(folder):
    """The content of every file: a run changes none but those that it is to write."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def outcome(checkpoint, tmp_path, capsys, monkeypatch):
    """Makes a broken input and runs it in this process: exit code, stdout, stderr."""

    def run(case, *more):
        folder = tmp_path / "model"
        shutil.copytree(checkpoint, folder)
        if case.edit is not None:
            case.edit(folder)
        capsys.readouterr()
        argv = [part.replace("{beside}", str(tmp_path)) for part in case.argv]
        if not {"--prompt", "--prompts-file"} & set(argv):
            argv += ["--prompt", "ab"]
        monkeypatch.setattr(session, "telling", contextlib.nullcontext)  # told on a busy machine
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(case.stdin)))
        before = files(tmp_path)
        code = code_of("--model", str(folder), *USUAL, *argv, *more)
        assert files(tmp_path) == before
        shutil.rmtree(folder)
        captured = capsys.readouterr()
        assert visible(captured.out + captured.err) == captured.out + captured.err
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    "case", [case for _, cases in GROUPS for case in cases], ids=lambda case: case.what[:60]
)
def test_broken_input_is_one_line_that_says_what_is_wrong(outcome, case):
    code, out, err = outcome(case)
    assert code == case.code, err
    if code == 2:
        assert out == ""
        assert len(err.splitlines()) == 1, err
    line = err.splitlines()[-1]
    assert line.startswith("error: ")
    assert case.says in line


def test_a_case_that_is_not_broken_or_says_something_else_would_be_found(outcome):
    sound = Broken("nothing", "anything")
    assert outcome(sound)[0] == 0
    with pytest.raises(AssertionError):
        test_broken_input_is_one_line_that_says_what_is_wrong(outcome, sound)
    other = Broken("an unknown flag", "something else", argv=("--nonsense",))
    with pytest.raises(AssertionError):
        test_broken_input_is_one_line_that_says_what_is_wrong(outcome, other)


def fields_of(checkpoint):
    return [*json.loads((checkpoint / "config.json").read_text(encoding="utf-8")), *MORE_FIELDS]


def check_field(outcome, key, value):
    """A value that a field should not have: refused in a line, or nothing but the right answer."""
    case = broken_inputs.config(key, value, "")
    code, out, err = outcome(case, "--verify", "--json")
    assert code in {0, 2, 3}, err
    assert "Traceback" not in err, err
    if code == 0:
        assert json.loads(out)["verified"] is True
    elif code == 2:
        (line,) = err.splitlines()
        assert re.match(r"error: (model: |[\w-]+: |--prompt )", line), line


@pytest.mark.parametrize("value", ["x", 0, None], ids=repr)
def test_no_field_of_a_configuration_ends_in_a_traceback(outcome, checkpoint, value):
    for key in fields_of(checkpoint):
        check_field(outcome, key, value)


@pytest.mark.walk
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_no_value_of_any_field_ends_in_a_traceback_or_a_wrong_answer(outcome, checkpoint, value):
    for key in fields_of(checkpoint):
        check_field(outcome, key, value)


def test_the_walk_finds_a_field_whose_value_decides_and_is_ignored(outcome, monkeypatch):
    """The planted bug: missing weights are drawn at random, as Transformers does by itself."""
    monkeypatch.setattr(loader, "check_loaded", lambda *_: None)
    (case,) = [case for case in CONFIG if case.what == "config.json: head_dim is 32"]
    with pytest.raises(AssertionError):
        test_broken_input_is_one_line_that_says_what_is_wrong(outcome, case)


@pytest.fixture
def start(checkpoint, forks):
    """Starts a process on the random checkpoint."""
    command = ["-m", "model.run", "--model", checkpoint, *USUAL]
    return lambda *argv: forks.start(*command, *argv, is_open=True)


MANY = [part for n in range(6) for part in ("--prompt", f"a prompt, number {n}")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_what_is_finished_when_a_signal_comes_is_printed(start, tmp_path, number):
    """Six requests one after the other; the signal comes when the first of them is streamed."""
    trace = tmp_path / "trace.json"
    limits = ("--max-num-seqs", "1", "--max-tokens", "200", "--ignore-eos", "--trace", str(trace))
    with start(*MANY, *limits, "--stream") as process:
        text = ""
        while "[2]" not in text:
            text += (piece := process.stdout.read(1))
            assert piece
        process.send_signal(number)
        text += process.stdout.read()
        error = process.stderr.read().splitlines()[-1]
        code = process.wait()
    word, wanted = ("interrupted", 130) if number is signal.SIGINT else ("terminated", 143)
    assert code == wanted, error
    found = re.fullmatch(rf"{word}: (\d) of 6 texts are finished", error)
    assert found, error
    assert 1 <= int(found[1]) < 6
    assert f"[{found[1]}]" in text
    assert text.count("requests ") == 1
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


class Signals:
    """Stands in for `stopping`: asked for an end after a number of finished texts."""

    def __init__(self, engine_steps):
        self.number = None
        self.left = engine_steps

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def __bool__(self):
        self.left -= 1
        if self.left < 0:
            self.number = signal.SIGINT
        return self.left < 0


@pytest.mark.parametrize("form", ["--json", "--stats"])
def test_an_interrupted_run_prints_finished_texts_and_no_others(
    checkpoint, capsys, monkeypatch, form
):
    monkeypatch.setattr(session, "stopping", lambda: Signals(7))
    code = code_of("--model", str(checkpoint), *USUAL, "--max-num-seqs", "1", *MANY, form)
    out, err = capsys.readouterr()
    assert code == 130
    assert err.splitlines()[-1] == "interrupted: 1 of 6 texts are finished"
    if form == "--json":
        requests = json.loads(out)["requests"]
        assert [r["finish_reason"] for r in requests] == ["length", *["aborted"] * 5]
        assert len(requests[0]["tokens"]) == 4
        assert 0 < len(requests[1]["tokens"]) < 4
    else:
        assert re.findall(r"^\[\d\]", out, re.MULTILINE) == ["[1]"]


def test_a_signal_while_it_verifies_leaves_what_was_generated(checkpoint, capsys, monkeypatch):
    asked = StopRequest()

    @contextlib.contextmanager
    def stopping():
        yield asked

    def slow(model, index, request, adapters):
        asked.number = signal.SIGTERM

    monkeypatch.setattr(session, "stopping", stopping)
    monkeypatch.setattr(session, "compare", slow)
    code = code_of("--model", str(checkpoint), *USUAL, *MANY, "--verify", "--json")
    out, err = capsys.readouterr()
    assert (code, err.splitlines()[-1]) == (143, "terminated: 6 of 6 texts are finished")
    document = json.loads(out)
    assert (len(document["requests"]), document["verified"]) == (6, None)


def test_a_constant_mask_of_an_old_checkpoint_is_not_one_too_many(outcome):
    masks = {"attn.masked_bias": torch.tensor(-1e4), "attn.bias": torch.ones(1, 1, 8, 8).bool()}
    edit = broken_inputs.weights(
        lambda tensors: tensors | {f"model.layers.0.{name}": mask for name, mask in masks.items()}
    )
    assert outcome(Broken("a mask", "", edit), "--verify")[0] == 0
    other = broken_inputs.weights(
        lambda tensors: {**tensors, "model.layers.0.attn.bias": torch.zeros(8)}
    )
    code, _, err = outcome(Broken("a bias", "", other))
    assert code == 2
    assert "model.layers.0.attn.bias is not in the network" in err


def test_a_file_of_too_many_prompts_is_refused_before_they_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(prompts, "_MAX_PROMPTS", 3)
    monkeypatch.setattr(prompts, "_MAX_LINES", 6)
    file = tmp_path / "many.txt"
    for content, is_refused in (("a\n" * 3, False), ("a\n" * 4, True), ("\n" * 5 + "a", False)):
        file.write_text(content, encoding="utf-8")
        if is_refused:
            with pytest.raises(UsageError, match="at most 3 prompts in 6 lines"):
                prompts.read_command_line(["--prompts-file", str(file)])
        else:
            assert prompts.read_command_line(["--prompts-file", str(file)])[1]
    file.write_text("\n" * 7, encoding="utf-8")
    with pytest.raises(UsageError, match="got more"):
        prompts.read_command_line(["--prompts-file", str(file)])


def test_a_fault_in_a_step_prints_what_was_finished_before(checkpoint, capsys, monkeypatch):
    step, steps = Engine.step, iter(range(100))

    def failing(self):
        if self.config.enable_prefix_caching and next(steps) == 7:
            raise MemoryError
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)
    code = code_of("--model", str(checkpoint), *USUAL, "--max-num-seqs", "1", *MANY)
    out, err = capsys.readouterr()
    assert (code, err.splitlines()[-1]) == (3, "error: out of memory")
    assert re.findall(r"^\[\d\]", out, re.MULTILINE) == ["[1]"]


def test_a_second_signal_ends_at_once_and_so_does_one_before_anything_runs(start):
    with start("--prompt", "-") as process:
        time.sleep(0.5)  # it is waiting for its prompt
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130
        assert process.stderr.read() == "interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line_and_exit_code_3(checkpoint, capsys, monkeypatch):
    """Under stdout; for the trace see `cli/test_run.py`."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert code_of("--model", str(checkpoint), *USUAL, "--prompt", "ab", "--json") == 3
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1] == "error: [Errno 28] No space left on device"
    assert "Traceback" not in errors


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_memory_is_bounded_whatever_a_flag_or_a_prompt_says(checkpoint, forks, tmp_path):
    """A line of 30 MB took 8 GB, a billion seats took 16; both are told apart before."""
    line = tmp_path / "line.txt"
    line.write_text("ab " * 10_000_000, encoding="utf-8")
    code = (
        "import resource, sys\n"
        "from tests.model.cli.test_run import main\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))\n"
        "usual, line = sys.argv[2:], sys.argv[1]\n"
        "for more in (['--prompts-file', line], ['--prompt', 'ab', '--max-num-seqs', '9' * 9]):\n"
        "    print('exit code', main([*usual, *more]), file=sys.stderr)\n"
    )
    done = forks.run("-c", code, line, "--model", checkpoint, *USUAL)
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.split("exit code 2\n")
    assert "prompt: wanted at most 1,280 characters" in first.splitlines()[-1]
    assert "ready after" in second.splitlines()[-2]
    assert second.endswith("exit code 0\n")
