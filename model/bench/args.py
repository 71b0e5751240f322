"""The benchmark's command line: which flags there are, and which workload takes which.

Decides: names, defaults and combinations of flags. Invariants: options that exist are consistent; a
wrong flag raises.

Does not know: torch, models.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence

from model.bench.options import BenchOptions, HostOptions, ServeOptions, WasteOptions
from model.bench.workloads import SHAPES, Shape, Span
from model.cli.args import Parser, add_execution, add_model, add_sizes, add_tracing, engine_config
from model.errors import InvalidArgumentError, UsageError, shown

PEER_NAMES = ("generate", "generate_batch", "generate_batch_sized", "no-prefix-cache")
"""What can run beside us."""

_EPILOG = """\
Without flags the tiny model serves nano-vLLM's workload: 256 requests of 100 to 1024 tokens, 100 to
1024 generated. The numbers have the names that vllm bench gives them. A peer runs on the same
requests in the same process, turn by turn; a ratio above 1x means that ours is faster.

Exit codes are those of model.run.
"""


def parse_args(argv: Sequence[str] | None = None) -> BenchOptions:
    """Parse a command line; None: the process's own. O(argv).

    Raises:
        UsageError: an unknown flag, a value of the wrong kind, or flags that exclude each other.
        InvalidArgumentError: a size is out of range.
    """
    flags = _parser().parse_args(argv)
    if flags.workload not in SHAPES:
        _refuse_serving(flags)
    if flags.workload == "waste":
        return _waste_options(flags)
    return _host_options(flags) if flags.workload == "host" else _serve_options(flags)


def _shape(flags: argparse.Namespace, name: str) -> Shape:
    given = {
        field.name: value
        for field in dataclasses.fields(Shape)
        if (value := getattr(flags, field.name)) is not None
    }
    return dataclasses.replace(SHAPES[name], **given)


def _refuse_serving(flags: argparse.Namespace) -> None:
    """Nothing is served: no peer can join, and there are no steps to tell of."""
    for name, value in (("peer", flags.peer), ("trace", flags.trace), ("stats", flags.stats)):
        if value:
            raise UsageError(f"--{name} has no meaning with --workload {flags.workload}")


def _host_options(flags: argparse.Namespace) -> HostOptions:
    num_running = 256 if flags.num_requests is None else flags.num_requests
    for name, value in (("num_requests", num_running), ("steps", flags.steps)):
        if value < 1:
            raise InvalidArgumentError(f"{name}: wanted at least 1, got {value}")
    return HostOptions(
        num_running=num_running,
        num_steps=flags.steps,
        block_size=engine_config(flags).block_size,
        json=flags.json,
    )


def _waste_options(flags: argparse.Namespace) -> WasteOptions:
    for name in ("row_slots", "rows"):
        if getattr(flags, name) < 1:
            raise InvalidArgumentError(f"{name}: wanted at least 1, got {getattr(flags, name)}")
    for length in flags.lengths:
        if not 1 <= length <= flags.row_slots:
            raise InvalidArgumentError(f"lengths: wanted 1 to {flags.row_slots}, got {length}")
    if min(flags.block_sizes) < 1:
        raise InvalidArgumentError(
            f"block_sizes: wanted at least 1 each, got {min(flags.block_sizes)}"
        )
    return WasteOptions(
        model=flags.model,
        dtype=flags.dtype,
        lengths=flags.lengths,
        row_slots=flags.row_slots,
        trace=flags.trace_of,
        shape=_shape(flags, flags.trace_of),
        seed=flags.seed,
        block_sizes=flags.block_sizes,
        rows=flags.rows,
        engine=engine_config(flags),
        json=flags.json,
    )


def _serve_options(flags: argparse.Namespace) -> ServeOptions:
    for name, value in (("rounds", flags.rounds), ("max_concurrency", flags.max_concurrency)):
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name}: wanted at least 1, got {value}")
    if not flags.request_rate > 0:
        raise InvalidArgumentError(f"request_rate: wanted above 0, got {flags.request_rate}")
    if "no-prefix-cache" in flags.peer and not flags.prefix_cache:
        raise UsageError("--peer no-prefix-cache has no meaning with --no-prefix-cache")
    return ServeOptions(
        workload=flags.workload,
        model=flags.model,
        backend=flags.backend,
        dtype=flags.dtype,
        dummy_weights=flags.dummy_weights,
        shape=_shape(flags, flags.workload),
        seed=flags.seed,
        temperature=flags.temperature,
        request_rate=flags.request_rate,
        max_concurrency=flags.max_concurrency,
        engine=engine_config(flags),
        peers=tuple(dict.fromkeys(flags.peer)),
        rounds=flags.rounds,
        json=flags.json,
        trace=flags.trace,
        stats=flags.stats,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m model.bench",
        description="Serve a workload and time it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what_runs = parser.add_argument_group("what runs").add_argument
    what_runs(
        "--workload",
        choices=(*SHAPES, "waste", "host"),
        default="uniform",
        help="what is measured (default: uniform)",
    )
    add_model(what_runs)
    what_runs(
        "--dummy-weights",
        action="store_true",
        help="random weights of the model's configuration; --model may be qwen3-0.6b",
    )
    what_runs(
        "--peer",
        action="append",
        default=[],
        choices=PEER_NAMES,
        metavar="NAME",
        help=f"repeatable; beside us: {', '.join(PEER_NAMES)}",
    )
    add_execution(what_runs, compiles=True)
    what_runs("--rounds", type=int, default=1, metavar="N", help="turns of each (default: 1)")
    _add_requests(parser.add_argument_group("which requests").add_argument)
    add_sizes(parser.add_argument_group("how large the cache and a step are").add_argument)
    _add_waste(parser.add_argument_group("--workload waste").add_argument)
    of_host = parser.add_argument_group("--workload host").add_argument
    of_host(
        "--steps", type=int, default=128, metavar="N", help="steps that are timed (default: 128)"
    )
    what_comes_out = parser.add_argument_group("what comes out").add_argument
    what_comes_out("--json", action="store_true", help="one JSON document on stdout")
    add_tracing(what_comes_out)
    parser.set_defaults(max_num_seqs=256)
    return parser


def _add_requests(flag: Callable[..., object]) -> None:
    flag("--num-requests", type=int, metavar="N", help="how many (default: 256; chat 128, ...)")
    flag(
        "--input-len",
        type=_span,
        metavar="LOW:HIGH",
        help="tokens of a prompt, without what it shares; N is N:N",
    )
    flag("--output-len", type=_span, metavar="LOW:HIGH", help="tokens generated")
    flag("--prefix-len", type=int, metavar="N", help="tokens that all prompts begin with")
    flag("--turns", type=int, metavar="N", help="requests of a conversation")
    flag(
        "--seed", type=int, default=0, metavar="S", help="of lengths, tokens, moments (default: 0)"
    )
    flag(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0: the most likely token (default); above 0: draw",
    )
    flag(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests a second, at random moments (default: all at once)",
    )
    flag(
        "--max-concurrency", type=int, metavar="N", help="requests in flight at once (default: any)"
    )


def _add_waste(flag: Callable[..., object]) -> None:
    flag(
        "--lengths",
        type=_integers,
        default=(1024, 640, 384, 200),
        metavar="N,N,...",
        help="tokens of the sequences to hold (default: 1024,640,384,200)",
    )
    flag(
        "--row-slots",
        type=int,
        default=1024,
        metavar="N",
        help="slots of a flat cache's row for them (default: 1024)",
    )
    flag(
        "--trace-of",
        choices=tuple(SHAPES),
        default="uniform",
        help="the workload that is replayed without a network (default: uniform)",
    )
    flag(
        "--block-sizes",
        type=_integers,
        default=(8, 16, 32, 64, 128, 256),
        metavar="N,N,...",
        help="on these block sizes, and on rows (default: 8,16,32,64,128,256)",
    )
    flag(
        "--rows",
        type=int,
        default=32,
        metavar="N",
        help="in the memory of so many rows for the longest request (default: 32)",
    )


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"wanted N,N,..., got {shown(text)}") from error


def _span(text: str) -> Span:
    low, _, high = text.partition(":")
    try:
        return Span(int(low), int(high or low))
    except ValueError as error:  # of int, and a length that is none
        raise argparse.ArgumentTypeError(
            f"wanted N or LOW:HIGH with 1 <= LOW <= HIGH, got {shown(text)}"
        ) from error
