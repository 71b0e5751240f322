"""`transformers serve` runs over kvcore's cache, and says what `generate` says."""

import contextlib
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig

from kvcore.adapters.transformers import KVCoreCache
from kvcore.adapters.transformers import __main__ as command_line
from model.tiny import CHECKPOINT_DIR
from tests.hang import HANG_S as DEADLINE_S

TINY = str(CHECKPOINT_DIR)
COMMAND = [sys.executable, "-m", "kvcore.adapters.transformers"]


def ask(url, path, body):
    return httpx.post(url + path, json=body, timeout=DEADLINE_S).raise_for_status().json()


def wait_until_ready(url, process):
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        time.sleep(0.1)
    raise AssertionError("it did not start")


def test_the_command_serves_what_generate_says():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sizes = ["--cb-num-blocks", "64", "--device", "cpu", "--dtype", "float32"]
    command = [*COMMAND, "--backend", "numba", "serve", TINY, "--continuous-batching", *sizes]
    url, body = f"http://localhost:{port}", {"model": TINY, "max_tokens": 8, "temperature": 0}
    with subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_ready(url, process)
            said = ask(url, "/v1/completions", {**body, "prompt": "A tuple is"})
        finally:
            process.terminate()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = torch.tensor([tokenizer.encode("A tuple is")])
    network = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    plain = network.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert said["choices"][0]["text"] == tokenizer.decode(plain)
    assert said["usage"]["completion_tokens"] == 8


def test_a_model_that_the_server_loads_has_kvcores_cache(monkeypatch):
    from transformers.cli.serving.model_manager import ModelManager  # noqa: PLC0415  # patched

    monkeypatch.setattr(ModelManager, "_load_model", ModelManager._load_model)  # put back later
    command_line.served(None)
    models = ModelManager(device="cpu", model_timeout=-1)  # no timer outlives the test
    model, _ = models.load_model_and_processor(f"{TINY}@main")
    manager = model.init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=64)
    )
    assert isinstance(manager._create_batch_processor().cache, KVCoreCache)


@pytest.mark.parametrize("arguments", [[], ["serve", TINY], ["chat"]])
def test_what_cannot_be_served_over_kvcore_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ending:
        command_line._run(arguments)
    assert ending.value.code == 2
    assert "continuous-batching" in capsys.readouterr().err
