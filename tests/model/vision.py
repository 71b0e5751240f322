"""Tiny networks with vision towers, their processors, and a walk: images equal `generate`.

`python -m tests.model.vision` stores what each came to in `images.json`.
"""

import copy
import functools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    IMAGE_PROCESSOR_MAPPING,
    PROCESSOR_MAPPING,
    AutoModelForImageTextToText,
    Gemma4VisionConfig,
    Glm4vConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
)

from model import ModelError, SamplingParams
from model.attention.attention import IMPLEMENTATION
from model.control.request import Request
from model.control.submission import Submission
from model.engine import Engine
from model.load.codec import HuggingFaceCodec
from model.load.images import NoImages, codec_of, processor_class
from model.load.loader import LoadedModel, wrap_network
from tests.model.networks import KnowingDrafter, preempt_in_steps
from tests.model.tiny_configs import make_config
from tests.model.walk import CLEAR, NEAR, SEEDS, SIZES, engine_of, quieten

VOCABULARY = 384
_SHARED = {"Qwen3VLMoeConfig": Qwen3VLConfig, "Glm4vMoeConfig": Glm4vConfig}
"""Configurations whose checkpoints name the image processor of another."""


@dataclass(frozen=True)
class Family:
    """What a class needs beside tiny sizes.

    Attributes:
        tokens: the names of special tokens in the tokenizer, and their texts; `image_token` is the
            one whose rows the tower gives.
        config: attributes of the configuration, dotted; `@name` is the id of a token.
        image: settings of the image processor.
        processor: settings of the processor.
        chunk: the most tokens of a step that cuts prompts.
    """

    tokens: dict[str, str] = field(default_factory=lambda: {"image_token": "<image>"})
    config: dict[str, Any] = field(default_factory=dict)
    image: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    chunk: int = 11


_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
_QWEN_IDS = {
    "image_token_id": "@image_token",
    "video_token_id": "@video_token",
    "vision_start_token_id": "@vision_start",
    "vision_end_token_id": "@vision_end",
    "vision_config.patch_size": 14,
}
_GRID = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 12}, "patch_size": 14}
_SQUARE = {"size": {"height": 32, "width": 32}}
_CROP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_GLM = {"image_token": "<|image|>", "video_token": "<|video|>"}
_GLM_IDS = {"image_token_id": "@image_token", "video_token_id": "@video_token"}
_GLM_IDS |= {"vision_config.patch_size": 14, "vision_config.image_size": 56}
_IDEFICS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "end_of_utterance_token": "<end_of_utterance>",
    "global_image_token": "<global-img>",
    **{f"at_{row}_{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)},
}
_LLAVA = {"image_token_id": "@image_token", "vision_feature_layer": -1}

