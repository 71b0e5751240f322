"""`python -m model` starts the commands that have modules of their own."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvcore
from model.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]


def spawn(*argv):
    return subprocess.run(
        [sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_every_command_is_a_module():
    for name in COMMANDS:
        assert find_spec(f"model.{name}") is not None


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["--help-all"]])
def test_without_a_command_it_names_them(argv):
    done = spawn("model", *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_version_is_that_of_the_package():
    done = spawn("model", "--version")
    assert (done.returncode, done.stdout) == (0, f"kvcore {kvcore.__version__}\n")


def test_a_command_that_does_not_exist_is_one_line_with_those_that_do():
    done = spawn("model", "fly")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: command: wanted {', '.join(COMMANDS)}, got 'fly'\n"


def test_a_certificate_that_is_missing_is_one_line_with_both_flags_and_files():
    done = spawn(
        "model", "serve", "--port", "0", "--tls-certfile", "c.pem", "--tls-keyfile", "k.pem"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        "error: --tls-certfile 'c.pem', --tls-keyfile 'k.pem': "
    )


@pytest.mark.parametrize("name", ["run", "serve"])  # a module, and a package
@pytest.mark.parametrize("argv", [["--help"], ["--nonsense"]])
def test_a_command_does_what_its_module_does(name, argv):
    one, other = spawn("model", name, *argv), spawn(f"model.{name}", *argv)
    assert (one.returncode, one.stdout, one.stderr) == (
        other.returncode,
        other.stdout,
        other.stderr,
    )
