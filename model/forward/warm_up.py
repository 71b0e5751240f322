"""Everything that is done before the first request, so that no request waits for it.

Three steps, in this order. `compile_network` compiles kernels, and traces and compiles the network;
it needs caches of one block only. `free_bytes` measures the largest step, which runs those kernels.
`prepare_network` captures CUDA graphs, once the caches have their final size.

Decides: how a network runs. Kernels are always compiled. Beside that, except in eager mode:

| | on a GPU | on a CPU |
|---|---|---|
| traced: operations without modules (`compile/traced_network.py`) | yes | `--compile`, if small |
| compiled piecewise (`compile/piecewise.py`) | with `--compile` | never |
| steps captured as CUDA graphs (`cuda_graphs.py`) | yes, up to some thousand tokens | never |

Steps with LoRA adapters are traced, compiled and captured beside those without.

A network that cannot be traced because it looks at values runs eagerly, also without CUDA graphs: a
graph would replay decisions that were made once. The largest step has one prompt of
`max_num_batched_tokens`, and samples as many rows as requests and their drafts can have.

Invariants: no block of the caches changes; nothing of the measurement stays allocated; what fails
is reported, and the network runs without it.

Does not know: requests, or how many blocks there will be.
"""

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

import backends
from model.attention.batch import prompt_step
from model.caches.memory import host_free_bytes
from model.compile.compile_processes import compile_processes
from model.compile.few_rows import FEW_ROWS
from model.compile.piecewise import start_compiler
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.errors import InvalidArgumentError, UnsupportedModelError
from model.forward.cuda_graphs import CudaGraphs
from model.forward.network import PagedNetwork
from model.host import part_of_start
from model.sample.draw_graphs import DrawGraphs
from model.sample.sampler import Draw, sample

_SMALL_PARAMETERS = 32_000_000
_COMPILED_TOKENS = 512
_LAUNCH_S = 5e-4  # host time to launch the kernels of one layer
_FLOPS = 6e14  # of a GPU, in matrix products
_MIN_CAPTURED_TOKENS, _MAX_CAPTURED_TOKENS = 256, 8192


def compiles(config: EngineConfig, device: torch.device) -> bool:
    """Return True if networks on a device are compiled, if they can be traced. O(1)."""
    return _may_trace(config) and device.type == "cuda" and config.compile


def _may_trace(config: EngineConfig) -> bool:
    return not (config.eager or config.sanitize)


def is_small(num_parameters: int) -> bool:
    """Return True if a CPU spends more time in Python than in the network's arithmetic. O(1)."""
    return num_parameters <= _SMALL_PARAMETERS


def compile_network(network: PagedNetwork, config: EngineConfig) -> str:
    """Compile kernels, trace and compile the network; return its mode in words. Only once.

    Takes a few seconds, or tens of seconds if no compiled kernel is cached on disk.
    """
    if network.mode is not None:
        return network.mode
    # Tracing changes what a call of a module does, so no module is called in parallel with it.
    calls = network.layer_calls()
    is_on_gpu = network.device.type == "cuda"
    is_traced = _may_trace(config) and (
        is_on_gpu or (config.compile and is_small(network.num_parameters))
    )
    is_compiled = compiles(config, network.device)
    # A new thread starts on the first GPU, so it is set to the one that this thread uses.
    same_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if is_on_gpu else None
    with (
        closing(compile_processes()),
        ThreadPoolExecutor(3, initializer=same_gpu) as threads,
    ):
        kernels = (
            threads.submit(_warm_up, network, calls, config),
            threads.submit(network.warm_up_draws),
        )
        if is_compiled:
            threads.submit(start_compiler)  # mostly in other processes
        with part_of_start("trace"):
            mode = _trace(network) if is_traced else "eager"
        if is_compiled and mode == "traced":
            with part_of_start("compiled pieces"):
                mode = _compile(network, config)
        with part_of_start("waiting for kernels"):
            for each in kernels:
                each.result()
    network.mode = mode
    return mode


def _warm_up(
    network: PagedNetwork, calls: Sequence[backends.LayerCall], config: EngineConfig
) -> None:
    with part_of_start("kernels, beside the trace"):
        network.warm_up(calls, config.max_num_seqs, config.max_num_batched_tokens)


def compiled_tokens(max_num_batched_tokens: int) -> int:
    """Return the tokens of the step that compiles the pieces; they then serve any number. O(1).

    More than `FEW_ROWS`, whose steps have separate pieces: otherwise the pieces for all other
    steps would be compiled by the first request.
    """
    return max(max(FEW_ROWS) + 1, min(max_num_batched_tokens, _COMPILED_TOKENS))


def _trace(network: PagedNetwork) -> str:
    try:
        network.trace()
    except UnsupportedModelError as error:
        return f"eager ({error})"
    return "traced"


