"""The same calls give the same ids: here, beside another manager, and in other processes."""

import hashlib
import random
import subprocess
import sys

import kvcore

GROUPS = (kvcore.FullAttention(), kvcore.SlidingWindow(6))
NAMESPACES = (kvcore.Namespace(), kvcore.Namespace(salt=b"x"), kvcore.Namespace(lora_name="x"))
CALL = (
    "from tests.kvcore.test_determinism import managers, transcript;"
    "print(transcript(400, *managers()))"
)


def managers(count=1):
    return [
        kvcore.KVCacheManager(40, 4, groups=GROUPS, record_events="sha256") for _ in range(count)
    ]


def one_call(kv, draw):
    """Make one call, drawn like all its arguments; return what can be seen of it."""
    live = list(kv.sequences.values())
    verb = draw.choice(["open", "run", "run", "append", "cut", "fork", "lease", "close", "tick"])
    if verb == "open" or not live:
        length, same = draw.randrange(1, 30), draw.randrange(0, 30)
        tokens = [0] * min(length, same) + [draw.randrange(3)] * max(0, length - same)
        wish = kvcore.Retention(0, 8, priority=draw.randrange(1, 3), max_steps=5)
        retain = [wish] if draw.random() < 0.3 else []
        return kv.open(tokens, namespace=draw.choice(NAMESPACES), retain=retain).block_tables
    seq = draw.choice(live)
    if verb == "run":
        todo = seq.num_tokens - seq.num_computed_tokens
        kv.reserve(seq, todo)
        return kv.commit(seq, todo)
    if verb == "append":
        return kv.append(seq, draw.randrange(3))
    if verb == "cut":
        return kv.truncate(seq, draw.randrange(seq.num_tokens + 1))
    if verb == "fork":
        return kv.fork(seq)[1]
    if verb == "lease":
        return kv.lease(seq, max_steps=draw.randrange(1, 4)).lease_id
    if verb == "close":
        return kv.close(seq)
    return [lease.lease_id for lease in kv.tick()]


def transcript(num_calls, *kvs):
    """Make many calls of each manager in turn; return a digest of all that any of them gave."""
    draws = [random.Random(7) for _ in kvs]
    seen = [hashlib.sha256() for _ in kvs]
    for _ in range(num_calls):
        for kv, draw, told in zip(kvs, draws, seen, strict=True):
            try:
                answer = one_call(kv, draw)
            except kvcore.OutOfBlocksError as error:
                answer = str(error)
            order = [block.block_id for block in kv.pool.free_blocks()]
            names = [
                event.block_hashes for event in kv.events.take() if hasattr(event, "block_hashes")
            ]
            tables = [seq.block_tables for seq in kv.sequences.values()]
            told.update(repr((answer, order, names, tables, kv.stats())).encode())
    (digest,) = {told.hexdigest() for told in seen}
    return digest


def test_two_managers_fed_the_same_calls_give_the_same_ids():
    pair = managers(2)
    assert transcript(400, *pair) == transcript(400, *managers())
    stats = pair[0].stats()
    assert stats.num_evicted_blocks > 50
    assert stats.num_hit_tokens > 200
    kvcore.check(pair[0])


def test_processes_with_other_hash_seeds_give_the_same_ids():
    digests = {
        subprocess.run(
            [sys.executable, *options, "-c", CALL],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed, options in (("0", []), ("1", ["-O"]), ("4242", []))
    }
    assert digests == {transcript(400, *managers())}
