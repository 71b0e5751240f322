"""Imports PyTorch and Transformers with less work: no garbage collection, and known names.

Transformers reads the source of its 2,500 model files, twice, to learn which name is in which file.
The names are stored for later starts. Its losses, which only training computes, import SciPy and
torchvision: files of losses are imported when one of their functions is called.

Invariants: the names are those that Transformers finds: a stored file belongs to the paths, sizes
and times of all files that it would read. What cannot be read or stored is found as before.
Importing this imports neither.

Does not know: the code that uses the packages.
"""

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from model.compile.stored_files import cache_dir, read_file, write_file
from model.host import uncollected

_FINDS_NAMES = "transformers.utils.import_utils"
_NAMES_LOSSES = "transformers.loss.loss_utils"

_Names = Mapping[frozenset[str], Mapping[str, set[str]]]
"""By the packages that they need, then by module: names."""


@contextmanager
def importing() -> Iterator[None]:
    """Import large packages in the body without garbage collection; what they made stays.

    Collections would take a fifth of the processor time of a start. O(1) beside the body.
    """
    with uncollected(), _known_names():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def _known_names() -> Iterator[None]:
    """Have Transformers, if it is imported in the body, look its names up, and import no losses."""
    finder = _Finder()
    sys.meta_path = [finder, *sys.meta_path]  # a new list: another thread may be going through it
    try:
        yield
    finally:
        sys.meta_path = [each for each in sys.meta_path if each is not finder]


class _Finder(MetaPathFinder):
    """Finds two modules of Transformers, and changes how they run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Find a module, and change how it runs if it is one of the two."""
        if name not in _CHANGED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = partial(_CHANGED[name], spec.loader.exec_module)
            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


class _Losses(ModuleType):
    """In place of a file of losses: its functions import it when they are called."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_call, self.__name__, name)


def _call(module: str, name: str, /, *given: object, **named: object) -> object:
    return getattr(import_module(module), name)(*given, **named)


def _run_without_losses(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run the module that names all losses; the files that it imports are not there meanwhile."""
    folder = Path(module.__file__ or "").parent
    names = {f"{module.__package__}.{file.stem}" for file in folder.glob("loss_*.py")}
    absent = names - {module.__name__} - sys.modules.keys()
    sys.modules.update({name: _Losses(name) for name in absent})
    try:
        with suppress(Exception):  # it uses more than functions
            run(module)
            return
    finally:
        for name in absent:
            del sys.modules[name]
    run(module)


def _run(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    run(module)
    find = getattr(module, "define_import_structure", None)
    if find is not None and module.__file__ is not None:
        models = Path(module.__file__).parents[1] / "models"
        vars(module)["define_import_structure"] = _looking_up(find, models)


_CHANGED = {_FINDS_NAMES: _run, _NAMES_LOSSES: _run_without_losses}


def _looking_up(find: Callable[..., _Names], models: Path) -> Callable[..., _Names]:
    """Return a `define_import_structure` that finds a folder's names once, for later starts too."""
    known = cache(partial(_names, find, models))

    def define(module_path: str | Path, prefix: str | None = None) -> _Names:
        path = Path(module_path)
        if models not in (path, path.parent) or path.name not in (models.name, "__init__.py"):
            return find(module_path, prefix)
        before = "" if prefix is None else f"{prefix}."
        return {
            needs: {f"{before}{module}": {*names} for module, names in modules.items()}
            for needs, modules in known().items()
        }

    return define


def _names(find: Callable[..., _Names], models: Path) -> _Names:
    """Return the names of a folder of models, stored for later starts. O(files)."""
    path = cache_dir() / "names" / _digest(models)
    with suppress(Exception):  # a file may hold anything
        return {
            frozenset(needs): {module: {*names} for module, names in modules.items()}
            for needs, modules in json.loads(read_file(path))
        }
    found = find(str(models))
    stored = [
        [[*needs], {module: [*names] for module, names in modules.items()}]
        for needs, modules in found.items()
    ]
    with suppress(OSError):
        write_file(path, json.dumps(stored).encode())
    return found


def _digest(models: Path) -> str:
    """Return a name for the sources that decide which names there are. O(files)."""
    facts = []
    for top in (models, models.parent / "utils"):
        for folder, _, names in os.walk(top, followlinks=True):  # as Transformers does
            for name in names:
                if name.endswith(".py"):
                    about = os.stat(f"{folder}/{name}")  # noqa: PTH116  # there are thousands
                    facts.append((folder, name, about.st_size, about.st_mtime_ns))
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()
