"""Text from a model in three lines, under the names that vLLM's examples use.

    from model import LLM, SamplingParams

    outputs = LLM("model/tiny").generate(["A list is"], SamplingParams(max_tokens=8))
    print(outputs[0].outputs[0].text)

Decides: what of vLLM's `LLM`, `RequestOutput` and `CompletionOutput` there is, and what it is
called here. Other settings of an engine have the names of fields of `EngineConfig`.

Does not know: how tokens come about.
"""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from model.cli.bars import bar
from model.cli.options import ModelOptions
from model.cli.start import make_engine
from model.control.config import EngineConfig
from model.control.images import PromptImages, take_images
from model.control.params import SamplingParams
from model.control.request import Request, SampledToken
from model.control.settings import check_settings
from model.control.submission import Prompt, Submission, salted
from model.engine import Engine
from model.errors import InvalidArgumentError, shown
from model.load.loader import load_codec

_ALIASES = {"enforce_eager": "eager", "gpu_memory_utilization": "kv_memory_fraction"}
_SETTINGS = frozenset(field.name for field in dataclasses.fields(EngineConfig))

Chat = Sequence[Mapping[str, object]]
PromptLike = str | Sequence[int] | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token.

    Attributes:
        logprob: the logarithm of its probability.
        rank: its place among the most likely tokens, from 1; None: it is not among those returned.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: its number among those of its prompt.
        text: cut before a stop string.
        token_ids: all that were drawn.
        finish_reason: "length", "stop" or "error".
        error: the error that ended it with "error", or None.
        logprobs: for each token the likely ones in its place, itself among them; None: not wanted.
        cumulative_logprob: of all tokens together; None: not wanted.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and what came of it.

    Attributes:
        request_id: the engine's number of it.
        prompt: its text; None: it was given as tokens.
        prompt_token_ids: its tokens.
        outputs: its continuations.
        num_cached_tokens: prompt tokens found in the cache.
        prompt_logprobs: for each prompt token the likely ones in its place, itself among them; None
            for the first token, and where they were not requested.
        finished: True, always.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True


