"""Decides what the tiny model reads: the documentation that the running interpreter carries.

Three sources: the language reference behind `help()` (`pydoc_data.topics`), the docstrings of the
standard library (read from its source, nothing is imported), and the docstrings of modules written
in C (these are imported, because they have no source).

Invariants: no network and no file outside the standard library; the same interpreter gives the
same documents in the same order in every process; no paragraph appears twice, so that nothing of
a held-out document was seen in training; a document is held out because of its name alone, so
that every interpreter holds out the same ones. It does not know about tokens or models.
"""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from types import ModuleType

from model.tiny.prose import paragraphs

HELD_OUT_ONE_IN = 32
_NOT_LIBRARY = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "turtledemo"}
)
_NOT_IMPORTED = frozenset({"readline"})  # its import writes escape codes to some terminals

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Entry:
    """A documented thing: its heading, empty if the text needs none, and what is said of it."""

    heading: str
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """The entries of one document, as found. name: such as `topics/assert` or `json.dumps`."""

    name: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A cleaned text that begins and ends by itself, under its source's name."""

    name: str
    text: str


def gather() -> list[Document]:
    """Every document of the running interpreter, in a fixed order, no paragraph twice.

    About 2.5 MB and 3 seconds; imports the standard library's C modules.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    return assemble([*topic_sources(), *library_sources(library), *c_sources()])


def is_held_out(name: str) -> bool:
    """Whether the document of this name is kept from training: about one name in 32."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """The documents to train on and the held-out ones, each in the given order."""
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        (held_out if is_held_out(document.name) else train).append(document)
    return train, held_out


def assemble(sources: Iterable[Source]) -> list[Document]:
    """Clean the sources, leaving out each paragraph that an earlier one had. O(characters).

    An entry with nothing left to say goes with its heading, a document without entries too.
    """
    seen: set[str] = set()
    documents: list[Document] = []
    for source in sources:
        parts: list[str] = []
        for entry in source.entries:
            fresh = [block for block in paragraphs(entry.text) if _is_new(block, seen)]
            if fresh:
                parts += [entry.heading, *fresh] if entry.heading else fresh
        if parts:
            documents.append(Document(source.name, "\n\n".join(parts)))
    return documents


def _is_new(paragraph: str, seen: set[str]) -> bool:
    key = " ".join(paragraph.split())
    is_new = key not in seen
    seen.add(key)
    return is_new


def topic_sources() -> list[Source]:
    """The language reference as `help("TOPIC")` shows it, a source a topic, by name."""
    return [
        Source(f"topics/{name}", (Entry("", text),)) for name, text in sorted(topics.topics.items())
    ]


def library_sources(root: Path, within: str = "") -> Iterator[Source]:
    """The docstrings of the Python files in `root / within`, by path; tests and bundles left out.

    A source is a module's docstring, a top-level function's, or a class's with its methods'; its
    name counts from `root`.
    """
    for path in sorted(_python_files(root / within)):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield from _file_sources(module, path)


def _python_files(folder: Path) -> Iterator[Path]:
    for place, subfolders, files in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        yield from (Path(place, name) for name in files if name.endswith(".py"))


def _file_sources(module: str, path: Path) -> Iterator[Source]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old docstrings
        tree = ast.parse(path.read_bytes())
    yield Source(module, (Entry(f"Module {module}", ast.get_docstring(tree) or ""),))
    for node in tree.body:
        if isinstance(node, _Definition):
            name = f"{module}.{node.name}"
            yield Source(name, tuple(_definition_entries(node, name)))


def _definition_entries(node: _Definition, name: str) -> Iterator[Entry]:
    docstring = ast.get_docstring(node) or ""
    if not isinstance(node, ast.ClassDef):
        yield Entry(f"{name}({', '.join(_argument_names(node.args))})", docstring)
        return
    yield Entry(f"class {name}", docstring)
    for child in node.body:
        if isinstance(child, _Definition):
            yield from _definition_entries(child, f"{node.name}.{child.name}")


def _argument_names(arguments: ast.arguments) -> Iterator[str]:
    for argument in (*arguments.posonlyargs, *arguments.args):
        if argument.arg not in {"self", "cls"}:
            yield argument.arg
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    yield from (argument.arg for argument in arguments.kwonlyargs)
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"


def c_sources() -> Iterator[Source]:
    """The docstrings of the standard library's C modules and of the built-ins, by module name."""
    for name in sorted(sys.stdlib_module_names - _NOT_IMPORTED):
        if name.startswith(("_test", "xx", "_xx")):
            continue
        module = _import_c_module(name)
        if module is not None:
            yield Source(name, (Entry(f"Module {name}", _doc_of(module)),))
            for key, value in sorted(vars(module).items()):
                full_name = f"{name}.{key}"
                yield Source(full_name, tuple(_object_entries(value, full_name, depth=1)))


def _import_c_module(name: str) -> ModuleType | None:
    """The module if it is compiled and this platform has it; nothing of Python is imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    if spec.origin != "built-in" and not spec.origin.endswith(suffixes):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return importlib.import_module(name)
        except ImportError:  # built without the library it wraps
            return None


def _object_entries(value: object, name: str, *, depth: int) -> Iterator[Entry]:
    if inspect.isclass(value):
        yield Entry(f"class {name}", _doc_of(value))
        if depth:
            for key, member in sorted(vars(value).items()):
                yield from _object_entries(member, f"{value.__name__}.{key}", depth=depth - 1)
    elif inspect.isroutine(value):
        yield Entry(f"{name}({', '.join(_parameter_names(value))})", _doc_of(value))
    elif inspect.isdatadescriptor(value):
        yield Entry(name, _doc_of(value))


def _parameter_names(value: object) -> list[str]:
    signature = getattr(value, "__text_signature__", None) or ""
    names = (part.split("=")[0].strip(" ()") for part in signature.split(","))
    return [name for name in names if name.isidentifier() and name not in {"self", "cls"}]


def _doc_of(value: object) -> str:
    doc = getattr(value, "__doc__", None)
    return doc if isinstance(doc, str) else ""
