"""The command line and the prompts it names, before any model is loaded."""

import dataclasses
import io
import json

import pytest

import kvcore
from model.cli.args import parse_args
from model.cli.options import ModelOptions, OutputOptions
from model.cli.prompts import read_prompts
from model.control.config import MAX_BLOCK_SIZE, MAX_NUM_BLOCKS, EngineConfig
from model.control.grammar import Grammar
from model.control.params import SamplingParams
from model.errors import InvalidArgumentError, UsageError
from model.tiny import CHECKPOINT_DIR, DEMO_PROMPTS


def read(*argv, stdin=b""):
    return read_prompts(parse_args(argv), io.BytesIO(stdin))


def test_without_arguments_the_tiny_model_says_its_own_prompts():
    options = parse_args([])
    assert (options.model.backend, options.model.path) == ("auto", str(CHECKPOINT_DIR))
    specs = read_prompts(options, None)
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
            *("--n", "11", "--watermark", "0.25", "--priority-span", "12"),
            *("--swap-memory-bytes", "13K"),
        ]
    )
    assert options.model == ModelOptions(backend="numba", model="there", dtype="float16")
    assert (options.engine.num_blocks, options.engine.block_size) == (7, 8)
    assert (options.engine.max_num_batched_tokens, options.engine.max_num_seqs) == (9, 10)
    assert not options.engine.enable_prefix_caching
    assert (options.engine.watermark, options.engine.priority_span) == (0.25, 12)
    assert options.engine.swap_memory_bytes == 13 * 1024
    assert options.output == OutputOptions(stream=True)
    first, second = read_prompts(options, None)
    assert (first.text, second.text) == ("a", "b")
    assert first.params == SamplingParams(
        n=11,
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
    (spec,) = read("--prompt", "-", stdin="\ufefftwo\r\nl\u00efnes\n".encode())
    assert spec.text == "two\nl\u00efnes"


class Unreadable(io.RawIOBase):
    """What stdin is after `0>file`."""

    def read(self, size=-1):
        raise io.UnsupportedOperation("not readable")


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (None, "stdin is closed"),
        (Unreadable(), "cannot read: not readable"),
        (io.BytesIO(b"a\xffb"), "is not UTF-8: invalid start byte at byte 1"),
    ],
)
def test_a_standard_input_without_text_is_one_error(stdin, message):
    with pytest.raises(UsageError, match=rf"^--prompt - \(stdin\).*{message}"):
        read_prompts(parse_args(["--prompt", "a", "--prompt", "-"]), stdin)


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
        (["--max-tokens", "many"], "--max-tokens: wanted an integer from 1 to .*, got 'many'"),
        (["--dtype", "int8"], "--dtype: wanted one of 'auto', 'float32', .*, got 'int8'"),
        (["--block-size", "0"], "--block-size: wanted an integer from 1 to 1048576, got 0"),
        (["--block-size", "1048577", "--num-blocks", "2"], "from 1 to 1048576, got 1048577"),
        (["--num-blocks", "1"], "--num-blocks: wanted an integer from 2 to 2147483647, got 1"),
        (["--num-blocks", str(2**31)], "--num-blocks: .* to 2147483647, got 2147483648"),
        (["--num-blocks", str(10**30)], "--num-blocks: .* to 2147483647, got 10{30}"),
        (["--kv-memory-bytes", "2 elephants"], "wanted bytes, such as .* got '2 elephants'"),
        (["--kv-memory-bytes", "9" * 16], "wanted bytes, such as"),
        (["--kv-memory-bytes", "0"], "--kv-memory-bytes: wanted an integer of at least 1, got 0"),
        (
            ["--kv-memory-fraction", "0"],
            "--kv-memory-fraction: wanted a number above 0 and at most 1",
        ),
        (["--kv-memory-fraction", "nan"], "--kv-memory-fraction: wanted a number .*, got nan"),
        (
            ["--kv-memory-fraction", "1", "--num-blocks", "9"],
            "num_blocks: cannot be combined with kv_mem",
        ),
        (["--max-num-seqs", "0"], "--max-num-seqs: wanted an integer of at least 1, got 0"),
        (["--watermark", "1"], "--watermark: wanted a number of at least 0 and below 1, got 1.0"),
        (["--priority-span", "0"], "--priority-span: wanted an integer of at least 1, got 0"),
        (["--swap-memory-bytes", "-1"], "--swap-memory-bytes: (wanted bytes|expected one)"),
        (["--verify", "--n", "2"], "greedy generation: remove --n"),
        (
            ["--max-num-batched-tokens", str(2**31)],
            "--max-num-batched-tokens: wanted an integer from 1 to 2147483647",
        ),
        (
            ["--max-num-batched-tokens", "-1"],
            "--max-num-batched-tokens: wanted an integer from 1 to .*, got -1",
        ),
        (["--stream", "--json"], "--stream prints text"),
        (["--verify", "--top-p", "0.5"], "greedy generation: remove --top-p"),
        (["--verify", "--temperature", "0"], "remove --temperature"),
    ],
)
def test_a_wrong_command_line_is_one_error(argv, message):
    with pytest.raises((UsageError, InvalidArgumentError), match=message):
        parse_args(argv)


