"""Reads what a model writes as reasoning, text and calls of tools.

Decides: the format of a model's answers (`answer_formats.py`): the one that a flag names, else the
one whose tags the chat template has, else that of the type of model. And where tags count:
reasoning begins with the answer or in the prompt, and ends once; a call begins where a whole call
follows, outside of Markdown's code and of quotes unless its tag is a special token. All other text
is content, and is never altered; a call that is broken or cut off is content with its tags. A call
that a grammar demands (`tools.py`) is JSON, and is told as it is written.

Invariants: a text without regions comes out as it went in; the parts of an answer are the same,
however it was cut into pieces.

Does not know: tokens, how parts are sent.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from model.serve import call_parser
from model.serve.answer_formats import AnswerFormat, format_of, recognised
from model.serve.call_parser import Call, NotACallError, Source, Steps
from model.serve.config import ServeConfig

if TYPE_CHECKING:  # torch is not loaded before an engine is made
    from model.engine_core import EngineCore
    from model.load.codec import TextCodec

_UNKNOWN = (
    "tools: how this model writes calls is unknown, so they are returned as text; "
    "--tool-call-parser chooses a format"
)
_END_TOKENS = 256  # of a prompt, which may open the reasoning of the answer
_FENCE = re.compile(r"(?:[ \t>]|[-*+] |\d{1,9}[.)] )*(`{3,}(?!.*`)|~{3,})")
"""The beginning of a block of code, also within lists and quotes, or its end."""

_FENCE_CHARACTERS = 100
_TICKS = re.compile(r"(`+)")
_QUOTES = re.compile(r"""(?:(?:^|[\s(\[])["']|[“‘«])\Z""")  # noqa: RUF001


class Part(NamedTuple):
    """A piece of an answer, as it is told.

    Attributes:
        kind: "reasoning" or "content", with its text; "call", with the name of the function, begins
            a call; "arguments" is a piece of the arguments of the last call, which are JSON.
        text: of it.
        number: of the call among those of the answer, from 0.
        call_id: its name, where it begins.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    number: int = 0
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How an answer is read.

    Attributes:
        format: the format of the model; None: the answer is text.
        schemas: the schemas of the arguments of the tools on offer, by name; None: calls are text.
        demanded: the function that the whole answer calls; "": the answer is a list of calls, as a
            grammar makes it; None: the model calls as it likes.
        most_calls: the largest number of calls; further ones are dropped. None: there is no limit.
        num_earlier: the number of calls in earlier messages, behind which the template counts.
        begun: the end of the prompt that belongs to the answer.
        is_reasoning: True if the prompt has opened the reasoning.
        may_reason: True if reasoning may come first.
        reasoning: the texts around the reasoning before an answer that a grammar makes; None:
            there is none. The first is empty where the prompt has it.
        ends: texts of tokens that end an answer.
        is_quotable: True if a text may quote tags, as none of them is a special token.
    """

    format: AnswerFormat | None = None
    schemas: Mapping[str, Mapping[str, object]] | None = None
    demanded: str | None = None
    most_calls: int | None = None
    num_earlier: int = 0
    begun: str = ""
    is_reasoning: bool = False
    may_reason: bool = True
    reasoning: tuple[str, str] | None = None
    ends: tuple[str, ...] = ()
    is_quotable: bool = True


class Reading:
    """How the answers of one model are read.

    Args:
        codec: the model's tokenizer.
        tool_parser: the name of the format of calls; None: as the model's chat template says.
        reasoning_parser: likewise, of reasoning.
        template: the chat template, where it is not the tokenizer's.
        ends: the texts of the tokens that end an answer.

    Attributes:
        format: the format of answers; None: it is unknown.
        knows_calls: True if it is known how the model writes calls.
        warning: a line for the start of a server, if calls of a chat model cannot be read.
        has_special_tags: True if some tags are special tokens, which a text usually leaves out.
    """

    def __init__(
        self,
        codec: "TextCodec",
        tool_parser: str | None,
        reasoning_parser: str | None,
        template: str | None = None,
        ends: Sequence[str] = (),
    ) -> None:
        self._decode = codec.decode
        self._reasons = reasoning_parser is not None
        self._ends = tuple(filter(None, ends))
        template = template or codec.chat_template
        self.format = _format(codec, tool_parser, reasoning_parser, template or "")
        self.knows_calls = self.format is not None and bool(self.format.calls)
        self.warning = _UNKNOWN if template is not None and not self.knows_calls else None
        tags = set() if self.format is None else _literals(self.format)
        self.has_special_tags = any(not _is_text(codec, tag) for tag in tags)
        reasoning = () if self.format is None else self.format.reasoning
        self._guides_reasoning = bool(reasoning) and all(_is_text(codec, tag) for tag in reasoning)

    def free(
        self,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, object]] = (),
        most_calls: int | None = None,
        *,
        num_earlier: int = 0,
        is_guided: bool = False,
        continued: str | None = None,
    ) -> Form:
        """Return how an answer is read in which the model may call tools or not. O(prompt).

        Args:
            prompt: its tokens.
            tools: those that it may call.
            most_calls: as `Form` has it.
            num_earlier: likewise.
            is_guided: True if a grammar makes the answer, behind its reasoning.
            continued: the beginning of the answer, where the prompt has it.
        """
        if self.format is None:
            return Form()
        end = self._decode(prompt[-_END_TOKENS:], skip_special_tokens=False).rstrip()
        opened = _opened(self.format, end, continued)
        reasoning = self._reasoning(opened=opened) if is_guided else None
        begun = max((t for t in _tags(self.format) if end.endswith(t)), default="", key=len)
        return Form(
            format=self.format,
            schemas=_schemas(tools) if tools and self.knows_calls else None,
            most_calls=most_calls,
            num_earlier=num_earlier,
            begun=begun,
            is_reasoning=opened is True and (not is_guided or reasoning is not None),
            may_reason=opened is None and continued is None,
            reasoning=reasoning,
            ends=self._ends if self.has_special_tags else (),
            is_quotable=not self.has_special_tags,
        )

    def _reasoning(self, *, opened: bool | None) -> tuple[str, str] | None:
        """Return the texts around reasoning that a grammar has to allow for."""
        if self.format is None or not self._guides_reasoning or opened is False:
            return None
        begin, end = self.format.reasoning
        if opened:
            return "", end
        return (begin, end) if self._reasons else None

    @staticmethod
    def open(form: Form, new_id: Callable[[], str]) -> "Reader":
        """Begin to read an answer. O(1)."""
        return Reader(form, new_id)

    def demanded(self, prompt: Sequence[int], named: str | None, *, num_earlier: int = 0) -> Form:
        """Return how an answer is read that a grammar of `tools.py` makes calls of. O(prompt).

        Args:
            prompt: its tokens.
            named: the function that must be called; None: the answer is a list of calls.
            num_earlier: as `Form` has it.
        """
        form = self.free(prompt, num_earlier=num_earlier, is_guided=True)
        return replace(form, demanded=named or "", begun="")


def reading_of(engine: "EngineCore", config: ServeConfig) -> Reading:
    """Return how the answers of a model that is served are read. O(template)."""
    codec, ends = engine.model.codec, sorted(engine.model.eos_token_ids)
    return Reading(
        codec,
        config.tool_call_parser,
        config.reasoning_parser,
        config.chat_template,
        [codec.decode([end], skip_special_tokens=False) for end in ends],
    )


def _is_text(codec: "TextCodec", mark: str) -> bool:
    """Return True if a mark is no special token."""
    return mark in codec.decode(codec.encode(mark))


def _format(
    codec: "TextCodec", tool_parser: str | None, reasoning_parser: str | None, template: str
) -> AnswerFormat | None:
    """Return the format of a model's answers."""
    found = format_of(tool_parser) if tool_parser else recognised(template, codec.model_type)
    reasoning = format_of(reasoning_parser) if reasoning_parser else None
    if reasoning is None:
        return found
    if found is None or not found.calls:
        return reasoning
    return replace(
        found, reasoning=reasoning.reasoning, reasons_again=reasoning.reasons_again,
        layout=tuple(dict.fromkeys((*found.layout, *reasoning.layout))),
    )  # fmt: skip


def _literals(form: AnswerFormat) -> set[str]:
    """Return all texts of a format that stand for themselves. O(forms)."""
    texts = [piece for one in form.calls for piece in call_parser.pieces(one.text)]
    literals = {text for text in texts if text[0] != "{" and text.strip()}
    return literals | {*form.reasoning, *form.section, *form.layout}


def _tags(form: AnswerFormat) -> tuple[str, ...]:
    """Return the texts with which a call or a piece of layout begins. O(forms)."""
    openers = [call_parser.opener(one) for one in form.calls]
    return tuple(filter(None, dict.fromkeys([*form.section[:1], *openers, *form.layout])))


def _opened(form: AnswerFormat, prompt: str, continued: str | None) -> bool | None:
    """Return True if a prompt has opened reasoning, False if it has closed it, else None."""
    if not form.reasoning or form.reasons_again:
        return None
    begin, end = (tag.strip() for tag in form.reasoning)
    _, found, inside = (prompt if continued is None else continued).rpartition(begin)
    if end in (inside if found else prompt):  # some templates close what none has opened
        return False if prompt.endswith(end) or continued is not None else None
    if not found or (continued is None and inside.strip()):  # an earlier message speaks of it
        return None
    return True


def _schemas(tools: Sequence[Mapping[str, object]]) -> dict[str, Mapping[str, object]]:
    """Return the schemas of the arguments of tools, by name."""
    made: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), **others}}:
                schema = others.get("parameters")
                made[name] = schema if isinstance(schema, Mapping) else {}
    return made


