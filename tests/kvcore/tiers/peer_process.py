"""`python -m tests.kvcore.tiers.peer_process HOST:PORT`: a process that serves the KV of a prompt.

With `--die N` it dies by SIGKILL in the middle of an answer: after N whole ones. With `--nixl` its
copies are read over NIXL.
"""

import argparse
import os
import signal
import sys

import kvcore
from kvcore import tiers

SIZE, BLOCK_BYTES, PROMPT = 4, 1 << 20, range(30)
SECRET = b"sixteen bytes at least"


class Memory:
    """The blocks of a device: each holds its number in the prompt."""

    def __init__(self):
        self.blocks = {}

    def read_block(self, block_id):
        return self.blocks[block_id]

    def write_block(self, block_id, data):
        self.blocks[block_id] = bytes(data)


def begin(further, weights="9f3c"):
    """A manager with the tiers behind it, and its memory."""
    kv, memory = kvcore.KVCacheManager(num_blocks=32, block_size=SIZE), Memory()
    made = tiers.TierManager(
        kv, further, memory, block_bytes=BLOCK_BYTES, meaning={"weights": weights}
    )
    return kv, memory, made


def compute(kv, memory, seq):
    kv.reserve(seq, len(PROMPT) - seq.num_computed_tokens)
    for place, block_id in enumerate(seq.block_table):
        memory.blocks[block_id] = bytes([place]) * BLOCK_BYTES
    kv.commit(seq, len(PROMPT) - seq.num_computed_tokens)


def serve(address, host_bytes=1 << 26, weights="9f3c", secret=SECRET, memory=None):
    """A server that has the prompt, and one of a tenant."""
    kv, device, made = begin([tiers.HostTier(host_bytes)], weights)
    for salt in (b"", b"tenant"):
        seq = kv.open(PROMPT, namespace=kvcore.Namespace(salt=salt))
        compute(kv, device, seq)
        kv.close(seq)
    while (job := made.begin_store()) is not None:
        job.run()
        made.finish_store(job)
    server = tiers.PeerServer(made, secret, memory)
    server.listen(address)
    return server


def die_in_the_middle(num_whole):
    """Have the next answer but `num_whole` be the last one, and only a half of it."""
    whole, left = tiers.PeerSession.copy, [num_whole]

    def copy(session, question):
        head, payload = whole(session, question)
        yield head
        if not left[0]:
            yield payload[: len(payload) // 2]
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        yield payload

    tiers.PeerSession.copy = copy


def main():
    made = argparse.ArgumentParser()
    made.add_argument("address")
    made.add_argument("--die", type=int)
    made.add_argument("--nixl", action="store_true")
    options = made.parse_args()
    if options.die is not None:
        die_in_the_middle(options.die)
    memory = tiers.Nixl(is_same_machine=True) if options.nixl else None
    sys.stdout.write(f"{serve(options.address, memory=memory).address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
