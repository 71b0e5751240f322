"""The verbs that an allocator must have to be tested, and what it may promise.

An adapter maps the eight verbs of `Allocator` to the calls that an engine makes for the same
purpose, in the same order. What not every allocator does is a `Promise`: the machines use only what
is promised, and check all of it. One call is made without a promise: a second `finish` of a request
may be accepted or refused, but must change nothing. The machines never read an allocator's internal
state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, Protocol, TypeVar

R = TypeVar("R")
"""The type that the adapter uses for a request; the machines never look inside."""

R_co = TypeVar("R_co", covariant=True)

R_contra = TypeVar("R_contra", contravariant=True)


class Promise(Enum):
    """A promise that an allocator may make beyond the eight verbs; its value describes it."""

    HOLD = "what `begin` found stays held: anything may happen before `reserve`"
    CHUNK = "`reserve` takes any number of tokens, not only all that are left"
    COMMIT = "a block is hit only after its tokens are committed: a step may be given up"
    STABLE = "a block keeps its place in a table until the request is cut or finished"
    STRICT = "misuse is refused by an exception that `python -O` keeps"
    REUSE = "a committed prompt that is sent again at once hits all its whole blocks"
    KEEP = "a committed block hits until it is handed out again; each of several copies does"
    LRU = "blocks that hold content are reused least recently released first, the tail before it"
    TENANTS = "`begin` is given the tenant of a request, and tenants share nothing"
    TRUNCATE = "there is `truncate`"
    FORK = "there is `fork`"
    RESET = "there is `reset`"
    RESOLVE = "there are `expect` and `resolve`: tokens become known later, and hit only after that"
    PARTS = "`commit` takes any part of what there is room for, where `reserve` took all at once"
    ITEMS = "there is `begin_with`: items (images, say) are part of what the blocks hold"
    LEASE = "there are `lease` and `end_lease`: no leased block is handed out before the end"
    EVENTS = "there are `take_events` and `block_hashes`: the events fold to what can be hit"
    SWAP = "there are `swap_out` and `swap_in`: a request's KV moves to the host and back"
    GROUPS = "there are `windows` and `block_tables`: several kinds of attention over one pool"
    STATES = "there is `states`, beside GROUPS: layers keep a recurrent state of each request"


EVERYTHING: Final = frozenset(Promise) - {Promise.GROUPS, Promise.STATES}
"""All that an allocator of one layer group can promise."""

WITH_GROUPS: Final = frozenset(
    {
        Promise.GROUPS,
        Promise.STATES,
        Promise.HOLD,
        Promise.CHUNK,
        Promise.COMMIT,
        Promise.PARTS,
        Promise.REUSE,
        Promise.KEEP,
        Promise.TENANTS,
    }
)
"""The promises that are tested where GROUPS is one of them."""


class Allocator(Protocol[R]):
    """The verbs of a paged KV-cache allocator. Called single-threaded.

    Attributes:
        promises: its promises, which are checked.
    """

    promises: Collection[Promise]

    def start(self, num_blocks: int, block_size: int) -> Collection[int]:
        """Make a fresh allocator of `num_blocks` blocks, ids 0 to `num_blocks - 1`.

        Returns:
            The ids that it may hand out: all, or all but those it sets aside (a null block).
        """

    def begin(self, tokens: Sequence[int], tenant: str) -> tuple[R, int]:
        """Begin a request: look up its longest cached prefix.

        With HOLD it is held from now on, and in the block table; without HOLD nothing changes, and
        the first `reserve` follows at once.

        Returns:
            The request, and the number of its tokens that are cached: never all of them.
        """

    def reserve(self, request: R, num_tokens: int) -> Sequence[int] | None:
        """Make room for the next tokens after those that are computed or cached.

        Returns:
            The new ids at the end of its block table, hits not among them; with GROUPS anything
            but None; None: no space.
        """

    def commit(self, request: R, num_tokens: int) -> None:
        """State that the KV of the next tokens is written. Without COMMIT it may do nothing."""

    def append(self, request: R, token: int) -> None:
        """Add a sampled token to the end; its KV is not computed yet."""

    def finish(self, request: R) -> None:
        """End a request in any state: finished, aborted or preempted."""

    def block_table(self, request: R) -> Sequence[int]:
        """Return the block ids of a live request, in order; changes nothing."""

    def num_free_blocks(self) -> int:
        """Return the number of blocks that `reserve` could take now, cached ones included."""


class Truncates(Protocol[R_contra]):
    """The verb of TRUNCATE."""

    def truncate(self, request: R_contra, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens: rejected drafts leave, or a turn is taken back.

        Returns:
            The number of computed tokens now; some may have to be computed again.
        """


