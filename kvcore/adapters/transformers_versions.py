"""How the minor versions of Transformers differ in what kvcore uses of them.

Decides: which minors are supported, the names of the argument by which a module takes the cache of
a pass, whether attention modules give their keys and values to the cache of a batch themselves, and
which layers of a cache keep nothing.

Invariants: a minor that is not in `INTERFACES` is refused when this file is imported, which the
other files do before they import a name of Transformers.

Does not know: classes of models, caches, batches.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn

import kvcore


class UnsupportedVersionError(kvcore.KVCoreError, ImportError):
    """The Transformers that is installed is not one that kvcore was run with."""


@dataclass(frozen=True, slots=True)
class Interface:
    """The interface of a minor version.

    Attributes:
        cache_argument: the argument of a forward for the cache.
        state_cache_argument: likewise, of networks that keep states alone, such as Mamba.
        modules_store: True if attention modules call `update` of the cache of continuous batching
            and pass it their keyword arguments to change; False if attention functions do, which
            get that cache as the argument `cache`.
    """

    cache_argument: str
    state_cache_argument: str
    modules_store: bool


_BEFORE_5_24 = Interface("past_key_values", "cache_params", modules_store=False)

INTERFACES = {
    "5.19": _BEFORE_5_24,
    "5.20": _BEFORE_5_24,
    "5.21": _BEFORE_5_24,
    "5.22": _BEFORE_5_24,
    "5.23": _BEFORE_5_24,
    "5.24": Interface("cache", "cache", modules_store=True),
}
"""By minor version, the oldest first."""

SUPPORTED = tuple(INTERFACES)


def interface_of(version: str) -> Interface:
    """Return the interface of a version of Transformers. O(1).

    Raises:
        UnsupportedVersionError: its minor is not supported; the insides change with each.
    """
    found = INTERFACES.get(".".join(version.split(".")[:2]))
    if found is None:
        raise UnsupportedVersionError(
            f"transformers: wanted {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}, got {version}",
            name="transformers",
        )
    return found


INSTALLED = interface_of(transformers.__version__)
"""The interface of the version that is installed."""

CACHE_ARGUMENT = INSTALLED.cache_argument
"""The argument by which a layer that attends takes the cache."""

EmptyLayer: Any = getattr(transformers.cache_utils, "DummyLayer", None)
"""The class of layers that keep nothing, in caches since 5.23; None: caches leave them out."""


def cache_argument(network: nn.Module, interface: Interface = INSTALLED) -> str:
    """Return the name of a network's argument for the cache of a pass. O(1)."""
    takes_states = interface.state_cache_argument in inspect.signature(network.forward).parameters
    return interface.state_cache_argument if takes_states else interface.cache_argument
