"""The images of a conversation, and what the control plane knows of those of a prompt.

Decides: how a message names its images; that an image of a prompt is known by the range of tokens
that it stands for, and by its content.

Invariants: the images of a request never change.

Does not know: pixels, tensors, vision towers.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import kvcore
from model.errors import InvalidArgumentError, shown

_BEGINNINGS = (b"\x89PNG", b"\xff\xd8", b"RIFF", b"GIF8", b"BM")
_BEGUN_CHARACTERS = 64  # of base64: a multiple of 4
_MOST_HEAD = 256


class PromptImages(Protocol):
    """The images of a prompt, such as an `ImagePrompt`, which has their tensors too."""

    @property
    def items(self) -> Sequence[kvcore.MultimodalItem]:
        """The content and place of each, in order."""
        ...

    @property
    def is_whole(self) -> bool:
        """True if one step has to compute all tokens of an image."""
        ...


def check_count(count: int, most: int) -> None:
    """Raise unless a prompt may have this number of images. O(1).

    Raises:
        InvalidArgumentError: it has more.
    """
    if count > most:
        raise InvalidArgumentError(
            f"image: wanted at most {most} of them (--max-images), got {count}"
        )


def take_images(
    messages: Sequence[Mapping[str, object]], fetch: Callable[[str], bytes] | None = None
) -> tuple[list[dict[str, object]], list[object]]:
    """Return messages as a chat template reads them, and their images in order.

    O(messages + bytes).

    Args:
        messages: OpenAI's: a content is a text, or parts of `type` "text" or "image_url";
            or "image", with the image itself as `image`.
        fetch: the bytes behind a URL that is no `data:` URL; None: there are none.

    Raises:
        InvalidArgumentError: a part is of another kind, or a URL has no image.
    """
    found: list[object] = []

    def part_of(part: Mapping[str, Any]) -> dict[str, object]:
        match part:
            case {"type": "text", "text": str(text)}:
                return {"type": "text", "text": text}
            case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
                found.append(data_of(url) if fetch is None or url[:5] == "data:" else fetch(url))
            case {"type": "image", "image": image}:
                found.append(image)
            case _:
                kind = dict(part).get("type")
                raise InvalidArgumentError(
                    f"messages: wanted parts of type text or image_url, got {shown(kind)}"
                )
        return {"type": "image"}

    taken: list[dict[str, object]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [part_of(part) for part in content]
            texts = [str(part["text"]) for part in parts if "text" in part]
            content = parts if len(texts) < len(parts) else "".join(texts)
        taken.append({**message, "content": content})
    return taken, found


def check_data(url: str, most: int) -> None:
    """Raise unless a `data:` URL has at most `most` bytes, and begins as a file of an image. O(1).

    Raises:
        InvalidArgumentError: it has more, or begins otherwise.
    """
    head, _, _ = url[:_MOST_HEAD].partition(",")
    count = (len(url) - len(head)) * 3 // 4
    if count > most + 3:
        raise InvalidArgumentError(
            f"image: wanted at most {most:,} bytes (--max-image-bytes), got about {count:,}"
        )
    begun = data_of(url[: len(head) + 1 + _BEGUN_CHARACTERS]) if count > _BEGUN_CHARACTERS else b""
    if begun and not any(begun[: len(mark)] == mark for mark in _BEGINNINGS):
        raise InvalidArgumentError("image: wanted one of PNG, JPEG, WEBP, GIF, BMP, got none")


def data_of(url: str) -> bytes:
    """Return the bytes in a URL such as `data:image/png;base64,iVBO...`. O(bytes)."""
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidArgumentError(
            f"image_url: wanted data:image/...;base64,..., got {shown(head[:40])}"
        )
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InvalidArgumentError(f"image_url: its data is not base64: {error}") from error
