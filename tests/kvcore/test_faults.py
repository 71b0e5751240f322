"""A verb that something interrupts has not begun: an exception anywhere changes nothing (P4)."""

import itertools
from array import array

import pytest

import kvcore
from kvcore.verbs import step as forward
from tests.kvcore.faults import Faults, InjectedError, dump

pytestmark = pytest.mark.source_build

LAYOUTS = {
    "full": [kvcore.FullAttention()],
    "full and window": [kvcore.FullAttention(), kvcore.SlidingWindow(6)],
    "wide, chunk": [kvcore.FullAttention(8), kvcore.ChunkedLocal(8)],
    "six and four": [kvcore.FullAttention(6), kvcore.SlidingWindow(5, 4)],
    "full and state": [kvcore.FullAttention(), kvcore.RecurrentState(2)],
    "full, window, state": [
        kvcore.FullAttention(),
        kvcore.SlidingWindow(6),
        kvcore.RecurrentState(1, every=8),
    ],
}
NUM_BLOCKS = {  # nearly full; the others: 65
    "full": 36,
    "six and four": 58,
    "full and state": 72,
    "full, window, state": 84,
}
CAT = kvcore.MultimodalItem(b"cat", 1, 3, b"\x01\x00\x01")
DOG = kvcore.MultimodalItem(b"dog", 13, 2)
STRONG = kvcore.Retention(0, 6, priority=3, max_steps=2)
WEAK = kvcore.Retention(0, 8, priority=1)
SALT = kvcore.Namespace(salt=b"s", lora_name="l", lora_version=1, weight_epoch=2)


class State:
    """A cache in which everything that there can be is there, and nearly full.

    Shared, forked, copied, cut, kept, leased, evicted and idle blocks; drafts; images; events.
    """

    def __init__(self, layout, *, caching=True, fragile=None):
        self.kv = kv = kvcore.KVCacheManager(
            NUM_BLOCKS.get(layout, 65),
            2 if layout == "six and four" else 4,
            groups=LAYOUTS[layout],
            enable_caching=caching,
            record_events="xxh3-128",
            record_lifetimes=True,
        )
        self.run(kv.open([7] * 9, retain=[STRONG, WEAK]), close=True)
        self.run(kv.open([8] * 9), close=True)
        self.run(kv.open([6] * 13, retain=[WEAK]), close=True)
        kv.tick()
        self.parent = self.run(kv.open([*range(11)], items=[CAT], retain=[STRONG]))
        self.child, _ = kv.fork(self.parent)
        kv.extend(self.child, [21, 22, 23, 24, 25, 26])
        self.other = self.run(kv.open([*range(8), 30, 31, 32, 33, 34], items=[CAT]))
        self.twin = kv.open([9] * 9, namespace=SALT)
        self.run(kv.open([9] * 9, namespace=SALT))
        self.alone = kv.open([2] * 9, namespace=kvcore.Namespace(salt=b"t"), retain=[WEAK])
        self.fresh = kv.open([4] * 9, retain=[STRONG, WEAK])
        for seq in (self.twin, self.alone, self.fresh):
            kv.reserve(seq, 9)
        self.short = kv.lease(self.other, "load", max_steps=1)
        self.long = kv.lease(self.parent, "store", owner="disk", num_tokens=8)
        self.short_too = kv.lease(self.child, max_steps=1)
        kv.extend(self.parent, [40, 41, 42, 43, 44, 45, 46])
        kv.reserve(self.parent, 7)
        kv.reserve(self.child, 6)
        self.ahead = self.run(kv.open([70] * 6, retain=[WEAK]))
        kv.expect(self.ahead, 6)
        kv.reserve(self.ahead, 6)
        kv.commit(self.ahead, 4)
        gone = self.run(kv.open([5] * 10, retain=[WEAK]))
        kv.lease(gone, "pin", num_tokens=4)
        kv.close(gone)
        self.loader = kv.open([*range(8), 50, 51, 52, 53, 54, 55, 56], items=[CAT], retain=[WEAK])
        self.load = kv.begin_load(self.loader, 14, owner="disk")
        kvcore.check(kv)
        if fragile is not None:
            fragile.fragile(kv)

    def run(self, seq, *, close=False):
        todo = seq.num_tokens - seq.num_computed_tokens
        self.kv.reserve(seq, todo)
        self.kv.commit(seq, todo)
        if close:
            self.kv.close(seq)
        return seq


