"""`/v1/chat/completions`: conversations to the assistant's next message.

Decides: that a conversation becomes a prompt by the model's own chat template, or by the plain one
of `loader.py` where it has none; and that an answer may be as long as the model allows where nobody
says.

Does not know: how tokens come about, how an answer is sent (`generation.py`).
"""

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from model.errors import InvalidArgumentError
from model.serve.errors import ApiError, api_error
from model.serve.generation import Asked, EventForm, answer, quoted, reason_name, usage
from model.serve.logprobs import chat_logprobs
from model.serve.protocol import ChatChoice, ChatCompletion, ChatLogprobs, ChatMessage, ChatRequest
from model.serve.service import Service
from model.token_stream import Delta, TokenStream


class _Messages(EventForm):
    """How the assistant's messages are written.

    Args:
        body: what was asked.
        service: who is asked.
    """

    def __init__(self, body: ChatRequest, service: Service) -> None:
        head = {"id": service.new_id("chatcmpl"), "created": service.now(), "model": service.name}
        super().__init__(head, "chat.completion.chunk", includes_usage=body.includes_usage)
        self._num_samples = body.num_samples
        self._decode = service.engine.engine.model.codec.decode
        self._tells_logprobs = bool(body.logprobs)

    def begin(self) -> str:
        return "".join(
            f'{self._begin}{{"index":{number},"delta":{{"role":"assistant","content":""}},'
            f'"logprobs":null,"finish_reason":null}}{self._end}'
            for number in range(self._num_samples)
        )

    def piece(self, delta: Delta) -> str:
        reason = reason_name(delta)
        logprobs = self._logprobs(delta)
        if not delta.text and reason is None and logprobs is None:
            return ""
        told = "null" if logprobs is None else logprobs.model_dump_json(ensure_ascii=True)
        why = "null" if reason is None else quoted(reason)
        said = f'{{"content":{quoted(delta.text)}}}' if delta.text else "{}"
        return (
            f'{self._begin}{{"index":{delta.sample},"delta":{said},'
            f'"logprobs":{told},"finish_reason":{why}}}{self._end}'
        )

    def whole(self, deltas: Sequence[Delta], stream: TokenStream) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=delta.sample,
                message=ChatMessage(content=delta.text),
                logprobs=self._logprobs(delta),
                finish_reason=reason_name(delta),
            )
            for delta in deltas
        ]
        return ChatCompletion(**self._head, choices=choices, usage=usage(stream))  # type: ignore[arg-type]

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(self._decode, delta.tokens) if self._tells_logprobs else None


def chat(service: Service) -> APIRouter:
    """The routes. O(1)."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def talk(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        body.check()
        service.check_model(body.model)
        service.serving()
        prompt = await service.encode_chat(
            body.messages,
            opens_answer=body.add_generation_prompt is not False,
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
        asked = Asked(
            submissions=[body.submission(prompt, params)],
            streams=bool(body.stream),
            names=names,
        )
        return await answer(request, service.engine, asked, _Messages(body, service))

    return router
