"""Sizes and limits, declared once and checked when an instance is made.

Invariants: a configuration that exists is in range; it never changes.

Does not know: the memory of the machine (`caches/memory.py`), the model's own limits (`loader.py`).
"""

from dataclasses import dataclass, replace
from typing import Literal

from model.control.settings import check_settings, setting, settings_of
from model.errors import InvalidArgumentError

MAX_NUM_BLOCKS = 2**31 - 1
"""The largest id that the int32 of a block table holds, so the most blocks of `kvcore`."""

MAX_STEP_TOKENS = 2**31 - 1
"""The most tokens a step, whose places a batch numbers in int32."""

MAX_BLOCK_SIZE = 2**20
"""The most tokens a block of `kvcore` has."""

_EXCLUSIVE = (
    ("num_blocks", "kv_memory_bytes"),
    ("num_blocks", "kv_memory_fraction"),
    ("kv_memory_bytes", "kv_memory_fraction"),
    ("eager", "compile"),
    ("draft_model", "drafts"),
    ("sanitize", "compile"),
)

_TIERS = ("host_memory_bytes", "disk", "peer")

_NGRAM_DRAFTS, _MODEL_DRAFTS = 8, 4
"""The default number of draft tokens: an n-gram look-up costs no forward pass, a model one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of one scheduler step."""

    max_num_batched_tokens: int = setting(
        2048,
        help="token budget of a step; longer prompts are computed by chunked prefill",
        least=1,
        most=MAX_STEP_TOKENS,
    )
    max_num_seqs: int = setting(
        64, help="largest number of requests that run at once", least=1, is_common=True
    )
    max_model_len: int | None = setting(
        None,
        help="largest number of prompt and output tokens of a request (default: the model's, as "
        "far as the KV cache has room)",
        least=1,
    )
    watermark: float = setting(
        0.01,
        help="fraction of the KV blocks that admitting a request must leave free while others run",
        least=0,
        below=1,
    )
    priority_span: int = setting(
        64, help="how many earlier arrivals a request overtakes for each level of priority", least=1
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(StepLimits):
    """The limits of a step and what the engine adds for its scheduler.

    Attributes:
        num_host_blocks: blocks of host memory for swapping preempted requests out; 0: preempted
            requests are recomputed.
        long_above: a longer text has different keys and values from its first token on (scaled
            rotary embeddings); None: there is no such length.
        may_cross: True if a request may grow past `long_above`; it is recomputed then.
        draft_tokens: the largest number of draft tokens of a request in one step.
    """

    num_host_blocks: int = 0
    long_above: int | None = None
    may_cross: bool = True
    draft_tokens: int = _NGRAM_DRAFTS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(StepLimits):
    """The sizes of an engine and how it runs a step.

    Attributes:
        expected_lengths: the largest number of tokens of each expected request; where `num_blocks`
            is None, no more blocks are allocated than all of them together can use.
        seed: for the random draws of requests that have no seed.
        record_events: record KV events, for a publisher that sends them to routers.
        shares_disk: several processes have `disk`, each a separate folder in it.
    """

    num_blocks: int | None = setting(
        None,
        help="number of KV cache blocks, including the unused block 0 (default: as many as the "
        "prompts can use and memory allows)",
        least=2,
        most=MAX_NUM_BLOCKS,
    )
    kv_memory_bytes: int | None = setting(
        None,
        help="memory for the KV cache, such as 2GiB, instead of --num-blocks (default on a CPU: "
        "1GiB, or half of the free memory if that is less)",
        least=1,
        unit="bytes",
        is_common=True,
    )
    kv_memory_fraction: float | None = setting(
        None,
        help="memory for the KV cache as a fraction of free memory (default on a GPU: 0.9)",
        above=0,
        most=1,
    )
    block_size: int = setting(
        16,
        help="tokens in a KV cache block; a multiple of it where recurrent states need larger ones",
        least=1,
        most=MAX_BLOCK_SIZE,
    )
    lora: tuple[str, ...] = setting(
        (),
        help="LoRA adapter, a folder that PEFT wrote, under a name that prompts and requests ask "
        "for",
        metavar="NAME=PATH",
    )
    max_loras: int | None = setting(
        None,
        help="load and unload LoRA adapters while serving, from folders that clients name, at most "
        "so many at once (default: only those of --lora)",
        least=1,
        most=1024,
    )
    max_lora_rank: int | None = setting(
        None,
        help="the largest rank of a LoRA adapter: each of --max-loras has as much memory beside "
        "each linear layer (default: the largest of --lora; with --max-loras at least 16)",
        least=1,
        most=1024,
        needs=("lora", "max_loras"),
    )
    enable_prefix_caching: bool = setting(
        True,
        help="prefix caching: reuse the blocks of a cached prefix instead of recomputing it",
        flag="prefix-cache",
        is_common=True,
    )
    kv_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        help="data type of the KV cache; auto: that of the model; fp8: e4m3 with scales, which "
        "takes half the memory of bfloat16 and may change the output",
    )
    swap_memory_bytes: int | None = setting(
        None,
        help="preemption: host memory to swap blocks of preempted requests to; 0: recompute them "
        "(default: some memory, where swapping is cheaper)",
        least=0,
        unit="bytes",
    )
    host_memory_bytes: int | None = setting(
        None,
        help="tiers: host memory for copies of KV cache blocks that the cache may evict, such as "
        "8GiB; with --tp each process has an equal share (default: none)",
        least=1,
        unit="bytes",
        flag="host-memory",
        is_common=True,
    )
    disk: str | None = setting(
        None,
        help="tiers: folder for copies of KV cache blocks, which are found again after a restart; "
        "with --tp each process has a folder in it (default: none)",
        least=1,
        metavar="PATH",
    )
    disk_bytes: int = setting(
        100 << 30,
        help="tiers: the most bytes that these copies take in the folder; with --tp each process "
        "has an equal share",
        least=1,
        unit="bytes",
        flag="disk-size",
        needs=("disk",),
    )
    peer: tuple[str, ...] = setting(
        (),
        help="tiers: address of another process of the same model that serves copies of its KV "
        "cache blocks (--serve-kv), which are loaded from there; not with --tp",
        least=1,
        metavar="HOST:PORT",
    )
    serve_kv: str | None = setting(
        None,
        help="tiers: address at which peers may load the copies in host memory and on disk; port "
        "0: any free port (default: none)",
        least=1,
        metavar="HOST:PORT",
        needs=("host_memory_bytes", "disk"),
    )
    kv_secret: str | None = setting(
        None,
        help="tiers: file with the secret that peers share, wanted unless all their addresses are "
        "on this machine (127.0.0.1)",
        least=1,
        metavar="PATH",
        needs=("peer", "serve_kv"),
    )
    kv_transport: Literal["auto", "tcp", "nixl"] = setting(
        "auto",
        help="tiers: how copies come from peers; auto: over NIXL where both processes have it and "
        "are on this machine, else over TCP; nixl: over NIXL between machines too",
        needs=("peer", "serve_kv"),
    )
    eager: bool = setting(
        False,
        help="run the network's modules eagerly: no CUDA graphs, no tracing, no torch.compile",
    )
    compile: bool = setting(
        False,
        help="compile before the first step, which takes seconds: on a GPU, with torch.compile; "
        "on a CPU, run the operations of a small network without its modules",
    )
    sanitize: bool = setting(
        False,
        help="debugging: check every KV cache access and stop at the first wrong one (a slot that "
        "was never written, or a block of another request); implies --eager; steps take two to "
        "four times as long on a CPU, longer on a GPU",
    )
    batch_invariant: bool = setting(
        False,
        help="deterministic inference: the output of a request does not depend on other requests, "
        "chunked prefill, prefix cache hits or draft tokens (batch invariance); slower, prompts "
        "most of all; on a CPU implies --eager",
    )
    async_scheduling: bool | None = setting(
        None,
        help="schedule and launch a step before the tokens of the previous one are read "
        "(default: on a GPU without speculative decoding)",
    )
    drafts: Literal["ngram"] | None = setting(
        None,
        help="speculative decoding: propose draft tokens and verify them in one forward pass; "
        "ngram: propose what followed the same tokens earlier in the text (default: off)",
    )
    draft_model: str | None = setting(
        None,
        help="speculative decoding with a draft model: a smaller model with the same vocabulary, a "
        "folder or a Hugging Face id; it gets as many KV cache blocks of its own",
        least=1,
        metavar="PATH_OR_ID",
        is_common=True,
    )
    draft_tokens: int | None = setting(
        None,
        help="speculative decoding: largest number of draft tokens of a request in a step "
        f"(default: {_NGRAM_DRAFTS} with --drafts ngram, {_MODEL_DRAFTS} with --draft-model)",
        least=1,
        most=64,
        needs=("drafts", "draft_model"),
    )
    json_schema_mode: Literal["closed", "literal"] = setting(
        "closed",
        help="structured outputs: closed: an object has only the properties that its schema names, "
        "where the schema does not say otherwise, and white space is compact; literal: as JSON "
        "Schema says, in which a missing additionalProperties allows all",
    )
    grammar_token_s: float = setting(
        0.1,
        help="structured outputs: CPU seconds allowed for the token mask of one token; a request "
        "that takes longer ends with an error",
        above=0,
    )
    grammar_request_s: float = setting(
        0.5,
        help="structured outputs: CPU seconds allowed for all token masks of a request; the first "
        "millisecond of each token is not counted",
        above=0,
    )
    max_images: int = setting(
        16, help="images: the most of them in a prompt", least=0, most=1 << 16
    )
    max_image_bytes: int = setting(
        20 << 20, help="images: the most bytes of an image file", least=1, unit="bytes"
    )
    max_image_pixels: int = setting(
        1 << 25,
        help="images: the most pixels of an image, width times height, which are known before any "
        "of them is decoded",
        least=1,
    )
    encoder_cache_bytes: int = setting(
        512 << 20,
        help="images: memory for outputs of the vision tower, of the images used last; an image "
        "whose tokens are in the prefix cache needs none",
        least=0,
        unit="bytes",
    )
    record_lifetimes: bool = setting(
        False,
        help="count for how many steps blocks live, stay idle and wait for a prefix cache hit",
    )
    prefault: bool = setting(
        False,
        help="create all KV cache block objects at the start, not on first use: a slower start and "
        "steadier step times",
    )
    expected_lengths: tuple[int, ...] | None = None
    seed: int = 0
    record_events: bool = False
    shares_disk: bool = False

    @property
    def has_adapters(self) -> bool:
        """True if there are LoRA adapters, or may be later. O(1)."""
        return bool(self.lora) or self.max_loras is not None

    @property
    def has_tiers(self) -> bool:
        """True if host memory, a disk or peers keep copies. O(1)."""
        return bool(self.tier_settings)

    @property
    def tier_settings(self) -> tuple[str, ...]:
        """The settings that ask for tiers. O(1)."""
        return tuple([name for name in _TIERS if getattr(self, name)])

    def without_tiers(self) -> "EngineConfig":
        """Return the same settings without tiers. O(settings)."""
        names = (*_TIERS, "disk_bytes", "serve_kv", "kv_secret", "kv_transport")
        defaults = {one.name: one.default for one in settings_of(EngineConfig) if one.name in names}
        return replace(self, **defaults)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        check_settings(self)
        for one, other in _EXCLUSIVE:
            if getattr(self, one) and getattr(self, other):
                raise InvalidArgumentError(
                    f"{one}: cannot be combined with {other}; give one of them"
                )
        if self.has_tiers and not self.enable_prefix_caching:
            raise InvalidArgumentError(
                f"{self.tier_settings[0]}: wanted prefix caching, which is off; remove "
                "--no-prefix-cache"
            )
        if self.is_speculative and self.async_scheduling:
            source = "drafts" if self.draft_model is None else "draft_model"
            raise InvalidArgumentError(
                f"async_scheduling: cannot be combined with {source}: draft tokens are proposed "
                "from the tokens of the previous step"
            )

    @property
    def is_speculative(self) -> bool:
        """True if speculative decoding is on. O(1)."""
        return self.drafts is not None or self.draft_model is not None

    @property
    def most_drafts(self) -> int:
        """The largest number of draft tokens of a request in a step; 0: it is off. O(1)."""
        if not self.is_speculative:
            return 0
        return self.draft_tokens or (_NGRAM_DRAFTS if self.draft_model is None else _MODEL_DRAFTS)

    @property
    def max_rows(self) -> int:
        """The largest number of rows of logits in a step: a request has 1 + drafts. O(1)."""
        each = 1 + self.most_drafts
        return min(self.max_num_batched_tokens, self.max_num_seqs * each)
