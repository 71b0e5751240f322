"""An engine for asyncio: requests from one event loop, tokens to it, the engine on its own thread.

Decides: when the two sides meet. Calls for the engine wait in an inbox that is emptied before
every step, so each is carried out between two steps; an engine without requests waits
there, at most until the next transfer has to be given up. What a step gives crosses to the
loop in one call. An engine that computes takes the interpreter back before the loop is awake, again
and again, so after a first token or an end it waits a moment for the loop to take them. And what a
fault costs: the requests it meets, and no more if the engine still computes a token afterwards.

The loop makes the text when it is taken, so no step waits for it. A stop string is found there; the
request is aborted, and tokens sampled since are dropped: the output is that of the engine alone.

Invariants: one thread touches the engine; everything else here belongs to the loop. A refusal is
raised before the first token. The blocks of a stream that is closed, or dropped by its reader, are
free before the next step. Every stream ends: with its last token, or by an error.

Does not know: HTTP, what a client is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import logging
import queue
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeVar

from model.control.clients import FairLimit
from model.control.params import SamplingParams
from model.control.request import FinishReason, Request, SampledToken
from model.control.submission import Prompt, Submission
from model.errors import InvalidArgumentError, ModelError, RankLostError
from model.host import Host
from model.pace import STREAM_SHARE, Pace
from model.token_stream import Delta, Sample, TokenStream
from model.turns import in_turn

if TYPE_CHECKING:  # torch is not loaded before an engine is made
    from model.engine_core import EngineCore, Output
    from model.sample.grammar_compiler import Compiled

_HAND_OVER_S = 0.002
"""The longest that the engine waits for the loop to take what cannot wait."""

_LET_GO_S = 0.5  # for the engine's thread to end after a loss
_LONG_TEXT = 4096  # characters; a longer text is cut into tokens on another thread
_T = TypeVar("_T")
_U = TypeVar("_U")
_log = logging.getLogger(__name__)


class EngineState(enum.Enum):
    """The state of an asynchronous engine."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    STOPPED = "stopped"


class NotServingError(ModelError):
    """The engine takes no requests now: it starts, drains, or has stopped."""


class QueueFullError(ModelError):
    """The queue is full: the requests that run or wait have reached their limit."""


class EngineFaultError(ModelError):
    """The engine failed while it worked on this request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """The state of an engine.

    Attributes:
        state: the state, which says if it takes requests.
        num_faults: the number of steps that have failed.
        last_fault: the error message of the last one; None: none has failed.
    """

    state: EngineState
    num_faults: int
    last_fault: str | None

    @property
    def is_ready(self) -> bool:
        """True if it takes requests. O(1)."""
        return self.state is EngineState.READY


class Observer(Protocol):
    """An observer that the loop calls as requests proceed; times in seconds."""

    def token_came(self, waited_s: float, *, is_first: bool, count: int = 1) -> None:
        """Record `count` tokens, each `waited_s` after the one before, or the first its request."""
        ...

    def sample_ended(self, sample: Sample) -> None:
        """Record that a sample has its last token, was aborted, or failed."""
        ...


class Announcer(Protocol):
    """A publisher of the engine's cache events, such as `kvcore.wire.Publisher`."""

    def publish(self) -> None:
        """Publish the changes; waits for nothing."""
        ...

    def close(self) -> None:
        """Stop publishing."""
        ...


class Unobserved:
    """An observer that does nothing."""

    def token_came(self, waited_s: float, *, is_first: bool, count: int = 1) -> None:
        """Do nothing. O(1)."""

    def sample_ended(self, sample: Sample) -> None:
        """Do nothing. O(1)."""


class _Command(NamedTuple):
    """A function to run between two steps.

    Attributes:
        run: runs on the engine's thread; returns a function that the loop calls then.
        fail: the loop calls it if `run` raised, or can never run.
    """

    run: Callable[[EngineCore], Callable[[], None]]
    fail: Callable[[Exception], None]


_Given = tuple[int, tuple[SampledToken, ...], FinishReason | None, ModelError | None]
"""request_id, tokens, finish reason, and the error that ended it alone."""


