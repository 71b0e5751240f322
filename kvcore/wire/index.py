"""An index of several caches: which publisher has the longest prefix of a prompt.

A path of the tree spells a prefix, tokens and namespace, exactly, as in a cache's own index; a node
has one bit for each publisher that holds it. So a question is answered by comparing tokens, in one
walk for all publishers. A block hash only tells which node an event refers to: a wrong event can
cost speed, but never produces a match that the tokens do not have.

A copy in a tier (medium "CPU" or "STORAGE") counts as held like a block of the cache: what has
left the cache stays in the tree while a tier has it. Its tokens were published with the block; a
copy that was published before them waits. Tiers of one medium differ by their `ownership`,
and each has its copies. A REMOTE copy is as far from its publisher as from the others, so it does
not count. The session of an event stored the block first; requests of others hit it too.

The hash of a block may cover tokens after it (`lookahead_token_ids`): a draft model computes the KV
of a block's last tokens from them. Such a block can be hit only where these tokens follow, so they
are a part of its content, and its publisher has separate trees: by block size and lookahead.

Indexed are the layer groups that see everything (a kind that the publisher does not say counts as
that), those with a sliding window and those with recurrent states. What everything
follows is held with it; a window holds what it holds, and a prefix can be served if all is there
that can be seen from its end; a state is found as a window of one token. What a chunk still holds
is not indexed, so for a model with chunks the answer is the longest prefix that its cache may
serve. A publisher with several groups serves what all of them can; a group is known once something
was stored in it, and until everything is cleared: the publisher may then have started again, with
other groups.

The parent of a block is known by its hash alone. A block whose parent was never published (only in
snapshots of windows, which have released their first blocks) is ignored, unless a group of full
attention with the same block size has the parent.

Memory is about 300 bytes for each block of 16 tokens, once for all publishers that hold it
(`python -m tests.bench wire` measures it). Calls may come from any thread.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final, NamedTuple

import msgspec

from kvcore import (
    DEFAULT_NAMESPACE,
    MultimodalItem,
    Namespace,
    Tokens,
    encode_namespace,
    pack,
)
from kvcore.identity.block_hash import block_contents
from kvcore.identity.multimodal import as_items, check_items
from kvcore.identity.tokens import BYTES_PER_TOKEN
from kvcore.wire.encoder import MARK_ITEMS, MARK_NAMESPACE
from kvcore.wire.messages import Batch, Cleared, Removed, Stored, WireEvent, WireHash

FULL_KINDS: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""The kinds of layer groups that see everything."""

WINDOW_KINDS: Final = frozenset({"sliding_window", "sliding_window_mla"})
"""The kinds of layer groups that see a number of tokens, which is said with them."""

STATE_KIND: Final = "mamba"
"""The kind of layer groups that keep recurrent states: like a window of one token."""

INDEXED_KINDS: Final = FULL_KINDS | WINDOW_KINDS | {STATE_KIND}
"""The kinds of layer groups whose blocks are indexed."""

