"""From the options of a server to its engine; loads torch and Transformers.

Decides: that an engine is warm before it is asked: its kernels are compiled, its network prepared,
and a few tokens computed that are forgotten again.

Does not know: clients.
"""

import dataclasses

import torch
from transformers.utils import logging as transformers_logging

import backends
from model.cli.exits import stopping
from model.cli.options import ModelOptions
from model.cli.progress import say
from model.cli.session import BAD_INPUT, choose_threads
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.device.ranks import join_ranks
from model.engine import Engine
from model.errors import UsageError
from model.loader import load_model
from model.twins import TwinEngine, engine_of


def make_engine(options: ModelOptions, config: EngineConfig) -> Engine:
    """Load a model and prepare an engine for it. Seconds to minutes.

    Args:
        options: which model on what.
        config: sizes.

    Raises:
        ModelError: there is no such model, or it does not run here.
    """
    try:
        return _prepared(options, config)
    except BAD_INPUT as error:
        raise UsageError(str(error)) from error


def follow(options: ModelOptions, config: EngineConfig) -> int:
    """Be a process that shares the network of one that serves, until that ends; the exit code.

    Raises:
        ModelError: there is no such model, or it does not run here.
        RankLostError: another process is gone.
    """
    engine = make_engine(options, config)
    if isinstance(engine, TwinEngine):
        with stopping():  # a signal reaches the one that serves too, which says when it is over
            engine.follow()
    return 0


def _prepared(options: ModelOptions, config: EngineConfig) -> Engine:
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    ranks = join_ranks(options.tp)
    chosen = backends.get_backend(options.backend)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    loaded = load_model(options.path, chosen.device, dtype, ranks)
    choose_threads(loaded)
    engine = engine_of(loaded, chosen, config, checks_ranks=options.check_ranks)
    say(engine.memory.describe(engine.network.layout))
    say(f"network: {engine.prepare()}")
    # Another engine, over the same caches: what it counts and finds is forgotten with it.
    sizes = dataclasses.replace(engine.config, enable_prefix_caching=False)
    trial = Engine(loaded, chosen, sizes, caches_of=engine)
    few = min(4, engine.config.max_num_seqs)
    trial.generate([[0] * 32] * few, SamplingParams(max_tokens=2, ignore_eos=True))
    return engine
