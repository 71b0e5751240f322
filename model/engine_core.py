"""The part of an engine that needs no tensors: requests in, tokens and text out, step by step.

Decides: the order of a step: schedule, launch (move blocks, compute, sample), commit, copy blocks
of forks, accept tokens, make text. With asynchronous scheduling, the default on a GPU, the tokens
that are accepted are those of the step before, so that the host works on one step while the device
does another; a request that ends by a stop token is then computed once in vain.

Invariants: one thread; whatever ends a request, its blocks are free when the call returns: work of
the device that still uses them comes before any work for their next owner. A request whose logits
are not finite ends alone, and the prefix cache is emptied, because it may hold blocks that
it computed. A request whose grammar cannot be followed any further ends alone too.

Does not know: how blocks are found (`kvcore`), what a device is (`Runner`), how the parts are made
(`engine.py`). `tests/simulation` runs it on a device that only remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import kvcore
from model.control.bad_words import BadWordReader
from model.control.drafts import accepted_tokens
from model.control.grammar import Grammar
from model.control.images import PromptImages
from model.control.params import SamplingParams
from model.control.request import FinishReason, Request, SampledToken
from model.control.scheduler import Scheduler
from model.control.step import SAMPLE, Flight, SchedulerStats, Step, StepWatch, Unwatched, samplers
from model.control.submission import Prompt, Submission
from model.control.tier_transfers import TierTransfers
from model.errors import InvalidArgumentError, ModelError, NumericalError, StalledError
from model.load.text import TextStream
from model.trace import StepRecorder

if TYPE_CHECKING:  # torch is not loaded for these
    from concurrent.futures import Future

    from kvcore.tiers import KeepingTier
    from model.load.codec import TextCodec
    from model.sample.grammar_compiler import Compiled
    from model.sample.grammars import Grammars


class Output:
    """The tokens that a step gives one request: one, or several with accepted draft tokens.

    Attributes:
        request: the request that they belong to, with its new status and finish reason.
        token_ids: the sampled tokens, in their order; none: its logits were NaN or infinite, which
            has ended it.
        chances: the log-probability of each token, and the most likely tokens with theirs; empty
            unless the request asks.
    """

    __slots__ = ("_stream", "chances", "request", "token_ids")

    def __init__(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        stream: TextStream,
        chances: Sequence[tuple[float, tuple[tuple[int, float], ...]]] = (),
    ) -> None:
        self.request = request
        self.token_ids = token_ids
        self._stream = stream
        self.chances = chances

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The tokens, with their log-probabilities if their request asks for them. O(tokens)."""
        if not self.chances:
            return tuple(map(SampledToken, self.token_ids))
        pairs = zip(self.token_ids, self.chances, strict=False)
        return tuple([SampledToken(token, *chance) for token, chance in pairs])

    def then(self, later: Output) -> Output:
        """Return this and the output of a later step for the same request as one. O(tokens)."""
        tokens, chances = self.token_ids + later.token_ids, (*self.chances, *later.chances)
        return Output(self.request, tokens, self._stream, chances)

    def take_text(self) -> str:
        """Return the text that became final since the last call; often empty.

        Never part of a character. It is decoded now, so a caller that does not need it saves the
        cost. O(tokens since).
        """
        return self._stream.take()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request and its text.

    Attributes:
        tokens: the tokens of its output with their log-probabilities; empty unless the request asks
            for them.
    """

    request: Request
    text: str
    tokens: tuple[SampledToken, ...] = ()


class Model(Protocol):
    """The parts of a model that an engine needs, such as a `LoadedModel`."""

    @property
    def codec(self) -> TextCodec:
        """The tokenizer."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text."""
        ...

    def open_text(self, params: SamplingParams) -> TextStream:
        """Start a text that this model writes."""
        ...


