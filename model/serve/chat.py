"""`/v1/chat/completions`: conversations to the assistant's next message.

Decides: that a conversation becomes a prompt by the model's own chat template, or by the plain one
of `loader.py` where it has none; and that without a limit an answer may be as long as the model
allows.

Does not know: how tokens come about, how an answer is sent (`generation.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from fastapi import APIRouter, Request, Response

from model.errors import InvalidArgumentError
from model.serve.errors import ApiError, api_error
from model.serve.generation import Asked, EventForm, answer, reason_json, with_warning
from model.serve.logprobs import LogprobsWriter, quoted
from model.serve.protocol import ChatCompletion, ChatRequest
from model.serve.service import Service
from model.token_stream import Delta, TokenStream


class _Messages(EventForm):
    """How the assistant's messages are written.

    Args:
        body: what was asked.
        service: who is asked.
    """

    def __init__(self, body: ChatRequest, service: Service) -> None:
        head = {
            "id": service.new_id("chatcmpl"), "created": service.now(),
            "model": body.model or service.name,
        }  # fmt: skip
        super().__init__(body, head, ("chat.completion", "chat.completion.chunk"))
        self._num_samples = body.num_samples
        self._writer = LogprobsWriter(service.engine.engine.model.codec.decode)
        self._tells_logprobs = bool(body.logprobs)

    def begin(self, stream: TokenStream) -> str:
        said = '"delta":{"role":"assistant","content":""}'
        firsts = [Delta(number, "", (), None) for number in range(self._num_samples)]
        return "".join(
            f"{self._begin}{self._plain(each, said, 'null')}{self._end(stream, each)}"
            for each in firsts
        )

    def piece(self, delta: Delta, stream: TokenStream) -> Iterable[str]:
        reason = reason_json(delta)
        said = f'"delta":{{"content":{quoted(delta.text)}}}' if delta.text else '"delta":{}'
        end = self._end(stream, delta)
        if self._tells_logprobs:
            return chain((self._begin,), self._choice(delta, said, reason), (end,))
        if delta.text or delta.finish_reason is not None:
            return (f"{self._begin}{self._plain(delta, said, reason)}{end}",)
        return ()

    def whole(self, deltas: Sequence[Delta], stream: TokenStream) -> Iterator[str]:
        choices = (
            self._choice(
                each,
                f'"message":{{"role":"assistant","content":{quoted(each.text)}}}',
                reason_json(each),
            )
            for each in deltas
        )
        return self._whole(choices, stream)

    def _plain(self, delta: Delta, said: str, reason: str) -> str:
        """A choice without log-probabilities."""
        return f'{{"index":{delta.sample},{said},"logprobs":null,"finish_reason":{reason}}}'

    def _choice(self, delta: Delta, said: str, reason: str) -> Iterator[str]:
        if not self._tells_logprobs:
            yield self._plain(delta, said, reason)
            return
        yield f'{{"index":{delta.sample},{said},"finish_reason":{reason},"logprobs":'
        yield from self._writer.of_chat(delta.tokens)
        yield "}"


def chat(service: Service) -> APIRouter:
    """The routes. O(1)."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def talk(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        body.check(is_strict=service.config.strict_fields)
        service.check_model(body.model)
        service.serving()
        prompt = await service.encode_chat(
            body.messages,
            opens_answer=body.opens_answer,
            options=body.chat_template_kwargs,
        )
        max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
        if max_tokens is None:
            max_tokens, name = body.max_tokens, "max_tokens"
        if max_tokens is None:
            max_tokens = max(1, service.engine.engine.max_model_len - len(prompt))
        names = {
            "prompt": "messages",
            "max_tokens": name,
            "logprobs": "top_logprobs",
            "grammar": body.grammar_field,
        }
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: wanted with logprobs alone", param="top_logprobs")
        try:
            params = body.sampling(max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
        except InvalidArgumentError as error:
            raise api_error(error, names) from error
        turns = await service.turns(body.messages, prompt, body.chat_template_kwargs)
        adapter = service.adapter(body.model)
        asked = Asked(
            submissions=[replace(body.submission(prompt, params, adapter), boundaries=turns)],
            streams=bool(body.stream),
            names=names,
        )
        response = await answer(request, service, asked, _Messages(body, service))
        return with_warning(response, body)

    return router
