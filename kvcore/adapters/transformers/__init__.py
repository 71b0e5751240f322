"""kvcore inside Hugging Face's Transformers.

`install(model)` has kvcore look after the cache of `generate_batch`, Transformers' continuous
batching. `PagedPool(model, num_blocks=...)` gives plain `generate` a `Cache` over kvcore's blocks,
that shares prompts between calls and beams. Both need torch and Transformers, nothing else of ours.
docs/how-to/transformers.md shows them.
"""

# Refuses an unsupported version before its insides are imported.
from kvcore.adapters.transformers_versions import SUPPORTED, UnsupportedVersionError

# isort: split
from kvcore.adapters.transformers.batching import KVCoreCache, install, uninstall
from kvcore.adapters.transformers.cache import PagedCache, PagedLayer, PagedPool

__all__ = [
    "SUPPORTED",
    "KVCoreCache",
    "PagedCache",
    "PagedLayer",
    "PagedPool",
    "UnsupportedVersionError",
    "install",
    "uninstall",
]
