"""Recurrent layers inside Transformers' models: a step's sequences, each from its own state.

A module that keeps a state asks the cache of its pass for it (`get_conv_state`,
`update_recurrent_state` and so on). It knows nothing of packed rows: it takes a row as one
sequence. So its forward is wrapped: the rows of a step are divided by sequence, sequences with the
same numbers of tokens run together as a batch, and each call gets a cache with their states only.

Where all functions of a module that take states can be replaced (`state_functions.py`), its forward
runs once for all packed rows. It gets a `SteppedState` in place of each state, and what replaces
its functions knows which rows belong to which sequence, and reads and writes the states where they
lie. Lengths are read on the device then, so a CUDA graph can be captured.

Decides: when a state is stored: after the tokens of a step that are known. Draft tokens continue
from it and nothing of them is stored, so a rejected one leaves no trace.

Invariants: states that a module sees are copied before, because some
kernels update the state that they are given in place; a pass writes the blocks of its step and no
others; a pass without this cache runs as if the modules were not wrapped.

Does not know: which blocks a sequence has, which modules keep states (`probe.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kvcore.adapters.recurrent.interfaces import KeyValueStore, StatesByLayer, Steps
from kvcore.adapters.recurrent.states import StateKey, StateTensors


class ReportedLength:
    """A cache in Transformers' interface that stores nothing and reports a length.

    Args:
        length: of every layer: a number, or int64 with a number for each row of the pass.
    """

    def __init__(self, length: int | Tensor) -> None:
        self._length = length

    is_initialized = True  # as a cache that has seen a text

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """The number of tokens before this pass. O(1)."""
        del layer_idx
        return self._length

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of the pass alone. O(1)."""
        del layer_idx
        return key, value

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As without a cache; used to build masks. O(1)."""
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """As without a cache; used to build masks. O(1)."""
        del layer_idx
        return query_length, 0


class SteppedState(NamedTuple):
    """Given to a module in place of a state, for the functions that replace the module's."""

    steps: Steps
    key: StateKey

    def to(self, *_: object, **__: object) -> "SteppedState":
        """Itself, for modules that convert what they store. O(1)."""
        return self


class Continued(NamedTuple):
    """Given to a module in place of a convolution's inputs, with those before them.

    Attributes:
        inputs: [1, channels, num_rows].
        state: where those before them are.
    """

    inputs: Tensor
    state: SteppedState


@dataclass(frozen=True, slots=True)
class Stepping:
    """A module's forward with other functions, that take `SteppedState`.

    Attributes:
        forward: for packed rows.
        kinds: of states that they take.
        transposed: kinds of states whose last two dimensions have to lie exchanged in memory.
    """

    forward: Callable[..., Any]
    kinds: frozenset[str]
    transposed: frozenset[str]


class Operations(Protocol):
    """What steps states where they lie, in place of modules' own functions."""

    def stepping(self, module: nn.Module) -> Stepping | None:
        """The forward of a module with all functions replaced that can be; None: none can."""

    def steps(self, tensors: StateTensors, rows: "StateRows") -> Steps:
        """The computations that step the states of a pass."""


class Run(NamedTuple):
    """The rows of one sequence in a step.

    Attributes:
        start: its first row.
        num_known: rows of tokens that stay.
        num_drafts: rows of draft tokens behind them.
        has_state: whether tokens were computed before; otherwise it starts from zeros.
    """

    start: int
    num_known: int
    num_drafts: int
    has_state: bool


