"""Checks that the files of a checkpoint are whole and belong together.

Decides: what the folder of a model must hold: JSON objects in its JSON files, whole safetensors
files under the names that their index gives, and exactly the tensors of the network. Transformers
initialises missing tensors at random, drops unexpected ones, and converts integers without scales,
with a warning at most; here all of these are errors.

Invariants: an error is one line that names the file, and the field or the tensors; only headers of
weight files are read here.

Does not know: architectures, where a folder came from, devices.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError  # nothing is unpickled here

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedModel

from model.errors import ModelNotFoundError, UnsupportedModelError, shown

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer.json"
_JSON_FILES = (
    _GENERATION,
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_PICKLED = "pytorch_model*.bin"
_POINTER = b"version https://git-lfs.github.com/spec/"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NAMED_TENSORS = 3
_MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The header of a safetensors file about one tensor.

    Attributes:
        file: the name of the file.
        dtype: as safetensors spells it: F32, BF16, I8.
        shape: of the tensor.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The product of the shape. O(dimensions)."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def reason(error: BaseException) -> str:
    """Return the message of another package's exception, in one line. O(its message)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, UnpicklingError):
        return "pickled weights that are broken, or hold more than tensors"
    if not lines:
        return type(error).__name__
    # The first line of a strict dataclass names the field, the last says what is wrong with it,
    # and names the field again.
    text = lines[-1] if isinstance(error, StrictDataclassError) else lines[0]
    if not isinstance(error, (OSError, RuntimeError, ValueError, StrictDataclassError)):
        text = f"{type(error).__name__}: {text}"
    text = text.removeprefix("TypeError: ").removeprefix("ValueError: ")
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


