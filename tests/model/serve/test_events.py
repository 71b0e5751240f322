"""An event of a stream, spelled by hand for speed, is the JSON that its model would give."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.control.request import FinishReason, SampledToken
from model.serve.answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from model.serve.chat import _Messages
from model.serve.completions import _Texts
from model.serve.protocol import ChatRequest, CompletionRequest
from model.serve.reading import Form, Reader
from model.serve.reasoning import CountingReader
from model.token_stream import Delta

NAME = 'a "model"\n\u2028'
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
chances = st.floats(-50, 0) | st.just(-math.inf)
tokens = st.builds(
    SampledToken,
    st.integers(0, 99),
    chances,
    st.lists(st.tuples(st.integers(0, 99), chances), max_size=2).map(tuple),
)
deltas = st.builds(
    Delta,
    st.integers(0, 3),
    texts,
    st.lists(tokens, max_size=3).map(tuple),
    st.sampled_from([None, FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORTED]),
)
pieces = st.lists(deltas, min_size=1, max_size=4)


def decode(ids):
    return "".join(f'<{each}"\u00e9\ud7ff>' for each in ids)


def named(token_id, logprob):
    text = decode([token_id])
    return TopLogprob(token=text, logprob=logprob, bytes=list(text.encode()))


def chat_logprobs(tokens):
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **named(token.token_id, token.logprob).model_dump(),
                top_logprobs=[named(*top) for top in token.top_logprobs],
            )
            for token in tokens
        ]
    )


def completion_logprobs(tokens, offset):
    texts = [decode([token.token_id]) for token in tokens]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[  # of two with one text the likelier, which comes first
            {decode([number]): value for number, value in reversed(token.top_logprobs)}
            for token in tokens
        ],
        text_offset=[offset + sum(map(len, texts[:number])) for number in range(len(texts))],
    )


READERS = [CountingReader(Reader(Form(), str))] * 4  # of answers that are text
LEFT_OUT = {"choices": {"__all__": {"message": {"reasoning_content", "tool_calls"}}}}
STREAM = SimpleNamespace(samples=[0], num_prompt_tokens=5, num_output_tokens=6, num_cached_tokens=4)
USAGE = Usage(
    prompt_tokens=5, completion_tokens=6, total_tokens=11,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
    completion_tokens_details=CompletionTokensDetails(reasoning_tokens=0),
)  # fmt: skip


@pytest.fixture(scope="module")
def service():
    codec = SimpleNamespace(decode=decode)
    engine = SimpleNamespace(model=SimpleNamespace(codec=codec))
    return SimpleNamespace(
        engine=SimpleNamespace(engine=engine),
        name=NAME,
        new_id=lambda kind: f"{kind}-1",
        now=lambda: 7,
    )


def told(event):
    """What a reader of server-sent events finds."""
    assert event.isascii()
    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    assert "\n" not in event[:-2]
    return json.loads(event.removeprefix("data: "))


def asked(kind, *, logprobs, usage, **fields):
    stream = {"stream": True, "stream_options": {"include_usage": usage}}
    return kind.model_validate({**fields, **stream, "logprobs": logprobs})


@given(pieces=pieces, logprobs=st.booleans(), usage=st.booleans())
def test_a_piece_of_a_completion(service, pieces, logprobs, usage):
    body = asked(CompletionRequest, prompt="x", logprobs=1 if logprobs else None, usage=usage)
    form = _Texts(body, service, [])
    offsets = [0] * 4
    for delta in pieces:
        found = None
        if logprobs:
            found = completion_logprobs(delta.tokens, offsets[delta.sample])
            offsets[delta.sample] += sum(map(len, found.tokens))
        event = "".join(form.piece(delta, STREAM))
        reason = delta.finish_reason and delta.finish_reason.value
        if not event:
            assert (delta.text, reason, found) == ("", None, None)
            continue
        choice = CompletionChoice(
            index=delta.sample, text=delta.text, logprobs=found, finish_reason=reason
        )
        whole = Completion(id="cmpl-1", created=7, model=NAME, choices=[choice])
        left_out = set() if usage else {"usage"}
        assert told(event) == json.loads(whole.model_dump_json(exclude=left_out))


@given(pieces=pieces, logprobs=st.booleans(), usage=st.booleans())
def test_a_piece_of_a_chat(service, pieces, logprobs, usage):
    messages = [{"role": "user", "content": "x"}]
    form = _Messages(
        asked(ChatRequest, messages=messages, logprobs=logprobs, usage=usage), service, READERS
    )
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": NAME}
    rest = {"usage": None} if usage else {}
    first = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": first, "logprobs": None, "finish_reason": None}
    assert told(form.begin(STREAM)) == {**head, "choices": [choice], **rest}
    for delta in pieces:
        found = json.loads(chat_logprobs(delta.tokens).model_dump_json() if logprobs else "null")
        event = "".join(form.piece(delta, STREAM))
        reason = delta.finish_reason and delta.finish_reason.value
        if not event:
            assert (delta.text, reason, found) == ("", None, None)
            continue
        said = {"content": delta.text} if delta.text else {}
        choice = {"index": delta.sample, "delta": said, "logprobs": found, "finish_reason": reason}
        assert told(event) == {**head, "choices": [choice], **rest}


@given(pieces=pieces, logprobs=st.booleans())
def test_a_whole_completion(service, pieces, logprobs):
    body = asked(CompletionRequest, prompt="x", logprobs=1 if logprobs else None, usage=False)
    deltas = [delta._replace(sample=number) for number, delta in enumerate(pieces)]
    choices = [
        CompletionChoice(
            index=delta.sample, text=delta.text,
            logprobs=completion_logprobs(delta.tokens, 0) if logprobs else None,
            finish_reason=delta.finish_reason and delta.finish_reason.value,
        )
        for delta in deltas
    ]  # fmt: skip
    whole = Completion(id="cmpl-1", created=7, model=NAME, choices=choices, usage=USAGE)
    found = "".join(_Texts(body, service, []).whole(deltas, STREAM))
    assert json.loads(found) == json.loads(whole.model_dump_json())


@given(pieces=pieces, logprobs=st.booleans())
def test_a_whole_chat(service, pieces, logprobs):
    messages = [{"role": "user", "content": "x"}]
    body = asked(ChatRequest, messages=messages, logprobs=logprobs, usage=False)
    deltas = [delta._replace(sample=number) for number, delta in enumerate(pieces)]
    choices = [
        ChatChoice(
            index=delta.sample, message=ChatMessage(content=delta.text),
            logprobs=chat_logprobs(delta.tokens) if logprobs else None,
            finish_reason=delta.finish_reason and delta.finish_reason.value,
        )
        for delta in deltas
    ]  # fmt: skip
    whole = ChatCompletion(id="chatcmpl-1", created=7, model=NAME, choices=choices, usage=USAGE)
    found = "".join(_Messages(body, service, READERS).whole(deltas, STREAM))
    assert json.loads(found) == json.loads(whole.model_dump_json(exclude=LEFT_OUT))
