"""The GPU backend: Triton kernels for CUDA devices, or for CPU tensors in Triton's interpreter.

Importing this imports no triton; `load` does, and says what is missing where it cannot run.

Every kernel's file says at its top what it computes, how its data lies, its grid and the bytes that
it moves. To read them, from the simplest on:

- `slot_mapping`, `store_kv`, `copy_blocks`: what moves without computing; `e4m3` is how a quantised
  element is written and read, `soft_cap` the base of all exponentials.
- `prefill`: attention of many query tokens in its plain form, one loop over tiles of keys with a
  running maximum and sum. All other attention here is that loop, cut differently.
- `decode`: single query tokens. `splits` is the plan that cuts long sequences, `chunk` the walk
  over the keys of a part, `merge` the sum of the parts; `cascade` reads a shared prefix once.
- `latent`: attention over latents (MLA), in its plain form; `hopper_latent` with warps of different
  work.
- `hopper_prefill`: prefill with warps of different work. `prefill_order` is the list of items,
  `hopper_items` who takes which, `hopper_load` the warp that loads, `hopper_consume` those that
  multiply.
- `paged_attention` chooses among them; `place` and `launch` are how a call becomes a launch,
  `warm_up` meets every variant before the first request, `ahead` compiles them in processes of
  their own, `backend` is the face.
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
    place = importlib.import_module("backends.triton_gpu.place").Place(interpreting=interpreting)
    backend: TritonBackend = module.TritonBackend(place)
    return backend


def interpreter_fault(triton_version: str, numpy_version: str) -> str:
    """Why Triton's interpreter cannot run our kernels with these versions; empty: it can.

    Before 3.7 it turns the bounds of a loop into Python numbers in a way that numpy 2.4 refuses.
    """
    triton, numpy = (
        tuple(int(part) for part in text.split(".")[:2]) for text in (triton_version, numpy_version)
    )
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of triton {triton_version} fails with numpy {numpy_version}"
    return ""
