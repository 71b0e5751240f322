"""The allocator as a few lists: obviously right, slow, and a stranger to kvcore.

Nothing here is linked, counted or cached: a free block is an entry of a list, a reference is a
place in a table, content is the whole prefix as a tuple. The state machines run it beside the real
thing and compare everything that can be seen.
"""

import functools
import itertools
import math
from contextlib import contextmanager


class NaiveQueue:
    """Free blocks in the order of their reuse."""

    def __init__(self):
        self.items = []

    def push_back(self, item):
        self.items.append(item)

    def pop_front(self):
        return self.items.pop(0)

    def remove(self, item):
        self.items.remove(item)


class NaivePool:
    """Who holds what, what it holds, and who is next. Content is (namespace, prefix)."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.published = []  # (content, block_id), in the order of publication
        self.num_evicted = self.num_allocated = self.peak = 0
        self.published_at, self.freed_at = {}, {}
        self.durations = {"lifetime": [], "idle_before_eviction": [], "reuse_gap": []}
        self.retention = {}  # block_id: {(priority, deadline)}
        self.shelves = {}  # priority: free blocks
        self.spare = []  # free blocks that no known end needs
        self.last_end = {}  # block_id: the number of the last end that needs it; -1: none does
        self.num_ends = 0
        self.num_continued = 4  # of 8: look-ups that went on where a sequence had ended
        self.now = 0
        self.serves = lambda content: True  # whether any hit can use it
        self.found, self.then = [], None  # what was found last, and how all stood then

    def order(self):
        """The free blocks, the one reused next first."""
        empty = [block_id for block_id in self.free if self.content_of(block_id) is None]
        shelved = [b for _, shelf in sorted(self.shelves.items()) for b in shelf]
        return empty + self.spare + self.queue() + shelved

    def shelf(self, block_id):
        """Where a block waits, once it is free and has content."""
        priority = self.priority(block_id)
        if priority:
            return self.shelves.setdefault(priority, [])
        return self.spare if self.last_end.get(block_id, 0) < 0 else self.free

    def set_end(self, block_id, number):
        """A block that this concerns while it is free moves to the end of where it belongs now."""
        before = self.shelf(block_id)
        self.last_end[block_id] = number
        if self.refs[block_id] == 0 and self.shelf(block_id) is not before:
            before.remove(block_id)
            self.shelf(block_id).append(block_id)

    def need(self, block_ids):
        """One more end is known, and needs these."""
        if block_ids:
            self.num_ends += 1
            self.found = []
        for block_id in block_ids:
            if self.content_of(block_id) is not None:
                self.set_end(block_id, self.num_ends)

    def put_first(self, block_ids, num_known):
        """No known end needs these, but ends that are newer than so many may."""
        if block_ids:
            self.num_ends = max(1, self.num_ends)
            self.found = []
        for block_id in block_ids:
            is_needed = self.last_end.get(block_id, 0) > num_known
            if self.content_of(block_id) is not None and not is_needed:
                self.set_end(block_id, -1)

    def priority(self, block_id):
        return max((p for p, end in self.retention.get(block_id, ()) if end > self.now), default=0)

    def front(self, block_id):
        """The terms that say something: no other is as strong and holds as long."""
        active = {(p, end) for p, end in self.retention.get(block_id, ()) if end > self.now}
        return {
            retain
            for retain in active
            if not any(p >= retain[0] and end >= retain[1] for p, end in active - {retain})
        }

    def retain(self, block_id, terms):
        before = self.front(block_id)
        self.retention.setdefault(block_id, set()).update(terms)
        if self.front(block_id) != before:
            self.found = []

    def put_back(self, block_id):
        self.found = []
        self.shelf(block_id).append(block_id)

    def take_out(self, block_id):
        for shelf in [self.free, self.spare, *self.shelves.values()]:
            if block_id in shelf:
                shelf.remove(block_id)

    def lose_content(self, block_id):
        self.published = [entry for entry in self.published if entry[1] != block_id]
        self.retention.pop(block_id, None)
        self.last_end.pop(block_id, None)

    def tick(self, num_steps):
        before = {block_id: self.priority(block_id) for block_id in self.order()}
        waiting = self.order()
        fronts = {block_id: self.front(block_id) for block_id in self.retention}
        self.now += num_steps
        if any(self.front(block_id) != front for block_id, front in fronts.items()):
            self.found = []
        gone = [b for b in waiting if before[b] != self.priority(b)]
        for block_id in sorted(gone, key=lambda b: (self.priority(b) == 0, waiting.index(b))):
            self.take_out(block_id)
            self.put_back(block_id)

    def content_of(self, block_id):
        for content, holder in self.published:
            if holder == block_id:
                return content
        return None

    def oldest_copy(self, content):
        for published, block_id in self.published:
            if published == content:
                return block_id
        return None

    def take(self, count):
        taken = self.order()[:count]
        if taken:
            self.found = []
        for block_id in taken:
            self.take_out(block_id)
            if self.content_of(block_id) is not None:
                self.num_evicted += 1
                self.durations["lifetime"].append(self.now - self.published_at[block_id])
                self.durations["idle_before_eviction"].append(self.now - self.freed_at[block_id])
            self.lose_content(block_id)
            self.refs[block_id] = 1
        self.num_allocated += count
        self.count_used()
        return taken

    def count_used(self):
        self.peak = max(self.peak, sum(1 for refs in self.refs.values() if refs))

    def queue(self):
        """The free blocks with content in the order of their use alone, the oldest first."""
        return [block_id for block_id in self.free if self.content_of(block_id) is not None]

    def stand_as_before(self):
        """What was found last goes back: all stands as it did then."""
        queue, self.spare, shelves = self.then
        stayed = [block_id for block_id in queue if block_id not in self.found]
        assert stayed == self.queue(), "something has moved, and what was found is still known"
        self.free = [b for b in self.free if self.content_of(b) is None] + queue
        self.shelves = shelves
        self.found = []

    def hold(self, block_ids):
        idle = [block_id for block_id in block_ids if self.refs[block_id] == 0]
        if idle:
            self.found = idle
            shelves = {p: list(shelf) for p, shelf in self.shelves.items()}
            self.then = self.queue(), list(self.spare), shelves
        for block_id in block_ids:
            if self.refs[block_id] == 0:
                self.durations["reuse_gap"].append(self.now - self.freed_at[block_id])
            self.refs[block_id] += 1
            self.take_out(block_id)
        self.count_used()

    def release(self, block_ids):
        for block_id in block_ids:
            self.refs[block_id] -= 1
        last_named = reversed(dict.fromkeys(reversed(block_ids)))
        freed = [b for b in last_named if self.refs[b] == 0]
        content = [b for b in freed if self.content_of(b) and self.serves(self.content_of(b))]
        is_undone = bool(self.found) and sorted(content) == sorted(self.found)
        for block_id in freed:
            self.freed_at[block_id] = self.now
            if block_id in content:
                if not is_undone:
                    self.put_back(block_id)
            else:
                if self.content_of(block_id) is not None:
                    self.lose_content(block_id)
                self.free.insert(0, block_id)
        if is_undone:
            self.stand_as_before()

    def publish(self, block_id, content):
        self.published.append((content, block_id))
        self.published_at[block_id] = self.now

    def match(self, namespace, tokens, block_size, max_blocks):
        hits = []
        for count in range(1, max_blocks + 1):
            block_id = self.oldest_copy((namespace, tuple(tokens[: count * block_size])))
            if block_id is None:
                break
            hits.append(block_id)
        return hits


class NaiveTable:
    """One group's blocks of one sequence; 0 where a block was given back."""

    def __init__(self):
        self.entries = []
        self.published = 0
        self.gone = []  # (place, block_id) given back, and its own end may need it still
        self.has_passed = False  # whether the call has given back any

    def held(self):
        return [block_id for block_id in self.entries if block_id]


