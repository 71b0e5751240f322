"""The server's command line: which flags there are.

Decides: nothing but what the environment adds. Invariants: options that exist are consistent; a
wrong flag raises, it never exits or prints by itself (`--help` alone does).

Does not know: FastAPI, torch, models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model.cli.options import ModelOptions
from model.cli.settings import Flags
from model.control.config import EngineConfig
from model.serve.config import ServeConfig, keys_of_environment

_EPILOG = """\
Serves OpenAI's interface under /v1 and Prometheus metrics under /metrics. After SIGTERM or SIGINT,
running requests may continue for --drain-timeout-s; a second signal ends the server at once.

The exit codes are those of model.run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The command line, parsed."""

    model: ModelOptions
    engine: EngineConfig
    serve: ServeConfig


def serve_flags() -> Flags:
    """The flags of `python -m model.serve`. O(flags)."""
    flags = Flags(
        "python -m model.serve",
        "Serve a model over an HTTP interface compatible with OpenAI's.",
        _EPILOG,
    )
    flags.add("model and hardware", ModelOptions)
    flags.add("server", ServeConfig)
    title = "engine: KV cache, scheduling and execution"
    flags.add(title, EngineConfig, record_lifetimes=True)
    return flags


def parse_args(argv: Sequence[str] | None = None) -> ServeOptions:
    """Parse a command line; None: the process's own. O(argv).

    Raises:
        UsageError: an unknown flag, or a value that is not allowed.
        InvalidArgumentError: settings that mean nothing together.
    """
    said = serve_flags().parse(argv)
    model = said.of(ModelOptions)
    serve = said.of(
        ServeConfig,
        served_model_name=(model.name,),
        api_keys=keys_of_environment(),
    )
    engine = said.of(EngineConfig, record_events=serve.kv_events is not None)
    serve.check_adapters(engine.lora)
    return ServeOptions(model=model, engine=engine, serve=serve)