def read_object(path: Path) -> dict[str, object]:
    """Read a file that holds one JSON object.

    Raises:
        ModelNotFoundError: it cannot be read, or holds something else.
    """
    check_pulled(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFoundError(f"model: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # ValueError: no UTF-8 either
        raise ModelNotFoundError(f"model: {path} is not JSON: {reason(error)}") from error
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"model: {path}: wanted a JSON object, got {shown(content)}")
    return content


def check_pulled(path: Path) -> None:
    """Refuse a file that is the pointer of Git LFS to the content, as a clone without LFS has it.

    Raises:
        ModelNotFoundError: it is one.
    """
    with suppress(OSError), path.open("rb") as file:  # the reader reports the error
        if file.read(len(_POINTER)) == _POINTER:
            raise ModelNotFoundError(
                f"model: {path} is a Git LFS pointer, not the content: run `git lfs pull` in "
                f"{path.parent}"
            )


def check_files(folder: Path) -> dict[str, StoredTensor]:
    """Check the files of a model beside config.json. Reads all JSON, and headers of weight files.

    Returns:
        The tensors of its safetensors files by name; empty if its weights are of another kind.

    Raises:
        ModelNotFoundError: a file is broken or missing; it is named.
    """
    for name in _JSON_FILES:
        path = folder / name
        if os.path.lexists(path) and not path.is_file():
            raise ModelNotFoundError(f"model: {path} is not a file")
        if path.is_file():
            content = read_object(path)
            if name == _GENERATION:
                _check_generation(path, content)
            elif name == _TOKENIZER:
                _check_merges(path, content)
            elif not isinstance(kind := content.get("tokenizer_class", ""), str | None):
                raise ModelNotFoundError(
                    f"model: {path}: tokenizer_class: wanted the name of one, got {shown(kind)}"
                )
    stored: dict[str, StoredTensor] = {}
    for name in _weight_files(folder):
        stored |= _header(folder / name)
    if not stored:
        for path in sorted(folder.glob(_PICKLED)):
            check_pulled(path)
    return stored


def check_stored(
    config: Path, stored: Mapping[str, StoredTensor], network: PreTrainedModel
) -> list[str]:
    """Refuse weights that a network cannot take, before memory is allocated. O(tensors).

    Args:
        config: the file that describes the network.
        stored: from `check_files`; if empty, nothing is known and nothing is refused.
        network: without weights.

    Returns:
        In words, the tensors with another shape in the network. A conversion may fix them, so they
        are refused only if the network does not load.

    Raises:
        UnsupportedModelError: quantised weights.
        ModelNotFoundError: the network is far larger than its weights, or one tensor is stored
            twice under names that differ in the network's own prefix.
    """
    state = network.state_dict()
    floats = {name for name, tensor in state.items() if tensor.is_floating_point()}
    _check_single(config, stored, f"{network.base_model_prefix}.")
    for name, tensor in stored.items():
        if tensor.dtype not in _FLOATS and (name in floats or name.endswith("weight")):
            raise UnsupportedModelError(
                f"model: {config.with_name(tensor.file)}: {name} is {tensor.dtype}: quantised "
                f"models are not supported, wanted one of {', '.join(sorted(_FLOATS))}"
            )
    # Conversions stack and rename tensors, and keep the number of elements. Smaller gaps are
    # reported by name after loading.
    wanted = sum(parameter.numel() for parameter in network.parameters())
    found = sum(tensor.num_elements for tensor in stored.values())
    if stored and wanted > 2 * found:
        raise ModelNotFoundError(
            f"model: {config} describes a network of {wanted:,} parameters, and its weights have "
            f"{found:,}"
        )
    return [
        f"{name} is {_shape(tensor.shape)} and the network wants {_shape(state[name].shape)}"
        for name, tensor in sorted(stored.items())
        if name in state and tuple(state[name].shape) != tensor.shape
    ]


def _check_single(config: Path, stored: Mapping[str, StoredTensor], prefix: str) -> None:
    """Refuse a tensor that is stored with and without the prefix: which one counts is undefined."""
    known: dict[str, str] = {}
    for name, tensor in stored.items():
        bare = name
        while len(prefix) > 1 and bare.startswith(prefix):
            bare = bare.removeprefix(prefix)
        if bare in known:
            raise ModelNotFoundError(
                f"model: {config.with_name(tensor.file)}: one tensor is stored as {known[bare]} "
                f"and as {name}"
            )
        known[bare] = name


def check_loaded(
    name: str,
    info: Mapping[str, Collection[object]],
    stored: Mapping[str, StoredTensor],
    unused: re.Pattern[str] | None = None,
) -> None:
    """Refuse a network that is not exactly what its checkpoint holds. O(tensors).

    Masks, which older versions of Transformers stored beside the weights, are allowed.

    Args:
        name: of the model.
        info: Transformers' `output_loading_info`, without tied weights and optional ones.
        stored: its tensors, as far as known.
        unused: the names of tensors that need not be in the network.

    Raises:
        ModelNotFoundError: tensors are missing, unexpected or of another shape; they are named.
    """
    faults = []
    missing, unexpected = _names(info["missing_keys"]), _names(info["unexpected_keys"])
    unexpected = [key for key in unexpected if not _is_mask(key, stored.get(key))]
    if unused is not None:
        unexpected = [key for key in unexpected if not unused.search(key)]
    if missing:
        faults.append(f"{_counted(missing)} missing")
    if unexpected:
        faults.append(f"{_counted(unexpected)} not in the network")
    mismatched = [entry for entry in info["mismatched_keys"] if isinstance(entry, tuple)]
    for key, there, here in sorted(mismatched)[:_NAMED_TENSORS]:
        faults.append(f"{key} is {_shape(there)} and the network wants {_shape(here)}")
    if len(mismatched) > _NAMED_TENSORS:
        faults.append(f"{len(mismatched) - _NAMED_TENSORS} more of another shape")
    if faults:
        raise ModelNotFoundError(
            f"model: the weights of {name!r} do not fit its config.json: {'; '.join(faults)}"
        )


def _check_generation(path: Path, content: dict[str, object]) -> None:
    try:
        GenerationConfig.from_dict(content)
    except Exception as error:  # any error of Transformers
        raise ModelNotFoundError(f"model: {path}: {reason(error)}") from error
    check_token_ids(f"{path}: eos_token_id", content.get("eos_token_id"))


def _check_merges(path: Path, content: dict[str, object]) -> None:
    """Refuse merges that do not continue a word: they abort the process in the Rust code."""
    model = content.get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges if prefix else ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or not str(parts[-1:] and parts[-1]).startswith(prefix):
            raise ModelNotFoundError(
                f"model: {path}: model: merges: wanted a second part that begins with "
                f"continuing_subword_prefix, {shown(prefix)}, got {shown(merge)}"
            )


def check_token_ids(where: str, ids: object) -> frozenset[int]:
    """Return the token ids in a field of a JSON file: one, a list, or null. O(ids).

    Raises:
        ModelNotFoundError: the field holds something else.
    """
    found: list[int] = []
    for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if not isinstance(token, int) or isinstance(token, bool) or not -1 <= token < 2**32:
            raise ModelNotFoundError(f"model: {where}: wanted token ids, got {shown(ids)}")
        found.append(token)
    return frozenset(token for token in found if token >= 0)  # some files write -1 for none


def _weight_files(folder: Path) -> Iterable[str]:
    """Return the names of the safetensors files that Transformers would read, in its order."""
    if (folder / _WHOLE).is_file():
        return [_WHOLE]
    index = folder / _INDEX
    if not index.is_file():
        return []
    content = read_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelNotFoundError(
            f"model: {index}: weight_map: wanted tensors and their files, got {shown(weight_map)}"
        )
    if not isinstance(content.get("metadata"), dict):
        raise ModelNotFoundError(
            f"model: {index}: metadata: wanted an object, got {shown(content.get('metadata'))}"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or PurePosixPath(file).name != file:
            raise ModelNotFoundError(
                f"model: {index}: {name}: wanted the name of a file, got {shown(file)}"
            )
    files = sorted(set(weight_map.values()))
    for file in files:
        try:
            is_there = (folder / file).is_file()
        except OSError as error:  # a name that is too long
            raise ModelNotFoundError(f"model: {index}: {shown(file)}: {error.strerror}") from error
        if not is_there:
            raise ModelNotFoundError(f"model: {index} names {file}, which is not there")
    return files


def _header(path: Path) -> dict[str, StoredTensor]:
    check_pulled(path)
    try:
        with safe_open(path, framework="pt") as content:
            return {
                name: StoredTensor(path.name, view.get_dtype(), tuple(view.get_shape()))
                for name in content.keys()  # noqa: SIM118  # no mapping
                for view in (content.get_slice(name),)
            }
    except (OSError, SafetensorError) as error:
        raise ModelNotFoundError(
            f"model: {path} is not a whole safetensors file: {reason(error)}"
        ) from error


def _is_mask(name: str, tensor: StoredTensor | None) -> bool:
    """Return True if a tensor is a buffer of attention: the causal mask, or its fill value."""
    if tensor is None or not name.endswith(("attn.bias", "attention.bias", ".masked_bias")):
        return False
    *ones, rows, columns = (1, 1, *tensor.shape)
    return rows == columns and all(size == 1 for size in ones)


def _names(keys: Iterable[object]) -> list[str]:
    return sorted(map(str, keys))


def _counted(names: list[str]) -> str:
    rest = len(names) - _NAMED_TENSORS
    some = ", ".join(names[:_NAMED_TENSORS])
    return (
        f"{some} and {rest} more are" if rest > 0 else f"{some} {'is' if not names[1:] else 'are'}"
    )


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
