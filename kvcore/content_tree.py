"""The prefix cache of one layer group: a tree whose paths are exactly the cached prefixes.

A root is a namespace, an edge is the tokens of one block, and a node lists the blocks that hold its
content now, oldest first. A look-up compares tokens, never digests, so a hash collision cannot give
one request the KV of another.

Invariants: a node is in the tree while it, or a descendant, has a block. With full attention a node
without blocks ends a match, because KV after a gap cannot be used; a sliding window continues past
it. `children` exists while there are two or more; `last_child` is then one of them or None, and
otherwise the only child or None.

Does not know ref counts: the pool decides on eviction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, final

from kvcore.block import PIECE_KEY_BYTES, Block, Node
from kvcore.errors import InvalidArgumentError
from kvcore.events import EventLog, Snapshot
from kvcore.identity.tokens import AT_ONCE, BYTES_PER_TOKEN, cutter


class ContentWatcher(Protocol):
    """Hears of contents in time to keep copies of them elsewhere: a tier behind the pool."""

    def published(self, blocks: list[Block]) -> None:
        """Note that these blocks have just become available; must not raise or change the pool.

        An error of the caller may take it back, so look at `block.node` when it is used.
        """
        ...

    def cleared(self) -> None:
        """Note that contents, or all, are invalid: no copy may be used any more; must not raise."""
        ...


@final
class ContentTree:
    """Published content, by namespace and tokens.

    Args:
        block_size: tokens a block.
        group: the layer group whose content it is.
        log: records the stored contents; None: not recorded.
    """

    __slots__ = ("_group", "_key_bytes", "_log", "_roots", "_spare")

    def __init__(self, block_size: int, group: int = 0, log: EventLog | None = None) -> None:
        self._key_bytes = block_size * BYTES_PER_TOKEN
        self._group = group
        self._log = log
        self._roots: dict[bytes, Node] = {}
        # Nodes beside blocks that stand for nothing now, joined by their parents: they are used
        # again, so in steady state no object is made that the garbage collector has to walk.
        self._spare: Node | None = None

    def match(
        self,
        namespace_key: bytes,
        packed: bytes,
        max_blocks: int,
        items: Sequence[bytes] | None = None,
    ) -> list[Block]:
        """Return the blocks of the longest cached prefix. O(blocks matched).

        Args:
            namespace_key: the encoded namespace.
            packed: the tokens of the prefix, 4 bytes each.
            max_blocks: the longest match wanted, in blocks; `packed` is at least that long.
            items: for each block the encoded items that reach into it; None: there are none.
        """
        found: list[Block] = []
        node = self._roots.get(namespace_key)
        if node is not None and items is None and max_blocks >= 2 * AT_ONCE:
            node = self._match_many(node, packed, max_blocks, found)
        if node is None:
            return found
        size = self._key_bytes
        for start in range(len(found) * size, max_blocks * size, size):
            content = packed[start : start + size]
            if items is not None:
                content = content + items[start // size]
            child = node.last_child
            if child is None or child.tokens != content:
                child = None if node.children is None else node.children.get(content)
                if child is None:
                    break
                node.last_child = child
            block = child.first_copy
            if block is None:
                break
            found.append(block)
            node = child
        return found

    def _match_many(
        self, node: Node, packed: bytes, max_blocks: int, found: list[Block]
    ) -> Node | None:
        """Do what `match` does without items, for a multiple of `AT_ONCE` blocks.

        The same walk, whose contents are cut together: a twelfth less for a hit block in Python, a
        fifth compiled. Returns the last node; None: the match ends before.
        """
        size = self._key_bytes
        cut = cutter(size)
        for start in range(0, (max_blocks - AT_ONCE + 1) * size, AT_ONCE * size):
            for content in cut.unpack_from(packed, start):
                child = node.last_child
                if child is None or child.tokens != content:
                    child = None if node.children is None else node.children.get(content)
                    if child is None:
                        return None
                    node.last_child = child
                block = child.first_copy
                if block is None:
                    return None
                found.append(block)
                node = child
        return node

    def path(
        self,
        namespace_key: bytes,
        packed: bytes,
        max_blocks: int,
        items: Sequence[bytes] | None = None,
    ) -> list[Block | None]:
        """Return the block of every node along the prefix, None where it has none. O(nodes).

        For groups that do not need every block of a prefix. Arguments as for `match`, which is the
        same up to the first gap; its walk is written out here, since a look-up is little else.
        """
        found: list[Block | None] = []
        node = self._roots.get(namespace_key)
        if node is None:
            return found
        size = self._key_bytes
        for start in range(0, max_blocks * size, size):
            content = packed[start : start + size]
            if items is not None:
                content = content + items[start // size]
            child = node.last_child
            if child is None or child.tokens != content:
                child = None if node.children is None else node.children.get(content)
                if child is None:
                    break
                node.last_child = child
            found.append(child.first_copy)
            node = child
        return found

    def attach(
        self,
        blocks: list[Block],
        namespace_key: bytes,
        parent: Node | None,
        contents: list[bytes],
    ) -> None:
        """Add blocks as copies of consecutive contents, all or none. O(len(blocks)).

        Args:
            blocks: blocks that hold no content yet.
            namespace_key: the encoded namespace.
            parent: the content before the first, in that namespace; None: the root.
            contents: for each block its tokens, then its encoded items. If there are more contents
                than blocks, the first contents lie outside the window and have no block.
        """
        if parent is None:
            parent = self._roots.get(namespace_key)
            if parent is None:
                parent = self._roots[namespace_key] = Node(None, namespace_key)
        start = node = parent
        group = self._group
        passed = len(contents) - len(blocks)
        try:
            if passed:
                parent = node = self._pass(parent, contents[:passed])
                contents = contents[passed:]
            for index, block in enumerate(blocks):
                content = contents[index]
                siblings = parent.children
                if block.parent is not None or (
                    parent.last_child is not None if siblings is None else content in siblings
                ):
                    node = self._child(parent, content) or self._grow(block, parent, content)
                    self._join(block, node)
                    parent = node
                    continue
                if siblings is not None:
                    siblings[content] = block
                parent.last_child = block
                block.parent = parent
                block.tokens = content
                block.node = block.first_copy = block.last_copy = block
                block.group = group
                parent = block
            if self._log is not None:
                self._note_stored(self._log, blocks, namespace_key)
        except BaseException:
            self._prune(node)  # if it was made for a block that has not joined it
            for block in reversed(blocks):
                self.detach(block)
            self._prune(start)
            raise

    def _pass(self, parent: Node, contents: list[bytes]) -> Node:
        """Return the node at the end of contents; missing nodes are added without blocks."""
        node = parent
        try:
            for content in contents:
                node = self._child(node, content) or self._grow(None, node, content)
        except BaseException:
            self._prune(node)
            raise
        return node

    def _note_stored(self, log: EventLog, blocks: list[Block], namespace_key: bytes) -> None:
        """Record the contents that got their first block, in runs of consecutive ones."""
        new: list[Node] = []
        for block in blocks:
            node = block.node
            if node is not None and node.first_copy is block:
                if not node.is_piece():
                    new.append(node)
            elif new:
                log.stored(new, namespace_key, self._group)
                new = []
        if new:
            log.stored(new, namespace_key, self._group)

    def detach(self, block: Block) -> None:
        """Remove a block from its content; the last copy removes the content.

        Cannot fail. Records no event: the pool has recorded it before. O(1), and O(depth) if a
        chain of nodes without blocks is removed too.
        """
        node = block.node
        if node is None:
            return
        before, after = block.prev_copy, block.next_copy
        if before is None:
            node.first_copy = after
        else:
            before.next_copy = after
        if after is None:
            node.last_copy = before
        else:
            after.prev_copy = before
        block.node = block.prev_copy = block.next_copy = None
        self._prune(node)

    def clear(self, nodes: list[Node]) -> None:
        """Remove all contents at once: `nodes` is the result of `nodes()`.

        Cannot fail. O(nodes + blocks that hold content).
        """
        for node in nodes:
            block = node.first_copy
            while block is not None:
                after = block.next_copy
                block.node = block.prev_copy = block.next_copy = None
                block.last_end = 0
                block = after
            self._set_aside(node)
        self._roots.clear()

    def find(self, namespace_key: bytes, contents: Sequence[bytes]) -> Node | None:
        """Return the node at the end of these contents, None if there is none. O(contents)."""
        node = self._roots.get(namespace_key)
        for content in contents:
            if node is None:
                break
            node = self._child(node, content)
        return node

    def roots(self) -> Iterator[Node]:
        """Yield the roots, in the order in which they were made."""
        yield from self._roots.values()

    def nodes(self) -> Iterator[Node]:
        """Yield every node that is not a root, a parent before its children. O(nodes)."""
        for root in self._roots.values():
            yield from root.descendants()

    @staticmethod
    def _child(node: Node, tokens: bytes) -> Node | None:
        child = node.last_child
        if child is not None and child.tokens == tokens:
            return child
        return None if node.children is None else node.children.get(tokens)

    def _grow(self, block: Block | None, parent: Node, tokens: bytes) -> Node:
        """Add a node below `parent`: the own node of the block, or another if that is in use.

        A node without a block stays only while it has descendants.
        """
        is_beside = block is None or block.parent is not None
        node: Node | None = self._spare if is_beside else block
        if node is None:
            node = Node(None, b"")
        only = parent.last_child
        if parent.children is not None:
            parent.children[tokens] = node
        elif only is not None:
            parent.children = {only.tokens: only, tokens: node}
        parent.last_child = node
        if is_beside:
            self._spare = node.parent
        node.parent = parent
        node.tokens = tokens
        return node

    def _join(self, block: Block, node: Node) -> None:
        """Make a block the last copy of a content."""
        block.node = node
        block.group = self._group
        before = node.last_copy
        node.last_copy = block
        if before is None:
            node.first_copy = block
        else:
            block.prev_copy = before
            before.next_copy = block

    def _prune(self, node: Node) -> None:
        """Remove `node` and its ancestors, as long as they have no blocks and no children."""
        while node.first_copy is None and node.last_child is None and node.children is None:
            parent = node.parent
            if parent is None:
                self._roots.pop(node.tokens, None)
                return
            siblings = parent.children
            if siblings is None:
                parent.last_child = None
            else:
                del siblings[node.tokens]
                if len(siblings) == 1:
                    # The walk past entries that left is paid for by their deletions.
                    parent.last_child = next(iter(siblings.values()))
                    parent.children = None
                elif parent.last_child is node:
                    parent.last_child = None  # any heir would cost a walk, an eviction each
            # What `_set_aside` does; the rest of it is clear already.
            node.parent = node.block_hash = None
            node.tokens = b""
            if not isinstance(node, Block):
                node.parent = self._spare
                self._spare = node
            node = parent

    def _set_aside(self, node: Node) -> None:
        """Clear a node without descendants; a node that is not a block is kept for reuse."""
        node.clear()
        if not isinstance(node, Block):
            node.parent = self._spare
            self._spare = node


def find_pieces(first: Block, count: int) -> list[Block]:
    """Return the `count` pieces of a published state, from its first one on. O(count).

    Older copies of the others may be left from a state whose first piece was evicted.
    """
    found = [first]
    node = first.node
    for number in range(1, count):
        if node is None:
            break
        key = number.to_bytes(PIECE_KEY_BYTES, "big")
        child = node.last_child
        if child is None or child.tokens != key:
            child = None if node.children is None else node.children.get(key)
        if child is not None and child.last_copy is not None:
            found.append(child.last_copy)
        node = child
    return found


def snapshot(log: EventLog | None, trees: Sequence[ContentTree]) -> Snapshot:
    """Return all contents that can be hit now. O(contents).

    Raises:
        InvalidArgumentError: no events are recorded.
    """
    if log is None:
        raise InvalidArgumentError(
            "record_events: wanted 'xxh3-128' or 'sha256' for a snapshot, got None"
        )
    return log.snapshot(
        [(group, root) for group, tree in enumerate(trees) for root in tree.roots()]
    )


def lost_contents(blocks: Sequence[Block]) -> list[tuple[Node, int]]:
    """Return the contents that only these blocks hold, with their layer groups. O(copies).

    They are lost with these blocks.
    """
    copies: dict[Node, int] = {}
    lost: list[tuple[Node, int]] = []
    for block in blocks:
        node = block.node
        if node is None or node.is_piece():
            continue
        if node.first_copy is not block or node.last_copy is not block:
            copies[node] = copies.get(node, len(node.copies())) - 1
            if copies[node]:
                continue
        lost.append((node, block.group))
    return lost


def evict(trees: Sequence[ContentTree], blocks: Sequence[Block]) -> None:
    """Detach free blocks from their contents; afterwards each has one holder.

    A block that is reused is nearly always the only copy of its content and uses its own node.
    Either the node is the last of its branch, and its parent keeps other children or a copy; or, in
    a window group, a descendant keeps it in the tree. So the links are cut here without calling
    `detach`, in the same loop that sets the other fields (two loops cost a fifth more, compiled).
    Cannot fail. O(len(blocks)), plus the cost of `detach` in other cases.
    """
    for block in blocks:
        block.ref_count = 1
        block.prev_free = block.next_free = None
        above = block.parent
        if above is None or block.first_copy is not block or block.last_copy is not block:
            trees[block.group].detach(block)
            continue
        if block.last_child is not None or block.children is not None:
            block.node = block.first_copy = block.last_copy = None
            continue
        siblings = above.children
        if siblings is None and above.first_copy is not None:
            above.last_child = None
        elif siblings is not None and len(siblings) > 2:
            del siblings[block.tokens]
            if above.last_child is block:
                above.last_child = None
        else:
            trees[block.group].detach(block)
            continue
        block.node = block.parent = block.first_copy = block.last_copy = block.block_hash = None
        block.tokens = b""
