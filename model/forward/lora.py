"""LoRA adapters: a small product beside each linear layer of a network, chosen by request.

E. Hu et al., "LoRA" (2021), as PEFT stores it. An adapter has a slot, and a linear layer one matrix
with the first halves of all slots and one with the second halves. A step multiplies all its rows by
the first, and `kvcore_lora::expand` multiplies the columns of each row's slot by the second (as L.
Chen et al., "Punica", 2023, one step serves many adapters; the sizes depend on no request, so a
CUDA graph can be captured). On a GPU that is one launch (`lora_kernels.py`), which reads the slots
that rows have. On a CPU it computes all slots for each row, which takes as long as a product for
each adapter's rows up to slots * rank = 128 at a width of 1024, and up to 1.6 times as long at 512.
A step without an adapter is computed as if there were none.

Decides: what an adapter's folder must hold to be applied exactly; which slot it gets.

Invariants: each product of an adapter is applied once to every token of its requests, as a pass
through the network shows beforehand; a row without an adapter gets a zero; the matrices never move,
so what was captured or compiled sees an adapter that is loaded later; keys and values are shared in
the prefix cache only between requests with equal weights of the adapter: its digest is part of
their namespace. Of a network that is split over several ranks an adapter is split like its layers:
each rank has the part beside its own part of a weight, and what it adds joins the layer's sum.

Does not know: the scheduler, sampling, where a request's prompt came from.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvcore
import model.compile
from kvcore.adapters.recurrent import RecurrentPass
from model.control.step import Chunk
from model.errors import InvalidArgumentError, ModelNotFoundError, UnsupportedModelError, shown
from model.load.checkpoint import read_object, reason
from model.load.probes import run_probe
from model.ranks.parallel import Cut

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_IN_A_LAYER = re.compile(r"\.\d+\.")
_PROBED_TOKENS = 3  # more than one, so that a layer that computes only the last one is found
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


def _expand(product: Tensor, inner: Tensor, up: Tensor, slots: Tensor, rank: int) -> Tensor:
    """Add to the product, of each row's slot, the columns of `inner` times the rows of `up`."""
    others = slots[..., None] != torch.arange(len(up), device=slots.device) // rank
    return product + inner.masked_fill(others, 0) @ up


def _expand_in_tiles(
    product: Tensor, inner: Tensor, up: Tensor, slots: Tensor, rank: int
) -> Tensor:
    kernels, sizes = model.compile.lora_kernels, [up.shape[1]]
    tile = kernels.tile_of(sizes)  # for any number of rows, as batch-invariant mode needs it
    added: Tensor = kernels.expand(product, inner, up, slots, rank, sizes, tile=tile)
    return added


def _shape_of(product: Tensor, inner: Tensor, up: Tensor, slots: Tensor, rank: int) -> Tensor:
    del inner, up, slots, rank
    return product.new_empty(product.shape)


_library = torch.library.Library("kvcore_lora", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "expand(Tensor product, Tensor inner, Tensor up, Tensor slots, int rank) -> Tensor"
)
for _device in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter
    _library.impl("expand", _expand_in_tiles, _device)  # type: ignore[no-untyped-call]
_library.impl("expand", _shape_of, "Meta")  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Product:
    """What an adapter adds to a linear layer: `(x @ down.T) @ up.T`.

    Attributes:
        down: [rank, in_features].
        up: [out_features, rank], scaled.
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, read.

    Attributes:
        text: what `read_adapter` was given.
        name: under which requests ask for it.
        version: a digest of its files, 64 bits.
        products: by the path of the linear layer in the network; this rank's parts.
    """

    text: str
    name: str
    version: int
    products: Mapping[str, Product]

    def cut(self, cuts: Mapping[str, Cut]) -> "Adapter":
        """A rank's part of this whole one. O(its weights)."""
        products = {
            path: Product(*cuts[path](one.down, one.up)) if path in cuts else one
            for path, one in self.products.items()
        }
        return replace(self, products=products)