FAMILIES: dict[str, Family] = {
    "Qwen2VLConfig": Family(_QWEN, _QWEN_IDS, _GRID),
    "Qwen2_5_VLConfig": Family(
        _QWEN,
        _QWEN_IDS | {"vision_config.window_size": 56, "vision_config.fullatt_block_indexes": [1]},
        _GRID,
    ),
    "Qwen3VLConfig": Family(
        _QWEN, _QWEN_IDS | {"vision_config.deepstack_visual_indexes": [0, 1]}, _GRID
    ),
    "Qwen3VLMoeConfig": Family(
        _QWEN, _QWEN_IDS | {"vision_config.deepstack_visual_indexes": [1]}, _GRID
    ),
    "Glm4vConfig": Family(_GLM, _GLM_IDS, _GRID),
    "Glm4vMoeConfig": Family(_GLM, _GLM_IDS, _GRID),
    "Glm46VConfig": Family(_GLM, _GLM_IDS, _GRID),
    "Mistral3Config": Family(
        {"image_token": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"},
        {"image_token_id": "@image_token", "vision_feature_layer": -1}
        | {"text_config.sliding_window": None},
        {"size": {"longest_edge": 96}, "patch_size": {"height": 16, "width": 16}},
        {"patch_size": 16, "spatial_merge_size": 2},
    ),
    "LlavaConfig": Family(
        config=_LLAVA,
        image=_CROP,
        processor={
            "patch_size": 16,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "LlavaNextConfig": Family(
        config=_LLAVA | {"image_grid_pinpoints": [[32, 64], [64, 32]]},
        image=_CROP | {"image_grid_pinpoints": [[32, 64], [64, 32]]},
        processor={
            "patch_size": 16,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "InternVLConfig": Family(
        {
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        {"image_token_id": "@context_image_token", "vision_config.image_size": [32, 32]},
        _SQUARE | {"crop_to_patches": True, "max_patches": 3},
        {"image_seq_length": 1},
    ),
    "Idefics3Config": Family(
        _IDEFICS,
        {"image_token_id": "@image_token", "scale_factor": 2},
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        {"image_seq_len": 1},
    ),
    "SmolVLMConfig": Family(
        _IDEFICS,
        {"image_token_id": "@image_token", "scale_factor": 2},
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        {"image_seq_len": 1},
    ),
    "VipLlavaConfig": Family(
        config={"image_token_id": "@image_token", "vision_feature_layers": [-1]},
        image=_CROP,
        processor={
            "patch_size": 16,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "LlavaOnevisionConfig": Family(
        config=_LLAVA | {"image_grid_pinpoints": [[32, 64], [64, 32]]},
        image=_SQUARE | {"image_grid_pinpoints": [[32, 64], [64, 32]]},
        processor={"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "AyaVisionConfig": Family(
        {
            "image_token": "<image>",
            "patch": "<|IMG_PATCH|>",
            "start": "<|START_OF_IMG|>",
            "end": "<|END_OF_IMG|>",
        },
        {"image_token_id": "@patch", "vision_feature_layer": -1, "downsample_factor": 2},
        _SQUARE | {"crop_to_patches": True, "max_patches": 3},
        {"patch_size": 16, "img_size": 32, "downsample_factor": 2},
    ),
    "PaddleOCRVLConfig": Family(
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        {"image_token_id": "@image_token", "vision_config.patch_size": 14},
        _GRID,
    ),
    "VideoLlama3Config": Family(
        _QWEN,
        {"image_token_id": "@image_token", "video_token_id": "@video_token"}
        | {"vision_config.patch_size": 14},
        {"size": {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 12}, "patch_size": 14},
    ),
    "LightOnOcrConfig": Family(
        {"image_token": "[IMG]", "image_break_token": "[BREAK]", "image_end_token": "[END]"},
        {"image_token_id": "@image_token"},
        {"size": {"longest_edge": 96}, "patch_size": {"height": 32, "width": 32}},
        {"patch_size": 16, "spatial_merge_size": 2},
    ),
    "Qwen3_5Config": Family(_QWEN, _QWEN_IDS, _GRID),
    "Ovis2Config": Family(
        {"image_token": "<image>", "atom": "<IMG_ATOM>", "start": "<IMG_START>"}
        | {"end": "<IMG_END>", "grid": "<IMG_GRID>", "row": "<IMG_ROW>", "col": "<IMG_COL>"},
        {"image_token_id": "@atom", "vision_config.image_size": 32},
        _SQUARE,
        {"image_seq_length": 4},
    ),
    "Gemma3Config": Family(
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        {
            "image_token_id": "@image_token",
            "mm_tokens_per_image": 4,
            "vision_config.image_size": 64,
        },
        {"size": {"height": 64, "width": 64}},
        {"image_seq_length": 4},
    ),
}

_GEMMA4 = Family(
    {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    | {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    {
        "image_token_id": "@image_token",
        "text_config.sliding_window": 96,
        "text_config.vocab_size_per_layer_input": VOCABULARY,
        "vision_config": Gemma4VisionConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
        ),
    },
    {"max_soft_tokens": 70, "pooling_kernel_size": 3, "patch_size": 16},
)
FAMILIES["Gemma4Config"] = _GEMMA4
FAMILIES["Gemma4Config vision"] = replace(
    _GEMMA4,
    config=_GEMMA4.config | {"text_config.use_bidirectional_attention": "vision"},
    chunk=90,
)


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise of a size."""
    drawn = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """One token a byte, and the special tokens of a family."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        extra_special_tokens=dict(family.tokens),
    )


def processor_of(config: Any, family: Family, tokenizer: PreTrainedTokenizerFast) -> Any:
    """A family's processor with tiny sizes."""
    kind = processor_class(PROCESSOR_MAPPING[type(config)])
    known = IMAGE_PROCESSOR_MAPPING
    own = known[type(config) if type(config) in known else _SHARED[type(config).__name__]]
    own = own["pil"](**family.image)
    given = {"image_processor": own, "tokenizer": tokenizer}
    parts = {name: given.get(name) for name in kind.get_attributes()}
    return kind(**parts, **family.processor)


def set_dotted(config: Any, name: str, value: Any) -> None:
    """Set an attribute of a configuration or of a part of it."""
    *parts, last = name.split(".")
    setattr(functools.reduce(getattr, parts, config), last, value)


def make_parts(name: str) -> tuple[Any, Any]:
    """The configuration of a family, and its processor."""
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    config = make_config(name.split(maxsplit=1)[0], "")
    for key, value in family.config.items():
        if isinstance(value, str) and value.startswith("@"):
            found = tokenizer.convert_tokens_to_ids(family.tokens[value[1:]])
        else:
            found = copy.deepcopy(value)  # a network writes into it
        set_dotted(config, key, found)
    config.get_text_config().vocab_size = VOCABULARY
    return config, processor_of(config, family, tokenizer)


def build(name: str, seed: int = 0) -> tuple[LoadedModel, Any]:
    """A random network in float32, and its processor."""
    config, processor = make_parts(name)
    torch.manual_seed(seed)
    network = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    network.generation_config.eos_token_id = None
    with torch.no_grad():
        for name_, parameter in network.named_parameters():
            if "multi_modal" in name_ and parameter.dim() > 1:  # so that an image shows
                parameter.normal_(std=0.6)
    codec = HuggingFaceCodec(processor.tokenizer, config.model_type, 256)
    return wrap_network(name, network, codec, None, codec_of(network, processor, codec)), processor


def save(name: str, folder: Path) -> None:
    """Write a checkpoint with a processor, as the hub has them."""
    config, processor = make_parts(name)
    torch.manual_seed(0)
    network = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    network.generation_config.eos_token_id = None
    network.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    kind = type(processor).__mro__[1].__name__
    settings = {"processor_class": kind} | FAMILIES[name].processor
    (folder / "processor_config.json").write_text(json.dumps(settings))


def sizes_of(family: Family) -> list[dict[str, Any]]:
    """The engines that are tried: all at once, and in steps of few tokens."""
    cut = {"max_num_batched_tokens": family.chunk}
    return [size | (cut if size.keys() & cut else {}) | {"max_num_seqs": 5} for size in SIZES]


Asked = tuple[str, list[Image.Image]]
"""A text, in which `#` stands for an image, and its images."""

FIRST, SECOND = image(60, 80), image(100, 50, 1)
PROMPTS: tuple[Asked, ...] = (
    ("Here is # and a text.", [FIRST]),
    ("Here is # and a text.", [SECOND]),  # another image in the same place
    ("Here is # and another one.", [FIRST]),  # a prefix up to behind an image
    ("Here is # beside # now.", [FIRST, SECOND]),
    ("Here is no image at all.", []),
)
NUM_TOKENS = 12


Told = tuple[list[int], list[float]]
"""The tokens of a text, and their log-probabilities."""


def wanted(model: LoadedModel, processor: Any, asked: Asked) -> tuple[Told, float]:
    """What `generate` says for what the processor makes, and the least lead of a token."""
    text, images = asked
    text = text.replace("#", model.images.mark)
    if images:
        found = processor(text=[text], images=images, return_tensors="pt")
    else:
        found = processor.tokenizer([text], return_tensors="pt")
    given = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    network = model.network
    network.set_attn_implementation(model.dense_implementation)
    with torch.inference_mode():
        output = network.generate(
            **given,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    network.set_attn_implementation(IMPLEMENTATION)
    logits = torch.cat(output.logits)
    top = logits.topk(2).values
    tokens = output.sequences[0, given["input_ids"].shape[1] :].tolist()
    told = tokens, logits.log_softmax(-1).amax(-1).tolist()
    return told, float((top[:, 0] - top[:, 1]).min())


GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)


def submit(engine: Engine, asked: Asked, params: SamplingParams = GREEDY) -> Request:
    """Queue a prompt."""
    text, images = asked
    if not images:
        return engine.add_request(text, params)
    text = text.replace("#", engine.model.images.mark)
    tokens, found = engine.model.images.encode(text, images, engine.config)
    [request] = engine.submit(Submission(tokens, params, images=found))
    return request


def run(engine: Engine) -> list[Told]:
    """What all prompts at once give; steps of few tokens preempt requests on the way."""
    if engine.config.max_num_batched_tokens < 2048:
        preempt_in_steps(engine, {6, 14, 15, 19})
    requests = [submit(engine, asked) for asked in PROMPTS]
    told: dict[int, list[float]] = {request.request_id: [] for request in requests}
    while engine.has_unfinished:
        for output in engine.step():
            told[output.request.request_id] += [token.logprob for token in output.tokens]
    if engine.config.max_num_batched_tokens < 2048 and not engine.stats.num_preemptions:
        raise AssertionError("nothing was preempted")
    if engine.kv.num_free_blocks != engine.kv.num_usable_blocks:
        raise AssertionError("a block was lost")
    for request in requests:
        if request.error is not None:
            raise request.error
    return [(request.output_tokens, told[request.request_id]) for request in requests]


def outcome(name: str) -> str:
    """What becomes of images in a family: "equal", "refused: ..." or what is wrong."""
    reason = ""
    for seed in range(SEEDS):
        model, processor = build(name, seed)
        if isinstance(model.images, NoImages):
            return f"refused: {model.images.why}"
        engines = [engine_of(model, **sizes) for sizes in sizes_of(FAMILIES[name])]
        dense = [wanted(model, processor, asked) for asked in PROMPTS]
        texts = [own for own, _ in dense]
        if len({tuple(tokens) for tokens, _ in texts}) < len(texts):
            reason = "WRONG: two prompts give the same tokens: the comparison would see nothing"
            continue
        if min(lead for _, lead in dense) < CLEAR:
            reason = "WRONG: no clear network found"
            continue
        try:
            return _differs(engines, texts) or "equal"
        except ModelError as error:
            return f"refused: {error}"
    return reason


def _are_near(one: list[Told], other: list[Told]) -> bool:
    """Whether tokens are the same, and log-probabilities nearly."""
    return [tokens for tokens, _ in one] == [tokens for tokens, _ in other] and all(
        abs(left - right) < NEAR
        for (_, lefts), (_, rights) in zip(one, other, strict=True)
        for left, right in zip(lefts, rights, strict=True)
    )


def _differs(engines: list[Engine], dense: list[Told]) -> str:
    """How engines differ from `generate`; empty: they do not."""
    for engine in engines:
        for turn in range(2):
            runs = engine.images.num_runs
            if not _are_near(got := run(engine), dense):
                return f"WRONG: turn {turn}: {dense} became {got}"
            if engine.images.num_runs - runs != (2 if turn == 0 else 0):
                return f"WRONG: turn {turn}: the tower ran {engine.images.num_runs - runs} times"
        if engine.kv.enable_caching and not engine.stats.num_hit_tokens:
            return "WRONG: nothing was hit"
    model = engines[0].model
    engine = engine_of(model, num_blocks=90, drafts="ngram")
    texts = []
    for asked, (own, _) in zip(PROMPTS, dense, strict=True):
        request = submit(engine, asked)
        texts.append((*request.prompt_tokens, *own))
        engine.abort(request)
    engine._scheduler._drafter = KnowingDrafter(texts)
    if not _are_near(run(engine), dense) or not engine.stats.num_accepted_tokens:
        return "WRONG: draft tokens change what is said, or none was accepted"
    return ""


DATA = Path(__file__).with_name("images.json")


def stored() -> dict[str, str]:
    """The outcomes as they were stored last."""
    found: dict[str, str] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def table() -> str:
    """What docs/reference/architectures.md shows of them."""
    lines = ["## Images", "", "| configuration | images |", "|---|---|"]
    for name, found in stored().items():
        kind, *variant = name.split()
        variants = f" ({' '.join(variant)})" if variant else ""
        lines.append(f"| `{kind.removesuffix('Config')}`{variants} | {found} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    quieten()
    outcomes = {name: outcome(name) for name in sorted(FAMILIES)}
    DATA.write_text(json.dumps(outcomes, indent=2) + "\n", encoding="utf-8")
