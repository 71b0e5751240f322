"""Indexers: modules of Transformers that choose the tokens a query attends to, in our passes.

Such a module (the lightning indexer of DeepSeek-V3.2 and its relatives) gives its new keys to the
cache, gets those of the whole text back, scores them, and returns the positions of the highest
scores, which the attention layer passes to its attention function as `indices`. Here it gets stand-
ins for the keys, and for the mask: they note what the module computes with them, and where it asks
for the highest scores they ask the pass, which has paged index keys and a backend that scores them.

Decides: that a score is a weighted sum over heads of max(0, query . key), from what the module
computes, whatever class it has; anything else is refused by name.

Invariants: outside our passes a network is unchanged; positions that a layer hands to later layers
(which share its choice) reach their attention too.

Does not know: caches, batches, which backend runs.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kvcore.adapters.recurrent import CACHE_ARGUMENT, ReportedLength
from model.errors import UnsupportedModelError

_SAME = frozenset({"float", "to", "transpose", "unsqueeze", "squeeze", "contiguous"})
"""The methods that keep the numbers of keys and scores; the shapes of products show the rest."""


def follow_indexers(network: nn.Module) -> None:
    """Have layers with an indexer choose tokens through the pass from now on. O(modules).

    Args:
        network: only passes with the keyword argument `paged` are changed.
    """
    hook_layers(network, "indexer", _stand_in)


def hook_layers(network: nn.Module, part: str, hook: Callable[..., Any]) -> None:
    """Call a hook before each layer that has a module of this name; a hook is added only once.

    O(modules).
    """
    for module in network.modules():
        hooks = module._forward_pre_hooks.values()  # noqa: SLF001
        has_part = isinstance(getattr(module, part, None), nn.Module)
        if has_part and hasattr(module, "layer_idx") and hook not in hooks:
            module.register_forward_pre_hook(hook, with_kwargs=True)


class SeenTokens:
    """Stands for the mask of a layer: the batch says which tokens a query sees."""

    dtype = torch.bool

    def __getitem__(self, _: object) -> "SeenTokens":
        """Return the same stand-in for any part of it. O(1)."""
        return self

    def __invert__(self) -> "SeenTokens":
        """Return a stand-in for the tokens not seen; only `masked_fill` takes it. O(1)."""
        return self


def _stand_in(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a layer with an indexer a cache and a mask that stand for the pass's; a hook."""
    paged = kwargs.get("paged")
    if paged is None:
        return None
    cache = _IndexCache(module, paged, kwargs.get(CACHE_ARGUMENT))
    kwargs = kwargs | {CACHE_ARGUMENT: cache}
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = SeenTokens()
    return args, kwargs


def _refuse(module: nn.Module, what: str) -> NoReturn:
    indexer = type(module.indexer).__name__
    raise UnsupportedModelError(
        f"wanted an index that scores each token by a weighted sum of max(0, query . key), "
        f"{indexer} is another kind: it {what}"
    )


class _IndexCache(ReportedLength):
    """The cache of a layer with an indexer: stores nothing, and hands out stand-ins for keys."""

    def __init__(self, module: nn.Module, paged: Any, cache: Any) -> None:  # noqa: ANN401
        super().__init__(0 if cache is None else cache.get_seq_length(module.layer_idx))
        self._module = module
        self._paged = paged

    def update_indexer(self, keys: Tensor, layer_idx: int) -> "Index":
        """Return a stand-in for the index keys of each whole text. O(1)."""
        if keys.dim() != 3 or keys.shape[0] != 1:
            _refuse(self._module, f"has keys of shape {list(keys.shape)}")

        def choose(query: Tensor, weights: Tensor, k: int) -> Tensor | NoChoice:
            if k < 1:
                raise UnsupportedModelError(f"index_topk: wanted at least 1, got {k}")
            if not hasattr(self._paged, "choose"):
                return NoChoice()
            found: Tensor = self._paged.choose(layer_idx, query, weights, keys[0].unsqueeze(1), k)
            return found[None]

        return Index(self._module, keys, choose)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self._module, f"reads the {name} of its cache")


class NoChoice:
    """The choice of an indexer in a pass that chooses nothing: every query attends to all."""

    def to(self, *_: object, **__: object) -> "NoChoice":
        """Return the same, whatever the dtype. O(1)."""
        return self


