"""Transformers 5.23's continuous batching: its paged cache, one kind of layers with full attention.

`Scheduled` calls it as its batch processor does: a prefix is looked up and held, room is made for a
chunk, blocks get their hash when the chunk has been computed, and a block that some other has the
content of is exchanged for that. When there is no room, all that is cached is evicted.
"""

import torch
from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

from kvcore.testing import Promise

CONFIG = LlamaConfig(
    hidden_size=16, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1
)
TRASH = 2  # blocks before the first that is handed out


class Scheduled:
    promises = frozenset(
        {Promise.HOLD, Promise.CHUNK, Promise.COMMIT, Promise.REUSE, Promise.FORK, Promise.RESET}
    )

    def start(self, num_blocks, block_size):
        config = ContinuousBatchingConfig(
            page_size=block_size, num_blocks=num_blocks, max_batch_tokens=64,
            max_memory_percent=1.0, max_blocks_per_request=0, max_requests_per_batch=8,
        )  # fmt: skip
        helper = DistributedHelper(None, cpu_group_timeout=None, tp_plan={})
        self.cache = PagedAttentionCache(CONFIG, config, torch.device("cpu"), helper, torch.float32)
        (self.allocator,) = self.cache.cache_allocators.values()
        self.count = 0
        return range(num_blocks)

    def begin(self, tokens, tenant):
        self.count += 1
        state = RequestState(str(self.count), list(tokens))
        state.position_offset = self.cache.search_prefix_match(state.request_id, tokens)
        return state, state.position_offset

    def reserve(self, state, num_tokens):
        before = len(self.block_table(state))
        if not self.cache.can_store_request_tokens(state, num_tokens):
            self.cache.evict_cached_blocks()
            self.cache.pool.try_to_free_sectors()
            if not self.cache.can_store_request_tokens(state, num_tokens):
                return None
        return self.block_table(state)[before:]

    def commit(self, state, num_tokens):
        complete = self.cache.count_new_complete_blocks(state, num_tokens)
        state.position_offset += num_tokens
        self.cache.mark_complete_blocks(state, complete)

    def append(self, state, token):
        state.generated_tokens.append(token)

    def finish(self, state):
        self.cache.free_blocks(state.request_id)

    def fork(self, state):
        self.count += 1
        copies = {name: ([], []) for name in self.cache.cache_allocators}
        if not self.cache.prepare_fork_request(state, [str(self.count)], copies):
            return None
        ((sources, targets),) = copies.values()
        pairs = [(a - TRASH, b - TRASH) for a, b in zip(sources, targets, strict=True)]
        return state.fork(str(self.count)), pairs

    def block_table(self, state):
        return [block - TRASH for block in self.allocator.block_table.get(state.request_id, [])]

    def num_free_blocks(self):
        ledger = self.allocator.ledger
        free = self.cache.pool.count_free_blocks(self.allocator.index)
        return self.cache.pool.num_free_sectors + free + len(ledger.cached_blocks)

    def reset(self):
        live = bool(self.allocator.block_table)
        if not live:
            self.cache.reset()
        return not live
