"""The tiny checkpoint: it loads anywhere, says true English, and can be made again."""

import dataclasses
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from model import LLM, SamplingParams
from model.tiny import CHECKPOINT_DIR, DEMO_PROMPTS, SHARED_PREFIX
from tests.model import tiny_training
from tests.model.tiny_training import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    Settings,
    assemble,
    bits_per_byte,
    build_network,
    c_sources,
    library_sources,
    main,
    make_checkpoint,
    paragraphs,
    split,
    topic_sources,
)

CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
HELD_OUT_BOUND = 1.5  # bits a byte; the whole held-out text costs 1.414
TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT_DIR, local_files_only=True)


@pytest.fixture(scope="module")
def network():
    return AutoModelForCausalLM.from_pretrained(
        CHECKPOINT_DIR, dtype=torch.float32, local_files_only=True
    )


@pytest.fixture(scope="module")
def corpus():
    """A part of the corpus that takes a tenth of the time: all kinds of source are in it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = ("asyncio", "email", "unittest", "wsgiref", "xml")
    modules = [source for package in packages for source in library_sources(library, package)]
    return assemble([*topic_sources(), *modules, *c_sources()])


def refuse(*args, **kwargs):
    raise AssertionError("the network was asked for")


def greedy(network, prompt, num_tokens):
    """The continuation, and by how much each of its tokens led the second best."""
    ids = TOKENIZER(prompt, return_tensors="pt").input_ids
    out = network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits).topk(2).values
    return out.sequences[0, ids.shape[1] :].tolist(), (best[..., 0] - best[..., 1]).flatten()


def test_the_readmes_first_answer_of_the_server_reads_well():
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"v1/completions .* -d '(.*)'", page)
    asked = json.loads(said)
    params = SamplingParams(max_tokens=16)
    assert asked["temperature"] == params.temperature
    (output,) = LLM(str(CHECKPOINT_DIR), num_blocks=20, eager=True).generate(
        asked["prompt"], params, use_tqdm=False
    )
    assert output.outputs[0].text.startswith(
        " return None.\n\nIf the file is not found, return None."
    )


def test_the_checkpoint_loads_from_another_place_without_a_network(tmp_path, monkeypatch):
    for name in CHECKPOINT_FILES:
        shutil.copy(CHECKPOINT_DIR / name, tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert network.dtype == torch.bfloat16
    assert network.config.eos_token_id == tokenizer.eos_token_id == END_OF_TEXT_ID
    assert network.config.max_position_embeddings >= 2048
    assert network.config.vocab_size == len(tokenizer)
    logits = network(**tokenizer("The function returns", return_tensors="pt")).logits
    assert torch.isfinite(logits).all()


def test_the_checkpoint_is_under_five_megabytes():
    assert sum((CHECKPOINT_DIR / name).stat().st_size for name in CHECKPOINT_FILES) < 5_000_000


def test_importing_the_package_loads_no_torch():
    code = "import sys, model.tiny; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.text())
@example("  two  spaces\r\n\ttab \x00 é 漢字 🙂 .")
@example(f"a{END_OF_TEXT}b")
def test_any_text_survives_encoding_and_decoding(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1))
def test_no_text_without_its_name_encodes_to_the_end_of_text_token(text):
    assert END_OF_TEXT_ID not in TOKENIZER.encode(text)


def test_held_out_text_costs_far_fewer_bits_than_without_training(network, corpus):
    sample = split(corpus)[1]
    assert sum(map(len, sample)) > 8_000
    torch.manual_seed(0)
    untrained = build_network(len(TOKENIZER))
    bits = bits_per_byte(network, TOKENIZER, sample)
    assert bits < HELD_OUT_BOUND
    assert bits < bits_per_byte(untrained, TOKENIZER, sample) / 2


def test_the_demo_prompts_share_their_first_hundred_tokens():
    rows = [TOKENIZER.encode(prompt) for prompt in DEMO_PROMPTS]
    prefix = TOKENIZER.encode(SHARED_PREFIX)
    assert len(prefix) >= 100
    assert all(row[: len(prefix)] == prefix for row in rows)
    assert len({tuple(row) for row in rows}) == len(rows) >= 4


@pytest.mark.parametrize("prompt", DEMO_PROMPTS)
def test_greedy_text_is_made_of_words_and_no_rounding_can_change_it(network, corpus, prompt):
    known = set(re.findall(r"[a-z]+", "\n".join(corpus.values()).lower()))
    tokens, leads = greedy(network, prompt, 32)
    words = re.findall(r"[a-z]+", TOKENIZER.decode(tokens).lower())[:-1]  # the last may be cut
    assert len(words) >= 10
    assert len(set(words)) >= len(words) / 3  # no word goes round and round
    assert sum(word in known for word in words) >= 0.95 * len(words)
    assert leads.min() > 1e-3  # float32 sums in another order differ by about 2e-5


def test_the_corpus_contains_no_licence(corpus):
    legal = re.compile("copyright|licen[cs]e|all rights reserved|warranty", re.IGNORECASE)
    assert [name for name, text in corpus.items() if legal.search(text)] == []
    assert sum(map(len, corpus.values())) > 500_000


def test_a_legal_paragraph_goes_and_its_neighbours_stay():
    text = "Reads a file.\n\nCopyright (c) 2001 Someone.\n\nWritten by Someone.\n\nReturns bytes."
    assert paragraphs(text) == ["Reads a file.", "Returns bytes."]


def test_wrapped_prose_becomes_one_line_and_code_keeps_its_lines():
    prose = "This sentence was wrapped by an editor that broke it\nat some column."
    code = "for name in names:\n    print(name)"
    assert paragraphs(f"{prose}\n\n{code}") == [prose.replace("\n", " "), code]


def test_a_paragraph_is_learned_once_and_an_empty_entry_takes_its_heading_along():
    first = ("a", [("class A", "One.\n\nTwo."), ("A.b()", "One.")])
    second = ("b", [("class B", "Two.")])
    assert assemble([first, second]) == {"a": "class A\n\nOne.\n\nTwo."}


def test_sources_come_in_the_order_of_their_paths_and_tests_are_left_out(tmp_path):
    for path in ("b.py", "a/z.py", "a/__init__.py", "a/test/t.py", "site-packages/s.py"):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('"""Says."""\ndef f(x, *, y=1):\n    """Does."""\n')
    sources = dict(library_sources(tmp_path))
    assert list(sources) == ["a", "a.f", "a.z", "a.z.f", "b", "b.f"]
    assert sources["a.f"] == [("a.f(x, y)", "Does.")]


def test_the_compiled_modules_give_the_same_corpus_in_every_process():
    code = (
        "import hashlib; from tests.model.tiny_training import c_sources;"
        "print(hashlib.sha256(repr(list(c_sources())).encode()).hexdigest())"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (run.communicate()[0] for run in runs)
    assert len(first.strip()) == 64
    assert first == second


def small_corpus():
    """Sixty-four documents, of which the names decide that one or more are held out."""
    return {f"small/{i}": f"The number {i} is followed by {i + 1}. " * 4 for i in range(64)}


SMALL = Settings(
    steps=24, tokens_per_step=128, window=64, long_window=128, warmup_steps=5, vocab_size=320
)


@pytest.fixture
def small_network(monkeypatch):
    """The network that is trained, two layers of it and a third as wide.

    Muon computes in bfloat16, a step of the whole in seconds where the processor has to emulate it.
    """

    def build(vocab_size):
        config = build_network(vocab_size).config
        config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 128, 2
        config.layer_types = config.layer_types[:2]
        return Qwen3ForCausalLM(config)

    monkeypatch.setattr(tiny_training, "build_network", build)
    return build


def test_a_few_steps_lower_the_loss_and_write_a_folder_that_loads(tmp_path, small_network):
    result = make_checkpoint(small_corpus(), tmp_path, SMALL)
    assert result["steps"] == SMALL.steps
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    network = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True
    )
    held_out = split(small_corpus())[1]
    bits = bits_per_byte(network, tokenizer, held_out)
    assert math.isclose(bits, result["held out"], rel_tol=1e-4)
    torch.manual_seed(SMALL.seed)
    assert bits < bits_per_byte(small_network(len(tokenizer)), tokenizer, held_out) / 2


@pytest.mark.usefixtures("small_network")
def test_the_same_seed_and_steps_give_the_same_files(tmp_path):
    settings = dataclasses.replace(SMALL, steps=2)
    for name in ("a", "b"):
        make_checkpoint(small_corpus(), tmp_path / name, settings)
    for name in CHECKPOINT_FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_documents_that_leave_nothing_to_hold_out_are_refused(tmp_path):
    with pytest.raises(ValueError, match="wanted some to learn from and some to hold out"):
        make_checkpoint({"small/0": "x"}, tmp_path, SMALL)


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--minutes", "-1"], ["--steps", "x"]])
def test_a_senseless_length_of_training_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err
