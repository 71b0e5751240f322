"""GPUs that need not be here, as plans and compilers see them; a backend with plans of its own."""

from backends.triton_gpu.backend import TritonBackend
from backends.triton_gpu.shared.place import Gpu, Place

H100 = Gpu((9, 0), 132, 227 << 10)


def backend_apart():
    """A backend on the current GPU that has planned nothing: the process's own keeps its plans."""
    return TritonBackend(Place(interpreting=False))
