"""The face's side: an engine that is several replicas, for all that answers clients.

It has the interface of an asynchronous engine. A prompt is cut into tokens here, because a replica
is chosen by them; text is made in the replicas.

Decides: what becomes of a request whose replica is lost: it is sent again if nothing of it has
come yet, and fails else.

Invariants: it belongs to one event loop. A refusal is raised before the first token. Every stream
ends: with its last token, or by an error.

Does not know: HTTP, how a replica is chosen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from model.async_engine import (
    EngineFaultError,
    EngineState,
    Health,
    NotServingError,
    Observer,
    Unobserved,
)
from model.cluster.config import ClusterConfig
from model.cluster.sent import Facts, Message, Piece, Refusal, Sent
from model.control.request import FinishReason, Request
from model.control.submission import Submission
from model.errors import InvalidArgumentError, ModelError
from model.token_stream import Sample, TokenStream

if TYPE_CHECKING:  # torch is loaded on a thread, when the face has begun
    from model.load.loader import TextCodec

_LONG_TEXT = 4096  # characters; what is longer is cut into tokens on a thread of its own
_LOST = (RayError, RayServeException, ConnectionError)
_TRIES, _PAUSE_S = 10, 1.0  # asking the replicas what they are, before that is an error


class ReplicaLostError(EngineFaultError):
    """The replica that worked on a request is gone."""


@dataclass(frozen=True, slots=True)
class _Model:
    codec: TextCodec


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the engine in every replica, as an engine has it."""

    model: _Model
    facts: Facts

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.facts.max_model_len


class _Told:
    """A text that was made elsewhere."""

    is_stopped = False

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, token: int) -> None:
        """Nothing: its text comes by itself."""

    def tell(self, text: str) -> None:
        self._pieces.append(text)

    def take(self) -> str:
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)

    def close(self) -> None:
        """Nothing: what is final was told."""


