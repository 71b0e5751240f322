"""What each kind of attention still needs, against attention written out (P19, P24)."""

import dataclasses
import random
from math import lcm

import pytest

import kvcore
from kvcore.tables.block_table import BlockTable
from kvcore.tables.groups import first_kept_block, resolve_groups
from kvcore.verbs.share import longest_servable
from tests.kvcore.naive import sees

HORIZON = 40
GROUPS = [
    ("full", 0, kvcore.FullAttention()),
    *(("window", span, kvcore.SlidingWindow(span)) for span in (1, 2, 3, 5, 8, 30)),
    *(("chunk", span, kvcore.ChunkedLocal(span)) for span in (1, 2, 3, 5, 8, 30)),
]
NAMES = [f"{kind} {span}" for kind, span, _ in GROUPS]


def needed(kind, span, position):
    """The positions that any query from `position` on sees, of those before it."""
    queries = range(position, HORIZON)
    return [k for k in range(position + 1) if any(sees(kind, span, q, k) for q in queries)]


@pytest.mark.parametrize(("kind", "span", "group"), GROUPS, ids=NAMES)
def test_the_first_visible_position_is_the_first_that_a_later_query_sees(kind, span, group):
    for position in range(HORIZON):
        assert group.first_visible(position) == needed(kind, span, position)[0]


@pytest.mark.parametrize(("kind", "span", "group"), GROUPS, ids=NAMES)
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_group_keeps_what_is_visible_and_always_the_last_full_block(kind, span, group, size):
    for computed in range(HORIZON):
        full = computed // size
        seen = {position // size for position in needed(kind, span, computed)}
        kept = min({*seen, max(0, full - 1)})
        assert first_kept_block(group, size, computed) == kept


@pytest.mark.parametrize("group", [group for _, _, group in GROUPS], ids=NAMES)
def test_groups_are_small_values_that_never_change(group):
    assert not hasattr(group, "__dict__")
    assert dataclasses.replace(group) == group
    assert hash(dataclasses.replace(group)) == hash(group)
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.block_size = 8
    assert group.block_size == 0


def test_block_sizes_are_filled_in_and_everything_else_is_kept():
    given = [
        kvcore.FullAttention(),
        kvcore.FullAttention(8),
        kvcore.SlidingWindow(5),
        kvcore.SlidingWindow(5, 12),
        kvcore.ChunkedLocal(6),
        kvcore.ChunkedLocal(6, 16),
    ]
    assert resolve_groups(given, 4) == (
        kvcore.FullAttention(4),
        kvcore.FullAttention(8),
        kvcore.SlidingWindow(5, 4),
        kvcore.SlidingWindow(5, 12),
        kvcore.ChunkedLocal(6, 4),
        kvcore.ChunkedLocal(6, 16),
    )
    assert resolve_groups(None, 4) == (kvcore.FullAttention(4),)
    assert resolve_groups([kvcore.FullAttention(2**20)], 1) == (kvcore.FullAttention(2**20),)


@pytest.mark.parametrize("size", [-1, 2**20 + 1])
def test_a_block_size_out_of_range_is_named(size):
    with pytest.raises(kvcore.InvalidArgumentError, match=f"block_size.*{size}"):
        resolve_groups([kvcore.SlidingWindow(3, size)], 1)


def test_a_block_size_that_is_no_multiple_is_named_with_what_it_must_divide():
    with pytest.raises(kvcore.InvalidArgumentError, match="multiples of 4, got 6"):
        resolve_groups([kvcore.FullAttention(8), kvcore.ChunkedLocal(3, 6)], 4)


def test_a_window_and_a_chunk_are_at_least_one_token():
    assert kvcore.SlidingWindow(1).window == kvcore.ChunkedLocal(1).chunk == 1
    for make in (kvcore.SlidingWindow, kvcore.ChunkedLocal):
        with pytest.raises(kvcore.InvalidArgumentError, match="at least 1, got 0"):
            make(0)


def servable(groups, paths, num_tokens):
    """Whether every group has the blocks that a query after `num_tokens` needs, one by one."""
    for (kind, span, group), path in zip(groups, paths, strict=True):
        size = group.block_size
        if num_tokens % size or num_tokens > len(path) * size:
            return False
        full = num_tokens // size
        wanted = {position // size for position in needed(kind, span, num_tokens)} | {full - 1}
        if any(path[place] is None for place in wanted if place < full):
            return False
    return True


def without_gaps(kind, path):
    """What a look-up finds: where attention is full it ends at the first gap."""
    return path[: path.index(None)] if kind == "full" and None in path else path


def test_the_longest_prefix_is_the_longest_of_all_that_every_group_can_serve():
    dice = random.Random(0)
    spoken_for = 0
    for _ in range(400):
        groups = [
            (kind, span, dataclasses.replace(group, block_size=dice.choice([1, 2, 3, 4])))
            for kind, span, group in dice.choices(GROUPS, k=dice.randint(1, 3))
        ]
        kinds = [group for _, _, group in groups]
        room = dice.randint(0, 24)
        paths = [
            [
                None if dice.random() < 0.2 else kvcore.Block(1)
                for _ in range(dice.choice([room, room, dice.randint(0, room)]) // g.block_size)
            ]
            for g in kinds
        ]
        found = [without_gaps(kind, path) for (kind, _, _), path in zip(groups, paths, strict=True)]
        rooms = [len(p) * g.block_size for p, g in zip(found, kinds, strict=True)]
        most = min(dice.randint(0, 24), *rooms)
        step = lcm(*[group.block_size for group in kinds])
        longest = longest_servable([BlockTable(kind) for kind in kinds], found, most, step)
        tried = [n for n in range(1, most + 1) if servable(groups, paths, n)]
        assert longest == max(tried, default=0)
        spoken_for += longest > 0
    assert spoken_for > 100


@pytest.mark.parametrize("gap", [None, 298, 299, 300, 301])
def test_a_long_prefix_is_served_up_to_the_last_gap_that_a_window_sees(gap):
    """More blocks than CPython keeps small integers for; in a block each, a window of three."""
    kv = kvcore.KVCacheManager(700, 1, groups=[kvcore.FullAttention(), kvcore.SlidingWindow(3)])
    seq = kv.open(range(302))
    for _ in range(151):  # what a window passes waits to be reused; nothing else does
        kv.reserve(seq, 2)
        kv.commit(seq, 2)
    path = kv.pool.path(seq.namespace_key, seq.packed.tobytes(), 302, 1)
    if gap is not None:
        path[gap] = None
    tables = [BlockTable(group) for group in kv.groups]
    full = list(seq.tables[0].blocks)
    wanted = 301 if gap is None or gap < 299 else gap
    assert longest_servable(tables, [full, path], 301, 1) == wanted
