"""The engine: requests in, tokens and text out, one step at a time.

Decides: the order of a step: schedule, launch (move blocks, compute, sample), commit, copy blocks
of forks, accept tokens, make text. With asynchronous scheduling, the default on a GPU, the tokens
that are accepted are those of the step before, so that the host works on one step while the device
does another; a request that ends by a stop token is then computed once in vain.

Invariants: one thread; whatever ends a request, its blocks are free when the call returns: the
device does what is left to do with them before anything for their next owner. A request whose
logits are not numbers ends alone, and the prefix cache is emptied, because it may hold blocks that
it computed. A request whose grammar cannot be followed any further ends alone too.

Does not know: how blocks are found (`kvcore`), how attention is computed (`backends`), arguments of
a command line.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import cast

import backends
import kvcore
from model.caches.memory import MemoryPlan, plan_memory
from model.caches.swap import BlockMover, plan_host_blocks
from model.control.config import EngineConfig, SchedulerConfig
from model.control.drafts import Drafter, NgramDrafts, accepted_tokens
from model.control.grammar import Grammar
from model.control.params import SamplingParams
from model.control.request import FinishReason, Request, SampledToken
from model.control.scheduler import Scheduler
from model.control.step import SchedulerStats, Step
from model.control.submission import Prompt, Submission
from model.errors import (
    InvalidArgumentError,
    ModelError,
    NumericalError,
    StalledError,
    UnsupportedModelError,
)
from model.forward.batch_invariant import BatchInvariantNetwork
from model.forward.draft_model import DraftModel
from model.forward.network import PagedNetwork
from model.forward.quantised import quantise
from model.forward.sanitized import SanitizedBackend
from model.forward.step_runner import Flight, StepRunner
from model.forward.warm_up import free_bytes, prepare_network
from model.load.loader import LoadedModel
from model.load.text import TextStream
from model.output import Completion, Output
from model.sample.grammar_compiler import Compiled
from model.sample.grammars import Grammars
from model.sample.request_sampler import RequestSampler
from model.trace import SAMPLE, StepRecorder, StepWatch, Unwatched

_TRIED_TOKENS = 32
_TRIED = [  # what may be asked of a request; what is not tried waits for the first that asks it
    SamplingParams(ignore_eos=True),
    SamplingParams(ignore_eos=True, temperature=1.0),
    SamplingParams(ignore_eos=True, temperature=1.0, top_k=20, top_p=0.9),
    SamplingParams(ignore_eos=True, logprobs=1, presence_penalty=0.1),
]


class Engine:
    """Runs requests on a loaded model.

    On a GPU whose memory is measured, making one takes most of what `prepare` does.

    Args:
        model: its attention is switched to the paged one.
        backend: runs attention and holds the caches.
        config: sizes.
        caches_of: an engine of the same model whose caches this one overwrites, in place of its
            own; it must have run nothing yet. Its number of blocks is this one's too.

    Attributes:
        draft: the draft model of speculative decoding; None: there is none.

    Raises:
        InvalidArgumentError: a size is out of range, or memory is too small for it.
        UnsupportedModelError: the model cannot run with a paged cache, or not on this backend.
    """

    draft: DraftModel | None

    def __init__(
        self,
        model: LoadedModel,
        backend: backends.Backend,
        config: EngineConfig | None = None,
        *,
        caches_of: "Engine | None" = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._backend = backend
        self._sanitizer = SanitizedBackend(backend) if self.config.sanitize else None
        if caches_of is None:
            watched = cast("backends.Backend", self._sanitizer or backend)
            self.network = _network(model, watched, self.config)
            self.config = _fitted(self.config, self.network)
            ahead = _draft_network(model, backend, self.config)
            self.memory = _allocate(model, self.network, ahead, self.config)
        else:
            self.network, self.memory = caches_of.network, caches_of.memory
            ahead = None if caches_of.draft is None else caches_of.draft.network
            size, wanted = self.config.block_size, self.memory.block_size
            if size != wanted:
                raise InvalidArgumentError(
                    f"block_size: wanted {wanted}, which the caches have, got {size}"
                )
        self.config = _limited(self.config, self.network)
        self.kv = kvcore.KVCacheManager(
            self.network.num_blocks,
            self.config.block_size,
            groups=self.network.layout.groups(self.config.block_size),
            enable_caching=self.config.enable_prefix_caching,
            record_events="xxh3-128" if self.config.record_events else None,
            record_lifetimes=self.config.record_lifetimes,
            prefault=self.config.prefault,
        )
        self.num_host_blocks = plan_host_blocks(
            self.config, model.network, self.network.layout, self.memory
        )
        if model.ranks is not None:
            self.num_host_blocks = model.ranks.all_reduce_min(self.num_host_blocks)
        by_default = backend.device.type == "cuda" and not self.config.is_speculative
        is_asked = self.config.async_scheduling
        self._is_async = by_default if is_asked is None else is_asked
        self._mover = BlockMover(self.network.backend, self.network.caches)
        beside = None if caches_of is None else caches_of.draft
        draft = None if ahead is None else DraftModel(model, ahead, self.config, beside=beside)
        drafter: Drafter | None = NgramDrafts() if self.config.drafts == "ngram" else draft
        self._scheduler = Scheduler(self.kv, self._limits(model.max_positions), drafter)
        self._grammars = _grammars(model, self.vocab_size, self.config)
        self._sampler = RequestSampler(
            self.vocab_size, self.network.device, self.config.seed, self._grammars, model.ranks
        )
        self._passes: StepRunner = StepRunner(
            self.network,
            self._mover,
            self._sampler,
            max_sampled=self.config.max_num_seqs,
            is_async=self._is_async,
            sanitizer=self._sanitizer,
            drawn=None if caches_of is None else caches_of._passes.drawn,  # noqa: SLF001
        )
        self._unread: Flight | None = None
        self._model, self.draft = model, draft
        self._streams: dict[int, TextStream] = {}
        self._next_id = 0
        self._watch: StepWatch = Unwatched()

    def _limits(self, max_positions: int | None) -> SchedulerConfig:
        rope = self.network.rope
        return SchedulerConfig(
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=max_positions,
            watermark=self.config.watermark,
            priority_span=self.config.priority_span,
            draft_tokens=self.config.most_drafts,
            num_host_blocks=self.num_host_blocks,
            long_above=None if rope is None else rope.num_tokens,
            may_cross=rope is None or rope.recomputes,
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to do. O(1)."""
        return self._scheduler.has_unfinished

    @property
    def model(self) -> LoadedModel:
        """What it runs. O(1)."""
        return self._model

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. O(1)."""
        return self.network.vocab_size

    @property
    def running(self) -> tuple[Request, ...]:
        """The running requests, in order. O(num_running)."""
        return self._scheduler.running

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The waiting and preempted requests, in order. O(num_waiting)."""
        return self._scheduler.waiting

    @property
    def max_model_len(self) -> int:
        """Tokens that a request may come to for sure, its prompt included. O(1)."""
        return self._scheduler.max_model_len

    @property
    def is_speculative(self) -> bool:
        """Whether speculative decoding is on. O(1)."""
        return self._scheduler.is_speculative

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's counters, live. O(1)."""
        return self._scheduler.stats

    def prepare(self) -> str:
        """Do now what the first requests would wait for; in words how the network runs then.

        Compiles kernels, traces and compiles the network and captures CUDA graphs, as `config` asks
        and `forward/warm_up.py` decides: seconds, half a minute where all is compiled for the
        first time, all but the capture in the constructor where that measures memory. A few
        requests run then on another engine that is thrown away: what they count and find is
        forgotten with it, and the blocks that they wrote are free. Nothing may run meanwhile.

        Raises:
            InvalidArgumentError: there is no memory left for it.
        """
        prepared = prepare_network(
            self.network, self.config, self._passes.drawn, self._model.max_positions
        )
        self._passes.use(prepared)
        ahead = None if self.draft is None else self.draft.prepare()
        sizes = dataclasses.replace(
            self.config, enable_prefix_caching=False, record_events=False, record_lifetimes=False
        )
        trial = Engine(self._model, self._backend, sizes, caches_of=self)
        trial._passes.use(prepared)
        if trial.draft is not None and ahead is not None:
            trial.draft.use(ahead)
        room = self.max_model_len - 1
        answer = min(2 + self.config.most_drafts, room)  # with draft tokens
        if answer > 0:
            prompts = [[0] * min(_TRIED_TOKENS, room + 1 - answer)] * len(_TRIED)
            trial.generate(
                prompts, [dataclasses.replace(each, max_tokens=answer) for each in _TRIED]
            )
        if self.network.device.type == "cuda" and answer > 0:  # where a long step takes no time
            longest = min(self.config.max_num_batched_tokens, room)
            trial.generate([[0] * longest], SamplingParams(max_tokens=1, ignore_eos=True))
        return prepared.how if ahead is None else f"{prepared.how}; draft model: {ahead.how}"

    def describe_memory(self) -> str:
        """What the caches take, and why; one line. O(num_layers)."""
        beside = None if self.draft is None else self.draft.network.layout
        return self.memory.describe(self.network.layout, beside)

    def empty_cache(self, *, enable_caching: bool) -> None:
        """Empty the prefix cache, and turn prefix caching on or off. O(contents).

        Args:
            enable_caching: as `enable_prefix_caching` of the configuration, from now on.
        """
        self.kv.reset()
        self.kv.enable_caching = enable_caching
        if self.draft is not None:
            self.draft.empty_cache(enable_caching=enable_caching)

    def end(self, *, goes_on: bool = False) -> None:
        """Say that no more steps come, which other ranks have to know. O(1).

        Args:
            goes_on: keep the other ranks running, because the network is used once more.
        """

    def record(self) -> StepRecorder:
        """Record every step from now on; the recorder grows with each. O(1)."""
        recorder = StepRecorder(self.kv, self._scheduler)
        self._watch = recorder
        return recorder

    def stop_recording(self) -> None:
        """Record no more steps; what was recorded stays with its recorder. O(1)."""
        self._watch = Unwatched()

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue a prompt, to be continued once; as `submit`. O(prompt).

        Args:
            prompt: text, or token ids.
            params: None: greedy, with the default length.
        """
        [request] = self.submit(Submission(prompt, params or SamplingParams()))
        return request

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
        self._check_tokens("logit_bias", [token for token, _ in params.logit_bias])
        if params.grammar is not None:
            self.check_grammar(params.grammar)
        requests: list[Request] = []
        for number in range(asked.num_samples):
            request = Request(
                self._next_id,
                tokens,
                params,
                self._model.eos_token_ids,
                priority=asked.priority,
                leader=requests[0] if requests else None,
                sample=number,
                namespace=asked.namespace,
                retain=asked.retain,
                boundaries=asked.boundaries,
                items=asked.items,
            )
            self._check_tokens("prompt", request.tokens)
            self._scheduler.add(request)
            if params.grammar is not None:
                self._grammars.open(request)
            self._streams[request.request_id] = self._model.open_text(request.params.stop)
            self._next_id += 1
            requests.append(request)
        return requests

    def compile_grammar(self, grammar: Grammar) -> "Future[Compiled]":
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
        """End a request now; whether it was unfinished. O(num_unfinished)."""
        self._streams.pop(request.request_id, None)
        self._sampler.discard(request)
        return self._scheduler.abort(request)

    def step(self) -> list[Output]:
        """Run one forward pass; return the tokens that were read, oldest chunk first.

        They are those of this pass, or with `async_scheduling` those of the one before: the first
        call returns none then, and one more call after the last pass returns the rest.

        Raises:
            StalledError: nothing can run although something is unfinished.
        """
        outputs = self._run_step()
        return [*outputs, *self._end_overrun()] if self._grammars.is_used else outputs

    def _run_step(self) -> list[Output]:
        """Schedule, launch, accept the tokens of the step before, commit, accept those at hand."""
        watch, previous, step = self._watch, self._unread, Step(())
        watch.begin()
        try:
            step = self._scheduler.schedule()
            watch.scheduled(step)
            launched = self._launch(step, previous)
            outputs = self._accept(previous, advances=not self._grammars.is_used)
        except BaseException:
            self._abandon(step)
            raise
        self._copy(self._scheduler.advance(step))
        if self._passes.can_defer_read(launched.sampling):
            self._unread = launched if step.chunks else None
        else:
            self._unread = None
            outputs += self._accept(launched)
        if (
            not step.chunks
            and previous is None
            and step.is_empty
            and self._scheduler.has_unfinished
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
        launched = self._passes.send(step, tuple(step.sampling), previous, self._watch)
        awaited = previous if self._is_async else launched
        if awaited is not None:
            awaited.read()
        self._watch.done(SAMPLE)
        return launched

    def _copy(self, orders: Sequence[kvcore.CopyOrder]) -> None:
        """Carry out the copies of forks, before whatever a later step does. O(their blocks)."""
        if orders:
            if self._sanitizer is not None:
                self._sanitizer.begin_copies(orders, self.network.caches)
            self._mover.copy(orders)

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[Output]:
        """Run prompts to their ends, yielding tokens as they come.

        If the iterator is closed early, what is left of these requests is aborted.

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
        """Step until these have ended; yield their outputs; abort what is left of them."""
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
        tokens = {number: token for number, token in sampled.items() if token is not None}
        logprobs, uses_grammars = flight.logprobs(), self._grammars.is_used
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

    def _verify(self, flight: Flight, tokens: Mapping[int, int]) -> dict[int, list[int]]:
        """The tokens behind the first one of each request whose draft tokens were accepted.

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
        """Why a request got no valid token; None: it got one."""
        if sampled[request.request_id] is None:
            return NumericalError("the model's logits for the next token are not finite numbers")
        return None if request.params.grammar is None else self._grammars.error(request)

    def _fail(self, request: Request, error: ModelError) -> Output:
        """End a request by an error of its own.

        Where its logits are no numbers, nothing that it has computed is found any more.
        """
        stream = self._streams[request.request_id]
        request.error = error
        self._scheduler.finish(request, FinishReason.ERROR)
        if isinstance(error, NumericalError):
            self.kv.reset()
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
            self.kv.reset()

    def _end(self, request: Request, stream: TextStream) -> None:
        if not request.is_finished:
            self._scheduler.finish(request, FinishReason.STOP)
        stream.close()
        del self._streams[request.request_id]
        self._sampler.discard(request)

    def _is_whole(self, request: Request) -> bool:
        return request.params.grammar is not None and self._grammars.is_whole(request)

    def _check_tokens(self, what: str, tokens: Sequence[int]) -> None:
        if tokens and max(tokens) >= self.vocab_size:
            raise InvalidArgumentError(
                f"{what}: wanted token ids below {self.vocab_size}, got {max(tokens)}"
            )


def _network(model: LoadedModel, backend: backends.Backend, config: EngineConfig) -> PagedNetwork:
    """The network, and what its caches will store."""
    kind = BatchInvariantNetwork if config.batch_invariant else PagedNetwork
    network = kind(model, backend)
    if config.kv_dtype == "fp8":
        block_size = _fitted(config, network).block_size
        quantise(network, block_size=block_size, vocab_size=network.vocab_size)
    return network


def _fitted(config: EngineConfig, network: PagedNetwork) -> EngineConfig:
    """The configuration with blocks that hold what recurrent layers keep."""
    block_size = network.layout.fitting_block_size(config.block_size)
    return dataclasses.replace(config, block_size=block_size)


def _limited(config: EngineConfig, network: PagedNetwork) -> EngineConfig:
    """The configuration with as many requests at once as have a block, and a state, each."""
    least = 1 + network.layout.blocks_per_state(config.block_size)
    most = min(config.max_num_seqs, max(1, (network.num_blocks - 1) // least))
    eager = config.eager or config.batch_invariant
    return dataclasses.replace(config, max_num_seqs=most, eager=eager)


def _grammars(model: LoadedModel, vocab_size: int, config: EngineConfig) -> Grammars:
    """What texts of this model may follow; of several ranks the first one measures."""
    leads = model.ranks is None or model.ranks.leads
    describe, ends = model.codec.describe, model.eos_token_ids
    return Grammars(describe, vocab_size, ends, config, measures=leads)


def _draft_network(
    model: LoadedModel, backend: backends.Backend, config: EngineConfig
) -> PagedNetwork | None:
    """The draft model's network likewise, checked by a sanitizer of its own; None: there is none.

    Raises:
        InvalidArgumentError: the model was loaded without its draft model.
        UnsupportedModelError: its draft model keeps states.
    """
    if config.draft_model is None:
        return None
    if model.draft is None:
        raise InvalidArgumentError(
            f"draft_model: {model.name!r} was loaded without a draft model; load it with "
            "model.load.loader.with_draft"
        )
    if config.sanitize:
        backend = cast("backends.Backend", SanitizedBackend(backend))
    network = _network(model.draft, backend, config)
    if network.layout.states:
        raise UnsupportedModelError(
            f"draft_model: wanted a network without recurrent layers, got {model.draft.name!r}: "
            f"its states could not forget rejected draft tokens"
        )
    return network


def _allocate(
    model: LoadedModel, network: PagedNetwork, ahead: PagedNetwork | None, config: EngineConfig
) -> MemoryPlan:
    """Have the caches; on several ranks as many blocks as the one with the least memory has."""
    networks = [network] if ahead is None else [network, ahead]
    plan = plan_memory(
        config,
        network.layout,
        is_gpu=network.device.type == "cuda",
        free_bytes=free_bytes(networks, config),
        beside=None if ahead is None else ahead.layout,
    )
    if model.ranks is not None:
        plan = plan.limited(model.ranks.all_reduce_min(plan.num_blocks))
    for each in networks:
        each.allocate(plan.num_blocks, config.block_size)
    return plan
