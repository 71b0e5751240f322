"""The messages between the ingress and a replica: a client's request, its answer in pieces.

Decides: the parts of a request that travel. A `Ticket` stays in the process of the router that
issued it.

Does not know: Ray, the engine, the contents of a request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import kvcore
from model.cluster.router import Ticket

_FIRST_LETTER = 0x4E00  # beyond the characters that have a meaning in a prompt

TAKEN, FIRST_TOKEN = "taken", "first token"
"""The reports of a replica beside the pieces of an answer: it has the request; a first token
exists, though nothing of the answer is ready to be sent."""


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        start: status and headers, in the first piece.
        body: bytes of the body.
        is_last: True if the answer ends with it.
    """

    start: tuple[int, list[tuple[bytes, bytes]]] | None
    body: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """The LoRA adapters that every replica has to have, where they change while it runs.

    Attributes:
        changed_ns: the time of the last change; a replica follows the newest table it has seen.
        adapters: by name: the folder, and the version; None: the ingress cannot read it.
    """

    changed_ns: int
    adapters: Mapping[str, tuple[str, int | None]]

    @property
    def versions(self) -> dict[str, int]:
        """The known versions, by name. O(adapters)."""
        found = self.adapters.items()
        return {name: version for name, (_, version) in found if version is not None}


class Forwarded:
    """A client's request on its way to a replica.

    Attributes:
        scope: the ASGI scope, as far as it can travel.
        body: the whole body.
        tokens: of the prompt, for the router; empty: any replica will do.
        namespace: requests of the same namespace share cached blocks.
        table: the adapters that the replica has to have first; None: those that it began with.
        ticket: set by the router in this process; None: no router of ours has chosen.
        decision_ns: processor time of the choice.
    """

    __slots__ = (
        "_is_over", "body", "decision_ns", "namespace", "scope", "table", "ticket", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        scope: Mapping[str, object],
        body: bytes,
        tokens: Sequence[int] = (),
        namespace: kvcore.Namespace = kvcore.DEFAULT_NAMESPACE,
        table: AdapterTable | None = None,
    ) -> None:
        self.table = table
        self.scope = scope
        self.body = body
        self.tokens = tokens
        self.namespace = namespace
        self.ticket: Ticket | None = None
        self.decision_ns = 0
        self._is_over = False

    def __reduce__(self) -> tuple[type["Forwarded"], tuple[object, ...]]:
        """Travel without what only the router reads."""
        return Forwarded, (self.scope, self.body, (), kvcore.DEFAULT_NAMESPACE, self.table)

    @property
    def prompt(self) -> str:
        """The prompt with one letter for each token, which Ray's routers read. O(tokens)."""
        return "".join(chr(_FIRST_LETTER + token % 0x100000) for token in self.tokens) or " "

    def take(self, ticket: Ticket, decision_ns: int) -> None:
        """Keep the ticket of a choice; the router may run on another thread. O(1)."""
        self.ticket, self.decision_ns = ticket, decision_ns
        if self._is_over:  # the client went away during the choice
            self.end_ticket()

    def has_begun(self) -> None:
        """Record that the first token has come. O(1)."""
        if self.ticket is not None:
            self.ticket.has_begun()

    def end_ticket(self) -> None:
        """End the ticket; the request may be sent again. O(1)."""
        if self.ticket is not None:
            self.ticket.end()
            self.ticket = None

    def end(self) -> None:
        """End the ticket, and any that a choice still under way returns. O(1)."""
        self._is_over = True
        self.end_ticket()
