"""Which modules keep states is found out by running a network, and so is how they are continued."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

import backends
from kvcore.adapters.recurrent import CACHE_ARGUMENT, HeldStates, StateKey, is_divided, probe
from model.attention.attention import IMPLEMENTATION
from model.errors import UnsupportedModelError
from model.load.architectures import check_architecture, check_layers
from model.load.probes import check_tokens_alone, probe_layers
from model.load.recurrence import find_states, probe_recurrence
from tests.model.tiny_configs import make_config

CPU, META = torch.device("cpu"), torch.device("meta")
NUMBA = backends.get_backend("numba")


def network_of(name, device=CPU, dtype=torch.float32):
    torch.manual_seed(0)
    with device:
        config = make_config(f"{name}Config", "")
        network = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION
        )
    return network.train(mode=False)


@pytest.mark.parametrize("device", [CPU, META])
def test_a_layer_of_gated_delta_attention_keeps_its_last_inputs_and_a_state(device):
    network = network_of("Qwen3_5Text", device, torch.bfloat16)
    conv, state = find_states(network, device)
    assert (conv.key, conv.shape, conv.dtype) == (StateKey(0, "conv", 0), (64, 3), torch.bfloat16)
    assert (state.key, state.shape) == (StateKey(0, "recurrent", 0), (4, 8, 8))
    assert state.dtype == torch.float32
    assert is_divided(network.model.layers[0].linear_attn)
    assert not is_divided(network.model.layers[1].self_attn)
    if device == CPU:
        assert [*probe_layers(network, CPU, keeps_states=True)] == [1]


@pytest.mark.parametrize(
    ("name", "token_by_token"),
    [
        ("Qwen3_5Text", False),
        ("Lfm2Moe", False),
        ("MiniMax", False),
        ("Jamba", True),
        ("Mamba", True),
    ],
)
def test_a_module_that_ignores_its_state_with_several_tokens_gets_one_at_a_time(
    name, token_by_token
):
    network = network_of(name)
    found = probe_recurrence(network, NUMBA)
    assert found.token_by_token == token_by_token
    check_tokens_alone(network, CPU, 100)
    assert find_states(network, CPU) == found.shapes  # a second engine finds the same


def test_a_network_that_attends_only_keeps_no_states():
    network = network_of("Llama")
    assert not probe_recurrence(network, NUMBA).shapes
    assert not is_divided(network)


def test_a_network_that_cannot_be_continued_is_refused(monkeypatch):
    monkeypatch.setattr(HeldStates, "get_recurrent_state", lambda *_, **__: None)
    with pytest.raises(UnsupportedModelError, match="Qwen3_5GatedDeltaNet gives other results"):
        probe_recurrence(network_of("Qwen3_5Text"), NUMBA)


def test_a_module_that_attends_and_keeps_a_state_at_once_is_refused():
    network = network_of("Lfm2Moe")

    class Both(nn.Module):
        """Asks for a state, then lets attention run inside."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            kwargs[CACHE_ARGUMENT].get_conv_state(1)
            return self.inner(*args, **kwargs)

    network.model.layers[1].self_attn = Both(network.model.layers[1].self_attn)
    with pytest.raises(UnsupportedModelError, match="attend or keep a state, Both does both"):
        find_states(network, CPU)


def test_a_state_outside_the_cache_is_found_by_what_it_does_to_other_tokens(monkeypatch):
    network = network_of("Lfm2Moe")
    forward = network.model.layers[0].feed_forward.forward
    network.model.layers[0].feed_forward.forward = lambda rows: forward(rows).cumsum(1)
    assert find_states(network, CPU)
    with pytest.raises(UnsupportedModelError, match="follow other tokens too"):
        check_tokens_alone(network, CPU, 100)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("xLSTM", "layers 0-1 are xLSTMBlock (a recurrent state outside Transformers' cache)"),
        ("Rwkv", "layers 0-1 are RwkvBlock (a recurrent state outside Transformers' cache)"),
        ("RecurrentGemma", "RecurrentGemmaRecurrentBlock (a recurrent state outside"),
        ("InklingText", "InklingAttention: its attention gets position_bias, which a paged cache"),
        ("Qwen4ExpText", "Qwen4ExpTextQSAIndexer (an index over groups of tokens, whose keys are"),
    ],
)
def test_what_a_cache_cannot_give_is_refused_before_any_weight_is_read(name, reason):
    config = make_config(f"{name}Config", "")
    with pytest.raises(UnsupportedModelError) as refused:
        check_architecture(copy.deepcopy(config))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["Qwen3_5Text", "NemotronH", "Zamba", "Mamba2"])
def test_a_network_with_states_passes_without_weights(name):
    config = make_config(f"{name}Config", "")
    check_architecture(config)
    assert check_layers(config).device == META


def test_kernels_of_another_package_are_not_run_without_a_gpu(monkeypatch):
    @functools.wraps(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    def kernel(*_, **__):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(modeling_qwen3_5, kernel.__name__, kernel)
    config = make_config("Qwen3_5TextConfig", "")
    check_architecture(config)
    assert check_layers(config).device == META
    assert probe_recurrence(network_of("Qwen3_5Text"), NUMBA).operations.backend is NUMBA


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen3_5Text", "KimiLinear", "FalconH1", "Lfm2Moe"])
def test_each_kind_of_state_is_stepped_by_the_backend(name, dtype):
    network = network_of(name, dtype=dtype)
    assert probe_recurrence(network, NUMBA).operations.backend is NUMBA
    assert {kind for module in network.modules() for kind in stepped_kinds(module)} == {
        "conv",
        *(() if name == "Lfm2Moe" else ("recurrent",)),
    }


def stepped_kinds(module):
    """The states that operations take in place of a module's functions."""
    step = getattr(module.forward, "stepping", None)
    return step.kinds if step else ()


def test_one_class_stands_for_all_its_modules(monkeypatch):
    seen = []
    is_close = probe._is_close
    monkeypatch.setattr(probe, "_is_close", lambda *given: seen.append(1) or is_close(*given))
    probe_recurrence(network_of("FalconH1"), NUMBA)
    assert len(seen) == 2 * 3  # pieces, with the backend's operations and without
