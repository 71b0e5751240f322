"""kvcore behind the protocol of `kvcore.testing`."""

import kvcore
from kvcore.testing import EVERYTHING


class OurAllocator:
    promises = EVERYTHING

    def start(self, num_blocks, block_size):
        self.kv = kvcore.KVCacheManager(num_blocks, block_size)
        return range(1, num_blocks)

    def begin(self, tokens, tenant):
        seq = self.kv.open(tokens, namespace=kvcore.Namespace(salt=tenant.encode()))
        return seq, seq.num_cached_tokens

    def reserve(self, request, num_tokens):
        try:
            return self.kv.reserve(request, num_tokens)[0]
        except kvcore.OutOfBlocksError:
            return None

    def commit(self, request, num_tokens):
        self.kv.commit(request, num_tokens)

    def append(self, request, token):
        self.kv.append(request, token)

    def expect(self, request, num_tokens):
        self.kv.expect(request, num_tokens)

    def tell(self, request, token):
        self.kv.tell(request, [token])

    def finish(self, request):
        self.kv.close(request)

    def block_table(self, request):
        return request.block_table

    def num_free_blocks(self):
        return self.kv.num_free_blocks

    def truncate(self, request, num_tokens):
        self.kv.truncate(request, num_tokens)
        return request.num_computed_tokens

    def fork(self, request):
        try:
            child, copies = self.kv.fork(request)
        except kvcore.OutOfBlocksError:
            return None
        return child, [(order.src, order.dst) for order in copies]

    def reset(self):
        self.kv.reset()
        return True
