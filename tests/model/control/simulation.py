"""A model of one line in place of a network, and a cache that remembers what was written into it.

The next token is a digest of all tokens before it. The cache maps a slot to the digest of the
prefix that was computed into it; a token may only be drawn where every slot that its sequence can
see holds exactly its own prefix, so a wrong hit, a block handed out twice, a copy not carried out
or stored too late shows at once.
"""

from array import array
from zlib import crc32

import kvcore
from model.control.drafts import accepted_tokens

VOCAB_SIZE = 5


def next_token(tokens):
    return crc32(array("I", tokens).tobytes()) % VOCAB_SIZE


def undisturbed(prompt, params):
    """What a request gives when it has the machine to itself."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + params.max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(prompt) :]


def peak_alone(groups, block_size, num_tokens):
    """The most blocks that a sequence alone holds at one moment, computed token by token."""
    kv = kvcore.KVCacheManager(len(groups) * num_tokens + 2, block_size, groups=groups)
    sequence = kv.open([0] * num_tokens)
    for _ in range(num_tokens):
        kv.reserve(sequence, 1)
        kv.commit(sequence, 1)
    return kv.stats().peak_used_blocks


class SlotMemory:
    """What the slots of a cache hold, and how blocks move.

    Attributes:
        size: tokens of a block.
        slots: what each holds, None at first.
    """

    def __init__(self, kv):
        self.size = kv.block_size
        self.slots = [None] * (kv.num_blocks * self.size)

    def transfer(self, step):
        """Store blocks in host memory, then load others from there."""
        for transfer in step.stores:
            transfer.copy.payload = [self.block(block_id) for block_id in transfer.block_ids]
        for transfer in step.loads:
            payload = transfer.copy.payload
            stored = [content for run in transfer.ranges for content in payload[slice(*run)]]
            for block_id, content in zip(transfer.block_ids, stored, strict=True):
                self.set_block(block_id, content)

    def copy(self, orders):
        """Carry copy orders out, last to first: their order must not matter."""
        assert len({order.dst for order in orders}) == len(orders)
        assert not {order.dst for order in orders} & {order.src for order in orders}
        for order in reversed(orders):
            self.set_block(order.dst, self.block(order.src))

    def block(self, block_id):
        return self.slots[block_id * self.size : (block_id + 1) * self.size]

    def set_block(self, block_id, content):
        self.slots[block_id * self.size : (block_id + 1) * self.size] = content


class SimulatedModel(SlotMemory):
    """A device: it knows the tokens that it has drawn before anybody has read them."""

    def __init__(self, kv, long_above=None):
        super().__init__(kv)
        self.kv = kv
        self.long_above = long_above
        self.drawn = {}  # request_id -> its newest token
        self.ahead = {}  # request_id -> what the last step has drawn behind each of its drafts

    def compute(self, step):
        """Carry a step out and draw its tokens; raises if one would see what is not its own."""
        self.transfer(step)
        for chunk in step.chunks:
            if not chunk.request.is_finished:
                self.write(chunk)
        sampled, self.ahead = {}, {}
        for chunk in step.chunks:
            if chunk.samples and not chunk.request.is_finished:
                tokens = self.tokens(chunk.request, chunk.drafts)
                known = len(tokens) - len(chunk.drafts)
                for end in range(known, len(tokens) + 1):
                    self.check_content(chunk.request, tokens[:end])
                drawn = [next_token(tokens[:end]) for end in range(known, len(tokens) + 1)]
                sampled |= {request.request_id: drawn[0] for request in chunk.sampling}
                self.ahead[chunk.request.request_id] = drawn[1:]
        self.drawn |= sampled
        return sampled

    def further(self, step, sampled):
        """What `accept` is told beside the tokens, of those who brought drafts."""
        return {
            chunk.request.request_id: accepted_tokens(
                chunk.request, chunk.drafts, sampled[number], self.ahead[number]
            )[1:]
            for chunk in step.chunks
            if chunk.drafts and (number := chunk.request.request_id) in sampled
        }

    def tokens(self, request, drafts=()):
        tokens = array("I", request.tokens)
        if request.is_expecting:
            tokens.append(self.drawn[request.request_id])
        tokens.extend(drafts)
        return tokens

    def digest(self, tokens, position, is_long):
        return crc32(tokens[: position + 1].tobytes()), position, is_long

    def write(self, chunk):
        request, stop = chunk.request, chunk.start + chunk.num_tokens
        tokens = self.tokens(request, chunk.drafts)
        for group in range(len(self.kv.groups)):
            slots = array("q", [-1] * chunk.num_tokens)
            request.running_sequence.write_slot_mapping(chunk.start, stop, slots, group)
            for position, slot in zip(range(chunk.start, stop), slots, strict=True):
                self.slots[slot] = self.digest(tokens, position, request.is_long)

    def check_content(self, request, tokens):
        size = self.kv.block_size
        tables = request.running_sequence.block_tables
        is_long = self.long_above is not None and len(tokens) > self.long_above
        for group, table in zip(self.kv.groups, tables, strict=True):
            last = len(tokens) - 1
            for position in range(group.first_visible(last), last + 1):
                slot = table[position // size] * size + position % size
                wanted = self.digest(tokens, position, is_long)
                assert self.slots[slot] == wanted, (request, position)
