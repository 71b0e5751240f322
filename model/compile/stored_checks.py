"""Checks that a network has passed, on disk, so that a second start does not repeat them.

Decides: when a network is equal to one that has passed: all that a trace depends on is the same,
and so are some numbers of each weight.

Invariants: a check that fails, or changes the network, is not stored.

Does not know: what is checked.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel

from model.compile.stored_files import cache_dir, read_file, write_file
from model.compile.stored_graphs import digest

_NUMBERS = 16
"""Of each weight, from all of it: enough to tell checkpoints apart."""


def pass_once(network: PreTrainedModel, check: Callable[[], None], *facts: object) -> None:
    """Run a check, unless an earlier start has run it on an equal network. O(weights) beside it.

    Args:
        network: that is checked.
        check: raises if the network does not pass.
        facts: what the check depends on beside the network.
    """
    path = _path(network, facts)
    with suppress(OSError, ValueError):
        read_file(path)
        return
    check()
    if _path(network, facts) == path:
        with suppress(OSError):
            write_file(path, b"passed")


def _path(network: PreTrainedModel, facts: object) -> Path:
    name = repr((digest(network), facts)).encode() + _some_numbers(network)
    return cache_dir() / "checks" / hashlib.sha256(name).hexdigest()


def _some_numbers(network: PreTrainedModel) -> bytes:
    kept = [
        each.detach().flatten()[:: max(1, each.numel() // _NUMBERS)].double()
        for each in network.parameters()
        if each.is_floating_point() and not each.is_meta
    ]
    return b"" if not kept else bytes(torch.cat(kept).cpu().numpy().data)
