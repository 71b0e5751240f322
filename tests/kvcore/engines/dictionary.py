"""An allocator made of lists and one dictionary: right, slow, and easy to break in one place.

What a subclass of `broken.py` overrides is a step that real allocators got wrong.
"""

from dataclasses import dataclass, field

from kvcore.testing import EVERYTHING
from kvcore.testing.ghost import marked


@dataclass(eq=False)
class DictionaryRequest:
    tokens: list
    tenant: str
    epoch: int
    computed: int = 0
    table: list = field(default_factory=list)
    is_open: bool = True
    unknown: int = 0
    items: tuple = ()


@dataclass(eq=False)
class DictionaryLease:
    table: list


class DictionaryAllocator:
    promises = EVERYTHING

    def start(self, num_blocks, block_size):
        self.block_size = block_size
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.content = {}  # block -> the whole prefix that it ends
        self.told = set()  # the contents that events have told
        self.epoch = 0
        return list(self.free)

    # the verbs

    def begin(self, tokens, tenant):
        return self.begin_with(tokens, tenant, ())

    def begin_with(self, tokens, tenant, items):
        request = DictionaryRequest(list(tokens), tenant, self.epoch, items=tuple(items))
        request.table = self.look_up(request)
        self.hold(request.table)
        request.computed = len(request.table) * self.block_size
        return request, request.computed

    def reserve(self, request, num_tokens):
        self.check_open(request)
        self.check_count(num_tokens)
        missing = self.blocks(request.computed + num_tokens) - len(request.table)
        if not self.has_room(missing):
            return None
        new = self.take(missing)
        request.table += new
        return new

    def commit(self, request, num_tokens):
        self.check_open(request)
        self.check_count(num_tokens)
        length = len(request.tokens) + request.unknown
        room = min(len(request.table) * self.block_size, length) - request.computed
        if num_tokens > room:
            raise ValueError(f"{num_tokens} tokens committed, room for {room}")
        request.computed += num_tokens
        self.publish(request, self.settled(request))

    def append(self, request, token):
        self.check_open(request)
        self.check_count(token)
        request.tokens.append(token)

    def expect(self, request, num_tokens):
        self.check_open(request)
        request.unknown += num_tokens

    def resolve(self, request, token):
        self.check_open(request)
        if not request.unknown:
            raise ValueError("no token is unknown")
        request.tokens.append(token)
        request.unknown -= 1
        self.publish(request, self.settled(request))

    def finish(self, request):
        self.check_open(request)
        self.release(request.table)
        request.table, request.is_open = [], False

    def block_table(self, request):
        return list(request.table)

    def num_free_blocks(self):
        return len(self.free)

    def truncate(self, request, num_tokens):
        self.check_open(request)
        request.computed = self.computed_after_cut(request, min(num_tokens, request.computed))
        kept = self.blocks(request.computed)
        self.release(request.table[kept:])
        request.unknown = max(0, num_tokens - len(request.tokens))
        del request.table[kept:], request.tokens[num_tokens:]
        return request.computed

    def fork(self, request):
        self.check_open(request)
        full, rest = divmod(request.computed, self.block_size)
        if not self.has_room(bool(rest)):
            return None
        child = DictionaryRequest([*request.tokens], request.tenant, request.epoch)
        child.computed, child.items = request.computed, request.items
        self.hold(request.table[:full])
        own = self.take(bool(rest))
        child.table = request.table[:full] + own
        return child, [(request.table[full], dst) for dst in own]

    def reset(self):
        self.content.clear()
        self.epoch += 1
        return True

    def lease(self, request):
        self.check_open(request)
        self.hold(request.table)
        return DictionaryLease([*request.table])

    def end_lease(self, lease):
        table, lease.table = lease.table, []
        self.release(table)

    def take_events(self):
        now, before = set(self.content.values()), self.told
        self.told = now
        return [("removed", key) for key in before - now] + [
            ("stored", key) for key in now - before
        ]

    def block_hashes(self, tokens, tenant):
        request = DictionaryRequest(list(tokens), tenant, self.epoch)
        return [self.key(request, index) for index in range(len(tokens) // self.block_size)]

    def swap_out(self, request):
        self.check_open(request)
        table, request.table = request.table, []
        self.release(table)
        return table[: self.blocks(request.computed)]

    def swap_in(self, request):
        self.check_open(request)
        found = [] if request.epoch != self.epoch else self.look_up(request)
        found = found[: request.computed // self.block_size]
        missing = self.blocks(request.computed) - len(found)
        if not self.has_room(missing + sum(self.refs[block_id] == 0 for block_id in found)):
            return None
        self.hold(found)
        request.table = found + self.take(missing)
        self.publish(request, self.settled(request))
        return list(enumerate(request.table))[len(found) :]

    # the steps

    def key(self, request, index):
        marks = marked(request.tokens, request.items)
        return request.tenant, tuple(marks[: (index + 1) * self.block_size])

    def look_up(self, request):
        found = []
        for index in range((len(request.tokens) - 1) // self.block_size):
            copies = [b for b, key in self.content.items() if key == self.key(request, index)]
            if not copies:
                break
            found.append(copies[0])
        return found

    def settled(self, request):
        return min(request.computed, len(request.tokens))

    def publish(self, request, num_tokens):
        if request.epoch == self.epoch:
            for index in range(num_tokens // self.block_size):
                self.content[request.table[index]] = self.key(request, index)

    def blocks(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def has_room(self, missing):
        return missing <= len(self.free)

    def take(self, count):
        taken = [self.free.pop(0) for _ in range(count)]
        for block_id in taken:
            self.refs[block_id] = 1
            self.forget(block_id)
        return taken

    def forget(self, block_id):
        self.content.pop(block_id, None)

    def hold(self, table):
        for block_id in table:
            self.refs[block_id] += 1
            if self.refs[block_id] == 1:
                self.free.remove(block_id)

    def release(self, table):
        for block_id in reversed(table):
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                self.free.append(block_id)

    def computed_after_cut(self, request, computed):
        full, rest = divmod(computed, self.block_size)
        if rest and (request.table[full] in self.content or self.refs[request.table[full]] > 1):
            return full * self.block_size
        return computed

    def check_open(self, request):
        if not request.is_open:
            raise KeyError("this request has ended")

    def check_count(self, number):
        if number < 0:
            raise ValueError(f"wanted a number that is not negative, got {number}")
