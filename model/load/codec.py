"""Text and conversations to tokens, and tokens to text, by a model's tokenizer.

Decides: that a conversation becomes text by the model's own chat template, and without one a line a
message. Invariants: a text that no request could have is refused before it is cut into tokens;
whatever a tokenizer raises is an error about the prompt, in one line.

Does not know: where a tokenizer is found (`loader.py`), images, requests.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import Protocol, cast

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from model.errors import InvalidArgumentError
from model.load.chat_template import ChatTemplate, Message, messages_at_end
from model.load.checkpoint import reason
from model.load.text import Step

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A piece that stands for one byte."""


class TextCodec(Protocol):
    """Text to tokens and back."""

    @property
    def chat_template(self) -> str | None:
        """The text of its chat template, or of all if it has several; None: it has none."""
        ...

    @property
    def model_type(self) -> str:
        """The family of its model, as its configuration names it."""
        ...

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        """Return a prompt's tokens, the special ones at its start included unless switched off."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return a conversation's tokens, in the format that the model was trained on.

        Args:
            messages: each with a `role` and a `content`.
            opens_answer: True if the tokens end where the assistant's answer starts.
            options: other arguments of Transformers' `apply_chat_template`, such as `tools`, and
                further variables of the template.
        """
        ...

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
        image_mark: str = "",
    ) -> tuple[str, bool]:
        """Return the text of a conversation, and True if it needs special tokens at its start.

        Args:
            messages: as for `encode_chat`; a content may be a list of parts, each of `type` "text",
                with a `text`, or "image".
            opens_answer: as for `encode_chat`.
            options: as for `encode_chat`.
            image_mark: stands for an image where there is no chat template.
        """
        ...

    def begun_answer(
        self,
        messages: Sequence[Message],
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return the end of a conversation's text that belongs to the answer. O(its text).

        That is what follows the last message, or with `continue_final_message` the last message.
        Reading starts with it, for it may open the reasoning; texts of users are not in it.
        """
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that may be a part of a character; None: they are unknown."""
        ...

    def check_template(self) -> None:
        """Refuse a chat template of the tokenizer that no conversation passes. O(template).

        Raises:
            InvalidArgumentError: it is broken; the message is the template's error.
        """
        ...

    def describe(self) -> str | None:
        """Return the tokenizer as `tokenizers` writes it, with tokens' bytes; None: unsupported.

        O(tokens).
        """
        ...

    def open_step(self, *, skip_special_tokens: bool = True) -> Step | None:
        """Return a decoder of one text piece by piece, faster than `decode`; None: unsupported."""
        ...


def plain_chat(messages: Sequence[Message], *, opens_answer: bool, image_mark: str = "") -> str:
    """Return a conversation for a model without a chat template: one line per message.

    `user: Hello`, and `assistant:` at the end if the assistant is to continue. O(messages).
    """

    def said(content: object) -> str:
        if not isinstance(content, list):
            return str(content or "")
        return "".join(part.get("text", image_mark) for part in content)

    lines = [f"{message['role']}: {said(message.get('content'))}\n" for message in messages]
    return "".join([*lines, "assistant:" if opens_answer else ""])


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Return the bytes that the letters of byte-level pieces stand for, as in GPT-2. O(1)."""
    letters = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return {letter: byte for byte, letter in letters.items()}


class _NoPanic:
    """Turns a panic of the tokenizers library's Rust code into an `Exception`."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is not None and kind.__module__ == "pyo3_runtime":
            raise RuntimeError(
                f"tokenizer.json makes the tokenizers library fail: {error}"
            ) from error


NO_PANIC = _NoPanic()


class HuggingFaceCodec:
    """A tokenizer of Transformers.

    Args:
        tokenizer: does the work.
        model_type: of the model.
        max_positions: of the model; a text that is too long even if every token were the longest is
            refused before tokenizing, which takes about 300 bytes per character. None: no limit.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model_type: str, max_positions: int | None
    ) -> None:
        self._templates: dict[str, ChatTemplate] = {}  # by their text
        self._tokenizer = tokenizer
        self.model_type = model_type
        self._max_characters: int | None = None
        if max_positions is not None:
            self._max_characters = max_positions * max(map(len, tokenizer.get_vocab()), default=1)

    @property
    def chat_template(self) -> str | None:
        """As `TextCodec`."""
        found: object = self._tokenizer.chat_template
        if isinstance(found, Mapping):
            return "\n".join(map(str, found.values()))
        return None if found is None else str(found)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of Transformers. O(1)."""
        return self._tokenizer

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return a conversation's tokens, in the format that the model was trained on."""
        text, adds = self.render_chat(messages, opens_answer=opens_answer, options=options)
        return self.encode(text, adds_special_tokens=adds)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
        image_mark: str = "",
    ) -> tuple[str, bool]:
        """As `TextCodec`."""
        others = dict(options or {})
        template = self._template(others.pop("chat_template", None), others.get("tools"))
        if template is not None:
            text = template.render(
                messages, opens_answer=opens_answer, options=others, image_mark=image_mark
            )
            return text, False
        if others.get("tools"):
            raise InvalidArgumentError(
                "tools: wanted a model with a chat template, which this one lacks; "
                "--chat-template gives it one"
            )
        return plain_chat(messages, opens_answer=opens_answer, image_mark=image_mark), True

    def begun_answer(
        self,
        messages: Sequence[Message],
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """As `TextCodec`."""
        others = dict(options or {})
        goes_on = bool(others.get("continue_final_message"))
        if not (opens_answer or goes_on):
            return ""
        end = messages_at_end(messages)
        try:
            whole, _ = self.render_chat(end, opens_answer=opens_answer, options=others)
        except InvalidArgumentError:  # messages that are left out are wanted
            end = messages
            whole, _ = self.render_chat(end, opens_answer=opens_answer, options=others)
        closed = end[:-1] if goes_on else end
        if not closed:
            return whole
        others.pop("continue_final_message", None)
        try:
            before, _ = self.render_chat(closed, opens_answer=False, options=others)
        except InvalidArgumentError:  # it takes no conversation that ends here
            before = whole
        lengths = range(1, 1 + min(len(whole), len(before)))
        begun = whole[bisect_left(lengths, 1, key=lambda k: int(whole[:k] != before[:k])) :]
        last = end[-1].get("content")
        if not begun and isinstance(last, str) and last.strip() in whole:
            begun = whole[whole.rindex(last.strip()) + len(last.strip()) :]  # always opened
        return begun

    def _template(self, given: object, tools: object) -> ChatTemplate | None:
        """Return the template that is given, else the tokenizer's, which may have one for tools."""
        text = given or self._tokenizer.chat_template
        if isinstance(text, dict):
            text = text.get("tool_use") if tools and "tool_use" in text else text.get("default")
        if not isinstance(text, str):
            return None
        if text not in self._templates:
            special = cast("Mapping[str, object]", self._tokenizer.special_tokens_map)
            self._templates[text] = ChatTemplate(text, dict(special))
        return self._templates[text]

    def check_template(self) -> None:
        """As `TextCodec`."""
        for tools in (False, True):
            template = self._template(None, tools)
            if template is not None:
                template.check()

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        """Return a prompt's tokens, the special ones at its start included unless switched off."""
        if self._max_characters is not None and len(text) > self._max_characters:
            raise InvalidArgumentError(
                f"prompt: wanted at most {self._max_characters:,} characters, the model's "
                f"positions times the length of its longest token, got {len(text):,}"
            )
        try:
            with NO_PANIC:
                return list(
                    self._tokenizer.encode(
                        text, truncation=False, add_special_tokens=adds_special_tokens
                    )
                )
        except Exception as error:  # its files may not fit together
            raise InvalidArgumentError(
                f"prompt: wanted text that the model's tokenizer accepts: {reason(error)}"
            ) from error

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        with NO_PANIC:
            text = self._tokenizer.decode(
                list(tokens),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        return str(text)

    def token_bytes(self, token: int) -> bytes | None:
        """As `TextCodec`. O(1)."""
        piece: object = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, bytes):  # of a tokenizer that is written in Python
            return piece
        text = str(piece)
        if found := _BYTE_PIECE.fullmatch(text):
            return bytes.fromhex(found[1])
        known = _bytes_of_letters()
        return bytes(known[letter] for letter in text) if known.keys() >= set(text) else None

    def describe(self) -> str | None:
        """Return the tokenizer as `tokenizers` writes it; None: it is written in Python."""
        tokenizer = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(tokenizer, Tokenizer):  # one that is written in Python
            return None
        if tokenizer.padding is not None or tokenizer.truncation is not None:
            tokenizer = copy(tokenizer)  # half a second for 150,000 tokens, which holds the GIL
            tokenizer.no_padding()
            tokenizer.no_truncation()
        return str(tokenizer.to_str())

    def open_step(self, *, skip_special_tokens: bool = True) -> Step | None:
        """Return a decoder of one text piece by piece; None: the tokenizer is written in Python."""
        tokenizer = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(tokenizer, Tokenizer):  # one that is written in Python
            return None
        step = partial(DecodeStream(skip_special_tokens=skip_special_tokens).step, tokenizer)

        def guarded(tokens: list[int]) -> str | None:
            with NO_PANIC:
                return step(tokens)

        return guarded