class Forks(Protocol[R]):
    """The verb of FORK."""

    def fork(self, request: R) -> tuple[R, Sequence[tuple[int, int]]] | None:
        """Begin a second request with the same tokens and the same computed KV.

        Returns:
            The child, and which blocks to copy, as (from, to), before either is written to; None:
            no space for the copy of a half-full block.
        """


class Resets(Protocol):
    """The verb of RESET."""

    def reset(self) -> bool:
        """Make everything cached so far unreachable, as after a change of weights.

        Returns:
            False if it could not, because requests are live; then nothing has changed.
        """


class Resolves(Protocol[R_contra]):
    """The verbs of RESOLVE: a step may be sent before the tokens of the last one are read."""

    def expect(self, request: R_contra, num_tokens: int) -> None:
        """Add unknown tokens to the end; they can get room and be committed."""

    def resolve(self, request: R_contra, token: int) -> None:
        """Make the first unknown token known. With STRICT it refuses where none is unknown."""


Item = tuple[str, int, int]
"""An item of a prompt: its identity, its first position, and the number of its positions."""


class TakesItems(Protocol[R_co]):
    """The verb of ITEMS."""

    def begin_with(
        self, tokens: Sequence[int], tenant: str, items: Sequence[Item]
    ) -> tuple[R_co, int]:
        """Begin a request like `begin`; over an item's positions its identity is content too."""


class Leases(Protocol[R_contra]):
    """The verbs of LEASE: a step or a transfer in flight still needs a request's blocks."""

    def lease(self, request: R_contra) -> object:
        """Hold all blocks in the request's table, even after the request has ended."""

    def end_lease(self, lease: object) -> object:
        """Release them. A second end of one lease may raise or not, and changes nothing."""


class RecordsEvents(Protocol):
    """The verbs of EVENTS. `block_hashes` is not called for requests with items."""

    def take_events(self) -> Sequence[tuple[str, object]]:
        """Return what has happened since the last call, oldest first.

        Each is ("stored", block hash), ("removed", block hash) or ("cleared", None); a block hash
        is anything that can be in a set, and identifies the block's whole prefix and tenant.
        """

    def block_hashes(self, tokens: Sequence[int], tenant: str) -> Sequence[object]:
        """Return the hashes of the whole blocks of a prompt, whether cached or not."""


class Swaps(Protocol[R_contra]):
    """The verbs of SWAP."""

    def swap_out(self, request: R_contra) -> Sequence[int]:
        """Free all blocks of a request, which stays open.

        Returns:
            The ids of the blocks to copy out before they are reused: those that hold computed
            tokens, in order.
        """

    def swap_in(self, request: R_contra) -> Sequence[tuple[int, int]] | None:
        """Give a request blocks for all its computed tokens again.

        Returns:
            Pairs of a block that was copied out and the block that its copy goes into. Blocks that
            are found in the cache need no copy. None: no space, and nothing has changed.
        """


class Groups(Protocol[R_contra]):
    """The table of GROUPS; an adapter that has it needs no `block_table`.

    Attributes:
        windows: a layer group each: how many tokens a query sees, itself included; None: all.
    """

    windows: Sequence[int | None]

    def block_tables(self, request: R_contra) -> Sequence[Sequence[int]]:
        """Return a table a group. An id that `start` did not return stands for no block."""


class KeepsStates(Protocol[R_contra]):
    """The verb of STATES: a state is some blocks, each a piece of it, in order."""

    def states(self, request: R_contra) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return what a request holds for recurrent states; changes nothing.

        Returns:
            The state after the computed tokens (no blocks: zeros); where the next step writes the
            state after its tokens (no blocks before `reserve`), maybe the same; and all else.
        """


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
    Promise.RESOLVE: ("expect", "resolve"),
    Promise.ITEMS: ("begin_with",),
    Promise.LEASE: ("lease", "end_lease"),
    Promise.EVENTS: ("take_events", "block_hashes"),
    Promise.SWAP: ("swap_out", "swap_in"),
    Promise.GROUPS: ("block_tables",),
    Promise.STATES: ("states",),
}
