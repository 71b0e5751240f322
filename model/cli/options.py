"""The settings of a command line beside those of an engine and of sampling.

Decides: the flags that several commands have, and what they mean. Invariants: as settings have.

Does not know: files, models, backends; whether a name means anything.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model.cli.files import OutputFile
from model.control.settings import check_settings, setting
from model.control.submission import Retained
from model.tiny import CHECKPOINT_DIR
from model.trace import TRACE_BEGINS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model of a command, its backend, its dtype and its processes."""

    model: str | None = setting(
        None,
        help="a model folder or a Hugging Face id (default: the tiny model that comes with kvcore)",
        metavar="PATH_OR_ID",
        is_common=True,
    )
    backend: str = setting(
        "auto",
        help="attention kernels: numba (CPU), triton (GPU), the name of a plug-in, or auto",
        metavar="NAME",
        is_common=True,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        help="data type of weights and KV cache; auto: bfloat16 on a GPU, float32 on a CPU and "
        "with --verify",
        is_common=True,
    )

    tp: int = setting(
        1,
        help="tensor parallelism: the number of processes; start as many with torchrun",
        least=1,
        most=1024,
        is_common=True,
    )
    expert_parallel: bool = setting(
        False,
        help="expert parallelism, with --tp: each process holds some whole experts, not a part "
        "of each",
        needs=("tp",),
    )
    check_ranks: bool = setting(
        False,
        help="debugging, with --tp: compare the block tables of all processes before every pass",
        needs=("tp",),
    )

    @property
    def name(self) -> str:
        """The name in requests: an id on the hub unchanged, of a path the last part. O(1)."""
        path = Path(self.path)
        return path.name if path.exists() else self.path

    @property
    def follows(self) -> bool:
        """True if another process leads this one, which then prints nothing. O(1)."""
        return self.tp > 1 and os.environ.get("RANK", "0") != "0"

    @property
    def path(self) -> str:
        """The model's folder or id. O(1)."""
        return str(CHECKPOINT_DIR) if self.model is None else self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompts of a run."""

    prompt: tuple[str, ...] = setting(
        (), help="prompt to continue; - reads it from stdin", is_common=True
    )
    prompts_file: str | None = setting(
        None,
        help="file of prompts; .txt: one on each line; .jsonl: a JSON object on each line, with "
        "prompt or messages, any sampling parameters, and images (paths), or as in OpenAI's batch "
        "files",
        metavar="PATH",
        is_common=True,
    )

    image: tuple[str, ...] = setting(
        (),
        help="image file for every --prompt; images stand where the prompt has the model's text "
        "for them, such as <|image_pad|>, or before it",
        metavar="PATH",
        needs=("prompt",),
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The settings of a request beside its sampling parameters."""

    priority: int = setting(
        0,
        help="scheduling priority; lower numbers run first",
        least=-1_000_000,
        most=1_000_000,
        flag="",
    )
    lora_name: str | None = setting(
        None,
        help="the LoRA adapter that computes a prompt and its output, one of those of --lora",
        metavar="NAME",
    )
    cache_salt: str = setting(
        "",
        help="prefix caching: share cached prefixes only with prompts of the same salt",
    )
    retain: tuple[Retained, ...] = setting(
        (),
        help="prompt tokens to keep in the prefix cache longer than others: START:STOP, then "
        "@PRIORITY if it is not 1 and /STEPS for a limited time",
        metavar="RANGE",
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The settings of the report on steps."""

    trace: str | None = setting(
        None,
        help="write a trace of all steps to FILE, for ui.perfetto.dev, chrome://tracing or "
        "model.view",
        metavar="FILE",
        is_common=True,
    )
    stats: bool = setting(
        False,
        help="print where the time of the steps went and what the KV cache did",
        is_common=True,
    )

    def file(self, *inputs: str | None) -> OutputFile | None:
        """Return the file of `--trace`, checked; None: no trace is wanted. O(files of the inputs).

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
class ChatOptions:
    """The settings of a conversation in the terminal."""

    system: str | None = setting(
        None, help="system message: what the conversation begins with", least=1, is_common=True
    )
    lora_name: str | None = setting(
        None, help="the LoRA adapter that answers, one of those of --lora", metavar="NAME"
    )
    report: bool = setting(
        False, help="print tokens and prefix cache hits after each answer", is_common=True
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The settings of a run's output."""

    stream: bool = setting(False, help="print text as it is generated", is_common=True)
    json: bool = setting(
        False,
        help="print one JSON document on stdout and everything else on stderr",
        is_common=True,
    )
    verify: bool = setting(
        False,
        help="compare every token with Transformers' generate, run on each prompt alone",
        is_common=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The format of the printed results."""

    json: bool = setting(False, help="print one JSON object", is_common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """One batch after another."""

    batch_size: int = setting(8, help="requests that run at once", least=1, is_common=True)
    input_len: int = setting(32, help="tokens of each prompt", least=1, is_common=True)
    output_len: int = setting(128, help="tokens of each output", least=1, is_common=True)
    num_iters_warmup: int = setting(2, help="batches before those that count", least=0)
    num_iters: int = setting(10, help="batches that count", least=1, is_common=True)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """Many requests at once."""

    num_prompts: int = setting(64, help="requests, all queued at once", least=1, is_common=True)
    input_len: int = setting(128, help="tokens of each prompt", least=1, is_common=True)
    output_len: int = setting(128, help="tokens of each output", least=1, is_common=True)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Requests to a server that runs."""

    base_url: str = setting(
        "http://127.0.0.1:8000", help="the server, ours or any with OpenAI's completions",
        least=1, metavar="URL", is_common=True,
    )  # fmt: skip
    api_key: str | None = setting(None, help="key that the server wants", least=1, metavar="KEY")
    served_model_name: str | None = setting(
        None, help="model that requests name (default: the first that the server lists)",
        least=1, metavar="NAME",
    )  # fmt: skip
    num_prompts: int = setting(64, help="requests", least=1, is_common=True)
    input_len: int = setting(128, help="tokens of each prompt", least=1, is_common=True)
    output_len: int = setting(128, help="tokens of each output", least=1, is_common=True)
    request_rate: float | None = setting(
        None, help="requests a second, at random moments (default: all at once)", above=0,
        is_common=True,
    )  # fmt: skip
    max_concurrency: int = setting(
        64, help="most requests in flight", least=1, most=1024, is_common=True
    )

    def __post_init__(self) -> None:
        check_settings(self)
