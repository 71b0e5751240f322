"""The picture of docs/kernels.md, drawn from its numbers: `python -m tests.kernels_picture`.

Each row of the table of decode is a point for us and one for the peer: bytes that are read, and
bytes a second. The bytes are what our time and speed come to.
"""

import math
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
OURS, PEER = "#1b6ca8", "#d1495b"
LEFT, RIGHT, TOP, BOTTOM = 70, 790, 30, 370
FIRST, LAST = 3e6, 6e9  # bytes
HIGHEST = 5  # TB/s
TICKS = {4e6: "4 MB", 16e6: "16 MB", 64e6: "64 MB", 250e6: "250 MB", 1e9: "1 GB", 4e9: "4 GB"}


def x_of(size):
    return LEFT + (RIGHT - LEFT) * math.log(size / FIRST) / math.log(LAST / FIRST)


def y_of(speed):
    return BOTTOM - (BOTTOM - TOP) * speed / HIGHEST


def decode_rows(page):
    """(what, our microseconds, our TB/s, the peer's microseconds) of each row."""
    section = re.search(r"^## Decode\n.*?(?=^## )", page, re.DOTALL | re.MULTILINE)[0]
    row = re.compile(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", re.MULTILINE)
    return [(what, *map(float, numbers)) for what, *numbers in row.findall(section)]


def mark(what, size, speed, colour):
    x, y = x_of(size), y_of(speed)
    how = f'fill="{colour}" fill-opacity="0.8"/>'
    if what.startswith("ragged") or " and " in what:
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {how}'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {how}'


def axes(ceiling):
    for speed in range(HIGHEST + 1):
        y = y_of(speed)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{speed}</text>'
    for size, name in TICKS.items():
        x = x_of(size)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{BOTTOM}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{name}</text>'
    y = y_of(ceiling)
    yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="#888"'
    yield ' stroke-dasharray="6 4"/>'
    yield f'<text x="{LEFT + 8}" y="{y - 6:.1f}" fill="#555">a sum reads {ceiling:.2f} TB/s</text>'
    yield f'<text x="{(LEFT + RIGHT) / 2}" y="415" text-anchor="middle">'
    yield "bytes of keys and values</text>"
    yield '<text x="18" y="200" text-anchor="middle" transform="rotate(-90 18 200)">TB/s</text>'


def legend():
    for y, colour, name in ((278, OURS, "ours"), (299, PEER, "FlashAttention-3")):
        yield f'<circle cx="560" cy="{y}" r="4.5" fill="{colour}"/>'
        yield f'<text x="572" y="{y + 4}">{name}</text>'
    yield '<text x="555" y="321" fill="#555">circles: even batches; squares: ragged</text>'


def picture(page):
    """The SVG of a page's numbers."""
    rows = decode_rows(page)
    ceiling = int(re.search(r"read (\d+) GB/s", page)[1]) / 1000
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 430"',
        ' font-family="sans-serif" font-size="13">',
        '<rect width="820" height="430" fill="white"/>',
        *axes(ceiling),
    ]
    for colour in (PEER, OURS):
        for what, our_us, our_speed, peer_us in rows:
            size = our_us * our_speed * 1e6
            speed = our_speed if colour == OURS else size / peer_us / 1e6
            lines.append(mark(what, size, speed, colour))
    return "\n".join([*lines, *legend(), "</svg>", ""])


if __name__ == "__main__":
    (DOCS / "kernels.svg").write_text(picture((DOCS / "kernels.md").read_text(encoding="utf-8")))
    sys.stdout.write(f"{DOCS / 'kernels.svg'}\n")
