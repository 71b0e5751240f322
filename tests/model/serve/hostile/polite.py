"""A polite client beside others, which measures what its own requests wait.

It asks for health, and for eight tokens in a stream, again and again, and writes a line of JSON for
each request: when it began, how long it took, how long the server's threads and this process were
ready meanwhile and had no core, and how long the server's event loop and engine worked. It ends
when its input ends.
"""

import contextlib
import json
import selectors
import socket
import sys
import time
from pathlib import Path

from tests.model.serve.hostile.attacks import POLITE_KEY, TEXT, raw

ASKED = {"prompt": [3] * 20, "max_tokens": 8, "ignore_eos": True, "stream": True, "temperature": 0}
PAUSE_S = 0.02


def times_s(pid):
    """Seconds that each thread of a process has had a core, and has waited for one."""
    told = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            had, waited, _ = (task / "schedstat").read_text().split()
            told[int(task.name)] = (int(had) / 1e9, int(waited) / 1e9)
    return told


def engine_of(pid):
    """The thread with the most processor time beside the main one."""
    times = times_s(pid)
    return max(times.keys() - {pid}, key=lambda thread: times[thread][0])


def between(before, after):
    """What each thread had and waited for between two looks."""
    none = (0.0, 0.0)
    return {
        thread: tuple(new - old for new, old in zip(times, before.get(thread, none), strict=True))
        for thread, times in after.items()
    }


def asked(port, request):
    """What a server answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def main(port, pid):
    body = json.dumps(ASKED).encode()
    kinds = {"health": raw("GET", "/health"), "tokens": raw("POST", TEXT, body, key=POLITE_KEY)}
    for _ in range(3):
        asked(port, kinds["tokens"])
    engine, ends = engine_of(pid), selectors.DefaultSelector()
    ends.register(sys.stdin, selectors.EVENT_READ)
    while not ends.select(PAUSE_S):
        for kind, request in kinds.items():
            before, began_s = [times_s(one) for one in (pid, "self")], time.monotonic()
            answer = asked(port, request)
            took_s = time.monotonic() - began_s
            server, own = map(between, before, [times_s(one) for one in (pid, "self")])
            waited_s = sum(waited for _, waited in (*server.values(), *own.values()))
            is_right = b" 200 " in answer[:20] and (kind == "health" or b"[DONE]" in answer)
            told = {"kind": kind, "began_s": began_s, "took_s": took_s, "waited_s": waited_s,
                    "worked_s": server[pid][0] + server[engine][0],
                    "error": "" if is_right else answer[:300].decode(errors="replace")}  # fmt: skip
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