class ReplicatedEngine(Collector):
    """Replicas as one engine, for the event loop that starts it.

    Args:
        replicas: a handle of Ray Serve's.
        load_codec: reads the tokenizer.
        config: how long to wait, how often to try again.
    """

    def __init__(
        self,
        replicas: Any,  # noqa: ANN401  # Ray has no types
        load_codec: Callable[[], TextCodec],
        config: ClusterConfig,
    ) -> None:
        self.observer: Observer = Unobserved()
        self.config = config
        self.calls = replicas.options(method_name="generate", stream=True)
        self._facts = replicas.options(method_name="facts")
        self._load_codec = load_codec
        self._state = EngineState.STARTING
        self._fault: str | None = None
        self._known: _Known | None = None
        self._starting: asyncio.Task[None] | None = None
        self._open: dict[TokenStream, list[_Call]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_id = 0
        self.num_sent = self.num_again = self.decision_ns = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0

    @property
    def health(self) -> Health:
        """How it is. O(1)."""
        return Health(self._state, 0, self._fault)

    @property
    def engine(self) -> _Known:
        """What is known of the engine in every replica. O(1).

        Raises:
            NotServingError: nothing yet.
        """
        if self._known is None:
            raise NotServingError(f"engine: wanted one that is there, it is {self._state.value}")
        return self._known

    def start(self) -> None:
        """Ask a replica what there is to know; requests are taken then. O(1)."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._learn())

    async def ready(self) -> None:
        """Wait until requests are taken.

        Raises:
            Exception: what there is to know cannot be had.
        """
        self.start()
        if self._starting is not None:
            await asyncio.shield(self._starting)

    async def stop(self) -> None:
        """End everything."""
        self._state = EngineState.STOPPED
        for stream in list(self._open):
            stream.close()
        if self._starting is not None:
            self._starting.cancel()

    async def submit(self, *asked: Submission) -> TokenStream:
        """Send all that is asked, each prompt to a replica of its own, or none of it.

        Returns:
            What comes of it, to be closed; the samples of the first prompt have the first numbers.

        Raises:
            InvalidArgumentError: as an engine says of one of them.
            QueueFullError: too many wait at a replica.
            NotServingError: no replica takes requests now.
            ReplicaLostError: it was lost as often as it was tried.
        """
        arrived_s = time.perf_counter()
        if not asked:
            raise InvalidArgumentError("prompt: wanted at least one, got none")
        if self._state is not EngineState.READY:
            raise NotServingError(f"engine: wanted one that serves, it is {self._state.value}")
        calls = self._calls_of(await self._encode(asked), arrived_s)
        stream = TokenStream(self._abort, [one for call in calls for one in call.samples])
        try:
            async with asyncio.TaskGroup() as group:
                for call in calls:
                    group.create_task(call.begin())
        except BaseException as error:  # noqa: BLE001  # a cancelled wait too
            for call in calls:
                call.end()
            raise _cause(error) from None
        self._open[stream] = calls
        for call in calls:
            task = asyncio.get_running_loop().create_task(call.pump(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    def _calls_of(self, asked: Sequence[Submission], arrived_s: float) -> list[_Call]:
        calls, count = [], 0
        for one in asked:
            samples, texts = [], []
            for number in range(one.num_samples):
                prompt: Sequence[int] = one.prompt  # type: ignore[assignment]  # it is tokens
                request = Request(self._next_id, prompt, one.params, sample=number)
                texts.append(_Told())
                samples.append(Sample(count, request, texts[-1], arrived_s))
                self._next_id += 1
                count += 1
            calls.append(_Call(self, Sent(one), samples, texts))
        return calls

    def closed(self, stream: TokenStream) -> None:
        """A stream has come to its end. O(1)."""
        self._open.pop(stream, None)

    def collect(self) -> Iterator[Metric]:
        """What Prometheus is told."""
        ready = GaugeMetricFamily("kvcore:engine_ready", "1 while requests are taken.")
        ready.add_metric([], self._state is EngineState.READY)
        yield ready
        for name, says, value in (
            ("router_requests", "Requests that were sent to a replica.", self.num_sent),
            ("router_requests_again", "Those whose replica was lost before.", self.num_again),
            (
                "router_decision_seconds",
                "The processor's, for all choices.",
                self.decision_ns / 1e9,
            ),
            ("prompt_tokens", "Tokens of prompts that were begun.", self.num_prompt_tokens),
            ("prompt_tokens_cached", "Those found in a cache.", self.num_cached_tokens),
        ):
            counter = CounterMetricFamily(f"kvcore:{name}", says)
            counter.add_metric([], value)
            yield counter

    def _abort(self, stream: TokenStream) -> None:
        calls = self._open.pop(stream, None)
        if calls is None:
            return
        for call in calls:
            call.end()
            call.finish(FinishReason.ABORTED)
        stream.end(NotServingError("request: it was aborted"))

    async def _learn(self) -> None:
        try:
            codec = await asyncio.to_thread(self._load_codec)
            facts = await self._ask_facts()
        except Exception as error:
            self._fault = f"{type(error).__name__}: {error}"
            self._state = EngineState.STOPPED
            raise
        self._known = _Known(_Model(codec), facts)
        self._state = EngineState.READY

    async def _ask_facts(self) -> Facts:
        """What a replica says, of those that are not lost meanwhile."""
        num_left = _TRIES
        while True:
            try:
                facts: Facts = await self._facts.remote()
            except _LOST:
                num_left -= 1
                if not num_left:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                return facts

    async def _encode(self, asked: Sequence[Submission]) -> list[Submission]:
        encode = self.engine.model.codec.encode

        def encode_all() -> list[Submission]:
            return [
                replace(one, prompt=encode(one.prompt)) if isinstance(one.prompt, str) else one
                for one in asked
            ]

        if sum(len(one.prompt) for one in asked if isinstance(one.prompt, str)) <= _LONG_TEXT:
            return encode_all()
        return await asyncio.to_thread(encode_all)


class _Call:
    """One prompt at a replica.

    Attributes:
        samples: what comes of it.
        is_taken: whether a replica works on it.
    """

    def __init__(
        self, engine: ReplicatedEngine, sent: Sent, samples: list[Sample], texts: list[_Told]
    ) -> None:
        self._engine = engine
        self._sent = sent
        self.samples = samples
        self.is_taken = False
        self._texts = texts
        self._coming: Any = None
        self._num_left = engine.config.retries
        self._has_begun = False
        self._is_over = False

    async def begin(self) -> None:
        """Send it until a replica takes it.

        Raises:
            ModelError: what the replica says, or that there is none.
        """
        while True:
            self._check_wanted()
            try:
                async with asyncio.timeout(self._engine.config.replica_timeout_s):
                    self._engine.num_sent += 1
                    # Of its own, not of the client's request: Ray's routers tell what waits in
                    # them apart by that, so of several prompts of one request one would be lost.
                    self._coming = Context().run(self._engine.calls.remote, self._sent)
                    first: Message = await anext(self._coming)
                self._engine.decision_ns += self._sent.decision_ns
            except TimeoutError:
                self.end()
                raise NotServingError("engine: no replica takes requests now") from None
            except (*_LOST, StopAsyncIteration) as error:
                self._check_wanted()
                self._again(error)
                continue
            self._check_wanted()
            if not isinstance(first, Refusal):
                self.is_taken = True
                return
            if not isinstance(first.error, NotServingError):
                self._sent.end()
                raise first.error
            self._again(first.error)

    async def pump(self, stream: TokenStream) -> None:
        """Hand on what comes, to the end."""
        try:
            while True:
                try:
                    async for piece in self._pieces():
                        self._hand_on(stream, piece)
                    break
                except _LOST as error:
                    if self._is_over:
                        return
                    if self._has_begun:
                        raise ReplicaLostError(
                            "the replica that worked on the request was lost"
                        ) from error
                    self._again(error)
                    await self.begin()
            if any(sample.finish_reason is None for sample in self.samples):
                raise ReplicaLostError("the replica did not finish the request")
        except ModelError as error:
            self.finish(FinishReason.ERROR)
            stream.end(error)
        finally:
            self._sent.end()
            if all(sample.finish_reason is not None for sample in stream.samples):
                self._engine.closed(stream)

    def _check_wanted(self) -> None:
        """Raise where nobody wants it any more; what was sent meanwhile is called back."""
        if self._is_over:
            self.end()
            raise NotServingError("request: it was aborted")

    def end(self) -> None:
        """Want no more of it. O(1)."""
        self._is_over = True
        self._sent.give_up()
        if self._coming is not None:
            self._coming.cancel()

    def finish(self, reason: FinishReason) -> None:
        """Its samples that have not ended do so, for this reason. O(samples)."""
        for sample in self.samples:
            if sample.finish_reason is None:
                sample.finish_reason = reason
                self._engine.observer.sample_ended(sample)

    async def _pieces(self) -> AsyncIterator[Piece]:
        """What comes, until it is over.

        Raises:
            ModelError: what the replica says.
        """
        async for message in self._coming:
            if isinstance(message, Refusal):
                raise message.error
            if isinstance(message, Piece):
                yield message

    def _hand_on(self, stream: TokenStream, piece: Piece) -> None:
        delta, now_s = piece.delta, time.perf_counter()
        sample = self.samples[delta.sample]
        if self._is_over or sample.finish_reason is not None:
            return
        if not self._has_begun:
            self._has_begun = True
            self._sent.has_begun()
            for one in self.samples:
                one.request.num_cached_tokens = piece.num_cached
            self._engine.num_prompt_tokens += sample.request.num_prompt_tokens
            self._engine.num_cached_tokens += piece.num_cached
        self._texts[delta.sample].tell(delta.text)
        before_s, is_first = sample.last_s, not sample.tokens
        sample.add(delta.tokens, delta.finish_reason, now_s, delta.error)
        for nth in range(len(delta.tokens)):  # of several the first has waited
            waited_s = 0.0 if nth else now_s - before_s
            self._engine.observer.token_came(waited_s, is_first=is_first and not nth)
        if delta.finish_reason is not None:
            self._engine.observer.sample_ended(sample)
        stream.tell(sample)

    def _again(self, error: Exception) -> None:
        """Let it be tried once more.

        Raises:
            ModelError: it was tried often enough.
        """
        self._sent.end()
        self._engine.num_again += 1
        self._num_left -= 1
        if self._num_left < 0:
            if isinstance(error, ModelError):
                raise error
            raise ReplicaLostError("the replicas that took the request were lost") from error


def _cause(error: BaseException) -> BaseException:
    """What to raise of what tasks together raised: what a replica says, if one says something."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    return next((one for one in error.exceptions if isinstance(one, ModelError)), error)