def _compile(network: PagedNetwork, config: EngineConfig) -> str:
    """Compile a traced network if possible."""
    count = compiled_tokens(config.max_num_batched_tokens)
    rows = max(1, min(count - 1, config.max_num_seqs))
    num_groups = len(network.layout.windows)
    steps = [
        prompt_step(tokens, num_rows, config.block_size, num_groups, network.device)
        for tokens, num_rows in ((count, rows), (max(FEW_ROWS), min(rows, max(FEW_ROWS) - 1)))
    ]
    try:
        network.compile(*steps)
    except UnsupportedModelError as error:
        return f"traced ({error})"
    return "compiled"


def free_bytes(networks: Sequence[PagedNetwork], config: EngineConfig) -> int | None:
    """Return the memory for caches on the networks' device; None if unknown.

    On a GPU this compiles all networks and runs the largest step of each, unless the size of the
    cache is given: then it is the memory that is free now.

    Args:
        networks: those that need caches; they have none.
        config: of the engine.

    Raises:
        InvalidArgumentError: not even the largest step fits.
    """
    device = networks[0].device
    if device.type != "cuda":
        return host_free_bytes()
    peak_bytes = 0
    if config.num_blocks is None and config.kv_memory_bytes is None:
        try:
            for each in networks:  # all first: compiled code takes memory
                each.allocate(1, config.block_size)
                compile_network(each, config)
            gc.collect(0)  # what a start without collections has made: it may hold memory
            peak_bytes = max([_peak_bytes(each, config) for each in networks])
        except torch.cuda.OutOfMemoryError as error:
            raise InvalidArgumentError(
                f"max_num_batched_tokens: a step of {config.max_num_batched_tokens} tokens does "
                f"not fit into the memory of {device}"
            ) from error
        finally:
            for each in networks:
                each.free()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(free) - peak_bytes)


def _peak_bytes(network: PagedNetwork, config: EngineConfig) -> int:
    """Return the most memory that a step allocates in addition to what is allocated now."""
    device = network.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    count, num_groups = config.max_num_batched_tokens, len(network.layout.windows)
    step = prompt_step(count, config.max_rows, config.block_size, num_groups, device)
    logits = network.logits(step if network.adapters is None else step.adapted())
    draw = Draw(SamplingParams(temperature=1.0, top_p=0.5), stream=0, index=0)  # needs the most
    sample(torch.zeros_like(logits), [draw] * len(logits))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True, slots=True)
class Prepared:
    """The way in which a network runs from now on.

    Attributes:
        how: in words.
        graphs: its steps as CUDA graphs; None if there are none.
    """

    how: str
    graphs: CudaGraphs | None = None


def prepare_network(
    network: PagedNetwork, config: EngineConfig, drawn: torch.Tensor, max_model_len: int | None
) -> Prepared:
    """Trace, compile and capture what can be; seconds, or half a minute if nothing is cached.

    Args:
        network: its caches are allocated.
        config: of the engine.
        drawn: the tokens of the previous step.
        max_model_len: the most tokens of a request; None: as many as fit into the cache.

    Raises:
        InvalidArgumentError: no memory is left for the graphs.
    """
    how = compile_network(network, config)
    network.mode = None  # another call starts from the beginning
    if how.startswith("eager") or network.device.type != "cuda":
        return Prepared(how)
    if any(network.layout.chunks):  # the tables of such steps differ in number and length
        return Prepared(f"{how}, no graphs of attention in chunks")
    if not network.can_replay_states:
        return Prepared(f"{how}, no graphs: the backend has no operation for some states")
    num_slots = (network.num_blocks - 1) * config.block_size
    longest = min(max_model_len or num_slots, num_slots)
    num_layers = len(network.layout.layers) + len({one.key.layer for one in network.layout.states})
    max_tokens = captured_tokens(network.num_parameters, num_layers, config)
    graphs = CudaGraphs(
        network,
        drawn,
        [-(-longest // config.block_size)] * len(network.layout.windows),
        config.block_size,
        config.max_num_seqs,
        max_tokens,
        DrawGraphs(max(2, config.max_num_seqs, config.max_rows), network.device),
        config.max_rows,
    )
    try:
        with part_of_start("graphs"):
            num_graphs = graphs.capture()
    except torch.cuda.OutOfMemoryError as error:
        raise InvalidArgumentError(
            "kv_memory_fraction: the KV cache leaves no memory for CUDA graphs: pass a smaller "
            "--kv-memory-fraction, or --eager"
        ) from error
    return Prepared(f"{how}, {num_graphs} graphs", graphs)


def captured_tokens(num_parameters: int, num_layers: int, config: EngineConfig) -> int:
    """Return the most tokens of a captured step: a larger one computes longer than it launches.

    O(1). Launching takes a time per layer, computing a time per weight and token.
    """
    launching = num_layers * _LAUNCH_S * _FLOPS / (2 * num_parameters)
    limit = min(config.max_num_batched_tokens, _MAX_CAPTURED_TOKENS)
    return min(limit, max(_MIN_CAPTURED_TOKENS, int(launching)))
