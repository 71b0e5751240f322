"""Well-known checkpoints by their published config.json, cut down to a tiny size.

`published.json` has for each what its config.json says about the network, where that was read, the
sizes that replace others here, and a weight that no network reads, if the checkpoint has one. A
random network of the tiny configuration is written as a checkpoint, in the format of the published
one, and loaded as a user loads it; then it goes through the walk.

`python -m tests.model.published` prints an outcome a line; with `--write` it stores them.
"""

import argparse
import json
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from model import ModelError
from model.load.architectures import check_architecture, check_layers
from model.load.loader import LoadedModel, load_config, load_model
from tests.model import vision
from tests.model.load.quantised_checkpoints import pack_fp4, pack_fp8, pack_mxfp4
from tests.model.walk import SIZES, build_network, compare, quieten

DATA = Path(__file__).with_name("published.json")
CPU = torch.device("cpu")
ROUNDING = {"fp8": 0.04, "mxfp4": 0.26, "fp4": 0.26}  # the most, of the largest number of a matrix


def stored() -> dict[str, dict[str, Any]]:
    """Every checkpoint by its name: `source`, `published`, `cut`, `unread`, `note`, `outcome`."""
    return {one["name"]: one for one in json.loads(DATA.read_text(encoding="utf-8"))}


def store(found: list[dict[str, Any]]) -> None:
    """Write the checkpoints, one field a line."""
    rows = [
        ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in one.items())
        for one in found
    ]
    text = ",\n".join(f"  {{\n{row}\n  }}" for row in rows)
    DATA.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def tiny(one: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json with its sizes cut."""
    return _merged(one["published"], one["cut"])


def _merged(published: dict[str, Any], cut: dict[str, Any]) -> dict[str, Any]:
    parts = {
        name: _merged(published[name], value)
        for name, value in cut.items()
        if isinstance(value, dict) and isinstance(published.get(name), dict)
    }
    return published | cut | parts


NEAR = 3e-3
"""Of log-probabilities: one of Qwen3.5-35B-A3B differs by 1.1e-3 with AVX2, 5e-4 without."""


def outcome(one: dict[str, Any], folder: Path) -> str:
    """What becomes of a checkpoint: "equal", "refused: ..." or what is wrong."""
    try:
        return compare(partial(_load, one, folder), SIZES, NEAR)
    except ModelError as error:
        return f"refused: {str(error).replace(str(folder), 'FOLDER')}"


def _load(one: dict[str, Any], folder: Path, seed: int) -> LoadedModel:
    """Write a checkpoint with random weights, and load it."""
    content = tiny(one)
    settings = content.get("quantization_config", {})
    path = folder / "config.json"
    path.write_text(json.dumps({**content, "quantization_config": None}))
    config = load_config(str(folder))
    check_architecture(config)
    check_layers(config)
    network = build_network(config, seed).network
    network.save_pretrained(folder)
    path.write_text(json.dumps(content))
    vision.tokenizer_of(vision.Family()).save_pretrained(folder)
    weights = folder / "model.safetensors"
    _quantise(weights, settings, experts=content.get("expert_dtype", "fp8"))
    if "unread" in one:
        save_file(load_file(weights) | {one["unread"]: torch.ones(4)}, weights, {"format": "pt"})
    model = load_model(str(folder), CPU)
    bound = ROUNDING.get(content.get("expert_dtype") or settings.get("quant_method", ""), 0.0)
    for name, weight in model.network.state_dict().items():
        wanted = network.state_dict()[name]
        error = float((weight - wanted).abs().max())
        if error > bound * float(wanted.abs().max()):
            raise AssertionError(f"{name}: its numbers are off by {error}")
    model.network.generation_config.eos_token_id = None
    return model


def _quantise(path: Path, settings: dict[str, Any], experts: str) -> None:
    """Rewrite a file of weights in a format, and its experts in another."""
    if settings.get("quant_method") == "mxfp4":
        pack_mxfp4(path)
    elif settings:
        found = {}
        for name, weight in load_file(path).items():
            base = name.removesuffix(".weight")
            if weight.ndim != 2 or not name.endswith(".weight") or re.search(_UNQUANTISED, name):
                found[name] = weight
            elif experts == "fp4" and ".experts." in name:
                found |= pack_fp4(base, weight)
            else:
                found |= pack_fp8(base, weight, settings["weight_block_size"][0])
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, path)


_UNQUANTISED = r"(embed|embed_tokens|head|gate|weights_proj)\.weight$|\.compressor\."


def table() -> str:
    """What docs/how-to/load-a-model.md shows of them."""
    images = vision.stored()
    lines = ["| checkpoint | text | images |", "|---|---|---|"]
    for name, one in stored().items():
        family = one["published"]["architectures"][0].removesuffix("ForConditionalGeneration")
        sees = images.get(f"{family}Config", "") if "vision_config" in one["published"] else ""
        text = re.sub(r"^refused: (\w+|model: FOLDER/config.json): ", "refused: ", one["outcome"])
        note = f" ({one['note']})" if "note" in one else ""
        lines.append(f"| `{name}` | {text}{note} | {sees} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try checkpoints, print, and store if that is wanted."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.published")
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--write", action="store_true", help="store the outcomes")
    options = parser.parse_args()
    quieten()
    found = stored()
    for name, one in found.items():
        if not options.names or any(part in name for part in options.names):
            with tempfile.TemporaryDirectory() as folder:
                one["outcome"] = outcome(one, Path(folder))
            print(f"{name}: {one['outcome']}", flush=True)  # noqa: T201
    if options.write:
        store([*found.values()])


if __name__ == "__main__":
    main()
