"""Measure a model on this machine: `python -m model.bench latency|throughput|serve`.

Decides: which measurements there are, with the names and the flags of `vllm bench`, and that flags
are read before anything slow is loaded. Prompts are random token ids, so none finds another one's
blocks, and each gets exactly the tokens that it asks for.

Does not know: how anything is measured (`cli/benchmarks.py`, `cli/load_client.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.cli.exits import leaves
from model.cli.options import (
    LatencyOptions,
    LoadOptions,
    ModelOptions,
    ReportOptions,
    ThroughputOptions,
)
from model.cli.settings import Flags
from model.control.config import EngineConfig
from model.errors import UsageError, shown

_ENGINE = "engine: KV cache, scheduling and execution"


MEASUREMENTS: dict[str, tuple[type[LatencyOptions | ThroughputOptions | LoadOptions], str]] = {
    "latency": (LatencyOptions, "how long one batch of requests takes"),
    "throughput": (ThroughputOptions, "how many tokens a second many requests get together"),
    "serve": (LoadOptions, "what clients of a running server wait for"),
}
_HELP = """\
usage: python -m model.bench MEASUREMENT [flags]

{measurements}

python -m model.bench MEASUREMENT --help shows its flags.
"""


def bench_flags(name: str) -> Flags:
    """Return the flags of one measurement. O(flags)."""
    declared, words = MEASUREMENTS[name]
    flags = Flags(f"python -m model.bench {name}", f"Measure {words}.")
    flags.add("requests", declared)
    if name != "serve":
        flags.add("model and hardware", ModelOptions)
        flags.add(_ENGINE, EngineConfig, max_num_seqs=256)
    flags.add("output", ReportOptions)
    return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, parsed.

    Attributes:
        asked: the options of the measurement.
        model: the model that is measured, and its backend; of no use for a server.
        engine: its sizes, likewise.
        report: how results are printed.
    """

    asked: LatencyOptions | ThroughputOptions | LoadOptions
    model: ModelOptions
    engine: EngineConfig
    report: ReportOptions


def parse_args(argv: Sequence[str]) -> Options:
    """Parse a command line. O(argv).

    Raises:
        UsageError: there is no such measurement, or a flag is wrong.
    """
    name = argv[0] if argv else "none"
    if name not in MEASUREMENTS:
        raise UsageError(f"measurement: wanted {', '.join(MEASUREMENTS)}, got {shown(name)}")
    said = bench_flags(name).parse(argv[1:])
    has_engine = name != "serve"
    return Options(
        asked=said.of(MEASUREMENTS[name][0]),
        model=said.of(ModelOptions) if has_engine else ModelOptions(),
        engine=said.of(EngineConfig) if has_engine else EngineConfig(),
        report=said.of(ReportOptions),
    )


def help_text() -> str:
    """Return the measurements. O(1)."""
    rows = [f"  {each:12}{words}" for each, (_, words) in MEASUREMENTS.items()]
    return _HELP.format(measurements="\n".join(rows))


if __name__ == "__main__":
    with leaves():
        import json
        import sys

        from model.cli.imports import importing
        from model.cli.load_client import send_load
        from model.cli.progress import say, telling

        if not sys.argv[1:] or sys.argv[1] in {"-h", "--help", "--help-all"}:
            print(help_text(), end="")
            sys.exit(0)
        options = parse_args(sys.argv[1:])
        if isinstance(options.asked, LoadOptions):
            report = send_load(options.asked)
        else:
            with importing(), telling("loading torch and Transformers"):
                from model.cli.benchmarks import measured, sized
                from model.cli.start import follow, make_engine

            if options.model.follows:
                sys.exit(follow(options.model, options.engine))
            config = replace(options.engine, expected_lengths=sized(options.asked))
            engine = make_engine(options.model, config, say)
            try:
                report = measured(engine, options.asked)
            finally:
                engine.end()
        print(json.dumps(report.values) if options.report.json else report.text)
