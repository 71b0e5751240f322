"""Checks that a network without weights has passed, on disk: a second start does not repeat them.

Decides: when a network is equal to one that has passed: its `digest` is, and so are Transformers'
own files. What this does not see (a function of another module that a program has replaced, say)
passes unchecked, so no check belongs here that guards against wrong results.

Invariants: a check that fails, or changes the network, is not stored.

Does not know: what a check looks for.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import transformers
from transformers import PreTrainedModel

from model.compile.stored_files import cache_dir, read_file, write_file
from model.compile.stored_graphs import digest


def pass_once(network: PreTrainedModel, check: Callable[[], None]) -> None:
    """Run a check, unless an earlier start has run it on an equal network. O(modules) beside it.

    Args:
        network: that is checked.
        check: raises if the network does not pass.
    """
    path = _path(network)
    with suppress(OSError, ValueError):
        read_file(path)
        return
    check()
    if _path(network) == path:
        with suppress(OSError):
            write_file(path, b"passed")


def _path(network: PreTrainedModel) -> Path:
    name = repr((digest(network), _sources())).encode()
    return cache_dir() / "checks" / hashlib.sha256(name).hexdigest()


def _sources() -> list[tuple[str, int, int]]:
    """Transformers' modules that all models share: names, sizes, times. O(files)."""
    files = [each for each in Path(transformers.__file__).parent.iterdir() if each.is_file()]
    return sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files)
