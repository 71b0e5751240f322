"""Batch-invariant mode: the output of a request does not depend on the others in its batch.

vLLM calls it batch invariance, SGLang deterministic inference (He et al. 2025, "Defeating
nondeterminism in LLM inference"). Sampling is per request already; what depends on the batch are
attention kernels that split work by its size, and matrix products, whose libraries sum in another
order for another number of rows.

Decides: attention runs in its batch-invariant mode with each token as a separate query, and
every linear layer computes its rows one by one, as if each token were alone: on a GPU in tiles that
do not depend on their number (`invariant_kernels.py`), as are means and sums of rows. There both
are operators, so that a trace has them, and steps are captured as CUDA graphs.

Invariants: a row's bits depend on its token and the tokens before it alone: not on other requests,
and not on chunked prefill, prefix cache hits, preemption or its draft tokens. Products of
other kinds that mix rows in one call (grouped experts) are refused.

Does not know: what a step computes, sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import backends
import model.forward
from model.attention.batch import StepTensors
from model.compile.piecewise import PiecewiseNetwork, compile_piecewise
from model.compile.traced_network import TracedNetwork
from model.errors import UnsupportedModelError
from model.forward.lora import Adapters
from model.forward.network import PagedNetwork
from model.load.images import NoImages
from model.load.loader import LoadedModel


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = model.forward.invariant_kernels.multiply(x, weight, bias)
    return product


def _add_up(x: Tensor, is_mean: bool) -> Tensor:  # noqa: FBT001  # as operators have it
    total: Tensor = model.forward.invariant_kernels.add_up(x, is_mean)
    return total


def _product_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    del bias
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _total_of(x: Tensor, is_mean: bool) -> Tensor:  # noqa: FBT001
    del is_mean
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


_library = torch.library.Library("kvcore_rows", "DEF")  # type: ignore[no-untyped-call]
for _name, _arguments, _run, _shape in (
    ("multiply", "Tensor x, Tensor weight, Tensor? bias=None", _multiply, _product_of),
    ("add_up", "Tensor x, bool is_mean", _add_up, _total_of),
):
    _library.define(f"{_name}({_arguments}) -> Tensor")  # type: ignore[no-untyped-call]
    for _device in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter
        _library.impl(_name, _run, _device)  # type: ignore[no-untyped-call]
    _library.impl(_name, _shape, "Meta")  # type: ignore[no-untyped-call]

_MIXED = frozenset({"addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm", "mm"})


class BatchInvariantNetwork(PagedNetwork):
    """A network whose rows do not depend on each other's number.

    If it is compiled, the pieces serve every step: a compiled kernel adds up a row in the same way
    for any number of rows, but two kernels may add it up in different ways.

    Args:
        model: see `PagedNetwork`.
        backend: see `PagedNetwork`.
        most_tokens: the most tokens of a step, and the most rows of logits.

    Raises:
        UnsupportedModelError: the backend has no batch-invariant attention, more than two ranks
            share the network, or it has recurrent layers.
    """

    def __init__(self, model: LoadedModel, backend: backends.Backend, most_tokens: int) -> None:
        if "batch_invariant" not in backend.capabilities.features:
            raise UnsupportedModelError(
                f"batch_invariant: backend {backend.name} has no batch-invariant attention"
            )
        if model.ranks is not None and model.ranks.size > 2:
            raise UnsupportedModelError(
                f"batch_invariant: wanted a --tp of at most 2, got {model.ranks.size}: collectives "
                "add the parts of more processes in an order that depends on the number of tokens"
            )
        super().__init__(model, BatchInvariantBackend(backend))  # type: ignore[arg-type]
        if self.layout.states:
            raise UnsupportedModelError(
                "batch_invariant: this model has recurrent layers, which compute a prompt in other "
                "steps than a token; leave --batch-invariant out"
            )
        self._in_tiles = backend.device.type == "cuda"
        self._most_tokens = most_tokens
        self._has_images = not isinstance(model.images, NoImages)

    def trace(self) -> None:
        """Trace the network on a GPU, row by row."""
        if not self._in_tiles:
            raise UnsupportedModelError("batch_invariant: a CPU computes each row by itself")
        with RowByRow(in_tiles=True):
            super().trace()

    def _cut(self, traced: TracedNetwork, adapters: Adapters | None) -> PiecewiseNetwork:
        """Cut the traced network into pieces; the compiler adds up rows between products."""
        if self._has_images or adapters is not None:
            kind = "images" if self._has_images else "adapters"
            raise UnsupportedModelError(
                f"batch_invariant: compiled pieces would round steps with {kind} differently"
            )
        return compile_piecewise(_fusible(traced), is_alone=True)

    def _compile(
        self, step: StepTensors, few: StepTensors, adapters: Adapters | None = None
    ) -> Tensor:
        """Compile the network, and check that the pieces are batch-invariant."""
        config = import_module("torch._inductor.config")
        with config.patch(deterministic=True):  # kernels are not chosen by their times
            logits = super()._compile(step, few, adapters)
        pieces = cast("PiecewiseNetwork", self._traced[False])
        most = min(pieces.limits)
        if most < self._most_tokens:
            raise UnsupportedModelError(
                f"batch_invariant: wanted a max_num_batched_tokens of at most {most} in compiled "
                f"pieces, got {self._most_tokens}"
            )
        check_rows(pieces, self.device, self.vocab_size)
        return logits

    def logits(self, step: StepTensors, *, backend: backends.Backend | None = None) -> Tensor:
        """Return the logits of a step; a linear layer takes as many products as it has rows."""
        if not isinstance(self._traced.get(False), PiecewiseNetwork):
            with RowByRow(in_tiles=self._in_tiles):
                return super().logits(step, backend=backend)
        return super().logits(_padded(step) if step.input_ids.shape[1] == 1 else step)


def _fusible(traced: TracedNetwork) -> TracedNetwork:
    """Return the same with PyTorch's sums and means, which a compiler fuses."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.module.graph, {}))
    for node in graph.nodes:
        if node.target is torch.ops.kvcore_rows.add_up.default:
            rows, is_mean = node.args
            node.target = torch.mean if is_mean else torch.sum
            node.args, node.kwargs = (rows, [-1], False), {"dtype": torch.float32}
    return TracedNetwork(fx.GraphModule(traced.module, graph), traced.terms, traced.recurrent)


