"""A traced network for steps of few tokens, with the operations around each product fused into it.

With one or two tokens a layer reads its weights once, and all other kernels are shorter than their
launches. So the norm before a product, the gate between two and the sum after one become part of
the product (`multiply` in `few_rows_kernels.py`), and norms and rotation of queries and keys become
one kernel (`rotate`). Of about twelve kernels per layer, four products, the rotation and attention
remain.

Decides: which nodes of a graph belong to a product or a rotation, by what they compute; any other
norm or gate is left as it is. Invariants: only what a node shows is assumed; the new graph
computes the same, except for rounding.

Does not know: which architecture it is.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

import model.compile
from model.compile.jobs import Job


class Kernels(NamedTuple):
    """The functions that replace nodes.

    Attributes:
        multiply: see `few_rows_kernels.multiply`.
        attend_rotated: see `few_rows_kernels.attend_rotated`.
        noting: see `few_rows_kernels.noting`.
    """

    multiply: Callable[..., Tensor]
    attend_rotated: Callable[..., Tensor]
    noting: Callable[[], AbstractContextManager[Collection[Job]]]


_VIEWS = (
    torch.ops.aten.alias.default,
    torch.ops.aten.unsqueeze.default,
    torch.unsqueeze,
    torch.reshape,
)
FEW_ROWS = (2, 4)
"""The numbers of tokens of such steps."""

_WIDEST = 4096
"""The longest row of a weight with which four tokens gain: longer rows need too many registers."""

LEAST_WEIGHT = 1 << 18
"""The smallest weight, in numbers, that is worth a cut."""


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels for a device, imported on first use; None: there are none.

    Only GPUs on which they were measured to gain have some, for dtypes of two bytes.
    """
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    kernels = model.compile.few_rows_kernels
    return Kernels(kernels.multiply, kernels.attend_rotated, kernels.noting)


def few_row_sizes(module: fx.GraphModule) -> tuple[int, ...]:
    """For how many tokens the result of `fuse_few_rows` gains. O(nodes)."""
    calls = [node for node in module.graph.nodes if "widest" in node.meta]
    return FEW_ROWS if max(node.meta["widest"] for node in calls) <= _WIDEST else FEW_ROWS[:1]


class Norm(NamedTuple):
    """x / rms(x) * scale."""

    x: fx.Node
    scale: fx.Node
    eps: float


class Unrun(fx.GraphModule):
    """A graph that is changed and cut, and never run: writing its code takes longer than that."""

    def recompile(self) -> Any:  # noqa: ANN401  # as PyTorch has it
        """Do nothing: a call raises NotImplementedError. O(1)."""


def fuse_few_rows(
    source: fx.GraphModule, kernels: Kernels, least: int = LEAST_WEIGHT
) -> fx.GraphModule | None:
    """A copy in which kernels compute products and the operations around them. O(nodes).

    Args:
        source: traced, its products of one input joined.
        kernels: to call.
        least: the smallest weight, in numbers.

    Returns:
        None: there is no such product.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    module = Unrun(source, graph)
    products = [node for node in graph.nodes if _is_product(module, node, least)]
    for product in products:
        _replace(module, product, kernels.multiply)
    if not products:
        return None
    for node in attentions(graph):
        rotation = rotation_of(module, node)
        if rotation is not None and rotation.product.target is kernels.multiply:
            given = rotation.product, *rotation.given
            attend_rotated(graph, node, kernels.attend_rotated, given)
    graph.eliminate_dead_code()
    return module


def attentions(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of attention. O(nodes)."""
    calls = [node for node in graph.nodes if _is_call(node, operator.call)]
    return [node for node in calls if node.args[1] >= 0]  # the others are of states


def _is_product(module: fx.GraphModule, node: fx.Node, least: int) -> bool:
    """Whether a node is a product of each token with a weight that a kernel can read."""
    if node.op != "call_function" or node.target is not nn.functional.linear or node.kwargs:
        return False
    x, *tensors = node.args
    values = [_tensor(module, one) for one in tensors if one is not None]
    if not isinstance(x, fx.Node) or any(value is None for value in values):
        return False
    shape, weight = x.meta.get("val"), values[0]
    return (
        isinstance(shape, Tensor)
        and isinstance(weight, Tensor)
        and shape.dim() == 3
        and x.meta.get("sized") == {1: 0}
        and weight.numel() >= least
        and weight.shape[1] * weight.itemsize % 16 == 0
        and all(v is not None and v.is_contiguous() and v.dtype == shape.dtype for v in values)
    )


