"""`kill -9` of a process that writes to a disk tier, and what another process then finds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvcore import tiers

ROOT = Path(__file__).parents[3]
NUM_BYTES = 4096
CAPACITY = 1 << 22
MEANING = tiers.meaning_of({"weights": "a"})
KEEPS = 600  # records that the capacity holds in any case
WRITER = """
import sys
from tests.kvcore.tiers.kills import *
tier = open_tier(sys.argv[1], CAPACITY)
for number in range(int(sys.argv[2]), 1 << 60):
    assert tier.put(key(number), payload_of(number), 0, 0)
    os.write(1, b"%d\\n" % number)
"""


def payload_of(number):
    return memoryview(number.to_bytes(8, "little") * (NUM_BYTES // 8))


def key(number):
    return tiers.key_of(0, number.to_bytes(32, "little"))


def open_tier(path, capacity=1 << 20):
    tier = tiers.DiskTier(path, capacity)
    tier.start(MEANING, NUM_BYTES)
    return tier


def kill_once(folder, first, dice):
    """Kill a writer at a random moment; return (acknowledged, found of these, the next number).

    What was evicted because the capacity was reached does not count.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(first)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    written = process.stdout.readline()
    time.sleep(dice.expovariate(1 / 0.03))
    process.send_signal(signal.SIGKILL)
    written += process.stdout.read()
    process.wait()
    process.stdout.close()
    numbers = [int(line) for line in written.split(b"\n")[:-1]]
    tier, found = open_tier(folder, CAPACITY), 0
    for number in numbers[-KEEPS:]:
        payload = tier.get(key(number), NUM_BYTES)
        assert payload is None or payload == payload_of(number), number
        found += payload is not None
    assert sum(path.stat().st_size for path in folder.rglob("*.kvseg")) <= CAPACITY
    tier.close()
    return len(numbers[-KEEPS:]), found, numbers[-1] + 2
