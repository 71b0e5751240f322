"""The GPU backend: Triton kernels for CUDA devices, or for CPU tensors in Triton's interpreter.

Importing this package does not import triton; `load` does, and reports what is missing.

Every kernel's file states the formula, the layout, the grid and the bytes moved. A reading order:

- `slot_mapping`, `store_kv`, `copy_blocks`, `move_blocks`: what moves data without computing.
- `shared`: what all kernels share. `place` and `launch` turn a call into a launch; `softmax`,
  `soft_cap` and `e4m3` are device functions, and `layer` the values they are compiled for.
- `prefill`: attention of many query tokens, one loop over tiles of keys. All other attention here
  is the same loop, cut differently.
- `decode`: attention of few query tokens (split-KV), and of a shared prefix.
- `hopper`: prefill with specialised warps.
- `latent`: attention over latents (MLA).
- `paged_attention` chooses among them. `warm_up` compiles every variant before the first request,
  `ahead` in parallel processes; `backend` is the public class.
"""

import importlib
import importlib.util
import os
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from backends.errors import BackendUnavailableError

if TYPE_CHECKING:
    from backends.triton_gpu.backend import TritonBackend

__all__ = ["interpreter_fault", "load"]

_ALTERNATIVE = (
    "the backend numba, or TRITON_INTERPRET=1 set before Python starts"
    " (Triton's interpreter: float32 and float16 on the CPU, slow)"
)


@lru_cache(maxsize=1)
def load() -> "TritonBackend":
    """The process's Triton backend; compiles nothing yet.

    Raises:
        BackendUnavailableError: Triton is not installed, there is no CUDA device, or the
            interpreter was asked for too late.
    """
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError("triton", "triton is not installed", _ALTERNATIVE)
    interpreting = os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "yes", "y"}
    if not interpreting and not torch.cuda.is_available():
        raise BackendUnavailableError("triton", "there is no CUDA device", _ALTERNATIVE)
    language = importlib.import_module("triton.language")
    if interpreting != (type(language.max).__name__ == "InterpretedFunction"):
        reason = "TRITON_INTERPRET changed after triton was first imported"
        raise BackendUnavailableError("triton", reason, "set it before Python starts")
    fault = interpreter_fault(version("triton"), version("numpy")) if interpreting else ""
    if fault:
        raise BackendUnavailableError("triton", fault, "the backend numba, or triton >= 3.7")
    module = importlib.import_module("backends.triton_gpu.backend")
    place = importlib.import_module("backends.triton_gpu.shared.place")
    backend: TritonBackend = module.TritonBackend(place.Place(interpreting=interpreting))
    return backend


def interpreter_fault(triton_version: str, numpy_version: str) -> str:
    """Return why Triton's interpreter cannot run our kernels with these versions, or "".

    Before 3.7 it turns the bounds of a loop into Python numbers in a way that numpy 2.4 refuses.
    """
    triton, numpy = (
        tuple(int(part) for part in text.split(".")[:2]) for text in (triton_version, numpy_version)
    )
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of triton {triton_version} fails with numpy {numpy_version}"
    return ""
