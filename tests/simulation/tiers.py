"""Host memory and a disk behind the pool of a replica, slow and with faults, in simulated time.

A block travels as the number of what it held. A tier takes some time for each copy, and now and
then so long that the load is given up; the disk has the faults of `tests/kvcore/tiers`.
"""

from functools import partial
from random import Random

from kvcore.tiers import DiskTier, HostTier, TierManager
from kvcore.tiers.tier import read_each
from model.control.tier_transfers import TierTransfers, TransferCosts
from tests.kvcore.tiers.faulty_disk import READS, WRITES, FaultyDisk

BLOCK_BYTES = 8
PATIENCE_S = 0.004
HANGS_S = 0.05, 30.0
_AT_ONCE_S = 0.0001


class Costs(TransferCosts):
    """Loads are always worth it, and given up soon."""

    def is_worth(self, found, waiting_s):
        del found, waiting_s
        return True

    def deadline_s(self, num_tokens, copies):
        del num_tokens, copies
        return PATIENCE_S


class SlowTier:
    """A tier that takes time.

    Args:
        tier: the tier.
        host: whose threads wait.
        draw: decides how long, and what goes wrong.
        disk: gets the faults; None: there are none.
    """

    def __init__(self, tier, host, draw, disk=None):
        self._tier, self._host, self._draw, self._disk = tier, host, draw, disk

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def mend(self):
        """Its device fails no more, and has all its files again."""
        if self._disk is not None:
            self._disk.write_faults, self._disk.read_faults = [], []
            self._disk.is_gone = False
        self._disk = None

    def held(self):
        """The keys of its copies."""
        return [*self._tier._entries]

    def read(self, key, length):
        """A copy, at once."""
        return self._tier.get(key, length)

    def keeps_retained(self):
        """Whether some copies are retained: they may leave no room for others."""
        return any(self._tier._order._priorities.values())

    def has_unwritten(self):
        """Whether a copy is found whose write has failed."""
        files = getattr(self._tier, "_files", None)
        places = self._tier._entries.values() if files is not None else ()
        return any((header.segment, offset) in files.unwritten for header, offset in places)

    def get(self, key, length):
        self._pass(READS, "read_faults")
        return self._tier.get(key, length)

    def begin_read(self, keys, targets):
        return partial(read_each, self, keys, targets)

    def hold(self, key, length):
        self._pass((), "")
        return self._tier.hold(key, length)

    def adopt(self, key, copy, priority, epoch):
        self._pass((), "")
        return self._tier.adopt(key, copy, priority, epoch)

    def put(self, key, payload, priority, epoch):
        self._pass(WRITES, "write_faults")
        return self._tier.put(key, payload, priority, epoch)

    def _pass(self, kinds, faults):
        draw = self._draw
        if self._disk is not None and draw.random() < 0.03:
            getattr(self._disk, faults).append(draw.choice(kinds))
        if self._host.loop.is_thread():  # the loop never waits for a tier
            hangs = draw.random() < 0.002
            took_s = draw.choice(HANGS_S) if hangs else draw.expovariate(20_000)
            if took_s > _AT_ONCE_S:
                self._host.loop.sleep(took_s)


class TierDevice:
    """Runs jobs on a `Device`, which remembers what its slots hold."""

    def __init__(self, device, host, draw):
        self._device, self._host, self._draw = device, host, draw
        self._contents = []
        self._reads = {}  # by block: when it was read, and the number of what it held
        device.tiers = self

    def mark(self):
        return None

    def began(self, job):
        for block in job.lease.blocks:  # as `Device` spoils: nothing may be read before it is there
            self._device.set_block(block.block_id, ["on its way"] * self._device.size)

    def load(self, job, mark):
        del mark
        self._host.loop.sleep(self._draw.expovariate(5_000))
        job.run()

    def store(self, job, mark):
        del mark
        took_s = self._draw.expovariate(5_000)
        if took_s > _AT_ONCE_S:  # else it is done before the engine does anything more
            self._host.loop.sleep(took_s)
        job.run()

    def gave_up(self):
        pass

    def read_block(self, block_id):
        number = len(self._contents)
        self._contents.append(self._device.block(block_id))
        self._reads.setdefault(block_id, []).append((self._device.num_sent, number))
        return number.to_bytes(BLOCK_BYTES, "little")

    def spoil(self, slot, since):
        """A slot that the step `since` has written is worth nothing, nor are copies of it."""
        block_id, place = divmod(slot, self._device.size)
        for read_at, number in self._reads.get(block_id, ()):
            if read_at >= since:
                self._contents[number][place] = "spoilt"

    def contents(self, payload, wanted):
        """What the blocks of a copy held, as `contents_of` has it."""
        numbers = [
            payload[place : place + BLOCK_BYTES] for place in range(0, len(payload), BLOCK_BYTES)
        ]
        held = [self._contents[int.from_bytes(number, "little")] for number in numbers]
        return held if isinstance(wanted[0], list) else [one[0] for one in held]

    def write_block(self, block_id, data):
        self._device.set_block(block_id, self._contents[int.from_bytes(data, "little")])


def make_tiers(plan, host, kv, device, kind=TierTransfers, group=None):
    """The tiers of a run, or of one of its ranks: each has its own sizes, delays and faults.

    None: it has none.
    """
    names = plan.features.tiers
    if not names:
        return None
    rank = 0 if group is None else group.rank
    draw = Random(plan.seed + 7 + 1_000_003 * rank)
    tiers = []
    if "host" in names:
        tiers.append(SlowTier(HostTier(draw.choice((20, 2000)) * (BLOCK_BYTES + 512)), host, draw))
    if "disk" in names:
        disk = FaultyDisk()
        made = DiskTier("", draw.choice((12_000, 200_000)), segments=disk, now_s=host.now_s)
        tiers.append(SlowTier(made, host, draw, disk if draw.random() < 0.5 else None))
    mover = TierDevice(device, host, draw)
    meaning = {"weights": "simulated", "rank": rank}
    manager = TierManager(
        kv, tiers, mover, block_bytes=BLOCK_BYTES, meaning=meaning, is_shard=group is not None
    )
    return kind(manager, mover, Costs(BLOCK_BYTES), host, None, group)
