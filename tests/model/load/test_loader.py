"""What loads, and what is refused by name before a weight is read."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from model.errors import ModelNotFoundError, UnsupportedModelError
from model.load import codec, loader
from model.load.codec import HuggingFaceCodec
from model.load.loader import load_model
from tests.model.conftest import byte_tokenizer
from tests.model.networks import ByteCodec

CPU = torch.device("cpu")


def test_a_folder_loads_with_its_codec_and_its_limits(checkpoint):
    model = load_model(str(checkpoint), CPU)
    assert (model.network.dtype, model.network.training) == (torch.float32, False)
    assert (model.max_positions, model.eos_token_ids) == (256, frozenset())
    text = "two\nlines and \u20ac"
    tokens = model.codec.encode(text)
    assert len(tokens) == len(text.encode())
    assert model.codec.decode(tokens) == text
    assert len(ByteCodec().encode(text)) == len(tokens)


def test_a_dtype_can_be_asked_for(checkpoint):
    assert load_model(str(checkpoint), CPU, torch.float16).network.dtype == torch.float16


def test_a_folder_that_is_not_there_is_refused_without_asking_the_hub():
    with pytest.raises(ModelNotFoundError, match=r"there is no folder '\./missing/model'"):
        load_model("./missing/model", CPU)
    with pytest.raises(ModelNotFoundError, match=r"there is no file '\./missing/model\.gguf'"):
        load_model("./missing/model.gguf", CPU)
    with pytest.raises(ModelNotFoundError, match="has the form owner/name"):
        load_model("missing", CPU)


def test_a_file_is_no_model(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"wanted a folder or a \.gguf file, got"):
        load_model(str(file), CPU)


def test_a_folder_without_a_configuration_is_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json is missing"):
        load_model(str(tmp_path), CPU)


def test_a_broken_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match=r"config\.json is not JSON"):
        load_model(str(tmp_path), CPU)


def test_a_folder_without_weights_says_so(folder_of):
    with pytest.raises(ModelNotFoundError, match=r"does not load: .*model\.safetensors"):
        load_model(folder_of(model_type="llama"), CPU)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_thing"}, "no_such_thing"),
        ({"model_type": "t5", "architectures": ["T5Model"]}, "T5Model: wanted a decoder-only"),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "BertForMaskedLM: wanted a decoder-only",
        ),
        (
            {"model_type": "rwkv"},
            "RwkvForCausalLM: wanted layers of full, .*RwkvBlock .a recurrent state outside",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "Gemma3ForCausalLM: wanted causal attention",
        ),
        (
            {"model_type": "gemma3n_text", "num_hidden_layers": 20, "num_kv_shared_layers": 20},
            "Gemma3nForCausalLM: num_kv_shared_layers: wanted fewer than all 20 layers, got 20",
        ),
        (
            {"model_type": "gemma4_text", "num_hidden_layers": 6, "num_kv_shared_layers": 1},
            "Gemma4ForCausalLM: layer_types: wanted .* before the last 1 .* none of full_attention",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_an_architecture_that_cannot_run_is_refused_by_name(folder_of, config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(folder_of(**config), CPU)


def run_offline(code, home):
    """Run code in a process whose hub is a port without a server."""
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(home), "NO_PROXY": "*"}
    unreachable["HF_HUB_OFFLINE"] = "0"  # whatever it is here
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **unreachable},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_without_a_hub_a_cached_id_loads_and_another_is_refused_after_one_question(
    checkpoint, tmp_path
):
    cached = tmp_path / "hub" / "models--owner--name"
    shutil.copytree(checkpoint, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc", encoding="utf-8")
    code = (
        "import torch\n"
        "from model.load import loader\n"
        "ask, asked = loader.urlopen, []\n"
        "loader.urlopen = lambda *a, **k: (asked.append(a), ask(*a, **k))[1]\n"
        "cpu = torch.device('cpu')\n"
        "print(loader.load_model('owner/name', cpu).max_positions)\n"
        "try: loader.load_model('no-such-owner/no-such-model', cpu)\n"
        "except loader.ModelNotFoundError as error: print(error)\n"
        "print(len(asked))\n"
    )
    positions, error, asked = run_offline(code, tmp_path)
    assert (positions, asked) == ("256", "2")
    assert error.startswith("model: there is no folder 'no-such-owner/no-such-model', the hub's")
    assert "not cached here, and http://127.0.0.1:9 cannot be reached: " in error


def test_in_offline_mode_no_hub_is_asked(monkeypatch):
    monkeypatch.setattr(loader.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delattr(loader, "urlopen")
    message = "^model: there is no folder 'no-such-owner/no-such-model', and the hub"
    with pytest.raises(ModelNotFoundError, match=message):
        load_model("no-such-owner/no-such-model", CPU)


def test_a_path_that_is_not_utf_8_is_refused_by_name():
    with pytest.raises(ModelNotFoundError, match=r"that UTF-8 can encode, got 'm.udc80'"):
        load_model("m\udc80", CPU)


def test_a_tokenizer_is_described_without_padding_and_is_copied_only_to_remove_it(monkeypatch):
    padded, plain = byte_tokenizer(), byte_tokenizer()
    padded.backend_tokenizer.enable_padding(length=64)
    padded.backend_tokenizer.enable_truncation(2)
    described = HuggingFaceCodec(plain, "", None).describe()
    assert HuggingFaceCodec(padded, "", None).describe() == described
    assert padded.backend_tokenizer.padding["length"] == 64
    assert padded.backend_tokenizer.truncation["max_length"] == 2
    monkeypatch.setattr(codec, "copy", None)
    assert HuggingFaceCodec(plain, "", None).describe() == described
