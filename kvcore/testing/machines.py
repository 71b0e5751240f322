"""State machines over an adapter: which calls are made, and when. `Driver` checks the results.

`RequestMachine` takes requests through every state and out of every state; `BranchMachine` lets
them draft, take back and fork; `ChurnMachine` fills a tiny pool and keeps evicting; `TenantMachine`
sends the same prompts for different tenants and resets; `GroupMachine` is for several kinds of
attention over one pool. What is not promised is left out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvcore.testing.ghost import Request
from kvcore.testing.machine import PICK, AllocatorMachine, any_live, drawn_prompts, promised
from kvcore.testing.protocol import Promise
from kvcore.testing.strategies import TENANTS

EDITED = 3
"""A token that no prompt has."""


class ComputingMachine(AllocatorMachine):
    """Base of the machines whose requests are computed in parts and decode for a while.

    Attributes:
        longest_decoding: the most tokens at once.
    """

    longest_decoding: ClassVar[int] = 3

    @precondition(any_live)
    @rule(number=PICK, count=st.integers(1, 9))
    def computes(self, number: int, count: int) -> None:
        """Some more of its tokens."""
        self.step(self.pick(number), count)

    @precondition(any_live)
    @rule(
        number=PICK,
        token=st.integers(0, 2),
        count=st.runner().flatmap(lambda machine: st.integers(1, machine.longest_decoding)),
    )
    def decodes(self, number: int, token: int, count: int) -> None:
        """One token, or a few."""
        for _ in range(count):
            self.decode(self.pick(number), token)


class RequestMachine(ComputingMachine):
    """Requests through every state, and out of every state."""

    @rule(prompt=drawn_prompts(), chunk=st.integers(0, 9))
    def arrives(self, prompt: list[int], chunk: int) -> None:
        """A request, prefilled whole or in part."""
        self.arrive(prompt, chunk=chunk)

    @rule(prompt=drawn_prompts())
    def twins_arrive(self, prompt: list[int]) -> None:
        """Two requests with one prompt in one step: both compute it, both keep their copies."""
        self.arrive_twins(prompt)

    @precondition(promised(Promise.HOLD))
    @rule(prompt=drawn_prompts())
    def is_looked_up(self, prompt: list[int]) -> None:
        """A request that waits between look-up and first step."""
        self.driver.begin(prompt)

    @precondition(promised(Promise.CHUNK, Promise.COMMIT))
    @precondition(any_live)
    @rule(number=PICK, count=st.integers(1, 9))
    def reserves(self, number: int, count: int) -> None:
        """Room, perhaps more than it has tokens for, and nothing written yet."""
        request = self.pick(number)
        if request.blocks or Promise.HOLD in self.promises:
            self.driver.reserve(request, count)

    @precondition(promised(Promise.COMMIT))
    @precondition(lambda self: not self.promises.isdisjoint({Promise.CHUNK, Promise.PARTS}))
    @precondition(any_live)
    @rule(number=PICK, count=st.integers(0, 9))
    def commits(self, number: int, count: int) -> None:
        """Some of what there is room for."""
        request = self.pick(number)
        count = min(count, self.driver.room(request), len(request.tokens) - request.computed)
        if count > 0:
            self.driver.commit(request, count)

    @precondition(promised(Promise.COMMIT, Promise.PARTS))
    @rule(prompt=drawn_prompts(), count=st.integers(1, 9))
    def is_computed_in_parts(self, prompt: list[int], count: int) -> None:
        """Room for all of it at once, and then a part."""
        request = self.driver.begin(prompt)
        left = len(prompt) - request.computed
        if self.driver.reserve(request, left):
            self.driver.commit(request, min(count, left))
        else:
            self.end(request)

    @precondition(promised(Promise.COMMIT))
    @rule(prompt=drawn_prompts())
    def is_given_up(self, prompt: list[int]) -> None:
        """Its step is scheduled and never runs: the same prompt sent again hits nothing of it."""
        request = self.driver.begin(prompt)
        left = len(prompt) - request.computed
        self.driver.reserve(request, left)
        self.end(request)
        self.arrive([*prompt, 0])

    @precondition(promised(Promise.LEASE))
    @precondition(any_live)
    @rule(number=PICK, prompt=drawn_prompts(max_blocks=2), ends=st.integers(0, 2))
    def is_leased(self, number: int, prompt: list[int], ends: int) -> None:
        """Its step or its transfer is in flight while it may end and another request begins."""
        request = self.pick(number)
        if not request.blocks:
            return
        lease = self.driver.lease(request)
        self.leases = [*self.leases[-5:], lease]
        if ends:
            self.end(request)
            self.arrive(prompt)
        if ends == 2:
            self.driver.end_lease(lease)

    @precondition(lambda self: self.leases)
    @rule(number=PICK)
    def arrives_at_last(self, number: int) -> None:
        """A transfer ends, perhaps for the second time."""
        self.driver.end_lease(self.leases[number % len(self.leases)])

    @precondition(promised(Promise.SWAP, Promise.COMMIT))
    @precondition(any_live)
    @rule(number=PICK, prompt=drawn_prompts(num_branches=5), soon=st.booleans())
    def is_swapped_out(self, number: int, prompt: list[int], *, soon: bool) -> None:
        """Its KV moves to the host, another takes its place, and perhaps it moves back at once."""
        request = self.pick(number)
        self.step(request, 10**9)
        if request.blocks and request.computed and not request.unknown:
            self.driver.swap_out(request)
            other = self.arrive(prompt)
            if soon and other:
                self.end(other)
                self.driver.swap_in(request)

    @precondition(lambda self: self.driver.away)
    @rule(number=PICK, ends=st.integers(0, 4))
    def comes_in(self, number: int, ends: int) -> None:
        """Its KV moves back, or it is aborted meanwhile."""
        request = self.driver.away[number % len(self.driver.away)]
        if ends:
            self.driver.swap_in(request)
        else:
            self.end(request)

    @precondition(any_live)
    @rule(number=PICK)
    def is_finished(self, number: int) -> None:
        """The end, after the last token is computed."""
        request = self.pick(number)
        self.step(request, 10**9)
        self.end(request)

    @precondition(any_live)
    @rule(number=PICK)
    def is_preempted(self, number: int) -> None:
        """Free all its blocks, and send it again with all its tokens."""
        request = self.pick(number)
        self.end(request)
        self.arrive([*request.tokens])

    @precondition(lambda self: self.past)
    @rule(number=PICK, more=st.integers(0, 3))
    def comes_back(self, number: int, more: int) -> None:
        """The next turn, or the same once more."""
        before = self.past[number % len(self.past)]
        self.arrive([*before, *[1] * more])

    @precondition(lambda self: self.ended)
    @rule(number=PICK, call=st.sampled_from(["finish", "reserve", "commit", "append"]))
    def is_used_after_its_end(self, number: int, call: str) -> None:
        """A second finish; where misuse is refused, any other call too."""
        ended = self.ended[number % len(self.ended)]
        if call == "finish" or Promise.STRICT not in self.promises:
            self.driver.misuse("finish", ended)
        else:
            self.driver.misuse(call, ended, 1)

    @precondition(promised(Promise.STRICT))
    @precondition(any_live)
    @rule(number=PICK, call=st.sampled_from(["reserve", "commit", "beyond"]))
    def is_misused(self, number: int, call: str) -> None:
        """A negative number, or more committed than there is room for."""
        request = self.pick(number)
        if call == "beyond":
            self.driver.misuse("commit", request, self.driver.room(request) + 1)
        else:
            self.driver.misuse(call, request, -1)


class BranchMachine(ComputingMachine):
    """Requests that take something back or go two ways: drafts, edited turns, beams."""

    @rule(prompt=drawn_prompts(max_blocks=3), chunk=st.integers(0, 9))
    def arrives(self, prompt: list[int], chunk: int) -> None:
        """A request, prefilled whole or in part."""
        self.arrive(prompt, chunk=chunk)

    @precondition(promised(Promise.CHUNK, Promise.COMMIT, Promise.TRUNCATE))
    @precondition(any_live)
    @rule(number=PICK, drafts=st.integers(1, 5), accepted=st.integers(0, 5))
    def speculates(self, number: int, drafts: int, accepted: int) -> None:
        """Drafts join, some are accepted, the others leave without a trace."""
        request = self.pick(number)
        if not self.step(request, 10**9) or len(request.tokens) > 5 * self.block_size + 9:
            return
        for _ in range(drafts):
            self.driver.append(request, 1)
        if self.driver.reserve(request, drafts) and accepted:
            self.driver.commit(request, min(accepted, drafts))
        self.driver.truncate(request, request.computed)

    @precondition(promised(Promise.CHUNK, Promise.COMMIT, Promise.RESOLVE))
    @precondition(any_live)
    @rule(number=PICK, token=st.integers(0, 2), count=st.integers(1, 6), lag=st.integers(0, 3))
    def runs_ahead(self, number: int, token: int, count: int, lag: int) -> None:
        """Steps are sent before the tokens of the last are read; those are then cut, or resolved.

        Meanwhile another request asks for the ids that an allocator may have put in their place.
        """
        request = self.pick(number)
        if not self.step(request, 10**9) or len(request.tokens) > 5 * self.block_size + 9:
            return
        for _ in range(count):
            self.driver.expect(request, token)
            if request.unknown > lag:
                self.driver.resolve(request)
            if self.driver.reserve(request, len(request.tokens) - request.computed):
                self.driver.commit(request, len(request.tokens) - request.computed)
        known = len(request.tokens) - request.unknown
        self.arrive([*request.tokens[:known], *[0] * (request.unknown + 1)])
        if request in self.driver.live:
            self.settle(request, lag)
            self.arrive([*request.tokens, 1])

    def settle(self, request: Request, lag: int) -> None:
        """Leave no token of a request unknown; what is resolved after that is out of order."""
        while request.unknown and (lag < 3 or Promise.TRUNCATE not in self.promises):
            self.driver.resolve(request)
        if request.unknown:
            self.driver.truncate(request, len(request.tokens) - request.unknown)
        if Promise.STRICT in self.promises:
            self.driver.misuse("resolve", request, 0)

    @precondition(promised(Promise.TRUNCATE))
    @precondition(any_live)
    @rule(number=PICK, back=st.integers(0, 1), edge=st.integers(-1, 1), count=st.integers(1, 6))
    def is_edited(self, number: int, back: int, edge: int, count: int) -> None:
        """A turn is cut and continues differently; the old turn sent again hits the old content."""
        request = self.pick(number)
        if not request.blocks or not self.step(request, 10**9):
            return
        before = [*request.tokens]
        keep = (len(before) // self.block_size - back) * self.block_size + edge
        self.driver.truncate(request, min(max(0, keep), len(before)))
        for _ in range(count):
            self.decode(request, EDITED)
        self.arrive([*before, 0])

    @precondition(promised(Promise.FORK))
    @precondition(any_live)
    @rule(number=PICK, token=st.integers(0, 2), count=st.integers(1, 3))
    def forks(self, number: int, token: int, count: int) -> None:
        """A beam forks and decodes on its own, without an effect on the other."""
        request = self.pick(number)
        child = self.driver.fork(request) if request.computed else None
        for _ in range(count if child else 0):
            self.decode(child or request, token)

    @precondition(lambda self: self.past)
    @rule(number=PICK, more=st.integers(0, 3))
    def comes_back(self, number: int, more: int) -> None:
        """The next turn, or the same once more."""
        self.arrive([*self.past[number % len(self.past)], *[1] * more])


class ChurnMachine(AllocatorMachine):
    """A pool that is always too small: every prompt evicts others', and comes back later."""

    pool_sizes = (2, 6)

    @rule(prompt=drawn_prompts(max_blocks=3, num_branches=5))
    def is_served(self, prompt: list[int]) -> None:
        """A request from begin to end."""
        request = self.arrive(prompt)
        if request is not None:
            self.end(request)

    @rule(prompt=drawn_prompts(max_blocks=2, num_branches=5))
    def stays(self, prompt: list[int]) -> None:
        """A request that keeps its blocks for a while."""
        self.arrive(prompt)

    @rule(prompt=drawn_prompts(max_blocks=2, num_branches=5))
    def twins_stay(self, prompt: list[int]) -> None:
        """Two copies of one content; after either is evicted, the other still hits."""
        self.arrive_twins(prompt)

    @precondition(lambda self: self.past)
    @rule(number=PICK)
    def is_served_again(self, number: int) -> None:
        """A prompt from before, of which something may be left."""
        request = self.arrive([*self.past[number % len(self.past)]])
        if request is not None:
            self.end(request)

    @precondition(any_live)
    @rule(number=PICK, token=st.integers(0, 4))
    def grows(self, number: int, token: int) -> None:
        """A token more, if there is room."""
        self.decode(self.pick(number), token)


