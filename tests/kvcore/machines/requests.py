"""What requests are made of: prompts that share prefixes, images, namespaces, wishes, groups."""

import math

from hypothesis import strategies as st

import kvcore

BLOCK_SIZE = 4

SALTS = ("default", "default", "default", "none", "salt", "lora", "reloaded", "next epoch")
"""Who asks; most of the time somebody who shares."""

NAMESPACES = {
    "none": None,
    "default": kvcore.Namespace(),
    "salt": kvcore.Namespace(salt=b"X"),
    "lora": kvcore.Namespace(lora_name="X"),
    "reloaded": kvcore.Namespace(lora_name="X", lora_version=1),
    "next epoch": kvcore.Namespace(weight_epoch=1),
}

LENGTHS = st.builds(
    lambda blocks, edge: max(1, blocks * BLOCK_SIZE + edge), st.integers(0, 4), st.integers(-1, 1)
)
"""Lengths around the multiples of a block, where a third of all boundary bugs live."""

PLACEHOLDER = 9
"""The token id that stands where an image's rows are."""

PROMPTS = st.builds(
    lambda length, fork, other: [0] * min(fork, length) + [other] * max(0, length - fork),
    LENGTHS,
    st.integers(0, 9),
    st.sampled_from([0, 1, 2, PLACEHOLDER]),
)
"""Prompts that agree up to some position, inside a block or at its edge, and differ after it.

A placeholder's token id may stand there as text too: the token ids alone do not tell an image.
"""


def with_image(prompt, image):
    """A prompt some of whose positions are rows of an image: (token, content, row, mask bit)."""
    if image is None:
        return prompt
    content, start, length, masked = image
    rows = range(min(length, max(0, len(prompt) - start)))
    pictured = [(PLACEHOLDER, content, row, row % 2 if masked else None) for row in rows]
    return prompt[:start] + pictured + prompt[start + len(pictured) :]


def lowered(elements, first=0):
    """Elements as kvcore takes them: token ids, and items from position `first` on."""
    tokens = [element[0] if isinstance(element, tuple) else element for element in elements]
    items, runs = [], []
    for position, element in enumerate(elements):
        if isinstance(element, tuple):
            if element[2] == 0:
                runs.append((position, []))
            runs[-1][1].append(element)
    for start, rows in runs:
        bits = [bit for _, _, _, bit in rows]
        mask = None if None in bits else bytes(bits)
        items.append(kvcore.MultimodalItem(rows[0][1], first + start, len(rows), mask))
    return tokens, items


RETENTIONS = st.one_of(
    st.just([]),
    st.lists(
        st.builds(
            lambda start, length, priority, steps: (start, start + length, priority, steps or None),
            st.integers(0, 9),
            st.integers(1, 9),
            st.integers(1, 3),
            st.integers(0, 3),
        ),
        max_size=2,
    ),
    st.just([(0, 8, 2, 1), (0, 8, 1, None)]),  # strong for a while, weak for ever
)

CONTENTS = (b"cat 3x5", b"cat 5x3", b"cap 3x5")

PICTURES = st.tuples(
    st.sampled_from(CONTENTS),
    st.integers(0, 9),
    st.integers(1, 5),
    st.booleans(),
)
"""Images whose contents begin alike: (content, first position, rows, whether some are masked)."""

IMAGES = st.none() | PICTURES


def neighbours(prompt, name, picture):
    """Yield (prompt, name) of the same token ids that differ in one thing, which is no token."""
    content, start, length, masked = picture
    for other in (
        *[(known, start, length, masked) for known in CONTENTS],
        (content, start + 1, length, masked),
        (content, start, length + 1, masked),
        (content, start, length, not masked),
        None,
    ):
        yield with_image(prompt, other), name
    for other_name in NAMESPACES:
        yield with_image(prompt, picture), other_name


GROUPS = {
    "full": [("full", 0, 4)],
    "window": [("window", 5, 4)],
    "narrow window": [("window", 1, 4)],
    "full and window": [("full", 0, 4), ("window", 6, 4)],
    "full and wide blocks": [("full", 0, 8), ("window", 3, 4)],
    "chunked and full": [("chunk", 8, 4), ("full", 0, 4)],
    "three": [("window", 9, 8), ("chunk", 6, 4), ("full", 0, 4)],
    "six and four": [("full", 0, 6), ("window", 5, 4)],
    "six before four": [("window", 13, 6), ("full", 0, 4)],
    "chunk of six": [("chunk", 6, 6), ("full", 0, 4)],
    "uneven three": [("window", 3, 4), ("full", 0, 6), ("window", 14, 4)],
}
"""Layer groups as the naive model writes them: kind, span, block size.

Where no block size is a multiple of all others, the windows are below and above the common one.
"""


def common_divisor(groups):
    """The manager's block size: all groups' are multiples of it."""
    return math.gcd(*[size for _, _, size in groups])


def real_groups(groups):
    kinds = {
        "full": lambda span, size: kvcore.FullAttention(size),
        "window": kvcore.SlidingWindow,
        "chunk": kvcore.ChunkedLocal,
    }
    return [kinds[kind](span, size) for kind, span, size in groups]
