"""The GPU backend's face: its name, its limits, and each operation's launcher."""

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.contract import AttentionTerms, Capabilities, KVCache, LayerCall, PagedBatch
from backends.states import LinearAttentionTerms, ShortConvTerms, StateBatch
from backends.triton_gpu.copy_blocks import copy_blocks
from backends.triton_gpu.decode import cascade
from backends.triton_gpu.move_blocks import move_blocks
from backends.triton_gpu.paged_attention import paged_attention
from backends.triton_gpu.shared.place import Place
from backends.triton_gpu.slot_mapping import compute_slot_mapping
from backends.triton_gpu.sparse.attend_chosen import attend_chosen
from backends.triton_gpu.sparse.choose_tokens import MOST_CHOSEN, choose_tokens
from backends.triton_gpu.sparse.score_index import score_index
from backends.triton_gpu.state.linear_attention import linear_attention_step
from backends.triton_gpu.state.short_conv import short_conv_step
from backends.triton_gpu.store_kv import store_kv
from backends.triton_gpu.warm_up import warm_up


class TritonBackend:
    """Triton kernels on the current CUDA device; see `backends.Backend` for the operations."""

    __slots__ = ("_capabilities", "_place")

    name = "triton"

    def __init__(self, place: Place) -> None:
        self._place = place
        halves = (torch.float16,) if place.interpreting else (torch.float16, torch.bfloat16)
        self._capabilities = Capabilities(
            dtypes=(torch.float32, *halves),
            max_head_dim=256,
            max_group_size=64,
            features=frozenset({"window", "soft_cap", "sinks", "batch_invariant"}),
            quantised=(torch.float8_e4m3fn,),
            shared_prefix_worth=cascade.worth(),
            max_latent_dim=576,
            state_dtypes=(torch.float32, *halves),
            max_state_dim=256,
            max_index_dim=256,
            max_chosen=MOST_CHOSEN,
        )

    @property
    def device(self) -> torch.device:
        """CUDA, or the CPU under the interpreter."""
        return self._place.device

    @property
    def capabilities(self) -> Capabilities:
        """Three dtypes and e4m3 caches; no bfloat16 under the interpreter, which gets it wrong."""
        return self._capabilities

    def store_kv(
        self, key: Tensor, value: Tensor | None, cache: KVCache, slot_mapping: Tensor
    ) -> None:
        """Write each token's key and value into its slot; negative slots are skipped."""
        store_kv(self, self._place, key, value, cache, slot_mapping)

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
        return paged_attention(self, self._place, query, cache, batch, terms, out)

    def copy_blocks(self, caches: Sequence[Tensor], copies: Tensor) -> None:
        """Copy whole blocks inside each cache."""
        copy_blocks(self, self._place, caches, copies)

    def move_blocks(
        self, caches: Sequence[Tensor], host: Tensor, moves: Tensor, sums: Tensor, *, to_host: bool
    ) -> None:
        """Copy whole blocks between the caches and host memory, and sum each."""
        move_blocks(self, self._place, caches, host, moves, sums, to_host=to_host)

    def compute_slot_mapping(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        out: Tensor,
    ) -> None:
        """Compute the slots of the step's new tokens; the rest of `out` becomes -1."""
        compute_slot_mapping(
            self, self._place, query_start_loc, seq_lens, block_table, block_size, out
        )

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
        return short_conv_step(self, self._place, x, state, batch, terms, out)

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
        return linear_attention_step(self, self._place, rows, state, batch, terms, out)

    def score_index(
        self, query: Tensor, weights: Tensor, cache: KVCache, batch: PagedBatch,
        first_row: int, out: Tensor,
    ) -> None:  # fmt: skip
        """Score the tokens that some rows see: `out[i, p]` of row `first_row + i`, position p."""
        score_index(self, self._place, query, weights, cache, batch, first_row, out)

    def choose_tokens(self, scores: Tensor, batch: PagedBatch, first_row: int, out: Tensor) -> None:
        """Write the positions of each row's highest scores, in ascending order, then -1."""
        choose_tokens(self, self._place, scores, batch, first_row, out)

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
        return attend_chosen(self, self._place, query, cache, batch, chosen, terms, out)

    def warmup(self, layers: Sequence[LayerCall], *, max_num_seqs: int, max_query_len: int) -> None:
        """Compile the kernels that calls of these layers need, so that none waits for a compiler.

        Without layers, start what a later call with layers will need. O(1).
        """
        warm_up(TritonBackend, self._place, layers, max_num_seqs, max_query_len)
