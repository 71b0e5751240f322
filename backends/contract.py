"""The contract of a kernel backend: the batch and the cache that it is given, and its operations.

Decides shapes, dtypes and meanings; a backend decides only how fast. Invariants:

- A layer's cache is a `KVCache` in one of two layouts. Of pairs: keys and values, `k, v:
  [num_blocks, block_size, num_kv_heads, head_dim]`. Of latents: one row a token, which is its key
  for every query head, and whose first numbers are its value: `k` has one KV head, and `v` is the
  first `value_dim` numbers of each row of `k`, the same memory. The last dimension is contiguous,
  the others may have any stride. slot = block_id * block_size + offset.
- A cache may be quantised: float8_e4m3fn, whatever the dtype of query, key and value, and then an
  element stands for `stored * scale`, with a scale a cache or a KV head (`k_scale`, `v_scale`).
  Storing gives e4m3(clamp(x * (1 / scale), -448, 448)): a quotient and a product in float32, each
  rounded once, then to the nearest, ties to even, NaN as NaN (0x7F). All backends store the same
  bytes.
- Attention is causal. Query token j of sequence s sits at position `seq_lens[s] - query_len[s] +
  j`; a window of W lets it see the keys at positions `max(0, position - W + 1) .. position`.
- A backend reads no slot that no query of the batch sees, no entry of `block_table` that covers
  only such slots (they may hold anything, NaN and 2^30 included), and no query, key or value row
  past `query_start_loc[-1]`.
- It writes the slots and the output rows of the call, and nothing else.

What is the same in every call of a layer is a record that travels whole: `KVCache`, and
`AttentionTerms` for what attention computes. They check themselves as they are made.

Knows nothing of allocation, prefix caching or requests: the caller answers for the block tables.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from backends.errors import InvalidArgumentError

_FORMS: dict[Hashable, int] = {}
_NUMBERS = itertools.count()


def _number(form: Hashable) -> int:
    """The same for equal forms; there are as many as layers look different."""
    found = _FORMS.get(form)
    return _FORMS.setdefault(form, next(_NUMBERS)) if found is None else found


def _form(tensor: Tensor | None) -> Hashable:
    """All of a tensor but values and address."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Keys that neighbouring sequences have in common: their tables name the same blocks.

    The caller that made the tables finds it; a backend may read these keys once for all sequences.
    """

    first_seq: int
    num_seqs: int
    num_tokens: int
    """Positions that the same entries of `block_table` cover; at most what each sequence has
    before its query tokens."""
    now: Tensor | None = None
    """int32 [3] on the batch's device: the first sequence, the one past the last and the tokens
    when a kernel reads them (they change between replays of a captured CUDA graph); equal sequences
    or no tokens: nothing is shared. The three fields above are then upper limits, from `first_seq`
    on, and the caller has found that sharing pays. None: the fields above are exact."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The places of one step's tokens in the cache; made once a step and used by every layer.

    Shapes, dtypes and devices are checked here, at O(1), so that the operations need not do it
    again. The last row numbers may be padding: a sequence of query length 0 takes no part.

    Raises:
        InvalidArgumentError: a field has the wrong dtype, shape, device or layout.
    """

    query_start_loc: Tensor
    """int32 [num_seqs + 1]: sequence s has the query rows [s] .. [s + 1] - 1."""
    seq_lens: Tensor
    """int32 [num_seqs]: KV length of each sequence, this step's new tokens included."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]: entry i holds the block_size positions from i * block_size."""
    slot_mapping: Tensor
    """int64 [num_tokens]: where each token's key and value go; negative: nowhere."""
    max_query_len: int
    """At least the longest query length of the batch."""
    max_seq_len: int
    """At least the longest `seq_lens`; rows of `block_table` have entries for that many."""
    shared_prefix: SharedPrefix | None = None
    """Blocks that some of the sequences share; None: none, or reading them once does not pay."""
    kept: dict[Hashable, object] | None = field(default=None, repr=False, compare=False)
    """A dict in which a backend may keep results for the other layers of the step: {} from a caller
    whose tensors hold the same values until the step's last call, and whose CUDA graph, if there is
    one, captures the step from its first call on. None: the backend keeps nothing."""
    form: tuple[object, ...] = field(init=False, repr=False, compare=False)
    """The inputs of plans besides the two maxima: the tensors' shapes, strides and device, and
    whether a prefix is shared."""

    def __post_init__(self) -> None:
        num_seqs = self.seq_lens.shape[0] if self.seq_lens.dim() == 1 else -1
        wanted = (
            ("seq_lens", self.seq_lens, torch.int32, (None,)),
            ("query_start_loc", self.query_start_loc, torch.int32, (num_seqs + 1,)),
            ("block_table", self.block_table, torch.int32, (num_seqs, None)),
            ("slot_mapping", self.slot_mapping, torch.int64, (None,)),
        )
        for name, tensor, dtype, shape in wanted:
            require_tensor(name, tensor, dtype=dtype, shape=shape, device=self.seq_lens.device)
        for name, limit in (
            ("max_query_len", self.max_query_len),
            ("max_seq_len", self.max_seq_len),
        ):
            if limit < 0:
                raise InvalidArgumentError(name, "at least 0", str(limit))
        if self.shared_prefix is not None:
            self._check_shared(self.shared_prefix)
        table = self.block_table
        form = (
            self.slot_mapping.shape[0], *table.shape, *table.stride(), table.device,
            self.shared_prefix is None,
        )  # fmt: skip
        object.__setattr__(self, "form", form)

    def _check_shared(self, prefix: SharedPrefix) -> None:
        first, last = prefix.first_seq, prefix.first_seq + prefix.num_seqs
        if not 0 <= first < last <= self.num_seqs:
            wanted = f"sequences of 0 .. {self.num_seqs - 1}"
            raise InvalidArgumentError("shared_prefix", wanted, f"{first} .. {last - 1}")
        if prefix.now is not None:
            require_tensor(
                "shared_prefix.now", prefix.now, dtype=torch.int32, shape=(3,), device=self.device
            )
        if not 0 < prefix.num_tokens < max(1, self.max_seq_len):
            wanted = f"a num_tokens of 1 .. {self.max_seq_len - 1}"
            raise InvalidArgumentError("shared_prefix", wanted, str(prefix.num_tokens))

    @property
    def num_seqs(self) -> int:
        """The number of sequences, padding included."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """The number of query rows, padding included."""
        return self.slot_mapping.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of all four tensors."""
        return self.seq_lens.device


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of a token in its slot of a layer's cache."""

    num_kv_heads: int
    head_dim: int
    """Of a key."""
    value_dim: int
    """Of a value: head_dim, or of a latent at most that."""
    dtype: torch.dtype
    """Of an element as it is stored."""
    is_latent: bool = False
    """One row, whose first `value_dim` numbers are the value; otherwise a key and a value."""

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a token in each tensor of a cache: keys and values, or latents alone. O(1)."""
        key = self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return (key,) if self.is_latent else (key, key)

    def over(
        self,
        tensors: Sequence[Tensor],
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> "KVCache":
        """Return the cache in this layout over these tensors, as many as `row_bytes`. O(1).

        Latents have one scale, `k_scale`.

        Raises:
            InvalidArgumentError: they are not `[num_blocks, block_size, num_kv_heads, head_dim]`.
        """
        k, *others = tensors
        if self.is_latent:
            return KVCache(k, k[..., : self.value_dim], k_scale, k_scale, is_latent=True)
        return KVCache(k, others[0], k_scale, v_scale)


@dataclass(frozen=True, slots=True)
class KVCache:
    """A layer's keys and values as they lie in memory; made once, given in every call.

    Its tensors keep their shapes, strides and places as long as it is used. A kernel that reads `k`
    and `v` serves both layouts; of latents it may read each row once.

    Raises:
        InvalidArgumentError: the tensors do not make a cache.
    """

    k: Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]."""
    v: Tensor
    """Like `k`; of latents the first `value_dim` numbers of its rows, in the same memory."""
    k_scale: Tensor | None = None
    """float32 [1] or [num_kv_heads], finite and above 0, of a quantised cache alone; None: 1."""
    v_scale: Tensor | None = None
    """Likewise; of latents the same as `k_scale`."""
    is_latent: bool = field(default=False, kw_only=True)
    form: int = field(init=False, repr=False, compare=False)
    """Equal for caches that look alike, down to whether they begin on 16 bytes."""

    def __post_init__(self) -> None:
        self.check()
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        loose = (self.k.data_ptr() | self.v.data_ptr()) & 15
        form = (*map(_form, tensors), self.is_latent, loose)
        object.__setattr__(self, "form", _number(form))

    def check(self) -> None:
        """Raise unless the tensors make a cache; they may have changed since. O(1).

        Raises:
            InvalidArgumentError: with the tensor's name, what was wanted and what came.
        """
        k, v, shape = self.k, self.v, (None, None, None, None)
        require_tensor("cache.k", k, shape=shape)
        wanted = tuple(k.shape)
        if self.is_latent:
            self._check_latent()
            wanted = (*wanted[:3], v.shape[3])
        require_tensor("cache.v", v, dtype=k.dtype, shape=wanted, device=k.device)
        if 0 in k.shape or 0 in v.shape:
            raise InvalidArgumentError("cache.k", "no empty dimension", f"shape {list(k.shape)}")
        if self.k_scale is not None or self.v_scale is not None:
            for name, scale in (("cache.k_scale", self.k_scale), ("cache.v_scale", self.v_scale)):
                if scale is not None:
                    _check_scale(name, scale, k)

    def _check_latent(self) -> None:
        k, v = self.k, self.v
        require_tensor("cache.v", v, shape=(None, None, None, None))
        if k.shape[2] != 1:
            raise InvalidArgumentError("cache.k", "one KV head of latents", f"{k.shape[2]}")
        if v.shape[3] > k.shape[3] or v.data_ptr() != k.data_ptr() or v.stride() != k.stride():
            raise InvalidArgumentError("cache.v", "the first numbers of cache.k's rows", "others")
        if self.k_scale is not self.v_scale:
            raise InvalidArgumentError("cache.v_scale", "cache.k_scale, of latents", "another one")

    @property
    def layout(self) -> KVLayout:
        """The layout of a token in its slot. O(1)."""
        heads, size = self.k.shape[2:]
        return KVLayout(heads, size, self.v.shape[3], self.k.dtype, self.is_latent)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory of the cache, as `KVLayout.over` takes it. O(1)."""
        return (self.k,) if self.is_latent else (self.k, self.v)


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """The constants of a layer's attention: logit = scale * q.k, capped, of the keys it sees.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    scale: float
    """Finite."""
    window: int | None = None
    """Keys a query sees, itself included; None: all."""
    soft_cap: float | None = None
    """Finite and above 0: logit = cap * tanh(logit / cap); None: no cap."""
    sinks: Tensor | None = None
    """[num_q_heads], any floating dtype: one more logit a head, in the denominator alone."""
    batch_invariant: bool = False
    """A sequence's rows are bitwise what they are in any other batch that gives it as many query
    tokens; slower where the batch is small."""
    form: int = field(init=False, repr=False, compare=False)
    """Equal for terms that are alike but for the values of their numbers."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise InvalidArgumentError("terms.scale", "a finite number", str(self.scale))
        if self.window is not None and self.window < 1:
            raise InvalidArgumentError("terms.window", "at least 1, or None", str(self.window))
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0):
            wanted = "a finite number above 0, or None"
            raise InvalidArgumentError("terms.soft_cap", wanted, str(self.soft_cap))
        if self.sinks is not None:
            require_tensor("terms.sinks", self.sinks, shape=(None,))
            if not self.sinks.is_floating_point():
                came = str(self.sinks.dtype)
                raise InvalidArgumentError("terms.sinks", "a floating dtype", came)
        form = (
            self.window is None, self.soft_cap is None, _form(self.sinks), self.batch_invariant,
            self.scale > 0, self.scale < 0,
        )  # fmt: skip
        object.__setattr__(self, "form", _number(form))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The limits of a backend; a launcher refuses calls beyond them with `UnsupportedError`."""

    dtypes: tuple[torch.dtype, ...]
    """Of query, key and value, which agree, and of a cache that holds them as they are."""
    max_head_dim: int
    max_group_size: int
    """Query heads a KV head at most."""
    features: frozenset[str] = frozenset({"window", "soft_cap", "sinks"})
    """Those of `AttentionTerms` beside the scale that are honoured; also "batch_invariant"."""
    quantised: tuple[torch.dtype, ...] = ()
    """Dtypes of caches that hold scaled values, for any of `dtypes`."""
    shared_prefix_worth: tuple[int, int, int] | None = None
    """The smallest `SharedPrefix` that pays: sequences, bytes of a layer that need not be read
    again, and further bytes for each sequence; None: it never pays."""
    max_latent_dim: int = 0
    """Numbers of a latent at most, under any number of query heads; 0: it has no such caches."""
    state_dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes of recurrent states, for rows of any of `dtypes`; empty: it has no operations on
    states. If there are any, the backend is a `StateBackend`."""
    max_state_dim: int = 0
    """The two dimensions of a head's state at most."""
    max_index_dim: int = 0
    """Numbers of an index key at most, under any number of index heads; 0: it has no index. If it
    has one, the backend is a `SparseBackend`."""
    max_chosen: int = 0
    """Tokens at most that a query chooses."""


