"""A traced network cut at its layers, the pieces compiled: piecewise compilation, as in vLLM.

Between the attention of two layers there are about a hundred small operations, each of which reads
and writes its whole tensor. `torch.compile` makes a few kernels of them. Pieces of similar layers
differ only in their weights: weights are arguments, so one compiled piece serves all such layers
and any number of tokens. A network of 28 layers costs three compilations.

Products of one input with several weights are one product (`joined_products.py`). LoRA adapters are
laid out behind the weights of their layers: compiled first, they leave the same weights together
for steps without.

Steps of two or four tokens may have pieces of their own with fused products (`few_rows.py`).

Decides: where the cuts are, and which pieces are equal: those with the same code once their tensors
are numbered.

Invariants: the pieces and the calls of attention are those of the traced network, in its order.
Compiled arithmetic rounds differently from PyTorch's operators: results are close, not identical.

Does not know: what the operations are, which requests a step has.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, fx, nn

import backends
from kvcore.adapters.recurrent import RecurrentPass
from model.attention.attention import Attending
from model.compile import artifacts
from model.compile.compile_processes import PIECES, compile_processes
from model.compile.few_rows import (
    FEW_ROWS,
    LEAST_WEIGHT,
    Kernels,
    few_row_sizes,
    fuse_few_rows,
)
from model.compile.jobs import do_all
from model.compile.joined_products import Expands, join_expands, joined
from model.compile.pieces import MOST, Piece, start_processes
from model.compile.stored_files import has_stored
from model.compile.traced_network import Mixing, TracedNetwork, with_near_attributes
from model.errors import UnsupportedModelError
from model.host import uncollected


def start_compiler(*, in_pieces: bool = False) -> None:
    """Load PyTorch's compiler and start its processes; or what stored pieces need. Once.

    A second, or a tenth of it if pieces are stored, of this network or another.

    Args:
        in_pieces: whether processes may compile a piece each (`compile_processes`).
    """
    if has_stored(PIECES):
        artifacts.prepare()
        return
    if in_pieces:
        compile_processes().start()
    if not compile_processes().are_running:
        start_processes()
    import_module("torch._inductor.compile_fx")


_LEAST = 2
_NEAR = 0.25
"""The relative error allowed of logits: bfloat16 rounds by up to 0.05, a mistake is about 1."""


class PiecewiseNetwork(TracedNetwork):
    """A traced network in compiled pieces; made by `compile_piecewise`.

    PyTorch compiles a size of one separately: so a single token runs through the traced network,
    unless `is_alone`, and a single row of logits is padded to two.

    Args:
        module: the pieces.
        plain: the traced network.
        few: pieces for steps of few tokens; None: there are none.
        sizes: the numbers of tokens that use `few` after `settle`; before that `FEW_ROWS`.
        kernels: that steps of few tokens call; None: there are none.
        is_alone: whether the pieces serve all steps; then the caller keeps steps within `limits`.

    Attributes:
        limits: the most tokens, and the most rows, of the pieces.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        plain: TracedNetwork,
        few: fx.GraphModule | None = None,
        sizes: tuple[int, ...] = (),
        kernels: Kernels | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        super().__init__(module, plain.terms, plain.recurrent)
        self._plain = plain
        self._few = None if few is None else TracedNetwork(few, plain.terms, plain.recurrent)
        self._sizes: tuple[int, ...] = FEW_ROWS
        self._settled_sizes = sizes
        self._kernels = kernels
        self.limits = (MOST, MOST)
        self._is_alone = is_alone
        self._is_submitting = False

    def logits(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Tensor,
        paged: Attending,
        states: RecurrentPass | None = None,
        adapter_slots: Tensor | None = None,
    ) -> Tensor:
        """See `TracedNetwork.logits`."""
        if self._is_submitting:
            paged, states = _NoAttention(), None
        return super().logits(input_ids, position_ids, rows, paged, states, adapter_slots)

    def _choose(self, num_tokens: int, rows: Tensor) -> tuple[Callable[..., Tensor], Tensor]:
        most_tokens, most_rows = self.limits
        serves = 1 < num_tokens <= most_tokens and len(rows) <= most_rows
        if not (serves or self._is_alone):
            return self._plain.module.forward, rows
        if len(rows) < _LEAST:
            rows = nn.functional.pad(rows, (0, _LEAST - len(rows)))
        if self._few is not None and num_tokens in self._sizes:
            return self._few.module.forward, rows
        return self._run, rows

    @property
    def has_few_row_pieces(self) -> bool:
        """Whether steps of few tokens have pieces of their own. O(1)."""
        return self._few is not None

    @property
    def pieces(self) -> list[Piece]:
        """The compiled pieces, each once. O(pieces)."""
        modules = [self.module] if self._few is None else [self.module, self._few.module]
        children = (child for module in modules for child in module.children())
        return [child for child in children if isinstance(child, Piece)]

    def submit(self, run: Callable[[], object]) -> None:
        """Let other processes compile the pieces, and kernels between them. A few passes.

        Does nothing if no process waits. Nothing attends in these passes, since its kernels may not
        be there yet.

        Args:
            run: calls all pieces.
        """
        processes, device = compile_processes(), self._device
        if not processes.can_compile(device):
            return
        for piece in self.pieces:
            piece.processes = processes
        self._is_submitting = True
        noting = nullcontext(()) if self._kernels is None else self._kernels.noting()
        try:
            with noting as noted:
                run()
                if self._few is not None:
                    for count in FEW_ROWS:
                        self._few_logits(self._few, count)
        finally:
            self._is_submitting = False
            for piece in self.pieces:
                piece.processes = None
        halves = [*noted][::2], [*noted][1::2]
        waits = [processes.submit(partial(do_all, half), device) for half in halves if half]
        for wait in filter(None, waits):
            wait()

    def settle(self) -> None:
        """End compilation: all that will run has run. A few passes of few tokens.

        The pieces for few tokens are dropped if their logits differ.
        """
        self._sizes = self._settled_sizes
        if self._few is not None and not self._few_are_near(self._few):
            self._few = None
        for piece in self.pieces:
            piece.settle()
        tokens, rows = zip(*[piece.limits for piece in self.pieces], strict=True)
        self.limits = min(tokens), min(rows)

    def _few_are_near(self, few: TracedNetwork) -> bool:
        """Whether steps of few tokens give logits close to the network's, on its own device."""
        for count in FEW_ROWS:
            wanted, got = (self._few_logits(one, count).float() for one in (self._plain, few))
            if not (got - wanted).norm() <= _NEAR * wanted.norm():
                return False
        return True

    def _few_logits(self, network: TracedNetwork, count: int) -> Tensor:
        """Those of a step of `count` tokens."""
        ids = torch.arange(1, count + 1, device=self._device)[None] * 7
        with torch.no_grad():
            return network.logits(ids, ids * 5, torch.arange(count, device=ids.device), Mixing())

    @property
    def _device(self) -> torch.device:
        return next(iter(self.module.parameters())).device


