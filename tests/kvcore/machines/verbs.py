"""The manager's verbs as rules: each calls the real thing and the naive one, and compares."""

import functools

from hypothesis import strategies as st
from hypothesis.stateful import consumes, multiple, precondition, rule

import kvcore
from tests.kvcore.machines.checks import CLOSED, LEASES, SEQUENCES, ManagerChecks
from tests.kvcore.machines.refusal import refused
from tests.kvcore.machines.requests import (
    IMAGES,
    NAMESPACES,
    PROMPTS,
    RETENTIONS,
    SALTS,
    lowered,
    with_image,
)
from tests.kvcore.views import PropertyError, expect


def opened(entry):
    """What a rule returns for a sequence that may have been refused."""
    return multiple() if entry is None else entry


class ManagerVerbs(ManagerChecks):
    """One rule a verb, with any arguments that a caller may think of."""

    @rule(
        target=SEQUENCES,
        prompt=PROMPTS,
        image=IMAGES,
        name=st.sampled_from(SALTS),
        packed=st.booleans(),
        retain=RETENTIONS,
    )
    def open(self, prompt, image, name, packed, retain):
        """A prompt of a small family, so that whole, half and missed hits are all common."""
        return opened(self.begin(with_image(prompt, image), NAMESPACES[name], packed, retain))

    @rule(
        target=SEQUENCES,
        entry=SEQUENCES,
        packed=st.booleans(),
        skips=st.booleans(),
        recompute=st.sampled_from([0, 0, 1, 5]),
    )
    def open_again(self, entry, packed, skips=False, recompute=0):
        """The same tokens once more: a retry, or the next turn; looked up, or computed anew."""
        tokens, namespace = entry[1].tokens or [0], entry[1].namespace
        return opened(self.begin(tokens, namespace, packed, skips=skips, recompute=recompute))

    def begin(
        self, tokens, namespace, packed, retain=(), resumed=False, skips=False, recompute=0
    ):  # fmt: skip
        """Open a sequence, beside the plan for it; None where it is too long to be one."""
        plain, items = lowered(tokens)
        given = kvcore.pack(plain) if packed else plain
        if self.too_long(len(tokens)):
            for call in (self.kv.plan, self.kv.open):
                refused(
                    "P14",
                    kvcore.SequenceTooLongError,
                    self.view,
                    lambda call=call: call(given, namespace=namespace, items=items),
                )
            return None
        before = self.view()
        about = {"namespace": namespace, "items": items, "skip_reading": skips}
        about["recompute"] = recompute
        plan = self.kv.plan(given, **about)
        chunk = 1 + len(self.live) % 4
        chunked = self.kv.plan(given, **about, chunk=chunk)
        expect("P4", self.view(), before, "state after a plan")
        cached, hits = self.naive.hits(tokens, None if skips else namespace, recompute)
        held = [block_id for table in hits for block_id in table if block_id]
        revived = sum(self.naive.pool.refs[block_id] == 0 for block_id in held)
        deferred = self.naive.num_deferred()
        peak = self.naive.peak(hits, cached, len(tokens), chunk)
        wishes = [kvcore.Retention(*wish) for wish in retain]
        real = self.kv.open(given, **about, retain=wishes, resumed=resumed)
        naive = self.naive.open(tokens, namespace, retain, resumed, skips, recompute)
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
        expect("P13", chunked.num_new_blocks + revived, peak, f"blocks in chunks of {chunk}")
        expect("P13", plan.num_cached_tokens, real.num_cached_tokens, "cached tokens planned")
        fits = self.kv.can_reserve(real, len(tokens) - real.num_computed_tokens)
        free = len(self.naive.pool.order())
        expect("P13", plan.num_free_blocks, free + revived, "free blocks planned with")
        expect("P20", plan.num_deferred_blocks, deferred, "deferred blocks planned with")
        expect("P13", plan.fits, fits, "whether it fits")
        for watermark in range(3):
            left = free >= watermark + sum(self.naive.missing(naive, len(tokens) - cached))
            expect("P13", plan.fits_above(watermark), left, f"whether {watermark} blocks are left")
        return entry

    @rule(entry=SEQUENCES, count=st.integers(0, 9))
    def reserve(self, entry, count):
        real, naive, delivered = entry
        if real.is_open:
            if self.too_long(naive.computed + count):
                for call in (self.kv.reserve, self.kv.can_reserve):
                    refused(
                        "P14",
                        kvcore.SequenceTooLongError,
                        self.view,
                        lambda call=call: call(real, count),
                    )
                return
            room = self.naive.can_reserve(naive, count)
            expect("P13", self.kv.can_reserve(real, count), room, "whether there is room")
            missing, free = self.kv.num_missing_blocks(real, count), self.kv.num_free_blocks
            expect("P13", missing <= free, room, "whether what is missing is free")
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
            taken = free - self.kv.num_free_blocks
            self.naive.reserve(naive, count)
            kvcore.check(self.kv)
            self.check_delivery(entry)
            expect("P13", taken, missing, "the blocks that were missing")

    @rule(entry=SEQUENCES, spread=st.integers(0, 9))
    def write_drafts(self, entry, spread):
        """A forward pass that is never committed: whatever it wrote must stay invisible."""
        real, naive, _ = entry
        if real.is_open:
            room = self.naive.room(naive)
            for position in range(real.num_computed_tokens, room)[:spread]:
                for number in range(len(self.groups)):
                    self.memory[self.place(real, number, position)] = "draft"

    @rule(entry=SEQUENCES, count=st.integers(0, 9))
    def write_and_commit(self, entry, count):
        real, naive, _ = entry
        if not real.is_open:
            return
        most = min(len(naive.all_tokens()), self.naive.room(naive)) - naive.computed
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
        kvcore.check(self.kv)

    def write(self, entry, count):
        """The forward pass: the KV of the next tokens, in every group."""
        real, naive, _ = entry
        for position in range(naive.computed, naive.computed + count):
            for number in range(len(self.groups)):
                content = (number, tuple(naive.all_tokens()[: position + 1]), self.origin(naive))
                self.memory[self.place(real, number, position)] = content

    @precondition(lambda self: len(self.live) > 1)
    @rule(token=st.integers(0, 2), room=st.integers(1, 3), aborts=st.booleans())
    def step(self, token, room, aborts):
        """A decode step of everything that runs: room for all or for none, then a token each.

        One of them may be aborted between its schedule and its commit.
        """
        ready = [e for e in self.told() if 0 < len(e[1].tokens) == e[1].computed + 1 <= 40]
        reals = [real for real, _, _ in ready]
        counts = [room + index % 2 for index in range(len(ready))]
        if any(self.too_long(e[1].computed + n) for e, n in zip(ready, counts, strict=True)):
            refused(
                "P14",
                kvcore.SequenceTooLongError,
                self.view,
                lambda: self.kv.reserve_step(reals, counts),
            )
            return
        if len(ready) > 1 and self.longest is None:
            # Room for a block each, which may be there, and for more than there is.
            too_much = 8 * self.naive.pool.num_blocks
            refused(
                "P13",
                kvcore.OutOfBlocksError,
                self.view,
                lambda: self.kv.reserve_step(reals, [*[5] * (len(reals) - 1), too_much]),
            )
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
        self.check_slots()
        if aborts and ready:
            self.end(ready.pop(0))
            reals.pop(0)
        for entry in ready:
            self.write(entry, 1)
        self.kv.commit_step(reals, [1] * len(reals))
        with self.naive.together():
            for entry in ready:
                self.naive.commit(entry[1], 1)
        for entry in ready:
            self.append(entry, [token])

    @rule(entry=SEQUENCES, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6), image=IMAGES)
    def append(self, entry, tokens, image=None):
        real, naive, _ = entry
        if not real.is_open or len(naive.all_tokens()) >= 40:
            return
        if naive.future:
            call = functools.partial(self.kv.extend, real, tokens)
            refused("P27", kvcore.UnknownTokensError, self.view, call)
            call = functools.partial(self.kv.append, real, tokens[0])
            refused("P27", kvcore.UnknownTokensError, self.view, call)
            self.resolve(entry, len(naive.future))
        tokens = with_image(tokens, image)
        plain, items = lowered(tokens, len(naive.tokens))
        one = len(tokens) == 1 and not items

        def join():
            if one:
                self.kv.append(real, plain[0])
            else:
                self.kv.extend(real, plain, items=items)

        if self.too_long(len(naive.tokens) + len(tokens)):
            refused("P14", kvcore.SequenceTooLongError, self.view, join)
            return
        join()
        naive.tokens += tokens

    @rule(entry=SEQUENCES, keep=st.integers(0, 20))
    def truncate(self, entry, keep):
        real, naive, delivered = entry
        if real.is_open:
            if keep > len(naive.all_tokens()):
                refused(
                    "P3",
                    kvcore.InvalidArgumentError,
                    self.view,
                    lambda: self.kv.truncate(real, keep),
                )
                keep = len(naive.all_tokens())
            self.kv.truncate(real, keep)
            self.naive.truncate(naive, keep)
            for told, table in zip(delivered, naive.tables, strict=True):
                del told[len(table.entries) :]

    @rule(target=SEQUENCES, entry=SEQUENCES)
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
        target=LEASES,
        entry=SEQUENCES,
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

    @rule(lease=LEASES, by_id=st.booleans())
    def end_lease(self, lease, by_id):
        """A completion arrives: in time, late, or for the second time."""
        before = self.view() if lease.lease_id not in self.naive.leases else None
        exclusive, free = lease.num_exclusive_blocks, self.kv.num_free_blocks
        ended = self.kv.leases.end(lease.lease_id) if by_id else lease.end()
        expect("P17", ended, self.naive.end_lease(lease.lease_id), "whether it was active")
        expect("P20", self.kv.num_free_blocks - free, exclusive, "the blocks it alone held")
        if before is not None:
            expect("P17", self.view(), before, "state after a late completion")

    @rule(steps=st.integers(0, 2))
    def tick(self, steps):
        late = [lease.lease_id for lease in self.kv.tick(steps)]
        expect("P17", late, self.naive.tick(steps), "the leases whose deadline has come")

    @rule(entry=SEQUENCES, kept=st.integers(0, 20))
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
        if naive.settled() <= kept:
            self.spoil_own(entry, kept)
        elif kept < naive.computed:
            for number in range(len(self.groups)):
                self.spoil(number, tuple(naive.tokens[: kept + 1]), self.origin(naive))
        hit = self.kv.fail_load(real, kept)
        wanted = self.naive.fail_load(naive, kept, [other for _, other, _ in self.live])
        self.check_set_back(hit, wanted)

    def check_set_back(self, hit, wanted):
        """P9: who had what is in doubt falls back, and nobody else; none of it is found."""
        hit = [other.seq_id for other in hit]
        self.check_published("P9")
        expect("P9", hit, [o.seq_id for o, n, _ in self.live if n in wanted], "who is set back")
        for _, other, told in self.live:
            for mine, table in zip(told, other.tables, strict=True):
                del mine[len(table.entries) :]

    @rule(lease=LEASES)
    def fail_transfer(self, lease):
        """A transfer turns out bad; its sequence may have gone."""
        if lease.is_active:
            self.spoil_blocks([block.block_id for block in lease.blocks])
        hit = self.kv.fail_transfer(lease)
        wanted = self.naive.fail_transfer(lease.lease_id, [other for _, other, _ in self.live])
        self.check_set_back(hit, wanted)

    @rule(ids=st.lists(st.integers(1, 5), max_size=2))
    def fail_blocks(self, ids):
        """Somebody says that some blocks are bad, whoever has them."""
        ids = [block_id for block_id in ids if block_id < self.kv.num_blocks]
        self.spoil_blocks(ids)
        hit = self.kv.fail_blocks(ids)
        wanted = self.naive.fail_blocks(ids, [other for _, other, _ in self.live])
        self.check_set_back(hit, wanted)

    def spoil_blocks(self, ids):
        """What these blocks hold is not what it should be, nor what was built on it."""
        for number, namespace, prefix in filter(None, map(self.naive.pool.content_of, ids)):
            start = len(prefix) - self.groups[number][2]
            for group in range(len(self.groups)):
                self.spoil(group, prefix[: start + 1], (namespace, self.epoch))
        for entry in self.live:
            _, naive, _ = entry
            starts = [
                place * group[2]
                for group, table in zip(self.groups, naive.tables, strict=True)
                for place, block_id in enumerate(table.entries)
                if block_id in ids and place * group[2] < naive.computed
            ]
            for start in starts:
                self.spoil_own(entry, start)
                if start < naive.settled():
                    for number in range(len(self.groups)):
                        self.spoil(number, tuple(naive.tokens[: start + 1]), self.origin(naive))

    def spoil(self, number, prefix, origin):
        """This KV never arrived, wherever it was copied to, and nothing built on it is right."""
        for place, content in self.memory.items():
            mine = content[0] == number and content[2:] == (origin,)
            if mine and content[1][: len(prefix)] == prefix:
                self.memory[place] = ("never arrived",)

    def spoil_own(self, entry, kept):
        """The KV of expected tokens never arrived; nobody else can have it."""
        real, naive, _ = entry
        for number, table in enumerate(real.tables):
            first = table.num_null * table.block_size
            for position in range(max(kept, first), naive.computed):
                self.memory[self.place(real, number, position)] = ("never arrived",)

    def told(self):
        """The live sequences that expect nothing."""
        return [entry for entry in self.live if not entry[1].future]

    @rule(entry=SEQUENCES, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def expect(self, entry, tokens):
        """Tokens are sampled on the device: they join, and their ids are told later."""
        real, naive, _ = entry
        length = len(naive.all_tokens())
        if not real.is_open or length >= 40:
            return
        if self.too_long(length + len(tokens)):
            call = functools.partial(self.kv.expect, real, len(tokens))
            refused("P14", kvcore.SequenceTooLongError, self.view, call)
            return
        self.kv.expect(real, len(tokens))
        naive.future += tokens

    @rule(entry=SEQUENCES, count=st.integers(0, 6), knows_where=st.booleans())
    def resolve(self, entry, count, knows_where=True):
        """They are read; not those that were cut since, nor any of them twice."""
        real, naive, _ = entry
        if not real.is_open:
            return
        start = len(naive.tokens)
        if count > len(naive.future):
            too_many = functools.partial(self.kv.resolve, real, [1] * count)
            refused("P27", kvcore.NotExpectedError, self.view, too_many)
            count = len(naive.future)
        told = naive.future[:count]
        if start:
            again = functools.partial(self.kv.resolve, real, told, start=start - 1)
            refused("P27", kvcore.NotExpectedError, self.view, again)
        self.kv.resolve(real, told, start=start if knows_where else None)
        self.naive.resolve(naive, count)

    @rule(target=CLOSED, entry=consumes(SEQUENCES))
    def close(self, entry):
        if entry[0].is_open:
            self.end(entry)
        return entry

    def end(self, entry):
        kv, table = self.kv, entry[0].tables[0]
        exclusive, free = kv.num_exclusive_blocks(entry[0]), kv.num_free_blocks
        shared, held = kv.num_shared_blocks(entry[0]), table.blocks[table.num_null :]
        kv.close(entry[0])
        gained = kv.num_free_blocks - free
        self.naive.close(entry[1])
        self.live.remove(entry)
        if gained != exclusive:
            kvcore.check(self.kv)  # what the pool says of itself comes first
        expect("P20", gained, exclusive, "the blocks that nobody else held")
        others = [block.ref_count > 0 for block in held]
        expect("P20", [*others, False].index(False), shared, "the first blocks that others hold")

    @rule(
        entry=CLOSED,
        call=st.sampled_from(
            ["close", "reserve", "commit", "truncate", "append", "fork", "expect", "resolve"]
        ),
    )
    def use_a_closed_one(self, entry, call):
        arguments = (entry[0],) if call in {"close", "fork"} else (entry[0], 1)
        arguments = (entry[0], [1]) if call == "resolve" else arguments
        refused(
            "P3",
            kvcore.StaleSequenceError,
            self.view,
            lambda: getattr(self.kv, call)(*arguments),
        )

    @rule(
        entry=SEQUENCES,
        what=st.sampled_from(
            ["reserve", "commit", "truncate", "append", "expect", "foreign", "lease"]
        ),
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
