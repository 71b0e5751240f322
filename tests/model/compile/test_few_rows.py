"""Steps of few tokens: what stands around a product goes into it, and comes out as it was."""

import operator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import fx
from torch.nn import functional

import backends
from model.compile import few_rows, piecewise
from model.compile.few_rows import FEW_ROWS, Kernels, few_row_sizes, fuse_few_rows
from model.compile.joined_products import joined
from model.compile.piecewise import compile_piecewise
from model.compile.traced_network import Mixing, TracedNetwork, trace_network
from model.forward.network import PagedNetwork
from tests.model.compile.test_piecewise import UNLIKE, agree, inputs
from tests.model.compile.test_traced_network import CPU, switched
from tests.model.few_rows_check import rotated, wanted
from tests.model.networks import build
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

STEPS = [(4, [0, 2, 3]), (2, [0, 1]), (4, [1]), (2, [0])]


class Told:
    """Computes as the kernels do, and notes what it was asked for."""

    def __init__(self):
        self.asked = []
        self.jobs = []

    @property
    def kernels(self):
        return Kernels(self.multiply, self.attend_rotated, self.noting)

    @contextmanager
    def noting(self):
        yield self.jobs

    def attend_rotated(self, call, layer, *given):
        self.asked.append(("rotates", given[3] is not None))
        return call(layer, *rotated(*given))

    def multiply(self, x, weight, bias, scale, eps, residual, *, is_gated):
        self.asked.append((scale is not None, residual is not None, is_gated))
        return wanted(x, weight, bias, scale, eps, residual, is_gated=is_gated)


def fused(module, kernels):
    """The fused network, to be run: the product only cuts it."""
    few = fuse_few_rows(module, kernels, least=0)
    return fx.GraphModule(few, few.graph)


@pytest.mark.parametrize("architecture", UNLIKE)
def test_a_network_with_fused_products_gives_what_it_gave(architecture):
    traced = trace_network(switched(build(architecture, 3)), CPU)
    told = Told()
    few = TracedNetwork(fused(traced.module, told.kernels), traced.terms)
    for step in STEPS:
        assert agree(traced, few, inputs(*step))
    assert len(told.asked) >= 8 * len(STEPS)


def test_a_layer_is_four_products_and_a_rotation_with_what_stands_around_them():
    torch._dynamo.reset()
    traced = trace_network(switched(build("qwen2", 3)), CPU)
    told = Told()
    pieces = compile_piecewise(traced, "eager", told.kernels, least=0)
    assert pieces.has_few_row_pieces
    assert agree(traced, pieces, inputs(4, [0, 1, 3]))
    layer = [
        (True, False, False),  # norm, queries and keys and values
        ("rotates", False),
        (False, True, False),  # what attention gave, added
        (True, False, True),  # norm, gate and up
        (False, True, False),  # down, added
    ]
    assert told.asked == layer * 2
    told.asked.clear()
    for step in [(3, [0]), (1, [0]), (16, [0, 15])]:
        assert agree(traced, pieces, inputs(*step))
    assert told.asked == []


def test_another_norm_gate_or_sum_stays_where_it_is():
    traced = trace_network(switched(build("qwen3", 3)), CPU)
    module = joined(traced.module)
    called = [node for node in module.graph.nodes if node.op == "call_function"]
    next(node for node in called if node.target is torch.rsqrt).target = torch.sqrt
    next(node for node in called if node.target is functional.silu).target = functional.relu
    targets = [node.target for node in called]
    after = targets.index(functional.linear, targets.index(operator.call))
    after_attention = called[after]
    [added] = after_attention.users
    added.args = (after_attention, after_attention)
    told = Told()
    few = TracedNetwork(fused(module, told.kernels), traced.terms)
    changed = TracedNetwork(fx.GraphModule(module, module.graph), traced.terms)
    for step in STEPS:
        assert agree(changed, few, inputs(*step))
    assert told.asked[:5] == [
        (False, False, False),
        ("rotates", True),
        (False, False, False),
        (True, False, False),
        (False, True, False),
    ]


