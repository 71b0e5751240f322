"""kvcore behind the protocol of `kvcore.testing`."""

from dataclasses import dataclass

import kvcore
from kvcore.testing import EVERYTHING, Promise

HASHES = "xxh3-128"


@dataclass(eq=False)
class Handle:
    """A request; its sequence is another one after it was swapped in."""

    seq: kvcore.KVSequence
    resets: int
    space: kvcore.Namespace
    items: tuple = ()
    num_computed: int = 0


class OurAllocator:
    promises = EVERYTHING
    make_manager = kvcore.KVCacheManager

    def start(self, num_blocks, block_size):
        self.kv = self.make_manager(num_blocks, block_size, record_events=HASHES)
        self.resets = 0
        return range(1, num_blocks)

    def begin(self, tokens, tenant):
        return self.begin_with(tokens, tenant, ())

    def begin_with(self, tokens, tenant, items):
        things = tuple(
            kvcore.MultimodalItem(name.encode(), start, length) for name, start, length in items
        )
        space = kvcore.Namespace(salt=tenant.encode())
        seq = self.kv.open(tokens, namespace=space, items=things)
        return Handle(seq, self.resets, space, things), seq.num_cached_tokens

    def reserve(self, request, num_tokens):
        try:
            return self.kv.reserve(request.seq, num_tokens)[0]
        except kvcore.OutOfBlocksError:
            return None

    def commit(self, request, num_tokens):
        self.kv.commit(request.seq, num_tokens)

    def append(self, request, token):
        self.kv.append(request.seq, token)

    def expect(self, request, num_tokens):
        self.kv.expect(request.seq, num_tokens)

    def resolve(self, request, token):
        self.kv.resolve(request.seq, [token])

    def finish(self, request):
        if request.num_computed:  # it is swapped out
            request.num_computed = 0
        else:
            self.kv.close(request.seq)

    def block_table(self, request):
        return request.seq.block_table

    def num_free_blocks(self):
        return self.kv.num_free_blocks

    def truncate(self, request, num_tokens):
        self.kv.truncate(request.seq, num_tokens)
        return request.seq.num_computed_tokens

    def fork(self, request):
        try:
            child, copies = self.kv.fork(request.seq)
        except kvcore.OutOfBlocksError:
            return None
        forked = Handle(child, request.resets, request.space, request.items)
        return forked, [(order.src, order.dst) for order in copies]

    def reset(self):
        self.kv.reset()
        self.resets += 1
        return True

    def lease(self, request):
        return self.kv.lease(request.seq, "step").lease_id

    def end_lease(self, lease):
        return self.kv.leases.end(lease)

    def take_events(self):
        told = []
        for event in self.kv.events.take():
            if isinstance(event, kvcore.AllCleared):
                told.append(("cleared", None))
            else:
                kind = "stored" if isinstance(event, kvcore.BlocksStored) else "removed"
                told += [(kind, name) for name in event.block_hashes]
        return told

    def block_hashes(self, tokens, tenant):
        space = kvcore.Namespace(salt=tenant.encode())
        return kvcore.block_hashes(tokens, self.kv.block_size, namespace=space, algorithm=HASHES)

    def swap_out(self, request):
        seq = request.seq
        request.num_computed = seq.num_computed_tokens
        ids = seq.block_table[: -(-request.num_computed // self.kv.block_size)]
        self.kv.close(seq)
        return ids

    def swap_in(self, request):
        """Like a prompt of which only the computed part is known; what is old stays unknown."""
        tokens, count = request.seq.tokens, request.num_computed
        fresh = request.resets == self.resets
        space = request.space if fresh else None
        items = request.items
        if not self.kv.plan(tokens[:count], namespace=space, items=items).fits:
            return None
        seq = self.kv.open(tokens[:count], namespace=space, items=items)
        hits = len(seq.block_table)
        self.kv.reserve(seq, count - seq.num_computed_tokens)
        self.kv.commit(seq, count - seq.num_computed_tokens)
        self.kv.extend(seq, tokens[count:])
        request.seq, request.num_computed = seq, 0
        return list(enumerate(seq.block_table))[hits:]


class OurWindows(OurAllocator):
    """Full attention beside a sliding window."""

    promises = EVERYTHING | {Promise.GROUPS}
    windows = (None, 5)

    def start(self, num_blocks, block_size):
        groups = [kvcore.FullAttention(), kvcore.SlidingWindow(window=5)]
        self.kv = self.make_manager(num_blocks, block_size, groups=groups)
        self.resets = 0
        return range(1, num_blocks)

    def block_tables(self, request):
        return request.seq.block_tables


class OurStates(OurWindows):
    """Full attention, a sliding window and recurrent states."""

    promises = EVERYTHING | {Promise.GROUPS, Promise.STATES}
    groups = (kvcore.FullAttention(), kvcore.SlidingWindow(window=5), kvcore.RecurrentState(2))

    def start(self, num_blocks, block_size):
        self.kv = self.make_manager(num_blocks, block_size, groups=self.groups)
        self.resets = 0
        return range(1, num_blocks)

    def states(self, request):
        state = request.seq.state
        sides = [[block.block_id for block in one] for one in (state.read, state.write)]
        return *sides, [block.block_id for block in state.blocks()]
