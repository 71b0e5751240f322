"""Weights arrive on their device as they were read."""

import pytest
import torch
from torch import nn

from model.load.placing import place, place_parameters

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Special(nn.Parameter):
    """A parameter with a class of its own, as quantised ones have."""


def network():
    made = nn.Module()
    made.tied = nn.Linear(37, 11, bias=False)
    made.also = nn.Linear(37, 11, bias=False)
    made.also.weight = made.tied.weight
    made.low = nn.Parameter(torch.randn(5, 3, 7).bfloat16(), requires_grad=False)
    made.one = nn.Parameter(torch.tensor(2.5))
    made.none = nn.Parameter(torch.empty(0, 4))
    made.turned = nn.Parameter(torch.randn(6, 4).t())
    made.special = Special(torch.randn(3))
    made.register_buffer("beside", torch.arange(5))
    return made


@pytest.mark.parametrize("buffer_bytes", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_parameters_keep_their_values_in_whatever_parts_they_are_sent(buffer_bytes, device):
    made = network()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in made.named_parameters()}
    place_parameters(made, torch.device(device), buffer_bytes)
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor.cpu(), before[name])
        assert tensor.dtype == before[name].dtype
    assert made.also.weight is made.tied.weight
    assert not made.low.requires_grad
    stay = {name for name, one in made.named_parameters() if one.data_ptr() == places[name]}
    assert {"turned", "special"} <= stay <= {"turned", "special", "none"}


@GPU
def test_a_network_of_many_buffers_is_whole_on_a_gpu():
    made = nn.ModuleList([nn.Linear(4096, 1024) for _ in range(40)]).bfloat16()
    wanted = [each.clone() for each in made.parameters()]
    place(made, torch.device("cuda"))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(made.parameters(), wanted, strict=True))
    assert {each.device.type for each in made.state_dict().values()} == {"cuda"}
