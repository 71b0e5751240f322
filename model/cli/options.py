"""What a command line says beside the settings of an engine and of a request.

Decides: the flags that several commands have, and what they mean. Invariants: as settings have.

Does not know: files, models, backends; whether a name means anything is told by who loads it.
"""

import os
from dataclasses import dataclass
from typing import Literal

from model.cli.files import OutputFile
from model.control.settings import check_settings, setting
from model.control.submission import Retained
from model.tiny import CHECKPOINT_DIR
from model.trace import TRACE_BEGINS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model runs on what."""

    model: str | None = setting(
        None,
        help="a model folder, or owner/name on the hub (default: the tiny model inside)",
        metavar="PATH_OR_ID",
    )
    backend: str = setting("auto", help="numba, triton, a plug-in's name, or auto", metavar="NAME")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", help="of weights and cache; auto: bfloat16 on a GPU, else and to verify float32"
    )

    tp: int = setting(
        1, help="processes that share the network, as many as torchrun starts", least=1, most=1024
    )
    expert_parallel: bool = setting(
        False,
        help="with --tp: each process has some of the experts whole, not a part of each",
        needs=("tp",),
    )
    check_ranks: bool = setting(
        False,
        help="with --tp: compare the block tables of all processes after every step",
        needs=("tp",),
    )

    @property
    def follows(self) -> bool:
        """Whether another process leads this one, which has nothing to say then. O(1)."""
        return self.tp > 1 and os.environ.get("RANK", "0") != "0"

    @property
    def path(self) -> str:
        """The model's folder or id. O(1)."""
        return str(CHECKPOINT_DIR) if self.model is None else self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Where the prompts of a run are."""

    prompt: tuple[str, ...] = setting((), help="what to continue; - reads it from stdin")
    prompts_file: str | None = setting(
        None,
        help=".txt: a prompt a line; .jsonl: an object a line, with prompt and any of its fields",
        metavar="PATH",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """What is said of a prompt beside how its tokens are chosen."""

    n: int = setting(1, help="texts to draw for each prompt", least=1, most=1024)
    priority: int = setting(
        0, help="the lower, the sooner", least=-1_000_000, most=1_000_000, flag=""
    )
    retain: tuple[Retained, ...] = setting(
        (),
        help="tokens of a prompt to keep in the cache longer than others: START:STOP, with "
        "@PRIORITY if not 1, and /STEPS if not for ever",
        metavar="RANGE",
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What is told of the steps."""

    trace: str | None = setting(
        None,
        help="write a trace of the steps, for ui.perfetto.dev or chrome://tracing",
        metavar="FILE",
    )
    stats: bool = setting(False, help="tell where the time went and what the cache did")

    def file(self, *inputs: str | None) -> OutputFile | None:
        """The file of `--trace`, checked; None: no trace is wanted. O(files of the inputs).

        Args:
            inputs: files that the run reads, and folders of which it may read every file.

        Raises:
            UsageError: it cannot be written, is an input, or is there and no trace.
        """
        if self.trace is None:
            return None
        file = OutputFile("--trace", self.trace, TRACE_BEGINS)
        file.check(inputs)
        return file


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What a run prints."""

    stream: bool = setting(False, help="write text as it comes")
    json: bool = setting(False, help="one JSON document on stdout; everything else on stderr")
    verify: bool = setting(
        False,
        help="compare every token with Transformers' generate, each prompt on its own",
    )
