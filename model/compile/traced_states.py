"""Recurrent states in a trace: operations on them as calls, or whole modules that keep some.

Where a backend steps states, each operation leaves a mark with its tensors, and what it was asked
for is noted; the operations around it are traced like all others. A module whose states no backend
steps leaves one mark. Marks are never run, and say how results lie in memory.

Does not know: the rest of the network, where states lie.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import backends
from kvcore.adapters.recurrent import RecurrentPass, StateKey, Steps, stepping_of
from model.errors import UnsupportedModelError


def _step(given: Sequence[Tensor], number: int, like: int) -> Tensor:
    """The place in a trace where states are stepped; never run."""
    del number
    return given[like].new_empty(given[like].shape)


def _recur(
    given: Sequence[Tensor], number: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The place in a trace where a module with a state is called; never run."""
    del number
    return given[0].new_empty((*given[0].shape[:2], *shape), dtype=dtype)


_library = torch.library.Library("kvcore_trace", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("step(Tensor[] given, int number, int like) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("step", _step, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "recur(Tensor[] given, int number, int[] shape, ScalarType dtype) -> Tensor"
)
_library.impl("recur", _recur, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class _Recurrent(NamedTuple):
    """A call of a module that keeps a state."""

    forward: Callable[..., Any]
    leaves: list[Any]  # of its arguments; a tensor of the trace is `Tensor`
    spec: pytree.TreeSpec

    def run(self, states: RecurrentPass, given: Sequence[Tensor]) -> Tensor:
        tensors = iter(given)
        leaves = [
            next(tensors) if leaf is Tensor else states if leaf is RecurrentPass else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        output = self.forward(*args, **kwargs)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


class _Convolution(NamedTuple):
    """A call of `Steps.convolve`."""

    key: StateKey
    has_bias: bool
    silu: bool

    def run(self, states: RecurrentPass, given: Sequence[Tensor]) -> Tensor:
        rows, weight, *bias = given
        terms = backends.ShortConvTerms(weight, bias[0] if bias else None, self.silu)
        return _steps_of(states).convolve(self.key, rows, terms)


class _LinearAttention(NamedTuple):
    """A call of `Steps.attend`: the terms without their tensors."""

    key: StateKey
    scale: float
    delta_rule: bool
    l2norm: bool
    limits: tuple[float, float] | None  # None: there is no gate
    has_bias: bool
    has_skip: bool

    def run(self, states: RecurrentPass, given: Sequence[Tensor]) -> Tensor:
        tensors = iter(given)
        query, key, value, decay = [next(tensors) for _ in range(4)]
        beta = next(tensors) if self.delta_rule else None
        gate = None
        if self.limits is not None:
            a, bias = next(tensors), next(tensors) if self.has_bias else None
            gate = backends.DecayGate(a, bias, self.limits)
        skip = next(tensors) if self.has_skip else None
        terms = backends.LinearAttentionTerms(
            self.scale, delta_rule=self.delta_rule, l2norm=self.l2norm, gate=gate, skip=skip
        )
        return _steps_of(states).attend(self.key, (query, key, value, decay, beta), terms)


def _steps_of(states: RecurrentPass) -> Steps:
    if states.steps is None:
        raise UnsupportedModelError("tracing: wanted a pass whose states a backend steps")
    return states.steps


class MarkedSteps:
    """Leaves a mark in the trace where states are stepped, and notes the call."""

    def __init__(self, calls: list["Call"]) -> None:
        self._calls = calls

    def convolve(self, key: StateKey, rows: Tensor, terms: backends.ShortConvTerms) -> Tensor:
        """Leave a mark."""
        call = _Convolution(key, terms.bias is not None, terms.silu)
        return self._mark(call, (rows, terms.weight, terms.bias), 0)

    def attend(
        self, key: StateKey, rows: backends.LinearRows, terms: backends.LinearAttentionTerms
    ) -> Tensor:
        """Leave a mark."""
        gate, skip = terms.gate, terms.skip
        a, bias, limits = (None, None, None) if gate is None else (gate.a, gate.bias, gate.limits)
        call = _LinearAttention(
            key, terms.scale, terms.delta_rule, terms.l2norm, limits, bias is not None,
            skip is not None,
        )  # fmt: skip
        return self._mark(call, (*rows, a, bias, skip), 2)

    def _mark(self, call: "Call", tensors: Sequence[Tensor | None], like: int) -> Tensor:
        self._calls.append(call)
        given = [each for each in tensors if each is not None]
        marked: Tensor = torch.ops.kvcore_trace.step(given, len(self._calls) - 1, like)
        return marked


Call = _Recurrent | _Convolution | _LinearAttention
"""What a mark stands for."""


class MixingSteps:
    """Steps states in results that depend on all arguments, and on nothing else."""

    def convolve(self, key: StateKey, rows: Tensor, terms: backends.ShortConvTerms) -> Tensor:
        """Mix the arguments."""
        shift = 0 if terms.bias is None else terms.bias
        mixed = rows * terms.weight.mean(1) + terms.weight[:, 0] + shift
        return (mixed / (3 - terms.silu) + key.layer / 8).contiguous()

    def attend(
        self, key: StateKey, rows: backends.LinearRows, terms: backends.LinearAttentionTerms
    ) -> Tensor:
        """Mix the arguments."""
        query, keys, value, decay, beta = rows
        shift = terms.scale * query.float().mean() + 2 * keys.float().mean() + terms.l2norm
        factor = decay.float().flatten(2).mean(-1) if decay.dim() > 2 else decay.float()
        factor = factor / 4 if beta is None else factor / 4 + beta
        if terms.gate is not None:
            factor = factor + terms.gate.a + (0 if terms.gate.bias is None else terms.gate.bias)
        if terms.skip is not None:
            factor = factor + terms.skip
        mixed = value * factor[..., None] + shift + key.layer / 8
        return mixed.to(value.dtype).contiguous()


def fresh_states(num_tokens: int) -> RecurrentPass:
    """A pass of one text, whose states are mixed or start from zeros, and are not kept. O(1)."""
    return RecurrentPass.of_fresh([num_tokens], steps=MixingSteps())


def marking(run: Callable[[RecurrentPass], object], calls: list[Call]) -> RecurrentPass:
    """A pass that leaves a mark where states are stepped, or a module with a state is called.

    Args:
        run: a pass of two tokens, which shows the results of such modules.
        calls: where what the marks stand for is noted.
    """
    passing, marked_pass = (fresh_states(2) for _ in range(2))
    marked_pass.steps = MarkedSteps(calls)
    outputs: list[tuple[nn.Module, Any]] = []
    passing.outputs = outputs
    run(passing)
    whole = iter([output for module, output in outputs if stepping_of(module) is None])

    def mark(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        output = next(whole)
        own, *others = output if isinstance(output, tuple) else (output,)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        number = len(calls)
        kinds = (Tensor, RecurrentPass)
        kept = [next((k for k in kinds if isinstance(leaf, k)), leaf) for leaf in leaves]
        calls.append(_Recurrent(forward, kept, spec))
        marked = torch.ops.kvcore_trace.recur(given, number, own.shape[2:], own.dtype)
        return (marked, *[None for _ in others]) if isinstance(output, tuple) else marked

    marked_pass.mark = mark
    return marked_pass
