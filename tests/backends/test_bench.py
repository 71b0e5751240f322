"""The benchmark measures what it says, in turns, and reports it in both forms."""

import json
import subprocess
import sys

import pytest
import torch

import backends
from backends.bench.cpu import DENSE, GATHER
from backends.bench.gpu import decode_cases
from backends.bench.host import PREFILL
from backends.bench.measured import DecodeCase, ragged, row_of
from backends.bench.prefill import CASES
from backends.contract import Capabilities


def _bench(*arguments):
    command = [sys.executable, "-m", "backends.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_quick_run_reports_every_case_against_its_yardsticks():
    done = _bench("--backend", "numba", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == "numba"
    rows = {row["case"]: row for row in report["rows"]}
    assert rows.keys() == {
        "decode 4 x 256, 32/8 heads d64, float32",
        "prefill 128 of 1 x 128, 32/8 heads d128, float32",
        "prefill 128 of 1 x 128, 32/8 heads d128, bfloat16",
        "store_kv, 256 tokens, bf16",
        "copy_blocks, 16 blocks, bf16",
    }
    for row in rows.values():
        assert 0 < row["low_us"] <= row["median_us"] <= row["high_us"]
        assert row["gb_per_s"] > 0
        assert row["ratios"].keys() == row["others_us"].keys() != set()
    assert rows["decode 4 x 256, 32/8 heads d64, float32"]["ratios"].keys() == {GATHER, DENSE}


def test_an_unknown_backend_is_one_line_and_exit_code_2():
    done = _bench("--backend", "numbs")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "did you mean 'numba'" in done.stderr


def test_bytes_and_bandwidth_by_hand():
    case = DecodeCase(8, 2048, dtype=torch.float32)
    assert case.kv_bytes == 2 * 8 * 2048 * 8 * 128 * 4
    latents = DecodeCase(8, 2048, 16, 1, head_dim=576, value_dim=512)
    assert latents.kv_bytes == 8 * 2048 * 576 * 2
    assert latents.flop == 2 * 8 * 2048 * 16 * (576 + 512)
    assert "16 heads over latents of 512 + 64" in latents.name
    assert latents.inputs(torch.device("cpu"))[1].layout == latents.layout
    row = row_of("x", [3.0, 1.0, 2.0], 4000, {}, {})
    assert (row.median_us, row.low_us, row.high_us, row.gb_per_s) == (2.0, 1.0, 3.0, 2.0)


def test_a_mixed_step_counts_each_sequence_and_lays_it_out():
    case = DecodeCase(2, 40, 4, 2, 16, others=((8, 20),), what="mixed")
    assert case.name == "mixed, 4/2 heads d16, bfloat16"
    assert case.kv_bytes == 2 * (40 + 40 + 20) * 2 * 16 * 2
    assert case.flop == 4 * (40 + 40 + 8 * 12 + 36) * 4 * 16
    query, cache, batch = case.inputs(torch.device("cpu"))
    assert batch.query_start_loc.tolist() == [0, 1, 2, 10]
    assert batch.seq_lens.tolist() == [40, 40, 20]
    assert (len(query), batch.max_query_len, batch.max_seq_len) == (10, 8, 40)
    blocks = sorted(batch.block_table.flatten().tolist())
    assert blocks == [0, *range(1, len(cache.k))]  # the third sequence has two of three


def test_ragged_lengths_are_the_same_in_every_run():
    first, again = ragged(9, 30, 5000, 700), ragged(9, 30, 5000, 700)
    assert first == again
    assert len(first.seqs) == 9
    assert all(30 <= length <= 5000 for _, length in first.seqs)


def test_a_gpu_is_timed_on_every_family():
    can = Capabilities((torch.bfloat16,), 256, 64, frozenset(), (torch.float8_e4m3fn,), None, 576)
    decode = {case.name for case in decode_cases(can)}
    assert len(decode) == len(decode_cases(can))
    ragged_48 = "ragged decode, 48 of 200 to 9000"
    assert decode >= {
        f"{what}, bfloat16{cache}"
        for what in (f"{ragged_48}, 32/8 heads d128", f"{ragged_48}, 28/4 heads d128")
        for cache in ("", " over float8_e4m3fn")
    }
    assert "decode 64 x 4096, 32/8 heads d128, bfloat16 over float8_e4m3fn" in decode
    latents = "decode 64 x 4096, 16 heads over latents of 512 + 64, bfloat16"
    assert {latents, f"{latents} over float8_e4m3fn"} <= decode
    assert len({case.name for case in CASES}) == len(CASES)
    prompts = next(case for case in CASES if case.what.startswith("16 prompts"))
    assert sorted(prompts.seqs) == [(length, length) for length in range(100, 4001, 260)]
    on_the_host = {case.seqs for case in PREFILL}
    assert on_the_host >= {((2048, 2048),), ((32, 8192),), ((256, 256),) * 16}


@pytest.mark.parametrize("new", [1, 5])
def test_what_is_compared_computes_the_same(new):
    case = DecodeCase(2, 40, num_q_heads=4, num_kv_heads=2, head_dim=16, new=new)
    query, cache, batch = case.inputs(torch.device("cpu"))
    terms = backends.AttentionTerms(0.25)
    ours = backends.get_backend("numba").paged_attention(query, cache, batch, terms)
    table = batch.block_table.long()
    k, v = (each[table].flatten(1, 2)[:, :40].transpose(1, 2) for each in cache.tensors)
    rows = query.view(2, new, 4, 16).transpose(1, 2)
    mask = torch.ones(new, 40, dtype=torch.bool).tril(40 - new)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        rows.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True
    )
    assert torch.allclose(ours.float().view(2, new, 4, 16), theirs.transpose(1, 2), atol=2e-2)
