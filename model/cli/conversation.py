"""A conversation in the terminal: lines of the user, and answers as they are generated.

Decides: what a line means (`/clear`, `/exit`, a message), that the whole history goes through the
model's chat template again at every turn, of which the prefix cache has all but the end, and that a
signal during an answer stops the answer alone. Invariants: an answer that was stopped stays in the
history as far as it was shown; a message that cannot be answered leaves the history as it was; no
control character of an answer reaches the terminal.

Does not know: flags, how tokens come about.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from model.cli.exits import Stopped
from model.cli.progress import say
from model.cli.signals import StopRequest, stopping
from model.control.params import SamplingParams
from model.control.submission import Submission, salted
from model.engine import Engine
from model.errors import InvalidArgumentError, visible

with contextlib.suppress(ImportError):  # not on every system; a line can be edited with it
    import readline  # noqa: F401

_PROMPT = "> "
_ENDED = "the conversation has ended"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a message.

    Attributes:
        text: the whole answer, as far as it was generated.
        num_tokens: of the answer.
        num_prompt_tokens: of the conversation before it.
        num_cached_tokens: those of them that were prefix cache hits.
        error: the error that ended it early; None: there was none.
    """

    text: str
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None


class Conversation:
    """A conversation with a model.

    Args:
        engine: the engine that answers; nothing else runs on it.
        params: of every answer; its `max_tokens` is cut to what the model's length allows.
        system: the system message that it begins with; None: none.
        lora_name: the LoRA adapter of the answers; None: no adapter.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        system: str | None = None,
        *,
        lora_name: str | None = None,
    ) -> None:
        self._engine = engine
        self._namespace = salted("", lora_name)
        self._params = params
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = [*self._first]

    def clear(self) -> None:
        """Forget all but the system message. O(1)."""
        self.messages = [*self._first]

    def ask(
        self, text: str, show: Callable[[str], object], stop: StopRequest | None = None
    ) -> Answer:
        """Answer a message, and remember both. O(history), and the steps of the answer.

        Args:
            text: the message.
            show: is called with each piece of the answer as soon as there is one.
            stop: ends the answer between two steps.

        Raises:
            InvalidArgumentError: the history is too long, or the chat template does not accept it;
                nothing has changed.
        """
        engine = self._engine
        history = [*self.messages, {"role": "user", "content": text}]
        prompt = engine.model.codec.encode_chat(history)
        room = max(1, engine.max_model_len - len(prompt))
        params = dataclasses.replace(self._params, max_tokens=min(self._params.max_tokens, room))
        (request,) = engine.submit(Submission(prompt, params, namespace=self._namespace))
        pieces = []
        try:
            while engine.has_unfinished and not stop:
                for output in engine.step():
                    pieces.append(output.take_text())
                    show(pieces[-1])
        finally:
            engine.abort(request)
        answer = "".join(pieces)
        self.messages = [*history, {"role": "assistant", "content": answer}]
        return Answer(
            answer,
            request.num_output_tokens,
            len(prompt),
            request.num_cached_tokens,
            None if request.error is None else str(request.error),
        )


def converse(talk: Conversation, lines: TextIO, out: TextIO, *, reports: bool = False) -> None:
    """Answer line after line until `/exit` or the end of the input.

    Args:
        talk: the conversation.
        lines: the input of the user; a terminal gets a prompt.
        out: the target of the answers.
        reports: True if tokens and prefix cache hits are shown after each answer.

    Raises:
        Stopped: a signal came while a line was awaited, or another than SIGINT during an answer.
    """

    def show(piece: str) -> None:
        out.write(visible(piece))
        out.flush()

    if lines.isatty():
        say("Ctrl-C stops an answer; /clear forgets the conversation, /exit or Ctrl-D ends it")
    while (line := _read(lines, out)) is not None and line != "/exit":
        if line == "/clear":
            talk.clear()
        elif line:
            started_s = time.perf_counter()
            with stopping() as stop:
                try:
                    answer = talk.ask(line, show, stop)
                except InvalidArgumentError as error:
                    say(f"error: {error}; /clear forgets the conversation")
                    continue
                finally:
                    show("\n")
            if stop.number not in {None, signal.SIGINT}:
                raise Stopped(stop.number or 0, _ENDED)
            if answer.error is not None:
                say(f"error: {answer.error}")
            if reports:
                say(_report(answer, time.perf_counter() - started_s))


def _read(lines: TextIO, out: TextIO) -> str | None:
    """Return the next line without the spaces around it; None: there is none.

    Raises:
        Stopped: a signal came.
    """

    def stop() -> None:
        raise Stopped(asked.number or 0, _ENDED)

    asked = StopRequest(stop)
    asked.handle()
    try:
        return _read_line(lines, out)
    finally:
        asked.restore()


def _read_line(lines: TextIO, out: TextIO) -> str | None:
    if not lines.isatty():
        line = lines.readline()
        return line.strip() if line else None
    try:
        return input(_PROMPT).strip()
    except EOFError:
        out.write("\n")
        return None


def _report(answer: Answer, took_s: float) -> str:
    return (
        f"{answer.num_tokens} tokens in {took_s:.1f} s; prefix cache hits: "
        f"{answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens"
    )
