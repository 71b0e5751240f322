"""vLLM's cache configuration and manager of hybrid models, for `capacity --peer vllm`.

What vLLM 0.32 does when it loads such a model: the attention block grows until its page is at least
a state's, states are padded to it, layers are divided into groups of equal depth, and prefix
caching stores states at block ends (the mode "align").
"""

from itertools import count
from types import SimpleNamespace

import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import single_type_kv_cache_manager as kinds
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.request import Request

from tests.bench.allocator.vllm import _PARAMS, _version
from tests.bench.engine.capacity import CHUNK

MAX_MODEL_LEN = 1 << 18


class Theirs:
    """vLLM, configured by its own functions."""

    name = f"vLLM {_version()}"

    def __init__(self, layout, memory):
        kinds.register_all_kvcache_specs(None)
        shapes, dtypes = [layout.conv], [torch.bfloat16]
        if layout.recurrent is not None:
            shapes.append(layout.recurrent)
            dtypes.append(torch.float32)
        state = {"shapes": tuple(shapes), "dtypes": tuple(dtypes), "mamba_cache_mode": "align"}
        state_bytes = MambaSpec(block_size=1, **state).page_size_bytes
        self.block_size = 16 * max(1, -(-state_bytes // (16 * self._attention(layout, 1))))
        page = self._attention(layout, self.block_size)
        specs = {f"a{n}": self._spec(layout, self.block_size) for n in range(layout.num_layers)}
        for number in range(layout.num_recurrent):
            specs[f"m{number}"] = MambaSpec(
                block_size=self.block_size, page_size_padded=page, **state
            )
        config = _config(self.block_size)
        groups = get_kv_cache_groups(config, specs)
        cache = get_kv_cache_config_from_groups(config, groups, memory)
        self.num_blocks = cache.num_blocks
        self.manager = KVCacheManager(
            cache,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=self.block_size,
            hash_block_size=self.block_size,
            max_in_flight_tokens=CHUNK,
        )
        digest = get_hash_fn_by_name("xxhash")
        init_none_hash(digest)
        self._hasher = get_request_block_hasher(self.block_size, digest)
        self._ids = map(str, count())

    @staticmethod
    def _spec(layout, block_size):
        kind = MLAAttentionSpec if layout.heads is None else FullAttentionSpec
        return kind(
            block_size=block_size,
            num_kv_heads=layout.heads or 1,
            head_size=layout.dim,
            dtype=torch.bfloat16,
        )

    def _attention(self, layout, block_size):
        return self._spec(layout, block_size).page_size_bytes

    def _request(self, tokens):
        return Request(
            next(self._ids), tokens, _PARAMS, None, arrival_time=0.0, block_hasher=self._hasher
        )

    def begin(self, tokens, *, ends=False):
        """Compute a prompt; says whether there was room."""
        request = self._request(tokens)
        hits, num_hits = self.manager.get_computed_blocks(request)[:2]
        done = num_hits
        while done < len(tokens):
            stop = min(len(tokens), done + CHUNK)
            if stop < len(tokens) or len(tokens) - done > self.block_size:
                # The scheduler ends chunks at block ends, the last one but the rest too.
                stop = (min(stop, len(tokens) - 1)) // self.block_size * self.block_size
            if stop <= done:
                stop = len(tokens)
            self.manager.new_step_starts()
            found = (num_hits, hits) if done == num_hits else (0, None)
            if self.manager.allocate_slots(request, stop - done, *found) is None:
                self.manager.free(request)
                return False
            done = request.num_computed_tokens = stop
        if ends:
            self.manager.free(request)
        return True

    def hits(self, tokens):
        """How many tokens of a prompt are cached."""
        return self.manager.get_computed_blocks(self._request(tokens))[1]


def _config(block_size):
    """What is read of a `VllmConfig`: its own defaults, and the cache of a hybrid model."""
    config = VllmConfig(
        cache_config=CacheConfig(
            block_size=block_size, mamba_cache_mode="align", enable_prefix_caching=True
        )
    )
    config.cache_config.kv_cache_layout = "LBNHC"  # what FlashAttention takes
    config.model_config = SimpleNamespace(max_model_len=MAX_MODEL_LEN)
    return config
