"""One request: its parameters, its state and its output.

Decides: the life of a request (WAITING -> RUNNING -> FINISHED, with any number of detours through
PREEMPTED) and when a sampled token ends it.

Invariants: the tokens are counted in one place: while RUNNING in the sequence, which is held
exactly then, otherwise here; `tokens` is the prompt followed by the output that has been read, and
only ever grows; a finished request has a reason, no copy in host memory, expects no token, and
never changes again.

Does not know: the pool, the other requests, torch, text.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import kvcore
from model.control.bad_words import BadWords
from model.control.images import PromptImages
from model.control.params import SamplingParams
from model.errors import InvalidArgumentError, ModelError, RequestStateError, shown

_MAX_TOKEN_ID = 2**32 - 1
_MAX_EPOCH = 2**63 - 1  # `admission.py` has two for each


class Status(enum.Enum):
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """The reason why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"
    ERROR = "error"


class SampledToken(NamedTuple):
    """A token of a request's output, and its log-probability.

    Attributes:
        token_id: the token.
        logprob: the natural logarithm of its probability in the model's distribution, before
            temperature, penalties, bias and cuts; None: `SamplingParams.logprobs` is None.
        top_logprobs: the most likely tokens with their log-probabilities, the most likely first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class HostCopy:
    """Blocks of a preempted request in host memory.

    Attributes:
        num_tokens: the number of tokens that were computed when they were copied.
        places: for each layer group the entries of its table, from the first to before the second,
            or the blocks of its state; those before them are out of sight, or shared with others
            and expected in the cache.
        payload: the memory itself; `BlockMover` allocates and frees it.
    """

    num_tokens: int
    places: tuple[tuple[int, int], ...]
    payload: object = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks. O(num_groups)."""
        return sum([stop - first for first, stop in self.places])


