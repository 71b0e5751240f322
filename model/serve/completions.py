"""`/v1/completions`: prompts to texts.

Does not know: how tokens come about, how an answer is sent (`generation.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from fastapi import APIRouter, Request, Response

from model.control.request import FinishReason, SampledToken
from model.errors import InvalidArgumentError
from model.serve.answers import Completion, Usage
from model.serve.errors import api_error
from model.serve.generation import Asked, EventForm, answer, reason_json, with_warning
from model.serve.large_bodies import LargeBodyRoute
from model.serve.logprobs import quoted
from model.serve.protocol import CompletionRequest
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
            "id": service.new_id("cmpl"), "created": service.now(),
            "model": body.model or service.name,
        }  # fmt: skip
        super().__init__(body, service, head, (kind, kind))
        self._echoes = list(echoes)
        self._echoed: set[int] = set()
        self._tells_logprobs = body.logprobs is not None
        self._drops_output = body.max_tokens == 0
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}  # of each sample: characters of its tokens so far

    def begin(self, stream: TokenStream) -> str:
        del stream
        return ""

    def piece(self, delta: Delta, stream: TokenStream) -> Iterable[str]:
        told = self._with_prompt(delta, stream)
        if not (self._tells_logprobs or self._tells_ids or told.text or told.finish_reason):
            return ()
        reason = reason_json(told)  # before anything is written
        beside = self._ids(delta)
        if self._tells_ids and delta.sample not in self._begun:
            self._begun.add(delta.sample)
            beside += self._prompt_ids(stream, delta.sample)
        return chain((self._begin,), self._choice(told, reason, beside), (self._end(stream, told),))

    def whole(self, deltas: Sequence[Delta], stream: TokenStream) -> Iterator[str]:
        def choice(delta: Delta) -> Iterator[str]:
            beside = chain((self._ids(delta),), self._of_prompt(stream, delta.sample))
            told = self._with_prompt(delta, stream)
            return self._choice(told, reason_json(told), beside)

        return self._whole(map(choice, deltas), stream)

    def _choice(self, delta: Delta, reason: str, beside: Iterable[str]) -> Iterator[str]:
        """A choice, with further fields, in parts."""
        yield f'{{"index":{delta.sample},"text":{quoted(delta.text)},"finish_reason":{reason}'
        yield from beside
        yield ',"logprobs":'
        if not self._tells_logprobs:
            yield "null}"
            return
        offset = self._offsets.get(delta.sample, 0)
        yield from self._writer.of_completion(delta.tokens, offset)
        self._offsets[delta.sample] = offset + self._writer.length(delta.tokens)
        yield "}"

    def _usage(self, stream: TokenStream) -> Usage:
        found = super()._usage(stream)
        if self._drops_output:
            found.completion_tokens, found.total_tokens = 0, found.prompt_tokens
        return found

    def _with_prompt(self, delta: Delta, stream: TokenStream) -> Delta:
        """A piece as it is told: the first of a sample behind its prompt, where that is echoed.

        Nothing is left of the output where no token was asked for; one was drawn nevertheless.
        """
        if self._drops_output:
            is_over = delta.finish_reason is FinishReason.STOP
            reason = FinishReason.LENGTH if is_over else delta.finish_reason
            delta = delta._replace(text="", tokens=(), finish_reason=reason)
        if not self._echoes or delta.sample in self._echoed:
            return delta
        self._echoed.add(delta.sample)
        per_prompt = len(stream.samples) // len(self._echoes)
        text, tokens = self._echoes[delta.sample // per_prompt], delta.tokens
        if self._tells_logprobs:
            request = stream.samples[delta.sample].request
            tokens = (SampledToken(request.tokens[0]), *request.prompt_logprobs, *tokens)
        return delta._replace(text=text + delta.text, tokens=tokens)


def completions(service: Service) -> APIRouter:
    """The routes. O(1)."""
    router = APIRouter(route_class=LargeBodyRoute)

    @router.post("/v1/completions", response_model=Completion)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        body.check(is_strict=service.config.strict_fields)
        service.check_model(body.model)
        service.serving()
        prompts = body.prompts
        echoes = [
            prompt if isinstance(prompt, str) else await service.decode(prompt)
            for prompt in (prompts if body.echo else ())
        ]
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        names = {"grammar": body.grammar_field}
        try:
            # Without output too a step is needed, and draws a token.
            params = body.sampling(
                service.sampling_defaults,
                max_tokens if max_tokens or not body.echo else 1,
                body.logprobs,
                scores_prompt=bool(body.echo),
            )
        except InvalidArgumentError as error:
            raise api_error(error, names) from error
        first = body.submission("", params, service.adapter(body.model))
        asked = Asked(
            submissions=[replace(first, prompt=prompt) for prompt in prompts],
            streams=bool(body.stream),
            names=names,
        )
        response = await answer(request, service, asked, _Texts(body, service, echoes))
        return with_warning(response, body)

    return router
