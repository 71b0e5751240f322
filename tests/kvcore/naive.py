"""The allocator as a few lists: obviously right, slow, and a stranger to kvcore.

Nothing here is linked, counted or cached: a free block is an entry of a list, a reference is a
place in a table, content is the whole prefix as a tuple. The state machines run it beside the real
thing and compare everything that can be seen.
"""


class NaiveQueue:
    """Free blocks in the order of their reuse."""

    def __init__(self):
        self.items = []

    def push_back(self, item):
        self.items.append(item)

    def push_front(self, item):
        self.items.insert(0, item)

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
        self.num_evicted = 0

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
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            if self.content_of(block_id) is not None:
                self.num_evicted += 1
            self.published = [entry for entry in self.published if entry[1] != block_id]
            self.refs[block_id] = 1
        return taken

    def hold(self, block_ids):
        for block_id in block_ids:
            self.refs[block_id] += 1
            if block_id in self.free:
                self.free.remove(block_id)

    def release(self, block_ids):
        for block_id in block_ids:
            self.refs[block_id] -= 1
        freed = [b for b in dict.fromkeys(block_ids) if self.refs[b] == 0]
        for block_id in freed:
            if self.content_of(block_id) is None:
                self.free.insert(0, block_id)
            else:
                self.free.append(block_id)

    def publish(self, block_id, content):
        self.published.append((content, block_id))

    def match(self, namespace, tokens, block_size, max_blocks):
        hits = []
        for count in range(1, max_blocks + 1):
            block_id = self.oldest_copy((namespace, tuple(tokens[: count * block_size])))
            if block_id is None:
                break
            hits.append(block_id)
        return hits


class NaiveSequence:
    def __init__(self, tokens, namespace):
        self.tokens = list(tokens)
        self.namespace = namespace
        self.table = []
        self.computed = 0
        self.cached = 0
        self.published = 0


class NaiveManager:
    """Sequences over a naive pool. `namespace` is any value; None is never cached."""

    def __init__(self, num_blocks, block_size, caching=True):
        self.pool = NaivePool(num_blocks)
        self.block_size = block_size
        self.caching = caching
        self.num_queried = self.num_hit = 0

    def blocks_for(self, num_tokens):
        full, rest = divmod(num_tokens, self.block_size)
        return full + (1 if rest else 0)

    def hits(self, tokens, namespace):
        if namespace is None or not self.caching:
            return []
        longest = (len(tokens) - 1) // self.block_size
        return self.pool.match(namespace, tokens, self.block_size, longest)

    def open(self, tokens, namespace):
        seq = NaiveSequence(tokens, namespace if self.caching else None)
        seq.table = self.hits(tokens, namespace)
        seq.published = len(seq.table)
        seq.computed = seq.cached = len(seq.table) * self.block_size
        self.pool.hold(seq.table)
        if seq.namespace is not None:
            self.num_queried += len(tokens)
            self.num_hit += seq.cached
        return seq

    def missing(self, seq, num_tokens):
        return max(0, self.blocks_for(seq.computed + num_tokens) - len(seq.table))

    def can_reserve(self, seq, num_tokens):
        return self.missing(seq, num_tokens) <= len(self.pool.free)

    def reserve(self, seq, num_tokens):
        new = self.pool.take(self.missing(seq, num_tokens))
        seq.table += new
        return new

    def commit(self, seq, num_tokens):
        seq.computed += num_tokens
        if seq.namespace is None:
            return
        while (seq.published + 1) * self.block_size <= seq.computed:
            end = (seq.published + 1) * self.block_size
            content = (seq.namespace, tuple(seq.tokens[:end]))
            self.pool.publish(seq.table[seq.published], content)
            seq.published += 1

    def truncate(self, seq, num_tokens):
        full = num_tokens // self.block_size
        keep = full if full < seq.published else self.blocks_for(num_tokens)
        self.pool.release(list(reversed(seq.table[keep:])))
        seq.table = seq.table[:keep]
        seq.tokens = seq.tokens[:num_tokens]
        seq.published = min(seq.published, keep)
        seq.computed = min(seq.computed, num_tokens, keep * self.block_size)
        seq.cached = min(seq.cached, seq.computed)

    def close(self, seq):
        self.pool.release(list(reversed(seq.table)))
