"""The network on its paged caches: tensors of a step in, logits out.

Decides: that a network uses our attention, and what its layers store.

Invariants: the caches fit the layers exactly, because a probe measured them; a pass writes the
slots of its step and no others.

Does not know: requests, sampling, why there are `num_blocks` blocks, how a step was planned.
"""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import backends
import kvcore
from kvcore.adapters.recurrent import RecurrentPass, Run, StateStep, cache_argument
from model.attention.attention import PagedPass, logits_of
from model.attention.batch import StepTensors
from model.attention.compressed import Completed, PagedEntries, none_complete
from model.attention.latents import absorb
from model.attention.own_code import has_alibi
from model.attention.rope import rope_switch
from model.attention.shared_prefix import Worth
from model.caches.kv_caches import KVCaches, Scales
from model.caches.layout import IndexShape, plan_layout
from model.compile.compile_processes import compile_processes
from model.compile.few_rows import kernels_for
from model.compile.joined_products import expands_for
from model.compile.piecewise import PiecewiseNetwork, compile_piecewise
from model.compile.traced_network import TracedNetwork, trace_network
from model.errors import InvalidArgumentError, UnsupportedModelError
from model.forward.lora import Adapter, Adapters, read_adapter
from model.load.loader import LoadedModel
from model.load.probes import check_tokens_alone, probe_layers
from model.load.recurrence import probe_recurrence
from model.sample.sampler import passes_for

_POSITIONS = 4096  # if the model does not give a number
_LEAST_RANK = 16  # of adapters that are loaded later


