"""Layers that equal an earlier one are copied in the trace: the graph is that of a whole trace."""

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from model.compile import traced_network
from model.compile.repeated_layers import RepeatedLayers
from model.compile.traced_network import trace_network
from model.load.loader import wrap_network
from tests.model.compile.test_traced_network import CPU, switched
from tests.model.networks import CONFIGS


class Scaled(nn.Module):
    """Computes by what no comparison shows."""

    def __init__(self, scale):
        super().__init__()
        self.scale = Equal(scale)

    def forward(self, x):
        return nn.functional.silu(x) * (1.5 + self.scale.value)


class Equal:
    """Equal to all others."""

    def __init__(self, value):
        self.value = value

    __hash__ = None

    def __eq__(self, _):
        return True


def nodes(traced):
    """The operations, with the tensors themselves."""
    module = traced.module
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    return [
        (
            node.op,
            id(getattr(module, node.target)) if node.op == "get_attr" else node.target,
            str(torch.fx.map_arg((node.args, node.kwargs), lambda one: numbers[one])),
            node.meta["sized"],
        )
        for node in module.graph.nodes
        if node.op != "placeholder"
    ]


@pytest.fixture
def marks(monkeypatch):
    """The layers of each trace."""
    made, own = [], RepeatedLayers

    def noting(network):
        made.append(own(network))
        return made[-1]

    monkeypatch.setattr(traced_network, "RepeatedLayers", noting)
    return made


def network_of(architecture, num_layers=4):
    given = CONFIGS[architecture].to_dict() | {"num_hidden_layers": num_layers}
    given.pop("layer_types", None)
    config = type(CONFIGS[architecture])(**given)
    torch.manual_seed(3)
    own = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    network = switched(wrap_network(architecture, own, None))
    for number, parameter in enumerate(network.parameters()):  # no two are equal
        parameter.data.mul_(1 + number / 1000)
    return network


@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "olmo2"])
def test_a_copied_layer_is_what_a_whole_trace_has_in_its_place(architecture, marks):
    network = network_of(architecture)
    copied = trace_network(network, CPU)
    assert marks[0]._firsts == {1: 0, 2: 0, 3: 0}
    whole = traced_network._checked(network, CPU, None)
    assert nodes(copied) == nodes(whole)
    assert copied.terms == whole.terms
    assert all("forward" not in vars(layer) for layer in marks[0]._layers)


def test_a_layer_of_another_kind_is_traced_and_later_ones_copy_their_own_kind(marks):
    network = network_of("qwen3", 5)
    for layer in network.model.layers[2:4]:
        layer.mlp.act_fn = nn.ReLU()
    network.model.layers[4].input_layernorm.variance_epsilon = 0.1
    copied = trace_network(network, CPU)
    assert marks[0]._firsts == {1: 0, 3: 2}
    assert nodes(copied) == nodes(traced_network._checked(network, CPU, None))


def test_layers_that_look_alike_and_compute_otherwise_are_traced_one_by_one(marks):
    network = network_of("qwen3")
    for number, layer in enumerate(network.model.layers):
        layer.mlp.act_fn = Scaled(number)
    copied = trace_network(network, CPU)
    assert marks[0]._firsts == {1: 0, 2: 0, 3: 0}
    assert nodes(copied) == nodes(traced_network._checked(network, CPU, None))


def test_what_fails_leaves_the_network_as_it_was(marks):
    network = network_of("qwen3")
    own = network.model.layers[1].forward
    network.model.layers[1].forward = own
    layers = RepeatedLayers(network)
    with pytest.raises(ZeroDivisionError), layers.marked():
        raise ZeroDivisionError
    assert [vars(layer).get("forward") for layer in network.model.layers] == [None, own, None, None]


def test_a_layer_that_is_there_twice_leaves_the_network_as_it_was():
    network = network_of("qwen3", 5)
    network.model.layers[1] = network.model.layers[0]
    trace_network(network, CPU)
    assert all("forward" not in vars(layer) for layer in network.model.layers)
