"""Four and eight processes: the tokens of one, with everything that an engine has at once."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

import tests.model.many_gpus
from model.ranks.parallel import shard_network
from model.ranks.ranks import Ranks
from tests.model.ranks import cut_networks
from tests.model.ranks.cut_networks import KINDS, are_all_used
from tests.model.ranks.test_ranks import _MAIN, Ranked


def run(forks, size, *arguments):
    ended = Ranked(forks, size, [_MAIN, *arguments]).end()
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_beyond_the_kv_heads_have_the_head_that_their_queries_read(size):
    whole = cut_networks.load("repeated heads", torch.device("cpu"), None).network
    for rank in range(size):
        own = copy.deepcopy(whole)
        shard_network(own, Ranks(rank, size, None, None), SimpleNamespace(group=""))
        for part, all_heads in zip(own.model.layers, whole.model.layers, strict=True):
            key, every = part.self_attn.k_proj.weight, all_heads.self_attn.k_proj.weight
            assert torch.equal(key, every.view(2, 16, -1)[rank * 2 // size])
            assert part.self_attn.num_key_value_groups == (4 if size == 2 else 8 // size)
            queries = all_heads.self_attn.q_proj.weight.chunk(size)[rank]
            assert torch.equal(part.self_attn.q_proj.weight, queries)


@pytest.mark.slow
def test_four_ranks_of_two_kv_heads_write_what_one_process_writes(forks):
    [found] = run(forks, 4, "many", "repeated heads").values()
    assert are_all_used(found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "kinds"),
    [(4, KINDS[1:]), (8, KINDS)],
)
def test_many_ranks_write_what_one_process_writes(forks, size, kinds):
    for kind, found in run(forks, size, "many", *kinds).items():
        assert are_all_used(found), (kind, found)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_experts_that_stay_whole_on_one_of_many_ranks_give_the_tokens_of_one(forks, size):
    for kind, found in run(forks, size, "many-experts", "experts", "latents").items():
        assert are_all_used(found), (kind, found)


@pytest.mark.slow
def test_a_rank_that_has_the_part_of_another_one_is_seen(forks):
    [found] = run(forks, 4, "many", "planted").values()
    assert found["equal"] < found["of"]


def test_the_script_for_many_gpus_runs_every_part_on_all_and_speed_on_one_too():
    for gpus in (2, 4, 8):
        parts = [part for each in tests.model.many_gpus.plan(gpus, ()) for part in each]
        assert {part.name for part in parts if part.size == gpus} >= {
            "sums", "tokens", "decode", "experts", "loss",
        }  # fmt: skip
        assert all(part.first + part.size <= gpus for part in parts)
    [[alone, pair], [every]] = tests.model.many_gpus.plan(4, ["decode"])
    assert [alone.size, pair.size, every.size] == [1, 2, 4]
