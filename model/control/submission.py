"""What is asked of an engine: a prompt and all that is said of it, in one record.

The record travels whole, from whoever asks through the asynchronous engine to every rank, so a
further field is added here and read in `Engine.submit`.

Invariants: a Submission never changes. What depends on the model, such as which tokens there are,
is checked by the engine that takes it.

Does not know: the model, what becomes of it (`request.py`).
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import kvcore
from model.control.params import SamplingParams
from model.errors import InvalidArgumentError

Prompt = str | Sequence[int]


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
