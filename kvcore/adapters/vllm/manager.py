"""vLLM's `KVCacheManager`, kept by kvcore: the verbs that vLLM's scheduler calls.

Decides what each verb is in kvcore's words, and when a sequence is brought up to date: kvcore is
asked where a block is taken, filled or given back, and told the tokens then; between those nothing
is counted twice, because nothing is counted here. It imports nothing of vLLM.

Invariants: a request that runs has an open sequence, whose tokens are a prefix of the request's.
What is computed in this step can be hit in this step, as in vLLM: attention writes before it reads,
and vLLM runs every step that it schedules. A block that a window lets go of is handed out when the
step that reads it has been processed, never before.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from types import SimpleNamespace
from typing import Any, Protocol

from kvcore import (
    Event,
    EventsLost,
    FullAttention,
    HashAlgorithm,
    InvalidArgumentError,
    KVCacheManager,
    KVSequence,
    LayerGroup,
    Lease,
    OutOfBlocksError,
    RecurrentState,
)
from kvcore.adapters.vllm.blocks import Blocks, BlockView, Ids, PoolFace
from kvcore.adapters.vllm.lookahead import look_ahead, shifted
from kvcore.adapters.vllm.prompts import (
    BytesOf,
    Prompt,
    Request,
    describe,
    feature_items,
    packed_of,
)


class CacheStats(Protocol):
    """The part of `vllm.v1.metrics.stats.PrefixCacheStats` that is used."""

    reset: bool

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:  # noqa: FBT001
        """Count a look-up."""


class Collector(Protocol):
    """The part of `vllm.v1.core.kv_cache_metrics.KVCacheMetricsCollector` that is used."""

    def on_block_allocated(self, block: BlockView) -> None:
        """Note that a block was handed out."""

    def on_block_accessed(self, block: BlockView) -> None:
        """Note that a block was hit."""

    def on_block_evicted(self, block: BlockView) -> None:
        """Note that a block's content is gone."""

    def reset(self) -> None:
        """Forget everything."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an engine's manager.

    Attributes:
        num_blocks: blocks in the cache, the null block included.
        groups: the layer groups, block sizes filled in; of recurrent states the last.
        places: for each of vLLM's groups its place among the groups of kvcore; each piece of a
            state is a group of vLLM's.
        specs: vLLM's own descriptions of its groups.
        caps: for each group with attention the most blocks that a request counts for when it is
            admitted, if less than its length says.
        max_model_len: tokens.
        enable_caching: look prefixes up, and keep them.
        recompute: the last tokens of a cached prefix, which a request computes again because a
            draft model needs the tokens after them.
        lookahead: the tokens after a block that a prompt must have too to hit it, because a draft
            model computed the KV from them.
        hash_block_size: the tokens of vLLM's own block hashes, where a request has them.
        watermark_blocks: blocks that stay free when a request is admitted beside others.
        event_hashes: the hash function of KV events; None: no events.
        keep_fresh: note which blocks are handed out, for those who clear them.
        bytes_of: how embeddings become bytes.
        new_stats: makes an empty count of look-ups; None: nothing is counted.
        spell: turns kvcore's events into vLLM's.
        collector: hears of a sample of blocks.
    """

    num_blocks: int
    groups: tuple[LayerGroup, ...]
    places: tuple[int, ...]
    specs: tuple[Any, ...]
    caps: tuple[int | None, ...]
    max_model_len: int
    enable_caching: bool = True
    recompute: int = 0
    lookahead: int = 0
    hash_block_size: int = 1
    watermark_blocks: int = 0
    event_hashes: HashAlgorithm | None = None
    keep_fresh: bool = False
    bytes_of: BytesOf = bytes
    new_stats: Callable[[], CacheStats] | None = None
    spell: Callable[[Iterable[Event]], list[Any]] = list
    collector: Collector | None = None


