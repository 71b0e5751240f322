"""Faults: the k-th thing that could fail fails, for every k.

A `Faults` object stands between kvcore and all that may raise: every call of one of its functions,
every call that it makes into xxhash, hashlib, struct and array, every growth of a container that
outlives a call, and every look at what the caller passed in. Armed with k, the k-th of these raises
an `InjectedError`, once. Counting k up until a verb succeeds tries all of them.
"""

import functools
import operator
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace

# What a change is made of: they set links, counters and entries of what is there, and call nothing
# else. They let nothing grow, so nothing can fail in them; and that is checked, too.
LINKS = {
    *(f"FreeQueue.{name}" for name in ("push_back", "pop_front", "remove")),
    *(f"FreeQueue.{name}" for name in ("push_run", "put_back", "remove_run", "cut_front", "clear")),
    *(f"IdleBlocks.{name}" for name in ("push_run", "remove", "remove_run", "find_run", "forget")),
    *(
        f"IdleBlocks.{name}"
        for name in ("_put_back", "set_terms", "_drop_deadlines", "cut_front", "clear")
    ),
    *(f"IdleBlocks.{name}" for name in ("need", "put_first", "sort_out", "tell")),
    "IdleBlocks._set_end",
    *(f"IdleBlocks.{name}" for name in ("_queue_of", "_forget_terms")),
    "_none_goes_first",
    "Deadlines.drop",
    "Deadlines.clear",
    *(f"LeaseBook.{name}" for name in ("_drop", "_count", "_uncount")),
    "_all_free",
    *(f"ContentTree.{name}" for name in ("detach", "_prune", "_set_aside", "clear")),
    "evict",
    *(f"LifetimeRecorder.{name}" for name in ("published", "freed", "revived", "evicted")),
    *(f"BlockPool.{name}" for name in ("_queue_freed", "_unqueue", "_end_release", "_take_back")),
    *(f"BlockPool.{name}" for name in ("_lose", "_count_emptied", "assign", "_extra_slots")),
    *(f"KVSequence.{name}" for name in ("cut_hashes", "forget_identity", "find_limits")),
    "BlockTable.cut",
    "BlockTable.forget",
    "BlockTable.renew",
    "EventLog.take_back",
    "EventLog.trim",
    "LeaseBook.forget",
    "HashChain.cut",
    "Node.clear",
    "BlockPool.unpublish",
    "_add",
    "BlockPool._hold_again",
    "_undo_half",
    *(f"_Change.{name}" for name in ("undo", "settle", "complete", "_assign")),
    "_set",
    "BlockTable.next_pass",
    "cut_tables",
    "StateMove.apply",
    *(f"StateTable.{name}" for name in ("room", "next_due", "next_stop", "forget")),
    "resume",
}
# What looks at a state, and is not part of any verb.
OUTSIDE = {"kvcore.inspect.invariants", "kvcore.testing"}


class InjectedError(Exception):
    """What an injected fault raises."""


