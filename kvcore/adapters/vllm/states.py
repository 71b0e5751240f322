"""The manager of networks with recurrent states: Mamba, gated delta nets, short convolutions.

vLLM keeps such states in blocks of the pool, one block of each of its groups for one state, which
kvcore counts as the pieces of one state. A worker of vLLM finds a state by its position in the
block table: the state after `n` tokens is in column `ceil(n / block_size) - 1`. Before a step the
worker copies it to the column of the tokens that the step ends with, unless that is the same
column, and there the step writes the next state (`mamba_cache_mode="align"`). Without prefix
caching there is one column, and each step writes over the state in it.

Invariants: what a step reads at a boundary and does not write stays held until that step is over,
since the worker copies states of the whole batch before it computes any. A state that is written in
a step is hit only from the next step on, for the same reason. Tokens count as computed when their
step is scheduled; a token that is sampled later is an expected one until then. A state that a
request keeps only for its end is dropped before anything that can be hit is evicted for it, and
before any request has to wait or give way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvcore import Block, KVSequence, StateTable
from kvcore.adapters.vllm.blocks import Blocks, Ids
from kvcore.adapters.vllm.manager import Manager, Settings
from kvcore.adapters.vllm.prompts import Request


class StateManager(Manager):
    """A manager whose last layer group keeps recurrent states."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._written: set[int] = set()  # the first blocks of the states that this step writes

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Blocks, int, int]:
        """Find a prefix as every manager does; say too where a state should be kept on the way.

        The third number is the position at which other prompts leave this one, if its state is not
        cached: the scheduler ends a chunk there.
        """
        blocks, num_hits, _ = super().get_computed_blocks(request, max_cache_hit_length)
        seq = self._found.get(request.request_id)
        wanted = [] if seq is None else _state_of(seq).wanted
        return blocks, num_hits, wanted[-2] if len(wanted) > 1 else 0

    def estimate_cached_tokens(self, request: Request) -> int:
        """Return how many of a request's tokens others could hit now, were all states kept."""
        seq = self._running.get(request.request_id)
        if seq is None or not self.enable_caching:
            return 0
        return seq.num_settled_tokens - seq.num_settled_tokens % self._common

    def new_step_starts(self) -> None:
        """Let states be hit that the step before has written."""
        super().new_step_starts()
        self._written.clear()

    def free(self, request: Request) -> None:
        """End what a request has; what it published can be hit, and the state that it has kept."""
        seq = self._running.get(request.request_id)
        if seq is not None:
            self._learn(seq, request)
        super().free(request)

    # Inside.

    def _can_begin(self, seq: KVSequence) -> bool:
        """Say whether the state that a request begins with is there when its step begins."""
        read = _state_of(seq).read
        return not read or read[0].block_id not in self._written

    def _make_room(self) -> bool:
        """Release blocks that no step needs: those of look-ups first, then kept states."""
        if super()._make_room():
            return True
        return any(self.kv.drop_kept_state(seq) for seq in reversed(self._running.values()))

    def _grow(self, seq: KVSequence, room: int, spare: int) -> Blocks | None:
        state, kv = _state_of(seq), self.kv
        need = kv.num_missing_blocks(seq, max(0, room - seq.num_computed_tokens))
        if state.kept and state.kept is state.read and not state.write:
            need += state.group.num_blocks  # the next state leaves this one as it is
        if need > kv.num_free_blocks or any(
            block.node is not None for block in kv.pool.next_blocks(need)
        ):
            kv.drop_kept_state(seq)
            for other in self._running.values():
                kv.drop_kept_state(other)
        return super()._grow(seq, room, spare)

    def _go_on(
        self, seq: KVSequence, request: Request, num_tokens: int, num_lookahead: int, spare: int
    ) -> Blocks | None:
        self._learn(seq, request)
        self._land(request)
        total = request.num_computed_tokens + num_tokens
        appended = self._grow(seq, min(total + num_lookahead, self.max_model_len), spare)
        if appended is not None:
            self._publish(seq, request, total)
        return appended

    def _publish(self, seq: KVSequence, request: Request, total: int) -> None:
        """Count the tokens of this step as computed; what only this step reads is held."""
        state = _state_of(seq)
        passed = [] if state.read is state.write else state.read[:]
        self._hold(seq, request, min(total, request.num_tokens), total, passed)
        self._settle(seq, request, total)
        self._written.update(block.block_id for block in state.read[:1])

    def _hold(
        self, seq: KVSequence, request: Request, settled: int, total: int, passed: list[Block]
    ) -> None:
        """Hold blocks until the step that ends with token `total` is over.

        Those of `passed`, and those that windows let go of once `settled` tokens are settled.
        """
        for table in seq.tables:
            if table.forgets:
                passed += table.before(table.first_kept(settled))
        if passed:
            flying = self._flying.setdefault(request.request_id, deque())
            flying.append((total, self.kv.leases.begin(passed, "step", "", None)))

    def _settle(self, seq: KVSequence, request: Request, stop: int) -> None:
        """Tell kvcore that the first `stop` tokens are computed, those that are known by id."""
        self._learn(seq, request)
        if stop > seq.num_computed_tokens:
            self._extend(seq, request, min(stop, request.num_tokens))
            self.kv.expect(seq, max(0, stop - seq.num_tokens))
            self.kv.commit(seq, stop - seq.num_computed_tokens)

    def _learn(self, seq: KVSequence, request: Request) -> None:
        """Tell kvcore the ids of expected tokens that have been sampled since."""
        known = len(seq.packed)
        count = min(request.num_tokens - known, seq.num_unknown_tokens)
        if count > 0:  # the step that computes the last of them may be in flight
            computed = seq.num_computed_tokens
            self._hold(seq, request, min(computed, known + count), computed, [])
            self.kv.resolve(seq, request.all_token_ids[known : known + count])

    def _blocks_of(self, seq: KVSequence, total: int = 0) -> Blocks:
        """Return a request's tables, with columns for the state after `total` tokens if more."""
        state, computed = _state_of(seq), seq.num_computed_tokens
        ids: list[list[int]] = [table.block_ids.tolist() for table in seq.tables]
        columns = self._columns(computed)
        for piece in range(state.group.num_blocks):
            column = [0] * columns
            if state.read:
                column[-1] = state.read[piece].block_id
            ids.append(column)
        if total > computed:
            new = self._appended_states(state, computed, total)
            ids[len(seq.tables) :] = [
                old + more for old, more in zip(ids[len(seq.tables) :], new, strict=True)
            ]
        return self._in_order(ids)

    def _appended(self, seq: KVSequence, ids: Ids, total: int) -> Blocks:
        """Return what a step appends to the tables: blocks of KV, and columns of states."""
        new = self._appended_states(_state_of(seq), seq.num_computed_tokens, total)
        return self._in_order([*ids[: len(seq.tables)], *new])

    def _appended_states(self, state: StateTable, computed: int, total: int) -> list[list[int]]:
        """Return for each piece of a state the columns from its old place to its new one."""
        count = self._columns(total) - self._columns(computed)
        if count <= 0:
            return [[] for _ in range(state.group.num_blocks)]
        return [[*[0] * (count - 1), block.block_id] for block in state.write]

    def _columns(self, num_tokens: int) -> int:
        """Return the length of a table of states after this number of tokens."""
        return -(-num_tokens // self._common) if self.enable_caching else min(num_tokens, 1)

    def _in_order(self, ids: Sequence[Sequence[int]]) -> Blocks:
        """Return tables in the order of vLLM's groups."""
        return Blocks([ids[place] for place in self.settings.places])


def _state_of(seq: KVSequence) -> StateTable:
    state = seq.state
    if state is None:
        raise TypeError("wanted a sequence with recurrent states")
    return state
