"""The cases that vary everything at once meet in pairs, over long contexts too, and catch bugs."""

import itertools

import pytest
import torch

import backends
from backends.conformance import spread
from backends.conformance.attention import attention_cases, check_attention
from backends.contract import Capabilities
from tests.backends.honest import HonestBackend

CAN = Capabilities(
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    max_head_dim=256,
    max_group_size=16,
    quantised=(torch.float8_e4m3fn,),
    max_latent_dim=576,
)
ON_A_GPU = tuple(spread.spread_cases(CAN, 1 << 30))
KINDS = (None, torch.float8_e4m3fn)


def sizes(case):
    """What was spread, by name, without what a limit may have cut."""
    named = (("query", case.seqs[0][0]), ("group", case.group), ("head", case.head_dim))
    return (*named, ("block", case.block_size))


@pytest.mark.parametrize("kind", KINDS)
def test_every_size_meets_every_other(kind):
    pairs = {
        pair
        for case in ON_A_GPU
        if case.cache_dtype == kind and not case.value_dim
        for pair in itertools.combinations(sizes(case), 2)
    }
    lists = {
        "query": spread.QUERY_LENS,
        "group": spread.GROUPS,
        "head": spread.HEAD_DIMS,
        "block": spread.BLOCK_SIZES,
    }
    named = [[(name, size) for size in values] for name, values in lists.items()]
    wanted = {
        pair
        for some, others in itertools.combinations(named, 2)
        for pair in itertools.product(some, others)
    }
    assert pairs == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_every_size_meets_a_long_context_every_dtype_and_every_company(kind):
    some = [case for case in ON_A_GPU if case.cache_dtype == kind and not case.value_dim]
    every = {size for case in some for size in sizes(case)}
    assert {size for case in some if case.seqs[0][1] > 16000 for size in sizes(case)} == every
    for dtype in CAN.dtypes:
        assert {size for case in some if case.dtype == dtype for size in sizes(case)} == every
    kinds = {len(case.seqs) for case in some}
    assert kinds == {1, 2, 7, 21}
    for count in kinds:
        assert {size for case in some if len(case.seqs) == count for size in sizes(case)} == every


@pytest.mark.parametrize("kind", KINDS)
def test_latents_meet_in_pairs_too_and_over_long_contexts(kind):
    some = [case for case in ON_A_GPU if case.cache_dtype == kind and case.value_dim]
    lists = (spread.LATENT_QUERY_LENS, spread.LATENT_HEADS, spread.LATENT_BLOCKS)
    met = [(case.seqs[0][0], case.group, case.block_size) for case in some]
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(sizes[one], sizes[other]) for sizes in met}
        assert pairs == set(itertools.product(lists[one], lists[other]))
    assert max(case.seqs[0][1] for case in some) > 16000


@pytest.mark.parametrize("largest", [1 << 20, 1 << 25, 1 << 30])
def test_no_case_costs_much_more_than_it_may_and_each_has_a_name_of_its_own(largest):
    cases = list(spread.spread_cases(CAN, largest))
    for case in cases:
        count, length = case.seqs[0]
        a_key = case.with_(seqs=((count, 1),)).cost
        assert a_key * (length - count) <= max(2 * largest, 40 * a_key)
    assert len({case.name for case in cases}) == len(cases)


class ForgetsWhatLiesFarBack(HonestBackend):
    def seen(self, position, window, block_size):
        first, last = super().seen(position, window, block_size)
        return max(first, position - 30_000), last


class KnowsSmallBlocksAlone(HonestBackend):
    def gather(self, cache, table, first, last):
        if cache.shape[1] > 32 and last > 2000:
            last = max(first, last - 1)
        return super().gather(cache, table, first, last)


@pytest.mark.parametrize("bug", [ForgetsWhatLiesFarBack, KnowsSmallBlocksAlone])
def test_a_bug_over_long_contexts_is_caught(bug):
    backend = bug()
    cases = [
        case
        for case in spread.spread_cases(backend.capabilities, 1 << 27)
        if case.seqs[0][0] == 1 and not case.value_dim and case.window is None
    ]
    if bug is KnowsSmallBlocksAlone:
        cases = [case for case in cases if case.block_size > 32]
    longest = max(cases, key=lambda case: case.seqs[0][1])
    failed = {f.check for f in check_attention(backend, longest) if not f.passed}
    assert failed == {"accuracy"}
    assert all(finding.passed for finding in check_attention(HonestBackend(), longest))


def test_the_kit_has_them_and_its_quick_part_has_not():
    numba = backends.get_backend("numba")
    names = [{case.name for case in attention_cases(numba, quick=quick)} for quick in (False, True)]
    own = {case.name for case in spread.spread_cases(numba.capabilities, 1 << 25)}
    assert own <= names[0]
    assert not own & names[1]
