"""A submission: a prompt and everything that a caller says about it, in one record.

The record is passed on whole, from the caller through the asynchronous engine to every rank, so a
new field is added here and read in `Engine.submit`.

Invariants: a Submission never changes. What depends on the model, such as which tokens there are,
is checked by the engine that takes it.

Does not know: the model, what becomes of it (`request.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Self

import kvcore
from model.control.images import PromptImages
from model.control.params import SamplingParams
from model.errors import InvalidArgumentError, InvalidSettingError

Prompt = str | Sequence[int]


def salted(cache_salt: str, lora_name: str | None = None) -> kvcore.Namespace:
    """Return the namespace of a cache salt and an adapter; without both the default one. O(salt).

    Raises:
        InvalidArgumentError: UTF-8 cannot encode it.
    """
    try:
        return kvcore.Namespace(salt=cache_salt.encode(), lora_name=lora_name)
    except UnicodeEncodeError as error:
        raise InvalidArgumentError("cache_salt: wanted text that UTF-8 can encode") from error


_RETAINED = re.compile(r"(\d{1,18}):(\d{0,18})(?:@(\d{1,10}))?(?:/(\d{1,18}))?", re.ASCII)
_END = 2**62  # no text is longer


@dataclass(frozen=True, slots=True)
class Retained:
    """A range of tokens to keep in the prefix cache longer than others, in the notation of flags.

    `0:512` keeps the first 512 tokens, `0:` all. `@2` keeps them longer than ranges with `@1`, the
    default priority; `/1000` keeps them for 1000 steps.
    """

    WANTED: ClassVar[str] = "START:STOP[@PRIORITY][/STEPS], such as 0:512@2/1000"

    retention: kvcore.Retention

    @classmethod
    def from_text(cls, text: object) -> Self:
        """Read one. O(text).

        Raises:
            InvalidSettingError: it is none, or names no token.
        """
        found = _RETAINED.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise InvalidSettingError("retain", cls.WANTED, text)
        start, stop, priority, steps = found.groups()
        try:
            return cls(
                kvcore.Retention(
                    int(start),
                    int(stop or _END),
                    int(priority or 1),
                    None if steps is None else int(steps),
                )
            )
        except kvcore.InvalidArgumentError as error:
            raise InvalidSettingError("retain", cls.WANTED, text) from error


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt and how to continue it.

    Attributes:
        prompt: text, or token ids.
        params: its sampling parameters. The prompt is computed once, and each of its `n` samples
            is a separate request.
        priority: lower numbers run first.
        client: the client that sends it; clients take turns (`control/clients.py`).
        namespace: requests share cached prefixes only within a namespace; its `lora_name` is the
            adapter that computes them.
        retain: ranges of its tokens to keep in the prefix cache longer than others.
        boundaries: positions in the prompt at which the states of recurrent layers are wanted, for
            prompts that part there; that of its end is kept anyway.
        items: multimodal items that its tokens stand for (images, audio), in order. They are part
            of the prefix cache identity only: the runner computes the embeddings of tokens.
        images: the images that its tokens stand for, which the runner computes too; they have
            their items with them.
    """

    prompt: Prompt
    params: SamplingParams = SamplingParams()  # noqa: RUF009  # it never changes
    _: KW_ONLY
    priority: int = 0
    client: str | None = None
    namespace: kvcore.Namespace = kvcore.DEFAULT_NAMESPACE
    retain: Sequence[kvcore.Retention] = ()
    boundaries: Sequence[int] = ()
    items: Sequence[kvcore.MultimodalItem] = ()
    images: PromptImages | None = None
