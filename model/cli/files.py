"""Files that a command writes: which may be replaced, and how.

Decides: that an existing file is replaced or continued only if the same flag has written it, which
its first characters show, and never if it is an input of this run, or where its stdout or stderr
goes, under whatever name. So a wrong name costs an error and no file. Invariants: the check changes
nothing; a file that is replaced is written beside the old one and renamed, so that a run which
fails leaves the old one.

Does not know: what is in a file.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from model.errors import UsageError


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that a command is to write.

    Attributes:
        flag: that names it, for errors.
        path: its path.
        begins: the first characters of files that this flag has written.
    """

    flag: str
    path: str
    begins: str

    def check(self, inputs: Iterable[str | None]) -> None:
        """Refuse what cannot be written, or must not be. Changes nothing. O(files of the inputs).

        A device or a pipe is written as it is.

        Args:
            inputs: files that the run reads, and folders of which it may read every file; None
                and names of what is not there are passed over.

        Raises:
            UsageError: it cannot be written, is an input, or is a file that this flag has not
                written.
        """
        path = Path(self.path)
        try:
            with suppress(FileNotFoundError):
                path.stat()  # raises for a loop of links, which `exists` calls missing
            if not path.exists():
                beside = _beside(path.resolve())
                beside.open("xb").close()
                beside.unlink()
            elif path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            elif path.is_file():
                with path.open("rb+") as there:
                    self._check_there(there, inputs)
        except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name; a loop of links
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"{self.flag}: cannot write {self.path!r}: {reason}") from error

    def _check_there(self, there: BinaryIO, inputs: Iterable[str | None]) -> None:
        for name in _files(inputs):
            with suppress(OSError, ValueError):
                if os.path.samestat(os.fstat(there.fileno()), name.stat()):
                    raise UsageError(
                        f"{self.flag}: {self.path!r} is {str(name)!r}, which this run reads: name "
                        "another file"
                    )
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            with suppress(OSError):
                if os.path.samestat(os.fstat(there.fileno()), os.fstat(descriptor)):
                    raise UsageError(
                        f"{self.flag}: {self.path!r} is where {stream} goes: name another file"
                    )
        begins = self.begins.encode()
        head = there.read(len(begins))
        if head not in {b"", begins}:
            raise UsageError(
                f"{self.flag}: {self.path!r} holds something that {self.flag} has not written: "
                "name another file, or remove it"
            )

    @contextmanager
    def replaced(self) -> Iterator[TextIO]:
        """Write it anew. What was there stays until the body has ended, and if that raises.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(self.path)
        if path.exists() and not path.is_file():  # a device or a pipe
            with path.open("w", encoding="utf-8") as out:
                yield out
            return
        path = path.resolve()  # a link stays one
        beside = _beside(path)
        try:
            with beside.open("x", encoding="utf-8") as out:
                yield out
            with suppress(FileNotFoundError):
                shutil.copymode(path, beside)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def _beside(path: Path) -> Path:
    """Return a new name in the same folder, of at most 212 bytes."""
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}")


def _files(inputs: Iterable[str | None]) -> Iterator[Path]:
    for name in inputs:
        if name is not None:
            path = Path(name)
            with suppress(OSError, ValueError):
                yield from path.iterdir() if path.is_dir() else (path,)
