"""A traced network is the network: the same bits, the same attention, or a refusal."""

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from model import EngineConfig, SamplingParams
from model.attention.attention import IMPLEMENTATION
from model.compile import traced_network as tracing
from model.compile.traced_network import trace_network
from model.engine import Engine
from model.errors import UnsupportedModelError
from model.load.loader import wrap_network
from tests.model.networks import CONFIGS, ByteCodec, build
from tests.model.reference import ReferenceBackend

CPU = torch.device("cpu")
PROMPTS = ["a prompt of some length, ", "a prompt of some length, again", "x"]


def switched(model):
    model.network.set_attn_implementation(IMPLEMENTATION)
    return model.network


class Telling:
    """A pass that notes what each layer is asked for."""

    def __init__(self):
        self.told = []

    def attend(self, layer, query, key, value, terms):
        self.told.append((layer, query.clone(), key.clone(), value.clone(), terms))
        return query + layer


@pytest.mark.parametrize("architecture", [name for name in CONFIGS if name != "gpt_oss"])
def test_logits_and_all_that_attention_sees_are_the_networks_own_bit_for_bit(architecture):
    check_is_the_network(switched(build(architecture, 3)))


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "mixtral"])
def test_experts_whose_products_are_grouped_are_traced_bit_for_bit(kind):
    sizes = {"hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(
        kind, vocab_size=320, num_hidden_layers=2, pad_token_id=None, **EXPERTS, **sizes, **heads
    )
    torch.manual_seed(4)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    check_is_the_network(switched(wrap_network(kind, network, ByteCodec())))


def check_is_the_network(network):
    traced = trace_network(network, CPU)
    for num_tokens, rows in ((1, [0]), (4, [3]), (30, [0, 7, 29]), (7, [])):
        torch.manual_seed(num_tokens)
        input_ids = torch.randint(0, 320, (1, num_tokens))
        position_ids = torch.randint(0, 256, (1, num_tokens))
        kept = torch.tensor(rows, dtype=torch.int64)
        plain, direct = Telling(), Telling()
        with torch.inference_mode():
            wanted = network(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=kept,
                paged=plain,
            ).logits[0]
            got = traced.logits(input_ids, position_ids, kept, direct)
        assert torch.equal(wanted, got)
        assert len(plain.told) == len(direct.told) == network.config.num_hidden_layers
        for one, other in zip(plain.told, direct.told, strict=True):
            assert (one[0], one[4]) == (other[0], other[4])
            assert all(torch.equal(a, b) for a, b in zip(one[1:4], other[1:4], strict=True))


@pytest.mark.parametrize("sizes", [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 16}])
def test_an_engine_gives_the_same_tokens_with_a_traced_network(sizes):
    outputs = []
    for traces in (False, True):
        config = EngineConfig(**{"num_blocks": 60, "block_size": 4, **sizes})
        engine = Engine(build("gemma3", 5), ReferenceBackend(), config)
        if traces:
            engine.network.trace()
        done = engine.generate(PROMPTS, SamplingParams(max_tokens=12))
        outputs.append([one.request.output_tokens for one in done])
    assert outputs[0] == outputs[1]


def test_a_network_that_looks_at_values_is_refused_by_name_and_runs_as_before():
    with pytest.raises(UnsupportedModelError, match="GptOssForCausalLM: its operations cannot be"):
        trace_network(switched(build("gpt_oss")), CPU)
    config = copy.deepcopy(CONFIGS["llama"])
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = wrap_network("dynamic", LlamaForCausalLM(config), ByteCodec())
    engine = Engine(model, ReferenceBackend(), EngineConfig(num_blocks=60, block_size=4))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM: its operations cannot be"):
        engine.network.trace()
    assert engine.generate(["x"], SamplingParams(max_tokens=2))[0].request.is_finished


@pytest.mark.parametrize("name", ["mul", "transpose", "narrow"])
def test_a_capture_that_computes_something_else_is_caught(name, monkeypatch):
    network = switched(build("qwen3", 3))
    if name == "narrow":
        monkeypatch.setattr(
            tracing.torch, "narrow", lambda x, dim, start, length: x.roll(1, dim)[..., :length]
        )
    else:
        operator = {"mul": torch.ops.aten.mul.Tensor, "transpose": torch.ops.aten.transpose.int}
        other = {"mul": torch.add, "transpose": lambda x, a, b: x.transpose(a, b).flip(-1)}
        monkeypatch.setitem(tracing._DIRECT, operator[name], other[name])
    with pytest.raises(UnsupportedModelError, match="give other logits than it does"):
        trace_network(network, CPU)


MULTIPLE = "a multiple of the number of tokens or rows, got "
TOKENS = tracing._SIZES[0]


def ending(function):
    """A network whose last hidden states go through a function."""
    network = switched(build("qwen3", 3))
    network.model.norm.register_forward_hook(lambda _module, _inputs, output: function(output))
    return network


def _only(x, kept):
    return torch.cat([x[:, :kept], x[:, kept:] * 0], 1)


