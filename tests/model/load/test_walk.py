"""Every decoder class of Transformers gives generate's tokens here, or is refused in one line."""

import pytest
import transformers
from torch import nn
from transformers.models.llama import modeling_llama

from model import ModelError
from tests.model import walk
from tests.model.tiny_configs import LOW, cases, lowered, make_config

QUICK = [
    ("BertConfig", ""),
    ("BertConfig", "is_decoder"),
    ("BloomConfig", ""),
    ("DeepseekV3Config", "wide values"),
    ("Glm5NextConfig", ""),
    ("GlmMoeDsaConfig", ""),
    ("GPT2Config", ""),
    ("GPTJConfig", ""),
    ("GPTNeoConfig", ""),
    ("GptOssConfig", ""),
    ("JambaConfig", ""),
    ("Llama4TextConfig", ""),
    ("MixtralConfig", ""),
    ("MoshiConfig", ""),
    ("MusicgenConfig", ""),
    ("Phi3Config", "longrope"),
    ("Qwen3Config", "windows"),
]
ALONE_IN_5_19 = {  # what fails is not the engine: whole passes give its tokens
    ("MusicgenConfig", ""): "the class has no defaults",
    ("Phi3Config", "longrope"): "generate forgets the text where the factors change",
}
if transformers.__version__.startswith("5.19."):
    QUICK = [case for case in QUICK if case not in ALONE_IN_5_19]
SAME_VERSION = pytest.mark.skipif(
    transformers.__version__ != walk.stored_for(),
    reason=f"the outcomes are those of Transformers {walk.stored_for()}",
)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("ERROR")


def agrees(name, variant, found):
    """True if an outcome is the stored one; in another version a refusal may have another reason.

    A class that the stored walk has not met is served or refused.
    """
    if transformers.__version__ == walk.stored_for():
        return found == walk.stored()[name, variant]
    wanted = walk.stored().get((name, variant), found)
    kinds = {outcome.partition(":")[0] for outcome in (found, wanted)}
    return kinds in ({"equal"}, {"refused"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "variant"), [case for case in QUICK if case in cases()])
def test_a_class_does_what_the_walk_has_found(name, variant):
    found = walk.outcome(name, variant)
    assert agrees(name, variant, found), found


@pytest.fixture(scope="module")
def loaded():
    """Forked processes begin with the kernels and modules that most classes need."""
    for name in ("LlamaConfig", "JambaConfig", "DeepseekV3Config"):
        assert walk.outcome(name, "") == "equal"


@pytest.mark.walk
@pytest.mark.usefixtures("loaded")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "variant"), [case for case in cases() if case not in QUICK])
def test_every_other_class_does_what_the_walk_has_found(name, variant):
    found = walk.limited(name, variant)
    assert agrees(name, variant, found), found


@SAME_VERSION
def test_the_walk_has_met_every_class_that_transformers_has():
    assert set(walk.stored()) == set(cases())


def test_nothing_runs_and_answers_wrongly_and_what_is_refused_is_one_line():
    for case, found in walk.stored().items():
        assert found == "equal" or found.startswith("refused: "), case
        assert "\n" not in found


# Planted: classes that run and answer wrongly, were it not for what is checked beforehand.


@pytest.fixture
def trusting(monkeypatch):
    """An engine that checks nothing of what its network does."""
    monkeypatch.setattr("model.forward.network.check_tokens_alone", lambda *_: None)


def _scaled(forward):
    def by_the_longest(self, x, position_ids):
        cos, sin = forward(self, x, position_ids)
        return cos * (1 + position_ids.max() / 99), sin

    return by_the_longest


def _mixing(forward):
    def with_the_one_before(self, x):
        return forward(self, x) + nn.functional.pad(x, (0, 0, 1, -1))

    return with_the_one_before


PLANTED = [
    (modeling_llama.LlamaRotaryEmbedding, _scaled),
    (modeling_llama.LlamaMLP, _mixing),
]


@pytest.mark.parametrize(("kind", "planted"), PLANTED)
def test_the_walk_sees_a_class_that_answers_wrongly(monkeypatch, trusting, kind, planted):
    monkeypatch.setattr(kind, "forward", planted(kind.forward))
    assert walk.outcome("LlamaConfig", "").startswith("WRONG: ")


def test_the_walk_sees_a_layer_that_counts_positions_by_itself_beyond_a_low_threshold(trusting):
    assert walk.outcome("Llama4TextConfig", "").startswith("WRONG: ")


def test_low_thresholds_are_below_every_prompt_and_sizes_stay():
    config = make_config("Llama4Config", "")
    low = lowered(config).text_config
    assert low.floor_scale == LOW < min(map(len, walk.prompts()))
    assert low.hidden_size == config.text_config.hidden_size
    assert lowered(make_config("LlamaConfig", "")) is None


@pytest.mark.parametrize(("kind", "planted"), PLANTED)
def test_such_a_class_is_refused(monkeypatch, kind, planted):
    monkeypatch.setattr(kind, "forward", planted(kind.forward))
    assert "follow other tokens too" in walk.outcome("LlamaConfig", "")


def test_the_walk_sees_an_error_that_is_none_of_ours(monkeypatch):
    def broken(config):
        raise KeyError("rope_type")

    monkeypatch.setattr(walk, "check_architecture", broken)
    assert walk.limited("LlamaConfig", "").startswith("WRONG: KeyError('rope_type') at ")


def test_the_walk_sees_a_refusal_of_many_lines(monkeypatch):
    def wordy(config):
        raise ModelError("one\ntwo")

    monkeypatch.setattr(walk, "check_architecture", wordy)
    assert walk.outcome("LlamaConfig", "").startswith("WRONG: not one line")
