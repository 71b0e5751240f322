"""Tensor parallelism: a network split over several ranks, each with some heads and columns.

Decides: how each style of Transformers' tensor-parallel plan (the network's own `tp_plan`) becomes
parts of weights and plain collectives, so that tracing, compilation and CUDA graphs see ordinary
operations; that KV heads are replicated if there are fewer than ranks. The scheme is Megatron-LM's
(Shoeybi et al. 2019, arXiv:1909.08053): one all-reduce after each attention and each MLP.

On GPUs of one host that can write each other's memory, a small sum is one kernel on the network's
stream (`sum_kernels.py`); larger ones are collectives of NCCL, on another stream.

Invariants: every rank computes the same logits, to the bit, because it receives the same sums; an
unknown style or size is refused, never guessed.

Does not know: caches (they follow from the heads that a probe sees), requests, blocks.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _symmetric_memory as symmetric_memory
from transformers import PreTrainedModel

import model.ranks
from model.errors import RankLostError, UnsupportedModelError
from model.ranks.ranks import Ranks

__all__ = ["Cut", "Sums", "check_cut", "shard_network"]

Cut = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""This rank's parts of two whole matrices whose product is added to the weight of a linear layer:
[rank, in_features] and [out_features, rank]."""

_OPS = torch.ops._c10d_functional  # noqa: SLF001  # collectives that can be traced
_KERNEL_SIZES = (2, 4, 8)  # the numbers of ranks whose sums may be a kernel
_MOST_RANKS = 16  # the most that an error names
_WHOLE = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"}
_GATHERED = {"colwise_gather_output", "colwise_rep"}
_SUMMED = {"rowwise", "rowwise_rep", "rowwise_split_input"}
_HOOKED = {"moe_tp_experts", "all_reduce", "moe_identity_expert"}
_WHOLE_EXPERTS = "grouped_gemm"
_OF_PARAMETERS = {"colwise", "rowwise", "packed_colwise", "packed_rowwise", _WHOLE_EXPERTS}
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_FUSED = {"qkv_proj", "query_key_value"}
_GROUPS = "num_key_value_groups"


def shard_network(network: PreTrainedModel, ranks: Ranks, sums: "Sums") -> dict[str, Cut]:
    """Keep only this rank's part of a network. O(parameters).

    Modules that compute a part of a sum, or of an output, get a hook that completes it.

    Args:
        network: whole, equal on every rank; its modules are changed as the plan says.
        ranks: the processes that share it.
        sums: all-reduces on the network's device.

    Returns:
        How each linear layer was cut, by its path; those that are whole on every rank are not here.

    Raises:
        UnsupportedModelError: it has no plan, or the plan does not fit the number of ranks.
    """
    sharding = _Sharding(network, _plan_of(network, ranks), ranks, sums)
    sharding.run()
    return sharding.cuts


def _plan_of(network: PreTrainedModel, ranks: Ranks) -> Mapping[str, str]:
    """Return Transformers' plan; its plan for experts overrides the one for tensors."""
    plan: Mapping[str, str] | None = getattr(network, "tp_plan", None)
    experts: Mapping[str, str] | None = getattr(network, "ep_plan", None)
    name = type(network).__name__
    if ranks.expert_parallel:
        if not experts:
            raise UnsupportedModelError(
                f"--expert-parallel: Transformers has no expert-parallel plan for {name}"
            )
        return {**(plan or {}), **experts}
    if not plan:
        raise UnsupportedModelError(f"--tp: Transformers has no tensor-parallel plan for {name}")
    return plan


def check_cut(network: PreTrainedModel, ranks: Ranks) -> None:
    """Run the split network once; every rank calls it. One forward pass of two tokens.

    Raises:
        UnsupportedModelError: Transformers' plan does not fit its own network.
    """
    tokens = torch.tensor([[0, 1]], device=network.device)
    try:
        with ranks.detecting_loss(), torch.inference_mode():
            network(input_ids=tokens, use_cache=False)
    except RankLostError:
        raise
    except Exception as error:  # any error of a network with unexpected tensors
        line = str(error).strip().split("\n")[0]
        raise UnsupportedModelError(
            f"--tp: {type(network).__name__} does not run when it is split by Transformers' plan "
            f"over {ranks.size} processes: {line}"
        ) from error


