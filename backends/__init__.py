"""The data plane: kernels over paged KV caches and recurrent states, behind one contract.

Backends are chosen by name.
Importing this imports torch and no toolchain; `get_backend` loads one.
"""

from backends.contract import (
    AttentionTerms,
    Backend,
    Capabilities,
    IndexCall,
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
from backends.sparse import SparseBackend, by_slot, choose
from backends.states import (
    DecayGate,
    LinearAttentionTerms,
    ShortConvTerms,
    StateBackend,
    StateBatch,
)

__all__ = [
    "AttentionTerms",
    "Backend",
    "BackendError",
    "BackendStatus",
    "BackendUnavailableError",
    "Capabilities",
    "DecayGate",
    "IndexCall",
    "InvalidArgumentError",
    "KVCache",
    "KVLayout",
    "LayerCall",
    "LinearAttentionTerms",
    "PagedBatch",
    "SharedPrefix",
    "ShortConvTerms",
    "SparseBackend",
    "StateBackend",
    "StateBatch",
    "UnknownBackendError",
    "UnsupportedError",
    "backend_names",
    "by_slot",
    "choose",
    "get_backend",
    "list_backends",
]