@dataclass(frozen=True, slots=True)
class IndexCall:
    """The calls of one layer to a backend for its index."""

    num_heads: int
    cache: KVCache
    """Of index keys."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The calls of one layer to a backend, for which `warmup` compiles."""

    num_q_heads: int
    dtype: torch.dtype
    """Of query, key and value, which come without gaps."""
    cache: KVCache
    """The layer's own, or one of the same shapes, strides and dtype."""
    terms: AttentionTerms
    shared_prefix: bool = False
    """True if batches may have a `shared_prefix`."""
    num_chosen: int = 0
    """Tokens that a query attends to at most, where it attends to chosen ones; 0: to all."""
    index: IndexCall | None = None
    """The calls for the layer's index; None: it has no index."""


@runtime_checkable
class Backend(Protocol):
    """The operations. Tensors live on `device`; on a GPU a call returns before it is done."""

    @property
    def name(self) -> str:
        """The name by which a caller asks for the backend."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The dtypes, sizes and features that the backend supports."""
        ...

    def store_kv(
        self, key: Tensor, value: Tensor | None, cache: KVCache, slot_mapping: Tensor
    ) -> None:
        """Write each token's key and value into its slot; negative slots are skipped.

        Args:
            key: [num_tokens, num_kv_heads, head_dim], the dtype of the cache unless that is
                quantised.
            value: like `key`; of latents None, because it is part of the key.
            cache: written.
            slot_mapping: int64 [num_tokens]; no slot twice.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,
        cache: KVCache,
        batch: PagedBatch,
        terms: AttentionTerms,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention of every query row over the cached keys of its sequence.

        Decode, prefill and chunked prefill, mixed at will.

        Args:
            query: [num_tokens, num_q_heads, head_dim], the dtype of the cache unless that is
                quantised; then at most 65504 in size, because a backend may take it in float16.
            cache: read.
            batch: the places of the keys.
            terms: the constants of the layer's attention.
            out: [num_tokens, num_q_heads, value_dim], the dtype of `query`, written and returned.
                Rows past `query_start_loc[-1]` are left as they are; where the backend allocates,
                they hold anything.
        """
        ...

    def copy_blocks(self, caches: Sequence[Tensor], copies: Tensor) -> None:
        """Copy whole blocks inside each cache.

        Args:
            caches: tensors [num_blocks, ...] of any one shape each.
            copies: int64 [num_copies, 2] of (src, dst); no dst twice, and none is also a src.
        """
        ...

    def move_blocks(
        self,
        caches: Sequence[Tensor],
        host: Tensor,
        moves: Tensor,
        sums: Tensor,
        *,
        to_host: bool,
    ) -> None:
        """Copy whole blocks from every cache to host memory, or back, and sum their bytes.

        A block of host memory holds one block of each cache, one behind the other.

        Args:
            caches: tensors [num_blocks, ...] of any one shape each.
            host: uint8 [num_host_blocks, bytes of a block of all caches] in host memory; for a GPU
                it has to be page-locked.
            moves: int64 [num_moves, 2] of (block id, block id in host memory), on the CPU; no
                target twice.
            sums: int64 [num_moves], written: `oracle.block_sum` of each block that was moved.
            to_host: whether blocks are copied to host memory; otherwise they come from it.
        """
        ...

    def compute_slot_mapping(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        out: Tensor,
    ) -> None:
        """Compute the slots of the step's new tokens; the rest of `out` becomes -1.

        The new tokens are the last of each sequence.

        Args:
            query_start_loc: int32 [num_seqs + 1].
            seq_lens: int32 [num_seqs].
            block_table: int32 [num_seqs, max_blocks].
            block_size: tokens a block.
            out: int64 [at least query_start_loc[-1]], written.
        """
        ...

    def warmup(self, layers: Sequence[LayerCall], *, max_num_seqs: int, max_query_len: int) -> None:
        """Compile what calls of these layers need, so that none of them waits for a compiler.

        For batches of up to `max_num_seqs` sequences of up to `max_query_len` query tokens, in
        tensors aligned to 16 bytes. Takes seconds to minutes, less where compiled kernels are found
        on disk. Leaves every byte of the caches as it is.

        Layers need not be known: without any, a backend may start, beside other work, what a call
        with layers will need. O(1).
        """
        ...


