"""Decides what the demonstration says to the tiny model: prompts with one long beginning.

Invariants: every prompt is `SHARED_PREFIX` and an ending; the prefix is more than a hundred of the
tiny model's tokens, so that several whole blocks can be shared; an ending starts with a letter, so
that the prefix has the same tokens in every prompt. It does not know how prompts are run.
"""

SHARED_PREFIX = (
    "class storage.Storage\n\n"
    "A collection of named values that is kept in a file. The keys are strings and the values are "
    "bytes objects. If the file does not exist, it is created. The file is closed when the object "
    "is deleted, or when the close() method is called.\n\n"
    "Storage.__init__(path, mode)\n\n"
    "Open the file for reading or writing. If the mode is 'r', the file must exist already. If the "
    "mode is 'w', the file is created, and an existing file is overwritten.\n\n"
)
"""The documentation of a class that does not exist, as the model has read many."""

ENDINGS = (
    "Storage.write(data)\n\n",
    "Storage.copy(path)\n\n",
    "Storage.remove(name)\n\n",
    "Storage.__len__()\n\n",
)
"""A method for each prompt; the model explains what it would do."""

DEMO_PROMPTS = tuple(SHARED_PREFIX + ending for ending in ENDINGS)
"""The prompts of `python -m model.run` without arguments."""
