"""LoRA adapters: the tokens of PEFT's own generate, in any mixture, and nothing for the others."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import backends
import kvcore
from model import LLM, EngineConfig, ModelError, SamplingParams, Submission
from model.cli.conversation import Conversation
from model.control.admission import Admission
from model.engine import Engine
from model.errors import InvalidArgumentError, UnsupportedModelError
from model.forward import lora
from model.forward.lora import Adapters, read_adapter, read_versions
from model.load.architectures import auto_class
from model.load.loader import load_model
from model.load.probes import run_probe
from model.tiny import CHECKPOINT_DIR
from tests.model import recurrent_networks
from tests.model.adapters import PROMPTS, TARGETS, peft, write_adapters
from tests.model.networks import preempt_in_steps, random_adapter
from tests.model.tiny_configs import make_config

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Adapters as PEFT writes them, and PEFT's tokens for every prompt."""
    place = tmp_path_factory.mktemp("adapters")
    return place, *write_adapters(place)


def engine_with(place, **sizes):
    lora = tuple(f"{name}={place / name}" for name in TARGETS)
    config = EngineConfig(block_size=4, lora=lora, **sizes)
    return Engine(load_model(str(CHECKPOINT_DIR), CPU), backends.get_backend("numba"), config)


def asked(prompt, name, **namespace):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    return Submission(prompt, params, namespace=kvcore.Namespace(lora_name=name, **namespace))


def run(engine, encoded, names):
    requests = {
        name: [engine.submit(asked(prompt, name))[0] for prompt in encoded] for name in names
    }
    while engine.has_unfinished:
        engine.step()
    return {name: [one.output_tokens for one in those] for name, those in requests.items()}


