"""A traced network in compiled pieces: near the same numbers, each kind compiled once."""

import operator
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode

import backends
from kvcore.adapters.recurrent import StateKey, StateRows
from kvcore.adapters.recurrent.state_functions import BackendOperations
from kvcore.adapters.recurrent.states import StateTensor
from model import EngineConfig, InvalidArgumentError, SamplingParams
from model.attention.batch import prompt_step
from model.compile.joined_products import laid_out
from model.compile.piecewise import PiecewiseNetwork, _NoAttention, compile_piecewise
from model.compile.traced_network import Mixing, trace_network
from model.compile.traced_states import MarkedSteps, MixingSteps
from model.engine import Engine
from model.errors import UnsupportedModelError
from model.forward.lora import Adapters
from model.forward.warm_up import prepare_network
from model.load.recurrence import find_states, probe_recurrence
from tests.model.compile.test_traced_network import CPU, Telling, switched
from tests.model.networks import build
from tests.model.reference import ReferenceBackend
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

UNLIKE = ["qwen2", "phi3", "olmo2", "gemma2", "gemma3n", "gemma4"]  # biases, norms, readers


@pytest.fixture
def nothing_is_compiled_twice():
    """What asks for a second compilation of a piece raises."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def inputs(num_tokens, rows):
    torch.manual_seed(num_tokens)
    input_ids = torch.randint(0, 320, (1, num_tokens))
    return input_ids, torch.randint(0, 256, (1, num_tokens)), torch.tensor(rows).long()


@pytest.mark.usefixtures("nothing_is_compiled_twice")
@pytest.mark.parametrize("architecture", UNLIKE)
def test_pieces_give_what_the_network_gives_for_any_number_of_tokens_and_rows(architecture):
    traced = trace_network(switched(build(architecture, 3)), CPU)
    pieces = compile_piecewise(traced, "eager")
    sizes = [(8, [0, 3, 7]), (5, [0, 1, 2, 3, 4]), (1, [0]), (30, [0, 29]), (7, [])]
    for size in sizes:
        assert agree(traced, pieces, inputs(*size))
        pieces.settle()


def test_code_is_written_for_each_piece_and_for_what_calls_them_and_for_no_other_graph(monkeypatch):
    traced, written = trace_network(switched(build("qwen3", 5)), CPU), []
    write = fx.GraphModule.recompile
    monkeypatch.setattr(
        fx.GraphModule, "recompile", lambda module: written.append(module) or write(module)
    )
    pieces = compile_piecewise(traced, "eager")
    assert len(written) == len(pieces.pieces) + 1


@pytest.mark.usefixtures("nothing_is_compiled_twice")
def test_modules_with_states_are_called_between_the_pieces():
    network = build_network(make_config("Qwen3_5TextConfig", ""), 1).network
    find_states(network, CPU)
    traced = trace_network(network, CPU)
    pieces = compile_piecewise(traced, "eager")
    assert [len(one.recurrent) for one in (traced, pieces)] == [1, 1]
    for size in ((8, [0, 3, 7]), (5, [0, 1, 2, 3, 4]), (2, [1]), (1, [0]), (30, [0, 29])):
        ids, positions, rows = inputs(*size)
        assert agree(traced, pieces, (ids % 300, positions, rows))
        pieces.settle()


@pytest.mark.parametrize("kind", ["Qwen3_5TextConfig", "FalconH1Config", "Lfm2MoeConfig"])
@pytest.mark.usefixtures("nothing_is_compiled_twice")
def test_what_surrounds_states_that_a_backend_steps_is_in_the_pieces(kind):
    network = build_network(make_config(kind, ""), 1).network
    assert probe_recurrence(network, backends.get_backend("numba")).takes_slots
    traced = trace_network(network, CPU)
    pieces = compile_piecewise(traced, "eager")
    assert len(traced.recurrent) == (1 if kind == "Lfm2MoeConfig" else 4 if "H1" in kind else 2)
    for size in ((8, [0, 3, 7]), (5, [0, 1, 2, 3, 4]), (2, [1]), (1, [0]), (30, [0, 29])):
        ids, positions, rows = inputs(*size)
        assert agree(traced, pieces, (ids % 300, positions, rows))
        pieces.settle()


def is_like(got, marked):
    """Whether a result lies in memory as a mark in a trace says: compiled code relies on it."""
    steps = [
        [step for step, size in zip(each.stride(), each.shape, strict=True) if size > 1]
        for each in (got, marked)
    ]
    return (got.shape, got.dtype) == (marked.shape, marked.dtype) and steps[0] == steps[1]


@given(seed=st.integers(0, 1 << 20), tokens=st.integers(1, 5))
def test_what_is_called_between_pieces_gives_the_strides_that_the_trace_says(seed, tokens):
    """Of arguments as a backend takes them: parts of wider rows, heads first, steps of two."""
    draw = random.Random(seed)

    def strided(*shape, dtype=torch.float32):
        order = [*draw.sample(range(len(shape) - 1), len(shape) - 1), len(shape) - 1]
        step = [draw.choice([1, 1, 2]) for _ in shape[1:]] + [1]
        wide = [shape[d] * step[d] + draw.choice([0, 3]) for d in order]
        made = torch.rand(wide, dtype=dtype).permute([order.index(d) for d in range(len(shape))])
        return made[tuple(slice(0, n * s, s) for n, s in zip(shape, step, strict=True))]

    ops, terms = torch.ops.kvcore_trace, backends.AttentionTerms(0.5)
    query, key, value = (strided(tokens, heads, 8) for heads in (4, 2, 2))
    marked = ops.attend(query, key, value, 0, None)
    for paged in (Mixing(), _NoAttention()):
        assert is_like(paged.attend(0, query, key, value, terms), marked)
    cache = backends.KVCache(*torch.zeros(2, 3, 4, 2, 8).unbind())
    batch = prompt_step(tokens, 1, 4, 1, CPU).paged[0]
    real = backends.get_backend("numba").paged_attention(query, cache, batch, terms)
    assert is_like(real, marked)
    gate = backends.DecayGate(torch.rand(4), torch.rand(4))
    conv = backends.ShortConvTerms(torch.rand(6, 3))
    linear = backends.LinearAttentionTerms(1.0, delta_rule=False, gate=gate, skip=torch.rand(4))
    rows = (*(strided(tokens, heads, 8) for heads in (2, 2, 4)), strided(tokens, 4), None)
    x, keys = strided(tokens, 6), [StateKey(0, "conv", 0), StateKey(0, "recurrent", 0)]
    tensors = {
        keys[0]: StateTensor(0, torch.zeros(2, 2, 6).transpose(1, 2)),
        keys[1]: StateTensor(0, torch.zeros(2, 4, 8, 8).transpose(2, 3)),
    }
    nowhere = torch.full((1, 1), -1, dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    where = StateRows(nowhere, nowhere, starts, starts[1:])
    own = BackendOperations(backends.get_backend("numba")).steps(tensors, where)
    marks = MarkedSteps([])
    for steps in (MixingSteps(), own):
        assert is_like(steps.convolve(keys[0], x, conv), marks.convolve(keys[0], x, conv))
        assert is_like(steps.attend(keys[1], rows, linear), marks.attend(keys[1], rows, linear))


@given(seed=st.integers(0, 1 << 20), rows=st.integers(1, 4))
@settings(max_examples=5, deadline=None)
def test_our_operators_have_the_strides_that_compiled_code_expects(seed, rows):
    """Each operator that a compiled piece may contain, fake and real, of any strides."""
    draw = random.Random(seed)
    wide = torch.rand(2 * rows, 3, 16)
    x = wide[:: draw.choice([1, 2])][:rows, :, : draw.choice([8, 16]) : draw.choice([1, 2])]
    x = x.transpose(0, 1) if draw.random() < 0.5 else x
    ops = torch.ops.kvcore_layers
    calls = [
        lambda x: ops.enter(x, 0, 0), lambda x: ops.leave(x, 0), lambda x: ops.repeat([x], 0),
        lambda x: torch.ops.kvcore_trace.recur([x], 0, [5], torch.float32),
        lambda x: torch.ops.kvcore_trace.step([x], 0, 0),
    ]  # fmt: skip
    for call in calls:
        with FakeTensorMode() as mode:
            fake = call(mode.from_tensor(x))
        assert is_like(call(x), fake)
        torch._dynamo.reset()
        whole = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert is_like(whole(x), fake)


@pytest.mark.usefixtures("nothing_is_compiled_twice")
def test_what_was_compiled_with_a_step_of_its_own_serves_parts_of_other_tensors():
    traced = trace_network(switched(build("llama", 3)), CPU)
    pieces = compile_piecewise(traced, "eager")
    largest = prompt_step(16, 5, 4, 1, CPU)
    with torch.no_grad():
        pieces.logits(largest.input_ids, largest.position_ids, largest.logit_rows, Telling())
    pieces.settle()
    words = torch.arange(60) % 11
    for tokens, rows in ((30, 4), (8, 8), (2, 2)):  # as graphs have them
        step = (words[:tokens][None] + 1, words[30:][:tokens][None], words[7:][:rows] % tokens)
        assert agree(traced, pieces, step)


def agree(traced, pieces, step, *slots):
    """Whether both give the same logits, and ask the same of their attention."""
    plain, cut = Telling(), Telling()
    ours, others = [(None, each) for each in (slots * 2)[:2]] or [(), ()]
    with torch.no_grad():
        pairs = [(traced.logits(*step, plain, *ours), pieces.logits(*step, cut, *others))]
    assert len(plain.told) == len(cut.told)
    for one, other in zip(plain.told, cut.told, strict=True):
        assert (one[0], one[4]) == (other[0], other[4])
        pairs += zip(one[1:4], other[1:4], strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-4) for a, b in pairs)


def test_layers_that_are_alike_share_a_piece():
    model = build("llama")
    config = model.network.config
    for num_layers in (2, 6):
        config.num_hidden_layers = num_layers
        network = type(model.network)(config)
        model.network.set_attn_implementation("eager")
        network.set_attn_implementation("kvcore_paged")
        pieces = compile_piecewise(trace_network(network, CPU), "eager")
        called = [node for node in pieces.module.graph.nodes if node.op == "call_module"]
        assert len(pieces.pieces) == 3
        assert len(called) == num_layers + 1


def test_joined_weights_are_held_once_and_the_network_goes_on_with_them():
    network = switched(build("qwen2", 3))
    step = inputs(6, [5])
    traced = trace_network(network, CPU)
    before = traced.logits(*step, Telling())
    layer = network.model.layers[0]
    compile_piecewise(traced, "eager")
    for parts in (
        [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        [layer.mlp.gate_proj, layer.mlp.up_proj],
    ):
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
        whole = parts[0].weight.untyped_storage().nbytes()
        assert whole == sum(part.weight.nbytes for part in parts)
    assert torch.allclose(traced.logits(*step, Telling()), before, atol=1e-5)
    held = [each.data_ptr() for each in network.parameters()]
    again = compile_piecewise(trace_network(network, CPU), "eager")
    assert [each.data_ptr() for each in network.parameters()] == held
    with torch.no_grad():
        assert torch.allclose(again.logits(*step, Telling()), before, atol=1e-5)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=6),
    st.integers(0, 1),
)
def test_tensors_that_lie_one_after_the_other_are_one_where_they_lie(order, lengths, dim):
    whole = torch.arange(sum(lengths[:6]) * 2.0).view((2, -1) if dim else (-1, 2))
    parts = whole.split(lengths[:6], dim)
    chosen = [parts[place] for place in order]
    found = laid_out(chosen, dim)
    assert found.equal(torch.cat(chosen, dim))
    lies_so = all(after == before + 1 for before, after in pairwise(order))
    assert (found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) == lies_so


@pytest.mark.usefixtures("nothing_is_compiled_twice")
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "gemma2"])
def test_pieces_with_adapters_leave_the_weights_of_the_others_where_they_are(architecture):
    network = switched(build(architecture, 3))
    adapters = Adapters(network, 2, 4, None, {})
    sizes = [(8, [0, 3, 7]), (5, [0, 1, 2, 3, 4]), (2, [1]), (1, [0]), (30, [0, 29])]
    with adapters.filled():
        traced = trace_network(network, CPU, adapters)
        pieces = compile_piecewise(traced, "eager", behind=adapters.downs)
        plain = compile_piecewise(trace_network(network, CPU), "eager")
        weights = [parameter.data_ptr() for parameter in network.parameters()]
        for size in sizes:
            given = inputs(*size)
            slots = torch.arange(size[0]) % 3 - 1
            assert agree(traced, pieces, given, slots)
            assert not agree(traced, pieces, given, slots, slots * 0)
            assert agree(plain, plain._plain, given)
            for each in (pieces, plain):
                each.settle()
    assert weights == [parameter.data_ptr() for parameter in network.parameters()]
    every = [*network.parameters(), *adapters.downs, *[h.up for h in adapters._halves.values()]]
    places = [tensor.untyped_storage() for tensor in (
        *pieces.module.parameters(), *plain.module.parameters(), *every)]  # fmt: skip
    held = {place.data_ptr(): place.nbytes() for place in places}
    assert sum(held.values()) == sum(tensor.nbytes for tensor in every)
    # A free slot is empty again, in what is compiled too.
    ids, positions, rows = inputs(8, [0, 3, 7])
    slots = torch.zeros(8, dtype=torch.int64)
    with torch.no_grad():
        found = pieces.logits(ids, positions, rows, Telling(), None, slots)
        wanted = plain.logits(ids, positions, rows, Telling())
    assert (found - wanted).abs().max() < 1e-4


def test_adapters_laid_out_between_weights_would_store_them_twice():
    network = switched(build("qwen3", 3))
    adapters = Adapters(network, 2, 4, None, {})
    compile_piecewise(trace_network(network, CPU, adapters), "eager")
    before = [parameter.data_ptr() for parameter in network.parameters()]
    compile_piecewise(trace_network(network, CPU), "eager")
    assert before != [parameter.data_ptr() for parameter in network.parameters()]


def test_a_planted_wrong_cut_is_seen():
    traced = trace_network(switched(build("qwen3", 3)), CPU)
    pieces = compile_piecewise(traced, "eager")
    graph, step = pieces.module.graph, inputs(8, [0, 3])
    assert agree(traced, pieces, step)
    attending = next(node for node in graph.nodes if node.target is operator.call)
    *rest, key, value = attending.args
    attending.args = (*rest, value, key)
    pieces.module.recompile()
    # A copy, because the old function is kept.
    assert not agree(traced, PiecewiseNetwork(pieces.module, traced), step)


def test_a_network_that_was_not_traced_or_whose_compiler_fails_runs_as_before(monkeypatch):
    engine = Engine(build("qwen3"), ReferenceBackend(), EngineConfig(num_blocks=20))
    with pytest.raises(UnsupportedModelError, match="wanted a network that was traced first"):
        engine.network.compile(None, None)
    engine.network.trace()

    def fails(step):
        raise RuntimeError("no compiler\nhere\nor there")

    monkeypatch.setattr(engine.network, "logits", fails)
    with pytest.raises(UnsupportedModelError, match=r"be compiled: no compiler here$"):
        engine.network.compile(None, None)
    monkeypatch.undo()
    assert len(engine.generate(["x"], SamplingParams(max_tokens=2))) == 1


@pytest.mark.parametrize(
    ("architecture", "config", "how"),
    [
        ("qwen3", {}, "eager"),
        ("qwen3", {"compile": True}, "traced"),
        ("qwen3", {"eager": True}, "eager"),
        ("gpt_oss", {"compile": True}, "eager (GptOssForCausalLM: its operations cannot be traced"),
    ],
)
def test_on_a_cpu_a_small_network_is_traced_where_it_can_be(architecture, config, how):
    backend = backends.get_backend("numba")
    engine = Engine(build(architecture), backend, EngineConfig(num_blocks=20, **config))
    drawn = torch.zeros(4, dtype=torch.int64)
    prepared = prepare_network(engine.network, engine.config, drawn, 100)
    assert prepared.how.startswith(how)
    assert prepared.graphs is None


def test_eager_and_compiled_exclude_each_other():
    with pytest.raises(InvalidArgumentError, match="eager: cannot be combined with compile"):
        EngineConfig(eager=True, compile=True)
