"""Texts that follow a grammar: whatever the network says, what comes out parses."""

import asyncio
import dataclasses
import json
import re
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model import EngineConfig, FinishReason, InvalidArgumentError, SamplingParams, Submission
from model.async_engine import AsyncEngine
from model.control.grammar import Grammar
from model.engine import Engine
from model.errors import GrammarError, InvalidSettingError, UnsupportedModelError
from model.sample import grammar_compiler, grammars, request_sampler
from tests.hang import HANG_S as DEADLINE_S
from tests.model.networks import ByteCodec
from tests.model.reference import ReferenceBackend
from tests.model.sample.test_engine_sampling import hashed_logits, run
from tests.model.test_engine import PROMPT, SIZES, greedy, is_async, network  # noqa: F401

END = 256


def make(ends=(END,), **sizes):
    model = dataclasses.replace(network(), eos_token_ids=frozenset(ends))
    return Engine(model, ReferenceBackend(), EngineConfig(**{**SIZES, **sizes}))


def hashed(**sizes):
    engine = make(**sizes)
    engine.network.logits = hashed_logits
    return engine


POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
SIZE = {**POINT, "properties": {"size": POINT["properties"]["size"]}, "required": ["size"]}
CHOICES = ("yes", "no", "yesterday")
SUMS = 'start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"'


def is_point(text):
    value = json.loads(text)
    return (
        set(value) <= {"name", "tags", "size"}
        and len(value["name"]) <= 4
        and 0 <= value["size"] <= 99
        and all(tag in {"a", "bc"} for tag in value.get("tags", ()))
    )


def is_sum(text):
    while re.search(r"\([0-9]{1,3}(\+[0-9]{1,3})*\)", text):
        text = re.sub(r"\([0-9]{1,3}(\+[0-9]{1,3})*\)", "1", text)
    return re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})*", text)


CASES = {
    "schema": (Grammar.json_schema(POINT), is_point),
    "regex": (Grammar.regex("[a-f]{2,5}-[0-9]+"), re.compile("[a-f]{2,5}-[0-9]+").fullmatch),
    "choice": (Grammar.choice(CHOICES), CHOICES.__contains__),
    "lark": (Grammar("lark", SUMS), is_sum),
    "gbnf": (Grammar("gbnf", 'root ::= "a" [b-d]+ "z"'), re.compile("a[b-d]+z").fullmatch),
    "object": (Grammar.json_object(), lambda text: isinstance(json.loads(text), dict)),
}
drawn = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 3.0]), "seed": st.integers(0, 99)},
    optional={
        "top_p": st.floats(0.1, 1),
        "top_k": st.integers(1, 300),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "logit_bias": st.just(((ord("}"), 3.0), (ord('"'), 2.0))),
    },
)
asked = st.lists(
    st.tuples(st.sampled_from(sorted(CASES)), drawn, st.integers(1, 40)), min_size=1, max_size=4
)
sizes = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([2, 64]),
        "max_num_seqs": st.sampled_from([1, 64]),
        "num_blocks": st.sampled_from([24, 60]),
    }
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=asked, sizes=sizes, samples=st.integers(1, 2))
def test_what_ends_by_itself_parses_and_what_is_cut_can_still_be_completed(asked, sizes, samples):
    check_parses(asked, sizes, samples)


def check_parses(asked, sizes, samples):
    """Beside a request without a grammar, in steps of any size, preempted or not."""
    engine = hashed(swap_memory_bytes=0, **sizes)
    free = engine.add_request("xy", SamplingParams(max_tokens=20, temperature=1.0, seed=1))
    requests = []
    for name, how, count in asked:
        params = SamplingParams(max_tokens=count, grammar=CASES[name][0], **how)
        requests += engine.submit(Submission("xy", dataclasses.replace(params, n=samples)))
    run(engine, requests)
    for request in requests:
        name = next(name for name, case in CASES.items() if case[0] == request.params.grammar)
        text = bytes(token for token in request.output_tokens if token < 256)
        if request.finish_reason is FinishReason.STOP:
            assert CASES[name][1](text.decode()), (name, text)
        else:
            assert request.finish_reason is FinishReason.LENGTH
            assert request.num_output_tokens == request.params.max_tokens
            matcher = engine.compile_grammar(request.params.grammar).result().matcher.deep_copy()
            assert matcher.validate_tokens(request.output_tokens) == len(request.output_tokens)
    assert not engine._grammars.texts
    alone = hashed()
    again = alone.add_request("xy", free.params)
    run(alone, [again])
    assert free.output_tokens == again.output_tokens