SIZES = (
    {},
    {"max_num_batched_tokens": 7, "num_blocks": 40},
    {"max_num_batched_tokens": 7, "num_blocks": 40, "swap_memory_bytes": 1 << 22},
    {"drafts": "ngram"},
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_adapters_in_one_batch_give_the_tokens_of_peft_and_leave_others_alone(folders, sizes):
    place, encoded, wanted = folders
    engine = engine_with(place, **sizes)
    if "num_blocks" in sizes:
        preempt_in_steps(engine, {6, 9, 14})
    for _ in range(2):  # the second time with prefix cache hits
        assert run(engine, encoded, [None, *TARGETS]) == wanted
    assert engine.stats.num_hit_tokens
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


BROKEN = ("shared namespace", "shifted rows", "no scale", "no mask", "others' columns")


@pytest.mark.parametrize("broken", BROKEN)
def test_the_comparison_sees_a_planted_bug(folders, monkeypatch, broken):
    place, encoded, wanted = folders
    if broken == "no scale":
        monkeypatch.setattr(lora, "_alpha", lambda *_: 4.0)
    engine = engine_with(place)
    adapters = engine.network.adapters
    if broken == "shared namespace":
        monkeypatch.setattr(Admission, "_namespace", lambda *_: kvcore.DEFAULT_NAMESPACE)
    elif broken == "shifted rows":
        own = Adapters.slots

        def shifted(self, chunks):
            slots = own(self, chunks)
            return None if slots is None else torch.cat([slots[:1] * 0 - 1, slots[:-1]])

        monkeypatch.setattr(Adapters, "slots", shifted)
    elif broken == "no mask":
        monkeypatch.setattr(torch.Tensor, "masked_fill", lambda rows, *_: rows)
    elif broken == "others' columns":
        adapters._rank *= 2
    found = [run(engine, encoded, [name])[name] for name in [None, *TARGETS]]
    assert found != [*wanted.values()]


def test_rows_without_an_adapter_get_a_zero(folders):
    """Also where the first half of an adapter gives no number for them."""
    engine = engine_with(folders[0])
    adapters = engine.network.adapters
    layer = engine.model.network.model.layers[0].self_attn.q_proj
    rows = torch.randn(1, 4, layer.in_features)
    rows[0, 2] = 1e38
    plain = layer(rows)
    with torch.no_grad(), adapters.choosing(torch.tensor([-1, 0, -1, 1])):
        found = layer(rows)
    assert torch.equal(found[0, [0, 2]], plain[0, [0, 2]])
    assert not torch.equal(found[0, 1], plain[0, 1])


@pytest.mark.parametrize("bug", [False, True])
def test_a_slot_that_is_used_again_holds_nothing_of_the_adapter_before(folders, monkeypatch, bug):
    place, encoded, wanted = folders
    if bug:  # a half keeps the layers and columns that the new adapter has not
        monkeypatch.setattr(torch.Tensor, "zero_", lambda halves: halves)
    model = load_model(str(CHECKPOINT_DIR), CPU)
    engine = Engine(model, backends.get_backend("numba"), EngineConfig(block_size=4, max_loras=1))
    halves = [tensor.data_ptr() for tensor in engine.network.adapters.downs]
    for name in ("all", "attention", "all"):
        engine.add_adapter(engine.read_adapter(f"{name}={place / name}"))
        found = run(engine, encoded, [None, name])
        assert found[None] == wanted[None]
        assert (found[name] == wanted[name]) or (bug and name == "attention")
        if bug and name == "attention":
            assert found[name] != wanted[name]
        engine.remove_adapter(name)
    assert halves == [tensor.data_ptr() for tensor in engine.network.adapters.downs]


def test_a_rank_is_bounded(folders):
    model, numba = load_model(str(CHECKPOINT_DIR), CPU), backends.get_backend("numba")
    sizes = {"block_size": 4, "max_loras": 2, "max_lora_rank": 3}
    text = f"sql={folders[0] / 'attention'}"
    with pytest.raises(InvalidArgumentError, match=r"at most 3 \(--max-lora-rank\), got 4 for"):
        Engine(model, numba, EngineConfig(lora=(text,), **sizes))
    engine = Engine(model, numba, EngineConfig(**sizes))
    with pytest.raises(InvalidArgumentError, match=r"at most 3 \(--max-lora-rank\), got 4 for"):
        engine.add_adapter(engine.read_adapter(text))
    assert engine.adapter_names == ()
    with pytest.raises(InvalidArgumentError, match="max_lora_rank: "):
        EngineConfig(max_lora_rank=8)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_traced_network_adds_adapters_that_are_loaded_later(folders, sizes, monkeypatch):
    place, encoded, wanted = folders
    config = EngineConfig(block_size=4, max_loras=2, compile=True, **sizes)
    engine = Engine(load_model(str(CHECKPOINT_DIR), CPU), backends.get_backend("numba"), config)
    assert engine.prepare() == "traced"
    assert sorted(engine.network._traced) == [False, True]
    for name in TARGETS:
        engine.add_adapter(engine.read_adapter(f"{name}={place / name}"))
    monkeypatch.setattr(lora.nn.functional, "linear", None)  # what the modules and hooks call
    assert run(engine, encoded, [None, *TARGETS]) == wanted


def test_a_trace_without_products_is_refused(folders, monkeypatch):
    """What the check of a trace compares includes the products, though no adapter is loaded."""
    model = load_model(str(CHECKPOINT_DIR), CPU)
    config = EngineConfig(block_size=4, max_loras=2)
    engine = Engine(model, backends.get_backend("numba"), config)
    own, calls = Adapters.choosing, []

    def once(self, slots, states=None):
        calls.append(slots)
        return own(self, None if len(calls) == 1 else slots, states)

    monkeypatch.setattr(Adapters, "choosing", once)
    with pytest.raises(ModelError, match="give other logits than it does"):
        engine.network.trace()


@pytest.mark.parametrize("fields", [{}, {"compile": True}, {"batch_invariant": True}], ids=str)
def test_adapters_move_with_the_sequences_of_recurrent_layers(tmp_path, fields):
    """Inside such a layer sequences are computed apart from the others of a step."""
    model, known = recurrent_networks.case("Qwen3_5TextConfig")
    texts = [[*text] for text in known][:6]
    network = peft.get_peft_model(
        copy.deepcopy(model.network),
        peft.LoraConfig(r=4, target_modules=["in_proj_qkv", "in_proj_b", "out_proj", "q_proj"]),
    )
    network.base_model.model.set_attn_implementation(model.dense_implementation)
    torch.manual_seed(2)
    for key, parameter in network.named_parameters():
        if "lora_" in key:
            parameter.data.normal_(std=0.1)
    network.save_pretrained(tmp_path)
    wanted = [
        network.generate(
            input_ids=torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.int64),
            max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
        )[0, len(text) :].tolist()
        for text in texts
    ]  # fmt: skip
    plain = [known[tuple(text)][:12] for text in texts]
    assert wanted != plain
    config = EngineConfig(
        block_size=4, num_blocks=400, max_num_batched_tokens=60, lora=(f"a={tmp_path}",), **fields
    )
    if "batch_invariant" in fields:
        with pytest.raises(ModelError, match="recurrent layers"):
            Engine(model, backends.get_backend("numba"), config)
        return
    engine = Engine(model, backends.get_backend("numba"), config)
    assert engine.prepare() == ("traced" if fields else "eager")
    assert run(engine, texts, ["a", None]) == {"a": wanted, None: plain}


