"""Compiles grammars with llguidance, each once, in parallel with the steps.

Decides: which grammars are refused before a request is admitted. A grammar is first compiled in
another process (`grammar_trial.py`), within limits of time, memory and stack, then here, and
then a few tokens are tried: a grammar that no text matches, or whose first masks exceed the
library's limits or the budget of a token, is an error of the request.

Invariants: a grammar is compiled once, and a refusal is remembered like a success, as long as it is
among the last `_MOST_COMPILED`; of a refusal only the reason is kept. A grammar that no request
waits for any more is not begun. Threads that compile have more stack than the trial had, so what
passes the trial cannot overflow it here.

Does not know: requests, steps, logits.
"""

import logging
import subprocess  # the program is ours
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from model.control.grammar import Grammar
from model.errors import GrammarError, InvalidSettingError, UnsupportedModelError
from model.sample.grammar_source import Source, source_of

_log = logging.getLogger(__name__)

_MOST_COMPILED = 256
_MOST_SPENT_S = 4.0
"""The library keeps what a grammar and its masks have cost, some 100 MB a second."""

_MAX_LEXER_STATES = 1 << 16  # some 100 MB for one grammar; the library's own limit is 500 MB
_NUM_TRIED = 16  # tokens
_TRIAL_CPU_S, _TRIAL_WALL_S = 2, 120
_TRIAL_BYTES = 1 << 30
_TRIAL_STACK_BYTES, _STACK_BYTES = 32 << 20, 64 << 20
_NOTHING_FOLLOWS = "NoExtension"  # the library's word


@dataclass(slots=True, weakref_slot=True)
class Compiled:
    """A compiled grammar.

    Attributes:
        grammar: it.
        matcher: at the beginning of a text; copied for each.
        spent_s: of the processor, to compile it and for all masks of its texts.
    """

    grammar: Grammar
    matcher: LLMatcher
    spent_s: float = 0.0


_T = TypeVar("_T")
_Work = Future[Compiled | str]
"""The outcome of compiling a grammar: the compiled one, or the words of the error."""


