"""A small program that uses kvcore's public interface, checked by strict type checkers.

`test_types.py` runs mypy over it, and runs it; `python -m tests.kvcore.test_types` runs pyright.
"""

from array import array

import numpy as np

import kvcore


def serve(kv: kvcore.KVCacheManager, prompt: list[int], tenant: bytes) -> tuple[int, ...]:
    """A request from begin to end, with a draft, a fork, a lease and a refusal."""
    namespace = kvcore.Namespace(salt=tenant)
    plan: kvcore.Plan = kv.plan(prompt, namespace=namespace)
    if not plan.fits_above(1):
        return ()
    seq: kvcore.KVSequence = kv.open(prompt, namespace=namespace)
    try:
        ids: tuple[tuple[kvcore.BlockId, ...], ...] = kv.reserve(seq, len(prompt))
    except kvcore.OutOfBlocksError as full:
        return (full.needed, full.available)
    kv.commit(seq, len(prompt) - seq.num_computed_tokens)
    kv.append(seq, 7)
    growths: tuple[kvcore.Growth, ...] = kv.decode_step([], [])
    table, slots = array("i", [0] * 16), array("q", [-1] * 16)
    written: int = seq.write_block_table(table) + seq.write_slot_mapping(0, 1, slots)
    kv.write_step([seq], table, slots, counts=[1], row_stride=16)
    child, copies = kv.fork(seq)
    orders = [(order.src, order.dst, order.num_tokens) for order in copies]
    lease: kvcore.Lease = kv.lease(child, "step")
    kv.close(child)
    ended: bool = kv.leases.end(lease.lease_id)
    kv.truncate(seq, 2)
    kv.extend(seq, np.array([8, 9], np.uint32))
    kv.close(seq)
    packed = np.array(prompt, np.uint32)
    for tokens in (packed, memoryview(array("I", prompt)), tuple(prompt)):
        kv.close(kv.open(tokens, namespace=namespace))
    found: tuple[tuple[kvcore.BlockId, ...], ...] = kv.plan(packed).cached_block_ids
    return (len(ids), len(growths), written, len(orders), int(ended), len(found))


def follow(log: kvcore.EventLog) -> frozenset[tuple[int, kvcore.BlockHash]]:
    """An index of what can be hit."""
    stored: tuple[kvcore.Event, ...] = log.take()
    names = [n for e in stored if isinstance(e, kvcore.BlocksStored) for n in e.block_hashes]
    return frozenset((0, name) for name in names) | kvcore.fold(stored)


def main() -> None:
    """Serve two tenants."""
    groups: list[kvcore.LayerGroup] = [kvcore.FullAttention()]
    kv = kvcore.KVCacheManager(32, 4, groups=groups, record_events="sha256")
    answers = [serve(kv, [1, 2, 3, 4, 5], tenant) for tenant in (b"red", b"blue")]
    stats: kvcore.Stats = kv.stats()
    kvcore.check(kv)
    if kv.events is not None:
        print(answers, stats.num_queried_tokens, len(follow(kv.events)))


if __name__ == "__main__":
    main()
