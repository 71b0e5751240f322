"""The functions with which Transformers' modules step their states, as operations of a backend.

A module passes the states that its cache gives to functions named in its forward:
`causal_conv1d_update`, `torch_recurrent_gated_delta_rule`, `mamba2_selective_state_update` and so
on. Here are others with their parameters. They take `Slots` in place of states, and the backend
reads and writes the states where they lie: no copy, and one call for all sequences.

Decides: which function is replaced, by its parameters alone; there is no list of classes.

Invariants: the module and the file of its class stay as they are; only a copy of its forward calls
the replacements.

Does not know: whether a replacement gives the network's results (`probe.py` compares).
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import NamedTuple

from torch import Tensor, nn

import backends
from kvcore.adapters.recurrent.passes import Stepping


@dataclass(frozen=True, slots=True)
class Slots:
    """The states of some sequences, where they lie.

    Attributes:
        backend: has operations on states.
        blocks: [num_blocks, *shape], see `StateTensor`.
        batch: which of them are read and written.
    """

    backend: backends.StateBackend
    blocks: Tensor
    batch: backends.StateBatch

    def to(self, *_: object, **__: object) -> "Slots":
        """Themselves, for modules that convert what they store. O(1)."""
        return self


def _convolve(
    hidden_states: Tensor,
    conv_state: Slots,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """One input of each sequence, [num_seqs, channels, 1]."""
    terms = backends.ShortConvTerms(weight, bias, {None: False, "silu": True}[activation])
    rows, blocks = hidden_states[..., 0], conv_state.blocks.transpose(1, 2)
    step = conv_state.backend.short_conv_step
    return step(rows, blocks, conv_state.batch, terms)[..., None]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Slots,
    *,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Slots | None]:
    """Some tokens of each sequence with the gated delta rule, [num_seqs, tokens, heads, dim]."""
    scale, step = key.shape[-1] ** -0.5, initial_state.backend.linear_attention_step
    terms = backends.LinearAttentionTerms(scale, delta_rule=True, l2norm=use_qk_l2norm_in_kernel)
    q, k, v, decay, rate = _flat((query, key, value, g, beta))
    out = step(q, k, v, decay, rate, initial_state.blocks, initial_state.batch, terms)
    return out.view(value.shape), initial_state if output_final_state else None


def _update(
    state: Slots,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # parameters are known by their names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    **_: object,
) -> Tensor:
    """One token of each sequence with Mamba2's rule, [num_seqs, heads, head_dim].

    What comes for each number of a head is the same for all of them.
    """
    skip, bias = (None if each is None else each[:, 0] for each in (D, dt_bias))
    out = _mamba2(state, (C, B, hidden_states, dt[..., 0]), A[:, 0, 0], bias, skip)
    return out if z is None else out * nn.functional.silu(z)


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    initial_states: Slots,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **_: object,
) -> tuple[Tensor, Slots]:
    """Some tokens of each sequence likewise, [num_seqs, tokens, heads, head_dim]."""
    rows = (C, B, hidden_states, dt)
    out = _mamba2(initial_states, rows, A, dt_bias, D, dt_limit)
    return out.view(hidden_states.shape), initial_states


def _mamba2(
    slots: Slots,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    a: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    gate = backends.DecayGate(a, None if bias is None else bias.float(), limits)
    skip = None if skip is None else skip.float()
    terms = backends.LinearAttentionTerms(1.0, delta_rule=False, gate=gate, skip=skip)
    query, key, value, decay = _flat(rows) if rows[0].dim() > 3 else rows
    step, blocks = slots.backend.linear_attention_step, slots.blocks.transpose(-1, -2)
    return step(query, key, value, decay, None, blocks, slots.batch, terms)


def _flat(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """[num_seqs, tokens, ...] to [num_seqs * tokens, ...]."""
    return tuple([each.flatten(0, 1).contiguous() for each in rows])


class _Replacement(NamedTuple):
    function: Callable[..., object]
    parameters: frozenset[str]  # that a function replaced by it has
    kind: str  # of the states that it takes
    is_transposed: bool  # the operation takes their last two dimensions exchanged
    takes_several: bool  # tokens of each sequence


def _replacement(
    function: Callable[..., object], kind: str, more: str = "", **how: bool
) -> _Replacement:
    own = inspect.signature(function).parameters.values()
    names = {one.name for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return _Replacement(function, frozenset({*names, *more.split()}), kind, **how)


_REPLACEMENTS = (
    _replacement(_convolve, "conv", is_transposed=True, takes_several=False),
    _replacement(_attend, "recurrent", is_transposed=False, takes_several=True),
    _replacement(_update, "recurrent", "dt_softplus", is_transposed=True, takes_several=False),
    _replacement(_scan, "recurrent", "chunk_size", is_transposed=True, takes_several=True),
)


class BackendOperations:
    """The operations of a backend on states, for a module's functions (see `Operations`)."""

    def __init__(self, backend: backends.StateBackend) -> None:
        self.backend = backend

    @classmethod
    def of(cls, backend: backends.Backend) -> "BackendOperations | None":
        """Those of a backend; None: it has none. O(1)."""
        return cls(backend) if isinstance(backend, backends.StateBackend) else None

    def stepping(self, module: nn.Module) -> Stepping | None:
        """See `Operations`. O(names)."""
        forward, functions = _functions(module)
        found = {name: one for name, each in functions.items() for one in _replacements(each)}
        if not found:
            return None
        return Stepping(
            _rebound(module, forward, {name: one.function for name, one in found.items()}),
            frozenset(one.kind for one in found.values()),
            frozenset(one.kind for one in found.values() if one.takes_several),
            frozenset(one.kind for one in found.values() if one.is_transposed),
        )

    def batch(self, read: Tensor, write: Tensor, num_tokens: int) -> backends.StateBatch:
        """See `Operations`. O(1)."""
        return backends.StateBatch(read, write, num_tokens)

    def slots(self, blocks: Tensor, batch: backends.StateBatch) -> Slots:
        """See `Operations`. O(1)."""
        return Slots(self.backend, blocks, batch)


def use_pytorch(module: nn.Module) -> None:
    """Let a module step its states in PyTorch: kernels of other packages need a GPU. O(names)."""
    forward, functions = _functions(module)
    own = {name: inspect.unwrap(each) for name, each in functions.items()}
    if own != functions and any(_replacements(each) for each in functions.values()):
        module.forward = _rebound(module, forward, own)


def _functions(module: nn.Module) -> tuple[FunctionType, dict[str, FunctionType]]:
    """A module's forward, and the functions of its file that it calls, by name."""
    forward = inspect.unwrap(module.forward)
    forward = getattr(forward, "__func__", forward)
    if not isinstance(forward, FunctionType):
        return forward, {}
    known = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return forward, {name: each for name, each in known.items() if isinstance(each, FunctionType)}


def _replacements(function: FunctionType) -> list[_Replacement]:
    own = {*inspect.signature(function).parameters}
    return [one for one in _REPLACEMENTS if one.parameters <= own]


def _rebound(
    module: nn.Module, forward: FunctionType, functions: Mapping[str, Callable[..., object]]
) -> MethodType:
    """A copy of a module's forward that knows other functions by these names."""
    code, defaults, closure = forward.__code__, forward.__defaults__, forward.__closure__
    known = {**forward.__globals__, **functions}
    copied = FunctionType(code, known, forward.__name__, defaults, closure)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copied, module)
