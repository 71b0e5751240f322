"""What goes between the face and its replicas.

Decides: what of a request travels: a `Ticket` is where it was given out, and stays there.

Does not know: Ray, the engine.
"""

from typing import NamedTuple

from model.async_engine import EngineFaultError, NotServingError, QueueFullError
from model.cluster.router import Ticket
from model.control.submission import Submission
from model.errors import InvalidArgumentError, ModelError, RequestTooLongError
from model.token_stream import Delta

_KINDS: tuple[type[ModelError], ...] = (
    RequestTooLongError, InvalidArgumentError, QueueFullError, NotServingError
)  # fmt: skip
_FIRST_LETTER = 0x4E00  # beyond what a text means


class Sent:
    """A request on its way to a replica.

    Attributes:
        asked: what is asked; its prompt is tokens.
        ticket: of the router, which sets it in this process; None: no router of ours has chosen.
        decision_ns: for the choice: the processor's time, by Ray's own prefix router all time.
        is_given_up: nobody wants it any more, so a ticket that comes now is given back at once.
    """

    __slots__ = ("asked", "decision_ns", "is_given_up", "ticket")

    def __init__(self, asked: Submission) -> None:
        self.asked = asked
        self.ticket: Ticket | None = None
        self.decision_ns = 0
        self.is_given_up = False

    def __reduce__(self) -> tuple[type["Sent"], tuple[Submission]]:
        """Travel without the ticket."""
        return Sent, (self.asked,)

    @property
    def prompt(self) -> str:
        """The prompt as a text of as many letters, for routers that read texts. O(tokens)."""
        prompt = self.asked.prompt
        return prompt if isinstance(prompt, str) else "".join(_letter(token) for token in prompt)

    def has_begun(self) -> None:
        """The first token has come. O(1)."""
        if self.ticket is not None:
            self.ticket.has_begun()

    def end(self) -> None:
        """It is over there; it may be sent again. O(1)."""
        if self.ticket is not None:
            self.ticket.end()
            self.ticket = None

    def take(self, ticket: Ticket, decision_ns: int) -> None:
        """A router has chosen, in so much of the processor's time. O(1)."""
        self.ticket, self.decision_ns = ticket, decision_ns
        if self.is_given_up:  # while it was choosing, on its own thread
            self.end()

    def give_up(self) -> None:
        """It is over for good. O(1)."""
        self.is_given_up = True
        self.end()


class Taken(NamedTuple):
    """A replica works on the request."""


class Piece(NamedTuple):
    """Something that has come of it.

    Attributes:
        delta: what has come of a sample.
        num_cached: tokens of the prompt that were found in the replica's cache.
    """

    delta: Delta
    num_cached: int


class Refusal(NamedTuple):
    """A replica says no, or no more.

    Attributes:
        place: of the error's class among those that travel.
        message: of the error.
    """

    place: int
    message: str

    @classmethod
    def of(cls, error: ModelError) -> "Refusal":
        """What an error is on its way. O(1)."""
        places = (place for place, kind in enumerate(_KINDS) if isinstance(error, kind))
        return cls(next(places, len(_KINDS)), str(error))

    @property
    def error(self) -> ModelError:
        """The error again. O(1)."""
        kinds: tuple[type[ModelError], ...] = (*_KINDS, EngineFaultError)
        return kinds[self.place](self.message)


Message = Taken | Piece | Refusal


class Facts(NamedTuple):
    """What the face has to know of the engine in every replica.

    Attributes:
        vocab_size: token ids are below this.
        max_model_len: tokens that a request may come to.
        block_size: tokens of a block.
        max_num_seqs: requests that run at once.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    max_num_seqs: int


def _letter(token: int) -> str:
    return chr(_FIRST_LETTER + token % 0x100000)