def _replace(module: fx.GraphModule, product: fx.Node, multiply: Callable[..., Tensor]) -> None:
    """Replace a product and the operations around it by a call of `multiply`."""
    graph = module.graph
    x, weight, *rest = product.args
    bias = rest[0] if rest else None
    last, residual, is_gated = product, None, False
    gated = gated_half(product, len(_tensor(module, weight)))  # type: ignore[arg-type]
    if gated is not None:
        last, is_gated = gated, True
    else:
        added = sum_of(product, x)
        if added is not None:
            last, residual = added
    norm = norm_of(module, x)
    scale, eps = (None, 0.0) if norm is None else (norm.scale, norm.eps)
    with graph.inserting_before(last):
        call = graph.call_function(
            multiply,
            (_unviewed(x if norm is None else norm.x), weight, bias, scale, eps, residual),
            {"is_gated": is_gated},
        )
    call.meta = {"sized": {1: 0}, "widest": _tensor(module, weight).shape[1]}  # type: ignore[union-attr]
    if "val" in last.meta:
        call.meta["val"] = last.meta["val"]
    last.replace_all_uses_with(call)


def sum_of(product: fx.Node, x: Any) -> tuple[fx.Node, fx.Node] | None:  # noqa: ANN401
    """The sum that is the only user of a product, and its other operand of the same shape."""
    [*users] = product.users
    if len(users) != 1 or users[0].target is not torch.add or users[0].kwargs:
        return None
    others = [one for one in users[0].args if one is not product]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    mine, its = users[0].meta.get("val"), others[0].meta.get("val")
    if not (isinstance(mine, Tensor) and isinstance(its, Tensor)):
        return None
    same = mine.shape == its.shape and mine.dtype == its.dtype == x.meta["val"].dtype
    return (users[0], others[0]) if same else None


def gated_half(product: fx.Node, count: int) -> fx.Node | None:
    """`silu(first half) * second half` of a product, if nothing else uses the halves. O(1)."""
    halves = list(product.users)
    if len(halves) != 2 or count % 2:
        return None
    half = count // 2
    wanted = [(product, -1, 0, half), (product, -1, half, half)]
    if any(one.target is not torch.narrow for one in halves):
        return None
    if [one.args for one in halves] != wanted or any(len(one.users) != 1 for one in halves):
        return None
    [gate], [whole] = (list(one.users) for one in halves)
    if gate.target is not nn.functional.silu or gate.kwargs or whole.target is not torch.mul:
        return None
    return whole if set(whole.args) == {gate, halves[1]} and len(gate.users) == 1 else None


def norm_of(module: fx.GraphModule, node: Any) -> Norm | None:  # noqa: ANN401
    """The norm that a node computes; None: it is no norm."""
    if not isinstance(node, fx.Node) or node.target is not torch.mul:
        return None
    for scale, normed in (node.args, node.args[::-1]):
        weight = _tensor(module, scale)
        if weight is None or weight.dim() != 1 or not isinstance(scale, fx.Node):
            continue
        wide, factor = _arguments(_uncast(normed), torch.mul)
        mean, eps = _arguments(_argument(factor, torch.rsqrt), torch.add)
        square = _argument(mean, torch.mean)
        if (
            square is not None
            and mean.args[1:] == ([-1], True)
            and _arguments(square, torch.mul) == (wide, wide)
            and isinstance(eps, float)
            and wide.meta["val"].dtype == torch.float32
        ):
            x = _uncast(wide)
            values = [one.meta["val"] for one in (x, node)]
            if values[0].shape == values[1].shape and {v.dtype for v in values} == {weight.dtype}:
                return Norm(x, scale, eps)
    return None


def _uncast(node: Any) -> Any:  # noqa: ANN401
    """The operand of a cast; the node itself if it is no cast."""
    return node.args[0] if _is_call(node, torch.ops.aten.to.dtype) else node


class _Heads(NamedTuple):
    """Queries or keys: part of a product, perhaps normed, and rotated."""

    product: fx.Node
    start: int
    size: int
    norm: Norm | None
    cos: fx.Node
    sin: fx.Node


class Rotation(NamedTuple):
    """Queries and keys that are rotated in the usual way before attention.

    Attributes:
        product: whose parts are queries, keys and values, one after another.
        given: what `rotate` takes after the product.
    """

    product: fx.Node
    given: tuple[Any, ...]


