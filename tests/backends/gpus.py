"""GPUs that need not be here, as plans and compilers see them."""

from backends.triton_gpu.place import Gpu

H100 = Gpu((9, 0), 132, 227 << 10)