def test_the_sizes_that_an_engine_may_have_are_those_of_kvcore():
    EngineConfig(num_blocks=MAX_NUM_BLOCKS, block_size=MAX_BLOCK_SIZE)
    kvcore.KVCacheManager(2, MAX_BLOCK_SIZE)
    for sizes in ((2, MAX_BLOCK_SIZE + 1), (MAX_NUM_BLOCKS + 1, 1)):
        with pytest.raises(kvcore.InvalidArgumentError):
            kvcore.KVCacheManager(*sizes)
        with pytest.raises(InvalidArgumentError, match="wanted an integer from"):
            EngineConfig(num_blocks=sizes[0], block_size=sizes[1])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", "  "], r"--prompt \(number 1\): wanted a prompt that is not empty"),
        (["--prompt", "-"], r"--prompt - \(stdin\): wanted a prompt that is not empty"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature: wanted a number of"),
        (["--prompt", "a", "--temperature", "1", "--top-p", "2"], "--top-p: wanted a number above"),
        (["--prompt", "a", "--temperature", "1", "--top-k", "0"], "--top-k: wanted an integer"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens: wanted an integer from"),
        (["--prompt", "a", "--top-k", "3"], "top_k has no effect with a temperature of 0"),
        (["--prompt", "a", "--n", "3"], "n has no effect with a temperature of 0"),
        (["--prompt", "a", "--n", "0", "--temperature", "1"], "n: wanted an integer from 1 to"),
        (["--prompt", "a", "--seed", "3"], "seed has no effect with a temperature of 0"),
        (["--prompt", "a", "--prompt", "a\udc80b"], r"\(number 2\): wanted text that UTF-8 can"),
        (["--prompts-file", "a\0b.txt"], "cannot read .*: embedded null byte"),
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
        ('{"text": "a"}', "line 2: unknown field 'text'; known: prompt, bad_words, "),
        ('{"max_tokens": 3}', "line 2: wanted a prompt that is not empty, got None"),
        ('{"prompt": 3}', "line 2: wanted a prompt that is not empty, got 3"),
        ('{"prompt": "a", "top_p": "x"}', "line 2: top_p has no effect"),
        ('{"prompt": "a", "temperature": "x"}', "line 2: temperature: wanted a number"),
        ('{"prompt": "a", "stop": [1]}', "line 2: stop: wanted"),
        ('{"prompt": "a\\ud800"}', r"line 2: wanted .* UTF-8 .*, got '.ud800' at character 2"),
        ('{"prompt": null}', "line 2: wanted a prompt that is not empty, got None"),
        ('{"prompt": "a", "stop_token_ids": [4294967296]}', "line 2: stop_token_ids: wanted"),
        ('{"prompt": "a", "temperature": 1, "seed": 1.5}', "line 2: seed: wanted an integer"),
        ('{"prompt": "a", "temperature": 1, "n": true}', "line 2: n: wanted an integer from 1"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias: wanted pairs of a token"),
        ('{"prompt": "a", "logit_bias": {"3": 101}}', "line 2: logit_bias: wanted pairs of a to"),
        ('{"prompt": "a", "grammar": {"regexp": "a"}}', "line 2: grammar: wanted an object with"),
        ('{"prompt": "a", "priority": 1e6}', "line 2: priority: wanted an integer .*, got 1000000"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read("--prompts-file", str(file))


@pytest.mark.parametrize(
    ("begin", "repeated", "count", "end", "message"),
    [
        ('{"prompt": "a", "temperature": 1', "0", 400, "}", "temperature: wanted a number of at"),
        ('{"prompt": "a", "max_tokens": 1', "0", 4300, "}", "an integer has more digits than"),
        ("", "[", 100_000, "", "its lists or objects are nested too deeply"),
    ],
)
def test_a_line_beyond_pythons_limits_is_one_error(tmp_path, begin, repeated, count, end, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + begin + repeated * count + end, encoding="utf-8")
    with pytest.raises(UsageError, match=f"jsonl line 2: {message}") as error:
        read("--prompts-file", str(file))
    assert len(str(error.value)) < 300


def test_a_line_says_how_often_and_how_soon_over_the_command_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a", "n": 2, "priority": -3}, {"prompt": "b", "n": None}]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    specs = read("--prompts-file", str(file), "--temperature", "1", "--n", "4")
    assert [(spec.params.n, spec.request.priority) for spec in specs] == [(2, -3), (4, 0)]


def test_a_line_has_a_bias_by_token_and_a_grammar(tmp_path):
    file = tmp_path / "prompts.jsonl"
    line = {"prompt": "a", "logit_bias": {"5": -1, "70": 2.5}, "grammar": {"choice": ["b", "c"]}}
    file.write_text(json.dumps(line), encoding="utf-8")
    [spec] = read("--prompts-file", str(file))
    assert spec.params.logit_bias == ((5, -1), (70, 2.5))
    assert spec.params.grammar == Grammar.choice(["b", "c"])


def test_what_is_kept_longer_is_said_by_a_flag_or_a_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a"}, {"prompt": "b", "retain": ["3:9@7/1000", "0:"]}]
    file.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "c", "retain": "1:2"}])))
    found = [
        [one.retention for one in spec.request.retain]
        for spec in read("--prompts-file", str(file), "--retain", "0:512", "--retain", "5:6@2")
    ]
    assert found == [
        [kvcore.Retention(0, 512), kvcore.Retention(5, 6, 2)],
        [kvcore.Retention(3, 9, 7, 1000), kvcore.Retention(0, 2**62)],
        [kvcore.Retention(1, 2)],
    ]
    for wrong in ("9:3", "3:3", "a:b", "3", "", "-1:4", "0:4@0", "0:4/0", "0:4@2147483648"):
        with pytest.raises(UsageError, match=r"--retain: wanted START:STOP\[@PRIORITY\]"):
            parse_args([f"--retain={wrong}"])
    for wrong in (5, [5], [["0:4"]], {"start": 0}, "0:0"):
        file.write_text(json.dumps({"prompt": "a", "retain": wrong}))
        with pytest.raises(UsageError, match="line 1: retain: wanted START:STOP"):
            read("--prompts-file", str(file))


