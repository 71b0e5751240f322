"""What the control plane knows of the images of a prompt.

Decides: that an image is known by the range of tokens that it stands for, and by its content; and
where a chunk of a prompt may end, where a network lets the tokens of an image see each other.

Invariants: the images of a request never change.

Does not know: pixels, tensors, vision towers.
"""

from collections.abc import Sequence
from typing import Protocol

import kvcore


class PromptImages(Protocol):
    """The images of a prompt, such as an `ImagePrompt`, which has their tensors too."""

    @property
    def items(self) -> Sequence[kvcore.MultimodalItem]:
        """Content and place of each, in order."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all tokens of an image have to be computed in one step."""
        ...
