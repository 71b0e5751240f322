"""Traced networks on disk, so that a second start traces nothing again.

Decides: what a trace depends on (`digest`), and how a graph is written: as JSON in which weights
are names, so that reading a file runs none of it.

Invariants: a file that does not fit the network is a miss. A graph that cannot be written is not
stored.

Does not know: what operations compute; whether a stored graph is right, which its reader checks.
"""

import hashlib
import inspect
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

import kvcore.adapters.recurrent
from model.compile.stored_files import cache_dir, read_file, write_file

_MAX_CONSTANT = 4096  # numbers; a longer constant is none of the code
_SCALARS = (bool, int, float, str, type(None), torch.dtype)
_OURS = ("attention", "caches", "compile", "forward", "load")  # what a trace of a network runs


class GraphStore:
    """The file of one network's graph.

    Args:
        network: with our attention, its weights on their device.
        functions: what a graph may call beside PyTorch's operators, by name.
    """

    def __init__(
        self, network: PreTrainedModel, functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._tensors = dict(_tensors(network))
        self._functions = functions
        self._path = cache_dir() / "traces" / digest(network)

    def read(self) -> fx.GraphModule | None:
        """The stored graph, on the network's tensors; None: there is none that fits. O(nodes)."""
        try:
            return self._decoded(json.loads(read_file(self._path)))
        except Exception:  # noqa: BLE001  # a file may hold anything
            return None

    def write(self, module: fx.GraphModule) -> None:
        """Store a graph, if all of it can be written and the folder too. O(nodes)."""
        with suppress(OSError, ValueError):
            write_file(self._path, json.dumps(self._encoded(module)).encode())

    def _encoded(self, module: fx.GraphModule) -> dict[str, Any]:
        named = {function: name for name, function in self._functions.items()}
        states = {id(tensor): name for name, tensor in self._tensors.items()}
        nodes, constants = [], {}
        for node in module.graph.nodes:
            target: Any = node.target
            if node.op == "get_attr":
                tensor = getattr(module, target)
                constants[target] = states.get(id(tensor)) or _constant(tensor)
            elif node.op == "call_function":
                target = named.get(target) or _operator_name(target)
            elif node.op not in ("placeholder", "output"):
                raise ValueError(f"wanted no {node.op}")
            given = _encoded(node.args), _encoded(node.kwargs)
            sized, look = [*node.meta.get("sized", {}).items()], _look(node.meta.get("val"))
            nodes.append([node.op, node.name, target, *given, sized, look])
        return {"nodes": nodes, "constants": constants}

    def _decoded(self, stored: dict[str, Any]) -> fx.GraphModule:
        device = next(iter(self._tensors.values())).device
        root = nn.Module()
        for name, value in stored["constants"].items():
            known = isinstance(value, str)
            tensor = self._tensors[value] if known else _tensor(device, *value)
            if isinstance(tensor, nn.Parameter):
                setattr(root, name, tensor)
            else:
                root.register_buffer(name, tensor)
        graph = fx.Graph()
        copies: dict[str, fx.Node] = {}
        for op, name, called, args, kwargs, sized, look in stored["nodes"]:
            target = called
            if op == "call_function":
                target = self._functions.get(called) or _operator(called)
            given = _decoded(args, copies), _decoded(kwargs, copies)
            node = copies[name] = graph.create_node(op, target, *given, name=name)
            node.meta["sized"] = dict(sized)
            if look is not None:
                shape, stride, dtype = look
                kind = getattr(torch, dtype)
                node.meta["val"] = torch.empty_strided(shape, stride, dtype=kind, device="meta")
        graph.lint()
        return fx.GraphModule(root, graph)


def digest(network: PreTrainedModel) -> str:
    """A name for all that a trace depends on. O(modules) and the bytes of their source files.

    Versions, the configuration, the modes of PyTorch's functions, the class, source file and plain
    attributes of every module, how each tensor looks, the device, and our own sources. Not the
    weights: a trace sees no values.
    """
    facts: list[object] = [torch.__version__, transformers.__version__, platform.python_version()]
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # noqa: SLF001
    facts += [[type(mode).__qualname__ for mode in modes], torch.get_default_dtype()]
    facts += [json.dumps(network.config.to_dict(), default=str)]
    files = {*kvcore.adapters.recurrent.__path__}
    files |= {str(Path(__file__).parents[1] / name) for name in _OURS}
    sources = [file for folder in files for file in Path(folder).rglob("*.py")]
    for name, module in network.named_modules():
        own = vars(module)
        plain = sorted((key, own[key]) for key in own if isinstance(own[key], _SCALARS))
        called = [type(module), *(own[key] for key in ("forward",) if key in own)]
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]  # noqa: SLF001
        for each in [*called, *hooks]:
            facts.append(getattr(each, "__qualname__", type(each).__qualname__))
            with suppress(TypeError, OSError):
                sources.append(Path(inspect.getsourcefile(inspect.unwrap(each)) or ""))
        facts.append((name, plain))
    for name, tensor in _tensors(network):
        look = (tensor.shape, tensor.stride(), tensor.dtype, str(tensor.device))
        facts.append((name, type(tensor).__qualname__, *look))
        if tensor.device.type == "cuda":
            facts.append(torch.cuda.get_device_capability(tensor.device))
    found = hashlib.sha256(repr(facts).encode())
    for file in sorted({*sources}):
        with suppress(OSError):
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors that modules hold: parameters, buffers, plain attributes; each once."""
    met: set[int] = set()
    for prefix, module in network.named_modules():
        own = {**vars(module), **module._parameters, **module._buffers}  # noqa: SLF001
        for name, value in own.items():
            if isinstance(value, Tensor) and id(value) not in met:
                met.add(id(value))
                yield f"{prefix}.{name}", value


def _look(value: object) -> tuple[list[int], list[int], str] | None:
    if not isinstance(value, Tensor):
        return None
    shape, stride = [*value.shape], [*value.stride()]
    if not all(isinstance(number, int) for number in shape + stride):
        raise ValueError("wanted sizes that depend on no value")
    return shape, stride, str(value.dtype).removeprefix("torch.")


def _constant(tensor: Tensor) -> tuple[list[int], str, list[object]]:
    """A tensor that the network makes of numbers, by its values."""
    if tensor.numel() > _MAX_CONSTANT or isinstance(tensor, nn.Parameter):
        raise ValueError("wanted a weight of the network or a small constant")
    kind = str(tensor.dtype).removeprefix("torch.")
    return [*tensor.shape], kind, tensor.detach().cpu().flatten().tolist()


def _tensor(device: torch.device, shape: list[int], kind: str, values: list[object]) -> Tensor:
    return torch.tensor(values, dtype=getattr(torch, kind), device=device).reshape(shape)


_KINDS = (torch.dtype, torch.layout, torch.memory_format)


def _encoded(value: Any) -> Any:  # noqa: ANN401  # arguments of any operator
    """An argument as JSON; what has no word there is an object with one key, its kind."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, _KINDS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, slice):
        return {"slice": _encoded([value.start, value.stop, value.step])}
    if isinstance(value, tuple):
        return {"tuple": _encoded([*value])}
    if isinstance(value, list):
        return [_encoded(one) for one in value]
    if isinstance(value, dict):
        return {"dict": {name: _encoded(one) for name, one in value.items()}}
    if type(value) in (bool, int, float, str, type(None)):
        return value
    raise ValueError(f"wanted a plain argument, got {type(value).__qualname__}")


def _decoded(value: Any, nodes: Mapping[str, fx.Node]) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        return [_decoded(one, nodes) for one in value]
    if not isinstance(value, dict):
        return value
    [(kind, given)] = value.items()
    if kind == "node":
        return nodes[given]
    if kind == "torch":
        named = getattr(torch, given)
        if not isinstance(named, _KINDS):
            raise ValueError(f"wanted a dtype, got {given}")
        return named
    if kind == "device":
        return torch.device(given)
    if kind == "dict":
        return {name: _decoded(one, nodes) for name, one in given.items()}
    parts = _decoded(given, nodes)
    if kind not in ("slice", "tuple"):
        raise ValueError(f"wanted an argument, got {kind}")
    return tuple(parts) if kind == "tuple" else slice(*parts)


def _operator_name(target: object) -> str:
    if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001
        raise ValueError(f"wanted an operator of PyTorch, got {target}")  # noqa: TRY004
    return str(target)


def _operator(name: str) -> object:
    space, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)