def test_a_null_field_of_a_line_is_as_if_it_were_not_there(tmp_path):
    file = tmp_path / "prompts.jsonl"
    fields = {field.name: None for field in dataclasses.fields(SamplingParams)}
    file.write_text(json.dumps({"prompt": "a", **fields}), encoding="utf-8")
    (greedy,) = read("--prompts-file", str(file), "--verify")
    assert greedy.params == SamplingParams()
    given = ["--max-tokens", "3", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.75"]
    given += ["--seed", "6", "--stop", "x", "--ignore-eos"]
    (drawn,) = read("--prompts-file", str(file), *given)
    assert drawn.params == SamplingParams(
        max_tokens=3, temperature=0.5, top_k=4, top_p=0.75, seed=6, stop=("x",), ignore_eos=True
    )


@pytest.mark.parametrize(
    ("name", "line"), [("prompts.txt", "first"), ("prompts.jsonl", '{"prompt": "first"}')]
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, line):
    file = tmp_path / name
    file.write_text(f"{line}\r\n{line}\r\n", encoding="utf-8-sig", newline="")
    assert [spec.text for spec in read("--prompts-file", str(file))] == ["first", "first"]


def test_seeds_beyond_the_last_begin_again_at_0():
    twins = ["--prompt", "a", "--prompt", "a", "--temperature", "1", "--seed"]
    assert [spec.params.seed for spec in read(*twins, str(2**63 - 1))] == [2**63 - 1, 0]
    for wrong in (2**63, -1):
        message = f"seed: wanted an integer from 0 to {2**63 - 1}, got {wrong}"
        with pytest.raises(UsageError, match=message):
            read(*twins, str(wrong))


def test_a_seed_that_does_not_exist_is_no_seed_of_a_later_prompt_either(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "seed": 1}\n{"prompt": "a"}', encoding="utf-8")
    with pytest.raises(UsageError, match=r"--seed: wanted .*, got -1"):
        read("--prompts-file", str(file), "--temperature", "1", "--seed", "-1")
    file.write_text('{"prompt": "a", "seed": -1}', encoding="utf-8")
    with pytest.raises(UsageError, match=r"line 1: seed: wanted .*, got -1"):
        read("--prompts-file", str(file), "--temperature", "1")


def test_verify_refuses_the_sampling_fields_of_a_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "temperature": 1}', encoding="utf-8")
    with pytest.raises(UsageError, match="line 1: temperature has no effect with --verify"):
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


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1?"}]