@dataclass(frozen=True, slots=True)
class StateStep:
    """Which states a step reads and writes.

    Attributes:
        runs: the rows of each sequence, in order.
        read: int64 [num_seqs, blocks_per_state]: block ids; of a sequence without a state -1.
        write: likewise; None: nothing is stored.
    """

    runs: tuple[Run, ...]
    read: Tensor
    write: Tensor | None

    def to(self, device: torch.device) -> "StateStep":
        """The same on a device; the copies may still run on return. O(its bytes)."""
        write = None if self.write is None else self.write.to(device, non_blocking=True)
        return StateStep(self.runs, self.read.to(device, non_blocking=True), write)

    def rows(self) -> "StateRows":
        """The same for packed rows, on the same device. O(its bytes)."""
        runs, device = self.runs, self.read.device
        lengths = [run.num_known + run.num_drafts for run in runs]
        sides = self.read.new_full((2, *self.read.shape[::-1]), -1, dtype=torch.int32)
        if any(run.has_state for run in runs):
            has_state = torch.tensor([run.has_state for run in runs], device=device)
            sides[0].copy_(self.read.t().where(has_state, -1))
        if self.write is not None:
            sides[1].copy_(self.write.t())
        if all(length == 1 for length in lengths):
            return StateRows(sides[0], sides[1])
        counts = [0, *accumulate(lengths), *[run.num_known for run in runs]]
        starts, stored = (
            torch.tensor(counts, dtype=torch.int32).to(device).tensor_split([len(runs) + 1])
        )
        return StateRows(sides[0], sides[1], starts, stored)


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which states a step reads and writes, and whose rows are where, on the device.

    Attributes:
        read: int32 [blocks_per_state, num_seqs]: block ids; -1: it starts from zeros.
        write: likewise; -1: nothing is stored.
        query_start_loc: int32 [num_seqs + 1], see `backends.StateBatch`; None: each has one row.
        num_stored: int32 [num_seqs]: rows of each whose state is stored; None: all.
    """

    read: Tensor
    write: Tensor
    query_start_loc: Tensor | None = None
    num_stored: Tensor | None = None


class HeldStates(ReportedLength):
    """A cache in Transformers' interface with the states of some sequences of equal length.

    Args:
        tensors: the states of all sequences.
        read: int64 [num_seqs, blocks_per_state]; None: they start from zeros.
    """

    def __init__(self, tensors: StateTensors, read: Tensor | None) -> None:
        super().__init__(0)
        self._tensors = tensors
        self._read = read
        self.held: dict[StateKey, Tensor] = {}  # [num_seqs, *shape]

    def store(self, write: Tensor) -> None:
        """Write the states that are held; others are in these blocks already. O(their bytes)."""
        for key, state in self.held.items():
            piece, blocks = self._tensors[key].piece, self._tensors[key].blocks
            blocks[write[:, piece]] = state.to(blocks.dtype)
        self._read = write

    def _load(self, key: StateKey) -> Tensor | None:
        if key not in self.held and self._read is not None:
            tensor = self._tensors[key]
            self.held[key] = tensor.blocks[self._read[:, tensor.piece]].contiguous()
        return self.held.get(key)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, a copy; None: there are none. O(its bytes)."""
        return self._load(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A recurrent state, a copy; None: there is none. O(its bytes)."""
        return self._load(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Hold the last inputs from now on; all that a convolution needs, those before included.

        O(its bytes).
        """
        key = StateKey(layer_idx, "conv", state_idx)
        before = self._load(key)
        if before is None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size - 1
            missing = max(0, size - conv_states.shape[-1])
            inputs = nn.functional.pad(conv_states, (missing, 0))
        else:
            size, inputs = before.shape[-1], torch.cat([before, conv_states], dim=-1)
        self.held[key] = inputs[..., inputs.shape[-1] - size :]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Hold a recurrent state from now on. O(1)."""
        self.held[StateKey(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name of `get_recurrent_state`. O(its bytes)."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """MiniMax's name of `update_recurrent_state`. O(1)."""
        self.update_recurrent_state(linear_cache, layer_idx)

    @property
    def layers(self) -> StatesByLayer:
        """The states by layer, as modules ask for them before Transformers 5.21. O(1)."""
        return StatesByLayer(self)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None, **_: object
    ) -> bool:
        """Return True if there is a state, of a layer or of all, before this call. O(states)."""
        return self._read is not None or any(
            layer_idx in (None, key.layer) and state_idx in (None, key.number) for key in self.held
        )

    def is_recording_past(self, *_: object, **__: object) -> bool:
        """Never: states are not cut. O(1)."""
        return False


