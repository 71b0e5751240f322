"""The shadow memory finds nothing in what is right, and each planted fault by its name."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.sanitize import SanitizerError, Shadow

SIZE = 4


class Runner:
    """An engine's step, told to a shadow; what a test plants changes what is told."""

    def __init__(self, num_blocks=24, groups=None):
        self.kv = kvcore.KVCacheManager(num_blocks, SIZE, groups=groups)
        self.shadow = Shadow()

    def begin(self, tokens, tenant=b""):
        seq = self.kv.open(tokens, namespace=kvcore.Namespace(salt=tenant))
        self.kv.reserve_to(seq, seq.num_tokens)
        return seq

    def slots(self, seq, start, stop, group=0):
        slots = array("q", [0] * (stop - start))
        seq.write_slot_mapping(start, stop, slots, group=group)
        return list(slots)

    def table(self, seq, group=0):
        return list(seq.tables[group].block_ids)

    def step(self, seq, count=None, slots=None, table=None, length=None):
        """Compute tokens of a sequence: its new KV is written, then all of it is read."""
        start = seq.num_computed_tokens
        stop = start + count if count else seq.num_tokens
        for group in range(len(seq.tables)):
            told = slots if slots is not None else self.slots(seq, start, stop, group)
            self.shadow.wrote(seq, start, told, group=group)
        for group, one in enumerate(seq.tables):
            first = one.num_null * SIZE
            rows = table if table is not None else self.table(seq, group)
            self.shadow.reads(seq, length or stop, rows, group=group, first=first)
        if seq.state is not None:
            self.shadow.advanced(seq, *seq.state_blocks, stop - start)
        self.kv.commit(seq, stop - start)

    def decode(self, seq, token):
        self.kv.append(seq, token)
        self.kv.reserve_to(seq, seq.num_tokens)
        self.step(seq)


STATES = (kvcore.FullAttention(), kvcore.RecurrentState(2))


@pytest.mark.parametrize("groups", [None, STATES])
@given(st.data())
def test_nothing_is_found_in_what_is_right(groups, data):
    runner = Runner(num_blocks=data.draw(st.integers(12, 24)), groups=groups)
    live = []
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["begin", "decode", "decode", "cut", "fork", "end"]))
        try:
            if what == "begin" or not live:
                prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=13))
                live.append(runner.kv.open(prompt))
                runner.kv.reserve_to(live[-1], len(prompt))
                runner.step(live[-1])
                continue
            seq = data.draw(st.sampled_from(live))
            if what == "decode":
                runner.decode(seq, data.draw(st.integers(0, 1)))
            elif what == "cut":
                runner.kv.truncate(seq, data.draw(st.integers(1, seq.num_tokens)))
                runner.kv.append(seq, 1)
                runner.kv.reserve_to(seq, seq.num_tokens)
                runner.step(seq)
            elif what == "fork":
                child, copies = runner.kv.fork(seq)
                runner.shadow.copied(copies)
                live.append(child)
                runner.decode(child, 1)
        except kvcore.OutOfBlocksError:
            what, seq = "end", live[0]
        if what == "end":
            live.remove(seq)
            runner.kv.close(seq)


def test_nothing_is_found_where_windows_move_on():
    runner = Runner(groups=[kvcore.FullAttention(), kvcore.SlidingWindow(window=5)])
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 8]):
        seq = runner.begin(tokens)
        runner.step(seq)
        for token in range(14):
            runner.decode(seq, token)
        assert seq.tables[1].num_null > 0


def writes_a_slot_too_far(runner):
    seq = runner.begin([1, 2, 3, 4, 5])
    runner.step(seq, slots=[slot + 1 for slot in runner.slots(seq, 0, 5)])


def writes_with_the_slots_of_another(runner):
    seq, other = runner.begin([1, 2, 3]), runner.begin([4, 5, 6])
    runner.step(other)
    runner.step(seq, slots=runner.slots(other, 0, 3))


def writes_into_the_null_block(runner):
    runner.step(runner.begin([1, 2, 3]), slots=[0, 1, 2])


def writes_nowhere(runner):
    runner.step(runner.begin([1, 2, 3]), slots=[-1, -1, -1])


def writes_into_a_freed_block(runner):
    seq = runner.begin([1, 2, 3, 4, 5])
    runner.step(seq)
    stale = runner.slots(seq, 0, 3)
    runner.kv.close(seq)
    runner.step(runner.begin([7, 8, 9]), slots=stale)