class Request:
    """A prompt on its way to its completion; the scheduler moves it, the engine reads it.

    Attributes:
        request_id: chosen by the caller, unique among the unfinished requests of a scheduler.
        priority: the lower, the sooner; `priority_span` of the scheduler says how much.
        leader: the first sample of the same prompt, if this is a further one: it waits for the
            leader's prompt to be computed, and shares it.
        sample: the number of this sample of its prompt, from 0.
        namespace: the namespace of its prefix cache.
        retain: the ranges of its tokens that stay in the cache longer than others.
        boundaries: positions at which the states of recurrent layers are wanted.
        client: the client that sent it; clients take turns.
        items: multimodal items of its prompt; a cached prefix is shared only with equal ones.
        images: the images behind the items; None: they are not known here.
        bad_words: the sequences that its output must not have; None: there are none.
        order: the key by which the scheduler sorts, the lower the sooner; set by `Scheduler.add`.
        max_total_tokens: the most tokens it can come to, its prompt included.
        sequence: its blocks and its tokens while RUNNING, otherwise None.
        host_copy: the blocks stored when it was preempted, or None.
        load: holds the blocks to which this step copies the host copy back; None: it does not.
        has_asked_tiers: True if host memory and disk were searched for its KV since it had blocks.
        is_long: True if it runs as a text beyond `SchedulerConfig.long_above`.
        num_cached_tokens: prompt tokens found in the prefix cache at its first admission.
        num_loaded_tokens: tokens that were loaded for it from host memory, disk or a peer.
        tier_marks: `TierManager.marks` of the time when it first got blocks; empty before.
        num_preemptions: the number of times that it lost its blocks to another request.
        error: the error that ended it with `FinishReason.ERROR`, or None.

    Raises:
        InvalidArgumentError: an empty prompt, a token id that is not one, no namespace, something
            else among the retentions, or items that overlap or leave the prompt.
    """

    __slots__ = (
        "_ends",
        "_finish_reason",
        "_is_owed",
        "_status",
        "_tokens",
        "bad_words",
        "boundaries",
        "client",
        "eos_token_ids",
        "error",
        "has_asked_tiers",
        "host_copy",
        "images",
        "is_long",
        "items",
        "leader",
        "load",
        "max_total_tokens",
        "namespace",
        "num_cached_tokens",
        "num_loaded_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "params",
        "priority",
        "prompt_logprobs",
        "request_id",
        "retain",
        "sample",
        "sequence",
        "tier_marks",
    )

    def __init__(
        self,
        request_id: int,
        prompt_tokens: Sequence[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        priority: int = 0,
        client: str | None = None,
        leader: Request | None = None,
        sample: int = 0,
        namespace: kvcore.Namespace = kvcore.DEFAULT_NAMESPACE,
        retain: Sequence[kvcore.Retention] = (),
        boundaries: Sequence[int] = (),
        items: Sequence[kvcore.MultimodalItem] = (),
        images: PromptImages | None = None,
        bad_words: BadWords | None = None,
    ) -> None:
        if len(prompt_tokens) == 0:
            raise InvalidArgumentError("prompt: wanted at least one token, got none")
        self.request_id = request_id
        self.params = params
        self.bad_words = bad_words
        self.eos_token_ids = eos_token_ids
        self._tokens = _packed(prompt_tokens)
        self._is_owed = False
        self.num_prompt_tokens = len(prompt_tokens)
        self.max_total_tokens = len(prompt_tokens) + params.max_tokens
        own = frozenset() if params.ignore_eos else eos_token_ids
        self._ends = own.union(params.stop_token_ids)
        self.priority = priority
        self.client = client
        self.leader = leader
        self.sample = sample
        self.namespace = _checked(namespace)
        self.images = images
        self.items = _checked_items(items if images is None else images.items, len(prompt_tokens))
        self.retain = tuple(retain)
        self.boundaries = tuple(boundaries)
        for one in self.retain:
            if type(one) is not kvcore.Retention:
                raise InvalidArgumentError(f"retain: wanted kvcore.Retention, got {shown(one)}")
        self.order: tuple[float, int] = (0, 0)
        self.sequence: kvcore.KVSequence | None = None
        self.host_copy: HostCopy | None = None
        self.load: kvcore.Lease | None = None
        self.is_long = False
        self.has_asked_tiers = False
        self.num_cached_tokens = 0
        self.num_loaded_tokens = 0
        self.tier_marks: tuple[int, ...] = ()
        self.num_preemptions = 0
        self.error: ModelError | None = None
        self.prompt_logprobs: list[SampledToken] = [] if leader is None else leader.prompt_logprobs
        self._status = Status.WAITING
        self._finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self._status.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens})"
        )

    def shares_prompt_with(self, other: Request) -> bool:
        """Return True if tokens, priority, client, namespace and items are equal. O(prompt)."""
        names = ("tokens", "priority", "client", "namespace", "items")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def status(self) -> Status:
        """The state of the request. O(1)."""
        return self._status

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why it ended; None while it has not. O(1)."""
        return self._finish_reason

    @property
    def is_finished(self) -> bool:
        """True if it has ended. O(1)."""
        return self._status is Status.FINISHED

    @property
    def tokens(self) -> array[int]:
        """The prompt and the output that has been read, packed as uint32; read it. O(1)."""
        return self._tokens if self.sequence is None else self.sequence.packed

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and output, one not read yet included. O(1)."""
        if self.sequence is None:
            return len(self._tokens) + self._is_owed
        return self.sequence.num_tokens

    @property
    def is_expecting(self) -> bool:
        """True if its last token was drawn and has not been read. O(1)."""
        return self._is_owed if self.sequence is None else self.sequence.num_unknown_tokens > 0

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens whose KV is written; 0 unless it runs. O(1)."""
        return 0 if self.sequence is None else self.sequence.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """The number of generated tokens, one not read yet included. O(1)."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_tokens(self) -> list[int]:
        """The generated tokens that have been read, an ending stop token included.

        O(num_output_tokens).
        """
        return self.tokens[self.num_prompt_tokens :].tolist()

    @property
    def is_complete(self) -> bool:
        """True if it has `max_total_tokens` tokens. O(1)."""
        return self.num_tokens == self.max_total_tokens

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end it. O(1)."""
        return self._ends

    @property
    def is_scoring(self) -> bool:
        """True if log-probabilities of its prompt are still to be computed for it. O(1)."""
        return (
            self.params.prompt_logprobs is not None
            and self.leader is None
            and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
        )

    def num_to_score(self, num_tokens: int) -> int:
        """Return how many of its next tokens give log-probabilities of its prompt. O(1)."""
        if not self.is_scoring:
            return 0
        left = self.num_prompt_tokens - 1 - self.num_computed_tokens
        return max(0, min(num_tokens, left))

    def score(self, position: int, tokens: Sequence[SampledToken]) -> None:
        """Record prompt tokens from a position on; known ones stay. O(tokens).

        Raises:
            RequestStateError: tokens before the position are missing.
        """
        num_known = 1 + len(self.prompt_logprobs)  # the first token has no probability
        if position > num_known:
            raise RequestStateError(f"{self!r}: scored from {position}, wanted {num_known}")
        self.prompt_logprobs += tokens[num_known - position :]

    @property
    def longest_whole(self) -> int:
        """The length of its longest image that one step has to compute; 1: none. O(images)."""
        if self.images is None or not self.images.is_whole:
            return 1
        return max(item.length for item in self.items)

    def whole_chunk(self, num_tokens: int) -> int:
        """Return the most next tokens, at most `num_tokens`, that cut no such image. O(images)."""
        start = self.num_computed_tokens
        stop = start + num_tokens
        for item in self.items if self.longest_whole > 1 else ():
            if item.start < stop < item.start + item.length:
                stop = max(start, item.start)
        return stop - start

    @property
    def least_chunk(self) -> int:
        """The fewest next tokens that a chunk can have, because of such an image. O(images)."""
        start = self.num_computed_tokens
        for item in self.items if self.longest_whole > 1 else ():
            if item.start <= start < item.start + item.length:
                return item.start + item.length - start
        return 1

    @property
    def prompt_tokens(self) -> list[int]:
        """The tokens of the prompt. O(num_prompt_tokens)."""
        return self.tokens[: self.num_prompt_tokens].tolist()

    @property
    def is_led(self) -> bool:
        """True if its leader has still to sample from the prompt that both share. O(1)."""
        leader = self.leader
        return leader is not None and not leader.is_finished and leader.num_output_tokens == 0

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of its tokens that are not computed; only while it runs. O(1).

        Raises:
            RequestStateError: it does not run.
        """
        sequence = self.running_sequence
        return sequence.num_tokens - sequence.num_computed_tokens

    def start(self, sequence: kvcore.KVSequence) -> None:
        """Take a sequence and run: WAITING or PREEMPTED -> RUNNING. O(1).

        Raises:
            RequestStateError: it runs already or has finished.
        """
        self._leave(Status.WAITING, Status.PREEMPTED, to=Status.RUNNING)
        if self.num_preemptions == 0:
            self.num_cached_tokens = sequence.num_cached_tokens
        self.sequence = sequence
        self._tokens = array("I")  # they are the sequence's now

    def preempt(self) -> kvcore.KVSequence:
        """Give up the sequence, to be computed again later: RUNNING -> PREEMPTED. O(1).

        Returns:
            The sequence, for the scheduler to close.

        Raises:
            RequestStateError: it does not run.
        """
        sequence = self.running_sequence
        self._leave(Status.RUNNING, to=Status.PREEMPTED)
        self.num_preemptions += 1
        self.has_asked_tiers = False
        self._is_owed = sequence.num_unknown_tokens > 0
        self._take_from(sequence)
        return sequence

    def suspend(self) -> kvcore.KVSequence:
        """Wait again, for KV that is being loaded: RUNNING -> what it was before. O(num_tokens).

        Returns:
            The sequence, for which the KV is loaded.

        Raises:
            RequestStateError: it does not run.
        """
        sequence = self.running_sequence
        before = Status.PREEMPTED if self.num_preemptions else Status.WAITING
        self._leave(Status.RUNNING, to=before)
        self._take_from(sequence)
        return sequence

    def tell(self, token: int) -> None:
        """Set the token that a request expects, where it was preempted meanwhile. O(1).

        Raises:
            RequestStateError: it expects none, or runs: then its sequence is resolved instead.
        """
        if not self._is_owed:
            raise RequestStateError(
                f"{self!r}: `tell` needs a preempted request that expects a token"
            )
        self._tokens.append(token)
        self._is_owed = False

    def ending(self, token: int) -> FinishReason | None:
        """Return the reason why this token, its newest, ends it, or None. O(1).

        This does not finish it: `finish` does, once the scheduler has released the blocks.
        """
        if token in self._ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens == self.max_total_tokens else None

    def ends_by(self, token: int) -> bool:
        """Return True if a token ends it wherever it stands. O(1)."""
        return token in self._ends

    def finish(self, reason: FinishReason) -> kvcore.KVSequence | None:
        """End the request, from any status but FINISHED; what it expects is forgotten. O(1).

        Returns:
            The sequence it held, for the scheduler to close; None if it held none.

        Raises:
            RequestStateError: it has ended already.
        """
        self._leave(Status.WAITING, Status.RUNNING, Status.PREEMPTED, to=Status.FINISHED)
        self._finish_reason = reason
        self.host_copy = None
        self._is_owed = False
        sequence = self.sequence
        if sequence is not None:
            self._take_from(sequence)
        return sequence

    @property
    def running_sequence(self) -> kvcore.KVSequence:
        """The sequence of a running request. O(1).

        Raises:
            RequestStateError: it does not run.
        """
        if self.sequence is None:
            raise RequestStateError(f"{self!r}: only a running request holds a sequence")
        return self.sequence

    def _take_from(self, sequence: kvcore.KVSequence) -> None:
        """Count the tokens here again; the sequence is about to be closed."""
        self._tokens = sequence.packed[:]
        self.sequence = None

    def _leave(self, *allowed: Status, to: Status) -> None:
        if self._status not in allowed:
            raise RequestStateError(f"{self!r}: cannot become {to.value}")
        self._status = to


