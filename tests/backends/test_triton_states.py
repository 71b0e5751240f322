"""Operations on states on a GPU: every case of the kit, CUDA graphs, and no compiling after one."""

import pytest
import torch

import backends
from backends import LinearAttentionTerms, StateBatch
from backends.conformance.cases import bits
from backends.conformance.states import (
    LAYERS,
    MODES,
    StateCase,
    build,
    check_states,
    state_cases,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

HALF = {"dtype": torch.bfloat16, "pages": "aligned"}
CASES = (
    StateCase("conv", "conv", MODES, (3, 8192), state_dtype=torch.bfloat16, **HALF),
    StateCase("delta", "delta", MODES, (128, 128), 32, 16, **HALF),
    StateCase("gated", "delta", MODES, (128, 128), 32, 16, options=False, **HALF),
    StateCase("KDA", "KDA", MODES, (128, 128), 32, 32, **HALF),
    StateCase("mamba", "mamba", MODES, (128, 64), 64, 8, **HALF),
)


@pytest.fixture(scope="module")
def triton():
    return backends.get_backend("triton")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("share", range(3))  # processes share them: most of the time is compiling
def test_on_a_gpu_states_pass_the_kit(triton, layer, dtype, share):
    cases = [
        case
        for case in state_cases(triton, quick=False)
        if case.layer == layer and case.dtype == dtype
        and case.state_dtype in (dtype, torch.float32)
    ][share::3]  # fmt: skip
    assert len(cases) > 3
    failed = [f for case in cases for f in check_states(triton, case) if not f.passed]
    assert not failed, failed[:20]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_captured_step_reads_and_writes_the_slots_of_its_replay(triton, case):
    """Captured on slots that read and write nothing; replayed on the case's, in two layouts."""
    inputs, eager = build(case, triton.device), build(case, triton.device)
    reads, writes = inputs.batch.read_slots.clone(), inputs.batch.write_slots.clone()
    before, untouched = inputs.memory.clone(), bits(inputs.memory)
    inputs.batch.read_slots.fill_(-1)
    inputs.batch.write_slots.fill_(-1)
    inputs.run(triton)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.run(triton)
    graph.replay()
    assert torch.equal(bits(inputs.memory), untouched)
    eager.run(triton)
    for _ in range(2):
        inputs.memory.copy_(before)
        inputs.batch.read_slots.copy_(reads)
        inputs.batch.write_slots.copy_(writes)
        graph.replay()
        assert torch.equal(bits(inputs.out), bits(eager.out))
        assert torch.equal(bits(inputs.memory), bits(eager.memory))


def test_slots_past_2_to_the_31_elements(triton):
    state = torch.zeros((5000, 32, 128, 128), device="cuda", dtype=torch.float32)
    assert state.numel() > 1 << 31
    rows = [torch.randn(2, heads, 128, device="cuda") for heads in (16, 16, 32)]
    decay, beta = -torch.rand(2, 32, device="cuda"), torch.rand(2, 32, device="cuda")
    near = torch.zeros((2, 32, 128, 128), device="cuda")
    terms, outs = LinearAttentionTerms(0.1, delta_rule=True, l2norm=True), []
    for each, slots in ((state, (4999, 4200)), (near, (0, 1))):
        where = torch.tensor(slots, dtype=torch.int32, device="cuda")
        for _ in range(2):
            batch = StateBatch(where, where)
            out = triton.linear_attention_step(*rows, decay, beta, each, batch, terms)
        outs.append(out)
    assert torch.equal(*outs)
    assert torch.equal(state[[4999, 4200]], near)
    assert near.any()
