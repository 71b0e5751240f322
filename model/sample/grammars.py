"""Structured outputs: the tokens that may come next in a text that follows a grammar.

Decides: the cost that a grammar may cause. llguidance, a compiled library without dependencies,
finds the allowed tokens: it takes schemas, expressions and grammars, knows the bytes of every
token, so a text may be tokenized in any way, and takes some tens of microseconds, lazily, so that
no grammar is expanded before it is used. Its own limits stop the worst; beyond them each token and
each request has a budget of processor time, because all of this runs within a step that other
requests share.

Invariants: the state of a text depends only on its tokens, so a preempted or forked request loses
nothing. A text ends as soon as nothing can follow. If the library fails on a text, that is an error
of its request; its mask allows everything, and its token is not used.

Does not know: logits, steps, why a request has its tokens.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from llguidance import LLMatcher
from torch import Tensor

from model.control.config import EngineConfig
from model.control.grammar import Grammar
from model.control.request import Request
from model.errors import GrammarError, InvalidSettingError
from model.sample.grammar_compiler import Compiled, GrammarCompiler, over_token_budget, reason

_FREE_S = 0.001
"""Time for the mask of a token that is not counted: most take a tenth of it."""

_TRIM_EVERY_S = 0.5  # processor time of all masks


class Grammars:
    """The texts of one engine that follow a grammar.

    Args:
        describe: returns the tokenizer as `tokenizers` writes it; None: grammars are unsupported.
        vocab_size: of the logits.
        eos_token_ids: tokens that end a text.
        config: the budgets.
        measures: True if time is measured; of several ranks only rank 0 does.
        clock: processor time of the thread, in seconds.

    Attributes:
        texts: by request_id, the state of each text that follows a grammar now; read its length.
    """

    def __init__(
        self,
        describe: Callable[[], str | None],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        config: EngineConfig,
        *,
        measures: bool = True,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._vocab_size = vocab_size
        self._token_s = config.grammar_token_s if measures else math.inf
        self._request_s = config.grammar_request_s if measures else math.inf
        self._clock = clock
        self._compiler = GrammarCompiler(
            describe, vocab_size, eos_token_ids, self._token_s if measures else None, clock,
            is_literal=config.json_schema_mode == "literal",
        )  # fmt: skip
        self.texts: dict[int, _Text] = {}
        self._untrimmed_s = 0.0
        self._overrun: dict[int, tuple[Request, GrammarError]] = {}

    @property
    def num_words(self) -> int:
        """32-bit words per mask. O(1)."""
        return -(-self._vocab_size // 32)

    def prepare(self) -> None:
        """Begin what the first grammar would wait for; see `GrammarCompiler.prepare`. O(1)."""
        self._compiler.prepare()

    def compile(self, grammar: Grammar) -> "Future[Compiled]":
        """Start to compile a grammar on another thread, unless done; from any thread. O(1).

        The future raises:
            InvalidSettingError: no text matches it, it is invalid, or it is too large.
            UnsupportedModelError: the model's tokens are unknown, or none of them ends a text.
        """
        return self._compiler.compile(grammar)

    def open(self, request: Request) -> None:
        """Keep the grammar of a request until `discard`. O(1), once it is compiled."""
        self._text(request)

    def mask(self, requests: Sequence[Request], newest: Mapping[int, int | None]) -> Tensor:
        """Return the allowed tokens: int32 [requests, num_words] on the host, a bit per token.

        Some tens of microseconds each. A text that has ended or failed allows every token.

        Args:
            requests: each with a grammar.
            newest: the last token of those whose last token is not known to the request yet.
        """
        shape, is_pinned = (len(requests), self.num_words), torch.cuda.is_available()
        words = torch.full(shape, -1, dtype=torch.int32, pin_memory=is_pinned)
        for row, request in zip(words, requests, strict=True):
            text, began_s = self._text(request), self._clock()
            text.follow(request, newest.get(request.request_id))
            if not text.matcher.is_stopped():
                text.matcher.unsafe_compute_mask_ptr(row.data_ptr(), 4 * self.num_words)
                if text.matcher.is_error():
                    row.fill_(-1)
            self._spend(request, text, self._clock() - began_s)
        return words

    def is_whole(self, request: Request) -> bool:
        """Return True if nothing can follow the known tokens of a request. O(new tokens)."""
        text, began_s = self._text(request), self._clock()
        text.follow(request, None)
        text.pending_s += self._clock() - began_s
        return text.matcher.is_stopped() and not text.matcher.is_error()

    def error(self, request: Request) -> GrammarError | None:
        """Return the error if the library cannot follow a request's text further, or None. O(1)."""
        matcher = self._text(request).matcher
        if not matcher.is_error():
            return None
        return GrammarError(
            f"grammar: wanted one that can be followed to the end, after "
            f"{request.num_output_tokens} tokens it cannot: {reason(matcher)}"
        )

    def take_overrun(self) -> list[tuple[Request, GrammarError]]:
        """Return the requests that exceeded a budget since the last call, with it. O(requests)."""
        overrun, self._overrun = list(self._overrun.values()), {}
        return overrun

    def discard(self, request: Request) -> None:
        """Drop all state of a request. O(1), sometimes O(grammars)."""
        self._overrun.pop(request.request_id, None)
        self.texts.pop(request.request_id, None)
        if self._untrimmed_s > _TRIM_EVERY_S:
            self._untrimmed_s = 0.0
            self._compiler.trim()

    def _spend(self, request: Request, text: "_Text", took_s: float) -> None:
        took_s, text.pending_s = took_s + text.pending_s, 0.0
        text.compiled.spent_s += took_s
        self._untrimmed_s += took_s
        text.spent_s += max(0.0, took_s - _FREE_S)
        if took_s > self._token_s:
            self._overrun[request.request_id] = (request, over_token_budget(took_s, self._token_s))
        elif text.spent_s > self._request_s:
            error = GrammarError(
                f"grammar: wanted at most {self._request_s:g} s of the processor for the masks of "
                f"a request, beside {_FREE_S:g} s for each token (--grammar-request-s), got "
                f"{text.spent_s:.3g} s after {request.num_output_tokens} tokens"
            )
            self._overrun[request.request_id] = (request, error)

    def _text(self, request: Request) -> "_Text":
        text = self.texts.get(request.request_id)
        if text is None:
            grammar = request.params.grammar
            if grammar is None:
                raise InvalidSettingError("grammar", "a request that has one", request)
            text = self.texts[request.request_id] = _Text(self.compile(grammar).result())
        return text


class _Text:
    """The state of one text.

    Attributes:
        compiled: its grammar.
        spent_s: processor time beyond what is free.
        pending_s: processor time since the last mask.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.spent_s = self.pending_s = 0.0
        self._matcher: LLMatcher | None = None
        self._num_followed = 0

    @property
    def matcher(self) -> LLMatcher:
        """The matcher of this text; created on first use. O(1)."""
        if self._matcher is None:
            self._matcher = self.compiled.matcher.deep_copy()
        return self._matcher

    def follow(self, request: Request, newest: int | None) -> None:
        """Consume the tokens that a request has got since the last call, and its newest token."""
        first = request.num_prompt_tokens + self._num_followed
        tokens = request.tokens[first:].tolist()
        if request.is_expecting and newest is not None and len(request.tokens) >= first:
            tokens.append(newest)
        for token in tokens:
            self._num_followed += 1
            if not self.matcher.is_stopped():
                self.matcher.consume_token(token)
