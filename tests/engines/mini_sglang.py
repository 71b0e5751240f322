"""mini-sglang's radix cache at commit 20fcd7f (2026-03-13), as its scheduler drives it.

MINI_SGLANG names a checkout; torch is needed, its kernels and a GPU are not. Two functions are
replaced, because they need those: the comparison of keys is C++, and a row of the page table is
written through pinned memory. `Scheduled` admits a request and allocates its pages in one go,
publishes a prompt when all of it is computed, and what is generated when the request ends. Every
step that is scheduled runs.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from kvcore.testing import Promise

for name in ("minisgl", "minisgl.kernel", "minisgl.scheduler", "minisgl.utils"):
    sys.modules[name] = ModuleType(name)  # its packages, without what they import
    sys.modules[name].__path__ = [str(Path(os.environ["MINI_SGLANG"], "python", *name.split(".")))]

from minisgl.utils.misc import align_down, div_ceil  # noqa: E402
from minisgl.utils.registry import Registry  # noqa: E402

vars(sys.modules["minisgl.utils"]).update(
    align_down=align_down, div_ceil=div_ceil, Registry=Registry
)

from minisgl import core  # noqa: E402
from minisgl.scheduler import cache  # noqa: E402
from minisgl.scheduler.table import TableManager  # noqa: E402


def compare_keys(one, two):
    pairs = zip(one.tolist(), two.tolist(), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def write_page_table(page_table, allocated, allocation_info, page_size):
    for row, first, last in allocation_info:
        count = (last - first) * page_size
        page_table[row, first * page_size : last * page_size] = allocated[:count]
        allocated = allocated[count:]


sys.modules["minisgl.kernel"].fast_compare_key = compare_keys
cache._write_page_table = write_page_table


class Scheduled:
    promises = frozenset({Promise.CHUNK})

    def start(self, num_blocks, block_size):
        self.size = block_size
        core._GLOBAL_CTX = core.Context(page_size=block_size)
        self.tables = TableManager(64, torch.zeros((64, 256), dtype=torch.int32))
        self.manager = cache.CacheManager(
            num_blocks, block_size, self.tables.page_table, type="radix"
        )
        return range(num_blocks)

    def begin(self, tokens, tenant):
        ids = torch.tensor(tokens, dtype=torch.int32)
        handle = self.manager.prefix_cache.match_prefix(ids[:-1]).cuda_handle
        request = core.Req(ids, -1, handle.cached_len, 1000, 0, None, handle)
        request.room, request.prompt = handle.cached_len, len(tokens)
        request.is_finished = False
        return request, handle.cached_len

    def reserve(self, request, num_tokens):
        is_new = request.table_idx < 0
        if is_new:
            self.manager.lock(request.cache_handle)
        total = request.cached_len + num_tokens
        pages = div_ceil(total, self.size) - div_ceil(request.room, self.size)
        if pages > self.num_free_blocks():
            if is_new:
                self.manager.unlock(request.cache_handle)
            return None
        if is_new:
            request.table_idx = self.tables.allocate()
            if request.cached_len:
                row = self.tables.page_table[request.table_idx]
                row[: request.cached_len] = request.cache_handle.get_matched_indices()
        before = len(self.block_table(request))
        request.device_len = total
        self.manager.allocate_paged([request])
        request.room = max(request.room, total)
        return self.block_table(request)[before:]

    def commit(self, request, num_tokens):
        request.cached_len += num_tokens
        if request.cached_len == request.prompt:
            with self.manager.lazy_free_region():
                self.manager.cache_req(request, finished=False)

    def append(self, request, token):
        request.append_host(torch.tensor([token], dtype=torch.int32))

    def finish(self, request):
        if request.is_finished:
            raise RuntimeError("its scheduler releases once")
        request.is_finished = True
        if request.table_idx >= 0:
            self.tables.free(request.table_idx)
            with self.manager.lazy_free_region():
                self.manager.cache_req(request, finished=True)

    def block_table(self, request):
        room = request.room if request.table_idx >= 0 else 0
        row = self.tables.page_table[request.table_idx, : room : self.size]
        return (row // self.size).tolist()

    def num_free_blocks(self):
        return self.manager.available_size // self.size


class Remapped(Scheduled):
    """A request's row names the tree's pages in place of its own that were freed."""

    def commit(self, request, num_tokens):
        super().commit(request, num_tokens)
        if request.cached_len == request.prompt and (cached := request.cache_handle.cached_len):
            tree = request.cache_handle.get_matched_indices()
            self.tables.page_table[request.table_idx, :cached] = tree
