"""MinivLLM's block manager at commit e63c96c (2025-12-31), as its scheduler drives it.

MINIVLLM names a checkout; torch and its kernels are not needed. A whole prompt is allocated at
once, which also publishes it; tokens join one step after another. A look-up of its own it has not,
so `begin` asks a copy that has room.
"""

import copy
import os
import sys
from pathlib import Path
from types import ModuleType

from kvcore.testing import Promise

for name in ("myvllm", "myvllm.engine"):  # its packages, without what they import
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(Path(os.environ["MINIVLLM"], "src", *name.split(".")))]

from myvllm.engine.block_manager import Block, BlockManager  # noqa: E402
from myvllm.engine.sequence import Sequence  # noqa: E402


class Scheduled:
    promises = frozenset({Promise.STABLE, Promise.REUSE})

    def start(self, num_blocks, block_size):
        Sequence.block_size = block_size
        self.manager = BlockManager(num_blocks, block_size)
        return range(num_blocks)

    def begin(self, tokens, tenant):
        request, asked = Sequence(list(tokens)), Sequence(list(tokens))
        request.waiting = []
        roomy = copy.deepcopy(self.manager)
        first = len(roomy.blocks)
        roomy.blocks += [Block(first + n) for n in range(asked.num_blocks)]
        roomy.free_block_ids.extend(range(first, len(roomy.blocks)))
        roomy.allocate(asked)
        return request, asked.num_cached_tokens

    def reserve(self, request, num_tokens):
        if not request.block_table:
            if not self.manager.can_allocate(request):
                return None
            self.manager.allocate(request)
            return request.block_table[request.num_cached_tokens // self.manager.block_size :]
        before, size = len(request.block_table), self.manager.block_size
        total = request.num_tokens + len(request.waiting)
        if -(-total // size) - before > len(self.manager.free_block_ids):
            return None  # `can_append`, for each of the steps
        for token in request.waiting:
            request.append_token(token)
            self.manager.append(request)
        request.waiting = []
        return request.block_table[before:]

    def commit(self, request, num_tokens):
        """It was published when it was allocated."""

    def append(self, request, token):
        request.waiting.append(token)

    def finish(self, request):
        self.manager.deallocate(request)

    def block_table(self, request):
        return request.block_table

    def num_free_blocks(self):
        return len(self.manager.free_block_ids)
