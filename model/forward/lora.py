"""LoRA adapters: a small product beside each linear layer of a network, chosen by request.

E. Hu et al., "LoRA" (2021), as PEFT stores it. The tokens of a step that have the same adapter are
multiplied together, whatever request they belong to, so one step serves many adapters (L. Chen et
al., "Punica", 2023). A step without an adapter is computed as if there were none.

Decides: what an adapter's folder must hold to be applied exactly; which rows of a step get which
products.

Invariants: each product of an adapter is applied once to every token of its requests, as a pass
through the network shows before the first request; keys and values are shared in the prefix cache
only between requests with equal weights of the adapter: its digest is part of their namespace.

Does not know: the scheduler, sampling, where a request's prompt came from.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvcore
from model.control.step import Chunk
from model.errors import InvalidArgumentError, ModelNotFoundError, UnsupportedModelError, shown
from model.load.checkpoint import read_object, reason

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_IN_A_LAYER = re.compile(r"\.\d+\.")
_PLAIN = {  # what another value would change the product by
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    # By the others the base weights are changed too.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "arrow_config": ({},),
}


@dataclass(frozen=True, slots=True)
class Product:
    """What an adapter adds to a linear layer: `(x @ down.T) @ up.T * scale`.

    Attributes:
        down: [rank, in_features].
        up: [out_features, rank].
        scale: of the product.
    """

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, read.

    Attributes:
        name: under which requests ask for it.
        version: a digest of its files, 64 bits.
        products: by the path of the linear layer in the network.
    """

    name: str
    version: int
    products: Mapping[str, Product]


def read_adapter(text: str, network: PreTrainedModel) -> Adapter:
    """Read `NAME=PATH`, the folder of an adapter as PEFT's `save_pretrained` writes it.

    Args:
        text: the name and the folder.
        network: the base model; the products get its device and dtype.

    Raises:
        InvalidArgumentError: the text is not of that form, or UTF-8 cannot encode the name.
        ModelNotFoundError: there is no such folder, or its files are broken.
        UnsupportedModelError: the adapter does more than add products to linear layers, or is one
            for another network.
    """
    name, folder = _name_and_folder(text)
    config = read_object(folder / _CONFIG)
    for key, allowed in _PLAIN.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(
                f"lora: {name}: {folder / _CONFIG}: {key}: wanted {shown(allowed[0])}, got "
                f"{shown(value)}"
            )
    stored = _weights(name, folder / _WEIGHTS)
    halves = _halves(name, folder / _WEIGHTS, stored)
    products = {path: _product(name, path, both, config, network) for path, both in halves.items()}
    return Adapter(name, _version(folder, stored), products)


def read_versions(texts: Sequence[str]) -> dict[str, int]:
    """The version of each adapter by its name; of those that can be read here. O(their bytes).

    Raises:
        InvalidArgumentError: a text is not `NAME=PATH`.
    """
    found = {}
    for text in texts:
        with suppress(ModelNotFoundError):
            name, folder = _name_and_folder(text)
            found[name] = _version(folder, _weights(name, folder / _WEIGHTS))
    return found


def _name_and_folder(text: str) -> tuple[str, Path]:
    name, equals, place = text.partition("=")
    if not name or not equals or not place:
        raise InvalidArgumentError(f"lora: wanted NAME=PATH, got {shown(text)}")
    if not name.isprintable():  # nor is what UTF-8 cannot encode
        raise InvalidArgumentError(f"lora: wanted a name that can be printed, got {shown(name)}")
    return name, _folder(name, place)


def _version(folder: Path, weights: bytes) -> int:
    digest = sha256((folder / _CONFIG).read_bytes())
    digest.update(weights)
    return int.from_bytes(digest.digest()[:8], "little")


def _folder(name: str, place: str) -> Path:
    """The folder of an adapter, which has both files."""
    try:
        folder = Path(place).expanduser()
        missing = [file for file in (_CONFIG, _WEIGHTS) if not (folder / file).is_file()]
    except (OSError, RuntimeError, ValueError) as error:  # no access, no home, a name too long
        raise ModelNotFoundError(
            f"lora: {name}: {shown(place)} cannot be read: {reason(error)}"
        ) from error
    if missing:
        raise ModelNotFoundError(
            f"lora: {name}: {folder / missing[0]} is missing: wanted a folder that PEFT wrote"
        )
    return folder


