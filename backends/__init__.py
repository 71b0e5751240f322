"""The data plane: kernels over a paged KV cache, behind one contract, chosen by name.

Importing this imports torch and no toolchain; `get_backend` loads one.
"""

from backends.contract import (
    AttentionTerms,
    Backend,
    Capabilities,
    KVCache,
    KVLayout,
    LayerCall,
    PagedBatch,
    SharedPrefix,
)
from backends.errors import (
    BackendError,
    BackendUnavailableError,
    InvalidArgumentError,
    UnknownBackendError,
    UnsupportedError,
)
from backends.registry import BackendStatus, backend_names, get_backend, list_backends

__all__ = [
    "AttentionTerms",
    "Backend",
    "BackendError",
    "BackendStatus",
    "BackendUnavailableError",
    "Capabilities",
    "InvalidArgumentError",
    "KVCache",
    "KVLayout",
    "LayerCall",
    "PagedBatch",
    "SharedPrefix",
    "UnknownBackendError",
    "UnsupportedError",
    "backend_names",
    "get_backend",
    "list_backends",
]
