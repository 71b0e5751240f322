"""The data plane: kernels over paged KV caches and recurrent states, behind one contract.

Backends are chosen by name.
Importing this imports no torch: most names are loaded at their first use. `get_backend` loads a
toolchain.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from backends.errors import (
    BackendError,
    BackendUnavailableError,
    InvalidArgumentError,
    UnknownBackendError,
    UnsupportedError,
)
from backends.helper_process import HelperProcess, num_cores, pickled, take_expected

if TYPE_CHECKING:
    from backends.contract import (
        AttentionTerms,
        Backend,
        Capabilities,
        IndexCall,
        KVCache,
        KVLayout,
        LayerCall,
        PagedBatch,
        SharedPrefix,
    )
    from backends.oracle import block_sum
    from backends.registry import BackendStatus, backend_names, get_backend, list_backends
    from backends.sparse import SparseBackend, by_slot, choose
    from backends.states import (
        DecayGate,
        LinearAttentionTerms,
        LinearRows,
        ShortConvTerms,
        StateBackend,
        StateBatch,
    )

__all__ = [
    "AttentionTerms",
    "Backend",
    "BackendError",
    "BackendStatus",
    "BackendUnavailableError",
    "Capabilities",
    "DecayGate",
    "HelperProcess",
    "IndexCall",
    "InvalidArgumentError",
    "KVCache",
    "KVLayout",
    "LayerCall",
    "LinearAttentionTerms",
    "LinearRows",
    "PagedBatch",
    "SharedPrefix",
    "ShortConvTerms",
    "SparseBackend",
    "StateBackend",
    "StateBatch",
    "UnknownBackendError",
    "UnsupportedError",
    "backend_names",
    "block_sum",
    "by_slot",
    "choose",
    "get_backend",
    "list_backends",
    "num_cores",
    "pickled",
    "take_expected",
]

_HOMES = ("contract", "oracle", "registry", "sparse", "states")


def __getattr__(name: str) -> object:
    """Load the names of `__all__` that need torch; they are attributes from then on."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in _HOMES:
        names = vars(import_module(f"{__name__}.{home}"))
        globals().update({each: names[each] for each in __all__ if each in names})
    value: object = globals()[name]
    return value


def __dir__() -> list[str]:
    """Return all names, loaded or not."""
    return sorted({*globals(), *__all__})
