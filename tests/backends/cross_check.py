"""Compare triton with numba and the oracle on random small batches; run by test_triton.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
Usage: python -m tests.backends.cross_check MAX_EXAMPLES
"""

import sys
import warnings

import torch
from hypothesis import Phase, given, settings

import backends
from backends.conformance.attention import check_attention
from backends.conformance.cases import build
from tests.backends.strategies import attention_cases

TRITON = backends.get_backend("triton")
NUMBA = backends.get_backend("numba")
CASES = attention_cases(
    (torch.float16, torch.float32),
    quantised=(torch.float8_e4m3fn,),
    longest=70,
    most_seqs=3,
    head_dims=(4, 16, 24),
)


@given(CASES)
@settings(
    max_examples=int(sys.argv[1]),
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking takes minutes here
)
def compare(case):
    for finding in check_attention(TRITON, case):
        assert finding.passed, finding
    inputs = build(case, TRITON.device)
    live = int(inputs.batch.query_start_loc[-1])
    ours, theirs = inputs.run(TRITON)[:live].clone(), inputs.run(NUMBA)[:live]
    distance = (ours.double() - theirs.double()).norm(dim=-1)
    assert (distance <= 2 * inputs.expected().allowed[:live]).all(), case


def compare_stored():
    """The same bytes, of any float and any scale."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 31), 1 << 31, (40, 3, 24), generator=generator).int()
    spread = 2.0 ** torch.randint(-10, 9, (40, 3, 24), generator=generator)
    rows = torch.cat([words.view(torch.float32), spread * torch.rand(40, 3, 24) - spread / 2])
    scales = torch.tensor([0.3, 1.0, 17.7])
    slots = torch.randperm(100, generator=generator)[:80]
    caches = []
    for backend in (TRITON, NUMBA):
        pair = [torch.zeros(25, 4, 3, 24, dtype=torch.float8_e4m3fn) for _ in range(2)]
        backend.store_kv(rows, rows.flip(0), backends.KVCache(*pair, scales, scales[:1]), slots)
        caches.append(torch.stack([cache.view(torch.uint8) for cache in pair]))
    assert torch.equal(caches[0], caches[1])
    assert len(caches[0].unique()) > 200


if __name__ == "__main__":
    compare()
    with warnings.catch_warnings(action="ignore"):  # numpy's, of infinities
        compare_stored()
    sys.stdout.write("triton and numba agree\n")
