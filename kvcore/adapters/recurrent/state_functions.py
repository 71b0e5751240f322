"""The functions with which Transformers' modules step their states, as operations of a backend.

A module passes the states that its cache gives to functions named in its forward:
`causal_conv1d_update`, `torch_recurrent_gated_delta_rule`, `mamba2_selective_state_update` and so
on. Here are others with their parameters. They take `SteppedState` in place of states and all rows
of a pass as one sequence, and the backend reads and writes the states where they lie: no copy, and
one call for all sequences.

Decides: which function is replaced, by its parameters alone; there is no list of classes.

Invariants: the module and the file of its class stay as they are; only a copy of its forward calls
the replacements.

Does not know: whether a replacement gives the network's results (`probe.py` compares).
"""

import inspect
import math
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import NamedTuple

from torch import Tensor, nn

import backends
from kvcore.adapters.recurrent.passes import Continued, StateRows, SteppedState, Stepping
from kvcore.adapters.recurrent.states import StateKey, StateTensors


class BackendSteps:
    """The operations of a backend on the states of one pass.

    Args:
        backend: has operations on states.
        tensors: the states of all sequences.
        rows: of the pass.
    """

    def __init__(
        self, backend: backends.StateBackend, tensors: StateTensors, rows: StateRows
    ) -> None:
        self._backend = backend
        self._tensors = tensors
        starts, stored = rows.query_start_loc, rows.num_stored
        self._batches = [  # of each piece
            backends.StateBatch(read, write, starts, stored)
            for read, write in zip(rows.read, rows.write, strict=True)
        ]

    def convolve(self, key: StateKey, rows: Tensor, terms: backends.ShortConvTerms) -> Tensor:
        """See `Steps`. O(its bytes)."""
        piece, blocks = self._tensors[key].piece, self._tensors[key].blocks
        step = self._backend.short_conv_step
        return step(rows, blocks.transpose(1, 2), self._batches[piece], terms)

    def attend(
        self, key: StateKey, rows: backends.LinearRows, terms: backends.LinearAttentionTerms
    ) -> Tensor:
        """See `Steps`. O(its bytes)."""
        piece, blocks = self._tensors[key].piece, self._tensors[key].blocks
        blocks = blocks if terms.delta_rule else blocks.transpose(-1, -2)
        return self._backend.linear_attention_step(*rows, blocks, self._batches[piece], terms)


def _convolve(
    hidden_states: Continued,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """The inputs of all rows, [1, channels, num_rows]."""
    terms = backends.ShortConvTerms(weight, bias, {None: False, "silu": True}[activation])
    (inputs, state) = hidden_states
    return state.steps.convolve(state.key, inputs[0].t(), terms).t()[None]


def _convolve_one(
    hidden_states: Tensor,
    conv_state: SteppedState,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The inputs of a single row likewise."""
    return _convolve(Continued(hidden_states, conv_state), weight, bias, activation)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: SteppedState,
    *,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, SteppedState | None]:
    """All rows with the gated delta rule, [1, num_rows, heads, dim]."""
    scale, state = key.shape[-1] ** -0.5, initial_state
    terms = backends.LinearAttentionTerms(scale, delta_rule=True, l2norm=use_qk_l2norm_in_kernel)
    rows = query[0], key[0], value[0], g[0], beta[0]
    out = state.steps.attend(state.key, rows, terms)[None]
    return out, state if output_final_state else None


def _update(
    state: SteppedState,
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
    """A single row with Mamba2's rule, [1, heads, head_dim].

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
    initial_states: SteppedState,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **_: object,
) -> tuple[Tensor, SteppedState]:
    """All rows likewise, [1, num_rows, heads, head_dim]."""
    rows = C[0], B[0], hidden_states[0], dt[0]
    return _mamba2(initial_states, rows, A, dt_bias, D, dt_limit)[None], initial_states


def _mamba2(
    state: SteppedState,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    a: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    gate = backends.DecayGate(a, None if bias is None else bias.float(), limits)
    skip = None if skip is None else skip.float()
    terms = backends.LinearAttentionTerms(1.0, delta_rule=False, gate=gate, skip=skip)
    return state.steps.attend(state.key, (*rows, None), terms)


class _Replacement(NamedTuple):
    function: Callable[..., object]
    parameters: frozenset[str]  # that a function replaced by it has
    kind: str  # of the states that it takes
    is_transposed: bool  # the operation takes their last two dimensions exchanged


def _replacement(
    function: Callable[..., object], kind: str, more: str = "", *, is_transposed: bool
) -> _Replacement:
    own = inspect.signature(function).parameters.values()
    names = {one.name for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return _Replacement(function, frozenset({*names, *more.split()}), kind, is_transposed)


_REPLACEMENTS = (  # the first one fits
    _replacement(_convolve_one, "conv", is_transposed=True),
    _replacement(_convolve, "conv", is_transposed=True),
    _replacement(_attend, "recurrent", is_transposed=False),
    _replacement(_update, "recurrent", "dt_softplus", is_transposed=True),
    _replacement(_scan, "recurrent", "chunk_size", is_transposed=True),
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
        found = {name: one[0] for name, each in functions.items() if (one := _replacements(each))}
        if not found:
            return None
        return Stepping(
            _rebound(module, forward, {name: one.function for name, one in found.items()}),
            frozenset(one.kind for one in found.values()),
            frozenset(one.kind for one in found.values() if one.is_transposed),
        )

    def steps(self, tensors: StateTensors, rows: StateRows) -> BackendSteps:
        """See `Operations`. O(pieces)."""
        return BackendSteps(self.backend, tensors, rows)


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
