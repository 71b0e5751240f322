"""Builds a compiled wheel of kvcore for each CPython that is found, and tests each: one command.

`python -m tests.kvcore.wheels` takes every CPython from 3.11 to 3.14 on the path or of pyenv;
`--python 3.12 --tests tests/kvcore/test_manager.py` does less. Each wheel is installed into a fresh
environment and tested from a copy of the tests, where no source can shadow it. The sdist is built
too, and installed where no C compiler can be found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
NEEDED = (
    *("pytest", "pytest-xdist", "hypothesis", "numpy", "hatchling", "mypy", "ruff"),
    *("pyzmq", "msgspec"),  # kvcore.wire
)
SHOW = "from kvcore import pool; print('python' if pool.__file__.endswith('.py') else 'compiled')"


def main(arguments=None):
    options = parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    done = []
    for version in options.python:
        python = interpreter(version)
        if python is None:
            done.append(f"{version}: no such interpreter here")
            continue
        with TemporaryDirectory() as work:
            wheel = build(python, Path(work), options.out)
            test(python, Path(work), wheel, options.tests)
            done.append(f"{version}: {wheel.name}, tested")
    with TemporaryDirectory() as work:
        done.append(f"sdist: {from_sdist(Path(work), options.out)}")
    print(*done, sep="\n")


def parser():
    made = argparse.ArgumentParser(prog="python -m tests.kvcore.wheels", description=__doc__)
    made.add_argument("--python", nargs="+", default=VERSIONS, metavar="3.X")
    made.add_argument("--out", type=Path, default=ROOT / "dist", help="where wheels go")
    made.add_argument("--tests", nargs="*", default=["tests/kvcore"], help="what each must pass")
    return made


def interpreter(version):
    """The path of a CPython of this version, or None."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*root.glob(f"versions/{version}.*/bin/python{version}")]
    on_path = shutil.which(f"python{version}")
    for path in [*found, *([Path(on_path)] if on_path else [])]:
        if run([path, "-c", "import venv"], check=False, capture_output=True).returncode == 0:
            return path
    return None


def build(python, work, out):
    """A wheel, compiled: what cannot be compiled is an error."""
    run([python, "-m", "venv", work / "builds"])
    pip = work / "builds" / "bin" / "pip"
    environment = {**os.environ, "KVCORE_COMPILE": "1"}
    run([pip, "wheel", "-q", "--no-deps", "-w", work / "wheel", ROOT], env=environment)
    (wheel,) = (work / "wheel").glob("*.whl")
    return Path(shutil.copy(wheel, out))


def test(python, work, wheel, tests):
    """Install a wheel into a fresh environment and run tests of ours from a copy."""
    run([python, "-m", "venv", work / "tests"])
    installed = work / "tests" / "bin" / "python"
    run([installed, "-m", "pip", "install", "-q", wheel, *NEEDED])
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    for name in ("tests", "docs", "README.md", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, elsewhere / name)
    said = run([installed, "-c", SHOW], cwd=elsewhere, capture_output=True, text=True).stdout
    if said.strip() != "compiled":
        raise SystemExit(f"{wheel.name} runs as {said.strip()}")
    if tests:
        run([installed, "-m", "pytest", "-q", *tests], cwd=elsewhere)


def from_sdist(work, out):
    """Install the sdist where there is no C compiler; return how kvcore runs then."""
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out], cwd=ROOT)
    version = re.search(r'__version__ = "(.*)"', (ROOT / "kvcore" / "sanitize.py").read_text())[1]
    run([sys.executable, "-m", "venv", work / "venv"])
    python = work / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    environment |= {"PATH": str(work / "venv" / "bin"), "KVCORE_COMPILE": ""}
    sdist = out / f"kvcore-{version}.tar.gz"
    run([python, "-m", "pip", "install", "-q", sdist], env=environment)
    said = run([python, "-c", SHOW], cwd=work, capture_output=True, text=True).stdout.strip()
    if said != "python":
        raise SystemExit(f"without a compiler it runs as {said}")
    return f"{sdist.name} installs without a compiler"


def run(command, *, check=True, **options):
    return subprocess.run([str(part) for part in command], check=check, **options)


if __name__ == "__main__":
    main()
