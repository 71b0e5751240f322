"""Decides what the demonstration says to the tiny model: prompts with one long beginning.

Invariants: every prompt is `SHARED_PREFIX` and an ending; the prefix is more than a hundred of the
tiny model's tokens, so that several whole blocks can be shared; an ending starts with a letter, so
that the prefix has the same tokens in every prompt. It does not know how prompts are run.
"""

SHARED_PREFIX = (
    "Python is an object-oriented programming language. Every value is an object, and every object "
    "has a type, an identity and a value. A function takes arguments and returns a value. A class "
    "defines methods, and an instance of the class has attributes. When an error occurs, an "
    'exception is raised, and the exception can be handled by the "except" clause of a "try" '
    "statement. A module is a file that contains definitions and statements, and its names can be "
    "imported by other modules.\n\n"
)
"""A few sentences of the kind that the model has read."""

ENDINGS = (
    "The function returns",
    "If an exception is raised",
    "A list is",
    "The module defines",
)
"""What each prompt goes on with; the model continues each in its own direction."""

DEMO_PROMPTS = tuple(SHARED_PREFIX + ending for ending in ENDINGS)
"""The prompts of `python -m model.run` without arguments."""
