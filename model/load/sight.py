"""What a mask of Transformers lets a query see.

A network builds its masks through Transformers' mask interface, as functions of two positions.
Asked at a few places, such a function tells what it is: causal attention over all, over a window or
over chunks. That is the network's own word, whatever its configuration says.

Invariants: what is none of the three is refused; a mask that looks into the future is called
bidirectional.

Does not know: layers, caches, who asks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.errors import UnsupportedModelError

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of batch, head, query and key (int64 tensors of one shape): whether the query sees the key."""

_FAR = 1 << 22  # farther than windows and chunks reach


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys at or before its own a query sees: all, or a part.

    Attributes:
        window: the last so many, its own included; None: no window.
        chunk: those of its own chunk of so many; None: no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window}"
        return "full attention" if self.chunk is None else f"chunks of {self.chunk}"

    def first(self, position: int) -> int:
        """The lowest position that a query at `position` sees. O(1)."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk


def sight_of(mask: MaskFunction, device: torch.device) -> Sight:
    """What a mask lets a query see. A few dozen calls of it.

    Args:
        mask: as Transformers gives it to a mask interface.
        device: where its own tensors are.

    Raises:
        UnsupportedModelError: it is not causal, or none of what a paged cache serves.
    """
    probe = _Asked(mask, device)
    if any(probe.sees([0, 5, _FAR], [1, 6, _FAR + 1])):
        raise UnsupportedModelError("wanted causal attention, its mask is bidirectional")
    count = probe.count(_FAR)
    if count == _FAR + 1:
        sight = Sight()
    elif probe.count(_FAR - 1) == count > 0:
        sight = Sight(window=count)
    else:  # the query before the first of this chunk is the last of the one before
        sight = Sight(chunk=max(1, probe.count(_FAR - count)))
    size = sight.window or sight.chunk or 64
    queries, keys = _places(sight, size)
    wanted = [sight.first(query) <= key <= query for query, key in zip(queries, keys, strict=True)]
    if probe.sees(queries, keys) != wanted:
        raise UnsupportedModelError(
            "wanted full attention, a sliding window or chunks, its mask is none of them"
        )
    return sight


class _Asked:
    """A mask that is asked at places."""

    def __init__(self, mask: MaskFunction, device: torch.device) -> None:
        self._mask = mask
        self._device = device

    def sees(self, queries: Sequence[int], keys: Sequence[int]) -> list[bool]:
        places = torch.tensor([queries, keys], dtype=torch.int64, device=self._device)
        zeros = torch.zeros_like(places[0])
        seen: list[bool] = self._mask(zeros, zeros, *places).expand(len(queries)).tolist()
        return seen

    def count(self, query: int) -> int:
        """How many keys a query sees, if those are the last ones."""
        seen, unseen = 0, query + 2  # at a distance of seen - 1, and of unseen - 1
        while unseen - seen > 1:
            middle = (seen + unseen) // 2
            if middle <= query + 1 and self.sees([query], [query - middle + 1])[0]:
                seen = middle
            else:
                unseen = middle
        return seen


def _places(sight: Sight, size: int) -> tuple[list[int], list[int]]:
    """Queries and keys where a mask of another kind would show."""
    around = [0, 1, 2, 3, size // 2, size - 2, size - 1, size, size + 1, 2 * size - 1, 2 * size]
    around += [2 * size + 1, 3 * size + size // 2, 7 * size - 1, 7 * size, _FAR]
    queries, keys = [], []
    for query in (query for query in around if query >= 0):
        first = sight.first(query)
        places = {0, 1, first - 1, first, first + 1, (first + query) // 2, query - 1, query}
        places |= {query + 1, query + 2, query + size}
        for key in sorted(place for place in places if place >= 0):
            queries.append(query)
            keys.append(key)
    return queries, keys
