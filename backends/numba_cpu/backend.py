"""The CPU backend's face: its name, its limits, and each operation's launcher.

Holds the worker threads and the plans of calls that were seen, nothing of any caller: one instance
serves every caller of a process.
"""

from collections.abc import Sequence
from functools import lru_cache

import numba
import torch
from torch import Tensor

from backends.contract import AttentionTerms, Capabilities, KVCache, LayerCall, PagedBatch
from backends.errors import BackendUnavailableError
from backends.numba_cpu.copy_blocks import copy_blocks
from backends.numba_cpu.launch import Plans, Workers
from backends.numba_cpu.move_blocks import move_blocks
from backends.numba_cpu.paged_attention import AttentionPlan, paged_attention
from backends.numba_cpu.slot_mapping import compute_slot_mapping
from backends.numba_cpu.sparse.attend_chosen import attend_chosen
from backends.numba_cpu.sparse.choose_tokens import choose_tokens
from backends.numba_cpu.sparse.score_index import score_index
from backends.numba_cpu.state.linear_attention import StatePlan, linear_attention_step
from backends.numba_cpu.state.short_conv import short_conv_step
from backends.numba_cpu.store_kv import StorePlan, store_kv
from backends.numba_cpu.warm_up import warm_up
from backends.states import LinearAttentionTerms, ShortConvTerms, StateBatch


class NumbaBackend:
    """A backend of serial numba kernels over slices of the work, in threads."""

    __slots__ = (
        "_attention_plans", "_conv_plans", "_sparse_plans", "_state_plans", "_store_plans",
        "_workers",
    )  # fmt: skip

    name = "numba"
    device = torch.device("cpu")
    capabilities = Capabilities(
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        max_head_dim=1 << 16,
        max_group_size=1 << 16,
        features=frozenset({"window", "soft_cap", "sinks", "batch_invariant"}),
        quantised=(torch.float8_e4m3fn,),
        max_latent_dim=1 << 16,
        state_dtypes=(torch.float32, torch.bfloat16, torch.float16),
        max_state_dim=1 << 16,
        max_index_dim=1 << 16,
        max_chosen=1 << 30,
    )
    """Three dtypes and e4m3 caches; the kernels set no limit to sizes."""

    def __init__(self) -> None:
        self._workers = Workers()
        self._store_plans = Plans[StorePlan]()
        self._attention_plans = Plans[AttentionPlan]()
        self._conv_plans = Plans[bool]()
        self._state_plans = Plans[StatePlan]()
        self._sparse_plans = Plans[bool]()

    def store_kv(
        self, key: Tensor, value: Tensor | None, cache: KVCache, slot_mapping: Tensor
    ) -> None:
        """Write each token's key and value into its slot; negative slots are skipped."""
        store_kv(self, self._workers, self._store_plans, key, value, cache, slot_mapping)

    def paged_attention(
        self,
        query: Tensor,
        cache: KVCache,
        batch: PagedBatch,
        terms: AttentionTerms,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention of every query row over the cached keys of its sequence."""
        return paged_attention(
            self, self._workers, self._attention_plans, query, cache, batch, terms, out
        )

    def copy_blocks(self, caches: Sequence[Tensor], copies: Tensor) -> None:
        """Copy whole blocks inside each cache."""
        copy_blocks(self, self._workers, caches, copies)

    def move_blocks(
        self, caches: Sequence[Tensor], host: Tensor, moves: Tensor, sums: Tensor, *, to_host: bool
    ) -> None:
        """Copy whole blocks between the caches and host memory, and sum each."""
        move_blocks(self, self._workers, caches, host, moves, sums, to_host=to_host)

    def compute_slot_mapping(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        out: Tensor,
    ) -> None:
        """Compute the slots of the step's new tokens; the rest of `out` becomes -1."""
        compute_slot_mapping(self, query_start_loc, seq_lens, block_table, block_size, out)

    def short_conv_step(
        self,
        x: Tensor,
        state: Tensor,
        batch: StateBatch,
        terms: ShortConvTerms,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Convolve each sequence's new tokens with the inputs before them."""
        return short_conv_step(self, self._workers, self._conv_plans, x, state, batch, terms, out)

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
        """Decay the state, add key and value, read it with the query; token after token."""
        rows = (query, key, value, decay, beta)
        return linear_attention_step(
            self, self._workers, self._state_plans, rows, state, batch, terms, out
        )

    def score_index(
        self, query: Tensor, weights: Tensor, cache: KVCache, batch: PagedBatch,
        first_row: int, out: Tensor,
    ) -> None:  # fmt: skip
        """Score the tokens that some rows see: `out[i, p]` of row `first_row + i`, position p."""
        score_index(
            self, self._workers, self._sparse_plans, query, weights, cache, batch, first_row, out
        )

    def choose_tokens(self, scores: Tensor, batch: PagedBatch, first_row: int, out: Tensor) -> None:
        """Write the positions of each row's highest scores, in ascending order, then -1."""
        choose_tokens(self, self._workers, self._sparse_plans, scores, batch, first_row, out)

    def attend_chosen(
        self,
        query: Tensor,
        cache: KVCache,
        batch: PagedBatch,
        chosen: Tensor,
        terms: AttentionTerms,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of every query row over its chosen tokens."""
        return attend_chosen(self, query, cache, batch, chosen, terms, out)

    def warmup(self, layers: Sequence[LayerCall], *, max_num_seqs: int, max_query_len: int) -> None:
        """Compile the kernels that calls of these layers need, for any number of tokens."""
        _ = max_num_seqs, max_query_len  # no kernel here depends on a size
        warm_up(self, layers)


@lru_cache(maxsize=1)
def load() -> NumbaBackend:
    """The process's CPU backend; compiles nothing yet.

    Raises:
        BackendUnavailableError: numba is configured to compile nothing (NUMBA_DISABLE_JIT).
    """
    if getattr(numba.config, "DISABLE_JIT", False):
        raise BackendUnavailableError(
            "numba", "NUMBA_DISABLE_JIT is set", "unset it before Python starts"
        )
    return NumbaBackend()
