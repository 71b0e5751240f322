"""What comes out of an engine: tokens as they are read, texts when they end.

Decides: nothing. Invariants: a text never holds part of a character.

Does not know: how a token came about.
"""

from dataclasses import dataclass

from model.control.request import Request
from model.text import TextStream


class Output:
    """One token of one request.

    Attributes:
        request: whose; its status and finish reason are up to date.
        token: the token that was drawn; None: its logits were no numbers, and it ended by that.
    """

    __slots__ = ("_stream", "request", "token")

    def __init__(self, request: Request, token: int | None, stream: TextStream) -> None:
        self.request = request
        self.token = token
        self._stream = stream

    @property
    def text(self) -> str:
        """The request's text that became final since it was last asked for; often none.

        Never part of a character. It is made now: who does not look does not pay. O(tokens since).
        """
        return self._stream.take()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request and its text."""

    request: Request
    text: str