class NaiveSequence:
    def __init__(self, tokens, namespace, num_groups, retain=(), opened_at=0):
        self.retain = retain  # (start, stop, priority, deadline)
        self.opened_at = opened_at
        self.tokens = list(tokens)
        self.future = []  # tokens that are expected: the device knows them, nobody was told
        self.namespace = namespace
        self.tables = [NaiveTable() for _ in range(num_groups)]
        self.computed = 0
        self.cached = 0
        self.ends, self.expected = set(), set()  # where prompts may hit its prefix once more
        self.recompute = self.num_known = 0
        self.num_ended = [0]  # the same list for its forks: it counts once

    def all_tokens(self):
        return self.tokens + self.future

    def settled(self):
        """How many tokens are both computed and told."""
        return min(self.computed, len(self.tokens))


def sees(kind, span, query, key):
    """Whether a query at position `query` sees the key at position `key`: attention, literally."""
    if key > query:
        return False
    if kind == "window":
        return key > query - span
    if kind == "chunk":
        return key // span == query // span
    return True


HORIZON = 64  # no test sequence is longer


@functools.cache
def keeps(group, computed):
    """The places of full blocks that are needed after `computed` tokens, and the last one."""
    kind, span, size = group
    full = computed // size
    wanted = {full - 1} if full else set()
    for place in range(full):
        keys = range(place * size, (place + 1) * size)
        queries = range(computed, HORIZON)
        if any(sees(kind, span, query, key) for query in queries for key in keys):
            wanted.add(place)
    return frozenset(wanted)


