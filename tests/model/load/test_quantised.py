"""Published formats of quantised weights: what is read and written, and what is refused."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig

import backends
from model import LLM, EngineConfig, ModelError, SamplingParams
from model.engine import Engine
from model.load import quantised
from model.load.loader import load_model
from model.tiny import CHECKPOINT_DIR
from tests.model.conftest import byte_tokenizer
from tests.model.load import quantised_checkpoints
from tests.model.load.quantised_checkpoints import KINDS, pack_fp8_rows, write
from tests.model.networks import CONFIGS, greedy_logits

PROMPTS = ("A tuple is", "The method returns the index of", "A list")
BOUNDS = {  # of the error of a weight, relative to the largest of its matrix
    "FP8 blocks": 0.04,
    "FP8 static": 0.04,
    "FP8 dynamic": 0.04,
    "FP8 rows": 0.04,
    "FP8 FBGEMM": 0.04,
    "FP8 ModelOpt": 0.04,
    "FP8 ModelOpt file": 0.04,
    "bitsandbytes nf4": 0.16,
    "bitsandbytes int8": 0.005,
    "compressed-tensors w8a8": 0.005,
    "compressed-tensors w4a16": 0.08,
    "compressed-tensors fp8": 0.04,
    "compressed-tensors fp8 static": 0.04,
    "compressed-tensors nvfp4": 0.18,
    "compressed-tensors nvfp4 static": 0.18,
}
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


def packages_of(kind):
    method = kind.split()[0].lower()
    name = {"bitsandbytes": kind if "int8" in kind else "bitsandbytes"}.get(method, method)
    return quantised.FORMATS[name].packages


def written(folder, kind):
    for package in packages_of(kind):
        pytest.importorskip(package.replace("-", "_"))
    return write(folder / "checkpoint", kind)


# What becomes of FP8 without blocks is compared number by number; one kind runs.
WHOLE_FP8 = [kind for kind in KINDS if kind.startswith("FP8") and kind != "FP8 blocks"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WHOLE_FP8[1:]])
def test_a_checkpoint_is_read_and_the_engine_writes_what_generate_writes(tmp_path, kind):
    model = load_model(str(written(tmp_path, kind)), CPU)
    prompts = [model.codec.encode(text) for text in PROMPTS]
    wanted = [greedy_logits(model, prompt, 12)[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    for sizes in ({}, {"max_num_batched_tokens": 5, "num_blocks": 12}):
        engine = Engine(model, backends.get_backend("numba"), EngineConfig(block_size=4, **sizes))
        done = engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        assert [one.request.output_tokens for one in done] == wanted


@pytest.mark.parametrize("kind", BOUNDS)
def test_the_weights_are_near_those_that_were_quantised(tmp_path, kind):
    network = load_model(str(written(tmp_path, kind)), CPU).network
    original = load_file(CHECKPOINT_DIR / "model.safetensors")
    found = network.state_dict()
    for name, weight in original.items():
        error = (found[name] - weight.float()).abs().max() / weight.abs().max()
        assert found[name].dtype == torch.float32
        assert error < (BOUNDS[kind] if weight.ndim == 2 else 1e-6), name


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_takes_hardly_more_than_the_weights(tmp_path, monkeypatch, forks):
    base = tmp_path / "base"
    shutil.copytree(CHECKPOINT_DIR, base, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = AutoConfig.from_pretrained(base)
    config.update({"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4})
    config.layer_types = ["full_attention"] * 4
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(base)
    monkeypatch.setattr(quantised_checkpoints, "CHECKPOINT_DIR", base)
    path = written(tmp_path, "FP8 blocks")
    for keeping in ((), ("keeping",)):  # the second one: a planted bug
        done = forks.run("-m", "tests.model.load.loading_memory", path, *keeping)
        taken, size = map(int, done.stdout.split()[-2:])
        assert (taken <= 1.2 * size) == (not keeping), (taken, size)


@pytest.mark.parametrize("kind", [*WHOLE_FP8, "compressed-tensors fp8 static"])
def test_fp8_weights_are_exactly_their_numbers_times_their_scales(tmp_path, kind):
    folder = written(tmp_path, kind)
    found = load_model(str(folder), CPU).network.state_dict()
    stored = load_file(folder / "model.safetensors")
    scaled = [name for name in stored if name.endswith(".weight_scale")]
    assert scaled
    for name in scaled:
        weight = name.removesuffix("_scale")
        assert torch.equal(found[weight], stored[weight].float() * stored[name].float()), name


def fused(folder):
    """Phi 3 has one matrix for queries, keys and values, and one for gate and up."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(CONFIGS["phi3"]).float()
    network.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    parts = {"qkv_proj": (64, 32, 32), "gate_up_proj": (64, 64)}
    found, wanted = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        base = name.removesuffix(".weight")
        counts = parts.get(base.rpartition(".")[2])
        if counts is None:
            found[name] = wanted[name] = weight
            continue
        packed = pack_fp8_rows(base, weight, counts, input_scale=0.03)
        found |= packed
        scale = packed[f"{base}.weight_scale"].repeat_interleave(torch.tensor(counts))
        wanted[name] = packed[name].float() * scale[:, None]
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    changed(folder, quantization_config={"quant_method": "fp8", "activation_scheme": "static"})
    return wanted


