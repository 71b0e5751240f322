"""The manager against lists, and against a ghost of the KV memory."""

from array import array

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import kvcore
from tests.kvcore.machines.refusal import refused
from tests.kvcore.machines.requests import (
    BLOCK_SIZE,
    GROUPS,
    IMAGES,
    NAMESPACES,
    PROMPTS,
    RETENTIONS,
    SALTS,
    lowered,
    real_groups,
    with_image,
)
from tests.kvcore.naive import NaiveManager
from tests.kvcore.views import PropertyError, expect, manager_view


class ManagerMachine(RuleBasedStateMachine):
    """The manager against lists, and against a ghost of the KV memory.

    `memory` is what a GPU would hold: for each place of each block, the group, the whole prefix,
    the namespace and the epoch that were in force when it was written. A hit is right if and only
    if the memory behind it says so, and a sequence's own memory must never change under it.
    """

    make_manager = kvcore.KVCacheManager
    layouts = tuple(GROUPS)
    with_events = True  # sometimes; or "always", or "never"
    sequences = Bundle("sequences")
    closed = Bundle("closed")
    leases = Bundle("leases")

    @initialize(
        num_blocks=st.integers(2, 14),
        layout=st.integers(0, len(GROUPS) - 1),
        caching=st.sampled_from([True, True, True, False]),
        events=st.booleans(),
    )
    def start(self, num_blocks, layout, caching, events):
        self.groups = GROUPS[self.layouts[layout % len(self.layouts)]]
        self.kv = self.make_manager(
            num_blocks,
            BLOCK_SIZE,
            groups=real_groups(self.groups),
            enable_caching=caching,
            record_events="xxh3-128" if self.with_events in {events, "always"} else None,
        )
        self.folded, self.last_event = set(), 0
        self.naive = NaiveManager(num_blocks, self.groups, caching)
        self.other = kvcore.KVCacheManager(4, BLOCK_SIZE)
        self.memory = {}
        self.epoch = 0
        self.live = []  # [real, naive, the runner's copy of the tables]

    def view(self):
        return manager_view(self.kv)

    @rule(
        target=sequences,
        prompt=PROMPTS,
        image=IMAGES,
        name=st.sampled_from(SALTS),
        packed=st.booleans(),
        retain=RETENTIONS,
    )
    def open(self, prompt, image, name, packed, retain):
        """A prompt of a small family, so that whole, half and missed hits are all common."""
        return self.begin(with_image(prompt, image), NAMESPACES[name], packed, retain)

    @rule(target=sequences, entry=sequences, packed=st.booleans())
    def open_again(self, entry, packed):
        """The same tokens once more: a retry, or the next turn."""
        return self.begin(entry[1].tokens or [0], entry[1].namespace, packed)

    @rule(targets=(sequences,), prompt=PROMPTS, name=st.sampled_from(SALTS))
    def twins(self, prompt, name):
        """Two requests with one prompt in one step: both compute it, both keep their copies."""
        pair = [self.begin(prompt, NAMESPACES[name], packed=False) for _ in range(2)]
        for entry in pair:
            self.run(entry)
        return multiple(*pair)

    @rule(prompt=PROMPTS, retain=RETENTIONS, steps=st.integers(0, 2))
    def keep_for_later(self, prompt, retain, steps):
        """A request comes, is to be kept, and goes; time passes."""
        entry = self.begin(prompt, kvcore.Namespace(), packed=False, retain=retain)
        self.run(entry)
        self.kv.close(entry[0])
        self.naive.close(entry[1])
        self.live.remove(entry)
        self.agree()
        self.advance(steps)

    def begin(self, tokens, namespace, packed, retain=()):
        plain, items = lowered(tokens)
        given = kvcore.pack(plain) if packed else plain
        plan = self.kv.plan(given, namespace=namespace, items=items)
        cached, hits = self.naive.hits(tokens, namespace)
        held = [block_id for table in hits for block_id in table if block_id]
        revived = sum(self.naive.pool.refs[block_id] == 0 for block_id in held)
        wishes = [kvcore.Retention(*wish) for wish in retain]
        real = self.kv.open(given, namespace=namespace, items=items, retain=wishes)
        naive = self.naive.open(tokens, namespace, retain)
        entry = [real, naive, [*map(list, real.block_tables)]]
        self.live.append(entry)
        self.check_memory(entry)
        if len(tokens) <= real.num_cached_tokens:
            raise PropertyError("P14", "a full hit leaves no token to compute")
        missing = sum(
            self.naive.blocks_for(len(tokens), size) - cached // size for _, _, size in self.groups
        )
        expect("P24", real.num_cached_tokens, cached, "cached tokens")
        expect("P13", plan.num_new_blocks, missing, "new blocks planned")
        expect("P13", plan.num_revived_blocks, revived, "revived blocks planned")
        expect("P13", plan.num_cached_tokens, real.num_cached_tokens, "cached tokens planned")
        fits = self.kv.can_reserve(real, len(tokens) - real.num_computed_tokens)
        expect("P13", plan.fits, fits, "whether it fits")
        return entry

    @rule(entry=sequences, count=st.integers(0, 9))
    def reserve(self, entry, count):
        real, naive, delivered = entry
        if real.is_open:
            room = self.naive.can_reserve(naive, count)
            expect("P13", self.kv.can_reserve(real, count), room, "whether there is room")
            if not room:
                refused(
                    "P13",
                    kvcore.OutOfBlocksError,
                    self.view,
                    lambda: self.kv.reserve(real, count),
                )
                return
            for table, new in zip(delivered, self.kv.reserve(real, count), strict=True):
                table.extend(new)
            self.naive.reserve(naive, count)
            kvcore.check(self.kv)
            self.check_delivery(entry)

    @rule(entry=sequences, spread=st.integers(0, 9))
    def write_drafts(self, entry, spread):
        """A forward pass that is never committed: whatever it wrote must stay invisible."""
        real, naive, _ = entry
        if real.is_open:
            room = self.naive.room(naive)
            for position in range(real.num_computed_tokens, room)[:spread]:
                for number in range(len(self.groups)):
                    self.memory[self.place(real, number, position)] = "draft"

    @rule(entry=sequences, count=st.integers(0, 9))
    def write_and_commit(self, entry, count):
        real, naive, _ = entry
        if not real.is_open:
            return
        most = min(len(naive.tokens), self.naive.room(naive)) - naive.computed
        if count > most:
            refused(
                "P9",
                (kvcore.InvalidArgumentError, kvcore.NotReservedError),
                self.view,
                lambda: self.kv.commit(real, count),
            )
            count = most
        self.write(entry, count)
        self.kv.commit(real, count)
        self.naive.commit(naive, count)

    def write(self, entry, count):
        """The forward pass: the KV of the next tokens, in every group."""
        real, naive, _ = entry
        for position in range(naive.computed, naive.computed + count):
            for number in range(len(self.groups)):
                content = (number, tuple(naive.tokens[: position + 1]), self.origin(naive))
                self.memory[self.place(real, number, position)] = content

    @rule(entry=sequences)
    def run(self, entry):
        """What an engine does most: room for everything, compute it, commit it."""
        real, naive, _ = entry
        if real.is_open:
            todo = len(naive.tokens) - naive.computed
            self.reserve(entry, todo)
            self.write_and_commit(entry, todo)

    @precondition(lambda self: len(self.live) > 1)
    @rule(token=st.integers(0, 2), room=st.integers(1, 3))
    def step(self, token, room):
        """A decode step of everything that runs: room for all or for none, then a token each."""
        ready = [e for e in self.live if 0 < len(e[1].tokens) == e[1].computed + 1 <= 40]
        reals = [real for real, _, _ in ready]
        counts = [room + index % 2 for index in range(len(ready))]
        missing = sum(
            sum(self.naive.missing(naive, count))
            for (_, naive, _), count in zip(ready, counts, strict=True)
        )
        if missing > len(self.naive.pool.order()):
            refused(
                "P13",
                kvcore.OutOfBlocksError,
                self.view,
                lambda: self.kv.reserve_step(reals, counts),
            )
            return
        for growth in self.kv.reserve_step(reals, counts):
            ready[growth.index][2][growth.group].extend(growth.block_ids)
        for entry, count in zip(ready, counts, strict=True):
            self.naive.reserve(entry[1], count)
            self.check_delivery(entry)
        self.check_step_buffers(reals)
        for entry in ready:
            self.write(entry, 1)
        self.kv.commit_step(reals, [1] * len(reals))
        for real, naive, _ in ready:
            self.naive.commit(naive, 1)
            self.kv.append(real, token)
            naive.tokens.append(token)

    def check_step_buffers(self, reals):
        """What is written for a whole step is what is written for each sequence."""
        width = max([len(table) for real in reals for table in real.block_tables], default=0) + 1
        for number, (_, _, size) in enumerate(self.groups):
            rows = array("i", [-7]) * (len(reals) * width)
            slots = array("q", [-7]) * len(reals)
            self.kv.write_step(reals, rows, slots, row_stride=width, group=number)
            for index, real in enumerate(reals):
                table = real.block_tables[number]
                row = list(rows[index * width : (index + 1) * width])
                expect("P16", row, [*table, *[-7] * (width - len(table))], "a row of the step")
                block_id, offset = self.place(real, number, real.num_computed_tokens)
                expect("P23", slots[index], block_id * size + offset, "a slot of the step")

    @rule(entry=sequences, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6), image=IMAGES)
    def append(self, entry, tokens, image=None):
        real, naive, _ = entry
        tokens = with_image(tokens, image)
        plain, items = lowered(tokens, len(naive.tokens))
        if real.is_open and len(naive.tokens) < 40:
            if len(tokens) == 1 and not items:
                self.kv.append(real, plain[0])
            else:
                self.kv.extend(real, plain, items=items)
            naive.tokens += tokens

    @rule(entry=sequences, keep=st.integers(0, 20))
    def truncate(self, entry, keep):
        real, naive, delivered = entry
        if real.is_open:
            if keep > len(naive.tokens):
                refused(
                    "P3",
                    kvcore.InvalidArgumentError,
                    self.view,
                    lambda: self.kv.truncate(real, keep),
                )
                keep = len(naive.tokens)
            self.kv.truncate(real, keep)
            self.naive.truncate(naive, keep)
            for told, table in zip(delivered, naive.tables, strict=True):
                del told[len(table.entries) :]

    @rule(entry=sequences, keep=st.integers(0, 9), token=st.integers(0, 2))
    def edit(self, entry, keep, token):
        """A turn is taken back and goes on differently, which is where names go stale."""
        if entry[0].is_open:
            self.truncate(entry, min(keep, len(entry[1].tokens)))
            self.agree()
            self.append(entry, [token] * 5)
            self.run(entry)

    @rule(entry=sequences, drafts=st.integers(1, 5), accepted=st.integers(0, 5))
    def speculate(self, entry, drafts, accepted):
        """Drafts join, some are accepted, the rest leave without a trace."""
        real, naive, _ = entry
        if real.is_open and naive.computed == len(naive.tokens):
            self.append(entry, [1] * drafts)
            self.reserve(entry, len(naive.tokens) - naive.computed)
            most = min(len(naive.tokens), self.naive.room(naive)) - naive.computed
            self.write_drafts(entry, drafts)
            self.write_and_commit(entry, min(accepted, most))
            self.truncate(entry, naive.computed)

    @rule(target=sequences, entry=sequences)
    def fork(self, entry):
        real, naive, _ = entry
        if not real.is_open:
            return entry
        if self.naive.copies_needed(naive) > len(self.naive.pool.order()):
            refused("P13", kvcore.OutOfBlocksError, self.view, lambda: self.kv.fork(real))
            return entry
        child, orders = self.kv.fork(real)
        twin, wanted = self.naive.fork(naive)
        got = [(order.src, order.dst, order.num_tokens, order.group) for order in orders]
        expect("P15", got, wanted, "the copy orders")
        for src, dst, count, _ in wanted:
            for offset in range(count):
                self.memory[dst, offset] = self.memory[src, offset]
        forked = [child, twin, [*map(list, child.block_tables)]]
        self.live.append(forked)
        self.check_memory(forked)
        return forked

    @rule(
        target=leases,
        entry=sequences,
        kind=st.sampled_from(["step", "load"]),
        steps=st.integers(0, 3),
        count=st.integers(1, 2),
        first=st.none() | st.integers(0, 12),
    )
    def lease(self, entry, kind, steps, count, first):
        """Steps or transfers begin; the sequence may be cut or closed while they run."""
        real, naive, _ = entry
        begun = []
        for _ in range(count if real.is_open else 0):
            lease = self.kv.lease(real, kind, num_tokens=first, max_steps=steps or None)
            begun.append(lease)
            self.naive.lease(naive, steps or None, first)
        return multiple(*begun)

    @rule(target=leases, entry=sequences, steps=st.integers(0, 2))
    def close_in_flight(self, entry, steps):
        """A sequence ends while two transfers of its blocks run; one of them is done first."""
        real, naive, _ = entry
        if not real.is_open:
            return multiple()
        self.run(entry)
        pair = [self.kv.lease(real, "store", max_steps=steps or None) for _ in range(2)]
        for _ in pair:
            self.naive.lease(naive, steps or None)
        self.kv.close(real)
        self.naive.close(naive)
        self.live.remove(entry)
        self.agree()
        self.end_lease(pair[0], by_id=True)
        return pair[1]

    @rule(lease=leases, by_id=st.booleans())
    def end_lease(self, lease, by_id):
        """A completion arrives: in time, late, or for the second time."""
        before = self.view() if lease.lease_id not in self.naive.leases else None
        ended = self.kv.leases.end(lease.lease_id) if by_id else lease.end()
        expect("P17", ended, self.naive.end_lease(lease.lease_id), "whether it was active")
        if before is not None:
            expect("P17", self.view(), before, "state after a late completion")

    @rule(steps=st.integers(0, 2))
    def advance(self, steps):
        late = [lease.lease_id for lease in self.kv.advance(steps)]
        expect("P17", late, self.naive.advance(steps), "the leases whose deadline has come")

    @rule(entry=sequences, kept=st.integers(0, 20))
    def fail_load(self, entry, kept):
        """KV that was committed turns out never to have arrived."""
        real, naive, _ = entry
        if not real.is_open:
            return
        if kept > naive.computed:
            refused(
                "P3",
                kvcore.InvalidArgumentError,
                self.view,
                lambda: self.kv.fail_load(real, kept),
            )
            return
        for number, table in enumerate(real.tables):
            first = max(kept, table.num_null * table.block_size)
            for position in range(first, naive.computed):
                self.spoil(number, tuple(naive.tokens[: position + 1]), self.origin(naive))
        hit = [other.seq_id for other in self.kv.fail_load(real, kept)]
        wanted = self.naive.fail_load(naive, kept, [other for _, other, _ in self.live])
        expect("P9", hit, [o.seq_id for o, n, _ in self.live if n in wanted], "who is set back")
        for _, other, told in self.live:
            for mine, table in zip(told, other.tables, strict=True):
                del mine[len(table.entries) :]

    def spoil(self, number, prefix, origin):
        """This KV never arrived, wherever it was copied to, and nothing built on it is right."""
        for place, content in self.memory.items():
            mine = content[0] == number and content[2:] == (origin,)
            if mine and content[1][: len(prefix)] == prefix:
                self.memory[place] = ("never arrived",)

    @rule(target=sequences, entry=sequences, keep=st.integers(0, 9), token=st.integers(0, 2))
    def diverge(self, entry, keep, token):
        """A beam splits off and goes another way; the one it left must not notice."""
        child = self.fork(entry)
        self.agree()
        self.edit(child, keep, token)
        return child

    @rule(target=closed, entry=consumes(sequences))
    def close(self, entry):
        real, naive, _ = entry
        if real.is_open:
            self.kv.close(real)
            self.naive.close(naive)
            self.live.remove(entry)
        return entry

    @rule(
        entry=closed,
        call=st.sampled_from(["close", "reserve", "commit", "truncate", "append", "fork"]),
    )
    def use_a_closed_one(self, entry, call):
        arguments = (entry[0],) if call in {"close", "fork"} else (entry[0], 1)
        refused(
            "P3",
            kvcore.StaleSequenceError,
            self.view,
            lambda: getattr(self.kv, call)(*arguments),
        )

    @rule(
        entry=sequences,
        what=st.sampled_from(["reserve", "commit", "truncate", "append", "foreign", "lease"]),
        number=st.integers(-1, 99),
    )
    def misuse(self, entry, what, number):
        """A negative number, another manager's sequence, a completion from nowhere."""
        if what == "foreign":
            foreign = self.other.open([1, 2])
            refused("P3", kvcore.ForeignSequenceError, self.view, lambda: self.kv.close(foreign))
            self.other.close(foreign)
        elif what == "lease":
            if number not in self.naive.leases:
                before = self.view()
                expect("P17", self.kv.leases.end(number), False, "an unknown completion")
                expect("P17", self.view(), before, "state after an unknown completion")
        elif entry[0].is_open:
            refused(
                "P3",
                kvcore.InvalidArgumentError,
                self.view,
                lambda: getattr(self.kv, what)(entry[0], -1),
            )

    @precondition(lambda self: self.live)
    @rule(chance=st.integers(0, 3), canonical=st.booleans())
    def reset(self, chance, canonical):
        if chance:
            return
        self.epoch += 1
        report = self.kv.reset(canonical_order=canonical)
        cached = len(self.naive.pool.published)
        used = sum(1 for refs in self.naive.pool.refs.values() if refs)
        self.naive.reset([naive for _, naive, _ in self.live], canonical)
        expect("P22", report.num_forgotten_blocks, cached, "blocks forgotten")
        expect("P22", report.num_used_blocks, used, "blocks in use at the reset")
        expect("P22", report.num_open_sequences, len(self.live), "sequences open at the reset")

    @precondition(lambda self: self.live)
    @rule()
    def close_all(self):
        for real, naive, _ in self.live:
            self.kv.close(real)
            self.naive.close(naive)
        self.live.clear()
        for number in list(self.naive.leases):
            self.kv.leases.end(number)
            self.naive.end_lease(number)
        expect("P5", self.kv.num_free_blocks, self.kv.num_usable_blocks, "free blocks at rest")

    @invariant()
    def agree(self):
        if not hasattr(self, "kv"):
            return
        kvcore.check(self.kv)
        for entry in self.live:
            self.check_memory(entry)
            self.check_sequence(entry)
        order = [block.block_id for block in self.kv.pool.free_blocks()]
        expect("P15", order, self.naive.pool.order(), "the order of reuse")
        published = {block.block_id for block in self.kv.pool.blocks if block.node is not None}
        wanted = {block_id for _, block_id in self.naive.pool.published}
        expect("P6", published, wanted, "the published blocks")
        deferred = self.kv.leases.num_deferred_blocks()
        expect("P20", deferred, self.naive.num_deferred(), "blocks free once the leases end")
        stats = self.kv.stats()
        expect("P24", stats.num_queried_tokens, self.naive.num_queried, "queried tokens")
        expect("P24", stats.num_hit_tokens, self.naive.num_hit, "hit tokens")
        self.fold()

    @staticmethod
    def names(namespace, elements, size):
        """The names of whole blocks, from scratch."""
        plain, items = lowered(elements)
        chain = kvcore.NameChain(kvcore.encode_namespace(namespace), size, "xxh3-128")
        return chain.names(kvcore.pack(plain), len(plain) // size, items)

    def fold(self):
        """P21: what an outside index makes of the events is what can be hit."""
        if self.kv.events is None:
            return
        before = kvcore.Snapshot(self.last_event, ())
        ever = set(self.folded)
        events = self.kv.events.take()
        for event in events:
            expect("P21", event.number, self.last_event + 1, "the sequence number")
            self.last_event = event.number
            if isinstance(event, kvcore.BlockStored):
                if (event.group, event.name) in self.folded:
                    raise PropertyError("P21", "stored twice without a removal")
                self.folded.add((event.group, event.name))
                ever.add((event.group, event.name))
            elif isinstance(event, kvcore.BlockRemoved):
                self.folded.discard((event.group, event.name))
            else:
                self.folded.clear()
        wanted = {
            (number, self.names(namespace, prefix, self.groups[number][2])[-1])
            for (number, namespace, prefix), _ in self.naive.pool.published
        }
        expect("P21", self.folded, wanted, "what the events add up to")
        expect("P21", kvcore.fold((), self.kv.snapshot()), wanted, "the snapshot")
        later = kvcore.fold(events, before)
        expect("P21", later <= ever, True, "events folded on an empty snapshot")

    def check_sequence(self, entry):
        real, naive, _ = entry
        self.check_delivery(entry)
        plain, items = lowered(naive.tokens)
        expect("P10", list(real.tokens), plain, "the tokens")
        expect("P10", list(real.items), items, "the items")
        expect("P14", real.num_computed_tokens, naive.computed, "computed tokens")
        expect("P14", real.num_cached_tokens, naive.cached, "cached tokens")
        if naive.namespace is not None:
            size, published = self.groups[0][2], naive.tables[0].published
            names = self.names(naive.namespace, naive.tokens[: published * size], size)
            expect("P10", real.block_names(), names, "the names")

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
                wanted = (number, tuple(naive.tokens[: position + 1]))
                expect("P7", content[:2], wanted, f"the KV behind position {position}")
                if naive.namespace is not None:
                    expect("P7", content[2], self.origin(naive), f"whose position {position} is")

    def origin(self, naive):
        """Whose KV it is. A sequence that lived through a reset shares with nobody any more."""
        return naive.namespace, self.epoch

    def place(self, real, number, position):
        table = real.tables[number]
        return table.blocks[position // table.block_size].block_id, position % table.block_size
