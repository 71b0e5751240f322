"""The times at which the device works on passes, from torch.profiler. User: `--trace` on a GPU.

On a GPU a pass returns before it is done, so the host's clock shows only its launch. Named ranges
(`record_function`) around the launches come back from the profiler with the times at which the
device started and finished their kernels.

Decides: the number of ranges: the profiler keeps every operation, so it stops after `_MAX_RANGES`.

Invariants: times are those of `time.perf_counter_ns`, to some microseconds; nothing is profiled
before the first range and after the call of `spans`.

Does not know: steps, phases, files.
"""

import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MAX_RANGES = 512
_PREFIX = "kvcore range "
_ORIGIN = "kvcore origin "
_NUM_ORIGINS = 8


class DeviceRanges:
    """Records ranges of work on a device.

    Args:
        device: its times are reported; for a CPU those of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._where = "CUDA" if is_gpu else "CPU"
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_gpu]
        self._profile = profile(activities=activities, acc_events=True)
        self._count = 0
        self._is_running = False
        self._origin_ns, self._origin = 0, 0

    def open(self) -> AbstractContextManager[object]:
        """Record the launches of the body; ranges are numbered from 0. O(1)."""
        if self._count == 0:
            self._begin()
        number = self._count
        self._count += 1
        if number == _MAX_RANGES:
            self._end()
        return record_function(f"{_PREFIX}{number}") if self._is_running else nullcontext()

    def spans(self) -> dict[int, tuple[int, int]]:
        """Return the start and end of each range by its number, in nanoseconds; ends the recording.

        Ranges that launched nothing are left out. O(operations).
        """
        if self._count == 0:
            return {}
        self._end()
        events = self._profile.events() or []  # type: ignore[no-untyped-call]
        (origin_us,) = [
            event.time_range.start
            for event in events
            if event.name == f"{_ORIGIN}{self._origin}" and event.device_type.name == "CPU"
        ]
        spans: dict[int, tuple[int, int]] = {}
        for event in events:
            if event.name.startswith(_PREFIX) and event.device_type.name == self._where:
                begin, end = (
                    self._origin_ns + round(1000 * (moment - origin_us))
                    for moment in (event.time_range.start, event.time_range.end)
                )
                first, last = spans.get(number := int(event.name[len(_PREFIX) :]), (begin, end))
                spans[number] = min(first, begin), max(last, end)
        return spans

    def _begin(self) -> None:
        self._is_running = True
        self._profile.start()
        moments = []
        for number in range(_NUM_ORIGINS):
            before = time.perf_counter_ns()
            with record_function(f"{_ORIGIN}{number}"):
                pass
            moments.append((time.perf_counter_ns() - before, before, number))
        # The first takes milliseconds, and any may be interrupted: the shortest is nearest.
        _, self._origin_ns, self._origin = min(moments)

    def _end(self) -> None:
        if self._is_running:
            self._is_running = False
            self._profile.stop()
