"""A model of one line in place of a network, and a cache that remembers what was written into it.

The next token is a digest of all tokens before it. The cache maps a slot to the digest of the
prefix that was computed into it; a token may only be drawn where every slot of its sequence's table
holds exactly its own prefix, so a wrong hit or a block handed out twice shows at once.
"""

from array import array
from zlib import crc32

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


class SimulatedModel:
    def __init__(self, kv):
        self.kv = kv
        self.ghost = {}

    def compute(self, step):
        """Write a step and draw its tokens; raises if a sequence would read what is not its own."""
        for chunk in step.chunks:
            request, stop = chunk.request, chunk.start + chunk.num_tokens
            if request.is_finished:
                continue
            slots = array("q", [-1] * chunk.num_tokens)
            written = request.running_sequence.write_slot_mapping(chunk.start, stop, slots)
            assert written == chunk.num_tokens
            for position, slot in zip(range(chunk.start, stop), slots, strict=True):
                self.ghost[slot] = prefix_digest(request, position)
        sampled = {}
        for chunk in step.chunks:
            if chunk.samples and not chunk.request.is_finished:
                self.check_content(chunk.request)
                sampled[chunk.request.request_id] = next_token(chunk.request.tokens)
        return sampled

    def check_content(self, request):
        table = array("i", [0] * request.running_sequence.num_blocks)
        request.running_sequence.write_block_table(table)
        size = self.kv.block_size
        for position in range(len(request.tokens)):
            slot = table[position // size] * size + position % size
            assert self.ghost.get(slot) == prefix_digest(request, position), (request, position)


def prefix_digest(request, position):
    return crc32(request.tokens[: position + 1].tobytes()), position