def rotation_of(module: fx.GraphModule, call: fx.Node) -> Rotation | None:
    """Return the rotation of queries and keys between one product and a call of attention. O(1).

    Returns:
        None: they are not rotated, or something else is done to them.
    """
    if len(call.args) != 5:  # tokens that an index chooses
        return None
    query, key, value = call.args[2:]
    q, k = _heads(module, query), _heads(module, key)
    v = _part(_untransposed(_heads_last(value)))
    if q is None or k is None or v is None:
        return None
    dim = q.cos.meta["val"].shape[-1]
    norms = {None if one.norm is None else one.norm.eps for one in (q, k)}
    sizes = (q.start, k.start, v[1], v[2])
    if (
        {q.product, k.product} != {v[0]}
        or sizes != (0, q.size, q.size + k.size, k.size)
        or (q.cos, q.sin) != (k.cos, k.sin)
        or len(norms) != 1
        or dim != query.meta["val"].shape[-1]  # type: ignore[union-attr]
    ):
        return None
    scales = [None if one.norm is None else one.norm.scale for one in (q, k)]
    [eps] = norms
    return Rotation(v[0], (q.cos, q.sin, *scales, eps or 0.0, q.size // dim, k.size // dim))


def attend_rotated(
    graph: fx.Graph, call: fx.Node, target: Callable[..., Tensor], given: Sequence[Any]
) -> None:
    """Replace a call of attention by one that rotates its own queries and keys. O(1)."""
    with graph.inserting_before(call):
        made = graph.call_function(target, (*call.args[:2], *given))
    made.meta = dict(call.meta)
    call.replace_all_uses_with(made)
    graph.erase_node(call)


def _heads(module: fx.GraphModule, node: Any) -> _Heads | None:  # noqa: ANN401
    """The part of a product that is rotated: `h * cos + cat(-h[half:], h[:half]) * sin`."""
    straight, turned = _arguments(_heads_last(node), torch.add)
    h, cos = _arguments(straight, torch.mul)
    both, sin = _arguments(turned, torch.mul)
    if not isinstance(h, fx.Node) or not _is_call(both, torch.cat) or both.kwargs:
        return None
    dim = h.meta["val"].shape[-1]
    halves, *axis = both.args
    if axis != [-1] or len(halves) != 2 or dim % 2:
        return None
    high, low = _argument(halves[0], torch.neg), halves[1]
    places = [one.args if _is_call(one, torch.narrow) else None for one in (low, high)]
    if places != [(h, 3, 0, dim // 2), (h, 3, dim // 2, dim // 2)]:
        return None
    factors = [one.args for one in (cos, sin) if _is_call(one, torch.unsqueeze)]
    if len(factors) != 2 or any(one[1] != 1 for one in factors):
        return None
    inner = _untransposed(h)
    norm = norm_of(module, inner)
    part = _part(inner if norm is None else norm.x)
    if part is None or any(one[0].meta["val"].shape[-1] != dim for one in factors):
        return None
    return _Heads(*part, norm, factors[0][0], factors[1][0])


def _heads_last(node: Any) -> Any:  # noqa: ANN401
    """[1, heads, tokens, dim] from the [tokens, heads, dim] that attention gets."""
    if not _is_call(node, torch.transpose) or node.args[1:] != (0, 1):
        return None
    select: Any = node.args[0]
    return select.args[0] if _is_call(select, torch.select) and select.args[1:] == (0, 0) else None


def _untransposed(node: Any) -> Any:  # noqa: ANN401
    """[1, tokens, heads, dim] from [1, heads, tokens, dim]."""
    return node.args[0] if _is_call(node, torch.transpose) and node.args[1:] == (1, 2) else None


def _part(node: Any) -> tuple[fx.Node, int, int] | None:  # noqa: ANN401
    """The product that heads are a view of, the first of their numbers, and how many they are."""
    if not _is_call(node, torch.reshape) or not _is_call(node.args[0], torch.narrow):
        return None
    product, axis, start, size = node.args[0].args
    return (product, start, size) if axis == -1 else None


def _unviewed(x: Any) -> Any:  # noqa: ANN401
    """The source of a node that is a view with the same order of numbers."""
    while isinstance(x, fx.Node) and x.op == "call_function" and x.target in _VIEWS:
        x = x.args[0]
    return x


def _tensor(module: fx.GraphModule, node: Any) -> Tensor | None:  # noqa: ANN401
    """The constant that a node stands for; None: it is no constant."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = getattr(module, str(node.target), None)
    return value if isinstance(value, Tensor) else None


def _is_call(node: Any, target: object) -> bool:  # noqa: ANN401
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def _argument(node: Any, target: object) -> Any:  # noqa: ANN401
    """The first argument of a call of `target`; None: it is another node."""
    return node.args[0] if _is_call(node, target) and not node.kwargs else None


def _arguments(node: Any, target: object) -> Sequence[Any]:  # noqa: ANN401
    """The two arguments of a call of `target`; otherwise None twice."""
    if _is_call(node, target) and len(node.args) == 2 and not node.kwargs:
        return tuple(node.args)
    return (None, None)
