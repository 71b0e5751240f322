"""The module that knows Transformers' minors answers for each, and is right about the installed."""

import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from torch import nn
from transformers import MambaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations import sdpa_attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import kvcore
from kvcore.adapters.transformers_versions import (
    CACHE_ARGUMENT,
    INSTALLED,
    SUPPORTED,
    UnsupportedVersionError,
    cache_argument,
    interface_of,
)

ROOT = Path(__file__).parents[2]
NAMES = "5.19, 5.20, 5.21, 5.22, 5.23 or 5.24"


class Attending(nn.Module):
    def forward(self, input_ids, past_key_values=None):
        return input_ids


class Keeping(nn.Module):
    def forward(self, input_ids, cache_params=None):
        return input_ids


class Renamed(nn.Module):
    def forward(self, input_ids, cache=None):
        return input_ids


@pytest.mark.parametrize(
    ("version", "network", "argument"),
    [
        ("5.19.0", Attending(), "past_key_values"),
        ("5.20.2", Keeping(), "cache_params"),
        ("5.23.0", Keeping(), "cache_params"),
        ("5.23.0", Attending(), "past_key_values"),
        ("5.24.0", Renamed(), "cache"),
        ("5.24.0.dev0", Renamed(), "cache"),
    ],
)
def test_a_minor_names_the_argument_that_its_networks_have(version, network, argument):
    found = cache_argument(network, interface_of(version))
    assert found == argument
    assert found in inspect.signature(network.forward).parameters


def test_modules_store_batches_since_5_24():
    stores = {minor: interface_of(f"{minor}.1").modules_store for minor in SUPPORTED}
    assert [minor for minor, does in stores.items() if does] == ["5.24"]


def test_what_the_table_says_of_the_installed_version_is_so():
    for kind, argument in (
        (Qwen3ForCausalLM, INSTALLED.cache_argument),
        (Qwen3Attention, CACHE_ARGUMENT),
        (MambaForCausalLM, INSTALLED.state_cache_argument),
    ):
        assert argument in inspect.signature(kind.forward).parameters
    function = inspect.signature(sdpa_attention.sdpa_attention_forward)
    assert INSTALLED.modules_store == ("cache" not in function.parameters)


class Noted:
    """A cache that notes how a module calls it."""

    def __init__(self):
        self.named = []

    def get_seq_length(self, layer_idx=0):
        return 0

    def get_query_offset(self, layer_idx=0):
        return 0

    def get_mask_sizes(self, query_length, layer_idx=0):
        return query_length, 0

    def update(self, key, value, layer_idx, **named):
        self.named.append(named)
        return key, value


def test_a_module_that_stores_gives_the_cache_its_arguments_to_change():
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    network, cache = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)), Noted()
    network(network.dummy_inputs["input_ids"] % 8, use_cache=False, **{CACHE_ARGUMENT: cache})
    assert len(cache.named) == 1
    assert isinstance(cache.named[0].get("kwargs"), dict) or not INSTALLED.modules_store


@pytest.mark.parametrize(
    "version", ["4.57.1", "5.1.9", "5.18.0", "5.25.0", "5.25.0.dev0", "5.190.0", "6.24.0", "5", ""]
)
def test_another_minor_gives_one_line_that_names_those_that_are_supported(version):
    with pytest.raises(UnsupportedVersionError) as refusal:
        interface_of(version)
    assert str(refusal.value) == f"transformers: wanted {NAMES}, got {version}"
    assert isinstance(refusal.value, (kvcore.KVCoreError, ImportError))


@pytest.mark.parametrize("version", ["5.18.0", "5.25.1"])
def test_the_command_line_says_it_in_one_line_too(tmp_path, version):
    (tmp_path / "transformers.py").write_text(f"__version__ = {version!r}")
    done = subprocess.run(
        [sys.executable, "-m", "model.run"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("loading ")]
    assert line == (
        "error: transformers does not load: UnsupportedVersionError: transformers: "
        f"wanted {NAMES}, got {version}"
    )


def test_the_extras_allow_the_minors_that_are_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needs = project["project"]["optional-dependencies"]["model"]
    ranges = [line for line in needs if line.startswith("transformers")]
    major, newest = SUPPORTED[-1].split(".")
    assert ranges == [f"transformers>={SUPPORTED[0]},<{major}.{int(newest) + 1}"]
