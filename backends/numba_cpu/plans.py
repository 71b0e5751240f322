"""What is known of calls that were checked before, by their signatures.

A call whose tensors have the shapes, strides, dtypes and devices of one before keeps the contract
as that one did, but for its numbers and its values; strides and sizes are those of that one, too.
Invariants: a signature is read off the tensors themselves in every call, so a tensor that was
changed in place, or that lies where another one lay, is known by what it is now; a plan depends on
its signature alone. It holds no tensor and no address, so nothing is kept alive and nothing grows
stale.

Knows nothing of what is planned.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from torch import Tensor

MOST_PLANS = 1024
"""Plans kept; then all are forgotten, and made anew as calls come."""

_P = TypeVar("_P")


class Plans(Generic[_P]):
    """Plans by signature; any number of threads may ask and keep at once."""

    __slots__ = ("_plans",)

    def __init__(self) -> None:
        self._plans: dict[Hashable, _P] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, signature: Hashable) -> _P | None:
        """What was kept under this signature; None: nothing. O(1)."""
        return self._plans.get(signature)

    def keep(self, signature: Hashable, plan: _P) -> None:
        """Keep the plan of a call that has passed its checks. O(1)."""
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[signature] = plan


def sign(*tensors: Tensor | None) -> Hashable:
    """What argument checks and plans look at: everything of tensors but values and addresses."""
    signs: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            signs.append(None)
        elif not isinstance(tensor, Tensor):
            signs.append(type(tensor).__name__)  # type: ignore[unreachable]  # a caller's mistake
        else:
            signs.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    return tuple(signs)
