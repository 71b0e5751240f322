"""The acceptance script: OpenAI's own client, against the tiny model."""

import json
import math
import re
import secrets

import openai
import pytest

GREEDY = {"model": "tiny", "prompt": "A tuple is", "max_tokens": 8, "temperature": 0}
LONG = "Return the number of items. " * 24
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "A tuple is"}],
    "max_completion_tokens": 8,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_greedy_completions_repeat_and_find_their_prompt_in_the_cache(client):
    first, second = (client.completions.create(**{**GREEDY, "prompt": LONG}) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    usage = second.usage
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 17 > 50


def test_a_salt_keeps_a_tenants_cache_apart(client):
    prompt = {**GREEDY, "prompt": "The salted text. " * 20}
    red, blue = secrets.token_hex(8), secrets.token_hex(8)  # a server elsewhere may know others
    found = [
        client.completions.create(
            **prompt, extra_body={"cache_salt": salt}
        ).usage.prompt_tokens_details.cached_tokens
        for salt in (red, blue, red)
    ]
    assert found[0] == found[1] == 0 < found[2]


def test_what_a_request_wants_kept_is_a_range_or_refused(client):
    prompt = {**GREEDY, "prompt": "The text that is to be kept. " * 8}
    said = client.completions.create(**prompt, extra_body={"retain": ["0:64@2/100", "0:"]})
    assert said.choices[0].text == client.completions.create(**prompt).choices[0].text
    for wrong in (["64"], ["5:5"], ["0:1@0"], ["0:1"] * 17, "0:1"):
        with pytest.raises(openai.BadRequestError, match="retain"):
            client.completions.create(**prompt, extra_body={"retain": wrong})


def test_streams_say_what_wholes_say(client):
    whole = client.completions.create(**GREEDY).choices[0].text
    pieces = list(
        client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == whole
    assert pieces[-1].usage.completion_tokens == 8
    assert all(piece.usage is None for piece in pieces[:-1])
    said = client.chat.completions.create(**CHAT).choices[0].message
    deltas = [
        piece.choices[0].delta for piece in client.chat.completions.create(**CHAT, stream=True)
    ]
    assert deltas[0].role == said.role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == said.content


def test_several_samples_are_drawn_apart_and_a_seed_repeats_them(client):
    drawn = {**GREEDY, "temperature": 1.5, "n": 3, "seed": 7, "max_tokens": 12}
    first, second = (
        [choice.text for choice in client.completions.create(**drawn).choices] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 3
    streamed = ["", "", ""]
    for piece in client.completions.create(**drawn, stream=True):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == first


def test_a_text_ends_before_its_stop_string(client):
    whole = client.completions.create(**{**GREEDY, "max_tokens": 24}).choices[0].text
    stop = whole[10:13]
    cut = client.completions.create(**{**GREEDY, "max_tokens": 24}, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 24
    pieces = client.completions.create(**{**GREEDY, "max_tokens": 24}, stop=[stop], stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == cut.choices[0].text


def test_prompts_are_lists_or_tokens_and_can_be_echoed(client, http):
    tokens = http.post("/tokenize", json={"prompt": "A tuple is"}).json()["tokens"]
    one = client.completions.create(**GREEDY).choices[0].text
    two = client.completions.create(**{**GREEDY, "prompt": ["A tuple is", "A list is"]})
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == one != two.choices[1].text
    assert client.completions.create(**{**GREEDY, "prompt": tokens}).choices[0].text == one
    listed = client.completions.create(**{**GREEDY, "prompt": [tokens, tokens]}, echo=True)
    assert [choice.text for choice in listed.choices] == [f"A tuple is{one}"] * 2


def test_log_probabilities_are_told_with_every_token(client):
    told = client.completions.create(**GREEDY, logprobs=2)
    logprobs = told.choices[0].logprobs
    assert "".join(logprobs.tokens) == told.choices[0].text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:number])) for number in range(8)]
    for own, tops in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert own == max(tops.values()) <= 0  # greedy
    streamed = [
        piece.choices[0].logprobs.token_logprobs
        for piece in client.completions.create(**GREEDY, logprobs=2, stream=True)
    ]
    assert [one for piece in streamed for one in piece] == logprobs.token_logprobs


def test_log_probabilities_of_a_chat_have_bytes_and_alternatives(client):
    content = (
        client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
        .choices[0]
        .logprobs.content
    )
    assert len(content) == 8
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert all(bytes(token.bytes).decode() == token.token for token in content)
    assert all(math.isfinite(token.logprob) for token in content)


def test_a_stream_of_a_chat_tells_the_log_probabilities_of_the_whole(client):
    asked = {**CHAT, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    told = [
        token
        for piece in client.chat.completions.create(**asked, stream=True)
        if piece.choices[0].logprobs is not None
        for token in piece.choices[0].logprobs.content
    ]
    assert [token.token for token in told] == [token.token for token in whole]
    assert [len(token.top_logprobs) for token in told] == [2] * 8
    for one, other in zip(told, whole, strict=True):
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-4)


def test_a_biased_token_comes_again_and_again(client, http):
    (token,) = http.post("/tokenize", json={"prompt": " the"}).json()["tokens"]
    text = client.completions.create(**GREEDY, logit_bias={str(token): 100}).choices[0].text
    assert text == " the" * 8


SCHEMA = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 1}


def test_an_answer_follows_its_schema(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    said = client.chat.completions.create(
        **{**CHAT, "max_completion_tokens": 60},
        response_format=wanted,
        logit_bias={"199": -100},  # this model likes empty lines, which JSON allows
    )
    found = json.loads(said.choices[0].message.content)
    assert found in (["a"], ["b"])


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}"}, r"[0-9]{3}"),
        ({"guided_choice": ["red", "green"]}, r"red|green"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, r"[0-9]{3}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, r"red|green"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
        ({"structured_outputs": {"json": {"enum": ["c"]}, "json_object": False}}, '"c"'),
    ],
)
def test_an_answer_follows_its_expression_choice_or_grammar(client, guide, pattern):
    text = client.completions.create(**GREEDY, extra_body=guide).choices[0].text
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("guide", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "nonsense ::"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
    ],
)
def test_a_form_that_means_nothing_is_named(client, names, guide, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**GREEDY, extra_body=guide)
    names(refused.value.body, param)


@pytest.mark.parametrize(
    ("wrong", "status", "param"),
    [
        ({"model": "another"}, 404, "model"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10**6}, 400, "prompt"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "warm"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"n": 129}, 400, "n"),
        ({"stop": [""]}, 400, "stop"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [10**9]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": {}}, 400, "prompt"),
        ({"logprobs": 99}, 400, "logprobs"),
        ({"logit_bias": {"the": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, 400, "logit_bias"),
        ({"suffix": "."}, 400, "suffix"),
        ({"best_of": 3}, 400, "best_of"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_a_wrong_field_is_named(client, names, wrong, status, param, streams):
    if "stream_options" in wrong and streams:
        return
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(**{**GREEDY, **wrong}, stream=streams)
    assert refused.value.status_code == status
    names(refused.value.body, param)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "messages"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(client, names, wrong, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**CHAT, **wrong})
    names(refused.value.body, param)