class GrammarCompiler:
    """Compiles grammars for one model.

    Args:
        describe: returns the tokenizer as `tokenizers` writes it; None: grammars are unsupported.
        vocab_size: of the logits.
        eos_token_ids: tokens that end a text.
        token_s: the most processor time of a mask; None: grammars are not tried, because rank 0 has
            done that.
        clock: processor time of the thread, in seconds.
        is_literal: True if schemas mean what JSON Schema says, unless a grammar itself says.
    """

    def __init__(
        self,
        describe: Callable[[], str | None],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        token_s: float | None,
        clock: Callable[[], float] = time.thread_time,
        *,
        is_literal: bool = False,
    ) -> None:
        self._is_literal = is_literal
        self._describe = describe
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._token_s = token_s
        self._clock = clock
        self._tokenizer: LLTokenizer | None = None
        self._known: dict[Grammar, _Work] = {}
        self._asking: dict[_Work, list[Future[Compiled]]] = {}  # while it is not done
        self._alive: WeakValueDictionary[Grammar, Compiled] = WeakValueDictionary()
        self._lock = threading.RLock()  # a cancelled future calls back at once
        self._tokenizing = threading.Lock()
        self._threads = ThreadPoolExecutor(2, "grammar")

    def prepare(self) -> None:
        """Begin to make the library's tokenizer, on another thread. O(1).

        That takes a second for 150,000 tokens, and old versions of the library hold the GIL
        meanwhile, so a server does it while it prepares the engine. If grammars are unsupported, a
        request that has one gets the error; any other error is also logged.
        """
        self._submit(self._known_tokens).add_done_callback(_log_failure)

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """Begin to compile a grammar, unless that was done; from any thread. O(1).

        Each call returns another future. When all those of a grammar are cancelled before it was
        begun, it is not compiled.

        The future raises:
            InvalidSettingError: no text matches it, it is invalid, or it is too large.
            GrammarError: its first masks exceed the budget of a token.
            UnsupportedModelError: the model's tokens are unknown, or none of them ends a text.
        """
        asked: Future[Compiled] = Future()
        with self._lock:
            work, made = self._known.get(grammar), self._alive.get(grammar)
            if work is None and made is not None:  # forgotten here, but still in use
                asked.set_result(made)
                return asked
            if work is None:
                work = self._known[grammar] = self._begin(grammar)
                if len(self._known) > _MOST_COMPILED:
                    del self._known[next(iter(self._known))]
            asking = self._asking.get(work)
            if asking is not None:
                asking.append(asked)
        if asking is None:
            _settle(asked, grammar, work)
        else:
            asked.add_done_callback(lambda _: self._let_go(asked, grammar, work))
        return asked

    def _let_go(self, asked: Future[Compiled], grammar: Grammar, work: _Work) -> None:
        """Forget a cancelled future; cancel the work if no other waits for it."""
        with self._lock:
            asking = self._asking.get(work)
            if asking is None:
                return
            asking.remove(asked)
            if not asking and work.cancel() and self._known.get(grammar) is work:
                del self._known[grammar]

    def trim(self) -> None:
        """Forget the oldest grammars while the library holds too much memory. O(grammars)."""
        with self._lock:
            spent_s = {
                grammar: made.spent_s
                for grammar, work in self._known.items()
                if work.done() and work.exception() is None
                and isinstance(made := work.result(), Compiled)
            }  # fmt: skip
            left_s = sum(spent_s.values())
            for grammar, each_s in spent_s.items():
                if left_s <= _MOST_SPENT_S:
                    return
                left_s -= each_s
                del self._known[grammar]

    def _begin(self, grammar: Grammar) -> _Work:
        work = self._submit(partial(self._compile, grammar))
        self._asking[work] = []
        work.add_done_callback(lambda _: self._tell(grammar, work))
        return work

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Begin work on a thread with enough stack; any of them may compile later."""
        before = threading.stack_size(_STACK_BYTES)
        try:
            return self._threads.submit(work)
        finally:
            threading.stack_size(before)

    def _tell(self, grammar: Grammar, work: _Work) -> None:
        """Set the outcome of a grammar in all futures that wait for it."""
        with self._lock:
            asking = self._asking.pop(work)
        for asked in asking:
            _settle(asked, grammar, work)

    def _compile(self, grammar: Grammar) -> Compiled | str:
        began_s = self._clock()
        try:
            compiled = self._compiled(grammar)
        except InvalidSettingError as error:
            return error.wanted  # the error itself would keep the matcher, by its traceback
        except BaseException:  # it may be none of the grammar's doing
            with self._lock:
                self._known.pop(grammar, None)
            raise
        compiled.spent_s = self._clock() - began_s
        with self._lock:
            self._alive[grammar] = compiled
        self.trim()
        return compiled

    def _compiled(self, grammar: Grammar) -> Compiled:
        tokenizer = self._known_tokens()
        try:
            source = source_of(grammar, is_literal=self._is_literal)
        except Exception as error:  # a parser may raise any error
            raise refused(grammar, str(error)) from error
        if self._token_s is not None and grammar.form not in {"choice", "json_object"}:
            _try(grammar, source)
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(tokenizer, source.text, log_level=0, limits=limits)
        if matcher.is_error():
            raise refused(grammar, source.explained(reason(matcher)))
        if self._token_s is not None:
            self._begin_text(grammar, matcher.deep_copy(), tokenizer, self._token_s)
        return Compiled(grammar, matcher)

    def _begin_text(
        self, grammar: Grammar, text: LLMatcher, tokenizer: LLTokenizer, token_s: float
    ) -> None:
        """Follow the first allowed token a few times, to find errors early."""
        words = torch.zeros(-(-self._vocab_size // 32), dtype=torch.int32)
        tokens: list[int] = []
        while len(tokens) < _NUM_TRIED and not text.is_stopped():
            began_s = self._clock()
            text.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
            took_s = self._clock() - began_s
            if text.is_error():
                break
            if took_s > token_s:
                raise over_token_budget(took_s, token_s)
            token = _first(words, self._eos_token_ids)
            if token is None:
                return
            tokens.append(token)
            text.consume_token(token)
        if text.is_error():
            why = reason(text)
            if why == _NOTHING_FOLLOWS:
                begun = tokenizer.decode_str(tokens)
                why = f"nothing can come after {begun!r}" if tokens else "no text matches it"
            raise refused(grammar, why)

    def _known_tokens(self) -> LLTokenizer:
        with self._tokenizing:
            if self._tokenizer is None:
                source, ends = self._describe(), sorted(self._eos_token_ids)
                if source is None:
                    raise UnsupportedModelError(
                        "grammar: the bytes of this model's tokens are unknown"
                    )
                if not ends:
                    raise UnsupportedModelError("grammar: this model has no token that ends a text")
                self._tokenizer = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=ends)
            return self._tokenizer


def _log_failure(work: Future[LLTokenizer]) -> None:
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, UnsupportedModelError):
        _log.error("grammars: the tokenizer could not be made", exc_info=error)


def _settle(asked: Future[Compiled], grammar: Grammar, work: _Work) -> None:
    """Set the outcome of a grammar in one future."""
    if not asked.set_running_or_notify_cancel():
        return
    error = work.exception()
    made = work.result() if error is None else None
    if isinstance(made, Compiled):
        asked.set_result(made)
    else:
        wanted = InvalidSettingError("grammar", made or "", grammar.text)
        asked.set_exception(error or wanted)


def refused(grammar: Grammar, why: str) -> InvalidSettingError:
    """Return the error of a grammar that is refused. O(length of `why`)."""
    is_calls = grammar.form == "tool_calls"
    wanted = "schemas that can be enforced" if is_calls else f"a {grammar.form} that compiles"
    return InvalidSettingError("grammar", f"{wanted} ({' '.join(why.split())[:300]})", grammar.text)


def reason(matcher: LLMatcher) -> str:
    """Return the library's error message of a matcher. O(length of the message)."""
    lines = str(matcher.get_error()).split("\n<", maxsplit=1)[0]
    said = " ".join(lines.split())[:300]
    return _NOTHING_FOLLOWS if said.startswith(_NOTHING_FOLLOWS) else said


