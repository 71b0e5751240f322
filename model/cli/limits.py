"""The limits of a process that the system sets, when one of them is why something failed.

Decides: which errors come of such a limit, whatever library raised them, and the words that say so:
they name the limit as the shell does, its value, and how to raise it; and how many open files a
server needs to start.

Does not know: what was run.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from importlib import import_module

from model.errors import ModelError, UsageError

_TEXTS = {
    os.strerror(errno.ENFILE): "",  # the system's limit: its own words say so
    os.strerror(errno.EMFILE): "NOFILE",
    "can't start new thread": "NPROC",
    os.strerror(errno.ENOMEM): "AS",
    "can't allocate memory": "AS",  # torch
    "failed to map segment": "AS",  # the loader of shared objects
}
"""Parts of messages, and the limit behind each."""

_AGAIN = os.strerror(errno.EAGAIN)
"""The message of a fork or a thread that fails, and also of sockets and of locks of files."""

_WORDS = {
    "NOFILE": ("too many open files", "ulimit -n", 1, "ulimit -n 65536"),
    "NPROC": ("no more threads or processes", "ulimit -u", 1, "ulimit -u 65536"),
    "AS": ("out of memory", "ulimit -v", 1024, "ulimit -v unlimited"),
}
"""The thing that is used up, the limit's name and unit, and a command that raises it."""


def exhausted(error: BaseException) -> str | None:
    """Return a line about the limit that an error comes of; None if it comes of none. O(chain)."""
    kind = next((found for one in _chain(error) if (found := _kind(one))), None)
    value = None if kind is None else _value(kind)
    if kind is None or value is None:
        return None
    what, name, unit, remedy = _WORDS[kind]
    return (
        f"{what}: this process is limited to {value // unit:,} ({name}): raise the limit, such as "
        f"by {remedy}"
    )


def allow_open_files(least: int, most: int = 65_536) -> None:
    """Raise the limit of open files as far as the system allows without privileges. O(1).

    Args:
        least: the number that the process needs.
        most: the limit to raise it to; a higher one stays.

    Raises:
        UsageError: fewer are allowed.
    """
    with contextlib.suppress(ImportError):  # there is no such module on Windows
        resource = import_module("resource")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        infinite = resource.RLIM_INFINITY
        wanted = most if hard == infinite else min(hard, most)
        if soft != infinite and soft < wanted:
            with contextlib.suppress(OSError, ValueError):  # macOS has another limit, too
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
        if soft != infinite and soft < least:
            raise UsageError(
                f"open files (ulimit -n): wanted a limit of at least {least}, as each connection "
                f"takes one, got {soft}: raise the limit, such as by ulimit -n {most}"
            )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _kind(error: BaseException) -> str | None:
    """Return the limit behind one error, or None if there is none."""
    if isinstance(error, ModelError):  # it may quote the user; what it comes of stands behind it
        return None
    if isinstance(error, MemoryError):
        return "AS"
    if isinstance(error, OSError) and error.errno == errno.EAGAIN and error.filename is None:
        return "NPROC" if error.strerror == _AGAIN else None
    if isinstance(error, RuntimeError) and _AGAIN in str(error):  # of C++
        return "NPROC"
    told = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    return next((kind for text, kind in _TEXTS.items() if text in told), None)


def _value(kind: str) -> int | None:
    """Return the value of a limit of this process; None if there is none."""
    with contextlib.suppress(ImportError):  # there is no such module on Windows
        resource = import_module("resource")
        value: int = resource.getrlimit(getattr(resource, f"RLIMIT_{kind}"))[0]
        return None if value == resource.RLIM_INFINITY else value
    return None
