"""A conversation with a network that keeps states: each turn finds the one before."""

import httpx
import pytest

from model.async_engine import AsyncEngine
from model.serve.config import ServeConfig
from tests.model.recurrent_networks import engine_of
from tests.model.serve.conftest import DEADLINE_S, Served

KIND = "Qwen3_5TextConfig"


@pytest.fixture(scope="module")
def http():
    with (
        Served(AsyncEngine(lambda: engine_of(KIND)), ServeConfig(port=0)) as running,
        httpx.Client(base_url=running.url, timeout=DEADLINE_S) as client,
    ):
        yield client


def ask(http, messages):
    """The number of tokens of the prompt, and how many of them were found."""
    body = {"messages": messages, "max_tokens": 5, "temperature": 0}
    usage = http.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_each_turn_finds_all_blocks_before_the_last_answer(http):
    block_size = engine_of(KIND).config.block_size
    messages, before = [], 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"question {turn} " * 3})
        length, found = ask(http, messages)
        assert found >= before // block_size * block_size
        # The template opens the answer in another way than it writes one that was given.
        before = length - len("assistant:")
        messages.append({"role": "assistant", "content": f"answer {turn}"})


def test_another_question_after_the_same_conversation_finds_all_blocks_before_it(http):
    block_size = engine_of(KIND).config.block_size
    past = [{"role": "system", "content": "Be brief, and always be kind to everyone. " * 2}]
    ask(http, [*past, {"role": "user", "content": "a question of some length, which is one"}])
    _, found = ask(http, [*past, {"role": "user", "content": "some other question"}])
    assert found == len(f"system: {past[0]['content']}\n") // block_size * block_size > 0
