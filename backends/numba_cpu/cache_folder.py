"""The folder in which numba keeps compiled kernels where it finds none itself.

Numba keeps them beside the source, or else below the user's home. A container with a read-only
install and no home has neither, and numba then refuses to compile at all. Here such a process gets
a folder of the user in the temporary directory, which later processes find again.

Invariant: what is loaded from there is code, so the folder belongs to this user and is closed to
all others; where it is not, this process gets a fresh one.
"""

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from numba import config

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(make: Callable[..., Callable[[_F], _F]], function: _F, *, cache: bool) -> _F:
    """Return the function compiled by `make(cache=...)`, which is `numba.njit` with its options.

    Where numba finds no folder for `cache=True`, the private one is used; where the temporary
    directory cannot be written either, every process compiles for itself.
    """
    try:
        return make(cache=cache)(function)
    except RuntimeError:  # "no locator available": numba has no folder
        folder = private_folder()
        if folder is None:
            return make(cache=False)(function)
        config.CACHE_DIR = folder  # type: ignore[attr-defined]  # it is made at run time
        return make(cache=cache)(function)


def private_folder() -> str | None:
    """Return the path of a folder in the temporary directory that this user alone can open.

    None if the temporary directory cannot be written.
    """
    user = os.getuid() if hasattr(os, "getuid") else None  # Windows' temporary files are private
    try:
        path = Path(tempfile.gettempdir()) / f"kvcore-numba-{user}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            found = path.lstat()
            is_closed = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
            if user is not None and not (is_closed and found.st_uid == user):
                return tempfile.mkdtemp(prefix="kvcore-numba-")
    except OSError:
        return None
    return str(path)
