"""The settings of the server; those of its engine are in `control/config.py`.

Invariants: a configuration that exists is in range; it never changes.

Does not know: FastAPI, the engine.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from model.control.settings import check_settings, setting
from model.errors import InvalidArgumentError, ModelNotFoundError, UsageError, shown
from model.pace import STREAM_SHARE

if TYPE_CHECKING:  # torch is not loaded before an engine is made
    from model.engine_core import EngineCore

_API_KEY = "KVCORE_API_KEY"
_KEY = re.compile(r"[!-~]+")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")
ToolCallParser = Literal[
    "hermes", "qwen3", "qwen3_coder", "qwen3_xml", "mistral", "llama3_json", "deepseek_v3",
    "deepseek_v31", "glm45", "glm47", "kimi_k2", "granite", "phi4_mini_json", "functionary",
    "gemma4", "openai", "seed_oss", "jamba", "internlm",
]  # fmt: skip
"""The formats of calls that can be chosen, by vLLM's names; `answer_formats.py` describes them."""

ReasoningParser = Literal[
    "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "granite", "kimi_k2", "mistral", "gemma4",
    "openai_gptoss", "seed_oss",
]  # fmt: skip
"""Likewise, of reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How the server listens, checks and limits requests."""

    host: str = setting("127.0.0.1", help="address to listen on", metavar="ADDRESS", is_common=True)
    port: int = setting(
        8000, help="port to listen on; 0: any free port", least=0, most=65_535, is_common=True
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        help="names of the model in requests; the first is that of answers to requests without one "
        "(default: --model; of a folder or file, the last part of its path)",
        least=1,
        unit="words",
        metavar="NAME",
        is_common=True,
    )
    api_keys: tuple[str, ...] = setting(
        (),
        help="API key that clients must send (default: $KVCORE_API_KEY; without one, no key is "
        "needed)",
        least=1,
        flag="api-key",
        metavar="KEY",
        is_common=True,
    )
    chat_template: str | None = setting(
        None,
        help="chat template: a file, or the template itself (default: the model's own)",
        metavar="PATH_OR_TEXT",
    )
    generation_config: Literal["auto", "vllm"] = setting(
        "auto",
        help="defaults of temperature, top_k, top_p, min_p, repetition_penalty and, in chats, "
        "max_tokens; auto: what the model's generation_config.json recommends; vllm: the defaults "
        "of OpenAI's interface, as with vLLM's flag of this name",
    )
    tool_call_parser: ToolCallParser | None = setting(
        None,
        help="how the model writes calls of tools (default: as its chat template or its type says)",
    )
    reasoning_parser: ReasoningParser | None = setting(
        None,
        help="how the model writes reasoning (default: as its chat template or its type says)",
    )
    allow_origins: tuple[str, ...] = setting(
        (),
        help="web origin whose pages may read answers (CORS; default: none)",
        flag="allow-origin",
        metavar="ORIGIN",
    )
    tls_certfile: str | None = setting(
        None, help="certificate for HTTPS", metavar="PATH", needs=("tls_keyfile",)
    )
    tls_keyfile: str | None = setting(
        None, help="private key for HTTPS", metavar="PATH", needs=("tls_certfile",)
    )
    max_waiting: int = setting(
        1024,
        help="largest number of waiting requests; above it, status 429 is the answer to a request "
        "that would give its client more than an equal share",
        least=0,
    )
    client_by: Literal["address", "user"] = setting(
        "address",
        help="clients take turns; whose a request is where there are not several API keys: the "
        "address that it comes from (of IPv6 the first 64 bits), or its field user, for a server "
        "behind a proxy that sets the field",
    )
    strict_fields: bool = setting(
        False,
        help="refuse a request with an unknown field, or with a tool or an item that cannot be "
        "used, in place of leaving it out and naming it in the header Warning",
    )
    stream_share: float = setting(
        STREAM_SHARE,
        help="largest fraction of time spent on sending streamed tokens; with many streams, "
        "several tokens are sent together to stay below it (1: every token is sent at once)",
        above=0,
        most=1,
    )
    max_request_bytes: int = setting(4 << 20, help="largest request body", least=1, unit="bytes")
    allow_image_urls: bool = setting(
        False,
        help="images: fetch those that requests name by an http or https URL, from public hosts "
        "alone; without it they have to be data: URLs",
    )
    image_url_timeout_s: float = setting(
        10.0,
        help="images: seconds that fetching one may take",
        above=0,
        below=math.inf,
        needs=("allow_image_urls",),
    )
    max_logprobs_bytes: int = setting(
        512 << 20,
        help="largest memory for the log-probabilities of a request, 128 bytes for each token and "
        "for each alternative; a request that may need more is refused",
        least=0,
        unit="bytes",
    )
    request_timeout_s: float = setting(
        60.0,
        help="seconds that a client may take to send a request",
        least=0,
        below=math.inf,
    )
    drain_timeout_s: float = setting(
        30.0,
        help="seconds that running requests may continue after SIGTERM",
        least=0,
        below=math.inf,
    )
    kv_events: str | None = setting(
        None,
        help="KV events: publish changes of the prefix cache here (ZeroMQ), such as tcp://*:5557",
        metavar="ADDRESS",
    )
    kv_replay: str | None = setting(
        None,
        help="KV events: resend missed ones to subscribers that ask here (ZeroMQ)",
        metavar="ADDRESS",
        needs=("kv_events",),
    )
    access_log: str | None = setting(
        None, help="write one JSON line for each request to this file; -: stdout", metavar="PATH"
    )

    def __post_init__(self) -> None:
        names: object = self.served_model_name
        if isinstance(names, str):  # of a caller in Python
            object.__setattr__(self, "served_model_name", (names,))
        check_settings(self)
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", _template(self.chat_template))
        for number, key in enumerate(self.api_keys, 1):
            if _KEY.fullmatch(key) is None:  # the key is a secret: it is not shown
                raise UsageError(
                    f"--api-key (or ${_API_KEY}): wanted printable ASCII characters without "
                    f"spaces, which a header can hold, got others in key number {number}"
                )
        for origin in self.allow_origins:
            if _ORIGIN.fullmatch(origin) is None:
                raise UsageError(
                    f"--allow-origin: wanted * or an origin as browsers send it, in lower case and "
                    f"without a path, such as http://localhost:3000, got {shown(origin)}"
                )

    @property
    def template_options(self) -> dict[str, object]:
        """What every conversation's template is told. O(1)."""
        return {} if self.chat_template is None else {"chat_template": self.chat_template}

    def sampling_defaults(self, engine: "EngineCore") -> dict[str, object]:
        """Return the sampling parameters of requests that do not give them. O(1).

        Raises:
            ModelNotFoundError: a value of the model's generation_config.json is not allowed.
        """
        plain: dict[str, object] = {"temperature": 1.0}
        if self.generation_config == "vllm":
            return plain
        loaded = import_module("model.load.generation")  # Transformers is there with an engine
        model: Any = engine.model  # as loaded, with its network
        found: dict[str, object] = loaded.sampling_defaults(model.network)
        return plain | found

    def check_template(self, engine: "EngineCore | None" = None) -> None:
        """Refuse a chat template that no conversation passes. O(template).

        Args:
            engine: of the model; None: it is not loaded yet, and its own template not checked.

        Raises:
            UsageError: the template that is given is broken.
            ModelNotFoundError: the model's own is, and none is given.
        """
        loaded = import_module("model.load.chat_template")  # Transformers is there with an engine
        try:
            if self.chat_template is not None:
                loaded.ChatTemplate(self.chat_template).check()
            elif engine is not None:
                engine.model.codec.check_template()
        except InvalidArgumentError as error:
            if self.chat_template is not None:
                raise UsageError(f"--chat-template: the template is broken: {error}") from error
            raise ModelNotFoundError(
                f"model: its chat template is broken: {error}; --chat-template replaces it"
            ) from error

    def check_adapters(self, lora: Sequence[str]) -> None:
        """Refuse LoRA adapters that no request could name. O(adapters).

        Args:
            lora: each `NAME=PATH`.

        Raises:
            UsageError: one has a name of the model.
        """
        for name in {text.partition("=")[0] for text in lora} & set(self.served_model_name):
            raise UsageError(
                f"--lora: wanted names other than the model's, got {shown(name)}; "
                "--served-model-name changes that"
            )


def _template(said: str) -> str:
    """A chat template that is given as such, or as a file.

    Raises:
        UsageError: the file cannot be read.
    """
    if "{" in said or "\n" in said:
        return said
    try:
        return Path(said).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--chat-template: {shown(said)} cannot be read: {why}") from error


def keys_of_environment() -> tuple[str, ...]:
    """The API keys of a server that was started without `--api-key`. O(1).

    Raises:
        UsageError: the environment variable is set and empty.
    """
    key = os.environ.get(_API_KEY)
    if key is None:
        return ()
    if not key:
        raise UsageError(f"${_API_KEY} is set and empty: unset it, or pass --api-key")
    return (key,)
