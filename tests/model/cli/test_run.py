"""`python -m model.run`: what it writes where, and its exit codes."""

import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvcore
from model.attention.attention import PagedPass
from model.cli import progress, prompts, session
from model.cli.exits import exits
from model.cli.session import execute

ROOT = Path(__file__).parents[3]
TWO = ["--prompt", "a prompt of some length, ", "--prompt", "a prompt of some length, again"]


def main(argv):
    """What the process does with a command line, in this one; its exit code."""
    with pytest.raises(SystemExit) as ending, exits():
        sys.exit(execute(*prompts.read_command_line(argv)))
    return ending.value.code


@pytest.fixture
def call(checkpoint, capsys, monkeypatch):
    """Runs a command line on the random checkpoint; exit code, stdout, stderr."""

    def run(*argv, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="ascii"))
        usual = ["--model", str(checkpoint), "--backend", "numba", "--block-size", "4"]
        code = main([*usual, "--max-tokens", "12", *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_what_is_to_be_kept_is_found_later_than_what_is_not(call, tmp_path):
    file, found = tmp_path / "prompts.jsonl", []
    sizes = ["--num-blocks", "20", "--max-num-seqs", "1", "--max-tokens", "2"]
    for kept in ([], ["0:24"]):
        lines = [{"prompt": TWO[1], "retain": kept}, {"prompt": "z" * 50}, {"prompt": "y" * 50}]
        file.write_text("\n".join(map(json.dumps, [*lines, {"prompt": TWO[1]}])))
        code, out, _ = call("--prompts-file", str(file), *sizes, "--json")
        assert code == 0
        found.append(json.loads(out)["requests"][-1]["num_cached_tokens"])
    assert found == [0, 24]


def test_a_chat_is_continued_as_the_models_template_has_it_and_keeps_its_name(call, tmp_path):
    file, chat = tmp_path / "chats.jsonl", [{"role": "user", "content": "What is a tuple?"}]
    body = {"model": "any", "messages": chat, "temperature": 0, "max_tokens": 12}
    batch = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    plain = {"prompt": "user: What is a tuple?\nassistant:"}  # what a chat is without a template
    file.write_text("\n".join(map(json.dumps, [plain, {"messages": chat}, batch])))
    code, out, err = call("--prompts-file", str(file), "--json", "--verify")
    assert code == 0, err
    prompt, told, named = json.loads(out)["requests"]
    assert prompt["tokens"] == told["tokens"] == named["tokens"]
    assert [one.get("custom_id") for one in (prompt, told, named)] == [None, None, "one"]
    code, out, err = call("--prompts-file", str(file))
    assert code == 0, err
    assert "[2] user: What is a tuple?\n" in out
    assert "[one] user: What is a tuple?\n" in out


def test_a_draft_model_is_loaded_and_told_of(call, checkpoint):
    code, plain, _ = call(*TWO, "--json")
    assert code == 0
    code, out, err = call(*TWO, "--json", "--draft-model", str(checkpoint), "--verify")
    assert code == 0
    texts = [[one["text"] for one in json.loads(each)["requests"]] for each in (plain, out)]
    assert texts[0] == texts[1]
    stats = json.loads(out)["stats"]
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"] > 10
    assert "; draft model's layers: 2 full-attention" in err
    assert "draft model: eager" in err
    code, out, err = call(*TWO, "--draft-model", "./missing/model")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: --draft-model: there is no folder './missing/m")


def test_texts_and_the_table_go_to_stdout_and_progress_to_stderr(call):
    code, out, err = call(*TWO)
    assert code == 0
    assert "[1] a prompt of some length, \n    =>" in out
    table = out[out.index("requests ") :].splitlines()
    names = ["requests", "new tokens", "tokens per second", "prefix hit rate"]
    names += ["blocks used", "blocks evicted", "KV bytes"]
    assert [line[:17].rstrip() for line in table] == names
    assert all(line[17:19] == "  " and line[19] != " " for line in table)
    # 25 and 30 tokens; the second starts a step later and finds 24 of the first. In the last step
    # of the first they have 36 and 40 tokens, so 9 and 10 blocks, of which 6 are shared.
    assert "43.6% (24 of 55 prompt tokens)" in out
    assert "13 of 20 at the peak, 4 tokens each" in out
    assert "numba on cpu" in err


def test_json_is_one_document_with_the_numbers_of_the_table(call):
    code, out, _ = call(*TWO, "--json")
    document = json.loads(out)
    assert (code, document["backend"], document["dtype"]) == (0, "numba", "float32")
    first, second = document["requests"]
    assert (first["num_prompt_tokens"], first["num_cached_tokens"]) == (25, 0)
    assert (second["num_prompt_tokens"], second["num_cached_tokens"]) == (30, 24)
    assert len(first["tokens"]) == 12
    assert first["finish_reason"] == "length"
    stats = document["stats"]
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, float32
    assert stats["peak_used_blocks"] == 13
    assert stats["paged_kv_bytes"] == 13 * 4 * token_bytes
    assert stats["flat_kv_bytes"] == 2 * (30 + 12) * token_bytes
    assert stats["hit_rate"] == round(24 / 55, 4)
    assert document["verified"] is None


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_start_that_takes_long_says_what_it_does(call, checkpoint, monkeypatch, is_slow):
    """Every part takes longer than a user waits in silence, or none does."""

    class Timer(threading.Timer):
        def start(self):
            if is_slow and self.interval == progress._PATIENCE_S:
                self.function(*self.args)

    monkeypatch.setattr(progress, "threading", SimpleNamespace(Timer=Timer))
    code, _, err = call("--prompt", "x")
    lines = [line for line in err.splitlines() if line.endswith(" ...")]
    assert code == 0
    assert lines == is_slow * [
        f"loading {checkpoint} ...",
        "checking the network and allocating its KV cache ...",
        "compiling kernels (the first time on a machine takes longest) ...",
    ]


def test_without_a_stderr_progress_goes_nowhere(call, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    code, out, _ = call(*TWO, "--json")
    assert (code, len(json.loads(out)["requests"])) == (0, 2)


def test_a_stream_is_character_for_character_the_whole_text(call):
    _, whole, _ = call(*TWO, "--prompt", "b\nb")
    code, streamed, _ = call(*TWO, "--prompt", "b\nb", "--stream")
    assert code == 0
    assert streamed[: streamed.index("requests ")] == whole[: whole.index("requests ")]


def test_without_the_prefix_cache_nothing_is_hit_and_the_text_is_the_same(call):
    cached = json.loads(call(*TWO, "--json")[1])
    uncached = json.loads(call(*TWO, "--json", "--no-prefix-cache")[1])
    assert (cached["stats"]["num_hit_tokens"], uncached["stats"]["num_hit_tokens"]) == (24, 0)
    assert [r["tokens"] for r in cached["requests"]] == [r["tokens"] for r in uncached["requests"]]


def test_a_small_pool_and_a_small_step_change_how_and_not_what(call):
    large = json.loads(call(*TWO, "--json")[1])
    small = json.loads(
        call(*TWO, "--json", "--num-blocks", "13", "--max-num-batched-tokens", "5")[1]
    )
    assert small["stats"]["num_preemptions"] + small["stats"]["num_evicted_blocks"] > 0
    assert small["stats"]["num_steps"] > large["stats"]["num_steps"]
    assert [r["text"] for r in small["requests"]] == [r["text"] for r in large["requests"]]


def test_samples_of_a_prompt_are_texts_of_their_own_streamed_or_whole(call):
    draw = [*TWO, "--temperature", "1.5", "--n", "2"]
    _, whole, _ = call(*draw)
    code, streamed, _ = call(*draw, "--stream")
    assert code == 0
    assert streamed[: streamed.index("requests ")] == whole[: whole.index("requests ")]
    labels = [line.split()[0] for line in whole.splitlines() if line.startswith("[")]
    assert labels == ["[1.1]", "[1.2]", "[2.1]", "[2.2]"]
    document = json.loads(call(*draw, "--json")[1])
    requests = document["requests"]
    assert [(r["prompt"], r["sample"]) for r in requests] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({r["text"] for r in requests}) == 4
    assert document["stats"]["num_forks"] == 2


def test_what_was_decided_about_memory_is_said_once(call):
    _, _, err = call(*TWO, "--num-blocks", "30", "--swap-memory-bytes", "1M")
    assert "KV cache: 30 blocks of 4 tokens, 60.0 KiB of " in err
    assert "(as asked for); layers: 2 full-attention\n" in err
    assert "preempted requests are swapped to host memory, up to 1.0 MiB\n" in err


def test_draws_repeat_with_their_seed(call):
    draw = [*TWO, "--json", "--temperature", "1.5", "--seed"]
    texts = [
        [request["text"] for request in json.loads(call(*draw, seed)[1])["requests"]]
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_verify_compares_every_token_with_generate(call):
    code, out, err = call(*TWO, "--verify", "--json")
    assert (code, json.loads(out)["verified"]) == (0, True)
    assert "verified: 24 tokens of 2 requests are those of Transformers' generate" in err


def test_verify_says_where_a_wrong_token_is(call, monkeypatch):
    """Positions 30 and later of every cache read as if nothing had been written there."""
    attend = PagedPass.attend

    def forgetful(self, layer, query, key, value, terms):
        lost = self.batches[0].seq_lens.max() > 30
        return attend(self, layer, query, key, torch.zeros_like(value) if lost else value, terms)

    monkeypatch.setattr(PagedPass, "attend", forgetful)
    code, out, err = call(*TWO, "--verify", "--json")
    document = json.loads(out)
    assert (code, document["verified"]) == (1, False)
    mismatch = document["mismatches"][0]
    paged = document["requests"][mismatch["index"]]["tokens"]
    assert paged[mismatch["position"]] == mismatch["paged"] != mismatch["dense"]
    where = f"request {mismatch['index'] + 1}, token {mismatch['position']}: paged "
    assert where in err


def test_a_prompt_from_standard_input_is_continued(call):
    code, out, _ = call("--prompt", "-", stdin=b"piped in\n")
    assert code == 0
    assert out.startswith("[1] piped in\n    =>")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backend", "nunba"], "unknown backend 'nunba'"),
        (["--model", "./missing"], "there is no folder './missing'"),
        (["--prompt", ""], "wanted a prompt that is not empty"),
        (["--prompt", "x" * 40, "--num-blocks", "5"], "the KV cache has 4"),
        (["--prompt", "x" * 250], "exceeds the model's 256 positions"),
        (["--block-size", "0"], "--block-size: wanted an integer from 1"),
        (["--prompts-file", "missing.jsonl"], "cannot read 'missing.jsonl'"),
        (["--temperature", "nan"], "--temperature: wanted a"),
        (["--max-num-seqs", "0"], "--max-num-seqs: wanted an integer of at least 1"),
        (["--num-blocks", str(2**31 - 1)], "blocks of 4 tokens take"),
        (
            ["--kv-memory-bytes", "1K"],
            "two blocks of 4 tokens take 4.0 KiB, the cache has 1.0 KiB",
        ),
        (["--kv-memory-bytes", "900T"], "--kv-memory-bytes: wanted at most"),
        (["--kv-memory-fraction", "1e-9"], "--kv-memory-fraction: two blocks"),
        (["--verify", "--seed", "1"], "remove --seed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(call, argv, message):
    code, out, err = call(*argv)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_an_interrupt_is_one_line_and_exit_code_130(call, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prompts, "read_prompts", interrupted)
    assert call() == (130, "", "interrupted\n")


def test_kvcores_refusal_of_an_argument_is_bad_input_and_its_bugs_are_not(call, monkeypatch):
    def refusing(*_, **__):
        raise kvcore.InvalidArgumentError("seq: wanted another")

    def broken(*_, **__):
        raise kvcore.InvariantError("a block is lost")

    monkeypatch.setattr(session, "start", refusing)
    assert call() == (2, "", "error: seq: wanted another\n")
    monkeypatch.setattr(session, "start", broken)
    code, _, err = call()
    assert code == 3
    assert "Traceback" in err
    assert "a block is lost" in err


def spawn(*argv, stdin="", stdout=subprocess.PIPE, **environment):
    return subprocess.run(
        [sys.executable, "-m", "model.run", *argv],
        cwd=ROOT,
        env={**os.environ, **environment},
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )


def test_help_shows_common_flags_and_help_all_every_flag():
    common, every = spawn("--help"), spawn("--help-all")
    for done in (common, every):
        assert (done.returncode, done.stderr) == (0, "")
        assert "--max-tokens" in done.stdout
    assert "--max-num-batched-tokens" not in common.stdout
    assert "--max-num-batched-tokens" in every.stdout


@pytest.mark.parametrize("argv", [["--help"], ["--nonsense"]])
def test_help_and_bad_input_are_answered_before_torch_is_loaded(argv):
    done = spawn(*argv, PYTHONPROFILEIMPORTTIME="1")
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "model.cli.prompts" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "backends"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_onto_a_full_disk_is_one_line_and_exit_code_3(unbuffered):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = spawn("--help", stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 3
    assert done.stderr == "error: [Errno 28] No space left on device\n"


def test_what_the_terminals_encoding_lacks_is_escaped(checkpoint):
    argv = ["--model", str(checkpoint), "--backend", "numba", "--prompt", "-", "--max-tokens", "1"]
    done = spawn(*argv, stdin="caf\u00e9", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1] caf\\xe9\n    =>")


def test_a_reader_that_goes_away_ends_the_run_quietly(checkpoint, forks):
    command = ["-m", "model.run", "--model", checkpoint, "--stream", "--block-size", "4", *TWO]
    with forks.start(*command, is_open=True) as process:
        assert process.stdout.read(3) == "[1]"
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 141
    assert "Traceback" not in errors
    assert "Exception" not in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what would be missing")
def test_triton_without_a_gpu_says_what_is_missing_and_what_to_choose(call, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    code, out, err = call("--prompt", "ab", "--backend", "triton")
    assert (code, out) == (2, "")
    assert "backend 'triton' cannot run here" in err
    assert "instead: " in err
    assert len([line for line in err.splitlines() if not line.endswith(" ...")]) == 1


def test_triton_in_its_interpreter_gives_generates_tokens(checkpoint, interpreting):
    done = interpreting.run(
        *("-m", "model.run", "--model", checkpoint, "--backend", "triton"),
        *("--prompt", "ab", "--prompt", "b"),
        *("--max-tokens", "3", "--block-size", "4", "--verify", "--json"),
        CUDA_VISIBLE_DEVICES="",
    )
    if done.returncode == 2 and "the interpreter of triton" in done.stderr:
        pytest.skip(done.stderr)  # versions that cannot interpret a loop together
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verified"] is True


def test_without_arguments_the_tiny_model_writes_what_generate_writes(capsys):
    assert main(["--verify"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("[1] ")
    assert "[4] " in out
    assert "are those of Transformers' generate" in err
    hits = next(line for line in out.splitlines() if line.startswith("prefix hit rate"))
    assert float(hits.split()[3].rstrip("%")) > 50


def test_trace_and_stats_tell_of_the_run_and_change_no_result(call, tmp_path):
    file = tmp_path / "trace.json"
    plain = json.loads(call(*TWO, "--json")[1])
    code, out, _ = call(*TWO, "--json", "--stats", "--trace", str(file))
    document = json.loads(out)
    assert code == 0
    assert document["requests"] == plain["requests"]
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == document["steps"]["num_steps"] == document["stats"]["num_steps"]
    assert document["steps"]["num_hit_tokens"] == document["stats"]["num_hit_tokens"] == 24
    _, out, _ = call(*TWO, "--stats")
    assert re.search(r"^forward +\d+\.\d%", out, re.MULTILINE)


def test_texts_are_printed_though_the_disk_is_too_full_for_the_trace(call):
    code, out, err = call(*TWO, "--json", "--trace", "/dev/full")
    assert (code, "No space left" in err) == (3, True)
    assert len(json.loads(out)["requests"]) == 2


def test_a_trace_file_that_cannot_be_written_is_bad_input(call, tmp_path):
    code, _, err = call(*TWO, "--trace", str(tmp_path))
    assert (code, err) == (2, f"error: --trace: cannot write {str(tmp_path)!r}: Is a directory\n")
