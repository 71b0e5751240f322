"""`/v1/completions`: prompts to texts.

Does not know: how tokens come about, how an answer is sent (`generation.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from fastapi import APIRouter, Request, Response

from model.errors import InvalidArgumentError
from model.serve.errors import ApiError, api_error
from model.serve.generation import Asked, EventForm, answer, reason_json
from model.serve.logprobs import LogprobsWriter, quoted
from model.serve.protocol import Completion, CompletionRequest
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
            "id": service.new_id("cmpl"), "created": service.now(), "model": service.name,
        }  # fmt: skip
        super().__init__(body, head, (kind, kind))
        self._num_samples = body.num_samples
        self._echoes = list(echoes)
        self._echoed: set[int] = set()
        self._writer = LogprobsWriter(service.engine.engine.model.codec.decode)
        self._tells_logprobs = body.logprobs is not None
        self._offsets: dict[int, int] = {}  # of each sample: characters of its tokens so far

    def begin(self, stream: TokenStream) -> str:
        del stream
        return ""

    def piece(self, delta: Delta, stream: TokenStream) -> Iterable[str]:
        reason = reason_json(delta)
        text = self._echo(delta.sample) + delta.text if self._echoes else delta.text
        end = self._end(stream, delta)
        if self._tells_logprobs:
            return chain((self._begin,), self._choice(delta, text, reason), (end,))
        if text or delta.finish_reason is not None:
            return (f"{self._begin}{self._plain(delta, text, reason)}{end}",)
        return ()

    def whole(self, deltas: Sequence[Delta], stream: TokenStream) -> Iterator[str]:
        choices = (
            self._choice(each, self._echo(each.sample) + each.text, reason_json(each))
            for each in deltas
        )
        return self._whole(choices, stream)

    def _plain(self, delta: Delta, text: str, reason: str) -> str:
        """A choice without log-probabilities."""
        return (
            f'{{"index":{delta.sample},"text":{quoted(text)},"logprobs":null,'
            f'"finish_reason":{reason}}}'
        )

    def _choice(self, delta: Delta, text: str, reason: str) -> Iterator[str]:
        if not self._tells_logprobs:
            yield self._plain(delta, text, reason)
            return
        yield f'{{"index":{delta.sample},"text":{quoted(text)},"finish_reason":{reason},"logprobs":'
        offset = self._offsets.get(delta.sample, 0)
        yield from self._writer.of_completion(delta.tokens, offset)
        self._offsets[delta.sample] = offset + self._writer.length(delta.tokens)
        yield "}"

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
                400,
                "echo: cannot be combined with logprobs; prompt tokens have none here",
                param="echo",
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
        adapter = service.adapter(body.model)
        asked = Asked(
            submissions=[body.submission(prompt, params, adapter) for prompt in prompts],
            streams=bool(body.stream),
            names=names,
        )
        return await answer(request, service, asked, _Texts(body, service, echoes))

    return router
