"""The benchmark's command line: which flags there are, and which workload takes which.

Decides: combinations of flags. Invariants: options that exist are consistent; a wrong flag raises.

Does not know: torch, models.
"""

from collections.abc import Sequence

from model.bench.options import (
    ArrivalOptions,
    BenchOptions,
    HostOptions,
    PrintOptions,
    WasteOptions,
    WeightOptions,
    WorkOptions,
)
from model.bench.workloads import SHAPES, Shape
from model.cli.options import ModelOptions, TraceOptions
from model.cli.settings import Flags
from model.control.config import EngineConfig
from model.errors import InvalidArgumentError, UsageError

_EPILOG = """\
Without flags the tiny model serves nano-vLLM's workload: 256 requests of 100 to 1024 tokens, 100 to
1024 generated. The numbers have the names that vllm bench gives them. A peer runs on the same
requests in the same process, turn by turn; a ratio above 1x means that ours is faster.

Exit codes are those of model.run.
"""


def bench_flags() -> Flags:
    """The flags of `python -m model.bench`. O(flags)."""
    flags = Flags("python -m model.bench", "Serve a workload and time it.", _EPILOG)
    flags.add("what runs", WorkOptions)
    flags.add("what runs", WeightOptions)
    flags.add("what runs", ModelOptions)
    flags.add("which requests (defaults: uniform's; the others have their own)", Shape)
    flags.add("when they come", ArrivalOptions)
    flags.add(
        "how large the cache and a step are, and how it runs",
        EngineConfig,
        max_num_seqs=256,
        compile=True,
    )
    flags.add("--workload waste", WasteOptions)
    flags.add("--workload host", HostOptions)
    flags.add("what comes out", PrintOptions)
    flags.add("what comes out", TraceOptions)
    return flags


def parse_args(argv: Sequence[str] | None = None) -> BenchOptions:
    """Parse a command line; None: the process's own. O(argv).

    Raises:
        UsageError: an unknown flag, a value that is not allowed, or flags that exclude each other.
        InvalidArgumentError: sizes that mean nothing together.
    """
    said = bench_flags().parse(argv)
    work, waste = said.of(WorkOptions), said.of(WasteOptions)
    for workload, kind in (("waste", WasteOptions), ("host", HostOptions)):
        for name in said.given(kind) if work.workload != workload else ():
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag}: wanted together with --workload {workload}, got it alone")
    shape = SHAPES[waste.trace_of if work.workload not in SHAPES else work.workload]
    options = BenchOptions(
        work=work,
        weights=said.of(WeightOptions),
        model=said.of(ModelOptions),
        engine=said.of(EngineConfig, compile=not said.given(EngineConfig).get("eager", False)),
        shape=said.over(shape),
        arrivals=said.of(ArrivalOptions),
        waste=waste,
        host=said.of(HostOptions),
        trace=said.of(TraceOptions),
        json=said.of(PrintOptions).json,
    )
    _check(options)
    return options


def _check(options: BenchOptions) -> None:
    work, trace, waste = options.work, options.trace, options.waste
    if work.workload not in SHAPES:  # nothing is served: no peer can join, no steps are told of
        flags = {"peer": work.peer, "trace": trace.trace, "stats": trace.stats}
        for name, value in {**flags, "tp": options.model.tp > 1}.items():
            if value:
                raise UsageError(f"--{name} has no meaning with --workload {work.workload}")
    others = [name for name in work.peer if name != "no-prefix-cache"]
    if others and options.model.tp > 1:
        raise UsageError(f"--peer {others[0]} runs in one process: it has no meaning with --tp")
    if "no-prefix-cache" in work.peer and not options.engine.enable_prefix_caching:
        raise UsageError("--peer no-prefix-cache has no meaning with --no-prefix-cache")
    if max(waste.lengths) > waste.row_slots:
        raise InvalidArgumentError(
            f"lengths: wanted 1 to {waste.row_slots}, got {max(waste.lengths)}"
        )
