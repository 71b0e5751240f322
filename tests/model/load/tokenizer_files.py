"""Small tokenizer.json files with the structure that families of models publish.

Each has the normalizer, pre-tokenizer, decoder, post-processor, model settings and flags of added
tokens of its family, and a vocabulary of a few hundred words trained on `TEXTS`.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Punctuation, Split

TEXTS = (
    "x):\n    return",
    "def f(x, y=None):\n\treturn [x for _ in range(1234567)]\r\n\r\n\n",
    "Hello, world!  This is   a test.   ",
    " leading and trailing ",
    "I'm sure you'll say it's 3.14159, or 2,718; they'Ve SEEN camelCase and HTTPServer2",
    "na\u00efve caf\u00e9 cafe\u0301 \u212b \ufb01 \u00bd",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 ok \U0001f1e9\U0001f1ea",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27",
    "a\u00a0b\u3000c\u200bd\ufeff\u2028e",
    "0 00 000 0000 12345678901234567890",
    "\u2581already\u2581spaced",
    "UPPER lower Title",
    "<s>one</s> two <|end|>  three<|end|>\n<tool>four</tool> <|endoftext|>five [CLS] six<unk>",
    "",
    " ",
    "\n",
)
END = "<|endoftext|>"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = GPT4.replace("{1,3}", "")
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = GPT_OSS.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def plain(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **({"normalized": False, "special": True} | flags))


def sequence(*parts: Any) -> Any:
    """Several pre-tokenizers, normalizers or decoders in a row."""
    return sys.modules[type(parts[0]).__module__].Sequence(list(parts))


def split(pattern: str, behavior: str = "isolated") -> Split:
    return Split(Regex(pattern), behavior)


def begins_with(tokenizer: Tokenizer, *tokens: str) -> processors.TemplateProcessing:
    """Adds these tokens before a text."""
    single = " ".join([*tokens, "$A"])
    known = [(token, tokenizer.token_to_id(token)) for token in {*tokens}]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=known)


def byte_level(
    pre_tokenizer: Any,
    normalizer: Any = None,
    added: tuple[AddedToken, ...] = (plain(END),),
    first: tuple[str, ...] = (),
    **settings: Any,
) -> Tokenizer:
    """BPE over bytes."""
    tokenizer = Tokenizer(models.BPE(**settings))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    tokenizer.add_tokens(list(added))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if first:
        template = begins_with(tokenizer, *first)
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, template])
    return tokenizer


def pieces(
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    added: tuple[AddedToken, ...] = (),
    first: tuple[str, ...] = ("<s>",),
    *,
    strips: bool = True,
) -> Tokenizer:
    """BPE over characters, with bytes for those that are in no word: Llama 2 and Gemma."""
    special = ["<unk>", "<s>", "</s>"]
    seed = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # noqa: S106
    seed.pre_tokenizer = Metaspace()
    spelled = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(seed, trainers.BpeTrainer(vocab_size=700, special_tokens=spelled, limit_alphabet=60))
    content = json.loads(seed.to_str())
    content["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(content))
    no_pre_tokenizer: Any = None
    tokenizer.pre_tokenizer = pre_tokenizer or no_pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([*map(plain, special), *added])
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = sequence(*back, *([decoders.Strip(" ", 1, 0)] if strips else []))
    if first:
        tokenizer.post_processor = begins_with(tokenizer, *first)
    return tokenizer


def unigram() -> Tokenizer:
    """T5's: a vocabulary with probabilities, over words that begin with a mark."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = sequence(normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "))
    tokenizer.pre_tokenizer = sequence(pre_tokenizers.WhitespaceSplit(), Metaspace())
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=150,
        special_tokens=special,
        unk_token="<unk>",  # noqa: S106
    )
    _train(tokenizer, trainer)
    tokenizer.add_tokens([plain(f"<extra_id_{n}>", rstrip=True, lstrip=True) for n in range(3)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


def word_piece(*, lowercase: bool) -> Tokenizer:
    """BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _train(tokenizer, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def bounded(tokenizer: Tokenizer) -> Tokenizer:
    """With truncation and padding left in the file."""
    tokenizer.enable_truncation(max_length=5)
    tokenizer.enable_padding(length=16, pad_id=3, pad_token=END)
    return tokenizer


def prefixed() -> Any:
    """Llama 2's and Phi 3's normalizer."""
    return sequence(normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581"))


def _train(tokenizer: Tokenizer, trainer: Any) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator([*TEXTS, *TEXTS], trainer)


BYTES = {"add_prefix_space": False, "use_regex": False}
MARKS = (
    plain(END),
    plain("<s>"),
    plain("</s>"),
    plain("<|end|>", rstrip=True),
    plain("<tool>", special=False),
    AddedToken("</tool>", normalized=True, special=False, lstrip=True),
)
FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": lambda: byte_level(ByteLevel(add_prefix_space=False)),
    "GPT-NeoX": lambda: byte_level(ByteLevel(add_prefix_space=False), normalizers.NFC()),
    "RoBERTa with a prefix space": lambda: byte_level(ByteLevel(add_prefix_space=True)),
    "Llama 3": lambda: byte_level(
        sequence(split(GPT4), ByteLevel(**BYTES)), added=MARKS, first=("<s>",), ignore_merges=True
    ),
    "BOS twice": lambda: byte_level(
        sequence(split(GPT4), ByteLevel(**BYTES)), added=MARKS, first=("<s>", "<s>")
    ),
    "Qwen 2 and 3": lambda: byte_level(
        sequence(split(QWEN), ByteLevel(**BYTES)), normalizers.NFC(), added=MARKS
    ),
    "OLMo 2 and Granite 4": lambda: byte_level(sequence(split(GPT4), ByteLevel(**BYTES))),
    "GPT-OSS": lambda: byte_level(
        sequence(split(GPT_OSS), ByteLevel(**BYTES)), added=MARKS, ignore_merges=True
    ),
    "Mistral's tekken": lambda: byte_level(
        sequence(split(TEKKEN), ByteLevel(**BYTES)), added=MARKS, first=("<s>",), ignore_merges=True
    ),
    "DeepSeek V3": lambda: byte_level(
        sequence(
            split(r"\p{N}{1,3}"),
            split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
            split(DEEPSEEK),
            ByteLevel(**BYTES),
        ),
        added=MARKS,
    ),
    "Falcon": lambda: byte_level(
        sequence(
            Punctuation("contiguous"),
            ByteLevel(add_prefix_space=False),
            Digits(individual_digits=False),
            split("[0-9][0-9][0-9]"),
        )
    ),
    "StarCoder and Command R": lambda: byte_level(
        sequence(Digits(individual_digits=True), ByteLevel(add_prefix_space=False)),
        normalizers.NFC(),
        added=MARKS,
    ),
    "Phi 4": lambda: byte_level(
        sequence(split(GPT4), ByteLevel(**BYTES)),
        added=(*MARKS, plain("<|im_start|>", lstrip=True, rstrip=True)),
    ),
    "truncation and padding": lambda: bounded(
        byte_level(sequence(split(QWEN), ByteLevel(**BYTES)), added=MARKS)
    ),
    "Llama 2": lambda: pieces(prefixed()),
    "Phi 3": lambda: pieces(
        prefixed(), added=(plain("<|end|>", rstrip=True), plain(END)), first=()
    ),
    "Mistral v0.3": lambda: pieces(pre_tokenizer=Metaspace(prepend_scheme="first", split=False)),
    "Gemma": lambda: pieces(
        normalizers.Replace(" ", "\u2581"),
        Split(" ", "merged_with_previous"),
        added=(plain("<tool>", special=False),),
        strips=False,
    ),
    "T5": unigram,
    "BERT": lambda: word_piece(lowercase=True),
    "BERT, cased": lambda: word_piece(lowercase=False),
}


@cache
def content(family: str) -> str:
    """The tokenizer.json of a family. Trains it once."""
    return FAMILIES[family]().to_str()


def write(folder: Path, family: str, model_type: str, **settings: object) -> Path:
    """Write a folder with a family's tokenizer.json, and settings in tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer.json").write_text(content(family), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
