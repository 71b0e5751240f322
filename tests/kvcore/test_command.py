"""The command `kvcore`: its version, its commands, and one line where something is missing."""

import os
import subprocess
import sys
from types import FunctionType

import pytest

import kvcore
from kvcore.__main__ import COMMANDS, main


def test_the_version_says_whether_this_is_the_compiled_build(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"kvcore {kvcore.__version__} ({kvcore.build}), ")
    is_python = isinstance(kvcore.BlockPool.take, FunctionType)
    assert kvcore.build == ("python" if is_python else "compiled")


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ["version", *COMMANDS])


def test_an_unknown_command_is_refused_with_those_there_are(capsys):
    assert main(["bench"]) == 2
    assert capsys.readouterr().err == "command: wanted version, test, events, got 'bench'\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_the_command_line_of_its_module(name):
    run = [sys.executable, "-m", "kvcore", name, "--help"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr


@pytest.mark.parametrize(("name", "missing"), [("test", "hypothesis"), ("events", "zmq")])
def test_a_missing_package_is_one_line_that_names_the_extra(name, missing):
    """In a fresh process, in which the package cannot be imported."""
    program = f"import sys; sys.modules[{missing!r}] = None; import kvcore.__main__ as it; "
    program += f"sys.exit(it.main([{name!r}, 'x']))"
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(f"kvcore {name}: ")
    assert line.endswith(f"pip install 'kvcore[{COMMANDS[name][1]}]'")


@pytest.mark.parametrize("arguments", [[], ["version"], ["events", "--help"]])
def test_output_that_is_read_no_further_ends_the_command_without_a_word(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    run = [sys.executable, "-m", "kvcore", *arguments]
    done = subprocess.run(run, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode in {0, 141}  # argparse ignores it where output is not buffered
    assert done.stderr == b""
