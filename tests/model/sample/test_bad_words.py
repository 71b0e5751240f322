"""Bad words are not generated, and nothing else changes: against a search of the whole output."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model import InvalidArgumentError, SamplingParams, Submission
from model.control.bad_words import BadWordReader, BadWords
from model.control.grammar import Grammar
from model.load.loader import load_model
from model.tiny import CHECKPOINT_DIR
from tests.model import sampling_reference as reference
from tests.model.sample.test_engine_sampling import NOISE, VOCAB, logits_after, run
from tests.model.test_engine import is_async, make, network  # noqa: F401

LETTERS = b"abc "
TEXTS = [b"cab", b"cab cab cab cab", b"ba", b"c"]


def narrow(step):
    """Logits that depend on a row's last token and its position, with four likely letters."""
    rows = step.logit_rows
    logits = NOISE[(step.input_ids[0, rows] * 31 + step.position_ids[0, rows] * 7) % 97].clone()
    logits[:, list(LETTERS)] += 20
    return logits


def engine_of(**sizes):
    engine = make(**sizes)
    engine.network.logits = narrow
    return engine


def forbidden(words, output):
    """What may not follow an output: every word is tried at its end."""
    found = set()
    for word in words:
        for form in (word.encode(), b" " + word.encode()):
            if bytes(output).endswith(form[:-1]):
                found.add(form[-1])
    return found


def check(request):
    """A greedy output token by token; any other has none of the words."""
    params, text = request.params, request.prompt_tokens
    output = request.output_tokens
    for place, token in enumerate(output):
        barred = forbidden(params.bad_words, output[:place])
        assert token not in barred
        if params.is_greedy:
            logits = logits_after(text + output[:place])
            for letter in LETTERS:
                logits[letter] += 20
            logits = reference.penalised(logits, params, text, output[:place])
            allowed = [one for one in range(VOCAB) if one not in barred]
            assert logits[token] >= max(logits[one] for one in allowed) - 1e-4


words = st.lists(st.text("abc ", min_size=1, max_size=3).filter(str.strip), max_size=5).map(
    lambda found: tuple(word.lstrip() for word in found)
)
asked = st.builds(
    lambda words, how, **fields: SamplingParams(bad_words=words, ignore_eos=True, **how, **fields),
    words,
    st.sampled_from([{}, {"temperature": 1.0}, {"presence_penalty": 1.5}, {"min_tokens": 2}]),
    seed=st.integers(0, 3),
    n=st.integers(1, 3),
    max_tokens=st.integers(2, 14),
)
arrivals = st.lists(st.tuples(st.integers(0, 3), asked, st.integers(0, 5)), min_size=1, max_size=5)
sizes = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([3, 8, 64]),
        "max_num_seqs": st.sampled_from([1, 3, 64]),
        "num_blocks": st.sampled_from([14, 60]),
        "swap_memory_bytes": st.sampled_from([0, 1 << 20]),
        "drafts": st.sampled_from([None, "ngram"]),
    }
)


def check_company(arrivals, sizes):
    if sizes["drafts"]:
        sizes = sizes | {"async_scheduling": False}
    engine, waiting, requests = engine_of(**sizes), list(arrivals), []
    step = 0
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][2] <= step or not engine.has_unfinished):
            prompt, params, _ = waiting.pop(0)
            requests += engine.submit(Submission(list(TEXTS[prompt]), params))
        engine.step()
        step += 1
    for request in requests:
        assert request.num_output_tokens == request.params.max_tokens
        check(request)
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    alone = engine_of(enable_prefix_caching=False)
    own = [alone.submit(Submission(list(TEXTS[prompt]), params)) for prompt, params, _ in arrivals]
    run(alone, [request for group in own for request in group])
    texts = [request.output_tokens for group in own for request in group]
    assert [request.output_tokens for request in requests] == texts


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrivals=arrivals, sizes=sizes)
def test_words_are_kept_out_in_any_company_and_the_best_other_token_comes(arrivals, sizes):
    check_company(arrivals, sizes)


@pytest.mark.parametrize("bug", ["whole prompt", "late", "first token"])
def test_the_check_sees_planted_bugs(bug, monkeypatch):
    after = BadWords.after
    if bug == "late":  # the newest token is not looked at
        monkeypatch.setattr(BadWords, "after", lambda self, out, newest=None: after(self, out[:-1]))
    elif bug == "first token":  # words of several tokens are barred at their first one
        monkeypatch.setattr(BadWords, "after", lambda self, *_: list(self._after))
    else:  # a word that begins in the prompt is kept out too
        monkeypatch.setattr(
            BadWords, "after", lambda self, out, newest=None: after(self, [*TEXTS[0], *out], newest)
        )
    how = SamplingParams(max_tokens=14, ignore_eos=True)
    several = [
        (0, replace(how, bad_words=words), 0)
        for words in (("ab", "ca"), ("aa", "bb", "cc"), ("ba", "bb", "bc", "b "))
    ]
    with pytest.raises(AssertionError):
        check_company(several, {"drafts": None})


def test_both_forms_of_a_word_are_kept_out_with_a_real_tokenizer():
    codec = load_model(str(CHECKPOINT_DIR), torch.device("cpu")).codec
    encode = partial(codec.encode, adds_special_tokens=False)
    reader = BadWordReader(encode, 2048, frozenset({0}))
    for word in ("tuple", " list", "the value"):
        barred = reader.of(SamplingParams(bad_words=[word]))
        for *before, last in (encode(lead + word.strip()) for lead in ("", " ")):
            assert last in {*barred.always, *barred.after([3, *before])}
            assert last in {*barred.always, *barred.after([3, *before[:-1]], *before[-1:])}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((" ",), "bad_words: wanted a list, each text that is not blank, got ' '"),
        (("",), "bad_words: wanted a list, each text that is not empty"),
        ("abc", "bad_words: wanted a list"),
        (("a",) * 129, "bad_words: wanted at most 128 texts, got 129"),
        (("a" * 4097,), "bad_words: wanted at most 4096 characters, got 4097"),
        (("a" * 513,), "bad_words: wanted at most 1024 tokens, with and without a space"),
    ],
)
def test_words_that_cannot_be_kept_out_are_refused(words, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make().submit(Submission("x", SamplingParams(bad_words=words)))


def test_words_do_not_go_with_a_grammar_and_never_bar_every_token():
    with pytest.raises(InvalidArgumentError, match="bad_words: wanted none with a grammar"):
        SamplingParams(bad_words=["a"], grammar=Grammar.choice(["b"]))
    others = [token for token in range(VOCAB) if token != ord("a")]
    every = SamplingParams(bad_words=["a"], min_tokens=3, stop_token_ids=others)
    with pytest.raises(InvalidArgumentError, match="the model has 320 tokens, and all may be"):
        make().submit(Submission("x", every))
