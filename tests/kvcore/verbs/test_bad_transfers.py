"""KV that never arrived: whose request is open, or gone, or known by its blocks alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.identity.multimodal import cut_items, decode_items, encode_items


def filled(kv, tokens, **options):
    seq = kv.open(tokens, **options)
    kv.reserve(seq, seq.num_tokens - seq.num_computed_tokens)
    kv.commit(seq, seq.num_tokens - seq.num_computed_tokens)
    return seq


def test_a_transfer_that_was_bad_is_not_hit_although_its_request_has_gone():
    kv = kvcore.KVCacheManager(16, 4)
    bystander = filled(kv, [5] * 5)
    loader = filled(kv, range(9))
    lease = kv.lease(loader, "load", num_tokens=8)
    reader = filled(kv, [*range(8), 20, 21, 22, 23, 24])
    kv.close(loader)
    assert kv.fail_transfer(lease) == (reader,)
    assert not lease.is_active
    assert (reader.num_computed_tokens, bystander.num_computed_tokens) == (0, 5)
    assert kv.plan([*range(8), 20]).num_cached_tokens == 0
    assert kv.fail_transfer(lease) == ()  # late: harmless
    kv.close(reader)
    kv.close(bystander)
    assert kv.num_free_blocks == kv.num_usable_blocks
    kvcore.check(kv)


def test_blocks_that_were_bad_take_what_was_built_on_them_along():
    kv = kvcore.KVCacheManager(16, 4)
    seq = filled(kv, range(13))
    bad = seq.block_table[1]
    kv.close(seq)
    other = filled(kv, [*range(4), 30, 31, 32, 33, 34])
    assert kv.fail_blocks([bad, bad]) == ()
    assert kv.plan(range(13)).num_cached_tokens == 4
    assert kv.plan([*range(4), 30, 31, 32, 33, 9]).num_cached_tokens == 8
    assert kv.fail_blocks([other.block_table[0], 15]) == (other,)
    assert (other.num_computed_tokens, kv.plan(range(13)).num_cached_tokens) == (0, 0)
    kvcore.check(kv)


def test_a_block_that_was_bad_is_told_from_others_by_its_image_too():
    cat, dog = (kvcore.MultimodalItem(name, 1, 6, bytes([1, 0] * 3)) for name in (b"cat", b"dog"))
    groups = [kvcore.FullAttention(4), kvcore.SlidingWindow(3, 6)]
    kv = kvcore.KVCacheManager(40, 2, groups=groups)
    bad = []
    for item in (cat, dog):
        seq = filled(kv, [7] * 13, items=[item])
        bad.append(seq.block_table[1])  # the first is in doubt with its first token, which is text
        kv.close(seq)
    kv.fail_blocks(bad[:1])
    assert kv.plan([7] * 13, items=[cat]).num_cached_tokens == 0
    assert kv.plan([7] * 13, items=[dog]).num_cached_tokens == 12


@pytest.mark.parametrize(("tokens", "kept"), [(6, 5), (9, 6), (9, 4), (9, 8)])
def test_what_is_sound_of_a_half_full_block_stays_where_nobody_else_has_it(tokens, kept):
    kv = kvcore.KVCacheManager(16, 4)
    seq = filled(kv, range(tokens))
    assert kv.fail_load(seq, kept) == (seq,)
    assert (seq.num_computed_tokens, len(seq.block_table)) == (kept, -(-kept // 4))
    kv.reserve_to(seq, tokens)
    kv.commit(seq, tokens - kept)
    kvcore.check(kv)
    assert kv.plan([*range(tokens), 1]).num_cached_tokens == tokens // 4 * 4


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([0, 1, 2, 3], 4),
        ([0, 1, 2, 3, 4], 4),
        ([0, 1, 2, 3, 4, 5], 4),
        ([0, 1, 2, 3, 9], 5),
        ([0, 1, 2, 3, 2], 5),
        ([0, 1, 1, 3, 4, 5], 6),
    ],
)
def test_who_has_computed_the_first_bad_token_too_is_set_back(tokens, kept):
    kv = kvcore.KVCacheManager(16, 4)
    loader, other = kv.open(range(9)), kv.open(tokens)
    for seq in (loader, other):  # each in blocks of its own
        kv.reserve(seq, seq.num_tokens)
    for seq in (other, loader):
        kv.commit(seq, seq.num_tokens)
    set_back = (loader, other) if kept < len(tokens) else (loader,)
    assert kv.fail_load(loader, 4) == set_back
    assert (loader.num_computed_tokens, other.num_computed_tokens) == (4, kept)
    kvcore.check(kv)


def test_nothing_is_taken_back_where_nothing_was_computed_after_what_is_sound():
    """Others have computed more of the same prompt, and did not build on this sequence's."""
    kv = kvcore.KVCacheManager(16, 4)
    longer = filled(kv, range(13))
    short = kv.open(range(9))
    assert short.num_computed_tokens == 8
    assert kv.fail_load(short, 8) == ()
    assert kv.plan(range(14)).num_cached_tokens == 12
    assert kv.fail_load(short, 7) == (longer, short)
    assert (longer.num_computed_tokens, short.num_computed_tokens) == (4, 4)
    assert kv.plan(range(14)).num_cached_tokens == 4
    kvcore.check(kv)


