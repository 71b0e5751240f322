"""What the machines raise: a broken property, a crash, or an adapter that is not one.

Each carries the calls that led to it as a program, so that a failure can be read, and replayed,
without the machine that found it.
"""

from __future__ import annotations

import kvcore


class AdapterError(kvcore.MisuseError):
    """An adapter lacks a verb that it promises, or a verb returns something of another kind."""


class BrokenError(kvcore.KVCoreError, AssertionError):
    """The allocator under test did something wrong.

    Attributes:
        message: what was wanted and what came.
        program: the calls that led there.
    """

    def __init__(self, message: str, program: str) -> None:
        super().__init__(message, program)
        self.message = message
        self.program = program

    def __str__(self) -> str:
        return f"{self.message}\n\nThe calls that led here:\n\n{self.program}"


class PropertyError(BrokenError):
    """A property of docs/invariants.md does not hold.

    Attributes:
        prop: its number, "P1" to "P26".
    """

    def __init__(self, prop: str, message: str, program: str) -> None:
        super().__init__(f"{prop}: {message}", program)
        self.prop = prop


class CrashError(BrokenError):
    """A call that was in order raised; the exception is the cause of this one."""
