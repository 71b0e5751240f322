"""A chat template: the form of messages that it reads, and the text that it makes of them.

Published templates disagree about the form of messages. Some iterate over the arguments of a call,
others print them as they are; some take a content that is a list of parts alone; some write a call
only beside a content that is null, others fail on null. So a template is probed once: short
conversations are rendered in every form, and the first form that loses nothing is used from then
on.

Decides: which form that is, and what an image becomes in a message in which the template takes
none. Invariants: a message without parts or calls is passed as it came, where the template shows a
text of its role.

Does not know: tokens, where templates are found, requests.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from model.errors import InvalidArgumentError
from model.load.checkpoint import reason

Message = Mapping[str, Any]
"""A message of a conversation as OpenAI has it: its `role`, its `content`: a text, a list of parts,
or None; its `tool_calls`, whose arguments are JSON as text, or an object."""

_NO_TOKENS = dict.fromkeys(
    (f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")), ""
)
"""The special tokens that a tokenizer may lack, which templates join with texts."""

_MOST_TRIED = 16  # options that are left out one by one, to find the one that is refused
_NO_CONTENT: tuple[dict[str, object], ...] = (
    {"content": None}, {}, {"content": ""}, {"content": [{"type": "text", "text": ""}]},
)  # fmt: skip
"""The content of a message that only calls tools, in each form that templates want."""

_KEY, _VALUE, _OTHER, _WORDS = "probe_key", "probe value", "probe second", "probe words"
_ID = "probe0001"
_LONG_ID = "call_00000000-0000-0000-0000-000000000001"
_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
_PRINTED_NULL = re.compile("None|null")
_RAW_PART = re.compile("""['"]type['"]: ?['"](text|image)['"]""")
"""The way in which a template prints parts that it does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """The form of messages that a template reads.

    Attributes:
        has_text_arguments: True if the arguments of calls are JSON as text, not an object.
        no_content: the content of a message that only calls tools: null, missing or an empty one.
        splits_calls: True if calls beside a text are lost, so they become a message of their own.
        takes_one_call: True if a message with several calls is refused, or loses some, so each is
            put before its result.
        has_short_ids: True if the ids of calls must be nine letters or digits.
        knows_developer: True if the role `developer` is named, and its messages are shown.
        lists: the roles whose content must be a list of parts.
        images: the roles that take images, and the text that stands for one between two texts;
            empty: it stands elsewhere.
        lists_no_tools: True if a request without tools must have an empty list of them.
        completes_tools: True if a function needs a description and parameters.
        completes_parameters: True if each of its parameters needs a description.
    """

    has_text_arguments: bool
    no_content: Mapping[str, object]
    splits_calls: bool
    takes_one_call: bool
    has_short_ids: bool
    knows_developer: bool
    lists: frozenset[str]
    images: Mapping[str, str]
    lists_no_tools: bool
    completes_tools: bool
    completes_parameters: bool


@dataclass(frozen=True)  # without slots, for `form` is kept
class ChatTemplate:
    """A chat template.

    Args:
        text: in Jinja.
        variables: the special tokens of a tokenizer, such as `bos_token`.
    """

    text: str
    variables: Mapping[str, object] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse a template that no conversation passes, or that shows none. O(template).

        A template that refuses these conversations by `raise_exception` may take others.

        Raises:
            InvalidArgumentError: it is broken; the message is the template's error.
        """
        user = {"role": "user", "content": _WORDS}
        parts = {"role": "user", "content": [{"type": "text", "text": _WORDS}]}
        failed: list[Exception] = []
        system = {"role": "system", "content": _WORDS}
        for messages, options in (
            ([user], {}), ([system, user], {}), ([parts], {}), ([user], {"tools": []}),
            ([user], {"tools": [_TOOL]}),
        ):  # fmt: skip
            try:
                shown = self._rendered(messages, options)
            except Exception as error:  # noqa: BLE001  # a template may raise any error
                if type(error) is TemplateError:
                    return
                failed.append(error)
            else:
                if _WORDS in shown:
                    return
        first = failed[0] if failed else TemplateError("it shows no message")
        line = f" (line {first.lineno})" if isinstance(first, TemplateSyntaxError) else ""
        told = str(first) if type(first) is TemplateError else reason(first)
        raise InvalidArgumentError(f"{told}{line}")

    def render(
        self,
        messages: Sequence[Message],
        *,
        opens_answer: bool,
        options: Mapping[str, Any],
        image_mark: str = "",
    ) -> str:
        """Return the text of a conversation. O(its text).

        Args:
            messages: of the conversation.
            opens_answer: True if the text ends where the assistant's answer starts.
            options: `tools`, `continue_final_message` and further variables.
            image_mark: stands for an image if the template shows none of any role.

        Raises:
            InvalidArgumentError: the template refuses an option or the messages.
        """
        given = dict(options)
        if given.get("tools"):
            given["tools"] = [self._tool(tool) for tool in given["tools"]]
        always: dict[str, Any] = {"add_generation_prompt": opens_answer}
        if self.form.lists_no_tools:
            always["tools"] = []
        shaped: list[Message] = []
        try:
            shaped += self._shaped(messages, image_mark)
            return self._rendered(shaped, always | given)
        except Exception as error:  # a template may raise any error
            name = self._refused(shaped, always, given)
            wanted = f"{name}: wanted {'messages' if name == 'messages' else 'a value'} that the "
            told = str(error) if type(error) is TemplateError else reason(error)
            raise InvalidArgumentError(f"{wanted}model's chat template accepts: {told}") from error

    def _refused(
        self, messages: Sequence[Message], always: dict[str, Any], given: dict[str, Any]
    ) -> str:
        """Return the given option without which the messages pass, or `messages` without one."""
        end = messages_at_end(messages)  # a long conversation is not rendered again and again

        def passes(names: Sequence[str]) -> bool:
            try:
                self._rendered(end, always | {name: given[name] for name in names})
            except Exception:  # noqa: BLE001  # a template may raise any error
                return False
            return True

        tried = list(given)[:_MOST_TRIED]
        if passes(list(given)) or not passes(()):
            return "messages"
        alone = (name for name in tried if passes([other for other in given if other != name]))
        return next(alone, tried[-1])

    def _rendered(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        rendered: Any = render_jinja_template(
            conversations=[list(messages)],  # type: ignore[arg-type]  # it takes any mappings
            chat_template=self.text,
            **{"add_generation_prompt": True, **_NO_TOKENS, **self.variables, **options},
        )
        return str(rendered[0][0])

    @cached_property
    def form(self) -> MessageForm:
        """The form of messages that the template reads. O(template), once."""
        return _probed(self._rendered, mentions_developer="developer" in self.text)

    def _shaped(self, messages: Sequence[Message], image_mark: str) -> Iterator[dict[str, Any]]:
        form = self.form
        for message in _one_by_one(messages) if form.takes_one_call else messages:
            made = dict(message)
            if made["role"] == "developer" and not form.knows_developer:
                made["role"] = "system"
            if made.get("tool_call_id") is not None:
                made["tool_call_id"] = self._id(made["tool_call_id"])
            calls = made.get("tool_calls")
            content = self._content(made["role"], made.pop("content", None), image_mark)
            if not calls:
                yield {**made, "content": content}
                continue
            made["tool_calls"] = [self._call(call) for call in calls]
            if not content:
                yield {**made, **form.no_content}
            elif form.splits_calls:
                yield {name: made[name] for name in made if name != "tool_calls"} | {
                    "content": content
                }
                yield {"role": made["role"], "tool_calls": made["tool_calls"], **form.no_content}
            else:
                yield {**made, "content": content}

    def _content(self, role: str, content: object, image_mark: str) -> str | list[dict[str, Any]]:
        """Return a content as the template reads it in a message of the role."""
        form, text = self.form, content or ""
        if isinstance(content, list):
            has_images = any(part.get("type") == "image" for part in content)
            if has_images and role in form.images:
                return content
            image = next(filter(None, form.images.values()), image_mark)
            text = "".join(part.get("text", image) for part in content)
        return [{"type": "text", "text": text}] if text and role in form.lists else str(text)

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments") or "{}"
        if self.form.has_text_arguments:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            arguments = json.loads(arguments)
        made = {"type": "function", **call, "function": {**function, "arguments": arguments}}
        if made.get("id") is not None:
            made["id"] = self._id(made["id"])
        return made

    def _id(self, call_id: str) -> str:
        """Return the id of a call as the template takes it: the same one for the same."""
        is_short = len(call_id) == len(_ID) and call_id.isascii() and call_id.isalnum()
        if is_short or not self.form.has_short_ids:
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[: len(_ID)]

    def _tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tool with what the template cannot do without."""
        form, function = self.form, dict(tool["function"])
        if form.completes_tools:
            function = {"description": "", "parameters": _OBJECT, **function}
        parameters = function.get("parameters")
        if form.completes_parameters and parameters:
            each = {
                name: {"description": "", **value} if isinstance(value, dict) else value
                for name, value in parameters.get("properties", {}).items()
            }
            function["parameters"] = {**parameters, "properties": each}
        return {**tool, "function": function}


def messages_at_end(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages that decide how a prompt ends. O(messages).

    They are those of the system, the last one of the user, and those from the last answer to it on:
    a long conversation is not rendered in order to learn its end.
    """
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return messages
    asked = len(roles) - 1 - roles[::-1].index("user")
    answers = [place for place in range(asked + 1, len(roles)) if roles[place] == "assistant"]
    system = [one for one in messages[:asked] if one["role"] in {"system", "developer"}]
    return [*system, messages[asked], *messages[answers[-1] if answers else asked + 1 :]]


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Cut messages with several calls into one for each call, and put it before its result."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: dict[object, list[Message]] = {}
        while place < len(messages) and messages[place]["role"] == "tool":
            results.setdefault(messages[place].get("tool_call_id"), []).append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            said = {"role": message["role"], "content": None} if number else message
            yield {**said, "tool_calls": [call]}
            yield from results.pop(call.get("id"), ())
        for others in results.values():
            yield from others


def _probed(
    render: Callable[[Sequence[Message], Mapping[str, Any]], str], *, mentions_developer: bool
) -> MessageForm:
    """Return the form of messages that a template reads. O(template)."""

    def shown(*messages: Message, tools: Sequence[Message] | None = None) -> str | None:
        """Return the text of a conversation, or None if the template fails."""
        try:
            return render(messages, {} if tools is None else {"tools": list(tools)})
        except Exception:  # noqa: BLE001  # a template may raise any error
            return None

    def is_list(role: str, call: Message | None = None) -> bool:
        """Return True if the template shows a text of the role in a list of parts alone."""
        plain, parts = (shown(*_said(role, what, call)) for what in (_WORDS, _parts(_WORDS)))
        return _WORDS not in (plain or "") and _WORDS in _read(parts)

    lists = {role for role in ("system", "user", "assistant") if is_list(role)}
    user = {"role": "user", "content": _parts("ask") if "user" in lists else "ask"}

    def rating(form: tuple[bool, Mapping[str, object]]) -> tuple[tuple[int, ...], ...]:
        """Return how well the template takes calls in a form, with a result and without one."""
        call = _call(form[1], has_text_arguments=form[0])
        return tuple(
            (text is not None, _shows_call(text), -len(_PRINTED_NULL.findall(text or "")))
            for text in (shown(user, call, _RESULT, tools=[_TOOL]), shown(user, call))
        )

    has_text, no_content = max(product((False, True), _NO_CONTENT), key=rating)  # the first best
    call = _call(no_content, has_text_arguments=has_text)
    lists |= {"tool"} if is_list("tool", call) else set()
    words = _parts(_WORDS) if "assistant" in lists else _WORDS
    said = {"role": "assistant", "content": words}
    [one] = call["tool_calls"]
    [other] = _call(no_content, _OTHER, has_text_arguments=has_text)["tool_calls"]
    long = {**call, "tool_calls": [{**one, "id": _LONG_ID}]}
    both = shown(user, {**call, "tool_calls": [one, other]}, _RESULT, _RESULT, tools=[_TOOL])

    def takes(*messages: Message, tool: Message = _TOOL) -> bool:
        return shown(user, *messages, tools=[tool]) is not None

    def shows(*messages: Message) -> bool:
        return _shows_call(shown(user, *messages, _RESULT, tools=[_TOOL]))

    pairs = {
        role: [_read(shown(*_said(role, what, call))) for what in (_PAIR, [_PAIR[0], _PAIR[2]])]
        for role in ("system", "user", "assistant", "tool")
    }
    return MessageForm(
        has_text_arguments=has_text,
        no_content=no_content,
        splits_calls=shows(call) and not shows({**call, "content": words}) and shows(said, call),
        takes_one_call=shows(call) and not (_shows_call(both) and _OTHER in (both or "")),
        has_short_ids=takes(call, _RESULT)
        and not takes(long, {**_RESULT, "tool_call_id": _LONG_ID}),
        knows_developer=mentions_developer
        and _WORDS in (shown({"role": "developer", "content": _WORDS}, user) or ""),
        lists=frozenset(lists),
        images=_images(pairs),
        lists_no_tools=shown(user) is None and shown(user, tools=()) is not None,
        completes_tools=takes() and not takes(tool=_BARE),
        completes_parameters=takes() and not takes(tool=_PLAIN),
    )


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "probe"}},
            "required": [_KEY],
        },
    },
}
_RESULT = {"role": "tool", "tool_call_id": _ID, "name": "probe_tool", "content": "done"}
_BARE = {"type": "function", "function": {"name": "probe_tool"}}
_PLAIN: dict[str, Any] = {
    "type": "function",
    "function": {
        **_TOOL["function"],
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


_BEFORE, _BEHIND = "probe before", "probe behind"
_PAIR = [*_parts(_BEFORE), {"type": "image"}, *_parts(_BEHIND)]


def _call(
    content: Mapping[str, object], value: str = _VALUE, *, has_text_arguments: bool
) -> dict[str, Any]:
    arguments: object = {_KEY: value}
    if has_text_arguments:
        arguments = json.dumps(arguments)
    function = {"name": "probe_tool", "arguments": arguments}
    calls = [{"id": _ID, "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls, **content}


def _said(role: str, content: object, call: Message | None = None) -> list[Message]:
    """Return a conversation in which a role says this, and the user a content of its kind."""
    user = {"role": "user", "content": "ask" if isinstance(content, str) else _parts("ask")}
    message = {"role": role, "content": content}
    match role:
        case "system":
            return [message, user]
        case "user":
            return [message]
        case "assistant":
            return [user, message]
    return [user, call or {}, {**_RESULT, **message}]


def _shows_call(text: str | None) -> bool:
    """Return True if a text has the arguments, neither as Python writes them nor quoted."""
    if text is None or _KEY not in text or _VALUE not in text:
        return False
    return f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text


def _read(text: str | None) -> str:
    """Return a text, or an empty one if it has parts as they came."""
    return "" if text is None or _RAW_PART.search(text) else text


def _images(texts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the roles that take images, and what stands for one, as `MessageForm` has them.

    Args:
        texts: of `_PAIR` for each role, with the image and without; empty: the template fails.
    """
    taken = {role: pair for role, pair in texts.items() if pair[0] not in {"", pair[1]}}
    between = {
        role: [text.partition(_BEFORE)[2].partition(_BEHIND)[0] for text in pair]
        for role, pair in taken.items()
    }
    found = {role: one for role, (one, other) in between.items() if one.strip() != other.strip()}
    return found or dict.fromkeys(taken, "")
