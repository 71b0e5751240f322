"""The calls made to an adapter, recorded as a program, with a class of error for each failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from kvcore.testing.errors import BrokenError, CrashError, PropertyError, Step
from kvcore.testing.ghost import Lease, Request


class Program:
    """An adapter, and every call that changes something made to it so far.

    Args:
        allocator: the adapter.
        waive: is given every error before it is raised, and may raise something else.
    """

    def __init__(
        self, allocator: object, waive: Callable[[BrokenError], None] | None = None
    ) -> None:
        self.allocator = allocator
        self.waive = waive
        self.lines: list[str] = []
        self.steps: list[Step] = []

    def __str__(self) -> str:
        return "\n".join(f"    {line}" for line in self.lines)

    def step(self, verb: str, who: str, *arguments: object) -> None:
        """Note which verb of the driver comes next."""
        self.steps.append(Step(verb, who, arguments))

    def note(self, text: str) -> None:
        """Write something down beside the calls, as a comment."""
        self.lines += [f"# {line}" for line in text.splitlines()]

    def ask(self, verb: str, *arguments: object) -> object:
        """Make a call that changes nothing, and write down nothing unless it raises."""
        try:
            return self._make(verb, arguments)
        except Exception as error:
            self._write("", verb, arguments)
            raise self._crash(verb, error) from error

    def call(self, verb: str, *arguments: object, target: str = "") -> object:
        """Make a call that is in order; it must not raise."""
        self._write(target, verb, arguments)
        try:
            result = self._make(verb, arguments)
        except Exception as error:
            raise self._crash(verb, error) from error
        if verb != "lease" and (result is not None or verb in {"reserve", "fork", "swap_in"}):
            self.lines[-1] += f"  # {self._shown(result)}"
        return result

    def misuse(self, verb: str, *arguments: object) -> Exception | None:
        """Make a call that is out of order, and return what it raised."""
        self._write("", verb, arguments)
        try:
            self._make(verb, arguments)
        except Exception as error:  # noqa: BLE001  # whatever an allocator's own error is
            self.lines[-1] += f"  # {type(error).__name__}"
            return error
        self.lines[-1] += "  # accepted"
        return None

    def broken(self, prop: str, message: str) -> NoReturn:
        """Raise that a property does not hold."""
        raise self._raised(PropertyError(prop, message, str(self), tuple(self.steps)))

    def expect(self, prop: str, what: str, got: object, wanted: object) -> None:
        """Raise that a property does not hold unless `got` is what was wanted."""
        if got != wanted:
            self.broken(prop, f"{what}: wanted {wanted!r}, got {got!r}")

    def _make(self, verb: str, arguments: tuple[object, ...]) -> object:
        passed = [a.handle if isinstance(a, Request | Lease) else a for a in arguments]
        return getattr(self.allocator, verb)(*passed)  # it was checked

    def _write(self, target: str, verb: str, arguments: tuple[object, ...]) -> None:
        shown = [a.name if isinstance(a, Request | Lease) else repr(a) for a in arguments]
        self.lines.append(f"{target}allocator.{verb}({', '.join(shown)})")

    def _crash(self, verb: str, error: Exception) -> BrokenError:
        self.lines[-1] += f"  # {type(error).__name__}"
        what = f"{verb} raised {error!r} though the call was in order"
        crash = CrashError(what, str(self), tuple(self.steps))
        crash.__cause__ = error
        return self._raised(crash)

    def _raised(self, error: BrokenError) -> BrokenError:
        """Return an error that is to be raised, unless it is waived."""
        if self.waive is not None:
            self.waive(error)
        return error

    @staticmethod
    def _shown(result: object) -> str:
        """Return the text of a value; of a pair with a request, of what can be looked at."""
        if result is None:
            return "None: no space"
        return repr(result[1]) if isinstance(result, tuple) and len(result) == 2 else repr(result)