# Each takes a state and Faults, which makes what the caller passes in; arguments are made anew.
VERBS = {
    "open, hits kept blocks": lambda s, f: s.kv.open(
        f.sequence(*[7] * 8, 1, 2), retain=f.sequence(STRONG, WEAK)
    ),
    "open, hits an image": lambda s, f: s.kv.open([*range(12)], items=f.sequence(CAT)),
    "open, resumed": lambda s, f: s.kv.open([9] * 9, namespace=SALT, resumed=True),
    "open, packed, hits nothing": lambda s, f: s.kv.open(array("I", [1, 1, 1])),
    "open without a namespace": lambda s, f: s.kv.open(f.sequence(1, 1, 1), namespace=None),
    "plan": lambda s, f: s.kv.plan(f.sequence(*range(12)), items=f.sequence(CAT)),
    "reserve, from all shelves": lambda s, f: s.kv.reserve(
        s.other, f.integer(4 * s.kv.num_free_blocks // len(s.kv.groups))
    ),
    "reserve, one block": lambda s, f: s.kv.reserve(s.other, f.integer(4)),
    "can reserve": lambda s, f: s.kv.can_reserve(s.other, f.integer(8)),
    "reserve a step": lambda s, f: s.kv.reserve_step(
        f.sequence(s.parent, s.child, s.other), f.sequence(11, f.integer(12), 9)
    ),
    "append": lambda s, f: s.kv.append(s.other, f.integer(3)),
    "extend": lambda s, f: s.kv.extend(s.other, f.sequence(1, 2, 3), items=f.sequence(DOG)),
    "commit": lambda s, f: s.kv.commit(s.parent, f.integer(6)),
    "commit, a copy": lambda s, f: s.kv.commit(s.twin, f.integer(9)),
    "commit, the first of a namespace": lambda s, f: s.kv.commit(s.alone, f.integer(9)),
    "commit, kept content": lambda s, f: s.kv.commit(s.fresh, f.integer(9)),
    "commit a step": lambda s, f: s.kv.commit_step(
        f.sequence(s.twin, s.child, s.fresh, s.parent), f.sequence(8, f.integer(6), 8, 7)
    ),
    "decode a step": lambda s, f: s.kv.decode_step(
        f.sequence(s.twin, s.child, s.fresh, s.parent), f.sequence(1, 2, f.integer(3), 4)
    ),
    "a mixed step": lambda s, f: s.kv.step(
        f.sequence(s.twin, s.child, s.fresh, s.parent),
        f.sequence(4, f.integer(6), 9, 0),
        f.sequence(1, f.integer(2), 3),
        num_known=f.sequence(0, f.integer(1), 2, 0),
        num_reserved=f.sequence(5, 1, f.integer(3), 0),
    ),
    "a step ahead": lambda s, f: s.kv.step(
        f.sequence(s.ahead, s.fresh, s.parent),
        f.sequence(2, f.integer(9), 7),
        f.sequence(5, f.integer(6)),
        num_known=f.sequence(2, 0, 0),
        num_expected=f.sequence(f.integer(3), 1, 1),
    ),
    "expect": lambda s, f: s.kv.expect(s.ahead, f.integer(2)),
    "resolve": lambda s, f: s.kv.resolve(
        s.ahead, f.sequence(1, f.integer(2), 3), start=f.integer(6)
    ),
    "resolve a step": lambda s, f: s.kv.resolve_step(
        f.sequence(s.ahead, s.fresh),
        f.sequence(1, 2, f.integer(3)),
        num_resolved=f.sequence(3, f.integer(0)),
        starts=f.sequence(f.integer(6), 9),
    ),
    "commit what is not told": lambda s, f: s.kv.commit(s.ahead, f.integer(2)),
    "truncate what is not told": lambda s, f: s.kv.truncate(s.ahead, f.integer(9)),
    "fork what is not told": lambda s, f: s.kv.fork(s.ahead),
    "fail a load of what is not told": lambda s, f: s.kv.fail_load(s.ahead, f.integer(7)),
    "reserve to": lambda s, f: s.kv.reserve_to(s.ahead, f.integer(17)),
    "truncate inside a published block": lambda s, f: s.kv.truncate(s.other, f.integer(6)),
    "truncate what is reserved": lambda s, f: s.kv.truncate(s.parent, f.integer(12)),
    "fork": lambda s, f: s.kv.fork(s.other),
    "lease": lambda s, f: s.kv.lease(
        s.child, "load", num_tokens=f.integer(9), max_steps=f.integer(2)
    ),
    "begin a load": lambda s, f: s.kv.begin_load(
        s.alone, f.integer(9), owner="disk", max_steps=f.integer(2)
    ),
    "commit a load": lambda s, f: s.kv.commit_load(s.load),
    "fail a transfer before it has arrived": lambda s, f: s.kv.fail_transfer(s.load),
    "plan a load": lambda s, f: s.kv.plan(f.sequence(*range(12)), num_external=f.integer(11)),
    "end a lease": lambda s, f: s.kv.leases.end(s.short.lease_id),
    "end a pin": lambda s, f: s.long.end(),
    "tick": lambda s, f: s.kv.tick(f.integer(3)),
    "fail a load": lambda s, f: s.kv.fail_load(s.other, f.integer(2)),
    "fail a transfer": lambda s, f: s.kv.fail_transfer(s.long),
    "fail blocks": lambda s, f: s.kv.fail_blocks(f.sequence(f.integer(1), 2, 3)),
    "close": lambda s, f: s.kv.close(s.child),
    "reset": lambda s, f: s.kv.reset(),
    "reset in order": lambda s, f: s.kv.reset(canonical_order=True),
    "take events": lambda s, f: s.kv.events.take(),
    "snapshot": lambda s, f: s.kv.snapshot(),
    "names": lambda s, f: s.other.block_hashes("sha256"),
    "statistics": lambda s, f: s.kv.stats(),
    "write a decode step": lambda s, f: s.kv.write_step(
        f.sequence(s.other), array("i", [0] * 20), array("q", [0]), row_stride=f.integer(20)
    ),
    "write a mixed step": lambda s, f: s.kv.write_step(
        f.sequence(s.parent, s.child),
        array("i", [0] * 40),
        array("q", [0] * 11),
        counts=f.sequence(7, f.integer(4)),
        row_stride=f.integer(20),
    ),
    "write slots": lambda s, f: s.parent.write_slot_mapping(
        f.integer(8), f.integer(11), array("q", [0] * 3), group=f.integer(0)
    ),
    "common blocks": lambda s, f: s.kv.num_common_blocks(f.sequence(s.parent, s.child)),
}


def interruptions(verb, layout, faults, **options):
    """Interrupt a verb everywhere; return the places after which something had changed."""
    state = State(layout, fragile=faults, **options)
    before = dump(state.kv)
    torn = []
    for count in itertools.count(1):
        try:
            with faults.armed(count):
                verb(state, faults)
        except InjectedError as fault:
            if dump(state.kv) != before:
                torn.append(fault.args[0])
                state = State(layout, fragile=faults, **options)
                assert dump(state.kv) == before  # a state comes out the same twice
        else:
            break
    return torn, state


@pytest.fixture
def faults(monkeypatch):
    found = Faults()
    found.install(monkeypatch)
    return found


@pytest.mark.parametrize(
    "layout",
    [
        "full",
        "wide, chunk",
        "six and four",
        "full, window, state",  # of which "full and window" is a part
        pytest.param("full and state", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", VERBS)
def test_a_verb_that_is_interrupted_anywhere_has_changed_nothing(faults, name, layout):
    torn, state = interruptions(VERBS[name], layout, faults)
    assert torn == []
    untouched = State(layout, fragile=faults)
    VERBS[name](untouched, faults)
    assert dump(state.kv) == dump(untouched.kv)  # it came through in the end, as if never disturbed
    kvcore.check(state.kv)


@pytest.mark.parametrize("name", ["reserve, one block", "commit", "fork", "close", "tick"])
def test_nor_has_one_where_nothing_is_cached(faults, name):
    torn, state = interruptions(VERBS[name], "full and window", faults, caching=False)
    assert torn == []
    kvcore.check(state.kv)


def test_every_kind_of_place_is_tried(faults):
    for layout, verb in itertools.product(LAYOUTS, VERBS.values()):
        state = State(layout, fragile=faults)
        with faults.armed(10**9):
            verb(state, faults)
    wanted = {
        *(f"BlockPool.{verb}" for verb in ("hand_out", "keep", "attach", "next_blocks")),
        *(f"BlockPool.{verb}" for verb in ("forget", "tick", "clear")),
        *(f"BlockPool.{verb}" for verb in ("revive", "give_back", "_begin_release")),
        *(
            "ContentTree.attach",
            "ContentTree.match",
            "ContentTree.path",
            "ContentTree._grow",
        ),
        *("EventLog.stored", "EventLog.removed", "EventLog.cleared", "EventLog.take"),
        *("IdleBlocks.keep", "IdleBlocks.merged_terms", "IdleBlocks.expire"),
        *("xxhash.xxh3_128_digest", "hashlib.sha256", "struct.pack", "array"),
        *("BlockTable.grow", "table.blocks", "packed", "sequences"),
        *("empty_blocks", "events", "kept", "roots", "children", "leases.active"),
        *("KVSequence.__init__", "Node.__init__", "Lease.__init__", "CopyOrder.__init__"),
        *("the caller's __index__", "the caller's __len__", "the caller's __iter__"),
        "the caller's __next__",
        *("StateMove.__init__", "publish_state", "publish_kept", "find_resume", "_go_back"),
    }
    assert wanted - set(faults.places) == set()


def test_a_verb_that_changes_before_it_has_allocated_is_seen(faults, monkeypatch):
    def take_first(pool, seq, num_tokens, longest):
        for table in seq.tables:
            table.grow(pool.take(table.num_missing(num_tokens)))
        return ()

    monkeypatch.setattr(forward, "grow", take_first)
    torn, _ = interruptions(VERBS["reserve, one block"], "full and window", faults)
    assert {"BlockTable.grow", "table.blocks"} <= set(torn)
    assert "BlockPool.take" in torn  # the second group's, after the first group's came through


def test_a_change_that_lets_something_grow_is_seen(faults, monkeypatch):
    def prune(tree, node):
        tree._roots[b"another"] = node

    state = State("full", fragile=faults)
    guarded = faults.guard(prune, "ContentTree._prune")
    monkeypatch.setattr(kvcore.ContentTree, "_prune", guarded)
    with pytest.raises(AssertionError, match="roots can fail, inside what cannot"):
        VERBS["fail a load"](state, faults)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_that_the_caller_holds_stops_a_verb_before_it_begins(layout):
    """Python refuses to resize an array while a view of it exists."""
    state = State(layout)
    kv, seq = state.kv, state.parent
    before = dump(kv)
    views = [memoryview(seq.packed)]
    calls = [
        lambda: kv.append(seq, 1),
        lambda: kv.extend(seq, [1, 2], items=[kvcore.MultimodalItem(b"x", 18, 2)]),
        lambda: kv.truncate(seq, 3),
    ]
    for call in calls:
        with pytest.raises(BufferError):
            call()
        assert dump(kv) == before
    for view in views:
        view.release()
    calls[-1]()
    kvcore.check(kv)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_of_block_ids_stops_nothing(layout):
    state = State(layout)
    kv, seq = state.kv, state.parent
    calls = [
        lambda: kv.reserve(seq, 12),
        lambda: kv.commit(seq, seq.num_tokens - seq.num_computed_tokens),
        lambda: kv.truncate(seq, 3),
        lambda: kv.reserve(seq, 12),
        lambda: kv.fail_load(seq, 0),
        lambda: kv.close(seq),
    ]
    views = []
    for call in calls:
        views += [memoryview(table.block_ids) for table in seq.tables]
        call()
        kvcore.check(kv)
        assert seq.block_tables == tuple([tuple(t.block_ids) for t in seq.tables])
