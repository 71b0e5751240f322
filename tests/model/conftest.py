"""What the tests of the runner share: a cache of their own, and a checkpoint made on the spot."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.model.networks import build


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """No test reads what an earlier run has left, or leaves anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCORE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def byte_tokenizer():
    """One token a byte: a byte-level vocabulary without merges, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    end = "<end>"
    vocabulary[end] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A folder with a random network of 2 layers and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    build("qwen3", seed=25).network.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder_of(tmp_path):
    """Makes a folder whose config.json says this, and which has no weights."""

    def make(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return make