def _padded(x):
    wide = torch.nn.functional.pad(x, (0, 0, 0, 64))
    return wide.view(1, x.shape[1] + 64, -1)[:, : x.shape[1]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x * (1 / x.shape[1]), "give other logits than it does"),
        (lambda x: x + (x.shape[1] + 64), "give other logits than it does"),
        (lambda x: x if x.shape[1] > 50 else x * 2, "give other logits than it does"),
        (lambda x: x * 2 if x.shape[1] > 50 else x, "give other logits than it does"),
        (lambda x: _only(x, x.shape[1] * 3 // 4 + 8), "give other logits than it does"),
        (_padded, "its traced operations fail for 13 tokens"),
        (lambda x: x + x.shape[1] ** 2, f"{MULTIPLE}{TOKENS**2} "),
        (lambda x: x * -x.shape[1], f"{MULTIPLE}-{TOKENS} "),
        (lambda x: x + torch.arange(x.shape[1] + 1)[1:, None], f"{MULTIPLE}{TOKENS + 1} "),
        (lambda x: x + torch.arange(x.shape[1] - 1).sum(), f"{MULTIPLE}{TOKENS - 1} "),
    ],
)
def test_what_depends_on_a_size_in_another_way_than_as_a_multiple_is_refused(function, message):
    network = ending(function)
    with pytest.raises(UnsupportedModelError, match=message):
        trace_network(network, CPU)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / x.shape[1],
        lambda x: x + 3 * x.shape[1],
        lambda x: x * torch.ones(2 * x.shape[1], dtype=x.dtype)[::2, None],
        lambda x: torch.cat([x, x], dim=1)[:, x.shape[1] :],
    ],
)
def test_multiples_of_a_size_are_those_of_any_other(function):
    network = ending(function)
    check_is_the_network(network)


@pytest.mark.parametrize(
    "function", [lambda x: x + x[x > 0].sum(), lambda x: x * torch.nonzero(x).shape[0]]
)
def test_sizes_that_depend_on_values_are_traced_where_nothing_is_replayed(function):
    network = ending(function)
    check_is_the_network(network)
    with pytest.raises(UnsupportedModelError, match="wanted sizes that depend on no value"):
        tracing._check_replayable(tracing._trace(network, CPU, {}, [], None))


def test_what_a_capture_leaves_out_is_nothing_but_casts_that_change_nothing():
    network = switched(build("qwen3", 3)).to(torch.bfloat16)
    traced = trace_network(network, CPU)  # in bfloat16 the norms really cast, to float32 and back
    assert torch.equal(
        *(
            _last_logits(run)
            for run in (
                traced.logits,
                lambda *given: network(
                    input_ids=given[0],
                    position_ids=given[1],
                    use_cache=False,
                    logits_to_keep=given[2],
                    paged=given[3],
                ).logits[0],
            )
        )
    )


def _last_logits(run):
    tokens = torch.arange(9)[None]
    with torch.inference_mode():
        return run(tokens, tokens, torch.tensor([8]), Telling())


def test_a_product_with_one_is_left_out_where_it_changes_nothing():
    def left_of(function, *inputs):
        module = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs)
        call = next(iter(module.graph.nodes))
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                tracing._simplify(node, call)
        module.graph.eliminate_dead_code()
        return [node.target for node in module.graph.nodes if node.op == "call_function"]

    x, product = torch.randn(3, 4), [torch.ops.aten.mul.Tensor]
    assert left_of(lambda x: x * 1.0, x) == []
    assert left_of(lambda x: x * 1, x) == []
    assert left_of(lambda x: x * 2.0, x) == product
    assert left_of(lambda x, y: x * y, x, torch.ones(3, 4)) == product
    assert left_of(lambda x: x * 1.0, x.int()) == product  # makes floats of them
    assert left_of(lambda x: x * 1.0, x[:, ::2]) == product  # closes their gaps


def simplified(function, *inputs):
    module = tracing._traced(function, *inputs)
    call = next(iter(module.graph.nodes))
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            tracing._simplify(node, call)
    module.recompile()
    return module


def _clamped_after_a_cast(x, dtype):
    x = x * 2
    before = x.to(dtype)
    x.clamp_(max=0.5)
    return before + x


def _divided_by_its_sum(x):
    x = x * 2
    x /= x.sum(dim=-1, keepdim=True)
    return x


def _seen_through_a_view(x):
    x = x * 2
    view = x.view(-1)
    x.add_(1)
    return view


def _written_through_a_view(x):
    x = x * 2
    x.t().add_(1)
    x[1:] += x[0]
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).add_(x),
        lambda x: (x * 2).add_(1).mul_(x).t().sum(0),
        lambda x: _clamped_after_a_cast(x, torch.float64),
        lambda x: _clamped_after_a_cast(x, torch.float32),  # the same tensor
        lambda x: (x * 2).masked_fill_(x > 0, 0.0),
        _divided_by_its_sum,
        lambda x: torch.empty_like(x).index_put_((torch.arange(3),), x) * 2,
        _seen_through_a_view,
        _written_through_a_view,
        lambda x: (x.int() * 2).add_(x.long()),
    ],
)
def test_what_is_written_in_place_is_computed_anew(function):
    x = torch.randn(3, 4)
    before = x.clone()
    module = simplified(function, x)
    assert torch.equal(module(x), function(x.clone()))
    assert torch.equal(x, before)
    assert not any(
        node.target._schema.is_mutable
        for node in module.graph.nodes
        if hasattr(node.target, "_schema")
    )


@pytest.mark.parametrize("amount", [lambda x: 1, lambda x: x.sum()])
def test_a_network_that_writes_into_a_buffer_of_its_own_is_refused(amount):
    buffer = torch.zeros(())

    def counting(x):
        return x + buffer.add_(amount(x))

    with pytest.raises(UnsupportedModelError, match=r"wanted pure|cannot be traced"):
        trace_network(ending(counting), CPU)


def test_squares_are_products_bit_for_bit_in_every_dtype_of_a_network():
    targets = [
        node.target for node in trace_network(switched(build("qwen3", 3)), CPU).module.graph.nodes
    ]
    assert torch.pow not in targets
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        every = whole.view(dtype) if dtype.itemsize == 2 else torch.randn(1 << 16) * 1e3
        assert torch.equal(*(each.nan_to_num(7.0) for each in (every.pow(2), every * every)))
