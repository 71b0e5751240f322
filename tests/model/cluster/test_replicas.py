"""Replicas behind one ingress: the answers of one engine, also when a replica is lost or let go."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

from model import LLM, SamplingParams
from model.load.loader import load_model
from model.tiny import CHECKPOINT_DIR
from tests.hang import HANG_S

_ROOT = Path(__file__).parents[3]
_SIZES = ("--num-blocks", "320", "--cpus-per-process", "0.5")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: .[cluster]"
    ),
]


class Cluster:
    """`python -m model.cluster`, and what it has said."""

    def __init__(self, *flags):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "model.cluster", "--port", "0", *_SIZES, *flags],
            cwd=_ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            with self._said:
                self.lines.append(line.rstrip())
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def address(self):
        """Wait until it is ready."""

        def found():
            return [line for line in self.lines if line.endswith(": ready")]

        with self._said:
            came = self._said.wait_for(
                lambda: found() or not self._reader.is_alive(), timeout=HANG_S
            )
        assert came, self.lines
        assert found(), self.lines
        return found()[0].removesuffix(": ready")

    def ended(self):
        code = self.process.wait(HANG_S)
        self._reader.join(HANG_S)
        return code

    def replicas(self):
        """The processes of its replicas."""
        return sorted(
            pid
            for pid, (parent, command) in processes().items()
            if command.startswith("ray::ServeReplica:kvcore:replica")
            and self.process.pid in ancestors(pid)
        )

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(HANG_S)
        left = [pid for pid in processes() if self.process.pid in ancestors(pid)]
        for pid in (*left, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(HANG_S)
        self._reader.join(HANG_S)
        self.process.stderr.close()
        return left


def processes():
    """By id: the parent and the command of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_text().replace("\0", " ").strip()
            found[pid] = parent, command
    return found


def ancestors(pid):
    every, found = processes(), []
    while pid in every:
        pid = every[pid][0]
        found.append(pid)
    return found


def wait_for(condition):
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.1)


@pytest.fixture(scope="module")
def cluster():
    made = Cluster("--replicas", "2", "--max-loras", "1")
    try:
        made.address()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def client(cluster):
    with httpx.Client(base_url=cluster.address(), timeout=HANG_S) as made:
        yield made


def complete(client, **asked):
    return client.post("/v1/completions", json={"temperature": 0, **asked})


def streamed(client, events, **asked):
    """Read the events of a stream into a list, to the end."""
    body = {"temperature": 0, "stream": True, "ignore_eos": True, **asked}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))


