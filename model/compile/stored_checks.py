"""Checks that a network has passed, on disk, so that a second start does not repeat them.

Decides: when a network is equal to one that has passed: its `digest` is, and so are some numbers of
each tensor and the times of Transformers' own files. What this does not see (a function of another
module that a program has replaced, say) passes unchecked.

Invariants: a check that fails, or changes the network, is not stored.

Does not know: what is checked.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from model.compile.stored_files import cache_dir, read_file, write_file
from model.compile.stored_graphs import digest

_NUMBERS = 16
"""Of each tensor, from all of it: enough to tell checkpoints apart."""


def pass_once(network: PreTrainedModel, check: Callable[[], None], *facts: object) -> None:
    """Run a check, unless an earlier start has run it on an equal network. O(weights) beside it.

    Args:
        network: that is checked.
        check: raises if the network does not pass.
        facts: what the check depends on beside the network.
    """
    path = _path(network, facts)
    with suppress(OSError, ValueError):
        if path is not None:
            read_file(path)
            return
    check()
    if path is not None and _path(network, facts) == path:
        with suppress(OSError):
            write_file(path, b"passed")


def _path(network: PreTrainedModel, facts: object) -> Path | None:
    """Where it is stored that it has passed; None: its tensors are of an unknown kind."""
    with suppress(Exception):
        name = repr((digest(network), facts, _sources())).encode() + _some_numbers(network)
        return cache_dir() / "checks" / hashlib.sha256(name).hexdigest()
    return None


def _sources() -> list[tuple[str, int, int]]:
    """Transformers' modules that all models share: names, sizes, times. O(files)."""
    files = [each for each in Path(transformers.__file__).parent.iterdir() if each.is_file()]
    return sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files)


def _some_numbers(network: PreTrainedModel) -> bytes:
    kept = [
        each.detach().flatten()[:: max(1, each.numel() // _NUMBERS)].double()
        for each in (*network.parameters(), *network.buffers())
        if not each.is_meta
    ]
    return b"" if not kept else bytes(torch.cat(kept).cpu().numpy().data)
