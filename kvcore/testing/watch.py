"""The checks after every call, of all that can be seen from outside an allocator."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from kvcore.testing.answers import as_count, as_ids, as_tables
from kvcore.testing.ghost import Lease, Memory, Prefixes, Request, Tables
from kvcore.testing.program import Program
from kvcore.testing.protocol import Promise

View = tuple[int, list[Tables], list[Tables]]


class Watch:
    """Compares an allocator with the ghost of its memory.

    Args:
        program: makes the calls and raises the broken properties.
        promises: the promises of the allocator.
        memory: the ghost.
        prefixes: the names of prefixes.
        usable: the ids that may be handed out.
    """

    def __init__(
        self,
        program: Program,
        promises: frozenset[Promise],
        memory: Memory,
        prefixes: Prefixes,
        usable: frozenset[int],
    ) -> None:
        self.program = program
        self.promises = promises
        self.memory = memory
        self.prefixes = prefixes
        self.usable = usable
        self.block_size = memory.block_size
        self.leases: list[Lease] = []

    def blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that tokens take."""
        return -(-num_tokens // self.block_size)

    def tables(self, request: Request) -> Tables:
        """Ask for a request's block tables."""
        if Promise.GROUPS in self.promises:
            answer = self.program.ask("block_tables", request)
            return as_tables("block_tables", answer, len(self.memory.windows))
        return [as_ids("block_table", self.program.ask("block_table", request))]

    def table(self, request: Request) -> list[int]:
        """Ask for the block table of a request's first layer group."""
        return self.tables(request)[0]

    def free(self) -> int:
        """Ask how many blocks are free."""
        return as_count("num_free_blocks", self.program.ask("num_free_blocks"))

    def view(self, live: Iterable[Request]) -> View:
        """Return all that can be seen without changing anything."""
        known = [request for request in live if request.blocks]
        tables = [self.tables(request) for request in known]
        return self.free(), tables, [self.states(request) for request in known]

    def states(self, request: Request) -> Tables:
        """Ask what a request holds for recurrent states: read, written, and others."""
        if Promise.STATES not in self.promises:
            return []
        return as_tables("states", self.program.ask("states", request), 3)

    def check_states(self, request: Request, live: Iterable[Request]) -> None:
        """P31, P33: a request reads the state of its own tokens; no other holds what it writes."""
        if not request.states:
            return
        reads, writes, _ = request.states
        computed = request.computed
        if bool(reads) is not (computed > 0):
            self.program.broken("P31", f"{request.name} reads {reads} after {computed} tokens")
        if computed and not self.memory.has_state(request.paths[0][computed - 1], reads):
            held = [self.memory.states.get(block_id) for block_id in reads]
            spelled = [None if one is None else self._spelled(one[1]) for one in held]
            wanted = self._spelled(request.paths[0][computed - 1])
            what = f"the state of {request.name} in {reads}: wanted that of {wanted}"
            self.program.broken("P31", f"{what}, got {spelled}")
        for other in live:
            if other is not request and not set(writes).isdisjoint(other.blocks):
                what = f"{request.name} writes its state into {writes}"
                self.program.broken("P33", f"{what}, of which {other.name} has some")

    def held(self, live: Iterable[Request]) -> set[int]:
        """Return the blocks that live tables and leases name."""
        leased = {block_id for lease in self.leases for block_id in lease.blocks}
        return leased.union(*(request.blocks for request in live)) & self.usable

    def needed(self, request: Request, num_tokens: int, live: Sequence[Request]) -> tuple[int, int]:
        """Return the fewest and the most free blocks that making room can take.

        They differ where hits are not held before, and it cannot be known from outside which of
        several copies they are; and with several layer groups, whose tables may have gaps.
        """
        if Promise.GROUPS in self.promises:
            return 0, sys.maxsize
        total = self.blocks(request.computed + num_tokens)
        if Promise.HOLD in self.promises or request.blocks:
            missing = max(0, total - len(request.block_table))
            return missing, missing
        hits = self.blocks(request.cached)
        fewest = most = max(0, total - hits)
        held = self.held(live)
        for index in range(request.cached // self.block_size):
            copies = self.memory.copies(request.paths[0], index)
            fewest += bool(copies) and not any(block_id in held for block_id in copies)
            most += not copies or not all(block_id in held for block_id in copies)
        return fewest, most

    def fresh(self, request: Request, tables: Tables) -> list[list[int]]:
        """Return which blocks of new tables the request did not have before, for each group."""
        before = set(request.blocks)
        return [[b for b in table if b in self.usable and b not in before] for table in tables]

    def check_cover(self, request: Request, tables: Tables, stop: int) -> None:
        """P14: there is a block in each table for every position from `computed` to `stop`."""
        wanted = max(len(request.block_table), self.blocks(stop))
        if Promise.GROUPS not in self.promises:
            self.program.expect("P14", f"blocks of {request.name}", len(tables[0]), wanted)
        for table in tables:
            places = range(request.computed // self.block_size, self.blocks(stop))
            if any(index >= len(table) or table[index] not in self.usable for index in places):
                what = f"{request.name} has no block for {request.computed} to {stop}"
                self.program.broken("P14", f"{what}: {table}")

    def check_new(self, request: Request, ids: Sequence[int], live: Iterable[Request]) -> None:
        """P1, P12, P15: new blocks are free, each once, and the right ones to reuse."""
        for block_id in ids:
            if block_id not in self.usable:
                self.program.broken(
                    "P1", f"block {block_id} handed out, which does not exist or is set aside"
                )
            if ids.count(block_id) > 1:
                self.program.broken("P1", f"block {block_id} handed out twice in one call")
            if block_id in request.blocks:
                self.program.broken(
                    "P12", f"block {block_id} of {request.name} handed out to itself once more"
                )
            for other in live:
                if block_id in other.blocks:
                    self.program.broken(
                        "P1", f"block {block_id} handed out to {request.name}: {other.name} has it"
                    )
            for lease in self.leases:
                if block_id in lease.blocks:
                    self.program.broken(
                        "P17",
                        f"block {block_id} handed out to {request.name}: {lease.name} holds it",
                    )
        if Promise.LRU in self.promises:
            self._check_order(ids, self.held(live) | set(request.blocks))

    def _check_order(self, ids: Sequence[int], held: set[int]) -> None:
        released, used = self.memory.released, self.memory.used
        cached = [b for b in self.memory.ends if b in released and b not in held]
        victims = [b for b in cached if b in ids]
        spared = [b for b in cached if b not in ids]
        if victims and spared:
            # A look-up that came to nothing may have made what it found young, or not.
            newest = max(victims, key=used.__getitem__)
            oldest = min(spared, key=released.__getitem__)
            if used[newest] > released[oldest]:
                self.program.broken(
                    "P15", f"block {newest} reused before {oldest}, which was released earlier"
                )

    def accept_hits(self, request: Request) -> None:
        """P1, P7, P9, P14, P19, P22: the blocks behind a request's hits are its own prefix."""
        hits = request.blocks
        if Promise.GROUPS in self.promises:
            hits = [block_id for block_id in hits if block_id in self.usable]
        else:
            wanted = self.blocks(request.cached)
            self.program.expect("P14", f"blocks of {request.name}", len(hits), wanted)
        if len(set(hits)) < len(hits) or not self.usable >= set(hits):
            self.program.broken("P1", f"{request.name} hits {request.tables}")
        wrong = self._wrong_at(request, request.cached)
        if wrong is not None:
            group, position = wrong
            prop, came = self._judge(request, group, position)
            block_id = request.tables[group][position // self.block_size]
            self.program.broken(
                prop,
                f"{request.name} hits block {block_id}: at position {position} it wanted "
                f"{self._spelled(request.paths[group][position])}, got {came}",
            )

    def _wrong_at(self, request: Request, stop: int) -> tuple[int, int] | None:
        """P19: a query at `stop` sees blocks. Return a group and a position with other content."""
        for group, table in enumerate(request.tables):
            first = self.memory.first_seen(group, stop) // self.block_size
            for index in range(first, self.blocks(stop)):
                if index >= len(table) or table[index] not in self.usable:
                    what = f"position {index * self.block_size} of {request.name}, group {group}"
                    self.program.broken("P19", f"{what}, can be seen and has no block: {table}")
        return self.memory.wrong_at(request, stop)

    def _judge(self, request: Request, group: int, position: int) -> tuple[str, str]:
        """Return the property that a wrong hit breaks, and what stands there in words."""
        index, offset = divmod(position, self.block_size)
        block_id, wanted = request.tables[group][index], request.paths[group][position]
        came = self.memory.places.get(block_id, [None] * self.block_size)[offset]
        if came is not None:
            tenant, epoch, tokens = self.prefixes.spell(came)
            mine = self.prefixes.spell(wanted)
            old = tenant == mine[0] and tokens == mine[2] and epoch != mine[1]
            what = f"{self._spelled(came)} from before the reset" if old else self._spelled(came)
            return ("P22" if old else "P7"), what
        if block_id not in self.memory.owners:
            return "P7", "a block that was never handed out"
        owner, path = self.memory.owners[block_id]
        due = path[position] if position < len(path) else None
        if due == wanted:
            return "P9", f"a block that {owner} has reserved and not committed"
        return "P7", f"a block that was handed out to {owner} since"

    def _spelled(self, prefix: int) -> str:
        tenant, _, tokens = self.prefixes.spell(prefix)
        if Promise.TENANTS not in self.promises:
            return str(tokens)
        return f"{tokens} of {f'tenant {tenant!r}' if tenant else 'the tenant without a name'}"

    def agree(self, live: Sequence[Request], seen: Counter[str]) -> None:
        """P1, P2, P5, P7, P18, P19: tables, free blocks and the KV of every computed token."""
        for request in live:
            now = self.tables(request)
            if now != request.tables:
                wanted = request.tables if len(now) > 1 else request.block_table
                got = now if len(now) > 1 else now[0]
                what = f"the table of {request.name} changed"
                self.program.broken("P18", f"{what}: wanted {wanted}, got {got}")
            wrong = self._wrong_at(request, request.computed)
            if wrong is not None:
                group, position = wrong
                _, came = self._judge(request, group, position)
                self.program.broken(
                    "P7",
                    f"the KV of {request.name} at position {position}: wanted "
                    f"{self._spelled(request.paths[group][position])}, got {came}",
                )
            self.check_states(request, live)
            seen["out of sight"] += any(
                self.memory.first_seen(group, request.computed) > 0 for group in range(len(now))
            )
        if Promise.GROUPS in self.promises:
            self._check_places(live)
        held = self.held(live)
        num_named = sum(block_id in self.usable for request in live for block_id in request.blocks)
        seen["shared blocks"] += num_named > len(held)
        num_used, free = len(held), self.free()
        if free > len(self.usable) - num_used:
            named = {block_id for request in live for block_id in request.blocks}
            prop = "P17" if free <= len(self.usable) - len(named & self.usable) else "P1"
        elif free < len(self.usable) - num_used:
            prop = "P2" if held else "P5"
        else:
            return
        wanted_free = len(self.usable) - num_used
        self.program.broken(prop, f"{free} blocks free, {num_used} in use: wanted {wanted_free}")

    def _check_places(self, live: Iterable[Request]) -> None:
        """P1: a block stands in one place, or in the same place of the same prefix."""
        places: dict[int, tuple[int, int]] = {}
        for request in live:
            for group, table in enumerate(request.tables):
                for index, block_id in enumerate(table):
                    path = request.paths[group][: (index + 1) * self.block_size]
                    place = (index, path[-1])
                    if block_id in self.usable and places.setdefault(block_id, place) != place:
                        what = f"block {block_id} stands in group {group} of {request.name}"
                        self.program.broken("P1", f"{what}, and elsewhere with other content")
