"""Calls that are not checked again: known by what their tensors are now, never by what was there.

The programs here carve every tensor out of the same memory, so that what comes later lies where
something else lay, and compare a backend that has seen it all with one that has seen nothing.
"""

import dataclasses
import gc
import itertools
import math
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import backends
from backends import InvalidArgumentError
from backends.conformance.cases import bits
from backends.numba_cpu import NumbaBackend, launch, paged_attention, store_kv
from backends.numba_cpu.launch import MOST_PLANS, Plans

SLOTS = 48
LENGTHS = ((1, 10), (3, 7))  # query tokens and length of the sequences
NUM_TOKENS = sum(count for count, _ in LENGTHS)
ARENA_BYTES = 1 << 15  # four times what any tensor takes: a wrong plan stays inside, too


class Kind:
    """What lies in the memory: sizes, the order of the cache's dimensions, a dtype."""

    def __init__(self, block_size, heads, size, order=(0, 1, 2), dtype=torch.float32, group=2):
        self.shape = (SLOTS // block_size, block_size, heads, size)
        self.order = order
        self.dtype = dtype
        self.group = group

    def __repr__(self):
        return f"Kind({self.shape}, {self.order}, {self.dtype}, {self.group})"


KINDS = st.builds(
    Kind,
    block_size=st.sampled_from((2, 3, 4, 8)),
    heads=st.integers(1, 3),
    size=st.sampled_from((1, 4, 8)),
    order=st.sampled_from(list(itertools.permutations(range(3)))),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    group=st.integers(1, 3),
)


class Memory:
    """Arenas that every tensor of a program begins at."""

    def __init__(self):
        self._arenas = {}

    def tensor(self, name, shape, dtype, order=None):
        arena = self._arenas.setdefault(name, torch.zeros(ARENA_BYTES, dtype=torch.uint8))
        order = (*(order or range(len(shape) - 1)), len(shape) - 1)
        laid = arena.view(dtype)[: math.prod(shape)].view([shape[dim] for dim in order])
        return laid.permute([order.index(dim) for dim in range(len(shape))])


def arguments(kind, memory):
    """The arguments of a store and of an attention, the same numbers in any memory."""
    generator = torch.Generator().manual_seed(1)
    num_blocks, block_size, heads, size = kind.shape
    tensors = {
        "key": memory.tensor("key", (NUM_TOKENS, heads, size), kind.dtype),
        "value": memory.tensor("value", (NUM_TOKENS, heads, size), kind.dtype),
        "query": memory.tensor("query", (NUM_TOKENS, heads * kind.group, size), kind.dtype),
        "out": memory.tensor("out", (NUM_TOKENS, heads * kind.group, size), kind.dtype),
        "k_cache": memory.tensor("k_cache", kind.shape, kind.dtype, kind.order),
        "v_cache": memory.tensor("v_cache", kind.shape, kind.dtype, kind.order),
    }
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    width = -(-max(length for _, length in LENGTHS) // block_size)
    table = torch.randperm(num_blocks, generator=generator)[: 2 * width].view(2, width).int()
    starts = torch.tensor([0, 1, NUM_TOKENS], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in LENGTHS], dtype=torch.int32)
    slots = torch.empty(NUM_TOKENS, dtype=torch.int64)
    NumbaBackend().compute_slot_mapping(starts, lengths, table, block_size, slots)
    return tensors, backends.PagedBatch(starts, lengths, table, slots, 3, 10)


def run(backend, tensors, batch):
    """Store and attend; every bit that was written."""
    cache = backends.KVCache(tensors["k_cache"], tensors["v_cache"])
    backend.store_kv(tensors["key"], tensors["value"], cache, batch.slot_mapping)
    terms = backends.AttentionTerms(0.5)
    out = backend.paged_attention(tensors["query"], cache, batch, terms, out=tensors["out"])
    return [bits(tensor.contiguous()) for tensor in (*cache.tensors, out)]


def first_difference(kinds):
    """Run one kind after the other; the first that a backend without a past runs otherwise."""
    memory, backend = Memory(), NumbaBackend()
    for number, kind in enumerate(kinds):
        wanted = run(NumbaBackend(), *arguments(kind, Memory()))
        try:
            got = run(backend, *arguments(kind, memory))
        except InvalidArgumentError:
            return number
        if not all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True)):
            return number
    return None


@given(st.lists(KINDS, min_size=2, max_size=6).flatmap(lambda kinds: st.permutations(kinds * 2)))
def test_whatever_lies_where_something_else_lay_is_read_and_written_as_itself(kinds):
    assert first_difference(kinds) is None


PLAIN = Kind(4, 2, 8)
NEIGHBOURS = {
    "strides": Kind(4, 2, 8, order=(2, 0, 1)),
    "shape": Kind(2, 2, 8),
    "dtype": Kind(4, 2, 8, dtype=torch.bfloat16),
}
FORGETFUL = {
    "strides": lambda tensor: None if tensor is None else (tensor.shape, tensor.dtype),
    "shape": lambda tensor: None if tensor is None else (tensor.shape[2:], tensor.dtype),
    "dtype": lambda tensor: None if tensor is None else (tensor.shape, tensor.stride()),
    "all but the address": lambda tensor: None if tensor is None else tensor.data_ptr(),
}


