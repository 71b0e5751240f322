"""Recurrent layers of Transformers' models, with each sequence's state in kvcore's blocks.

Serves the runner and the adapter for continuous batching. Needs torch and Transformers.
"""

from kvcore.adapters.recurrent.passes import (
    HeldStates,
    Operations,
    RecurrentPass,
    ReportedLength,
    Run,
    StateStep,
    cache_argument,
    divide,
    is_divided,
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

__all__ = [
    "HeldStates",
    "Operations",
    "Recurrence",
    "RecurrentPass",
    "ReportedLength",
    "Run",
    "StateKey",
    "StateShape",
    "StateStep",
    "StateTensors",
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
    "undivide",
]
