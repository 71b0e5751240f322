"""Checks of an adapter, and of the types of what it returns."""

from __future__ import annotations

from collections.abc import Collection

from kvcore.testing.errors import AdapterError
from kvcore.testing.protocol import OPTIONAL_VERBS, VERBS, Promise


def check_adapter(adapter: object) -> frozenset[Promise]:
    """Return an adapter's promises.

    Raises:
        AdapterError: it promises something that is no `Promise`, or lacks a verb.
    """
    promises = getattr(adapter, "promises", None)
    if not isinstance(promises, Collection) or not all(isinstance(p, Promise) for p in promises):
        raise AdapterError(f"promises: wanted a collection of Promise, got {promises!r}")
    wanted = [v for v in VERBS if v != "block_table" or Promise.GROUPS not in promises]
    for promise, verbs in OPTIONAL_VERBS.items():
        wanted += verbs if promise in promises else ()
    name = type(adapter).__name__
    missing = [verb for verb in wanted if not callable(getattr(adapter, verb, None))]
    if missing:
        raise AdapterError(f"{name} has no {', '.join(missing)}")
    if Promise.GROUPS in promises:
        _check_windows(getattr(adapter, "windows", None))
    return frozenset(promises)


def _check_windows(windows: object) -> None:
    is_list = isinstance(windows, Collection) and not isinstance(windows, str) and len(windows) > 0
    if not is_list or not all(w is None or (type(w) is int and w > 0) for w in windows):  # type: ignore[attr-defined]
        raise AdapterError(f"windows: wanted a number of tokens or None a group, got {windows!r}")


def as_count(verb: str, value: object) -> int:
    """Return a number of tokens or blocks. Raises AdapterError if it is no int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise AdapterError(f"{verb}: wanted a number, got {value!r}")
    return value


def as_ids(verb: str, value: object) -> list[int]:
    """Return block ids. Raises AdapterError if it is no collection of ints."""
    if not isinstance(value, Collection) or isinstance(value, str):
        raise AdapterError(f"{verb}: wanted block ids, got {value!r}")
    return [as_count(verb, block_id) for block_id in value]


def as_tables(verb: str, value: object, num_groups: int) -> list[list[int]]:
    """Return block tables. Raises AdapterError if there is not one for each layer group."""
    if not isinstance(value, Collection) or len(value) != num_groups:
        wanted = f"a table for each of {num_groups} groups"
        raise AdapterError(f"{verb}: wanted {wanted}, got {value!r}")
    return [as_ids(verb, table) for table in value]


def as_pair(verb: str, value: object) -> tuple[object, object]:
    """Return a pair. Raises AdapterError if it is none."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise AdapterError(f"{verb}: wanted a pair, got {value!r}")
    return value


def as_pairs(verb: str, value: object) -> list[tuple[int, int]]:
    """Return pairs of block ids. Raises AdapterError if it is no collection of them."""
    if not isinstance(value, Collection) or isinstance(value, str):
        raise AdapterError(f"{verb}: wanted pairs of block ids, got {value!r}")
    pairs = [as_pair(verb, pair) for pair in value]
    return [(as_count(verb, src), as_count(verb, dst)) for src, dst in pairs]


def as_events(verb: str, value: object) -> list[tuple[str, object]]:
    """Return events. Raises AdapterError if one is none."""
    if not isinstance(value, Collection) or isinstance(value, str):
        raise AdapterError(f"{verb}: wanted events, got {value!r}")
    pairs = [as_pair(verb, event) for event in value]
    for kind, _ in pairs:
        if kind not in {"stored", "removed", "cleared"}:
            raise AdapterError(f"{verb}: wanted stored, removed or cleared, got {kind!r}")
    return [(str(kind), block_hash) for kind, block_hash in pairs]


def as_hashes(verb: str, value: object) -> list[object]:
    """Return block hashes. Raises AdapterError if it is no collection."""
    if not isinstance(value, Collection) or isinstance(value, str):
        raise AdapterError(f"{verb}: wanted block hashes, got {value!r}")
    return list(value)
