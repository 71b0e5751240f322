"""Files that one start leaves for later ones, in `cache_dir()`. Loads no other package.

Invariants: a file is written beside its name and renamed, and only its owner may read it; one that
is corrupt or foreign (of another owner, or writable by others) is a miss.

Does not know: what files hold.
"""

import hashlib
import os
import secrets
import stat
import time
import zlib
from contextlib import suppress
from pathlib import Path

_UNREAD_S = 60 * 24 * 3600


def cache_dir() -> Path:
    """Where files are kept for later starts: `KVCORE_CACHE_DIR`, or `~/.cache/kvcore`. O(1)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVCORE_CACHE_DIR") or Path(base) / "kvcore")


def has_stored(folder: str) -> bool:
    """Whether an earlier start has left files in this folder of `cache_dir()`. O(1)."""
    with suppress(OSError):
        return any(True for _ in (cache_dir() / folder).iterdir())
    return False


def can_store(folder: str) -> bool:
    """Whether files can be written there; if not, no other process can leave any. O(1)."""
    with suppress(OSError):
        (cache_dir() / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.access(cache_dir() / folder, os.W_OK | os.X_OK)


def read_file(path: Path) -> bytes:
    """What `write_file` has written there. O(its bytes).

    Raises:
        OSError: there is no such file.
        ValueError: it is another user's, or others may write it, or it is not whole.
    """
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        content = file.read()
    is_ours = about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    head, body = content[:32], content[32:]
    if not is_ours or hashlib.sha256(path.name.encode() + body).digest() != head:
        raise ValueError(f"{path} is foreign or corrupt")
    with suppress(OSError):
        os.utime(path)  # when it was last of use
    return zlib.decompress(body)


def write_file(path: Path, content: bytes) -> None:
    """Write a file with a checksum, for its owner alone; at no time is there half of one.

    Files beside it that no start has read for 60 days are deleted. O(its bytes, the files there).

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    body = zlib.compress(content, 1)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(hashlib.sha256(path.name.encode() + body).digest() + body)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    for each in path.parent.iterdir():
        with suppress(OSError):  # another process may have deleted it
            if time.time() - each.stat().st_mtime > _UNREAD_S:
                each.unlink()
