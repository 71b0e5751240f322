"""The command line of a run: which flags there are, and what they may not mean together.

Decides: combinations of flags. Invariants: options that exist are consistent; a wrong flag raises,
it never exits or prints by itself (`--help` alone does).

Does not know: files, models, backends; whether a name means anything is told by who loads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model.cli.options import (
    ModelOptions,
    OutputOptions,
    PromptOptions,
    SampleOptions,
    TraceOptions,
)
from model.cli.settings import Flags
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.errors import UsageError

_UNLIKE_GREEDY = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
)
_EPILOG = """\
Without a prompt it continues a few of its own, which share a prefix. The table at the end: tokens a
second after the kernels are compiled; prompt tokens found in the prefix cache; blocks; and the
bytes that hold keys and values, against a flat cache with room for the longest request in each row.

Exit codes: 0 done; 1 --verify found a difference; 2 bad input; 3 failed otherwise, such as a full
disk; 130 interrupted; 141 output closed; 143 terminated.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, parsed.

    Attributes:
        model: which runs, and on what.
        prompts: where the prompts are.
        sampling: how tokens are chosen: only what was given, because a prompt has its own too.
        engine: sizes.
        output: what is printed.
        trace: what is told of the steps.
    """

    model: ModelOptions
    prompts: PromptOptions
    sampling: dict[str, object]
    engine: EngineConfig
    output: OutputOptions
    trace: TraceOptions


def run_flags() -> Flags:
    """The flags of `python -m model.run`. O(flags)."""
    flags = Flags("python -m model.run", "Generate text with a paged KV cache.", _EPILOG)
    flags.add("what runs", ModelOptions)
    flags.add("what runs", PromptOptions)
    flags.add("how tokens are chosen", SamplingParams)
    flags.add("how tokens are chosen", SampleOptions)
    flags.add("how large the cache and a step are, and how it runs", EngineConfig)
    flags.add("what comes out", OutputOptions)
    flags.add("what comes out", TraceOptions)
    return flags


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Parse a command line; None: the process's own. O(argv).

    Raises:
        UsageError: an unknown flag, a value that is not allowed, or flags that exclude each other.
        InvalidArgumentError: sizes that mean nothing together.
    """
    said = run_flags().parse(argv)
    sampling = {**said.given(SamplingParams), **said.given(SampleOptions)}
    output = said.of(OutputOptions)
    if output.verify:
        given = [f"--{name.replace('_', '-')}" for name in _UNLIKE_GREEDY if name in sampling]
        if given:
            raise UsageError(
                f"--verify compares with greedy generation: {', '.join(given)} cannot be given too"
            )
    if output.stream and output.json:
        raise UsageError("--stream writes text as it comes, --json one document: give one of them")
    return Options(
        model=said.of(ModelOptions),
        prompts=said.of(PromptOptions),
        sampling=sampling,
        engine=said.of(EngineConfig),
        output=output,
        trace=said.of(TraceOptions),
    )
