"""Compare triton with numba and the oracle on random small batches; run by test_triton.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
Usage: python -m tests.backends.cross_check MAX_EXAMPLES
"""

import sys

import torch
from hypothesis import Phase, given, settings

import backends
from backends import oracle
from backends.conformance.attention import check_attention
from backends.conformance.cases import build
from tests.backends.strategies import attention_cases

TRITON = backends.get_backend("triton")
NUMBA = backends.get_backend("numba")
CASES = attention_cases(
    (torch.float16, torch.float32), longest=70, most_seqs=3, head_dims=(4, 16, 24)
)


def allowed(inputs):
    return oracle.attention(
        inputs.query,
        inputs.k_cache,
        inputs.v_cache,
        inputs.batch,
        scale=inputs.scale,
        window=inputs.window,
        soft_cap=inputs.soft_cap,
        sinks=inputs.sinks,
    ).allowed


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
    assert (distance <= 2 * allowed(inputs)[:live]).all(), case


if __name__ == "__main__":
    compare()
    sys.stdout.write("triton and numba agree\n")
