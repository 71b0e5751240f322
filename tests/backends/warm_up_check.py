"""After a warm-up no call needs a variant that has not been met: random batches; by test_triton.

In Triton's interpreter, which counts variants and compiles nothing.
"""

import random
import sys

import torch

import backends
from backends import LayerCall
from backends.conformance import AttentionCase
from backends.conformance.cases import bits, build
from backends.triton_gpu import cascade, copy_blocks, decode, merge, slot_mapping, store_kv
from backends.triton_gpu.warm_up import batch_sizes

MAX_NUM_SEQS, MAX_QUERY_LEN = 40, 6
TRITON = backends.get_backend("triton")
CASE = AttentionCase("", (), num_kv_heads=1, group=2, head_dim=16, dtype=torch.float16)


def compiled():
    """Every variant of our kernels but prefill's that this process has used so far."""
    launchers = (
        cascade._attend_prefix, copy_blocks._copy, decode._attend_chunk, merge._merge_parts,
        slot_mapping._fill, store_kv._scatter,
    )  # fmt: skip
    return frozenset((i, key) for i, each in enumerate(launchers) for key in each.compiled())


def layer_of(inputs):
    return LayerCall(2, torch.float16, inputs.cache, inputs.terms, shared_prefix=True)


def random_case(draw):
    count = draw.choice((1, 2, 15, 16, 17, 40))
    shared = 32 * draw.randint(0, 1)
    most = draw.choice((1, 1, 4)) if not shared else 1
    seqs = tuple((draw.randint(1, most), draw.randint(shared + 5, 50)) for _ in range(count))
    if count < 3:
        seqs += ((draw.randint(1, MAX_QUERY_LEN), 42),)
    return CASE.with_(seqs=seqs, shared=shared)


def main():
    assert batch_sizes(1) == [1]
    assert batch_sizes(40) == [1, 2, 16, 17, 40]
    assert batch_sizes(5000) == [1, 2, 16, 17, 64, 65, 256, 257, 1024, 1025]
    cascade.WORTH_BYTES = cascade.WORTH_BYTES_A_SEQUENCE = cascade.FEWEST = 0
    inputs = build(CASE.with_(seqs=((1, 20), (2, 30))), torch.device("cpu"))
    before = [bits(tensor) for tensor in inputs.cache.tensors]
    TRITON.warmup([layer_of(inputs)], max_num_seqs=MAX_NUM_SEQS, max_query_len=MAX_QUERY_LEN)
    for tensor, then in zip(inputs.cache.tensors, before, strict=True):
        assert torch.equal(bits(tensor), then)
    known = compiled()
    draw = random.Random(1)
    for _ in range(6):
        step = build(random_case(draw), torch.device("cpu"))
        step.run(TRITON)
        rows = torch.zeros(3, 1, 16, dtype=torch.float16)
        slots = torch.tensor([1, -1, 9])
        TRITON.store_kv(rows, rows, step.cache, slots)
        TRITON.compute_slot_mapping(
            step.batch.query_start_loc, step.batch.seq_lens, step.batch.block_table, 16,
            torch.empty(step.query.shape[0], dtype=torch.int64),
        )  # fmt: skip
        TRITON.copy_blocks(step.cache.tensors, torch.tensor([[1, 2]]))
        assert compiled() == known, compiled() - known
    step = build(CASE.with_(seqs=((1, 9),), window=5), torch.device("cpu"))
    step.run(TRITON)
    assert compiled() > known  # a window that the warm-up was not told of
    sys.stdout.write("nothing is left to compile\n")


if __name__ == "__main__":
    main()
