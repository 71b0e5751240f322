"""The errors of the wire, as types. None of them leaves a socket or a thread behind."""

from __future__ import annotations

from kvcore import KVCoreError, MisuseError


class WireError(KVCoreError):
    """The root of every error of `kvcore.wire`."""


class EndpointError(WireError):
    """An endpoint cannot be used: a port in use, an unknown host, no address at all.

    Attributes:
        endpoint: the address.
        reason: the message of ZeroMQ.
    """

    def __init__(self, argument: str, endpoint: str, reason: str) -> None:
        super().__init__(argument, endpoint, reason)
        self.argument = argument
        self.endpoint = endpoint
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.argument}: wanted a free address such as tcp://127.0.0.1:5557, "
            f"got {self.endpoint!r}: {self.reason}"
        )


class MalformedError(WireError):
    """A message is not of the format: cut short, of a wrong type, or not MessagePack."""


class ClosedError(MisuseError):
    """A publisher or subscriber was used after `close`, or after its thread had ended."""
