"""A small engine, with a block manager of its own, and the same engine with kvcore in its place.

`SmallEngine(OwnBlocks(...))` is what a small engine looks like: 70 lines keep a free list, ref
counts, a table of hashes, and a block table a request. `SmallEngine(KvcoreBlocks(...))` is the same
engine after the replacement; `StepEngine` goes on from there, one call a step, and `AheadEngine`
sends a step before it has read the tokens of the last. All write the same text.

The device is a list: what stands in a slot is what was written there, and the next token depends
on every slot that the block table names. A wrong table, or a block that is reused too early, gives
another text.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field

import kvcore


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)  # of the prompt, and what was sampled
    num_computed: int = 0
    table: list[int] = field(default_factory=list)  # the own manager's
    seq: kvcore.KVSequence | None = None  # kvcore's

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def is_finished(self):
        return len(self.tokens) - len(self.prompt) >= self.max_tokens


class Device:
    """The memory of the KV cache, and a network that reads all of it."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.slots = [None] * (num_blocks * block_size)
        self.num_written = 0

    def slot(self, table, position):
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def forward(self, table, slots, tokens, start):
        """Write the KV of the tokens from `start` on to the slots, read it all, return a token."""
        for slot, position in zip(slots, range(start, len(tokens)), strict=True):
            self.slots[slot] = (position, tokens[position])
        self.num_written += len(tokens) - start
        seen = [self.slots[self.slot(table, position)] for position in range(len(tokens))]
        return sum((place + 1) * (token + 7) for place, token in seen) % 997


