"""The network as one function: its own operations, without the modules around them.

A step of a small network spends more time in Python, on the way from module to module, than in
arithmetic. So its operations are traced once, and then run as one generated function that calls
PyTorch's operators directly: the same operations on the same weights, so the same bits.

Decides: what can be traced. The trace runs on fake tensors, which have shapes and no values, so a
network that looks at values (rotary scaling by length, experts called one by one) is refused.
PyTorch's functionalization makes in-place operations into ones with new results; a network that
writes into its own weights or buffers is refused. The numbers of tokens and rows of the trace are
primes larger than those of any step, and occur in no network: each multiple of one of them becomes
that multiple of the number at run time. No-ops (a cast to the same dtype, a product with 1) are
removed. At the end the function is compared with the network, bit for bit, at several sizes,
because a number may depend on the size in another way.

Steps with LoRA adapters have a separate trace: the adapter slot of each token is one more input.
Operations on recurrent states are calls in the trace, as attention is. A module whose states no
backend steps is one call itself: it runs as it is, sequence by sequence.

Invariants: a traced network gave the network's own logits for every size tried; attention is called
as the network calls it, layer by layer, with the same terms.

Does not know: caches, batches, what attention does.
"""

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

import backends
from kvcore.adapters.recurrent import RecurrentPass, cache_argument, is_divided
from model.attention.attention import Attending, logits_of
from model.compile.repeated_layers import RepeatedLayers
from model.compile.stored_graphs import GraphStore
from model.compile.traced_states import Call, fresh_states, marking
from model.errors import UnsupportedModelError
from model.host import uncollected

_SIZES = (1_299_709, 1_299_689)  # tokens and rows of the trace
_NEAR = 6  # a number this close to one of them comes from it too
_TRIALS = ((13, 6), (1, 1), (2, 1), (300, 40))  # the first alone for a trace of an earlier start


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, chosen: Tensor | None = None
) -> Tensor:
    """The place in a trace where a layer attends; never run."""
    del key, layer, chosen
    return query.new_empty(*query.shape[:2], value.shape[2])


def _choose(query: Tensor, weights: Tensor, key: Tensor, layer: int, count: int) -> Tensor:
    """The place in a trace where an index chooses tokens; never run."""
    del weights, key, layer
    return query.new_empty((query.shape[0], count), dtype=torch.int32)


