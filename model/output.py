"""What comes out of an engine: tokens as they are read, texts when they end.

Decides: nothing. Invariants: a text never holds part of a character.

Does not know: how a token came about.
"""

from dataclasses import dataclass

from model.control.request import Request, SampledToken
from model.text import TextStream


class Output:
    """One token of one request.

    Attributes:
        request: whose; its status and finish reason are up to date.
        token_id: the token that was drawn; None: its logits were no numbers, and it ended by that.
    """

    __slots__ = ("_chance", "_stream", "request", "token_id")

    def __init__(
        self,
        request: Request,
        token_id: int | None,
        stream: TextStream,
        chance: tuple[float | None, tuple[tuple[int, float], ...]] = (None, ()),
    ) -> None:
        self.request = request
        self.token_id = token_id
        self._stream = stream
        self._chance = chance

    @property
    def token(self) -> SampledToken | None:
        """The token, and how likely it was if its request asks; None as `token_id`. O(1)."""
        return None if self.token_id is None else SampledToken(self.token_id, *self._chance)

    @property
    def text(self) -> str:
        """The request's text that became final since it was last asked for; often none.

        Never part of a character. It is made now: who does not look does not pay. O(tokens since).
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