class TenantMachine(AllocatorMachine):
    """The same few prompts for different tenants, before and after a reset."""

    def tenant(self, number: int) -> str:
        """Return a tenant, or the one without a name where there are none."""
        return TENANTS[number] if Promise.TENANTS in self.promises else ""

    @rule(prompt=drawn_prompts(max_blocks=2, num_branches=2), whose=st.integers(0, 2))
    def is_served(self, prompt: list[int], whose: int) -> None:
        """A request from begin to end."""
        request = self.arrive(prompt, self.tenant(whose))
        if request is not None:
            self.end(request)

    @rule(
        prompt=drawn_prompts(max_blocks=2, num_branches=2),
        whose=st.integers(0, 2),
        chunk=st.integers(0, 4),
    )
    def stays(self, prompt: list[int], whose: int, chunk: int) -> None:
        """A request that is still live when others begin, or at a reset."""
        self.arrive(prompt, self.tenant(whose), chunk)

    @precondition(promised(Promise.ITEMS))
    @rule(
        prompt=drawn_prompts(max_blocks=2, num_branches=1),
        what=st.sampled_from(["cat", "dog"]),
        start=st.integers(0, 4),
        length=st.integers(1, 3),
    )
    def is_pictured(self, prompt: list[int], what: str, start: int, length: int) -> None:
        """The same placeholder tokens for different pictures, at different places."""
        start = min(start, len(prompt) - 1)
        item = (what, start, min(length, len(prompt) - start))
        request = self.driver.begin(prompt, "", [item])
        self.step(request, len(prompt))
        self.end(request)

    @precondition(any_live)
    @rule(number=PICK, token=st.integers(0, 1))
    def grows(self, number: int, token: int) -> None:
        """A token more: after a reset, after content that must not be hit any more."""
        self.decode(self.pick(number), token)

    @precondition(promised(Promise.RESET))
    @rule(chance=st.integers(0, 3), rest=st.booleans())
    def is_reset(self, chance: int, *, rest: bool) -> None:
        """A change of weights, now and then, at rest or with requests in flight."""
        if chance:
            return
        if rest:
            self.end_all()
        self.driver.reset()

    @precondition(promised(Promise.RESET))
    @rule(prompt=drawn_prompts(max_blocks=2, num_branches=2), chunk=st.integers(0, 4))
    def outlives_a_reset(self, prompt: list[int], chunk: int) -> None:
        """Its later tokens are computed from old KV: the same prompt sent again must not hit."""
        request = self.arrive(prompt, chunk=chunk)
        if request is not None:
            self.driver.reset()
            for _ in range(self.block_size):
                self.decode(request, 0)
            self.arrive([*request.tokens, 0])


