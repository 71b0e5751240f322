"""A manager with tiers on a faulty disk, against a ghost that knows what every block must hold.

The ghost computes the true bytes of a block from its prefix, namespace, group and weights, and the
key of a copy from `kvcore.block_hashes`, which knows nothing of tiers. It looks at every payload
that enters or leaves a tier, at every block that a load has filled, and at every hit.
"""

import errno
import sys
from functools import partial, wraps

import xxhash
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvcore
from kvcore import tiers
from tests.kvcore.tiers.disk_checks import check_counts, check_records
from tests.kvcore.tiers.faulty_disk import (
    READS,
    WRITES,
    BrokenError,
    CrashedError,
    FaultyDisk,
)

SIZE = 2  # tokens a block
NUM_BYTES = 16  # of a block
GROUPS = (
    None,
    (kvcore.FullAttention(), kvcore.SlidingWindow(window=5)),
    (kvcore.SlidingWindow(window=3), kvcore.SlidingWindow(window=6, block_size=4)),
    (kvcore.FullAttention(), kvcore.RecurrentState(2)),
)
SALTS = (b"", b"tenant")
WEIGHTS = ("a", "a", "a", "b")
NUM_BLOCKS = 20


def prompt(length, fork):
    """A prompt of one family: all begin alike, and part at `fork`."""
    return [int(place >= fork) * (fork + 1) for place in range(length)]


PROMPTS = st.builds(prompt, st.integers(5, 15), st.sampled_from([0, 1, 4, 15]))


def numbers_of(tier):
    """The copies of a tier by their numbers: one that was evicted and came again has another."""
    entries = tier.tier._entries.items()
    return {key: one.number if tier.in_blocks else one[0].number for key, one in entries}


def truth(*about):
    return xxhash.xxh3_128_digest(repr(about).encode())


def key_of(group, block_hash, namespace):
    """The group, with its highest bit set where there is a salt, and the hash."""
    return (group + (bool(namespace.salt) << 31)).to_bytes(4, "little") + block_hash


class Memory:
    """The blocks of the device."""

    def __init__(self, num_blocks):
        self.blocks = [bytes(NUM_BYTES)] * num_blocks

    meanwhile = None

    def read_block(self, block_id):
        data, meanwhile, self.meanwhile = self.blocks[block_id], self.meanwhile, None
        if meanwhile is not None:
            meanwhile()  # on another thread
        return data

    def write_block(self, block_id, data):
        self.blocks[block_id] = bytes(data)


class Watched:
    """A tier, and the ghost beside it."""

    def __init__(self, tier, machine):
        self.tier, self.machine = tier, machine
        self.name, self.stats = tier.name, tier.stats

    def __getattr__(self, name):
        return getattr(self.tier, name)

    num_puts = 0

    def put(self, key, payload, priority, epoch):
        return self.keep(key, payload, epoch, partial(self.tier.put, key, payload, priority, epoch))

    def keep(self, key, payload, epoch, put):
        wanted = self.machine.true_payloads.get(key)
        if wanted is None:
            raise BrokenError("P37: stored under a key that no prefix of this namespace has")
        if bytes(payload) != wanted:
            raise BrokenError("P38: stored after its block was reused, or before it was written")
        is_old = epoch != self.tier.epoch
        self.num_puts += not is_old
        try:
            is_kept = put()
        except CrashedError:
            if not is_old:
                self.machine.since_clear.add(key)  # all of it may be there
            raise
        if is_old and is_kept and key not in self.machine.since_clear:
            raise BrokenError("P38: a store of before a reset came late, and is found")
        if is_kept:
            self.machine.since_clear.add(key)
        return is_kept

    def adopt(self, key, copy, priority, epoch):
        payload = self.tier.blocks.payload(copy)
        return self.keep(key, payload, epoch, partial(self.tier.adopt, key, copy, priority, epoch))

    def hold(self, key, length):
        """As `get`, but that the sums are still to be compared: a job does."""
        copy = self.tier.hold(key, length)
        if copy is not None and key not in self.machine.since_clear:
            raise BrokenError("P37: a tier served what was forgotten by a reset, or is not ours")
        return copy

    def begin_read(self, keys, targets):
        """As `get` of each, but that the tier reads them together."""
        there = [self.tier.contains(key) for key in keys]
        faults, wait = self.tier.stats.faults.total(), self.tier.begin_read(keys, targets)

        def read():
            found = wait()
            for key, target, is_found in zip(keys, targets, found, strict=True):
                if is_found:
                    self.check(key, b"".join(target))
            num_missing = there.count(True) - [*found].count(True)
            if self.tier.stats.faults.total() - faults < num_missing:
                raise BrokenError("P37: a record was not served, and that is not counted")
            return found

        return read

    def check(self, key, payload):
        if payload is not None and bytes(payload) != self.machine.true_payloads.get(key):
            raise BrokenError("P37: a tier served other bytes than this prefix has")
        if payload is not None and key not in self.machine.since_clear:
            raise BrokenError("P37: a tier served what was forgotten by a reset, or is not ours")

    meanwhile = None

    def get(self, key, length):
        is_there, faults = self.tier.contains(key), self.tier.stats.faults.total()
        payload, meanwhile, self.meanwhile = self.tier.get(key, length), self.meanwhile, None
        self.check(key, payload)
        if payload is None and is_there and self.tier.stats.faults.total() == faults:
            raise BrokenError("P37: a record was not served, and that is not counted")
        if meanwhile is not None:
            meanwhile()  # on another thread
        return payload


