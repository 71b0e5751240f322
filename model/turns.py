"""Turns: what a server computes beside the engine, one client after another.

Decides: of each client one long piece of work runs at a time, on a thread, and one short one, on
the event loop, which serves what has come from others before the next; each in the order of its
requests, so a client with many waits for itself. Short ones do not wait for long ones. Work whose
client has left is not begun.

The caller is known by a context variable: what is called for a request finds it, whatever is
between. Without one, work runs at once.

Invariants: a client without work is forgotten.

Does not know: HTTP, the work.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

_NUM_THREADS = 8
_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The client has left: its work was not begun."""


@dataclass(slots=True)
class _Lane:
    """The work of one client, short or long: what runs, and what waits for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0


class _Caller(NamedTuple):
    """The client for which a task works.

    Attributes:
        turns: where it takes its turn.
        client: its name.
        has_left: returns True once it reads no answer any more.
    """

    turns: "Turns"
    client: str | None
    has_left: Callable[[], bool]


_CALLER: ContextVar[_Caller | None] = ContextVar("caller", default=None)


class Turns:
    """The lanes of all clients of one event loop."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str | None, bool], _Lane] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "turns")

    @property
    def num_clients(self) -> int:
        """The number of clients whose work runs or waits. O(that)."""
        return len({client for client, _ in self._lanes})

    def work_for(self, client: str | None, has_left: Callable[[], bool]) -> None:
        """Have this task, and those that it begins, work for a client from now on. O(1)."""
        _CALLER.set(_Caller(self, client, has_left))

    @asynccontextmanager
    async def _turn(self, client: str | None, *, is_long: bool) -> AsyncIterator[None]:
        key = (client, is_long)
        lane = self._lanes.setdefault(key, _Lane())
        lane.num_users += 1
        try:
            async with lane.lock:
                yield
        finally:
            lane.num_users -= 1
            if not lane.num_users:
                del self._lanes[key]

    async def run(self, caller: _Caller, work: Callable[[], _T], *, is_long: bool) -> _T:
        """Run a piece of work in its client's turn.

        Raises:
            ClientGoneError: the client has left before that.
        """
        async with self._turn(caller.client, is_long=is_long):
            if caller.has_left():
                raise ClientGoneError
            if not is_long:
                await asyncio.sleep(0)  # the turn lasts until others have had the event loop
                return work()
            return await self._on_thread(work)

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        """Run work on a thread. A task that is cancelled meanwhile ends with it, as its turn does.

        So a client that leaves again and again never has two threads.
        """
        running = self._threads.submit(work)
        done = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not running.cancel():  # it has begun
                await asyncio.wait([done])
            raise


async def in_turn(work: Callable[[], _T], *, is_long: bool = True) -> _T:
    """Run a piece of work for the client of this task, when it is its turn.

    Args:
        work: runs on a thread if it is long, else on the event loop.
        is_long: as above.

    Raises:
        ClientGoneError: the client has left before that.
    """
    caller = _CALLER.get()
    if caller is not None:
        return await caller.turns.run(caller, work, is_long=is_long)
    return await asyncio.to_thread(work) if is_long else work()
