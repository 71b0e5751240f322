"""P28: what a call costs depends on what it takes, gives back or finds, never on the pool's size.

Nor on how many sequences are open, blocks kept and leases held. Counted, not timed. Each verb runs
in equal situations in a small and in a large pool, with few and with many others; the bytecodes
that kvcore executes must be equal in number, and so, but for what a growing list keeps in reserve,
the most memory that the call needs at once, which is where a copied list or slice shows.
"""

import functools
import gc
import sys
import tracemalloc
from array import array
from pathlib import Path

import pytest

import kvcore
from kvcore.eviction.idle_blocks import IdleBlocks, _still
from tests.bench.allocator.verbs import codes_run
from tests.kvcore.pools import published

HOME = str(Path(kvcore.__file__).parent)
SMALL, LARGE = 512, 512 + 6 * 600  # the same remainder when they are filled
SPARE_BYTES = 6000  # a list with an entry for each block of the large pool grows by an eighth

GROUPS = {
    "full": [kvcore.FullAttention()],
    "full and window": [kvcore.FullAttention(), kvcore.SlidingWindow(6)],
    "wide, window": [kvcore.FullAttention(8), kvcore.SlidingWindow(6)],
}


def never_used(kv):
    """Most blocks were never held."""


def empty(kv):
    """Most blocks were held once, and hold nothing."""
    kv.close(filled(kv, 4 * (kv.num_free_blocks // len(kv.groups) - 2), namespace=None))


def idle(kv):
    """Most blocks hold content that is not used."""
    for number in range(kv.num_free_blocks // (3 * len(kv.groups))):
        kv.close(filled(kv, 12, first=1000 * (number + 1)))


def filled(kv, length, *, first=0, **options):
    seq = kv.open(range(first, first + length), **options)
    kv.reserve(seq, length - seq.num_computed_tokens)
    kv.commit(seq, length - seq.num_computed_tokens)
    return seq


def open_sequences(kv, count):
    return [filled(kv, 7, first=10_000 + 100 * number) for number in range(count)]


def kept_blocks(kv, count):
    """Closed, and each kept until a time of its own."""
    for number in range(count):
        wish = kvcore.Retention(0, 4, 1 + number % 3, max_steps=100 + number)
        kv.close(filled(kv, 7, first=10_000 + 100 * number, retain=[wish]))


def leased_blocks(kv, count):
    """What leases alone hold, each until a time of its own."""
    for number, seq in enumerate(open_sequences(kv, count)):
        kv.lease(seq, max_steps=100 + number)
        kv.close(seq)


OTHERS = {
    "open sequences": open_sequences,
    "kept blocks": kept_blocks,
    "leased blocks": leased_blocks,
}
FEW, MANY = 3, 123  # the same remainder, and no more than both pools have room for


class Situation:
    """A pool of a size, most of it in one state, and the same few sequences in each."""

    def __init__(self, layout, most, num_blocks, others=None, count=0, **options):
        self.kv = kvcore.KVCacheManager(num_blocks, 4, groups=GROUPS[layout], **options)
        most(self.kv)
        if others is not None:
            others(self.kv, count)
        self.one = filled(self.kv, 30)
        self.other = filled(self.kv, 21, first=100)
        self.uncached = filled(self.kv, 24, first=500, namespace=None)
        self.kv.append(self.uncached, 1)
        self.kv.reserve(self.uncached, 1)
        self.loaded = filled(self.kv, 16, first=700)
        self.lease = self.kv.lease(self.other)
        self.transfer = self.kv.lease(self.loaded, "load")
        waiting = self.kv.open(range(900, 930))
        self.arriving = self.kv.begin_load(waiting, 24)
        self.caller = self.kv.open(range(950, 980))
        self.tables, self.slots = array("i", [0] * 64), array("q", [0] * 2)
        self.hit = kvcore.pack([*range(30), 1])

    def decode(self):
        for _ in range(9):
            self.kv.decode_step([self.one, self.other], [1, 2])


VERBS = {
    "open, a miss": lambda s: s.kv.open([9, 9, 9, 9, 9]),
    "open, a hit": lambda s: s.kv.open(s.hit),
    "plan": lambda s: s.kv.plan(s.hit),
    "reserve": lambda s: s.kv.reserve(s.one, 40),
    "can reserve": lambda s: s.kv.can_reserve(s.one, 40),
    "reserve to": lambda s: s.kv.reserve_to(s.one, 70),
    "append": lambda s: s.kv.append(s.one, 1),
    "extend": lambda s: s.kv.extend(s.one, [1, 2, 3]),
    "write a step": lambda s: s.kv.write_step(
        [s.one, s.uncached], s.tables, s.slots, row_stride=32
    ),
    "commit, a window moves": lambda s: s.kv.commit(s.uncached, 1),
    "decode": Situation.decode,
    "reserve and commit of a step": lambda s: (
        s.kv.reserve_step([s.one, s.uncached], [8, 8]),
        s.kv.commit_step([s.one, s.uncached], [0, 1]),
    ),
    "a step, a window moves": lambda s: s.kv.step([s.uncached], [1], [7], num_reserved=[8]),
    "a step ahead": lambda s: (
        s.kv.step([s.one, s.uncached], [0, 1], num_known=0, num_expected=1),
        s.kv.resolve_step([s.one, s.uncached], [7, 8]),
    ),
    "expect and resolve": lambda s: (s.kv.expect(s.one, 3), s.kv.resolve(s.one, [1, 2, 3])),
    "what is missing, exclusive, shared": lambda s: (
        s.kv.num_missing_blocks(s.one, 40),
        s.kv.num_exclusive_blocks(s.one),
        s.kv.num_shared_blocks(s.one),
    ),
    "truncate": lambda s: s.kv.truncate(s.one, 5),
    "fork": lambda s: s.kv.fork(s.one),
    "close": lambda s: s.kv.close(s.one),
    "close, nothing of it cached": lambda s: s.kv.close(s.uncached),
    "lease": lambda s: s.kv.lease(s.one),
    "end a lease": lambda s: s.lease.end(),
    "tick": lambda s: s.kv.tick(),
    "begin a load": lambda s: s.kv.begin_load(s.caller, 24, max_steps=7),
    "commit a load": lambda s: s.kv.commit_load(s.arriving),
    "fail a load": lambda s: s.kv.fail_load(s.loaded, 0),
    "fail a transfer": lambda s: s.kv.fail_transfer(s.transfer),
    "fail blocks": lambda s: s.kv.fail_blocks([b.block_id for b in s.transfer.blocks]),
    "statistics": lambda s: s.kv.stats(),
    "names": lambda s: s.one.block_hashes(),
}
FAILURES = ("fail a load", "fail a transfer", "fail blocks")
SNAPSHOT = {"snapshot": lambda s: s.kv.snapshot()}  # where events are recorded


def bytes_needed(call, *args):
    """How many bytes a call has allocated at most at once."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call(*args)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def bytes_left(call, *args):
    """How many bytes a call leaves behind when it is made a second time."""
    tracemalloc.start()
    try:
        call(*args)  # what the second one frees has been allocated while it was watched
        gc.collect()  # Python keeps freed tuples for later; a collection lets them go
        before = tracemalloc.get_traced_memory()[0]
        call(*args)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def difference(verb, make, sizes):
    """What a verb costs in the larger of two situations beyond the smaller, in words."""
    codes = [codes_run(verb, make(size)) for size in sizes]
    found = [] if codes[0] == codes[1] else [f"bytecodes: {codes[0]} and {codes[1]}"]
    needed = [bytes_needed(verb, make(size)) for size in sizes]
    if needed[1] > needed[0] + SPARE_BYTES:
        found.append(f"bytes at once: {needed[0]} and {needed[1]}")
    return found


def excess(layout, most, verb, **options):
    """What a verb costs in the large pool beyond what it costs in the small one."""
    make = functools.partial(Situation, layout, most, **options)
    return difference(verb, make, (SMALL, LARGE))


def excess_among(others, verb, layout="full and window", **options):
    """What a verb costs among many others beyond what it costs among few, in one size of pool."""
    return difference(
        verb,
        lambda count: Situation(layout, empty, LARGE, others, count, **options),
        (FEW, MANY),
    )


source_build = pytest.mark.source_build  # compiled functions run no bytecode


@source_build
@pytest.mark.parametrize("most", [never_used, empty, idle])
@pytest.mark.parametrize("layout", ["full", "wide, window"])
def test_no_verb_costs_more_in_a_larger_pool(layout, most):
    costs = {name: excess(layout, most, verb) for name, verb in VERBS.items()}
    if most is idle:  # it looks at all that begins as the failed block did, and next to it
        for name in FAILURES:
            assert costs.pop(name) != [], name
    assert {name: cost for name, cost in costs.items() if cost} == {}


@source_build
def test_nor_with_events_and_lifetimes():
    options = {"record_events": "xxh3-128", "record_lifetimes": True}
    for name, verb in (VERBS | SNAPSHOT).items():
        assert excess("full and window", empty, verb, **options) == [], name


@source_build
def test_a_snapshot_costs_what_it_tells():
    assert excess("full", idle, SNAPSHOT["snapshot"], record_events="xxh3-128") != []


WALKS = {
    "open sequences": FAILURES,
    "kept blocks": FAILURES,  # which begin where the failed one does
    "leased blocks": FAILURES,
}


@source_build
@pytest.mark.parametrize("others", OTHERS)
def test_no_verb_costs_more_among_many_others(others):
    costs = {name: excess_among(OTHERS[others], verb) for name, verb in VERBS.items()}
    assert {name for name, cost in costs.items() if cost} == set(WALKS[others])


@source_build
@pytest.mark.parametrize("layout", ["full", "wide, window"])
def test_time_passes_for_what_ends_alone(layout):
    """Two leases or wishes end, of few or of many."""
    for others in (kept_blocks, leased_blocks):
        assert excess_among(others, lambda s: s.kv.tick(101), layout) == []


@source_build
@pytest.mark.parametrize("most", [never_used, empty])
def test_a_reset_costs_what_it_forgets(most):
    assert excess("full", most, lambda s: s.kv.reset()) == []


def test_a_reset_of_a_pool_that_was_never_used_makes_no_block():
    kv = kvcore.KVCacheManager(10**9, 16)
    kv.reset()
    assert bytes_needed(kv.reset) < 2000


def test_a_verb_needs_no_memory_for_blocks_that_it_does_not_touch():
    """On both builds."""
    for name, verb in VERBS.items():
        for most in (empty, idle):
            needed = [
                bytes_needed(verb, Situation("full and window", most, size))
                for size in (SMALL, LARGE)
            ]
            assert needed[1] <= needed[0] + SPARE_BYTES, (name, needed)


def live_again(kv, times):
    for _ in range(times):
        kv.close(filled(kv, 12, first=10**6 + 100 * kv._next_seq_id))  # never the same prompt
        kv.tick()


def test_requests_that_come_and_go_leave_nothing_behind():
    kv = Situation("full and window", idle, SMALL).kv
    assert bytes_left(live_again, kv, 300) < 1000


# The checker is checked: one bug of each kind.


def copies_the_stack(pool, blocks, released):
    freed = pool._uncount(list(released), is_own=False)
    left = pool.empty_blocks[: -len(blocks)] if blocks else pool.empty_blocks
    stack = left + [block for block in freed if block.node is None]
    pool.hand_out(blocks)
    pool.empty_blocks = stack
    pool._count_emptied([block for block in freed if block.node is None])
    pool._queue_freed([block for block in freed if block.node is not None])


def walks_the_blocks(pool):
    return pool.num_usable_blocks - sum(1 for _ in pool.free_blocks())


def makes_all_blocks(pool, *, canonical_order=False):
    pool.empty_blocks = list(pool.free_blocks())[::-1]
    return 0


def keeps_a_journal(give_back):
    journal = []

    def noting(pool, blocks):
        journal.extend([object() for _ in blocks])
        give_back(pool, blocks)

    return noting


@source_build
def test_a_copied_list_is_seen(monkeypatch):
    monkeypatch.setattr(kvcore.BlockPool, "exchange", copies_the_stack)
    (told,) = excess("full and window", empty, VERBS["a step, a window moves"])
    assert told.startswith("bytes at once")


@source_build
def test_a_walk_is_seen(monkeypatch):
    monkeypatch.setattr(kvcore.BlockPool, "num_used_slots", property(walks_the_blocks))
    told = excess("full", empty, VERBS["statistics"])
    assert told[0].startswith("bytecodes")


def walking(verb):
    """A verb that looks at every free block first."""

    @functools.wraps(verb)
    def walks(self, *args, **options):
        pool = self.owner.pool if isinstance(self, kvcore.KVSequence) else self.pool
        walks_the_blocks(pool)
        return verb(self, *args, **options)

    return walks


@source_build
def test_a_walk_is_seen_in_every_verb(monkeypatch):
    for name, verb in list(vars(kvcore.KVCacheManager).items()):
        if callable(verb) and not name.startswith("_"):
            monkeypatch.setattr(kvcore.KVCacheManager, name, walking(verb))
    monkeypatch.setattr(kvcore.KVSequence, "block_hashes", walking(kvcore.KVSequence.block_hashes))
    monkeypatch.setattr(kvcore.LeaseBook, "pool", property(lambda book: book._pool), raising=False)
    monkeypatch.setattr(kvcore.LeaseBook, "end", walking(kvcore.LeaseBook.end))
    for name, verb in (VERBS | SNAPSHOT).items():
        small, large = (
            Situation("full", empty, size, record_events="xxh3-128") for size in (SMALL, LARGE)
        )
        assert codes_run(verb, large) > codes_run(verb, small) + LARGE - SMALL, name


def walks_the_sequences(manager):
    return sum([seq.num_tokens for seq in manager.sequences.values()])


def walks_the_kept(idle, now):
    return [_still(wishes, now) for wishes in idle.kept.values()]


def walks_the_leases(book, step):
    return tuple([lease for lease in book.active.values() if lease.num_exclusive_blocks < 0])


@source_build
@pytest.mark.parametrize(
    ("others", "verb", "owner", "method", "planted"),
    [
        (open_sequences, "statistics", kvcore.KVCacheManager, "stats", walks_the_sequences),
        (kept_blocks, "tick", IdleBlocks, "expire", walks_the_kept),
        (leased_blocks, "tick", kvcore.LeaseBook, "due", walks_the_leases),
    ],
    ids=["sequences", "kept", "leases"],
)
def test_a_walk_through_the_others_is_seen(monkeypatch, others, verb, owner, method, planted):
    monkeypatch.setattr(owner, method, planted)
    assert excess_among(others, VERBS[verb])[0].startswith("bytecodes")


@source_build
def test_a_pool_that_is_made_by_its_reset_is_seen(monkeypatch):
    monkeypatch.setattr(kvcore.BlockPool, "clear", makes_all_blocks)
    assert len(excess("full", never_used, lambda s: s.kv.reset())) == 2


@source_build
def test_a_list_that_grows_for_ever_is_seen(monkeypatch):
    kv = Situation("full and window", idle, SMALL).kv
    monkeypatch.setattr(kvcore.BlockPool, "give_back", keeps_a_journal(kvcore.BlockPool.give_back))
    assert bytes_left(live_again, kv, 300) > 1000


# The collector.


def collections(call):
    """How many objects the garbage collector found to free while a call ran, and how often it ran.

    And of the blocks and nodes of kvcore, how many it had to walk.
    """
    found, runs, walked = 0, 0, 0

    def note(phase, info):
        nonlocal found, runs, walked
        if phase == "start":
            young = gc.get_objects(generation=info["generation"])
            walked += sum([isinstance(thing, kvcore.Node) for thing in young])
        else:
            found += info["collected"]
            runs += 1

    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # of each version its own
    gc.collect()
    gc.freeze()
    gc.callbacks.append(note)
    try:
        call()
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    return found, runs, walked


def busy(kv):
    """Chats of growing histories over a system prompt, until the pool has evicted much."""
    for turn in range(40):
        running = [filled(kv, 40 + 8 * turn, first=1000 * chat) for chat in range(12)]
        for step in range(20):
            kv.decode_step(running, [step] * len(running))
        for seq in running:
            kv.close(seq)


def test_the_collector_finds_no_garbage_and_meets_no_block_of_a_prefaulted_pool():
    kv = kvcore.KVCacheManager(1200, 4, prefault=True)
    found, runs, walked = collections(lambda: busy(kv))
    assert kv.stats().num_evicted_blocks > 1200
    assert (found, walked) == (0, 0)
    assert runs < 60


def test_without_it_the_collector_meets_the_blocks_that_are_made():
    kv = kvcore.KVCacheManager(1200, 4)
    found, _, walked = collections(lambda: busy(kv))
    assert found == 0
    assert walked > 500


def test_a_prefaulted_pool_gives_the_same_ids():
    told = []
    for prefault in (False, True):
        kv = kvcore.KVCacheManager(40, 4, prefault=prefault)
        kv.close(filled(kv, 30))
        told.append((filled(kv, 50, first=7).block_table, kv.stats()))
        assert len(kv.pool._made) == (40 if prefault else 21)
    assert told[0] == told[1]


# A call in the usual case takes a short path. Beside it a long path handles every case, so a bug
# that never takes the short one breaks nothing: the number of kvcore's functions that run shows it.


def calls_made(call, *args):
    """How many functions of kvcore a call runs."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(HOME)
        count += is_ours and not code.co_name.startswith("<")  # comprehensions

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call(*args)
    finally:
        sys.setprofile(before)
    return count


@source_build
def test_taking_and_releasing_blocks_makes_few_calls(pool):
    pool.release(pool.take(3))
    assert calls_made(pool.take, 1) == 1
    assert calls_made(pool.release, pool.take(1)) == 1
    assert calls_made(pool.release, pool.take(3)) <= 7
    assert calls_made(pool.release, published(pool, 1, 2)[::-1]) <= 9


@source_build
@pytest.mark.parametrize("num_others", [0, 2, 3])
def test_an_eviction_tail_first_makes_few_calls(pool, num_others):
    """Alone below the root the last block takes the root along."""
    for other in range(num_others):
        published(pool, 10 + other)
    pool.release(published(pool, 1, 2, 3)[::-1])
    pool.take(pool.num_free_blocks - 3)
    calls = [calls_made(pool.take, 1) for _ in range(3)]
    assert max(calls[:2]) <= 10
    assert calls[2] <= (10 if num_others else 12)
    assert pool.num_evicted_blocks == 3


LAYOUTS = {
    "full": None,
    "and a window": [kvcore.FullAttention(), kvcore.SlidingWindow(40)],
    "and two, uneven": [
        kvcore.FullAttention(),
        kvcore.SlidingWindow(40, 8),
        kvcore.ChunkedLocal(48, 12),
    ],
}


@source_build
def test_a_request_of_one_layer_group_makes_few_calls():
    kv = kvcore.KVCacheManager(32, 4)
    tokens = kvcore.pack(range(10))
    seq = kv.open(tokens)
    kv.reserve(seq, 10)
    assert [calls_made(kv.reserve, seq, count) for count in (12, 11, 0)] == [5, 1, 1]
    assert calls_made(kv.commit, seq, 10) <= 10
    assert calls_made(kv.reserve, seq, 6) <= 13
    assert calls_made(kv.open, tokens) <= 13


@source_build
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decode_step_only_counts_where_no_block_is_full(layout):
    kv = kvcore.KVCacheManager(32, 4, groups=LAYOUTS[layout])
    seqs = [kv.open([number]) for number in range(3)]
    for seq in seqs:
        kv.reserve(seq, 1)
    kv.decode_step(seqs, [1, 2, 3])
    calls = [calls_made(kv.decode_step, seqs, [1, 2, 3]) for _ in range(4)]
    assert calls[:2] + calls[3:] == [7, 7, 7]
    assert layout != "full" or calls[2] <= 50


@source_build
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_that_fills_no_block_is_counted_from_the_second_on(layout):
    kv = kvcore.KVCacheManager(64, 4, groups=LAYOUTS[layout])
    seq = kv.open([1, 2, 3])
    kv.reserve(seq, 3)
    assert [calls_made(kv.commit, seq, 1) for _ in range(3)][1:] == [1, 1]


@source_build
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_verb_only_counts_between_changes(layout):
    """For each request alone, and for a whole step whose engine runs ahead or does not."""
    kv = kvcore.KVCacheManager(256, 4, groups=LAYOUTS[layout])
    seqs = [kv.open([number]) for number in range(3)]
    for seq in seqs:
        kv.reserve(seq, 1)

    def one_by_one():
        for seq in seqs:
            kv.commit(seq, 1)
            kv.append(seq, 5)
            kv.reserve(seq, 1)

    def ahead():
        known = [seq.num_unknown_tokens for seq in seqs]  # none in the first step
        kv.step(seqs, 1, [1, 2, 3][: sum(known)], num_known=known, num_expected=1, num_reserved=2)

    for call, few in [
        (one_by_one, 9),
        (lambda: kv.step(seqs, [1, 1, 1], [1, 2, 3]), 7),
        (ahead, 11),
    ]:
        calls = [calls_made(call) for _ in range(12)]
        assert sum(count <= few for count in calls) >= 5, calls