class _NoAttention:
    """Gives what looks like the results of attention."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Zeros."""
        del layer, key, terms, chosen
        return query.new_zeros((*query.shape[:2], value.shape[2]))

    def choose(self, layer: int, query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
        """The first token, each time."""
        del layer, weights, key
        return query.new_zeros((len(query), count), dtype=torch.int32)


@uncollected()
def compile_piecewise(
    traced: TracedNetwork,
    backend: str = "inductor",
    kernels: Kernels | None = None,
    least: int | None = None,
    behind: Collection[Tensor] = (),
    expands: Expands | None = None,
    *,
    is_alone: bool = False,
) -> PiecewiseNetwork:
    """Cut a traced network into pieces; they are compiled when they first run.

    Run it first with several tokens and a different number of rows: PyTorch would treat a size of
    one, and two equal sizes, as fixed. With `kernels`, run it once more with `FEW_ROWS` tokens.

    Args:
        traced: is not changed.
        backend: of `torch.compile`.
        kernels: for steps of few tokens; None: such steps run like all others.
        least: the smallest weight, in numbers, whose product they compute; None: where they gain.
        behind: weights that are laid out behind all others of their product.
        expands: add what adapters add; None: the operations of the trace do.
        is_alone: see `PiecewiseNetwork`.

    Raises:
        UnsupportedModelError: a piece depends on a number that is no size of its tensors.
    """
    source = joined(traced.module, behind)
    if expands is not None:
        join_expands(source, expands)
    few = (
        None
        if kernels is None
        else fuse_few_rows(source, kernels, LEAST_WEIGHT if least is None else least)
    )
    whole = _cut(source, backend, () if expands is None else expands[:3])
    cuts = () if kernels is None else (kernels.multiply, kernels.attend_rotated)
    if few is None:
        return PiecewiseNetwork(whole, traced, is_alone=is_alone)
    return PiecewiseNetwork(whole, traced, _cut(few, backend, cuts), few_row_sizes(few), kernels)


def _cut(
    source: fx.GraphModule, backend: str, cuts: Sequence[Callable[..., Tensor]]
) -> fx.GraphModule:
    cutter = _Cutter(source, backend, cuts)
    for node in source.graph.nodes:
        cutter.take(node)
    return cutter.finished()


class _Cutter:
    """Builds the graph of pieces, node by node; what a layer or `cuts` call separates them."""

    def __init__(
        self, source: fx.GraphModule, backend: str, cuts: Sequence[Callable[..., Tensor]]
    ) -> None:
        self._source = source
        self._between = {operator.call, *cuts}
        self._backend = backend
        self._root = nn.Module()
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._numbers: dict[fx.Node, tuple[int, int]] = {}  # which size, and its factor
        self._cut: list[fx.Node] = []
        self._found: dict[tuple[str, str], str] = {}

    def take(self, node: fx.Node) -> None:
        """Take the next node of the source."""
        if node.op == "call_function" and node.target is operator.mul and self._is_number(node):
            size, factor = node.args
            self._numbers[node] = self._numbers[size][0], factor  # type: ignore[index,assignment]
        elif node.op == "call_function" and node.target not in self._between:
            self._cut.append(node)
            return
        elif node.op in ("call_function", "output"):
            self._end_piece()
        elif node.name in _PLACES:
            self._numbers[node] = _PLACES[node.name], 1
        elif node.op == "get_attr":
            setattr(self._root, str(node.target), getattr(self._source, str(node.target)))
        self._copies[node] = self._graph.node_copy(node, lambda one: self._copies[one])

    def finished(self) -> fx.GraphModule:
        """The graph of all pieces."""
        module = fx.GraphModule(self._root, self._graph)
        return with_near_attributes(module)

    def _is_number(self, node: fx.Node) -> bool:
        return all(one in self._numbers for one in node.all_input_nodes)

    def _end_piece(self) -> None:
        nodes, self._cut = self._cut, []
        if not nodes:
            return
        inside = set(nodes)
        outside = [one for node in nodes for one in node.all_input_nodes if one not in inside]
        inputs = [one for one in dict.fromkeys(outside) if one not in self._numbers]
        outputs = [node for node in nodes if not inside.issuperset(node.users)]
        graph = self._operations(nodes, inputs, outputs)
        sized = [one.meta.get("sized", {}) for one in inputs]
        look = graph.python_code("self").src, repr([*map(self._look, inputs)])
        name = self._found.setdefault(look, f"piece_{len(self._found)}")
        if not hasattr(self._root, name):
            module = fx.GraphModule(nn.Module(), graph)
            setattr(self._root, name, Piece(module, sized, self._backend))
        called = self._graph.call_module(name, tuple(self._copies[one] for one in inputs))
        for place, output in enumerate(outputs):
            self._copies[output] = self._graph.call_function(operator.getitem, (called, place))

    def _look(self, node: fx.Node) -> tuple[object, ...]:
        """Return what compiled code depends on of an input: its dtype and the sizes that stay."""
        sized = node.meta.get("sized", {})
        value = node.meta.get("val")
        if node.op == "get_attr":
            value = getattr(self._source, str(node.target))
        if not isinstance(value, Tensor):
            return (sized,)
        sizes = [None if dim in sized else int(size) for dim, size in enumerate(value.shape)]
        return sized, sizes, value.dtype

    def _operations(
        self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> fx.Graph:
        """The nodes as a function, with new names, so that equal pieces have equal code."""
        graph = fx.Graph()
        copies = {one: graph.placeholder(f"x{place}") for place, one in enumerate(inputs)}
        used = {one for node in nodes for one in node.all_input_nodes if one in self._numbers}
        for one in sorted(used, key=self._numbers.__getitem__):
            copies[one] = self._number(graph, inputs, copies, *self._numbers[one])
        for place, node in enumerate(nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"n{place}")
        graph.output(tuple(copies[one] for one in outputs))
        return graph

    def _number(
        self,
        graph: fx.Graph,
        inputs: Sequence[fx.Node],
        copies: dict[fx.Node, fx.Node],
        place: int,
        factor: int,
    ) -> fx.Node:
        """A multiple of a size, read from a tensor of that length."""
        for one in inputs:
            for dim, its_place in one.meta.get("sized", {}).items():
                if its_place == place:
                    size = graph.call_method("size", (copies[one], dim))
                    return (
                        size if factor == 1 else graph.call_function(operator.mul, (size, factor))
                    )
        raise UnsupportedModelError(
            f"compile: wanted a tensor as long as there are {_NAMES[place]} in each piece"
        )


_NAMES = ("num_tokens", "num_rows")
_PLACES = {name: place for place, name in enumerate(_NAMES)}
