"""kvcore inside Hugging Face's Transformers.

`install(model)` has kvcore look after the cache of `generate_batch`, Transformers' continuous
batching. `PagedPool(model, num_blocks=...)` gives plain `generate` a `Cache` over kvcore's blocks,
that shares prompts between calls and beams. Both need torch and Transformers, nothing else of ours.
docs/adapters.md shows them.
"""

from kvcore.adapters.transformers_batching import (
    KVCoreCache,
    UnsupportedVersionError,
    install,
    uninstall,
)
from kvcore.adapters.transformers_cache import PagedCache, PagedLayer, PagedPool

__all__ = [
    "KVCoreCache",
    "PagedCache",
    "PagedLayer",
    "PagedPool",
    "UnsupportedVersionError",
    "install",
    "uninstall",
]
