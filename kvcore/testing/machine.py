"""The base of all machines: a fresh allocator, and the life of a request in a few calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import ClassVar

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcore.testing.driver import Driver
from kvcore.testing.errors import BrokenError
from kvcore.testing.ghost import Lease, Request
from kvcore.testing.protocol import Promise
from kvcore.testing.strategies import prompts

PICK = st.integers(0, 5)
"""The choice of a live request: its place among them, modulo their number."""


def drawn_prompts(max_blocks: int = 4, num_branches: int = 3) -> st.SearchStrategy[list[int]]:
    """Return prompts for the block size that the running machine has drawn."""
    return st.runner().flatmap(
        lambda machine: prompts(machine.block_size, max_blocks, num_branches)
    )


def promised(*promises: Promise) -> Callable[[AllocatorMachine], bool]:
    """Return a precondition: all of these are promised."""
    return lambda machine: machine.promises.issuperset(promises)


def any_live(machine: AllocatorMachine) -> bool:
    """Say whether a request is live."""
    return bool(machine.driver.live)


def is_known(error: BrokenError, known: Iterable[str]) -> bool:
    """Say whether a failure is known: by its key ("P9: commit"), or by what goes wrong ("P9")."""
    return any(name in {error.key, error.what} for name in known)


class AllocatorMachine(RuleBasedStateMachine):
    """The base of all machines: a fresh allocator, and the life of a request in a few calls.

    Attributes:
        make_allocator: makes the adapter under test.
        block_sizes: the block sizes for `start`, the simplest first.
        pool_sizes: the smallest and the largest pool.
        seen: the events that the driver has seen, over all runs of the machine.
        known: failures that are known: an example ends there, and the search continues.
        waived: the number of times that each was met.
    """

    make_allocator: Callable[[], object]
    block_sizes: ClassVar[tuple[int, ...]] = (2, 4, 1)
    pool_sizes: ClassVar[tuple[int, int]] = (3, 12)
    seen: Counter[str]
    known: tuple[str, ...] = ()
    waived: Counter[str]

    @initialize(
        num_blocks=st.runner().flatmap(lambda machine: st.integers(*machine.pool_sizes)),
        block_size=st.runner().flatmap(lambda machine: st.sampled_from(machine.block_sizes)),
    )
    def start(self, num_blocks: int, block_size: int) -> None:
        """Make a fresh allocator."""
        self.block_size = block_size
        self.driver = Driver(self.make_allocator(), self.seen, self.waive)
        self.promises = self.driver.promises
        self.ended: list[Request] = []
        self.past: list[list[int]] = []
        self.leases: list[Lease] = []
        self.seen["examples"] += 1
        self.driver.start(num_blocks, block_size)

    @precondition(any_live)
    @rule(number=PICK)
    def leaves(self, number: int) -> None:
        """One request ends in any state; others that share its blocks keep them."""
        self.end(self.pick(number))

    @precondition(any_live)
    @rule()
    def all_leave(self) -> None:
        """All end: `Driver.agree` wants every block free."""
        self.end_all()

    def waive(self, error: BrokenError) -> None:
        """Discard this example if its failure is known."""
        if is_known(error, self.known):
            self.waived[error.key] += 1
            reject()

    def pick(self, number: int) -> Request:
        """Return one of the live requests."""
        return self.driver.live[number % len(self.driver.live)]

    def arrive(self, tokens: list[int], tenant: str = "", chunk: int = 0) -> Request | None:
        """Begin a request and run its first step; without space it ends, and so does another."""
        request = self.driver.begin(tokens, tenant)
        left = len(tokens) - request.computed
        if not self.step(request, min(chunk or left, left)):
            self.end(request)
            if self.driver.live:
                self.end(self.driver.live[0])
            return None
        return request

    def arrive_twins(self, tokens: list[int]) -> None:
        """Begin two requests with one prompt, if that may be before either is computed."""
        if {Promise.HOLD, Promise.COMMIT} <= self.promises:
            for request in [self.driver.begin(tokens) for _ in range(2)]:
                self.step(request, len(tokens))
        else:
            self.arrive(tokens)
            self.arrive(tokens)

    def step(self, request: Request, num_tokens: int) -> bool:
        """Make room for some tokens, or without CHUNK for all that are left, and commit them."""
        left = len(request.tokens) - request.computed
        count = min(num_tokens, left) if Promise.CHUNK in self.promises else left
        if Promise.STATES in self.promises and request.computed < request.boundary:
            count = min(count, request.boundary - request.computed)  # its state is kept there
        if not count:
            return True
        room = self.driver.room(request) if request.blocks else 0
        asks = Promise.CHUNK in self.promises or room < count
        if asks and not self.driver.reserve(request, count):
            return False
        self.driver.commit(request, count)
        return True

    def end(self, request: Request) -> None:
        """Finish a request; its tokens may be sent again."""
        self.driver.finish(request)
        self.ended = [*self.ended[-5:], request]
        self.remember(request)

    def remember(self, request: Request) -> None:
        """Remember the tokens of a request, to send them again."""
        self.past = [*self.past[-5:], [*request.tokens]]

    def decode(self, request: Request, token: int) -> None:
        """Compute the rest of a request, then one sampled token; without space it stays."""
        if len(request.tokens) < 5 * self.block_size + 9 and self.step(request, 10**9):
            self.driver.append(request, token)
            self.step(request, 1)

    def end_all(self) -> None:
        """Finish every live request."""
        for request in list(self.driver.live):
            self.end(request)
