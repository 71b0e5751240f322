"""One network on several processes: the tokens of one process, and a loss that is told."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from model.engine import Engine, TwinEngine
from model.errors import RankLostError, UnsupportedModelError, UsageError
from model.load.architectures import auto_class
from model.ranks.parallel import shard_network
from model.ranks.ranks import Ranks, join_ranks
from tests.hang import HANG_S
from tests.model import vision
from tests.model.cli.test_run import main
from tests.model.tiny_configs import make_config
from tests.model.walk import DATA

_ROOT = Path(__file__).parents[3]
_MAIN = _ROOT / "tests/model/ranks_main.py"
_GONE = "rank {} of the processes that share the network is gone"
_PROMPTS = [
    {"prompt": "Return the number of items in the list, and", "max_tokens": 12},
    {"prompt": "Return the number of items in the list, or", "max_tokens": 24},
    {"prompt": "x", "max_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 3, "n": 2},
    {"prompt": "Raise an error if the", "max_tokens": 20, "temperature": 0.7, "seed": 5},
]


class Ranked:
    """The processes of one network."""

    def __init__(self, forks, size, arguments):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.ranks = [
            forks.start(*arguments, **shared, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(size)
        ]

    def end(self, timeout_s=HANG_S):
        """Wait for all: the highest exit code, and what they have written, rank by rank."""
        ended = [rank.end(timeout_s) for rank in self.ranks]
        written = ("".join(getattr(one, name) for one in ended) for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess((), max(one.returncode for one in ended), *written)


@pytest.fixture
def ranked(forks):
    """Starts the processes of one network."""
    return lambda size, *arguments: Ranked(forks, size, arguments)


def texts_of(output):
    return [each["text"] for each in json.loads(output)["requests"]]


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(each) + "\n" for each in _PROMPTS))
    # 12 blocks: some of the requests are preempted; 16 tokens a step: prompts come in chunks
    sizes = [
        "--num-blocks",
        "12",
        "--block-size",
        "8",
        "--max-num-batched-tokens",
        "16",
        "--compile",
        "--json",
    ]
    run = ["--prompts-file", str(prompts), *sizes]
    assert main(run) == 0
    alone = capsys.readouterr().out
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "model.run", *run, "--tp", "2", "--check-ranks"]
    shared = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert shared.returncode == 0, shared.stderr
    assert texts_of(shared.stdout) == texts_of(alone)
    assert len(texts_of(alone)) == 5
    assert "network: traced" in shared.stderr
    assert json.loads(shared.stdout)["stats"]["num_preemptions"] > 0


@pytest.mark.slow
def test_processes_with_a_draft_model_write_what_one_writes_without(ranked, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(each) + "\n" for each in _PROMPTS))
    run = ["--prompts-file", str(prompts), "--num-blocks", "30", "--json"]
    assert main(run) == 0
    alone = capsys.readouterr().out
    guided = [*run, "--draft-model", str(_ROOT / "model/tiny"), "--tp", "2", "--check-ranks"]
    shared = ranked(2, "-m", "model.run", *guided).end()
    assert shared.returncode == 0, shared.stderr
    assert texts_of(shared.stdout) == texts_of(alone)
    stats = json.loads(shared.stdout)["stats"]
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"] > 50


def test_images_are_computed_on_every_rank(ranked, tmp_path, capsys):
    vision.save("Qwen3VLConfig", tmp_path)
    images = [str(tmp_path / name) for name in ("one.png", "other.png")]
    for seed, path in enumerate(images):
        vision.image(40, 30 + seed, seed).save(path)
    mark, prompts = "<|image_pad|>", tmp_path / "prompts.jsonl"
    common = {"max_tokens": 8, "ignore_eos": True}
    asked = [
        {"prompt": f"a text {mark} and {mark} more", "images": images},
        {"prompt": f"a text {mark} is it", "images": images[1:]},
        {"prompt": f"a text {mark} is it", "images": images[:1]},
        {"prompt": "a text"},
    ]
    prompts.write_text("".join(json.dumps(each | common) + "\n" for each in asked))
    sizes = ["--num-blocks", "40", "--block-size", "4", "--max-num-batched-tokens", "80"]
    run = ["--model", str(tmp_path), "--prompts-file", str(prompts), *sizes, "--json"]
    assert main(run) == 0
    alone = json.loads(capsys.readouterr().out)
    shared = ranked(2, "-m", "model.run", *run, "--tp", "2", "--check-ranks").end()
    assert shared.returncode == 0, shared.stderr
    found = [each["tokens"] for each in json.loads(shared.stdout)["requests"]]
    assert found == [each["tokens"] for each in alone["requests"]]
    assert found[1] != found[2]


@pytest.mark.slow
def test_ranks_that_hold_other_blocks_are_told(ranked):
    ended = ranked(2, _MAIN, "diverge").end()
    line = "rank 1 and rank 0 have different block tables after the same calls"
    assert sorted(ended.stdout.splitlines()) == [f"rank 0: {line}", f"rank 1: {line}"], ended.stderr


@pytest.mark.slow
def test_a_process_that_dies_is_noticed_by_the_others(ranked):
    ended = ranked(2, _MAIN, "die").end()
    assert ended.stdout.splitlines() == [f"rank 0: {_GONE.format(1)}"], ended.stderr
    assert ended.stderr.splitlines().count(f"error: {_GONE.format(1)}") == 1


@pytest.mark.slow
def test_a_rank_with_other_logits_takes_the_others_tokens_and_one_with_less_memory_limits_all(
    ranked,
):
    ended = ranked(2, _MAIN, "odd").end()
    assert ended.returncode == 0, ended.stderr
    first, second = sorted(map(json.loads, ended.stdout.splitlines()), key=lambda one: one["rank"])
    assert first["num_blocks"] == second["num_blocks"] == 40 - 9
    assert len(first["tokens"]) == 12
    assert first["tokens"] == second["tokens"]
    assert max(first["kept"], second["kept"]) <= 4  # those of one step


@pytest.mark.slow
def test_a_number_of_processes_that_does_not_divide_the_heads_is_one_line(ranked):
    ended = ranked(3, "-m", "model.run", "--tp", "3").end()
    heads = "4 attention heads and 2 KV heads"
    line = f"error: --tp: wanted one of 1, 2, 4, which fit the network's {heads}, got 3"
    assert ended.returncode != 0
    assert [each for each in ended.stderr.splitlines() if each == line]


@pytest.mark.parametrize(
    ("name", "size", "line"),
    [
        ("Qwen3Config", 8, "--tp: wanted one of 1, 2, 4, which fit the network's 4 attention "),
        (
            "DeepseekV3Config",
            3,
            "--tp: wanted one of 1, 2, 4, 8, 16, which fit 64, a size of model",
        ),
        ("GptOssConfig", 3, "--expert-parallel: wanted one of 1, 2, 4, which fit the 4 experts of"),
    ],
)
def test_what_cannot_be_cut_names_the_numbers_of_processes_that_can(name, size, line):
    config = make_config(name, "")
    network = auto_class(config).from_config(config)
    ranks = Ranks(0, size, None, FiredWatchdog(), expert_parallel=line.startswith("--e"))
    with pytest.raises(UnsupportedModelError, match=f"^{line}.*, got {size}$"):
        shard_network(network, ranks, SimpleNamespace(group=""))


@pytest.mark.slow
def test_a_prompt_that_one_process_refuses_ends_those_that_already_compute(ranked):
    ended = ranked(2, "-m", "model.run", "--tp", "2", "--prompt", "a", "--max-tokens", "9999").end()
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "exceeds the model's 2048 positions" in said[0]
    assert said[1:] in ([], [f"error: {_GONE.format(0)}"])
    assert "This is a bug" not in ended.stderr


def test_a_number_of_processes_that_is_not_there_is_one_line(capsys):
    assert main(["--tp", "2"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("error: --tp: wanted the number of processes, which is 1, got 2: start it as")
    )


def test_experts_are_shared_by_several_processes_only():
    with pytest.raises(UsageError, match="--expert-parallel: wanted --tp with several processes"):
        join_ranks(1, expert_parallel=True)


@pytest.mark.slow
def test_experts_that_stay_whole_give_the_same_logits_and_what_has_none_is_refused(ranked):
    equal = ["MixtralConfig/", "GptOssConfig/", "DeepseekV3Config/"]
    ended = ranked(2, _MAIN, "experts", *equal, "LlamaConfig/").end()
    line = "refused: --expert-parallel: Transformers has no expert-parallel plan for"
    assert json.loads(ended.stdout) == {
        **dict.fromkeys(equal, "equal"),
        "LlamaConfig/": f"{line} LlamaForCausalLM",
    }


@pytest.mark.walk
@pytest.mark.parametrize(
    ("what", "size", "every", "least"),
    # Of four processes only the sizes are new: a third of the networks has each.
    [("walk", 2, 1, 60), ("walk", 4, 3, 15), ("experts", 2, 1, 20)],
)
def test_every_network_that_runs_is_cut_without_a_difference_or_refused(
    ranked, what, size, every, least
):
    walked = json.loads(DATA.read_text())["outcomes"]
    equal = [f"{name}/{variant}" for name, variant, outcome in walked if outcome == "equal"]
    names = equal[::every]
    ended = ranked(size, _MAIN, what, *names).end(1200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    outcomes = json.loads(ended.stdout)
    refusals = ("refused: --tp: ", "refused: --expert-parallel: ", "not dense: ")
    wrong = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome != "equal" and not outcome.startswith(refusals)
    }
    assert not wrong
    assert sum(outcome == "equal" for outcome in outcomes.values()) > least


class FiredWatchdog:
    """Stands in for a watchdog that has noticed that rank 1 is gone."""

    failed = False

    def loss(self):
        error = RankLostError(_GONE.format(1))
        error.was_told = True
        return error

    def fail(self):
        self.failed = True


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at pair.cc] Connection closed by peer [127.0.0.1]:1"),
        UnsupportedModelError("the network fails on this configuration"),
    ],
)
def test_a_rank_that_is_lost_while_an_engine_is_made_is_told(monkeypatch, error):
    """Also where what fails first takes it for an error of its own."""

    def fail(*_):
        raise error from RuntimeError("Connection reset by peer")

    monkeypatch.setattr(Engine, "__init__", fail)
    watchdog = FiredWatchdog()
    with pytest.raises(RankLostError, match="rank 1 of the processes"):
        TwinEngine(SimpleNamespace(ranks=Ranks(0, 2, None, watchdog)), None)
    assert not watchdog.failed


def test_an_error_that_is_no_loss_is_its_own_and_the_others_are_told(monkeypatch):
    def fail(*_):
        raise UnsupportedModelError("of this network alone")

    monkeypatch.setattr(Engine, "__init__", fail)
    watchdog = FiredWatchdog()
    with pytest.raises(UnsupportedModelError):
        TwinEngine(SimpleNamespace(ranks=Ranks(0, 2, None, watchdog)), None)
    assert watchdog.failed


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["load", "engine", "step", "stuck"])
def test_a_server_that_loses_a_rank_says_so_in_one_line_and_ends(ranked, stage):
    server, other = ranked(2, _MAIN, "serve", stage).ranks
    if ready := server.wait_for(r"(\S+): ready"):
        asked = {"prompt": "A tuple is", "max_tokens": 100, "ignore_eos": True}
        answer = httpx.post(f"{ready[1]}/v1/completions", json=asked, timeout=HANG_S)
        assert answer.status_code == 500
        assert _GONE.format(1) in answer.json()["error"]["message"]
    ended = server.end()
    assert (ended.returncode, other.end().returncode) == (3, 9)
    assert (ready is not None) == (stage in {"step", "stuck"})
    lines = ended.stderr.splitlines()
    assert lines[0].endswith("model/tiny")
    assert [line for line in lines if "processes that share" in line] == [
        f"error: {_GONE.format(1)}"
    ]
    assert lines[-1] == f"error: {_GONE.format(1)}"
    assert "Traceback" not in ended.stderr
