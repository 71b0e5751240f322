"""The files of a disk tier: numbered segments in a folder that one process has at a time.

Decides: names, rights and the lock. The folder is `kvcore-tier` inside the path that was given,
readable by its owner alone (0700, its files 0600). A lock on the file `lock` is held as long as the
process lives, so a crash leaves nothing behind that would have to be removed.

Does not know: what is in a segment. Every call may raise OSError; `start` turns it into one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, final

from kvcore.tiers.tier import TierError, TierInUseError

try:
    import fcntl
except ImportError:  # Windows, where routers read events, has no such lock; `start` says so
    fcntl = None  # type: ignore[assignment]

_NAME: Final = re.compile(r"([0-9a-f]{16})\.kvseg")
_FLAGS: Final = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class Segments(Protocol):
    """Numbered files. Every call but `start` and `close` may raise OSError."""

    def start(self) -> None:
        """Take the files for this process.

        Raises:
            TierError: it cannot have them.
        """
        ...

    def retake(self) -> None:
        """Take the files again after failures: they may have gone, been replaced, or come back.

        Raises:
            TierError: it cannot have them; those that it had it keeps.
        """
        ...

    def sizes(self) -> dict[int, int]:
        """Return the size of every segment by its number."""
        ...

    def write(self, number: int, offset: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Write pieces one behind the other, all or an OSError; a missing file is created."""
        ...

    def read(self, number: int, offset: int, buffers: Sequence[bytearray | memoryview]) -> int:
        """Fill buffers, one behind the other; return the bytes read, fewer where the file ends."""
        ...

    def cut(self, number: int, size: int) -> None:
        """Shorten a file."""
        ...

    def delete(self, number: int) -> None:
        """Delete a file."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


@final
class Folder:
    """The segments below a path, see above.

    Args:
        path: an existing folder, or one that can be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path) / "kvcore-tier"
        self._lock: int | None = None

    def start(self) -> None:
        """Make the folder, if it is not there, and lock it."""
        if fcntl is None:
            raise TierError(
                "disk tier: wanted a system with POSIX file locks (Linux, macOS), this one has "
                "none; keep copies in host memory"
            )
        try:
            with suppress(FileExistsError):  # it is a file, as `retake` says
                self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from None
        self.retake()

    def retake(self) -> None:
        """Take the files again, as `Segments` says. A path that was removed is not made again.

        It may be where a device was mounted that is gone.
        """
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            if self.path.is_symlink() or self.path.stat().st_uid != os.geteuid():
                raise TierError(f"disk tier: {self.path} is a link, or belongs to another user")
            self.path.chmod(0o700)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        except OSError as error:
            raise self._unusable(error) from None
        if self._lock is not None and os.path.sameopenfile(lock, self._lock):
            os.close(lock)
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                raise TierInUseError(
                    f"disk tier: {self.path} is in use by another process"
                ) from None
            raise TierError(f"disk tier: {self.path} {error.strerror}") from None
        self.close()
        self._lock = lock

    def _unusable(self, error: OSError) -> TierError:
        return TierError(f"disk tier: {self.path} cannot be used: {error.strerror}")

    def sizes(self) -> dict[int, int]:
        """Return the size of every segment by its number; files with other names are ignored."""
        found: dict[int, int] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    found[int(match[1], 16)] = entry.stat(follow_symlinks=False).st_size
        return found

    def write(self, number: int, offset: int, pieces: Sequence[bytes | memoryview]) -> None:
        """See `Segments.write`."""
        left = [memoryview(piece) for piece in pieces if len(piece)]
        file = os.open(self._name(number), os.O_WRONLY | os.O_CREAT | _FLAGS, 0o600)
        try:
            while left:
                count = os.pwritev(file, left, offset)
                offset += count
                left = _after(left, count)
        finally:
            os.close(file)

    def read(self, number: int, offset: int, buffers: Sequence[bytearray | memoryview]) -> int:
        """See `Segments.read`."""
        left = [memoryview(buffer) for buffer in buffers]
        begin = offset
        file = os.open(self._name(number), os.O_RDONLY | _FLAGS)
        try:
            while left and (count := os.preadv(file, left, offset)):
                offset += count
                left = _after(left, count)
        finally:
            os.close(file)
        return offset - begin

    def cut(self, number: int, size: int) -> None:
        """See `Segments.cut`."""
        os.truncate(self._name(number), size)

    def delete(self, number: int) -> None:
        """See `Segments.delete`."""
        Path(self._name(number)).unlink()

    def close(self) -> None:
        """See `Segments.close`."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _name(self, number: int) -> str:
        return os.path.join(self.path, f"{number:016x}.kvseg")  # noqa: PTH118  # called often


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers after their first bytes. A call moves at most 2 GiB."""
    left = [*buffers]
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
    return left
