"""The server's command line: which flags there are.

Decides: names and defaults. Invariants: options that exist are consistent; a wrong flag raises, it
never exits or prints by itself (`--help` alone does).

Does not know: FastAPI, torch, models.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from model.cli.args import Parser, add_execution, add_model, add_sizes, engine_config
from model.cli.size_flags import num_bytes
from model.control.config import EngineConfig
from model.serve.config import ServeConfig

_EPILOG = """\
Serves OpenAI's interface under /v1, metrics for Prometheus under /metrics. SIGTERM and SIGINT let
what runs go on for --drain-timeout-s; a second one ends it.

Exit codes are those of model.run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The command line, parsed."""

    model: str
    backend: str
    dtype: str
    engine: EngineConfig
    serve: ServeConfig


def parse_args(argv: Sequence[str] | None = None) -> ServeOptions:
    """Parse a command line; None: the process's own. O(argv).

    Raises:
        UsageError: an unknown flag, or a value of the wrong kind.
        InvalidArgumentError: a value is out of range.
    """
    flags = _parser().parse_args(argv)
    keys = flags.api_key or [key for key in [os.environ.get("KVCORE_API_KEY")] if key]
    return ServeOptions(
        model=flags.model,
        backend=flags.backend,
        dtype=flags.dtype,
        engine=engine_config(flags),
        serve=ServeConfig(
            host=flags.host,
            port=flags.port,
            served_model_name=flags.served_model_name or PurePath(flags.model).name,
            api_keys=tuple(keys),
            allow_origins=tuple(flags.allow_origin),
            tls_certfile=flags.tls_certfile,
            tls_keyfile=flags.tls_keyfile,
            max_waiting=flags.max_waiting,
            max_request_bytes=flags.max_request_bytes,
            request_timeout_s=flags.request_timeout_s,
            drain_timeout_s=flags.drain_timeout_s,
            access_log=flags.access_log,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m model.serve",
        description="Serve a model to OpenAI's clients.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_serving(parser.add_argument_group("how clients are met").add_argument)
    what_runs = parser.add_argument_group("what runs").add_argument
    add_model(what_runs)
    add_execution(what_runs, compiles=False)
    add_sizes(parser.add_argument_group("how large the cache and a step are").add_argument)
    return parser


def _add_serving(flag: Callable[..., object]) -> None:
    usual = ServeConfig()
    flag("--host", default=usual.host, help=f"address to listen on (default: {usual.host})")
    flag(
        "--port",
        type=int,
        default=usual.port,
        help=f"likewise; 0: any that is free (default: {usual.port})",
    )
    flag("--served-model-name", metavar="NAME", help="what clients call the model")
    flag(
        "--api-key",
        action="append",
        metavar="KEY",
        help="repeatable; clients have to show one (default: $KVCORE_API_KEY, else none is asked)",
    )
    flag(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="repeatable; pages of this origin may read answers (default: none)",
    )
    flag("--tls-certfile", metavar="PATH", help="HTTPS with this certificate")
    flag("--tls-keyfile", metavar="PATH", help="and this key")
    flag(
        "--max-waiting",
        type=int,
        default=usual.max_waiting,
        metavar="N",
        help="requests that may wait beside those that run; others are told to come again "
        f"(default: {usual.max_waiting})",
    )
    flag(
        "--max-request-bytes",
        type=num_bytes,
        default=usual.max_request_bytes,
        metavar="SIZE",
        help="the largest request (default: 4MiB)",
    )
    flag(
        "--request-timeout-s",
        type=float,
        default=usual.request_timeout_s,
        metavar="S",
        help=f"how long a request may take to come (default: {usual.request_timeout_s:g})",
    )
    flag(
        "--drain-timeout-s",
        type=float,
        default=usual.drain_timeout_s,
        metavar="S",
        help=f"how long requests may go on after SIGTERM (default: {usual.drain_timeout_s:g})",
    )
    flag("--access-log", metavar="PATH", help="write a JSON line for each request; -: to stdout")
