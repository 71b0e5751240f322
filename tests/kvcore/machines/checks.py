"""What the manager's machine drives, and all that it compares after every step."""

import functools
from array import array

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant

import kvcore
from tests.kvcore.machines.refusal import refused
from tests.kvcore.machines.requests import (
    BLOCK_SIZE,
    GROUPS,
    common_divisor,
    lowered,
    real_groups,
)
from tests.kvcore.naive import NaiveManager
from tests.kvcore.views import PropertyError, expect, manager_view

SEQUENCES = Bundle("sequences")
CLOSED = Bundle("closed")
LEASES = Bundle("leases")


PATIENT = 10**6  # events that wait are never too many


class Rows:
    """The block tables of a group in a buffer of the engine, from step to step."""

    def __init__(self, number):
        self.wide = number % 2
        self.tables = kvcore.StepTables(self.allocate, number)

    def allocate(self, num_rows, num_entries):
        self.buffer = memoryview(bytearray(num_rows * num_entries * (4 + 4 * self.wide)))
        self.buffer = self.buffer.cast("iq"[self.wide], (num_rows, num_entries))
        return self.buffer

    def check(self, live, number):
        """P16: rows that did not change need not be written, whatever happened to the others."""
        self.tables.update([real for real, _, _ in live])
        for row, (_, naive, _) in enumerate(live):
            wanted = naive.tables[number].entries
            found = self.buffer.tolist()[row]
            seen = [mine if its else 0 for mine, its in zip(found, wanted, strict=False)]
            expect("P16", seen, wanted, "a row of the step's tables")
            expect("P16", any(found[len(wanted) :]), False, "entries behind a table")


