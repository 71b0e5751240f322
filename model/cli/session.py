"""A run of the command line, once its input is read.

Decides: the order of a run (load, compile, generate, verify, report), and what goes to stdout and
what to stderr. Invariants: with `--json` stdout holds one document and nothing else; results go to
stdout, progress to stderr; an error that the user can fix is a ModelError; however a run
ends, by a signal or a fault, the texts that were finished by then are printed.

Does not know: how anything is done; how the input was read, and how the process ends (`run.py`).
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import backends
from model.caches.memory import show_bytes
from model.cli.args import Options
from model.cli.bars import bar
from model.cli.exits import FAILED, Stopped
from model.cli.files import OutputFile
from model.cli.progress import say, telling
from model.cli.prompts import PromptSpec
from model.cli.report import document, measure, table
from model.cli.signals import StopRequest, stopping
from model.cli.start import COMPILING, input_errors, start, warm_up
from model.cli.step_table import StepStats, step_table, summarize_steps
from model.cli.verify import Mismatch, compare
from model.cli.writer import StreamWriter, show
from model.control.config import EngineConfig
from model.control.images import PromptImages
from model.control.request import FinishReason, Request, SampledToken
from model.control.submission import Submission, salted
from model.engine import Engine, TwinEngine, engine_of
from model.engine_core import Completion, Output
from model.errors import InvalidArgumentError, RankLostError, UsageError
from model.forward.lora import Adapters
from model.forward.ranges import DeviceRanges
from model.load.loader import LoadedModel
from model.trace import write_trace

_Encoded = tuple[list[int], PromptImages | None]
"""The tokens of a prompt, and its images."""


@dataclass(frozen=True, slots=True)
class _Generated:
    """The completions in the order of the prompts, and the error that ended the run early."""

    completions: list[Completion]
    elapsed_s: float
    fault: BaseException | None


def execute(options: Options, specs: Sequence[PromptSpec]) -> int:
    """Run prompts as the options say, and print.

    Returns:
        The exit code: 1 if --verify differs, 3 if a request failed alone.

    Raises:
        ModelError: the input cannot be run.
        OSError: the output could not be written.
    """
    what = options.model
    with input_errors():
        trace = options.trace.file(
            what.path, options.engine.draft_model, options.prompts.prompts_file
        )
        return _run(options, specs, trace)


def _run(options: Options, specs: Sequence[PromptSpec], trace: OutputFile | None) -> int:
    what = options.model
    with telling(f"loading {what.path}"):
        model, backend = start(
            what.path,
            what.backend,
            what.dtype,
            draft_name=options.engine.draft_model,
            num_ranks=what.tp,
            expert_parallel=what.expert_parallel,
            config=options.engine,
            is_exact=options.output.verify,
        )
    prompts = _encode(model, specs, options.engine)
    with telling("checking the network and allocating its KV cache"):
        engine = _engine(options, model, backend, specs, prompts)
    if isinstance(engine, TwinEngine) and not engine.leads:
        return _follow(model, engine)
    requests = _queue(engine, specs, prompts)
    about = {
        "model": what.path,
        "backend": backend.name,
        "device": str(backend.device),
        "dtype": str(model.network.dtype).removeprefix("torch."),
    }
    say(f"{about['model']} in {about['dtype']}, {about['backend']} on {about['device']}")
    say(engine.describe_memory())
    if not engine.memory.holds_all:
        say(_preemption(engine))
    with telling(COMPILING):
        started = time.perf_counter()
        how = warm_up(engine)
    say(f"network: {how}; ready after {time.perf_counter() - started:.1f} s")
    recorder = engine.record() if options.trace.stats or trace is not None else None
    if recorder is not None and trace is not None:
        recorder.record_pool(model.codec.decode)
        if model.network.device.type == "cuda":
            recorder.record_device(DeviceRanges(model.network.device))
    with stopping() as asked:  # until all that is finished is printed
        generated = _generate(options, engine, specs, requests, asked)
        _end(engine, generated.fault, is_verified=options.output.verify)
        mismatches = steps = None
        try:
            if recorder is not None and trace is not None:
                with trace.replaced() as out:
                    write_trace(out, recorder)
        finally:  # without a trace too, if the disk is full
            if options.output.verify and generated.fault is None:
                mismatches = _verified(model, requests, asked, engine.network.adapters)
            if recorder is not None and options.trace.stats:
                steps = summarize_steps(recorder)
            _report(options, engine, specs, about, generated, mismatches, steps)
    if generated.fault is not None:
        raise generated.fault
    if asked.number is not None:
        raise Stopped(asked.number, f"{len(requests)} of {len(requests)} texts are finished")
    num_failed = _tell_failed(specs, requests)
    return FAILED if num_failed else 1 if mismatches else 0


def _report(
    options: Options,
    engine: Engine,
    specs: Sequence[PromptSpec],
    about: dict[str, str],
    generated: _Generated,
    mismatches: Sequence[Mismatch] | None,
    steps: StepStats | None,
) -> None:
    """Print what was generated; of a run that was ended early, the texts that were finished."""
    completions = generated.completions
    stats = measure(engine, completions, generated.elapsed_s)
    if options.output.json:
        names = [spec.custom_id for spec in specs]
        whole = document(about, completions, stats, mismatches, names)
        json.dump(whole if steps is None else {**whole, "steps": asdict(steps)}, sys.stdout)
        print()
        return
    if not options.output.stream:
        for head, completion in zip(_heads(specs), completions, strict=True):
            if completion.request.finish_reason is not FinishReason.ABORTED:
                print(show(*head, completion.text), end="")
    print(table(stats))
    if steps is not None:
        print(f"\n{step_table(steps)}")


def _tell_failed(specs: Sequence[PromptSpec], requests: Sequence[Request]) -> int:
    """Name the requests that ended alone, by an error; return their number."""
    places = [spec.where for spec in specs for _ in range(spec.params.n)]
    failed = [
        (where, request)
        for where, request in zip(places, requests, strict=True)
        if request.finish_reason is FinishReason.ERROR
    ]
    for where, request in failed:
        say(f"error: {where}: failed after {request.num_output_tokens} tokens: {request.error}")
    return len(failed)


def _preemption(engine: Engine) -> str:
    if not engine.num_host_blocks:
        return "preemption: preempted requests are recomputed"
    size = show_bytes(engine.network.layout.kv_bytes(engine.num_host_blocks, engine.kv.block_size))
    return f"preemption: preempted requests are swapped to host memory, up to {size}"


def _engine(
    options: Options,
    model: LoadedModel,
    backend: backends.Backend,
    specs: Sequence[PromptSpec],
    prompts: Sequence[_Encoded],
) -> Engine:
    """Return an engine with room for the prompts, unless its size was given."""
    lengths = tuple(  # the last token is handed out and never computed
        len(prompt) + spec.params.max_tokens - 1
        for spec, (prompt, _) in zip(specs, prompts, strict=True)
        for _ in range(spec.params.n)
    )
    config = dataclasses.replace(options.engine, expected_lengths=lengths)
    return engine_of(model, backend, config, checks_ranks=options.model.check_ranks)


def _follow(model: LoadedModel, engine: TwinEngine) -> int:
    """Run a rank that is not the first: it takes the same steps and prints nothing.

    A signal reaches the first rank too, which sends the others the end.
    """
    warm_up(engine)
    with stopping():
        requests: list[Request] = []
        if engine.follow(requests.extend):  # it is verified
            for index, request in enumerate(requests):
                compare(model, index, request, engine.network.adapters)
            if model.ranks is not None:
                model.ranks.disarm()
    return 0


def _encode(
    model: LoadedModel, specs: Sequence[PromptSpec], limits: EngineConfig
) -> list[_Encoded]:
    prompts: list[_Encoded] = []
    for spec in specs:
        try:
            if spec.messages:
                prompts.append((model.codec.encode_chat(spec.messages), None))
            elif spec.images:
                prompts.append(model.images.encode(spec.text, spec.images, limits))
            else:
                prompts.append((model.codec.encode(spec.text), None))
        except InvalidArgumentError as error:
            raise UsageError(f"{spec.where}: {error}") from error
    return prompts


def _queue(
    engine: Engine, specs: Sequence[PromptSpec], prompts: Sequence[_Encoded]
) -> list[Request]:
    requests: list[Request] = []
    for spec, (prompt, images) in zip(specs, prompts, strict=True):
        try:
            requests += engine.submit(
                Submission(
                    prompt,
                    spec.params,
                    priority=spec.request.priority,
                    namespace=salted(spec.request.cache_salt, spec.request.lora_name),
                    retain=[one.retention for one in spec.request.retain],
                    images=images,
                )
            )
        except InvalidArgumentError as error:
            raise UsageError(f"{spec.where}: {error}") from error
    return requests


def _heads(specs: Sequence[PromptSpec]) -> list[tuple[str, str]]:
    """Return the label and the prompt of each text: 3.1 and 3.2 where the third has two samples.

    A prompt with a `custom_id` is labelled with it, not with its number.
    """
    return [
        (f"{spec.custom_id or number}" + f".{sample}" * (spec.params.n > 1), spec.text)
        for number, spec in enumerate(specs, 1)
        for sample in range(1, spec.params.n + 1)
    ]


def _generate(
    options: Options,
    engine: Engine,
    specs: Sequence[PromptSpec],
    requests: Sequence[Request],
    asked: StopRequest,
) -> _Generated:
    """Step until all have ended, a signal asks for an end, or a step fails."""
    texts: dict[int, str] = {request.request_id: "" for request in requests}
    told: dict[int, list[SampledToken]] = {request.request_id: [] for request in requests}
    latest: dict[int, Output] = {}
    writer = StreamWriter(_heads(specs), sys.stdout) if options.output.stream else None
    fault: BaseException | None = None
    started = time.perf_counter()
    with bar("generated", len(requests), is_wanted=not writer) as advance:
        try:
            while engine.has_unfinished and not asked:
                for output in engine.step():
                    number, is_last = output.request.request_id, output.request.is_finished
                    latest[number] = output
                    if output.request.params.logprobs is not None:
                        told[number] += output.tokens
                    if writer is not None:
                        piece = output.take_text()
                        texts[number] += piece
                        writer.write(number, piece, is_last=is_last)
                    advance(int(is_last))
        except Exception as error:  # noqa: BLE001  # raised again, once what is finished is printed
            fault = error
    elapsed_s = time.perf_counter() - started
    if asked.number is not None and engine.has_unfinished:
        num_finished = sum(request.is_finished for request in requests)
        report = f"{num_finished} of {len(requests)} texts are finished"
        fault = fault or Stopped(asked.number, report)
    for request in requests:
        engine.abort(request)
    if writer is None:
        texts |= {number: output.take_text() for number, output in latest.items()}
    completions = [
        Completion(request, texts[request.request_id], tuple(told[request.request_id]))
        for request in requests
    ]
    return _Generated(completions, elapsed_s, fault)


def _end(engine: Engine, fault: BaseException | None, *, is_verified: bool) -> None:
    """Tell the other ranks that no more steps come, unless one is lost."""
    if not isinstance(fault, RankLostError):
        engine.end(goes_on=is_verified and fault is None)


def _verified(
    model: LoadedModel,
    requests: Sequence[Request],
    asked: StopRequest,
    adapters: Adapters | None,
) -> list[Mismatch] | None:
    """Compare with the dense network; None: a signal ended it early."""
    mismatches = _compared(model, requests, asked, adapters)
    if model.ranks is not None:
        model.ranks.disarm()
    if mismatches is None:
        return None
    total = sum(request.num_output_tokens for request in requests)
    if not mismatches:
        say(
            f"verified: {total} tokens of {len(requests)} requests are those of Transformers' "
            "generate"
        )
    else:
        after = sum(
            max(0, requests[one.index].num_output_tokens - one.position) for one in mismatches
        )
        say(f"verified: {total - after} of {total} tokens come before the first difference")
    return mismatches


def _compared(
    model: LoadedModel,
    requests: Sequence[Request],
    asked: StopRequest,
    adapters: Adapters | None,
) -> list[Mismatch] | None:
    """Name the first difference of each request."""
    mismatches = []
    for index, request in enumerate(requests):
        found = compare(model, index, request, adapters)
        if asked:
            return None
        if found.note:
            say(f"request {index + 1}: {found.note}")
        mismatch = found.mismatch
        if mismatch is not None:
            mismatches.append(mismatch)
            paged, dense = (
                "the end" if token is None else f"{token} {model.codec.decode([token])!r}"
                for token in (mismatch.paged, mismatch.dense)
            )
            say(f"request {index + 1}, token {mismatch.position}: paged {paged}, dense {dense}")
    return mismatches