class Faults:
    """Where faults can be raised, and when one is.

    Attributes:
        places: how often each place was passed while armed.
    """

    def __init__(self):
        self.left = 0
        self.links = 0  # how deep we are in functions that cannot fail
        self.places = Counter()

    def point(self, place):
        """A place that can fail is reached."""
        if self.links:
            raise AssertionError(f"{place} can fail, inside what cannot")
        if self.left:
            self.places[place] += 1
            self.left -= 1
            if not self.left:
                raise InjectedError(place)

    @contextmanager
    def armed(self, count):
        self.left = count
        try:
            yield
        finally:
            self.left = 0

    # Functions.

    def guard(self, function, place):
        if place in LINKS:

            @functools.wraps(function)
            def linking(*args, **kwargs):
                self.links += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    self.links -= 1

            return linking

        @functools.wraps(function)
        def guarded(*args, **kwargs):
            self.point(place)
            return function(*args, **kwargs)

        return guarded

    def install(self, monkeypatch):
        """Put every function of kvcore, and those of others that it calls, behind a point."""
        modules = [
            module
            for name, module in sorted(sys.modules.items())
            if name.startswith("kvcore.") and not any(name.startswith(out) for out in OUTSIDE)
        ]
        guarded = {}
        for module in modules:
            for name, thing in list(vars(module).items()):
                mine = getattr(thing, "__module__", "") == module.__name__
                if isinstance(thing, FunctionType) and mine:
                    guarded[thing] = self.guard(thing, name)
                elif isinstance(thing, type) and mine:
                    self._install_class(monkeypatch, thing)
        for module in modules:
            for name, thing in list(vars(module).items()):
                if isinstance(thing, FunctionType) and thing in guarded:
                    monkeypatch.setattr(module, name, guarded[thing])
            self._install_others(monkeypatch, module)

    def _install_class(self, monkeypatch, cls):
        for name, thing in list(vars(cls).items()):
            place = f"{cls.__name__}.{name}"
            if isinstance(thing, staticmethod):
                monkeypatch.setattr(cls, name, staticmethod(self.guard(thing.__func__, place)))
            elif isinstance(thing, property):
                monkeypatch.setattr(cls, name, property(self.guard(thing.fget, place)))
            elif isinstance(thing, FunctionType):
                monkeypatch.setattr(cls, name, self.guard(thing, place))

    def _install_others(self, monkeypatch, module):
        for name, functions in {
            "xxhash": ["xxh3_128_digest"],
            "hashlib": ["sha256"],
            "struct": ["pack", "unpack", "error"],
        }.items():
            if hasattr(module, name):
                real = getattr(module, name)
                fake = {f: self.guard(getattr(real, f), f"{name}.{f}") for f in functions[:2]}
                fake |= {f: getattr(real, f) for f in functions[2:]}
                monkeypatch.setattr(module, name, SimpleNamespace(**fake))
        if (
            hasattr(module, "array") and module.__name__ != "kvcore.identity.tokens"
        ):  # which asks its type
            monkeypatch.setattr(module, "array", self.guard(array, "array"))

    # Containers.

    def fragile(self, kv):
        """Let every container of a manager that outlives a call fail when it grows."""
        kv.sequences = self.dictionary(kv.sequences, "sequences")
        for seq in kv.sequences.values():
            seq.packed = self.array(seq.packed, "packed")
            for table in seq.tables:
                table.blocks = self.list(table.blocks, "table.blocks")
                table._ids = self.array(table.block_ids, "table.block_ids")
        kv.leases.active = self.dictionary(kv.leases.active, "leases.active")
        kv.pool.empty_blocks = self.list(kv.pool.empty_blocks, "empty_blocks")
        idle = kv.pool.idle_blocks
        idle.kept = self.dictionary(idle.kept, "kept")
        idle._shelves = self.dictionary(idle._shelves, "shelves")
        for tree in kv.pool.trees:
            tree._roots = self.dictionary(tree._roots, "roots")
            for node in [*tree.roots(), *tree.nodes()]:
                if node.children is not None:
                    node.children = self.dictionary(node.children, "children")
        if kv.events is not None:
            kv.events._pending = self.list(kv.events._pending, "events")

    def dictionary(self, content, place):
        point = self.point

        class Dictionary(dict):
            def __setitem__(self, key, value):
                if key not in self:
                    point(place)
                super().__setitem__(key, value)

            def setdefault(self, key, value=None):
                if key not in self:
                    self[key] = value
                return self[key]

        return Dictionary(content)

    def list(self, content, place):
        return self._growing(list, content, place)

    def array(self, content, place):
        return self._growing(array, content, place)

    def _growing(self, base, content, place):
        point = self.point

        class Growing(base):
            def append(self, item):
                point(place)
                super().append(item)

            def extend(self, items):
                point(place)
                super().extend(items)

            def fromlist(self, items):
                point(place)
                super().fromlist(items)

            def __iadd__(self, items):
                self.extend(items)
                return self

        return Growing(content) if base is list else Growing(content.typecode, content)

    # What callers pass in.

    def sequence(self, *items):
        """A sequence each look at which can fail."""
        point = self.point

        class Touchy(Sequence):
            def __len__(self):
                point("the caller's __len__")
                return len(items)

            def __getitem__(self, index):
                point("the caller's __getitem__")
                return items[index]

            def __iter__(self):
                point("the caller's __iter__")
                for item in items:
                    point("the caller's __next__")
                    yield item

        return Touchy()

    def integer(self, value):
        point = self.point

        class Touchy:
            def __index__(self):
                point("the caller's __index__")
                return value

        return Touchy()


CACHES = {
    "Node": {"name", "last_child", "children"},
    "Block": {"name", "last_child", "children"},
    "BlockTable": {"_ids", "num_changes"},  # which says only: look again
    "KVCacheManager": {"_last_step"},
    "KVSequence": {"chain"},
    "ContentTree": {"_spare"},
    "BlockPool": {"_made"},
}
"""What no answer depends on: names once asked for, the child to be tried first, what is at hand."""


def fields_of(thing, pool):
    """The fields of an object that say something."""
    kind = type(thing).__name__
    names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    left_out = CACHES.get(kind, ())
    values = {f: getattr(thing, f) for f in names or vars(thing) if f not in left_out}
    if kind in ("Node", "Block"):
        below = [] if thing.last_child is None else [thing.last_child]
        below = below if thing.children is None else list(thing.children.values())
        values["below"] = sorted(below, key=operator.attrgetter("tokens"))
    if kind == "Block" and thing.node is None:
        del values["group"]
    elif kind == "BlockPool" and thing._passing:
        values["_passing"] = [thing._passing[b.block_id] for b in pool.blocks if b.node is not None]
    elif kind == "IdleBlocks":
        values["_shelves"] = {p: q for p, q in thing._shelves.items() if len(q)}
    elif kind == "LifetimeRecorder":
        published = [block.block_id for block in pool.blocks if block.node is not None]
        values["_published_at"] = [thing._published_at[block_id] for block_id in published]
        idle = [b.block_id for b in pool.blocks if b.node is not None and not b.ref_count]
        values["_freed_at"] = [thing._freed_at[block_id] for block_id in idle]
    return values


def dump(manager):
    """Every field of everything that a manager reaches, as plain values.

    Objects are numbered in the order in which they are met, so equal dumps are equal graphs.
    """
    numbers, pending, found = {id(manager): 0}, [manager], []

    def plain(value):
        if value is None or isinstance(value, (bool, int, str, bytes, type, float)):
            return value
        if isinstance(value, (array, bytearray)):
            return type(value).__name__, *value
        if isinstance(value, dict):
            return "dict", *((plain(key), plain(entry)) for key, entry in value.items())
        if isinstance(value, (list, tuple)):
            return "tuple" if isinstance(value, tuple) else "list", *map(plain, value)
        if id(value) not in numbers:
            numbers[id(value)] = len(numbers)
            pending.append(value)
        return f"object {numbers[id(value)]}"

    while pending:
        thing = pending.pop()
        values = {f: plain(v) for f, v in fields_of(thing, manager.pool).items()}
        found.append((numbers[id(thing)], type(thing).__name__, values))
    return sorted(found, key=operator.itemgetter(0))