@pytest.mark.parametrize("forgotten", FORGETFUL)
def test_a_plan_that_outlives_what_it_was_made_for_is_caught(forgotten, monkeypatch):
    changed = list(NEIGHBOURS.values()) if forgotten not in NEIGHBOURS else [NEIGHBOURS[forgotten]]
    assert all(first_difference([PLAIN, kind]) is None for kind in changed)

    def sign(*tensors):
        return tuple(map(FORGETFUL[forgotten], tensors))

    for module in (store_kv, paged_attention):
        monkeypatch.setattr(module, "sign", sign)
    assert all(first_difference([PLAIN, kind]) == 1 for kind in changed)


def test_an_address_that_is_kept_is_caught():
    class Keeping(NumbaBackend):
        """Writes where the first cache of a signature lay: a stale view."""

        __slots__ = ("seen",)

        def store_kv(self, key, value, cache, slot_mapping):
            kept = self.seen.setdefault(launch.sign(cache.k), cache)
            super().store_kv(key, value, kept, slot_mapping)

    backend = Keeping()
    backend.seen = {}
    results = [run(backend, *arguments(PLAIN, Memory())) for _ in range(2)]
    assert torch.equal(results[0][0], run(NumbaBackend(), *arguments(PLAIN, Memory()))[0])
    assert not torch.equal(results[0][0], results[1][0])


def test_a_tensor_that_is_changed_in_place_is_known_by_what_it_is_now():
    backend, memory = NumbaBackend(), Memory()
    kind = Kind(4, 4, 8)
    tensors, batch = arguments(kind, memory)
    run(backend, tensors, batch)
    for name in ("k_cache", "v_cache"):
        tensors[name].transpose_(1, 2)  # the same object at the same address, of the same shape
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    wanted = run(NumbaBackend(), copies, batch)
    got = run(backend, tensors, batch)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    cache = backends.KVCache(tensors["k_cache"], tensors["v_cache"])
    tensors["k_cache"].resize_(12, 4, 4, 4)
    with pytest.raises(InvalidArgumentError, match=r"cache\.v"):
        run(backend, tensors, batch)
    with pytest.raises(InvalidArgumentError, match=r"cache\.v"):  # of a record made before
        backend.paged_attention(tensors["query"], cache, batch, backends.AttentionTerms(0.5))


def change_batch(**changes):
    def change(tensors, batch, numbers):
        changed = {name: make(getattr(batch, name)) for name, make in changes.items()}
        return tensors, dataclasses.replace(batch, **changed), numbers

    return change


BREACHES = {
    "terms.scale": lambda tensors, batch, numbers: (tensors, batch, numbers | {"scale": math.nan}),
    "terms.window": lambda tensors, batch, numbers: (tensors, batch, numbers | {"window": 0}),
    "terms.soft_cap": lambda tensors, batch, numbers: (tensors, batch, numbers | {"soft_cap": -1}),
    "slot_mapping": change_batch(slot_mapping=lambda slots: torch.full_like(slots, SLOTS)),
    "batch.block_table[0]": change_batch(block_table=lambda table: torch.full_like(table, 99)),
    "batch.block_table": change_batch(max_seq_len=lambda _: 1000),
    "batch.seq_lens[1]": change_batch(seq_lens=lambda lengths: lengths - 5),
    "batch.query_start_loc[1]": change_batch(max_query_len=lambda _: 0),
    "query": change_batch(slot_mapping=lambda slots: slots[:-1]),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_known_call_with_other_values_is_refused_and_writes_nothing(name):
    backend = NumbaBackend()
    tensors, batch = arguments(PLAIN, Memory())
    run(backend, tensors, batch)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors, batch, numbers = BREACHES[name](tensors, batch, {"scale": 0.5})
    cache = backends.KVCache(tensors["k_cache"], tensors["v_cache"])

    def call():
        if name == "slot_mapping":
            backend.store_kv(tensors["key"], tensors["value"], cache, batch.slot_mapping)
        terms = backends.AttentionTerms(**numbers)
        backend.paged_attention(tensors["query"], cache, batch, terms, out=tensors["out"])

    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert str(caught.value).startswith(name)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def test_a_backend_keeps_nothing_that_it_was_given_alive():
    backend, alive = NumbaBackend(), []
    for _ in range(3):
        memory = np.zeros(2 * SLOTS * 2 * 8, dtype=np.float32)
        alive.append(weakref.ref(memory))
        tensors, batch = arguments(PLAIN, Memory())
        both = torch.from_numpy(memory).view(2, *PLAIN.shape)
        run(backend, tensors | {"k_cache": both[0], "v_cache": both[1]}, batch)
        del memory, both, tensors
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_plans_are_few_however_many_calls_differ():
    kept = Plans()
    for number in range(3 * MOST_PLANS):
        kept.keep(number, -number)
        assert kept.get(number) == -number
        assert len(kept) <= MOST_PLANS
    assert kept.get(0) is None


def test_threads_share_plans(monkeypatch):
    monkeypatch.setattr(launch, "MOST_PLANS", 2)  # so that plans come and go under their hands
    kinds = [PLAIN, *NEIGHBOURS.values()]
    backend, start = NumbaBackend(), threading.Barrier(len(kinds))
    wanted = [run(NumbaBackend(), *arguments(kind, Memory())) for kind in kinds]
    wrong = []

    def work(number):
        start.wait()
        for _ in range(30):
            got = run(backend, *arguments(kinds[number], Memory()))
            if not all(map(torch.equal, got, wanted[number])):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