def writes_into_a_block_that_it_has_hit(runner):
    first = runner.begin([1, 2, 3, 4, 5])
    runner.step(first)
    second = runner.begin([1, 2, 3, 4, 6])
    runner.shadow.wrote(second, 0, runner.slots(second, 0, 5))


def computes_its_own_prefix_again(runner):
    seq = runner.begin([1, 2, 3, 4, 5])
    runner.step(seq)
    runner.shadow.wrote(seq, 3, runner.slots(seq, 3, 5))


def reads_blocks_in_the_wrong_order(runner):
    seq = runner.begin([1, 2, 3, 4, 5])
    runner.step(seq, table=runner.table(seq)[::-1])


def reads_the_table_of_another(runner):
    seq, other = runner.begin([1, 2, 3]), runner.begin([4, 5, 6])
    runner.step(other)
    runner.step(seq, table=runner.table(other))


def reads_a_table_from_before_a_preemption(runner):
    seq = runner.begin([1, 2, 3, 4, 5])
    runner.step(seq)
    stale = runner.table(seq)
    runner.kv.close(seq)
    runner.step(runner.begin([9] * 9))
    again = runner.begin([1, 2, 3, 4, 5, 6])
    runner.step(again, table=stale)


def reads_through_a_table_that_is_too_short(runner):
    seq = runner.begin([1, 2, 3, 4, 5])
    runner.step(seq, table=runner.table(seq)[:1])


def reads_a_token_too_many(runner):
    seq = runner.begin([1, 2, 3, 4, 5])
    runner.step(seq, length=6)


def skips_a_chunk(runner):
    seq = runner.begin([1, 2, 3, 4, 5, 6, 7, 8])
    runner.step(seq, count=3)
    runner.kv.commit(seq, 2)
    runner.step(seq)


def forgets_the_copies_of_a_fork(runner):
    seq = runner.begin([1, 2, 3, 4, 5, 6])
    runner.step(seq)
    child, _ = runner.kv.fork(seq)
    runner.decode(child, 9)


def copies_less_than_a_fork_needs(runner):
    seq = runner.begin([1, 2, 3, 4, 5, 6])
    runner.step(seq)
    child, (order,) = runner.kv.fork(seq)
    runner.shadow.copied([kvcore.CopyOrder(order.src, order.dst, 1, 0)])
    runner.decode(child, 9)


def copies_into_a_block_that_is_taken(runner):
    seq, other = runner.begin([1, 2, 3, 4, 5, 6]), runner.begin([7, 8])
    runner.step(seq)
    runner.step(other)
    _, (order,) = runner.kv.fork(seq)
    (taken,) = runner.table(other)
    runner.shadow.copied([kvcore.CopyOrder(order.src, taken, 2, 0)])


def hybrid(*prompts):
    """A runner, and sequences that have computed their prompts."""
    runner = Runner(groups=STATES)
    seqs = [runner.begin(prompt) for prompt in prompts]
    for seq in seqs:
        runner.step(seq)
    for seq in seqs:
        runner.kv.append(seq, 9)
        runner.kv.reserve_to(seq, seq.num_tokens)
    return runner, *seqs


def reads_the_state_of_another(_):
    runner, seq, other = hybrid([1, 2, 3], [4, 5, 6])
    runner.shadow.advanced(seq, other.state_blocks[0], seq.state_blocks[1], 1)


def reads_the_pieces_of_a_state_in_the_wrong_order(_):
    runner, seq = hybrid([1, 2, 3])
    reads, writes = seq.state_blocks
    runner.shadow.advanced(seq, reads[::-1], writes, 1)


def starts_from_zeros_where_there_is_a_state(_):
    runner, seq = hybrid([1, 2, 3])
    runner.shadow.advanced(seq, (), seq.state_blocks[1], 1)


def writes_a_state_after_tokens_that_are_not_there(_):
    runner, seq = hybrid([1, 2, 3])
    runner.shadow.advanced(seq, *seq.state_blocks, 2)


def commits_a_state_that_was_never_written(_):
    runner, seq = hybrid([1, 2, 3])
    runner.shadow.wrote(seq, 3, runner.slots(seq, 3, 4))
    runner.kv.commit(seq, 1)
    runner.decode(seq, 9)


