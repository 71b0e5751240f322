"""Rotary factors that change with the length of a text: each request has its own.

`longrope` (Phi-3) has two sets of factors, one for texts up to the length that the model was first
trained at and one for longer texts. Transformers chooses by the longest text of a batch. Here a
batch has texts of many requests, so the choice is made per token: the network's own rotation is
computed twice, as if all texts were short and as if all were long.

Decides: which networks have such factors, at which length they change, and whether a text may grow
past it: only if Transformers' `generate` then recomputes it from its start (Phi-3 and similar);
otherwise it would mix keys of both kinds, which equals neither.

Invariants: outside our passes the network is unchanged.

Does not know: requests, caches; callers say which tokens belong to a long text.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from model.errors import UnsupportedModelError


class RopeSwitch:
    """The choice of factors for one network; made by `rope_switch`.

    Attributes:
        num_tokens: the longest text with the first factors.
        recomputes: True if a text that grows past it is computed again.
    """

    def __init__(self, num_tokens: int, *, recomputes: bool) -> None:
        self.num_tokens = num_tokens
        self.recomputes = recomputes
        self._is_long: Tensor | None = None

    @contextmanager
    def choosing(self, is_long: Tensor | None) -> Iterator[None]:
        """Choose for each token while a pass runs. O(1).

        Args:
            is_long: bool [1, num_tokens], whether it belongs to a long text; None: no token does.
        """
        self._is_long = is_long
        try:
            yield
        finally:
            self._is_long = None

    def rotation(self, rotate: Callable[..., Any]) -> "_Rotation":
        """Return the forward of a rotary embedding, with the choice. O(1)."""
        return _Rotation(self, rotate)

    def chosen(self, rotate: Callable[..., Any], x: Tensor, positions: Tensor, *more: Any) -> Any:  # noqa: ANN401  # as the network's
        """Return the rotation of each token. Two rotations if any token may be long."""
        is_long = self._is_long
        if is_long is None:
            return rotate(x, positions, *more)
        short = rotate(x, positions.masked_fill(is_long, 0), *more)
        beyond = torch.full_like(positions[:, :1], self.num_tokens)  # one token of a long text
        long = rotate(x, torch.cat([positions, beyond], dim=1), *more)
        return tuple(
            torch.where(is_long[..., None], after[:, :-1], before)
            for before, after in zip(short, long, strict=True)
        )


class _Rotation:
    def __init__(self, switch: RopeSwitch, rotate: Callable[..., Any]) -> None:
        self.switch = switch
        self._rotate = rotate

    def __call__(self, x: Tensor, position_ids: Tensor, *more: Any) -> Any:  # noqa: ANN401
        return self.switch.chosen(self._rotate, x, position_ids, *more)


def rope_switch(network: PreTrainedModel) -> RopeSwitch | None:
    """Install the choice in a network whose factors change with the length. O(modules).

    A second call returns the same object.

    Returns:
        None: its factors never change.

    Raises:
        UnsupportedModelError: they change at several lengths.
    """
    found = {module: at for module in network.modules() if (at := _changes_at(module)) is not None}
    if not found:
        return None
    if len(set(found.values())) > 1:
        raise UnsupportedModelError(
            f"{type(network).__name__}: wanted rotary factors that change at one length, "
            f"got {sorted(set(found.values()))}"
        )
    before = next(iter(found)).__dict__.get("forward")
    if isinstance(before, _Rotation):
        return before.switch
    own = getattr(type(network), "prepare_inputs_for_generation", None)
    recomputes = own is not GenerationMixin.prepare_inputs_for_generation
    recomputes = recomputes and hasattr(network.config, "original_max_position_embeddings")
    switch = RopeSwitch(next(iter(found.values())), recomputes=recomputes)
    for module in found:
        module.__dict__["forward"] = switch.rotation(module.forward)
    return switch


def _changes_at(module: nn.Module) -> int | None:
    """Return the length at which a rotary embedding changes its factors; None: it never does."""
    kind = getattr(module, "rope_type", None)
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    if not isinstance(parameters, dict):
        return None
    sets = [parameters] if isinstance(kind, str) else parameters.values()
    lengths = {
        each["original_max_position_embeddings"]
        for each in sets
        if isinstance(each, dict) and each.get("rope_type") == "longrope"
    }
    return max(lengths) if kind is not None and lengths else None
