"""Chats in a file of prompts: lines with `messages`, and lines of OpenAI's batch files.

    {"messages": [{"role": "user", "content": "What is a tuple?"}], "max_tokens": 40}
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ...}}

Decides: how such a line becomes fields of a prompt. A body's sampling fields mean what they mean in
OpenAI's interface; fields that change no token are dropped. Invariants: a line that cannot be
answered is refused as a whole.

Does not know: files, tokens, chat templates, what a sampling field may be.
"""

from collections.abc import Mapping, Sequence

from model.errors import UsageError, shown

Message = Mapping[str, object]
"""A message of a chat: its role, its content, and what else a chat template reads."""

_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_LINE = {"custom_id", "method", "url", "body"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_DROPPED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier"}


def unpacked(where: str, entry: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a line as those of a prompt. O(line).

    Raises:
        UsageError: the line is not whole, or asks for something that a run does not do.
    """
    fields, is_batch = dict(entry), bool(entry.keys() & (_LINE - {"custom_id"}))
    if is_batch:
        fields = _body(where, entry)
    if is_batch or "messages" in fields:
        fields = _renamed(where, fields)
    if "messages" in fields:
        if "prompt" in fields or "images" in fields:
            raise UsageError(f"{where}: messages: cannot be combined with prompt or images")
        fields["messages"] = _messages(where, fields["messages"])
    if "custom_id" in entry:
        custom_id = entry["custom_id"]
        if not isinstance(custom_id, str) or not custom_id:
            raise UsageError(f"{where}: custom_id: wanted text, got {shown(custom_id)}")
        fields["custom_id"] = custom_id
    return fields


def without_nulls(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are given: null means "not given". O(fields)."""
    return {name: value for name, value in fields.items() if value is not None}


def text_of(messages: Sequence[Message]) -> str:
    """Return a conversation as a user reads it. O(its text)."""
    return "\n".join(f"{one['role']}: {one['content']}" for one in messages)


def _body(where: str, entry: Mapping[str, object]) -> dict[str, object]:
    """Return the body of a line of a batch file, checked against the rest of the line."""
    missing, unknown = sorted(_LINE - entry.keys()), sorted(entry.keys() - _LINE)
    if missing or unknown:
        what = f"{missing[0]} is missing" if missing else f"unknown field {shown(unknown[0])}"
        raise UsageError(
            f"{where}: wanted custom_id, method, url and body, as in OpenAI's batch files: {what}"
        )
    if entry["method"] != "POST":
        raise UsageError(f"{where}: method: wanted 'POST', got {shown(entry['method'])}")
    url, body = entry["url"], entry["body"]
    if not isinstance(url, str) or url not in _URLS:
        raise UsageError(f"{where}: url: wanted {' or '.join(_URLS)}, got {shown(url)}")
    if not isinstance(body, dict):
        raise UsageError(f"{where}: body: wanted an object, got {shown(body)}")
    fields = without_nulls(body)
    if _URLS[url] not in fields:
        raise UsageError(f"{where}: body: wanted {_URLS[url]}, which {url} needs")
    return fields


def _renamed(where: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Return fields of OpenAI's interface under the names that a prompt has."""
    found = {name: value for name, value in fields.items() if name not in _DROPPED}
    if found.pop("stream", None):
        raise UsageError(f"{where}: stream: wanted false, because a run has no client to stream to")
    longest = found.pop("max_completion_tokens", None)
    if longest is not None:
        found["max_tokens"] = longest
    if isinstance(found.get("logprobs"), bool):  # of a chat
        told, most = found.pop("logprobs"), found.pop("top_logprobs", None)
        if told:
            found["logprobs"] = 0 if most is None else most
        elif most:
            raise UsageError(f"{where}: top_logprobs: wanted only where logprobs is true")
    return found


def _messages(where: str, messages: object) -> tuple[Message, ...]:
    """Return messages whose contents are texts."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: messages: wanted a list of messages, got {shown(messages)}")
    return tuple(
        _message(f"{where}: messages: number {number}", one)
        for number, one in enumerate(messages, 1)
    )


def _message(where: str, message: object) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise UsageError(
            f"{where}: wanted an object with a role, one of {', '.join(_ROLES)}, and a content, "
            f"got {shown(message)}"
        )
    content = message.get("content")
    if isinstance(content, list):  # of parts
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise UsageError(f"{where}: content: wanted text, got {shown(content)}")
    return {**message, "content": content}
