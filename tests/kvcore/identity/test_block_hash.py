"""The page on block hashes is exact: its vectors, computed from its rules and by kvcore."""

import hashlib
import re
import struct
from pathlib import Path

import pytest
import xxhash

import kvcore

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "reference" / "block-hashes.md").read_text(encoding="utf-8")
VECTORS = re.findall(
    r"### (.+?)\n\n- namespace: `(.+?)`\n- tokens: `(.+?)`\n- items: (.+?)\n\n```\n(.+?)```",
    PAGE,
    re.DOTALL,
)
DIGESTS = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh3-128": lambda data: xxhash.xxh3_128(data).digest(),
}


def by_the_page(namespace, tokens, items, digest):
    """Two names of blocks of two tokens, with nothing of kvcore but the arguments."""
    key = b"KVN1"
    if namespace.salt:
        key += struct.pack("<BI", 1, len(namespace.salt)) + namespace.salt
    if namespace.lora_name is not None:
        name = namespace.lora_name.encode()
        key += struct.pack("<BI", 2, len(name)) + name
    for tag, number in ((3, namespace.lora_version), (4, namespace.weight_epoch)):
        if number:
            key += struct.pack("<BIQ", tag, 8, number)
    names, previous = [], digest(key)
    for start in (0, 2):
        content = struct.pack("<II", *tokens[start : start + 2])
        for item in items:
            rows = [r for r in range(item.length) if start <= item.start + r < start + 2]
            if rows:
                content += struct.pack("<I", item.start + rows[0] - start)
                content += struct.pack("<Q", rows[0]) + struct.pack("<I", len(rows))
                content += bytes([item.mask is not None]) + struct.pack("<I", len(item.content))
                content += item.content
                content += b"" if item.mask is None else bytes(item.mask[row] for row in rows)
        head = b"KVB1" + bytes([len(previous)]) + previous + struct.pack("<I", 2)
        previous = digest(head + content)
        names.append(previous)
    return key, names


@pytest.mark.parametrize("vector", VECTORS, ids=[title for title, *_ in VECTORS])
def test_a_vector_of_the_page_is_what_the_rules_and_kvcore_give(vector):
    _, namespace_text, token_text, item_text, block = vector
    scope = {"Namespace": kvcore.Namespace, "MultimodalItem": kvcore.MultimodalItem}
    namespace = eval(namespace_text, scope)  # noqa: S307  # our own page
    tokens = [int(token) for token in token_text.split()]
    items = () if item_text == "none" else (eval(item_text.strip("`"), scope),)  # noqa: S307
    lines = [line.split() for line in block.splitlines()]
    for algorithm, digest in DIGESTS.items():
        key, names = by_the_page(namespace, tokens, items, digest)
        assert ["namespace", key.hex()] in lines
        listed = [line[2] for line in lines if line[0] == algorithm]
        assert listed == [name.hex() for name in names]
        chain = kvcore.HashChain(kvcore.encode_namespace(namespace), 2, algorithm)
        assert list(chain.hashes(kvcore.pack(tokens), 2, items)) == names


def test_the_page_has_vectors_for_every_field():
    assert len(VECTORS) == 6
    text = " ".join(namespace for _, namespace, *_ in VECTORS)
    for field in ("salt", "lora_name", "lora_version", "weight_epoch"):
        assert field in text
