"""What test_sums.py runs, with Triton's interpreter: the kernels of all GPUs in one process.

No GPU waits here. The kernels run three times with the same number: the first messages are there in
the second run, and the second ones in the third. A line with another number counts as nothing.
"""

import itertools
import json
import sys

import torch
import triton
import triton.language as tl

from model.ranks import sum_kernels


@triton.jit
def _read_lines(first, second, number):
    a, b, c, d = tl.load(first), tl.load(first + 1), tl.load(second), tl.load(second + 1)
    wanted = number.to(tl.int64)
    return (
        tl.where((a >> 32) == wanted, a, 0).to(tl.int32),
        tl.where((b >> 32) == wanted, b, 0).to(tl.int32),
        tl.where((c >> 32) == wanted, c, 0).to(tl.int32),
        tl.where((d >> 32) == wanted, d, 0).to(tl.int32),
    )


def add_up(memory, parts):
    """The sum of parts as each GPU has it."""
    before = [one.clone()[: sum_kernels._HEAD] for one in memory]
    for run in range(3):
        for shared, head in zip(memory, before, strict=True):
            if run:
                shared[: len(head)] = head
        found = [
            sum_kernels.add_up(part, shared, rank, len(parts))
            for rank, (part, shared) in enumerate(zip(parts, memory, strict=True))
        ]
    return found


def main():
    sum_kernels._wait_for_lines = _read_lines
    sum_kernels.MOST_BYTES = 1 << 15
    wrong, count = [], 0
    draw = torch.Generator().manual_seed(3)
    kinds = {2: torch.bfloat16, 4: torch.float32, 8: torch.float16}
    for size, dtype in kinds.items():
        memory = [torch.zeros(sum_kernels.shared_words(), dtype=torch.int64) for _ in range(size)]
        for shared in memory:
            shared[:size] = torch.tensor([one.data_ptr() for one in memory])
        for length, once in itertools.product((64, 1600), (0, 1 << 30)):
            sum_kernels._ONCE_BYTES = once
            parts = [torch.randn(length, generator=draw).to(dtype) for _ in range(size)]
            wanted = sum(part.float() for part in parts).to(dtype)
            first, *others = add_up(memory, parts)
            count += 1
            is_right = torch.equal(first, wanted)
            if dtype == torch.bfloat16:  # which the interpreter cuts off, and does not round
                is_right = torch.allclose(first, wanted, rtol=2**-7)
            if not is_right or not all(torch.equal(one, first) for one in others):
                wrong.append([size, length, once])
    sys.stdout.write(json.dumps({"wrong": wrong, "of": count}))


if __name__ == "__main__":
    if sys.argv[1:] == ["planted"]:
        run = sum_kernels.add_up
        sum_kernels.add_up = lambda part, shared, rank, size: run(part, shared, rank // 2, size)
    main()