class _Code:
    """Follows whether a text is inside of Markdown's code, or behind a quote that opens."""

    def __init__(self) -> None:
        self._fence = ""  # what opened a block of code
        self._line = ""  # the beginning of the line
        self._end = ""  # the last characters of the line
        self._ticks = ""  # what opened code within the line
        self._run = ""  # the backticks at the end of the line

    def add(self, text: str) -> None:
        """Go on with the text. O(text)."""
        first, *others = text.split("\n")
        self._add_to_line(first)
        for line in others:
            self._settle()
            found = _FENCE.match(self._line)
            if found and not self._fence:
                self._fence = found[1]
            elif found and found[1].startswith(self._fence):
                self._fence = self._line[found.end() :].strip() and self._fence
            self._line = self._end = self._ticks = ""
            self._add_to_line(line)

    def _add_to_line(self, text: str) -> None:
        self._line += text[: _FENCE_CHARACTERS - len(self._line)]
        self._end = (self._end + text[-2:])[-2:]
        for piece in _TICKS.split(text):
            if piece[:1] == "`":
                self._run += piece
            elif piece:
                self._settle()

    def _settle(self) -> None:
        """Take the last backticks as an end or a beginning of code."""
        if self._run:
            self._ticks = "" if self._run == self._ticks else self._ticks or self._run
            self._run = ""

    def quotes(self) -> bool:
        """Return True if what follows is quoted. O(1)."""
        self._settle()
        return bool(self._fence or self._ticks or _QUOTES.search(self._end))


