"""A picture of the pool in text: the content and the holders of each block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from kvcore.testing.ghost import Memory, Prefixes, Request
from kvcore.testing.watch import Watch

MAX_BLOCKS = 24
UNWRITTEN = "."


def picture(memory: Memory, prefixes: Prefixes, watch: Watch, live: Iterable[Request]) -> str:
    """Return one line: the blocks that were ever handed out, and how many are free.

    `3:ab[0 1]*` is block 3, in the tables of a and b, with the KV of tokens 0 and 1; the star says
    that it can be hit, `.` that nothing was written there, `-` that it has no holder. `a'` is the
    second layer group of a.
    """
    holders: dict[int, list[str]] = {}
    for request in live:
        for group, table in enumerate(request.tables):
            for block_id in watch.usable.intersection(table):
                holders.setdefault(block_id, []).append(request.name + "'" * group)
    for lease in watch.leases:
        for block_id in lease.blocks:
            holders.setdefault(block_id, []).append(f"({lease.name})")
    known = sorted(set(memory.places) | set(holders))
    shown = []
    for block_id in known[:MAX_BLOCKS]:
        cells = memory.places.get(block_id, [])
        inside = " ".join(UNWRITTEN if c is None else _last(prefixes, c) for c in cells)
        star = "*" if block_id in memory.ends else ""
        shown.append(f"{block_id}:{''.join(holders.get(block_id, ['-']))}[{inside}]{star}")
    if len(known) > MAX_BLOCKS:
        shown.append(f"and {len(known) - MAX_BLOCKS} more")
    num_free = len(watch.usable) - len(watch.held(live))
    return f"  {'  '.join(shown) or 'nothing yet'}   {num_free} free"


def _last(prefixes: Prefixes, number: int) -> str:
    """Return the token that a prefix ends with, and the item there if there is one."""
    token: Hashable = prefixes.spell(number)[2][-1]
    return f"{token[0]}{token[1]}" if isinstance(token, tuple) else str(token)
