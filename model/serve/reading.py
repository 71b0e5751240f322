"""What a model writes, read as reasoning, text and calls of tools.

The parser is Transformers' `ResponseParser`, which follows a response template: that of the
tokenizer, or the one that `transformers serve` has for a family of models whose tokenizers have
none. A call that a grammar demands (`tools.py`) is read by the same parser, with a template for it.
https://huggingface.co/docs/transformers/chat_response_parsing

Decides: what an answer is read with, and what becomes of a region that cannot be parsed, such as a
call that was cut off: it is text. White space between regions is dropped.

Invariants: a text without regions comes out as it went in; the parts of an answer are the same,
however it was cut into pieces.

Does not know: tokens, how parts are sent.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    load_response_template,
)

from model.load.codec import TextCodec

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of the region of reasoning in response templates."""

_CALLS = "tool_calls"
_END_TOKENS = 256  # of a prompt, in which the answer's beginning is looked for first
_ANYWHERE = {"start_anchor_pattern": r"\A"}


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


@dataclass(frozen=True, slots=True)
class Form:
    """How an answer is read.

    Attributes:
        template: of all regions that it may have; None: it is text.
        tools: those on offer, whose schemas give arguments their types.
        named: the function that the whole answer calls; None: it says so itself.
        most_calls: further ones are dropped; None: none are.
        prompt: the end of the prompt, which may begin the answer's first region.
        reasoning: what begins and ends the reasoning before an answer that a grammar makes; None:
            there is none. The beginning is empty where the prompt has it.
    """

    template: ResponseTemplate | None = None
    tools: Sequence[Mapping[str, object]] = ()
    named: str | None = None
    most_calls: int | None = None
    prompt: str = ""
    reasoning: tuple[str, str] | None = None


class Reading:
    """How the answers of one model are read.

    Args:
        codec: the model's tokenizer.
        tool_family: the type of model whose template is taken in place of the tokenizer's.
        reasoning_family: likewise, for its region of reasoning.

    Attributes:
        knows_calls: whether it is known how the model writes calls.
    """

    def __init__(
        self, codec: TextCodec, tool_family: str | None, reasoning_family: str | None
    ) -> None:
        self._decode = codec.decode
        self._reasons = reasoning_family is not None
        self._template = _family_template(codec, tool_family, reasoning_family)
        fields = {} if self._template is None else self._template["fields"]
        self.knows_calls = _CALLS in fields
        self._forms = {
            reads_calls: load_response_template({**self._template, "fields": {
                name: {**each, "optional": True}  # an answer may be cut off
                for name, each in fields.items()
                if reads_calls or name != _CALLS
            }}) if self._template is not None else None
            for reads_calls in (False, True)
        }  # fmt: skip

        self._region: dict[str, Any] = next(
            (fields[name] for name in _REASONING if name in fields), {}
        )
        ends = [self._region.get(name) for name in ("open", "close")]
        self._marks = [one for one in ends if isinstance(one, str) and _is_text(codec, one)]

    def free(
        self,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, object]] = (),
        most_calls: int | None = None,
        *,
        is_guided: bool = False,
    ) -> Form:
        """How an answer is read in which the model may call tools or not. O(prompt).

        Args:
            prompt: its tokens.
            tools: those that it may call.
            most_calls: as `Form` has it.
            is_guided: whether a grammar makes the answer, behind its reasoning.
        """
        template = self._forms[bool(tools)]
        if template is None:
            return Form()
        begun = self._begun(template, prompt)
        reasoning = self._reasoning(begun) if is_guided else None
        if is_guided and reasoning is None:
            begun = ""
        return Form(template, tools, None, most_calls, begun, reasoning)

    def _begun(self, template: ResponseTemplate, prompt: Sequence[int]) -> str:
        """What of an answer is in the prompt: without white space at its end.

        The parser would hold that back until the answer comes.
        """
        text = self._decode(prompt[-_END_TOKENS:], skip_special_tokens=False)
        if len(prompt) > _END_TOKENS and not template.start_anchor_re.search(text):
            text = self._decode(prompt, skip_special_tokens=False)
        if not template.start_anchor_re.search(text):
            return ""
        return template.truncate_past_last_anchor(text).rstrip()

    def _reasoning(self, begun: str) -> tuple[str, str] | None:
        """As `Form` has it, for an answer that is begun so."""
        if len(self._marks) < 2:
            return None
        begin, end = self._marks
        _, found, inside = begun.rpartition(begin)
        if found:
            return None if end in inside else ("", end)
        return (begin, end) if self._reasons else None

    @staticmethod
    def open(form: Form, new_id: Callable[[], str]) -> "Reader":
        """Begin to read an answer. O(end of the prompt)."""
        return Reader(form, new_id)

    def demanded(self, prompt: Sequence[int], named: str | None) -> Form:
        """How an answer is read that a grammar of `tools.py` makes calls of. O(prompt).

        Args:
            prompt: its tokens.
            named: the function that must be called; None: the answer is a list of calls.
        """
        name, arguments = ("{name}", "{arguments}") if named is None else (named, "{content}")
        calls = {
            "content": "json",
            "transform": {"type": "function", "function": {"name": name, "arguments": arguments}},
            "transform_each": named is None,
        }
        fields: dict[str, Any] = {_CALLS: calls}
        form = self.free(prompt, is_guided=True)
        if form.reasoning is not None:
            fields["reasoning_content"] = self._region
        return Form(
            load_response_template({**_ANYWHERE, "fields": fields}),
            named=named,
            prompt=form.prompt if form.reasoning is not None else "",
            reasoning=form.reasoning,
        )