def test_where_only_the_empty_text_follows_a_grammar_the_end_comes_first():
    [done] = make().generate([PROMPT], greedy(5, grammar=Grammar.regex("")))
    assert (done.text, done.request.output_tokens) == ("", [END])


@pytest.mark.parametrize("schema", [SIZE, {"$ref": "#/$defs/a", "$defs": {"a": SIZE}}])
def test_a_model_that_likes_white_space_still_comes_to_the_end_of_its_json(schema):
    likely = tuple((ord(letter), 60.0 if letter in " \n\t" else 40.0) for letter in ' \n\t{}"01[]')
    engine = make(num_blocks=80, json_schema_mode="literal")
    params = SamplingParams(max_tokens=250, grammar=Grammar.json_schema(schema), logit_bias=likely)
    [done] = engine.generate(["x"], params)
    assert done.request.finish_reason is FinishReason.STOP
    assert "size" in json.loads(done.text)


@pytest.mark.parametrize("name", ["choice", "regex"])
def test_a_text_ends_with_the_token_after_which_nothing_can_follow(name):
    grammar = {"choice": Grammar.choice(["yes", "no"]), "regex": Grammar.regex("[ab]{3}")}[name]
    engine = make()
    [done] = engine.generate([PROMPT], SamplingParams(max_tokens=9, grammar=grammar))
    assert done.request.finish_reason is FinishReason.STOP
    assert done.text in {"yes", "no"} or re.fullmatch("[ab]{3}", done.text)
    assert done.request.num_output_tokens == len(done.text)


def test_each_sample_of_a_prompt_and_each_request_follows_its_own_text():
    engine = hashed()
    how = SamplingParams(max_tokens=12, temperature=3.0, seed=1, grammar=Grammar.choice(CHOICES))
    requests = engine.submit(Submission(PROMPT, dataclasses.replace(how, n=8)))
    run(engine, requests)
    texts = {bytes(t for t in r.output_tokens if t < 256).decode() for r in requests}
    assert texts <= set(CHOICES)
    assert len(texts) > 1


def test_log_probabilities_beside_a_grammar_are_still_the_models():
    engine = hashed()
    params = SamplingParams(max_tokens=3, logprobs=1, grammar=Grammar.choice(["yes"]))
    request = engine.add_request(PROMPT, params)
    [tokens] = run(engine, [request])
    assert bytes(token.token_id for token in tokens) == b"yes"
    assert any(token.top_logprobs[0][0] != token.token_id for token in tokens)
    assert all(token.logprob <= token.top_logprobs[0][1] < 0 for token in tokens)


def test_a_grammar_is_compiled_once(monkeypatch):
    compiled = []
    real = grammar_compiler.LLMatcher
    engine = make()

    class Counting:
        def __new__(cls, *these, **more):
            compiled.append(these[1])
            return real(*these, **more)

        grammar_from_regex = real.grammar_from_regex

    monkeypatch.setattr(grammar_compiler, "LLMatcher", Counting)
    for _ in range(3):
        engine.generate([PROMPT] * 2, greedy(2, grammar=Grammar.regex("[a-z]+")))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("[a-"), r"a regex that compiles \(.*unclosed character class"),
        (Grammar("json_schema", "{"), r"a json_schema that compiles \("),
        (
            Grammar.json_schema({"type": "objec"}),
            r"a json_schema that compiles \(#/type: unknown type \"objec\"\)",
        ),
        (Grammar("lark", "start: nothing"), r"a lark that compiles \("),
        (Grammar("gbnf", "root ::= ["), r"a gbnf that compiles \("),
    ],
)
def test_a_grammar_that_means_nothing_is_refused_when_it_is_queued(grammar, message):
    engine = make()
    with pytest.raises(InvalidArgumentError, match=f"grammar: wanted {message}"):
        engine.add_request(PROMPT, greedy(2, grammar=grammar))
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    "described",
    [
        {"regexp": "a"},
        {"regex": 3},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "yes"},
        {"json_object": False},
        {"json_schema": 3},
        "a",
        {},
    ],
)
def test_what_describes_no_grammar_is_refused_by_name(described):
    with pytest.raises(InvalidArgumentError, match="grammar: wanted "):
        Grammar.of(described)
    with pytest.raises(InvalidArgumentError, match="grammar: wanted a Grammar"):
        SamplingParams(grammar=described)


