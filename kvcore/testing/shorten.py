"""A failure made shorter: steps are left out as long as the same thing goes wrong.

Hypothesis shrinks what it has drawn, rule by rule; this goes on where it stops, verb by verb, which
it cannot see. A shorter list of steps is only taken if every step of it is in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from kvcore.testing.driver import Driver
from kvcore.testing.errors import BrokenError, PropertyError, Step
from kvcore.testing.ghost import Request
from kvcore.testing.protocol import Promise

Steps = tuple[Step, ...]


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
                if (found := replay(make_allocator, steps)) is not None and _same(found, error)
            ),
            None,
        )


def replay(make_allocator: Callable[[], object], steps: Steps) -> BrokenError | None:
    """Take steps with a fresh allocator, and return what goes wrong, if it goes wrong in order."""
    driver = Driver(make_allocator())
    requests: dict[str, Request] = {}
    try:
        for index, step in enumerate(steps):
            following = steps[index + 1] if index + 1 < len(steps) else None
            _take(driver, requests, step, following)
    except BrokenError as error:
        return error
    except _OutOfOrderError:
        return None
    return None


def _same(one: BrokenError, other: BrokenError) -> bool:
    """Whether the same thing goes wrong: the property, or the exception of a crash."""
    if isinstance(one, PropertyError) and isinstance(other, PropertyError):
        return one.prop == other.prop
    return type(one) is type(other) and type(one.__cause__) is type(other.__cause__)


def _shorter(steps: Steps) -> Iterator[Steps]:
    """Yield what is left without some steps, without a token, without a block."""
    for length in (4, 3, 2, 1):
        for start in range(len(steps) - length, 0, -1):
            yield steps[:start] + steps[start + length :]
    for index, step in enumerate(steps):
        if step.verb == "begin":
            tokens, tenant = cast("tuple[tuple[int, ...], str]", step.arguments)
            if len(tokens) > 1:
                cut = Step("begin", step.who, (tokens[:-1], tenant))
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


def _take(driver: Driver, requests: dict[str, Request], step: Step, after: Step | None) -> None:
    """Take one step. Raises _OutOfOrderError if it is not in order."""
    if step.verb == "start":
        driver.start(*cast("tuple[int, int]", step.arguments))
    elif step.verb == "begin":
        _need(Promise.HOLD in driver.promises or _is_about(step.who, {"reserve", "finish"}, after))
        tokens, tenant = cast("tuple[tuple[int, ...], str]", step.arguments)
        requests[step.who] = driver.begin(tokens, tenant)
    elif step.verb == "fork":
        parent = _live(driver, requests, cast("str", step.arguments[0]))
        _need(parent.computed > 0)
        child = driver.fork(parent)
        if child is not None:
            requests[step.who] = child
    elif step.verb == "misuse":
        verb, was_live, *arguments = step.arguments
        request = requests.get(step.who)
        _need(request is not None and (request in driver.live) == was_live)
        driver.misuse(cast("str", verb), cast("Request", request), *arguments)
    elif step.verb == "reset":
        driver.reset()
    else:
        _take_live(driver, _live(driver, requests, step.who), step, after)


def _take_live(driver: Driver, request: Request, step: Step, after: Step | None) -> None:
    number = cast("int", step.arguments[0]) if step.arguments else 0
    left = len(request.tokens) - request.computed
    if step.verb == "reserve":
        _need(number == left or Promise.CHUNK in driver.promises)
        _need(number > 0 or bool(request.told) or Promise.HOLD in driver.promises)
        if driver.reserve(request, number):
            _need(Promise.COMMIT in driver.promises or _is_about(step.who, {"commit"}, after))
    elif step.verb == "commit":
        room = len(request.told) * driver.block_size - request.computed
        _need(0 < number <= min(left, room))
        driver.commit(request, number)
    elif step.verb == "truncate":
        _need(number <= len(request.tokens))
        driver.truncate(request, number)
    elif step.verb == "append":
        _need(not request.untold)
        driver.append(request, number)
    elif step.verb == "expect":
        driver.expect(request, number)
    elif step.verb == "tell":
        _need(request.untold > 0)
        driver.tell(request)
    else:
        driver.finish(request)


def _live(driver: Driver, requests: dict[str, Request], name: str) -> Request:
    request = requests.get(name)
    if request is None or request not in driver.live:
        raise _OutOfOrderError
    return request


def _is_about(who: str, verbs: set[str], after: Step | None) -> bool:
    """Whether the step after this one is one of these verbs, for the same request, or none is."""
    return after is None or (after.who == who and after.verb in verbs)


def _need(condition: bool) -> None:  # noqa: FBT001  # a condition is all there is
    if not condition:
        raise _OutOfOrderError
