"""Speculative decoding with a draft model: a second, smaller network guesses the next tokens.

Each request that decodes has a follower: a sequence of the same tokens in the draft model's own
caches, under its own manager. The draft tokens of a step take one pass each; the first pass also
computes what the request has got since, and each further one computes the token that the previous
one has drawn, on the device, without the host reading it. A draft is drawn as the real token will
be, with the request's own parameters and the same random number for the same place of the output:
where both networks agree on the distribution, they draw the same token.

Decides: what a follower computes before it can guess. All tokens of the request come first, at most
a step's budget per step, so a long prompt gets drafts some steps late; a shared prefix is found in
the prefix cache, or waited for while another follower computes it. Without free blocks or positions
there are no drafts.

Invariants: a draft is never committed before it is a token of its request, so a rejected one is
never found in the prefix cache and truncation removes it; a request that is not running has no
follower; every rank makes the same drafts as rank 0.

Does not know: how many drafts a request may have, which are accepted, the first network.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

import kvcore
from model.caches.swap import BlockMover
from model.control.config import EngineConfig
from model.control.request import Request
from model.control.step import Chunk, Flight, Step, Unwatched
from model.forward.network import PagedNetwork
from model.forward.sanitized import SanitizedBackend
from model.forward.step_runner import StepRunner
from model.forward.warm_up import Prepared, prepare_network
from model.load.loader import LoadedModel
from model.sample.grammars import Grammars
from model.sample.request_sampler import RequestSampler


@dataclass(slots=True)
class _Follower:
    """The draft model's side of a request.

    Attributes:
        request: of the first network.
        own: the same tokens and parameters, with the sequence in the draft model's cache.
        num_drafts: unverified tokens at its end; all but the last are in the cache, none is
            committed.
    """

    request: Request
    own: Request
    num_drafts: int = 0


class DraftModel:
    """Drafts tokens by running another network; a `Drafter`.

    Args:
        model: the first one, with its draft model.
        network: of the draft model; its caches are allocated.
        config: of the engine.
        beside: another one of the same network, which has run nothing yet.
    """

    def __init__(
        self,
        model: LoadedModel,
        network: PagedNetwork,
        config: EngineConfig,
        *,
        beside: "DraftModel | None" = None,
    ) -> None:
        self.network = network
        self._config = config
        own = model.draft or model
        edges = [own.max_positions, None if network.rope is None else network.rope.num_tokens]
        self._max_positions = min([edge for edge in edges if edge is not None], default=None)
        self._kv = kvcore.KVCacheManager(
            network.num_blocks,
            config.block_size,
            groups=network.layout.groups(config.block_size),
            enable_caching=config.enable_prefix_caching,
        )
        size = network.vocab_size
        grammars = Grammars(lambda: None, size, frozenset(), config)  # such requests get no drafts
        self._sampler = RequestSampler(size, network.device, config.seed, grammars, model.ranks)
        watch: object = network.backend
        self._passes = StepRunner(
            network,
            BlockMover(network.backend, network.caches),
            self._sampler,
            max_sampled=config.max_num_seqs,
            is_async=True,
            sanitizer=watch if isinstance(watch, SanitizedBackend) and beside is None else None,
            drawn=None if beside is None else beside.drawn,
        )
        self._followers: dict[int, _Follower | None] = {}  # None: no drafts any more
        self._watch = Unwatched()

    @property
    def drawn(self) -> Tensor:
        """The tokens that the last pass has drawn, see `StepRunner.drawn`. O(1)."""
        return self._passes.drawn

    @property
    def kv(self) -> kvcore.KVCacheManager:
        """The manager of the draft model's cache. O(1)."""
        return self._kv

    def prepare(self) -> Prepared:
        """Trace, compile and capture the network as configured; see `prepare_network`.

        Raises:
            InvalidArgumentError: no memory is left for the graphs.
        """
        prepared = prepare_network(
            self.network, self._config, self._passes.drawn, self._max_positions
        )
        self.use(prepared)
        return prepared

    def use(self, prepared: Prepared) -> None:
        """Run as prepared from now on. O(1)."""
        self._passes.use(prepared)

    def empty_cache(self, *, enable_caching: bool) -> None:
        """Forget all cached prefixes, and set whether new ones are cached. O(contents).

        Args:
            enable_caching: see `enable_prefix_caching` of the configuration; from now on.
        """
        self._kv.reset()
        self._kv.enable_caching = enable_caching

    def discard(self, request: Request) -> None:
        """Forget a request that has ended. O(blocks of its follower)."""
        self._leave(self._followers.pop(request.request_id, None))

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Sequence[int]]:
        """Return draft tokens for each request, up to its number.

        At most as many passes as one request wants draft tokens.
        """
        for follower in list(self._followers.values()):
            if follower is not None and follower.request.sequence is None:
                self.discard(follower.request)
        most_of = {request.request_id: self._reachable(request, most) for request, most in wanted}
        followers = [
            follower
            for request, _ in wanted
            if most_of[request.request_id] and (follower := self._following(request)) is not None
        ]
        chunks, ready = self._plan(followers, most_of)
        drafts: dict[int, list[int]] = {}
        if chunks:
            found = self._run(chunks, [(one.own, most_of[one.own.request_id]) for one in ready])
            drafts = self._settle(ready, found)
        return [drafts.get(request.request_id, ()) for request, _ in wanted]

    def _reachable(self, request: Request, most: int) -> int:
        """Return the most drafts that have positions: all but the last one are computed."""
        if self._max_positions is None:
            return most
        return max(0, min(most, self._max_positions - request.num_tokens + 1))

    def _following(self, request: Request) -> _Follower | None:
        """Return the follower of a request, with the same tokens; None: no drafts now."""
        number = request.request_id
        if number in self._followers:
            follower = self._followers[number]
            if follower is not None:
                self._catch_up(follower)
            return follower
        sequence = self._kv.open(request.tokens, namespace=request.namespace)
        if self._is_prefix_in_flight(request, sequence.num_computed_tokens):
            self._kv.close(sequence)
            return None
        own = Request(
            number,
            request.prompt_tokens,
            replace(request.params, logprobs=None),
            sample=request.sample,
            namespace=request.namespace,
        )
        own.start(sequence)
        self._followers[number] = follower = _Follower(request, own)
        return follower

    def _is_prefix_in_flight(self, request: Request, num_cached_tokens: int) -> bool:
        """Return True if another follower will compute the next block that this one could hit."""
        end = num_cached_tokens + self._kv.block_size
        if not self._kv.enable_caching or end >= request.num_tokens:
            return False
        prefix = request.tokens[:end]
        return any(
            other.own.num_computed_tokens < end
            and other.request.namespace == request.namespace
            and other.request.tokens[:end] == prefix
            for other in self._followers.values()
            if other is not None
        )

    def _catch_up(self, follower: _Follower) -> None:
        """Take the tokens of the request; drafts that were accepted are computed already."""
        sequence, tokens = follower.own.running_sequence, follower.request.tokens
        begin = sequence.num_tokens - follower.num_drafts
        drafts = sequence.packed[begin:]
        held = 0
        for draft, token in zip(drafts, tokens[begin : begin + len(drafts)], strict=False):
            if draft != token:
                break
            held += 1
        computed = min(held, follower.num_drafts - 1)
        if computed > 0:
            self._kv.commit(sequence, computed)
        if follower.num_drafts:
            self._kv.truncate(sequence, begin + held)
            follower.num_drafts = 0
        if sequence.num_tokens < len(tokens):
            self._kv.extend(sequence, tokens[sequence.num_tokens :])

    def _plan(
        self, followers: Sequence[_Follower], most_of: dict[int, int]
    ) -> tuple[list[Chunk], list[_Follower]]:
        """Plan the first pass, and reserve for all; return it and the followers that can guess."""
        budget = self._config.max_num_batched_tokens
        chunks: list[Chunk] = []
        ready: list[_Follower] = []
        # Followers that are up to date come first, so that a long prompt does not delay them.
        for follower in sorted(followers, key=lambda one: one.own.num_uncomputed_tokens > 2):
            own = follower.own
            left = own.num_uncomputed_tokens
            count = min(left, budget)
            is_ready = count == left
            room = count + (most_of[own.request_id] - 1) * is_ready
            if not count:
                continue
            if not self._kv.can_reserve(own.running_sequence, room):
                self.discard(follower.request)  # its computed blocks stay in the prefix cache
                continue
            self._kv.reserve(own.running_sequence, room)
            budget -= count
            chunks.append(Chunk(own, own.num_computed_tokens, count, is_ready))
            if is_ready:
                ready.append(follower)
        return chunks, ready

    def _run(self, chunks: Sequence[Chunk], asking: Sequence[tuple[Request, int]]) -> list[Flight]:
        """Compute the plan, then the drawn tokens: a pass for each draft token that is wanted."""
        sampling = tuple([own for own, _ in asking])
        flights = [self._passes.send(Step(tuple(chunks)), sampling, None, self._watch)]
        sequences = [chunk.request.running_sequence for chunk in chunks]
        self._kv.step(
            sequences,
            [chunk.num_tokens for chunk in chunks],
            num_known=0,
            num_expected=[int(chunk.samples) for chunk in chunks],
            num_reserved=0,
        )
        while sampling := tuple([own for own, most in asking if most > len(flights)]):
            if len(flights) > 1:  # of three passes the first is done: its buffers are free
                flights[-2].read()
            following = [Chunk(own, own.num_tokens - 1, 1, samples=True) for own in sampling]
            step = Step(tuple(following))
            flights.append(self._passes.send(step, sampling, flights[-1], self._watch))
            for own in sampling:
                self._kv.expect(own.running_sequence, 1)
        return flights

    def _settle(
        self, ready: Sequence[_Follower], flights: Sequence[Flight]
    ) -> dict[int, list[int]]:
        """Give the followers their drawn tokens; if logits are NaN, it stops guessing."""
        drawn: dict[int, list[int | None]] = {}
        for flight in flights:
            for number, token in flight.read().items():
                drawn.setdefault(number, []).append(token)
        drafts: dict[int, list[int]] = {}
        for follower in ready:
            number = follower.own.request_id
            tokens = [token for token in drawn[number] if token is not None]
            if len(tokens) < len(drawn[number]):
                self.discard(follower.request)
                self._kv.reset()  # NaN may be in its blocks
                self._followers[number] = None
                continue
            self._kv.resolve(follower.own.running_sequence, tokens)
            follower.num_drafts = len(tokens)
            drafts[number] = tokens
        return drafts

    def _leave(self, follower: _Follower | None) -> None:
        if follower is not None:
            self._kv.close(follower.own.running_sequence)
            self._sampler.discard(follower.own)