def test_batch_invariant_a_request_has_the_same_bits_beside_other_adapters(folders):
    place, encoded, wanted = folders

    def outputs(prompts, names, **sizes):
        engine = engine_with(place, batch_invariant=True, **sizes)
        params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
        found = {
            engine.submit(Submission(p, params, namespace=kvcore.Namespace(lora_name=name)))[0]: []
            for name in names
            for p in prompts
        }
        while engine.has_unfinished:
            for output in engine.step():
                found[output.request] += output.tokens
        return [*found.values()]

    names = [None, *TARGETS]
    together = outputs(encoded, names)
    assert [[token.token_id for token in one] for one in together] == [
        tokens for name in names for tokens in wanted[name]
    ]
    alone = [outputs([prompt], [name])[0] for name in names for prompt in encoded]
    assert alone == together
    assert outputs(encoded, names, max_num_batched_tokens=7) == together


def test_requests_share_a_prefix_only_with_requests_of_equal_adapters(folders, tmp_path):
    place, encoded, _ = folders
    engine = engine_with(place)
    base, one, other = (engine.submit(asked(encoded[0], name))[0] for name in (None, *TARGETS))
    assert len({request.namespace for request in (base, one, other)}) == 3
    assert one.namespace.lora_version
    again = engine_with(place).submit(asked(encoded[0], "attention"))[0]
    assert again.namespace == one.namespace
    versions = read_versions([f"attention={place / 'attention'}"])  # what routers know
    assert versions == {"attention": one.namespace.lora_version}


def test_a_request_keeps_its_adapter_when_it_is_unloaded(folders, monkeypatch):
    place, encoded, wanted = folders
    model = load_model(str(CHECKPOINT_DIR), CPU)
    engine = Engine(model, backends.get_backend("numba"), EngineConfig(block_size=4, max_loras=2))
    texts = {name: f"sql={place / name}" for name in TARGETS}
    engine.add_adapter(engine.read_adapter(texts["attention"]))
    first = engine.submit(asked(encoded[0], "sql"))[0]
    for _ in range(4):
        engine.step()
    engine.remove_adapter("sql")
    with pytest.raises(InvalidArgumentError, match="a loaded adapter"):
        engine.submit(asked(encoded[0], "sql"))
    engine.add_adapter(engine.read_adapter(texts["all"]))  # of the same name, with other weights
    other = engine.read_adapter(f"other={place / 'all'}")
    with pytest.raises(InvalidArgumentError, match="1 of them until their requests"):
        engine.add_adapter(other)
    second = engine.submit(asked(encoded[0], "sql"))[0]
    while engine.has_unfinished:
        engine.step()
    found = [request.output_tokens for request in (first, second)]
    assert found == [wanted["attention"][0], wanted["all"][0]]
    engine.add_adapter(other)
    assert engine.adapter_names == ("sql", "other")

    # A planted bug: nothing keeps what an unfinished request has.
    monkeypatch.setattr(engine, "_namespaces", list)
    engine.submit(asked(encoded[0], "other"))
    engine.remove_adapter("other")
    with pytest.raises(KeyError):
        engine.step()


