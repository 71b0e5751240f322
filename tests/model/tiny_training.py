"""`python -m tests.model.tiny_training`: train the tiny model and its tokenizer again.

The text is the documentation that the running interpreter carries: the language reference behind
`help()`, the docstrings of the standard library's Python files (read, not imported) and those of
its C modules (imported, because they have no source). The tokenizer is a byte-level BPE. The
network is a Qwen3 with 1.9 million parameters; the matrices of its layers are trained with Muon
(K. Jordan, 2024), embeddings and norms with AdamW.

Invariants: no network access and no file outside the standard library; no paragraph appears twice,
and none of a licence, a copyright notice or a list of authors; a document is held out by its name
alone, and neither the vocabulary nor the weights see it. With --steps the same seed, interpreter,
libraries and processor give the same files.
"""

import argparse
import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import math
import os
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from model.errors import InvalidArgumentError
from model.tiny import CHECKPOINT_DIR

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the tokenizer's trainer numbers special tokens first
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n\n{% endfor %}"
"""A paragraph for each message: the model has read documentation, and no conversation."""

HELD_OUT_ONE_IN = 32
_EVALUATION_WINDOW = 512
_REPORT_EVERY = 100
_NOT_LIBRARY = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "turtledemo"}
)
_NOT_IMPORTED = frozenset({"readline"})  # its import writes escape codes to some terminals

_LEGAL = re.compile(
    r"copyright|licen[cs]e|\(c\)\s*(19|20)\d\d|©|all rights reserved|warrant(y|ies)"
    r"|permission (is|to)|hereby grant|redistribut|liab(le|ility) (for|to)",
    re.IGNORECASE,
)
_CREDIT = re.compile(
    r"\b(written|contributed|designed|developed|implemented|modified|maintained) by\b"
    r"|\bauthors?\b\s*[:=(]|[\w.+-]+@(?!example|localhost)[\w-]+\.(com|org|net|edu|de|uk|nl|it|fr)\b",
    re.IGNORECASE,
)
_RULER = re.compile(r"\s*([-=*~^#_+.])\1{2,}\s*")
_TABLE = re.compile(r"\s*(\+[-=]|\|)")
_BULLET = re.compile(r"(\s*)([-*o]|\d+\.|\(\w\))\s+")
_CODE = re.compile(r"\s*(>>>|\.\.\.|[$#%])")
_WIDE_STOP = re.compile(r"(?<=[a-z)\]\"'][.!?]) {2,}(?=[A-Z\"'`*(])")
_WRAPPED_LENGTH = 45  # a line broken by a writer's editor is at least this long; code rarely is

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

Entry = tuple[str, str]
"""The heading of a documented object, "" if it needs none, and its text."""

Source = tuple[str, list[Entry]]
"""The name of a document, such as `topics/assert` or `json.dumps`, and its entries as found."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train and for how long: `steps`, or `minutes` where `steps` is None."""

    steps: int | None = None
    minutes: float = 12.0
    seed: int = 0
    rate: float = 8e-3
    tokens_per_step: int = 2048
    window: int = 256
    long_window: int = 512  # in every fourth step, so that prompt and answer stay in known range
    warmup_steps: int = 50
    dropout: float = 0.1
    vocab_size: int = 2048


# The text


