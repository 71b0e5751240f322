"""The command line of several replicas: which flags there are.

Invariants: options that exist are consistent; a wrong flag raises.

Does not know: Ray, FastAPI, torch, models.
"""

from collections.abc import Sequence

from model.cli.options import ModelOptions
from model.cli.settings import Flags
from model.cluster.config import ClusterConfig, ClusterOptions
from model.control.config import EngineConfig
from model.errors import UsageError
from model.serve.config import ServeConfig, keys_of_environment

_EPILOG = """\
Serves OpenAI's API with several replicas of an engine, on Ray Serve. With --tp N a replica is N
processes, each on its own GPU. After SIGTERM or SIGINT, running requests have --drain-timeout-s.

Exit codes are those of model.run.
"""
_NOT_HERE = ("kv_events", "kv_replay", "access_log")


def cluster_flags() -> Flags:
    """Return the flags of `python -m model.cluster`. O(flags)."""
    flags = Flags("python -m model.cluster", "Serve a model with several replicas.", _EPILOG)
    flags.add("replicas and routing", ClusterConfig)
    flags.add("server", ServeConfig)
    flags.add("model and backend of each replica", ModelOptions)
    flags.add("engine: KV cache, scheduling and execution", EngineConfig)
    return flags


def parse_args(argv: Sequence[str] | None = None) -> ClusterOptions:
    """Parse a command line; None: the process's own. O(argv).

    Raises:
        UsageError: an unknown flag, a value that is not allowed, or one that means nothing here.
        InvalidArgumentError: settings that mean nothing together.
    """
    said = cluster_flags().parse(argv)
    for name in said.given(ServeConfig).keys() & set(_NOT_HERE):
        flag = name.replace("_", "-")
        raise UsageError(f"--{flag} has no meaning here: it is a flag of one server process")
    model = said.of(ModelOptions)
    serve = said.of(
        ServeConfig,
        served_model_name=(model.name,),
        api_keys=keys_of_environment(),
    )
    if "serve_kv" in said.given(EngineConfig):
        raise UsageError("--serve-kv has no meaning here: all replicas would have one address")
    engine = said.of(EngineConfig, record_events=True, shares_disk=True)
    serve.check_adapters(engine.lora)
    cluster = said.of(ClusterConfig)
    return ClusterOptions(cluster=cluster, serve=serve, model=model, engine=engine)
