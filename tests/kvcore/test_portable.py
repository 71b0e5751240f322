"""kvcore on systems that lack POSIX: what a router on Windows imports must not ask for it.

No Windows is at hand: a fresh process hides what Windows' Python does not have.
"""

import subprocess
import sys

import pytest

HIDE = """
import os, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "resource", "termios", "pwd", "grp"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for name in ("O_CLOEXEC", "O_NOFOLLOW", "geteuid", "getuid", "pwritev", "preadv", "fork"):
    if hasattr(os, name):
        delattr(os, name)
"""

ROUTE = """
import kvcore
from kvcore.wire import Index, Publisher, Source, Subscriber

kv = kvcore.KVCacheManager(num_blocks=8, block_size=4, record_events="xxh3-128")
with Publisher(kv, "tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as publisher:
    with Subscriber({"a": Source(publisher.endpoint, publisher.replay)}):
        print("reads")
"""

DISK = """
from kvcore.tiers import Folder, TierError
try:
    Folder("unused").start()
except TierError as error:
    print(error)
"""


def hidden(program: str) -> str:
    """Return what a program prints where Windows' gaps are."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE + program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["kvcore", "kvcore.wire", "kvcore.tiers", "kvcore.testing"])
def test_a_package_is_imported_where_posix_is_missing(module: str) -> None:
    assert hidden(f"import {module}; print('imported')") == "imported\n"


def test_a_disk_tier_without_file_locks_is_refused_in_one_line() -> None:
    assert "wanted a system with POSIX file locks" in hidden(DISK)


def test_events_are_published_and_read_where_posix_is_missing() -> None:
    assert hidden(ROUTE) == "reads\n"