def commits_a_state_that_has_seen_rejected_drafts(_):
    runner, seq = hybrid([1, 2, 3])
    runner.kv.extend(seq, [5, 6])
    runner.kv.reserve_to(seq, seq.num_tokens)
    runner.shadow.advanced(seq, *seq.state_blocks, 3)
    runner.kv.commit(seq, 1)
    runner.kv.truncate(seq, seq.num_computed_tokens)
    runner.kv.append(seq, 9)
    runner.kv.reserve_to(seq, seq.num_tokens)
    runner.shadow.advanced(seq, *seq.state_blocks, 1)


def does_not_load_what_it_swaps_in(runner):
    seq = runner.begin([1, 2, 3, 4, 5, 6])
    runner.kv.commit(seq, 4)
    runner.step(seq)


def fills_a_block_of_another_from_the_host(runner):
    seq, other = runner.begin([1, 2, 3]), runner.begin([4, 5, 6])
    runner.step(other)
    runner.shadow.filled(seq, runner.table(other))


def loads_after_the_load_has_ended(runner):
    lease = runner.kv.begin_load(runner.kv.open([1, 2, 3, 4, 5, 6]), 5)
    lease.end()
    runner.shadow.loaded(lease)


def goes_on_with_less_than_was_to_be_loaded(runner):
    seq = runner.kv.open([1, 2, 3, 4, 5, 6])
    runner.kv.commit_load(runner.kv.begin_load(seq, 5))
    runner.kv.reserve(seq, 1)
    runner.step(seq)


PLANTED = {
    writes_a_slot_too_far: "misplaced",
    writes_with_the_slots_of_another: "foreign",
    writes_into_the_null_block: "null",
    writes_nowhere: "null",
    writes_into_a_freed_block: "freed",
    writes_into_a_block_that_it_has_hit: "shared",
    computes_its_own_prefix_again: "double",
    reads_blocks_in_the_wrong_order: "table",
    reads_the_table_of_another: "foreign",
    reads_a_table_from_before_a_preemption: "foreign",
    reads_through_a_table_that_is_too_short: "table",
    reads_a_token_too_many: "length",
    skips_a_chunk: "unwritten",
    forgets_the_copies_of_a_fork: "unwritten",
    copies_less_than_a_fork_needs: "unwritten",
    copies_into_a_block_that_is_taken: "foreign",
    reads_the_state_of_another: "table",
    reads_the_pieces_of_a_state_in_the_wrong_order: "table",
    starts_from_zeros_where_there_is_a_state: "table",
    writes_a_state_after_tokens_that_are_not_there: "length",
    commits_a_state_that_was_never_written: "foreign",
    commits_a_state_that_has_seen_rejected_drafts: "foreign",
    does_not_load_what_it_swaps_in: "unwritten",
    fills_a_block_of_another_from_the_host: "foreign",
    loads_after_the_load_has_ended: "freed",
    goes_on_with_less_than_was_to_be_loaded: "unwritten",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named_and_shows_the_calls(plant):
    with pytest.raises(SanitizerError) as caught:
        plant(Runner())
    assert caught.value.kind == PLANTED[plant], str(caught.value)
    assert caught.value.calls
    assert caught.value.calls[-1] in str(caught.value)


def test_what_was_swapped_in_may_be_read():
    runner = Runner()
    seq = runner.begin([1, 2, 3, 4, 5, 6])
    runner.kv.commit(seq, 4)
    runner.shadow.filled(seq, runner.table(seq)[:1])
    runner.step(seq)


def test_what_was_loaded_may_be_read_and_the_last_block_written_on():
    runner = Runner()
    seq = runner.kv.open([1, 2, 3, 4, 5, 6])
    lease = runner.kv.begin_load(seq, 5)
    runner.shadow.loaded(lease)
    runner.kv.commit_load(lease)
    runner.kv.reserve(seq, 1)
    runner.step(seq)
    runner.shadow.loaded(runner.kv.lease(seq))  # loads nothing


def test_blocks_that_are_begun_are_told_once_to_be_poisoned():
    runner = Runner()
    seq = runner.begin([1, 2, 3, 4, 5])
    runner.step(seq)
    assert runner.shadow.take_fresh() == [1, 2]
    runner.decode(seq, 6)
    assert runner.shadow.take_fresh() == []


def test_closed_sequences_are_forgotten():
    runner = Runner()
    for number in range(200):
        seq = runner.begin([number, 1])
        runner.step(seq)
        runner.kv.close(seq)
    assert len(runner.shadow._names) <= 64