def test_the_digest_is_that_of_the_weights_that_were_read(folders, monkeypatch, tmp_path):
    """A trainer may overwrite the folder while it is read."""
    place, _, _ = folders
    shutil.copytree(place / "attention", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    network = load_model(str(CHECKPOINT_DIR), CPU).network
    own = lora._halves

    def overwritten(*given):
        file.write_bytes((place / "all" / "adapter_model.safetensors").read_bytes())
        return own(*given)

    monkeypatch.setattr(lora, "_halves", overwritten)
    adapter = read_adapter(f"sql={tmp_path / 'adapter'}", network)
    assert adapter.version == read_versions([f"sql={place / 'attention'}"])["sql"]


def changed(place, tmp_path, edit=None, **fields):
    """A copy of an adapter whose configuration or tensors are changed."""
    config = json.loads((place / "attention" / "adapter_config.json").read_text()) | fields
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(place / "attention" / "adapter_model.safetensors")
    if edit is not None:
        tensors = edit(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    return tmp_path


def refusal(text):
    with pytest.raises(ModelError) as caught:
        Engine(
            load_model(str(CHECKPOINT_DIR), CPU),
            backends.get_backend("numba"),
            EngineConfig(block_size=4, lora=text),
        )
    assert "\n" not in str(caught.value)
    return str(caught.value)


def first(tensors, half):
    return next(key for key in tensors if half in key)


def without_b(tensors):
    tensors.pop(first(tensors, "lora_B"))
    return tensors


def narrower(tensors):
    key = first(tensors, "lora_B")
    return tensors | {key: tensors[key][:-1].contiguous()}


def elsewhere(tensors):
    return {key.replace("q_proj", "qq_proj"): tensor for key, tensor in tensors.items()}


def of_no_rank(tensors):
    return {
        key: tensor[:0] if "lora_A" in key else tensor[:, :0].contiguous()
        for key, tensor in tensors.items()
    }


def without_dimensions(tensors):
    return tensors | {first(tensors, "lora_B"): torch.tensor(1.0)}


def not_numbers(tensors):
    key = first(tensors, "lora_B")
    return tensors | {key: tensors[key] * float("nan")}


def of_the_head(tensors):
    key = "base_model.model.lm_head.lora_{}.weight"
    return {key.format("A"): torch.ones(2, 192), key.format("B"): torch.ones(2048, 2)}


EDITS = {
    "half of it": (without_b, {}),
    "is one for another base model": (narrower, {}),
    "qq_proj, it has nothing there": (elsewhere, {}),
    "lm_head": (of_the_head, {}),
    "use_dora: wanted False": (None, {"use_dora": True}),
    "bias: wanted 'none'": (None, {"bias": "all"}),
    "peft_type: wanted 'LORA'": (None, {"peft_type": "IA3"}),
    "lora_alpha: wanted a finite number": (None, {"lora_alpha": "x"}),
    "lora_alpha: wanted a finite number, got 1000": (None, {"lora_alpha": 10**400}),
    "lora_alpha: wanted a finite number, got nan": (None, {"lora_alpha": float("nan")}),
    "alpha_pattern: error: missing )": (None, {"alpha_pattern": {"(": 1}}),
    "init_lora_weights: wanted True, got 'pissa'": (None, {"init_lora_weights": "pissa"}),
    "alora_invocation_tokens: wanted []": (None, {"alora_invocation_tokens": [7]}),
    "of one rank, got 0 and 0": (of_no_rank, {}),
    "got tensors of 2 and 0 dimensions": (without_dimensions, {}),
    "wanted finite weights": (not_numbers, {}),
}


@pytest.mark.parametrize("says", EDITS)
def test_an_adapter_that_cannot_be_applied_exactly_is_refused_by_name(folders, tmp_path, says):
    edit, fields = EDITS[says]
    found = refusal((f"sql={changed(folders[0], tmp_path, edit, **fields)}",))
    assert found.startswith("lora: sql: ")
    assert says in found


def test_bad_names_are_refused(folders):
    place = folders[0]
    assert "wanted NAME=PATH" in refusal(("sql",))
    assert "adapter_config.json is missing" in refusal((f"sql={place}",))
    assert "wanted a name that can be printed" in refusal((f"\udcff={place / 'all'}",))
    assert "cannot be read" in refusal((f"sql={'x' * 5000}",))
    assert "cannot be read" in refusal(("sql=~nobody-has-this-name/x",))
    both = (f"sql={place / 'all'}", f"sql={place / 'attention'}")
    assert "'sql' twice" in refusal(both)
    engine = engine_with(place)
    with pytest.raises(InvalidArgumentError, match="one of attention, all, got 'x'"):
        engine.submit(asked([1, 2], "x"))
    assert not engine.has_unfinished


class Skipping(torch.nn.Linear):
    """A linear layer that a network passes by, as one does whose weights were absorbed."""

    def __call__(self, rows):
        return torch.nn.functional.linear(rows, self.weight)


def test_a_layer_that_the_network_passes_by_is_refused(folders):
    place = folders[0]
    model = load_model(str(CHECKPOINT_DIR), CPU)
    model.network.model.layers[0].self_attn.q_proj.__class__ = Skipping
    with pytest.raises(ModelError, match=r"q_proj of Qwen3ForCausalLM is not called"):
        Engine(
            model,
            backends.get_backend("numba"),
            EngineConfig(block_size=4, lora=(f"sql={place / 'attention'}",)),
        )


def test_a_layer_that_gives_more_than_a_product_stays_as_it_is():
    """The router of Llama 4 is a linear layer by its class, and returns two tensors."""
    config = make_config("Llama4TextConfig", "")
    network = auto_class(config).from_config(config).eval()
    loaded = Adapters(network, 1, 3, None, {})
    adapter = random_adapter(network, "sql", 3)
    with pytest.raises(UnsupportedModelError, match="router of Llama4ForCausalLM does more than"):
        loaded.add(adapter)
    products = {path: one for path, one in adapter.products.items() if "router" not in path}
    assert len(products) < len(adapter.products)
    loaded.add(replace(adapter, products=products))
    with loaded.choosing(torch.tensor([0])):
        run_probe(network, CPU, 3)


def test_products_beside_weights_that_stay_quantised_are_floats(folders):
    bitsandbytes = pytest.importorskip("bitsandbytes").nn
    network = load_model(str(CHECKPOINT_DIR), CPU).network
    attention = network.model.layers[0].self_attn
    plain = attention.q_proj
    quantised = bitsandbytes.Linear4bit(plain.in_features, plain.out_features, bias=False)
    quantised.weight = bitsandbytes.Params4bit(plain.weight.data, quant_type="nf4").to("cpu")
    attention.q_proj = quantised
    adapter = read_adapter(f"sql={folders[0] / 'attention'}", network)
    product = adapter.products["model.layers.0.self_attn.q_proj"]
    original = load_file(folders[0] / "attention" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    assert torch.equal(product.down, original[key.format("A")])
    assert torch.equal(product.up, original[key.format("B")] * 2)


def test_an_adapter_answers_python_and_a_conversation(folders):
    lora = tuple(f"{name}={folders[0] / name}" for name in TARGETS)
    llm = LLM(str(CHECKPOINT_DIR), block_size=4, num_blocks=200, lora=lora)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for name in (None, *TARGETS):
        found = llm.generate([*PROMPTS], params, lora_name=name)
        assert [list(one.outputs[0].token_ids) for one in found] == folders[2][name]
        [chat] = llm.chat([{"role": "user", "content": "x"}], params, lora_name=name)
        talk = Conversation(llm.engine, params, lora_name=name)
        assert talk.ask("x", lambda _: None).text == chat.outputs[0].text
