"""Which modules of a network keep states, what these are, and whether they can be continued.

The probe runs a network once with a cache that records which modules ask for a state; there is no
list of classes. Then it computes a text whole and in pieces: a module whose code ignores its state
when it gets several tokens at once is called token by token where it continues a sequence.

Invariants: a network whose modules pass gives the same result in pieces as in one pass.

Does not know: caches of a running engine, requests.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcore.adapters.recurrent.passes import (
    Operations,
    RecurrentPass,
    Run,
    Spy,
    StateRows,
    StateStep,
    divide,
    drop_stepping,
    stepping_of,
)
from kvcore.adapters.recurrent.states import StateShape, StateTensors, aligned, state_views
from kvcore.adapters.transformers_versions import cache_argument

_TOLERANCES = {torch.float32: 0.01, torch.float64: 0.01}
"""The relative error allowed between a text as a whole and in pieces; 0.05 in other dtypes."""
_NUM_TOKENS, _BEGINNING = 9, 5


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What the recurrent layers of a network keep.

    Attributes:
        shapes: of the states, by layer; empty: there are none, or the network does not run with a
            cache of our own.
        token_by_token: where a sequence is continued, modules get one token a call.
        operations: step the states where they can; None: modules do.
        takes_slots: True if they step all states. Then a pass copies no state, and the host
            decides nothing in it that depends on the sequences.
        attending: by the index of a layer that attends, the shapes of a token's key and value,
            both [num_kv_heads, head_dim].
        error: why the network did not run; None: it has run.
    """

    shapes: tuple[StateShape, ...] = ()
    token_by_token: bool = False
    operations: Operations | None = None
    takes_slots: bool = False
    attending: Mapping[int, tuple[torch.Size, torch.Size]] = field(default_factory=dict)
    error: Exception | None = None

    def passing(
        self,
        tensors: StateTensors,
        step: StateStep | StateRows,
        packed: frozenset[str] = frozenset(),
    ) -> RecurrentPass:
        """The cache of a pass; see `RecurrentPass`. Rows do if all states are stepped. O(rows)."""
        if isinstance(step, StateRows):
            rows, of_runs = step, None
        else:
            rows, of_runs = step.rows(), step
        steps = None if self.operations is None else self.operations.steps(tensors, rows)
        return RecurrentPass(
            tensors, of_runs, steps=steps, token_by_token=self.token_by_token, packed=packed
        )


def find_states(
    network: PreTrainedModel,
    device: torch.device,
    refusal: type[Exception],
    operations: Operations | None = None,
) -> Recurrence:
    """Find the states of a network, and divide the modules that keep them. One pass of one token.

    Args:
        network: its attention calls `attend` of the pass's argument `paged`, as `Spy` has it.
        device: of the network; the meta device works for a network without weights.
        refusal: what its attention raises where a paged cache cannot serve it, and this function.
        operations: say how states have to lie in memory; None: as modules have them.

    Raises:
        refusal: a module attends and keeps a state in one, or a network that keeps states attends
            in a way that a paged cache does not support.
    """
    spy, token = Spy(), torch.zeros((1, 1), dtype=torch.int64, device=device)
    hooks = [
        hook
        for module in network.modules()
        for hook in (
            module.register_forward_pre_hook(spy.enter),
            module.register_forward_hook(spy.leave, always_call=True),
        )
    ]
    try:
        _run(network, token, token, spy, spy.cache)
    except Exception as error:  # a class of Transformers may raise any error
        if spy.modules and isinstance(error, refusal):
            raise refusal(f"{type(network).__name__}: {error}") from error
        return Recurrence(error=error)  # the loader reports what is wrong
    finally:
        for hook in hooks:
            hook.remove()
    modules = {id(module): module for module in spy.modules.values()}.values()
    for module in modules:
        if any(module is other for other in spy.attending):
            raise refusal(
                f"{type(network).__name__}: wanted modules that attend or keep a state, "
                f"{type(module).__name__} does both"
            )
    divide(modules, operations)
    drop_stepping(
        module
        for key, module in spy.modules.items()
        if (step := stepping_of(module)) is not None and key.kind not in step.kinds
    )
    shapes, left = [], []
    for key, state in sorted(spy.cache.held.items()):
        step = stepping_of(spy.modules[key])
        is_transposed = step is not None and state.dim() > 2 and key.kind in step.transposed
        shapes.append(StateShape(key, tuple(state.shape[1:]), state.dtype, is_transposed))
        if step is None:
            left.append(key)
    return Recurrence(tuple(shapes), takes_slots=not left, attending=spy.layers)


