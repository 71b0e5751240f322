"""Checkpoints with quantised weights: which formats load, and what becomes of their weights.

Transformers' quantizers, and the packages that they call, read every format. Where a package's
layers give a token the same result alone and in a batch, they stay as they are; elsewhere weights
are dequantised, and the network is an ordinary one from then on: its activations and its KV cache
are not rounded, and the scales that a checkpoint has for them are not used.

Decides: from `quantization_config` in config.json, or from the end of a file's name, which format a
checkpoint has, and whether it stays quantised.

Invariants: nothing is quantised here; a format that is not in `FORMATS`, or whose package is not
installed, is refused before any weight is read, with the package's name.

Does not know: requests, caches, backends.
"""

import ctypes
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import GgufConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from model.errors import ModelNotFoundError, UnsupportedModelError, shown
from model.load.checkpoint import StoredTensor, read_object


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantised weights.

    Attributes:
        name: in words.
        packages: that read it, as pip names them.
        stays: types of devices on which its layers run as they are; elsewhere weights are
            dequantised when read.
    """

    name: str
    packages: tuple[str, ...]
    stays: tuple[str, ...] = ()


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's `mallopt`


@contextmanager
def freeing_at_once() -> Iterator[None]:
    """Return tensors from a MiB on that the body frees to the system at once, on glibc.

    A weight that is dequantised leaves several tensors behind. glibc would keep those below 32 MiB
    for later, between the weights that stay: up to three quarters of their size. Afterwards it
    keeps such memory again, for the tensors of steps.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, 1 << 25)  # what glibc itself comes to
        set_option(_TRIM_THRESHOLD, 1 << 26)


