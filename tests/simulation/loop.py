"""One process in simulated time: an event loop, threads and a clock that one seed decides.

The loop is asyncio's own, with another selector: where a real loop sleeps, threads run, and if none
can run the clock jumps to the next moment at which something happens. A thread is a greenlet: it
runs until it waits, so the code of the product runs as it is. Which thread runs next, and whether
the loop or a thread goes first, is drawn; the order of the loop's own callbacks is asyncio's.

Nothing here reads the time, a `hash` or the order of a set, so a seed is one run everywhere.
"""

import asyncio
import heapq
from collections import deque
from functools import partial
from queue import Empty

import greenlet


class DeadlockError(BaseException):
    """Everything waits, and nothing will ever happen."""


class Thread(greenlet.greenlet):
    """A thread of a host. One whose host was killed never runs again."""

    host = None


class SimulatedLoop(asyncio.BaseEventLoop):
    """asyncio's loop over simulated time.

    Args:
        draw: a `random.Random`; decides who runs.

    Attributes:
        now: the time in seconds.
        lost_errors: what asyncio reports because no task handles it.
    """

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.now = 0.0
        self._selector = self  # `_run_once` calls `select`
        self._threads = []
        self._runnable = []
        self._sleeping = []  # (when, number, what is called then)
        self._number = 0
        self.set_exception_handler(self._note)
        self.lost_errors = []

    # What asyncio asks for.

    def time(self):
        return self.now

    def _process_events(self, event_list):
        pass

    def _check_closed(self):
        """What the collector ends after a failed run may still call; nothing runs it."""

    def _write_to_self(self):
        pass

    def close(self):
        for thread in self._threads:
            self._kill(thread)
        self._selector = None
        super().close()

    def run_in_executor(self, executor, func, *args):
        del executor
        future = self.create_future()

        def run():
            self.sleep(self.draw.random() * 0.001)
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001  # raised where it is awaited
                done = (future.set_exception, error)
            else:
                done = (future.set_result, result)
            self.call_soon_threadsafe(lambda: None if future.done() else done[0](done[1]))

        self.start_thread(run, None)
        return future

    def call_soon_threadsafe(self, callback, *args, context=None):
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        if self.is_thread() and self.draw.random() < 0.1:
            self.pause()
        return handle

    def select(self, timeout):
        """Let threads run, and time pass, until the loop has something to do."""
        if timeout == 0:
            while self._runnable and self.draw.random() < 0.5:
                self._run_one()
            return ()
        deadline = None if timeout is None else self.now + timeout
        while not self._ready:
            self._wake_sleepers()
            if self._runnable:
                self._run_one()
                continue
            if self._ready:
                break
            next_s = self._sleeping[0][0] if self._sleeping else None
            if next_s is None or (deadline is not None and deadline <= next_s):
                if deadline is None:
                    raise DeadlockError("every task and thread waits, and none for time")
                self.now = deadline
                return ()
            self.now = next_s
        return ()

    # Threads.

    def start_thread(self, run, host):
        """Run a function as a thread of a host."""
        self._threads = [thread for thread in self._threads if not thread.dead]
        thread = Thread(run, self._hub())
        thread.host = host
        self._threads.append(thread)
        self._runnable.append(thread)

    @property
    def num_threads(self):
        """Threads that have not ended, but for those of hosts that were killed."""
        return sum(not (thread.dead or _is_killed(thread)) for thread in self._threads)

    def at(self, when, call):
        """Call a function, which does not wait, at a time."""
        self._number += 1
        heapq.heappush(self._sleeping, (when, self._number, call))

    def sleep(self, seconds):
        """Of a thread: go on when time has passed."""
        self.at(self.now + seconds, partial(self._runnable.append, greenlet.getcurrent()))
        self._hub().switch()

    def pause(self):
        """Of a thread: let others run first."""
        self._runnable.append(greenlet.getcurrent())
        self._hub().switch()

    def park(self, waiters, until_s=None):
        """Of a thread: go on when somebody wakes it up, or when it is time."""
        entry = [greenlet.getcurrent()]
        waiters.append(entry)
        if until_s is not None:
            self.at(until_s, partial(self.wake, [entry]))
        self._hub().switch()

    def wake(self, waiters):
        """Let all threads that are parked there run."""
        for entry in waiters:
            if entry:
                self._runnable.append(entry.pop())
        waiters.clear()

    @staticmethod
    def is_thread():
        """Whether a thread runs, not the loop."""
        return greenlet.getcurrent().parent is not None

    def _hub(self):
        current = greenlet.getcurrent()
        while current.parent is not None:
            current = current.parent
        return current

    def _run_one(self):
        runnable = self._runnable
        thread = runnable.pop(self.draw.randrange(len(runnable)) if len(runnable) > 1 else 0)
        if not _is_killed(thread):
            thread.switch()

    def _wake_sleepers(self):
        while self._sleeping and self._sleeping[0][0] <= self.now:
            heapq.heappop(self._sleeping)[2]()

    def _kill(self, thread):
        """End a thread now, so that the collector does not do it at some other moment."""
        if not thread.dead:
            thread.parent = greenlet.getcurrent()
            thread.throw()

    def _note(self, _loop, context):
        self.lost_errors.append(context)


def _is_killed(thread):
    return thread.host is not None and thread.host.is_killed


class SimulatedHost:
    """What `model.host.Host` gives, for one simulated process.

    Attributes:
        is_killed: whether the process was killed: none of its threads runs again.
        offset_s: how far its clock of the day is wrong.
    """

    def __init__(self, loop):
        self.loop, self.is_killed, self.offset_s = loop, False, 0.0

    def now_s(self):
        return self.loop.now

    def worked_s(self):
        return self.loop.now * self.loop.draw.random()

    def start_thread(self, name, run):
        del name
        self.loop.start_thread(run, self)

    def queue(self):
        return SimulatedQueue(self.loop)

    def event(self):
        return SimulatedEvent(self.loop)


class SimulatedQueue:
    """`queue.SimpleQueue`."""

    def __init__(self, loop):
        self._loop, self._items, self._waiters = loop, deque(), []

    def put(self, item):
        self._items.append(item)
        self._loop.wake(self._waiters)

    def get(self, block=True, timeout=None):
        until_s = None if timeout is None else self._loop.now + timeout
        while not self._items:
            if not block or (until_s is not None and self._loop.now >= until_s):
                raise Empty
            self._loop.park(self._waiters, until_s)
        return self._items.popleft()

    def get_nowait(self):
        return self.get(block=False)


class SimulatedEvent:
    """`threading.Event`."""

    def __init__(self, loop):
        self._loop, self._is_set, self._waiters = loop, False, []

    def set(self):
        self._is_set = True
        self._loop.wake(self._waiters)

    def wait(self, timeout=None):
        deadline = None if timeout is None else self._loop.now + timeout
        while not self._is_set:
            if deadline is not None and self._loop.now >= deadline:
                return False
            self._loop.park(self._waiters, deadline)
        return True
