"""Batch-invariant mode: a request's result is the same to the bit alone and in any batch."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import backends
from model import EngineConfig, SamplingParams
from model.engine import Engine
from model.errors import UnsupportedModelError
from model.forward.batch_invariant import BatchInvariantNetwork, RowByRow
from tests.model.networks import build
from tests.model.reference import ReferenceBackend
from tests.model.same_digest import check
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

PROMPTS = ["a prompt of some length, ", "short", "a prompt of another length, and its end", "x"]
PARAMS = [
    SamplingParams(max_tokens=8, logprobs=3, ignore_eos=True, temperature=0.8, seed=number)
    for number in range(len(PROMPTS))
]


def engine_of(architecture="qwen3", **fields):
    sizes = {"num_blocks": 90, **fields}
    config = EngineConfig(block_size=4, batch_invariant=True, **sizes)
    return Engine(build(architecture, 25), backends.get_backend("numba"), config)


def outputs(engine, numbers):
    done = engine.generate([PROMPTS[n] for n in numbers], [PARAMS[n] for n in numbers])
    return {n: one.tokens for n, one in zip(numbers, done, strict=True)}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma4"])
@pytest.mark.parametrize("budget", [2048, 16])
def test_a_request_gives_the_same_bits_alone_and_in_any_batch(architecture, budget):
    """Tokens and log-probabilities; also where prompts are computed in chunks, and found again."""
    engine = engine_of(architecture, max_num_batched_tokens=budget)
    engine.prepare()
    alone = {n: outputs(engine_of(architecture), [n])[n] for n in range(len(PROMPTS))}
    for numbers in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0], [1, 1, 1, 2]):
        assert outputs(engine, numbers) == {n: alone[n] for n in numbers}


@pytest.mark.parametrize("name", ["GPT2Config", "FalconConfig", "MiniCPM3Config"])
def test_products_of_other_kinds_give_the_same_bits(name):
    """Weights with outputs as columns, by addmm and by @, and latents that a head decompresses."""
    model = build_network(make_config(name, ""), 0)
    config = EngineConfig(block_size=4, num_blocks=90, batch_invariant=True)
    engine = Engine(model, backends.get_backend("numba"), config)
    alone = [outputs(engine, [n])[n] for n in range(4)]
    engine = Engine(model, backends.get_backend("numba"), config)
    assert outputs(engine, range(4)) == dict(enumerate(alone))


def test_it_gives_the_same_bits_when_it_is_preempted_and_with_draft_tokens():
    prompts = ["abc abc abc abc abc abc abc abc abc ", *PROMPTS[:3]]
    params = [replace(each, max_tokens=40) for each in PARAMS]

    def outputs(numbers, **fields):
        engine = engine_of(**{"num_blocks": 400, **fields})
        done = engine.generate([prompts[n] for n in numbers], [params[n] for n in numbers])
        return [one.tokens for one in done], engine.stats

    alone = [outputs([n])[0][0] for n in range(4)]
    pressed, stats = outputs(range(4), num_blocks=32)
    assert pressed == alone
    assert stats.num_preemptions > 0
    drafted, stats = outputs(range(4), drafts="ngram")
    assert drafted == alone
    assert stats.num_draft_tokens > 0


def test_without_it_the_check_has_something_to_find():
    """Rows of one product do depend on their number here, or the mode would prove nothing."""
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(512, 512), torch.randn(40, 512)
    with torch.inference_mode():
        together = layer(rows)
        single = torch.cat([layer(row[None]) for row in rows])
        with RowByRow():
            assert torch.equal(layer(rows), torch.cat([layer(row[None]) for row in rows]))
            assert torch.allclose(layer(rows), together, atol=1e-5)
    if torch.equal(together, single):
        pytest.skip("this library of matrix products happens to be batch-invariant")


def test_a_row_is_the_same_among_any_others_in_the_kernels_of_a_gpu(interpreting):
    done = interpreting.run("-m", "tests.model.invariant_check")
    found = 2 * "found what was planted\n" + "a row is the same among any others\n"
    assert done.stdout == found, done.stderr


def test_what_cannot_be_batch_invariant_is_refused():
    assert "a CPU computes each row by itself" in engine_of(compile=True).prepare()
    config = EngineConfig(num_blocks=60, batch_invariant=True)
    model = build("qwen3", 25)
    with pytest.raises(UnsupportedModelError, match="backend reference has no batch-invariant"):
        Engine(model, ReferenceBackend(), config)
    shared = replace(model, ranks=SimpleNamespace(size=3))
    with pytest.raises(UnsupportedModelError, match="wanted a --tp of at most 2, got 3"):
        BatchInvariantNetwork(shared, backends.get_backend("numba"), 16)
    with RowByRow(), pytest.raises(UnsupportedModelError, match="in one bmm"):
        torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    with RowByRow(), pytest.raises(UnsupportedModelError, match="in one addmm"):
        torch.addmm(*torch.ones(3, 2, 2))  # a bias of each row


SMALL = {"few_blocks": 20, "at_once": 16, "num_blocks": 300, "block_size": 16}


def test_requests_of_mixed_lengths_have_one_digest_however_they_are_computed():
    check(build("qwen3", 25), backends.get_backend("numba"), 120, **SMALL)


def test_the_digest_shows_attention_that_depends_on_the_number_of_tokens():
    class Depends:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def paged_attention(self, query, cache, batch, terms, *, out=None):
            out = self.inner.paged_attention(query, cache, batch, terms, out=out)
            return out.mul_(1 + 1e-3 * (batch.num_seqs % 2))

    with pytest.raises(AssertionError, match=r"of \d+ differ, first"):
        check(build("qwen3", 25), Depends(backends.get_backend("numba")), 40, **SMALL)