class _Noting:
    """A pass that stores nothing and notes how each layer attends."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[int, torch.dtype, backends.AttentionTerms]] = {}
        self.indexes: dict[int, int] = {}  # the heads of a layer's index
        self.counts: dict[int, int] = {}  # the tokens that are chosen for a layer
        self.entries = self

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Note the call; return zeros."""
        del key
        self.calls[layer] = (query.shape[1], query.dtype, terms)
        if chosen is not None:
            self.counts[layer] = chosen.shape[1]
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def choose(self, layer: int, query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
        """Note the call; return zeros."""
        del weights
        self.indexes[layer] = query.shape[1]
        return key.new_zeros((len(key), count), dtype=torch.int32)

    def complete(self, layer: int, parts: Tensor, rate: int, *, is_index: bool) -> Completed:
        """Return that no entry is complete."""
        del layer, is_index
        return none_complete(parts, rate)

    def store_entries(self, layer: int, rows: Tensor, *, is_index: bool) -> None:
        """Do nothing: no entry is complete."""

    def choose_entries(self, layer: int, query: Tensor, weights: Tensor, count: int) -> None:
        """Note the call."""
        del weights, count
        self.indexes[layer] = query.shape[1]


class PagedNetwork:
    """A loaded model, its caches and the backend that works on them.

    Args:
        model: its attention is replaced by the paged one for its whole life.
        backend: has the caches on its device, and computes on them.

    Attributes:
        rope: chooses rotary factors that change with the length; None: they never change.
        adapters: LoRA adapters that requests may choose; None: there are none.
        mode: how it runs, in words, while `warm_up.py` prepares it; None: not begun, or done.

    Raises:
        UnsupportedModelError: the network cannot run with a paged cache, or not on this backend.
    """

    def __init__(self, model: LoadedModel, backend: backends.Backend) -> None:
        self._network = model.network
        self._is_whole = model.ranks is None  # ranks trace all together, or none does
        self._cuts = model.cuts
        self._backend = backend
        self.rope = rope_switch(self._network)
        absorb(self._network, backend.capabilities.max_latent_dim)
        self._recurrence = probe_recurrence(self._network, backend)
        self._cache_argument = cache_argument(self._network)
        states = self._recurrence.shapes
        shapes = probe_layers(self._network, backend.device, keeps_states=bool(states))
        longest = model.max_positions or _POSITIONS
        check_tokens_alone(self._network, backend.device, longest, self.rope)
        for layer, shape in shapes.items():
            if shape.dtype not in backend.capabilities.dtypes:
                raise UnsupportedModelError(
                    f"backend {backend.name}: layer {layer} is {shape.dtype}, wanted one of "
                    f"{', '.join(map(str, backend.capabilities.dtypes))}"
                )
            index = shape.index if shape.entries is None else shape.entries.index
            if index is not None:
                _check_index(backend, layer, index)
            if shape.value_dim is not None and shape.head_dim > backend.capabilities.max_latent_dim:
                raise UnsupportedModelError(
                    f"backend {backend.name}: layer {layer} stores one row of {shape.head_dim} "
                    f"numbers for key and value, and this backend stores rows of at most "
                    f"{backend.capabilities.max_latent_dim}; use --backend triton or --backend "
                    f"numba, without --batch-invariant"
                )
        self.layout = plan_layout([*shapes.values()], [*shapes], states)
        self._scales: Scales = ()
        self.caches = KVCaches((), ())
        self.adapters: Adapters | None = None
        self._traced: dict[bool, TracedNetwork] = {}  # by whether a step has adapters
        self.mode: str | None = None

    @property
    def backend(self) -> backends.Backend:
        """Computes its attention. O(1)."""
        return self._backend

    @property
    def device(self) -> torch.device:
        """The device of a step's tensors. O(1)."""
        return self._backend.device

    @property
    def scales(self) -> Scales:
        """Those of quantised caches; empty: there are none, or all are 1. O(1)."""
        return self._scales

    @property
    def num_parameters(self) -> int:
        """The number of parameters. O(parameters)."""
        return self._network.num_parameters()

    @property
    def vocab_size(self) -> int:
        """The width of its logits. O(1)."""
        size: int = self._network.config.get_text_config().vocab_size
        return size

    @property
    def num_blocks(self) -> int:
        """Blocks of the caches, the null block included; 0 if there are no caches. O(1)."""
        return self.caches.storages[0].shape[0] if self.caches.storages else 0

    @property
    def blocks_per_state(self) -> int:
        """Blocks of a sequence's state in the caches; 0: it keeps none. O(states)."""
        return 1 + max([state.piece for state in self.caches.states.values()], default=-1)

    @property
    def can_replay_states(self) -> bool:
        """True if steps can be replayed from a CUDA graph. O(1)."""
        return not self.layout.states or self._recurrence.takes_slots

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Allocate caches of `num_blocks` blocks; earlier caches are freed first. O(their bytes).

        Raises:
            InvalidArgumentError: the device has too little memory.
        """
        self.free()
        self.caches = KVCaches.allocate(
            self.layout, num_blocks, block_size, self.device, self._scales
        )

    def check_stores(self, dtype: torch.dtype) -> None:
        """Raise unless the network and the backend support quantised caches of this dtype. O(1).

        Raises:
            UnsupportedModelError: one of them does not.
        """
        if has_alibi(self._network):
            raise UnsupportedModelError(
                f"kv_dtype: {type(self._network).__name__} has ALiBi, and caches of {dtype} cannot "
                f"hold its positions: leave out --kv-dtype"
            )
        if dtype not in self._backend.capabilities.quantised:
            known = ", ".join(map(str, self._backend.capabilities.quantised)) or "none"
            raise UnsupportedModelError(
                f"kv_dtype: backend {self._backend.name} has no caches of {dtype}, it has {known}"
            )
        if self.layout.beside:
            raise UnsupportedModelError(
                "kv_dtype: wanted layers without compressed keys, whose parts would lose too much"
            )

    def store_as(self, dtype: torch.dtype, scales: Scales) -> None:
        """Use quantised caches from now on; none are allocated yet. O(num_layers).

        Args:
            dtype: of a stored element.
            scales: of each layer; empty: all are 1.
        """
        layers = [replace(layer, dtype=dtype) for layer in self.layout.own_layers]
        self.layout = plan_layout(layers, [*self.layout.numbers], self.layout.states)
        self._scales = scales

    def free(self) -> None:
        """Free the caches. O(1)."""
        self.caches = KVCaches((), ())

    def trace(self) -> None:
        """Run the traced operations without modules from now on: the same bits, faster.

        Costs a trace and a few forward passes; less if an earlier start has left its trace on disk.

        Raises:
            UnsupportedModelError: it cannot be traced, and why; it runs as before.
        """
        if self.rope is not None:
            raise UnsupportedModelError(
                "tracing: its rotary factors depend on the length of each request"
            )
        if self.layout.beside:
            raise UnsupportedModelError(
                "tracing: how many compressed keys a step makes depends on its positions"
            )
        own = trace_network(self._network, self.device, is_stored=self._is_whole)
        traced = {False: own}
        if self.adapters is not None:
            with self.adapters.filled():
                traced[True] = trace_network(self._network, self.device, self.adapters)
        self._traced = traced

    def compile(self, step: StepTensors, few: StepTensors) -> Tensor:
        """Run a traced network in compiled pieces from now on: results close to before, faster.

        Takes seconds per kind of layer, less if compiled code is cached on disk.

        Args:
            step: run once, to compile; several tokens, and a different number of rows.
            few: the same with 4 tokens, if such steps have separate pieces.

        Returns:
            The logits of `step`.

        Raises:
            UnsupportedModelError: it cannot be compiled, and why; it runs as before.
        """
        before = self._traced
        if not before:
            raise UnsupportedModelError("compile: wanted a network that was traced first")
        try:
            if self.adapters is not None:  # first: see `piecewise.py`
                self._compile(step.adapted(), few.adapted(), self.adapters)
            logits = self._compile(step, few)
        except Exception as error:  # a compiler may raise any error
            self._traced = before
            reason = " ".join((str(error).strip() or type(error).__name__).split("\n")[:2])
            raise UnsupportedModelError(
                f"{type(self._network).__name__}: it cannot be compiled: {reason}"
            ) from error
        return logits

    def _compile(
        self, step: StepTensors, few: StepTensors, adapters: Adapters | None = None
    ) -> Tensor:
        """Compile what steps like `step` run in; its logits.

        Args:
            step: see `compile`.
            few: see `compile`; with adapters it runs for the kernels of few rows.
            adapters: that the step has.
        """
        adapted = adapters is not None
        pieces = self._cut(self._traced[adapted], adapters)
        self._traced = {**self._traced, adapted: pieces}
        with warnings.catch_warnings(action="ignore"):  # of the compiler
            steps = (step, few) if adapted or pieces.has_few_row_pieces else (step,)
            if self._is_whole:  # each rank decides alone, and further passes have collectives
                pieces.submit(lambda: [self.logits(each) for each in steps])
            logits, *_ = [self.logits(each) for each in steps]
        pieces.settle()
        return logits

    def _cut(self, traced: TracedNetwork, adapters: Adapters | None) -> PiecewiseNetwork:
        """Return a traced network in pieces, to be compiled by their first steps."""
        if adapters is not None:
            expands = expands_for(self.device)
            return compile_piecewise(traced, behind=adapters.downs, expands=expands)
        return compile_piecewise(traced, kernels=kernels_for(self.device, self._network.dtype))

    def warm_up(
        self, calls: Sequence[backends.LayerCall], max_num_seqs: int, max_query_len: int
    ) -> None:
        """Compile the kernels of all layers: seconds to a minute.

        Args:
            calls: of the layers.
            max_num_seqs: the most sequences of a step.
            max_query_len: the most query tokens of a sequence.
        """
        if calls:
            self._backend.warmup(calls, max_num_seqs=max_num_seqs, max_query_len=max_query_len)

    def warm_up_draws(self) -> None:
        """Compile the kernels of all draws: seconds, in another process if one waits."""
        passes = passes_for(self.device.type)
        warm_up = partial(passes.warm_up, self.vocab_size, self._network.dtype, self.device)
        processes = compile_processes()
        if self.device.type == "cuda" and processes.can_compile(self.device):
            wait = processes.submit(warm_up, self.device)
            if wait is not None:
                wait()
        warm_up()

    def layer_calls(self) -> tuple[backends.LayerCall, ...]:
        """Return the calls of the layers to the backend, each kind once. One pass of a few tokens.

        Operations on states are compiled in it; they read and write no block.
        """
        noting = _Noting()
        for lengths in ((1, 1), (1, 16)) if self.layout.states else ((1,),):
            tokens = torch.zeros((1, sum(lengths)), dtype=torch.int64, device=self.device)
            states = None
            if self.layout.states:
                runs = [
                    Run(start, length, num_drafts=0, has_state=True)
                    for start, length in enumerate(lengths)
                ]
                nowhere = tokens.new_full((len(runs), self.blocks_per_state), -1)
                step = StateStep(tuple(runs), nowhere, None)
                states = self._recurrence.passing(self.caches.states, step)
            with torch.inference_mode():
                self._network(
                    input_ids=tokens,
                    position_ids=tokens,
                    use_cache=False,
                    paged=noting,
                    **self._named(states),
                )
        calls: dict[object, backends.LayerCall] = {}
        worth = self.shared_worth()
        for index, (num_q_heads, dtype, asked) in sorted(noting.calls.items()):
            layer = self.layout.numbers[index]
            cache, shape = self.caches.layers[layer], self.layout.layers[layer]
            shapes = [(tensor.shape, tensor.stride()) for tensor in cache.tensors]
            own, num_chosen = self.caches.indexes.get(layer), noting.counts.get(index, 0)
            terms = replace(asked, window=shape.window)
            if shape.entries is not None:  # it attends as to chosen tokens
                terms, chosen = replace(asked, window=None), shape.entries.index
                own = self.caches.indexes.get(self.layout.beside[layer][-1])
                num_chosen = 1 if chosen is None else chosen.count
            index_heads = noting.indexes.get(index, 0)
            kind = (num_q_heads, dtype, *shapes, cache.layout, terms.window, num_chosen)
            calls.setdefault(
                (*kind, index_heads, terms.soft_cap, terms.sinks is None),
                backends.LayerCall(
                    num_q_heads,
                    dtype,
                    cache,
                    terms,
                    shared_prefix=worth[self.layout.places[layer][0]] is not None,
                    num_chosen=num_chosen,
                    index=None if own is None else backends.IndexCall(index_heads, own),
                ),
            )
        return tuple(calls.values())

    def shared_worth(self) -> tuple[Worth | None, ...]:
        """Return for each group when reading a shared prefix once pays; None: never. O(layers).

        It never does for layers that do not see all tokens.
        """
        least = self._backend.capabilities.shared_prefix_worth
        found: list[Worth | None] = [None] * len(self.layout.windows)
        for layer, (group, _) in zip(self.layout.layers, self.layout.places, strict=True):
            if least and not (layer.window or layer.chunk or layer.slot.is_latent):
                found[group] = Worth(*least, layer.token_bytes)
        return tuple(found)

    def allow_adapters(
        self, most: int | None, max_rank: int | None, adapters: Sequence[Adapter]
    ) -> None:
        """Add LoRA adapters, and make room for others. A pass of few tokens.

        Args:
            most: at once; None: no others than these.
            max_rank: of an adapter; None: that of these, or 16 if there may be others.
            adapters: of this network.

        Raises:
            InvalidArgumentError: two have one name, there are too many, a rank is too large, or the
                device has too little memory.
            UnsupportedModelError: one cannot be applied to this network exactly.
        """
        products = {path: one for each in adapters for path, one in each.products.items()}
        ranks = [len(one.down) for each in adapters for one in each.products.values()]
        rank = max_rank or max([*ranks, 0 if most is None else _LEAST_RANK])
        paths = None if most is not None else products.keys()
        self.adapters = Adapters(self._network, most or len(adapters), rank, paths, self._cuts)
        for adapter in adapters:
            self.adapters.add(adapter)

    def read_adapter(self, text: str) -> Adapter:
        """Read a LoRA adapter of this network, `NAME=PATH`; from any thread. O(its bytes).

        Raises:
            InvalidArgumentError: it is not of this form.
            ModelNotFoundError: it is not there, or broken.
            UnsupportedModelError: it cannot be applied to this network exactly.
        """
        return read_adapter(text, self._network, self._cuts)

    def add_adapter(self, adapter: Adapter, in_use: Iterable[kvcore.Namespace] = ()) -> None:
        """Let requests ask for an adapter. O(its layers), between two steps.

        Raises:
            InvalidArgumentError: another one has its name, there are too many, its rank is too
                large, or none are allowed.
            UnsupportedModelError: it cannot be applied to this network exactly.
        """
        if self.adapters is None:
            raise InvalidArgumentError("lora: wanted --max-loras, without which none is loaded")
        self.adapters.add(adapter, in_use)

    def logits(self, step: StepTensors, *, backend: backends.Backend | None = None) -> Tensor:
        """Compute a step: write its keys and values, return [num_sampled, vocab_size].

        Args:
            step: on the network's device.
            backend: computes attention; None: the network's own backend.
        """
        slots = step.adapter_slots
        traced = None if step.images is not None else self._traced.get(slots is not None)
        paged = PagedPass(
            backend or self._backend, self.caches, self.layout, step.paged, step.ahead
        )
        if self.layout.beside:
            entries = PagedEntries(paged.backend, self.caches, self.layout, step.paged)
            paged = replace(paged, entries=entries)
        states = self._states_of(step)
        # Tensors of inference mode would make the pieces compile again.
        is_compiled = isinstance(traced, PiecewiseNetwork)
        adapters = nullcontext() if self.adapters is None else self.adapters.choosing(slots, states)
        with torch.no_grad() if is_compiled else torch.inference_mode(), adapters:
            if traced is not None:
                return traced.logits(
                    step.input_ids, step.position_ids, step.logit_rows, paged, states, slots
                )
            with nullcontext() if self.rope is None else self.rope.choosing(step.is_long):
                return logits_of(
                    self._network,
                    step.input_ids,
                    step.position_ids,
                    step.logit_rows,
                    paged=paged,
                    **self._named(states),
                    **({} if step.images is None else step.images(step.input_ids)),
                )

    def _states_of(self, step: StepTensors) -> RecurrentPass | None:
        """Return the states that a step reads and writes; None: the network has none."""
        if not self.layout.states:
            return None
        states = step.states
        if states is None:  # a prompt that stores nothing
            nowhere = step.input_ids.new_full((1, self.blocks_per_state), -1)
            run = Run(0, step.input_ids.shape[1], 0, has_state=False)
            states = StateStep((run,), nowhere, None)
        return self._recurrence.passing(self.caches.states, states)

    def _named(self, states: RecurrentPass | None) -> dict[str, RecurrentPass]:
        """Return the states as an argument of the network."""
        return {} if states is None else {self._cache_argument: states}


def _check_index(backend: backends.Backend, layer: int, index: IndexShape) -> None:
    can = backend.capabilities
    if index.dim > can.max_index_dim or index.count > can.max_chosen:
        has = "none"
        if can.max_index_dim:
            has = f"at most {can.max_chosen} tokens by keys of {can.max_index_dim} numbers"
        raise UnsupportedModelError(
            f"backend {backend.name}: layer {layer} attends to {index.count} tokens that an index "
            f"with keys of {index.dim} numbers chooses, and this backend chooses {has}; use "
            f"--backend triton or --backend numba"
        )