def require_tensor(
    name: str,
    tensor: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int | None, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise unless the tensor has this dtype, shape and device, and rows without gaps. O(1).

    A size of None is any size.

    Raises:
        InvalidArgumentError: with the argument's name, what was wanted and what came.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidArgumentError(name, "a tensor", type(tensor).__name__)
    if dtype is not None and tensor.dtype != dtype:
        raise InvalidArgumentError(name, str(dtype), str(tensor.dtype))
    found = tensor.shape
    if shape is not None and found != shape and not _fits(found, shape):
        text = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise InvalidArgumentError(name, f"shape {text}", f"shape {list(found)}")
    if device is not None and tensor.device != device:
        raise InvalidArgumentError(name, f"device {device}", f"device {tensor.device}")
    if found and found[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidArgumentError(
            name, "a contiguous last dimension", f"stride {tensor.stride(-1)} there"
        )


def _check_scale(name: str, scale: Tensor, cache: Tensor) -> None:
    if cache.dtype.itemsize != 1:
        raise InvalidArgumentError(name, f"None beside a cache of {cache.dtype}", "a value")
    require_tensor(name, scale, dtype=torch.float32, shape=(None,), device=cache.device)
    if scale.shape[0] not in (1, cache.shape[2]):
        came = f"shape {list(scale.shape)}"
        raise InvalidArgumentError(name, f"shape [1] or [{cache.shape[2]}]", came)


def _fits(found: Sequence[int], wanted: tuple[int | None, ...]) -> bool:
    if len(found) != len(wanted):
        return False
    for want, size in zip(wanted, found, strict=True):  # a loop: this runs in every call
        if want is not None and size != want:
            return False
    return True
