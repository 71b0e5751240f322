"""Sizes and limits, declared and checked once, when they are stated.

Invariants: a configuration that exists is in range; it never changes.

Does not know: the memory of the machine (`caches/memory.py`), the model's own limits (`loader.py`).
"""

from dataclasses import dataclass
from typing import Literal

from model.control.settings import check_settings, setting
from model.errors import InvalidArgumentError

MAX_NUM_BLOCKS = 2**31 - 1
"""The largest id that the int32 of a block table holds, so the most blocks of `kvcore`."""

MAX_STEP_TOKENS = 2**31 - 1
"""The most tokens a step, whose places a batch numbers in int32."""

MAX_BLOCK_SIZE = 2**20
"""The most tokens a block of `kvcore` has."""

_LOOKED_UP, _COMPUTED = 8, 4
"""Tokens that are guessed at once where nobody says: a look-up costs no pass of a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How much a step takes, and who comes into it."""

    max_num_batched_tokens: int = setting(
        2048, help="the most tokens of a step", least=1, most=MAX_STEP_TOKENS
    )
    max_num_seqs: int = setting(64, help="the most requests that run at once", least=1)
    watermark: float = setting(
        0.01,
        help="share of the blocks that a start beside running requests leaves free",
        least=0,
        below=1,
    )
    priority_span: int = setting(
        64, help="how many later requests one level of priority overtakes", least=1
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(StepLimits):
    """What a scheduler is told beside the limits of a step.

    Attributes:
        num_host_blocks: blocks of host memory that preempted requests may be stored in; 0: none,
            they are computed again.
        long_above: longer texts have other keys and values from their first token on; None: there
            is no such length.
        may_cross: whether a request may grow past it; it is computed again then.
        draft_tokens: the most tokens that are guessed at once for a request.
    """

    max_model_len: int | None = setting(
        None,
        help="the most tokens a request may come to (default: as many as fit into the cache)",
        least=1,
    )
    num_host_blocks: int = 0
    long_above: int | None = None
    may_cross: bool = True
    draft_tokens: int = _LOOKED_UP


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(StepLimits):
    """How large an engine is, and how it runs a step.

    Attributes:
        expected_lengths: the most tokens of each request to come; where `num_blocks` is None, never
            more blocks than all of them together can use.
        seed: of the draws of requests that have no seed of their own.
        record_events: note what the cache holds, for a publisher that tells routers.
    """

    num_blocks: int | None = setting(
        None,
        help="blocks of the cache, block 0 included, which is never used (default: as many as the "
        "prompts can use and memory allows)",
        least=2,
        most=MAX_NUM_BLOCKS,
    )
    kv_memory_bytes: int | None = setting(
        None,
        help="what the cache may take, such as 2GiB, in place of --num-blocks (default on a CPU: "
        "1GiB, or half of what is free if that is less)",
        least=1,
        unit="bytes",
    )
    kv_memory_fraction: float | None = setting(
        None,
        help="likewise, as a share of the memory that is free (default on a GPU: 0.9)",
        above=0,
        most=1,
    )
    block_size: int = setting(16, help="tokens of a block", least=1, most=MAX_BLOCK_SIZE)
    enable_prefix_caching: bool = setting(
        True, help="let a prompt use what others have computed", flag="prefix-cache"
    )
    kv_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        help="of the cache's numbers; auto: the network's; fp8: e4m3 with scales, half of "
        "bfloat16's memory, and a text that may differ",
    )
    swap_memory_bytes: int | None = setting(
        None,
        help="host memory for blocks of preempted requests; 0: they are computed again (default: "
        "some, where that is cheaper)",
        least=0,
        unit="bytes",
    )
    eager: bool = setting(
        False,
        help="call the network's modules as they are: nothing traced, compiled or captured",
    )
    compile: bool = setting(
        False,
        help="spend seconds before the first step: on a GPU, compile the network's operations "
        "with torch.compile; on a CPU, run those of a small one without its modules",
    )
    sanitize: bool = setting(
        False,
        help="check every KV cache access of every step and stop at the first wrong one: a slot "
        "that was never written, or a block of another request; for debugging: implies eager, and "
        "steps take two to four times as long on a CPU, longer on a GPU",
    )
    async_scheduling: bool | None = setting(
        None,
        help="plan and send a step before the tokens of the last one are read (default: on a GPU)",
    )
    drafts: Literal["ngram"] | None = setting(
        None,
        help="guess the next tokens of a request, and check all guesses in one pass; ngram: what "
        "followed the same tokens before (default: no guesses)",
    )
    draft_model: str | None = setting(
        None,
        help="guess the next tokens with a second, smaller model of the same vocabulary: a folder "
        "or owner/name on the hub; it has as many cache blocks beside those of the first",
        least=1,
        metavar="PATH_OR_ID",
    )
    draft_tokens: int | None = setting(
        None,
        help="the most tokens that are guessed at once for a request (default: "
        f"{_LOOKED_UP} by look-up, {_COMPUTED} by a model, which takes a pass for each)",
        least=1,
        most=64,
        needs=("drafts", "draft_model"),
    )
    grammar_token_s: float = setting(
        0.1,
        help="the most processor time, in seconds, to find the tokens that may come next in a "
        "text that follows a grammar; a request that takes more ends with an error",
        above=0,
    )
    grammar_request_s: float = setting(
        0.5,
        help="likewise for all tokens of a request; the first millisecond of each is not counted",
        above=0,
    )
    record_lifetimes: bool = setting(
        False,
        help="count for how many steps blocks live, lie idle and wait for a hit",
    )
    expected_lengths: tuple[int, ...] | None = None
    seed: int = 0
    record_events: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        sizes = ("num_blocks", "kv_memory_bytes", "kv_memory_fraction")
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidArgumentError(f"{given[0]}: wanted this or {given[1]}, got both")
        if self.eager and self.compile:
            raise InvalidArgumentError("eager: wanted this or compile, got both")
        if self.drafts is not None and self.draft_model is not None:
            raise InvalidArgumentError("draft_model: wanted this or drafts, got both")
        if self.guesses and self.async_scheduling:
            guess = "drafts" if self.draft_model is None else "draft_model"
            raise InvalidArgumentError(
                f"async_scheduling: wanted this or {guess}, got both: what to guess is known when "
                "the last tokens are read"
            )
        if self.sanitize and self.compile:
            raise InvalidArgumentError("sanitize: wanted this or compile, got both")

    @property
    def guesses(self) -> bool:
        """Whether requests bring drafts. O(1)."""
        return self.drafts is not None or self.draft_model is not None

    @property
    def most_drafts(self) -> int:
        """The most tokens that are guessed at once for a request; 0: nothing is guessed. O(1)."""
        if not self.guesses:
            return 0
        return self.draft_tokens or (_LOOKED_UP if self.draft_model is None else _COMPUTED)

    @property
    def max_rows(self) -> int:
        """The most rows of logits of a step: of each request one, and one for each draft. O(1)."""
        each = 1 + self.most_drafts
        return min(self.max_num_batched_tokens, self.max_num_seqs * each)