def counted(client, name):
    """A metric of the ingress, or the sum of a metric of all replicas."""
    page = client.get("/metrics").text
    return sum(map(float, re.findall(rf"^kvcore:{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))


def test_replicas_answer_what_one_engine_answers(client):
    prompts = ["A tuple is", "Return the number of items in the list, and", "x"]
    wanted = LLM(CHECKPOINT_DIR).generate(prompts, SamplingParams(max_tokens=12))
    answer = complete(client, prompt=prompts, max_tokens=12).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [output.outputs[0].text for output in wanted]
    events = []
    streamed(client, events, prompt=prompts[0], max_tokens=12, ignore_eos=False, n=3)
    for number in range(3):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == number]
        assert "".join(choice["text"] for choice in mine) == texts[0]
        assert mine[-1]["finish_reason"] == answer["choices"][0]["finish_reason"]


def test_replicas_run_at_the_priority_of_the_command(cluster):
    own = os.getpriority(os.PRIO_PROCESS, cluster.process.pid)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in cluster.replicas()] == [own, own]


def test_prompts_that_begin_alike_find_what_the_others_have_computed(client):
    before = counted(client, "router_requests_total")
    begins = [[token] * 320 for token in range(5, 9)]
    for begin in begins:
        complete(client, prompt=begin, max_tokens=2).raise_for_status()
    for begin in begins:
        usage = complete(client, prompt=[*begin, 3, 4], max_tokens=2).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 320
    assert counted(client, "router_requests_total") == before + 8
    assert counted(client, "router_decision_seconds_total") > 0


def test_chats_that_begin_alike_find_it_too(client):
    begin = {"role": "user", "content": "list.append(x) adds an item to the end of the list. " * 8}
    cached = []
    for more in ("", "Why?"):
        messages = [begin, {"role": "assistant", "content": "Yes."}, {"role": "user",
                                                                      "content": more}]  # fmt: skip
        asked = {"messages": messages, "max_tokens": 2}
        usage = client.post("/v1/chat/completions", json=asked).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    assert cached[0] < 0.1
    assert cached[1] > 0.8


@pytest.mark.filterwarnings("ignore")  # of PEFT
def test_an_adapter_that_is_loaded_while_they_run_is_at_every_replica_and_its_prefixes_are_found(
    client, tmp_path
):
    peft = pytest.importorskip("peft")
    network = load_model(str(CHECKPOINT_DIR), torch.device("cpu")).network
    peft.get_peft_model(network, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path
    )

    def change(path, **about):
        return client.post(path, json={"lora_name": "sql", **about}).status_code

    assert change("/v1/load_lora_adapter", lora_path=str(tmp_path)) == 200
    begins = [[token] * 320 for token in range(15, 23)]
    for begin in begins:  # they are spread over the replicas, of which one had to load it again
        complete(client, prompt=begin, max_tokens=2, model="sql").raise_for_status()
    for begin in begins:
        answer = complete(client, prompt=[*begin, 3, 4], max_tokens=2, model="sql").json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
    assert change("/v1/unload_lora_adapter") == 200
    for begin in begins:
        assert complete(client, prompt=begin, max_tokens=2, model="sql").status_code == 404


def test_metrics_are_told_of_each_replica(client):
    complete(client, prompt="x", max_tokens=2).raise_for_status()
    page = client.get("/metrics").text
    ready = re.findall(r'^kvcore:engine_ready{.*replica="(\w+)".*} 1.0$', page, re.MULTILINE)
    assert len(set(ready)) == len(ready) == 2
    assert counted(client, "time_to_first_token_seconds_count") > 0


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_what_its_request_held(client, streams):
    def aborted():
        page = client.get("/metrics").text
        return sum(map(int, re.findall(r'success_total{.*"aborted".*} (\d+)', page)))

    before = aborted()
    asked = {"prompt": [7] * 40, "max_tokens": 900, "ignore_eos": True, "stream": streams}
    with (
        contextlib.suppress(httpx.ReadTimeout),
        client.stream("POST", "/v1/completions", json=asked, timeout=0.3) as response,
    ):
        assert response.status_code == 200
        next(response.iter_lines())
    wait_for(lambda: aborted() == before + 1)
    assert counted(client, "num_requests_running") == 0


def test_there_is_no_page(client):
    assert client.get("/").status_code == 404


def test_a_request_that_cannot_be_is_refused_before_a_stream_begins(client):
    refused = complete(client, prompt="x", max_tokens=100_000, stream=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    refused = complete(client, prompt=["a", [1]])
    assert refused.status_code == 400
    assert complete(client, prompt="x", max_tokens=2).status_code == 200


def test_a_replica_that_dies_fails_what_it_had_begun_and_nothing_else(cluster, client):
    streams = [[] for _ in range(6)]
    threads = [
        threading.Thread(
            target=streamed, args=(client, events), kwargs={"prompt": [n + 9] * 40,
                                                            "max_tokens": 600}
        )
        for n, events in enumerate(streams)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    wait_for(lambda: all(len(events) > 3 for events in streams))
    before = cluster.replicas()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    later = complete(client, prompt=[3] * 50, max_tokens=4)
    assert later.status_code == 200, later.text
    for thread in threads:
        thread.join(HANG_S)
    lost = [events for events in streams if "error" in events[-1]]
    whole = [events for events in streams if "error" not in events[-1]]
    assert lost
    assert whole
    assert {events[-1]["error"]["message"] for events in lost} == {
        "the replica that worked on the request was lost"
    }
    assert all(e[-1]["choices"][0]["finish_reason"] == "length" for e in whole)
    wait_for(lambda: len(cluster.replicas()) == 2)  # Ray starts another


def test_a_signal_lets_what_runs_come_to_its_end_and_leaves_nothing():
    made = Cluster("--replicas", "1", "--router", "round-robin")
    try:
        events = []
        with httpx.Client(base_url=made.address(), timeout=HANG_S) as client:
            asked = {"prompt": "A tuple is", "max_tokens": 400}
            thread = threading.Thread(target=streamed, args=(client, events), kwargs=asked)
            thread.start()
            wait_for(lambda: len(events) > 3)
            made.process.terminate()
            thread.join(HANG_S)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert made.ended() == 0
    finally:
        left = made.close()
    assert not left


def test_a_replica_of_two_processes_answers_and_is_made_anew_when_one_is_lost():
    made = Cluster("--replicas", "1", "--tp", "2", "--check-ranks")
    try:
        with httpx.Client(base_url=made.address(), timeout=HANG_S) as client:
            asked = {"prompt": "A tuple is", "max_tokens": 8}
            before = complete(client, **asked).json()["choices"]
            [leader] = made.replicas()
            followers = [
                pid
                for pid, (_, command) in processes().items()
                if command.startswith("ray::_Follower") and made.process.pid in ancestors(pid)
            ]
            assert len(followers) == 1
            os.kill(followers[0], signal.SIGKILL)
            wait_for(lambda: leader not in processes())
            assert complete(client, **asked).json()["choices"] == before
    finally:
        made.close()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--kv-memory-bytes", "1K"], "error: --kv-memory-bytes: "),
        (["--replicas", "1000"], "error: --replicas 1000: wanted at most"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(flags, line):
    flags = [*flags, "--num-blocks", "40"] if flags[0] != "--kv-memory-bytes" else flags
    command = [sys.executable, "-m", "model.cluster", "--port", "0", "--cpus-per-process", "0.5"]
    ended = subprocess.run(
        [*command, *flags], cwd=_ROOT, capture_output=True, text=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert line in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
