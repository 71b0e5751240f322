"""Tiny checkpoints with quantised weights, one for each format, written from the tiny model's.

Where a format's own package writes it, that package does; the others are packed here, as their
publishers describe them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GptOssConfig

from model.tiny import CHECKPOINT_DIR

GROUP = 64
BLOCK = 32


def write(folder: Path, kind: str) -> Path:
    """Write a checkpoint of a kind of `KINDS`; what `--model` wants for it."""
    shutil.copytree(CHECKPOINT_DIR, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return KINDS[kind](folder) or folder


def _rewrite(
    folder: Path, settings: dict[str, Any], pack: Callable[[str, Tensor], dict[str, Tensor]]
) -> None:
    """Replace the weights of all linear layers by what `pack` makes of them."""
    path = folder / "model.safetensors"
    found: dict[str, Tensor] = {}
    for name, weight in load_file(path).items():
        is_linear = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
        base = name.removesuffix(".weight")
        found |= pack(base, weight.float()) if is_linear else {name: weight}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, path)
    _settle(folder, settings)


def _settle(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text()) | {"quantization_config": settings}
    path.write_text(json.dumps(content))


def _fp8(folder: Path) -> None:
    sizes = [BLOCK, BLOCK]
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": sizes}
    _rewrite(folder, settings, lambda name, weight: pack_fp8(name, weight, BLOCK))


def pack_fp8(name: str, weight: Tensor, size: int) -> dict[str, Tensor]:
    """A matrix in FP8 with a scale for each square of a size, cut at its edges."""
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
    blocks = whole.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2)
    scale = blocks.abs().amax((2, 3)) / 448
    stored = (blocks / scale[..., None, None]).to(torch.float8_e4m3fn).transpose(1, 2)
    stored = stored.reshape(whole.shape)[:rows, :columns]
    return {f"{name}.weight": stored, f"{name}.weight_scale_inv": scale}


def pack_fp8_rows(
    name: str, weight: Tensor, counts: tuple[int, ...] = (), **others: float
) -> dict[str, Tensor]:
    """A matrix in FP8 with a scale for each of its parts, and what else stands beside it.

    Args:
        name: of the layer.
        weight: the matrix.
        counts: the rows of each part; empty: one scale without a dimension for all.
        others: tensors of one number, such as the scale of the activations.
    """
    parts = weight.split(counts) if counts else (weight,)
    scales = torch.stack([part.abs().max() / 448 for part in parts])
    rows = [part / scale for part, scale in zip(parts, scales, strict=True)]
    stored = {
        f"{name}.weight": torch.cat(rows).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scales if counts else scales[0],
    }
    return stored | {f"{name}.{other}": torch.tensor(value) for other, value in others.items()}


def _auto_fp8(
    scheme: str, *, by_row: bool = False, others: tuple[str, ...] = (), **settings: Any
) -> Callable[[Path], None]:
    """FP8 without blocks, as AutoFP8, FBGEMM and ModelOpt write it."""

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        given = dict.fromkeys(others, 0.03)
        if name.endswith("k_proj"):
            given |= {"k_scale": 0.5, "output_scale": 0.5}
        found = pack_fp8_rows(name, weight, (1,) * len(weight) if by_row else (), **given)
        if by_row:
            found[f"{name}.weight_scale"] = found[f"{name}.weight_scale"][:, None]
        if name.endswith("v_proj"):
            found[f"{name.removesuffix('.v_proj')}.v_scale"] = torch.tensor([0.5])
        return found

    given = {"quant_method": "fp8", "activation_scheme": scheme} | settings
    return lambda folder: _rewrite(folder, given, pack)


def _modelopt_file(folder: Path) -> None:
    """ModelOpt's first files say nothing in config.json."""
    _auto_fp8("static", others=("input_scale",))(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    del content["quantization_config"]
    path.write_text(json.dumps(content))
    found = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    producer = {"name": "modelopt", "version": "0.33"}
    path = folder / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": producer, "quantization": found}))


def _levels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of 4 bits around 8, [in, out], and a scale for each group of inputs."""
    groups = weight.T.unflatten(0, (-1, GROUP))
    scale = groups.abs().amax(1) / 7
    whole = (groups / scale[:, None]).round().clamp(-8, 7) + 8
    return whole.flatten(0, 1).to(torch.int32), scale.half()


def _packed(whole: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
    """Eight integers of 4 bits in one of 32, along a dimension."""
    parts = whole.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, 0)
    total = sum(parts[place] << (4 * shift) for shift, place in enumerate(order))
    return (total - ((total >> 31) << 32)).to(torch.int32)


IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _gptq(folder: Path) -> None:
    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        whole, scale = _levels(weight)
        return {
            f"{name}.qweight": _packed(whole, 0, IN_ORDER),
            f"{name}.qzeros": _packed(torch.full_like(scale, 7), 1, IN_ORDER),  # one less is stored
            f"{name}.scales": scale,
            f"{name}.g_idx": torch.arange(len(whole), dtype=torch.int32) // GROUP,
        }

    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
    _rewrite(folder, settings | {"sym": True, "checkpoint_format": "gptq"}, pack)


def _awq(folder: Path) -> None:
    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        whole, scale = _levels(weight)
        return {
            f"{name}.qweight": _packed(whole, 1, AWQ_ORDER),
            f"{name}.qzeros": _packed(torch.full_like(scale, 8), 1, AWQ_ORDER),
            f"{name}.scales": scale,
        }

    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    _rewrite(folder, settings | {"version": "gemm"}, pack)


def _bitsandbytes(**settings: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        found = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**settings), dtype=torch.float32
        )
        found.save_pretrained(folder)

    return write


def _compressed(scheme: str, *, group: int | None = None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        compressors = pytest.importorskip("compressed_tensors.compressors")
        quantization = pytest.importorskip("compressed_tensors.quantization")
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = quantization.preset_name_to_scheme(scheme, ["Linear"])
        if group is not None:
            wanted.weights.group_size = group
        quantization.apply_quantization_config(
            network,
            quantization.QuantizationConfig(
                config_groups={"all": wanted}, ignore=["lm_head"], quantization_status="frozen"
            ),
        )
        highest = {"int": {8: 127, 4: 7}, "float": {8: 448, 4: 6}}
        for module in network.modules():
            if getattr(module, "quantization_scheme", None) is None:
                continue
            weights, weight = module.quantization_scheme.weights, module.weight.data
            size = weights.group_size or weight.shape[1]
            scale = weight.unflatten(1, (-1, size)).abs().amax(2)
            scale = scale / highest[str(weights.type).rpartition(".")[2].lower()][weights.num_bits]
            if hasattr(module, "weight_global_scale"):  # NVFP4 scales its scales, of FP8
                module.weight_global_scale.data.fill_(float(448 * 6 / weight.abs().max()))
                scale = scale * module.weight_global_scale
            if module.weight_scale.numel() == 1:
                scale = scale.max()
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            for name in ("input_scale", "input_global_scale"):
                if hasattr(module, name):
                    getattr(module, name).data.fill_(0.03)
        compressor = compressors.ModelCompressor.from_pretrained_model(network)
        compressor.compress_model(network)
        network.save_pretrained(folder)
        compressor.update_config(str(folder))

    return write


def _mxfp4(folder: Path) -> None:
    """A GPT-OSS whose experts are in MXFP4: 32 numbers of 4 bits share an exponent."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.3}
    config = GptOssConfig(**sizes, **heads, **experts, sliding_window=8, eos_token_id=None)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    pack_mxfp4(folder / "model.safetensors")
    _settle(folder, {"quant_method": "mxfp4", "modules_to_not_convert": []})


def pack_fp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A matrix in FP4 with a scale for each 32 numbers of a row."""
    codes, exponent = _fp4(weight)
    packed, scale = codes.flatten(1).to(torch.int8), 2**exponent
    return {f"{name}.weight": packed, f"{name}.weight_scale_inv": scale}


def pack_mxfp4(path: Path) -> None:
    """Rewrite the experts of a file in MXFP4."""
    found: dict[str, Tensor] = {}
    for name, weight in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = weight
            continue
        codes, exponent = _fp4(weight.transpose(1, 2))
        found[f"{name}_blocks"] = codes.to(torch.uint8)
        found[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, path)


def _fp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of numbers of 4 bits, [..., groups, 16], and the exponent of each group of 32."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = rows.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    levels = torch.cat([levels, -levels])
    codes = (groups[..., None] * 2 ** -exponent[..., None] - levels).abs().argmin(-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4, exponent[..., 0]


def _gguf(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        gguf = pytest.importorskip("gguf")
        path = folder / f"{kind}.gguf"
        layers, width, heads, pairs, vocabulary = 2, 256, 4, 2, 2048
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(layers)
        writer.add_context_length(512)
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(width)
        writer.add_head_count(heads)
        writer.add_head_count_kv(pairs)
        writer.add_rope_dimension_count(width // heads)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10_000.0)
        writer.add_vocab_size(vocabulary)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        words = dict(tokenizer["model"]["vocab"])
        words |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
        spelled = sorted(words, key=words.__getitem__)
        spelled += [f"[PAD{number}]" for number in range(len(spelled), vocabulary)]
        merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(spelled)
        writer.add_token_types([1] * vocabulary)
        writer.add_token_merges(merges)
        writer.add_eos_token_id(0)
        torch.manual_seed(0)
        stored = getattr(gguf.GGMLQuantizationType, kind)

        def add(name: str, *shape: int) -> None:
            weight = (torch.randn(shape) * 0.3).numpy()
            writer.add_tensor(f"{name}.weight", _blocks(gguf, weight, stored), raw_dtype=stored)

        add("token_embd", vocabulary, width)
        add("output", vocabulary, width)
        writer.add_tensor("output_norm.weight", torch.ones(width).numpy())
        for layer in range(layers):
            for name, rows in (
                *(("attn_q", width), ("attn_k", width // heads * pairs), ("attn_output", width)),
                *(("attn_v", width // heads * pairs), ("ffn_gate", width), ("ffn_up", width)),
                ("ffn_down", width),
            ):
                add(f"blk.{layer}.{name}", rows, width)
            for name in ("attn_norm", "ffn_norm"):
                writer.add_tensor(f"blk.{layer}.{name}.weight", torch.ones(width).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        for other in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / other).unlink()  # the file holds everything
        return path

    return write


def _blocks(gguf: Any, weight: Any, stored: Any) -> Any:
    """Numbers in blocks of a kind; at random for one that the package cannot write."""
    try:
        return gguf.quants.quantize(weight, stored)
    except NotImplementedError:
        size, num_bytes = gguf.GGML_QUANT_SIZES[stored]
        count = weight.size // size
        blocks = torch.randint(0, 256, (count, num_bytes), dtype=torch.uint8)
        scales = torch.tensor([0.002, 0.015], dtype=torch.float16).view(torch.uint8)
        blocks[:, :4] = scales  # Q4_K begins with the scale of its scales and of its minima
        return blocks.reshape(weight.shape[0], -1).numpy()


KINDS: dict[str, Callable[[Path], Path | None]] = {
    "FP8 blocks": _fp8,
    "FP8 static": _auto_fp8("static", others=("input_scale",), ignored_layers=["lm_head"]),
    "FP8 dynamic": _auto_fp8("dynamic", modules_to_not_convert=["re:.*lm_head"]),
    "FP8 rows": _auto_fp8("dynamic", by_row=True, weight_block_size=None),
    "FP8 FBGEMM": _auto_fp8(
        "dynamic", by_row=True, others=("input_scale_ub",), quant_method="fbgemm_fp8"
    ),
    "FP8 ModelOpt": _auto_fp8(
        "static",
        others=("input_scale",),
        quant_method="modelopt",
        quant_algo="FP8",
        ignore=["lm_head"],
    ),
    "FP8 ModelOpt file": _modelopt_file,
    "MXFP4": _mxfp4,
    "GPTQ": _gptq,
    "AWQ": _awq,
    "bitsandbytes nf4": _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "bitsandbytes int8": _bitsandbytes(load_in_8bit=True),
    "compressed-tensors w8a8": _compressed("W8A8"),
    "compressed-tensors w4a16": _compressed("W4A16", group=GROUP),
    "compressed-tensors fp8": _compressed("FP8_DYNAMIC"),
    "compressed-tensors fp8 static": _compressed("FP8"),
    "compressed-tensors nvfp4": _compressed("NVFP4A16"),
    "compressed-tensors nvfp4 static": _compressed("NVFP4"),
    "GGUF Q8_0": _gguf("Q8_0"),
    "GGUF Q4_K": _gguf("Q4_K"),
}