def test_a_block_that_another_has_too_is_given_back_whole():
    kv = kvcore.KVCacheManager(16, 4)
    seq = filled(kv, range(9))
    other = kv.open(range(9))
    assert kv.fail_load(seq, 6) == (seq, other)
    assert (seq.num_computed_tokens, other.num_computed_tokens) == (4, 4)
    kvcore.check(kv)


@pytest.mark.parametrize("wrong", [None, 0, "lease"])
def test_what_is_no_lease_of_this_manager_is_refused(wrong):
    kv, other = kvcore.KVCacheManager(8, 4), kvcore.KVCacheManager(8, 4)
    lease = other.lease(filled(other, [1, 2])) if wrong == "lease" else wrong
    with pytest.raises((kvcore.InvalidArgumentError, TypeError), match=r"lease|Lease"):
        kv.fail_transfer(lease)  # a compiled function refuses what is no lease at its door


@pytest.mark.parametrize("wrong", [[0], [8], [-1], [True], ["1"], [1, 2.5]])
def test_what_is_no_block_is_refused(wrong):
    kv = kvcore.KVCacheManager(8, 4)
    seq = filled(kv, [1, 2, 3, 4, 5])
    with pytest.raises(kvcore.InvalidArgumentError, match="block_ids: wanted"):
        kv.fail_blocks(wrong)
    assert seq.num_computed_tokens == 5


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from([None, 0, 1])), max_size=4
    ),
    st.integers(1, 7),
    st.integers(0, 6),
)
def test_items_are_read_from_blocks_as_they_were_written(runs, size, num_blocks):
    items, first = [], 0
    for gap, length, bit in runs:
        mask = None if bit is None else bytes((row + bit) % 2 for row in range(length))
        items.append(kvcore.MultimodalItem(b"x" * (1 + first % 3), first + gap, length, mask))
        first += gap + length
    encoded = encode_items(items, 0, num_blocks, size)
    assert decode_items(encoded, size) == cut_items(tuple(items), num_blocks * size)


@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
@pytest.mark.parametrize("sound", [0, 1, 2, 3])
def test_a_copy_with_the_same_image_is_taken_along_and_one_with_another_is_not(
    start, sound, before
):
    """Wherever in its block the image begins, wherever in it the KV stops being sound."""
    kv = kvcore.KVCacheManager(24, 4)
    prompt = range(before + 9)
    images = [
        (kvcore.MultimodalItem(content, before + start, 2),) for content in (b"a cat", b"a dog")
    ]
    loader, copy, other = [
        filled(kv, prompt, items=items, skip_reading=True)
        for items in (images[0], images[0], images[1])
    ]
    kv.close(copy)
    kv.close(other)
    assert kv.fail_load(loader, before + sound) == (loader,)
    kv.close(loader)
    assert kv.plan(prompt, items=images[0]).num_cached_tokens == before
    is_seen = start <= sound  # before it the two prompts are one
    assert kv.plan(prompt, items=images[1]).num_cached_tokens == before + (8 if is_seen else 0)
    kvcore.check(kv)


def test_blocks_under_many_leases_are_deferred_until_the_last_ends():
    """More than CPython keeps small integers for."""
    kv = kvcore.KVCacheManager(4, 4)
    seq = filled(kv, [1, 2, 3])
    leases = [kv.lease(seq) for _ in range(300)]
    assert kv.leases.num_deferred_blocks() == 0
    kv.close(seq)
    assert kv.leases.num_deferred_blocks() == 1
    for lease in leases:
        lease.end()
    assert (kv.leases.num_deferred_blocks(), kv.num_free_blocks) == (0, 3)