_MEDIA: Final = {None: "GPU", "GPU": "GPU", "CPU": "CPU", "STORAGE": "STORAGE", "DISK": "STORAGE"}
_NEAR: Final = frozenset({None, "LOCAL"})
_CACHE: Final = 1
_EXTRA_KEYS: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Counters of an index.

    Attributes:
        num_publishers: known publishers.
        num_contents: different contents, each counted once.
        num_held: contents, counted for each publisher and group that holds them.
        num_orphans: blocks ignored because their parent was never published.
        num_passed_over: events ignored: unknown media, copies that are not local, groups that are
            not indexed.
    """

    num_publishers: int
    num_contents: int
    num_held: int
    num_orphans: int
    num_passed_over: int


class _Node:
    """One block's content below what it follows.

    Attributes:
        parent: the node that it follows; None: it is a root, or out of the tree.
        content: its tokens and what else it depends on.
        name: its block hash in the events of the first publisher.
        holders: one bit for each publisher's group that has it; one that sees everything has also
            all that it follows. None: others follow it.
        only: its child, while there is one.
        children: its children by content, while there are more.
    """

    __slots__ = ("children", "content", "holders", "name", "only", "parent")

    def __init__(self, parent: _Node | None, content: bytes) -> None:
        self.parent = parent
        self.content = content
        self.name: WireHash | None = None
        self.holders = 0
        self.only: _Node | None = None
        self.children: dict[bytes, _Node] | None = None

    def child(self, content: bytes) -> _Node | None:
        """Return the child with a content. O(1)."""
        only = self.only
        if only is not None and only.content == content:
            return only
        children = self.children
        return None if children is None else children.get(content)

    def add(self, child: _Node) -> None:
        """Add a child whose content no other has. O(1)."""
        if self.children is not None:
            self.children[child.content] = child
        elif self.only is None:
            self.only = child
        else:
            self.children = {self.only.content: self.only, child.content: child}
            self.only = None

    def drop(self, child: _Node) -> None:
        """Forget a child. O(1)."""
        if self.children is None:
            self.only = None
            return
        del self.children[child.content]
        if len(self.children) == 1:
            (self.only,) = self.children.values()
            self.children = None

    def below(self) -> Iterable[_Node]:
        """Return its children. O(1)."""
        if self.children is not None:
            return self.children.values()
        return () if self.only is None else (self.only,)


class _Shape(NamedTuple):
    """The tokens of the blocks of one tree.

    Attributes:
        block_size: tokens a block.
        lookahead: the tokens after it that its hash covers.
    """

    block_size: int
    lookahead: int


class _Group(NamedTuple):
    """A layer group that is indexed.

    Attributes:
        bit: its bit.
        window: the number of tokens that it sees; 0: all.
        block_size: tokens a block.
    """

    bit: int
    window: int
    block_size: int


class _Publisher:
    """The knowledge about one publisher.

    Attributes:
        bits: its bit for each layer group that is indexed.
        mask: all of them.
        groups: the group of each bit, in no order.
        step: a length that the blocks of all groups divide.
        apart: the contents of groups with a window.
        aliases: nodes by hashes that other publishers use differently, or by a second hash.
        tiers: a bit for each tier, by medium and ownership; `_CACHE` is that of the cache.
        copies: the places of contents in tiers, by group and hash: bits of `_CACHE` and `tiers`.
    """

    __slots__ = ("aliases", "apart", "bits", "copies", "groups", "mask", "step", "tiers")

    def __init__(self) -> None:
        self.aliases: dict[WireHash, _Node] = {}
        self.apart: set[_Node] = set()
        self.begin()

    def begin(self) -> None:
        """Have no groups and no copies. O(1)."""
        self.tiers: dict[tuple[str, str | None], int] = {}
        self.copies: dict[tuple[int | None, WireHash], int] = {}
        self.bits: dict[int | None, int] = {}
        self.mask = 0
        self.groups: tuple[_Group, ...] = ()
        self.step = 1


class Index:
    """The prefixes that each publisher holds.

    A change holds a lock, a look-up does not: while a batch is applied, an answer may have a part
    of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._publishers: dict[str, _Publisher] = {}
        self._owners: dict[int, str] = {}  # by bit
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._windows = 0  # the bits of groups that have one
        self._roots: dict[tuple[_Shape, bytes], _Node] = {}
        self._shapes: tuple[_Shape, ...] = ()
        self._names: dict[WireHash, _Node] = {}
        self._num_contents = self._num_held = self._num_orphans = self._num_passed_over = 0

    def apply(self, publisher: str, batch: Batch) -> None:
        """Take what a publisher says has changed. O(its tokens)."""
        with self._lock:
            known = self._publishers.get(publisher)
            if known is None:
                known = self._publishers[publisher] = _Publisher()
            for event in _in_order(batch):
                self._apply(publisher, known, event)

    def forget(self, publisher: str) -> None:
        """Forget a publisher and all that it holds. O(what it holds)."""
        with self._lock:
            known = self._publishers.pop(publisher, None)
            if known is not None:
                self._clear(known)

    def match(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        items: Sequence[MultimodalItem] = (),
    ) -> dict[str, int]:
        """Return how many of these tokens each publisher holds as a prefix, where it holds any.

        In whole blocks. O(tokens + publishers).

        Raises:
            InvalidArgumentError: no token ids, or items that do not lie within them.
        """
        packed = pack(tokens)
        checked = check_items(as_items(items), 0, len(packed))
        key = encode_namespace(namespace)
        met = _Met()
        for shape in self._shapes:
            root = self._roots.get((shape, key))
            if root is not None:
                self._walk(root, packed, checked, shape, met)
        found: dict[str, int] = {}
        for bit in [*met.lengths, *met.runs]:
            name = self._owners.get(bit, "")
            known = self._publishers.get(name)
            if known is None:
                continue  # it is being forgotten
            bits = known.bits
            if bit not in met.runs and len(bits) == 1:
                found[name] = met.lengths[bit]
            elif name not in found and (shared := met.servable(known)):
                found[name] = shared
        return found

    def held_hashes(self, publisher: str) -> frozenset[WireHash]:
        """Return the block hashes that a publisher holds. O(its blocks)."""
        with self._lock:
            known = self._publishers.get(publisher)
            if known is None:
                return frozenset()
            second = {node: name for name, node in known.aliases.items()}
            held = {*self._held(self._roots.values(), known.mask), *known.apart}
            return frozenset([second.get(node, node.name or 0) for node in held])

    def publishers(self) -> tuple[str, ...]:
        """Return the publishers that it knows. O(publishers)."""
        with self._lock:
            return tuple(self._publishers)

    def stats(self) -> IndexStats:
        """Return the counters. O(1)."""
        with self._lock:
            return IndexStats(
                num_publishers=len(self._publishers),
                num_contents=self._num_contents,
                num_held=self._num_held,
                num_orphans=self._num_orphans,
                num_passed_over=self._num_passed_over,
            )

    def _apply(self, publisher: str, known: _Publisher, event: WireEvent) -> None:
        if isinstance(event, Cleared):
            self._clear(known)
        elif event.medium not in _MEDIA or event.locality not in _NEAR:
            self._num_passed_over += 1
        elif (medium := _MEDIA[event.medium]) != "GPU":
            tier = medium, event.ownership
            bit = known.tiers.setdefault(tier, _CACHE << (1 + len(known.tiers)))
            self._apply_copies(known, event, bit)
        elif isinstance(event, Stored):
            kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window or 0
            if kind in FULL_KINDS:
                self._store(publisher, known, event, 0)
            elif kind in WINDOW_KINDS and window > 0:
                self._store(publisher, known, event, window)
            elif kind == STATE_KIND:
                self._store(publisher, known, event, 1)
            else:
                self._num_passed_over += 1
        elif event.group_idx in known.bits:
            self._remove(known, known.bits[event.group_idx], event)
        else:
            self._num_passed_over += 1

    def _store(self, publisher: str, known: _Publisher, event: Stored, window: int) -> None:
        bit = known.bits.get(event.group_idx) or self._new_bit(publisher, known, event, window)
        is_apart = bool(bit & self._windows)
        namespace, contents = _read(event)
        if event.parent_block_hash is None:
            node = self._root(_Shape(event.block_size, event.num_lookahead_tokens), namespace)
        else:
            above = self._named(known, event.parent_block_hash)
            if above is None or not (is_apart or above.holders & bit):
                self._num_orphans += len(contents)
                return
            node = above
        for name, content in zip(event.block_hashes, contents, strict=True):
            child = node.child(content)
            if child is None:
                child = _Node(node, content)
                node.add(child)
            if self._named(known, name) is not child:
                if child.name is None and name not in self._names:
                    child.name = name
                    self._names[name] = child
                    known.aliases.pop(name, None)
                else:
                    known.aliases[name] = child
            if not child.holders & bit:
                self._hold(known, child, bit)
            node = child
        if known.copies:
            for place in {(event.group_idx, name) for name in event.block_hashes} & {*known.copies}:
                known.copies[place] |= _CACHE

    def _hold(self, known: _Publisher, node: _Node, bit: int) -> None:
        self._num_contents += not node.holders
        node.holders |= bit
        self._num_held += 1
        if bit & self._windows:
            known.apart.add(node)

    def _apply_copies(self, known: _Publisher, event: Stored | Removed, tier: int) -> None:
        """Note what a tier has, or has no longer; what the cache has as well stays either way."""
        bit, gone = known.bits.get(event.group_idx, 0), []
        for name in event.block_hashes:
            place, node = (event.group_idx, name), self._named(known, name)
            is_held = node is not None and bool(node.holders & bit)
            where = known.copies.get(place, _CACHE if is_held else 0)
            if isinstance(event, Stored):
                known.copies[place] = where | tier
                above = None if node is None else node.parent
                if node is None or above is None or is_held or not bit:
                    continue
                if above.parent is None or above.holders & bit or bit & self._windows:
                    self._hold(known, node, bit)
            elif where & ~tier & ~_CACHE:
                known.copies[place] = where & ~tier
            elif known.copies.pop(place, 0) and not where & _CACHE:
                gone.append(name)
        if gone:
            self._remove(known, bit, Removed(gone, event.medium, event.group_idx))

    def _named(self, known: _Publisher, name: WireHash) -> _Node | None:
        """Return the node of a publisher's block hash; None if it is not in the tree."""
        node = known.aliases.get(name)
        if node is None:
            return self._names.get(name)
        return None if node.parent is None else node

    def _remove(self, known: _Publisher, bit: int, event: Removed) -> None:
        """Take contents from a publisher's group; what follows them too: nothing can hit that.

        A window looks past what is gone.
        """
        for name in event.block_hashes:
            if known.copies and (event.group_idx, name) in known.copies:
                known.copies[event.group_idx, name] &= ~_CACHE
                continue  # a tier has it
            node = self._named(known, name)
            if node is None:
                known.aliases.pop(name, None)
                continue
            if node.holders & bit:
                if not bit & self._windows:
                    for held in reversed(self._held([node], bit)):
                        self._take(held, bit)
                self._take(node, bit)
                if not node.holders & self._windows & known.mask:
                    known.apart.discard(node)
            if not node.holders & known.mask:
                known.aliases.pop(name, None)

    def _clear(self, known: _Publisher) -> None:
        """Take all from a publisher, and its groups. O(what it holds)."""
        bits, mask, apart = known.bits, known.mask, known.apart
        for bit in bits.values():
            del self._owners[bit]
        known.begin()
        known.aliases.clear()
        known.apart = set()
        for node in [*reversed(self._held(self._roots.values(), mask)), *apart]:
            self._take(node, mask)
        self._windows &= ~mask
        self._free_bits += bits.values()

    def _take(self, node: _Node, mask: int) -> None:
        """Remove holders from a node, and the node from the tree if it is not needed."""
        held = node.holders & mask
        if not held:
            return
        node.holders ^= held
        self._num_held -= held.bit_count()
        self._num_contents -= not node.holders
        below, above = node, node.parent
        while above is not None and not below.holders and not below.below():
            above.drop(below)
            below.parent = None
            if below.name is not None and self._names.get(below.name) is below:
                del self._names[below.name]
            below, above = above, above.parent
        if above is None and not below.below():
            self._roots = {key: root for key, root in self._roots.items() if root is not below}
            self._count_shapes()

    @staticmethod
    def _held(tops: Iterable[_Node], mask: int) -> list[_Node]:
        """Return what is held by these bits below some nodes, a parent before its children."""
        found: list[_Node] = []
        for top in tops:
            found += [node for node in top.below() if node.holders & mask]
        for node in found:  # it grows
            found += [child for child in node.below() if child.holders & mask]
        return found

    def _root(self, shape: _Shape, namespace: bytes) -> _Node:
        root = self._roots.get((shape, namespace))
        if root is None:
            root = self._roots[shape, namespace] = _Node(None, namespace)
            self._count_shapes()
        return root

    def _count_shapes(self) -> None:
        self._shapes = tuple(dict.fromkeys([shape for shape, _ in self._roots]))

    def _new_bit(self, publisher: str, known: _Publisher, event: Stored, window: int) -> int:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._num_bits
            self._num_bits += 1
        if window:
            self._windows |= bit
        known.groups = (*known.groups, _Group(bit, window, event.block_size))
        known.step = lcm(known.step, event.block_size)
        known.bits[event.group_idx] = bit
        known.mask |= bit
        self._owners[bit] = publisher
        return bit

    def _walk(
        self,
        root: _Node,
        packed: array[int],
        items: tuple[MultimodalItem, ...],
        shape: _Shape,
        met: _Met,
    ) -> None:
        """Note what each bit holds from a root on."""
        size, ahead = shape
        if ahead and items:  # of an image only other engines tell in such a tree, in their words
            packed, items = packed[: items[0].start], ()
        data = packed.tobytes()
        width, span = size * BYTES_PER_TOKEN, (size + ahead) * BYTES_PER_TOKEN
        extended = block_contents(packed, items, 0, len(packed) // size, size) if items else None
        windows = self._windows
        node, alive, depth = root, ~windows, 0
        for start in range(0, len(data) - span + 1, width):
            content = data[start : start + span] if extended is None else extended[depth]
            child = node.only
            if child is None or child.content != content:
                child = node.child(content)
                if child is None:
                    break
            holders = child.holders
            if windows:
                met.see(holders & windows, depth)
            held = holders & alive
            if held != alive:
                if depth:
                    met.note(alive & ~held, depth * size)
                alive = held
                if not held and not windows:
                    return
            node = child
            depth += 1
        if depth:
            met.note(alive, depth * size)
        met.see(0, depth)


class _Met:
    """The publishers that a look-up has met on its way.

    Attributes:
        lengths: by bit, how many tokens a group holds from the beginning on.
        runs: by bit of a window, where what it holds begins and ends, in blocks.
    """

    __slots__ = ("_begun", "_seen", "lengths", "runs")

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.runs: dict[int, list[tuple[int, int]]] = {}
        self._begun: dict[int, int] = {}
        self._seen = 0

    def note(self, mask: int, length: int) -> None:
        """Set the number of tokens that groups hold. O(groups)."""
        while mask:
            bit = mask & -mask
            self.lengths[bit] = length
            mask ^= bit

    def see(self, mask: int, depth: int) -> None:
        """Note that windows hold this place's block. O(those that lacked the one before it)."""
        changed, self._seen = mask ^ self._seen, mask
        while changed:
            bit = changed & -changed
            if mask & bit:
                self._begun[bit] = depth
            else:
                self.runs.setdefault(bit, []).append((self._begun[bit], depth))
            changed ^= bit

    def servable(self, known: _Publisher) -> int:
        """Return the longest prefix of which each group has what can be seen from its end.

        O((groups + runs) * log runs), of a few groups.
        """
        groups, step = known.groups, known.step
        wanted = -1
        for group in groups:
            limit = self.lengths.get(group.bit, 0)
            if group.window:
                runs = self.runs.get(group.bit)
                limit = runs[-1][1] * group.block_size if runs else 0
            if limit < wanted or wanted < 0:
                wanted = limit
        length = 0
        while wanted > 0 and wanted != length:
            length = wanted = wanted - wanted % step
            for group in groups:
                if group.window:
                    wanted = min(wanted, _served(self.runs.get(group.bit, ()), group, length))
        return max(0, wanted)


def _served(runs: Sequence[tuple[int, int]], group: _Group, length: int) -> int:
    """Return a length, in tokens, if a window has what is seen from there; else where it may.

    What is seen is as `kvcore.SlidingWindow` says, and at least the last block. O(log runs).
    """
    size = group.block_size
    num_blocks = length // size
    first = min(max(0, length - group.window + 1) // size, num_blocks - 1)
    place = bisect_left(runs, num_blocks, key=lambda run: run[1])
    if place < len(runs) and runs[place][0] <= first:
        return length
    return runs[place - 1][1] * size if place else 0


def _in_order(batch: Batch) -> Sequence[WireEvent]:
    """Return a batch's events; in a snapshot those of windows last."""
    events = batch.events
    stored = [event for event in events if isinstance(event, Stored)]
    if not batch.begins_anew or len(stored) != len(events) - 1:
        return events
    stored.sort(key=lambda event: event.kv_cache_spec_kind not in FULL_KINDS)
    return (events[0], *stored)


def _read(event: Stored) -> tuple[bytes, list[bytes]]:
    """Return the encoded namespace of a run, and what each block holds."""
    tokens = array("I", event.token_ids).tobytes()
    width = event.block_size * BYTES_PER_TOKEN
    contents = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    for index, after in enumerate(event.lookahead_token_ids or ()):
        contents[index] += array("I", after).tobytes()
    namespace = encode_namespace(Namespace(lora_name=event.lora_name or None))
    for index, keys in enumerate(event.extra_keys or ()):
        if keys is None:
            continue
        marked = [key for key in keys if isinstance(key, bytes)]
        spaces = [key for key in marked if key.startswith(MARK_NAMESPACE)]
        items = [key for key in marked if key.startswith(MARK_ITEMS)]
        if items:
            contents[index] += items[0][len(MARK_ITEMS) :]
        elif not spaces and any(key != event.lora_name for key in keys):
            # Another engine's: what it means is not known, only that it is part of the content.
            contents[index] += b"?" + _EXTRA_KEYS.encode(keys)
        if spaces:
            namespace = spaces[0]
    return namespace, contents
