"""What is done first: all of a network's preparation that needs no more cache than one block.

Its kernels are compiled in processes of their own; meanwhile PyTorch's compiler is loaded, and the
network is traced and compiled. Where memory is measured this comes before, because the step that is
measured runs the same kernels.

Decides: how a network runs. Kernels are compiled in any case. Then, unless it is to run as it is:

| | on a GPU | on a CPU |
|---|---|---|
| its operations without its modules (`traced_network.py`) | always | if asked for and small |
| in compiled pieces (`piecewise.py`) | where asked for | never |
| steps as CUDA graphs (`cuda_graphs.py`), up to some thousand tokens | always | never |

The last are recorded when the caches are there (`prepare.py`). A network that looks at values
cannot be captured, and then nothing else is done: a graph would replay what it decided once.

Invariants: no block of the caches changes; what could not be done is told, and what is left runs.

Does not know: how large the caches will be, requests.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from model.attention.batch import prompt_step
from model.compile.few_rows import FEW
from model.compile.piecewise import start_compiler
from model.control.config import EngineConfig
from model.errors import UnsupportedModelError
from model.forward.network import PagedNetwork

_SMALL_PARAMETERS = 32_000_000
_COMPILED_TOKENS = 512


def is_small(num_parameters: int) -> bool:
    """Whether a CPU takes longer for Python's way through a network than for its arithmetic."""
    return num_parameters <= _SMALL_PARAMETERS


def begin(network: PagedNetwork, config: EngineConfig) -> str:
    """Compile kernels, trace and compile the network; how it runs then. Only once.

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
    is_compiled = is_traced and is_on_gpu and config.compile
    with ThreadPoolExecutor(3, initializer=_same_gpu() if is_on_gpu else None) as side:
        kernels = (
            side.submit(network.warm_up, calls, config.max_num_seqs, config.max_num_batched_tokens),
            side.submit(network.warm_up_draws),
        )
        if is_compiled:
            side.submit(start_compiler)  # most of it in processes of its own
        how = _captured(network) if is_traced else "eager"
        if is_compiled and how == "captured":
            how = _compiled(network, config)
        for each in kernels:
            each.result()
    network.begun = how
    return how


def compiled_tokens(max_num_batched_tokens: int) -> int:
    """Tokens of the step that pieces are compiled with; they serve any number then. O(1).

    Never as few as have pieces of their own: what all others run in would be compiled by a request.
    """
    return max(max(FEW) + 1, min(max_num_batched_tokens, _COMPILED_TOKENS))


def _same_gpu() -> Callable[[], None]:
    """What makes this thread's GPU that of another thread, which begins with the first one."""
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def _captured(network: PagedNetwork) -> str:
    try:
        network.capture()
    except UnsupportedModelError as error:
        return f"eager ({error})"
    return "captured"


def _compiled(network: PagedNetwork, config: EngineConfig) -> str:
    """Compile a captured network, if that can be."""
    count = compiled_tokens(config.max_num_batched_tokens)
    rows = max(1, min(count - 1, config.max_num_seqs))
    num_groups = len(network.layout.windows)
    steps = [
        prompt_step(tokens, its_rows, config.block_size, num_groups, network.device)
        for tokens, its_rows in ((count, rows), (max(FEW), min(rows, max(FEW) - 1)))
    ]
    try:
        network.compile(*steps)
    except UnsupportedModelError as error:
        return f"captured ({error})"
    return "compiled"
