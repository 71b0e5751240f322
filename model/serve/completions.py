"""`/v1/completions`: prompts to texts.

Does not know: how tokens come about, how an answer is sent (`generation.py`).
"""

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from model.errors import InvalidArgumentError
from model.serve.errors import ApiError, api_error
from model.serve.generation import Asked, EventForm, answer, quoted, reason_name, usage
from model.serve.logprobs import completion_logprobs
from model.serve.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from model.serve.service import Service
from model.token_stream import Delta, TokenStream

_DEFAULT_MAX_TOKENS = 16


class _Texts(EventForm):
    """How completions are written.

    Args:
        body: what was asked.
        service: who is asked.
        echoes: the text before each answer, one a prompt; none: nothing.
    """

    def __init__(self, body: CompletionRequest, service: Service, echoes: Sequence[str]) -> None:
        kind = "text_completion"
        head = {
            "id": service.new_id("cmpl"),
            "object": kind,
            "created": service.now(),
            "model": service.name,
        }
        super().__init__(head, kind, includes_usage=body.includes_usage)
        self._num_samples = body.num_samples
        self._echoes = list(echoes)
        self._echoed: set[int] = set()
        self._decode = service.engine.engine.model.codec.decode
        self._tells_logprobs = body.logprobs is not None
        self._offsets: dict[int, int] = {}  # of each sample: characters of its tokens so far

    def begin(self) -> str:
        return ""

    def piece(self, delta: Delta) -> str:
        reason = reason_name(delta)
        text = self._echo(delta.sample) + delta.text
        logprobs = self._logprobs(delta)
        if not text and reason is None and logprobs is None:
            return ""
        told = "null" if logprobs is None else logprobs.model_dump_json(ensure_ascii=True)
        why = "null" if reason is None else quoted(reason)
        return (
            f'{self._begin}{{"index":{delta.sample},"text":{quoted(text)},'
            f'"logprobs":{told},"finish_reason":{why}}}{self._end}'
        )

    def whole(self, deltas: Sequence[Delta], stream: TokenStream) -> Completion:
        choices = [
            CompletionChoice(
                index=delta.sample,
                text=self._echo(delta.sample) + delta.text,
                logprobs=self._logprobs(delta),
                finish_reason=reason_name(delta),
            )
            for delta in deltas
        ]
        return Completion(**self._head, choices=choices, usage=usage(stream))  # type: ignore[arg-type]

    def _logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if not self._tells_logprobs:
            return None
        offset = self._offsets.get(delta.sample, 0)
        told = completion_logprobs(self._decode, delta.tokens, offset)
        self._offsets[delta.sample] = offset + sum(map(len, told.tokens))
        return told

    def _echo(self, sample: int) -> str:
        """The prompt, before the first piece of each sample."""
        if not self._echoes or sample in self._echoed:
            return ""
        self._echoed.add(sample)
        return self._echoes[sample // self._num_samples]


def completions(service: Service) -> APIRouter:
    """The routes. O(1)."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=Completion)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        body.check()
        service.check_model(body.model)
        service.serving()
        prompts = body.prompts
        if body.echo and body.logprobs is not None:
            raise ApiError(
                400, "echo: wanted without logprobs: prompts have none here", param="echo"
            )
        echoes = [
            prompt if isinstance(prompt, str) else await service.decode(prompt)
            for prompt in (prompts if body.echo else ())
        ]
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        names = {"grammar": body.grammar_field}
        try:
            params = body.sampling(max_tokens, body.logprobs)
        except InvalidArgumentError as error:
            raise api_error(error, names) from error
        asked = Asked(
            submissions=[body.submission(prompt, params) for prompt in prompts],
            streams=bool(body.stream),
            names=names,
        )
        return await answer(request, service.engine, asked, _Texts(body, service, echoes))

    return router
