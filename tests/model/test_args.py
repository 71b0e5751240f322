"""The command line and the prompts it names, before any model is loaded."""

import io
import json

import pytest

from model.args import parse_args
from model.errors import InvalidArgumentError, UsageError
from model.params import SamplingParams
from model.prompts import read_prompts
from model.tiny import CHECKPOINT_DIR, DEMO_PROMPTS


def read(*argv, stdin=""):
    return read_prompts(parse_args(argv), io.StringIO(stdin))


def test_without_arguments_the_tiny_model_says_its_own_prompts():
    options = parse_args([])
    assert (options.backend, options.model) == ("auto", str(CHECKPOINT_DIR))
    specs = read_prompts(options, io.StringIO())
    assert tuple(spec.text for spec in specs) == DEMO_PROMPTS
    assert all(spec.params == SamplingParams() for spec in specs)


def test_every_flag_arrives():
    options = parse_args(
        [
            *("--backend", "numba", "--model", "there", "--dtype", "float16"),
            *("--prompt", "a", "--prompt", "b", "--max-tokens", "3", "--temperature", "0.5"),
            *("--top-k", "4", "--top-p", "0.75", "--seed", "6", "--stop", "x", "--stop", "y"),
            *("--ignore-eos", "--stream", "--num-blocks", "7", "--block-size", "8"),
            *("--max-num-batched-tokens", "9", "--max-num-seqs", "10", "--no-prefix-cache"),
        ]
    )
    assert (options.backend, options.model, options.dtype) == ("numba", "there", "float16")
    assert (options.engine.num_blocks, options.engine.block_size) == (7, 8)
    assert (options.engine.max_num_batched_tokens, options.engine.max_num_seqs) == (9, 10)
    assert not options.engine.enable_prefix_caching
    assert (options.stream, options.json, options.verify) == (True, False, False)
    first, second = read_prompts(options, io.StringIO())
    assert (first.text, second.text) == ("a", "b")
    assert first.params == SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        seed=6,
        stop=("x", "y"),
        ignore_eos=True,
    )
    assert second.params.seed == 7  # one more a prompt, so that twins differ


def test_a_prompt_can_come_from_standard_input():
    (spec,) = read("--prompt", "-", stdin="two\nlines\n")
    assert spec.text == "two\nlines"


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\n  second\u2028still \n", encoding="utf-8")
    specs = read("--prompts-file", str(file), "--prompt", "before")
    assert [spec.text for spec in specs] == ["before", "first", "  second\u2028still "]


def test_a_line_of_json_has_its_own_parameters_over_those_of_the_command_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a", "max_tokens": 5, "stop": "."},
        {"prompt": "b", "temperature": 0, "stop": ["x", "y"], "stop_token_ids": [3]},
        {"prompt": "c", "seed": 5, "ignore_eos": True},
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    a, b, c = read("--prompts-file", str(file), "--temperature", "2", "--max-tokens", "9")
    assert a.params == SamplingParams(max_tokens=5, temperature=2, stop=(".",), seed=0)
    assert b.params == SamplingParams(max_tokens=9, stop=("x", "y"), stop_token_ids=(3,))
    assert c.params == SamplingParams(max_tokens=9, temperature=2, seed=5, ignore_eos=True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--max-tok", "3"], "unrecognized arguments"),
        (["--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--block-size", "0"], "block_size: wanted at least 1, got 0"),
        (["--num-blocks", "1"], "num_blocks: wanted at least 2"),
        (["--stream", "--json"], "--stream writes text as it comes"),
        (["--verify", "--top-p", "0.5"], "greedy generation: --top-p cannot be given too"),
        (["--verify", "--temperature", "0"], "--temperature cannot be given too"),
    ],
)
def test_a_wrong_command_line_is_one_error(argv, message):
    with pytest.raises((UsageError, InvalidArgumentError), match=message):
        parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", "  "], r"--prompt \(number 1\): wanted a prompt with some text"),
        (["--prompt", "-"], r"--prompt - \(stdin\): wanted a prompt with some text"),
        (["--prompt", "a", "--temperature", "-1"], "temperature: wanted a number of at least 0"),
        (["--prompt", "a", "--temperature", "1", "--top-p", "2"], "top_p: wanted a number above 0"),
        (["--prompt", "a", "--temperature", "1", "--top-k", "0"], "top_k: wanted an integer"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens: wanted an integer of at least 1"),
        (["--prompt", "a", "--top-k", "3"], "top_k has no meaning with a temperature of 0"),
        (["--prompt", "a", "--seed", "3"], "seed has no meaning with a temperature of 0"),
        (["--prompts-file", "missing.txt"], "cannot read 'missing.txt': No such file"),
        (["--prompts-file", "prompts.csv"], r"wanted a \.txt or \.jsonl file"),
    ],
)
def test_a_prompt_that_says_nothing_is_one_error(argv, message):
    with pytest.raises(UsageError, match=message):
        read(*argv)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"jsonl line 2: not JSON: .* at column 15"),
        ('["a"]', "line 2: wanted an object with a prompt, got list"),
        ('{"text": "a"}', "line 2: unknown field 'text'; known: prompt, ignore_eos, max_tokens"),
        ('{"max_tokens": 3}', "line 2: wanted a prompt with some text in it, got None"),
        ('{"prompt": 3}', "line 2: wanted a prompt with some text in it, got 3"),
        ('{"prompt": "a", "top_p": "x"}', "line 2: top_p has no meaning"),
        ('{"prompt": "a", "temperature": "x"}', "line 2: temperature: wanted a number"),
        ('{"prompt": "a", "stop": [1]}', "line 2: stop: wanted"),
        ('{"prompt": "a", "temperature": 1, "seed": 1.5}', "line 2: seed: wanted an integer"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read("--prompts-file", str(file))


def test_verify_refuses_the_sampling_fields_of_a_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "temperature": 1}', encoding="utf-8")
    with pytest.raises(UsageError, match="line 1: temperature has no meaning with --verify"):
        read("--prompts-file", str(file), "--verify")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\n \n", "has no prompts"), (b"\xff\xfe\x00", "is not UTF-8: invalid start byte")],
)
def test_a_file_without_text_is_one_error(tmp_path, content, message):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read("--prompts-file", str(file))
