"""The command line of a run: which flags there are, and what they may not mean together.

Decides: combinations of flags. Invariants: options that exist are consistent; a wrong flag raises,
it never exits or prints by itself (`--help` alone does).

Does not know: files, models, backends; whether a name means anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model.cli.options import (
    ModelOptions,
    OutputOptions,
    PromptOptions,
    RequestOptions,
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
    "min_tokens",
    "bad_words",
    "seed",
    "n",
)
_EPILOG = """\
Without --prompt or --prompts-file, a few built-in prompts that share a prefix are continued. The
table at the end shows tokens per second (without kernel compilation), prefix cache hits, KV cache
blocks, and the bytes used for keys and values compared with a contiguous cache that has room for
the longest request in every row.

Exit codes: 0 done; 1 --verify found a difference; 2 bad input; 3 any other failure, such as a full
disk; 130 interrupted; 141 the output was closed; 143 terminated.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, parsed.

    Attributes:
        model: the model, and its backend.
        prompts: the prompts.
        sampling: the given sampling parameters alone, because a prompt may have others.
        engine: sizes.
        output: the format of the output.
        trace: the reports on the steps.
    """

    model: ModelOptions
    prompts: PromptOptions
    sampling: dict[str, object]
    engine: EngineConfig
    output: OutputOptions
    trace: TraceOptions


def run_flags() -> Flags:
    """Return the flags of `python -m model.run`. O(flags)."""
    flags = Flags(
        "python -m model.run",
        "Generate text with a paged KV cache and continuous batching.",
        _EPILOG,
    )
    flags.add("model and hardware", ModelOptions)
    flags.add("model and hardware", PromptOptions)
    flags.add("sampling", SamplingParams)
    flags.add("sampling", RequestOptions)
    flags.add("engine: KV cache, scheduling and execution", EngineConfig)
    flags.add("output", OutputOptions)
    flags.add("output", TraceOptions)
    return flags


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Parse a command line; None: the process's own. O(argv).

    Raises:
        UsageError: an unknown flag, a value that is not allowed, or flags that exclude each other.
        InvalidArgumentError: sizes that mean nothing together.
    """
    said = run_flags().parse(argv)
    sampling = {**said.given(SamplingParams), **said.given(RequestOptions)}
    output = said.of(OutputOptions)
    if output.verify:
        given = [f"--{name.replace('_', '-')}" for name in _UNLIKE_GREEDY if name in sampling]
        if given:
            raise UsageError(f"--verify compares with greedy generation: remove {', '.join(given)}")
    if output.stream and output.json:
        raise UsageError(
            "--stream prints text as it is generated, --json one document: give one of them"
        )
    return Options(
        model=said.of(ModelOptions),
        prompts=said.of(PromptOptions),
        sampling=sampling,
        engine=said.of(EngineConfig),
        output=output,
        trace=said.of(TraceOptions),
    )
