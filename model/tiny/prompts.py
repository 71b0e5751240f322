"""Decides what the demonstration says to the tiny model: prompts with one long beginning.

Invariants: every prompt is `SHARED_PREFIX` and an ending; the prefix is more than a hundred of the
tiny model's tokens, so that several whole blocks can be shared; an ending starts with a letter, so
that the prefix has the same tokens in every prompt. It does not know how prompts are run.
"""

SHARED_PREFIX = (
    "class matrix.Matrix\n\n"
    "A table of numbers with a fixed number of rows and columns. All elements have the same type, "
    "which is either int or float. Two matrices are equal if they have the same size and if all "
    "their elements are equal.\n\n"
    "Matrix.__init__(rows, columns, value)\n\n"
    "Create a matrix in which each element has the given value. The default value is zero. If the "
    "number of rows or columns is negative, ValueError is raised.\n\n"
    "Matrix.__getitem__(index)\n\n"
    "Return the element at the given index, a tuple of two integers.\n\n"
)
"""The documentation of a class that does not exist, in the form of the many that were read."""

ENDINGS = (
    "Matrix.__setitem__(index, value)\n\n",
    "Matrix.__add__(other)\n\n",
    "Matrix.insert(index, row)\n\n",
    "Matrix.is_empty()\n\n",
)
"""A method for each prompt; the model says what it would do."""

DEMO_PROMPTS = tuple(SHARED_PREFIX + ending for ending in ENDINGS)
"""The prompts of `python -m model.run` without arguments."""
