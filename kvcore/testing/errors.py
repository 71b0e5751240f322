"""The errors of the machines: a broken property, a crash, or an invalid adapter.

Each carries the calls that led to it as a program, so that a failure can be read, and replayed,
without the machine that found it.
"""

from __future__ import annotations

from dataclasses import dataclass

import kvcore


@dataclass(frozen=True, slots=True)
class Step:
    """One verb of the driver.

    Attributes:
        verb: its name.
        who: the name of the request that it is about, or "".
        arguments: the others.
    """

    verb: str
    who: str
    arguments: tuple[object, ...]


class AdapterError(kvcore.MisuseError):
    """An adapter lacks a verb that it promises, or a verb returns something of another kind."""


class BrokenError(kvcore.KVCoreError, AssertionError):
    """The allocator under test did something wrong.

    Attributes:
        message: the wanted and the actual result.
        program: the calls that led there.
        steps: the same as the driver's verbs, so that they can be taken again.
    """

    def __init__(self, message: str, program: str, steps: tuple[Step, ...] = ()) -> None:
        super().__init__(message, program)
        self.message = message
        self.program = program
        self.steps = steps

    def __str__(self) -> str:
        return f"{self.message}\n\nThe calls that led here:\n\n{self.program}"

    @property
    def what(self) -> str:
        """The failure in short: the property, or "crash" and the exception's class."""
        cause = self.__cause__
        return f"crash {type(cause).__name__}" if cause else "crash"

    @property
    def key(self) -> str:
        """The failure and the verb in which it happened, in the form that `--known` takes."""
        last = self.steps[-1] if self.steps else Step("", "", ())
        verb = str(last.arguments[0]) if last.verb == "misuse" else last.verb
        return f"{self.what}: {verb}"


class PropertyError(BrokenError):
    """A property of docs/reference/properties.md does not hold.

    Attributes:
        prop: its number, such as "P7".
    """

    def __init__(self, prop: str, message: str, program: str, steps: tuple[Step, ...] = ()) -> None:
        super().__init__(f"{prop}: {message}", program, steps)
        self.prop = prop

    @property
    def what(self) -> str:
        """The property."""
        return self.prop


class CrashError(BrokenError):
    """A call that was in order raised; the exception is the cause of this one."""
