"""From the name of a model to an engine that is warm; loads torch and Transformers.

Decides: that an engine is warm before it is asked: its kernels are compiled, its network prepared,
and a few tokens computed that are forgotten again.

Does not know: who asks for it.
"""

from collections.abc import Callable

from model.cli.exits import stopping
from model.cli.options import ModelOptions
from model.control.config import EngineConfig
from model.engine import Engine
from model.start import input_errors, start, warm_up
from model.twins import TwinEngine, engine_of


def make_engine(
    options: ModelOptions, config: EngineConfig, tell: Callable[[str], None] = lambda _: None
) -> Engine:
    """Load a model and prepare an engine for it. Seconds to minutes.

    Args:
        options: which model on what.
        config: sizes.
        tell: is told what came about, a line each.

    Raises:
        ModelError: there is no such model, or it does not run here.
    """
    with input_errors():
        model, backend = start(options.path, options.backend, options.dtype, num_ranks=options.tp)
        engine = engine_of(model, backend, config, checks_ranks=options.check_ranks)
        tell(engine.memory.describe(engine.network.layout))
        tell(f"network: {warm_up(engine)}")
        return engine


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