class GroupMachine(ComputingMachine):
    """Several kinds of attention over one pool: windows move on, what they need is there."""

    pool_sizes = (4, 24)
    longest_decoding = 6  # the window moves on

    @rule(prompt=drawn_prompts(max_blocks=5), chunk=st.integers(0, 9))
    def arrives(self, prompt: list[int], chunk: int) -> None:
        """A request, prefilled whole or in part."""
        self.arrive(prompt, chunk=chunk)

    @precondition(promised(Promise.COMMIT))
    @rule(prompt=drawn_prompts())
    def is_given_up(self, prompt: list[int]) -> None:
        """Its step is scheduled and never runs: the same prompt sent again hits nothing of it."""
        request = self.driver.begin(prompt)
        self.driver.reserve(request, len(prompt) - request.computed)
        self.end(request)
        self.arrive([*prompt, 0])

    @precondition(lambda self: self.past)
    @rule(number=PICK, back=st.integers(0, 9))
    def comes_back(self, number: int, back: int) -> None:
        """The next turn, the same once more, or an earlier turn, which a window has forgotten."""
        before = self.past[number % len(self.past)]
        self.arrive([*before[: max(1, len(before) - back)], 1])


MACHINES = (RequestMachine, BranchMachine, ChurnMachine, TenantMachine)
"""All machines for one kind of attention."""


def machines_for(promises: Collection[Promise]) -> tuple[type[AllocatorMachine], ...]:
    """Return the machines that an allocator is tested with."""
    return (GroupMachine,) if Promise.GROUPS in promises else MACHINES
