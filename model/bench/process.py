"""How long this process is there, as the system counts: what a user has waited for.

Decides: nothing. Does not know: what it has done meanwhile.
"""

import os
import time
from pathlib import Path

_STARTED = time.monotonic()


def process_age_s() -> float:
    """Seconds since this process was started; where nobody says since this file was read.

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
