"""The errors of the data plane, as types.

Every error names the argument or the backend, what was wanted and what it got.
"""


class BackendError(Exception):
    """Base of every error that `backends` raises on purpose."""


class InvalidArgumentError(BackendError, ValueError):
    """An argument breaks the contract; no tensor has been written to.

    `argument` is its name, so that a caller can say which of its inputs was wrong.
    """

    def __init__(self, argument: str, wanted: str, got: str) -> None:
        super().__init__(f"{argument}: wanted {wanted}, got {got}")
        self.argument = argument
        self.wanted = wanted
        self.got = got


class UnsupportedError(InvalidArgumentError):
    """The argument keeps the contract, but this backend's capabilities exclude it."""


class UnknownBackendError(BackendError, LookupError):
    """No backend of this name is built in or registered by an installed package."""


class BackendUnavailableError(BackendError, RuntimeError):
    """A known backend cannot run here. Carries the reason, and what to choose instead."""

    def __init__(self, name: str, reason: str, alternative: str) -> None:
        super().__init__(f"backend {name!r} cannot run here: {reason}; instead: {alternative}")
        self.name = name
        self.reason = reason
        self.alternative = alternative
