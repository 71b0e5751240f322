"""The errors of the runner, as types.

Invariants: every error that a user's input can cause is a ModelError with a one-line message that
names the argument, what was wanted and what came, so a command line can print it without a
traceback.

Does not know: torch, kvcore or backends; their errors keep their types.
"""

import re

_SHOWN_CHARACTERS = 80
# Control characters but tab and line feed, line separators, and what turns the direction of text.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Return text for a terminal or a log: control characters are escaped, as \x1b. O(text).

    Text of a file, a model or a request is written there by way of this function.
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(value: object) -> str:
    """Return a value for an error message: its beginning, where it is long. O(repr of it)."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a {type(value).__name__} too long to write"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class ModelError(Exception):
    """Base of the runner's errors."""


class InvalidArgumentError(ModelError, ValueError):
    """An argument has a value that cannot be used: which one, what was wanted, what came."""


class InvalidSettingError(InvalidArgumentError):
    """A setting has a value that is not allowed."""

    def __init__(self, name: str, wanted: str, got: object) -> None:
        super().__init__(f"{name}: wanted {wanted}, got {shown(got)}")
        self.name = name
        self.wanted = wanted
        self.got = got


class GrammarError(InvalidArgumentError):
    """A text cannot follow its grammar any further: a limit or a budget is used up."""


class RequestTooLongError(InvalidArgumentError):
    """The request could never finish here, even alone: pool or positions are too few."""


class RequestStateError(ModelError):
    """A call that the status of the request does not allow."""


class SchedulerStateError(ModelError):
    """The step protocol was broken: schedule and update must alternate, each step updated once."""


class StalledError(ModelError):
    """Requests are unfinished, yet nothing can run: someone else holds the blocks of this pool."""


class ModelNotFoundError(ModelError):
    """There is no model at this path or id, or what is there is not a model."""


class UnsupportedModelError(ModelError):
    """The model is there, but cannot run with a paged cache; the message says why."""


class NumericalError(ModelError):
    """The model's logits are not numbers."""


class RankLostError(ConnectionError):
    """Another of the processes that share a network is gone; nothing can go on without it.

    Attributes:
        was_told: True once a process has written on stderr which one it is.
    """

    was_told = False


class RanksDivergedError(RuntimeError):
    """The processes that share a network hold different blocks: a bug, or a broken machine."""


class UsageError(ModelError):
    """The command line, or a file it names, does not say what to do."""
