"""Recurrent states: their layout, which of them a step reads and writes, the operations.

The part of the contract for layers that keep one state per sequence instead of a key and a value
per token. Invariants:

- A layer's states are one tensor `[num_slots, ...]`; an index into its first dimension is a state
  slot. A state lies in its slot without gaps; the distance between slots may be larger than a state
  (a page may also hold states of other layers).
- A step reads one state per sequence and writes states to other slots, or to the slot it has read.
  It changes no byte outside the slots it writes, and reads no slot outside those it is given: other
  slots may hold anything, NaN included.
- Computation is in float32 whatever the dtype of rows and states. After each token the state is
  rounded to its dtype, so a call with several tokens computes what calls with one token compute:
  the same bits for up to `EXACT_TOKENS` tokens of a sequence, otherwise within the oracle's error,
  and rows of two bytes may then be multiplied in tf32.
- Rows behind the last sequence's belong to no sequence: whatever they hold, they change no state.

Arguments that all calls of a layer share are one record (`ShortConvTerms`, `LinearAttentionTerms`),
and arguments that all layers of a step share are another (`StateBatch`). Records are checked on
construction. States are copied with `Backend.copy_blocks`, a slot being a block.

Knows nothing of how slots are allocated, published or shared: the caller answers for that.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from backends.contract import Backend, require_tensor
from backends.errors import InvalidArgumentError

NORM_EPSILON = 1e-6
"""Added to the sum of squares of a query or key before the root is taken."""
EXACT_TOKENS = 7
"""Tokens of a sequence for which a call gives the bits of calls with one: drafts change none."""


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The states that one step reads and writes; made once a step and used by every layer.

    Several sequences may read one slot. No slot is written twice, and a slot that a sequence reads
    is written only by that sequence, if at all. Values are the caller's duty.

    Raises:
        InvalidArgumentError: a field has the wrong dtype, shape, device or layout.
    """

    read_slots: Tensor
    """int32 [num_seqs]: the state before each sequence's first token; negative: zeros."""
    write_slots: Tensor
    """int32 [num_seqs]: the slot of the state after its stored tokens; negative: not written."""
    query_start_loc: Tensor | None = None
    """int32 [num_seqs + 1], ascending: sequence s has the rows from its entry to the next. None:
    each sequence has one row. A sequence without rows writes nothing."""
    num_stored: Tensor | None = None
    """int32 [num_seqs]: the number of its rows after which the state is written; the rows behind
    are draft tokens, which continue from that state. None: all of them."""

    def __post_init__(self) -> None:
        reads = self.read_slots
        require_tensor("read_slots", reads, dtype=torch.int32, shape=(None,))
        for name, each, more in (
            ("write_slots", self.write_slots, 0),
            ("query_start_loc", self.query_start_loc, 1),
            ("num_stored", self.num_stored, 0),
        ):
            if each is not None:
                shape = (len(reads) + more,)
                require_tensor(name, each, dtype=torch.int32, shape=shape, device=reads.device)
        if self.num_stored is not None and self.query_start_loc is None:
            raise InvalidArgumentError("num_stored", "None without query_start_loc", "a tensor")

    @property
    def num_seqs(self) -> int:
        """The number of sequences."""
        return self.read_slots.shape[0]


@dataclass(frozen=True, slots=True)
class ShortConvTerms:
    """A causal convolution of each channel over its last `width` tokens.

    Raises:
        InvalidArgumentError: a tensor has the wrong shape.
    """

    weight: Tensor
    """[channels, width], the dtype of the rows; column width - 1 meets the newest token."""
    bias: Tensor | None = None
    """[channels], likewise."""
    silu: bool = False
    """True if the result passes through x * sigmoid(x)."""

    def __post_init__(self) -> None:
        weight = self.weight
        require_tensor("terms.weight", weight, shape=(None, None))
        if weight.shape[1] < 2 or not weight.is_contiguous():
            wanted = "a width of at least 2, without gaps"
            raise InvalidArgumentError("terms.weight", wanted, f"shape {list(weight.shape)}")
        _require_like("terms.bias", self.bias, weight[:, 0])


