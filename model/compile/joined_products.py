"""Products of one input as one product, and what LoRA adapters add to its parts as one launch.

Products of one input with several weights (queries, keys and values; gate and up) become one
product, which uses a GPU better: the weights are laid out one after another in one tensor, and the
network's own become views of it, so nothing is stored twice. The first halves of adapters are laid
out behind the weights of their layers, the second halves like the parts of the product. There one
kernel adds all adapters' parts, and applies the gate if that is all that happens to them.

Does not know: layers, which kernel it is.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

import model.compile
from model.compile.few_rows import (
    Norm,
    Unrun,
    attend_rotated,
    attentions,
    gated_half,
    norm_of,
    rotation_of,
    sum_of,
)


def joined(source: fx.GraphModule, behind: Collection[Tensor] = ()) -> fx.GraphModule:
    """Return a copy in which the products of one input are one product. O(nodes)."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    module = Unrun(source, graph)
    groups: dict[object, list[Any]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _is_product(node.target):
            values: list[Any] = [getattr(module, str(one.target), None) for one in node.args[1:]]
            if all(isinstance(value, nn.Parameter) and value.is_contiguous() for value in values):
                kind = (
                    node.target,
                    node.args[0],
                    *[(value.dtype, value.shape[1:]) for value in values],
                )
                groups.setdefault(kind, []).append(node)
    last = {id(weight) for weight in behind}
    for number, nodes in enumerate(nodes for nodes in groups.values() if len(nodes) > 1):
        nodes.sort(key=lambda node: id(getattr(module, node.args[1].target)) in last)
        if len({node.args[1] for node in nodes}) == len(nodes):
            _join(module, nodes, f"joined_{number}")
    return module


def _is_product(target: object) -> bool:
    """Return True if it multiplies rows with a weight; in batch-invariant mode too."""
    return target is nn.functional.linear or str(target) == "kvcore_rows.multiply.default"


def _join(module: fx.GraphModule, nodes: Sequence[Any], name: str) -> None:
    """Replace several products by one."""
    graph, first = module.graph, nodes[0]  # no other of them is computed earlier
    with graph.inserting_before(first):
        tensors = [
            _join_tensors(module, parts, f"{name}_{place}")
            for place, parts in enumerate(zip(*[node.args[1:] for node in nodes], strict=True))
        ]
        product = graph.call_function(first.target, (first.args[0], *tensors))
        start = 0
        for node in nodes:
            size = len(getattr(module, node.args[1].target))
            part = graph.call_function(torch.narrow, (product, -1, start, size))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
            start += size
    for node in nodes:
        graph.erase_node(node)


def _join_tensors(module: fx.GraphModule, parts: Sequence[Any], name: str, dim: int = 0) -> fx.Node:
    """Return a parameter with others one after another, which become views of it."""
    own = [getattr(module, part.target) for part in parts]
    whole = nn.Parameter(laid_out([one.data for one in own], dim), requires_grad=False)
    sizes = [one.shape[dim] for one in own]
    for one, part in zip(own, whole.data.split(sizes, dim), strict=True):  # type: ignore[no-untyped-call]
        one.data = part
    setattr(module, name, whole)
    return module.graph.get_attr(name)


def laid_out(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return tensors one after another in one tensor: without a copy if they already lie so."""
    first = tensors[0]
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    size = [*first.shape]
    size[dim] = sum([one.shape[dim] for one in tensors])
    for each in tensors:
        place = each.data_ptr(), each.untyped_storage().data_ptr(), each.stride()
        if place != (at, storage, first.stride()) or (dim and size[dim] > first.stride(0)):
            return torch.cat([*tensors], dim)
        at += each.shape[dim] * each.stride(dim) * each.itemsize
    return first.as_strided(size, first.stride(), first.storage_offset())


class Expands(NamedTuple):
    """The functions that replace what adapters add.

    Attributes:
        expand: see `lora_kernels.expand_parts`.
        expand_normed: see `lora_kernels.expand_normed`.
        attend_rotated: see `lora_kernels.attend_rotated`.
        fits: True if parts of these sizes can share a launch.
    """

    expand: Callable[..., Tensor]
    expand_normed: Callable[..., Tensor]
    attend_rotated: Callable[..., Tensor]
    fits: Callable[[Sequence[int]], bool]


def expands_for(device: torch.device) -> Expands | None:
    """Return the functions for a device, imported on first use; None: there are none."""
    if device.type != "cuda":
        return None
    kernels = model.compile.lora_kernels
    return Expands(
        kernels.expand_parts, kernels.expand_normed, kernels.attend_rotated, kernels.fits
    )


class _Part(NamedTuple):
    """The term that an adapter adds to a part of a product.

    Attributes:
        node: the call that adds it.
        product: with the part from column `start` on.
        inner: with the first halves' product from column `inner_start` on.
        size: columns of the part.
    """

    node: fx.Node
    product: fx.Node
    start: int
    inner: fx.Node
    inner_start: int
    size: int


def join_expands(module: fx.GraphModule, expands: Expands) -> None:
    """Let one call add what adapters add to the parts of each product. O(nodes).

    Args:
        module: of `joined`; is changed.
        expands: to call.
    """
    groups: dict[object, list[_Part]] = {}
    norms: dict[fx.Node, tuple[fx.Node, Norm]] = {}
    for node in module.graph.nodes:
        norm = norm_of(module, node)
        if norm is not None:
            norms.setdefault(norm.x, (node, norm))
        if str(node.target) == "kvcore_lora.expand.default":
            part = _part_of(node)
            kind = part.product, part.inner, *node.args[3:]
            groups.setdefault(kind, []).append(part)
    for number, found in enumerate(groups.values()):
        parts = sorted(found, key=lambda part: part.start)
        columns = len(getattr(module, str(parts[0].node.args[2].target)))  # type: ignore[union-attr]
        follow = all(
            (after.start, after.inner_start) == (one.start + one.size, one.inner_start + columns)
            for one, after in pairwise(parts)
        )
        fits = follow and expands.fits([part.size for part in parts])
        for place, some in enumerate([parts] if fits else [[part] for part in found]):
            call = _join_parts(module, found[place].node, some, expands, f"expand_{number}_{place}")
            if len(some) == 1:
                _join_norm(module, call, norms, expands)
    for node in attentions(module.graph):
        rotation = rotation_of(module, node)
        if rotation is not None and rotation.product.target is expands.expand:
            given = *rotation.product.args, *rotation.given
            attend_rotated(module.graph, node, expands.attend_rotated, given)
    module.graph.eliminate_dead_code()


def _part_of(node: fx.Node) -> _Part:
    product, start = _source(node.args[0])
    inner, inner_start = _source(node.args[1])
    return _Part(node, product, start, inner, inner_start, node.meta["val"].shape[-1])


def _source(node: Any) -> tuple[fx.Node, int]:  # noqa: ANN401
    """Return the tensor that a node is a part of, and its first column there."""
    is_part = node.target is torch.narrow and node.args[1] == -1
    return (node.args[0], node.args[2]) if is_part else (node, 0)


def _join_parts(
    module: fx.GraphModule,
    first: fx.Node,
    parts: Sequence[_Part],
    expands: Expands,
    name: str,
) -> fx.Node:
    """Replace calls by one; of two parts that a gate follows, by one that applies it."""
    graph, own = module.graph, [part.node for part in parts]
    slots, rank = own[0].args[3:]
    sizes = tuple(part.size for part in parts)
    with graph.inserting_before(first):
        up = _join_tensors(module, [node.args[2] for node in own], name, 1)
        given = parts[0].product, parts[0].start, parts[0].inner, parts[0].inner_start
        call = graph.call_function(expands.expand, (*given, up, slots, rank, sizes))
        call.meta = dict(own[0].meta)
        for part in parts if len(parts) > 1 else ():
            start = part.start - parts[0].start
            half = graph.call_function(torch.narrow, (call, -1, start, part.size))
            half.meta = dict(part.node.meta)
            part.node.replace_all_uses_with(half)
    if len(parts) == 1:
        own[0].replace_all_uses_with(call)
    for node in own:
        graph.erase_node(node)
    gated = gated_half(call, sum(sizes))
    if gated is not None:
        with graph.inserting_before(gated):
            whole = graph.call_function(expands.expand, call.args, {"is_gated": True})
        whole.meta = dict(gated.meta)
        gated.replace_all_uses_with(whole)
    return call


def _join_norm(
    module: fx.GraphModule,
    call: fx.Node,
    norms: Mapping[fx.Node, tuple[fx.Node, Norm]],
    expands: Expands,
) -> None:
    """Add to the residual, and norm the sum, in the same call, where nothing else is done."""
    graph, added = module.graph, sum_of(call, call)
    if added is None or added[0] not in norms:
        return
    total, residual = added
    end, norm = norms[total]
    with graph.inserting_before(total):
        scale = graph.get_attr(str(norm.scale.target))
        given = *call.args, residual, scale, norm.eps
        both = graph.call_function(expands.expand_normed, given)
        both.meta = {"sized": {place + 1: size for place, size in total.meta["sized"].items()}}
        for place, node in enumerate((total, end)):
            one = graph.call_function(torch.select, (both, 0, place))
            one.meta = dict(node.meta)
            node.replace_all_uses_with(one)
