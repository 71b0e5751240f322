"""Positions for layers that compute them, and what a layer would give in another row.

A step holds tokens of many requests, so the row of a token says nothing about its position.
`position_ids` does, but some layers do not use it: in Llama 4, layers without rotation scale their
queries by the position `cache.get_seq_length() + row`.

Decides: what such a layer gets: an empty cache that reports, for each row, the position minus the
row. The sum that the layer computes is then the position, in any step.

Invariants: outside our passes the network is unchanged.

Does not know: requests, caches, which networks need it (`probes.py` finds out).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvcore.adapters.recurrent import ReportedLength, cache_argument


def report_positions(network: PreTrainedModel) -> None:
    """Give the layers of each of our passes a cache that reports positions from now on. O(1).

    Args:
        network: only passes with the keyword argument `paged` are changed.
    """
    argument = cache_argument(network)

    def with_lengths(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        if "paged" in kwargs and kwargs.get(argument) is None:
            positions = kwargs["position_ids"][0]
            rows = torch.arange(positions.shape[0], device=positions.device)
            kwargs = kwargs | {argument: ReportedLength(positions - rows)}
        return args, kwargs

    network.register_forward_pre_hook(with_lengths, with_kwargs=True)


_COUNTING = {"arange", "cumsum"}
_ARITHMETIC = {  # names of functions without underscores that an integer is followed through
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "clone"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "div", "rdiv", "truediv", "floordiv"),
    *("floor_divide", "remainder", "pow", "rpow", "neg", "clamp", "minimum", "maximum", "outer"),
    *("lt", "le", "gt", "ge", "eq", "ne", "where", "view", "reshape", "expand", "flatten"),
    *("unsqueeze", "squeeze", "transpose", "permute", "contiguous", "stack", "cat"),
}


class RowsElsewhere(TorchFunctionMode):
    """Computes, beside a pass, what it would give if its rows were `shift` rows further on.

    So a pass of a few rows shows what a pass of thousands would do. A count along the rows has a
    twin that starts at another row, and everything computed from the count has a twin too. Integers
    are followed through arithmetic only: integers that are indices (the rows of an expert's tokens)
    must stay in range.
    """

    def __init__(self, num_rows: int, shift: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self._shift = shift
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # id -> a tensor, kept, and its twin
        self._is_moved = False  # whether the last arguments had a twin

    def twin(self, tensor: Tensor) -> Tensor:
        """Return the tensor as it would be `shift` rows further on. O(1)."""
        return self._twins.get(id(tensor), (tensor, tensor))[1]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401  # as PyTorch calls it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function of PyTorch, and again with the twins of its arguments."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self._is_moved = False
        if name == "__getitem__":  # its indices stay
            moved, named = (self._moved(args[0], "view"), *args[1:]), kwargs
        else:
            moved, named = self._moved(args, name), self._moved(kwargs, name)
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if self._is_moved and writes and moved[0] is args[0]:
            moved = (args[0].clone(), *moved[1:])
        result = func(*args, **kwargs)
        if name in _COUNTING and result.shape[-1:] == (self._num_rows,):
            self._note(result, result + self._shift)
        elif self._is_moved:
            try:
                twin = func(*moved, **named)
            except (IndexError, RuntimeError):  # not computable with the twins
                return result
            self._note(args[0] if writes else result, moved[0] if writes else twin)
        return result

    def _moved(self, value: Any, name: str) -> Any:  # noqa: ANN401
        """Return arguments, replaced by their twins if they have one."""
        if isinstance(value, Tensor):
            is_integer = not (value.is_floating_point() or value.dtype == torch.bool)
            if id(value) not in self._twins or (is_integer and name.strip("_") not in _ARITHMETIC):
                return value
            self._is_moved = True
            return self.twin(value)
        if isinstance(value, dict):
            return {key: self._moved(one, name) for key, one in value.items()}
        if isinstance(value, list | tuple):
            moved = [self._moved(one, name) for one in value]
            return moved if isinstance(value, list) else tuple(moved)
        return value

    def _note(self, result: Any, twin: Any) -> None:  # noqa: ANN401
        if isinstance(result, Tensor):
            self._twins[id(result)] = (result, twin)
        elif isinstance(result, list | tuple):
            for one, other in zip(result, twin, strict=True):
                self._note(one, other)