_library = torch.library.Library("kvcore_trace", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attend(Tensor query, Tensor key, Tensor value, int layer, Tensor? chosen=None) -> Tensor"
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "choose(Tensor query, Tensor weights, Tensor key, int layer, int count) -> Tensor"
)
_library.impl("choose", _choose, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class TracedNetwork:
    """The operations of a network as one function; made by `trace_network`.

    Attributes:
        module: the function as a graph of input_ids, position_ids, rows, with adapters the slot of
            each token's, num_tokens, num_rows and a callable for attention and for modules with
            states. `meta["sized"]` of a node maps
            each dimension of its tensor that depends on the number of tokens or rows to 0 (tokens),
            1 (rows) or -1 (else).
        terms: of each layer's attention.
        recurrent: the calls with states, in order: call number -1 is the first one.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        terms: dict[int, backends.AttentionTerms],
        recurrent: Sequence[Call] = (),
    ) -> None:
        self.module = module
        self.terms = terms
        self.recurrent = recurrent
        self._run: Callable[..., Tensor] = module.forward

    def logits(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Tensor,
        paged: Attending,
        states: RecurrentPass | None = None,
        adapter_slots: Tensor | None = None,
    ) -> Tensor:
        """The logits of the network: [num_rows, vocab_size]. One forward pass.

        Args:
            input_ids: int64 [1, num_tokens].
            position_ids: int64 [1, num_tokens].
            rows: int64 [num_rows], the tokens whose logits are wanted.
            paged: computes the attention of each layer.
            states: of recurrent layers; None: no state is there, as in `fresh_states`.
            adapter_slots: int64 [num_tokens], if it was traced with adapters.
        """
        terms, attend, recurrent = self.terms, paged.attend, self.recurrent
        num_tokens = input_ids.shape[1]
        run, computed = self._choose(num_tokens, rows)
        passing = fresh_states(num_tokens) if recurrent and states is None else states

        def call(layer: int, *given: Any) -> Tensor:  # noqa: ANN401  # as `_simplify` has it
            if layer < 0 and passing is not None:
                return recurrent[~layer].run(passing, given)
            query, key, value, *more = given
            if not more:
                return attend(layer, query, key, value, terms[layer])
            (chosen,) = more
            if isinstance(chosen, int):  # a count: these are of an index
                return paged.choose(layer, query, key, value, chosen)
            return attend(layer, query, key, value, terms[layer], chosen)

        more = () if adapter_slots is None else (adapter_slots,)
        sizes = num_tokens, computed.shape[0]
        logits = run(input_ids, position_ids, computed, *more, *sizes, call)
        return logits if computed is rows else logits[: rows.shape[0]]

    def _choose(self, num_tokens: int, rows: Tensor) -> tuple[Callable[..., Tensor], Tensor]:
        """Return the function that runs for that number of tokens, and its rows. O(1)."""
        del num_tokens  # one function for all; not so in compiled pieces
        return self._run, rows


class ChoosesAdapters(Protocol):
    """The LoRA adapters of a network.

    Attributes:
        num_slots: the number of adapters.
    """

    num_slots: int

    def choosing(self, slots: Tensor | None) -> AbstractContextManager[None]:
        """Passes in here have these adapters: int64 [num_tokens]; None: they have none."""


def trace_network(
    network: PreTrainedModel,
    device: torch.device,
    adapters: ChoosesAdapters | None = None,
    *,
    is_stored: bool = False,
) -> TracedNetwork:
    """Trace a network that has our attention. Costs a trace and a few forward passes.

    Args:
        network: to trace.
        device: of its weights.
        adapters: to trace with it; each slot should have one, or what it adds is not compared.
        is_stored: look on disk for the trace of an earlier start first, which costs three passes
            of few tokens, and leave this one there; not with adapters.

    Raises:
        UnsupportedModelError: it cannot be traced, and why.
    """
    store = GraphStore(network, _functions()) if is_stored and adapters is None else None
    stored = None if store is None else _from_disk(store, network, device)
    if stored is not None:
        return stored
    layers = RepeatedLayers(network)
    made: TracedNetwork | None = None
    if adapters is None and layers and not is_divided(network):
        with suppress(UnsupportedModelError):  # some layers of one kind differ after all
            made = _checked(network, device, None, layers)
    if made is None:
        made = _checked(network, device, adapters)
    if store is not None:
        store.write(made.module)
    return made


def _checked(
    network: PreTrainedModel,
    device: torch.device,
    adapters: ChoosesAdapters | None,
    layers: RepeatedLayers | None = None,
) -> TracedNetwork:
    """Trace a network and compare it; with `layers` each kind of them is traced once."""
    terms: dict[int, backends.AttentionTerms] = {}
    recurrent: list[Call] = []
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # logs what is raised here
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with nullcontext() if layers is None else layers.marked():
            traced = _trace(network, device, terms, recurrent, adapters)
        if layers is not None:
            layers.expand(traced)
            terms, _ = _noted(network, device)
        if device.type == "cuda":
            _check_replayable(traced)
            _move_constants(traced, device)
        module = _sizeless(traced)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a tracer may raise any error
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise UnsupportedModelError(
            f"{type(network).__name__}: its operations cannot be traced: {reason}"
        ) from error
    finally:
        logger.setLevel(level)
    traced_network = TracedNetwork(module, terms, recurrent)
    for num_tokens, num_rows in _TRIALS:
        _check(network, traced_network, device, num_tokens, num_rows, adapters)
    return traced_network


@uncollected()
def _from_disk(
    store: GraphStore, network: PreTrainedModel, device: torch.device
) -> TracedNetwork | None:
    """The trace of an earlier start, with what this network notes; None: there is none."""
    module = store.read()
    if module is None:
        return None
    noted = _noted(network, device) if is_divided(network) else ({}, [])  # else `_check` notes
    stored = TracedNetwork(with_near_attributes(module), *noted)
    try:
        _check(network, stored, device, *_TRIALS[0], adapters=None)
    except UnsupportedModelError:  # of another network, or damaged
        return None
    return stored


def _noted(
    network: PreTrainedModel, device: torch.device
) -> tuple[dict[int, backends.AttentionTerms], list[Call]]:
    """What a pass of two tokens notes."""
    terms: dict[int, backends.AttentionTerms] = {}
    recurrent: list[Call] = []
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    with torch.no_grad():
        _noting(network, device, terms, recurrent, None)(tokens, tokens, tokens[0, :1])
    return terms, recurrent


def _trace(
    network: PreTrainedModel,
    device: torch.device,
    terms: dict[int, backends.AttentionTerms],
    recurrent: list[Call],
    adapters: ChoosesAdapters | None,
) -> fx.GraphModule:
    forward = _noting(network, device, terms, recurrent, adapters)
    num_tokens, num_rows = _SIZES
    tokens = torch.zeros((1, num_tokens), dtype=torch.int64, device=device)
    positions = torch.zeros_like(tokens)
    rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
    slots = () if adapters is None else (torch.zeros_like(tokens[0]),)
    with torch.no_grad():
        return _traced(forward, tokens, positions, rows, *slots)


def _noting(
    network: PreTrainedModel,
    device: torch.device,
    terms: dict[int, backends.AttentionTerms],
    recurrent: list[Call],
    adapters: ChoosesAdapters | None,
) -> Callable[..., Tensor]:
    """A pass of the network that notes terms and calls of modules with states, and leaves marks."""
    tokens, states = torch.zeros((1, 2), dtype=torch.int64, device=device), None
    if is_divided(network):
        short = partial(_logits, network, tokens, tokens, tokens[0, :1], Mixing())
        states = marking(short, recurrent)

    def forward(input_ids: Tensor, position_ids: Tensor, rows: Tensor, *slots: Tensor) -> Tensor:
        with nullcontext() if adapters is None else adapters.choosing(*slots):
            return _logits(network, input_ids, position_ids, rows, _Noting(terms), states)

    return forward


def _traced(function: Callable[..., Tensor], *inputs: Tensor) -> fx.GraphModule:
    """The operations of a function, none of them in place except on tensors that it owns."""
    mode = FunctionalTensorMode(export=True, pre_dispatch=True)
    trace = make_fx(
        dispatch_functionalize(function, mode),
        tracing_mode="fake",
        pre_dispatch=True,
        _allow_non_fake_inputs=True,
    )
    return trace(*inputs)


class _Noting:
    """A pass that leaves a mark in the trace and notes the terms of each layer."""

    def __init__(self, terms: dict[int, backends.AttentionTerms]) -> None:
        self._terms = terms

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Leave a mark."""
        self._terms[layer] = terms
        marked: Tensor = torch.ops.kvcore_trace.attend(query, key, value, layer, chosen)
        return marked

    def choose(self, layer: int, query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
        """Leave a mark."""
        marked: Tensor = torch.ops.kvcore_trace.choose(query, weights, key, layer, count)
        return marked


def _sizeless(module: fx.GraphModule) -> fx.GraphModule:
    """The graph for any size from a graph for the sizes of the trace, without no-ops."""
    graph = module.graph
    for node in graph.nodes:
        if _is_whole_slice(node):  # from minus the number of tokens on, say
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        call = graph.placeholder("call")
    with graph.inserting_before(call):
        num_tokens = graph.placeholder("num_tokens")
        num_rows = graph.placeholder("num_rows")
    numbers = _Numbers(graph, after=call, names=(num_tokens, num_rows))
    for node in nodes:
        node.meta["sized"] = _sized(node.meta.get("val"))
        if node.op == "call_function":
            node.args = numbers.replaced(node.args)
            node.kwargs = numbers.replaced(node.kwargs)
    for node in nodes:
        if node.op == "call_function":
            _simplify(node, call)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op == "call_function":
            _make_direct(node)
    module.recompile()
    return with_near_attributes(module)


def with_near_attributes(module: fx.GraphModule) -> fx.GraphModule:
    """The module, whose tensors are found faster than by nn.Module.__getattr__. O(nodes)."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            module.__dict__[node.target] = getattr(module, node.target)
    return module


def _sized(value: object) -> dict[int, int]:
    """The dimensions that depend on a size of the trace: on which one, or -1."""
    if not isinstance(value, Tensor):
        return {}
    sized = {}
    for dim, length in enumerate(value.shape):
        if _is_symbol(length):
            sized[dim] = -1
        elif length and any(length % size == 0 for size in _SIZES):
            sized[dim] = _SIZES.index(length) if length in _SIZES else -1
    return sized


def _is_symbol(value: object) -> bool:
    """Whether a number depends on the values of a tensor."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _check_replayable(module: fx.GraphModule) -> None:
    """Raise if a number depends on the values of a tensor: no CUDA graph can replay that."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if any(map(_is_symbol, value.shape if isinstance(value, Tensor) else (value,))):
            raise UnsupportedModelError(
                f"tracing: wanted sizes that depend on no value, got those of {node.target}"
            )


def _move_constants(module: fx.GraphModule, device: torch.device) -> None:
    """Move tensors that the network makes of numbers; no CUDA graph copies from the host."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, node.target)
            if isinstance(value, Tensor) and value.device.type != device.type:
                setattr(module, node.target, value.to(device))


class _Numbers:
    """The numbers of a graph: those that depend on a size become nodes that compute them."""

    def __init__(self, graph: fx.Graph, after: fx.Node, names: tuple[fx.Node, fx.Node]) -> None:
        self._graph = graph
        self._after = after
        self._names = names
        self._made: dict[tuple[int, int], fx.Node] = {}

    def replaced(self, value: Any) -> Any:  # noqa: ANN401  # arguments of any operator
        """The arguments of a node, for any size."""
        if isinstance(value, tuple | list):
            return type(value)(self.replaced(one) for one in value)
        if isinstance(value, dict):
            return {name: self.replaced(one) for name, one in value.items()}
        if isinstance(value, slice):
            return slice(*map(self.replaced, (value.start, value.stop, value.step)))
        if isinstance(value, int) and not isinstance(value, bool) and value != 0:
            for place, size in enumerate(_SIZES):
                if value % size == 0:
                    return self._multiple(place, value // size)
                if abs(value - size) <= _NEAR:
                    raise _no_multiple(value)
        return value

    def _multiple(self, place: int, factor: int) -> fx.Node:
        if factor < 1 or any(factor % size == 0 for size in _SIZES):
            raise _no_multiple(factor * _SIZES[place])
        if factor == 1:
            return self._names[place]
        if (place, factor) not in self._made:
            with self._graph.inserting_after(self._after):
                made = self._graph.call_function(operator.mul, (self._names[place], factor))
            self._made[place, factor] = made
        return self._made[place, factor]


def _no_multiple(number: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tracing: wanted a number that is a multiple of the number of tokens or rows, got "
        f"{number} for {_SIZES[0]} tokens and {_SIZES[1]} rows"
    )


_IDLE = (  # the trace of no_grad; what functionalization leaves of a cast
    torch._C._set_grad_enabled,  # noqa: SLF001
    torch.ops.aten._assert_tensor_metadata.default,  # noqa: SLF001
)
_PURE = ("aten", "_c10d_functional", "kvcore_ranks", "kvcore_rows", "kvcore_lora")
"""Two have the collectives of the ranks, the others the products of batch-invariant mode and what
LoRA adapters add."""


def _simplify(node: fx.Node, call: fx.Node) -> None:
    """Remove a no-op; make attention a call; refuse what cannot be replayed."""
    target: Any = node.target
    if target is torch.ops.kvcore_trace.attend.default:
        query, key, value, layer, *chosen = node.args
        node.target, node.args = operator.call, (call, layer, query, key, value, *chosen)
    elif target is torch.ops.kvcore_trace.choose.default:
        query, weights, key, layer, count = node.args
        node.target, node.args = operator.call, (call, layer, query, weights, key, count)
    elif target in (torch.ops.kvcore_trace.recur.default, torch.ops.kvcore_trace.step.default):
        given, number, *_ = node.args
        node.target, node.args = operator.call, (call, ~number, *given)  # type: ignore[operator,misc]
    elif target is torch.ops.aten._to_copy.default and [*node.kwargs] == ["dtype"]:  # noqa: SLF001
        node.target, node.args = torch.ops.aten.to.dtype, (node.args[0], node.kwargs["dtype"])
        node.kwargs = {}
    elif target in _IDLE:
        node.graph.erase_node(node)
    elif _is_idle(node):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]  # a tensor's node
    elif target is operator.getitem:  # one of several results
        return
    elif getattr(target, "namespace", None) not in _PURE or target._schema.is_mutable:  # noqa: SLF001
        raise UnsupportedModelError(f"tracing: wanted pure operations of PyTorch, got {target}")


_CASTS = {
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.contiguous.default,
}


def _is_idle(node: fx.Node) -> bool:
    """Whether the result equals the first argument: a cast to the same dtype, a product with 1."""
    if node.target is torch.ops.aten.mul.Tensor:
        if isinstance(node.args[1], fx.Node) or node.args[1] != 1:
            return False
    elif node.target not in _CASTS:
        return False
    return _is_same_kind(node, node.args[0])


def _is_whole_slice(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.slice.Tensor or not _is_same_kind(node, node.args[0]):
        return False
    return bool(node.meta["val"].shape == node.args[0].meta["val"].shape)  # type: ignore[union-attr]


def _is_same_kind(node: fx.Node, source: object) -> bool:
    if not isinstance(source, fx.Node):
        return False
    after, before = node.meta["val"], source.meta["val"]
    same = after.dtype == before.dtype and after.device == before.device
    return bool(same and after.stride() == before.stride())


def _direct_names() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Operators with an equivalent in `torch` that is called faster."""
    for name, overload in (
        ("add", "Tensor"), ("sub", "Tensor"), ("mul", "Tensor"), ("div", "Tensor"),
        ("pow", "Tensor_Scalar"), ("mean", "dim"), ("rsqrt", "default"), ("neg", "default"),
        ("cat", "default"), ("cos", "default"), ("sin", "default"), ("tanh", "default"),
        ("transpose", "int"), ("unsqueeze", "default"), ("select", "int"),
        ("reshape", "default"), ("embedding", "default"), ("rms_norm", "default"),
    ):  # fmt: skip
        yield getattr(getattr(torch.ops.aten, name), overload), getattr(torch, name)
    for name in ("linear", "silu", "gelu"):
        yield getattr(torch.ops.aten, name).default, getattr(torch.nn.functional, name)
    yield torch.ops.aten.view.default, torch.reshape  # what attention returns may have gaps


_DIRECT = dict(_direct_names())


def _functions() -> dict[str, Callable[..., Any]]:
    """What a graph calls beside PyTorch's operators, by name."""
    known = [*_DIRECT.values(), torch.narrow, operator.call, operator.getitem, operator.mul]
    return {f"{one.__module__}:{one.__name__}": one for one in known}


def _make_direct(node: fx.Node) -> None:
    target: Any = node.target
    if target is torch.ops.aten.pow.Tensor_Scalar and node.args[1] == 2:
        node.target, node.args = torch.mul, (node.args[0], node.args[0])  # as PyTorch computes it
    elif target in _DIRECT:
        node.target = _DIRECT[target]
    elif target is torch.ops.aten.slice.Tensor and len(node.args) == 4:
        _make_narrow(node)


def _make_narrow(node: fx.Node) -> None:
    """`x[..., start:stop]` as the faster `narrow`, if the numbers do not depend on a size."""
    source, dim, start, stop = node.args
    if not (isinstance(source, fx.Node) and isinstance(dim, int)):
        return
    if not (isinstance(start, int) and isinstance(stop, int) and start >= 0):
        return
    length = node.meta["val"].shape[dim]
    if dim in (-1, node.meta["val"].dim() - 1) and "val" in source.meta:  # never the tokens
        node.target, node.args = torch.narrow, (source, dim, start, length)


def _logits(
    network: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    rows: Tensor,
    paged: object,
    states: RecurrentPass | None,
) -> Tensor:
    named = {} if states is None else {cache_argument(network): states}
    return logits_of(network, input_ids, position_ids, rows, paged=paged, **named)


class Mixing:
    """A pass whose results depend on all its arguments, and on nothing else.

    They lie in memory without gaps, as those of a backend do: compiled code relies on it.

    Args:
        terms: where the terms of each layer are noted; None: nowhere.
    """

    def __init__(self, terms: dict[int, backends.AttentionTerms] | None = None) -> None:
        self._terms = {} if terms is None else terms

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Mix the arguments."""
        self._terms[layer] = terms
        shift = (key.mean() + 2 * value.mean() + layer / 8).to(query.dtype)
        if chosen is not None:
            shift = shift + chosen.to(query.dtype).mean() / 8
        return (query[..., : value.shape[2]] * terms.scale + shift).contiguous()

    def choose(self, layer: int, query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
        """Mix the arguments."""
        mixed = query.float().sum((1, 2)) * 16 + weights.sum(1) + key.float().sum((1, 2)) + layer
        return mixed.to(torch.int32)[:, None] + torch.arange(count, device=key.device).int()


def _check(
    network: PreTrainedModel,
    traced: TracedNetwork,
    device: torch.device,
    tokens: int,
    rows: int,
    adapters: ChoosesAdapters | None,
) -> None:
    vocab_size = network.config.get_text_config().vocab_size
    input_ids = torch.arange(1, tokens + 1, device=device)[None] * 7919 % vocab_size
    position_ids = torch.arange(tokens, device=device)[None] * 3 % 37  # any network has 37
    kept = torch.arange(rows, device=device) * (tokens - 1) // max(1, rows - 1)  # first to last
    slots = None
    if adapters is not None:  # from that of the last slot to none
        slots = adapters.num_slots - 1 - torch.arange(tokens, device=device)
        slots = slots % (adapters.num_slots + 1) - 1
    choosing = nullcontext() if adapters is None else adapters.choosing(slots)
    with torch.inference_mode(), choosing:
        states = fresh_states(tokens) if traced.recurrent else None
        wanted = _logits(network, input_ids, position_ids, kept, Mixing(traced.terms), states)
        try:
            got = traced.logits(input_ids, position_ids, kept, Mixing(), None, slots)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # an operator may raise any error
            reason = str(error).strip().split("\n", 1)[0]
            raise UnsupportedModelError(
                f"{type(network).__name__}: its traced operations fail for {tokens} tokens: "
                f"{reason}"
            ) from error
    if not torch.equal(wanted, got):
        raise UnsupportedModelError(
            f"{type(network).__name__}: its traced operations give other logits than it does"
        )