def gather() -> dict[str, str]:
    """Return every document of the running interpreter by name. About 2.5 MB and 3 seconds."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return assemble([*topic_sources(), *library_sources(library), *c_sources()])


def assemble(sources: Iterable[Source]) -> dict[str, str]:
    """Clean sources, leaving out each paragraph that an earlier one had. O(characters).

    An entry with no text left is left out with its heading, and so is a document without entries.
    """
    seen: set[str] = set()
    documents: dict[str, str] = {}
    for name, entries in sources:
        parts: list[str] = []
        for heading, text in entries:
            fresh = []
            for paragraph in paragraphs(text):
                words = " ".join(paragraph.split())
                if words not in seen:
                    seen.add(words)
                    fresh.append(paragraph)
            if fresh:
                parts += [heading, *fresh] if heading else fresh
        if parts:
            documents[name] = "\n\n".join(parts)
    return documents


def split(documents: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the texts to train on and those held out: by their names, about one in 32."""
    texts: tuple[list[str], list[str]] = ([], [])
    for name, text in documents.items():
        digest = hashlib.sha256(name.encode()).digest()
        texts[int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0].append(text)
    return texts


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs worth learning from, each unwrapped if it is prose. O(len(text)).

    Legal texts, credits, tables and the rulers under headings are left out. Common indentation is
    removed; what remains marks code and lists, and stays. One space follows a full stop.
    """
    lines = [line.rstrip() for line in inspect.cleandoc(text).splitlines()]
    body = "\n".join(line for line in lines if not _RULER.fullmatch(line))
    blocks = [block.strip("\n") for block in re.split(r"\n{2,}", body)]
    unwanted = (_LEGAL.search, _CREDIT.search, _TABLE.match)
    wanted = [block for block in blocks if block and not any(find(block) for find in unwanted)]
    return [_WIDE_STOP.sub(" ", _unwrap(block)) for block in wanted]


def _unwrap(block: str) -> str:
    """Join the lines of a wrapped paragraph or list item; return anything else as it is."""
    first, *rest = lines = block.split("\n")
    if not rest or _CODE.match(first) or min(map(len, lines[:-1])) < _WRAPPED_LENGTH:
        return block
    bullet = _BULLET.match(first)
    indent = bullet.end() if bullet else _indent(first)
    if any(_indent(line) != indent or _BULLET.match(line) for line in rest):
        return block
    return " ".join([first, *(line.strip() for line in rest)])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def topic_sources() -> Iterator[Source]:
    """Yield the language reference as `help("TOPIC")` shows it, a source a topic, by name."""
    for name, text in sorted(topics.topics.items()):
        yield f"topics/{name}", [("", text)]


def library_sources(root: Path, within: str = "") -> Iterator[Source]:
    """Yield the docstrings of the Python files in `root / within`, by path, without tests.

    A source is the docstring of a module or of a top-level function, or those of a class and its
    methods; its name is relative to `root`.
    """
    paths = []
    for folder, subfolders, files in os.walk(root / within):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old docstrings
            tree = ast.parse(path.read_bytes())
        yield module, [(f"Module {module}", ast.get_docstring(tree) or "")]
        for node in tree.body:
            if isinstance(node, _Definition):
                name = f"{module}.{node.name}"
                yield name, [*_definition_entries(node, name)]


def _definition_entries(node: _Definition, name: str) -> Iterator[Entry]:
    docstring = ast.get_docstring(node) or ""
    if not isinstance(node, ast.ClassDef):
        arguments = node.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        names = [argument for argument in names if argument not in {"self", "cls"}]
        names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
        names += [argument.arg for argument in arguments.kwonlyargs]
        names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
        yield f"{name}({', '.join(names)})", docstring
        return
    yield f"class {name}", docstring
    for child in node.body:
        if isinstance(child, _Definition):
            yield from _definition_entries(child, f"{node.name}.{child.name}")


def c_sources() -> Iterator[Source]:
    """Yield the docstrings of the standard library's C modules and built-ins, by module name."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    for name in sorted(sys.stdlib_module_names - _NOT_IMPORTED):
        spec = importlib.util.find_spec(name)
        is_private = name.startswith(("_test", "xx", "_xx"))
        if is_private or spec is None or not (spec.origin or "").endswith(("built-in", *suffixes)):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                module = importlib.import_module(name)
            except ImportError:  # built without the library it wraps
                continue
        yield name, [(f"Module {name}", _doc_of(module))]
        for key, value in sorted(vars(module).items()):
            yield f"{name}.{key}", [*_object_entries(value, f"{name}.{key}", depth=1)]


def _object_entries(value: object, name: str, *, depth: int) -> Iterator[Entry]:
    if inspect.isclass(value):
        yield f"class {name}", _doc_of(value)
        for key, member in sorted(vars(value).items()) if depth else ():
            yield from _object_entries(member, f"{value.__name__}.{key}", depth=depth - 1)
    elif inspect.isroutine(value):
        signature = getattr(value, "__text_signature__", None) or ""
        names = [part.split("=")[0].strip(" ()") for part in signature.split(",")]
        names = [name for name in names if name.isidentifier() and name not in {"self", "cls"}]
        yield f"{name}({', '.join(names)})", _doc_of(value)
    elif inspect.isdatadescriptor(value):
        yield name, _doc_of(value)


def _doc_of(value: object) -> str:
    doc = getattr(value, "__doc__", None)
    return doc if isinstance(doc, str) else ""


# The tokenizer and the network