def _weights(name: str, file: Path) -> bytes:
    """The bytes of a file of weights: read once, so that its digest is that of its tensors."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ModelNotFoundError(f"lora: {name}: cannot read {file}: {reason(error)}") from error


def _halves(name: str, file: Path, weights: bytes) -> dict[str, dict[str, Tensor]]:
    """The tensors of an adapter by the path of their layer, then "A" and "B"."""
    try:
        stored = load(weights)
    except SafetensorError as error:
        raise ModelNotFoundError(
            f"lora: {name}: {file} is not a whole safetensors file: {reason(error)}"
        ) from error
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in stored.items():
        found = _NAME.fullmatch(key)
        if found is None:
            raise UnsupportedModelError(
                f"lora: {name}: wanted products of linear layers alone, got the tensor {key}"
            )
        halves.setdefault(found[1], {})[found[2]] = tensor
    if not halves:
        raise ModelNotFoundError(f"lora: {name}: {file} holds no product")
    return halves


def _product(
    name: str,
    path: str,
    both: Mapping[str, Tensor],
    config: Mapping[str, Any],
    network: PreTrainedModel,
) -> Product:
    try:
        layer: object = network.get_submodule(path)
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.Linear) or not _IN_A_LAYER.search(path):
        kind = "nothing" if layer is None else type(layer).__name__
        raise UnsupportedModelError(
            f"lora: {name}: wanted a linear layer of {type(network).__name__}'s decoder at {path}, "
            f"it has {kind} there"
        )
    down, up = both.get("A"), both.get("B")
    shape = (layer.out_features, layer.in_features)
    if down is None or up is None:
        got: str | None = "half of it"
    elif down.ndim != 2 or up.ndim != 2:
        got = f"tensors of {down.ndim} and {up.ndim} dimensions"
    else:
        is_fitting = (len(up), down.shape[1]) == shape
        got = None if is_fitting else f"{len(up)}x{down.shape[1]}"
    if got is not None or down is None or up is None:
        raise UnsupportedModelError(
            f"lora: {name}: {path}: wanted a product of {shape[0]}x{shape[1]}, got {got}: the "
            f"adapter is one for another base model"
        )
    rank = len(down)
    if up.shape[1] != rank or not rank:
        raise UnsupportedModelError(
            f"lora: {name}: {path}: wanted both halves of one rank, got {rank} and {up.shape[1]}"
        )
    scale = _alpha(name, path, config) / (rank**0.5 if config.get("use_rslora") else rank)
    weight = layer.weight  # one that stays quantised is of integers
    dtype = weight.dtype if weight.is_floating_point() else network.dtype
    down, up = down.to(weight.device, dtype), up.to(weight.device, dtype)
    if not (down.isfinite().all() and up.isfinite().all()):
        raise ModelNotFoundError(f"lora: {name}: {path}: wanted finite weights in {dtype}")
    return Product(down, up, scale)


def _alpha(name: str, path: str, config: Mapping[str, Any]) -> float:
    """What scales a product, before the rank divides it."""
    try:
        alpha = _by_pattern(config.get("alpha_pattern"), path, config.get("lora_alpha", 8))
    except re.error as error:
        raise ModelNotFoundError(f"lora: {name}: alpha_pattern: {reason(error)}") from error
    if isinstance(alpha, int | float) and not isinstance(alpha, bool):
        with suppress(OverflowError):  # an integer that no float can be
            if isfinite(alpha):
                return float(alpha)
    raise ModelNotFoundError(
        f"lora: {name}: lora_alpha: wanted a finite number, got {shown(alpha)}"
    )


def _by_pattern(patterns: object, path: str, default: object) -> object:
    """The value of the first pattern that matches the end of a path, as PEFT chooses."""
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


Rows = slice | Tensor
_EVERY = slice(None)


class Adapters:
    """The adapters of a network, and which rows of the present step have which.

    Args:
        network: gets a hook for each layer that an adapter changes, for its whole life.
        most: how many there may be at once; None: no bound.
    """

    def __init__(self, network: PreTrainedModel, most: int | None = None) -> None:
        self._by_name: dict[str, Adapter] = {}
        self._held: dict[tuple[str, int], Adapter] = {}  # those, and what unfinished requests have
        self._most = most
        self._hooked: set[str] = set()
        self._groups: Sequence[tuple[Adapter, Rows]] = ()
        self._calls: dict[str, list[int]] | None = None  # the rows of each call, by layer
        self._network = network
        self.device = network.device

    @property
    def names(self) -> tuple[str, ...]:
        """Of all adapters. O(adapters)."""
        return tuple(self._by_name)

    @property
    def versions(self) -> dict[str, int]:
        """The version of each adapter, by its name. O(adapters)."""
        return {name: adapter.version for name, adapter in self._by_name.items()}

    def add(self, adapter: Adapter, in_use: Iterable[kvcore.Namespace] = ()) -> None:
        """Let requests ask for an adapter. O(its layers).

        Args:
            adapter: of this network.
            in_use: the namespaces of unfinished requests.

        Raises:
            InvalidArgumentError: another adapter has its name, or there are too many.
        """
        if adapter.name in self._by_name:
            raise InvalidArgumentError(
                f"lora: wanted different names, got {shown(adapter.name)} twice"
            )
        self._let_go(in_use)
        if self._most is not None and len(self._held) >= self._most:
            leaving = len(self._held) - len(self._by_name)
            raise InvalidArgumentError(
                f"lora: wanted at most {self._most} adapters (--max-loras), got one more"
                + (f"; {leaving} of them until their requests have ended" if leaving else "")
            )
        for path in adapter.products.keys() - self._hooked:
            layer = self._network.get_submodule(path)
            layer.register_forward_hook(partial(self._add, path))
        self._hooked |= adapter.products.keys()
        self._by_name[adapter.name] = self._held[adapter.name, adapter.version] = adapter

    def remove(self, name: str, in_use: Iterable[kvcore.Namespace]) -> None:
        """Take no more requests for an adapter; those that are unfinished keep it. O(adapters).

        Args:
            name: of the adapter.
            in_use: the namespaces of unfinished requests.

        Raises:
            InvalidArgumentError: there is no such adapter.
        """
        if self._by_name.pop(name, None) is None:
            raise InvalidArgumentError(f"lora_name: wanted {self._known()}, got {shown(name)}")
        self._let_go(in_use)

    def _let_go(self, in_use: Iterable[kvcore.Namespace]) -> None:
        """Forget the weights that no request can need."""
        needed = {(one.lora_name, one.lora_version) for one in in_use}
        needed |= {(adapter.name, adapter.version) for adapter in self._by_name.values()}
        self._held = {key: adapter for key, adapter in self._held.items() if key in needed}

    def _known(self) -> str:
        return f"a loaded adapter, one of {', '.join(self._by_name) or 'none'}"

    def resolve(self, namespace: kvcore.Namespace) -> kvcore.Namespace:
        """The namespace of a request with the version of its adapter; O(1).

        Raises:
            InvalidArgumentError: there is no such adapter.
        """
        if namespace.lora_name is None:
            return namespace
        found = self._by_name.get(namespace.lora_name)
        if found is None:
            raise InvalidArgumentError(
                f"lora_name: wanted {self._known()}, got {shown(namespace.lora_name)}"
            )
        return replace(namespace, lora_version=found.version)

    def groups(self, chunks: Sequence[Chunk]) -> list[tuple[Adapter, Rows]]:
        """For each adapter of a step the rows of its requests. O(chunks).

        Args:
            chunks: of the step, whose tokens follow one another in this order.
        """
        ranges: dict[tuple[str, int], list[tuple[int, int]]] = {}
        start = 0
        for chunk in chunks:
            stop = start + chunk.num_tokens
            namespace = chunk.request.namespace
            if namespace.lora_name is not None:
                known = ranges.setdefault((namespace.lora_name, namespace.lora_version), [])
                if known and known[-1][1] == start:
                    known[-1] = (known[-1][0], stop)
                else:
                    known.append((start, stop))
            start = stop
        return [(self._held[key], self._rows(known)) for key, known in ranges.items()]

    def _rows(self, ranges: Sequence[tuple[int, int]]) -> Rows:
        if len(ranges) == 1:
            return slice(*ranges[0])
        return torch.cat([torch.arange(*one) for one in ranges]).to(self.device)

    @contextmanager
    def choosing(self, groups: Sequence[tuple[Adapter, Rows]]) -> Iterator[None]:
        """Passes in here add these products to these rows."""
        self._groups = groups
        try:
            yield
        finally:
            self._groups = ()

    @contextmanager
    def choosing_for_all(self, namespace: kvcore.Namespace) -> Iterator[None]:
        """Passes in here add the products of a request's adapter to every row."""
        found = self._by_name.get(namespace.lora_name or "")
        with self.choosing([] if found is None else [(found, _EVERY)]):
            yield

    @contextmanager
    def checking(self, adapter: Adapter, num_rows: int) -> Iterator[None]:
        """Passes in here show whether every product is applied once to every token.

        Args:
            adapter: whose products.
            num_rows: tokens of a pass.

        Raises:
            UnsupportedModelError: a layer is not called once in a pass, with all its tokens.
        """
        called: dict[str, list[int]] = {}
        self._calls = called
        try:
            yield
        finally:
            self._calls = None
        for path in adapter.products:
            calls = called.get(path, [])
            if calls != [num_rows]:
                what = "is not called" if not calls else "computes only some of the tokens"
                raise UnsupportedModelError(
                    f"lora: {adapter.name}: wanted layers that compute each token once, "
                    f"{path} of {type(self._network).__name__} {what}"
                )

    def _add(
        self, path: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        """A hook: the output of a linear layer with the products of its rows."""
        del layer
        rows = args[0]
        if self._calls is not None:
            self._calls.setdefault(path, []).append(rows.shape[:-1].numel())
        if not self._groups:
            return None
        output = output.clone()
        for adapter, chosen in self._groups:
            product = adapter.products.get(path)
            if product is not None:
                inner = nn.functional.linear(rows[..., chosen, :], product.down)
                output[..., chosen, :] += nn.functional.linear(inner, product.up) * product.scale
        return output