class PackedStates(ReportedLength):
    """A cache in Transformers' interface for a forward of `Stepping`: it gives no tensors.

    Args:
        steps: compute with the states.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__(0)
        self._steps = steps

    @property
    def layers(self) -> StatesByLayer:
        """The states by layer, as modules ask for them before Transformers 5.21. O(1)."""
        return StatesByLayer(self)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> SteppedState:
        """The last inputs of a convolution. O(1)."""
        return SteppedState(self._steps, StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> SteppedState:
        """A recurrent state. O(1)."""
        return SteppedState(self._steps, StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Continued:
        """The inputs of a convolution with those before them. O(1)."""
        return Continued(conv_states, self.get_conv_state(layer_idx, state_idx))

    def update_recurrent_state(self, recurrent_states: object, *_: object, **__: object) -> object:
        """Do nothing: it has been written already. O(1)."""
        return recurrent_states

    def has_previous_state(self, *_: object, **__: object) -> bool:
        """Always: a sequence without one has zeros. O(1)."""
        return True

    def is_recording_past(self, *_: object, **__: object) -> bool:
        """Never: states are not cut. O(1)."""
        return False


class _Span(NamedTuple):
    """Rows of a step that lie side by side."""

    start: int
    num_seqs: int
    num_tokens: int  # of each sequence

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.num_seqs * self.num_tokens)


_Rows = Tensor | _Span
"""Rows of a step: int64 [num_seqs, tokens of each], or a span."""


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls of a module for sequences with the same numbers of tokens.

    Attributes:
        rows: that each call computes.
        num_tokens: of each sequence, in all calls.
        read: see `StateStep`; None: nothing is stored before the first call.
        write: see `StateStep`; None: nothing is stored after the last one.
    """

    rows: list[_Rows]
    num_tokens: int
    read: Tensor | None
    write: Tensor | None