def read_adapter(
    text: str, network: PreTrainedModel, cuts: Mapping[str, Cut] | None = None
) -> Adapter:
    """Read `NAME=PATH`, the folder of an adapter as PEFT's `save_pretrained` writes it.

    Args:
        text: the name and the folder.
        network: the base model; the products get its device and dtype.
        cuts: how ranks split its linear layers, by their paths; None: it is whole.

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
    return Adapter(text, name, _version(folder, stored), products).cut(cuts or {})


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
    device, dtype = layer.weight.device, _dtype_of(layer, network)
    down, up = down.to(device, dtype), (up.to(device, torch.float32) * scale).to(dtype)
    if not (down.isfinite().all() and up.isfinite().all()):
        raise ModelNotFoundError(f"lora: {name}: {path}: wanted finite weights in {dtype}")
    return Product(down, up)


def _dtype_of(layer: nn.Linear, network: PreTrainedModel) -> torch.dtype:
    """Of the products beside a layer; weights that stay quantised have one of their own."""
    dtype = layer.weight.dtype
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else network.dtype


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


@dataclass(frozen=True, slots=True)
class _Halves:
    """The products beside a linear layer, those of all slots.

    Parameters, so that a compiled network may lay them out behind the weight of their layer.

    Attributes:
        down: [num_slots * rank, in_features].
        up: [num_slots * rank, out_features].
    """

    down: nn.Parameter
    up: nn.Parameter

    @classmethod
    def beside(
        cls, layer: nn.Linear, columns: int, dtype: torch.dtype, cut: Cut | None
    ) -> "_Halves":
        """Zeros for a layer, or for a rank's part of it."""
        zeros = partial(torch.zeros, dtype=dtype, device=layer.weight.device)
        halves = zeros((columns, layer.in_features)), zeros((layer.out_features, columns))
        halves = halves if cut is None else cut(*halves)
        down, up = halves[0], halves[1].T.contiguous()
        return cls(*[nn.Parameter(half, requires_grad=False) for half in (down, up)])

    def write(self, columns: slice, product: Product | None) -> None:
        """Overwrite the product of a slot; None: it has none."""
        down, up = self.down.data[columns], self.up.data[columns]
        down.zero_()
        up.zero_()
        if product is not None:
            rank = len(product.down)
            down[:rank].copy_(product.down)
            up[:rank].copy_(product.up.T)