class Sums:
    """All-reduces sums over the ranks; every rank creates it at the same time.

    Args:
        device: of the sums.
        ranks: the processes.

    Attributes:
        group: the name of the process group.
    """

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self.group: str = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._rank, self._size = ranks.rank, ranks.size
        self._shared = torch.empty(0, dtype=torch.int64, device=device)
        has_kernels = device.type == "cuda" and ranks.size in _KERNEL_SIZES
        shared = _shared_memory(device, self.group) if has_kernels else None
        if ranks.all_reduce_min(int(shared is not None)) and shared is not None:
            self._shared = shared

    def __call__(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' parts, on every rank."""
        terms = (self._shared, self._rank, self._size, self.group)
        done: Tensor = torch.ops.kvcore_ranks.sum(part.contiguous(), *terms)
        return done


class _Sharding:
    def __init__(
        self, network: PreTrainedModel, plan: Mapping[str, str], ranks: Ranks, sums: Sums
    ) -> None:
        self._network, self._plan, self._ranks, self._sums = network, plan, ranks, sums
        self.cuts: dict[str, Cut] = {}
        config = network.config.get_text_config()
        self._is_sparse = any(getattr(config, "activation_sparsity_pattern", None) or ())
        # Gemma 4's layers differ: {number of a layer: its configuration}
        is_mixed = getattr(config, "is_heterogeneous", False)
        layers = dict(enumerate(config.per_layer_config)) if is_mixed else {None: config}
        counts = {
            int(getattr(layer, "num_attention_heads", ranks.size)) for layer in layers.values()
        }
        if len(counts) > 1:  # Dots 3
            raise UnsupportedModelError(
                f"--tp: num_attention_heads: wanted as many in every layer, got {sorted(counts)}"
            )
        (self._num_heads,) = counts
        self._kv_heads = {
            number: int(getattr(layer, "num_key_value_heads", None) or self._num_heads)
            for number, layer in layers.items()
        }

    def run(self) -> None:
        self._check_heads()
        for name, module in list(self._network.named_modules()):
            style = self._plan.get(_generic(name))
            if style is not None:
                self._cut_module(name, module, style)
            for own, parameter in list(module.named_parameters(recurse=False)):
                style = self._plan.get(_generic(f"{name}.{own}"))
                if style in _OF_PARAMETERS:
                    self._cut_parameter(name, module, own, parameter, style)
                elif style is not None and style not in _WHOLE:
                    raise self._unknown(f"{name}.{own}", style)
        groups: object = self._num_heads // self._ranks.size  # query heads per KV head
        for name, module in self._network.named_modules():
            if hasattr(module, _GROUPS) and self._repeats(name):
                setattr(module, _GROUPS, groups)

    def _num_kv_heads(self, name: str) -> int:
        """Return the KV heads of the layer that a module or parameter is in. O(name)."""
        if None in self._kv_heads:
            return self._kv_heads[None]
        number = re.search(r"\.(\d+)\.", name)
        return self._kv_heads[int(number[1]) if number else 0]

    def _repeats(self, name: str) -> bool:
        """Return True if several ranks have the same KV head of a module's layer. O(name)."""
        return self._num_kv_heads(name) < self._ranks.size and bool(self._cut_projections)

    @property
    def _cut_projections(self) -> set[str]:
        """The last names of the split layers that compute keys. O(plan)."""
        cut = {name.rsplit(".", 1)[-1] for name, way in self._plan.items() if way == "colwise"}
        return cut & {"k_proj", *_FUSED}

    def _check_heads(self) -> None:
        if self._is_sparse:  # Gemma 3n
            raise UnsupportedModelError(
                "--tp: activation_sparsity_pattern: wanted layers that compute an activation from "
                "itself, these compare it with all others, which Transformers' plan splits"
            )
        if not self._cut_projections:
            return
        is_fused = not self._cut_projections.isdisjoint(_FUSED)
        counts = sorted({*self._kv_heads.values()})

        def fits(size: int) -> bool:  # with fewer KV heads than ranks, several have the same
            return self._num_heads % size == 0 and all(
                count % size == 0 or (size % count == 0 and not is_fused) for count in counts
            )

        shown = " or ".join(map(str, counts))
        heads = f"the network's {self._num_heads} attention heads and {shown} KV heads"
        self._check_size(heads, fits)

    def _check_size(self, what: str, fits: Callable[[int], bool], flag: str = "--tp") -> None:
        """Refuse a number of ranks that does not fit, and name those that do. O(1)."""
        if not fits(self._ranks.size):
            sizes = ", ".join(str(size) for size in range(1, _MOST_RANKS + 1) if fits(size))
            raise UnsupportedModelError(
                f"{flag}: wanted one of {sizes}, which fit {what}, got {self._ranks.size}"
            )

    def _cut_module(self, name: str, module: nn.Module, style: str) -> None:
        if style in _WHOLE:
            return
        if style in _HOOKED:
            self._hook(module, style)
        elif style == "ep_dispatch_experts" and hasattr(module, "num_experts"):
            self._share_experts(name, module)
        elif isinstance(module, nn.Embedding) and style == "embedding_rowwise":
            self._replace(name, _RowwiseEmbedding(module, self._ranks, self._sums))
        elif isinstance(module, nn.Linear) and style in {"colwise", "packed_colwise"}:
            for own, parameter in list(module.named_parameters(recurse=False)):
                self._cut_parameter(name, module, own, parameter, style)
        elif isinstance(module, nn.Linear) and style in _GATHERED:
            self._gather_outputs(name, module)
        elif isinstance(module, nn.Linear) and style in _SUMMED:
            self._sum_outputs(name, module, splits=style == "rowwise_split_input")
        else:
            raise self._unknown(name, style)

    def _cut_parameter(
        self, name: str, module: nn.Module, own: str, parameter: Tensor, style: str
    ) -> None:
        part_of = partial(self._part_of, f"{name}.{own}", style=style)
        module.register_parameter(own, _parameter(part_of(parameter)))
        if own == "weight" and isinstance(module, nn.Linear):
            is_inward = style.endswith("rowwise")
            self.cuts[name] = lambda down, up: (
                (part_of(down), up) if is_inward else (down, part_of(up))
            )

    def _sum_outputs(self, name: str, layer: nn.Linear, *, splits: bool) -> None:
        """Give each rank some columns of the input; `splits`: it is whole on every rank."""
        self._cut_parameter(name, layer, "weight", layer.weight, "rowwise")
        bias: Tensor | None = layer.bias
        if bias is not None and not self._ranks.leads:  # the sum has it once
            layer.bias = _parameter(torch.zeros_like(bias))
        if splits:
            width = layer.weight.shape[1]
            start = self._ranks.rank * width

            def narrow(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
                return (args[0].narrow(-1, start, width),)

            layer.register_forward_pre_hook(narrow)
        self._hook(layer, "all_reduce")

    def _gather_outputs(self, name: str, layer: nn.Linear) -> None:
        """Give each rank some rows of the output, such as the logits, and gather them.

        Rows of zeros pad the last rank's part if the number of rows is not divisible.
        """
        size, group, num_rows = self._ranks.size, self._sums.group, layer.out_features
        part_of = partial(_padded_part, ranks=self._ranks)
        for own, parameter in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(own, _parameter(part_of(parameter)))
        self.cuts[name] = lambda down, up: (down, part_of(up))

        def gather(_module: nn.Module, _args: object, part: Tensor) -> Tensor:
            parts = _all_gather(part.reshape(1, -1), size, group)
            whole = parts.view(size, *part.shape).movedim(0, -2).flatten(-2)
            return whole[..., :num_rows]

        layer.register_forward_hook(gather)

    def _hook(self, module: nn.Module, style: str) -> None:
        sums, size = self._sums, self._ranks.size

        def sum_up(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            return sums(output)

        def divide(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (args[0] / size, *args[1:])

        if style == "moe_identity_expert":
            module.register_forward_pre_hook(divide)
        else:
            module.register_forward_hook(sum_up)

    def _share_experts(self, name: str, module: nn.Module) -> None:
        """Give a rank some whole experts, which it runs on all tokens; the results are summed.

        A token's choice of an expert elsewhere becomes one that `module` skips, with weight 0, as
        in Transformers' `AllReduceEP`.
        """
        count, size = int(module.num_experts), self._ranks.size  # type: ignore[arg-type]
        what = f"the {count} experts of {name}"
        self._check_size(what, lambda size: count % size == 0, "--expert-parallel")
        count //= size
        start = self._ranks.rank * count
        module.num_experts, module._is_expert_parallel = count, True  # type: ignore[assignment]  # noqa: SLF001

        def choose(
            _module: nn.Module, args: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            hidden, chosen, weights = args
            own = chosen - start
            is_elsewhere = (own < 0) | (own >= count)
            return (
                hidden,
                own.masked_fill(is_elsewhere, count),
                weights.masked_fill(is_elsewhere, 0),
            )

        module.register_forward_pre_hook(choose)
        self._hook(module, "moe_tp_experts")

    def _part_of(self, name: str, tensor: Tensor, style: str) -> Tensor:
        """Return this rank's part of a parameter."""
        if style.endswith("rowwise"):
            if tensor.dim() == 1:
                return tensor  # added once, after the sum
            return self._part(name, tensor, -1, pieces=2 if style == "packed_rowwise" else 1)
        if style == _WHOLE_EXPERTS:
            return self._part(name, tensor, 0)
        dim = max(tensor.dim() - 2, 0)
        if style == "packed_colwise":
            return self._part(name, tensor, dim, pieces=2 if tensor.dim() > 1 else 1)
        if name.split(".")[-2] in _KEYS_AND_VALUES and self._repeats(name):
            count = self._num_kv_heads(name)
            return tensor.chunk(count, dim)[self._ranks.rank * count // self._ranks.size].clone()
        return self._part(name, tensor, dim)

    def _part(self, name: str, tensor: Tensor, dim: int, *, pieces: int = 1) -> Tensor:
        """Return this rank's part along a dimension, of each of `pieces` consecutive pieces."""
        size, rank = self._ranks.size, self._ranks.rank
        length = tensor.shape[dim]
        what = f"{length // pieces}, a size of {name}"
        self._check_size(what, lambda size: length % (size * pieces) == 0)
        parts = [piece.chunk(size, dim)[rank] for piece in tensor.chunk(pieces, dim)]
        return torch.cat(parts, dim) if pieces > 1 else parts[0].clone()

    def _replace(self, name: str, module: nn.Module) -> None:
        owner, _, own = name.rpartition(".")
        setattr(self._network.get_submodule(owner), own, module.train(mode=False))

    def _unknown(self, name: str, style: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"--tp: Transformers' plan splits {name} by {style!r}, which is not supported here"
        )


class _RowwiseEmbedding(nn.Module):
    """A table split by rows: the other ranks give zeros, and the results are summed.

    The other operations of the network's kind of table, such as Gemma's factor, stay.
    """

    def __init__(self, whole: nn.Embedding, ranks: Ranks, sums: Sums) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.part = whole
        self.part.weight = _parameter(_padded_part(whole.weight, ranks))
        self._start = ranks.rank * self.part.weight.shape[0]
        self._sums = sums

    @property
    def weight(self) -> Tensor:
        """The rows of this rank. O(1)."""
        return self.part.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens: `[...]` to `[..., embedding_dim]`."""
        places = tokens - self._start
        is_mine = (places >= 0) & (places < self.part.weight.shape[0])
        found: Tensor = self.part(torch.where(is_mine, places, 0))
        return self._sums(found * is_mine[..., None])


def _padded_part(whole: Tensor, ranks: Ranks) -> Tensor:
    length = -(-whole.shape[0] // ranks.size)
    part = whole.detach()[ranks.rank * length : (ranks.rank + 1) * length]
    padded = part.new_zeros((length, *whole.shape[1:]))
    padded[: len(part)] = part
    return padded


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _shared_memory(
    device: torch.device,
    group: Any,  # noqa: ANN401  # a name, of a type that not all versions of torch have
) -> Tensor | None:
    """Return memory that the GPUs of a group write into; None: no access, or no Triton."""
    with suppress(RuntimeError, ImportError):
        kernels = model.ranks.sum_kernels
        shared = symmetric_memory.empty(kernels.shared_words(), dtype=torch.int64, device=device)
        addresses = symmetric_memory.rendezvous(shared, group).buffer_ptrs
        kernels.begin(shared, addresses)
        return shared
    return None


def _summed(part: Tensor, group: str) -> Tensor:
    reduce: Callable[[Tensor, str, str], Tensor] = _OPS.all_reduce
    done: Tensor = _OPS.wait_tensor(reduce(part.contiguous(), "sum", group))
    return done


def _sum(part: Tensor, shared: Tensor, rank: int, size: int, group: str) -> Tensor:
    """Return the sum over the ranks, by the faster of the two ways: see `Sums`."""
    if not len(shared) or not model.ranks.sum_kernels.takes(part, size):
        return _summed(part, group)
    done: Tensor = model.ranks.sum_kernels.add_up(part, shared, rank, size)
    return done


def _sum_shape(part: Tensor, *_: object) -> Tensor:
    return torch.empty_like(part)


_library = torch.library.Library("kvcore_ranks", "DEF")  # type: ignore[no-untyped-call]
_library.define("sum(Tensor part, Tensor shared, int rank, int size, str group) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("sum", _sum, "CPU")  # type: ignore[no-untyped-call]
_library.impl("sum", _sum, "CUDA")  # type: ignore[no-untyped-call]
_library.impl("sum", _sum_shape, "Meta")  # type: ignore[no-untyped-call]


def _all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """Gather `[1, ...]` of each rank into `[size, ...]`."""
    gather: Callable[[Tensor, int, str], Tensor] = _OPS.all_gather_into_tensor
    done: Tensor = _OPS.wait_tensor(gather(tensor.contiguous(), size, group))
    return done


def _generic(name: str) -> str:
    """Return the name of a module as plans spell it: `*` for the number of a layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
