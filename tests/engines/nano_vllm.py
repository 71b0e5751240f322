"""nano-vLLM's block manager at commit bb823b3 (2026-04-26), as its scheduler drives it.

NANO_VLLM names a checkout; neither torch nor its kernels are needed. `Scheduled` allocates a whole
prompt at once, publishes blocks when they are computed, and appends tokens one step after another.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

from kvcore.testing import Promise

for name in ("nanovllm", "nanovllm.engine"):  # its packages, without what they import
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(Path(os.environ["NANO_VLLM"], *name.split(".")))]

from nanovllm.engine.block_manager import BlockManager  # noqa: E402
from nanovllm.engine.sequence import Sequence  # noqa: E402


class Scheduled:
    promises = frozenset(
        {Promise.COMMIT, Promise.PARTS, Promise.STABLE, Promise.REUSE, Promise.KEEP, Promise.LRU}
    )

    def start(self, num_blocks, block_size):
        Sequence.block_size = block_size
        self.manager = BlockManager(num_blocks, block_size)
        return range(num_blocks)

    def begin(self, tokens, tenant):
        request = Sequence(list(tokens))
        request.waiting = []
        free, self.manager.free_block_ids = self.manager.free_block_ids, range(10**6)
        found = self.manager.can_allocate(request)  # looked up, whether there is room or not
        self.manager.free_block_ids = free
        return request, found * self.manager.block_size

    def reserve(self, request, num_tokens):
        if not request.block_table:
            found = self.manager.can_allocate(request)
            if found == -1:
                return None
            self.manager.allocate(request, found)
            return request.block_table[found:]
        before, size = len(request.block_table), self.manager.block_size
        total = request.num_tokens + len(request.waiting)
        if -(-total // size) - before > len(self.manager.free_block_ids):
            return None  # `can_append`, for each of the steps
        for token in request.waiting:
            request.append_token(token)
            self.manager.may_append(request)
        request.waiting = []
        return request.block_table[before:]

    def commit(self, request, num_tokens):
        request.num_scheduled_tokens = num_tokens
        self.manager.hash_blocks(request)
        request.num_cached_tokens += num_tokens

    def append(self, request, token):
        size, table = self.manager.block_size, request.block_table
        if table and (request.waiting or request.num_tokens == len(table) * size):
            request.waiting.append(token)  # it joins when there is a block
        else:
            request.append_token(token)

    def finish(self, request):
        self.manager.deallocate(request)

    def block_table(self, request):
        return request.block_table

    def num_free_blocks(self):
        return len(self.manager.free_block_ids)
