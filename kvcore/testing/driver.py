"""An allocator and a ghost of the GPU's memory, driven side by side, compared after every call.

`Driver` has the protocol's verbs, and each checks what can be known from outside: that what came is
what was promised, that a call that found no space has changed nothing, and, through `agree`, that
free blocks, live tables and the KV behind them are what they must be. It decides nothing: what is
called, and when, is decided by the machines, or by a scenario written by hand.

Every request has a table for each layer group; an allocator that does not promise GROUPS has one
group of full attention. With GROUPS, what no later query of a window sees may be anything, and only
the promises of `WITH_GROUPS` are tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

from kvcore.testing.answers import (
    as_count,
    as_events,
    as_hashes,
    as_ids,
    as_pair,
    as_pairs,
    check_adapter,
)
from kvcore.testing.errors import BrokenError
from kvcore.testing.ghost import Lease, Memory, Prefixes, Request, marked
from kvcore.testing.picture import picture
from kvcore.testing.program import Program
from kvcore.testing.protocol import WITH_GROUPS, Item, Promise
from kvcore.testing.watch import Watch


class Driver:
    """The verbs of an allocator, each checked.

    Args:
        allocator: an adapter, as `Allocator` describes it.
        seen: counts what has been seen: hits, evictions, refusals and so on.
        waive: is given every error before it is raised, and may raise something else.
        draw: True: a picture of the pool stands in the program after every call.

    Raises:
        AdapterError: it lacks a verb, or promises what there is not.
    """

    def __init__(
        self,
        allocator: object,
        seen: Counter[str] | None = None,
        waive: Callable[[BrokenError], None] | None = None,
        *,
        draw: bool = False,
    ) -> None:
        promised = check_adapter(allocator)
        self.promises = promised & WITH_GROUPS if Promise.GROUPS in promised else promised
        self.windows: Sequence[int | None] = (None,)
        if Promise.GROUPS in promised:
            self.windows = tuple(cast("Iterable[int | None]", getattr(allocator, "windows", ())))
        self.program = Program(allocator, waive)
        self.draw = draw
        self.seen: Counter[str] = Counter() if seen is None else seen
        self.prefixes = Prefixes()
        self.epoch = 0
        self.num_requests = 0
        self.tenants: list[str] = []
        self.live: list[Request] = []
        self.away: list[Request] = []
        self.ended_leases: list[Lease] = []
        self.num_leases = 0
        self.index: set[object] = set()

    def start(self, num_blocks: int, block_size: int) -> None:
        """Make a fresh allocator: all that it may hand out is free."""
        self.program.step("start", "", num_blocks, block_size)
        ids = as_ids("start", self.program.call("start", num_blocks, block_size))
        self.block_size = block_size
        self.memory = Memory(block_size, self.windows)
        usable = frozenset(ids)
        if len(usable) != len(ids) or not usable <= set(range(num_blocks)):
            self.program.broken("P1", f"ids 0 to {num_blocks - 1}, each once, got {ids!r}")
        self.watch = Watch(self.program, self.promises, self.memory, self.prefixes, usable)
        self.agree()

    def begin(self, tokens: Iterable[int], tenant: str = "", items: Iterable[Item] = ()) -> Request:
        """Begin a request. P7, P9 and P22 of its hits, P14, P21 and P24 if it ought to hit."""
        asked, things = list(tokens), tuple(items)
        name = self._name()
        self.program.step("begin", name, tuple(asked), tenant, things)
        target = f"{name}, cached = "
        indexed = None if things else self._indexed(asked, tenant)
        if things:
            answer = self.program.call("begin_with", list(asked), tenant, things, target=target)
        else:
            answer = self.program.call("begin", list(asked), tenant, target=target)
        handle, cached = as_pair("begin", answer)
        roots = self._roots(tenant)
        paths = self._paths(roots, asked, things)
        request = Request(name, handle, asked, tenant, self.epoch, roots, paths, items=things)
        request.cached = request.computed = as_count("begin", cached)
        request.boundary = (len(asked) - 1) // self.block_size * self.block_size
        if not 0 <= request.cached < len(asked):
            self.program.broken(
                "P14",
                f"{name} has {len(asked)} tokens, {cached} cached: at least one must be computed",
            )
        self._must_hit(request)
        if indexed is not None and indexed != request.cached:
            self.program.broken(
                "P21", f"{name} hits {cached} tokens: wanted {indexed}, by the events"
            )
        self._note_strangers(request)
        self.live.append(request)
        if Promise.HOLD in self.promises:
            request.tables = self.watch.tables(request)
            request.states = self.watch.states(request)
            self.watch.accept_hits(request)
        self.agree()
        return request

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room. P1 and P12 of the new ids, P13, P14, P15 and P16; P4 if there is no space."""
        self.program.step("reserve", request.name, num_tokens)
        needed = self.watch.needed(request, num_tokens, self.live)
        before = self.watch.view(self.live)
        answer = self.program.call("reserve", request, num_tokens)
        if answer is None:
            self.seen["no space"] += 1
            if needed[1] <= before[0]:
                self.program.broken(
                    "P13", f"no space for {needed[1]} blocks, though {before[0]} are free"
                )
            self.program.expect("P4", "state after no space", self.watch.view(self.live), before)
            return False
        tables = self.watch.tables(request)
        if not self._is_placed(request):
            hits = self.watch.blocks(request.cached)
            request.tables = [table[:hits] for table in tables]
            self.watch.accept_hits(request)
        has_groups = Promise.GROUPS in self.promises
        fresh = self.watch.fresh(request, tables) if has_groups else [as_ids("reserve", answer)]
        states = self.watch.states(request)
        known = set(request.blocks)
        fresh.append([b for state in states[1:2] for b in state if b not in known])
        num_taken = max(needed[0], sum(map(len, fresh)))
        if num_taken > before[0]:
            self.program.broken(
                "P13", f"room made that takes {num_taken} free blocks, with {before[0]} free"
            )
        self._hand_out(request, fresh)
        if not has_groups:
            table = [*request.block_table, *fresh[0]]
            self.program.expect("P16", f"the table of {request.name}", table, tables[0])
        self.watch.check_cover(request, tables, request.computed + num_tokens)
        request.tables, request.states = tables, states
        self.agree()
        return True

    def commit(self, request: Request, num_tokens: int) -> None:
        """Write the KV of the next tokens, and say so. P16 if blocks must stay in their places."""
        self.program.step("commit", request.name, num_tokens)
        stop = request.computed + num_tokens
        self._write(request, request.computed, stop)
        if request.states and num_tokens:
            if not request.states[1]:
                self.program.broken("P14", f"{request.name} has no block for its next state")
            self.memory.advance(request, stop, request.states[1])
        self.program.call("commit", request, num_tokens)
        request.computed = stop
        tables = self.watch.tables(request)
        if Promise.STABLE in self.promises:
            self.program.expect("P16", f"the table of {request.name}", tables, request.tables)
        before, request.tables = request.blocks, tables
        request.states = self.watch.states(request)
        self.memory.release(before, self.watch.held(self.live))
        self.agree()

    def append(self, request: Request, token: int) -> None:
        """Add a token to the end."""
        self.program.step("append", request.name, token)
        self.program.call("append", request, token)
        self._join(request, token)
        self.agree()

    def expect(self, request: Request, token: int) -> None:
        """Add a token to the end that the device knows, and the allocator does not know yet."""
        self.program.step("expect", request.name, token)
        self.program.call("expect", request, 1)
        self._join(request, token)
        request.unknown += 1
        self.seen["expected"] += 1
        self.agree()

    def resolve(self, request: Request) -> None:
        """Make the first unknown token known; what that fills ought to hit from now on."""
        self.program.step("resolve", request.name)
        known = request.num_known
        self.program.call("resolve", request, request.tokens[known])
        request.unknown -= 1
        if known < request.computed:
            self._write(request, known, known + 1)
        self.seen["resolved"] += 1
        self.agree()

    def finish(self, request: Request) -> None:
        """End a request in any state."""
        self.program.step("finish", request.name)
        if request.computed < len(request.tokens):
            self.seen["aborted"] += 1
        self.program.call("finish", request)
        (self.away if request in self.away else self.live).remove(request)
        self._let_go(request, request.blocks)
        self.agree()

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Cut a request. P14 of what is computed now, P16 of what is left of its table."""
        self.program.step("truncate", request.name, num_tokens)
        answer = self.program.call("truncate", request, num_tokens)
        computed = as_count("truncate", answer)
        most = min(num_tokens, request.computed)
        table = self.watch.table(request)
        if not 0 <= computed <= most or computed > len(table) * self.block_size:
            self.program.broken(
                "P14", f"{computed} tokens computed after a cut, in {table}: wanted at most {most}"
            )
        self.program.expect("P16", "what is left", table, request.block_table[: len(table)])
        before, request.block_table = request.block_table, table
        others = self.watch.held(other for other in self.live if other is not request)
        for index in range(computed // self.block_size, len(table)):
            if table[index] not in others:
                self.memory.doubt(table[index])
        request.unknown = max(0, num_tokens - request.num_known)
        del request.tokens[num_tokens:]
        for path in request.paths:
            del path[num_tokens:]
        request.computed = computed
        self._let_go(request, before)
        request.cached = min(request.cached, computed)
        self.seen["cut"] += 1
        self.agree()

    def fork(self, request: Request) -> Request | None:
        """Fork a request and carry out the copies. P13, P4, P16, and P7 through `agree`."""
        needed = int(request.computed % self.block_size > 0)
        before = self.watch.view(self.live)
        name = self._name()
        self.program.step("fork", name, request.name)
        answer = self.program.call("fork", request, target=f"{name}, copies = ")
        if answer is None:
            if needed <= before[0]:
                self.program.broken("P13", f"no space to fork, though {before[0]} are free")
            self.program.expect("P4", "state after no space", self.watch.view(self.live), before)
            return None
        handle, copies = as_pair("fork", answer)
        paths = [[*path] for path in request.paths]
        child = replace(request, name=name, handle=handle, tokens=[*request.tokens], paths=paths)
        child.tables = []
        orders = as_pairs("fork", copies)
        table = self.watch.table(child)
        own = [block_id for block_id in table if block_id not in request.block_table]
        self.program.expect("P13", f"new blocks of {name}", len(own), needed)
        if len(table) < self.watch.blocks(child.computed):
            self.program.broken("P14", f"{table} does not cover {child.computed} computed tokens")
        self._hand_out(child, [own])
        child.block_table = table
        for src, dst in orders:
            if src not in request.block_table or dst not in own:
                self.program.broken("P16", f"a copy from {src} to {dst}: not in the tables")
            self.memory.copy(src, dst)
        self.live.append(child)
        self.seen["forks"] += 1
        self.agree()
        return child

    def lease(self, request: Request) -> Lease:
        """Hold the blocks of a request's table, for a step or a transfer in flight."""
        self.num_leases += 1
        name = f"lease{self.num_leases}"
        self.program.step("lease", request.name, name)
        handle = self.program.call("lease", request, target=f"{name} = ")
        lease = Lease(name, handle, request.blocks)
        self.watch.leases.append(lease)
        self.seen["leases"] += 1
        self.agree()
        return lease

    def end_lease(self, lease: Lease) -> None:
        """End a lease; a second time changes nothing. P17 through `agree`."""
        self.program.step("end_lease", "", lease.name)
        if lease in self.watch.leases:
            self.program.call("end_lease", lease)
            self.watch.leases.remove(lease)
            self.ended_leases.append(lease)
            held = self.watch.held(self.live)
            self.memory.release(lease.blocks, held, was_used=False)
        else:
            before = self.watch.view(self.live)
            self.program.misuse("end_lease", lease)
            self.program.expect(
                "P17", "state after a second end", self.watch.view(self.live), before
            )
        self.agree()

    def swap_out(self, request: Request) -> None:
        """Free a request's blocks; the host keeps its computed KV. P16 of the copies."""
        self.program.step("swap_out", request.name)
        ids = as_ids("swap_out", self.program.call("swap_out", request))
        wanted = request.block_table[: self.watch.blocks(request.computed)]
        self.program.expect("P16", f"what {request.name} copies out", ids, wanted)
        self.live.remove(request)
        self.away.append(request)
        before, request.tables, request.num_away = request.blocks, [], len(ids)
        self._let_go(request, before)
        self.seen["swapped out"] += 1
        self.agree()

    def swap_in(self, request: Request) -> bool:
        """Bring a request back. P1, P4, P13 and P16 of the copies, P7 through `agree`."""
        self.program.step("swap_in", request.name)
        before = self.watch.view(self.live)
        answer = self.program.call("swap_in", request)
        if answer is None:
            if request.num_away <= before[0]:
                self.program.broken("P13", f"{request.name} stays out, with {before[0]} free")
            self.program.expect("P4", "state after no space", self.watch.view(self.live), before)
            return False
        copies = as_pairs("swap_in", answer)
        table = self.watch.table(request)
        self.program.expect("P14", f"blocks of {request.name}", len(table), request.num_away)
        for index, block_id in copies:
            if not 0 <= index < len(table) or table[index] != block_id:
                self.program.broken("P16", f"block {index} of the host to {block_id}, in {table}")
        copied = {index for index, _ in copies}
        request.block_table = [b for index, b in enumerate(table) if index not in copied]
        self._hand_out(request, [[block_id for _, block_id in copies]])
        self.away.remove(request)
        self.live.append(request)
        request.block_table, request.num_away = table, 0
        for index in sorted(copied):
            start = index * self.block_size
            self._write(request, start, min(start + self.block_size, request.computed))
        self.seen["swapped in"] += 1
        self.agree()
        return True

    def reset(self) -> None:
        """Reset. P22: nothing older is hit, and at rest it must not refuse."""
        self.program.step("reset", "")
        before = self.watch.view(self.live)
        if self.program.call("reset"):
            self.epoch += 1
            self.memory.forget()
            self.seen["resets"] += 1
        else:
            if not self.live:
                self.program.broken("P22", "reset refused, though no request is live")
            self.program.expect("P4", "state after it", self.watch.view(self.live), before)
        self.agree()

    def misuse(self, verb: str, request: Request, *arguments: object) -> None:
        """Make a call that is out of order. P3: refused, and P4: nothing has changed."""
        self.program.step("misuse", request.name, verb, request in self.live, *arguments)
        before = self.watch.view(self.live)
        error = self.program.misuse(verb, request, *arguments)
        self.seen["misuse"] += 1
        if Promise.STRICT in self.promises:
            if error is None:
                self.program.broken("P3", "wanted an exception, the call was accepted")
            if isinstance(error, AssertionError):
                self.program.broken("P3", "refused by an assert, which vanishes under python -O")
        self.program.expect("P4", "state after misuse", self.watch.view(self.live), before)
        self.agree()

    def agree(self) -> None:
        """Compare all that can be seen: P1, P2, P5, P7, P18 and P19."""
        if self.draw:
            self.program.note(picture(self.memory, self.prefixes, self.watch, self.live))
        placed = [request for request in self.live if self._is_placed(request)]
        self.watch.agree(placed, self.seen)

    def room(self, request: Request) -> int:
        """Return the number of slots of a request's table that are not computed yet."""
        return len(request.block_table) * self.block_size - request.computed

    def _roots(self, tenant: str) -> list[int]:
        """Return the numbers of a tenant's empty prefixes, one a layer group."""
        return [self.prefixes.root(tenant, self.epoch, n) for n in range(len(self.windows))]

    def _paths(self, roots: list[int], tokens: list[int], items: Iterable[Item]) -> list[list[int]]:
        """Return the numbers of a prompt's prefixes, for each layer group."""
        marks = marked(tokens, items)
        return [self.prefixes.follow(root, marks) for root in roots]

    def _join(self, request: Request, token: int) -> None:
        """Add a token to the end of what the machines know of a request."""
        request.tokens.append(token)
        for root, path in zip(request.roots, request.paths, strict=True):
            path.extend(self.prefixes.follow(path[-1] if path else root, [token]))

    def _write(self, request: Request, start: int, stop: int) -> None:
        """Write the KV of positions; what has known tokens and no older weights can be hit."""
        known, current = request.num_known, request.epoch == self.epoch
        self.memory.write(request, start, min(stop, known), resident=current)
        self.memory.write(request, max(start, known), stop, resident=False)

    def _indexed(self, tokens: list[int], tenant: str) -> int | None:
        """Return how many tokens of a prompt hit by the events, if those are promised."""
        if Promise.EVENTS not in self.promises:
            return None
        self._fold()
        answer = self.program.ask("block_hashes", list(tokens), tenant)
        hashes = as_hashes("block_hashes", answer)
        wanted = len(tokens) // self.block_size
        self.program.expect("P21", "block hashes of a prompt", len(hashes), wanted)
        leading = next((n for n, h in enumerate(hashes) if h not in self.index), len(hashes))
        return min(leading, (len(tokens) - 1) // self.block_size) * self.block_size

    def _fold(self) -> None:
        """Follow the events. P21: nothing is removed that was not stored."""
        for kind, block_hash in as_events("take_events", self.program.ask("take_events")):
            if kind == "stored":
                self.index.add(block_hash)
            elif kind == "cleared":
                self.index.clear()
            elif block_hash in self.index:
                self.index.remove(block_hash)
            else:
                self.program.broken("P21", f"{block_hash!r} removed, which was not stored")
            self.seen["events"] += 1

    def _name(self) -> str:
        """Return a name: the letters, then r26, r27 and so on."""
        self.num_requests += 1
        number = self.num_requests - 1
        return chr(ord("a") + number) if number < 26 else f"r{number}"

    def _is_placed(self, request: Request) -> bool:
        """Return True if a request's hits are in its table: with HOLD, or once it has reserved."""
        return Promise.HOLD in self.promises or bool(request.blocks)

    def _must_hit(self, request: Request) -> None:
        """P24: what was committed and is still there is found."""
        if request.cached:
            self.seen["hits"] += 1
        if request.cached == (len(request.tokens) - 1) // self.block_size * self.block_size > 0:
            self.seen["full hits"] += 1
        if Promise.KEEP not in self.promises and Promise.REUSE not in self.promises:
            return
        at_once, has_states = Promise.KEEP not in self.promises, Promise.STATES in self.promises
        wanted = self.memory.expected(request.paths, at_once=at_once, needs_state=has_states)
        if request.cached < wanted:
            self.program.broken(
                "P24", f"{request.name} hits {request.cached} tokens: {wanted} are cached"
            )

    def _note_strangers(self, request: Request) -> None:
        """Note whether another tenant's blocks would have hit more, if they could be hit."""
        if request.tenant not in self.tenants:
            self.tenants.append(request.tenant)
        for tenant in self.tenants:
            paths = self._paths(self._roots(tenant), request.tokens, request.items)
            theirs = self.memory.expected(paths, at_once=False)
            if theirs > request.cached:
                self.seen["kept apart"] += 1
                return

    def _let_go(self, request: Request, blocks: list[int]) -> None:
        """Note the release of a request's blocks, all or the last; hits alone were never used."""
        was_used = len(blocks) > self.watch.blocks(request.cached)
        self.memory.release(blocks, self.watch.held(self.live), was_used=was_used)

    def _hand_out(self, request: Request, fresh: list[list[int]]) -> None:
        """P1, P12, P15: blocks that are new to a request, for each of its layer groups."""
        self.watch.check_new(request, [b for ids in fresh for b in ids], self.live)
        for number, ids in enumerate(fresh):
            group = number if number < len(request.paths) else 0  # states come last
            for block_id in ids:
                self.seen["evictions"] += self.memory.hand_out(block_id, request, group)