def learn_vocabulary(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most `vocab_size` tokens: end-of-text, 256 bytes, and BPE merges.

    Every text decodes to itself, and nothing is added around an encoded text. About 2 seconds for
    2.5 MB. The class is one that `AutoTokenizer` loads from a saved folder as it is, so that its
    splitting rules are read from the file and not guessed from the model's architecture.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # Transformers leaves it bare
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Return the tokens of texts, each closed by the end-of-text token: int64 [num_tokens]."""
    rows = tokenizer([text + END_OF_TEXT for text in texts], verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in row])


def build_network(vocab_size: int) -> Qwen3ForCausalLM:
    """Return a network with random weights, float32, on the CPU."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def next_token_loss(network: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, of every token but the first of each window.

    windows: int64 [batch, length].
    """
    logits = network(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(
    network: nn.Module, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> float:
    """Return the bits that the network needs for each byte of texts in UTF-8. O(num_tokens).

    Every token but the very first is predicted once, from up to 512 tokens before it; the
    end-of-text tokens cost bits and count no bytes.
    """
    tokens, nats = encode(tokenizer, texts), 0.0
    for start in range(0, len(tokens) - 1, _EVALUATION_WINDOW):
        piece = tokens[start : start + _EVALUATION_WINDOW + 1]
        nats += next_token_loss(network, piece[None]).item() * (len(piece) - 1)
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


# Training


def make_checkpoint(documents: dict[str, str], out: Path, settings: Settings) -> dict[str, float]:
    """Train a tokenizer and a network on the documents not held out, and save both to `out`.

    Writes config.json, generation_config.json, model.safetensors (bf16), tokenizer.json and
    tokenizer_config.json.

    Returns:
        The bits a byte of the saved weights ("train", "held out"), "parameters" and "steps".

    Raises:
        InvalidArgumentError: too little text to train on, or none to hold out.
    """
    texts, held_out = split(documents)
    if not texts or not held_out:
        raise InvalidArgumentError(
            "documents: wanted some to learn from and some to hold out, "
            f"got {len(texts)} and {len(held_out)}"
        )
    torch.manual_seed(settings.seed)
    tokenizer = learn_vocabulary(texts, settings.vocab_size)
    network = build_network(len(tokenizer))
    num_steps = _train(network, encode(tokenizer, texts), settings)
    weights: nn.Module = network  # the view of it that is typed
    weights.eval()
    weights.to(torch.bfloat16)
    network.generation_config.pad_token_id = network.config.eos_token_id  # `generate` asks for one
    tokenizer.save_pretrained(out, save_jinja_files=False)
    network.save_pretrained(out)
    weights.float()  # the saved numbers, as a CPU computes with them
    sample = texts[:: max(1, len(texts) // len(held_out))]
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "steps": num_steps,
        "train": bits_per_byte(network, tokenizer, sample),
        "held out": bits_per_byte(network, tokenizer, held_out),
    }


def _train(network: Qwen3ForCausalLM, tokens: Tensor, settings: Settings) -> int:
    """Train in place on random windows of the tokens; return the number of steps.

    Warm-up, then a linear decay of the rates to 0; bf16 autocast; gradients are clipped to norm 1.
    Dropout is for the embeddings and the MLPs, where the architecture has none.
    """
    if len(tokens) <= settings.long_window:
        raise InvalidArgumentError(
            f"documents: wanted more than {settings.long_window} tokens to learn from, "
            f"got {len(tokens)}"
        )
    named = dict(network.named_parameters())  # tied weights appear once
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
    optimizers: list[Optimizer] = [
        Muon(matrices, lr=2.5 * settings.rate, weight_decay=0.1, momentum=0.95),
        AdamW(others, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def drop(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return functional.dropout(output, settings.dropout, training=module.training)

    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    full_rates = [group["lr"] for group in groups]
    places = [network.model.embed_tokens, *(layer.mlp for layer in network.model.layers)]
    handles = [place.register_forward_hook(drop) for place in places]
    generator = torch.Generator().manual_seed(settings.seed)
    network.train()
    recent, begin, step, done = torch.zeros(()), time.monotonic(), 0, 0.0
    while done < 1.0:
        length = settings.long_window if step % 4 == 3 else settings.window
        count = settings.tokens_per_step // length
        starts = torch.randint(len(tokens) - length, (count, 1), generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(network, tokens[starts + torch.arange(length + 1)])
        torch.autograd.backward(loss)
        clip_grad_norm_(network.parameters(), 1.0)
        for group, full_rate in zip(groups, full_rates, strict=True):
            group["lr"] = full_rate * min(1.0, (step + 1) / settings.warmup_steps) * (1.0 - done)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent += loss.detach()
        step += 1
        if step % _REPORT_EVERY == 0:
            nats = recent.item() / _REPORT_EVERY
            print(f"step {step}  {done:4.0%}  {nats:.3f} nats a token", file=sys.stderr)
            recent.zero_()
        spent = (time.monotonic() - begin) / (60 * settings.minutes)
        done = spent if settings.steps is None else step / settings.steps
    for handle in handles:
        handle.remove()
    return step


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"wanted a number above 0, got {text}")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"wanted a whole number above 0, got {text}")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; the result goes to stdout, progress to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.model.tiny_training", description=__doc__
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=_positive, default=12.0, help="train this long")
    length.add_argument("--steps", type=_positive_int, help="or make exactly this many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=CHECKPOINT_DIR, help="folder to write to")
    parser.add_argument("--threads", type=_positive_int, default=2, help="of torch")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = Settings(steps=options.steps, minutes=options.minutes, seed=options.seed)
    for name, value in make_checkpoint(gather(), options.out, settings).items():
        is_count = name in {"parameters", "steps"}
        print(f"{name:12} {value}" if is_count else f"{name:12} {value:.3f} bits a byte")
    print(f"written to   {options.out}")


if __name__ == "__main__":
    main()
