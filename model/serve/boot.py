"""From the options of a server to its engine; loads torch and Transformers.

Decides: that an engine is warm before it is asked: its kernels are compiled, its network prepared,
and a few tokens computed that are forgotten again.

Does not know: clients.
"""

from model.cli.progress import say
from model.control.config import EngineConfig
from model.engine import Engine
from model.start import input_errors, start, warm_up


def make_engine(model: str, backend: str, dtype: str, config: EngineConfig) -> Engine:
    """Load a model and prepare an engine for it. Seconds to minutes.

    Args:
        model: a folder, or an id on the hub.
        backend: its name, or "auto".
        dtype: its name, or "auto".
        config: sizes.

    Raises:
        ModelError: there is no such model, or it does not run here.
    """
    with input_errors():
        loaded, chosen = start(model, backend, dtype)
        engine = Engine(loaded, chosen, config)
        say(engine.memory.describe(engine.network.layout))
        few = min(4, engine.config.max_num_seqs)
        how = warm_up(engine, loaded, chosen, length=32, num_prompts=few)
    say(f"network: {how}")
    return engine