class OwnBlocks:
    """What many small engines do: hashes of prefixes, ref counts, a free list."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.free = deque(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.hashes = {}  # hash of a prefix -> block
        self.hash_of = {}  # block -> hash

    def begin(self, request):
        """Take over cached blocks and get room for the rest of the prompt, or do nothing."""
        hits, prefix = [], 0
        size = self.block_size
        for start in range(0, (len(request.tokens) - 1) // size * size, size):
            prefix = hash((prefix, *request.tokens[start : start + size]))
            if prefix not in self.hashes:
                break
            hits.append(self.hashes[prefix])
        missing = -(-len(request.tokens) // size) - len(hits)
        if missing + sum(self.ref_counts[block] == 0 for block in hits) > len(self.free):
            return False
        for block in hits:
            if self.ref_counts[block] == 0:
                self.free.remove(block)
            self.ref_counts[block] += 1
        request.table = hits + [self.take() for _ in range(missing)]
        request.num_computed = len(hits) * size
        return True

    def grow(self, request):
        """Get room for one token more, or do nothing."""
        if len(request.tokens) > len(request.table) * self.block_size:
            if not self.free:
                return False
            request.table.append(self.take())
        return True

    def take(self):
        block = self.free.popleft()
        self.ref_counts[block] = 1
        if block in self.hash_of:
            del self.hashes[self.hash_of.pop(block)]
        return block

    def computed(self, request, sampled):
        """The KV of all tokens is written; a token was sampled."""
        prefix, size = 0, self.block_size
        for index in range(len(request.tokens) // size):
            prefix = hash((prefix, *request.tokens[index * size : (index + 1) * size]))
            if prefix not in self.hashes and request.table[index] not in self.hash_of:
                self.hashes[prefix] = request.table[index]
                self.hash_of[request.table[index]] = prefix
        request.num_computed = len(request.tokens)
        request.tokens.append(sampled)

    def end(self, request):
        for block in reversed(request.table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free.append(block)
        request.table, request.num_computed = [], 0

    def table(self, request):
        return request.table


class KvcoreBlocks:
    """The same verbs with kvcore. No hash, no ref count, no table is kept here."""

    def __init__(self, num_blocks, block_size):
        self.kv = kvcore.KVCacheManager(num_blocks, block_size)

    def begin(self, request):
        if not self.kv.plan(request.tokens).fits:
            return False
        request.seq = self.kv.open(request.tokens)
        self.kv.reserve_to(request.seq, len(request.tokens))
        request.num_computed = request.seq.num_computed_tokens
        return True

    def grow(self, request):
        try:
            self.kv.reserve_to(request.seq, len(request.tokens))
        except kvcore.OutOfBlocksError:
            return False
        return True

    def computed(self, request, sampled):
        self.kv.commit(request.seq, len(request.tokens) - request.num_computed)
        self.kv.append(request.seq, sampled)
        request.num_computed = len(request.tokens)
        request.tokens.append(sampled)

    def end(self, request):
        self.kv.close(request.seq)
        request.seq, request.num_computed = None, 0

    def table(self, request):
        return request.seq.block_table


class SmallEngine:
    """Continuous batching: requests that fit run; the latest is preempted when blocks run out."""

    def __init__(self, blocks, device, max_running=4):
        self.blocks, self.device, self.max_running = blocks, device, max_running
        self.waiting, self.running = deque(), []
        self.num_preempted = 0

    def run(self, requests):
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()

    def step(self):
        for request in list(self.running):
            while request in self.running and not self.blocks.grow(request):
                self.preempt(self.running[-1])
        while self.waiting and len(self.running) < self.max_running:
            if not self.blocks.begin(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
        for request in list(self.running):
            table, start = self.blocks.table(request), request.num_computed
            slots = [self.device.slot(table, p) for p in range(start, len(request.tokens))]
            sampled = self.device.forward(table, slots, request.tokens, start)
            self.blocks.computed(request, sampled)
            if request.is_finished:
                self.running.remove(request)
                self.blocks.end(request)

    def preempt(self, request):
        """It gives everything back, and comes again with all its tokens."""
        self.running.remove(request)
        self.blocks.end(request)
        self.waiting.appendleft(request)
        self.num_preempted += 1


class StepEngine(SmallEngine):
    """The same with one call of kvcore a step, for all that run."""

    @property
    def kv(self):
        return self.blocks.kv

    def step(self):
        """What came in is admitted, the device runs, and one call takes all to the next step."""
        self.admit()
        running = self.running
        todo = [seq.num_tokens - seq.num_computed_tokens for seq in self.seqs()]
        sampled = self.forward(todo)
        done = [r for r, token in zip(running, sampled, strict=True) if self.join(r, token)]
        for request in done:  # the last token is never computed: it gets no room
            index = running.index(request)
            del running[index], todo[index], sampled[index]
            self.blocks.end(request)
        while running:
            try:
                self.kv.step(self.seqs(), todo, sampled)
            except kvcore.OutOfBlocksError:  # nothing has changed: the last one gives way
                self.preempt(running[-1])
                todo.pop(), sampled.pop()
            else:
                return

    def seqs(self):
        return [request.seq for request in self.running]

    def admit(self):
        while self.waiting and len(self.running) < self.max_running:
            if not self.blocks.begin(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())

    def forward(self, todo):
        """kvcore writes a row of block ids for each request and a slot for each token to compute.

        Prompts, chunks and decoders are one batch: `todo` says how many tokens each computes.
        """
        seqs = self.seqs()
        width = max((len(seq.block_table) for seq in seqs), default=1)
        tables, slots = array("i", [0]) * (len(seqs) * width), array("q", [-1]) * sum(todo)
        self.kv.write_step(seqs, tables, slots, counts=todo, row_stride=width)
        sampled, first = [], 0
        for row, (request, count) in enumerate(zip(self.running, todo, strict=True)):
            table, own = tables[row * width : (row + 1) * width], slots[first : first + count]
            start = request.seq.num_computed_tokens
            sampled.append(self.device.forward(table, own, request.tokens, start))
            first += count
        return sampled

    @staticmethod
    def join(request, token):
        request.tokens.append(token)
        return request.is_finished


class AheadEngine(StepEngine):
    """One step ahead: what a step samples is read after the next one was sent.

    The device keeps its own tokens; kvcore is told them later. A request whose end is known by its
    length stops in time; who leaves with a step in flight is held by a lease until that is over.
    """

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.unread = []  # of the step in flight: its requests and their tokens
        self.leases = []  # blocks that it reads although their request has left

    def run(self, requests):
        super().run(requests)
        self.read()
        self.end_leases()

    def step(self):
        self.admit()
        running = list(self.running)
        todo = [seq.num_tokens - seq.num_computed_tokens for seq in self.seqs()]
        sampled = self.forward(todo)  # sent: the device goes on with its own tokens
        self.end_leases()  # the step before is over: this one was sent behind it
        for request, token in zip(running, sampled, strict=True):
            if self.join(request, token):  # by its length: the token is not read yet
                index = self.running.index(request)
                del self.running[index], todo[index]
                self.leases.append(self.kv.lease(request.seq, "step"))
                self.tell_of(request)
                self.blocks.end(request)
        while self.running:
            read = {id(r): token for r, token in self.unread}
            known = [read[id(r)] for r in self.running if id(r) in read]
            each = [int(id(r) in read) for r in self.running]
            try:  # the tokens of the step before are known now, and one more is expected of each
                self.kv.step(self.seqs(), todo, known, num_known=each, num_expected=1)
            except kvcore.OutOfBlocksError:
                self.tell_of(self.running[-1])  # it comes again with all its tokens
                self.preempt(self.running[-1])
                todo.pop()
            else:
                break
        self.unread = [(r, r.tokens[-1]) for r in self.running]

    def end_leases(self):
        while self.leases:
            self.kv.leases.end(self.leases.pop().lease_id)

    def tell_of(self, request):
        """Tell what was expected of one request."""
        for index, (other, token) in enumerate(self.unread):
            if other is request:
                self.kv.resolve(request.seq, [token])
                del self.unread[index]
                return

    def read(self):
        """The tokens of the step before have arrived."""
        told = [(r, token) for r, token in self.unread if r.seq is not None]
        self.kv.resolve_step([r.seq for r, _ in told], [token for _, token in told])
        self.unread = []
