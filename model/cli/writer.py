"""The layout of prompts and their continuations on a terminal.

Decides: the layout of a text, and the order in which streamed pieces appear: prompt after prompt,
the first unfinished one live, those behind it held until their turn. Of a long prompt only the end
is shown.

Invariants: what is streamed is, character for character, what `show` gives for the whole texts; no
control character of a text reaches the terminal.

Does not know: tokens, requests.
"""

from collections.abc import Sequence
from typing import TextIO

from model.errors import visible

_INDENT = "    "
_PROMPT_WIDTH = 72


def show(label: str, prompt: str, text: str) -> str:
    """Return a prompt's end and its continuation, with an empty line behind. O(prompt + text)."""
    return _head(label, prompt) + _Indenter().feed(text) + "\n\n"


class StreamWriter:
    """Writes the pieces of several texts to one stream, in order.

    Args:
        prompts: label and prompt of every text of the run, in order.
        out: flushed after every piece.
    """

    def __init__(self, prompts: Sequence[tuple[str, str]], out: TextIO) -> None:
        self._prompts = prompts
        self._out = out
        self._pending: list[list[str]] = [[] for _ in prompts]
        self._finished = [False] * len(prompts)
        self._indenters = [_Indenter() for _ in prompts]
        self._turn = 0
        self._begin()

    def write(self, index: int, piece: str, *, is_last: bool) -> None:
        """Add a piece of text `index`, from 0, and write all that is due. O(text that is due)."""
        self._pending[index].append(self._indenters[index].feed(piece))
        self._finished[index] = is_last
        while self._turn < len(self._prompts):
            self._out.write("".join(self._pending[self._turn]))
            self._pending[self._turn].clear()
            if not self._finished[self._turn]:
                break
            self._out.write("\n\n")
            self._turn += 1
            self._begin()
        self._out.flush()

    def _begin(self) -> None:
        if self._turn < len(self._prompts):
            self._out.write(_head(*self._prompts[self._turn]))


class _Indenter:
    """Indents the lines of a text that comes in pieces; empty lines stay empty."""

    def __init__(self) -> None:
        self._at_line_start = False

    def feed(self, piece: str) -> str:
        out = []
        for character in piece:
            if self._at_line_start and character != "\n":
                out.append(_INDENT)
            self._at_line_start = character == "\n"
            out.append(character)
        return visible("".join(out))


def _head(label: str, prompt: str) -> str:
    end = prompt.rstrip("\n").rsplit("\n", 1)[-1][-_PROMPT_WIDTH:]
    cut = "" if end == prompt.rstrip("\n") else "... "
    gap = " " if prompt[-1:].isspace() else ""
    return f"[{label}] {cut}{visible(end)}\n{_INDENT}=>{gap}"
