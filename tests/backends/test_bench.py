"""The kernels' benchmark measures what it says, on a CPU and on every family of a GPU's cases."""

import json

import torch

import backends
from tests.bench.kernels.cases import DecodeCase
from tests.bench.kernels.gpu import decode_cases
from tests.kvcore.test_bench import run


def test_the_kernels_of_a_cpu_are_measured_beside_their_yardsticks():
    code, out, errors = run("kernels", "--backend", "numba", "--quick", "--json")
    assert code == 0, errors
    rows = json.loads(out)["rows"]
    assert [row["group"] for row in rows] == [
        "decode",
        "prefill",
        "prefill",
        "movement",
        "movement",
    ]
    assert all(row["ratios"] and row["rates"]["GB/s"] > 0 for row in rows)
    code, _, errors = run("kernels", "--backend", "numbs")
    assert (code, errors.count("\n")) == (2, 1)
    assert "did you mean 'numba'" in errors


def test_a_mixed_step_counts_each_sequence_and_lays_it_out():
    case = DecodeCase(2, 40, 4, 2, 16, others=((8, 20),), what="mixed")
    assert case.name == "mixed, 4/2 heads d16, bfloat16"
    assert case.kv_bytes == 2 * (40 + 40 + 20) * 2 * 16 * 2
    assert case.flop == 4 * (40 + 40 + 8 * 12 + 36) * 4 * 16
    query, cache, batch = case.inputs(torch.device("cpu"))
    assert batch.query_start_loc.tolist() == [0, 1, 2, 10]
    assert batch.seq_lens.tolist() == [40, 40, 20]
    blocks = sorted(batch.block_table.flatten().tolist())
    assert blocks == [0, *range(1, len(cache.k))]  # the third sequence has two of three
    assert len(query) == 10


def test_a_gpu_is_timed_on_every_family_once():
    quantised = (torch.float8_e4m3fn,)
    can = backends.Capabilities((torch.bfloat16,), 256, 64, frozenset(), quantised, None, 576)
    names = [case.name for case in decode_cases(can)]
    assert len(set(names)) == len(names)
    for what in ("decode 64 x 4096, 32/8 heads d128", "decode 64 x 4096, 16 heads over latents"):
        assert sum(name.startswith(what) for name in names) >= 1
        assert any(name.startswith(what) and name.endswith("float8_e4m3fn") for name in names)
