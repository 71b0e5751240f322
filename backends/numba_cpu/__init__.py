"""The CPU backend: the reference for the others, and the default where there is no GPU.

Kernels are compiled by numba on their first use (seconds, then cached on disk) and run on a few
plain threads. Any number of threads may call; a forked child works.
"""

from backends.numba_cpu.backend import NumbaBackend, load

__all__ = ["NumbaBackend", "load"]
