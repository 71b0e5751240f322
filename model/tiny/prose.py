"""Decides which paragraphs of a piece of documentation a model may learn from, and in what form.

Invariants: the same text gives the same paragraphs, in order; no paragraph of a licence, a
copyright notice or a list of authors survives.
It does not know where a text comes from, nor that a model will be trained on it.
"""

import inspect
import re

_LEGAL = re.compile(
    r"copyright|licen[cs]e|\(c\)\s*(19|20)\d\d|©|all rights reserved|warrant(y|ies)"
    r"|permission (is|to)|hereby grant|redistribut|liab(le|ility) (for|to)",
    re.IGNORECASE,
)
_CREDIT = re.compile(
    r"\b(written|contributed|designed|developed|implemented|modified|maintained) by\b"
    r"|\bauthors?\b\s*[:=(]|[\w.+-]+@(?!example|localhost)[\w-]+\.(com|org|net|edu|de|uk|nl|it|fr)\b",
    re.IGNORECASE,
)
_RULER = re.compile(r"\s*([-=*~^#_+.])\1{2,}\s*")
_TABLE = re.compile(r"\s*(\+[-=]|\|)")
_BULLET = re.compile(r"(\s*)([-*o]|\d+\.|\(\w\))\s+")
_CODE = re.compile(r"\s*(>>>|\.\.\.|[$#%])")
_WIDE_STOP = re.compile(r"(?<=[a-z)\]\"'][.!?]) {2,}(?=[A-Z\"'`*(])")
_WRAPPED_LENGTH = 45  # a line broken by a writer's editor is at least this long; code rarely is


def is_legal_text(text: str) -> bool:
    """Whether the text speaks of licences, copyright or warranty. O(len(text))."""
    return _LEGAL.search(text) is not None


def paragraphs(text: str) -> list[str]:
    """The paragraphs worth learning from, each unwrapped if it is prose. O(len(text)).

    Legal texts, credits, tables and the rulers under headings are left out. Common indentation
    goes; what remains marks code and lists, and stays. One space follows a full stop.
    """
    lines = [line.rstrip() for line in inspect.cleandoc(text).splitlines()]
    body = "\n".join(line for line in lines if not _RULER.fullmatch(line))
    blocks = (block.strip("\n") for block in re.split(r"\n{2,}", body))
    return [_WIDE_STOP.sub(" ", _unwrap(block)) for block in blocks if block and _is_wanted(block)]


def _is_wanted(block: str) -> bool:
    return not (is_legal_text(block) or _CREDIT.search(block) or _TABLE.match(block))


def _unwrap(block: str) -> str:
    """Join the lines of a wrapped paragraph or list item; return anything else as it came."""
    lines = block.split("\n")
    first, rest = lines[0], lines[1:]
    if not rest or _CODE.match(first) or min(map(len, lines[:-1])) < _WRAPPED_LENGTH:
        return block
    bullet = _BULLET.match(first)
    indent = bullet.end() if bullet else _indent(first)
    if any(_indent(line) != indent or _BULLET.match(line) for line in rest):
        return block
    return " ".join([first, *(line.strip() for line in rest)])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
