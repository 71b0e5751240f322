"""`--verify` blames the side that is wrong: the run, or `generate` where it contradicts itself."""

import copy

import pytest
import torch

import backends
from model import EngineConfig, SamplingParams
from model.cli import session, verify
from model.cli.prompts import read_command_line
from model.engine import Engine
from tests.model.conftest import byte_tokenizer
from tests.model.prompts import prompts
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

NUM_TOKENS = 8
HYBRIDS = (  # their layers can be in either order
    "GraniteMoeHybridConfig",
    "KimiLinearConfig",
    "Lfm2Config",
    "Lfm2MoeConfig",
    "MiniMaxConfig",
    "NemotronHConfig",
    "OlmoHybridConfig",
    "Qwen3NextConfig",
    "Qwen3_5TextConfig",
    "ZambaConfig",
)
QUICK = (
    ("MiniMaxConfig", "linear_attention"),
    ("MiniMaxConfig", "full_attention"),
    ("Lfm2Config", "conv"),
    ("Lfm2Config", "full_attention"),
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("ERROR")


def hybrid(name, first):
    config = make_config(name, "")
    kinds = list(config.layer_types)
    if kinds[0] != first:
        config.layer_types = kinds[::-1]
    assert config.layer_types[0] == first
    return build_network(config, 1)


def indexed(name="DeepseekV32Config"):
    """A network whose index scores every token alike."""
    config = copy.deepcopy(make_config(name, ""))
    config.index_topk = 5
    model = build_network(config, 0)
    heads = [
        weight
        for path, weight in model.network.named_parameters()
        if "indexer" in path and "weights_proj" in path
    ]
    assert heads
    with torch.no_grad():
        for weight in heads:
            weight.zero_()
    return model


def finished(model, num_prompts=1):
    """Requests that ran here."""
    settings = {"block_size": 4, "num_blocks": 90}
    engine = Engine(model, backends.get_backend("numba"), EngineConfig(**settings))
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return [one.request for one in engine.generate(prompts()[:num_prompts], params)]


def dense(model, request):
    return verify.dense_tokens(model, request.prompt_tokens, NUM_TOKENS, ())


@pytest.mark.parametrize(("name", "first"), QUICK)
def test_a_cache_of_transformers_that_is_wrong_is_not_held_against_a_run(name, first):
    model = hybrid(name, first)
    (request,) = finished(model)
    is_wrong = dense(model, request) != request.output_tokens
    assert is_wrong == ((name, first) == QUICK[0])
    found = verify.compare(model, 0, request)
    assert found.mismatch is None
    assert found.note == (verify._WITHOUT_CACHE.note if is_wrong else "")


def test_the_command_says_which_side_is_wrong_and_ends_well(tmp_path, capsys):
    hybrid(*QUICK[0]).network.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    argv = ("--model", str(tmp_path), "--prompt", "a text", "--max-tokens", "8", "--verify")
    assert session.execute(*read_command_line((*argv, "--block-size", "4"))) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [
        f"request 1: {verify._WITHOUT_CACHE.note}",
        "verified: 8 tokens of 1 requests are those of Transformers' generate",
    ]


@pytest.mark.walk
@pytest.mark.parametrize("name", HYBRIDS)
def test_both_orders_of_layers_equal_generate_without_a_cache(name):
    kinds = make_config(name, "").layer_types
    for first in (kinds[0], kinds[-1]):
        model = hybrid(name, first)
        for request in finished(model, len(prompts())):
            assert verify.compare(model, 0, request).mismatch is None, first


@pytest.mark.parametrize(
    "name",
    [
        "DeepseekV32Config",
        "GlmMoeDsaConfig",
        pytest.param("DeepseekV4Config", marks=pytest.mark.walk),
        pytest.param("AXK2Config", marks=pytest.mark.walk),
    ],
)
def test_equal_scores_at_the_cut_of_an_index_are_not_held_against_a_run(name):
    model = indexed(name)
    request = next(one for one in finished(model, 4) if dense(model, one) != one.output_tokens)
    assert verify.compare(model, 0, request) == verify.Comparison(note=verify._LOWER_FIRST.note)


@pytest.mark.parametrize("build", [lambda: hybrid(*QUICK[0]), indexed])
def test_a_wrong_token_of_such_a_network_is_still_found(build, monkeypatch):
    model = build()
    (request,) = finished(model)
    tokens = request.output_tokens
    wrong = [*tokens[:3], tokens[3] + 1, *tokens[4:]]
    monkeypatch.setattr(type(request), "output_tokens", wrong)
    found = verify.compare(model, 7, request).mismatch
    assert found == verify.Mismatch(7, 3, paged=wrong[3], dense=tokens[3])


def test_a_class_that_cannot_go_without_its_cache_is_compared_with_it(monkeypatch):
    model = hybrid(*QUICK[0])
    (request,) = finished(model)
    generate = verify.dense_tokens

    def refusing(*args):
        if not args[-1].uses_cache:
            raise ValueError("needs its cache")
        return generate(*args)

    monkeypatch.setattr(verify, "dense_tokens", refusing)
    found = verify.compare(model, 0, request)
    assert found.mismatch is not None
    assert not found.note


def test_a_stable_topk_is_topk_where_no_scores_are_equal():
    scores = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    with verify._LowerFirst():
        for dim in (-1, 1):
            found = scores.topk(3, dim=dim)
            assert torch.equal(found.indices, torch.topk(scores, 3, dim, sorted=False)[1])
        equal = torch.zeros(2, 9)
        equal[0, 7] = 1.0
        assert equal.topk(3).indices.tolist() == [[7, 0, 1], [0, 1, 2]]
        assert equal.topk(1, largest=False).values.tolist() == [[0.0], [0.0]]
    assert torch.equal(scores.topk(3, dim=1).values, found.values)
