"""What an allocator must offer to be tested, and what it may promise.

An adapter maps the eight verbs of `Allocator` to the calls that an engine makes for the same
purpose, in the same order. What not every allocator does is a `Promise`: the machines use only what
is promised, and check all of it. Nothing of an allocator's insides is ever asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, Protocol, TypeVar

R = TypeVar("R")
"""Whatever the adapter uses for a request; the machines never look inside."""

R_contra = TypeVar("R_contra", contravariant=True)


class Promise(Enum):
    """What an allocator may promise beyond the eight verbs; its value is the promise in words."""

    HOLD = "what `begin` found stays held: anything may happen before `reserve`"
    CHUNK = "`reserve` takes any number of tokens, not only all that are left"
    COMMIT = "nobody hits a block before its tokens are committed: a step may be given up"
    STABLE = "a block keeps its place in a table until the request is cut or finished"
    STRICT = "misuse is refused by an exception that `python -O` keeps"
    REUSE = "a committed prompt that is sent again at once hits all its whole blocks"
    KEEP = "a committed block hits until it is handed out again; each of several copies does"
    LRU = "blocks that hold content are reused least recently released first, the tail before it"
    TENANTS = "`begin` is given whose request it is, and tenants share nothing"
    TRUNCATE = "there is `truncate`"
    FORK = "there is `fork`"
    RESET = "there is `reset`"
    TELL = "there are `expect` and `tell`: tokens are told later, and nobody hits them before that"


EVERYTHING: Final = frozenset(Promise)


class Allocator(Protocol[R]):
    """The verbs of a paged KV-cache allocator. Called single-threaded.

    Attributes:
        promises: what it promises, and is held to.
    """

    promises: Collection[Promise]

    def start(self, num_blocks: int, block_size: int) -> Collection[int]:
        """Make a fresh allocator over so many blocks, ids 0 to `num_blocks - 1`.

        Returns:
            The ids that it may hand out: all, or all but those it sets aside (a null block).
        """

    def begin(self, tokens: Sequence[int], tenant: str) -> tuple[R, int]:
        """Begin a request: look up its longest cached prefix.

        With HOLD it is held from now on, and in the block table; without HOLD nothing changes, and
        the first `reserve` follows at once.

        Returns:
            The request, and how many of its tokens are cached: never all of them.
        """

    def reserve(self, request: R, num_tokens: int) -> Sequence[int] | None:
        """Make room for the next tokens after those that are computed or cached.

        Returns:
            The new ids at the end of its block table, hits not among them; None: no space.
        """

    def commit(self, request: R, num_tokens: int) -> None:
        """State that the KV of the next tokens is written. Without COMMIT it may do nothing."""

    def append(self, request: R, token: int) -> None:
        """Let a sampled token join the end; its KV is not computed yet."""

    def finish(self, request: R) -> None:
        """End a request in whatever state it is: finished, aborted or preempted."""

    def block_table(self, request: R) -> Sequence[int]:
        """Return the block ids of a live request, in order; changes nothing."""

    def num_free_blocks(self) -> int:
        """Return how many blocks `reserve` could take now, cached ones included."""


class Truncates(Protocol[R_contra]):
    """What TRUNCATE promises."""

    def truncate(self, request: R_contra, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens: rejected drafts leave, or a turn is taken back.

        Returns:
            How many tokens are computed now; an allocator may have to compute some again.
        """


class Forks(Protocol[R]):
    """What FORK promises."""

    def fork(self, request: R) -> tuple[R, Sequence[tuple[int, int]]] | None:
        """Begin a second request with the same tokens and the same computed KV.

        Returns:
            The child, and which blocks to copy, as (from, to), before either is written to; None:
            no space for the copy of a half-full block.
        """


class Resets(Protocol):
    """What RESET promises."""

    def reset(self) -> bool:
        """Make everything cached so far unreachable, as after a change of weights.

        Returns:
            False if it could not, because requests are live; then nothing has changed.
        """


class Tells(Protocol[R_contra]):
    """What TELL promises: an engine may send a step before it has read the tokens of the last."""

    def expect(self, request: R_contra, num_tokens: int) -> None:
        """Let tokens join the end whose ids are told later; they can get room and be committed."""

    def tell(self, request: R_contra, token: int) -> None:
        """Say which token the first expected one is. With STRICT it refuses where none is."""


VERBS: Final = (
    "start",
    "begin",
    "reserve",
    "commit",
    "append",
    "finish",
    "block_table",
    "num_free_blocks",
)
OPTIONAL_VERBS: Final = {
    Promise.TRUNCATE: ("truncate",),
    Promise.FORK: ("fork",),
    Promise.RESET: ("reset",),
    Promise.TELL: ("expect", "tell"),
}
