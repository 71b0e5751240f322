"""Compiles kvcore with mypyc when a wheel is built; hatchling runs this, kvcore never imports it.

The environment decides: `KVCORE_COMPILE=1` compiles whatever is built, an editable install too
(in place, so edits count again after the next build), and a build that cannot is an error;
`KVCORE_COMPILE=0` compiles nothing; unset, wheels alone, and what cannot be compiled here, for want
of mypyc or of a C compiler, is built as Python, with a warning. The same `.py` files are shipped
either way. pip hides what a build prints, so the warning and the progress of the compiler go to the
terminal too, where there is one.

A wheel has the extras that its configuration names: the others need packages that are not in it.
The long description is README.md, with links that lead somewhere.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "KVCORE_COMPILE"

# The modules that a request passes through. Those of plain data stay Python: a native class would
# refuse a wrong type with another error before ours could say what was wanted. (A compiled
# identity/namespace.py makes a request of 20 tokens in another namespace 2 to 7 % faster, and
# accepts True as a version.)
COMPILED = (
    "arguments",
    "block",
    "content_tree",
    "events",
    "eviction/deadlines",
    "eviction/free_queue",
    "eviction/idle_blocks",
    "eviction/lifetimes",
    "identity/block_hash",
    "identity/tokens",
    "lease",
    "manager",
    "pool",
    "sequence",
    "tables/block_table",
    "tables/ends",
    "tables/slots",
    "verbs/ends",
    "verbs/load",
    "verbs/peaks",
    "verbs/rewind",
    "verbs/share",
    "verbs/step",
    "verbs/write",
)

SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)


WITHOUT_COMPILER = "there is no C compiler (cc, gcc, clang or $CC)"
TICK_SECONDS = 5.0


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]  # of any builder
    """Adds the compiled modules to what is built.

    Attributes:
        compiler: the command that compiles the files named after it, in place.
        terminal: the terminal of the user, while pip hides the output of a build.
    """

    compiler: tuple[str, ...] = (sys.executable, "-m", "mypyc", "--ignore-missing-imports")
    terminal: Path = Path("/dev/tty")
    _work: TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return what has to be installed before the build."""
        wanted = is_wanted(os.environ.get(VARIABLE, ""), "standard")
        return ["mypy[mypyc]>=1.15", "setuptools"] if wanted and self.has_compiler() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, if that is wanted, before the files are collected.

        Raises:
            RuntimeError: it is demanded and cannot be done.
        """
        source = Path(self.root)
        if version == "editable":
            discard(source)
        elif "extras" in self.config:
            keep(self.config["extras"], self.metadata.core.optional_dependencies)
        value = os.environ.get(VARIABLE, "")
        if not is_wanted(value, version):
            return
        self._work = TemporaryDirectory()
        work = Path(self._work.name)
        problem = None if self.has_compiler() else WITHOUT_COMPILER
        problem = problem or compile_copy(source / "kvcore", work, self.compiler, self.tell)
        if problem:
            self.finalize()
            if value == "1":
                raise RuntimeError(f"{VARIABLE}=1, and kvcore cannot be compiled: {problem}")
            warning = f"kvcore is built as Python, several times slower: {problem}"
            self.app.display_warning(warning)
            self.tell(warning)
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

    @staticmethod
    def has_compiler() -> bool:
        """Say whether a C compiler can be found; on Windows setuptools looks for itself."""
        names = (*os.environ.get("CC", "").split()[:1], "cc", "gcc", "clang")
        return os.name == "nt" or any(shutil.which(name) for name in names)

    def tell(self, message: str) -> None:
        """Write a line to the terminal, if there is one."""
        with suppress(OSError), self.terminal.open("a", encoding="utf-8") as terminal:
            terminal.write(f"\r{message}\n")


class LongDescriptionHook(MetadataHookInterface):
    """Sets the long description; the URL `Source` of the project makes its links absolute."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the field `readme`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute_links(text, metadata.get("urls", {}).get("Source", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute_links(text: str, source: str) -> str:
    """Return Markdown whose relative links begin with a URL, or are plain text if it is empty.

    Relative images are left out.
    """
    text = re.sub(r"!\[[^\]]*\]\((?!\w+:)[^)]*\)\n*", "", text)
    linked = rf"[\1]({source.rstrip('/')}/\2)" if source else r"\1"
    return re.sub(r"\[([^\]]*)\]\((?!\w+:|#)([^)]*)\)", linked, text)


def keep(names: list[str], extras: dict[str, list[str]]) -> None:
    """Remove the extras that are not named.

    Raises:
        ValueError: an extra that is named is not there.
    """
    if unknown := sorted(set(names) - set(extras)):
        raise ValueError(f"extras: wanted some of {', '.join(extras)}, got {', '.join(unknown)}")
    for name in set(extras) - set(names):
        del extras[name]


def is_wanted(value: str, version: str) -> bool:
    """Say whether to compile, given what `KVCORE_COMPILE` says and what is built.

    Raises:
        ValueError: the variable is neither "0", "1" nor unset.
    """
    if value not in {"", "0", "1"}:
        raise ValueError(f"{VARIABLE}: wanted 0, 1 or nothing, got {value!r}")
    return value == "1" or (value == "" and version == "standard")


def compile_copy(
    package: Path,
    work: Path,
    compiler: tuple[str, ...],
    tell: Callable[[str], None],
    tick_seconds: float = TICK_SECONDS,
) -> str | None:
    """Copy a package into `work` and compile it there; return what went wrong, or None.

    `tell` hears of the progress, once every `tick_seconds`.
    """
    copy = work / package.name
    annexes = "adapters", "testing", "sanitize", "tiers", "wire"
    left_out = shutil.ignore_patterns("__pycache__", *annexes)
    shutil.copytree(package, copy, ignore=left_out)
    discard(work)
    files = [f"{package.name}/{module}.py" for module in COMPILED]
    tell(f"kvcore: compiling {len(files)} modules, about a minute")
    log = work / "compiler.log"
    started = time.monotonic()
    try:
        with (
            log.open("wb") as output,
            subprocess.Popen(  # noqa: S603  # our own command
                [*compiler, *files], cwd=work, stdout=output, stderr=subprocess.STDOUT
            ) as process,
        ):
            while not _has_ended(process, tick_seconds):
                seconds = time.monotonic() - started
                tell(f"kvcore: {_stage(work)}, {seconds:.0f} s")
    except OSError as error:
        return str(error)
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else f"{compiler[0]} ended with {process.returncode}"
    shutil.rmtree(work / "build", ignore_errors=True)
    missing = len(COMPILED) + 1 - len(extensions(work))  # and one that they share
    return f"{missing} extension modules are missing" if missing else None


def _has_ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _stage(work: Path) -> str:
    """Return how far mypyc is: what it has written says so."""
    if next((work / "build").rglob("*.o"), None):
        return "linking"
    return "compiling C" if next((work / "build").rglob("*.c"), None) else "reading types"


def extensions(root: Path) -> list[Path]:
    """Return the compiled modules of kvcore below `root`, and the one that they share."""
    found = [*root.glob("*__mypyc.*"), *(root / "kvcore").rglob("*.*")]
    return sorted(path for path in found if path.name.endswith(SUFFIXES))


def discard(root: Path) -> None:
    """Delete what an earlier build left beside the sources: it would be run in their place."""
    for path in extensions(root):
        path.unlink()
