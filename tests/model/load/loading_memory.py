"""What reading a checkpoint takes and leaves behind: prints two sizes in bytes.

A program of its own: `python -m tests.model.load.loading_memory CHECKPOINT [KEEPING]`. With a
second argument what is made of weights in FP8 is kept a second time.
"""

import sys
from pathlib import Path

import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from model.load import loader
from model.tiny import CHECKPOINT_DIR


def anonymous_bytes():
    """Memory of this process that is no file's."""
    with Path("/proc/self/status").open() as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def keep_all():
    """A planted bug: a copy of each weight is never freed."""
    kept, convert = [], Fp8Dequantize.convert

    def converted(self, read, **named):
        weights = convert(self, read, **named)
        kept.extend(weight.clone() for weight in weights.values())
        return weights

    Fp8Dequantize.convert = converted


def main():
    cpu = torch.device("cpu")
    loader.load_model(str(CHECKPOINT_DIR), cpu)  # imports what reads one
    if len(sys.argv) > 2:
        keep_all()
    before = anonymous_bytes()
    network = loader.load_model(sys.argv[1], cpu).network
    taken = anonymous_bytes() - before
    tensors = [*network.parameters(), *network.buffers()]
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    sys.stdout.write(f"{taken} {sum(storages.values())}\n")


if __name__ == "__main__":
    main()
