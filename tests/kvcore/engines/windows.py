"""Full attention beside a sliding window over one pool, made of lists: right, slow, easy to break.

A block id of 0 in a window's table is no block: nothing there can be seen any more.
"""

# ruff: noqa: N801  # a broken allocator's name is what it does wrong

from dataclasses import dataclass, field

from kvcore import testing
from kvcore.testing import Promise

BROKEN_WINDOWS = {}


def broken(*properties):
    """Register an allocator, by which properties its bug may show."""

    def register(cls):
        BROKEN_WINDOWS[cls.__name__] = (cls, set(properties), [testing.GroupMachine])
        return cls

    return register


@dataclass(eq=False)
class Request:
    tokens: list
    tenant: str
    tables: list = field(default_factory=list)
    computed: int = 0


class WindowAllocator:
    promises = frozenset(
        {Promise.GROUPS, Promise.HOLD, Promise.CHUNK, Promise.COMMIT, Promise.KEEP, Promise.TENANTS}
    )
    windows = (None, 5)

    def start(self, num_blocks, block_size):
        self.block_size = block_size
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.content = {}  # block -> group and the whole prefix that it ends
        return list(self.free)

    def begin(self, tokens, tenant):
        request = Request(list(tokens), tenant)
        count, request.tables = self.look_up(request)
        for table in request.tables:
            for block_id in table:
                self.hold(block_id)
        request.computed = count * self.block_size
        return request, request.computed

    def reserve(self, request, num_tokens):
        wanted = -(-(request.computed + num_tokens) // self.block_size)
        missing = [wanted - len(table) for table in request.tables]
        if sum(missing) > len(self.free):
            return None
        taken = [self.take(count) for count in missing]
        for table, new in zip(request.tables, taken, strict=True):
            table.extend(new)
        return taken

    def commit(self, request, num_tokens):
        request.computed += num_tokens
        for group, table in enumerate(request.tables):
            for index in range(request.computed // self.block_size):
                if table[index]:
                    self.content[table[index]] = self.key(request, group, index)
        self.move_on(request)

    def append(self, request, token):
        request.tokens.append(token)

    def finish(self, request):
        for table in request.tables:
            for block_id in reversed(table):
                self.let_go(block_id)

    def block_tables(self, request):
        return [list(table) for table in request.tables]

    def num_free_blocks(self):
        return len(self.free)

    # the steps

    def key(self, request, group, index):
        return group, request.tenant, tuple(request.tokens[: (index + 1) * self.block_size])

    def first_seen(self, group, position):
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def look_up(self, request):
        by_key = {key: block_id for block_id, key in self.content.items()}
        for count in range((len(request.tokens) - 1) // self.block_size, 0, -1):
            tables = [self.serve(request, by_key, group, count) for group in range(2)]
            if None not in tables:
                return count, tables
        return 0, [[], []]

    def serve(self, request, by_key, group, count):
        first = self.first_seen(group, count * self.block_size) // self.block_size
        found = [by_key.get(self.key(request, group, index)) for index in range(first, count)]
        return None if None in found else [0] * first + found

    def move_on(self, request):
        for group, table in enumerate(request.tables):
            for index in range(self.first_seen(group, request.computed) // self.block_size):
                self.let_go(table[index])
                table[index] = 0

    def take(self, count):
        taken = [self.free.pop(0) for _ in range(count)]
        for block_id in taken:
            self.refs[block_id] = 1
            self.content.pop(block_id, None)
        return taken

    def hold(self, block_id):
        if block_id:
            self.refs[block_id] += 1
            if self.refs[block_id] == 1:
                self.free.remove(block_id)

    def let_go(self, block_id):
        if block_id:
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                self.free.append(block_id)


@broken("P19")
class a_window_moves_on_one_token_too_far(WindowAllocator):
    """The query's own position is counted twice."""

    def move_on(self, request):
        request.computed += 1
        super().move_on(request)
        request.computed -= 1


@broken("P19")
class a_hit_asks_the_first_group_alone(WindowAllocator):
    """The window's blocks are gone, and the prefix is hit nevertheless."""

    def serve(self, request, by_key, group, count):
        found = super().serve(request, by_key, group, count)
        return [0] * count if found is None and group else found


@broken("P1", "P7")
class both_groups_get_one_block(WindowAllocator):
    """The layers of a window write over those of full attention."""

    def reserve(self, request, num_tokens):
        if super().reserve(request, num_tokens) is None:
            return None
        full, window = request.tables
        for index, block_id in enumerate(window):
            if block_id and full[index] != block_id and block_id not in self.content:
                self.let_go(block_id)
                self.hold(full[index])
                window[index] = full[index]
        return []


@broken("P2", "P5")
class what_a_window_has_left_is_lost(WindowAllocator):
    """Its blocks leave the table, and never come back."""

    def move_on(self, request):
        for group, table in enumerate(request.tables):
            for index in range(self.first_seen(group, request.computed) // self.block_size):
                table[index] = 0


@broken("P1")
class what_a_window_has_left_is_free_and_still_named(WindowAllocator):
    """The next request gets a block that this table still points at."""

    def move_on(self, request):
        for group, table in enumerate(request.tables):
            for index in range(self.first_seen(group, request.computed) // self.block_size):
                if self.refs[table[index]] > 0:
                    self.let_go(table[index])


@broken("P1", "P7")
class content_does_not_say_its_group(WindowAllocator):
    """A window hits the blocks of full attention: equal tokens, other layers."""

    def key(self, request, group, index):
        return super().key(request, 0, index)


@broken("P24")
class a_hit_needs_what_a_window_has_left(WindowAllocator):
    """All blocks of the window are asked for, and long prompts never hit."""

    def serve(self, request, by_key, group, count):
        found = [by_key.get(self.key(request, group, index)) for index in range(count)]
        return None if None in found else super().serve(request, by_key, group, count)


@broken("P9")
class a_window_publishes_what_is_only_reserved(WindowAllocator):
    """The window's blocks can be hit before they are written."""

    def reserve(self, request, num_tokens):
        taken = super().reserve(request, num_tokens)
        if taken is not None:
            for group, table in enumerate(request.tables):
                for index in range(min(len(table), len(request.tokens) // self.block_size)):
                    if table[index]:
                        self.content[table[index]] = self.key(request, group, index)
        return taken
