"""kvcore inside Hugging Face's Transformers.

`install(model)` has kvcore look after the cache of `generate_batch`, Transformers' continuous
batching. `PagedPool(model, num_blocks=...)` gives plain `generate` a `Cache` over kvcore's blocks,
that shares prompts between calls and beams. Both need torch and Transformers, nothing else of ours.
docs/how-to/transformers.md shows them.
"""

import transformers

import kvcore

SUPPORTED = ("5.23",)


class UnsupportedVersionError(kvcore.KVCoreError, ImportError):
    """The Transformers that is installed is not one that this adapter was run with."""


def check_version(found: str) -> None:
    """Refuse a Transformers that this adapter was not run with.

    Raises:
        UnsupportedVersionError: it is another minor version; its insides change with each.
    """
    if found.rsplit(".", 1)[0] not in SUPPORTED:
        wanted = " or ".join(f"{version}.x" for version in SUPPORTED)
        raise UnsupportedVersionError(f"transformers: wanted {wanted}, got {found}")


check_version(transformers.__version__)

from kvcore.adapters.transformers.batching import KVCoreCache, install, uninstall  # noqa: E402
from kvcore.adapters.transformers.cache import PagedCache, PagedLayer, PagedPool  # noqa: E402

__all__ = [
    "SUPPORTED",
    "KVCoreCache",
    "PagedCache",
    "PagedLayer",
    "PagedPool",
    "UnsupportedVersionError",
    "check_version",
    "install",
    "uninstall",
]
