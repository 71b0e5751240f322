"""SGLang 0.5.23's radix tree over its paged allocator, with full attention, on a CPU.

`Scheduled` does what its scheduler does with a request: the longest prefix is matched and locked,
whole pages are allocated (the tree evicts leaves for them), and `checkpoint` publishes what a chunk
has computed: it gives back pages that the tree has already, and the request's row takes the tree's.
`Scheduled` has the Python tree (`RadixCache`), `Rust` what the engine builds by default
(`UnifiedRadixCache` over its tree in Rust, which is in the wheel), and `Python` the same over the
tree in Python that stands in for it where Rust is not served.
"""

from array import array
from dataclasses import replace
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvcore.testing import Promise


class Rows:
    """Its table of slots, a row a request."""

    def __init__(self):
        self.req_to_token = torch.zeros((4096, 64), dtype=torch.int64)

    def write(self, where, slots):
        self.req_to_token[where] = slots


class Scheduled:
    promises = frozenset(
        {Promise.HOLD, Promise.CHUNK, Promise.COMMIT, Promise.REUSE, Promise.TENANTS, Promise.RESET}
    )

    def start(self, num_blocks, block_size):
        self.size = block_size
        slots = (num_blocks - 1) * block_size
        self.pool = PagedTokenToKVPoolAllocator(
            slots, block_size, torch.float32, "cpu", None, False
        )
        self.rows = Rows()
        self.tree = self.make_tree(CacheInitParams(False, self.rows, self.pool, block_size))
        self.live = 0
        self.count = 0
        return range(1, num_blocks)

    def make_tree(self, params):
        return RadixCache(params)

    def begin(self, tokens, tenant):
        key = RadixKey(array("q", tokens[:-1]), cache_salt=tenant or None)
        node = self.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
        found = self.tree.path_device_indices(node)
        kv = SimpleNamespace(
            req_pool_idx=self.count, cache_protected_len=len(found), cache_inserted_len=len(found),
            swa_evict_floor=0,
        )  # fmt: skip
        request = SimpleNamespace(
            kv=kv, tokens=list(tokens), computed=len(found), room=len(found), last_node=node,
            lock=self.tree.lock(node), extra_key=None, cache_salt=tenant or None, priority=0,
            origin_input_ids=array("q", tokens), session=None, session_id=None,
            kv_rotation_base=None, finished=lambda: False,
        )  # fmt: skip
        self.rows.write((self.count, slice(0, len(found))), found)
        self.count, self.live = self.count + 1, self.live + 1
        return request, len(found)

    def reserve(self, request, num_tokens):
        missing = -(-(request.computed + num_tokens - request.room) // self.size) * self.size
        if missing > self.num_free_blocks() * self.size:
            return None  # its scheduler counts before it takes
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing - self.pool.available_size()))
            slots = self.pool.alloc(missing)
            end = request.room + missing
            self.rows.write((request.kv.req_pool_idx, slice(request.room, end)), slots)
            request.room = end
            return (slots[:: self.size] // self.size).tolist()
        return []

    def commit(self, request, num_tokens):
        request.computed += num_tokens
        request.full_untruncated_fill_ids = array("q", request.tokens)
        self.tree.checkpoint(request, up_to=request.computed)

    def append(self, request, token):
        request.tokens.append(token)

    def finish(self, request):
        if request.lock is None:
            raise RuntimeError("its scheduler releases once")
        self.release(request)
        request.lock = None

    def release(self, request):
        first = request.kv.cache_protected_len
        row = self.rows.req_to_token[request.kv.req_pool_idx, first : request.room]
        self.pool.free_segment(row.clone(), start_pos=first)
        self.tree.unlock(request.lock)
        self.live -= 1

    def block_table(self, request):
        row = self.rows.req_to_token[request.kv.req_pool_idx, : request.room : self.size]
        return (row // self.size).tolist()

    def num_free_blocks(self):
        return (self.pool.available_size() + self.tree.evictable_size()) // self.size

    def reset(self):
        if not self.live:
            self.tree.reset()
            self.pool.clear()
        return not self.live


class Unguarded(Scheduled):
    """A second release of a request is accepted."""

    def finish(self, request):
        self.release(request)


class Rust(Scheduled):
    core = "rust"

    def make_tree(self, params):
        params = replace(params, tree_components=(ComponentType.FULL,), tree_core_backend=self.core)
        tree = UnifiedRadixCache(params)
        if tree._tree_core_backend != self.core:
            raise RuntimeError(f"wanted its tree in {self.core}, got {tree._tree_core_backend}")
        return tree


class Python(Rust):
    core = "python"


class UnguardedRust(Unguarded, Rust):
    """The same over the tree in Rust."""
