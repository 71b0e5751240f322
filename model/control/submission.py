"""What is asked of an engine: a prompt and all that is said of it, in one record.

The record travels whole, from whoever asks through the asynchronous engine to every rank, so a
further field is added here and read in `Engine.submit`.

Invariants: a Submission never changes. What depends on the model, such as which tokens there are,
is checked by the engine that takes it.

Does not know: the model, what becomes of it (`request.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Self

import kvcore
from model.control.params import SamplingParams
from model.errors import InvalidArgumentError, InvalidSettingError

Prompt = str | Sequence[int]

_RETAINED = re.compile(r"(\d{1,18}):(\d{0,18})(?:@(\d{1,10}))?(?:/(\d{1,18}))?", re.ASCII)
_END = 2**62  # no text is longer


@dataclass(frozen=True, slots=True)
class Retained:
    """Tokens to keep in the cache longer than others, as people write it.

    `0:512` keeps the first 512 tokens, `0:` all; `@2` more strongly than what has `@1`, which is
    what is meant where nothing stands; `/1000` for so many steps.
    """

    WANTED: ClassVar[str] = "START:STOP[@PRIORITY][/STEPS], such as 0:512@2/1000"

    wish: kvcore.Retention

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
    """A prompt, and how it is to be continued.

    Attributes:
        prompt: text, or token ids.
        params: how its tokens are chosen.
        num_samples: how often it is continued; it is computed once, and each sample is a request of
            its own, drawn apart from the others.
        priority: the lower, the sooner.
        namespace: with whom it shares what it computes; a salt for a tenant, for one.
        retain: which ranges of its tokens to keep in the cache longer than others, in steps.

    Raises:
        InvalidArgumentError: fewer than one sample.
    """

    prompt: Prompt
    params: SamplingParams = SamplingParams()  # noqa: RUF009  # it never changes
    _: KW_ONLY
    num_samples: int = 1
    priority: int = 0
    namespace: kvcore.Namespace = kvcore.DEFAULT_NAMESPACE
    retain: Sequence[kvcore.Retention] = ()

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InvalidArgumentError(f"num_samples: wanted at least 1, got {self.num_samples}")
