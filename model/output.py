"""What comes out of an engine: tokens as they are read, texts when they end.

Decides: nothing. Invariants: a text never holds part of a character.

Does not know: how a token came about.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model.control.request import Request, SampledToken
from model.load.text import TextStream


class Output:
    """What a step gives one request: a token, or several with accepted draft tokens.

    Attributes:
        request: whose; its status and finish reason are up to date.
        token_ids: the tokens that were drawn, in their order; none: its logits were no numbers, and
            it ended by that.
    """

    __slots__ = ("_chances", "_stream", "request", "token_ids")

    def __init__(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        stream: TextStream,
        chances: Sequence[tuple[float, tuple[tuple[int, float], ...]]] = (),
    ) -> None:
        self.request = request
        self.token_ids = token_ids
        self._stream = stream
        self._chances = chances

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The tokens, with how likely they were if their request asks. O(tokens)."""
        if not self._chances:
            return tuple(map(SampledToken, self.token_ids))
        pairs = zip(self.token_ids, self._chances, strict=False)
        return tuple([SampledToken(token, *chance) for token, chance in pairs])

    def take_text(self) -> str:
        """The request's text that became final since this was last called; often none.

        Never part of a character. It is decoded now, so a caller that does not need it saves the
        cost. O(tokens since).
        """
        return self._stream.take()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request and its text.

    Attributes:
        tokens: each token of its output with how likely it was; empty unless the request asks.
    """

    request: Request
    text: str
    tokens: tuple[SampledToken, ...] = ()
