"""What is sent to a process that compiles: a function, and what it is called with.

Decides: that operations are sent with the names of operators, and tensors as shapes, strides and
dtypes.

Does not know: what a job compiles, which process does it.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import backends

Job = Callable[[], object]
"""Compiles something and stores it; for another process to find by its name."""


def write(job: Job, device: torch.device) -> bytes:
    """A job as bytes, of which `run` makes it again. O(job).

    Args:
        job: gets tensors without memory for those that it holds.
        device: the current one while it is done; a GPU without a number is the caller's.

    Raises:
        Exception: it holds what only this process knows.
    """
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return backends.pickled((job, device), _reduced)


def run(content: bytes) -> None:
    """Do a job. O(job).

    Raises:
        Exception: the job's.
    """
    job, device = pickle.loads(content)  # noqa: S301  # from the caller
    if device.type == "cuda":
        torch.cuda.set_device(device)
    job()


def do_all(jobs: Sequence[Job]) -> None:
    """Do one job after another. O(jobs)."""
    for job in jobs:
        job()


def _reduced(value: object) -> Any:  # noqa: ANN401  # as Python has it
    """Of tensors how they look, of graphs their operations, of operators the name."""
    if isinstance(value, Tensor):
        if value.storage_offset():
            raise ValueError("wanted tensors that begin where their memory does")
        return _seen, (tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, fx.GraphModule):
        return _module, (_operations(value.graph),)
    if isinstance(value, torch._ops.OpOverload):  # noqa: SLF001
        return _operator, (str(value),)
    return NotImplemented


class _Number(int):
    """Stands for the node with that number."""


def _operations(graph: fx.Graph) -> list[tuple[str, Any, str, Any, Any]]:
    numbers = {node: _Number(number) for number, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            node.target,
            node.name,
            *fx.map_arg((node.args, node.kwargs), numbers.__getitem__),
        )
        for node in graph.nodes
    ]


def _module(operations: Sequence[tuple[str, Any, str, Any, Any]]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def node_of(value: Any) -> Any:  # noqa: ANN401  # arguments of any operator
        return nodes[value] if isinstance(value, _Number) else value

    for op, target, name, *given in operations:
        args, kwargs = fx.node.map_aggregate(tuple(given), node_of)
        nodes.append(graph.create_node(op, target, args, kwargs, name))
    return fx.GraphModule(nn.Module(), graph)


def _operator(name: str) -> object:
    space, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def _seen(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor that looks so, without memory."""
    with FakeTensorMode():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
