"""Layers that equal an earlier one but for their weights: traced once, copied in the graph.

Tracing takes a fifth of a second per layer, most of it in PyTorch's Python for each operation. So
only the first layer of each kind is traced, between two marks in the graph. Every other layer of
that kind leaves one mark, which is then replaced by a copy of what lies between those two.

Decides: which layers are of one kind: all attributes of their modules are the same, except
`layer_idx`, and so are the looks of their tensors and all arguments of their calls.

Does not know: whether layers of one kind compute the same, which the caller has to check.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

_KEPT = {"_modules", "_parameters", "_buffers", "forward"}


def _like(x: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride())


_library = torch.library.Library("kvcore_layers", "DEF")  # type: ignore[no-untyped-call]
for _name, _given, _run in (
    ("enter", "Tensor x, int layer, int place", lambda x, *_: _like(x)),
    ("leave", "Tensor x, int layer", lambda x, *_: _like(x)),
    ("repeat", "Tensor[] given, int layer", lambda given, *_: _like(given[0])),
):
    _library.define(f"{_name}({_given}) -> Tensor")  # type: ignore[no-untyped-call]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class RepeatedLayers:
    """The layers of a network, by kind.

    Args:
        network: to be traced.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers: list[nn.Module] = []
        for parent in network.modules():
            if isinstance(parent, nn.ModuleList):
                self._layers += [child for child in parent if len(_indices(child)) == 1]
        self._layers = [*dict.fromkeys(self._layers)]  # one may be there twice
        self._looks = [_look(layer) for layer in self._layers]
        self._calls: dict[int, Any] = {}  # of the first layer of a kind
        self._firsts: dict[int, int] = {}  # of each further one the first

    def __bool__(self) -> bool:
        return len(self._layers) > 1

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Calls of layers in here leave marks."""
        before = [vars(layer).get("forward") for layer in self._layers]
        for number, layer in enumerate(self._layers):
            vars(layer)["forward"] = self._marking(number, layer.forward)
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, before, strict=True):
                del vars(layer)["forward"]
                if forward is not None:
                    vars(layer)["forward"] = forward

    def _marking(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def mark(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # any layer's
            leaves, spec = pytree.tree_flatten((args, kwargs))
            given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            looks = [_shown(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            call = [spec, *looks]
            for first, other in self._calls.items():
                if _same(call, other) and _same(self._looks[number], self._looks[first]):
                    self._firsts[number] = first
                    return torch.ops.kvcore_layers.repeat(given, number)
            places = iter(range(len(given)))
            entered = [
                torch.ops.kvcore_layers.enter(leaf, number, next(places))
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
            args, kwargs = pytree.tree_unflatten(entered, spec)
            output = forward(*args, **kwargs)
            if not isinstance(output, Tensor) or _shown(output) != _shown(given[0]):
                return output
            self._calls[number] = call
            return torch.ops.kvcore_layers.leave(output, number)

        return mark

    def expand(self, module: fx.GraphModule) -> None:
        """Replace the marks of a trace by what layers compute. O(nodes)."""
        operators = torch.ops.kvcore_layers
        entries: dict[int, dict[fx.Node, int]] = {}
        bodies: dict[int, tuple[Sequence[fx.Node], fx.Node]] = {}
        for node in list(module.graph.nodes):
            if node.target is operators.enter.default:
                entries.setdefault(node.args[1], {})[node] = node.args[2]
            elif node.target is operators.leave.default:
                result, number = node.args
                bodies[number] = _between(entries[number], node), result
            elif node.target is operators.repeat.default:
                given, number = node.args
                first = self._firsts[number]
                inside, result = bodies[first]
                copies = {entry: given[place] for entry, place in entries[first].items()}
                with module.graph.inserting_before(node):
                    self._copy(module, inside, copies, first, number)
                node.replace_all_uses_with(copies[result])
        for node in list(module.graph.nodes):
            if node.target in (operators.enter.default, operators.leave.default):
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
            elif node.target is operators.repeat.default:
                module.graph.erase_node(node)

    def _copy(
        self,
        module: fx.GraphModule,
        inside: Sequence[fx.Node],
        copies: dict[fx.Node, fx.Node],
        first: int,
        number: int,
    ) -> None:
        own, its = (self._layers[each] for each in (first, number))
        names = {id(tensor): name for name, tensor in _tensors(own)}
        tensors = dict(_tensors(its))
        [before], [after] = _indices(own), _indices(its)
        for node in inside:
            if node.op == "get_attr":
                name = names.get(id(getattr(module, str(node.target))))
                if name is None:
                    copies[node] = node
                    continue
                attribute = f"layer_{number}_{name.replace('.', '_')}"
                if isinstance(tensors[name], nn.Parameter):
                    setattr(module, attribute, tensors[name])
                else:
                    module.register_buffer(attribute, tensors[name])
                copies[node] = module.graph.get_attr(attribute)
                copies[node].meta = dict(node.meta)
                continue
            made = copies[node] = module.graph.node_copy(node, lambda one: copies.get(one, one))
            if getattr(node.target, "namespace", "") == "kvcore_trace":
                made.args = tuple(
                    after if type(one) is int and one == before and place == _LAYER else one
                    for place, one in enumerate(made.args)
                )


_LAYER = 3
"""The place of the layer in the arguments of a mark of attention."""


def _between(entries: dict[fx.Node, int], leave: fx.Node) -> list[fx.Node]:
    """The nodes that one layer added, in order, with those that hold its weights."""
    found: list[fx.Node] = []
    node = min(entries)
    while node is not leave:
        if node not in entries:
            found.append(node)
        node = node.next
    return found


def _tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in layer.named_modules():
        own = {**vars(module), **module._parameters, **module._buffers}  # noqa: SLF001
        for name, value in own.items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}", value


def _indices(layer: nn.Module) -> set[int]:
    found = {vars(module).get("layer_idx") for module in layer.modules()} - {None}
    return {index for index in found if isinstance(index, int)}


def _look(layer: nn.Module) -> list[object]:
    """What layers of one kind share."""
    facts: list[object] = [(name, _shown(tensor)) for name, tensor in _tensors(layer)]
    for name, module in layer.named_modules():
        own = vars(module)
        facts += [name, type(module), own.get("forward")]
        for key, value in sorted(own.items(), key=lambda item: item[0]):
            if key not in _KEPT and key != "layer_idx" and not isinstance(value, Tensor):
                facts += [key, value]
    return facts


def _shown(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, type(tensor)


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and bool(a == b)) for a, b in zip(one, other, strict=True)
    )