def _padded(step: StepTensors) -> StepTensors:
    """Return a step of one token, and a second token that belongs to no sequence."""
    return replace(
        step,
        input_ids=functional.pad(step.input_ids, (0, 1)),
        position_ids=functional.pad(step.position_ids, (0, 1)),
        paged=tuple(
            replace(one, slot_mapping=functional.pad(one.slot_mapping, (0, 1), value=-1))
            for one in step.paged
        ),
    )


class _Alone:
    """A pass in which each token attends to itself."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Return a sum of the token's query, key and value."""
        del chosen
        places = torch.arange(query.shape[1], device=query.device) % key.shape[1]
        width = value.shape[2]
        return query[..., :width] * terms.scale + key[:, places, :width] + value[:, places] + layer

    def choose(self, layer: int, query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
        """Return the first token."""
        del layer, weights, key
        return query.new_zeros((len(query), count), dtype=torch.int32)


_TRIED = (2, 3, 17, 300)


def check_rows(traced: TracedNetwork, device: torch.device, vocab_size: int) -> None:
    """Raise unless a row has the same bits in steps of several sizes. A few passes.

    Raises:
        UnsupportedModelError: a row has other bits in one of them.
    """
    ids = torch.arange(1, max(_TRIED) + 1, device=device)[None] * 7919 % vocab_size
    with torch.no_grad():
        whole = traced.logits(ids, ids % 37, torch.arange(max(_TRIED), device=device), _Alone())
        for count in _TRIED:
            some, rows = ids[:, -count:], torch.arange(count, device=device)
            if not torch.equal(traced.logits(some, some % 37, rows, _Alone()), whole[-count:]):
                raise UnsupportedModelError(
                    "batch_invariant: a row of logits depends on the number of rows"
                )


class BatchInvariantBackend:
    """A backend whose attention is always batch-invariant."""

    def __init__(self, inner: backends.Backend) -> None:
        self._inner = inner
        # Of no latents, whose products with heads would have rows of all tokens.
        self.capabilities = replace(inner.capabilities, shared_prefix_worth=None, max_latent_dim=0)

    def warmup(
        self, layers: Sequence[backends.LayerCall], *, max_num_seqs: int, max_query_len: int
    ) -> None:
        """Compile the kernels for these layers, in the calls that this backend makes."""
        calls = [replace(one, terms=replace(one.terms, batch_invariant=True)) for one in layers]
        most = max(max_num_seqs, min(max_query_len, _AT_ONCE))  # each token is a sequence
        self._inner.warmup(calls, max_num_seqs=most, max_query_len=1)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def paged_attention(
        self,
        query: Tensor,
        cache: backends.KVCache,
        batch: backends.PagedBatch,
        terms: backends.AttentionTerms,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention, each token as a sequence of one."""
        terms = replace(terms, batch_invariant=True)
        out = query.new_empty(*query.shape[:2], cache.v.shape[3]) if out is None else out
        for rows, some in _token_by_token(batch):
            self._inner.paged_attention(query[rows], cache, some, terms, out=out[rows])
        return out

    def attend_chosen(
        self,
        query: Tensor,
        cache: backends.KVCache,
        batch: backends.PagedBatch,
        chosen: Tensor,
        terms: backends.AttentionTerms,
    ) -> Tensor:
        """Compute attention over chosen tokens; the backend takes each token by itself anyway."""
        terms, sparse = replace(terms, batch_invariant=True), cast("Any", self._inner)
        out: Tensor = sparse.attend_chosen(query, cache, batch, chosen, terms)
        return out


_AT_ONCE = 512
"""Query tokens of a call: a GPU keeps up to 32 parts of each."""
_KEPT = "token by token"


def _token_by_token(batch: backends.PagedBatch) -> list[tuple[slice, backends.PagedBatch]]:
    """Return the rows as calls, each token a sequence that ends with it. O(tokens * blocks).

    Once for all layers, where the batch keeps it.
    """
    kept = {} if batch.kept is None else batch.kept
    if _KEPT not in kept:
        kept[_KEPT] = _calls_of(batch)
    return cast("list[tuple[slice, backends.PagedBatch]]", kept[_KEPT])


def _calls_of(batch: backends.PagedBatch) -> list[tuple[slice, backends.PagedBatch]]:
    """Return calls with shapes that depend on no value; surplus tokens are empty sequences."""
    if batch.max_query_len == 1:
        return [(slice(None), batch)]
    ends, last = batch.query_start_loc[1:], batch.query_start_loc[-1]
    places = torch.arange(batch.num_tokens + 1, dtype=ends.dtype, device=ends.device)
    owners = torch.searchsorted(ends, places[:-1], right=True).clamp(max=len(ends) - 1)
    behind = ends[owners] - places[:-1]  # rows of its sequence from it on
    seq_lens = (batch.seq_lens[owners] - behind + 1).masked_fill(behind <= 0, 0)
    calls = []
    for first in range(0, batch.num_tokens, _AT_ONCE):
        rows = slice(first, min(first + _AT_ONCE, batch.num_tokens))
        here = (last - first).clamp(min=0)
        some = replace(
            batch,
            query_start_loc=torch.minimum(places[: rows.stop - first + 1], here),
            seq_lens=seq_lens[rows],
            block_table=batch.block_table[owners[rows]],
            slot_mapping=batch.slot_mapping[rows],
            max_query_len=1,
            shared_prefix=None,
            kept=None,
        )
        calls.append((rows, some))
    return calls


_BY_COLUMNS = frozenset({"__matmul__", "addmm", "matmul", "mm"})
_SUMS = frozenset({"mean", "sum"})
_ROUNDED = frozenset({"cos", "exp", "gelu", "mish", "sigmoid", "silu", "sin", "softplus", "tanh"})
"""Functions of one number whose last bit depends on how many numbers there are: PyTorch computes
the rest that does not fill a processor's vector in another way."""


class RowByRow(TorchFunctionMode):
    """Computes linear layers, and functions that are not exact, row by row.

    Args:
        in_tiles: as on a GPU, by `invariant_kernels.py`.
    """

    def __init__(self, *, in_tiles: bool = False) -> None:
        super().__init__()
        self._in_tiles = in_tiles

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        given, in_tiles = kwargs or {}, self._in_tiles
        name = getattr(func, "__name__", "")
        linear = _linear_in_tiles if in_tiles else _linear
        if func is functional.linear:
            return linear(*args, **given)  # type: ignore[arg-type]
        if name in _BY_COLUMNS and not given and (found := _by_columns(*args)) is not None:
            return linear(*found)
        if in_tiles and name in _SUMS and isinstance(args[0], Tensor):
            return _summed(name, func, *args, **given)  # type: ignore[arg-type]
        if not in_tiles and name in _ROUNDED and isinstance(args[0], Tensor) and args[0].ndim > 1:
            return _each_row(func, args[0], args[1:], given)
        if name in _MIXED:
            raise UnsupportedModelError(
                f"batch_invariant: this model computes rows of several tokens in one "
                f"{func.__name__}; leave --batch-invariant out"
            )
        return func(*args, **given)


def _by_columns(*args: object) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return the operands of the linear layer that these are, or None if they are of another kind.

    Args:
        args: [bias,] rows, and a weight whose columns are the outputs.
    """
    *bias, rows, weight = args
    if not isinstance(rows, Tensor) or not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    if rows.ndim < 2 or not weight.is_floating_point():
        return None
    if not bias:
        return rows, weight.t(), None
    (added,) = bias
    return (rows, weight.t(), added) if isinstance(added, Tensor) and added.ndim == 1 else None


def _each_row(
    func: Callable[..., object],
    rows: Tensor,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Tensor:
    """Call a function of each number for one row after the other."""
    flat = rows.reshape(-1, rows.shape[-1])
    found = [func(row, *args, **kwargs) for row in flat]
    return torch.stack(found).reshape(rows.shape) if found else rows  # type: ignore[arg-type]


def _summed(
    name: str,
    func: Callable[..., object],
    rows: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002 - as PyTorch has it
    **kwargs: object,
) -> object:
    """Compute a sum or mean on a GPU, whose order PyTorch chooses by the number of rows."""
    dims = [] if dim is None else [dim] if isinstance(dim, int) else [*dim]
    if (
        dims not in ([-1], [rows.ndim - 1])
        or kwargs
        or not rows.is_floating_point()
        or rows.dtype.itemsize > 4
    ):
        return func(rows, dim, keepdim, **kwargs) if dims else func(rows, **kwargs)
    total: Tensor = torch.ops.kvcore_rows.add_up(rows, name == "mean").to(rows.dtype)
    return total.unsqueeze(-1) if keepdim else total


def _linear_in_tiles(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.kvcore_rows.multiply(rows, weight, bias)
    return product


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    out = flat.new_empty((flat.shape[0], weight.shape[0]))
    for row, into in zip(flat, out, strict=True):
        torch.mv(weight, row, out=into)
    if bias is not None:
        out += bias
    return out.reshape(*rows.shape[:-1], weight.shape[0])