def _checked(namespace: object) -> kvcore.Namespace:
    if type(namespace) is not kvcore.Namespace:
        raise InvalidArgumentError(f"namespace: wanted a kvcore.Namespace, got {shown(namespace)}")
    if namespace.weight_epoch > _MAX_EPOCH:
        raise InvalidArgumentError(
            f"namespace: wanted a weight_epoch of at most {_MAX_EPOCH}, "
            f"got {namespace.weight_epoch}"
        )
    return namespace


def _checked_items(
    items: Sequence[kvcore.MultimodalItem], num_tokens: int
) -> tuple[kvcore.MultimodalItem, ...]:
    end = 0
    for item in items:
        if type(item) is not kvcore.MultimodalItem:
            raise InvalidArgumentError(f"items: wanted kvcore.MultimodalItem, got {shown(item)}")
        if item.start < end or item.start + item.length > num_tokens:
            raise InvalidArgumentError(
                f"items: wanted them in order, apart and inside the {num_tokens} tokens of the "
                f"prompt, got one at {item.start} of {item.length}"
            )
        end = item.start + item.length
    return tuple(items)


def _packed(tokens: Sequence[int]) -> array[int]:
    for token in tokens:
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise InvalidArgumentError(
                f"prompt: wanted token ids from 0 to {_MAX_TOKEN_ID}, got {token}"
            )
    return array("I", tokens)
