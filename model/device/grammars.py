"""Texts that must follow a grammar: which tokens may come next, and when the text is whole.

Decides: what a grammar is compiled with. llguidance does it, a compiled library that needs no
other: it takes schemas, expressions and grammars, knows the bytes of every token, so a text may be
cut into tokens anywhere, and finds the tokens that may follow in some tens of microseconds,
lazily, so that no grammar is expanded before it is used.

Invariants: a grammar is compiled once; where a text stands depends on its tokens alone, so a
preempted or forked request loses nothing. A text ends as soon as nothing can follow.

Does not know: logits, steps, why a request has the tokens that it has.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from torch import Tensor

from model.control.grammar import Grammar
from model.control.request import Request
from model.errors import InvalidSettingError, UnsupportedModelError


class Grammars:
    """The texts of one engine that follow a grammar.

    Args:
        describe: gives the tokenizer as `tokenizers` writes it; None: no grammar can be followed.
        vocab_size: of the logits.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self,
        describe: Callable[[], str | None],
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._describe = describe
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[Grammar, LLMatcher] = {}
        self._compiling = threading.Lock()
        self._texts: dict[int, _Text] = {}

    @property
    def num_words(self) -> int:
        """32-bit words of a mask. O(1)."""
        return -(-self._vocab_size // 32)

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar, unless it is. Some milliseconds, the first time some hundreds.

        Any thread may ask, so that the engine's need not wait.

        Raises:
            InvalidSettingError: it means nothing, or is too large.
            UnsupportedModelError: the model's tokens are unknown, or none of them ends a text.
        """
        self._matcher(grammar)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        known = self._compiled.get(grammar)
        if known is not None:
            return known
        with self._compiling:
            try:
                source = _source(grammar)
            except Exception as error:  # what a reader of grammars raises
                raise _refused(grammar, str(error)) from error
            matcher = LLMatcher(self._known_tokens(), source, log_level=0)
            if matcher.is_error():
                raise _refused(grammar, matcher.get_error())
            if len(self._compiled) >= _MOST_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[grammar] = matcher
            return matcher

    def mask(self, requests: Sequence[Request], newest: Mapping[int, int | None]) -> Tensor:
        """Which tokens may come next: int32 [requests, num_words] on the host, a bit a token.

        Some tens of microseconds each. A text that is whole, or was given up, may have any.

        Args:
            requests: each with a grammar.
            newest: the last token of those that have not been told theirs yet.
        """
        shape, is_pinned = (len(requests), self.num_words), torch.cuda.is_available()
        words = torch.full(shape, -1, dtype=torch.int32, pin_memory=is_pinned)
        for row, request in zip(words, requests, strict=True):
            text = self._text(request)
            text.follow(request, newest.get(request.request_id))
            if not text.matcher.is_stopped():
                text.matcher.unsafe_compute_mask_ptr(row.data_ptr(), 4 * self.num_words)
        return words

    def is_whole(self, request: Request) -> bool:
        """Whether nothing can follow what a request has been told. O(tokens since)."""
        text = self._text(request)
        text.follow(request, None)
        return text.matcher.is_stopped() and not text.matcher.is_error()

    def has_failed(self, request: Request) -> bool:
        """Whether the grammar became too large to be followed. O(1)."""
        return bool(self._text(request).matcher.is_error())

    def discard(self, request: Request) -> None:
        """Keep nothing of a request any more. O(1)."""
        self._texts.pop(request.request_id, None)

    def _text(self, request: Request) -> "_Text":
        text = self._texts.get(request.request_id)
        if text is None:
            grammar = request.params.grammar
            if grammar is None:
                raise InvalidSettingError("grammar", "a request that has one", request)
            text = self._texts[request.request_id] = _Text(self._matcher(grammar).deep_copy())
        return text

    def _known_tokens(self) -> LLTokenizer:
        if self._tokenizer is None:
            source, ends = self._describe(), sorted(self._eos_token_ids)
            if source is None:
                raise UnsupportedModelError("grammar: the bytes of this model's tokens are unknown")
            if not ends:
                raise UnsupportedModelError("grammar: this model has no token that ends a text")
            self._tokenizer = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=ends)
        return self._tokenizer


_MOST_COMPILED = 256


class _Text:
    """Where one text stands."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self._num_followed = 0

    def follow(self, request: Request, newest: int | None) -> None:
        """Take in what a request has been told since, and its newest token if it is known."""
        first = request.num_prompt_tokens + self._num_followed
        tokens = request.tokens[first:].tolist()
        if request.is_expecting and newest is not None and len(request.tokens) >= first:
            tokens.append(newest)
        for token in tokens:
            self._num_followed += 1
            if not self.matcher.is_stopped():
                self.matcher.consume_token(token)


def _source(grammar: Grammar) -> str:
    """As llguidance takes it.

    Raises:
        Exception: it is no JSON, or no grammar of its kind.
    """
    match grammar.form:
        case "json_schema":
            return str(LLMatcher.grammar_from_json_schema(grammar.text))
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "choice":
            texts = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
            return str(LLMatcher.grammar_from_lark(f"start: {texts}"))
        case "gbnf":
            return str(LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text)))
    return str(LLMatcher.grammar_from_lark(grammar.text))


def _refused(grammar: Grammar, why: str) -> InvalidSettingError:
    reason = " ".join(why.split())[:200]
    return InvalidSettingError(
        "grammar", f"a {grammar.form} that compiles ({reason})", grammar.text
    )