def survives(verb):
    """The process may die in this rule, at any write: then another begins on what the disk has."""

    @wraps(verb)
    def outermost(self, *args, **kwargs):
        if self.is_inside:
            return verb(self, *args, **kwargs)
        self.is_inside, before = True, {*self.since_clear}
        try:
            return verb(self, *args, **kwargs)
        except CrashedError:
            self.since_clear |= before  # a reset that was not finished may have left them
            self.restart("killed", self.weights, 1, 0)
        finally:
            self.is_inside = False

    return outermost


class TierMachine(RuleBasedStateMachine):
    """Prompts, stores, loads, resets, crashes and faults, in any order."""

    disk_tier = tiers.DiskTier
    host_tier = tiers.HostTier
    tier_manager = tiers.TierManager
    record_events = None

    @initialize(
        groups=st.sampled_from(GROUPS),
        host=st.booleans(),
        records=st.integers(1, 3),
        segments=st.sampled_from([9, 14]),
    )
    def begin(self, groups, host, records, segments):
        self.groups, self.has_host = groups, host
        pieces = getattr(groups[-1], "num_blocks", 1) if groups else 1
        self.segment_bytes = 32 + records * (128 + NUM_BYTES * pieces)
        self.capacity = segments * self.segment_bytes
        self.batch_bytes = NUM_BYTES * (64, 2, 5)[records % 3]
        self.disk = FaultyDisk()
        self.ever_stored = {}  # weights -> keys that a disk may serve
        self.ever_true = {}  # weights -> key -> payload; peers ask for what came before a restart
        self.start("a", self.capacity)

    def start(self, weights, capacity):
        self.weights = weights
        self.kv = kvcore.KVCacheManager(
            NUM_BLOCKS, SIZE, groups=self.groups, record_events=self.record_events
        )
        self.memory = Memory(NUM_BLOCKS)
        self.true_payloads = self.ever_true.setdefault(weights, {})
        self.since_clear = self.ever_stored.setdefault(weights, set())
        self.loads, self.stores, self.namespaces = [], [], {}
        self.disk.capacity = None
        chosen = [
            self.disk_tier(
                "",
                capacity,
                segment_bytes=self.segment_bytes,
                segments=self.disk,
                now_s=lambda: self.now_s,
            )
        ]
        if self.has_host:
            chosen.insert(0, self.host_tier(12 * (512 + 2 * NUM_BYTES)))
        self.tiers = self.tier_manager(
            self.kv,
            [*[Watched(tier, self) for tier in chosen], *self.further_tiers()],
            self.memory,
            block_bytes=NUM_BYTES,
            meaning={"weights": weights},
            max_store_blocks=8,
            batch_bytes=self.batch_bytes,
        )
        if self.disk.total > capacity:
            raise BrokenError(
                f"P39: {self.disk.total} bytes on a disk tier of {capacity} at its start"
            )
        self.disk.capacity = capacity
        check_records(self.on_disk, self.disk)

    def further_tiers(self):
        return []

    @property
    def on_disk(self):
        return next(one.tier for one in self.tiers.tiers if one.name == "disk")

    # What a block must hold

    def register(self, tokens, namespace):
        """The true payload of every key of a prompt, which are returned."""
        keys = []
        for number, group in enumerate(self.kv.groups):
            size = group.block_size
            hashes = kvcore.block_hashes(tokens, size, namespace=namespace, algorithm="sha256")
            for place, block_hash in enumerate(hashes):
                prefix = tuple(tokens[: (place + 1) * size])
                pieces = getattr(group, "num_blocks", 1)
                payload = b"".join(
                    [self.bytes_of(namespace, number, prefix, piece) for piece in range(pieces)]
                )
                keys.append(key_of(number, block_hash, namespace))
                self.true_payloads[keys[-1]] = payload
        return keys

    def bytes_of(self, namespace, group, prefix, piece=0):
        return truth(self.weights, namespace.salt, group, prefix, piece)

    def check_blocks(self, seq, what):
        """Every full block that later queries see holds what its prefix has."""
        computed = seq.num_computed_tokens
        for number, table in enumerate(seq.tables):
            for place in range(table.first_kept(computed), computed // table.block_size):
                prefix = tuple(seq.packed[: (place + 1) * table.block_size])
                wanted = self.bytes_of(self.namespaces[seq], number, prefix)
                if self.memory.blocks[table.block_ids[place]] != wanted:
                    raise BrokenError(what)
        state = seq.state
        if state is not None and computed and state.read:
            prefix = tuple(seq.packed[:computed])
            for piece, block in enumerate(state.read):
                wanted = self.bytes_of(self.namespaces[seq], state.number, prefix, piece)
                if self.memory.blocks[block.block_id] != wanted:
                    raise BrokenError(what)

    def open_sequence(self, tokens, salt):
        namespace = kvcore.Namespace(salt=salt)
        self.register(tokens, namespace)
        seq = self.kv.open(tokens, namespace=namespace)
        self.namespaces[seq] = namespace
        self.check_blocks(seq, "P40: the cache has other bytes than this prefix")
        return seq

    def compute(self, seq):
        """Run the passes of a prompt; False: there is no room."""
        while seq.num_computed_tokens < seq.num_tokens:
            start = seq.num_computed_tokens
            count = self.kv.chunk_length(seq, seq.num_tokens - start)
            try:
                self.kv.reserve(seq, count)
            except kvcore.OutOfBlocksError:
                if not self.tiers.cancel_stores():
                    if any(job.lease.is_active for job in self.stores):
                        raise BrokenError("P41: a store keeps a request from running") from None
                    return False
                self.stores = []
                continue
            end, namespace = start + count, self.namespaces[seq]
            for number, table in enumerate(seq.tables):
                for place in range(start // table.block_size, end // table.block_size):
                    prefix = tuple(seq.packed[: (place + 1) * table.block_size])
                    held = self.bytes_of(namespace, number, prefix)
                    self.memory.blocks[table.block_ids[place]] = held
            if seq.state is not None:
                prefix = tuple(seq.packed[:end])
                for piece, block in enumerate(seq.state.write):
                    held = self.bytes_of(namespace, seq.state.number, prefix, piece)
                    self.memory.blocks[block.block_id] = held
            self.kv.commit(seq, count)
        return True

    # Rules

    @rule(tokens=PROMPTS, salt=st.sampled_from(SALTS), stores=st.booleans())
    @survives
    def serve(self, tokens, salt, stores):
        """Open, load what there is, compute the rest, close; perhaps store at once."""
        seq = self.open_sequence(tokens, salt)
        found = self.tiers.find(seq)
        job = self.begin_load(seq)
        if job is not None:
            self.run(job)
            is_loaded = self.tiers.finish_load(job)
            if is_loaded and seq.num_computed_tokens != found.num_tokens:
                raise BrokenError("P38: a load brought other tokens than were found")
            if is_loaded:
                self.check_blocks(seq, "P38: a load is counted as done before its bytes are there")
        self.compute(seq)
        self.kv.close(seq)
        if stores:
            self.store_all(seq)

    def store_all(self, seq):
        """Store what is published; on a sound disk every block of a prompt is there then."""
        disk = self.on_disk
        before, is_cached = disk.stats.num_evicted, self.kv.enable_caching
        while self.stores:
            self.end_store(0, runs=True)
        while (job := self.tiers.begin_store()) is not None:
            self.stores.append(job)
            while self.stores:
                self.end_store(0, runs=True)
        is_whole = seq.num_computed_tokens == seq.num_tokens
        if not (self.was_sound and is_cached and is_whole and before == disk.stats.num_evicted):
            return
        namespace = self.namespaces[seq]
        tokens = seq.packed.tolist()
        for number, table in enumerate(seq.tables):
            if table.window or table.chunk:  # what has left the window is not stored again
                continue
            for block_hash in kvcore.block_hashes(
                tokens, table.block_size, namespace=namespace, algorithm="sha256"
            ):
                key = key_of(number, block_hash, namespace)
                if not disk.contains(key):
                    raise BrokenError("P24: a prompt was stored, and a tier does not have it")

    @rule(forks=st.lists(st.integers(0, 9), min_size=2, max_size=4))
    @survives
    def churn(self, forks):
        """Other prompts take the blocks; theirs are stored too."""
        for fork in forks:
            self.serve(prompt(15, fork % 5), SALTS[fork // 5], stores=True)

    @rule(tokens=PROMPTS, salt=st.sampled_from(SALTS))
    def wait_for_a_load(self, tokens, salt):
        """Open and begin to load; the rest comes later."""
        if len(self.loads) < 2:
            seq = self.open_sequence(tokens, salt)
            job = self.begin_load(seq)
            if job is None:
                self.kv.close(seq)
            else:
                self.loads.append((seq, job))

    @rule(index=st.integers(0, 1), runs=st.booleans(), closes=st.booleans(), twice=st.booleans())
    @survives
    def end_load(self, index, runs, closes, twice):
        """A load ends: done or given up, its request still there or not."""
        if index < len(self.loads):
            self.end(*self.loads.pop(index), runs, closes, twice)

    def end(self, seq, job, runs, closes, twice):
        if runs:
            self.run(job)
        if closes:
            self.kv.close(seq)
        before = seq.num_computed_tokens
        is_loaded = self.tiers.finish_load(job)
        if is_loaded and (closes or not runs):
            raise BrokenError("P38: a load joined without its bytes, or a request that has gone")
        if not is_loaded and seq.num_computed_tokens != before:
            raise BrokenError("P38: a load that failed left a trace")
        if job.lease.is_active:
            raise BrokenError("P41: a load has ended and still holds its blocks")
        if not runs:
            self.run_too_late(job)
        if twice and self.tiers.finish_load(job):
            raise BrokenError("P38: a second completion changed something")
        if not closes:
            if is_loaded:
                self.check_blocks(seq, "P38: a load is counted as done before its bytes are there")
            self.go_on(seq)

    def go_on(self, seq):
        """Compute what a load has not brought, and close."""
        if seq.namespace_key is not None or not seq.num_computed_tokens:
            self.compute(seq)
        self.kv.close(seq)

    def run_too_late(self, job):
        """A load runs after it was given up: it must touch no block, they may be another's."""
        blocks = [*self.memory.blocks]
        self.run(job)
        if blocks != self.memory.blocks:
            raise BrokenError("P38: a load that was given up wrote to blocks")

    @rule(runs=st.booleans())
    @survives
    def store(self, runs):
        job = self.tiers.begin_store()
        if job is not None:
            self.stores.append(job)
            if runs:
                self.run(job)

    @rule(index=st.integers(0, 1), runs=st.booleans())
    @survives
    def end_store(self, index, runs):
        if index < len(self.stores):
            job = self.stores.pop(index)
            if runs and not job.is_done:
                self.run(job)
            self.tiers.finish_store(job)
            if job.lease.is_active:
                raise BrokenError("P41: a store has ended and still holds its blocks")
            if not job.is_done:
                self.run(job)  # too late: it may store nothing that its blocks do not hold

    @rule()
    @survives
    def reset(self):
        """Weights that changed, say: nothing of before may come back."""
        self.since_clear.clear()
        self.kv.reset()
        if any(tier.stats.num_records for tier in self.tiers.tiers):
            raise BrokenError("P37: a tier has copies after a reset")

    @rule()
    @survives
    def reset_while_it_stores(self):
        self.memory.meanwhile = self.reset
        self.store(runs=True)
        self.memory.meanwhile = None

    @rule(tokens=PROMPTS)
    @survives
    def a_transfer_turns_out_bad(self, tokens):
        """KV from elsewhere was wrong: nothing that was computed from it may be served."""
        seq = self.open_sequence(tokens, b"")
        self.compute(seq)
        if seq.num_computed_tokens >= SIZE and seq.namespace_key is not None:
            self.kv.fail_load(seq, 0)
            self.since_clear.clear()
        self.kv.close(seq)

    @rule(tokens=PROMPTS, salt=st.sampled_from(SALTS))
    @survives
    def a_step_fails(self, tokens, salt):
        """What a request has read or computed may be wrong; what was stored before it stays."""
        marks, before = self.tiers.marks(), {*self.since_clear}
        kept = [tier for tier in self.tiers.tiers if tier.keeps]
        held = [numbers_of(tier) for tier in kept]
        self.serve(tokens, salt, stores=True)
        seq = self.open_sequence(tokens, salt)
        wrong = {*self.register(tokens, self.namespaces[seq])}
        stayed = [
            old.items() & numbers_of(tier).items() for tier, old in zip(kept, held, strict=True)
        ]
        is_sound = self.was_sound and not self.disk.late
        self.tiers.reset(marks, seq)
        self.kv.close(seq)
        if is_sound:  # else the disk may lose what says that they are gone
            self.since_clear &= before - wrong
        for tier, old in zip(kept, stayed, strict=True):
            found, keys = {*tier.tier._entries}, {key for key, _ in old} - wrong
            if found & wrong or not found <= before:
                raise BrokenError("P37: a tier has what a failed step may have written")
            if is_sound and not keys <= found:
                raise BrokenError("P24: a failed step has cost copies of before it")

    @rule(
        kind=st.sampled_from(["closed", "killed", "power"]),
        weights=st.sampled_from(WEIGHTS),
        share=st.sampled_from([1, 1, 1, 2]),
        lost=st.integers(0, 400),
        crash=st.sampled_from([None, None, (0, 0), (0, 1), (1, 0.5), (2, 0.5)]),
    )
    def restart(self, kind, weights, share, lost, crash=None):
        """The process ends, in order or not, and another begins on the same disk."""
        self.num_restarts += 1
        found = {*self.on_disk._entries}
        if kind == "closed":
            self.finish_all()
            self.tiers.close()
        self.disk.is_taken = False
        if kind == "power":
            self.disk.lose_power(lost)
        is_sound = kind != "power" and not self.disk.late and self.was_sound
        is_same = share == 1 and weights == self.weights
        self.disk.write_faults, self.disk.read_faults, self.disk.crash = [], [], None
        capacity = self.capacity if share == 1 else 8 * self.segment_bytes
        self.disk.is_undeletable = False
        self.disk.room = self.disk.refusal = None
        if self.disk.is_gone or self.on_disk._is_outdated:  # or its files are deleted by hand
            self.disk.files, self.disk.is_gone = {}, False
        self.disk.crash = crash
        try:
            self.start(weights, capacity)
        except CrashedError:
            self.disk.is_taken = False
            self.start(weights, capacity)
        self.disk.crash = None
        again = {*self.on_disk._entries}
        if is_sound and is_same and not found <= again:
            raise BrokenError("P24: a restart has lost records that were whole")
        self.was_sound = True

    was_sound, is_inside, num_restarts, now_s = True, False, 0, 0.0

    @rule(left=st.integers(0, 12), share=st.sampled_from([0, 0.3, 0.5, 0.9, 1]))
    def the_process_is_to_die(self, left, share):
        """It dies at one of the next writes, cuts or deletions, perhaps in the middle of it."""
        self.disk.crash = left, share

    @rule(
        writes=st.lists(st.sampled_from(WRITES), max_size=2),
        reads=st.lists(st.sampled_from(READS), max_size=2),
        undeletable=st.sampled_from([False, False, True]),
        lands=st.booleans(),
    )
    def the_disk_misbehaves(self, writes, reads, undeletable, lands):
        self.disk.write_faults, self.disk.read_faults = writes, reads
        self.disk.is_undeletable = undeletable
        self.was_sound = False
        if lands:
            self.disk.land()

    @rule(
        fault=st.sampled_from(["elsewhere", "short", "torn", "stale"]),
        before=st.integers(0, 8),
        kind=st.sampled_from(["killed", "killed", "power"]),
        lost=st.sampled_from([7, 20]),
        salt=st.sampled_from(SALTS),
    )
    def a_write_goes_wrong_and_life_goes_on(self, fault, before, kind, lost, salt):
        """What stands behind a record that is torn, short or stale is found after a restart too."""
        new = [[40 + 2 * self.num_restarts + which] * 15 for which in range(2)]  # all is written
        self.the_disk_misbehaves([*[None] * before, fault], [], False, False)
        self.serve(new[0], salt, stores=True)
        self.restart(kind, self.weights, 1, lost)
        self.serve(new[1], salt, stores=True)
        self.restart("killed", self.weights, 1, 0)

    @rule(which=st.integers(0, 9), bit=st.integers(0, 127))
    def host_memory_is_overwritten(self, which, bit):
        """A bit of a copy there flips: it is a miss then, and the copy is dropped."""
        host = self.tiers.tiers[0].tier
        copies = [*host._entries.values()] if self.has_host else []
        if copies:
            host.blocks.views(copies[which % len(copies)])[0][bit // 8] ^= 1 << bit % 8

    @rule(
        room=st.sampled_from([None, 0, 100, 300]),
        refusal=st.sampled_from([None, errno.EROFS, errno.EIO, errno.EDQUOT]),
    )
    def the_device_fails_for_a_while(self, room, refusal):
        """It has less space, or takes no changes."""
        self.disk.room, self.disk.refusal = room, refusal
        self.was_sound = False

    @rule(seconds=st.sampled_from([0.5, 1, 4, 60]))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule(tokens=PROMPTS)
    @survives
    def the_device_works_again(self, tokens):
        """After a pause the tier has its whole capacity again."""
        disk, tier = self.disk, next(one for one in self.tiers.tiers if one.name == "disk")
        disk.room = disk.refusal = disk.crash = None
        disk.write_faults, disk.read_faults = [], []
        disk.is_undeletable = disk.is_gone = False
        self.now_s += 61
        before = tier.num_puts
        self.serve(tokens, b"", stores=True)
        is_whole = tier.stats.is_enabled and tier.stats.capacity_bytes == disk.capacity
        if tier.num_puts > before and not is_whole:
            raise BrokenError("P24: a device works again, and its tier is still small, or off")

    @rule(shift=st.integers(1, 3), cut=st.integers(0, 200))
    def another_process_leaves_files(self, shift, cut):
        """A copy of a segment under another number, cut somewhere; found at the next start."""
        if self.disk.files:
            number = max(self.disk.files)
            copied = bytearray(self.disk.files[number])
            self.restart("killed", self.weights, 1, 0)
            self.disk.files[number + shift] = copied[: len(copied) - cut]
            self.disk.is_taken = False
            self.start(self.weights, self.capacity)

    def begin_load(self, seq):
        try:
            return self.tiers.begin_load(seq)
        except kvcore.OutOfBlocksError:
            return None

    def run(self, job):
        moved = self.disk.num_moved
        job.run()
        most = (len(job.parts) + 1) * 6 * (self.capacity // 8)
        if self.disk.num_moved - moved > most:
            raise BrokenError("P39: one job rewrote more segments than its records could need")

    def finish_all(self):
        for seq, job in self.loads:
            self.tiers.finish_load(job)
            self.kv.close(seq)
        for job in self.stores:
            self.tiers.finish_store(job)
        self.loads, self.stores = [], []

    @invariant()
    def every_block_is_accounted_for(self):
        kvcore.check(self.kv)
        check_counts(self.on_disk)
        host = self.tiers.tiers[0].tier
        if self.has_host:
            held = sum(512 + NUM_BYTES * len(copy.ids) for copy in host._entries.values())
            if held > host.stats.capacity_bytes or held != host.stats.used_bytes:
                raise BrokenError("P39: the host tier has more bytes than it may, or counts others")
        blocks = self.tiers._blocks
        kept = [copy.ids for copy in host._entries.values()] if self.has_host else []
        taken = [*blocks._free, *[host_id for ids in kept for host_id in ids]]
        if sorted(taken) != [*range(blocks._num_used)]:
            raise BrokenError("P39: blocks of host memory are lost, or have two copies")

    def teardown(self):
        if hasattr(self, "tiers") and sys.exc_info()[0] is None:
            self.finish_all()
            self.tiers.cancel_stores()
            if self.kv.leases.active or self.kv.num_free_blocks != self.kv.num_usable_blocks:
                raise BrokenError("P41: all requests have ended, and blocks are still held")
            self.tiers.close()
