"""What is done first: all of a network's preparation that needs no more cache than one block.

Its kernels are compiled, its operations are traced and PyTorch's compiler is loaded, side by side:
kernels in processes of their own, the rest under Python's lock. Where memory is measured this comes
before, because the step that is measured runs the same kernels.

Decides: when a network's operations run without its modules (`fx_trace.py`): on a GPU always, on a
CPU where asked for and where it is small.

Invariants: no block of the caches changes; what could not be done is told, and what is left runs.

Does not know: how large the caches will be, requests.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from model.control.config import EngineConfig
from model.device.network import PagedNetwork
from model.device.piecewise import start_compiler
from model.errors import UnsupportedModelError

_SMALL_PARAMETERS = 32_000_000


def is_small(num_parameters: int) -> bool:
    """Whether a CPU takes longer for Python's way through a network than for its arithmetic."""
    return num_parameters <= _SMALL_PARAMETERS


def begin(network: PagedNetwork, config: EngineConfig) -> str:
    """Compile kernels and trace the network; how it runs then. Nothing where that has been done.

    Takes a few seconds, tens of them where no kernel is found on disk.

    Args:
        network: has caches, of any size.
        config: of the engine.
    """
    if network.begun is not None:
        return network.begun
    # No module is called beside a trace, which changes what calling one does.
    calls = network.layer_calls()
    is_on_gpu = network.device.type == "cuda"
    is_traced = not (config.eager or config.sanitize) and (
        is_on_gpu or (config.compile and is_small(network.num_parameters))
    )
    with ThreadPoolExecutor(3, initializer=_same_gpu() if is_on_gpu else None) as side:
        kernels = (
            side.submit(network.warm_up, calls, config.max_num_seqs, config.max_num_batched_tokens),
            side.submit(network.warm_up_draws),
        )
        if config.compile and is_on_gpu and is_traced:
            side.submit(start_compiler)  # most of it in processes of its own
        how = _captured(network) if is_traced else "eager"
        for each in kernels:
            each.result()
    network.begun = how
    return how


def _same_gpu() -> Callable[[], None]:
    """What makes this thread's GPU that of another thread, which begins with the first one."""
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def _captured(network: PagedNetwork) -> str:
    try:
        network.capture()
    except UnsupportedModelError as error:
        return f"eager ({error})"
    return "captured"