class AsyncEngine:
    """An engine that runs on a thread, for the event loop that starts it.

    Args:
        engine: the engine, or a function that makes one, which is called on the thread.
        max_waiting: the most unfinished samples beyond `max_num_seqs`; above that each client may
            have an equal share of both (`FairLimit`). None: any number.
        stream_share: the most of the loop's time that handing out tokens may take: where many
            streams would take more, several tokens of each go together. A first token and an end
            never wait. 1: no token does.
        observer: is called for every event.
        announce: makes the announcer, on the thread, from the engine and a function that wakes it.
        host: the source of the thread and of the time; None: this process.
    """

    def __init__(
        self,
        engine: EngineCore | Callable[[], EngineCore],
        *,
        max_waiting: int | None = None,
        stream_share: float = STREAM_SHARE,
        observer: Observer | None = None,
        announce: Callable[[EngineCore, Callable[[], None]], Announcer] | None = None,
        host: Host | None = None,
    ) -> None:
        self.host = Host() if host is None else host
        self.observer: Observer = Unobserved() if observer is None else observer
        self._make: Callable[[], EngineCore] = engine if callable(engine) else lambda: engine
        self._announce = announce
        self._announcer: Announcer | None = None
        self._max_waiting = max_waiting
        self._state = EngineState.STARTING
        self._num_faults = 0
        self._last_fault: str | None = None
        self._fault: Exception | None = None
        self._inbox: queue.SimpleQueue[_Command | None] = self.host.queue()
        self._open: dict[int, tuple[TokenStream, Sample]] = {}  # by request_id
        self._held: dict[int, tuple[TokenStream, Sample]] = {}  # have tokens to hand out, likewise
        self._over = self.host.event()  # the thread is at its end
        self._pace = Pace(stream_share, now=self.host.now_s, worked=self.host.worked_s)
        self._timer: asyncio.TimerHandle | None = None
        self._counts = FairLimit()
        self._engine: EngineCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def health(self) -> Health:
        """The state of the engine. O(1)."""
        return Health(self._state, self._num_faults, self._last_fault)

    @property
    def engine(self) -> EngineCore:
        """The engine, for reading; changes go through `call`. O(1).

        Raises:
            NotServingError: it is not there yet.
        """
        if self._engine is None:
            raise NotServingError(
                f"engine: it is not there yet, or has stopped (state: {self._state.value})"
            )
        return self._engine

    @property
    def num_open(self) -> int:
        """Samples that are unfinished, those on their way to the engine included. O(1)."""
        return self._counts.total

    def start(self) -> None:
        """Start the thread, if that was not done; requests are taken from `ready` on. O(1)."""
        if self._loop is not None:
            return
        loop = self._loop = asyncio.get_running_loop()
        self._ready, self._gone = loop.create_future(), loop.create_future()
        self._ready.add_done_callback(_look)
        self.host.start_thread("engine", self._run)

    async def ready(self) -> None:
        """Wait until requests are taken.

        Raises:
            NotServingError: it was not started, or was stopped before.
            Exception: the error that kept the engine from being made.
        """
        if self._ready is None:
            raise NotServingError("ready: the engine was not started; call start first")
        await asyncio.shield(self._ready)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Delta]:
        """Continue a prompt; yield its Deltas as they come. Closing the iterator aborts it."""
        async with await self.add(prompt, params) as stream:
            async for delta in stream:
                yield delta

    async def add(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """Queue a prompt, to be continued once; as `submit`."""
        return await self.submit(Submission(prompt, params or SamplingParams()))

    async def submit(self, *asked: Submission) -> TokenStream:
        """Queue all submissions between the same two steps, or none of them.

        Returns:
            The stream of their samples, to be closed; those of the first prompt come first.

        Raises:
            InvalidArgumentError: as the engine says of one of them; nothing is queued.
            QueueFullError: too many wait.
            NotServingError: no requests are taken now.
        """
        arrived_s = self.host.now_s()
        wanted: Counter[str | None] = Counter()
        for each in asked:
            wanted[each.client] += each.params.n
        if not asked:
            raise InvalidArgumentError("prompt: wanted at least one, got none")
        self._check_serving()
        self._check_room(len(asked), wanted)
        self._counts.add(wanted)
        try:
            every = await self._encode(asked)
            compiled = await self._compile(asked)
            self._check_serving()
        except BaseException:
            self._uncount(wanted)
            raise
        params = [each.params for each in asked for _ in range(each.params.n)]

        def open_them(requests: list[Request]) -> TokenStream:
            return self._opened(requests, params, arrived_s)

        def submit_them(engine: EngineCore) -> list[Request]:
            requests = engine.submit_all(every)
            compiled.clear()  # kept alive until here, so the engine did not compile them again
            return requests

        return await self._ask(submit_them, open_them, counted=wanted)

    def abort(self, stream: TokenStream) -> None:
        """Abort a stream's unfinished samples; their blocks are free before the next step.

        Aborting a finished one changes nothing. O(samples).
        """
        left = [s.request for s in stream.samples if self._forget(s, FinishReason.ABORTED)]
        if left:
            self._abort_requests(left)
            stream.end(NotServingError("request: aborted"))

    async def call(self, run: Callable[[EngineCore], _T]) -> _T:
        """Run a function on the engine's thread between two steps; return its result.

        Raises:
            NotServingError: the engine has stopped, or is not there yet.
            Exception: the error of `run`.
        """
        if self._engine is None or self._state is EngineState.STOPPED:
            raise NotServingError(f"call: the engine does not run (state: {self._state.value})")
        return await self._ask(run, lambda value: value)

    async def drain(self, deadline_s: float) -> int:
        """Take no more requests, wait for those that are there, and stop.

        Returns:
            The number of samples cut off, because they had not ended after `deadline_s`.
        """
        if self._state is not EngineState.STOPPED:
            self._state = EngineState.DRAINING
        if self.num_open:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle], timeout=deadline_s)
        num_cut = self.num_open
        await self.stop()
        return num_cut

    async def ended(self) -> Exception | None:
        """Wait until the thread has ended, and return its error; None: it was stopped.

        Raises:
            NotServingError: it was not started.
        """
        if self._gone is None:
            raise NotServingError("ended: the engine was not started; call start first")
        await asyncio.shield(self._gone)
        return self._fault

    async def stop(self) -> None:
        """End all requests and the thread, after the step that it runs."""
        if self._gone is not None:
            self._inbox.put(None)
            await asyncio.shield(self._gone)

    # What follows runs on the loop, until the next such line.

    def _check_serving(self) -> None:
        if self._state is not EngineState.READY:
            raise NotServingError(f"engine: it takes no requests now (state: {self._state.value})")

    def _check_room(self, num_prompts: int, wanted: Mapping[str | None, int]) -> None:
        if self._max_waiting is None:
            return
        limit, num_samples = self.engine.max_num_seqs + self._max_waiting, sum(wanted.values())
        if num_prompts > limit:
            raise InvalidArgumentError(f"prompt: wanted at most {limit}, got {num_prompts}")
        if num_samples > limit:
            raise InvalidArgumentError(f"n: wanted at most {limit}, got {num_samples}")
        if not self._counts.admits(wanted, limit):
            raise QueueFullError(
                f"max_waiting: {self.num_open} requests run or wait, the limit is {limit} "
                "(--max-num-seqs plus --max-waiting), and this client has its share"
            )

    async def _encode(self, asked: Sequence[Submission]) -> list[Submission]:
        """Return the submissions as tokens without stop strings: the loop looks for those."""

        def encoded(one: Submission) -> Submission:
            engine, prompt, params = self.engine, one.prompt, one.params
            engine.bad_words.of(params)  # which remembers them
            return dataclasses.replace(
                one,
                prompt=engine.model.codec.encode(prompt) if isinstance(prompt, str) else prompt,
                params=dataclasses.replace(params, stop=()) if params.stop else params,
            )

        texts = [one.prompt for one in asked if isinstance(one.prompt, str)]
        size = sum(map(len, texts)) + sum(map(len, asked[0].params.bad_words))
        return await in_turn(lambda: list(map(encoded, asked)), is_long=size > _LONG_TEXT)

    async def _compile(self, asked: Sequence[Submission]) -> list[Compiled]:
        """Compile grammars beside the steps; none is compiled twice while the caller holds it."""
        grammars = {one.params.grammar for one in asked}
        return [
            await asyncio.wrap_future(self.engine.compile_grammar(grammar))
            for grammar in grammars
            if grammar is not None
        ]

    def _uncount(self, wanted: Mapping[str | None, int]) -> None:
        self._counts.remove(wanted)
        if self._idle is not None and not self._idle.done() and not self.num_open:
            self._idle.set_result(None)

    async def _ask(
        self,
        run: Callable[[EngineCore], _T],
        settle: Callable[[_T], _U],
        *,
        counted: Mapping[str | None, int] | None = None,
    ) -> _U:
        """Run a function on the thread, pass its result to `settle` on the loop, and return that.

        `settle` runs before anything that a later step gives; a stream without a waiter is closed.
        Samples that are `counted` are not any more if it fails.
        """
        waiter: asyncio.Future[_U] = asyncio.get_running_loop().create_future()

        def settled(result: _T) -> None:
            value = settle(result)
            if waiter.done():
                _close(value)
            else:
                waiter.set_result(value)

        def failed(error: Exception) -> None:
            if not waiter.done():
                waiter.set_exception(error)
            self._uncount(counted or {})

        def command(engine: EngineCore) -> Callable[[], None]:
            return functools.partial(settled, run(engine))

        self._inbox.put(_Command(command, failed))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                _close(waiter.result())  # it came at the same moment
            raise

    def _opened(
        self, requests: Sequence[Request], params: Sequence[SamplingParams], arrived_s: float
    ) -> TokenStream:
        """Return the stream of requests that were queued; none of their tokens has come yet."""
        samples = [
            Sample(number, request, self.engine.model.open_text(each), arrived_s)
            for number, (request, each) in enumerate(zip(requests, params, strict=True))
        ]
        stream = TokenStream(self.abort, samples)
        for sample in samples:
            self._open[sample.request.request_id] = (stream, sample)
        return stream

    def _deliver(self, now_s: float, given: Sequence[_Given]) -> None:
        """Hand out the tokens of a step."""
        stopped: list[Request] = []
        waits: dict[tuple[float, bool], int] = {}  # since when, for a first token: how many
        num_at_once = 0  # behind the first of one step
        for number, tokens, reason, error in given:
            place = self._open.get(number)
            if place is None:  # aborted, or ended here by a stop string
                continue
            stream, sample = place
            num_before, wait = len(sample.tokens), (sample.last_s, not sample.tokens)
            if sample.add(tokens, reason, now_s, error):
                stopped.append(sample.request)
            if len(sample.tokens) > num_before:
                waits[wait] = waits.get(wait, 0) + 1
                num_at_once += len(sample.tokens) - num_before - 1
            if sample.finish_reason is not None:
                self._forget(sample, sample.finish_reason)
                stream.tell(sample)
            elif num_before:
                self._held[number] = place
            else:
                stream.tell(sample)
        if stopped:
            self._abort_requests(stopped)
        self._observe(now_s, waits, num_at_once)
        self._plan_round()

    def _observe(
        self, now_s: float, waits: Mapping[tuple[float, bool], int], num_at_once: int
    ) -> None:
        for (since_s, is_first), count in waits.items():
            self.observer.token_came(now_s - since_s, is_first=is_first, count=count)
        if num_at_once:
            self.observer.token_came(0.0, is_first=False, count=num_at_once)

    def _plan_round(self) -> None:
        if self._held and self._timer is None:
            wait_s = self._pace.wait_s()
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._tell_round)
            else:
                self._tell_round()

    def _tell_round(self) -> None:
        """Hand out the held tokens, and measure the cost: readers run before the next callback."""
        self._timer = None
        self._pace.begin()
        self._tell_held()
        asyncio.get_running_loop().call_soon(self._pace.end)

    def _tell_held(self) -> None:
        held, self._held = self._held, {}
        for stream, sample in held.values():
            if sample.has_news:  # else a reader that was late has taken them with what came before
                stream.tell(sample)

    def _abort_requests(self, requests: Sequence[Request]) -> None:
        def run(engine: EngineCore) -> Callable[[], None]:
            for request in requests:
                engine.abort(request)
            return _nothing

        self._inbox.put(_Command(run, _nothing))

    def _forget(self, sample: Sample, reason: FinishReason) -> bool:
        """Note that a sample has ended; return True if it was open."""
        if self._open.pop(sample.request.request_id, None) is None:
            return False
        self._held.pop(sample.request.request_id, None)  # its end is sent with all that is new
        sample.finish_reason = reason
        self.observer.sample_ended(sample)
        self._uncount({sample.request.client: 1})
        return True

    def _fail_all(self, error: Exception) -> None:
        self._tell_held()
        for stream, sample in list(self._open.values()):
            self._forget(sample, FinishReason.ERROR)
            stream.end(error)

    def _made(self, engine: EngineCore) -> None:
        self._engine = engine
        if self._state is EngineState.STARTING:
            self._state = EngineState.READY
        if self._ready is not None:
            self._ready.set_result(None)

    def _faulted(self, error: Exception) -> None:
        self._num_faults += 1
        self._last_fault = f"{type(error).__name__}: {error}"
        if self._state is EngineState.READY:
            self._state = EngineState.RECOVERING
        self._fail_all(EngineFaultError(f"engine: a step failed: {self._last_fault}"))

    def _recovered(self) -> None:
        if self._state is EngineState.RECOVERING:
            self._state = EngineState.READY

    def _ended(self, error: Exception | None) -> None:
        """Fail all requests and commands, as the thread has ended and will run none of them."""
        self._state = EngineState.STOPPED
        self._fault = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error or NotServingError("engine: stopped"))
        reason = NotServingError("engine: it takes no requests any more, it has stopped")
        self._fail_all(reason)
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if command is not None:
                    command.fail(reason)
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def _wake(self) -> None:
        """Have the engine's thread publish and go on with transfers, from any thread."""
        self._inbox.put(_Command(_tend, _nothing))

    def _lose(self, error: Exception) -> None:
        """End everything, from any thread, if the engine's waits for a GPU without end."""
        if not self._over.wait(_LET_GO_S):
            with contextlib.suppress(_LoopGoneError):
                self._post(functools.partial(self._faulted, error))
                self._post(functools.partial(self._ended, error))

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        fault: Exception | None = None
        try:
            engine = self._make()
            try:
                if self._announce is not None:
                    self._announcer = self._announce(engine, self._wake)
                engine.woken_by(self._wake, self._lose)
                self._post(functools.partial(self._made, engine))
                while self._obey(engine):
                    if engine.has_unfinished:
                        self._step(engine)
                        self._publish()
            finally:
                if self._announcer is not None:
                    self._announcer.close()
                _abort_everything(engine)
                engine.end()
        except _LoopGoneError:
            return
        except Exception as error:  # noqa: BLE001  # it is raised where `ready` is awaited
            fault = error
        self._over.set()
        with contextlib.suppress(_LoopGoneError):
            self._post(functools.partial(self._ended, fault))

    def _obey(self, engine: EngineCore) -> bool:
        """Run the commands in the inbox, or wait for one if idle; False: the engine has to stop."""
        while True:
            try:
                command = self._inbox.get(not engine.has_unfinished, engine.patience_s)
            except queue.Empty:
                if engine.has_unfinished:
                    return True
                command = _Command(_tend, _nothing)  # a transfer takes too long
            if command is None:
                return False
            try:
                settle = command.run(engine)
            except Exception as error:  # noqa: BLE001  # it is raised in the caller
                settle = functools.partial(command.fail, error)
            self._publish()
            if settle is not _nothing:
                self._post(settle)

    def _publish(self) -> None:
        if self._announcer is not None:
            self._announcer.publish()

    def _step(self, engine: EngineCore) -> None:
        try:
            outputs = engine.timed_step(self.host.now_s)
        except Exception as error:  # a fault costs the requests it meets
            self._post(functools.partial(self._faulted, error))
            if isinstance(error, RankLostError):  # nothing goes on without it
                raise
            _log.exception("a step failed, and with it all unfinished requests")
            self._recover(engine)
            return
        if outputs:
            given = [
                (o.request.request_id, o.tokens, o.request.finish_reason, o.request.error)
                for o in outputs
            ]
            self._post(functools.partial(self._deliver, self.host.now_s(), given))
            if any(map(_cannot_wait, outputs)):
                taken = self.host.event()
                self._post(taken.set)
                taken.wait(_HAND_OVER_S)

    def _recover(self, engine: EngineCore) -> None:
        """Abort all requests and try the engine with a new one; an error of that ends it."""
        _abort_everything(engine)
        engine.generate([[0]], SamplingParams(max_tokens=1, ignore_eos=True))
        self._post(self._recovered)

    def _post(self, do: Callable[[], None]) -> None:
        if self._loop is None:
            raise _LoopGoneError
        try:
            self._loop.call_soon_threadsafe(do)
        except RuntimeError as error:  # the loop was closed without a word
            raise _LoopGoneError from error


class _LoopGoneError(Exception):
    """The engine has no client left."""


def _cannot_wait(output: Output) -> bool:
    """Return True if the output has a first token or the end of its request."""
    request = output.request
    num_read = len(request.tokens) - request.num_prompt_tokens
    return request.is_finished or num_read <= len(output.token_ids)


def _abort_everything(engine: EngineCore) -> None:
    for request in (*engine.running, *engine.waiting):
        engine.abort(request)


def _nothing(*_: object) -> None:
    pass


def _tend(engine: EngineCore) -> Callable[[], None]:
    engine.tend()
    return _nothing


def _look(future: asyncio.Future[None]) -> None:
    """Take note of a future's error, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()


def _close(value: object) -> None:
    if isinstance(value, TokenStream):
        value.close()