def batch_line(custom_id="a", url="/v1/chat/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def lines_of(tmp_path, lines, *argv):
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return read("--prompts-file", str(file), *argv)


def test_a_chat_and_a_line_of_openais_batch_files_are_prompts(tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "What "},
                                          {"type": "text", "text": "is 1?"}]}]  # fmt: skip
    chat, named, batch, whole, plain = lines_of(
        tmp_path,
        [
            {"messages": CHAT, "max_tokens": 3, "stop": "x"},
            {"prompt": "b", "custom_id": "n"},
            batch_line(
                model="any", messages=parts, max_completion_tokens=5, logprobs=True, top_logprobs=2,
                temperature=0, top_p=1, seed=4, user="u", stream=False,
            ),
            batch_line("w", messages=CHAT, logprobs=False),
            batch_line("c", "/v1/completions", prompt="2 + 2 =", logprobs=1, temperature=0.5),
        ],
    )  # fmt: skip
    assert chat.messages == tuple(CHAT)
    assert chat.text == "system: Be brief.\nuser: What is 1?"
    assert (chat.params.max_tokens, chat.params.stop, chat.params.temperature) == (3, ("x",), 0)
    assert (chat.custom_id, named.custom_id, named.text) == (None, "n", "b")
    assert batch.messages == ({"role": "user", "content": "What is 1?"},)
    assert batch.params == SamplingParams(max_tokens=5, logprobs=2)
    assert (batch.custom_id, whole.custom_id) == ("a", "w")
    assert (whole.params.temperature, whole.params.logprobs) == (1, None)  # as OpenAI has it
    assert (plain.text, plain.messages, plain.params.logprobs) == ("2 + 2 =", (), 1)
    [greedy] = lines_of(tmp_path, [batch_line(messages=CHAT)], "--temperature", "0")
    [verified] = lines_of(tmp_path, [batch_line(messages=CHAT)], "--verify")
    assert greedy.params == verified.params == SamplingParams()


def test_null_in_a_chat_or_a_batch_line_means_not_given(tmp_path):
    nothing = dict.fromkeys(["tools", "response_format", "top_logprobs", "stream_options", "n"])
    plain, chat, batch = lines_of(
        tmp_path,
        [
            {"prompt": "a", "messages": None, "custom_id": None, "body": None},
            {"messages": CHAT, "prompt": None, "images": None, **nothing},
            batch_line(messages=CHAT, logprobs=None, temperature=None, **nothing),
        ],
    )
    assert (plain.text, plain.messages, plain.custom_id) == ("a", (), None)
    assert plain.params == chat.params == SamplingParams()  # of a run: greedy
    assert chat.messages == batch.messages == tuple(CHAT)
    assert (batch.params.temperature, batch.params.logprobs) == (1, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, "messages: wanted a list of messages, got \\[\\]"),
        ({"messages": "hi"}, "messages: wanted a list"),
        ({"messages": ["hi"]}, "messages: number 1: wanted an object with a role"),
        ({"messages": [*CHAT, {"role": "x", "content": "a"}]}, "number 3: wanted .* got {'role'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "number 1: wanted"),
        ({"messages": [{"role": "user", "content": None}]}, "content: wanted text, got None"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content: wanted"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "wanted text that UTF-8"),
        ({"messages": CHAT, "prompt": "a"}, "messages: cannot be combined with prompt"),
        ({"messages": CHAT, "tools": []}, "unknown field 'tools'"),
        ({"messages": CHAT, "stream": True}, "stream: wanted false"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": 99}, "logprobs: wanted"),
        (batch_line(messages=CHAT, logprobs=False, top_logprobs=3), "top_logprobs: wanted only"),
        ({"prompt": "a", "custom_id": 3}, "custom_id: wanted text, got 3"),
        ({"prompt": "a", "custom_id": "\ud800"}, "custom_id: wanted text that UTF-8 can encode"),
        (batch_line(messages=None), "body: wanted messages, which"),
        ({**batch_line(), "body": None}, "batch files: body is missing"),
        (batch_line("", messages=CHAT), "custom_id: wanted text, got ''"),
        (batch_line("first", messages=CHAT), "custom_id: 'first' is that of .* line 1, too"),
        (batch_line(url="/v1/embeddings", input="a"), "url: wanted /v1/chat/completions or"),
        (batch_line(url=["/v1/completions"]), "url: wanted"),
        (batch_line(max_tokens=3), "body: wanted messages, which /v1/chat/completions needs"),
        (batch_line(url="/v1/completions", messages=CHAT), "body: wanted prompt"),
        (batch_line(messages=CHAT, top_p=7), "top_p: wanted a number above 0"),
        (batch_line(messages=CHAT, temperature=0, n=2), "n has no effect"),
        ({**batch_line(messages=CHAT), "method": "GET"}, "method: wanted 'POST', got 'GET'"),
        ({**batch_line(messages=CHAT), "x": 1}, "batch files: unknown field 'x'"),
        ({**batch_line(), "body": "a"}, "body: wanted an object, got 'a'"),
        ({"custom_id": "a", "body": {"messages": CHAT}}, "batch files: method is missing"),
    ],
)
def test_a_chat_that_cannot_be_answered_is_named_by_its_line(tmp_path, line, message):
    with pytest.raises(UsageError, match=f"lines.jsonl line 2: .*{message}"):
        lines_of(tmp_path, [{"prompt": "a", "custom_id": "first"}, line])