def over_token_budget(took_s: float, token_s: float) -> GrammarError:
    """Return the error of a mask that took too long. O(1)."""
    return GrammarError(
        f"grammar: wanted at most {token_s:g} s of the processor for the mask of a token "
        f"(--grammar-token-s), got {took_s:.3g} s"
    )


def _first(words: torch.Tensor, ends: frozenset[int]) -> int | None:
    """Return the first allowed token that does not end the text, or None. O(vocab_size)."""
    bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    allowed = bits.flatten()
    allowed[[end for end in ends if end < len(allowed)]] = 0
    token = int(allowed.argmax())
    return token if allowed[token] else None


def _try(grammar: Grammar, source: Source) -> None:
    """Compile a grammar in another process. Some tens of milliseconds.

    Raises:
        InvalidSettingError: it does not compile there, or a pattern overlaps with a property.
    """
    said = _tried(grammar, source.text)
    if said:
        raise refused(grammar, source.explained(said))
    for overlap in source.overlaps:
        if _tried(grammar, str(LLMatcher.grammar_from_json_schema(overlap.schema))):
            why = f"{overlap.place}: a pattern matches the name of a property beside it"
            raise refused(grammar, why)


def _tried(grammar: Grammar, source: str) -> str:
    """Compile a source in a separate process; return the library's error message, if any."""
    library = find_spec("llguidance._lib")
    program = Path(__file__).with_name("grammar_trial.py")
    limits = (_TRIAL_CPU_S, _TRIAL_BYTES, _TRIAL_STACK_BYTES)
    command = [sys.executable, "-I", "-S", str(program), str(library and library.origin)]
    too_large = (
        f"it takes more than {_TRIAL_CPU_S} s of the processor or {_TRIAL_BYTES >> 20} MiB to "
        "compile, or its rules are nested too deeply"
    )
    try:
        ran = subprocess.run(  # noqa: S603  # the program is ours
            [*command, *map(str, limits)],
            input=source.encode("utf-8", "replace"),
            capture_output=True,
            timeout=_TRIAL_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise refused(grammar, too_large) from error
    if ran.returncode < 0:  # a signal: out of stack, memory or time
        raise refused(grammar, too_large)
    if ran.returncode:
        raise RuntimeError(f"grammar_trial.py: {ran.stderr.decode(errors='replace')[-500:]}")
    said = ran.stdout.decode(errors="replace").strip()
    return "" if said.startswith("WARNING") else said