def test_a_schema_that_is_no_json_is_refused_by_name():
    endless = {}
    endless["properties"] = endless
    for schema in (endless, {"const": {1, 2}}):
        with pytest.raises(InvalidSettingError, match="grammar: wanted JSON"):
            Grammar.json_schema(schema)


def test_a_grammar_from_a_file_is_what_the_constructors_make():
    assert Grammar.of({"json_schema": POINT}) == CASES["schema"][0]
    assert Grammar.of({"choice": list(CHOICES)}) == CASES["choice"][0]
    assert Grammar.of({"regex": "a"}) == Grammar.regex("a")
    assert Grammar.of({"json_object": True}) == Grammar.json_object()
    assert Grammar.of({"gbnf": "root ::= [a]"}) == Grammar("gbnf", "root ::= [a]")


def test_a_model_whose_tokens_are_unknown_refuses_grammars(monkeypatch):
    monkeypatch.setattr(ByteCodec, "describe", lambda codec: None)
    with pytest.raises(UnsupportedModelError, match="grammar: the bytes of this model's tokens"):
        make().add_request(PROMPT, greedy(2, grammar=Grammar.regex("a")))


def test_a_model_of_which_no_token_ends_a_text_refuses_grammars():
    with pytest.raises(UnsupportedModelError, match="grammar: this model has no token that ends"):
        make(ends=()).add_request(PROMPT, greedy(2, grammar=Grammar.regex("a")))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70])