def probe_recurrence(
    network: PreTrainedModel,
    device: torch.device,
    refusal: type[Exception],
    operations: Operations | None = None,
) -> Recurrence:
    """Find the states of a network and how they are continued. A few passes.

    Args:
        network: see `find_states`.
        device: of the network, which has weights.
        refusal: see `find_states`.
        operations: step the states if they give the network's results.

    Raises:
        refusal: as `find_states`, or the network cannot continue from a state.
    """
    found = find_states(network, device, refusal, operations)
    if not found.shapes:
        return found
    if _failing(network, device, found) is None:
        return _with_operations(network, device, found, operations)
    found = replace(found, token_by_token=True)
    module = _failing(network, device, found)
    if module is None:
        return _with_operations(network, device, found, operations)
    raise refusal(
        f"{type(network).__name__}: wanted layers that can continue from a state, "
        f"{type(module).__name__} gives other results for a text in pieces"
    )


def _with_operations(
    network: PreTrainedModel,
    device: torch.device,
    found: Recurrence,
    operations: Operations | None,
) -> Recurrence:
    """The same with operations on states, if they give the network's results."""
    stepped = replace(found, operations=operations)
    with suppress(Exception):  # of a class of Transformers, or an operation that does not fit
        if operations is not None and _failing(network, device, stepped) is None:
            return stepped
    drop_stepping(network.modules())
    shapes = tuple([replace(shape, is_transposed=False) for shape in found.shapes])
    return replace(found, shapes=shapes, takes_slots=False)


class _Apart:
    """Attention in which no token sees another."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, _: object) -> Tensor:
        """The value of each token itself."""
        del layer, key
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


def _failing(network: PreTrainedModel, device: torch.device, found: Recurrence) -> nn.Module | None:
    """A module that gives other results for a text in pieces; None: none does.

    Of each class the first that is called is compared: rounding has not gone far there.
    """
    page_bytes = sum(aligned(shape.num_bytes) for shape in found.shapes)
    pages = torch.zeros((2, page_bytes), dtype=torch.uint8, device=device)
    tensors = state_views(found.shapes, pages)
    block = torch.ones((1, 1), dtype=torch.int64, device=device)
    whole = _outputs(network, device, RecurrentPass.of_fresh([_NUM_TOKENS]), 0, _NUM_TOKENS)
    end = 0
    for stop in (_BEGINNING, _NUM_TOKENS - 1, _NUM_TOKENS):
        step = StateStep((Run(0, stop - end, 0, end > 0),), block, block)
        outputs = _outputs(network, device, found.passing(tensors, step), end, stop)
        tolerance = _TOLERANCES.get(network.dtype, 0.05)
        known: set[type[nn.Module]] = set()
        for (module, wanted), (_, output) in zip(whole, outputs, strict=True):
            part = wanted[:, end:stop]
            if type(module) not in known and not _is_close(output, part, tolerance):
                return module
            known.add(type(module))
        end = stop
    return None


def _outputs(
    network: PreTrainedModel, device: torch.device, passing: RecurrentPass, start: int, stop: int
) -> list[tuple[nn.Module, Tensor]]:
    """What the modules with states give for some tokens of a text."""
    vocab_size: int = network.config.get_text_config().vocab_size
    positions = torch.arange(start, stop, device=device)[None]
    passing.outputs = []
    _run(network, (positions * 7 + 3) % vocab_size, positions, _Apart(), passing)
    return [
        (module, output[0] if isinstance(output, tuple) else output)
        for module, output in passing.outputs
    ]


def _is_close(one: Tensor, two: Tensor, tolerance: float) -> bool:
    return float((one.float() - two.float()).norm()) <= tolerance * float(two.float().norm())


def _run(
    network: PreTrainedModel, tokens: Tensor, positions: Tensor, paged: object, cache: object
) -> None:
    with torch.inference_mode():
        network(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.arange(tokens.shape[1], device=tokens.device),
            paged=paged,
            **{cache_argument(network): cache},
        )
