"""The command line: which flags there are, and what they may not mean together.

Decides: names, defaults and combinations of flags. Invariants: options that exist are consistent;
a wrong flag raises, it never exits or prints by itself (`--help` alone does).

Does not know: files, models, backends; whether a name means anything is told by who loads it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from model.cli.size_flags import add_execution, add_sizes, engine_config
from model.control.config import EngineConfig
from model.errors import UsageError
from model.tiny import CHECKPOINT_DIR

__all__ = [
    "DTYPES",
    "Options",
    "Parser",
    "add_execution",
    "add_model",
    "add_sizes",
    "add_tracing",
    "engine_config",
    "parse_args",
]

DTYPES = ("auto", "float32", "bfloat16", "float16")

_SAMPLING = ("temperature", "top_k", "top_p", "seed", "n")
_EPILOG = """\
Without a prompt it continues a few of its own, which share a prefix. The table at the end: tokens a
second after the kernels are compiled; prompt tokens found in the prefix cache; blocks; and the
bytes that hold keys and values, against a flat cache with room for the longest request in each row.

Exit codes: 0 done; 1 --verify found a difference; 2 bad input; 3 failed otherwise, such as a full
disk; 130 interrupted; 141 output closed; 143 terminated.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, parsed. `sampling` has only the fields that were given."""

    backend: str
    model: str
    tp: int
    check_ranks: bool
    dtype: str
    prompts: tuple[str, ...]
    prompts_file: str | None
    sampling: dict[str, object]
    engine: EngineConfig
    stream: bool
    json: bool
    verify: bool
    trace: str | None
    stats: bool


class _Writable(Protocol):
    def write(self, text: str, /) -> object: ...


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        raise UsageError(message)

    def print_help(self, file: _Writable | None = None) -> None:
        """Write the help; unlike the original, an output that cannot be written is an error."""
        (sys.stdout if file is None else file).write(self.format_help())


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Parse a command line; None: the process's own. O(argv).

    Raises:
        UsageError: an unknown flag, a value of the wrong kind, or flags that exclude each other.
        InvalidArgumentError: a size is out of range.
    """
    flags = _parser().parse_args(argv)
    sampling = {
        name: value
        for name in ("max_tokens", *_SAMPLING, "ignore_eos")
        if (value := getattr(flags, name)) is not None
    }
    if flags.stop:
        sampling["stop"] = tuple(flags.stop)
    if flags.verify:
        given = [f"--{name.replace('_', '-')}" for name in _SAMPLING if name in sampling]
        if given:
            raise UsageError(
                f"--verify compares with greedy generation: {', '.join(given)} cannot be given too"
            )
    if flags.stream and flags.json:
        raise UsageError("--stream writes text as it comes, --json one document: give one of them")
    return Options(
        backend=flags.backend,
        model=flags.model,
        tp=flags.tp,
        check_ranks=flags.check_ranks,
        dtype=flags.dtype,
        prompts=tuple(flags.prompt),
        prompts_file=flags.prompts_file,
        sampling=sampling,
        engine=engine_config(flags),
        stream=flags.stream,
        json=flags.json,
        verify=flags.verify,
        trace=flags.trace,
        stats=flags.stats,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m model.run",
        description="Generate text with a paged KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what_runs = parser.add_argument_group("what runs").add_argument
    add_model(what_runs)
    add_execution(what_runs, compiles=False)
    what_runs(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the network, as many as torchrun starts (default: 1)",
    )
    what_runs(
        "--check-ranks",
        action="store_true",
        help="with --tp: compare the block tables of all processes after every step",
    )
    _add_prompts(what_runs)
    _add_sampling(parser.add_argument_group("how tokens are chosen").add_argument)
    add_sizes(parser.add_argument_group("how large the cache and a step are").add_argument)
    what_comes_out = parser.add_argument_group("what comes out").add_argument
    _add_output(what_comes_out)
    add_tracing(what_comes_out)
    return parser


def add_model(flag: Callable[..., object]) -> None:
    """Add the flags that say which model runs on what. O(1)."""
    flag(
        "--backend",
        default="auto",
        metavar="NAME",
        help="auto, numba, triton or a plug-in's name (default: auto)",
    )
    flag(
        "--model",
        default=str(CHECKPOINT_DIR),
        metavar="PATH_OR_ID",
        help="a model folder, or owner/name on the hub (default: the tiny model)",
    )
    flag(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="auto: float32 on a CPU and with --verify, bfloat16 on a GPU",
    )


def _add_prompts(flag: Callable[..., object]) -> None:
    flag(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="repeatable; - reads one prompt from stdin",
    )
    flag(
        "--prompts-file",
        metavar="PATH",
        help=".txt: a prompt a line; .jsonl: an object a line, with prompt and any of its fields",
    )


def _add_sampling(flag: Callable[..., object]) -> None:
    flag(
        "--max-tokens",
        type=int,
        metavar="N",
        help="the most tokens to generate for a prompt (default: 64)",
    )
    flag(
        "--temperature",
        type=float,
        metavar="T",
        help="0: the most likely token (default); above 0: draw",
    )
    flag("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    flag(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the most likely tokens that reach mass P",
    )
    flag("--n", type=int, metavar="N", help="texts to draw for each prompt (default: 1)")
    flag(
        "--seed",
        type=int,
        metavar="S",
        help="of the draws; prompt number i, from 0, draws with S + i modulo 2**63 (default: 0)",
    )
    flag(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="repeatable; a text ends before this",
    )
    flag(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="go on after the model's own end of text",
    )


def add_tracing(flag: Callable[..., object]) -> None:
    """Add the flags that tell what steps do. O(1)."""
    flag(
        "--trace",
        metavar="FILE",
        help="write a trace of the steps, for ui.perfetto.dev or chrome://tracing",
    )
    flag("--stats", action="store_true", help="tell where the time went and what the cache did")


def _add_output(flag: Callable[..., object]) -> None:
    flag("--stream", action="store_true", help="write text as it comes")
    flag(
        "--json", action="store_true", help="one JSON document on stdout; everything else on stderr"
    )
    flag(
        "--verify",
        action="store_true",
        help="compare every token with Transformers' generate, each prompt on its own",
    )