def fused_columns(folder):
    """The same with a column of scales, which as a grid would divide the matrix evenly."""
    wanted = fused(folder)
    tensors = load_file(folder / "model.safetensors")
    columns = {
        name: scales[:, None] for name, scales in tensors.items() if name.endswith("weight_scale")
    }
    assert columns
    save_file(tensors | columns, folder / "model.safetensors", metadata={"format": "pt"})
    return wanted


def experts(folder):
    """Mixtral's file has three matrices for each expert, with a scale each; its network has two."""
    torch.manual_seed(0)
    sizes = {"num_local_experts": 3, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, **heads, vocab_size=320, max_position_embeddings=64)
    network = AutoModelForCausalLM.from_config(config).float()
    network.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    found, scales = {}, []
    for name, weight in load_file(folder / "model.safetensors").items():
        base = name.removesuffix(".weight")
        is_expert = "experts" in name
        found |= pack_fp8_rows(base, weight, input_scale=0.03) if is_expert else {name: weight}
        scales += [found[f"{base}.weight_scale"]] if is_expert else []
    assert len(scales) == 9
    dense = {
        name: weight.float() * found[f"{name}_scale"] if f"{name}_scale" in found else weight
        for name, weight in found.items()
        if name.endswith("weight")
    }
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    wanted = load_model(str(folder), CPU).network.state_dict()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    changed(folder, quantization_config={"quant_method": "fp8", "activation_scheme": "static"})
    return wanted


@pytest.mark.parametrize("make", [fused, fused_columns, experts])
def test_fp8_parts_of_a_matrix_have_scales_of_their_own(tmp_path, make):
    wanted = make(tmp_path)
    model = load_model(str(tmp_path), CPU)
    found = model.network.state_dict()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name
    prompt = [5, 7, 11, 13, 17]
    engine = Engine(model, backends.get_backend("numba"), EngineConfig(block_size=4))
    done = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    assert done[0].request.output_tokens == greedy_logits(model, prompt, 8)[0]


def changed(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(path):
    with pytest.raises(ModelError) as caught:
        load_model(str(path), CPU)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    folder = written(tmp_path, "FP8 blocks")
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    assert "in FP8 (DeepSeek V3, Qwen3, AutoFP8)" in refusal(folder)
    assert refusal(folder).endswith("pip install accelerate")


def test_a_format_that_contradicts_its_tensors_is_refused(tmp_path):
    folder = written(tmp_path, "FP8 blocks")
    changed(folder, quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})
    refusal(folder)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("FP8 static", "activation_scheme", "per_token"),
        ("FP8 ModelOpt", "quant_algo", "NVFP4"),
        ("FP8 ModelOpt", "quant_algo", None),
        ("FP8 static", "quant_method", "quark"),
    ],
)
def test_what_is_not_read_is_refused_by_its_field(tmp_path, kind, field, value):
    folder = written(tmp_path, kind)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    changed(folder, quantization_config=settings | {field: value})
    assert f"quantization_config: {field}: wanted " in refusal(folder)
    assert f"got {value!r}" in refusal(folder)


