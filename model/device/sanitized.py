"""A backend under a sanitizer: what a step writes and reads, told to `kvcore.sanitize`, and seen.

Decides: what can be seen of the memory itself. Slots that nobody has written hold NaN, so an
attention that reads one gives NaN; one element of every slot is compared before and after a store,
so a store that writes elsewhere is seen; what was to be stored is read back.

Invariants: output is what it is without; every check is an operation of torch, so it runs where the
caches are; each waits for the device.

Does not know: chunked attention's pieces (their slots are checked, their tables are not).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import backends
import kvcore
from kvcore.sanitize import Shadow
from model.control.step import Step
from model.device.batch import StepTensors
from model.device.kv_caches import KVCaches

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SanitizedBackend:
    """Another backend, watched.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: backends.Backend) -> None:
        self._inner = inner
        self._is_poisoned = False
        self._has_nan = False
        self.shadow = Shadow()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def begin_transfers(self, step: Step, caches: KVCaches) -> None:
        """Poison what a step loads from the host, before it does. O(blocks loaded).

        Raises:
            SanitizerError: a block is another request's.
        """
        if not self._is_poisoned:
            self._is_poisoned = True
            _poison(caches, None)
        for transfer in step.loads:
            self.shadow.loaded(transfer.lease)
            _poison(caches, list(transfer.block_ids))

    def begin_copies(self, orders: Sequence[kvcore.CopyOrder], caches: KVCaches) -> None:
        """Poison what the copies of forks go to, before they are made. O(blocks copied).

        Raises:
            SanitizerError: a block was never written, or is another's.
        """
        self.shadow.copied(orders)
        _poison(caches, [order.dst for order in orders])

    def begin_step(
        self, step: Step, tensors: StepTensors, caches: KVCaches, chunks: tuple[int | None, ...]
    ) -> None:
        """Check where a step writes and what it reads, and poison what is begun.

        O(tokens + blocks of the step).

        Args:
            step: what is planned.
            tensors: what was made of it, on the host.
            caches: of every layer.
            chunks: for each layer group the chunk that its layers see; None: they have none.

        Raises:
            SanitizerError: a slot or a table is not right.
        """
        for group, batch in enumerate(tensors.paged):
            slots = batch.slot_mapping.tolist()
            rows = None if chunks[group] is not None else batch.block_table.tolist()
            lengths = batch.seq_lens.tolist()
            begin = 0
            for chunk in step.chunks:
                end = begin + chunk.num_tokens
                sequence = chunk.request.running_sequence
                self.shadow.wrote(sequence, chunk.start, slots[begin:end], group=group)
                begin = end
            if rows is not None:
                for chunk, row, length in zip(step.chunks, rows, lengths, strict=True):
                    sequence = chunk.request.running_sequence
                    table = sequence.tables[group]
                    first, known = table.num_null * table.block_size, length - len(chunk.drafts)
                    self.shadow.reads(sequence, known, row, group=group, first=first)
        _poison(caches, self.shadow.take_fresh())

    def store_kv(
        self,
        key: Tensor,
        value: Tensor | None,
        cache: backends.KVCache,
        slot_mapping: Tensor,
    ) -> None:
        """Store, and see that it is there and nothing else has changed. O(slots of the cache)."""
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
                self.shadow.fail_kernel(f"store_kv wrote a {name} into slot {strays[0]}, unasked")
            if tensor.dtype == given.dtype:
                stored = tensor.reshape(-1, *tensor.shape[2:])[slots]
                wanted = given[slot_mapping >= 0]
                wrong = ((stored != wanted) & ~wanted.isnan()).flatten(1).any(1).nonzero()
                if len(wrong):
                    slot = slots[wrong[0]].item()
                    self.shadow.fail_kernel(f"store_kv did not write the {name} of slot {slot}")

    def paged_attention(
        self,
        query: Tensor,
        cache: backends.KVCache,
        batch: backends.PagedBatch,
        terms: backends.AttentionTerms,
    ) -> Tensor:
        """Attend, and see that no slot was read that nobody has written. O(output)."""
        out = self._inner.paged_attention(query, cache, batch, terms)
        rows = out[: int(batch.query_start_loc[-1].item())]
        if not self._has_nan and bool(rows.isnan().any().item()):
            row = rows.isnan().flatten(1).any(1).nonzero()[0].item()
            ends = batch.query_start_loc[1:].tolist()
            sequence = next(number for number, end in enumerate(ends) if row < end)
            what = f"paged_attention of query row {row}, of sequence {sequence} of the batch"
            self.shadow.fail_kernel(f"{what}, has read a slot that was never written")
        return out


def _marks(cache: Tensor) -> Tensor:
    """The bits of one element of every slot, copied: [num_slots]."""
    return cache[:, :, -1, -1].reshape(-1).clone().view(_BITS[cache.element_size()])


def _poison(caches: KVCaches, blocks: list[int] | None) -> None:
    """Let slots hold NaN: of some blocks, or of all."""
    if blocks is not None and not blocks:
        return
    for cache in caches.layers:
        for tensor in cache.tensors:
            if tensor.is_floating_point():
                tensor[slice(None) if blocks is None else blocks] = float("nan")