class LLM:
    """A model, loaded, that continues prompts. When it is gone, tiers store the rest, and close.

    Args:
        model: a folder, or an id on the hub.
        backend: the attention kernels; "auto": those for this machine.
        dtype: of the weights; "auto": float32 on a CPU, bfloat16 on a GPU.
        settings: fields of `EngineConfig`; `enforce_eager` and `gpu_memory_utilization` are
            taken for `eager` and `kv_memory_fraction`.

    Raises:
        ModelError: there is no such model, it does not run here, or a setting is none.
    """

    def __init__(
        self, model: str, *, backend: str = "auto", dtype: str = "auto", **settings: object
    ) -> None:
        said = {_ALIASES.get(name, name): value for name, value in settings.items()}
        for name in said:
            if name not in _SETTINGS:
                raise InvalidArgumentError(f"{name}: EngineConfig has no such field")
        options = ModelOptions(model=str(model), backend=backend, dtype=dtype)  # type: ignore[arg-type]
        check_settings(options)
        config = EngineConfig(**said)  # type: ignore[arg-type]  # it checks them
        self.engine: Engine = make_engine(options, config)
        weakref.finalize(self, self.engine.end)  # at the end of the process too

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        lora_name: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts; what came of each, in their order.

        Args:
            prompts: a text, or several texts or lists of token ids; or vLLM's dictionaries, such as
                `{"prompt": "<image>Who?", "multi_modal_data": {"image": [...]}}`: images of Pillow,
                paths or bytes, and in the text what the model has for each.
            sampling_params: of all of them, or one for each; None: greedy, with the default length.
            cache_salt: cached prefixes are shared only between prompts of the same salt.
            lora_name: the LoRA adapter of `lora` that computes them; None: none does.
            use_tqdm: True: draw a bar, if stderr is a terminal.

        Raises:
            InvalidArgumentError: one of them cannot be run; none is then.
        """
        given = [prompts] if isinstance(prompts, str | Mapping) else prompts
        each = [self._read(prompt) for prompt in given]  # type: ignore[arg-type]  # of any form
        params = sampling_params or SamplingParams()
        every = [params] * len(each) if isinstance(params, SamplingParams) else list(params)
        if len(every) != len(each):
            raise InvalidArgumentError(
                f"sampling_params: wanted {len(each)} of them, got {len(every)}"
            )
        engine = self.engine
        groups: list[list[Request]] = []
        texts: dict[int, list[str]] = {}
        tokens: dict[int, list[SampledToken]] = {}
        try:
            namespace = salted(cache_salt, lora_name)
            for prompt, one in zip(each, every, strict=True):
                asked = Submission(
                    prompt.prompt,
                    one,
                    namespace=namespace,
                    images=prompt.images,
                )
                groups.append(engine.submit(asked))
            texts = {r.request_id: [] for group in groups for r in group}
            tokens = {number: [] for number in texts}
            with bar("generated", len(texts), is_wanted=use_tqdm) as advance:
                while engine.has_unfinished:
                    for output in engine.step():
                        texts[output.request.request_id].append(output.take_text())
                        tokens[output.request.request_id] += output.tokens
                        advance(output.request.is_finished)
        finally:
            for group in groups:
                for request in group:
                    engine.abort(request)
        return [
            RequestOutput(
                request_id=str(group[0].request_id),
                prompt=prompt.prompt if isinstance(prompt.prompt, str) else prompt.text,
                prompt_token_ids=group[0].prompt_tokens,
                outputs=[
                    self._output(r, "".join(texts[r.request_id]), tokens[r.request_id])
                    for r in group
                ],
                num_cached_tokens=group[0].num_cached_tokens,
                prompt_logprobs=self._prompt_logprobs(group[0]),
            )
            for prompt, group in zip(each, groups, strict=True)
        ]

    def _read(self, prompt: "PromptLike | _Read") -> "_Read":
        """Return a prompt of any form, and its images."""
        if isinstance(prompt, _Read):
            return prompt
        if not isinstance(prompt, Mapping):
            return _Read(prompt)
        text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
        data = prompt.get("multi_modal_data") or {}
        known = {"prompt", "multi_modal_data"} if tokens is None else {"prompt_token_ids"}
        if unknown := sorted(prompt.keys() - known):
            raise InvalidArgumentError(f"prompts: wanted {' and '.join(known)}, got {unknown[0]}")
        if isinstance(tokens, Sequence):
            return _Read(tokens)
        if not isinstance(text, str) or not isinstance(data, Mapping) or data.keys() - {"image"}:
            raise InvalidArgumentError(
                f"prompts: wanted a text, and image alone in multi_modal_data, got {shown(prompt)}"
            )
        found = data.get("image", ())
        images = found if isinstance(found, list | tuple) else [found]
        if not images:
            return _Read(text)
        return _Read(*self.engine.model.images.encode(text, images, self.engine.config), text)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, of Transformers, made anew. Reads its files."""
        return load_codec(self.engine.model.name).tokenizer

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        if request.params.prompt_logprobs is None:
            return None
        return [None, *map(self._logprobs, request.prompt_logprobs)]

    def _output(
        self, request: Request, text: str, tokens: Sequence[SampledToken]
    ) -> CompletionOutput:
        asks = request.params.logprobs is not None
        reason = request.finish_reason
        return CompletionOutput(
            index=request.sample,
            text=text,
            token_ids=[token.token_id for token in tokens],
            finish_reason=None if reason is None else reason.value,
            logprobs=[self._logprobs(token) for token in tokens] if asks else None,
            cumulative_logprob=sum([token.logprob or 0.0 for token in tokens]) if asks else None,
            error=None if request.error is None else str(request.error),
        )

    def _logprobs(self, token: SampledToken) -> dict[int, Logprob]:
        """Return the likely tokens in the place of one, itself included."""
        decode = self.engine.model.codec.decode
        told = {
            number: Logprob(logprob, rank, decode([number]))
            for rank, (number, logprob) in enumerate(token.top_logprobs, 1)
        }
        own = Logprob(token.logprob or 0.0, None, decode([token.token_id]))
        return {token.token_id: told.get(token.token_id, own), **told}

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        lora_name: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, by the model's chat template; as `generate`.

        A content may be a list of OpenAI's parts; an `image_url` is a `data:` URL.
        """
        first = messages[0] if messages else None
        chats = [messages] if isinstance(first, Mapping) else messages
        return self.generate(
            [_Read(*self.engine.encode_chat(*take_images(chat))) for chat in chats],  # type: ignore[arg-type]  # one or the other
            sampling_params,
            cache_salt=cache_salt,
            lora_name=lora_name,
            use_tqdm=use_tqdm,
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """A prompt, its images, and its text where that is not the prompt."""

    prompt: Prompt
    images: PromptImages | None = None
    text: str | None = None
