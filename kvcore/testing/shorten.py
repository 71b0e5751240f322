"""A failure made shorter: steps are left out as long as the same thing goes wrong.

Verb by verb, which Hypothesis cannot see: it shrinks what it has drawn, rule by rule, and takes
fifty times as long. A shorter list of steps is only taken if every step of it is in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from kvcore.testing.driver import Driver
from kvcore.testing.errors import BrokenError, PropertyError, Step
from kvcore.testing.ghost import Lease, Request
from kvcore.testing.protocol import Item, Promise

Steps = tuple[Step, ...]
_Begin = tuple[tuple[int, ...], str, tuple[Item, ...]]


class _OutOfOrderError(Exception):
    """A step cannot be taken, for want of those that were left out."""


def shorten(make_allocator: Callable[[], object], error: BrokenError) -> None:
    """Replace the program of an error, and its message, by those of a shorter one. O(steps^2)."""
    shorter: BrokenError | None = error
    while shorter is not None:
        error.message, error.program = shorter.message, shorter.program
        error.steps = shorter.steps
        shorter = next(
            (
                found
                for steps in _shorter(error.steps)
                if (found := replay(make_allocator, steps)) is not None and is_same(found, error)
            ),
            None,
        )


def replay(
    make_allocator: Callable[[], object], steps: Steps, *, draw: bool = False
) -> BrokenError | None:
    """Take steps with a fresh allocator, and return what goes wrong, if it goes wrong in order.

    With `draw` a picture of the pool stands in the program after every call.
    """
    taken = _Replay(Driver(make_allocator(), draw=draw))
    try:
        for index, step in enumerate(steps):
            taken.take(step, steps[index + 1] if index + 1 < len(steps) else None)
    except BrokenError as error:
        return error
    except _OutOfOrderError:
        return None
    return None


def is_same(one: BrokenError, other: BrokenError) -> bool:
    """Return True if both are the same failure: one property, or exceptions of one class."""
    if isinstance(one, PropertyError) and isinstance(other, PropertyError):
        return one.prop == other.prop
    return type(one) is type(other) and type(one.__cause__) is type(other.__cause__)


def _shorter(steps: Steps) -> Iterator[Steps]:
    """Yield the steps without a request, without some steps, a token or a block."""
    for who in dict.fromkeys([step.who for step in steps[1:]]):
        yield tuple([step for step in steps if step.who != who])
    for length in (4, 3, 2, 1):
        for start in range(len(steps) - length, 0, -1):
            yield steps[:start] + steps[start + length :]
    for index, step in enumerate(steps):
        if step.verb == "begin":
            tokens, tenant, items = cast("_Begin", step.arguments)
            if len(tokens) > 1:
                left = tuple(item for item in items if item[1] + item[2] < len(tokens))
                cut = Step("begin", step.who, (tokens[:-1], tenant, left))
                yield (*steps[:index], cut, *_with_fewer(step.who, steps[index + 1 :]))
    num_blocks, block_size = cast("tuple[int, int]", steps[0].arguments)
    if num_blocks > 2:
        yield Step("start", "", (num_blocks - 1, block_size)), *steps[1:]


def _with_fewer(who: str, steps: Steps) -> Iterator[Step]:
    """Yield steps of which a request's first `reserve` and `commit` are for one token less."""
    left = {"reserve", "commit"}
    for step in steps:
        if step.who == who and step.verb in left:
            left.remove(step.verb)
            yield Step(step.verb, who, (cast("int", step.arguments[0]) - 1,))
        else:
            yield step


class _Replay:
    """Steps, taken one by one; one that is not in order raises _OutOfOrderError.

    Args:
        driver: a fresh one.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.requests: dict[str, Request] = {}
        self.leases: dict[str, Lease] = {}

    def take(self, step: Step, after: Step | None) -> None:
        """Take one step; `after` is the next one, if there is one."""
        driver = self.driver
        if step.verb == "start":
            driver.start(*cast("tuple[int, int]", step.arguments))
        elif step.verb == "begin":
            held = Promise.HOLD in driver.promises
            _need(held or _is_about(step.who, {"reserve", "finish"}, after))
            self.requests[step.who] = driver.begin(*cast("_Begin", step.arguments))
        elif step.verb == "fork":
            parent = self._live(cast("str", step.arguments[0]))
            _need(parent.computed > 0)
            child = driver.fork(parent)
            if child is not None:
                self.requests[step.who] = child
        elif step.verb == "misuse":
            verb, was_live, *arguments = step.arguments
            request = self.requests.get(step.who)
            _need(request is not None and (request in driver.live) == was_live)
            driver.misuse(cast("str", verb), cast("Request", request), *arguments)
        elif step.verb == "reset":
            driver.reset()
        elif step.verb in {"lease", "end_lease"}:
            self._take_lease(driver, step)
        else:
            self._take_away(driver, step, after)

    def _take_lease(self, driver: Driver, step: Step) -> None:
        name = cast("str", step.arguments[0])
        if step.verb == "lease":
            request = self._live(step.who)
            _need(bool(request.blocks))
            self.leases[name] = driver.lease(request)
        else:
            _need(name in self.leases)
            driver.end_lease(self.leases[name])

    def _take_away(self, driver: Driver, step: Step, after: Step | None) -> None:
        """Take a step that may be about a request that is swapped out."""
        request = self.requests.get(step.who)
        if request is None or request not in driver.away:
            _need(step.verb != "swap_in")
            self._take_live(driver, step, after)
        elif step.verb == "swap_in":
            driver.swap_in(request)
        else:
            _need(step.verb == "finish")
            driver.finish(request)

    def _take_live(self, driver: Driver, step: Step, after: Step | None) -> None:
        request = self._live(step.who)
        number = cast("int", step.arguments[0]) if step.arguments else 0
        left, room = len(request.tokens) - request.computed, driver.room(request)
        if step.verb == "reserve":
            _need(number == left or Promise.CHUNK in driver.promises)
            _need(number > 0 or bool(request.blocks) or Promise.HOLD in driver.promises)
            _need(Promise.CHUNK in driver.promises or not request.blocks or room < left)
            if driver.reserve(request, number):
                _need(Promise.COMMIT in driver.promises or _is_about(step.who, {"commit"}, after))
        elif step.verb == "commit":
            _need(0 < number <= min(left, room))
            _need(number == left or not driver.promises.isdisjoint({Promise.CHUNK, Promise.PARTS}))
            driver.commit(request, number)
        elif step.verb == "append":
            _need(not request.unknown)
            driver.append(request, number)
        elif step.verb == "finish":
            driver.finish(request)
        else:
            self._take_change(driver, request, step.verb, number)

    @staticmethod
    def _take_change(driver: Driver, request: Request, verb: str, number: int) -> None:
        if verb == "truncate":
            _need(number <= len(request.tokens))
            driver.truncate(request, number)
        elif verb == "expect":
            driver.expect(request, number)
        elif verb == "resolve":
            _need(request.unknown > 0)
            driver.resolve(request)
        else:
            _need(bool(request.blocks) and request.computed > 0)
            driver.swap_out(request)

    def _live(self, name: str) -> Request:
        request = self.requests.get(name)
        if request is None or request not in self.driver.live:
            raise _OutOfOrderError
        return request


def _is_about(who: str, verbs: set[str], after: Step | None) -> bool:
    """Return True if no step follows, or one of these verbs for the same request."""
    return after is None or (after.who == who and after.verb in verbs)


def _need(condition: bool) -> None:  # noqa: FBT001  # a condition is all there is
    if not condition:
        raise _OutOfOrderError