class ManagerChecks(RuleBasedStateMachine):
    """A manager, a naive one beside it, and a ghost of the KV memory.

    `memory` is what a GPU would hold: for each place of each block, the group, the whole prefix,
    the namespace and the epoch that were in force when it was written. A hit is right if and only
    if the memory behind it says so, and a sequence's own memory must never change under it.
    """

    make_manager = kvcore.KVCacheManager
    layouts = tuple(GROUPS)
    with_events = True  # sometimes; or "always", or "never"
    rows = ()  # of each group, where `start` makes them
    longest = None

    @initialize(
        num_blocks=st.integers(2, 14),
        layout=st.integers(0, len(GROUPS) - 1),
        caching=st.sampled_from([True, True, True, False]),
        events=st.booleans(),
        longest=st.sampled_from([None, None, None, 13, 16]),
        lifetimes=st.booleans(),
        patience=st.sampled_from([PATIENT, PATIENT, 2]),
    )
    def start(
        self, num_blocks, layout, caching, events, longest=None, lifetimes=False, patience=PATIENT
    ):
        self.groups = GROUPS[self.layouts[layout % len(self.layouts)]]
        self.kv = self.make_manager(
            num_blocks,
            common_divisor(self.groups),
            groups=real_groups(self.groups),
            enable_caching=caching,
            max_model_len=longest,
            record_events="xxh3-128" if self.with_events in {events, "always"} else None,
            record_lifetimes=lifetimes,
        )
        self.rows = [Rows(number) for number in range(len(self.groups))]
        self.folded, self.last_event = set(), 0
        self.spaces = {}  # (group, name): the namespace that it was told with, for ever
        self.patience = patience
        if self.kv.events is not None:
            self.kv.events.max_hashes = patience
        self.naive = NaiveManager(num_blocks, self.groups, caching)
        self.other = kvcore.KVCacheManager(4, BLOCK_SIZE)
        self.longest = longest
        self.memory = {}
        self.epoch = 0
        self.live = []  # [real, naive, the runner's copy of the tables]

    def view(self):
        return manager_view(self.kv)

    def too_long(self, num_tokens):
        return self.longest is not None and num_tokens > self.longest

    @invariant()
    def agree(self):
        if not hasattr(self, "kv"):
            return
        kvcore.check(self.kv)
        for entry in self.live:
            self.check_memory(entry)
            self.check_sequence(entry)
        spare = [block.block_id for block in self.kv.pool.idle_blocks.spare]
        expect("P42", spare, self.naive.pool.spare, "the blocks that no known end needs")
        order = [block.block_id for block in self.kv.pool.free_blocks()]
        expect("P15", order, self.naive.pool.order(), "the order of reuse")
        self.check_published("P6")
        deferred = self.kv.leases.num_deferred_blocks()
        expect("P20", deferred, self.naive.num_deferred(), "blocks free once the leases end")
        self.check_common()
        self.check_slots()
        self.check_stats()
        self.fold()

    def check_published(self, prop):
        published = {block.block_id for block in self.kv.pool.blocks if block.node is not None}
        wanted = {block_id for _, block_id in self.naive.pool.published}
        expect(prop, published, wanted, "the published blocks")

    def check_common(self):
        """P25: what sequences share is read from their tables, whoever else holds the blocks."""
        for entries in (self.live[:1], self.live[:2], self.live[-2:], self.live):
            for number in range(len(self.groups) if entries else 0):
                shared = self.kv.num_common_blocks([real for real, _, _ in entries], group=number)
                wanted = self.naive.num_common_blocks([naive for _, naive, _ in entries], number)
                expect("P25", shared, wanted, "blocks that these sequences share")

    def check_slots(self):
        """P16, P23: what is written for a step is each sequence's table and its tokens' slots.

        In one state as a mixed step (all that is to be computed, half of it, one token, room for
        drafts, none), in the next without counts, which is refused unless it is a decode step.
        """
        step = []
        for index, (real, naive, _) in enumerate(self.live):
            room = self.naive.room(naive) - naive.computed
            todo = len(naive.all_tokens()) - naive.computed
            count = (todo, todo // 2, 1, room, 0)[(index + naive.computed) % 5]
            step.append((real, naive, min(count, room), todo, room))
        for number, rows in enumerate(self.rows):
            # The list of sequences changes now and then.
            rows.check(self.live[len(self.live) % 3 == 2 :], number)
        if sum(naive.computed for _, naive, *_ in step) % 2:
            self.check_written([entry[:3] for entry in step], [entry[2] for entry in step])
            return
        ready = [(real, naive, 1, todo) for real, naive, _, todo, room in step if room]
        self.check_written([entry[:3] for entry in ready if entry[3] < 2], None)
        if any(todo > 1 for *_, todo in ready):
            reals = [real for real, *_ in ready]
            rows, slots = array("i", [-7]) * (99 * len(reals)), array("q", [-7]) * len(reals)
            call = functools.partial(self.kv.write_step, reals, rows, slots, row_stride=99)
            refused("P23", kvcore.InvalidArgumentError, self.view, call)
            expect("P4", {*rows, *slots}, {-7}, "what a refused step has written")

    def check_written(self, step, counts):
        """What is written of (real, naive, tokens) is what the naive tables say."""
        reals = [real for real, _, _ in step]
        width = max([len(t.entries) for _, naive, _ in step for t in naive.tables], default=0) + 1
        for number, (_, _, size) in enumerate(self.groups):
            rows = array("iq"[number % 2], [-7]) * (len(step) * width)
            slots = array("q", [-7]) * (sum(count for _, _, count in step) + 1)
            self.kv.write_step(reals, rows, slots, counts=counts, row_stride=width, group=number)
            wanted = []
            for index, (_, naive, count) in enumerate(step):
                entries = naive.tables[number].entries
                row = list(rows[index * width : (index + 1) * width])
                expect("P16", row, [*entries, *[-7] * (width - len(entries))], "a row of the step")
                places = range(naive.computed, naive.computed + count)
                wanted += [entries[p // size] * size + p % size for p in places]
            expect("P23", list(slots), [*wanted, -7], "the slots of the step")

    def check_stats(self):
        """P24: the statistics have a model too, every field of them."""
        stats = self.kv.stats()
        wanted = self.naive.stats([naive for _, naive, _ in self.live])
        told = {name: getattr(stats, name) for name in wanted}
        expect("P24", told, wanted, "the statistics")
        rate = stats.num_hit_tokens / max(1, stats.num_queried_tokens)
        expect("P24", stats.hit_rate, rate, "the hit rate")
        if stats.lifetimes is not None:
            for name, durations in self.naive.pool.durations.items():
                got = getattr(stats.lifetimes, name)
                told = (got.count, got.total, got.maximum, got.buckets)
                expect("P24", told, self.naive.histogram(durations), f"the histogram of {name}")

    @staticmethod
    def names(namespace, elements, size):
        """The names of whole blocks, from scratch."""
        plain, items = lowered(elements)
        chain = kvcore.HashChain(kvcore.encode_namespace(namespace), size, "xxh3-128")
        return chain.hashes(kvcore.pack(plain), len(plain) // size, items)

    def fold(self):
        """P21: what an outside index makes of the events is what can be hit."""
        if self.kv.events is None:
            return
        before = kvcore.Snapshot(self.last_event, ())
        ever = set(self.folded)
        events = self.kv.events.take()
        lost = any(isinstance(event, kvcore.EventsLost) for event in events)
        if lost:
            self.begin_again(events)
        else:
            for event in events:
                expect("P21", event.number, self.last_event + 1, "the sequence number")
                self.last_event = event.number
                self.follow(event)
                ever |= self.folded
        wanted = {
            (number, self.names(namespace, prefix, self.groups[number][2])[-1])
            for (number, namespace, prefix), _ in self.naive.pool.published
        }
        expect("P21", self.folded, wanted, "what the events add up to")
        expect("P21", kvcore.fold((), self.kv.snapshot()), wanted, "the snapshot")
        if not lost:
            later = kvcore.fold(events, before)
            expect("P21", later <= ever, True, "events folded on an empty snapshot")

    def begin_again(self, events):
        """Events were lost because they waited too long: the reader needs a snapshot."""
        expect("P21", self.patience < PATIENT, True, "whether too many events were waiting")
        expect("P21", events[0].number > self.last_event, True, "whether any were lost")
        try:
            kvcore.fold(events, kvcore.Snapshot(self.last_event, ()))
        except kvcore.InvalidArgumentError:
            pass
        else:
            raise PropertyError("P21", "what was lost is passed over in silence")
        numbers = [event.number for event in events]
        expect("P21", numbers, [*range(numbers[0], numbers[0] + len(numbers))], "the numbers")
        snapshot = self.kv.snapshot()
        expect("P21", numbers[-1], snapshot.number, "the last event")
        self.last_event, self.folded = numbers[-1], set()
        for run in snapshot.stored:
            self.check_stored(run)
        expect("P21", self.folded, kvcore.fold(events, snapshot), "events that a snapshot knows")

    def follow(self, event):
        """An outside index is told what has changed."""
        if isinstance(event, kvcore.BlocksStored):
            self.check_stored(event)
        elif isinstance(event, kvcore.BlocksRemoved):
            for name in event.block_hashes:
                if (event.group, name) not in self.folded:
                    raise PropertyError("P21", "removed without having been stored")
                self.folded.discard((event.group, name))
        else:
            self.folded.clear()

    def check_stored(self, run):
        """A run says enough to compute its names again, and comes after what it follows."""
        kind, _, size = self.groups[run.group]
        expect(
            "P21", (run.block_size, len(run.block_hashes)), (size, len(run.contents)), "the sizes"
        )
        root = kvcore.digest(run.namespace_key, "xxh3-128")
        self.spaces[run.group, root] = run.namespace_key
        if run.parent is not None:
            space = self.spaces.get((run.group, run.parent))
            if space is not None:  # a window's run may follow what was gone before a snapshot
                expect("P21", space, run.namespace_key, "the namespace of what a run follows")
            if kind == "full":
                known = (run.group, run.parent) in self.folded
                expect("P21", known, True, "whether the parent was stored before")
        above = root if run.parent is None else run.parent
        for index, name in enumerate(run.block_hashes):
            if (run.group, name) in self.folded:
                raise PropertyError("P21", "stored twice without a removal")
            tokens = run.tokens[index * size : (index + 1) * size]
            content = kvcore.pack(tokens).tobytes() + run.items[index]
            encoded = kvcore.encode_block(above, content, size)
            expect("P21", name, kvcore.digest(encoded, "xxh3-128"), "a name, from its event")
            self.spaces[run.group, name] = run.namespace_key
            self.folded.add((run.group, name))
            above = name

    def check_sequence(self, entry):
        real, naive, _ = entry
        self.check_delivery(entry)
        plain, items = lowered(naive.tokens)
        expect("P10", list(real.tokens), plain, "the tokens")
        expect("P10", list(real.items), items, "the items")
        expect("P27", real.num_unknown_tokens, len(naive.future), "expected tokens")
        expect("P14", real.num_computed_tokens, naive.computed, "computed tokens")
        expect("P14", real.num_cached_tokens, naive.cached, "cached tokens")
        for number, (_, _, size) in enumerate(self.groups if naive.namespace is not None else ()):
            told = naive.tokens[: naive.tables[number].published * size]
            names = self.names(naive.namespace, told, size)
            expect("P10", real.block_hashes(group=number), names, "the names")

    def check_delivery(self, entry):
        """P16: what the runner was told is the table, but for what no query can see any more."""
        real, naive, delivered = entry
        for told, table, wanted in zip(delivered, real.block_tables, naive.tables, strict=True):
            seen = [mine if its else 0 for mine, its in zip(told, table, strict=False)]
            expect("P16", seen, list(table), "the table that the runner was told")
            expect("P16", len(told), len(table), "its length")
            expect("P15", list(table), wanted.entries, "the blocks handed out")

    def check_memory(self, entry):
        """P7: behind every computed position stands this sequence's own prefix."""
        real, naive, _ = entry
        for number, table in enumerate(real.tables):
            first = table.num_null * table.block_size
            for position in range(first, real.num_computed_tokens):
                content = self.memory.get(self.place(real, number, position), "never written")
                wanted = (number, tuple(naive.all_tokens()[: position + 1]))
                expect("P7", content[:2], wanted, f"the KV behind position {position}")
                if naive.namespace is not None:
                    expect("P7", content[2], self.origin(naive), f"whose position {position} is")

    def origin(self, naive):
        """Whose KV it is. A sequence that lived through a reset shares with nobody any more."""
        return naive.namespace, self.epoch

    def place(self, real, number, position):
        table = real.tables[number]
        return table.blocks[position // table.block_size].block_id, position % table.block_size
