"""The common part of the launchers: plans of calls that were checked before, threads, scales.

Plans: a call whose tensors have the shapes, strides, dtypes and devices of an earlier call keeps
the contract as that one did, except for its numbers and values; its strides and sizes are those of
the earlier call too. Invariants: a signature is read from the tensors in every call, so a tensor
that was changed in place, or that lies where another one lay, is known by what it is now; a plan
depends on its signature alone, and holds no tensor and no address.

Threads: kernels are serial and release the GIL, so plain threads over slices of the work are
enough, and the traps of numba's threading layers (aborts on concurrent use, dead children after a
fork, stalls on a crowded machine) do not arise. Invariants: any number of threads may call at once;
a forked child makes new threads; the calling thread works too.

Scales: a cache that is not quantised has scales of 1, by which multiplying changes no bit.

Knows nothing of kernels, or of what is planned.
"""

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from backends.errors import InvalidArgumentError

MOST_PLANS = 1024
"""Plans kept; then all are forgotten, and made anew as calls come."""

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
_P = TypeVar("_P")


class Plans(dict[Hashable, _P]):
    """Plans by signature; any number of threads may `get` and `keep` at once."""

    __slots__ = ()

    def keep(self, signature: Hashable, plan: _P) -> None:
        """Keep the plan of a call that has passed its checks. O(1)."""
        if len(self) >= MOST_PLANS:
            self.clear()
        self[signature] = plan


def sign(*tensors: Tensor | None) -> Hashable:
    """Return the inputs of checks and plans: all about tensors but their values and addresses."""
    signs: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            signs.append(None)
        elif not isinstance(tensor, Tensor):
            signs.append(type(tensor).__name__)  # type: ignore[unreachable]  # a caller's mistake
        else:
            signs.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    return tuple(signs)


class Workers:
    """Runs a function over (start, stop) slices, as many at a time as `torch.get_num_threads()`."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        self._pools: dict[tuple[int, int], ThreadPoolExecutor] = {}

    def run(self, work: Callable[[int, int], object], slices: Sequence[tuple[int, int]]) -> None:
        """Call `work(start, stop)` for every slice, the first one in this thread; wait for all.

        Raises whatever `work` raises, after all slices have ended.
        """
        if not slices:
            return
        others = [self._pool().submit(work, *piece) for piece in slices[1:]]
        try:
            work(*slices[0])
        finally:
            for other in others:
                other.exception()
        for other in others:
            other.result()

    def run_evenly(self, work: Callable[[int, int], object], total: int, grain: int) -> None:
        """Call `work` over 0 .. total, cut in equal slices of at least `grain`."""
        parts = max(1, min(torch.get_num_threads(), total // max(1, grain)))
        if parts == 1:
            work(0, total)
            return
        bounds = [total * i // parts for i in range(parts + 1)]
        self.run(work, list(pairwise(bounds)))

    def _pool(self) -> ThreadPoolExecutor:
        # The threads of a parent do not exist in its child.
        key = (os.getpid(), torch.get_num_threads())
        pool = self._pools.get(key)
        if pool is None:
            fresh = ThreadPoolExecutor(max(1, key[1] - 1), thread_name_prefix="kvcore-numba")
            pool = self._pools.setdefault(key, fresh)
        return pool


def per_head(name: str, scale: Tensor | None, num_kv_heads: int) -> Floats:
    """float32 [num_kv_heads] from None, [1] or [num_kv_heads].

    Raises:
        InvalidArgumentError: a scale is not finite or not above 0.
    """
    if scale is None:
        return np.ones(num_kv_heads, np.float32)
    scales = np.array(np.broadcast_to(scale.detach().numpy(), num_kv_heads), np.float32)
    for head, value in enumerate(scales):
        if not (np.isfinite(value) and value > 0):
            raise InvalidArgumentError(f"{name}[{head}]", "finite and above 0", str(value))
    return scales
