"""The warm-up before the first request: each part is done once, also when it starts early."""

import pytest
import torch

import backends
from model.control.config import EngineConfig
from model.forward.network import PagedNetwork
from model.forward.warm_up import compile_network, prepare_network
from tests.model.networks import build

CONFIG = EngineConfig(compile=True, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture
def done(monkeypatch):
    """What of a preparation has been done, in order."""
    found = []
    for name in ("warm_up", "warm_up_draws", "trace"):
        method = getattr(PagedNetwork, name)

        def noting(network, *arguments, name=name, method=method):
            found.append(name)
            method(network, *arguments)

        monkeypatch.setattr(PagedNetwork, name, noting)
    return found


def network_of(name, num_blocks):
    network = PagedNetwork(build(name, 3), backends.get_backend("numba"))
    network.allocate(num_blocks, 16)
    return network


def prepared(network, config=CONFIG):
    return prepare_network(network, config, torch.zeros(4, dtype=torch.int64), 100).how


def test_what_is_compiled_before_the_cache_is_allocated_is_not_compiled_again(done):
    network = network_of("qwen3", 1)
    assert compile_network(network, CONFIG) == compile_network(network, CONFIG) == "traced"
    network.free()
    network.allocate(40, 16)
    assert prepared(network) == "traced"
    assert sorted(done) == ["trace", "warm_up", "warm_up_draws"]
    assert prepared(network) == "traced"  # another call starts from the beginning
    assert sorted(done) == 2 * ["trace"] + 2 * ["warm_up"] + 2 * ["warm_up_draws"]


def test_the_reason_for_eager_mode_is_reported_by_later_calls(done):
    network = network_of("gpt_oss", 1)
    why = compile_network(network, CONFIG)
    assert why.startswith("eager (")
    assert prepared(network) == why
    assert done.count("trace") == 1


@pytest.mark.parametrize("settings", [{"eager": True}, {"sanitize": True}, {"compile": False}])
def test_a_network_that_is_to_run_as_it_is_is_not_traced(settings, done):
    network = network_of("qwen3", 1)
    assert compile_network(network, EngineConfig(**settings)) == "eager"
    assert sorted(done) == ["warm_up", "warm_up_draws"]


def test_a_kernel_that_does_not_compile_is_told(monkeypatch):
    def fail(*_):
        raise OSError("no room on the device")

    monkeypatch.setattr(PagedNetwork, "warm_up", fail)
    network = network_of("qwen3", 1)
    with pytest.raises(OSError, match="no room"):
        compile_network(network, CONFIG)
    assert network.mode is None
