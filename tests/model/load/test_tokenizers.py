"""A prompt becomes the tokens that tokenizer.json gives, whatever class is named for it."""

import copy
import json
from functools import cache

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from model.load.loader import load_codec
from model.load.text import TextStream
from tests.model.load.tokenizer_files import END, FAMILIES, TEXTS, content, write

CLASSES = (  # what tokenizer_config.json names, and the type of the model in config.json
    (None, "falcon"),
    (None, "gemma2"),
    (None, "gpt2"),
    (None, "llama"),
    (None, "mistral"),
    ("BertTokenizer", "bert"),
    ("BloomTokenizerFast", "bloom"),
    ("CodeGenTokenizer", "phi"),
    ("CodeLlamaTokenizer", "llama"),
    ("CohereTokenizerFast", "cohere"),
    ("GPT2Tokenizer", "llama"),
    ("GPT2TokenizerFast", "olmo2"),
    ("GPTNeoXTokenizerFast", "gpt_neox"),
    ("GemmaTokenizer", "gemma3_text"),
    ("LlamaTokenizer", "llama"),
    ("LlamaTokenizerFast", "deepseek_v3"),
    ("NoSuchTokenizer", "llama"),
    ("PreTrainedTokenizerFast", "llama"),
    ("Qwen2Tokenizer", "qwen2"),
    ("Qwen3_5Tokenizer", "qwen3"),
    ("RobertaTokenizer", "llama"),
    ("T5Tokenizer", "llama"),
    ("TokenizersBackend", "mistral"),
    ("XGLMTokenizer", "xglm"),
)
QUICK = (
    ("OLMo 2 and Granite 4", "GPT2Tokenizer", "llama"),
    ("OLMo 2 and Granite 4", "GPT2TokenizerFast", "olmo2"),
    ("Llama 2", "LlamaTokenizer", "llama"),
    ("Llama 3", "Qwen2Tokenizer", "qwen2"),
    ("DeepSeek V3", "CodeLlamaTokenizer", "llama"),
    ("Falcon", "GPTNeoXTokenizerFast", "gpt_neox"),
    ("Gemma", "LlamaTokenizerFast", "deepseek_v3"),
    ("T5", "XGLMTokenizer", "xglm"),
    ("BERT, cased", "BertTokenizer", "bert"),
    ("Mistral v0.3", None, "gemma2"),
    ("RoBERTa with a prefix space", None, "gpt2"),
    ("truncation and padding", "GPT2Tokenizer", "llama"),
)


@cache
def tokenizer_of(family):
    tokenizer = Tokenizer.from_str(content(family))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def settings_of(named):
    return {} if named is None else {"tokenizer_class": named}


def check(folder, family, named, model_type):
    file = tokenizer_of(family)
    codec = load_codec(str(write(folder, family, model_type, **settings_of(named))))
    assert parts(codec.describe()) == parts(file.to_str())
    for text in TEXTS:
        tokens = file.encode(text).ids
        assert codec.encode(text) == tokens, text
        bare = file.encode(text, add_special_tokens=False).ids
        assert codec.encode(text, adds_special_tokens=False) == bare, text
        for skips in (True, False):
            whole = file.decode(tokens, skip_special_tokens=skips)
            assert codec.decode(tokens, skip_special_tokens=skips) == whole
            step = codec.open_step(skip_special_tokens=skips)
            assert "".join(pieces(codec, tokens, step, skips=skips)) == whole


def parts(described):
    return {**json.loads(described), "post_processor": None}  # none, and one that adds no token


def pieces(codec, tokens, step, *, skips):
    stream = TextStream(lambda ids: codec.decode(ids, skip_special_tokens=skips), (), step)
    for token in tokens:
        stream.add(token)
        yield stream.take()
    stream.close()
    yield stream.take()


@pytest.mark.parametrize(("family", "named", "model_type"), QUICK)
def test_the_tokens_are_those_of_the_file(tmp_path, family, named, model_type):
    check(tmp_path, family, named, model_type)


@pytest.mark.walk
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_the_file_with_every_class(tmp_path, family):
    for number, (named, model_type) in enumerate(CLASSES):
        check(tmp_path / str(number), family, named, model_type)


def test_the_pairs_are_of_the_kind_that_went_wrong(tmp_path):
    """Transformers' own choice of a class gives other tokens for the first of them."""
    family, named, model_type = QUICK[0]
    folder = write(tmp_path, family, model_type, **settings_of(named))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.encode(TEXTS[0]) != tokenizer_of(family).encode(TEXTS[0]).ids


def test_settings_beside_the_file_stay(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    folder = write(
        tmp_path,
        "Phi 3",
        "llama",
        tokenizer_class="GPT2Tokenizer",
        bos_token="<s>",  # noqa: S106
        eos_token="<|end|>",  # noqa: S106
        additional_special_tokens=["<|end|>"],
        chat_template=template,
    )
    codec = load_codec(str(folder))
    chat = codec.encode_chat([{"role": "user", "content": "x <|end|>  y"}])
    assert chat == tokenizer_of("Phi 3").encode("<s>x <|end|>  y<|end|>").ids
    assert codec.chat_template == template


@pytest.mark.parametrize("named", [None, "GPT2Tokenizer"])
def test_a_class_still_names_the_special_tokens_that_config_leaves_out(tmp_path, named):
    for family, wanted in (("OLMo 2 and Granite 4", END), ("Llama 2", None)):
        folder = write(tmp_path / family, family, "gpt2", **settings_of(named))
        assert load_codec(str(folder)).tokenizer.eos_token == wanted


def test_tokens_that_config_adds_are_added(tmp_path):
    folder = write(
        tmp_path, "GPT-2", "llama", **settings_of("GPT2Tokenizer") | {"pad_token": "<pad>"}
    )
    file = copy.deepcopy(tokenizer_of("GPT-2"))
    file.add_special_tokens(["<pad>"])
    assert load_codec(str(folder)).encode("a<pad>b") == file.encode("a<pad>b").ids


def test_without_a_file_the_class_decides(tmp_path):
    folder = write(tmp_path, "GPT-2", "gpt2")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    assert load_codec(str(folder)).encode(TEXTS[1]) == tokenizer_of("GPT-2").encode(TEXTS[1]).ids