def _is_text(codec: TextCodec, mark: str) -> bool:
    """Whether a grammar can have it: it is no special token."""
    return mark in codec.decode(codec.encode(mark))


def _family_template(
    codec: TextCodec, tool_family: str | None, reasoning_family: str | None
) -> dict[str, Any] | None:
    """The response template of a model; None: how it writes calls is unknown. O(template)."""
    family = tool_family or reasoning_family
    if family is None:
        return _template_of(codec.response_template, codec.model_type)
    found = _template_of(None, family)
    if found is not None and reasoning_family is not None:
        regions = (_template_of(None, reasoning_family) or found)["fields"]
        fields = {name: each for name, each in found["fields"].items() if name not in _REASONING}
        found["fields"] = fields | {n: each for n, each in regions.items() if n in _REASONING}
    return found


def _template_of(own: Mapping[str, object] | None, model_type: str) -> dict[str, Any] | None:
    """A tokenizer's own template, or a copy of that of a type of model."""
    tokenizer = SimpleNamespace(response_template=own)
    model = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    found = get_response_template(tokenizer, cast("Any", model))
    return None if found is None else deepcopy(dict(found))


class _Parser(ResponseParser):
    """The parser, which goes on behind a region that it cannot parse, and tells the text of all."""

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, body = self._current, self._body
        try:
            num_before = len(events)
            super()._close_current(events)
            for event in events[num_before:]:
                event["text"] = body
        except Exception:  # noqa: BLE001  # a template may raise any error
            events.append({"type": "region_broken", "field": field, "text": body})
            self._reset_to_implicit()


class Reader:
    """Reads one answer.

    Attributes:
        num_calls: how many it has made so far.
    """

    def __init__(self, form: Form, new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self._form = form
        self._new_id = new_id
        self._parser: _Parser | None = None
        self._is_first, self._is_blank = True, False  # no region yet; nothing of it but blanks
        if form.template is not None:
            tools = [dict(tool) for tool in form.tools]
            self._parser = _Parser(form.template, prefix=form.prompt, tools=cast("Any", tools))
            for event in self._parser.initial_events:  # they were told, or are the template's
                list(self._told(event))
            self.num_calls = 0

    def read(self, text: str, *, is_last: bool) -> list[Part]:
        """What is new with a piece of the text. O(text).

        Args:
            text: the piece.
            is_last: whether the answer ends with it.
        """
        if self._parser is None:
            return [Part("content", text)] if text else []
        events = self._parser.feed(text) if text else []
        if is_last:
            events += self._parser.finalize()[1]
        return list(_joined(part for event in events for part in self._told(event)))

    def _told(self, event: Mapping[str, Any]) -> Iterator[Part]:
        kind, field = event["type"], event["field"]
        is_named_call = field == _CALLS and self._form.named is not None
        if kind == "region_open":
            self._is_blank = not self._is_first or field in _REASONING
            self._is_first = False
            if is_named_call:
                yield from self._call(self._form.named or "")
        elif kind == "region_chunk" and is_named_call:
            yield self._arguments(event["text"])
        elif kind == "region_chunk" and not event["dirty"]:
            yield from self._text(field, event["text"])
        elif kind == "region_broken" and not is_named_call:
            yield from self._text("content", event["text"])
        elif kind == "region_close" and field == _CALLS and not is_named_call:
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                yield from self._whole_call(call, event["text"])

    def _text(self, field: str, text: str) -> Iterator[Part]:
        if self._is_blank:
            text = text.lstrip()
        if text:
            self._is_blank = False
            yield Part("reasoning" if field in _REASONING else "content", text)

    def _whole_call(self, call: object, text: str) -> Iterator[Part]:
        """A call that was parsed; the text of what is none."""
        match call:
            case {"function": {"name": str(name), **others}}:
                arguments = others.get("arguments", others.get("parameters", {}))
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                for part in self._call(name):
                    yield part
                    yield self._arguments(arguments)
            case _:
                yield from self._text("content", text)

    def _call(self, name: str) -> Iterator[Part]:
        most = self._form.most_calls
        if most is None or self.num_calls < most:
            self.num_calls += 1
            yield Part("call", name, self.num_calls - 1, self._new_id())

    def _arguments(self, text: str) -> Part:
        return Part("arguments", text, self.num_calls - 1)


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