class Manager:
    """Keeps the KV cache of one vLLM engine in a `kvcore.KVCacheManager`, for vLLM 0.32 and 0.33.

    The names and signatures of its methods are vLLM's; what they mean is said there.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        groups = settings.groups
        sizes = [one.block_size for one in groups if not isinstance(one, RecurrentState)]
        self.kv = KVCacheManager(
            settings.num_blocks,
            gcd(*sizes),
            groups=groups,
            enable_caching=settings.enable_caching,
            record_events=settings.event_hashes,
        )
        _ = self.kv.pool.blocks  # makes all of them now, as vLLM does, and none within a step
        self._is_plain = len(groups) == 1 and isinstance(groups[0], FullAttention)
        self._size = sizes[0]
        self._ahead = settings.lookahead
        self._common = lcm(*sizes)
        self._running: dict[str, KVSequence] = {}
        self._flying: dict[str, deque[tuple[int, Lease]]] = {}
        self._found: dict[str, KVSequence] = {}
        self._admitted: dict[str, Blocks] = {}
        self._prompts: dict[str, Prompt] = {}
        self._fresh: list[int] = []
        self._num_noted: dict[KVSequence, int] = {}
        self.prefix_cache_stats = settings.new_stats and settings.new_stats()
        self.enable_caching = settings.enable_caching
        self.log_stats = settings.new_stats is not None
        self.max_model_len = settings.max_model_len
        self.num_kv_cache_groups = len(settings.places)
        self.empty_kv_cache_blocks = Blocks(((),) * len(settings.places))
        self.block_pool = PoolFace(self.kv, settings.hash_block_size)
        self.kv_cache_config = SimpleNamespace(num_blocks=settings.num_blocks)
        self._hashed_group = next(
            (place for place, one in enumerate(groups) if isinstance(one, FullAttention)), 0
        )
        self.coordinator = SimpleNamespace(
            enable_partial_hash_hits=False,
            full_attention_group_id=settings.places.index(self._hashed_group),
            single_type_managers=[
                SimpleNamespace(
                    block_size=sizes[place] if place < len(sizes) else self._common,
                    kv_cache_spec=spec,
                    block_pool=self.block_pool,
                )
                for place, spec in zip(settings.places, settings.specs, strict=True)
            ],
        )
        self.mamba_shared_prefix_checkpoint = False

    # Prefixes.

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Say whether a prefix is looked up for a request."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Blocks, int, int]:
        """Find a request's longest cached prefix, and hold it until the step is scheduled.

        Args:
            request: the request.
            max_cache_hit_length: the most tokens that may be hits; None: all but the last.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        request_id = request.request_id
        self._let_go(request_id)
        seq = self._open(request, skip_reading=False)
        if max_cache_hit_length is not None and seq.num_cached_tokens > max_cache_hit_length:
            self.kv.close(seq)
            seq = self._open_shorter(request, max_cache_hit_length)
        self._found[request_id] = seq
        if not seq.num_cached_tokens:
            return self.empty_kv_cache_blocks, 0, 0
        return self._blocks_of(seq), seq.num_cached_tokens, 0

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count what a request that is admitted has found."""
        if self.prefix_cache_stats is None or not self.prefix_cache_lookup_enabled(request):
            return
        self.prefix_cache_stats.record(request.num_tokens, num_hits, request.num_preemptions > 0)

    def make_prefix_cache_stats(self) -> CacheStats | None:
        """Return what was counted since the last call."""
        stats = self.prefix_cache_stats
        self.prefix_cache_stats = self.settings.new_stats and self.settings.new_stats()
        return stats

    def estimate_cached_tokens(self, request: Request) -> int:
        """Return how many of a request's tokens others can hit now."""
        seq = self._running.get(request.request_id)
        if seq is None or not self.enable_caching:
            return 0
        return seq.num_computed_tokens - seq.num_computed_tokens % self._common

    # Blocks.

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Blocks | None = None,  # noqa: ARG002  # its sequence holds them
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,  # noqa: ARG002, FBT001, FBT002  # of connectors
        num_encoder_tokens: int = 0,  # noqa: ARG002  # of cross attention
        full_sequence_must_fit: bool = False,  # noqa: FBT001, FBT002
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,  # noqa: FBT001, FBT002
        skip_zeroing_group_ids: tuple[int, ...] = (),  # noqa: ARG002  # of connectors
    ) -> Blocks | None:
        """Make room for a step's tokens; None: too few blocks are free."""
        seq = self._running.get(request.request_id)
        appended: Blocks | None = self.empty_kv_cache_blocks
        if seq is not None and self._is_plain:
            total = request.num_computed_tokens + num_new_tokens
            room = min(total + num_lookahead_tokens, self.max_model_len)
            if room > len(seq.tables[0].blocks) * self._size:
                appended = self._grow(seq, room, self._spare(request, reserved_blocks))
            if appended is not None and total >= seq.num_computed_tokens + self._size:
                self._settle(seq, request, min(total, request.num_tokens))
            return appended
        if num_external_computed_tokens or num_new_tokens + num_new_computed_tokens == 0:
            raise InvalidArgumentError(
                "wanted tokens to compute and none of a connector, got "
                f"num_new_tokens={num_new_tokens}, "
                f"num_external_computed_tokens={num_external_computed_tokens}"
            )
        spare = self._spare(request, reserved_blocks, alone=not has_scheduled_reqs)
        if seq is not None:
            return self._go_on(seq, request, num_new_tokens, num_lookahead_tokens, spare)
        seq = self._admissible(request, num_new_computed_tokens)
        total = num_new_computed_tokens + num_new_tokens
        room = min(total + num_lookahead_tokens, self.max_model_len)
        appended = None
        if self._can_begin(seq) and (
            not full_sequence_must_fit or self._fits(seq, request, spare - reserved_blocks)
        ):
            appended = self._grow(seq, room, spare)
        if appended is None:
            self.kv.close(seq)
        else:
            self._admit(seq, request, total)
        return appended

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let others hit what is computed, now that its tokens are known."""
        seq = self._running.get(request.request_id)
        if seq is None:
            return
        if not self._is_plain:
            self._settle(seq, request, min(num_computed_tokens, self._processed(request)))
        elif num_computed_tokens >= seq.num_computed_tokens + self._size:
            self._settle(seq, request, min(num_computed_tokens, request.num_tokens))

    def free(self, request: Request) -> None:
        """End what a request has, whatever it has; what it published can be hit."""
        request_id = request.request_id
        self._let_go(request_id)
        self._prompts.pop(request_id, None)
        self._admitted.pop(request_id, None)
        seq = self._running.pop(request_id, None)
        if seq is None:
            return
        if not self._is_plain:
            stop = self._processed(request)
            if stop - stop % self.kv.block_size > seq.num_computed_tokens:
                self._settle(seq, request, stop)
        for _, lease in self._flying.pop(request_id, ()):
            lease.end()
        self._num_noted.pop(seq, None)
        self.kv.close(seq)

    def pop_blocks_for_free(self, request: Request) -> list[Lease]:
        """End a request whose blocks a step in flight may write: `free_blocks` gives them back."""
        seq = self._running.get(request.request_id)
        leases = [] if seq is None else [self.kv.lease(seq, "step")]
        while flying := self._flying.get(request.request_id):
            leases.append(flying.pop()[1])
        self.free(request)
        return leases

    def get_blocks(self, request_id: str) -> Blocks:
        """Return all blocks of a request, as the step that is being scheduled needs them."""
        if request_id in self._admitted:
            return self._admitted[request_id]
        seq = self._running.get(request_id)
        return self.empty_kv_cache_blocks if seq is None else self._blocks_of(seq)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of all blocks of a request."""
        return self.get_blocks(request_id).get_block_ids() or ()

    @property
    def usage(self) -> float:
        """Which part of the blocks is held, from 0 to 1."""
        return self.block_pool.get_usage()

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached, unless a request holds some of it: False."""
        self._let_all_go()
        if self.kv.num_free_blocks != self.kv.num_usable_blocks:
            return False
        self.kv.reset()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        if self.settings.collector is not None:
            self.settings.collector.reset()
        return True

    # Steps.

    def new_step_starts(self) -> None:
        """Let go of what was found for requests that were not admitted after all."""
        if self._found:
            self._let_all_go()
        self._admitted.clear()

    def take_new_block_ids(self) -> list[int]:
        """Return the blocks that were handed out since the last call, for those who clear them."""
        if self._found:
            self._let_all_go()
        self._admitted.clear()
        fresh, self._fresh = self._fresh, []
        return fresh

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return no copies: a block is hit whole."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return none: they are of connectors."""
        return {}

    def take_events(self) -> list[Any]:
        """Return what was stored and removed since the last call, as vLLM says it.

        Where too much has happened to be kept, all that is cached is told anew.
        """
        if self.kv.events is None:
            return []
        events = self.kv.events.take()
        if events and isinstance(events[0], EventsLost):
            events = (events[0], *self.kv.snapshot().stored)
        return self.settings.spell(events)

    # Inside.

    def _open(self, request: Request, *, skip_reading: bool) -> KVSequence:
        prompt = self._prompt_of(request)
        packed = prompt.packed
        if self._ahead:
            packed = packed + array("I", [0])  # what is told last is never a hit
        seq = self.kv.open(
            packed,
            namespace=prompt.namespace,
            items=prompt.items,
            resumed=request.num_preemptions > 0,
            skip_reading=skip_reading,
            recompute=self.settings.recompute,
        )
        if self._ahead:
            self.kv.truncate(seq, len(prompt.packed))
        return seq

    def _open_shorter(self, request: Request, num_tokens: int) -> KVSequence:
        """Open a request with no more than `num_tokens` hits.

        Of one with images or recurrent states nothing is hit: what is looked up ends with a prompt.
        """
        prompt = self._prompt_of(request)
        if prompt.items or isinstance(self.settings.groups[-1], RecurrentState):
            return self._open(request, skip_reading=True)
        seq = self.kv.open(
            prompt.packed[: num_tokens + 1],
            namespace=prompt.namespace,
            resumed=request.num_preemptions > 0,
            recompute=self.settings.recompute,
        )
        if rest := prompt.packed[num_tokens + 1 :]:
            self.kv.extend(seq, rest)
        return seq

    def _prompt_of(self, request: Request) -> Prompt:
        """Return what kvcore is told of a request."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or len(prompt.packed) != self._num_told(request):
            prompt = describe(request, self.kv.block_size, self.settings.bytes_of)
            if self._ahead:
                prompt = look_ahead(prompt, self._ahead)
            self._prompts[request.request_id] = prompt
        return prompt

    def _num_told(self, request: Request) -> int:
        """Return how many tokens of a request kvcore may be told: what follows them is known."""
        return max(0, request.num_tokens - self._ahead)

    def _can_begin(self, seq: KVSequence) -> bool:  # noqa: ARG002  # other kinds of groups may not
        """Say whether a request can begin in this step with what it has found."""
        return True

    def _admissible(self, request: Request, num_cached_tokens: int) -> KVSequence:
        """Return a new sequence that has all that was found, or nothing of it."""
        seq = self._found.pop(request.request_id, None)
        if seq is not None and (
            seq.num_tokens != self._num_told(request)
            or (seq.num_computed_tokens and not num_cached_tokens)
        ):
            self.kv.close(seq)
            seq = None
        if seq is None:
            seq = self._open(request, skip_reading=not num_cached_tokens)
        found = seq.num_computed_tokens
        if found != num_cached_tokens:
            self.kv.close(seq)
            raise InvalidArgumentError(
                f"num_new_computed_tokens: wanted the {found} that are found for "
                f"{request.request_id}, or 0, got {num_cached_tokens}"
            )
        return seq

    def _admit(self, seq: KVSequence, request: Request, total: int) -> None:
        """Let a request run whose first step is computed up to `total`."""
        self._running[request.request_id] = seq
        self._prompts.pop(request.request_id, None)
        if self.settings.collector is not None:
            self._note_hits(seq, self.settings.collector)
        if not self._is_plain:  # this step needs what a window lets go of after it
            self._admitted[request.request_id] = self._blocks_of(seq, total)
        self._publish(seq, request, total)

    def _go_on(
        self, seq: KVSequence, request: Request, num_tokens: int, num_lookahead: int, spare: int
    ) -> Blocks | None:
        """Make room for a running request that has windows."""
        self._settle(seq, request, self._processed(request))
        self._land(request)
        total = request.num_computed_tokens + num_tokens
        room = min(total + num_lookahead, self.max_model_len)
        appended: Blocks | None = self.empty_kv_cache_blocks
        for table in seq.tables:
            if room > len(table.blocks) * table.block_size:
                appended = self._grow(seq, room, spare)
                break
        if appended is not None and num_tokens > 1:
            self._publish(seq, request, total)
        return appended

    def _land(self, request: Request) -> None:
        """End the leases of the steps that are over."""
        processed = self._processed(request)
        flying = self._flying.get(request.request_id)
        while flying and flying[0][0] <= processed:
            flying.popleft()[1].end()

    def _publish(self, seq: KVSequence, request: Request, total: int) -> None:
        """Let others hit what this step computes; what only this step sees is held by a lease."""
        stop = min(total, request.num_tokens)
        passed = [
            block
            for table in seq.tables
            if table.forgets
            for block in table.before(table.first_kept(stop))
        ]
        if passed:
            flying = self._flying.setdefault(request.request_id, deque())
            flying.append((stop, self.kv.leases.begin(passed, "step", "", None)))
        self._settle(seq, request, stop)

    def _settle(self, seq: KVSequence, request: Request, stop: int) -> None:
        """Tell kvcore that the first `stop` tokens are known and computed.

        Without windows only whole blocks matter.
        """
        if self._ahead:
            stop = self._proven(request, stop)
        if self._is_plain:
            stop -= stop % self._size
        self._extend(seq, request, stop)
        if stop > seq.num_computed_tokens:
            self.kv.commit(seq, stop - seq.num_computed_tokens)
        if request.block_hashes and self.enable_caching:
            self._note_hashes(seq, request.block_hashes)

    def _proven(self, request: Request, stop: int) -> int:
        """Return up to where the KV of a draft model is final, of the first `stop` tokens.

        It is written from the tokens after it: those of the next chunk write the last ones again.
        The last token of a streamed input may be discarded, so it is told only with a whole block.
        """
        stop = max(0, min(stop - self._ahead + 1, self._num_told(request)))
        return stop - stop % self.kv.block_size if request.resumable else stop

    def _note_hashes(self, seq: KVSequence, hashes: Sequence[bytes]) -> None:
        """Remember the blocks of the contents that vLLM has hashed. O(blocks not noted before)."""
        table = seq.tables[self._hashed_group]
        step = table.block_size // self.settings.hash_block_size
        whole = min(seq.num_computed_tokens // table.block_size, len(hashes) // step)
        for place in range(self._num_noted.get(seq, 0), whole):
            self.block_pool.note(hashes[(place + 1) * step - 1], table.blocks[place])
        self._num_noted[seq] = whole

    def _extend(self, seq: KVSequence, request: Request, stop: int) -> None:
        """Tell kvcore the first `stop` tokens, which are known."""
        known, ahead = seq.num_tokens, self._ahead
        if stop > known:
            first, features = known + ahead, request.mm_features
            if features and any(feature.mm_position.offset >= first for feature in features):
                tokens = packed_of(request.all_token_ids[first:])  # a next turn, with images
                items = shifted(feature_items(features, first), ahead)
                self.kv.extend(seq, tokens, items=items)
            elif stop == known + 1:
                self.kv.append(seq, request.all_token_ids[first])
            else:
                self.kv.extend(seq, request.all_token_ids[first : stop + ahead])

    def _processed(self, request: Request) -> int:
        """Return how many tokens the steps that are over have computed, of those that are known."""
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        return min(computed, request.num_tokens)

    def _spare(self, request: Request, reserved: int, *, alone: bool = False) -> int:
        """Return how many blocks have to stay free."""
        watermark = self.settings.watermark_blocks
        return reserved if not watermark or alone or _runs(request) else reserved + watermark

    def _fits(self, seq: KVSequence, request: Request, spare: int) -> bool:
        """Say whether all tokens of a request fit, as the admission of vLLM counts them."""
        length = min(request.num_tokens, self.max_model_len)
        missing = spare
        for table, cap in zip(seq.tables, self.settings.caps, strict=True):
            blocks = -(-length // table.block_size)
            if cap is not None:
                blocks = min(blocks, cap)
            missing += max(0, blocks - len(table.blocks))
        if seq.state is not None:
            missing += seq.state.num_missing()
        while missing > self.kv.num_free_blocks:
            if not self._make_room():
                return False
        return True

    def _grow(self, seq: KVSequence, room: int, spare: int) -> Blocks | None:
        """Reserve blocks for the first tokens; None: too few blocks are free."""
        if spare:
            missing = self.kv.num_missing_blocks(seq, max(0, room - seq.num_computed_tokens))
            if missing + spare > self.kv.num_free_blocks:
                return self._grow(seq, room, spare) if self._make_room() else None
        try:
            ids = self.kv.reserve_to(seq, room)
        except OutOfBlocksError:
            return self._grow(seq, room, spare) if self._make_room() else None
        if self.settings.keep_fresh or self.settings.collector is not None:
            self._note_fresh(ids, len(seq.tables))
        return self._appended(seq, ids, room)

    def _appended(self, seq: KVSequence, ids: Ids, total: int) -> Blocks:  # noqa: ARG002
        """Return the blocks that a step with room for `total` tokens appends to the tables."""
        return Blocks(ids)

    def _note_fresh(self, ids: Ids, num_tables: int) -> None:
        collector = self.settings.collector
        for number, group in enumerate(ids):
            if self.settings.keep_fresh and number < num_tables:  # a worker clears no states
                self._fresh += group
            if collector is not None:
                for block in map(BlockView, group):
                    collector.on_block_evicted(block)
                    collector.on_block_allocated(block)

    @staticmethod
    def _note_hits(seq: KVSequence, collector: Collector) -> None:
        for table in seq.tables:
            hits = table.block_ids[table.num_null : seq.num_cached_tokens // table.block_size]
            for block in map(BlockView, hits):
                collector.on_block_accessed(block)

    def _let_go(self, request_id: str) -> None:
        seq = self._found.pop(request_id, None)
        if seq is not None:
            self.kv.close(seq)

    def _make_room(self) -> bool:
        """Give up what no step needs; say whether there was any."""
        return self._let_all_go()

    def _let_all_go(self) -> bool:
        """Close what was found and not admitted; say whether there was any."""
        found = bool(self._found)
        for request_id in list(self._found):
            self._let_go(request_id)
        return found

    def _blocks_of(self, seq: KVSequence, total: int = 0) -> Blocks:  # noqa: ARG002
        """Return the tables of a request; `total`: for a step that ends there."""
        return Blocks(tuple([table.block_ids.tolist() for table in seq.tables]))


class Manager022(Manager):
    """The same for vLLM 0.22: all in which it differs.

    There a step may be handed what the one before reads, because the device runs them in order.
    """

    def get_computed_blocks(  # type: ignore[override]
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Blocks, int]:
        """Find a request's longest cached prefix, and count that it was looked for."""
        blocks, num_hits, _ = super().get_computed_blocks(request, max_cache_hit_length)
        self.record_prefix_cache_stats(request, num_hits)
        return blocks, num_hits

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return how many leading blocks all requests share, for each group.

        The step is scheduled, so requests that run are all that hold a block at a table's begin.
        """
        self._let_all_go()
        running = self._running.values()
        counts: list[int] = []
        for group, table in enumerate(self._running[running_request_id].tables):
            shared = table.blocks
            if table.forgets and any(seq.tables[group].num_null for seq in running):
                shared = []  # and what one has passed, a step in flight may hold
            place = 0
            while place < len(shared) and shared[place].ref_count >= len(running):
                place += 1
            counts.append(place)
        return counts

    def _processed(self, request: Request) -> int:
        return min(request.num_computed_tokens, request.num_tokens)


def _runs(request: Request) -> bool:
    """Say whether vLLM's scheduler has a request among those that run."""
    return bool(request.status.name == "RUNNING")
