"""Log-probabilities are bounded when they are asked for, and written in pieces."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.control.request import FinishReason, SampledToken
from model.serve import generation, logprobs
from model.serve.answers import ChatCompletion, Completion
from model.serve.chat import _Messages
from model.serve.completions import _Texts
from model.serve.generation import _EventStream
from model.serve.protocol import ChatRequest, CompletionRequest
from model.serve.reading import Form, Reader
from model.serve.reasoning import CountingReader
from model.tiny import CHECKPOINT_DIR
from model.token_stream import Delta

NUM_PROMPTS, NUM_TOKENS, NUM_TOPS = 16, 100, 20
TOKEN = SampledToken(7, -1.5, tuple((number, -1.5 - number) for number in range(NUM_TOPS)))
DELTAS = [
    Delta(number, "x", (TOKEN,) * NUM_TOKENS, FinishReason.LENGTH) for number in range(NUM_PROMPTS)
]
MOST_AT_ONCE = 2 * logprobs.PIECE_ENTRIES + generation._TURN_CHARACTERS // 10
"""Entries: what a turn has characters for, of 10 each, and a piece on either side."""


def form_of(kind):
    codec = SimpleNamespace(decode=lambda ids: "".join(f"<{each}>" for each in ids))
    engine = SimpleNamespace(model=SimpleNamespace(codec=codec))
    service = SimpleNamespace(
        engine=SimpleNamespace(engine=engine), name="m", new_id=lambda kind: kind, now=lambda: 7
    )
    if kind == "chat":
        asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        readers = [CountingReader(Reader(Form(), str))] * NUM_PROMPTS
        return _Messages(ChatRequest.model_validate(asked), service, readers)
    return _Texts(CompletionRequest.model_validate({"prompt": "x", "logprobs": 20}), service, [])


@pytest.fixture
def entries(monkeypatch):
    """How many entries were written in each turn of the event loop."""
    turns = [0]
    number = logprobs._number

    def counted(value):
        turns[-1] += 1
        return number(value)

    monkeypatch.setattr(logprobs, "_number", counted)
    return turns


async def beside(turns, coroutine):
    """Run something beside a task that is there in every turn of the loop."""

    async def tick():
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    try:
        return await coroutine
    finally:
        ticking.cancel()


class Finished:
    """A stream of which all has come."""

    samples = range(NUM_PROMPTS)
    num_prompt_tokens = num_output_tokens = num_cached_tokens = 1
    is_over = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    def close(self):
        pass

    async def news(self):
        self.is_over = True
        return DELTAS


async def written(form):
    return b"".join([part async for part in generation._in_turns(form.whole(DELTAS, Finished()))])


async def streamed(form):
    bodies = []

    async def send(message):
        bodies.append(message.get("body", b""))

    await _EventStream(Finished(), form, {})._send_events(send)
    return b"".join(bodies)


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("write", [written, streamed])
def test_a_large_answer_gives_others_their_turn_every_few_thousand_entries(kind, write, entries):
    content = asyncio.run(beside(entries, write(form_of(kind))))
    assert sum(entries) == NUM_PROMPTS * NUM_TOKENS * (1 + NUM_TOPS)
    assert max(entries) <= MOST_AT_ONCE < sum(entries) / 3
    if write is written:
        answer = {"completion": Completion, "chat": ChatCompletion}[kind]
        assert len(answer.model_validate_json(content).choices) == NUM_PROMPTS
    else:
        events = [part for part in content.decode().split("\n\n") if part]
        assert events[-1] == "data: [DONE]"
        assert len([json.loads(each.removeprefix("data: ")) for each in events[:-1]]) >= NUM_PROMPTS


def test_the_count_of_turns_notices_an_answer_that_is_written_at_once(monkeypatch, entries):
    async def at_once(parts):
        yield "".join(parts).encode()

    monkeypatch.setattr(generation, "_in_turns", at_once)
    asyncio.run(beside(entries, written(form_of("chat"))))
    assert max(entries) == sum(entries) > MOST_AT_ONCE


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_of_several_pieces_is_whole(http, path):
    asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    if path == "/v1/completions":
        asked |= {"prompt": ["A tuple is"] * 4, "logprobs": 20}
    else:
        asked |= {"messages": [{"role": "user", "content": "x"}], "n": 4}
        asked |= {"logprobs": True, "top_logprobs": 20}
    answer = http.post(path, json=asked)
    assert answer.headers["transfer-encoding"] == "chunked"
    for choice in answer.json()["choices"]:
        told = choice["logprobs"]
        tops = told["top_logprobs"] if path == "/v1/completions" else told["content"]
        assert len(tops) == 60
    assert answer.json()["usage"]["completion_tokens"] == 240


@pytest.mark.parametrize(
    ("path", "asked", "named"),
    [
        ("/v1/completions", {"prompt": ["a"] * 300, "logprobs": 20, "max_tokens": 2000},
         "logprobs"),
        ("/v1/completions", {"prompt": ["a"] * 3, "n": 100, "logprobs": 20, "max_tokens": 2000},
         "logprobs"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "x"}], "n": 128, "logprobs": True,
          "top_logprobs": 20, "stream": True},
         "top_logprobs"),
    ],
)  # fmt: skip
def test_more_log_probabilities_than_an_answer_may_keep_are_refused(http, path, asked, named):
    refused = http.post(path, json=asked)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, named), error
    assert error["message"].startswith(f"{named}: this answer may need")
    assert "--max-logprobs-bytes" in error["message"]


def test_an_entry_takes_no_more_memory_than_is_counted_for_it():
    """As a step makes them: an integer and a number in a tuple, which a list keeps."""
    values, ids = [-1.0 * number for number in range(1, 22)], list(range(1000, 1020))
    tops = tuple(zip(ids, values[1:], strict=True))
    token = SampledToken(10_000, values[0], tops)
    parts = [token, tops, *tops, *ids, *values, token.token_id]
    size = sum(part.__sizeof__() + 16 for part in parts if not isinstance(part, int | float))
    size += sum(part.__sizeof__() for part in parts if isinstance(part, int | float))
    assert size <= 21 * logprobs.ENTRY_BYTES


def echoed(http, prompt, **fields):
    body = {"prompt": prompt, "temperature": 0, "echo": True, "logprobs": 2, **fields}
    return http.post("/v1/completions", json=body)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("prompt", ["A tuple is returned", [5, 6, 7, 8]])
def test_an_echo_tells_the_log_probabilities_of_the_prompt(http, llm_logprobs, prompt, max_tokens):
    answer = echoed(http, prompt, max_tokens=max_tokens).json()
    (choice,), usage = answer["choices"], answer["usage"]
    wanted = llm_logprobs(prompt)
    count = len(wanted)
    told = choice["logprobs"]
    assert usage["completion_tokens"] == max_tokens
    assert usage["total_tokens"] == count + max_tokens
    assert choice["finish_reason"] == "length"
    assert [len(values) for values in told.values()] == [count + max_tokens] * 4
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:count] == pytest.approx(wanted[1:], abs=1e-3)
    assert all(value <= 0 for value in told["token_logprobs"][1:])
    assert all(1 <= len(tops) <= 2 for tops in told["top_logprobs"][1:])
    assert "".join(told["tokens"]) == choice["text"]
    sizes = [len(text) for text in told["tokens"]]
    assert told["text_offset"] == [sum(sizes[:place]) for place in range(len(sizes))]


def test_streams_and_samples_tell_the_prompts_log_probabilities_once_each(http):
    whole = echoed(http, ["A tuple is", "A list"], max_tokens=2, n=2).json()
    with http.stream(
        "POST",
        "/v1/completions",
        json={
            "prompt": ["A tuple is", "A list"], "temperature": 0, "echo": True, "logprobs": 2,
            "max_tokens": 2, "n": 2, "stream": True,
        },
    ) as stream:  # fmt: skip
        events = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    told = {}
    for event in events:
        for choice in json.loads(event)["choices"]:
            told.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
    assert told == {one["index"]: one["logprobs"]["tokens"] for one in whole["choices"]}


def test_no_tokens_without_an_echo_is_still_refused(http):
    body = {"prompt": "A tuple is", "max_tokens": 0}
    answer = http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


@pytest.fixture(scope="module")
def llm_logprobs():
    network = AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT_DIR)

    def of(prompt):
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        with torch.inference_mode():
            scores = network(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return [None, *scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()]

    return of
