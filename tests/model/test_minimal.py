"""The engine in one file: its output equals that of `generate` and of the full engine."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import backends
import kvcore
from model import EngineConfig, SamplingParams, minimal
from model.engine import Engine
from model.errors import InvalidArgumentError, UnsupportedModelError
from model.tiny import CHECKPOINT_DIR
from tests.model.networks import build, greedy_and_margin
from tests.model.prompts import NUM_TOKENS, prompts
from tests.model.reference import ReferenceBackend
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

SEED = 25
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SOURCE = Path(minimal.__file__).read_text(encoding="utf-8")
PROMPTS = [*prompts(), prompts()[0][:8] * 5]  # the last one repeats itself, so it is drafted

ALL = range(len(PROMPTS))


@functools.cache
def generated(number):
    """The tokens that `generate` of Transformers adds to a prompt."""
    tokens, margin = greedy_and_margin(build("qwen3", SEED), PROMPTS[number], NUM_TOKENS)
    assert margin > 1e-4  # no rounding can change the choice
    return tokens


@functools.cache
def network():
    return build("qwen3", SEED).network


def make(backend=None, **sizes):
    sizes = {"num_blocks": 64, "block_size": 4, **sizes}
    return minimal.Engine(network(), backend or ReferenceBackend(), **sizes)


def run(engine, numbers=ALL):
    return engine.generate([minimal.Request(PROMPTS[number], NUM_TOKENS) for number in numbers])


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("num_blocks", [64, 18])
def test_greedy_output_equals_generate(num_blocks, num_draft_tokens):
    engine = make(
        num_blocks=num_blocks, max_num_batched_tokens=16, num_draft_tokens=num_draft_tokens
    )
    assert run(engine) == [generated(number) for number in ALL]
    assert engine.kv.num_free_blocks == num_blocks - 1
    kvcore.check(engine.kv)
    assert bool(engine.stats["preemptions"]) == (num_blocks == 18)


def test_drafts_save_steps_and_change_no_token():
    outputs, num_steps = [], []
    for num_draft_tokens in (0, 4):
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR)
        engine = minimal.Engine(model, ReferenceBackend(), num_draft_tokens=num_draft_tokens)
        prompt = AutoTokenizer.from_pretrained(CHECKPOINT_DIR).encode("A tuple is")
        engine.add_request(minimal.Request(prompt, 32))
        request, steps = engine.waiting[0], 0
        while engine.waiting or engine.running:
            engine.step()
            steps += 1
        outputs.append(request.output_tokens)
        num_steps.append((steps, steps + engine.stats["accepted_draft_tokens"]))
    assert outputs[0] == outputs[1]
    assert num_steps[0] == (32, 32)
    assert num_steps[1][0] < num_steps[1][1] == 32


def test_a_second_run_finds_the_first_ones_blocks():
    engine = make()
    run(engine)
    before = engine.stats["cached_tokens"]
    assert run(engine) == [generated(number) for number in ALL]
    assert engine.stats["cached_tokens"] - before >= sum(len(p) // 4 * 4 - 4 for p in PROMPTS)


@settings(max_examples=15)
@given(
    numbers=st.lists(st.sampled_from(ALL), min_size=1, max_size=6),
    num_blocks=st.integers(18, 40),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    num_draft_tokens=st.integers(0, 4),
)
def test_output_depends_on_no_size_and_no_neighbour(numbers, **sizes):
    engine = make(**sizes)
    schedule, steps = engine.schedule, []
    engine.schedule = lambda: steps.append(schedule()) or steps[-1]
    assert run(engine, numbers) == [generated(number) for number in numbers]
    kvcore.check(engine.kv)
    most = max(sum(chunk.num_tokens for chunk in chunks) for chunks in steps)
    assert most <= sizes["max_num_batched_tokens"]


def test_requests_finish_in_the_order_of_their_arrival_though_some_are_preempted():
    engine = make(num_blocks=18)
    requests = [minimal.Request(PROMPTS[0], NUM_TOKENS) for _ in range(6)]
    for request in requests:
        engine.add_request(request)
    finished = []
    while engine.waiting or engine.running:
        engine.step()
        done = [each for each in requests if not each.num_missing_tokens]
        finished += [each for each in done if each not in finished]
    assert finished == requests
    assert engine.stats["preemptions"] > 1


def test_the_full_engine_writes_the_same():
    full = Engine(
        build("qwen3", SEED), ReferenceBackend(), EngineConfig(num_blocks=64, block_size=4)
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    completions = full.generate(PROMPTS, params)
    assert run(make()) == [list(each.request.output_tokens) for each in completions]


def test_any_backend_can_be_plugged_in():
    assert run(make(backends.get_backend("numba"))) == [generated(number) for number in ALL]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_triton_backend_can_be_plugged_in():
    engine = minimal.Engine(
        build("qwen3", SEED).network, backends.get_backend("triton"), num_draft_tokens=3
    )
    assert run(engine) == [generated(number) for number in ALL]


def test_draws_with_a_temperature_follow_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(6000, 1)
    drawn = minimal.sample(logits, [0.5] * 6000, torch.Generator().manual_seed(0))
    shares = torch.bincount(torch.tensor(drawn)) / 6000
    assert torch.allclose(shares, (logits[0] / 0.5).softmax(-1), atol=0.02)
    mixed = minimal.sample(logits[:200], [0.0, 1.0] * 100, torch.Generator())
    assert set(mixed[::2]) == {2}
    assert set(mixed[1::2]) == {0, 1, 2}
    request = minimal.Request(PROMPTS[4], NUM_TOKENS, temperature=1.0)
    [output] = make(num_draft_tokens=3).generate([request])
    assert len(output) == NUM_TOKENS


def test_verify_keeps_what_equals_the_drafts_and_one_token_more():
    assert minimal.verify([5], []) == [5]
    assert minimal.verify([5, 6, 7], [5, 6]) == [5, 6, 7]
    assert minimal.verify([5, 6, 7], [5, 9]) == [5, 6]
    assert minimal.verify([5, 6, 7], [9, 6]) == [5]


def test_propose_repeats_what_followed_the_last_two_tokens():
    assert minimal.propose([1, 2, 3, 4, 1, 2], 2) == [3, 4]
    assert minimal.propose([1, 2, 3, 4, 5], 2) == []
    assert minimal.propose([1, 2, 3, 1, 2], 0) == []


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 3), ([1], 0), ([1] * 60, 20)])
def test_a_request_that_could_never_run_is_refused(prompt, max_tokens):
    engine = make(num_blocks=20)
    with pytest.raises(InvalidArgumentError, match="at most 76 in all"):
        engine.add_request(minimal.Request(prompt, max_tokens))
    assert not engine.waiting


@pytest.mark.parametrize("name", ["MistralConfig", "Gemma2Config", "Llama4TextConfig"])
def test_a_model_with_a_window_or_chunks_is_refused(name):
    network = build_network(make_config(name, ""), 0).network
    with pytest.raises(UnsupportedModelError, match=r"python -m model\.run"):
        run(minimal.Engine(network, ReferenceBackend(), block_size=4))


def test_it_continues_a_prompt_of_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["minimal", "A tuple is", "--max-tokens", "4"])
    minimal.main()
    assert capsys.readouterr().out.startswith("'A tuple is")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["word " * 3000], "wanted a prompt and max_tokens of at least 1 and at most 2048 in all"),
        (["a", ""], "got 0 tokens and max_tokens=32"),
        (["a", "--max-tokens", "0"], "max_tokens=0"),
        (["a", "--max-tokens", "5000"], "max_tokens=5000"),
        (["a", "--backend", "nunba"], "invalid choice: 'nunba'"),
        (["a", "--model", "./nowhere"], "./nowhere"),
        (["a", "--backend", "triton"], "no CUDA device; instead: the backend numba"),
    ],
)
def test_a_command_line_that_cannot_run_ends_in_a_line(monkeypatch, capsys, argv, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["minimal", *argv])
    with pytest.raises(SystemExit, match="2"):
        minimal.main()
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert line.startswith("python -m model.minimal: error: ")
    assert message in line
    assert (out, "Traceback" in err) == ("", False)


def test_the_first_run_that_the_readme_suggests_reads_well(monkeypatch, capsys):
    [prompt] = re.findall(r'`python -m model\.minimal "(.*)"`', README)
    monkeypatch.setattr("sys.argv", ["minimal", prompt])
    minimal.main()
    words = re.findall(r"\w+", capsys.readouterr().out.replace("\\n", " "))
    assert len(words) > len(prompt.split()) + 12
    assert "_SSL" not in " ".join(words)
    assert all(3 * (word,) != tuple(words[at : at + 3]) for at, word in enumerate(words))


def pointers():
    return re.findall(r"^ *# Full version: ([\w.]+)$", SOURCE, re.MULTILINE)


@pytest.mark.parametrize("name", pointers())
def test_a_full_version_that_it_names_exists(name):
    found = importlib.import_module(name.split(".")[0])
    for part in name.split(".")[1:]:
        if inspect.ismodule(found):
            found = getattr(found, part, None) or importlib.import_module(
                f"{found.__name__}.{part}"
            )
        else:
            found = getattr(found, part)
    assert callable(found)


def test_it_is_short_enough_to_be_read_first():
    assert len(SOURCE.splitlines()) <= 300
    assert len(inspect.getsource(minimal.Engine.step).splitlines()) <= 25
    public = [minimal.attend, minimal.propose, minimal.verify, minimal.sample]
    verbs = [vars(minimal.Engine)[name] for name in ("schedule", "prepare_batch", "step")]
    assert len(pointers()) >= len(public) + len(verbs)