class RecurrentPass(ReportedLength):
    """The cache of a pass over packed rows: what a network passes on to its layers.

    Layers that attend take it for a cache that stores nothing.

    Args:
        tensors: the states of all sequences.
        step: the rows of each sequence, and its blocks; None: all modules have `Stepping`.
        steps: compute with the states of modules that have `Stepping`; None: these modules do.
        token_by_token: a module cannot compute several tokens from a state in one call.
        length: what layers that ask for the number of tokens before the pass are told.
        packed: names of arguments that describe the packed rows; modules with a state get None.

    Attributes:
        calling: the rows that a module with a state computes now; None: none is called.
        outputs: of each call of a module with a state, the module and its output; None: not kept.
        mark: is called in place of such a module, with its wrapped forward and arguments; None:
            the module runs.
        kv_cache: stores the keys and values of layers that attend; None: this pass does not.
    """

    def __init__(
        self,
        tensors: StateTensors,
        step: StateStep | None,
        *,
        steps: Steps | None = None,
        token_by_token: bool = False,
        length: int | Tensor = 0,
        packed: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(length)
        self.tensors = tensors
        self.packed = packed
        self.steps = steps
        runs = () if step is None else step.runs
        self.num_rows = sum([run.num_known + run.num_drafts for run in runs])
        self._step, self._token_by_token = step, token_by_token
        self._batches: list[list[_Calls]] | None = None
        self.calling: _Rows | None = None
        self.outputs: list[tuple[nn.Module, Any]] | None = None
        self.mark: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None
        self.mark = None
        self.kv_cache: KeyValueStore | None = None

    def update(
        self,
        key: Tensor,
        value: Tensor,
        layer_idx: int,
        *_: object,
        **named: Any,  # noqa: ANN401  # as attention modules have it
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values in `kv_cache`; without one return those of the pass alone."""
        if self.kv_cache is None:
            return key, value
        return self.kv_cache.update(key, value, layer_idx, **named)

    @property
    def batches(self) -> list[list[_Calls]]:
        """The calls of a module without `Stepping`. O(sequences) for the first one."""
        if self._batches is None:
            step = self._step or StateStep((), torch.empty(0), None)
            self._batches = _batches(step, token_by_token=self._token_by_token)
        return self._batches

    @classmethod
    def of_fresh(
        cls, lengths: Iterable[int], length: int | Tensor = 0, steps: Steps | None = None
    ) -> "RecurrentPass":
        """A pass of sequences that start from zeros and store nothing. O(sequences).

        Args:
            lengths: the tokens of each.
            length: see the class.
            steps: see the class.
        """
        runs, start = [], 0
        for count in lengths:
            runs.append(Run(start, count, 0, has_state=False))
            start += count
        nothing = torch.zeros((len(runs), 0), dtype=torch.int64)
        return cls({}, StateStep(tuple(runs), nothing, None), length=length, steps=steps)

    def in_call(self, values: Tensor) -> Tensor:
        """Values of all rows, [num_rows, ...], for the layers inside a module with a state.

        Returns:
            [num_seqs, tokens of each, ...] of the sequences that it computes now; outside of such a
            module all as they are. O(rows of the call).
        """
        return values if self.calling is None else _taken(values, self.calling)


def _batches(step: StateStep, *, token_by_token: bool) -> list[list[_Calls]]:
    """For sequences that are alike, the calls for known tokens and those for drafts."""
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for number, run in enumerate(step.runs):
        alike.setdefault(run[1:], []).append(number)
    device, found = step.read.device, []
    for (num_known, num_drafts, has_state), numbers in alike.items():
        starts = [step.runs[number].start for number in numbers]
        first, last = numbers[0], numbers[-1]
        own: slice | Tensor = slice(first, last + 1)
        if len(numbers) <= last - first:
            own = torch.tensor(numbers, device=device)
        read = step.read[own] if has_state else None
        write = None if step.write is None else step.write[own]
        known = _rows(starts, num_known, device, one_by_one=token_by_token and has_state)
        calls = [_Calls(known, num_known, read, write)]
        if num_drafts:
            behind = [start + num_known for start in starts]
            drafts = _rows(behind, num_drafts, device, one_by_one=token_by_token)
            calls.append(_Calls(drafts, num_drafts, write, None))
        found.append(calls)
    return found


def _rows(
    starts: Sequence[int], count: int, device: torch.device, *, one_by_one: bool
) -> list[_Rows]:
    """The rows of each call, for sequences of `count` rows each."""
    if one_by_one:
        return [
            rows
            for offset in range(count)
            for rows in _rows([s + offset for s in starts], 1, device, one_by_one=False)
        ]
    if starts == [starts[0] + count * number for number in range(len(starts))]:
        return [_Span(starts[0], len(starts), count)]
    first = torch.tensor(starts, device=device)
    return [first[:, None] + torch.arange(count, device=device)]


class _Divided:
    """The forward of a module that keeps a state: sequence by sequence in our passes.

    Attributes:
        stepping: its forward with operations on states; None: it has none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._wrapped = vars(module).get("forward")
        self._forward: Callable[..., Any] = module.forward
        self.__wrapped__ = self._forward
        self.stepping: Stepping | None = None

    def leave(self) -> None:
        """Give the module its own forward back. O(1)."""
        del self._module.forward
        if self._wrapped is not None:
            self._module.forward = self._wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the module takes it
        """Call the module once or more, and put the rows together again."""
        given = (*args, *kwargs.values())
        passing = next((value for value in given if isinstance(value, RecurrentPass)), None)
        if passing is None:
            return self._forward(*args, **kwargs)
        is_stepped = passing.steps is not None and self.stepping is not None
        if passing.mark is not None and not is_stepped:
            return passing.mark(self, args, kwargs)
        kwargs = {n: None if n in passing.packed else value for n, value in kwargs.items()}
        if passing.steps is not None and self.stepping is not None:
            packed = PackedStates(passing.steps)
            own, named = _picked((args, kwargs), None, 0, packed)
            output = self.stepping.forward(*own, **named)
        else:
            output = self._divided(passing, args, kwargs)
        if passing.outputs is not None:
            passing.outputs.append((self._module, output))
        return output

    def _divided(
        self, passing: RecurrentPass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """Call the module's own forward, sequence by sequence."""
        parts: list[tuple[_Rows, Any]] = []
        for batch in passing.batches:
            cache = HeldStates(passing.tensors, batch[0].read)
            for calls in batch:
                for rows in calls.rows:
                    own, named = _picked((args, kwargs), rows, passing.num_rows, cache)
                    passing.calling = rows
                    try:
                        parts.append((rows, self._forward(*own, **named)))
                    finally:
                        passing.calling = None
                if calls.write is not None:
                    cache.store(calls.write)
        return _joined(parts, passing.num_rows)


def _taken(values: Tensor, rows: _Rows) -> Tensor:
    """Some rows of [num_rows, ...]: [num_seqs, tokens of each, ...]."""
    if isinstance(rows, Tensor):
        return values[rows]
    return values[rows.rows].reshape(*rows[1:], *values.shape[1:])


def _picked(value: Any, rows: _Rows | None, num_rows: int, cache: object) -> Any:  # noqa: ANN401
    """Arguments of some rows, or None: of all, with the cache of their sequences."""
    if isinstance(value, Tensor):
        if rows is None or value.shape[:2] != (1, num_rows):
            return value
        return _taken(value[0], rows)
    if isinstance(value, RecurrentPass):
        return cache
    if type(value) in (tuple, list):
        return type(value)(_picked(one, rows, num_rows, cache) for one in value)
    if type(value) is dict:
        return {name: _picked(one, rows, num_rows, cache) for name, one in value.items()}
    return value


def _joined(parts: Sequence[tuple[_Rows, Any]], num_rows: int) -> Any:  # noqa: ANN401
    """The results of calls as one: tensors with the rows of a call are put together."""
    first = parts[0][1]
    if isinstance(first, tuple):
        columns = zip(*[result for _, result in parts], strict=True)
        every = [rows for rows, _ in parts]
        return tuple(_joined([*zip(every, one, strict=True)], num_rows) for one in columns)
    if not isinstance(first, Tensor):
        return first
    sizes = [rows.shape if isinstance(rows, Tensor) else rows[1:] for rows, _ in parts]
    if any(part.shape[:2] != size for (_, part), size in zip(parts, sizes, strict=True)):
        return first  # a state, say; no layer takes it from here
    if len(parts) == 1 and not isinstance(parts[0][0], Tensor):
        return first.reshape(1, num_rows, *first.shape[2:])
    out = first.new_empty((1, num_rows, *first.shape[2:]))
    for rows, part in parts:
        if isinstance(rows, Tensor):
            out[0, rows] = part
        else:
            out[0, rows.rows] = part.flatten(0, 1)
    return out


def divide(modules: Iterable[nn.Module], operations: Operations | None = None) -> None:
    """Wrap the forwards of modules that keep states, once. O(modules).

    Args:
        modules: each asks the cache of its pass for a state.
        operations: step the states where they can; None: modules do.
    """
    for module in modules:
        divided = module.forward
        if not isinstance(divided, _Divided):
            divided = module.forward = _Divided(module)
        if operations is not None and divided.stepping is None:
            divided.stepping = operations.stepping(module)


def undivide(network: nn.Module) -> None:
    """Give the modules of a network their own forwards back. O(modules)."""
    for module in network.modules():
        divided = vars(module).get("forward")
        if isinstance(divided, _Divided):
            divided.leave()


def stepping_of(module: nn.Module) -> Stepping | None:
    """The forward of a divided module that steps states where they lie; None: it has none. O(1)."""
    return module.forward.stepping if isinstance(module.forward, _Divided) else None


def drop_stepping(modules: Iterable[nn.Module]) -> None:
    """Let divided modules compute with their states themselves. O(modules)."""
    for module in modules:
        if isinstance(module.forward, _Divided):
            module.forward.stepping = None


def is_divided(network: nn.Module) -> bool:
    """Whether some modules of a network are wrapped. O(modules)."""
    return any(isinstance(module.forward, _Divided) for module in network.modules())


@dataclass(slots=True)
class Spy:
    """Finds the modules that ask the cache of their pass for states, and the states.

    Attributes:
        modules: those that have asked, by the states that each has asked for.
        attending: those that have called attention, or called a module that has.
        layers: by the index of a layer that attends, the shapes of a token's key and value, both
            [num_kv_heads, head_dim].
        cache: to be passed to the network.
    """

    modules: dict[StateKey, nn.Module] = field(default_factory=dict)
    attending: list[nn.Module] = field(default_factory=list)
    layers: dict[int, tuple[torch.Size, torch.Size]] = field(default_factory=dict)
    _calls: list[nn.Module] = field(default_factory=list)
    cache: "_Spied" = field(init=False)

    def __post_init__(self) -> None:
        self.cache = _Spied(self)

    def enter(self, module: nn.Module, _: object) -> None:
        """A hook: a module is called."""
        self._calls.append(module)

    def leave(self, *_: object) -> None:
        """A hook: the call returns, or fails."""
        self._calls.pop()

    def ask(self, key: StateKey) -> None:
        """The innermost module has asked for a state."""
        self.modules[key] = self._calls[-1]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, _: object) -> Tensor:
        """Attention of any layer: zeros."""
        self.layers[layer] = key.shape[1:], value.shape[1:]
        self.attending += self._calls
        return query.new_zeros(*query.shape[:2], value.shape[2])


class _Spied(HeldStates):
    """The states of one sequence that starts from zeros; notes which module asks."""

    def __init__(self, spy: Spy) -> None:
        super().__init__({}, None)
        self._spy = spy

    def _load(self, key: StateKey) -> Tensor | None:
        self._spy.ask(key)
        return super()._load(key)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **more: object
    ) -> Tensor:
        """As `HeldStates`. O(1)."""
        self._spy.ask(StateKey(layer_idx, "recurrent", state_idx))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **more)