def test_four_tokens_have_pieces_of_their_own_only_where_rows_are_short(monkeypatch):
    torch._dynamo.reset()
    traced = trace_network(switched(build("llama", 3)), CPU)
    told = Told()
    for widest, sizes in ((64, FEW_ROWS), (63, FEW_ROWS[:1])):  # down's rows have 64 numbers
        monkeypatch.setattr(few_rows, "_WIDEST", widest)
        assert few_row_sizes(fuse_few_rows(traced.module, told.kernels, least=0)) == sizes
    pieces = compile_piecewise(traced, "eager", told.kernels, least=0)
    for settled in (False, True):
        told.asked.clear()
        assert agree(traced, pieces, inputs(4, [0, 1, 3]))
        assert bool(told.asked) != settled
        pieces.settle()
    assert agree(traced, pieces, inputs(2, [0, 1]))
    assert told.asked


def test_other_processes_compile_the_kernels_of_all_steps_of_few_tokens(monkeypatch):
    torch._dynamo.reset()
    events = []

    class Noting(Told):
        @contextmanager
        def noting(self):
            self.asked.clear()
            yield [partial(events.append, number) for number in range(3)]
            events.append(set(self.asked))

    class Process:
        def can_compile(self, device):
            return device == CPU

        def submit(self, job, device):
            job()
            return partial(events.append, "is waited for") if len(events) < 4 else None

    monkeypatch.setattr(piecewise, "compile_processes", Process)
    told = Noting()
    traced = trace_network(switched(build("llama", 3)), CPU)
    pieces = compile_piecewise(traced, "eager", told.kernels, least=0)
    pieces.submit(lambda: pieces.logits(*inputs(4, [0, 1, 3]), None))
    asked, *rest = events
    assert rest == [0, 2, 1, "is waited for"]
    assert len(asked) >= 4
    assert all(piece.processes is None for piece in pieces.pieces)
    assert agree(traced, pieces, inputs(4, [0, 1, 3]))


def test_a_network_without_large_weights_has_no_steps_of_its_own():
    traced = trace_network(switched(build("qwen3", 3)), CPU)
    assert not compile_piecewise(traced, "eager", Told().kernels).has_few_row_pieces


@pytest.mark.parametrize("kind", ["DeepseekV32Config", "GlmMoeDsaConfig"])
def test_layers_whose_tokens_an_index_chooses_attend_as_they_did(kind):
    config = make_config(kind, "")
    config.index_topk, config.mlp_layer_types = 5, ["dense", "dense"]
    model = build_network(config, seed=0)
    PagedNetwork(model, backends.get_backend("numba"))  # it has our attention now
    traced = trace_network(model.network, CPU)
    told = Told()
    few = TracedNetwork(fused(joined(traced.module), told.kernels), traced.terms)
    with torch.no_grad():
        wanted, got = (one.logits(*inputs(4, [0, 1, 3]), Mixing()) for one in (traced, few))
    assert (wanted - got).abs().max() < 1e-4
    assert told.asked


def test_a_planted_wrong_half_is_seen():
    class Swaps(Told):
        def multiply(self, x, weight, *rest, is_gated):
            if is_gated:
                weight = weight.roll(len(weight) // 2, 0)
            return super().multiply(x, weight, *rest, is_gated=is_gated)

    traced = trace_network(switched(build("llama", 3)), CPU)
    for told, same in ((Told(), True), (Swaps(), False)):
        few = TracedNetwork(fused(joined(traced.module), told.kernels), traced.terms)
        assert agree(traced, few, inputs(4, [0, 1, 3])) == same


def test_pieces_for_few_tokens_that_give_other_logits_are_not_used():
    torch._dynamo.reset()

    class Doubles(Told):
        def multiply(self, *given, **how):
            return super().multiply(*given, **how) * 2

    for told, stays in ((Told(), True), (Doubles(), False)):
        traced = trace_network(switched(build("llama", 3)), CPU)
        pieces = compile_piecewise(traced, "eager", told.kernels, least=0)
        pieces.settle()
        assert pieces.has_few_row_pieces == stays
        assert agree(traced, pieces, inputs(4, [0, 1, 3]))


def test_the_kernel_gives_in_the_interpreter_what_operators_give(interpreting):
    run = interpreting.run("-m", "tests.model.few_rows_check")
    assert run.stdout.split() == ["108", "caught"], run.stderr
