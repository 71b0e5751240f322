"""The errors of kvcore.

There are three families, because a caller reacts to them in three ways: the cache is full
(`OutOfBlocksError`: wait, preempt or refuse), the caller made a mistake (`MisuseError`: fix the
code), the allocator is broken (`InvariantError`: stop). Every error is raised before anything has
changed. No error is an `assert`, so `python -O` keeps them all.
"""

from __future__ import annotations


class KVCoreError(Exception):
    """The root of every error that kvcore raises."""


class OutOfBlocksError(KVCoreError):
    """A call needs more blocks than are free; nothing has changed.

    Attributes:
        needed: blocks that the call had to take from the free queue.
        available: blocks that the free queue held.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed, available)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return f"needed {self.needed} free blocks, {self.available} available"


class MisuseError(KVCoreError):
    """The caller broke a rule of the interface; nothing has changed."""


class InvalidArgumentError(MisuseError, ValueError):
    """An argument has the wrong type or a value outside its range."""


class DoubleFreeError(MisuseError):
    """A block was released more often than it is held."""


class ForeignBlockError(MisuseError):
    """A block does not belong to this pool, or is the null block."""


class BlockStateError(MisuseError):
    """A block is not in the state that the call needs: free, held, published or not."""


class StaleSequenceError(MisuseError):
    """A sequence was used after it was closed."""


class ForeignSequenceError(MisuseError):
    """A sequence was given to a manager that did not open it."""


class SequenceTooLongError(MisuseError):
    """A sequence would grow past `max_model_len`."""


class NotReservedError(MisuseError):
    """KV was committed, or a slot looked up, where the sequence has no block."""


class UnknownTokensError(MisuseError):
    """A known token cannot follow expected tokens whose ids are still unknown."""


class NotExpectedError(MisuseError):
    """Resolved tokens are not expected: resolved before, truncated since, or never expected."""


class InvariantError(KVCoreError):
    """A property of the allocator does not hold: a bug in kvcore, or memory was overwritten.

    Attributes:
        prop: the number of the property, "P1" to "P30", as docs/reference/properties.md lists them.
    """

    def __init__(self, prop: str, message: str) -> None:
        super().__init__(prop, message)
        self.prop = prop
        self.message = message

    def __str__(self) -> str:
        return f"{self.prop}: {self.message}"
