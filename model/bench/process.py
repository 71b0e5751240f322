"""What a process makes its users wait for: how long it is there, how long Python's collector takes.

Decides: nothing. Does not know: what it has done meanwhile.
"""

import gc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_STARTED = time.monotonic()


def process_age_s() -> float:
    """Seconds since this process was started; if that is unknown, since this file was read.

    Reads two small files.
    """
    try:
        ticks = int(
            Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        )
        up_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _STARTED
    return up_s - ticks / os.sysconf("SC_CLK_TCK")


class CollectorWatch:
    """Between `with` and its end: how often Python's collector ran, and for how long.

    Attributes:
        num_pauses: runs, of young objects or of all.
        longest_s: the longest of them.
    """

    def __init__(self) -> None:
        self.num_pauses = 0
        self.longest_s = 0.0
        self._begun_s = 0.0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        del info
        if phase == "start":
            self._begun_s = time.perf_counter()
            return
        self.num_pauses += 1
        self.longest_s = max(self.longest_s, time.perf_counter() - self._begun_s)
