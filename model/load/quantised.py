"""Checkpoints with quantised weights: which formats load, and what becomes of their weights.

Transformers' quantizers, and the packages that they call, read every format. Where a package's
layers give a token the same result alone and in a batch, they stay as they are; elsewhere weights
are dequantised, and the network is an ordinary one from then on.

Decides: from `quantization_config` in config.json, or from the end of a file's name, which format a
checkpoint has, and whether it stays quantised.

Invariants: nothing is quantised here; a format that is not in `FORMATS`, or whose package is not
installed, is refused before any weight is read, with the package's name.

Does not know: requests, caches, backends.
"""

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import GgufConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from model.errors import ModelNotFoundError, UnsupportedModelError, shown
from model.load.checkpoint import StoredTensor


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
    """Tensors of a MiB or more that are freed in here go back to the system at once, on glibc.

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
def padding_blocks() -> Iterator[None]:
    """Transformers reads matrices in here whose last FP8 blocks are cut by the edge.

    DeepSeek V3 has one in each layer: 576 rows in blocks of 128. Transformers divides rows by
    scales to find the size of a block, so it would refuse them, or take wrong scales.
    """
    original = Fp8Dequantize._dequantize_one  # noqa: SLF001

    def dequantise(
        self: Fp8Dequantize,
        quantized: Tensor,
        scales: Tensor,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        sizes = self.hf_quantizer.quantization_config.weight_block_size or (1, 1)
        shape, grid = quantized.shape[-2:], scales.shape[-2:]
        whole = [-(-length // size) * size for length, size in zip(shape, sizes, strict=True)]
        is_cut = [*shape] != whole and [n * s for n, s in zip(grid, sizes, strict=False)] == whole
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


_INT8 = "bitsandbytes int8"
_BITSANDBYTES = ("accelerate", "bitsandbytes")
FORMATS = {
    "fp8": Format("FP8 in blocks (DeepSeek V3, Qwen3)", ("accelerate",)),
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


def find_format(where: str, config: PreTrainedConfig, *, is_gguf: bool = False) -> Format | None:
    """The format of a checkpoint's weights; None: they are not quantised. O(1).

    Args:
        where: what names the checkpoint in an error.
        config: of the checkpoint.
        is_gguf: whether its weights are in a GGUF file.

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
    missing = [name for name in found.packages if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise UnsupportedModelError(
            f"{where}: its weights are in {found.name}, and the package that reads it is not "
            f"installed: pip install {' '.join(missing)}"
        )
    return found


def _method(config: PreTrainedConfig) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        settings = getattr(config.get_text_config(), "quantization_config", None)
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


def check_scales(config: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse quantised tensors without scales, which Transformers takes as they are. O(tensors).

    Args:
        config: the file that describes the network.
        stored: from `check_files`.

    Raises:
        ModelNotFoundError: with the name of the tensor.
    """
    for name, tensor in stored.items():
        for end, others in _SCALES:
            base = name.removesuffix(end)
            is_quantised = base != name and tensor.dtype not in _UNSCALED
            if is_quantised and not any(base + other in stored for other in others):
                raise ModelNotFoundError(
                    f"model: {config.with_name(tensor.file)}: {name} is {tensor.dtype}, and its "
                    f"scales, {' or '.join(base + other for other in others)}, are missing"
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
    if isinstance(settings, dict) and found.packages != _BITSANDBYTES and not found.stays:
        settings["dequantize"] = True
    return {}


def finish(
    network: PreTrainedModel, found: Format, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """What is left to do for a network that was read. O(weights) where they change.

    Those of bitsandbytes become floats where they cannot stay; those that Transformers dequantised
    get the dtype that was asked for, since it writes bfloat16 for some formats.

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
