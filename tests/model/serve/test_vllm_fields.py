"""Fields of vLLM's beside OpenAI's: token ids, log-probabilities of the prompt, special tokens."""

import json

import pytest

GREEDY = {"max_tokens": 6, "temperature": 0}
PATHS = {
    "/v1/completions": {"prompt": "A tuple is", **GREEDY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A tuple is"}], **GREEDY},
}


def prompt_of(http, path):
    asked = {name: value for name, value in PATHS[path].items() if name in {"prompt", "messages"}}
    return http.post("/tokenize", json=asked).json()["tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_token_ids_are_told_of_wholes_and_streams(http, path):
    asked = {**PATHS[path], "return_token_ids": True}
    whole = http.post(path, json=asked).json()
    [choice] = whole["choices"]
    told = choice if path == "/v1/completions" else whole
    assert told["prompt_token_ids"] == prompt_of(http, path)
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"] == 6
    text = http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"]
    assert text == choice.get("text", choice.get("message", {}).get("content"))
    lines = http.post(path, json={**asked, "stream": True}).text.split("\n\n")[:-2]
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
    ids = [token for one in pieces for token in one["choices"][0].get("token_ids", ())]
    assert ids == choice["token_ids"]
    first = pieces[0]["choices"][0] if path == "/v1/completions" else pieces[0]
    assert first["prompt_token_ids"] == told["prompt_token_ids"]
    plain = http.post(path, json=PATHS[path]).text
    assert 'token_ids":[' not in plain


@pytest.mark.parametrize("path", PATHS)
def test_log_probabilities_of_the_prompt_have_vllms_shape(http, path):
    whole = http.post(path, json={**PATHS[path], "prompt_logprobs": 2}).json()
    told = whole["choices"][0] if path == "/v1/completions" else whole
    first, *others = told["prompt_logprobs"]
    assert first is None
    tokens = prompt_of(http, path)
    assert len(others) == len(tokens) - 1
    for token, likely in zip(tokens[1:], others, strict=True):
        own = likely[str(token)]
        text = http.post("/detokenize", json={"tokens": [token]}).json()["prompt"]
        assert (next(iter(likely)), own["decoded_token"]) == (str(token), text)
        assert len(likely) == (2 if own["rank"] in {1, 2} else 3)
        assert {one["rank"] for one in likely.values()} >= {1, 2}


def test_the_same_is_told_where_a_prompt_is_echoed_with_log_probabilities(http):
    asked = PATHS["/v1/completions"]
    echoed = http.post("/v1/completions", json={**asked, "echo": True, "logprobs": 1}).json()
    scored = http.post("/v1/completions", json={**asked, "prompt_logprobs": 1}).json()
    tokens = prompt_of(http, "/v1/completions")
    likely = scored["choices"][0]["prompt_logprobs"]
    own = [one[str(token)]["logprob"] for token, one in zip(tokens[1:], likely[1:], strict=True)]
    told = echoed["choices"][0]["logprobs"]["token_logprobs"][1 : len(tokens)]
    assert own == pytest.approx(told, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}),
        ("/v1/completions", {"prompt_logprobs": 1, "echo": True}),
        ("/v1/completions", {"prompt_logprobs": 99}),
        ("/v1/chat/completions", {"prompt_logprobs": -1}),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(http, names, path, wrong):
    refused = http.post(path, json={**PATHS[path], **wrong})
    assert refused.status_code == 400
    names(refused.json()["error"], "prompt_logprobs")


def test_special_tokens_are_told_where_that_is_asked_for(http):
    asked = {"prompt": "A tuple is", "max_tokens": 1, "logit_bias": {"0": 100}, "temperature": 0}
    texts = [
        http.post("/v1/completions", json={**asked, "skip_special_tokens": skips}).json()
        for skips in (True, False)
    ]
    assert [one["choices"][0]["text"] for one in texts] == ["", "<|endoftext|>"]


@pytest.mark.parametrize("path", PATHS)
def test_bad_words_are_not_generated_in_wholes_and_streams(http, path):
    def tokens_of(words):
        asked = {**PATHS[path], "max_tokens": 12, "bad_words": words, "return_token_ids": True}
        [whole] = http.post(path, json=asked).json()["choices"]
        lines = http.post(path, json={**asked, "stream": True}).text.split("\n\n")[:-2]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        streamed = [token for one in choices for token in one.get("token_ids", ())]
        assert streamed == whole["token_ids"]
        return streamed

    words = []
    for _ in range(3):  # whatever comes is kept out from then on
        found = tokens_of(words)
        for word in words:
            form = http.post("/tokenize", json={"prompt": word}).json()["tokens"]
            assert form not in [found[at : at + len(form)] for at in range(len(found))]
        text = http.post("/detokenize", json={"tokens": found[:2]}).json()["prompt"]
        assert text.strip()
        words.append(text)


@pytest.mark.parametrize(
    "wrong",
    [{"bad_words": [" "]}, {"bad_words": "x"}, {"bad_words": ["x"], "guided_regex": "a"},
     {"bad_words": ["x" * 9] * 200}],
)  # fmt: skip
def test_bad_words_that_cannot_be_kept_out_are_refused_by_name(http, wrong):
    refused = http.post("/v1/completions", json={**PATHS["/v1/completions"], **wrong})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "bad_words")