class Runner(Protocol):
    """A device that runs steps, such as a `StepRunner`."""

    @property
    def is_async(self) -> bool:
        """True if steps are sent before the tokens of the previous one are read."""
        ...

    def can_defer_read(self, sampling: Sequence[Request]) -> bool:
        """Return True if the next step may be sent before these requests get their tokens."""
        ...

    def send(
        self, step: Step, sampling: tuple[Request, ...], before: Flight | None, watch: StepWatch
    ) -> Flight:
        """Run a step; see `StepRunner.send`."""
        ...

    def copy(self, orders: Sequence[kvcore.CopyOrder]) -> None:
        """Copy blocks, before anything that a later step does."""
        ...

    def discard(self, request: Request) -> None:
        """Forget a request that has ended."""
        ...

    def encode_images(self, step: Step) -> Mapping[Request, ModelError]:
        """Run the vision tower for a step's images; return the errors of requests that failed."""
        ...


class EngineCore:
    """An engine that runs requests on a device, whatever that is made of.

    Args:
        model: the tokenizer, and the texts of requests.
        kv: the manager of the device's blocks.
        scheduler: the planner of steps.
        runner: runs the steps.
        grammars: the grammars of structured outputs.
        vocab_size: token ids are below this.
        tiers: host memory and disk behind the pool, the scheduler's too; None: there are none.

    Attributes:
        kv: as above.
        tiers: as above.
        vocab_size: as above.
        bad_words: the reader that makes requests' bad words into tokens.
    """

    def __init__(
        self,
        model: Model,
        kv: kvcore.KVCacheManager,
        scheduler: Scheduler,
        runner: Runner,
        grammars: Grammars,
        vocab_size: int,
        tiers: TierTransfers | None = None,
    ) -> None:
        self.kv = kv
        self.tiers = tiers
        self.vocab_size = vocab_size
        self._model = model
        self._scheduler = scheduler
        self._runner = runner
        self._grammars = grammars
        self._unread: Flight | None = None
        self._streams: dict[int, TextStream] = {}
        self._has_images = False  # whether any request has had one
        self._failed: list[Output] = []  # of this step, without a pass
        self._next_id = 0
        self._num_sent = self._num_timed = 0  # tokens: of the last step; that the last call awaited
        self._watch: StepWatch = Unwatched()
        encode = partial(model.codec.encode, adds_special_tokens=False)
        self.bad_words = BadWordReader(encode, vocab_size, model.eos_token_ids)

    @property
    def has_unfinished(self) -> bool:
        """True if any request is waiting or running. O(1)."""
        return self._scheduler.has_unfinished

    @property
    def model(self) -> Model:
        """The model that it runs. O(1)."""
        return self._model

    @property
    def running(self) -> tuple[Request, ...]:
        """The running requests, in order. O(num_running)."""
        return self._scheduler.running

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The waiting and preempted requests, in order. O(num_waiting)."""
        return self._scheduler.waiting

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Every request that has not ended. O(those)."""
        return self._scheduler.unfinished

    @property
    def max_model_len(self) -> int:
        """The number of tokens that a request may surely come to, prompt included. O(1)."""
        return self._scheduler.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """The most requests that run at once. O(1)."""
        return self._scheduler.config.max_num_seqs

    @property
    def keeps_states(self) -> bool:
        """True if some layers have recurrent states. O(1)."""
        return isinstance(self.kv.groups[-1], kvcore.RecurrentState)

    @property
    def is_speculative(self) -> bool:
        """True if speculative decoding is on. O(1)."""
        return self._scheduler.is_speculative

    @property
    def keeping_tiers(self) -> Sequence[KeepingTier]:
        """The tiers that keep copies of blocks. O(1)."""
        return () if self.tiers is None else self.tiers.tiers.keeping

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's counters, live. O(1)."""
        return self._scheduler.stats

    def empty_cache(self, *, enable_caching: bool) -> None:
        """Empty the prefix cache, and turn prefix caching on or off. O(contents).

        Args:
            enable_caching: True if finished blocks are found again, from now on.
        """
        self.kv.reset()
        self.kv.enable_caching = enable_caching

    def end(self, *, goes_on: bool = False) -> None:
        """State that no more steps come, which other ranks have to know. O(1).

        Tiers store what they lack and are closed, which takes 10 s at most.

        Args:
            goes_on: keep the other ranks running, because the network is used once more.
        """
        del goes_on
        if self.tiers is not None:
            self.tiers.close()

    def woken_by(self, wake: Callable[[], None], lose: Callable[[Exception], object]) -> None:
        """Have `wake` called, on another thread, when `tend` has something to do. O(1).

        `lose` is called likewise when no step can end any more, because another rank is lost.
        """
        del lose
        if self.tiers is not None:
            self.tiers.wake = wake

    @property
    def patience_s(self) -> float | None:
        """The seconds after which `tend` is due without a wake; None: it is not. O(transfers)."""
        return None if self.tiers is None else self.tiers.patience_s

    def tend(self) -> None:
        """Go on with transfers while no step runs. O(transfers and their blocks)."""
        if self.tiers is not None:
            self.tiers.tend()

    def record(self) -> StepRecorder:
        """Record every step from now on; the recorder grows with each. O(1)."""
        recorder = StepRecorder(self.kv, self._scheduler)
        self._watch = recorder
        return recorder

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue a prompt, to be continued once; as `submit`. O(prompt).

        Args:
            prompt: text, or token ids.
            params: None: greedy, with the default length.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise InvalidArgumentError(f"n: add_request continues a prompt once, got {params.n}")
        [request] = self.submit(Submission(prompt, params))
        return request

    @property
    def image_limits(self) -> tuple[int, int]:
        """The most images of a prompt, and the most bytes of one. O(1)."""
        return 0, 0

    def check_images(self, count: int) -> None:
        """Raise unless a prompt may have this number of images. O(1).

        Raises:
            InvalidArgumentError: it may not.
        """
        if count:
            raise InvalidArgumentError("image: this engine takes text alone")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        images: Sequence[object] = (),
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> tuple[list[int], PromptImages | None]:
        """Return the tokens of a conversation, and its images; from any thread. O(text + pixels).

        Args:
            messages: as `TextCodec.encode_chat`, or with parts as `TextCodec.render_chat`.
            images: one for each part that is an image: the bytes of a file, its path,
                or an image of Pillow.
            opens_answer: as `TextCodec.encode_chat`.
            options: as `TextCodec.encode_chat`.

        Raises:
            InvalidArgumentError: the template refuses the messages, or an image is refused.
        """
        self.check_images(len(images))
        codec = self._model.codec
        return codec.encode_chat(messages, opens_answer=opens_answer, options=options), None

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters that requests may ask for. O(1)."""
        return ()

    def submit(self, asked: Submission) -> list[Request]:
        """Queue a submission: a request for each sample. O(samples * prompt).

        Raises:
            InvalidArgumentError: an empty prompt, a token that the model does not have, items
                outside the prompt, or something else than a namespace or retentions.
            RequestTooLongError: it could never finish here; nothing has changed.
        """
        prompt, params = asked.prompt, asked.params
        tokens = self._model.codec.encode(prompt) if isinstance(prompt, str) else prompt
        if isinstance(prompt, str) and not prompt:
            raise InvalidArgumentError("prompt: wanted text that is not empty, got ''")
        self._scheduler.check_positions(len(tokens), params.max_tokens)
        self._check_tokens("logit_bias", [token for token, _ in params.logit_bias])
        if params.grammar is not None:
            self.check_grammar(params.grammar)
        requests: list[Request] = []
        bad_words = self.bad_words.of(params)
        for number in range(params.n):
            request = Request(
                self._next_id,
                tokens,
                params,
                self._model.eos_token_ids,
                priority=asked.priority,
                client=asked.client,
                leader=requests[0] if requests else None,
                sample=number,
                namespace=asked.namespace,
                retain=asked.retain,
                boundaries=asked.boundaries,
                items=asked.items,
                images=asked.images,
                bad_words=bad_words,
            )
            self._check_tokens("prompt", request.tokens)
            self._scheduler.add(request)
            self._has_images |= asked.images is not None
            if params.grammar is not None:
                self._grammars.open(request)
            self._streams[request.request_id] = self._model.open_text(request.params)
            self._next_id += 1
            requests.append(request)
        return requests

    def prepare_grammars(self) -> None:
        """Begin, on another thread, what the first grammar would wait for. O(1)."""
        self._grammars.prepare()

    def compile_grammar(self, grammar: Grammar) -> Future[Compiled]:
        """Begin to compile a grammar, unless that was done; from any thread. O(1).

        It is compiled beside the steps; a request that has it is queued at once then. The future
        raises what `check_grammar` does.
        """
        return self._grammars.compile(grammar)

    def check_grammar(self, grammar: Grammar) -> None:
        """Wait until a grammar is compiled. Some tens of milliseconds, once for each grammar.

        Raises:
            InvalidSettingError: no text follows it, it means nothing, or is too large.
            GrammarError: its first masks take longer than a token may.
            UnsupportedModelError: the model's tokens are unknown, or none of them ends a text.
        """
        self.compile_grammar(grammar).result()

    def submit_all(self, asked: Iterable[Submission]) -> list[Request]:
        """Queue several, or none of them. O(all samples * their prompts).

        Returns:
            Their requests, the samples of the first one first.

        Raises:
            InvalidArgumentError: one of them is refused, as `submit` says.
        """
        requests: list[Request] = []
        try:
            for each in asked:
                requests += self.submit(each)
        except Exception:
            for request in requests:
                self.abort(request)
            raise
        return requests

    def abort(self, request: Request) -> bool:
        """End a request now; return True if it was unfinished. O(num_unfinished)."""
        self._streams.pop(request.request_id, None)
        self._runner.discard(request)
        is_ended = self._scheduler.abort(request)
        if self.tiers is not None and self.tiers.has_work and not self.has_unfinished:
            self.tiers.wake()  # no step goes on with transfers, or stores what this has published
        return is_ended

    def step(self) -> list[Output]:
        """Run one forward pass; return the tokens that were read, oldest chunk first.

        They are those of this pass, or with `async_scheduling` those of the one before: the first
        call returns none then, and one more call after the last pass returns the rest.

        Raises:
            StalledError: nothing can run although something is unfinished.
        """
        outputs = self._run_step()
        if self._failed:
            outputs, self._failed = [*outputs, *self._failed], []
        return [*outputs, *self._end_overrun()] if self._grammars.texts else outputs

    def timed_step(self, now_s: Callable[[], float]) -> list[Output]:
        """Run a step; the budget of steps that clients share follows from its time, by a clock."""
        began_s = now_s()
        outputs = self.step()
        self.note_time(now_s() - began_s)
        return outputs

    def note_time(self, took_s: float) -> None:
        """Note the seconds of the last step. O(1)."""
        self._scheduler.shared_budget.note(self._num_timed, took_s)

    def _run_step(self) -> list[Output]:
        """Schedule, launch, accept the tokens of the step before, commit, accept those at hand."""
        watch, previous, step = self._watch, self._unread, Step(())
        watch.begin()
        if self.tiers is not None:
            self.tiers.begin_step()
        try:
            step = self._scheduler.schedule()
            watch.scheduled(step)
            launched = self._launch(step, previous)
            outputs = self._accept(previous, advances=not self._grammars.texts)
        except BaseException:
            self._abandon(step)
            raise
        orders = self._scheduler.advance(step)
        if orders:
            self._runner.copy(orders)
        before, self._num_sent = self._num_sent, step.num_tokens
        if not self._runner.is_async:
            outputs = self._accept(launched)
        else:
            self._unread = launched if step.chunks else None
            if not self._runner.can_defer_read(launched.sampling):
                outputs = self._read_at_once(launched, outputs)
        self._num_timed = before if self._unread is not None else self._num_sent
        if self.tiers is not None:
            self.tiers.end_step(step.num_tokens)
        if (
            not step.chunks
            and previous is None
            and step.is_empty
            and self._scheduler.has_unfinished
            and not (self.tiers is not None and self.tiers.wait())
        ):
            raise StalledError(
                "step: requests are waiting, and none of them can be admitted or run"
            )
        watch.end()
        return outputs

    def _launch(self, step: Step, previous: Flight | None) -> Flight:
        """Send a step to the device; wait for the tokens that this call returns.

        They are its own, or with `async_scheduling` those of the previous step.
        """
        if self._has_images:
            step = self._with_encoded(step)
        sampling = tuple(samplers(step.chunks))
        launched = self._runner.send(step, sampling, previous, self._watch)
        awaited = previous if self._runner.is_async else launched
        if awaited is not None:
            awaited.read()
        self._watch.done(SAMPLE)
        return launched

    def _with_encoded(self, step: Step) -> Step:
        """Return a step whose images have their outputs; requests whose image fails end alone."""
        errors = self._runner.encode_images(step)
        if not errors:
            return step
        self._failed = [self._fail(request, error) for request, error in errors.items()]
        chunks = tuple([chunk for chunk in step.chunks if chunk.request not in errors])
        return replace(step, chunks=chunks)

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[Output]:
        """Run prompts to their ends, yielding tokens as they come.

        If the iterator is closed early, the unfinished requests are aborted.

        Raises:
            InvalidArgumentError: one of the prompts is refused; none of them is queued then.
        """
        yield from self._drain(self.add_all(prompts, params))

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Run prompts to their ends; their completions in the order of the prompts.

        Raises:
            InvalidArgumentError: one of the prompts is refused; none of them is queued then.
        """
        requests = self.add_all(prompts, params)
        texts: dict[int, str] = {}
        tokens: dict[int, list[SampledToken]] = {request.request_id: [] for request in requests}
        for output in self._drain(requests):
            if output.request.params.logprobs is not None:
                tokens[output.request.request_id] += output.tokens
            if output.request.is_finished:
                texts[output.request.request_id] = output.take_text()
        return [
            Completion(request, texts[request.request_id], tuple(tokens[request.request_id]))
            for request in requests
        ]

    def add_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        """Queue several prompts, or none of them. O(all prompts).

        Raises:
            InvalidArgumentError: one of the prompts is refused, or there are not as many `params`.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidArgumentError(f"params: wanted {len(prompts)} of them, got {len(each)}")
        return self.submit_all(map(Submission, prompts, each))

    def _drain(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Step until these requests have ended and yield their outputs; abort unfinished ones."""
        wanted = {request.request_id for request in requests}
        try:
            while not all(request.is_finished for request in requests):
                yield from (out for out in self.step() if out.request.request_id in wanted)
        finally:
            for request in requests:
                self.abort(request)

    def _accept(self, flight: Flight | None, *, advances: bool = False) -> list[Output]:
        """Give the requests of a step their tokens, and end those that these end.

        See `Scheduler.accept` for `advances`.
        """
        if flight is None:
            return []
        streams, outputs, sampled = self._streams, [], flight.read()
        for request, position, scored in () if flight.scored is None else flight.scored.tokens():
            request.score(position, scored)
        tokens = {number: token for number, token in sampled.items() if token is not None}
        logprobs, uses_grammars = flight.logprobs(), bool(self._grammars.texts)
        if len(tokens) < len(sampled) or uses_grammars:
            for request in flight.sampling:
                error = None if request.is_finished else self._error(request, sampled)
                if error is not None:
                    tokens.pop(request.request_id, None)
                    outputs.append(self._fail(request, error))
        further = self._verify(flight, tokens) if flight.drafted else {}
        for request in self._scheduler.accept(tokens, further, advances=advances):
            number = request.request_id
            stream, given = streams[number], (tokens[number], *further.get(number, ()))
            if number not in further:
                stream.add(given[0])
            is_over = request.is_finished or stream.is_stopped
            if is_over or (uses_grammars and self._is_whole(request)):
                self._end(request, stream)
            outputs.append(Output(request, given, stream, logprobs.get(number, ())))
        return outputs

    def _read_at_once(self, launched: Flight, before: list[Output]) -> list[Output]:
        """Accept a step before the next one is sent; its outputs joined to those of the last step.

        Each request has one output, so that an end comes with all tokens before it.
        """
        try:
            outputs = self._accept(launched)
        except BaseException:  # the step is committed, and nothing is known of what it has written
            self._abandon(Step(()))
            raise
        self._unread = None
        if not before:
            return outputs
        joined = {output.request.request_id: output for output in before}
        for output in outputs:
            number = output.request.request_id
            joined[number] = joined[number].then(output) if number in joined else output
        return list(joined.values())

    def _verify(self, flight: Flight, tokens: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the tokens behind the first one of each request whose draft tokens were accepted.

        Their text is made here: a stop string may end it among them; the tokens behind it are
        dropped.
        """
        further: dict[int, list[int]] = {}
        for request, drafts, ahead in flight.ahead():
            number = request.request_id
            if request.is_finished or number not in tokens:
                continue
            stream, count = self._streams[number], 0
            accepted = accepted_tokens(request, drafts, tokens[number], ahead)
            for token in accepted:
                stream.add(token)
                count += 1
                if stream.is_stopped:
                    break
            further[number] = accepted[1:count]
        return further

    def _error(self, request: Request, sampled: Mapping[int, int | None]) -> ModelError | None:
        """Return the error if a request got no valid token, or None."""
        if sampled[request.request_id] is None:
            return NumericalError("the model's logits for the next token are not finite numbers")
        return None if request.params.grammar is None else self._grammars.error(request)

    def _fail(self, request: Request, error: ModelError) -> Output:
        """End one request with an error.

        If its logits were NaN or infinite, nothing that it has computed is found any more.
        """
        stream = self._streams[request.request_id]
        request.error = error
        if isinstance(error, NumericalError):
            if self.tiers is None:
                self.kv.reset()
            else:
                self.tiers.distrust(request)
        self._scheduler.finish(request, FinishReason.ERROR)
        self._end(request, stream)
        return Output(request, (), stream)

    def _end_overrun(self) -> list[Output]:
        """End the requests whose grammar has used up its time."""
        overrun = self._grammars.take_overrun()
        return [self._fail(each, error) for each, error in overrun if not each.is_finished]

    def _abandon(self, step: Step) -> None:
        """Abort all requests; what the pass has written is unknown, so none of it may be found."""
        for request in self._scheduler.unfinished:
            self.abort(request)
        self._scheduler.drop(step)
        if self._unread is not None:
            self._unread = None
            if self.tiers is None:
                self.kv.reset()
            else:
                self.tiers.distrust_steps()

    def _end(self, request: Request, stream: TextStream) -> None:
        if not request.is_finished:
            self._scheduler.finish(request, FinishReason.STOP)
        stream.close()
        del self._streams[request.request_id]
        self._runner.discard(request)

    def _is_whole(self, request: Request) -> bool:
        return request.params.grammar is not None and self._grammars.is_whole(request)

    def _check_tokens(self, what: str, tokens: Sequence[int]) -> None:
        if tokens and max(tokens) >= self.vocab_size:
            raise InvalidArgumentError(
                f"{what}: wanted token ids below {self.vocab_size}, got {max(tokens)}"
            )