@functools.cache
def needed_by_a_hit(groups, number, end):
    """Whether a hit of any length, whole blocks of every group, needs the block before `end`."""
    size = groups[number][2]
    for length in range(end, HORIZON):
        is_whole = all(length % other == 0 for _, _, other in groups)
        if is_whole and end // size - 1 in keeps(groups[number], length):
            return True
    return False


class NaiveManager:
    """Sequences over a naive pool. `namespace` is any value; None is never cached.

    `groups` are (kind, span, block size), kind one of "full", "window", "chunk".
    """

    def __init__(self, num_blocks, groups, caching=True):
        self.pool = NaivePool(num_blocks)
        self.pool.serves = self.serves
        self.groups = groups
        self.unit = math.lcm(*[size for _, _, size in groups])
        self.forgets = [kind != "full" for kind, _, _ in groups]
        self.waiting = None  # sequences of one call, whose blocks are sorted out after it
        self.caching = caching
        self.num_queried = self.num_hit = self.num_resumed = self.num_resumed_hit = 0
        self.leases = {}  # id: (blocks in the order of release, deadline)
        self.num_leases = 0
        self.loads = {}  # lease: (sequence, its tokens then, {(group, place): block_id})
        self.leased_sizes = {}  # block_id: the block size of the group that it was leased for

    @staticmethod
    def blocks_for(num_tokens, size):
        full, rest = divmod(num_tokens, size)
        return full + (1 if rest else 0)

    def keeps(self, group, computed):
        return keeps(group, computed)

    def serves(self, content):
        """Whether a hit of any length would need the last block of a prefix."""
        number, _, prefix = content
        return needed_by_a_hit(tuple(self.groups), number, len(prefix))

    def content(self, number, namespace, tokens):
        return (number, namespace, tuple(tokens))

    def hits(self, tokens, namespace, recompute=0):
        """The longest servable prefix; with `recompute` that many tokens shorter at least."""
        if recompute:
            last = self.servable(tokens, namespace, len(tokens))[0] - recompute
            return self.servable(tokens, namespace, last)
        return self.servable(tokens, namespace, len(tokens) - 1)

    def servable(self, tokens, namespace, last):
        """The longest servable prefix up to `last` tokens, by trying every length from there."""
        nothing = 0, [[] for _ in self.groups]
        if namespace is None or not self.caching:
            return nothing
        for length in range(last, 0, -1):
            found = []
            for number, group in enumerate(self.groups):
                size = group[2]
                if length % size:
                    break
                table = [0] * (length // size)
                for place in self.keeps(group, length):
                    prefix = tokens[: (place + 1) * size]
                    table[place] = self.pool.oldest_copy(self.content(number, namespace, prefix))
                if None in table:
                    break
                found.append(table)
            else:
                return length, found
        return nothing

    def goes_on(self, number, namespace, prefix):
        """The next contents behind a prefix, each once."""
        size = self.groups[number][2]
        return {
            other[len(prefix) : len(prefix) + size]
            for (group, whose, other), _ in self.pool.published
            if (group, whose, other[: len(prefix)]) == (number, namespace, tuple(prefix))
            and len(other) > len(prefix)
        }

    def branches(self, seq, last):
        """Where the cached content goes on otherwise: at the end of it, or where a hit sees it."""
        tokens, namespace, cached = seq.tokens, seq.namespace, seq.cached
        found, num_ended, depths = set(), 0, []
        for number, (kind, _, size) in enumerate(self.groups):
            depth, asked = 0, last // size
            while depth < asked:
                prefix = tokens[: (depth + 1) * size]
                is_there = self.pool.oldest_copy(self.content(number, namespace, prefix))
                is_passed = kind != "full" and self.goes_on(number, namespace, prefix)
                if not is_there and not is_passed:
                    break
                depth += 1
            if not depth:
                break
            goes_on = self.goes_on(number, namespace, tokens[: depth * size])
            if number == ([*self.forgets, False].index(False) % len(self.groups)):
                num_ended = -1 if goes_on else 1
            if depth < asked and goes_on:
                found.add(depth * size)
            depths.append(depth)
            last = min(last, depth * size)
        for number, depth in enumerate(depths if cached else ()):
            found |= self.branches_of(seq, number, depth)
        return found, num_ended

    def branches_of(self, seq, number, depth):
        """Where content of a group goes on otherwise, in the window of a hit or at the end of it.

        Of `depth` blocks that are cached those of a draft model may follow the hit.
        """
        group, tokens, cached = self.groups[number], seq.tokens, seq.cached
        places = self.keeps(group, cached) if self.forgets[number] else ()
        inside = {(place + 1) * group[2] for place in places} - {cached}
        found = {end for end in inside if self.parts(number, seq.namespace, tokens[:end])}
        last = depth * group[2] if seq.recompute else cached
        between = range(cached, last, group[2])
        is_end = self.goes_on(number, seq.namespace, tokens[:last])
        if is_end or any(self.parts(number, seq.namespace, tokens[:end]) for end in between):
            found.add(cached)
        return found

    def parts(self, number, namespace, prefix):
        """Whether a cached block has several contents behind it."""
        is_there = self.pool.oldest_copy(self.content(number, namespace, prefix))
        return bool(is_there) and len(self.goes_on(number, namespace, prefix)) > 1

    def learn_ends(self, seq, recompute, skips, *, is_resumed):
        """Where its prefix is expected to be hit; ends before its own hit are so no longer."""
        if not any(self.forgets) or seq.namespace is None:
            return
        seq.recompute, seq.num_known = recompute, self.pool.num_ends
        last = len(seq.tokens) - (recompute == 0)
        seq.expected = {last // self.unit * self.unit}
        if not skips:
            ends, num_ended = self.branches(seq, last)
            seq.num_ended = [0 if is_resumed else num_ended]
            seq.ends = {end // self.unit * self.unit for end in ends}

    def superseded(self, seq):
        """The free blocks before a hit that no branch of the prefix needs: older turns' ends."""
        found = []
        for number, group in enumerate(self.groups):
            size = group[2]
            first = min(self.keeps(group, seq.cached), default=0) if self.forgets[number] else 0
            for place in range(first - 1, -1, -1):
                content = self.content(number, seq.namespace, seq.tokens[: (place + 1) * size])
                block_id = self.pool.oldest_copy(content)
                is_needed = any(
                    self.pool.oldest_copy((*content[:2], tuple(seq.tokens[: end * size])))
                    and len(self.goes_on(number, seq.namespace, seq.tokens[: end * size])) > 1
                    and min(self.keeps(group, self.last_hit(seq, end * size)), default=0) <= place
                    for end in range(place + 1, first + 1)
                )
                is_needed = is_needed or self.is_within(seq, number, place)
                if block_id and self.pool.refs[block_id] == 0 and not is_needed:
                    found += [block_id] * (self.pool.last_end.get(block_id, 0) >= 0)
        return found

    def is_within(self, seq, number, place):
        """Whether a hit at a known end of a sequence needs a block."""
        group, size = self.groups[number], self.groups[number][2]
        return any(
            min(self.keeps(group, self.last_hit(seq, end)), default=0) <= place
            and (place + 1) * size <= end
            for end in seq.ends | (seq.expected if self.pool.num_continued <= 5 else set())
        )

    def last_hit(self, seq, num_tokens):
        end = num_tokens // self.unit * self.unit
        return max(0, end - seq.recompute) // self.unit * self.unit

    @contextmanager
    def together(self):
        """One call commits for several sequences: what has left their windows is sorted at last."""
        self.waiting = []
        yield
        waiting, self.waiting = self.waiting, None
        for seq in waiting:
            self.sort_out(seq)

    def sort_out(self, seq, least=4):
        """Of what has left the windows goes first what no known end needs; of a few it waits."""
        if seq.namespace is None:
            return
        needed, spare = [], []
        for number in range(len(self.groups)):
            self.sort_out_group(seq, number, least, needed, spare)
        self.pool.need(needed)
        self.pool.put_first(spare, seq.num_known)

    def sort_out_group(self, seq, number, least, needed, spare):
        group, table = self.groups[number], seq.tables[number]
        size = group[2]
        if len(table.gone) >= least and (table.has_passed or not least):
            stop = min(self.keeps(group, self.last_hit(seq, seq.settled())), default=0)
            table.has_passed = False
            for place, block_id in [entry for entry in table.gone if entry[0] < stop]:
                table.gone.remove((place, block_id))
                prefix = seq.tokens[: (place + 1) * size]
                if self.pool.content_of(block_id) == self.content(number, seq.namespace, prefix):
                    (needed if self.is_within(seq, number, place) else spare).append(block_id)

    def peak(self, hits, cached, total, chunk):
        """The most blocks that come from the free ones, at every moment of every way to the end."""
        most = 0
        for settled in range(cached, total):
            taken = 0
            for group, table in zip(self.groups, hits, strict=True):
                reserved = self.blocks_for(min(settled + chunk, total), group[2])
                for place in range(min(self.keeps(group, settled), default=0), reserved):
                    is_hit = place < len(table) and table[place]
                    taken += not is_hit or self.pool.refs[table[place]] == 0
            most = max(most, taken)
        return most

    def retain(self, seq, number):
        """Every block of the path is kept as strongly as anything after it."""
        size, table = self.groups[number][2], seq.tables[number]
        for place in range(table.published):
            if table.entries[place]:
                wanted = {
                    (priority, end)
                    for _, stop, priority, end in seq.retain
                    if stop > place * size and end > self.pool.now
                }
                self.pool.retain(table.entries[place], wanted)

    def open(self, tokens, namespace, retain=(), resumed=False, skips=False, recompute=0):
        namespace = namespace if self.caching else None
        retain = [(a, b, p, 10**9 if n is None else self.pool.now + n) for a, b, p, n in retain]
        seq = NaiveSequence(tokens, namespace, len(self.groups), retain)
        seq.computed, found = self.hits(tokens, None if skips else namespace, recompute)
        seq.cached = seq.computed
        for table, entries in zip(seq.tables, found, strict=True):
            table.entries = list(entries)
            table.published = len(entries)
        self.learn_ends(seq, recompute, skips, is_resumed=resumed)
        older = [] if skips else self.superseded(seq)
        self.pool.hold([block_id for table in seq.tables for block_id in table.held()])
        for number in range(len(self.groups)):
            self.retain(seq, number)
        self.pool.put_first(older, self.pool.num_ends)
        if skips:
            return seq
        if seq.namespace is not None and resumed:
            self.num_resumed += len(tokens)
            self.num_resumed_hit += seq.cached
        elif seq.namespace is not None:
            self.num_queried += len(tokens)
            self.num_hit += seq.cached
        return seq

    def stats(self, sequences):
        """What the statistics of so many open sequences have to say, by their names there."""
        slots = {
            block_id: group[2]
            for seq in sequences
            for group, table in zip(self.groups, seq.tables, strict=True)
            for block_id in table.held()
        }
        leased = [block_id for blocks, _ in self.leases.values() for block_id in blocks]
        slots |= {block_id: self.leased_sizes[block_id] for block_id in leased}
        free = len(self.pool.order())
        return {
            "num_blocks": self.pool.num_blocks,
            "num_used_blocks": self.pool.num_blocks - 1 - free,
            "num_free_blocks": free,
            "num_cached_blocks": len(self.pool.published),
            "peak_used_blocks": self.pool.peak,
            "num_queried_tokens": self.num_queried,
            "num_hit_tokens": self.num_hit,
            "num_evicted_blocks": self.pool.num_evicted,
            "num_allocated_blocks": self.pool.num_allocated,
            "num_resumed_tokens": self.num_resumed,
            "num_resumed_hit_tokens": self.num_resumed_hit,
            "num_computed_tokens": sum(seq.computed for seq in sequences),
            "num_slots": sum(slots.values()),
        }

    @staticmethod
    def histogram(durations):
        """Count, sum, maximum, and how many are 0, 1, 2 to 3, 4 to 7, and so on."""
        bounds = [0, 1]
        while durations and bounds[-1] <= max(durations):
            bounds.append(bounds[-1] * 2)
        buckets = [
            sum(low <= duration < high for duration in durations)
            for low, high in itertools.pairwise(bounds)
        ]
        if not durations:
            buckets = []
        return len(durations), sum(durations), max(durations, default=0), tuple(buckets)

    @staticmethod
    def num_common_blocks(sequences, number):
        """The places from the start where all have the same block."""
        count = 0
        for entries in zip(*[seq.tables[number].entries for seq in sequences], strict=False):
            if entries[0] == 0 or len(set(entries)) > 1:
                break
            count += 1
        return count

    def missing(self, seq, num_tokens):
        total = seq.computed + num_tokens
        return [
            max(0, self.blocks_for(total, group[2]) - len(table.entries))
            for group, table in zip(self.groups, seq.tables, strict=True)
        ]

    def can_reserve(self, seq, num_tokens):
        return sum(self.missing(seq, num_tokens)) <= len(self.pool.order())

    def reserve(self, seq, num_tokens):
        for table, count in zip(seq.tables, self.missing(seq, num_tokens), strict=True):
            table.entries += self.pool.take(count)

    def room(self, seq):
        return min(
            len(table.entries) * group[2]
            for group, table in zip(self.groups, seq.tables, strict=True)
        )

    def commit(self, seq, num_tokens):
        seq.computed += num_tokens
        self.settle(seq)

    def resolve(self, seq, num_tokens):
        seq.tokens += seq.future[:num_tokens]
        del seq.future[:num_tokens]
        self.settle(seq)

    def settle(self, seq):
        """What is computed and told is visible; what no query after it sees is given back."""
        for number, (group, table) in enumerate(zip(self.groups, seq.tables, strict=True)):
            size = group[2]
            while seq.namespace is not None and (table.published + 1) * size <= seq.settled():
                prefix = seq.tokens[: (table.published + 1) * size]
                content = self.content(number, seq.namespace, prefix)
                self.pool.publish(table.entries[table.published], content)
                table.published += 1
                self.retain(seq, number)
            kept = self.keeps(group, seq.settled())
            for place in range(seq.settled() // size):
                if table.entries[place] and place < min(kept):
                    self.pool.release([table.entries[place]])
                    table.gone.append((place, table.entries[place]))
                    table.has_passed = True
                    table.entries[place] = 0
        if self.waiting is None:
            self.sort_out(seq)
        else:
            self.waiting.append(seq)

    def truncate(self, seq, num_tokens):
        computed = min(num_tokens, seq.computed)
        if computed < seq.computed:
            for _ in self.groups:  # each may lower it for the others
                for group, table in zip(self.groups, seq.tables, strict=True):
                    place = computed // group[2]
                    inside = computed % group[2]
                    if inside and table.entries[place]:
                        block_id = table.entries[place]
                        shared = self.pool.refs[block_id] > 1
                        if shared or self.pool.content_of(block_id) is not None:
                            computed = place * group[2]
            for group, table in zip(self.groups, seq.tables, strict=True):
                wanted = set(self.keeps(group, computed))
                if computed % group[2]:
                    wanted.add(computed // group[2])
                if any(not table.entries[place] for place in wanted):
                    computed = 0
        lowered = computed < min(num_tokens, seq.computed)
        self.release_from(seq, computed if lowered else num_tokens)
        seq.future = seq.future[: max(0, num_tokens - len(seq.tokens))]
        seq.tokens = seq.tokens[:num_tokens]
        seq.computed = computed
        seq.cached = min(seq.cached, computed)

    def release_from(self, seq, num_tokens):
        leaving = []
        for number, (group, table) in enumerate(zip(self.groups, seq.tables, strict=True)):
            size = group[2]
            keep = self.blocks_for(num_tokens, size)
            leaving += [
                ((place + 1) * size, number, block_id)
                for place, block_id in enumerate(table.entries)
                if place >= keep and block_id
            ]
            table.entries = table.entries[:keep]
            if keep < table.published:
                table.published, table.gone = keep, []
        self.pool.release([block_id for _, _, block_id in sorted(leaving, reverse=True)])

    def tail_first(self, seq, num_tokens=None):
        held = [
            ((place + 1) * group[2], number, block_id)
            for number, (group, table) in enumerate(zip(self.groups, seq.tables, strict=True))
            for place, block_id in enumerate(table.entries)
            if block_id and (num_tokens is None or place * group[2] < num_tokens)
        ]
        return [block_id for _, _, block_id in sorted(held, reverse=True)]

    def lease(self, seq, max_steps, num_tokens=None):
        blocks = self.tail_first(seq, num_tokens)
        for (_, _, size), table in zip(self.groups, seq.tables, strict=True):
            self.leased_sizes |= dict.fromkeys(table.held(), size)
        self.pool.hold(blocks)
        deadline = None if max_steps is None else self.pool.now + max_steps
        self.leases[self.num_leases] = (blocks, deadline)
        self.num_leases += 1

    def needed(self, number, length):
        """The places of a group's blocks that are needed after so many tokens, the last in part."""
        size = self.groups[number][2]
        rest = {length // size} if length % size else set()
        return self.keeps(self.groups[number], length) | rest

    def to_load(self, seq, length):
        """The blocks, as (group, place), that a load of so many tokens brings."""
        return [
            (number, place)
            for number, (_, _, size) in enumerate(self.groups)
            for place in sorted(self.needed(number, length))
            if place >= seq.computed // size
        ]

    def begin_load(self, seq, length, max_steps):
        wanted = self.to_load(seq, length)
        blocks = dict(zip(wanted, sorted(self.pool.take(len(wanted))), strict=True))
        ends = {key: ((key[1] + 1) * self.groups[key[0]][2], key[0]) for key in wanted}
        held = [blocks[key] for key in sorted(wanted, key=ends.get, reverse=True)]
        for (number, _), block_id in blocks.items():
            self.leased_sizes[block_id] = self.groups[number][2]
        deadline = None if max_steps is None else self.pool.now + max_steps
        self.leases[self.num_leases] = (held, deadline)
        self.loads[self.num_leases] = (seq, seq.tokens[:length], blocks)
        self.num_leases += 1

    def has_all(self, seq, length, blocks):
        """Whether a sequence, with these blocks, has what is needed after so many tokens."""
        for number, (_, _, size) in enumerate(self.groups):
            for place in self.needed(number, length):
                own = place < seq.computed // size and seq.tables[number].entries[place]
                if not own and (number, place) not in blocks:
                    return False
        return True

    def commit_load(self, number, sequences):
        """The sequence has computed the tokens, where they still are its next ones."""
        if number not in self.leases:
            return False
        seq, tokens, blocks = self.loads[number]
        length = len(tokens)
        is_ahead = seq in sequences and seq.computed < length and seq.tokens[:length] == tokens
        if not is_ahead or not self.has_all(seq, length, blocks):
            self.end_lease(number)
            return False
        late, beyond, passed = [], [], []
        for group, (_, _, size) in enumerate(self.groups):
            table, own = seq.tables[group], seq.computed // size
            needed = self.needed(group, length)
            entries = [0] * self.blocks_for(length, size)
            for place in needed:
                is_own = place < own and table.entries[place]
                entries[place] = table.entries[place] if is_own else blocks[group, place]
            late += [blocks[key] for key in blocks if key[0] == group and key[1] < own]
            for place, block_id in enumerate(table.entries):
                if block_id and place >= own:
                    beyond.append(((place + 1) * size, group, block_id))
                elif block_id and place not in needed:
                    passed.append(block_id)
                    table.gone.append((place, block_id))
            table.entries = entries
            for place in range(own, length // size) if seq.namespace is not None else ():
                if entries[place]:
                    prefix = self.content(group, seq.namespace, tokens[: (place + 1) * size])
                    self.pool.publish(entries[place], prefix)
            table.published = length // size if seq.namespace is not None else 0
            self.retain(seq, group)
        held, _ = self.leases.pop(number)
        last = [block_id for _, _, block_id in sorted(beyond, reverse=True)]
        self.pool.release([b for b in held if b in late] + last + passed)
        seq.computed = length
        self.sort_out_all(seq)
        return True

    def sort_out_all(self, seq):
        self.sort_out(seq, least=0)
        for table in seq.tables:
            table.gone = []

    def end_lease(self, number):
        if number not in self.leases:
            return False
        self.pool.release(self.leases.pop(number)[0])
        return True

    def tick(self, num_steps):
        self.pool.tick(num_steps)
        now = self.pool.now
        late = [n for n, (_, end) in self.leases.items() if end is not None and end <= now]
        for number in late:
            self.end_lease(number)
        return late

    def num_deferred(self):
        leased = [block_id for blocks, _ in self.leases.values() for block_id in blocks]
        return sum(leased.count(b) == self.pool.refs[b] for b in set(leased))

    def fail_load(self, seq, num_tokens, sequences):
        """Nobody trusts a block that spells this prefix further than `num_tokens`."""
        doubtful = [self.beyond(seq, num_tokens)]
        if num_tokens < seq.settled():
            doubtful.append(self.spelling(seq.namespace, seq.tokens, num_tokens, sequences))
        return self.take_from_all(doubtful, sequences)

    def fail_blocks(self, block_ids, sequences):
        """Nor does anybody trust what these blocks hold, or what spells its prefix further."""
        doubtful = []
        for number, namespace, prefix in filter(None, map(self.pool.content_of, block_ids)):
            start = len(prefix) - self.groups[number][2]
            doubtful.append(self.spelling(namespace, list(prefix), start, sequences))
        for seq in sequences:
            for group, table in zip(self.groups, seq.tables, strict=True):
                for place, block_id in enumerate(table.entries):
                    if block_id in block_ids and place * group[2] < seq.computed:
                        start = place * group[2]
                        doubtful.append(self.beyond(seq, start))
                        if start < seq.settled():
                            more = self.spelling(seq.namespace, seq.tokens, start, sequences)
                            doubtful.append(more)
        return self.take_from_all(doubtful, sequences)

    def fail_transfer(self, number, sequences):
        """And the lease ends, if it has not."""
        if number not in self.leases:
            return []
        set_back = self.fail_blocks(self.leases[number][0], sequences)
        self.end_lease(number)
        return set_back

    def spelling(self, namespace, tokens, start, sequences):
        """The blocks of sequences, and those that are published, with one more of these tokens."""
        end = start + 1
        found = {}
        for suspect in sequences:
            same = suspect.namespace == namespace and suspect.tokens[:end] == tokens[:end]
            if same and suspect.settled() >= end:
                found |= self.beyond(suspect, start)
        for (_, whose, prefix), block_id in self.pool.published:
            if (whose, prefix[:end]) == (namespace, tuple(tokens[:end])):
                found[block_id] = start
        return found

    def take_from_all(self, found, sequences):
        """`found` says of blocks, perhaps several times, up to which token they are sound."""
        doubtful = {}
        for more in found:
            for block_id, sound in more.items():
                doubtful[block_id] = min(sound, doubtful.get(block_id, sound))
        targets = [(seq, self.sound_until(seq, doubtful)) for seq in sequences]
        for block_id in sorted(doubtful):
            if self.pool.content_of(block_id) is not None:
                self.pool.lose_content(block_id)
                self.pool.found = []
                if block_id in self.pool.order():
                    self.pool.take_out(block_id)
                    self.pool.free.insert(0, block_id)
        for seq, computed in targets:
            if computed is not None:
                self.release_from(seq, computed)
                for group, table in zip(self.groups, seq.tables, strict=True):
                    table.published = min(table.published, computed // group[2])
                    table.gone = []
                seq.computed = computed
                seq.cached = min(seq.cached, computed)
        return [seq for seq, computed in targets if computed is not None]

    def beyond(self, seq, num_tokens):
        """A sequence's computed blocks from `num_tokens` on, and that they are sound up to it."""
        found = {}
        for group, table in zip(self.groups, seq.tables, strict=True):
            size = group[2]
            first = num_tokens // size
            for block_id in table.entries[first : self.blocks_for(seq.computed, size)]:
                if block_id:
                    found[block_id] = num_tokens
        return found

    def sound_until(self, seq, doubtful):
        """What stays computed of a sequence, None if all of it."""
        starts = [
            max(place * group[2], doubtful[block_id])
            for group, table in zip(self.groups, seq.tables, strict=True)
            for place, block_id in enumerate(table.entries)
            if block_id in doubtful
        ]
        computed = min([seq.computed, *starts])
        if computed == seq.computed:
            return None
        for _ in self.groups:  # each may lower it for the others
            for group, table in zip(self.groups, seq.tables, strict=True):
                block_id = table.entries[computed // group[2]]
                if computed % group[2] and block_id:
                    is_found = self.pool.content_of(block_id) is not None
                    if self.pool.refs[block_id] > 1 or (is_found and block_id not in doubtful):
                        computed -= computed % group[2]
        for group, table in zip(self.groups, seq.tables, strict=True):
            wanted = set(self.keeps(group, computed))
            if computed % group[2]:
                wanted.add(computed // group[2])
            if any(not table.entries[place] for place in wanted):
                computed = 0
        return computed

    def copies_needed(self, seq):
        return sum(1 for group in self.groups if seq.settled() % group[2])

    def fork(self, seq):
        child = NaiveSequence(seq.tokens, seq.namespace, len(self.groups), seq.retain)
        child.computed = seq.settled()
        child.ends, child.expected, child.recompute = seq.ends, seq.expected, seq.recompute
        child.num_known, child.num_ended = seq.num_known, seq.num_ended
        own = self.pool.take(self.copies_needed(seq))
        orders = []
        for number, (group, mine) in enumerate(zip(self.groups, seq.tables, strict=True)):
            full, rest = divmod(child.computed, group[2])
            table = child.tables[number]
            mine.gone = []
            table.entries = mine.entries[:full]
            table.published = mine.published
            self.pool.hold(table.held())
            if rest:
                copy = own.pop(0)
                table.entries.append(copy)
                orders.append((mine.entries[full], copy, rest, number))
        return child, orders

    def reset(self, sequences, canonical):
        kept = [content for content in self.pool.order() if self.pool.content_of(content)]
        self.pool.free = kept + [b for b in self.pool.order() if b not in kept]
        self.pool.published, self.pool.retention, self.pool.shelves = [], {}, {}
        self.pool.spare, self.pool.last_end = [], {}
        if canonical:
            self.pool.free.sort()
        for seq in sequences:
            seq.namespace = None
            for table in seq.tables:
                table.published = 0

    def close(self, seq):
        """Its end is known from now on, if it has computed anything."""
        needed, spare = [], []
        if any(self.forgets) and seq.namespace is not None:
            for number, table in enumerate(seq.tables):
                self.sort_out_group(seq, number, 0, needed, spare)
                if self.forgets[number]:
                    for place, block_id in table.gone:
                        prefix = seq.tokens[: (place + 1) * self.groups[number][2]]
                        content = self.content(number, seq.namespace, prefix)
                        needed += [block_id] * (self.pool.content_of(block_id) == content)
                    needed += [
                        block_id for block_id in table.entries[: table.published] if block_id
                    ]
        self.release_from(seq, 0)
        if seq.computed > seq.cached and seq.namespace is not None:
            continued = self.pool.num_continued + seq.num_ended[0]
            self.pool.num_continued, seq.num_ended[0] = max(0, min(8, continued)), 0
        self.pool.need(needed if seq.computed > seq.cached else [])
        self.pool.put_first(spare, seq.num_known)
