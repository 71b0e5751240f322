"""The conformance kit passes an honest backend and catches each planted bug, by name."""

import dataclasses
import itertools
import math

import pytest
import torch

import backends
from backends import KVCache, conformance
from backends.conformance import __main__ as command_line
from backends.conformance.relations import check_relations
from tests.backends.honest import HonestBackend


class SeesTheNextKey(HonestBackend):
    def seen(self, position, window, block_size):
        first, last = super().seen(position, window, block_size)
        return first, last + 1


class MissesItsOwnKey(HonestBackend):
    def seen(self, position, window, block_size):
        first, last = super().seen(position, window, block_size)
        return first, max(first, last - 1)


class WindowOneTooWide(HonestBackend):
    def seen(self, position, window, block_size):
        return super().seen(position, None if window is None else window + 1, block_size)


class WindowOneTooNarrow(HonestBackend):
    def seen(self, position, window, block_size):
        return super().seen(position, None if window is None else max(1, window - 1), block_size)


class IgnoresTheWindow(HonestBackend):
    def gather(self, cache, table, first, last):
        return super().gather(cache, table.clamp(0, cache.shape[0] - 1), 0, last)


class ForgetsTheLastPartialBlock(HonestBackend):
    def seen(self, position, window, block_size):
        first, last = super().seen(position, window, block_size)
        return first, max(first, (last + 1) // block_size * block_size - 1)


class AlignsPrefillTopLeft(HonestBackend):
    def position(self, length, count, index):
        return index


class IgnoresCausality(HonestBackend):
    def position(self, length, count, index):
        return length - 1


class InterleavesTheGroups(HonestBackend):
    def kv_heads(self, num_q_heads, num_kv_heads):
        return torch.arange(num_q_heads) % num_kv_heads


class IgnoresTheSoftCap(HonestBackend):
    def shape_logits(self, logits, scale, soft_cap):
        return super().shape_logits(logits, scale, None)


class CapsBeforeScaling(HonestBackend):
    def shape_logits(self, logits, scale, soft_cap):
        return super().shape_logits(logits, 1.0, soft_cap) * scale


class IgnoresTheScale(HonestBackend):
    def shape_logits(self, logits, scale, soft_cap):
        return super().shape_logits(logits, 16**-0.5, soft_cap)


class IgnoresTheSinks(HonestBackend):
    def probabilities(self, logits, sinks):
        return super().probabilities(logits, None)


class SinksOfTheWrongHead(HonestBackend):
    def probabilities(self, logits, sinks):
        return super().probabilities(logits, None if sinks is None else sinks.roll(1))


class RoundsTheLogitsToHalf(HonestBackend):
    def shape_logits(self, logits, scale, soft_cap):
        return super().shape_logits(logits, scale, soft_cap).half().float()


class RoundsTheQueryToTf32(HonestBackend):
    def paged_attention(self, query, *arguments, **options):
        rounded = (query.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)
        return super().paged_attention(rounded.view(torch.float32), *arguments, **options)


class EndsTheSeriesOfTheExponentialEarly(HonestBackend):
    """Each probability is off by up to 4e-5; the check allows 1e-6 of a row of a few keys."""

    def probabilities(self, logits, sinks):
        wide = logits if sinks is None else torch.cat([logits, sinks[:, None]], 1)
        x = (wide - wide.amax(-1, keepdim=True)) / math.log(2)
        rest = (x - x.round()) * math.log(2)
        p = sum(rest**i / math.factorial(i) for i in range(5)) * torch.exp2(x.round())
        return (p / p.sum(-1, keepdim=True))[:, : logits.shape[1]]


class ScalesTheLogitsAHundredThousandthTooMuch(HonestBackend):
    def shape_logits(self, logits, scale, soft_cap):
        return super().shape_logits(logits, scale * (1 + 1e-5), soft_cap)


class LosesTwoMillionthsOfTheSum(HonestBackend):
    def probabilities(self, logits, sinks):
        return super().probabilities(logits, sinks) * (1 - 2e-6)


class ReadsTheTableTail(HonestBackend):
    def gather(self, cache, table, first, last):
        everything = cache[table.long()].flatten(0, 1)
        return everything[first : last + 1]


class MultipliesUnmaskedValues(HonestBackend):
    """Reads whole blocks and trusts a probability of 0 to erase what it should not have read."""

    def gather(self, cache, table, first, last):
        size = cache.shape[1]
        return super().gather(cache, table, first, last // size * size + size - 1)

    def probabilities(self, logits, sinks):
        return super().probabilities(logits.nan_to_num(nan=-math.inf), sinks)


class SumsInBlockOrder(HonestBackend):
    def gather(self, cache, table, first, last):
        seen, size = torch.arange(first, last + 1), cache.shape[1]
        blocks = table[seen // size].long()
        order = blocks.argsort(stable=True)
        return cache[blocks[order], (seen % size)[order]]


class TakesTheFirstTable(HonestBackend):
    def table_row(self, s):
        return 0


class SharesTheWholeOfTheFirstTable(HonestBackend):
    def paged_attention(self, query, cache, batch, terms, *, out=None):
        if batch.shared_prefix is not None:
            table = batch.block_table[:1].expand_as(batch.block_table).contiguous()
            batch = dataclasses.replace(batch, block_table=table)
        return super().paged_attention(query, cache, batch, terms, out=out)


class WritesARowTooMany(HonestBackend):
    def paged_attention(self, *arguments, out=None, **options):
        out = super().paged_attention(*arguments, out=out, **options)
        out[int(arguments[2].query_start_loc[-1]) :] = 0
        return out


class ScalesTheQueryInPlace(HonestBackend):
    def paged_attention(self, query, cache, batch, terms, *, out=None):
        query *= terms.scale
        terms = dataclasses.replace(terms, scale=1.0)
        return super().paged_attention(query, cache, batch, terms, out=out)


class CleansTheCache(HonestBackend):
    def paged_attention(self, query, cache, *arguments, **options):
        cache.k.nan_to_num_(nan=0.0)
        return super().paged_attention(query, cache, *arguments, **options)


class IgnoresOut(HonestBackend):
    def paged_attention(self, *arguments, out=None, **options):
        super().paged_attention(*arguments, **options)
        return out


class AnswersDifferentlyEachTime(HonestBackend):
    def __init__(self):
        self.calls = itertools.count()

    def probabilities(self, logits, sinks):
        return super().probabilities(logits, sinks) * (1 + next(self.calls) % 2 * 2e-7)


class StoresNegativeSlots(HonestBackend):
    def stores(self, slot):
        return slot > -10


class SkipsSlotZero(HonestBackend):
    def stores(self, slot):
        return slot > 0


class TruncatesTheDivision(HonestBackend):
    def stores(self, slot):
        return int(slot / 4) >= 0


class SwapsBlockAndOffset(HonestBackend):
    def place(self, slot, block_size):
        return slot % block_size % 3, slot // block_size


class StoresKeysTwice(HonestBackend):
    def store_kv(self, key, value, *arguments, **options):
        super().store_kv(key, key if value is not None else None, *arguments, **options)


class ChangesTheKeys(HonestBackend):
    def store_kv(self, key, *arguments, **options):
        super().store_kv(key, *arguments, **options)
        key.zero_()


class StoresANeighbour(HonestBackend):
    def store_kv(self, key, value, cache, slot_mapping):
        super().store_kv(key, value, cache, slot_mapping)
        if len(slot_mapping):
            cache.tensors[-1].view(torch.uint8)[-1, -1, -1, -1] += 1


class OverflowsToNan(HonestBackend):
    def clamped(self, rows):
        return rows.masked_fill(rows.abs() > 448, math.nan)


class CutsInsteadOfRounding(HonestBackend):
    def clamped(self, rows):
        rows = super().clamped(rows).contiguous()
        return (rows.view(torch.int32) & -(1 << 20)).view(torch.float32)


class RoundsTiesAwayFromZero(HonestBackend):
    def clamped(self, rows):
        rows = super().clamped(rows)
        return rows * (1 + 1e-6)


class StoresQuantisedUnscaled(HonestBackend):
    def quantised(self, rows, scale):
        return super().quantised(rows, None)


class StoresWithTheScaleOfTheFirstHead(HonestBackend):
    def quantised(self, rows, scale):
        return super().quantised(rows, None if scale is None else scale[:1])


class ReadsQuantisedUnscaled(HonestBackend):
    def widened(self, cache, scale):
        return super().widened(cache, None)


class ReadsWithTheScaleOfTheFirstHead(HonestBackend):
    def widened(self, cache, scale):
        return super().widened(cache, None if scale is None else scale[:1])


class SwapsTheScales(HonestBackend):
    def paged_attention(self, query, cache, *arguments, **options):
        if not cache.is_latent:
            cache = dataclasses.replace(cache, k_scale=cache.v_scale, v_scale=cache.k_scale)
        return super().paged_attention(query, cache, *arguments, **options)


class TakesTheLastNumbersOfALatent(HonestBackend):
    def paged_attention(self, query, cache, *arguments, **options):
        if cache.is_latent:
            values = cache.k[..., -cache.v.shape[3] :]
            cache = KVCache(cache.k, cache.k)
            object.__setattr__(cache, "v", values)
        return super().paged_attention(query, cache, *arguments, **options)


class StoresNoMoreOfALatentThanItsValue(HonestBackend):
    def store_kv(self, key, value, cache, slot_mapping):
        if cache.is_latent:
            size = cache.v.shape[3]
            key, cache = key[..., :size], KVCache(cache.v, cache.v, is_latent=True)
        super().store_kv(key, value, cache, slot_mapping)


class CopiesBackwards(HonestBackend):
    def copy_blocks(self, caches, copies):
        super().copy_blocks(caches, copies.flip(1))


class CopiesTheFirstCacheAlone(HonestBackend):
    def copy_blocks(self, caches, copies):
        super().copy_blocks(caches[:1], copies)


class MovesBackwards(HonestBackend):
    def move_blocks(self, caches, host, moves, sums, *, to_host):
        super().move_blocks(caches, host, moves, sums, to_host=not to_host)


class MovesTheFirstCacheAlone(HonestBackend):
    def move_blocks(self, caches, host, moves, sums, *, to_host):
        size = caches[0][0].numel() * caches[0].element_size()
        super().move_blocks(caches[:1], host[:, :size], moves, sums, to_host=to_host)


class SumsWithoutPlaces(HonestBackend):
    def move_blocks(self, caches, host, moves, sums, *, to_host):
        super().move_blocks(caches, host, moves, sums, to_host=to_host)
        for number, (_, host_id) in enumerate(moves.tolist()):
            sums[number] = int(host[host_id].long().sum())


class MovesInPairsSwapped(HonestBackend):
    def move_blocks(self, caches, host, moves, sums, *, to_host):
        super().move_blocks(caches, host, moves.roll(1, 0), sums, to_host=to_host)


class LeavesSlotsUnpadded(HonestBackend):
    def compute_slot_mapping(self, query_start_loc, seq_lens, block_table, block_size, out):
        end = int(query_start_loc[-1])
        super().compute_slot_mapping(query_start_loc, seq_lens, block_table, block_size, out[:end])


class ComputesSlotsIn32Bits(HonestBackend):
    def compute_slot_mapping(self, query_start_loc, seq_lens, block_table, block_size, out):
        super().compute_slot_mapping(query_start_loc, seq_lens, block_table, block_size, out)
        out.copy_(out.int().long())


SABOTAGE = {
    SeesTheNextKey: "poison",
    MissesItsOwnKey: "accuracy",
    WindowOneTooWide: "poison",
    WindowOneTooNarrow: "accuracy",
    IgnoresTheWindow: "poison",
    ForgetsTheLastPartialBlock: "accuracy",
    AlignsPrefillTopLeft: "accuracy",
    IgnoresCausality: "accuracy",
    InterleavesTheGroups: "accuracy",
    IgnoresTheSoftCap: "accuracy",
    CapsBeforeScaling: "accuracy",
    IgnoresTheScale: "accuracy",
    IgnoresTheSinks: "accuracy",
    SinksOfTheWrongHead: "accuracy",
    RoundsTheLogitsToHalf: "accuracy",
    RoundsTheQueryToTf32: "accuracy",
    EndsTheSeriesOfTheExponentialEarly: "accuracy",
    ScalesTheLogitsAHundredThousandthTooMuch: "accuracy",
    LosesTwoMillionthsOfTheSum: "accuracy",
    ReadsTheTableTail: "attention raised",
    MultipliesUnmaskedValues: "poison",
    SumsInBlockOrder: "permutation",
    TakesTheFirstTable: "attention raised",
    SharesTheWholeOfTheFirstTable: "attention raised",
    WritesARowTooMany: "untouched",
    ScalesTheQueryInPlace: "untouched",
    CleansTheCache: "untouched",
    IgnoresOut: "poison",
    AnswersDifferentlyEachTime: "repeatable",
    StoresNegativeSlots: "store_kv",
    SkipsSlotZero: "store_kv",
    TruncatesTheDivision: "store_kv",
    SwapsBlockAndOffset: "store_kv",
    StoresKeysTwice: "store_kv",
    StoresANeighbour: "store_kv",
    ChangesTheKeys: "store_kv",
    OverflowsToNan: "store_kv, quantised",
    CutsInsteadOfRounding: "store_kv, quantised",
    RoundsTiesAwayFromZero: "store_kv, quantised",
    StoresQuantisedUnscaled: "store_kv, quantised",
    StoresWithTheScaleOfTheFirstHead: "store_kv, quantised",
    ReadsQuantisedUnscaled: "accuracy",
    ReadsWithTheScaleOfTheFirstHead: "accuracy",
    SwapsTheScales: "accuracy",
    TakesTheLastNumbersOfALatent: "accuracy",
    StoresNoMoreOfALatentThanItsValue: "store_kv",
    CopiesBackwards: "copy_blocks",
    CopiesTheFirstCacheAlone: "copy_blocks",
    MovesBackwards: "move_blocks",
    MovesTheFirstCacheAlone: "move_blocks",
    SumsWithoutPlaces: "move_blocks",
    MovesInPairsSwapped: "move_blocks",
    LeavesSlotsUnpadded: "compute_slot_mapping",
    ComputesSlotsIn32Bits: "compute_slot_mapping",
}


def test_an_honest_backend_conforms():
    report = conformance.run(HonestBackend(), quick=True)
    assert report.passed, report.as_text()
    assert 0 < report.worst_ratio <= 1


@pytest.mark.parametrize("bug", SABOTAGE, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught_by_name(bug):
    report = conformance.run(bug(), quick=True)
    assert SABOTAGE[bug] in report.failed_checks, report.as_text()


class ForgetsToMultiplyByTheCap(HonestBackend):
    def shape_logits(self, logits, scale, soft_cap):
        capped = super().shape_logits(logits, scale, soft_cap)
        return capped if soft_cap is None else capped / soft_cap


class CountsEverySinkAsOne(HonestBackend):
    def probabilities(self, logits, sinks):
        return super().probabilities(logits, None if sinks is None else sinks * 0)


class AssumesBlocksOfFour(HonestBackend):
    def gather(self, cache, table, first, last):
        seen = torch.arange(first, last + 1)
        return cache[table[seen // cache.shape[1]].long(), seen % 4]


class ChangesWithCompany(HonestBackend):
    def paged_attention(self, query, cache, batch, terms, *, out=None):
        terms = dataclasses.replace(terms, scale=terms.scale * (1 + 0.01 * batch.num_seqs))
        return super().paged_attention(query, cache, batch, terms, out=out)


class LosesAPartOfTheSum(HonestBackend):
    def probabilities(self, logits, sinks):
        return super().probabilities(logits, sinks) * 0.99


class LosesTheSmallestQuantisedValues(HonestBackend):
    def widened(self, cache, scale):
        values = super().widened(cache, scale)
        return values if values is cache else values.where(cache.float().abs() >= 4, 0.0)


class ChangesALittleWithCompany(HonestBackend):
    def paged_attention(self, query, cache, batch, terms, *, out=None):
        terms = dataclasses.replace(terms, scale=terms.scale * (1 + 1e-6 * (batch.num_seqs > 1)))
        return super().paged_attention(query, cache, batch, terms, out=out)


class ChangesALittleWithCompanyWhereQuantised(HonestBackend):
    def paged_attention(self, query, cache, batch, terms, *, out=None):
        if cache.k.dtype == torch.float8_e4m3fn:
            factor = 1 + 1e-6 * (batch.num_seqs > 1)
            terms = dataclasses.replace(terms, scale=terms.scale * factor)
        return super().paged_attention(query, cache, batch, terms, out=out)


RELATIONS = {
    ChangesALittleWithCompanyWhereQuantised: "batch-invariant: alone or batched, bit by bit",
    ChangesALittleWithCompany: "batch-invariant: alone or batched, bit by bit",
    WindowOneTooNarrow: "a window of the length is no window",
    ForgetsToMultiplyByTheCap: "an endless soft cap is none",
    CountsEverySinkAsOne: "a sink of nothing is none",
    AssumesBlocksOfFour: "another block size",
    ChangesWithCompany: "alone or batched",
    IgnoresCausality: "one more token changes no earlier row",
    LosesAPartOfTheSum: "values plus one",
    InterleavesTheGroups: "grouped heads are repeated heads",
    TakesTheLastNumbersOfALatent: "latents are keys whose first numbers are values",
    LosesTheSmallestQuantisedValues: "a quantised cache is the values it stands for",
}


@pytest.mark.parametrize("bug", RELATIONS, ids=lambda bug: bug.__name__)
def test_each_relation_catches_a_bug_without_the_oracles_answer(bug):
    base = conformance.AttentionCase(
        "small", ((2, 9), (3, 3)), num_kv_heads=2, head_dim=16, block_size=4
    )
    findings = list(check_relations(bug(), base))
    assert {f.check for f in findings} == {f"relation: {name}" for name in RELATIONS.values()}
    assert f"relation: {RELATIONS[bug]}" in {f.check for f in findings if not f.passed}


def test_a_report_without_findings_is_not_a_pass():
    assert not conformance.Report("none", "cpu", ()).passed


def test_the_command_names_an_unknown_backend_and_exits_2(capsys):
    assert command_line.main(["nmba"]) == 2
    assert "did you mean 'numba'" in capsys.readouterr().err


def test_there_are_never_more_processes_than_cores(monkeypatch, capsys):
    asked = []

    def noted(name, *, quick, jobs):
        asked.append(jobs)
        return conformance.run(backends.get_backend(name), quick=quick, shard=(0, 10**6))

    monkeypatch.setattr(command_line, "run_in_processes", noted)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    command_line.main(["numba", "--quick", "--jobs", "100000"])
    assert asked == [3]
    with pytest.raises(SystemExit) as ending:
        command_line.main(["numba", "--jobs", "0"])
    assert ending.value.code == 2
    assert "wanted at least 1, got 0" in capsys.readouterr().err


def test_a_long_run_says_how_far_it_is(monkeypatch, capsys):
    told = []
    shard = (0, 40)
    conformance.run(HonestBackend(), quick=True, shard=shard, tell=told.append)
    monkeypatch.setattr(conformance, "_TELL_EVERY_S", 0.0)
    several = [*told]
    conformance.run(HonestBackend(), quick=True, shard=shard, tell=several.append)
    assert len(several) > len(told)
    count = len(list(conformance._cases(HonestBackend(), quick=True))[::40])
    assert [line.split(";")[0] for line in several[len(told) :]] == [
        f"{number} of {count} cases" for number in range(count)
    ]
    passed = conformance.Finding("a", "b", passed=True, detail="")
    monkeypatch.setattr(command_line, "get_backend", lambda _: HonestBackend())
    monkeypatch.setattr(
        conformance, "_cases", lambda *_, **__: iter([("a", "b", lambda: [passed])])
    )
    assert command_line.main(["numba"]) == 0
    assert capsys.readouterr().err == "0 of 1 cases; now a: b\n"
