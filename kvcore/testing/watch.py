"""What must be so after every call, as far as it can be seen from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvcore.testing.answers import as_count, as_ids
from kvcore.testing.ghost import Lease, Memory, Prefixes, Request
from kvcore.testing.program import Program
from kvcore.testing.protocol import Promise

View = tuple[int, list[list[int]]]


class Watch:
    """Compares an allocator with the ghost of its memory.

    Args:
        program: where the allocator is asked, and where what is broken is raised.
        promises: what it promises.
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

    def table(self, request: Request) -> list[int]:
        """Ask for a request's block table."""
        return as_ids("block_table", self.program.ask("block_table", request))

    def free(self) -> int:
        """Ask how many blocks are free."""
        return as_count("num_free_blocks", self.program.ask("num_free_blocks"))

    def view(self, live: Iterable[Request]) -> View:
        """Return all that can be seen without changing anything."""
        return self.free(), [self.table(request) for request in live if request.told]

    def held(self, live: Iterable[Request]) -> set[int]:
        """Return the blocks that live tables and leases name."""
        leased = {block_id for lease in self.leases for block_id in lease.blocks}
        return leased.union(*(request.told for request in live))

    def needed(self, request: Request, num_tokens: int, live: Sequence[Request]) -> tuple[int, int]:
        """Return the fewest and the most free blocks that making room can take.

        They differ only where hits are not held before, and it cannot be known from outside which
        of several copies they are.
        """
        total = self.blocks(request.computed + num_tokens)
        if Promise.HOLD in self.promises or request.told:
            missing = max(0, total - len(request.told))
            return missing, missing
        hits = self.blocks(request.cached)
        fewest = most = max(0, total - hits)
        held = self.held(live)
        for index in range(request.cached // self.block_size):
            copies = self.memory.copies(request.path, index)
            fewest += bool(copies) and not any(block_id in held for block_id in copies)
            most += not copies or not all(block_id in held for block_id in copies)
        return fewest, most

    def check_new(self, request: Request, ids: Sequence[int], live: Iterable[Request]) -> None:
        """P1, P12, P15: new blocks are free, each once, and the right ones to reuse."""
        for block_id in ids:
            if block_id not in self.usable:
                self.program.broken(
                    "P1", f"block {block_id} handed out, which is none or is set aside"
                )
            if ids.count(block_id) > 1:
                self.program.broken("P1", f"block {block_id} handed out twice in one call")
            if block_id in request.told:
                self.program.broken(
                    "P12", f"block {block_id} of {request.name} handed out to itself once more"
                )
            for other in live:
                if block_id in other.told:
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
            self._check_order(ids, self.held(live) | set(request.told))

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
        """P1, P7, P9, P14, P22: the blocks behind a request's hits are its own prefix."""
        wanted = self.blocks(request.cached)
        self.program.expect("P14", f"blocks of {request.name}", len(request.told), wanted)
        if len(set(request.told)) < len(request.told) or not self.usable >= set(request.told):
            self.program.broken("P1", f"{request.name} hits {request.told}")
        wrong = self.memory.wrong_at(request, request.cached)
        if wrong is not None:
            prop, came = self._judge(request, wrong)
            block_id = request.told[wrong // self.block_size]
            self.program.broken(
                prop,
                f"{request.name} hits block {block_id}: at position {wrong} it wanted "
                f"{self._spelled(request.path[wrong])}, got {came}",
            )

    def _judge(self, request: Request, position: int) -> tuple[str, str]:
        """Which property a wrong hit breaks, and what stands there."""
        index, offset = divmod(position, self.block_size)
        block_id, wanted = request.told[index], request.path[position]
        came = self.memory.places.get(block_id, [None] * self.block_size)[offset]
        if came is not None:
            tenant, epoch, tokens = self.prefixes.spell(came)
            mine = self.prefixes.spell(wanted)
            old = tenant == mine[0] and tokens == mine[2] and epoch != mine[1]
            what = f"{self._spelled(came)} from before the reset" if old else self._spelled(came)
            return ("P22" if old else "P7"), what
        owner = self.memory.owners.get(block_id)
        if owner is None:
            return "P7", "a block that was never handed out"
        due = owner.path[position] if position < len(owner.path) else None
        if due == wanted:
            return "P9", f"what {owner.name} made room for and did not commit"
        return "P7", f"a block that was handed out to {owner.name} since"

    def _spelled(self, prefix: int) -> str:
        tenant, _, tokens = self.prefixes.spell(prefix)
        return f"{tokens} of {tenant!r}" if tenant else str(tokens)

    def agree(self, live: Sequence[Request], seen: Counter[str]) -> None:
        """P1, P2, P5, P7, P18: tables, free blocks and the KV behind every computed token."""
        for request in live:
            if self.table(request) != request.told:
                self.program.broken(
                    "P18",
                    f"the table of {request.name} changed: wanted {request.told}, "
                    f"got {self.table(request)}",
                )
            wrong = self.memory.wrong_at(request, request.computed)
            if wrong is not None:
                _, came = self._judge(request, wrong)
                self.program.broken(
                    "P7",
                    f"the KV of {request.name} at position {wrong}: wanted "
                    f"{self._spelled(request.path[wrong])}, got {came}",
                )
        held = self.held(live)
        seen["shared blocks"] += sum(len(request.told) for request in live) > len(held)
        wanted = len(self.usable) - len(held)
        free = self.free()
        if free > wanted:
            named = {block_id for request in live for block_id in request.told}
            prop = "P17" if free <= len(self.usable) - len(named) else "P1"
            self.program.broken(prop, f"{free} blocks free, {len(held)} in use: wanted {wanted}")
        if free < wanted:
            prop = "P2" if held else "P5"
            self.program.broken(prop, f"{free} blocks free, {len(held)} in use: wanted {wanted}")
