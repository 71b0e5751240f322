"""The parts of a cache that modules of Transformers ask for, in the forms of several versions.

Decides: their names. Does not know: where states, keys and values lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from kvcore.adapters.recurrent.states import StateKey


class KeyValueStore(Protocol):
    """A cache of Transformers to which attention modules give their keys and values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the module's queries attend to."""
        ...


class Steps(Protocol):
    """The computations on the states of a pass, for packed rows of all its sequences.

    Records are those of `backends`.
    """

    def convolve(self, key: StateKey, rows: Tensor, terms: Any) -> Tensor:  # noqa: ANN401
        """A short convolution of [num_rows, channels], see `StateBackend.short_conv_step`."""

    def attend(self, key: StateKey, rows: Any, terms: Any) -> Tensor:  # noqa: ANN401
        """Linear attention, see `StateBackend.linear_attention_step`."""


class States(Protocol):
    """A cache that gives states by layer and number."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> object:
        """Return the last inputs of a convolution."""
        ...

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> object:
        """Return a recurrent state."""
        ...


@dataclass(frozen=True, slots=True)
class StatesByLayer:
    """The layers of a cache: modules read `cache.layers[layer].conv_states[number]`."""

    cache: States

    def __getitem__(self, layer: int) -> StatesOfLayer:
        """Return the states of a layer. O(1)."""
        return StatesOfLayer(self.cache, layer)


class StatesOfLayer:
    """The states of one layer of a cache, by their numbers.

    Attributes:
        conv_states: those of `get_conv_state`.
        recurrent_states: those of `get_recurrent_state`.
    """

    record_past = False  # states are not cut

    def __init__(self, cache: States, layer: int) -> None:
        self.conv_states = _ByNumber(partial(cache.get_conv_state, layer))
        self.recurrent_states = _ByNumber(partial(cache.get_recurrent_state, layer))


@dataclass(frozen=True, slots=True)
class _ByNumber:
    get: Callable[[int], object]

    def __getitem__(self, number: int) -> object:
        return self.get(number)
