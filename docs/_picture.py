"""The picture of decode's speed, drawn from measured results when the site is built.

Each row of the table of decode is a point for us and one for the peer: bytes that are read, and
bytes a second. The bytes are what our time and speed come to.
"""

import math
from collections.abc import Iterator

OURS, PEER = "#1b6ca8", "#d1495b"
LEFT, RIGHT, TOP, BOTTOM = 70, 790, 30, 370
FIRST, LAST = 3e6, 6e9  # bytes
HIGHEST = 5  # TB/s
TICKS = {4e6: "4 MB", 16e6: "16 MB", 64e6: "64 MB", 250e6: "250 MB", 1e9: "1 GB", 4e9: "4 GB"}


def picture(rows: list[list[str]], ceiling: float) -> str:
    """The SVG of rows of (what, our us, our TB/s, the peer's us, ratio), and the read ceiling."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 430"',
        ' font-family="sans-serif" font-size="13">',
        '<rect width="820" height="430" fill="white"/>',
        *_axes(ceiling),
    ]
    for what, ours, speed, peer, *_ in rows:
        size = float(ours) * float(speed) * 1e6
        lines.append(_mark(what, size, size / float(peer) / 1e6, PEER))
        lines.append(_mark(what, size, float(speed), OURS))
    return "\n".join([*lines, *_legend(), "</svg>", ""])


def _x(size: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(size / FIRST) / math.log(LAST / FIRST)


def _y(speed: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * speed / HIGHEST


def _mark(what: str, size: float, speed: float, colour: str) -> str:
    x, y = _x(size), _y(speed)
    fill = f'fill="{colour}" fill-opacity="0.8"/>'
    if what.startswith("ragged") or " and " in what:
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {fill}'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {fill}'


def _axes(ceiling: float) -> Iterator[str]:
    for speed in range(HIGHEST + 1):
        y = _y(speed)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{speed}</text>'
    for size, name in TICKS.items():
        x = _x(size)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{BOTTOM}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{name}</text>'
    y = _y(ceiling)
    yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="#888"'
    yield ' stroke-dasharray="6 4"/>'
    yield f'<text x="{LEFT + 8}" y="{y - 6:.1f}" fill="#555">a sum reads {ceiling:.2f} TB/s</text>'
    yield f'<text x="{(LEFT + RIGHT) / 2}" y="415" text-anchor="middle">'
    yield "bytes of keys and values</text>"
    yield '<text x="18" y="200" text-anchor="middle" transform="rotate(-90 18 200)">TB/s</text>'


def _legend() -> Iterator[str]:
    for y, colour, name in ((278, OURS, "kvcore"), (299, PEER, "FlashAttention-3")):
        yield f'<circle cx="560" cy="{y}" r="4.5" fill="{colour}"/>'
        yield f'<text x="572" y="{y + 4}">{name}</text>'
    yield '<text x="555" y="321" fill="#555">circles: even batches; squares: ragged</text>'
