"""Compiles kvcore with mypyc when a wheel is built; hatchling runs this, kvcore never imports it.

The environment decides: `KVCORE_COMPILE=1` compiles whatever is built, an editable install too
(in place, so edits count again after the next build); `KVCORE_COMPILE=0` nothing; unset, wheels
alone. The same `.py` files are shipped either way, and what cannot be compiled here, for want of
mypyc or of a C compiler, is shipped as Python, with a warning.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "KVCORE_COMPILE"

# The modules that a request passes through. Those of plain data stay Python: a native class would
# refuse a wrong type with an error of its own before ours could say what was wanted.
COMPILED = (
    "advance",
    "arguments",
    "block",
    "block_table",
    "content_tree",
    "doubt",
    "events",
    "free_blocks",
    "free_queue",
    "leases",
    "lifetimes",
    "manager",
    "names",
    "peaks",
    "pool",
    "prefix",
    "published",
    "release",
    "sequence",
    "slots",
    "state",
    "steps",
    "tokens",
)

SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]  # of any builder
    """Adds the compiled modules to what is built.

    Attributes:
        compiler: the command that compiles the files named after it, in place.
    """

    compiler: tuple[str, ...] = (sys.executable, "-m", "mypyc", "--ignore-missing-imports")
    _work: TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return what has to be installed before the build."""
        wanted = is_wanted(os.environ.get(VARIABLE, ""), "standard")
        return ["mypy[mypyc]>=1.15", "setuptools"] if wanted else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, if that is wanted, before the files are collected."""
        source = Path(self.root)
        if version == "editable":
            discard(source)
        if not is_wanted(os.environ.get(VARIABLE, ""), version):
            return
        self._work = TemporaryDirectory()
        work = Path(self._work.name)
        problem = compile_copy(source / "kvcore", work, self.compiler)
        if problem:
            self.finalize()
            self.app.display_warning(f"kvcore is built as Python: {problem}")
            return
        built = extensions(work)
        if version == "editable":
            for path in built:
                shutil.copy2(path, source / path.relative_to(work))
            self.finalize()
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in built:
            build_data["force_include"][str(path)] = str(path.relative_to(work))

    def finalize(self, *_: object) -> None:
        """Remove the working directory, once all is packed."""
        if self._work is not None:
            self._work.cleanup()


def is_wanted(value: str, version: str) -> bool:
    """Say whether to compile, given what `KVCORE_COMPILE` says and what is built.

    Raises:
        ValueError: the variable is neither "0", "1" nor unset.
    """
    if value not in {"", "0", "1"}:
        raise ValueError(f"{VARIABLE}: wanted 0, 1 or nothing, got {value!r}")
    return value == "1" or (value == "" and version == "standard")


def compile_copy(package: Path, work: Path, compiler: tuple[str, ...]) -> str | None:
    """Copy a package into `work` and compile it there; return what went wrong, or None."""
    copy = work / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "bench", "testing"))
    discard(work)
    files = [f"{package.name}/{module}.py" for module in COMPILED]
    try:
        done = subprocess.run(  # noqa: S603  # our own command
            [*compiler, *files], cwd=work, capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    if done.returncode:
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        return lines[-1] if lines else f"{compiler[0]} ended with {done.returncode}"
    shutil.rmtree(work / "build", ignore_errors=True)
    missing = len(COMPILED) + 1 - len(extensions(work))  # and one that they share
    return f"{missing} extension modules are missing" if missing else None


def extensions(root: Path) -> list[Path]:
    """Return the compiled modules of kvcore below `root`, and the one that they share."""
    found = [*root.glob("*__mypyc.*"), *(root / "kvcore").glob("*.*")]
    return sorted(path for path in found if path.name.endswith(SUFFIXES))


def discard(root: Path) -> None:
    """Delete what an earlier build left beside the sources: it would be run in their place."""
    for path in extensions(root):
        path.unlink()
