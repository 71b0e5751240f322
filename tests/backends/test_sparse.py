"""Sparse attention: the kit catches planted bugs; the CPU backend conforms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from backends import (
    AttentionTerms,
    Capabilities,
    InvalidArgumentError,
    KVCache,
    PagedBatch,
    UnsupportedError,
    sparse_oracle,
)
from backends import sparse as contract
from backends.conformance.cases import AttentionCase
from backends.conformance.sparse import SparseCase, build_sparse, check_sparse
from backends.conformance.sparse import sparse_cases as kit_cases
from tests.backends.honest import HonestBackend

NUMBA = backends.get_backend("numba")
CPU = torch.device("cpu")
SMALL = SparseCase(
    AttentionCase(
        "", ((1, 9), (2, 40)), num_kv_heads=1, head_dim=24, value_dim=16, block_size=4, padding=1
    )
)


class HonestSparse(HonestBackend):
    """Operations of sparse attention in plain torch, to be broken in one place at a time."""

    capabilities = Capabilities(
        dtypes=(torch.float32,), max_head_dim=64, max_group_size=64, max_latent_dim=64,
        max_index_dim=64, max_chosen=100, features=frozenset({"sinks"}),
    )  # fmt: skip

    def score_index(self, query, weights, cache, batch, first_row, out):
        for t, (s, length) in enumerate(sparse_oracle.rows_of(batch)):
            if first_row <= t < first_row + len(out):
                keys = self.of_seq(cache.k, batch, s, self.scored(length))[:, 0]
                scores = weights[t] @ self.positive(query[t] @ keys.T)
                out[t - first_row, : len(scores)] = scores

    def choose_tokens(self, scores, batch, first_row, out):
        for t, (_, length) in enumerate(sparse_oracle.rows_of(batch)):
            if first_row <= t < first_row + len(out):
                order = self.ranked(scores[t - first_row, :length])
                best = order[: out.shape[1]].sort().values
                out[t - first_row] = self.padding(out[t - first_row])
                out[t - first_row, : len(best)] = best

    def attend_chosen(self, query, cache, batch, chosen, terms, *, out=None):
        for t, (s, length) in enumerate(sparse_oracle.rows_of(batch)):
            at = chosen[t, : min(chosen.shape[1], length)].long()
            rows = [
                self.of_seq(each, batch, s, length)[self.attended(at)] for each in cache.tensors
            ]
            one = cache.layout.over([each[:, None] for each in rows])
            n, last = len(rows[0]), torch.tensor([-1])
            table = torch.arange(n, dtype=torch.int32)[None]
            starts, lengths = (torch.tensor(i, dtype=torch.int32) for i in ([0, 1], [n]))
            alone = PagedBatch(starts, lengths, table, last, 1, n)
            out[t : t + 1] = self.paged_attention(query[t : t + 1], one, alone, terms)
        return out

    def of_seq(self, cache, batch, s, length):
        at = torch.arange(length)
        return cache[batch.block_table[s, at // cache.shape[1]].long(), at % cache.shape[1]]

    def scored(self, length):
        return length

    def positive(self, dots):
        return dots.clamp(min=0)

    def ranked(self, scores):
        return torch.sort(scores, descending=True, stable=True).indices

    def padding(self, row):
        return torch.full_like(row, -1)

    def attended(self, at):
        return at


class ForgetsTheReLU(HonestSparse):
    def positive(self, dots):
        return dots


class ScoresATokenOfTheFuture(HonestSparse):
    def scored(self, length):
        return length + 1


class ScoresAllButTheTokenItself(HonestSparse):
    def scored(self, length):
        return max(1, length - 1)


class TakesLaterOnesOfEquals(HonestSparse):
    def ranked(self, scores):
        return len(scores) - 1 - super().ranked(scores.flip(0))


class CountsMinusZeroAsLess(HonestSparse):
    def ranked(self, scores):
        below = torch.nextafter(torch.tensor(0.0), torch.tensor(-1.0))
        return super().ranked(torch.where(scores.signbit() & (scores == 0), below, scores))


class TakesTheLowest(HonestSparse):
    def ranked(self, scores):
        return super().ranked(-scores)


class LeavesThePaddingAsItIs(HonestSparse):
    def padding(self, row):
        return row.clone()


class AttendsToOneLess(HonestSparse):
    def attended(self, at):
        return at[:-1] if len(at) > 1 else at


class AttendsToTheFirstTokens(HonestSparse):
    def attended(self, at):
        return torch.arange(len(at))


SABOTAGE = {
    ForgetsTheReLU: "scores",
    ScoresATokenOfTheFuture: "untouched scores",
    ScoresAllButTheTokenItself: "scores",
    TakesLaterOnesOfEquals: "choice of equals",
    CountsMinusZeroAsLess: "choice of equals",
    TakesTheLowest: "choice",
    LeavesThePaddingAsItIs: "choice",
    AttendsToOneLess: "attention",
    AttendsToTheFirstTokens: "poison",
}


def failed_checks(backend):
    found = set()
    for case in kit_cases(backend, quick=True):
        try:
            found |= {each.check for each in check_sparse(backend, case) if not each.passed}
        except IndexError:  # of a bug that reads past a table
            found.add("raised")
    return found


def test_an_honest_backend_passes():
    assert failed_checks(HonestSparse()) == set()


@pytest.mark.parametrize("bug", SABOTAGE, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught_by_name(bug):
    assert SABOTAGE[bug] in failed_checks(bug())


@settings(max_examples=30)
@given(st.data())
def test_random_batches_match_the_oracle(data):
    draw = data.draw
    value_dim = draw(st.sampled_from((0, 16)))
    lengths = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    case = SMALL.with_(
        seqs=tuple((draw(st.integers(0, min(9, n))), n) for n in lengths),
        value_dim=value_dim,
        num_kv_heads=1 if value_dim else draw(st.integers(1, 2)),
        block_size=draw(st.sampled_from((1, 3, 8, 16))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        sinks=draw(st.booleans()),
        strided=draw(st.booleans()),
        count=draw(st.integers(1, 100)),
        num_heads=draw(st.integers(1, 9)),
        index_dim=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**20)),
    )
    for finding in check_sparse(NUMBA, case):
        assert finding.passed, finding


def test_the_rows_of_a_step_may_be_scored_a_few_at_a_time(monkeypatch):
    inputs = build_sparse(SMALL.with_(seqs=((20, 30), (1, 90)), padding=0), CPU)
    call = (inputs.query, inputs.weights, inputs.cache, inputs.attention.batch, 5)
    whole = backends.choose(NUMBA, *call)
    assert torch.equal(whole, inputs.choose(NUMBA, inputs.score(NUMBA), 5))
    monkeypatch.setattr(contract, "SCORE_BYTES", 3 * 4 * 1024)
    assert torch.equal(backends.choose(NUMBA, *call), whole)


def test_every_number_of_threads_gives_the_same_bits(monkeypatch):
    results = []
    for width in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda width=width: width)
        inputs = build_sparse(SMALL.with_(seqs=((40, 900), (1, 2000)), num_heads=16), CPU)
        scores = inputs.score(NUMBA)
        results.append((scores, inputs.choose(NUMBA, scores, 6)))
    for scores, chosen in results[1:]:
        assert torch.equal(scores, results[0][0])
        assert torch.equal(chosen, results[0][1])


def test_a_cache_in_pages_of_any_size_is_seen_by_slot():
    pages = torch.arange(6 * 1000.0).view(6, 1000)
    rows = pages[:, : 4 * 24].view(6, 4, 1, 24)
    seen, first, second = contract.by_slot(KVCache(rows, rows[..., :16], is_latent=True))
    for block in range(6):
        for offset in range(4):
            assert torch.equal(seen.k[block * first + offset * second, 0], rows[block, offset])


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"query": lambda q: q.double()}, InvalidArgumentError, "query: wanted torch.float32"),
        ({"weights": lambda w: w[:, :1]}, InvalidArgumentError, r"weights: wanted shape"),
        ({"first_row": lambda _: 1}, InvalidArgumentError, "first_row: wanted 0 .. 0, for 4 rows"),
        ({"out": lambda out: out[:, :8]}, InvalidArgumentError, "at least 40"),
        ({"cache": lambda c: KVCache(c.k, c.v)}, UnsupportedError, "all of them values"),
    ],
)
def test_what_breaks_the_contract_of_scores_is_refused(change, error, reason):
    inputs = build_sparse(SMALL, CPU)
    call = {
        "query": inputs.query, "weights": inputs.weights, "cache": inputs.cache,
        "batch": inputs.attention.batch, "first_row": 0, "out": inputs.scores,
    }  # fmt: skip
    NUMBA.score_index(**call)
    for name, changed in change.items():
        call[name] = changed(call[name])
    with pytest.raises(error, match=reason):
        NUMBA.score_index(**call)


def test_what_breaks_the_contract_of_chosen_tokens_is_refused():
    inputs = build_sparse(SMALL, CPU)
    one = inputs.attention
    chosen = inputs.choose(NUMBA, inputs.score(NUMBA), 6)
    call = (one.query, one.cache, one.batch)
    window = AttentionTerms(1.0, window=3)
    with pytest.raises(UnsupportedError, match=r"terms.window: wanted None beside chosen"):
        NUMBA.attend_chosen(*call, chosen, window)
    with pytest.raises(UnsupportedError, match="without gaps"):
        NUMBA.attend_chosen(*call, chosen[:, :3], one.terms)
    for wrong in (-1, 9, 1 << 30):
        broken = chosen.clone()
        broken[0, 2] = wrong
        with pytest.raises(InvalidArgumentError, match=rf"chosen\[0\].*position {wrong}"):
            NUMBA.attend_chosen(*call, broken, one.terms)
    with pytest.raises(UnsupportedError, match="positions a row"):
        NUMBA.choose_tokens(inputs.scores, one.batch, 0, chosen[:, :0])


def test_infinite_scores_are_ordered_too():
    batch = build_sparse(SMALL.with_(seqs=((1, 5),), padding=0), CPU).attention.batch
    scores = torch.tensor([[-math.inf, 1.0, math.inf, -math.inf, -3e38]])
    chosen = torch.empty((1, 4), dtype=torch.int32)
    NUMBA.choose_tokens(scores, batch, 0, chosen)
    assert chosen.tolist() == [[0, 1, 2, 4]]
