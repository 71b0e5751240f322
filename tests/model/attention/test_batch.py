"""From a step to tensors, and from a layer to a backend: by hand."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from model import Request, SamplingParams, Scheduler, SchedulerConfig
from model.attention.batch import BatchBuilder
from model.attention.shared_prefix import Worth
from model.caches.kv_caches import KVCaches
from model.caches.layout import LayerShape, plan_layout
from model.control.step import Chunk, Step

CPU = torch.device("cpu")


def step_of(kv, prompts, budget=64):
    scheduler = Scheduler(kv, SchedulerConfig(max_num_batched_tokens=budget))
    for number, prompt in enumerate(prompts):
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=4)))
    return scheduler, scheduler.schedule()


def test_a_step_lies_chunk_after_chunk_with_padded_tables():
    kv = kvcore.KVCacheManager(10, 2)
    scheduler, step = step_of(kv, [[5, 6, 7], [8], [9, 10, 11, 12, 13]], budget=7)
    tensors = BatchBuilder(CPU).build(step)
    # The third prompt has the budget for three of its tokens, and blocks for as many.
    assert tensors.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11]]
    assert tensors.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2]]
    assert tensors.logit_rows.tolist() == [2, 3]
    (paged,) = tensors.paged
    assert paged.query_start_loc.tolist() == [0, 3, 4, 7]
    assert paged.seq_lens.tolist() == [3, 1, 3]
    assert paged.block_table.tolist() == [[1, 2], [3, 0], [4, 5]]
    assert paged.slot_mapping.tolist() == [2, 3, 4, 6, 8, 9, 10]
    assert (paged.max_query_len, paged.max_seq_len) == (3, 3)

    scheduler.update(step, {0: 20, 1: 21})
    tensors = BatchBuilder(CPU).build(scheduler.schedule())
    assert tensors.input_ids.tolist() == [[20, 21, 12, 13]]
    assert tensors.position_ids.tolist() == [[3, 1, 3, 4]]
    assert tensors.logit_rows.tolist() == [0, 1, 3]
    assert tensors.paged[0].slot_mapping.tolist() == [5, 7, 11, 12]


def test_each_group_has_its_own_table_and_slots():
    kv = kvcore.KVCacheManager(
        20, 2, groups=[kvcore.FullAttention(), kvcore.SlidingWindow(window=3)]
    )
    scheduler, step = step_of(kv, [list(range(10, 19))], budget=8)
    builder = BatchBuilder(CPU, num_groups=2)
    full, window = builder.build(step).paged
    assert full.block_table.tolist() == [[1, 2, 3, 4]]
    assert window.block_table.tolist() == [[5, 6, 7, 8]]
    assert window.slot_mapping.tolist() == list(range(10, 18))
    assert full.seq_lens.data_ptr() == window.seq_lens.data_ptr()
    scheduler.update(step, {})
    # Position 8 sees 6 and 7 beside itself: of the window's blocks the last is left. The others can
    # still be hit, so they are behind 9 and 10, which hold nothing.
    full, window = builder.build(scheduler.schedule()).paged
    assert full.block_table.tolist() == [[1, 2, 3, 4, 9]]
    assert window.block_table.tolist() == [[0, 0, 0, 8, 10]]
    assert (full.slot_mapping.tolist(), window.slot_mapping.tolist()) == ([18], [20])


def test_a_smaller_step_after_a_larger_one_keeps_nothing_of_it():
    kv = kvcore.KVCacheManager(300, 1)
    builder = BatchBuilder(CPU)
    scheduler, step = step_of(kv, [list(range(280))], budget=300)  # the buffers begin with 256
    assert builder.build(step).paged[0].block_table.shape == (1, 280)
    assert scheduler.abort(step.chunks[0].request)
    scheduler.update(step, {})
    for number, prompt in enumerate(([3, 4, 5], [6])):
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=4)))
    tensors = builder.build(scheduler.schedule())
    assert tensors.input_ids.tolist() == [[3, 4, 5, 6]]
    table = tensors.paged[0].block_table.tolist()
    assert (len(table[0]), table[1][1:]) == (3, [0, 0])


def test_a_step_in_which_nothing_is_sampled_asks_for_no_logits():
    kv = kvcore.KVCacheManager(10, 2)
    _, step = step_of(kv, [[5, 6, 7, 8]], budget=3)
    assert BatchBuilder(CPU).build(step).logit_rows.shape == (0,)


def test_a_chunk_without_room_is_refused():
    kv = kvcore.KVCacheManager(10, 2)
    _, step = step_of(kv, [list(range(12))], budget=3)
    (chunk,) = step.chunks
    for num_tokens in (5, 9):
        beyond = Chunk(chunk.request, chunk.start, num_tokens, samples=False)
        with pytest.raises(kvcore.NotReservedError):
            BatchBuilder(CPU).build(Step((beyond,)))


GROUPS = [kvcore.FullAttention(), kvcore.SlidingWindow(window=5)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6),
    num_blocks=st.integers(30, 60),
    budget=st.integers(1, 30),
    seats=st.integers(1, 5),
    aborts=st.sets(st.integers(0, 30)),
)
def test_a_builder_that_has_seen_other_steps_gives_what_a_new_one_gives(
    lengths, num_blocks, budget, seats, aborts
):
    kv = kvcore.KVCacheManager(num_blocks, 2, groups=GROUPS)
    limits = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seats)
    worth = (Worth(2, 0, 0, 1), None)
    scheduler, builder = Scheduler(kv, limits), BatchBuilder(CPU, 2, worth=worth)
    for number, (length, max_tokens) in enumerate(lengths):
        scheduler.add(Request(number, range(length), SamplingParams(max_tokens=max_tokens)))
    number = 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        kept, fresh = builder.build(step), BatchBuilder(CPU, 2, worth=worth).build(step)
        for name in ("input_ids", "position_ids", "logit_rows"):
            assert torch.equal(getattr(kept, name), getattr(fresh, name))
        for group, (ours, other) in enumerate(zip(kept.paged, fresh.paged, strict=True)):
            for name in ("query_start_loc", "seq_lens", "slot_mapping"):
                assert torch.equal(getattr(ours, name), getattr(other, name))
            assert (ours.max_query_len, ours.max_seq_len) == (
                other.max_query_len,
                other.max_seq_len,
            )
            assert ours.slot_mapping.tolist() == _slots(step, group)
            assert ours.shared_prefix == other.shared_prefix
            _check_shared(step, ours, is_told=group == 0)
            for row, chunk in enumerate(step.chunks):
                table = chunk.request.running_sequence.tables[group]
                seen, stop = table.num_null, -(-(chunk.start + chunk.num_tokens) // 2)
                wanted = list(table.block_ids)[seen:stop]
                assert ours.block_table[row, seen:stop].tolist() == wanted
        if number in aborts:
            scheduler.abort(step.chunks[0].request)
        sampled = {c.request.request_id: number % 7 for c in step.chunks if c.samples}
        scheduler.update(step, sampled)
        number += 1


def _check_shared(step, paged, *, is_told):
    starts = [chunk.start for chunk in step.chunks]
    blocks = [paged.block_table[row, : start // 2].tolist() for row, start in enumerate(starts)]
    shared = paged.shared_prefix
    if shared is None:  # two neighbours that begin with a whole block would be told
        if paged.max_query_len == 1 and is_told:
            assert not any(a and b and a[0] == b[0] for a, b in pairwise(blocks))
        return
    assert is_told
    rows = range(shared.first_seq, shared.first_seq + shared.num_seqs)
    assert shared.num_tokens <= min(starts[row] for row in rows)
    whole = -(-shared.num_tokens // 2)
    assert len({tuple(paged.block_table[row, :whole].tolist()) for row in rows}) == 1


def _slots(step, group):
    slots = []
    for chunk in step.chunks:
        out = torch.empty(chunk.num_tokens, dtype=torch.int64).numpy()
        stop = chunk.start + chunk.num_tokens
        chunk.request.running_sequence.write_slot_mapping(chunk.start, stop, out, group)
        slots += out.tolist()
    return slots


def test_caches_have_the_shape_of_their_layers():
    layout = plan_layout([LayerShape(2, 16, torch.float32), LayerShape(1, 8, torch.float32)])
    caches = KVCaches.allocate(layout, num_blocks=5, block_size=4, device=CPU)
    assert [tuple(each.shape) for cache in caches.layers for each in cache.tensors] == [
        *[(5, 4, 2, 16)] * 2,
        *[(5, 4, 1, 8)] * 2,
    ]
    assert not any(each.any() for cache in caches.layers for each in cache.tensors)


def test_each_step_and_group_has_a_place_for_what_a_backend_works_out():
    kv = kvcore.KVCacheManager(
        20, 2, groups=[kvcore.FullAttention(), kvcore.SlidingWindow(window=3)]
    )
    scheduler, step = step_of(kv, [list(range(10, 19))], budget=8)
    builder = BatchBuilder(CPU, num_groups=2)
    places = [batch.kept for batch in builder.build(step).paged]
    scheduler.update(step, {})
    places += [batch.kept for batch in builder.build(scheduler.schedule()).paged]
    assert places == [{}] * 4
    assert len({id(place) for place in places}) == 4