@contextmanager
def reading_scales(config: PreTrainedConfig) -> Iterator[None]:
    """Have Transformers read FP8 matrices whose scales are not a grid that divides them.

    It knows only such grids. A checkpoint may have a scale for the whole matrix, for each row, or
    for each part of a fused matrix. DeepSeek V3 has 576 rows in blocks of 128 in each layer, so the
    edge cuts the last blocks: Transformers divides rows by scales to find the size of a block, and
    would refuse them, or take wrong scales.

    Args:
        config: of the network.
    """
    original = Fp8Dequantize._dequantize_one  # noqa: SLF001
    has_blocks = _has_blocks(config)

    def dequantise(
        self: Fp8Dequantize,
        quantized: Tensor,
        scales: Tensor,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        sizes = self.hf_quantizer.quantization_config.weight_block_size or (1, 1)
        shape = quantized.shape[-2:]
        if scales.numel() == 1:
            scales = scales.reshape(1, 1)
        elif _is_list(scales.shape, has_blocks=has_blocks) and (
            counts := _rows_of_scales(len(scales), shape[0], config)
        ):
            repeats = torch.tensor(counts, device=scales.device)
            scales = scales.flatten().repeat_interleave(repeats)[:, None]
        whole = _padded(shape, sizes)
        is_cut = [*shape] != whole and _spanned(scales.shape[-2:], sizes) == whole
        if is_cut:
            padded = quantized.new_zeros(whole)
            padded[: shape[0], : shape[1]] = quantized
            quantized = padded
        found: Tensor = original(self, quantized, scales, output_dtype=output_dtype)
        return found[: shape[0], : shape[1]].contiguous() if is_cut else found

    Fp8Dequantize._dequantize_one = dequantise  # type: ignore[method-assign]  # noqa: SLF001
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = original  # type: ignore[method-assign]  # noqa: SLF001


def _has_blocks(config: PreTrainedConfig) -> bool:
    return bool((_settings(config) or {}).get("weight_block_size"))


def _is_list(shape: Sequence[int], *, has_blocks: bool) -> bool:
    """Return True if scales of this shape are those of rows or of parts, not a grid of blocks."""
    return len(shape) == 1 or (len(shape) == 2 and shape[1] == 1 and not has_blocks)


def _padded(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return a shape rounded up to whole blocks."""
    return [-(-length // size) * size for length, size in zip(shape, sizes, strict=True)]


def _spanned(grid: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the shape that the blocks of a grid of scales fill."""
    return [count * size for count, size in zip(grid, sizes, strict=True)]


def _rows_of_scales(num_scales: int, num_rows: int, config: PreTrainedConfig) -> list[int]:
    """Return how many rows each of a list of scales is for; empty if its meaning is unknown."""
    if num_scales == num_rows:
        return [1] * num_rows
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    pairs = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(1, heads)
    qkv, halves = [heads * size, pairs * size, pairs * size], [num_rows // 2] * 2
    fused = [counts for counts in (qkv, halves) if len(counts) == num_scales]
    return next((counts for counts in fused if sum(counts) == num_rows), [])


_INT8 = "bitsandbytes int8"
_BITSANDBYTES = ("accelerate", "bitsandbytes")
FORMATS = {
    "fp8": Format("FP8 (DeepSeek V3, Qwen3, AutoFP8)", ("accelerate",)),
    "fbgemm_fp8": Format("FP8 of FBGEMM (Llama 3.1 405B)", ("accelerate",)),
    "modelopt": Format("FP8 of ModelOpt", ("accelerate",)),
    "mxfp4": Format("MXFP4 (GPT-OSS)", ("accelerate",)),
    "compressed-tensors": Format(
        "compressed-tensors (w8a8, w4a16, FP8, NVFP4)", ("accelerate", "compressed-tensors")
    ),
    # On a CPU its product for one token rounds more than that for several.
    "bitsandbytes": Format("bitsandbytes 4 bit (nf4, fp4)", _BITSANDBYTES, stays=("cuda",)),
    # Its products take columns apart in which any token of the batch has an outlier.
    _INT8: Format(_INT8, _BITSANDBYTES),
    "gptq": Format("GPTQ", ("accelerate", "gptqmodel", "optimum"), stays=("cpu", "cuda")),
    "awq": Format("AWQ", ("accelerate", "gptqmodel"), stays=("cpu", "cuda")),
    "gguf": Format("GGUF (Q8_0, Q4_K and others)", ("accelerate", "gguf")),
}
"""By `quant_method`; bitsandbytes has one name for two formats."""
_FP8 = ("fp8", "fbgemm_fp8", "modelopt")  # one layout, three descriptions of it
_ALLOWED = {  # values of fields that say how FP8 weights are stored, and activations rounded
    "fp8": ("activation_scheme", ("dynamic", "static", None)),
    "modelopt": ("quant_algo", ("FP8",)),
}
UNUSED_SCALES = re.compile(
    r"\.(input|act|activation|output|prob|[qkv]|kv)_(global_)?(scale|zero_point)(_ub)?$"
)
"""The names of scales of activations and of KV caches, which are not rounded here."""


def find_format(where: str, config: PreTrainedConfig, *, is_gguf: bool = False) -> Format | None:
    """Return the format of a checkpoint's weights; None: they are not quantised. O(1).

    Args:
        where: the name of the checkpoint in an error.
        config: of the checkpoint.
        is_gguf: True if its weights are in a GGUF file.

    Raises:
        UnsupportedModelError: an unknown format, or a package that reads it is not installed.
    """
    method = "gguf" if is_gguf else _method(config)
    if method is None:
        return None
    found = FORMATS.get(method)
    if found is None:
        known = ", ".join(sorted(FORMATS))
        raise UnsupportedModelError(
            f"{where}: quantization_config: quant_method: wanted one of {known}, got "
            f"{shown(method)}"
        )
    field, allowed = _ALLOWED.get(method, ("", (None,)))
    value = (_settings(config) or {}).get(field)
    if value not in allowed:
        raise UnsupportedModelError(
            f"{where}: quantization_config: {field}: wanted "
            f"{' or '.join(filter(None, allowed))}, got {shown(value)}"
        )
    missing = [name for name in found.packages if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise UnsupportedModelError(
            f"{where}: its weights are in {found.name}, and the package that reads it is not "
            f"installed: pip install {' '.join(missing)}"
        )
    return found


def add_modelopt(config: PreTrainedConfig, path: Path) -> None:
    """Add the settings of ModelOpt's first checkpoints, which stand in a separate file. O(1).

    Args:
        config: of the checkpoint; its `quantization_config` is set if it has none.
        path: of the file, which need not exist.

    Raises:
        ModelNotFoundError: the file is broken.
    """
    if _settings(config) is None and path.is_file():
        found = read_object(path).get("quantization")
        if not isinstance(found, dict):
            raise ModelNotFoundError(
                f"model: {path}: quantization: wanted an object, got {shown(found)}"
            )
        config.quantization_config = {"quant_method": "modelopt"} | found


def _settings(config: PreTrainedConfig) -> Mapping[str, object] | None:
    found: Mapping[str, object] | None = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(), "quantization_config", None)
    return found


def _method(config: PreTrainedConfig) -> str | None:
    settings = _settings(config)
    if settings is None:
        return None
    # bitsandbytes wrote no method in its first years.
    is_int8 = bool(settings.get("load_in_8bit"))
    method = settings.get("quant_method", "bitsandbytes" if "load_in_8bit" in settings else None)
    return _INT8 if method == "bitsandbytes" and is_int8 else str(method)


_SCALES = (  # the end of a quantised tensor's name, and the ends of which one has its scales
    (".weight", (".weight_scale_inv", ".weight_scale", ".SCB", ".weight.absmax")),
    (".weight_packed", (".weight_scale",)),
    (".qweight", (".scales",)),
    ("_blocks", ("_scales",)),
)
_UNSCALED = ("F64", "F32", "F16", "BF16")


def check_scales(path: Path, config: PreTrainedConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse quantised tensors without scales, which Transformers takes as they are. O(tensors).

    Args:
        path: the file that describes the network.
        config: its contents.
        stored: from `check_files`.

    Raises:
        ModelNotFoundError: with the name of the tensor.
        UnsupportedModelError: the scales of an FP8 matrix have an unknown shape.
    """
    if _method(config) in _FP8:
        _check_fp8(path, config, stored)
    for name, tensor in stored.items():
        for end, others in _SCALES:
            base = name.removesuffix(end)
            is_quantised = base != name and tensor.dtype not in _UNSCALED
            if is_quantised and not any(base + other in stored for other in others):
                raise ModelNotFoundError(
                    f"model: {path.with_name(tensor.file)}: {name} is {tensor.dtype}, and its "
                    f"scales, {' or '.join(base + other for other in others)}, are missing"
                )


def _check_fp8(path: Path, config: PreTrainedConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse scales that divide no FP8 matrix into rows, parts or blocks."""
    sizes = (_settings(config) or {}).get("weight_block_size")
    for name, tensor in stored.items():
        base = name.removesuffix(".weight")
        ends = (end for end in (".weight_scale", ".weight_scale_inv") if base + end in stored)
        scales = next((base + end for end in ends), None)
        if base == name or scales is None or len(tensor.shape) != 2:
            continue
        grid = stored[scales].shape
        count, rows = stored[scales].num_elements, tensor.shape[0]
        is_list = _is_list(grid, has_blocks=_has_blocks(config))
        if len(grid) == 2 and not is_list:
            lengths = zip(tensor.shape, grid, strict=True)
            fits = all(count and length % count == 0 for length, count in lengths)
            if isinstance(sizes, list) and [*map(type, sizes)] == [int, int] and 0 not in sizes:
                fits = fits or _spanned(grid, sizes) == _padded(tensor.shape, sizes)
        else:
            has_parts = base.endswith(("qkv_proj", "gate_up_proj"))
            fits = count == 1 or (
                is_list
                and (count == rows or has_parts)
                and bool(_rows_of_scales(count, rows, config))
            )
        if not fits:
            raise UnsupportedModelError(
                f"model: {path.with_name(tensor.file)}: {scales}: wanted a scale for the matrix, "
                f"for each row, for each part, or for each block of weight_block_size, got the "
                f"shape {list(grid)} for {list(tensor.shape)}"
            )


def choose_dequantised(config: PreTrainedConfig, found: Format) -> dict[str, object]:
    """Have Transformers dequantise weights as it reads them, if their format cannot stay anywhere.

    Args:
        config: its `quantization_config` is changed.
        found: the format of its weights.

    Returns:
        Further arguments for `from_pretrained`.
    """
    if found.name == FORMATS["gguf"].name:
        return {"quantization_config": GgufConfig(dequantize=True)}
    settings = getattr(config, "quantization_config", None)
    is_fp8 = _method(config) in _FP8
    if isinstance(settings, dict) and found.packages != _BITSANDBYTES and not found.stays:
        if settings.get("quant_method") in _FP8[1:]:
            settings = config.quantization_config = {"quant_method": "fp8"}
        settings["dequantize"] = True
    # Transformers knows FP8 scales by the name that DeepSeek gave them.
    return {"key_mapping": {r"\.weight_scale$": ".weight_scale_inv"}} if is_fp8 else {}


def finish(
    network: PreTrainedModel, found: Format, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Convert the weights of a network that was read. O(weights) where they change.

    Those of bitsandbytes become floats where they cannot stay; those that Transformers dequantised
    get the configured dtype, since Transformers writes bfloat16 for some formats.

    Args:
        network: as Transformers read it.
        found: the format of its weights.
        dtype: of floats.
        device: that will run it.

    Returns:
        The network: an ordinary one, unless its format stays.
    """
    if device.type in found.stays:
        return network
    if found.packages == _BITSANDBYTES:
        network = network.dequantize(dtype)  # type: ignore[no-untyped-call]
    for weight in network.parameters():
        if weight.dtype in (torch.bfloat16, torch.float16):  # some stay in float32 for precision
            weight.data = weight.data.to(dtype)
    return network
