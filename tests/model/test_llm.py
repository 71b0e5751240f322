"""`LLM` in vLLM's shape says what the engine says."""

import gc
import math

import pytest

import backends
import model
from model.control.config import EngineConfig
from model.engine import Engine
from model.errors import InvalidArgumentError
from model.load.loader import load_model
from model.tiny import CHECKPOINT_DIR

GREEDY = model.SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def llm():
    return model.LLM(str(CHECKPOINT_DIR), num_blocks=100, enforce_eager=True)


def test_it_says_what_the_engine_says_in_the_order_of_the_prompts(llm):
    loaded = load_model(str(CHECKPOINT_DIR), backends.get_backend("numba").device)
    engine = Engine(loaded, backends.get_backend("numba"), EngineConfig(num_blocks=100))
    prompts = ["A tuple is", "A list is", [5, 6, 7]]
    wanted = [completion.text for completion in engine.generate(prompts, GREEDY)]
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in found] == wanted
    assert [output.prompt for output in found] == ["A tuple is", "A list is", None]
    assert found[2].prompt_token_ids == [5, 6, 7]
    assert all(output.outputs[0].finish_reason == "length" for output in found)


def test_a_draft_model_is_loaded_beside_and_says_nothing_else(llm):
    guided = model.LLM(str(CHECKPOINT_DIR), num_blocks=100, draft_model=str(CHECKPOINT_DIR))
    found = guided.generate("A tuple is", GREEDY, use_tqdm=False)
    assert found[0].outputs == llm.generate("A tuple is", GREEDY, use_tqdm=False)[0].outputs
    assert guided.engine.stats.num_accepted_tokens > 2


def test_one_text_is_one_prompt_and_samples_are_its_outputs(llm):
    params = model.SamplingParams(n=2, max_tokens=8, temperature=1.5, seed=3, logprobs=2)
    (output,) = llm.generate("A tuple is", params, use_tqdm=False)
    assert [one.index for one in output.outputs] == [0, 1]
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    for one in output.outputs:
        own = [tops[token] for tops, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert math.isclose(sum(top.logprob for top in own), one.cumulative_logprob)


def test_a_prompt_that_is_refused_leaves_nothing_behind(llm):
    with pytest.raises(InvalidArgumentError, match="prompt"):
        llm.generate(["A tuple is", ""], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished
    with pytest.raises(InvalidArgumentError, match="sampling_params: wanted 1"):
        llm.generate("A tuple is", [GREEDY, GREEDY], use_tqdm=False)


def test_a_text_that_ends_by_itself_ends_the_call(llm):
    eos = next(iter(llm.engine.model.eos_token_ids))
    params = model.SamplingParams(max_tokens=6, logit_bias=((eos, 100.0),))
    (output,) = llm.generate("A tuple is", params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"


def test_a_chat_is_answered(llm):
    chat = [{"role": "user", "content": "A tuple is"}]
    one, two = llm.chat([chat, chat], GREEDY, use_tqdm=False)
    assert one.outputs[0].text == two.outputs[0].text != ""
    (alone,) = llm.chat(chat, GREEDY, use_tqdm=False)
    assert alone.outputs[0].text == one.outputs[0].text


def test_a_setting_that_is_none_is_named():
    with pytest.raises(InvalidArgumentError, match="max_modl_len"):
        model.LLM("anything", max_modl_len=5)
    with pytest.raises(InvalidArgumentError, match="dtype"):
        model.LLM("anything", dtype="int3")


def test_sampling_parameters_are_taken_as_vllm_takes_them():
    params = model.SamplingParams(stop=".", top_k=-1, stop_token_ids=[3], logit_bias={5: 1.0})
    same = model.SamplingParams(stop=(".",), stop_token_ids=(3,), logit_bias=((5, 1.0),))
    assert params == same
    assert model.SamplingParams(stop=None, stop_token_ids=None) == model.SamplingParams()
    assert model.SamplingParams(stop=["a", "b"], top_k=0).stop == ("a", "b")
    with pytest.raises(InvalidArgumentError, match="top_k"):
        model.SamplingParams(top_k=-2)
    with pytest.raises(InvalidArgumentError, match="stop"):
        model.SamplingParams(stop=[""])


def test_the_tokenizer_is_the_models(llm):
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("A tuple is", GREEDY, use_tqdm=False)
    assert tokenizer.encode("A tuple is") == output.prompt_token_ids


def test_prompt_logprobs_have_the_token_and_likely_ones(llm):
    params = model.SamplingParams(max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate("A tuple is", params, use_tqdm=False)
    first, *others = output.prompt_logprobs
    assert first is None
    for token, told in zip(output.prompt_token_ids[1:], others, strict=True):
        assert 2 <= len(told) <= 3
        assert told[token].logprob <= max(one.logprob for one in told.values())
    assert llm.generate("A tuple is", GREEDY, use_tqdm=False)[0].prompt_logprobs is None


def test_a_length_that_was_given_bounds_requests():
    short = model.LLM(str(CHECKPOINT_DIR), num_blocks=100, eager=True, max_model_len=12)
    assert short.engine.max_model_len == 12
    with pytest.raises(InvalidArgumentError, match="12"):
        short.generate("A tuple is", model.SamplingParams(max_tokens=10), use_tqdm=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_async", [False, True])
def test_no_end_is_generated_before_min_tokens(temperature, is_async):
    llm = model.LLM(str(CHECKPOINT_DIR), num_blocks=100, eager=True, async_scheduling=is_async)
    eos = next(iter(llm.engine.model.eos_token_ids))
    likely = {"max_tokens": 9, "logit_bias": {eos: 100.0, 7: 100.0}, "stop_token_ids": [7]}
    for wanted in (0, 1, 5, 9):
        params = model.SamplingParams(min_tokens=wanted, temperature=temperature, seed=1, **likely)
        other = model.SamplingParams(max_tokens=3)
        first, _ = llm.generate(["A tuple is", "A list"], [params, other], use_tqdm=False)
        tokens = first.outputs[0].token_ids
        assert len(tokens) == min(wanted + 1, 9)
        assert not {eos, 7} & set(tokens[:wanted])
    with pytest.raises(InvalidArgumentError, match=r"^min_tokens: wanted at most max_tokens, 4"):
        model.SamplingParams(max_tokens=4, min_tokens=5)


def test_tiers_keep_everything_when_an_llm_is_gone(tmp_path):
    prompts = [[*range(first, first + 300)] for first in (5, 9)]
    num_found = []
    for _ in range(2):
        llm = model.LLM(
            str(CHECKPOINT_DIR), num_blocks=200, block_size=4, eager=True, disk=str(tmp_path)
        )
        [disk] = llm.engine.tiers.tiers.tiers
        num_found.append(disk.stats.num_records)
        llm.generate(prompts, model.SamplingParams(max_tokens=3), use_tqdm=False)
        del llm
        gc.collect()
    assert num_found == [0, 150]