def test_a_mask_lets_exactly_the_tokens_of_its_bits_through(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    may_come = torch.rand(3, vocab_size, generator=generator) < 0.5
    words = torch.zeros(3, -(-vocab_size // 32), dtype=torch.int64)
    for row, token in may_come.nonzero().tolist():
        words[row, token // 32] |= 1 << token % 32
    words = words.where(words < 2**31, words - 2**32).int()
    found = request_sampler.masked(torch.zeros(3, vocab_size), words)
    assert torch.equal(found == 0, may_come)
    assert torch.equal(found == -torch.inf, ~may_come)


# Grammars that cost too much once they are followed: each ends its own request and no other.

AMBIGUOUS = Grammar("lark", 'start: e\ne: e e | "a" | "b" | e e e')


def clocked(monkeypatch, cost_s):
    """An engine whose masks take what `cost_s` says of the tokens before them, by its clock."""
    engine = hashed()
    now = [0.0]
    engine._grammars._clock = lambda: now[0]
    follow = grammars._Text.follow

    def follows(self, request, newest):
        follow(self, request, newest)
        now[0] += cost_s(request.num_output_tokens)

    monkeypatch.setattr(grammars._Text, "follow", follows)
    return engine


COSTLY = {
    "token": (lambda count: 0.2 * (count == 5), 5, r"0.1 s .* \(--grammar-token-s\), got 0.[24]"),
    "request": (lambda count: 0.02, 15, r"0.5 s .* \(--grammar-request-s\), got 0.5"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_grammar_that_takes_too_long_ends_its_own_request_by_the_budgets_name(monkeypatch, name):
    cost_s, most, message = COSTLY[name]
    engine = clocked(monkeypatch, cost_s)
    guided = engine.add_request("xy", greedy(60, grammar=Grammar.regex("[a-z]*[0-9]{99}")))
    other = engine.add_request("xy", greedy(60, ignore_eos=True))
    run(engine, [guided, other])
    assert guided.finish_reason is FinishReason.ERROR
    assert 0 < guided.num_output_tokens <= most + 2
    assert re.match(f"grammar: wanted at most {message}", str(guided.error)), guided.error
    assert isinstance(guided.error, GrammarError)
    assert (other.finish_reason, other.error) == (FinishReason.LENGTH, None)
    assert not engine._grammars.texts
    assert not engine._grammars._overrun


def test_what_a_mask_takes_as_a_rule_is_not_counted(monkeypatch):
    engine = clocked(monkeypatch, lambda count: 0.0004)
    guided = engine.add_request("xy", greedy(60, grammar=Grammar.regex("[a-z]*[0-9]{99}")))
    run(engine, [guided])
    assert guided.finish_reason is FinishReason.LENGTH


def test_a_grammar_beyond_the_librarys_limits_in_the_middle_ends_its_own_request():
    """Its error is told, no token of its last mask is, and what was computed can be found."""
    engine = make()
    many = "|".join(f'"{n}c" many' for n in range(3000))
    grammar = Grammar("lark", f"start: /[ab]{{20}}/ many\nmany: {many}")
    failing = engine.add_request("xy" * 8, greedy(40, grammar=grammar))
    other = engine.add_request("xy", greedy(60, ignore_eos=True))
    run(engine, [failing, other])
    assert failing.finish_reason is FinishReason.ERROR
    assert 19 <= failing.num_output_tokens <= 21
    assert re.match(
        r"grammar: wanted .* after (19|20|21) tokens it cannot: .*item", str(failing.error)
    )
    assert END not in failing.output_tokens
    assert other.finish_reason is FinishReason.LENGTH
    again = engine.add_request("xy" * 8, greedy(1))
    run(engine, [again])
    assert again.num_cached_tokens > 0


def test_the_ambiguous_grammar_ends_by_its_budget_and_not_after_seconds():
    engine = make(grammar_request_s=0.05)
    no_end = ((END, -100.0),)
    guided = engine.add_request("xy", greedy(200, grammar=AMBIGUOUS, logit_bias=no_end))
    run(engine, [guided])
    assert guided.finish_reason is FinishReason.ERROR
    assert "0.05 s of the processor" in str(guided.error)
    assert guided.num_output_tokens < 150


# Planted bugs, and what must find them.


def forgets_the_newest_token(monkeypatch):
    mask = grammars.Grammars.mask
    monkeypatch.setattr(
        grammars.Grammars, "mask", lambda self, these, newest: mask(self, these, {})
    )


def follows_the_newest_twice(monkeypatch):
    follow = grammars._Text.follow

    def twice(self, request, newest):
        follow(self, request, newest)
        if newest is not None and not self.matcher.is_stopped():
            self.matcher.consume_token(newest)

    monkeypatch.setattr(grammars._Text, "follow", twice)


def shares_one_text(monkeypatch):
    class Same(dict):
        def get(self, key, default=None):
            return next(iter(self.values()), default)

    init = grammars.Grammars.__init__

    def shared(self, *these, **more):
        init(self, *these, **more)
        self.texts = Same()

    monkeypatch.setattr(grammars.Grammars, "__init__", shared)


def does_not_mask(monkeypatch):
    monkeypatch.setattr(request_sampler, "masked", lambda logits, words: logits)


def goes_on_when_all_is_said(monkeypatch):
    monkeypatch.setattr(grammars.Grammars, "is_whole", lambda self, request: False)


@pytest.mark.parametrize(
    "plant",
    [
        forgets_the_newest_token,
        follows_the_newest_twice,
        shares_one_text,
        does_not_mask,
        goes_on_when_all_is_said,
    ],
)
def test_a_planted_bug_is_caught(plant, monkeypatch, is_async):  # noqa: F811
    if not is_async and plant in {forgets_the_newest_token, follows_the_newest_twice}:
        return  # nothing is newer than what was told
    plant(monkeypatch)
    how = {"temperature": 1.0, "seed": 3}
    hunted = [("choice", how, 12), ("regex", how, 20), ("schema", how, 40)]
    with pytest.raises((AssertionError, json.JSONDecodeError, UnicodeDecodeError, KeyError)):
        check_parses(hunted, {"num_blocks": 60}, 2)


def test_a_grammar_that_takes_long_to_compile_delays_no_other_request(monkeypatch):
    engine = make()
    with_grammar = SamplingParams(max_tokens=5, grammar=Grammar.choice(["ab", "cd"]))
    is_over, source = threading.Event(), grammar_compiler.source_of

    def waits(grammar, **more):
        assert is_over.wait(DEADLINE_S)
        return source(grammar, **more)

    monkeypatch.setattr(grammar_compiler, "source_of", waits)

    async def main():
        async with asyncio.timeout(DEADLINE_S), AsyncEngine(engine) as served:
            slow = asyncio.create_task(served.add(PROMPT, with_grammar))
            async with await served.add(PROMPT, greedy(100, ignore_eos=True)) as other:
                await other.whole()
            assert not slow.done()
            is_over.set()
            async with await slow as stream:
                [delta] = await stream.whole()
                assert delta.text in ("ab", "cd")

    asyncio.run(main())
