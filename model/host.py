"""The clock and the threads of a process, and how threads wait for each other.

Code that needs one of these uses the host that it is given. `tests/simulation` passes one in which
time and threads are simulated, so that a run can be repeated exactly. Code on an event loop uses
the loop instead: `loop.time`, `asyncio.sleep`, `asyncio.to_thread`.

`uncollected`, `part_of_start` and `log_age` are for the start of a process; what the
last two log is read by `python -m tests.bench start`.

Does not know: its callers.
"""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol


class Event(Protocol):
    """An event that one thread waits for, such as `threading.Event`."""

    def set(self) -> None:
        """Note that it has happened."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has happened, or for `timeout` seconds; return True if it has."""
        ...


class Host:
    """The real clock and real threads."""

    def now_s(self) -> float:
        """Return the reading of a clock, in seconds; only differences mean anything. O(1)."""
        return time.perf_counter()

    def worked_s(self) -> float:
        """Return the processor time of this thread so far, in seconds. O(1)."""
        return time.thread_time()

    def start_thread(self, name: str, run: Callable[[], None]) -> None:
        """Run a function on a new thread that does not keep the process alive. O(1)."""
        threading.Thread(target=run, name=name, daemon=True).start()

    def queue(self) -> SimpleQueue[Any]:
        """Return a queue from any thread to one that may wait for it. O(1)."""
        return SimpleQueue()

    def event(self) -> Event:
        """Return an event that has not happened. O(1)."""
        return threading.Event()


_log = logging.getLogger("model.start")


@contextmanager
def part_of_start(name: str) -> Iterator[None]:
    """Log at level DEBUG how long the body took. The clock of the process: all threads. O(1)."""
    began, worked = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        took, work = time.perf_counter() - began, time.process_time() - worked
        _log.debug("%s: %.2f s, %.2f s of CPU", name, took, work)


def log_age(name: str) -> None:
    """Log at level DEBUG the age of this process, if the system reports it. O(1)."""
    with suppress(OSError, AttributeError, ValueError):
        began = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(began) / os.sysconf("SC_CLK_TCK")
        _log.debug("%s: %.2f s, %.2f s of CPU", name, age, time.process_time())


@contextmanager
def uncollected() -> Iterator[None]:
    """Run the body without garbage collection, for bodies that make many objects. O(1) beside it.

    Collections would look at the same objects again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