class Reader:
    """Reads one answer.

    Attributes:
        num_calls: how many it has made so far.
    """

    def __init__(self, form: Form, new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self._form = form
        self._new_id = new_id
        self._format = form.format or AnswerFormat()
        self._source = Source(form.begun)
        self._num_begun = len(form.begun)  # characters that the prompt has said
        self._parts: list[Part] = []
        self._held = ""  # what may be the end of the answer
        self._told_from: int | None = None  # the place of arguments that are told as they come
        self._gap: str | None = ""  # blanks at the beginning of a text; None: the text has begun
        self._is_told = False
        self._code = _Code()
        self._tags = _tags(self._format) if form.schemas is not None else self._format.layout
        if self._format.reasons_again:
            self._tags = (*self._tags, *self._format.reasoning[:1])
        self._opening, self._begun_tags = _opening(self._tags, self._format.before)
        self._steps = self._answer()
        next(self._steps, None)

    def read(self, text: str, *, is_last: bool) -> list[Part]:
        """Return what is new with a piece of the text. O(text).

        Args:
            text: the piece.
            is_last: True if the answer ends with it.
        """
        if self._form.format is None and self._form.demanded is None:
            return [Part("content", text)] if text else []
        text, self._held = self._held + text, ""
        for end in self._form.ends:
            if is_last:
                text = text.removesuffix(end)
                continue
            size = max((n for n in range(len(end) + 1) if text.endswith(end[:n])), default=0)
            if size > len(self._held):
                self._held = text[-size:]
        self._source.text += text.removesuffix(self._held) if self._held else text
        self._source.is_whole = is_last
        next(self._steps, None)
        self._tell_arguments()
        parts, self._parts = self._parts, []
        return list(_joined(parts))

    def _answer(self) -> Steps[None]:
        source, form = self._source, self._form
        if form.is_reasoning:
            yield from call_parser.blank(source)
            yield from call_parser.literal(source, self._format.reasoning[0])  # some repeat it
            yield from self._reasoning()
        elif form.may_reason and self._format.reasoning and not self._format.reasons_again:
            yield from call_parser.blank(source)
            if (yield from call_parser.literal(source, self._format.reasoning[0])):
                yield from self._reasoning()
            else:
                source.place = 0
        if form.demanded is None:
            yield from self._content()
            return
        try:
            yield from call_parser.blank(source)
            yield from self._demanded(form.demanded)
        except NotACallError as error:
            self._tell_arguments()
            self._told_from = None
            while not error.is_cut:  # a grammar makes no such text
                self._tell(source.text[source.place :])
                source.place = len(source.text)
                yield

    def _reasoning(self) -> Steps[None]:
        """Read reasoning and the layout around it."""
        source, close = self._source, self._format.reasoning[1]
        close = close.strip()
        yield from call_parser.blank(source)
        while True:
            found = source.text.find(close, source.place)
            size = _partial(source.text, source.place, (close,))
            end = len(source.text) - size if found < 0 else found
            if found < 0 and source.is_whole:
                end = len(source.text)
            text = source.text[source.place : end].rstrip()
            if text:
                self._parts.append(Part("reasoning", text))
                self._is_told = True
            source.place += len(text)
            if found >= 0:
                source.place = found + len(close)
                yield from call_parser.run(source, re.compile(r"\n*"))
                source.drop()
                self._gap, self._is_told = "", True
                return
            source.drop()
            if source.is_whole:
                return
            yield

    def _content(self) -> Steps[None]:
        """Read texts and calls up to the end of the answer."""
        source, format_ = self._source, self._format
        if self._form.schemas is not None and any(
            not call_parser.opener(form) for form in format_.calls
        ):
            yield from self._bare()
        while True:
            found = self._opening.search(source.text, source.place) if self._tags else None
            if found is None:
                size = (
                    0 if source.is_whole else _partial(source.text, source.place, self._begun_tags)
                )
                self._tell(source.text[source.place : len(source.text) - size])
                source.place = len(source.text) - size
                source.drop()
                if source.is_whole:
                    break
                yield
                continue
            lead = found[1]
            self._tell(source.text[source.place : found.start()])
            source.text, source.place = source.text[found.end(1) :], 0
            self._code.add(lead)
            outcome = yield from self._region()
            if outcome is True:
                self._num_begun = 0
                source.drop()
                continue
            source.place = 0
            if outcome is None:  # cut off: the rest is a part of it
                self._tell(lead + source.text)
                break
            self._tell(lead + source.text[0], is_known=len(lead))
            source.place = 1
        if self._gap and not self._is_told:
            self._parts.append(Part("content", self._gap))

    def _bare(self) -> Steps[None]:
        """Read calls that no tag opens, at the beginning of an answer."""
        source = self._source
        place = 0
        yield from call_parser.blank(source)
        while (yield from self._calls()) is True:
            place = source.place
            yield from call_parser.blank(source)
            yield from call_parser.literal(source, self._format.separator)
            yield from call_parser.blank(source)
        source.place = place
        source.drop()

    def _region(self) -> Steps[bool | None]:
        """Read what a tag opens.

        Returns:
            True if it is more than text; None if it could have been, but the answer ended.
        """
        source, format_ = self._source, self._format
        again = format_.reasoning[:1] if format_.reasons_again else ()
        if again and (yield from call_parser.literal(source, again[0])):
            source.drop()
            self._code = _Code()
            yield from self._reasoning()
            return True
        is_quoted = self._form.is_quotable and self._code.quotes()
        if self._form.schemas is not None and not is_quoted:
            outcome = yield from self._section()
            if outcome is not False:
                return outcome
        for tag in format_.layout:
            source.place = 0
            if (yield from call_parser.literal(source, tag)):
                self._code = _Code()
                return True
        return False

    def _section(self) -> Steps[bool | None]:
        """Read a call, or a section of calls."""
        source, section = self._source, self._format.section
        has_begun = bool(section) and (yield from call_parser.literal(source, section[0]))
        if has_begun:
            yield from call_parser.blank(source)
        outcome = yield from self._calls()
        while outcome is True and has_begun:
            end = source.place
            yield from call_parser.blank(source)
            if (yield from call_parser.literal(source, section[1])):
                return True
            if (yield from self._calls()) is not True:
                source.place = end
                return True
        return outcome

    def _calls(self) -> Steps[bool | None]:
        """Read what one of the forms of calls matches; as `_region` returns."""
        source, is_cut, begin = self._source, False, self._source.place
        schemas = self._form.schemas or {}
        for form in self._format.calls:
            source.place = begin
            try:
                found = yield from call_parser.calls(source, form, schemas)
            except NotACallError as error:
                is_cut = is_cut or error.is_cut
                continue
            is_strict = self._format.only_offered or not call_parser.opener(form)
            if is_strict and any(call.name not in schemas for call in found):
                continue
            for call in found:
                self._tell_call(call)
            return True
        source.place = begin
        return None if is_cut else False

    def _demanded(self, name: str) -> Steps[None]:
        """Read calls that a grammar makes, and tell their arguments as they come."""
        source, expect = self._source, call_parser.expect
        if name:
            while source.place == len(source.text):
                if source.is_whole:
                    return
                yield
            source.drop()
            yield from self._streamed(name)
            return
        yield from expect(source, "[ ")
        while True:
            yield from expect(source, '{ "name" : "')
            called = yield from call_parser.until(source, '"')
            yield from expect(source, ' , "arguments" : ')
            source.drop()
            yield from self._streamed(called)
            yield from expect(source, " } ")
            if (yield from call_parser.literal(source, "]")):
                return
            yield from expect(source, ", ")

    def _streamed(self, name: str) -> Steps[None]:
        self._tell_call(Call(name, ""))
        self._told_from = self._source.place
        yield from call_parser.value(self._source)
        self._tell_arguments()
        self._told_from = None

    def _tell_arguments(self) -> None:
        if self._told_from is None:
            return
        text = self._source.text[self._told_from : self._source.place]
        self._told_from = self._source.place
        if text:
            self._parts.append(Part("arguments", text, self.num_calls - 1))

    def _tell_call(self, call: Call) -> None:
        self._gap, self._is_told = "", True
        most = self._form.most_calls
        if most is not None and self.num_calls >= most:
            return
        number = call.number or self._form.num_earlier + self.num_calls
        call_id = self._format.call_id.format(name=call.name, number=number) or self._new_id()
        self._parts.append(Part("call", call.name, self.num_calls, call_id))
        if call.arguments:
            self._parts.append(Part("arguments", call.arguments, self.num_calls))
        self.num_calls += 1

    def _tell(self, text: str, *, is_known: int = 0) -> None:
        """Tell content; blanks before it only if it is not blank."""
        begun, self._num_begun = self._num_begun, max(0, self._num_begun - len(text))
        text = text[begun:]
        if not text:
            return
        self._code.add(text[is_known:])
        if self._gap is not None:
            text = self._gap + text
            self._gap = text
            if not text.strip():
                return
            self._gap = None
        self._is_told = True
        self._parts.append(Part("content", text))


def _opening(tags: Sequence[str], before: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Return what finds tags with the layout before them, and all texts to look for."""
    longest = sorted(tags, key=len, reverse=True)
    pattern = re.compile(f"({re.escape(before)}|)(?:{'|'.join(map(re.escape, longest))})")
    return pattern, (*longest, *[before + tag for tag in longest])


def _partial(text: str, place: int, tags: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin a tag. O(tags)."""
    most = min(len(text) - place, max(map(len, tags), default=1) - 1)
    for size in range(most, 0, -1):
        end = text[-size:]
        if any(tag.startswith(end) for tag in tags):
            return size
    return 0


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Parts, of which those of one region that follow each other are one."""
    held: Part | None = None
    for part in parts:
        if held is not None and held.kind == part.kind != "call":
            held = held._replace(text=held.text + part.text)
            continue
        if held is not None:
            yield held
        held = part
    if held is not None:
        yield held
