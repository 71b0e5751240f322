"""Blocks and contents as they are made, and what can be asked of them."""

import pytest

import kvcore


def test_a_new_block_is_free_and_holds_nothing():
    block = kvcore.Block(7)
    assert (block.block_id, block.ref_count, block.group) == (7, 0, 0)
    links = (block.prev_free, block.next_free, block.prev_copy, block.next_copy, block.node)
    assert links == (None,) * 5


def test_a_block_says_how_often_it_is_held_and_whether_it_can_be_hit():
    block = kvcore.Block(7)
    block.ref_count = 2
    assert repr(block) == "Block(7, ref_count=2)"
    block.node = kvcore.Node(None, b"")
    assert repr(block) == "Block(7, ref_count=2, published)"


def test_a_new_content_has_nothing_below_it_and_no_block():
    root = kvcore.Node(None, b"root")
    node = kvcore.Node(root, b"abcd")
    assert (node.parent, node.tokens) == (root, b"abcd")
    empty = (node.last_child, node.children, node.first_copy, node.last_copy, node.block_hash)
    assert empty == (None,) * 5
    assert not node.has_children()
    assert node.copies() == node.descendants() == []


@pytest.mark.parametrize("known", ["last", "all", "both"])
def test_children_are_seen_whichever_way_they_are_listed(known):
    node = kvcore.Node(None, b"")
    child, other = kvcore.Node(node, b"a"), kvcore.Node(node, b"b")
    if known != "all":
        node.last_child = child
    if known != "last":
        node.children = {b"a": child, b"b": other}
    assert node.has_children()
    assert set(node.descendants()) == ({child} if known == "last" else {child, other})


def test_copies_are_listed_oldest_first():
    tree = kvcore.ContentTree(1)
    blocks = [kvcore.Block(number) for number in range(1, 4)]
    for block in blocks:
        tree.attach([block], b"", None, [b"abcd"])
    node = blocks[0].node
    assert node.copies() == blocks
    assert {block.group for block in blocks} == {0}  # where no other group is named
    tree.detach(blocks[1])
    assert node.copies() == [blocks[0], blocks[2]]


def test_descendants_come_after_what_stands_before_them():
    tree = kvcore.ContentTree(1)
    paths = [(b"aaaa", b"bbbb", b"cccc"), (b"aaaa", b"dddd"), (b"eeee",)]
    for number, path in enumerate(paths):
        blocks = [kvcore.Block(10 * number + place) for place in range(len(path))]
        tree.attach(blocks, b"", None, list(path))
    (root,) = tree.roots()
    below = root.descendants()
    assert sorted(node.tokens for node in below) == [b"aaaa", b"bbbb", b"cccc", b"dddd", b"eeee"]
    for place, node in enumerate(below):
        assert node.parent is root or node.parent in below[:place]
    assert root not in below
