"""From names to an engine that is warm: for every way to run one. Loads torch and Transformers.

Decides: which number format "auto" is, how many threads a network gets, that an engine is warm
before it is asked, and which errors of other packages tell of the input. Invariants: Transformers
prints nothing by itself.

Does not know: requests, clients.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from transformers.utils import logging as transformers_logging

import backends
import kvcore
from model.cli.options import ModelOptions
from model.cli.prefetch import may_share_compiling
from model.cli.progress import telling
from model.cli.signals import stopping
from model.compile.compile_processes import compile_processes
from model.compile.piecewise import start_compiler
from model.compile.stored_checks import pass_once
from model.control.config import EngineConfig
from model.engine import Engine, TwinEngine, engine_of
from model.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from model.forward.warm_up import compiles, is_small
from model.host import Host, part_of_start, uncollected
from model.load.loader import LoadedModel, load_model, with_draft
from model.ranks.ranks import Ranks, join_ranks

_BAD_INPUT = (  # those of other packages that the input causes, not a bug
    backends.UnknownBackendError,
    backends.BackendUnavailableError,
    backends.UnsupportedError,
    kvcore.InvalidArgumentError,
    kvcore.OutOfBlocksError,
)

COMPILING = "compiling kernels (the first time on a machine takes longest)"
"""The work between the weights and the first request, for `telling`."""

Load = Callable[[str, torch.device, torch.dtype, Ranks | None], LoadedModel]
_load = partial(load_model, once=pass_once)


@contextmanager
def input_errors() -> Iterator[None]:
    """Tell what other packages find wrong with the input as what it is.

    Raises:
        UsageError: in place of their errors.
    """
    try:
        yield
    except _BAD_INPUT as error:
        raise UsageError(str(error)) from error


def start(
    name: str,
    backend_name: str,
    dtype_name: str,
    *,
    draft_name: str | None = None,
    num_ranks: int | None = None,
    expert_parallel: bool = False,
    config: EngineConfig | None = None,
    is_exact: bool = False,
    load: Load = _load,
) -> tuple[LoadedModel, backends.Backend]:
    """Load a model for a backend, on its device. Reads every weight once.

    Args:
        name: a folder, or an id on the hub.
        backend_name: its name, or "auto".
        dtype_name: its name, or "auto": bfloat16 on a GPU, else float32.
        draft_name: of a second model that guesses for it; None: there is none. Each of several
            processes has it whole.
        num_ranks: processes that share the network; None: it is whole here.
        expert_parallel: each of them has some experts whole.
        config: of the engine; if it compiles networks, the compiler loads beside the weights.
        is_exact: "auto" is float32 everywhere: two ways of computing agree token by token only
            without near ties.
        load: the function that loads it.

    Raises:
        ModelError: there is no such model, it cannot run here, or there are not as many processes.
        RankLostError: another process is gone.
    """
    if sys.flags.optimize > 1:
        raise UsageError(
            "PYTHONOPTIMIZE=2 (python -OO) removes docstrings, which Transformers needs to load a "
            "model; use 0 or 1"
        )
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    ranks = None
    if num_ranks is not None:
        ranks = join_ranks(num_ranks, expert_parallel=expert_parallel)
    with nullcontext() if ranks is None else ranks.detecting_loss(or_fail=True):
        backend = backends.get_backend(backend_name)
        if config is not None:
            backend.warmup((), max_num_seqs=1, max_query_len=1)  # begins what the layers need
        if config is not None and compiles(config, backend.device):
            in_pieces = (num_ranks or 1) == 1 and may_share_compiling(config)
            Host().start_thread("compiler", partial(start_compiler, in_pieces=in_pieces))
        if dtype_name == "auto":
            is_half = backend.device.type == "cuda" and not is_exact
            dtype_name = "bfloat16" if is_half else "float32"
        dtype: torch.dtype = getattr(torch, dtype_name)
        with part_of_start("weights"):
            model = load(name, backend.device, dtype, ranks)
        if draft_name is not None:
            try:
                draft = load(draft_name, backend.device, dtype, None)
            except (ModelNotFoundError, UnsupportedModelError) as error:
                raise type(error)(f"draft_model: {str(error).removeprefix('model: ')}") from error
            model = with_draft(model, draft)
    _choose_threads(model)
    return model, backend


def warm_up(engine: Engine) -> str:
    """Prepare an engine, and the collector for a process that serves; in words how it runs.

    What was loaded and compiled by now stays as long as the process, some hundred thousand objects:
    they are looked through once more and then never again (`gc.freeze`), so a full collection looks
    at what requests have made alone. O(objects) beside the preparation.
    """
    with part_of_start("graphs and trial requests"):
        how = engine.prepare()
    gc.collect()
    gc.freeze()
    return how


def _told(options: ModelOptions, work: str) -> AbstractContextManager[object]:
    """Tell of long work in the process that leads the others, or is alone."""
    return nullcontext() if options.follows else telling(work)


def make_engine(
    options: ModelOptions,
    config: EngineConfig,
    tell: Callable[[str], None] = lambda _: None,
    *,
    load: Load = _load,
    expects_grammars: bool = False,
) -> Engine:
    """Load a model and prepare an engine for it. Seconds to minutes.

    Args:
        options: the model and its backend.
        config: sizes.
        tell: called with each line about the start.
        load: the function that loads it.
        expects_grammars: True: prepare for the first grammar too, beside the rest.

    Raises:
        ModelError: there is no such model, or it does not run here.
    """
    with input_errors(), ExitStack() as failed:
        failed.callback(compile_processes().close)
        with _told(options, f"loading {options.path}"):
            model, backend = start(
                options.path,
                options.backend,
                options.dtype,
                draft_name=config.draft_model,
                num_ranks=options.tp,
                expert_parallel=options.expert_parallel,
                config=config,
                load=load,
            )
        with uncollected(), _told(options, COMPILING):  # `warm_up` collects once
            with part_of_start("probes and caches"):  # and, on a GPU, all that is compiled
                engine = engine_of(model, backend, config, checks_ranks=options.check_ranks)
            if expects_grammars:
                engine.prepare_grammars()
            tell(engine.describe_memory())
            tell(f"network: {warm_up(engine)}")
        failed.pop_all()
        return engine


def follow(options: ModelOptions, config: EngineConfig) -> int:
    """Run the steps of the process that serves, which shares its network; return the exit code.

    Raises:
        ModelError: there is no such model, or it does not run here.
        RankLostError: another process is gone.
    """
    engine = make_engine(options, config)
    if isinstance(engine, TwinEngine):
        with stopping():  # a signal reaches the one that serves too, which says when it is over
            engine.follow()
    return 0


def _choose_threads(model: LoadedModel) -> None:
    """Use one thread for a small network on a CPU, unless the user has set the number.

    Layers this small gain nothing from a second one, and lose a hundredfold where cores are busy.
    """
    network = model.network
    if (
        network.device.type == "cpu"
        and is_small(network.num_parameters())
        and "OMP_NUM_THREADS" not in os.environ
    ):
        torch.set_num_threads(1)
