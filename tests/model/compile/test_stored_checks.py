"""A check that a network has passed is not repeated, and is for every network that differs."""

import pytest
import torch

import backends
from model.compile import stored_checks, stored_files
from model.compile.stored_checks import pass_once
from model.errors import ModelError, UnsupportedModelError
from model.forward import network as networks
from model.forward.network import PagedNetwork
from model.load import architectures
from model.load.loader import load_model
from tests.model.compile.test_traced_network import CPU, switched
from tests.model.networks import build


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checks"


class Check:
    """A check that every network passes."""

    def __init__(self, act=lambda: None):
        self.count = 0
        self._act = act

    def __call__(self):
        self.count += 1
        self._act()


def test_equal_networks_are_checked_once():
    check = Check()
    for _ in range(3):
        pass_once(switched(build("llama", 3)), check)
    assert check.count == 1


def test_a_network_that_differs_is_checked():
    check = Check()
    pass_once(switched(build("llama", 3)), check)
    pass_once(switched(build("qwen3", 3)), check)
    changed = switched(build("llama", 3))
    changed.model.layers[1].mlp.forward = torch.nn.Identity().forward
    pass_once(changed, check)
    assert check.count == 3


def test_a_user_without_a_home_has_every_check(monkeypatch):
    for name in ("KVCORE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(stored_files.Path, "home", home)
    check = Check()
    for _ in range(2):
        pass_once(switched(build("llama", 3)), check)
    assert check.count == 2
    assert not stored_files.has_stored("checks")
    assert not stored_files.can_store("checks")


def test_a_failure_is_not_stored_nor_is_a_check_that_changes_the_network(folder):
    network = switched(build("llama", 3))

    def fail():
        raise UnsupportedModelError("it fails")

    with pytest.raises(UnsupportedModelError, match="it fails"):
        pass_once(network, fail)

    def change():
        network.model.layers[0].is_changed = True

    pass_once(network, change)
    assert not folder.exists()


def test_a_damaged_file_is_a_check(folder):
    check = Check()
    pass_once(switched(build("llama", 3)), check)
    (stored,) = folder.iterdir()
    stored.write_bytes(b"passed")
    pass_once(switched(build("llama", 3)), check)
    assert check.count == 2


def test_each_start_checks_that_tokens_see_no_others(monkeypatch):
    """A program may have replaced a function since an equal network passed."""
    check = Check()
    monkeypatch.setattr(networks, "check_tokens_alone", lambda *_: check())
    for _ in range(2):
        PagedNetwork(build("qwen3", 25), backends.get_backend("numba"))
    assert check.count == 2


def test_a_second_start_makes_no_pass_without_weights_and_loads_the_same(checkpoint, monkeypatch):
    find, made = architectures.find_states, []
    monkeypatch.setattr(architectures, "find_states", lambda *given: made.append(0) or find(*given))
    one, other = (load_model(str(checkpoint), CPU, once=pass_once).network for _ in range(2))
    assert len(made) == 1
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    assert all(name == its and torch.equal(left, right) for (name, left), (its, right) in pairs)


def test_a_network_that_is_refused_is_refused_by_each_start(folder_of):
    folder = folder_of(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=7)
    said = set()
    for _ in range(2):
        with pytest.raises(ModelError) as refused:
            load_model(str(folder), CPU, once=pass_once)
        said.add(str(refused.value))
    assert len(said) == 1


def test_a_network_beside_other_sources_is_checked_again(monkeypatch):
    check = Check()
    network = switched(build("llama", 3))
    pass_once(network, check)
    monkeypatch.setattr(stored_checks, "_sources", lambda: [("a module", 1, 2)])
    pass_once(network, check)
    assert check.count == 2