@dataclass(frozen=True, slots=True)
class DecayGate:
    """Decays from a projection, one a head: `dt * a`, with dt = softplus(x + bias) within `limits`.

    Raises:
        InvalidArgumentError: a tensor has the wrong shape or dtype, or the limits are no range.
    """

    a: Tensor
    """float32 [num_heads], negative."""
    bias: Tensor | None = None
    """float32 [num_heads]."""
    limits: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        require_tensor("terms.gate.a", self.a, dtype=torch.float32, shape=(None,))
        _require_like("terms.gate.bias", self.bias, self.a)
        if not 0 <= self.limits[0] <= self.limits[1]:
            wanted = "a range of numbers from 0 on"
            raise InvalidArgumentError("terms.gate.limits", wanted, str(self.limits))


@dataclass(frozen=True, slots=True)
class LinearAttentionTerms:
    """The constants of a layer of linear attention.

    Gated DeltaNet (arXiv:2412.06464) has the delta rule, norms and a gate; Kimi Delta Attention
    (arXiv:2510.26692) has no gate, its decays are per channel; Mamba2 (arXiv:2405.21060) has a gate
    and a skip: c is the query, b the key and x the value.

    Raises:
        InvalidArgumentError: the scale is not finite, or `skip` has the wrong shape or dtype.
    """

    scale: float
    """Of the query, after its norm."""
    delta_rule: bool
    """True if the value that the key recalls is subtracted from the new one, and the difference is
    weighed by beta."""
    l2norm: bool = False
    """True if query and key are divided by sqrt(sum of squares + NORM_EPSILON)."""
    gate: DecayGate | None = None
    """The gate that turns `decay` into decays; None: `decay` holds decays."""
    skip: Tensor | None = None
    """float32 [num_heads]: the part of the value that is added to the output."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise InvalidArgumentError("terms.scale", "a finite number", str(self.scale))
        if self.skip is not None:
            require_tensor("terms.skip", self.skip, dtype=torch.float32, shape=(None,))


StateTerms = ShortConvTerms | LinearAttentionTerms
LinearRows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""query, key, value, decay, beta of `linear_attention_step`."""


@runtime_checkable
class StateBackend(Backend, Protocol):
    """A backend with operations on states: `Capabilities.state_dtypes` is not empty.

    Bytes moved by each: a state read and one written per sequence.
    """

    def short_conv_step(
        self,
        x: Tensor,
        state: Tensor,
        batch: StateBatch,
        terms: ShortConvTerms,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Convolve each sequence's new tokens with the inputs before them, all rows at once.

            out[t] = f(bias + sum over j of weight[:, j] * input[t - width + 1 + j])

        A state holds the last width - 1 inputs, oldest first, exactly. O(num_tokens * channels *
        width).

        Args:
            x: [num_tokens, channels].
            state: [num_slots, width - 1, channels], the dtype of `x`; written.
            batch: the states that are read and written.
            terms: the weights.
            out: like `x`, written and returned.
        """
        ...

    def linear_attention_step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        state: Tensor,
        batch: StateBatch,
        terms: LinearAttentionTerms,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Decay the state, add key and value, read it with the query; token after token.

            S = exp(decay) * S;  S += key (rate * new)^T;  out = scale * S^T query + skip * value

        With the delta rule `new` is value - S^T key, and the rate is beta. Without it `new` is
        value, and the rate is the gate's dt, or 1 if there is no gate. Key heads serve
        num_heads // num_key_heads consecutive heads each. O(num_tokens * num_heads * key_dim *
        value_dim).

        Args:
            query: [num_tokens, num_key_heads, key_dim].
            key: like `query`.
            value: [num_tokens, num_heads, value_dim], the same dtype.
            decay: float32 [num_tokens, num_heads] or [num_tokens, num_heads, key_dim], at most 0.
                With a gate its input: [num_tokens, num_heads], the dtype of `query`.
            beta: [num_tokens, num_heads], the dtype of `query`; None without the delta rule.
            state: [num_slots, num_heads, key_dim, value_dim]; written.
            batch: the states that are read and written.
            terms: the recurrence and its constants.
            out: like `value`, written and returned.
        """
        ...


def _require_like(name: str, tensor: Tensor | None, like: Tensor) -> None:
    if tensor is not None:
        require_tensor(name, tensor, dtype=like.dtype, shape=like.shape, device=like.device)
