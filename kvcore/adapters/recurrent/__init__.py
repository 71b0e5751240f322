"""Recurrent layers of Transformers' models, with each sequence's state in kvcore's blocks.

Serves the runner and the adapter for continuous batching. Needs torch and Transformers, and for
what computes with a backend's operations (`BackendOperations`, `use_pytorch`) `backends`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# Refuses an unsupported version of Transformers before its insides are imported.
from kvcore.adapters.transformers_versions import CACHE_ARGUMENT, cache_argument

# isort: split
from kvcore.adapters.recurrent.interfaces import Steps
from kvcore.adapters.recurrent.passes import (
    HeldStates,
    Operations,
    RecurrentPass,
    ReportedLength,
    Run,
    StateRows,
    StateStep,
    divide,
    is_divided,
    stepping_of,
    undivide,
)
from kvcore.adapters.recurrent.probe import Recurrence, find_states, probe_recurrence
from kvcore.adapters.recurrent.states import (
    StateKey,
    StateShape,
    StateTensors,
    aligned,
    fitting_block_size,
    layer_bytes,
    num_pieces,
    state_places,
    state_views,
)

if TYPE_CHECKING:
    from kvcore.adapters.recurrent.state_functions import BackendOperations, use_pytorch

__all__ = [
    "CACHE_ARGUMENT",
    "BackendOperations",
    "HeldStates",
    "Operations",
    "Recurrence",
    "RecurrentPass",
    "ReportedLength",
    "Run",
    "StateKey",
    "StateRows",
    "StateShape",
    "StateStep",
    "StateTensors",
    "Steps",
    "aligned",
    "cache_argument",
    "divide",
    "find_states",
    "fitting_block_size",
    "is_divided",
    "layer_bytes",
    "num_pieces",
    "probe_recurrence",
    "state_places",
    "state_views",
    "stepping_of",
    "undivide",
    "use_pytorch",
]


def __getattr__(name: str) -> object:
    """Import what needs `backends` when it is asked for."""
    if name in {"BackendOperations", "use_pytorch"}:
        home = import_module(f"{__name__}.state_functions")
        found: object = getattr(home, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