class Adapters:
    """The adapters of a network, and which of them each row of the present step has.

    Args:
        network: gets a hook for each layer that an adapter may change, for its whole life.
        num_slots: the most adapters at once.
        rank: the most of an adapter.
        paths: of the layers that adapters may change; None: all linear layers of the decoder.
        cuts: how ranks split linear layers, by their paths.

    Raises:
        InvalidArgumentError: the device has too little memory.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        num_slots: int,
        rank: int,
        paths: Collection[str] | None,
        cuts: Mapping[str, Cut],
    ) -> None:
        self.num_slots = num_slots
        self._rank = rank
        self._by_name: dict[str, int] = {}  # the version of an adapter
        self._held: dict[tuple[str, int], int] = {}  # its slot; until its requests have ended
        self._network = network
        self._calls = _calls_of(network)
        self._slots: Tensor | None = None  # of each row of the present pass
        self._states: RecurrentPass | None = None
        self._halves: dict[str, _Halves] = {}
        try:
            for path in self._calls if paths is None else paths:
                layer = network.get_submodule(path)
                if isinstance(layer, nn.Linear) and self._calls.get(path) == [_PROBED_TOKENS]:
                    dtype = _dtype_of(layer, network)
                    halves = _Halves.beside(layer, num_slots * rank, dtype, cuts.get(path))
                    self._halves[path] = halves
                    # Before a hook that sums up the ranks' parts.
                    layer.register_forward_hook(partial(self._add, halves), prepend=True)
        except torch.OutOfMemoryError as error:
            raise InvalidArgumentError(
                f"lora: {num_slots} adapters of rank {rank} do not fit into the memory of "
                f"{network.device}: pass a smaller --max-loras or --max-lora-rank"
            ) from error

    @property
    def names(self) -> tuple[str, ...]:
        """Of all adapters. O(adapters)."""
        return tuple(self._by_name)

    @property
    def downs(self) -> list[nn.Parameter]:
        """The first halves of all layers. O(layers)."""
        return [halves.down for halves in self._halves.values()]

    @property
    def versions(self) -> dict[str, int]:
        """The version of each adapter, by its name. O(adapters)."""
        return dict(self._by_name)

    def add(self, adapter: Adapter, in_use: Iterable[kvcore.Namespace] = ()) -> None:
        """Let requests ask for an adapter; its weights are copied. O(all layers).

        Args:
            adapter: of this network.
            in_use: the namespaces of unfinished requests.

        Raises:
            InvalidArgumentError: another adapter has its name, there are too many, or its rank is
                too large.
            UnsupportedModelError: it cannot be applied to this network exactly.
        """
        if adapter.name in self._by_name:
            raise InvalidArgumentError(
                f"lora: wanted different names, got {shown(adapter.name)} twice"
            )
        self._check(adapter)
        self._let_go(in_use)
        key = adapter.name, adapter.version
        if key not in self._held:  # one that its requests still have is loaded again
            free = self._free()
            if not free:
                leaving = len(self._held) - len(self._by_name)
                raise InvalidArgumentError(
                    f"lora: wanted at most {self.num_slots} adapters (--max-loras), got one more"
                    + (f"; {leaving} of them until their requests have ended" if leaving else "")
                )
            self._write(free[0], adapter.products)
            self._held[key] = free[0]
        self._by_name[adapter.name] = adapter.version

    def _check(self, adapter: Adapter) -> None:
        """Raise unless each product can be added once to every token, in the room of a slot."""
        for path, product in adapter.products.items():
            if len(product.down) > self._rank:
                raise InvalidArgumentError(
                    f"lora: {adapter.name}: wanted a rank of at most {self._rank} "
                    f"(--max-lora-rank), got {len(product.down)} for {path}"
                )
            if path not in self._halves:
                calls = self._calls.get(path, [])
                what = "is called several times" if len(calls) > 1 else "is not called"
                what = "computes only some of the tokens" if len(calls) == 1 else what
                what = "does more than multiply" if calls == [0] else what
                raise UnsupportedModelError(
                    f"lora: {adapter.name}: wanted layers that compute each token once, "
                    f"{path} of {type(self._network).__name__} {what}"
                )

    def _free(self) -> list[int]:
        return sorted(set(range(self.num_slots)).difference(self._held.values()))

    @torch.no_grad()
    def _write(self, slot: int, products: Mapping[str, Product]) -> None:
        columns = slice(slot * self._rank, (slot + 1) * self._rank)
        for path, halves in self._halves.items():
            halves.write(columns, products.get(path))

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
        """Give the slots back that no request can need."""
        needed = {(one.lora_name, one.lora_version) for one in in_use} | {*self._by_name.items()}
        self._held = {key: slot for key, slot in self._held.items() if key in needed}

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
        return replace(namespace, lora_version=found)

    def slots(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """The slot of each token of a step, int64 [num_tokens] on the host; -1: no adapter.

        O(chunks + tokens).

        Args:
            chunks: of the step, whose tokens follow one another in this order.

        Returns:
            None: no token has an adapter.
        """
        spaces = [chunk.request.namespace for chunk in chunks]
        if all(one.lora_name is None for one in spaces):
            return None
        own = [
            -1 if one.lora_name is None else self._held[one.lora_name, one.lora_version]
            for one in spaces
        ]
        return torch.from_numpy(np.repeat(own, [chunk.num_tokens for chunk in chunks]))

    @contextmanager
    def choosing(self, slots: Tensor | None, states: RecurrentPass | None = None) -> Iterator[None]:
        """Passes in here add the products of a slot to each row.

        Args:
            slots: int64 [num_tokens] on the network's device, or [1] for all rows; None: nothing is
                added.
            states: those of the pass, whose modules with states compute some of its rows at a time.
        """
        self._slots, self._states = slots, states
        try:
            yield
        finally:
            self._slots = self._states = None

    @contextmanager
    def choosing_for_all(self, namespace: kvcore.Namespace) -> Iterator[None]:
        """Passes in here add the products of a request's adapter to every row."""
        name, slots = namespace.lora_name, None
        if name in self._by_name:
            slots = torch.tensor([self._held[name, self._by_name[name]]])
            slots = slots.to(self._network.device)
        with self.choosing(slots):
            yield

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Free slots have products in here, so that a comparison of networks sees what is added."""
        free = self._free()
        products = {}
        for path, halves in self._halves.items():
            down = halves.down.data[: self._rank]
            up = halves.up.data[: self._rank].T
            products[path] = Product(_noise(down), _noise(up))
        for slot in free:
            self._write(slot, products)
        try:
            yield
        finally:
            for slot in free:
                self._write(slot, {})

    def _add(
        self, halves: _Halves, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        """A hook: the output of a linear layer and the products of each row's slot."""
        del layer
        slots = self._slots
        if slots is None:
            return None
        if self._states is not None:
            slots = self._states.in_call(slots)
        inner = nn.functional.linear(args[0], halves.down)
        expand = torch.ops.kvcore_lora.expand if output.is_cuda else _expand
        added: Tensor = expand(output, inner, halves.up, slots, self._rank)
        return added


def _noise(like: Tensor) -> Tensor:
    """Numbers that differ, as small as those of an adapter."""
    numbers = torch.arange(like.numel(), device=like.device) % 7 - 3
    return (numbers / like.shape[1]).to(like.dtype).view(like.shape)


def _calls_of(network: PreTrainedModel) -> dict[str, list[int]]:
    """How many rows each linear layer of the decoder gets in its calls. One pass of few tokens.

    0: its output is more than a product, as of the routers of some experts.
    """
    calls: dict[str, list[int]] = {}
    hooks = []
    for path, layer in network.named_modules():
        if isinstance(layer, nn.Linear) and _IN_A_LAYER.search(path):
            rows = calls[path] = []

            def note(
                _: nn.Module, args: tuple[Tensor, ...], output: object, rows: list[int] = rows
            ) -> None:
                rows.append(args[0].shape[:-1].numel() if isinstance(output, Tensor) else 0)

            hooks.append(layer.register_forward_hook(note))
    try:
        run_probe(network, network.device, _PROBED_TOKENS)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