@dataclass(frozen=True)
class _Choice:
    """The result of `topk`."""

    indices: Tensor | NoChoice


@dataclass(frozen=True)
class Index:
    """Stands for index keys, then for their scores, in the code of an indexer.

    Attributes:
        keys: [1, num_keys, index_dim]: the index keys that the code sees.
        keys: [1, num_keys, index_dim]: as many as the code shall see.
        choose: from queries [num_tokens, num_heads, index_dim], weights [num_tokens, num_heads] and
            a number the positions that `topk` returns.
        query: [1, num_tokens, num_heads, index_dim]; None: no product was taken yet.
        weights: [1, num_tokens, 1, num_heads]; None: heads are not weighted yet.
        is_positive: True if scores below 0 were set to 0.
        is_sum: True if the weighted heads are added up.
        is_sum: True if the weighted heads are added up.
    """

    module: nn.Module
    keys: Tensor
    choose: Callable[[Tensor, Tensor, int], Tensor | NoChoice]
    query: Tensor | None = None
    weights: Tensor | None = None
    factor: float = 1.0
    is_positive: bool = False
    is_sum: bool = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401  # as PyTorch calls it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> "Index":
        """Handle a function of PyTorch that gets a stand-in. O(1)."""
        del types
        name = getattr(func, "__name__", "").strip("_")
        self: Index = next(arg for arg in args if isinstance(arg, cls))
        if name in {"matmul", "rmatmul"} and isinstance(args[0], Tensor):
            return self._product(args[0])
        if name == "relu" and self.query is not None and self.weights is None:
            return replace(self, is_positive=True)
        if name in {"mul", "rmul"} and args[0] is self:
            return cls.__mul__(self, args[1])
        if name in {"add", "radd"} and self.weights is not None:
            return self
        _refuse(self.module, f"computes {name} of its {self._what} with {kwargs or 'tensors'}")

    @property
    def _what(self) -> str:
        return "keys" if self.query is None else "scores"

    def _product(self, left: Tensor) -> "Index":
        if self.query is None and left.dim() == 4:
            return replace(self, query=left)
        if self.is_positive and self.weights is None and left.dim() == 4 and left.shape[2] == 1:
            return replace(self, weights=left, is_sum=True)
        _refuse(self.module, f"multiplies its {self._what} by {list(left.shape)}")

    def __mul__(self, factor: object) -> "Index":
        """Scale by a number above 0 (max(0, x) lets it through), or weigh heads. O(1)."""
        if isinstance(factor, Tensor) and self.is_positive and self.weights is None:
            if factor.dim() == 4 and factor.shape[-1] == 1:
                return replace(self, weights=factor.transpose(2, 3))
            _refuse(self.module, f"multiplies its {self._what} by {list(factor.shape)}")
        if self.query is None or not isinstance(factor, int | float) or factor <= 0:
            _refuse(self.module, f"multiplies its {self._what} by {factor}")
        return replace(self, factor=self.factor * factor)

    __rmul__ = __mul__

    def __add__(self, _: object) -> "Index":
        """Add a mask, as before `topk`. O(1)."""
        return self

    def sum(self, dim: int) -> "Index":
        """Add up the heads. O(1)."""
        if self.weights is None or self.is_sum or dim != 2:
            _refuse(self.module, f"adds up its {self._what} over dimension {dim}")
        return replace(self, is_sum=True)

    def masked_fill(self, _: object, value: float) -> "Index":
        """Leave out what a query does not see; the pass does. O(1)."""
        if self.weights is None or value != float("-inf"):
            _refuse(self.module, f"fills its {self._what} with {value}")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scores, which are as many as a text has tokens: any number. O(1)."""
        return (1, self.keys.shape[1], sys.maxsize)

    def topk(self, k: int, dim: int = -1) -> _Choice:
        """Return the positions of the highest scores, from the pass. Its cost."""
        if self.query is None or self.weights is None or not self.is_sum or dim != -1:
            _refuse(self.module, f"takes the highest of its {self._what}")
        weights = self.weights[0, :, 0].float() * self.factor
        return _Choice(self.choose(self.query[0], weights, k))

    def __getattr__(self, name: str) -> object:
        if name in _SAME:
            return lambda *_, **__: self
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self.module, f"takes {name} of its {self._what}")
