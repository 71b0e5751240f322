"""Blocks of the KV cache, and the tree nodes of their contents.

A block is in exactly one of two states: *free* (`ref_count == 0`, linked into the free queue) or
*held* (`ref_count >= 1`, in a block table or a lease, not in the queue). A block may also be
*published*: `node` is then its content, and `prev_copy`/`next_copy` link the blocks that hold the
same content. A free published block can be hit until it is reused; freeing is not evicting.

Nearly every content is held by one block and is lost when that block is reused. So each block is
also a node, with `block.node is block`: an eviction reads memory that lies together, and
allocates nothing. A content that another block also holds, or that a descendant keeps in the tree,
stays in its node. A block whose own node is used in this way publishes its next content in a
separate node. All links are intrusive: moving a block between states allocates nothing.
"""

from __future__ import annotations

from typing import Final, NewType, final

BlockId = NewType("BlockId", int)
"""An index into the first dimension of the KV cache."""

NULL_BLOCK: Final = BlockId(0)
"""The block that padding points to: never handed out, never published, never freed."""

PIECE_KEY_BYTES: Final = 2
"""The length of the key of a further piece of a state; no block of tokens has a key so short."""


class Node:
    """The content of one block: its tokens, after the content of the parent.

    The path from a root spells a prefix exactly, so two nodes are the same content if and only if
    they are the same object.

    Attributes:
        tokens: the block's tokens, packed, and after them the encoded items that reach into it;
            for a root, its namespace, encoded.
        parent: the content before it; None for a root, and for a block's node that is not in use.
        last_child: the child that was followed or added last, the first to be tried; None if that
            one is gone, or if there is none at all.
        children: all children by their tokens, while there are two or more; None otherwise.
        first_copy: the block published first of those that still hold it; None when all are gone.
        last_copy: the block published last of those.
        block_hash: its block hash; None until it is computed.
    """

    __slots__ = (
        "block_hash",
        "children",
        "first_copy",
        "last_child",
        "last_copy",
        "parent",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.last_child: Node | None = None
        self.children: dict[bytes, Node] | None = None
        self.first_copy: Block | None = None
        self.last_copy: Block | None = None
        self.block_hash: bytes | None = None

    def clear(self) -> None:
        """Forget the content and the links. Cannot fail. O(1)."""
        self.parent = self.last_child = self.children = None
        self.first_copy = self.last_copy = self.block_hash = None
        self.tokens = b""

    def root(self) -> Node:
        """Return the root above it: its namespace. O(depth)."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def is_piece(self) -> bool:
        """Return whether it is a further piece of a state, which lives with the first one. O(1).

        No tokens have a key so short. Pieces are in no event: the first one stands for all.
        """
        return len(self.tokens) == PIECE_KEY_BYTES and self.parent is not None

    def has_children(self) -> bool:
        """Return whether the node has children. O(1)."""
        return self.last_child is not None or self.children is not None

    def copies(self) -> list[Block]:
        """Return the blocks that hold the content, oldest first. O(copies)."""
        found: list[Block] = []
        block = self.first_copy
        while block is not None:
            found.append(block)
            block = block.next_copy
        return found

    def child_nodes(self) -> list[Node]:
        """Return the nodes right below it. O(children)."""
        if self.children is not None:
            return list(self.children.values())
        return [] if self.last_child is None else [self.last_child]

    def descendants(self) -> list[Node]:
        """Return every node below it, a parent before its children. O(nodes below)."""
        found: list[Node] = []
        pending = [self]
        while pending:
            node = pending.pop()
            if node is not self:
                found.append(node)
            if node.children is not None:
                pending += node.children.values()
            elif node.last_child is not None:
                pending.append(node.last_child)
        return found


@final
class Block(Node):
    """One block. Its fields belong to the pool that made it; read them, do not write them.

    It has the fields of a node too. They describe the content of the block only if
    `node` is the block itself.

    Attributes:
        block_id: its index in the cache.
        id_object: the same number as a Python object; compiled code would make a new object for
            each answer.
        ref_count: the number of its holders.
        num_leases: the number of leases among them.
        prev_free, next_free: neighbours in the free queue. Outside the queue `next_free` is None,
            and `prev_free` is the block that it stood before when it was taken out.
        node: the content it holds and can be hit by, or None.
        group: the layer group that it was published for.
        last_end: the number of the last known end that needs its content; 0: none; -1: it is reused
            first, because no known end needs it.
        prev_copy, next_copy: the published blocks of the same content before and after it.
    """

    __slots__ = (
        "block_id",
        "group",
        "id_object",
        "last_end",
        "next_copy",
        "next_free",
        "node",
        "num_leases",
        "prev_copy",
        "prev_free",
        "ref_count",
    )

    def __init__(self, block_id: int) -> None:
        super().__init__(None, b"")
        self.block_id = BlockId(block_id)
        self.id_object: object = block_id
        self.ref_count = 0
        self.num_leases = 0
        self.prev_free: Block | None = None
        self.next_free: Block | None = None
        self.node: Node | None = None
        self.group = 0
        self.last_end = 0
        self.prev_copy: Block | None = None
        self.next_copy: Block | None = None

    def __repr__(self) -> str:
        published = "" if self.node is None else ", published"
        return f"Block({self.block_id}, ref_count={self.ref_count}{published})"


@final
class PendingRelease:
    """A release in progress: the released blocks, and the sizes to restore if it fails.

    Of the blocks that become free, those in `content` can be hit later and those in `empty` cannot:
    they hold no content or lose it now. The blocks in `passing` are among the latter; no prefix
    cache hit could use their content.
    """

    __slots__ = ("content", "empty", "last_event", "num_empty", "passing", "released")

    def __init__(self, released: list[Block], num_empty: int, last_event: int) -> None:
        self.released = released
        self.num_empty = num_empty
        self.last_event = last_event
        self.content: list[Block] = []
        self.empty: list[Block] = []
        self.passing: list[Block] = []
