"""Broken input to the command line, as data: what is wrong with it, and what a user reads then.

The site shows the table on the page of errors. `test_broken_input.py` makes every case and runs it;
"""

import json
import os
import pickle  # one is made, to be refused
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model.trace import TRACE_BEGINS

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 988097824\n"


@dataclass(frozen=True)
class Broken:
    """One broken input.

    Attributes:
        what: in words, for the page.
        says: a part of the line that a user reads.
        edit: breaks a copy of a model's folder that is whole.
        argv: flags of the command line.
        code: the exit code.
        stdin: what stdin holds.
    """

    what: str
    says: str
    edit: Callable[[Path], object] | None = None
    argv: tuple[str, ...] = ()
    code: int = 2
    stdin: bytes = b""


def write(name, content):
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def field(name, key, value):
    """Give one field of a JSON file this value."""

    def edit(folder):
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8"))
        content[key] = value
        path.write_text(json.dumps(content), encoding="utf-8")

    return edit


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name, size):
    def edit(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:size])

    return edit


def weights(change):
    """Replace the tensors of a checkpoint by what `change` makes of them."""

    def edit(folder):
        tensors = change(load_file(folder / "model.safetensors"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def one(change):
    """Replace one tensor."""
    return weights(lambda tensors: {**tensors, WEIGHT: change(tensors[WEIGHT])})


def index(content):
    """Give the weights an index of shards, with one shard."""

    def edit(folder):
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        made = content(names) if callable(content) else content
        (folder / INDEX).write_text(json.dumps(made), encoding="utf-8")

    return edit


def pickled(data):
    def edit(folder):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(data)

    return edit


class _Calling:
    """What runs code where pickles are trusted."""

    def __reduce__(self):
        return (os.system, ("echo never",))


def both(*edits):
    return lambda folder: [edit(folder) for edit in edits]


def folder_for(name):
    """Put a folder where a file should be."""

    def edit(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return edit


def named(names):
    """A whole index of one shard."""
    return {"metadata": {}, "weight_map": dict.fromkeys(names, "shard.safetensors")}


WEIGHTS = (
    Broken(
        "every tensor has another name",
        "lm_head.weight, model.embed_tokens.weight, model.layers.0.input_layernorm.weight and 22 "
        "more are missing; x.lm_head.weight",
        weights(lambda tensors: {f"x.{name}": tensor for name, tensor in tensors.items()}),
    ),
    Broken(
        "one tensor is missing",
        f"{WEIGHT} is missing",
        weights(lambda tensors: {k: v for k, v in tensors.items() if k != WEIGHT}),
    ),
    Broken(
        "one tensor too many",
        "extra.weight is not in the network",
        weights(lambda tensors: {**tensors, "extra.weight": torch.zeros(3)}),
    ),
    Broken(
        "a tensor of another shape",
        f"{WEIGHT} is 48x64 and the network wants 64x48",
        one(lambda tensor: tensor.T.contiguous()),
    ),
    Broken(
        "a tensor is a scalar",
        f"{WEIGHT} is a scalar and the network wants 64x48",
        one(lambda _: torch.zeros(())),
    ),
    Broken(
        "a tensor is stored twice, with the network's prefix and without",
        "one tensor is stored as layers.0.input_layernorm.weight and as model.layers.0.input",
        weights(
            lambda tensors: {
                **tensors,
                **{k.removeprefix("model."): v * 0 for k, v in tensors.items() if ".0." in k},
            }
        ),
    ),
    Broken(
        "tied weights, and another shape of the second",
        "lm_head.weight is 3x5 and the network wants 320x48",
        both(
            field("config.json", "tie_word_embeddings", True),
            weights(lambda tensors: {**tensors, "lm_head.weight": torch.zeros(3, 5)}),
        ),
    ),
    Broken("no tensors", "22 more are missing", weights(lambda _: {})),
    Broken(
        "the name of a tensor has the escape codes of a terminal",
        r"x\x1b]0;title\x07\x1b[31m.weight is not in the network",
        weights(lambda tensors: {**tensors, "x\x1b]0;title\x07\x1b[31m.weight": torch.zeros(3)}),
    ),
    *(
        Broken(
            f"weights are {name}",
            f"{WEIGHT} is {name}: quantised models are not supported",
            one(lambda tensor, dtype=dtype: tensor.to(dtype)),
        )
        for name, dtype in (
            ("I8", torch.int8),
            ("U8", torch.uint8),
            ("F8_E4M3", torch.float8_e4m3fn),
            ("I64", torch.int64),
            ("BOOL", torch.bool),
        )
    ),
    Broken(
        "weights are NaN",
        "--prompt (number 1): failed after 0 tokens: the model's logits",
        one(lambda tensor: tensor * torch.nan),
        code=3,
    ),
    Broken(
        "model.safetensors is empty",
        "is not a whole safetensors file",
        write("model.safetensors", b""),
    ),
    *(
        Broken(
            f"{name} is a Git LFS pointer",
            f"{name} is a Git LFS pointer, not the content: run `git lfs pull` in ",
            edit,
        )
        for name, edit in (
            ("model.safetensors", write("model.safetensors", POINTER)),
            ("shard.safetensors", both(index(named), write("shard.safetensors", POINTER))),
            ("pytorch_model.bin", pickled(POINTER)),
            ("tokenizer.json", write("tokenizer.json", POINTER)),
        )
    ),
    Broken(
        "model.safetensors is cut off in its header",
        "is not a whole safetensors file",
        cut("model.safetensors", 1000),
    ),
    Broken(
        "model.safetensors is cut off in its last tensor",
        "file not fully covered",
        cut("model.safetensors", -7),
    ),
    Broken(
        "model.safetensors is garbage",
        "is not a whole safetensors file",
        write("model.safetensors", b"\xff" * 5000),
    ),
    Broken("no weights", "no file named model.safetensors", remove("model.safetensors")),
    Broken("the index is a list", f"{INDEX}: wanted a JSON object, got []", index([])),
    Broken("the index names no tensors", f"{INDEX}: weight_map: wanted tensors", index({})),
    Broken(
        "the index has no metadata",
        f"{INDEX}: metadata: wanted an object",
        index({"weight_map": {"a": "shard.safetensors"}}),
    ),
    Broken(
        "the index names a number",
        f"{INDEX}: a: wanted the name of a file, got 1",
        index({"metadata": {}, "weight_map": {"a": 1}}),
    ),
    Broken(
        "the index names a file of another folder",
        f"{INDEX}: a: wanted the name of a file, got '../shard.safetensors'",
        index({"metadata": {}, "weight_map": {"a": "../shard.safetensors"}}),
    ),
    Broken(
        "the index names a file that is not there",
        "names lost.safetensors, which is not there",
        index({"metadata": {}, "weight_map": {"a": "lost.safetensors"}}),
    ),
    Broken(
        "pickled weights are garbage", "pickled weights that are broken", pickled(b"garbage" * 9)
    ),
    Broken(
        "pickled weights would run code",
        "or hold more than tensors",
        pickled(pickle.dumps({WEIGHT: _Calling()}, protocol=2)),
    ),
)

_UNPREFIXED = {
    "type": "BPE",
    "vocab": {"é": 0, "b": 1},
    "merges": [["b", "é"]],
    "continuing_subword_prefix": "b",
}

_NO_OBJECT = (
    ("empty", ""),
    ("a list", "[]"),
    ("null", "null"),
    ("cut off", '{"a"'),
    ("not UTF-8", b'{"\xff"}'),
)

FILES = (
    *(
        Broken(f"{name} is {what}", f"{name}{says}", write(name, content))
        for name in (
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
        )
        for what, content in _NO_OBJECT
        for says in (": wanted a JSON object" if what in {"a list", "null"} else " is not JSON",)
    ),
    Broken(
        "config.json is nested too deeply",
        "config.json is not JSON",
        write("config.json", "[" * 100_000),
    ),
    Broken("no config.json", "config.json is missing", remove("config.json")),
    Broken("config.json is a folder", "config.json is not a file", folder_for("config.json")),
    Broken(
        "tokenizer.json is a folder", "tokenizer.json is not a file", folder_for("tokenizer.json")
    ),
    Broken(
        "the index names a file of 5,000 characters",
        f"{INDEX}: 'xxx",
        index({"metadata": {}, "weight_map": {"a": "x" * 5000}}),
    ),
    *(
        Broken(
            f"generation_config.json: eos_token_id is {value}",
            f"eos_token_id: wanted token ids, got {value!r}",
            write("generation_config.json", json.dumps({"eos_token_id": value})),
        )
        for value in ("x", -5, 1.5, True, 10**30, [["a"]], {})
    ),
    *(
        Broken(
            f"generation_config.json: {next(iter(content))} is {next(iter(content.values()))}",
            "generation_config.json: ",
            write("generation_config.json", json.dumps(content)),
        )
        for content in (
            {"max_new_tokens": [1]},
            {"pad_token_id": "x"},
            {"cache_implementation": "x"},
        )
    ),
    Broken(
        "tokenizer_config.json: tokenizer_class is 3",
        "tokenizer_class: wanted the name of one, got 3",
        field("tokenizer_config.json", "tokenizer_class", 3),
    ),
    *(
        Broken(
            f"tokenizer_config.json: {key} is {value}",
            "the tokenizer of ",
            field("tokenizer_config.json", key, value),
        )
        for key, value in (
            ("model_max_length", "x"),
            ("eos_token", 3),
            ("added_tokens_decoder", []),
        )
    ),
    *(
        Broken(
            f"tokenizer.json: {key} is {value}",
            "the tokenizer of ",
            field("tokenizer.json", key, value),
        )
        for key, value in (
            ("model", None),
            ("model", {"type": "x"}),
            ("model", {"type": "BPE", "vocab": {}, "merges": []}),
            ("added_tokens", 3),
            ("pre_tokenizer", 3),
            ("decoder", 3),
            ("truncation", 3),
            ("version", 7),
        )
    ),
    *(
        Broken(
            f"tokenizer.json: {key} is {value}",
            "tokenizer.json makes the tokenizers library fail: ",
            field("tokenizer.json", key, value),
        )
        for key, value in (
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
            ("decoder", {"type": "Strip", "content": "a", "start": 9, "stop": 9}),
        )
    ),
    Broken(
        "tokenizer.json: merges that do not begin with continuing_subword_prefix",
        "merges: wanted a second part that begins with continuing_subword_prefix, 'b', got ['b',",
        field("tokenizer.json", "model", _UNPREFIXED),
    ),
    Broken("tokenizer.json is an empty object", "the tokenizer of ", write("tokenizer.json", "{}")),
    Broken("no tokenizer.json", "the tokenizer of ", remove("tokenizer.json")),
    Broken(
        "no tokenizer at all",
        "gives no tokens",
        remove("tokenizer.json", "tokenizer_config.json"),
    ),
)


def config(key, value, says, name=None):
    return Broken(name or f"config.json: {key} is {value}", says, field("config.json", key, value))


CONFIG = (
    config("model_type", "x", "config.json: model_type: Transformers"),
    config("model_type", ["x"], "config.json: model_type: wanted the name of one"),
    config("architectures", 3, "config.json: architectures: wanted names, got 3"),
    config("architectures", ["x"], "x: wanted a decoder-only language model"),
    config("architectures", ["LlamaForCausalLM"], "of model_type qwen3: Qwen3ForCausalLM"),
    config("auto_map", 3, "config.json: argument of type 'int' is not"),
    config("sub_configs", {}, "config.json: sub_configs: no network can be made with {}"),
    config("is_causal", False, "wanted causal attention, its mask is bidirectional"),
    config("dtype", "x", "config.json: dtype: no network can be made with 'x'"),
    config("hidden_size", "x", "config.json: Field 'hidden_size' expected int, got str"),
    config("hidden_size", 10**9, "describes a network of 1,413,000,000,064 parameters"),
    config("head_dim", 0, "config.json: head_dim: no network can be made with 0"),
    config("head_dim", 32, "o_proj.weight is 48x64 and the network wants 48x128"),
    config("num_attention_heads", 0, "num_attention_heads: no network can be made with 0"),
    config("num_key_value_heads", -1, "Trying to create tensor with negative dimension"),
    config("num_hidden_layers", 3, "`num_hidden_layers` (3) must be equal"),
    Broken(
        "config.json: num_hidden_layers is 10,000,000",
        "config.json: num_hidden_layers: wanted at most 10,000, got 10000000",
        write("config.json", json.dumps({"model_type": "llama", "num_hidden_layers": 10**7})),
    ),
    config("layer_types", ["x"], "config.json: The `layer_types` entries must be in"),
    config("vocab_size", 1, "and the network wants 1x48"),
    config("hidden_act", "x", "config.json: hidden_act: no network can be made with 'x'"),
    config("max_position_embeddings", 0, "config.json: max_position_embeddings: wanted at least 1"),
    config("max_position_embeddings", 10**30, "wanted at least 1 and at most 2,147,483,647"),
    config("max_position_embeddings", 5, "exceeds the model's 5 positions"),
    config("rope_parameters", 3, "config.json: Field 'rope_parameters'"),
    config(
        "rope_parameters",
        {"rope_type": "x"},
        "config.json: rope_parameters: no network can be made",
    ),
    config("rms_norm_eps", "x", "config.json: Field 'rms_norm_eps' expected float, got str"),
    config("eos_token_id", 10**30, "eos_token_id: wanted token ids"),
    config("quantization_config", {"quant_method": "x"}, "quant_method: wanted one of awq, "),
    config("quantization_config", 3, "quantization_config: wanted an object, got 3"),
)

FLAGS = (
    Broken("an unknown flag", "unrecognized arguments: --nonsense", argv=("--nonsense",)),
    Broken(
        "a flag without its value", "--max-tokens: expected one argument", argv=("--max-tokens",)
    ),
    Broken(
        "a word for a number", "--max-tokens: wanted an integer from 1", argv=("--max-tokens", "x")
    ),
    Broken("--max-tokens 0", "--max-tokens: wanted an integer from 1", argv=("--max-tokens", "0")),
    Broken(
        "more tokens than positions",
        "exceeds the model's 256 positions",
        argv=("--max-tokens", "999999"),
    ),
    Broken("--temperature nan", "--temperature: wanted a", argv=("--temperature", "nan")),
    Broken(
        "--top-p 2",
        "--top-p: wanted a number above 0 and at most 1",
        argv=("--temperature", "1", "--top-p", "2"),
    ),
    Broken("--backend of no name", "unknown backend 'nunba'", argv=("--backend", "nunba")),
    Broken("--model that is not there", "there is no folder './x'", argv=("--model", "./x")),
    Broken("--num-blocks 1", "--num-blocks: wanted an integer from 2", argv=("--num-blocks", "1")),
    Broken(
        "more blocks than memory", "blocks of 4 tokens take", argv=("--num-blocks", "2147483647")
    ),
    Broken(
        "--disk below a file",
        "--disk: /dev/null/kv/kvcore-tier cannot be used: Not a directory",
        argv=("--disk", "/dev/null/kv"),
    ),
    Broken("--disk-size alone", "has no effect without --disk", argv=("--disk-size", "1G")),
    Broken(
        "--host-memory 0",
        "--host-memory: wanted an integer of at least 1",
        argv=("--host-memory", "0"),
    ),
    Broken(
        "--host-memory 100TiB",
        "--host-memory: wanted at most",
        argv=("--host-memory", "100TiB"),
    ),
    Broken(
        "--host-memory 999PiB",
        "--host-memory: wanted bytes, such as",
        argv=("--host-memory", "999PiB"),
    ),
    Broken("--block-size 0", "--block-size: wanted an integer from 1", argv=("--block-size", "0")),
    Broken(
        "--kv-memory-bytes x",
        "--kv-memory-bytes: wanted bytes, such as",
        argv=("--kv-memory-bytes", "x"),
    ),
    Broken(
        "--max-num-seqs 0",
        "--max-num-seqs: wanted an integer of at least 1",
        argv=("--max-num-seqs", "0"),
    ),
    Broken(
        "--prompt with nothing in it", "wanted a prompt that is not empty", argv=("--prompt", " ")
    ),
    Broken(
        "a prompt that no positions can hold",
        "prompt: wanted at most 1,280 characters",
        argv=("--prompt", "x" * 100_000),
    ),
    Broken(
        "stdin is not UTF-8",
        "--prompt - (stdin) is not UTF-8",
        argv=("--prompt", "-"),
        stdin=b"\xff",
    ),
    Broken(
        "--prompts-file that is not there", "cannot read 'x.txt'", argv=("--prompts-file", "x.txt")
    ),
    Broken(
        "--prompts-file of another kind",
        "wanted a .txt or .jsonl",
        argv=("--prompts-file", "x.csv"),
    ),
    Broken("--stop that is not UTF-8", "stop: wanted text that UTF-8", argv=("--stop", "\udcff")),
    Broken(
        "--model of a name with the escape codes of a terminal",
        r"there is no folder './\x1b[31m'",
        argv=("--model", "./\x1b[31m"),
    ),
    Broken(
        "--prompts-file of such a name, with a broken line",
        r"\x1b[31m.jsonl line 1: not JSON",
        write("../\x1b[31m.jsonl", "{"),
        argv=("--prompts-file", "{beside}/\x1b[31m.jsonl"),
    ),
    Broken("--model of a name too long", "File name too long", argv=("--model", "a" * 9999)),
    Broken(
        "--draft-tokens without --drafts",
        "--draft-tokens: has no effect without --drafts or --draft-model",
        argv=("--draft-tokens", "4"),
    ),
    Broken("--stream with --json", "give one of them", argv=("--stream", "--json")),
    Broken("--verify with --seed", "remove --seed", argv=("--verify", "--seed", "1")),
    Broken(
        "--trace to a folder", "--trace: cannot write '/': Is a directory", argv=("--trace", "/")
    ),
    Broken(
        "--trace to a file of the model",
        "config.json', which this run reads: name another file",
        argv=("--trace", "{beside}/model/config.json"),
    ),
    Broken(
        "--trace to a link to a file of the model",
        "config.json', which this run reads: name another file",
        lambda folder: (folder.parent / "link").symlink_to(folder / "config.json"),
        argv=("--trace", "{beside}/link"),
    ),
    Broken(
        "--trace to the file of prompts",
        "prompts.txt', which this run reads: name another file",
        write("../prompts.txt", "ab"),
        argv=("--prompts-file", "{beside}/prompts.txt", "--trace", "{beside}/prompts.txt"),
    ),
    Broken(
        "--trace to a file that is no trace",
        "holds something that --trace has not written: name another file",
        write("../notes.txt", "ab"),
        argv=("--trace", "{beside}/notes.txt"),
    ),
    Broken(
        "a model that does not load, with --trace to an older trace",
        "config.json is not JSON",
        both(write("../trace.json", TRACE_BEGINS), write("config.json", "{")),
        argv=("--trace", "{beside}/trace.json"),
    ),
)

# A line of a prompts file, and what is wrong with it.
LINES = (
    ("not JSON", "{", "line 1: not JSON"),
    ("a list", "[]", "line 1: wanted an object with a prompt, got list"),
    ("no prompt", "{}", "line 1: wanted a prompt that is not empty, got None"),
    ("a prompt that is a number", '{"prompt": 3}', "line 1: wanted a prompt that is not empty"),
    ("an unknown field", '{"prompt": "a", "x": 1}', "line 1: unknown field 'x'"),
    ("n is 0", '{"prompt": "a", "n": 0, "temperature": 1}', "line 1: n: wanted an integer"),
    ("max_tokens is text", '{"prompt": "a", "max_tokens": "x"}', "line 1: max_tokens: wanted"),
    ("half a character", '{"prompt": "\\ud800"}', "line 1: wanted text that UTF-8 can encode"),
    ("a number of 5,000 digits", f'{{"n": {"9" * 5000}}}', "line 1: an integer has more digits"),
    ("nested too deeply", "[" * 100_000, "line 1: its lists or objects are nested too deeply"),
)


def _line_case(what, line, says):
    def edit(folder):
        (folder.parent / "lines.jsonl").write_text(line + "\n", encoding="utf-8")

    return Broken(
        f"--prompts-file, a line: {what}", says, edit, ("--prompts-file", "{beside}/lines.jsonl")
    )


GROUPS = (
    ("Weights", WEIGHTS),
    ("Files of a model", FILES),
    ("Fields of config.json", CONFIG),
    ("Flags and prompts", (*FLAGS, *(_line_case(*line) for line in LINES))),
)

# Besides, every field of config.json gets each of these values: it runs and gives generate's
# tokens, or it is refused in one line.
VALUES = (None, "x", -1, 0, 1, 3, 1.5, True, [], ["x"], {}, {"a": 1}, 10**7, 10**30, float("nan"))
MORE_FIELDS = (
    "sliding_window",
    "attn_logit_softcapping",
    "rope_scaling",
    "partial_rotary_factor",
    "x",
)
