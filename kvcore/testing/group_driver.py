"""Several kinds of attention over one pool, driven beside a ghost of the GPU's memory.

Like `Driver`, for allocators that promise GROUPS: every group has a table of its own, and what no
later query of a window sees may be anything. Between calls each group must hold, behind every
position that its next query sees, the KV of this very prefix (P7, P19); no block stands in two
places that differ (P1); what no table names is free (P1, P2, P5); no table changes but by a call
with its own request (P18); and the longest prefix that every group can serve is found (P24).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import cast

from kvcore.testing.answers import as_count, as_ids, as_pair, check_adapter
from kvcore.testing.driver import Driver
from kvcore.testing.errors import AdapterError, BrokenError
from kvcore.testing.ghost import Prefixes, Request
from kvcore.testing.program import Program
from kvcore.testing.protocol import Item, Promise

Tables = list[list[int]]


class GroupDriver:
    """The verbs of an allocator of several layer groups, each checked.

    Args:
        allocator: an adapter that promises GROUPS.
        seen: counts what has been seen.
        waive: is given every error before it is raised, and may raise something else.
        draw: whether a picture of the pool stands in the program after every call.
    """

    def __init__(
        self,
        allocator: object,
        seen: Counter[str] | None = None,
        waive: Callable[[BrokenError], None] | None = None,
        *,
        draw: bool = False,
    ) -> None:
        self.promises = check_adapter(allocator)
        self.windows = list(cast("Collection[int | None]", getattr(allocator, "windows", ())))
        self.program = Program(allocator, waive)
        self.seen: Counter[str] = Counter() if seen is None else seen
        self.draw = draw
        self.prefixes = Prefixes()
        self.live: list[Request] = []
        self.tables: dict[str, Tables] = {}
        self.places: dict[int, tuple[int, list[int | None]]] = {}  # block -> group, prefixes
        self.stamps: dict[int, int] = {}  # block -> how many had been handed out when it filled
        self.num_handed_out = 0
        self.num_requests = 0

    def start(self, num_blocks: int, block_size: int) -> None:
        """Make a fresh allocator: all that it may hand out is free."""
        self.program.step("start", "", num_blocks, block_size)
        ids = as_ids("start", self.program.call("start", num_blocks, block_size))
        self.block_size = block_size
        self.usable = frozenset(ids)
        if len(self.usable) != len(ids) or not self.usable <= set(range(num_blocks)):
            self.program.broken("P1", f"ids 0 to {num_blocks - 1}, each once, got {ids!r}")
        self.agree()

    def begin(self, tokens: Iterable[int], tenant: str = "", items: Iterable[Item] = ()) -> Request:
        """Begin a request. P7 and P19 of its hits, P14, P24 if it ought to hit."""
        asked = list(tokens)
        self.num_requests += 1
        name = f"r{self.num_requests}"
        self.program.step("begin", name, tuple(asked), tenant, tuple(items))
        root = self.prefixes.root(tenant, 0)
        path = self.prefixes.follow(root, asked)
        wanted = self._findable(path)
        answer = self.program.call("begin", list(asked), tenant, target=f"{name}, cached = ")
        handle, cached = as_pair("begin", answer)
        request = Request(name, handle, asked, tenant, root, path)
        request.cached = request.computed = as_count("begin", cached)
        if not 0 <= request.cached < len(asked):
            self.program.broken("P14", f"{name} has {len(asked)} tokens, {cached} cached")
        if request.cached < wanted:
            self.program.broken("P24", f"{name} hits {cached} tokens: {wanted} are cached")
        self.seen["hits"] += request.cached > 0
        self.live.append(request)
        self.tables[name] = []
        if Promise.HOLD in self.promises:
            self._take_over(request)
        self.agree()
        return request

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room. P1 of the new blocks; P4 if there is no space; P14 of the tables."""
        self.program.step("reserve", request.name, num_tokens)
        before = self._free()
        if self.program.call("reserve", request, num_tokens) is None:
            self.seen["no space"] += 1
            self.program.expect("P4", "free blocks after no space", self._free(), before)
            self.agree()
            return False
        fresh = self._take_over(request)
        if len(fresh) > before:
            self.program.broken("P13", f"{len(fresh)} blocks handed out, with {before} free")
        self._check_cover(request, request.computed, request.computed + num_tokens)
        self.agree()
        return True

    def commit(self, request: Request, num_tokens: int) -> None:
        """Write the KV of the next tokens in every group, and say so."""
        self.program.step("commit", request.name, num_tokens)
        stop = request.computed + num_tokens
        for group, table in enumerate(self.tables[request.name]):
            for position in range(request.computed, stop):
                self._write(group, table[position // self.block_size], request, position)
        self.program.call("commit", request, num_tokens)
        request.computed = stop
        self._take_over(request)
        self.agree()

    def append(self, request: Request, token: int) -> None:
        """Let a token join the end."""
        self.program.step("append", request.name, token)
        self.program.call("append", request, token)
        request.tokens.append(token)
        request.path += self.prefixes.follow(request.path[-1], [token])
        self.agree()

    def finish(self, request: Request) -> None:
        """End a request in whatever state it is."""
        self.program.step("finish", request.name)
        self.program.call("finish", request)
        self.live.remove(request)
        del self.tables[request.name]
        self.agree()

    def agree(self) -> None:
        """Compare all that can be seen: P1, P2, P5, P7, P18 and P19."""
        if self.draw:
            self.program.note(self._picture())
        held: dict[int, tuple[int, int, int]] = {}
        for request in self.live:
            told = self.tables[request.name]
            if not told:
                continue
            now = self._ask(request)
            self.program.expect("P18", f"the tables of {request.name}", now, told)
            for group, table in enumerate(now):
                self._check_places(request, group, table, held)
                self._check_sight(request, group, table)
        self.seen["shared blocks"] += len(held) < sum(
            b in self.usable for tables in self.tables.values() for t in tables for b in t
        )
        free, wanted = self._free(), len(self.usable) - len(held)
        if free != wanted:
            prop = "P1" if free > wanted else "P2" if held else "P5"
            what = f"{free} blocks free, {len(held)} in use: wanted {wanted}"
            self.program.broken(prop, what)

    def _check_places(
        self, request: Request, group: int, table: list[int], held: dict[int, tuple[int, int, int]]
    ) -> None:
        """P1: a block stands in one place, or in the same place of the same prefix."""
        for index, block_id in enumerate(table):
            if block_id in self.usable:
                end = min((index + 1) * self.block_size, len(request.path)) - 1
                place = (group, index, request.path[end])
                if held.setdefault(block_id, place) != place:
                    what = f"block {block_id} stands in group {group} of {request.name}"
                    self.program.broken("P1", f"{what}, and elsewhere with other content")

    def _check_sight(self, request: Request, group: int, table: list[int]) -> None:
        """P7, P19: behind every position that the next query sees stands its own prefix."""
        self.seen["out of sight"] += self._first_seen(group, request.computed) > 0
        for position in range(self._first_seen(group, request.computed), request.computed):
            index, offset = divmod(position, self.block_size)
            block_id = table[index] if index < len(table) else None
            where = f"position {position} of {request.name} in group {group}"
            if block_id not in self.usable:
                self.program.broken("P19", f"{where} can be seen, and has no block")
            owner, cells = self.places.get(block_id, (group, [None]))
            if owner != group or cells[offset : offset + 1] != [request.path[position]]:
                self.program.broken("P7", f"{where}: block {block_id} holds something else")

    def _check_cover(self, request: Request, start: int, stop: int) -> None:
        for group, table in enumerate(self.tables[request.name]):
            for index in range(start // self.block_size, -(-stop // self.block_size)):
                if index >= len(table) or table[index] not in self.usable:
                    what = f"group {group} of {request.name} has no block for {start} to {stop}"
                    self.program.broken("P14", f"{what}: {table}")

    def _take_over(self, request: Request) -> list[int]:
        """Note a request's tables as they are now; blocks that are new hold nothing yet."""
        before, now = self.tables[request.name], self._ask(request)
        old = {block_id for table in before for block_id in table}
        hits = len(before) == 0 and request.cached // self.block_size
        fresh = []
        for group, table in enumerate(now):
            for index, block_id in enumerate(table):
                if block_id in self.usable and block_id not in old and index >= hits:
                    self._hand_out(request, group, block_id)
                    fresh.append(block_id)
        self.tables[request.name], request.told = now, now[0]
        return fresh

    def _hand_out(self, request: Request, group: int, block_id: int) -> None:
        for other in self.live:
            if any(block_id in table for table in self.tables[other.name]):
                what = f"block {block_id} handed out to {request.name}: {other.name} has it"
                self.program.broken("P1", what)
        self.seen["evictions"] += self.stamps.pop(block_id, None) is not None
        self.places[block_id] = (group, [None] * self.block_size)
        self.num_handed_out += 1

    def _write(self, group: int, block_id: int, request: Request, position: int) -> None:
        _, cells = self.places.setdefault(block_id, (group, [None] * self.block_size))
        index, offset = divmod(position, self.block_size)
        if cells[offset] != request.path[position]:
            self.stamps.pop(block_id, None)
            cells[offset] = request.path[position]
        first = index * self.block_size
        if cells == request.path[first : first + self.block_size]:
            self.stamps[block_id] = self.num_handed_out

    def _first_seen(self, group: int, position: int) -> int:
        """The first position that a query at `position` sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _findable(self, path: list[int]) -> int:
        """How many tokens every group can serve, if that is promised."""
        if Promise.KEEP not in self.promises and Promise.REUSE not in self.promises:
            return 0
        at_once = Promise.KEEP not in self.promises
        found = {
            (group, cells[-1])
            for block_id, (group, cells) in self.places.items()
            if block_id in self.stamps
            and (not at_once or self.stamps[block_id] == self.num_handed_out)
        }
        size = self.block_size
        for count in range((len(path) - 1) // size, 0, -1):
            if all(
                (group, path[(index + 1) * size - 1]) in found
                for group in range(len(self.windows))
                for index in range(self._first_seen(group, count * size) // size, count)
            ):
                return count * size
        return 0

    def _ask(self, request: Request) -> Tables:
        answer = self.program.ask("block_tables", request)
        if not isinstance(answer, Collection) or len(answer) != len(self.windows):
            wanted = f"a table for each of {len(self.windows)} groups"
            raise AdapterError(f"block_tables: wanted {wanted}, got {answer!r}")
        return [as_ids("block_tables", table) for table in answer]

    def _free(self) -> int:
        return as_count("num_free_blocks", self.program.ask("num_free_blocks"))

    def _picture(self) -> str:
        rows = []
        for request in self.live:
            for group, table in enumerate(self.tables[request.name]):
                ids = " ".join(str(b) if b in self.usable else "." for b in table)
                rows.append(f"  {request.name} group {group}: [{ids}]")
        return "\n".join(rows) or "  no tables"


def make_driver(
    allocator: object,
    seen: Counter[str] | None = None,
    waive: Callable[[BrokenError], None] | None = None,
    *,
    draw: bool = False,
) -> Driver | GroupDriver:
    """Return the driver that fits what an adapter promises."""
    kind = GroupDriver if Promise.GROUPS in check_adapter(allocator) else Driver
    return kind(allocator, seen, waive, draw=draw)
