"""A backend under a sanitizer, which checks the inputs of its kernels and their memory accesses.

`kvcore.sanitize` checks the slots and tables that a step passes to the kernels; this module checks
what the kernels did with the memory.

Decides: how a wrong access is found. A store: one element of every slot is compared before and
after, and the stored rows are read back. A read of a slot that was never written: such slots hold
NaN, so the result is NaN. A read of another request's block: attention runs again while the blocks
that some requests may not read are scrambled; the results of those requests must stay the same, bit
for bit.

Invariants: the output is the same as without; every check is an operation of torch, so it runs
where the caches are, and waits for the device. Scrambling flips bits in place and flips them back,
because there is no memory for a copy.

Does not know: whether the tables are right (`Shadow` does), why a request reads its own blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import pairwise
from threading import Lock
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

import backends
import kvcore
from kvcore.adapters.recurrent import StateStep
from kvcore.sanitize import Shadow
from model.attention.batch import StepTensors
from model.caches.kv_caches import KVCaches
from model.caches.layout import CacheLayout
from model.control.step import Chunk, Step

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_PART = 256  # blocks that are changed at once, which needs a copy of them


@dataclass(frozen=True)
class _Owners:
    """The sequences of a batch that may read each block.

    Attributes:
        rows: for each sequence its first query row, and the end of its rows.
        of: block_id -> the sequences as a bit set; blocks without a sequence are missing.
    """

    rows: tuple[tuple[int, int], ...]
    of: dict[int, int]

    @classmethod
    def of_batch(cls, batch: backends.PagedBatch, block_size: int, window: int | None) -> "_Owners":
        """Read the tables of a batch. O(their entries)."""
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        rows = tuple(pairwise(starts))
        owners: dict[int, int] = {}
        for number, (table, length) in enumerate(
            zip(batch.block_table.tolist(), lengths, strict=True)
        ):
            begin, end = rows[number]
            first = 0 if window is None else max(0, length - (end - begin) - window + 1)
            for block_id in table[first // block_size : -(-length // block_size)]:
                owners[block_id] = owners.get(block_id, 0) | 1 << number
        return cls(rows, owners)

    def kept(self) -> list[int]:
        """Return sets of sequences whose blocks stay intact, one set per run of attention.

        For each sequence, and each block that it may not read, one set contains the sequence and no
        owner of the block. For a block with one owner: the numbers of the two differ in a bit. For
        a block with several: the set of all other sequences. 2 * log2(sequences) sets, and one for
        each set of sequences that share blocks.
        """
        everyone = (1 << len(self.rows)) - 1
        found = {everyone} if len(self.rows) == 1 else set()
        for bit in range((len(self.rows) - 1).bit_length()):
            ones = sum(1 << row for row in range(len(self.rows)) if row >> bit & 1)
            found |= {ones, everyone & ~ones}
        found |= {everyone & ~owners for owners in self.of.values() if owners.bit_count() > 1}
        return sorted(found - {0})

    @cached_property
    def runs(self) -> list[tuple[list[int], list[int], list[int]]]:
        """Each of these sets: its sequences, their query rows, its blocks. O(runs * blocks)."""
        found = []
        for kept in self.kept():
            members = [number for number in range(len(self.rows)) if kept >> number & 1]
            rows = [row for number in members for row in range(*self.rows[number])]
            found.append((members, rows, self.readable(kept)))
        return found

    def readable(self, kept: int) -> list[int]:
        """Return the blocks that one of these sequences may read. O(blocks)."""
        return [block_id for block_id, owners in self.of.items() if owners & kept]


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _alone(method: _Method) -> _Method:
    """Hold the lock of a sanitized backend during a call."""

    @wraps(method)
    def alone(self: "SanitizedBackend", *args: object, **named: object) -> object:
        with self.lock:
            return method(self, *args, **named)

    return cast("_Method", alone)


class SanitizedBackend:
    """Checks another backend.

    Attributes:
        shadow: knows what each slot should hold.
        lock: held while blocks are scrambled: no other thread reads or writes one meanwhile.
    """

    def __init__(self, inner: backends.Backend) -> None:
        self._inner = inner
        self._is_poisoned = False
        self._has_nan = False
        self._places: dict[int, tuple[int, int]] = {}  # id of a cache -> its layer, and its group
        self._pieces: list[list[Chunk]] = []  # for each group the chunk of each sequence
        self.shadow = Shadow()
        self.lock = Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def begin_transfers(self, step: Step, caches: KVCaches) -> None:
        """Poison the blocks that a step loads from the host, before it loads them. O(blocks).

        Raises:
            SanitizerError: a block belongs to another request.
        """
        self._poison_all(caches)
        for transfer in step.loads:
            self.begin_load(transfer.lease, caches)

    def begin_load(self, lease: kvcore.Lease, caches: KVCaches) -> None:
        """Poison the blocks of a load before they are written. O(blocks).

        Raises:
            SanitizerError: a block belongs to another request.
        """
        self._poison_all(caches)
        self.shadow.loaded(lease)
        _poison(caches, [block.block_id for block in lease.blocks])

    def _poison_all(self, caches: KVCaches) -> None:
        """Poison all blocks, once. O(their bytes)."""
        if not self._is_poisoned:
            self._is_poisoned = True
            _poison(caches, None)

    def begin_copies(self, orders: Sequence[kvcore.CopyOrder], caches: KVCaches) -> None:
        """Poison the targets of copies before they are made. O(blocks copied).

        Raises:
            SanitizerError: a source was never written, or belongs to another request.
        """
        self.shadow.copied(orders)
        _poison(caches, [order.dst for order in orders])

    def begin_step(
        self, step: Step, tensors: StepTensors, caches: KVCaches, layout: CacheLayout
    ) -> None:
        """Check which slots a step writes and reads, and poison new blocks.

        O(tokens + blocks of the step).

        Args:
            step: the plan.
            tensors: built from it, on the host.
            caches: of every layer.
            layout: the group of each layer, and what its layers see.

        Raises:
            SanitizerError: a slot or a table is wrong.
        """
        self._places = {
            id(caches.layers[number]): (layer, layout.places[number][0])
            for layer, number in layout.numbers.items()
        }
        self._pieces = []
        for group, batch in enumerate(tensors.paged):
            slots = batch.slot_mapping.tolist()
            end = 0
            for chunk in step.chunks:
                begin, end = end, end + chunk.num_tokens
                sequence = chunk.request.running_sequence
                self.shadow.wrote(sequence, chunk.start, slots[begin:end], group=group)
            self._pieces.append([])
            rows, lengths = batch.block_table.tolist(), batch.seq_lens.tolist()
            pieces = _pieces(step, layout.chunks[group])
            for (chunk, begin), row, length in zip(pieces, rows, lengths, strict=True):
                self._pieces[group].append(chunk)
                sequence = chunk.request.running_sequence
                table = sequence.tables[group]
                size, first = table.block_size, max(begin, table.num_null * table.block_size)
                end = begin + length
                if end <= chunk.start + chunk.num_tokens:
                    end = min(end, chunk.start + chunk.num_known)  # without draft tokens
                if end > first:
                    ids = [0] * (begin // size) + row  # entries before the piece are not checked
                    self.shadow.reads(sequence, end, ids, group=group, first=first)
        if isinstance(tensors.states, StateStep):
            self._check_states(step, tensors.states)
        _poison(caches, self.shadow.take_fresh())

    def _check_states(self, step: Step, states: StateStep) -> None:
        """Check which states a step reads and writes. O(blocks of the states + tokens)."""
        if states.write is None:
            return
        blocks = zip(states.runs, states.read.tolist(), states.write.tolist(), strict=True)
        for chunk, (run, read, write) in zip(step.chunks, blocks, strict=True):
            sequence = chunk.request.running_sequence
            self.shadow.advanced(sequence, read if run.has_state else [], write, run.num_known)

    @_alone
    def store_kv(
        self,
        key: Tensor,
        value: Tensor | None,
        cache: backends.KVCache,
        slot_mapping: Tensor,
    ) -> None:
        """Store, and check that nothing else has changed. O(slots of the cache)."""
        rows = [key] if value is None else [key, value]
        self._has_nan |= any(bool(each.isnan().any().item()) for each in rows)
        before = [_marks(tensor) for tensor in cache.tensors]
        self._inner.store_kv(key, value, cache, slot_mapping)
        slots = slot_mapping[slot_mapping >= 0]
        others = torch.ones(before[0].numel(), dtype=torch.bool, device=slots.device)
        others[slots] = False
        for name, tensor, was, given in zip(
            ("key", "value"), cache.tensors, before, rows, strict=False
        ):
            strays = ((_marks(tensor) != was) & others).nonzero().flatten().tolist()
            if strays:
                self.shadow.fail_kernel(
                    f"store_kv wrote a {name} into slot {strays[0]}, which it was not given"
                )
            if tensor.dtype == given.dtype:
                stored = tensor.reshape(-1, *tensor.shape[2:])[slots]
                wanted = given[slot_mapping >= 0]
                wrong = ((stored != wanted) & ~wanted.isnan()).flatten(1).any(1).nonzero()
                if len(wrong):
                    slot = slots[wrong[0]].item()
                    self.shadow.fail_kernel(f"store_kv did not write the {name} of slot {slot}")

    @_alone
    def paged_attention(
        self,
        query: Tensor,
        cache: backends.KVCache,
        batch: backends.PagedBatch,
        terms: backends.AttentionTerms,
    ) -> Tensor:
        """Attend, and check that every slot read was written, by the reading request.

        One further run of attention per entry of `_Owners.runs`. O(output + the layer's cache).
        """
        out = self._inner.paged_attention(query, cache, batch, terms)
        owners = _owners(batch, cache, terms)
        rows = out[: owners.rows[-1][1]]
        if not self._has_nan and bool(rows.isnan().any().item()):
            row = rows.isnan().flatten(1).any(1).nonzero()[0].item()
            number = next(number for number, (_, end) in enumerate(owners.rows) if row < end)
            what = f"{self._reader(cache, number, owners)} has read a slot that was never written"
            self.shadow.fail_kernel(f"{what}, in query row {row}")

        def changed() -> Tensor:
            again = self._inner.paged_attention(query, cache, batch, terms)
            bits = _BITS[out.element_size()]
            return (again.view(bits) != out.view(bits)).flatten(1).any(1)

        wrong = None
        with _scrambled(cache, None):
            for members, its_rows, blocks in owners.runs:
                with _scrambled(cache, blocks):  # flipped twice: intact
                    differs = changed()
                if bool(differs[its_rows].any().item()):
                    wrong = next(n for n in members if differs[slice(*owners.rows[n])].any().item())
                    break
        if wrong is not None:
            rows_of = slice(*owners.rows[wrong])
            self._fail_foreign(cache, wrong, owners, lambda: bool(changed()[rows_of].any().item()))
        return out

    @_alone
    def attend_chosen(
        self,
        query: Tensor,
        cache: backends.KVCache,
        batch: backends.PagedBatch,
        chosen: Tensor,
        terms: backends.AttentionTerms,
    ) -> Tensor:
        """Attend to chosen tokens, and check that every slot read was written. O(output)."""
        sparse = cast("backends.SparseBackend", self._inner)
        out = sparse.attend_chosen(query, cache, batch, chosen, terms)
        nans = out[: int(batch.query_start_loc[-1])].isnan().flatten(1).any(1).nonzero()
        if not self._has_nan and len(nans):
            layer = f" of layer {self._places[id(cache)][0]}" if id(cache) in self._places else ""
            self.shadow.fail_kernel(
                f"attend_chosen{layer} has read a slot that was never written, in query row "
                f"{nans[0].item()}"
            )
        return out

    def _fail_foreign(
        self, cache: backends.KVCache, number: int, owners: _Owners, is_changed: Callable[[], bool]
    ) -> NoReturn:
        """Find the block that a sequence has read, by bisection of all foreign blocks."""
        reader = self._reader(cache, number, owners)
        if is_changed():
            self.shadow.fail_kernel(f"{reader} gave different bits when it was called again")
        own = set(owners.readable(1 << number))
        blocks = [block_id for block_id in range(cache.k.shape[0]) if block_id not in own]
        while len(blocks) > 1:
            half = blocks[: len(blocks) // 2]
            with _scrambled(cache, half):
                blocks = half if is_changed() else blocks[len(half) :]
        (block_id,) = blocks
        owner = owners.of.get(block_id, 0).bit_length() - 1
        whose = self._name(cache, owner, owners) if owner >= 0 else self.shadow.whose(block_id)
        self.shadow.fail_kernel(f"{reader} has read block {block_id} of {whose}")

    def _reader(self, cache: backends.KVCache, number: int, owners: _Owners) -> str:
        """Return the layer and the request of a call of attention."""
        layer = f" of layer {self._places[id(cache)][0]}" if id(cache) in self._places else ""
        return f"paged_attention{layer}: {self._name(cache, number, owners)}"

    def _name(self, cache: backends.KVCache, number: int, owners: _Owners) -> str:
        """Return the request of a batch's sequence, with the name that kvcore gives that."""
        group = self._places.get(id(cache), (0, 0))[1]
        pieces = self._pieces[group] if self._pieces else []
        if len(pieces) != len(owners.rows):  # `begin_step` was not called
            return f"sequence {number} of the batch"
        request = pieces[number].request
        sequence = self.shadow.name_of(request.running_sequence)
        return f"request {request.request_id} ({sequence})"


def _owners(
    batch: backends.PagedBatch, cache: backends.KVCache, terms: backends.AttentionTerms
) -> _Owners:
    """Return the owners of a batch; computed once for all layers if the batch keeps them."""
    kept = {} if batch.kept is None else batch.kept
    found = kept.get("sanitized")
    if not isinstance(found, _Owners):
        found = _Owners.of_batch(batch, cache.k.shape[1], terms.window)
        kept["sanitized"] = found
    return found


def _pieces(step: Step, size: int | None) -> list[tuple[Chunk, int]]:
    """Return the chunk of each sequence of a batch, and the position at which its table starts."""
    if size is None:
        return [(chunk, 0) for chunk in step.chunks]
    return [
        (chunk, begin)
        for chunk in step.chunks
        for begin in range(chunk.start // size * size, chunk.start + chunk.num_tokens, size)
    ]


@contextmanager
def _scrambled(cache: backends.KVCache, blocks: list[int] | None) -> Iterator[None]:
    """Change the numbers in some blocks, or in all, for a while.

    The highest bit of each exponent is flipped, and flipped back. O(their bytes), no memory.
    """
    parts = (
        () if blocks is None else [blocks[at : at + _PART] for at in range(0, len(blocks), _PART)]
    )

    def flip() -> None:
        for tensor in cache.tensors:
            bits = tensor.view(_BITS[tensor.element_size()])
            highest = 1 << (8 * tensor.element_size() - 2)
            if blocks is None:
                bits ^= highest
            for part in parts:
                bits[part] ^= highest

    flip()
    try:
        yield
    finally:
        flip()


def _marks(cache: Tensor) -> Tensor:
    """Return the bits of one element of every slot, copied: [num_slots]."""
    return cache[:, :, -1, -1].reshape(-1).clone().view(_BITS[cache.element_size()])


def _poison(caches: KVCaches, blocks: list[int] | None) -> None:
    """Fill the slots of some blocks, or of all, with NaN."""
    if blocks is not None and not blocks:
        return
    of_layers = [
        tensor for cache in (*caches.layers, *caches.indexes.values()) for tensor in cache.tensors
    ]
    for tensor in (*of_layers, *(state.blocks for state in caches.states.values())):
        if tensor.is_floating_point():
            tensor[slice(None) if blocks is None else blocks] = float("nan")
