"""The kernels that add up over GPUs, interpreted: each GPU's sum is that of all parts."""

import json

import torch

from model.ranks import sum_kernels


def run(interpreting, *arguments):
    ended = interpreting.run("-m", "tests.model.ranks.sums_main", *arguments)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


def test_every_gpu_has_the_sum_of_all_parts_whatever_came_before(interpreting):
    assert run(interpreting) == {"wrong": [], "of": 12}


def test_a_gpu_that_writes_where_another_one_does_is_seen(interpreting):
    assert len(run(interpreting, "planted")["wrong"]) == 12


def test_parts_that_no_line_fits_are_added_up_by_nccl():
    fits = torch.zeros(64, dtype=torch.bfloat16)
    assert sum_kernels.takes(fits, 4)
    assert not sum_kernels.takes(fits[:60], 4)  # three lines and a half for each GPU
    assert not sum_kernels.takes(fits[1:33], 4)  # no address of 16 bytes
    assert not sum_kernels.takes(fits.double(), 4)
    assert not sum_kernels.takes(fits[:0], 4)
    large = torch.empty(sum_kernels.MOST_BYTES // 2 + 64, dtype=torch.bfloat16)
    assert not sum_kernels.takes(large, 4)
