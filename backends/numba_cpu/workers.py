"""A few threads that run serial kernels over slices of the work.

Kernels release the GIL, so plain threads are enough, and the traps of numba's threading layers
(aborts on concurrent use, dead children after a fork, stalls on a crowded machine) do not arise.
Invariants: any number of threads may call at once; a forked child gets threads of its own; the
calling thread works too. Knows nothing of kernels.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch


class Workers:
    """Runs a function over (start, stop) slices, as wide as `torch.get_num_threads()`."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        self._pools: dict[tuple[int, int], ThreadPoolExecutor] = {}

    @property
    def width(self) -> int:
        """Slices that run at the same time."""
        return torch.get_num_threads()

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
        parts = max(1, min(self.width, total // max(1, grain)))
        if parts == 1:
            work(0, total)
            return
        bounds = [total * i // parts for i in range(parts + 1)]
        self.run(work, list(pairwise(bounds)))

    def _pool(self) -> ThreadPoolExecutor:
        key = (os.getpid(), self.width)  # the threads of a parent do not exist in its child
        pool = self._pools.get(key)
        if pool is None:
            fresh = ThreadPoolExecutor(max(1, key[1] - 1), thread_name_prefix="kvcore-numba")
            pool = self._pools.setdefault(key, fresh)
        return pool