def test_a_file_of_modelopt_that_is_broken_is_named(tmp_path):
    folder = written(tmp_path, "FP8 ModelOpt file")
    for content in ("{", '{"quantization": 3}'):
        (folder / "hf_quant_config.json").write_text(content)
        assert "hf_quant_config.json" in refusal(folder)


@pytest.mark.parametrize("shape", [(2,), (3,), (7, 1), (2, 5), (1, 1, 2), (0, 1), (1, 0)])
def test_fp8_scales_of_an_unknown_shape_are_refused_by_their_name(tmp_path, shape):
    folder = written(tmp_path, "FP8 static")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale"
    save_file(tensors | {name: torch.ones(shape)}, folder / "model.safetensors")
    assert f"{name}: wanted a scale for the matrix" in refusal(folder)
    assert f"got the shape {list(shape)} for [192, 384]" in refusal(folder)


@pytest.mark.parametrize("sizes", [[0, 16], ["16", 16], [16, None], [16]])
def test_fp8_scales_beside_sizes_that_no_block_has_are_refused(tmp_path, sizes):
    folder = written(tmp_path, "FP8 static")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    changed(folder, quantization_config=settings | {"weight_block_size": sizes})
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale"
    save_file(tensors | {name: torch.ones(7, 1)}, folder / "model.safetensors")
    assert f"{name}: wanted a scale for the matrix" in refusal(folder)


def test_scales_beside_weights_that_are_not_quantised_are_refused(tmp_path):
    folder = shutil.copytree(CHECKPOINT_DIR, tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.input_scale"
    save_file(tensors | {name: torch.ones(())}, folder / "model.safetensors")
    assert f"{name} is not in the network" in refusal(folder)


SCALED = {
    "FP8 blocks": "_scale_inv",
    "FP8 static": "down_proj.weight_scale",
    "FP8 FBGEMM": "down_proj.weight_scale",
    "MXFP4": "_scales",
    "bitsandbytes nf4": ".absmax",
    "bitsandbytes int8": ".SCB",
    "compressed-tensors w4a16": ".weight_scale",
}


@pytest.mark.parametrize(("kind", "end"), SCALED.items())
def test_scales_that_are_missing_are_an_error(tmp_path, kind, end):
    folder = written(tmp_path, kind)
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if name.endswith(end))
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors")
    assert lost in refusal(folder)


def test_an_adapter_is_told_from_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "a LoRA adapter, not a model" in refusal(tmp_path)


def test_a_folder_with_a_gguf_file_names_it(tmp_path):
    (tmp_path / "x-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / "x-Q4_K_M.gguf") in refusal(tmp_path)


def test_a_broken_gguf_file_is_an_error_in_a_line(tmp_path):
    path = written(tmp_path, "GGUF Q8_0")
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert str(path) in refusal(path) or "does not load" in refusal(path)


def test_the_tokenizer_of_a_gguf_file_is_in_it(tmp_path):
    llm = LLM(str(written(tmp_path, "GGUF Q8_0")), num_blocks=20)
    assert llm.get_tokenizer().encode(PROMPTS[0]) == llm.engine.model.codec.encode(PROMPTS[0])


def test_a_configuration_may_say_that_nothing_is_quantised(tmp_path):
    folder = shutil.copytree(CHECKPOINT_DIR, tmp_path / "checkpoint")
    changed(folder, quantization_config=None, quantization=None)
    assert load_model(str(folder), CPU).eos_token_ids


def test_weights_for_mlx_are_refused_with_what_to_do(tmp_path):
    folder = Path(written(tmp_path, "FP8 blocks"))
    content = json.loads((folder / "config.json").read_text())
    del content["quantization_config"]
    content["quantization"] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(content))
    assert "MLX" in refusal(folder)


def test_code_of_a_checkpoint_is_not_run_and_the_error_says_so(tmp_path):
    folder = written(tmp_path, "FP8 blocks")
    changed(folder, model_type="private", auto_map={"AutoConfig": "configuration.Private"})
    assert "code of its own, which is never run" in refusal(folder)
