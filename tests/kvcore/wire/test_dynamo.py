"""Dynamo's own indexer, unmodified, follows a kvcore publisher: from the start and late.

Runs where `ai-dynamo-runtime` is installed, or where DYNAMO_PYTHON names a Python that has it.
"""

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

import kvcore
from kvcore import wire
from tests.hang import HANG_S as PATIENCE_S

pytestmark = pytest.mark.dynamo

PYTHON = os.environ.get("DYNAMO_PYTHON", "")
if not PYTHON and importlib.util.find_spec("dynamo") is None:
    pytest.skip(
        "needs ai-dynamo-runtime: pip install ai-dynamo-runtime==1.6.1, or DYNAMO_PYTHON",
        allow_module_level=True,
    )

BLOCK_SIZE = 4
SPACES = (kvcore.Namespace(), kvcore.Namespace(lora_name="sql"))


def until(true):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := true()):
        if time.monotonic() > deadline:
            pytest.fail("waited in vain")
        time.sleep(0.02)
    return found


class Indexer:
    """The indexer's HTTP face."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def call(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310  # http
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310  # http
                return answer.read()
        except (urllib.error.URLError, ConnectionError):
            return None

    def register(self, worker, publisher):
        done = self.call(
            "/register",
            {
                "instance_id": worker, "endpoint": publisher.endpoint, "model_name": "m",
                "block_size": BLOCK_SIZE, "replay_endpoint": publisher.replay,
            },
        )  # fmt: skip
        assert done is not None

    def held(self, tokens, space):
        """The tokens of the prefix that each worker holds."""
        body = {"token_ids": tokens, "model_name": "m"}
        if space.lora_name:
            body["lora_name"] = space.lora_name
        scores = json.loads(self.call("/query", body))["scores"]
        return {int(worker): ranks["0"] for worker, ranks in scores.items()}


@contextmanager
def indexer():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON or sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = Indexer(port)
        until(lambda: found.call("/health") is not None)
        yield found
    finally:
        process.kill()
        process.wait(PATIENCE_S)


class Life:
    """A manager with random requests over prompts that share prefixes."""

    def __init__(self, num_blocks, seed):
        self.random = random.Random(seed)
        self.kv = kvcore.KVCacheManager(num_blocks, BLOCK_SIZE, record_events="xxh3-128")
        self.stems = [self.random.choices(range(1000), k=40) for _ in range(6)]
        self.prompts = []

    def step(self):
        stem = self.random.choice(self.stems)[: self.random.randrange(1, 41)]
        tokens = stem + self.random.choices(range(1000), k=self.random.randrange(12))
        space = self.random.choice(SPACES)
        self.prompts.append((tokens, space))
        seq = self.kv.open(tokens, namespace=space)
        self.kv.reserve(seq, len(tokens) - seq.num_computed_tokens)
        self.kv.commit(seq, len(tokens) - seq.num_computed_tokens)
        self.kv.close(seq)
        if self.random.random() < 0.003:
            self.kv.reset()

    def held(self, tokens, space):
        """The prefix that the cache holds, by the names in its snapshot."""
        true = {name for run in self.kv.snapshot().stored for name in run.block_hashes}
        names = kvcore.block_hashes(tokens, BLOCK_SIZE, namespace=space)
        missing = [place for place, name in enumerate(names) if name not in true]
        return BLOCK_SIZE * (missing[0] if missing else len(names))


def live(publisher, life, steps):
    for _ in range(steps):
        life.step()
        publisher.publish()


def settle(found, worker, publisher, life):
    """Publish a mark until the indexer knows it: then it knows all before it."""
    mark = [2000 + worker] * BLOCK_SIZE

    def known():
        life.kv.reset()
        seq = life.kv.open(mark)
        life.kv.reserve(seq, BLOCK_SIZE)
        life.kv.commit(seq, BLOCK_SIZE)
        life.kv.close(seq)
        publisher.publish()
        return found.held(mark, SPACES[0]).get(worker) == BLOCK_SIZE

    until(known)


def num_wrong(found, worker, life, count=150):
    asked = life.random.choices(life.prompts, k=count)
    wrong = hits = 0
    for tokens, space in asked:
        true = life.held(tokens, space)
        hits += true > 0
        wrong += found.held(tokens, space).get(worker, 0) != true
    assert hits > count // 10
    return wrong


def caught_up(found, worker, life):
    """The newest prompt is held as it should be; then everything before it is too."""
    tokens, space = life.prompts[-1]
    return found.held(tokens, space).get(worker, 0) == life.held(tokens, space)


@pytest.mark.parametrize("form", ["map", "array"])
def test_it_follows_from_the_start_and_late_and_over_a_restart(form):
    life = Life(120, seed=form)
    address = "tcp://127.0.0.1:*"
    with indexer() as found:
        publisher = wire.Publisher(life.kv, address, address, form=form, replay_bytes=20_000)
        with publisher:
            found.register(1, publisher)
            settle(found, 1, publisher, life)
            live(publisher, life, 400)
            until(lambda: caught_up(found, 1, life))
            assert num_wrong(found, 1, life) == 0
            found.register(2, publisher)  # late: the buffer is far too short for all

            def joined():
                live(publisher, life, 1)  # it asks when it first hears something
                return caught_up(found, 2, life)

            until(joined)
            assert num_wrong(found, 2, life) == 0
        other = Life(120, seed=form + "again")
        with wire.Publisher(other.kv, publisher.endpoint, publisher.replay, form=form) as second:

            def followed():
                live(second, other, 1)
                return caught_up(found, 1, other)

            until(followed)
            assert num_wrong(found, 1, other) == 0
