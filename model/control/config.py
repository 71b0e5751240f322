"""Sizes and limits, checked once, when they are stated.

Invariants: a configuration that exists is in range; it never changes.

Does not know: the memory of the machine (`kv_caches.py`), the model's own limits (`loader.py`).
"""

from dataclasses import dataclass

from model.errors import InvalidArgumentError, shown

MAX_NUM_BLOCKS = 2**31 - 1
"""The largest id that the int32 of a block table holds, so the most blocks of `kvcore`."""

MAX_STEP_TOKENS = 2**31 - 1
"""The most tokens a step, whose places a batch numbers in int32."""

MAX_BLOCK_SIZE = 2**20
"""The most tokens a block of `kvcore` has."""


WATERMARK = 0.01
"""The default share of the blocks that a start leaves free."""

PRIORITY_SPAN = 64
"""The default number of requests that one level of priority overtakes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        max_num_batched_tokens: the most tokens in one step.
        max_num_seqs: the most requests running at once.
        max_model_len: the most tokens a request may come to; None: as many as fit into the pool.
        watermark: the share of the blocks that a start beside running requests leaves free.
        priority_span: how many later requests one level of priority lets a request overtake.
        num_host_blocks: blocks of host memory that preempted requests may be stored in; 0: none,
            they are computed again.
        long_above: longer texts have other keys and values from their first token on; None: there
            is no such length.
        may_cross: whether a request may grow past it; it is computed again then.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int | None = None
    watermark: float = WATERMARK
    priority_span: int = PRIORITY_SPAN
    num_host_blocks: int = 0
    long_above: int | None = None
    may_cross: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "priority_span"):
            _check_least_one(name, getattr(self, name))
        _check_watermark(self.watermark)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How large an engine is.

    Attributes:
        num_blocks: blocks of the cache, the null block included; None: as many as memory suggests
            (`memory.py`).
        kv_memory_bytes: what the cache may take, in bytes; in place of `num_blocks`.
        kv_memory_fraction: likewise, as a share of what is free, above 0 and at most 1.
        expected_lengths: the most tokens of each request to come; where `num_blocks` is None, never
            more blocks than all of them together can use.
        block_size: tokens a block.
        enable_prefix_caching: whether a prompt may use what others have computed.
        max_num_batched_tokens: the most tokens in one step.
        max_num_seqs: the most requests running at once.
        watermark: the share of the blocks that a start beside running requests leaves free.
        priority_span: how many later requests one level of priority lets a request overtake.
        swap_memory_bytes: host memory for the blocks of preempted requests; 0: they are computed
            again; None: some, where that is cheaper (`swap.py`).
        eager: the network's modules are called as they are; else what `prepare.py` says.
        compile: whether seconds are spent before the first step, so that each takes less: on a GPU
            `torch.compile`, on a CPU a small network's operations without its modules.
        async_scheduling: whether a step is planned and sent before the tokens of the one before it
            are read; None: on a GPU.
        seed: of the draws of requests that have no seed of their own.
    """

    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    kv_memory_fraction: float | None = None
    expected_lengths: tuple[int, ...] | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    watermark: float = WATERMARK
    priority_span: int = PRIORITY_SPAN
    swap_memory_bytes: int | None = None
    eager: bool = False
    compile: bool = False
    async_scheduling: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_blocks is not None and not 2 <= self.num_blocks <= MAX_NUM_BLOCKS:
            raise InvalidArgumentError(
                f"num_blocks: wanted at least 2 (block 0 is never used) and at most "
                f"{MAX_NUM_BLOCKS}, got {shown(self.num_blocks)}"
            )
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise InvalidArgumentError(
                f"block_size: wanted at least 1 and at most {MAX_BLOCK_SIZE}, "
                f"got {shown(self.block_size)}"
            )
        names = ("max_num_batched_tokens", "max_num_seqs", "kv_memory_bytes", "priority_span")
        for name in names:
            _check_least_one(name, getattr(self, name))
        _check_watermark(self.watermark)
        if self.swap_memory_bytes is not None and self.swap_memory_bytes < 0:
            raise InvalidArgumentError(
                f"swap_memory_bytes: wanted at least 0, got {shown(self.swap_memory_bytes)}"
            )
        share = self.kv_memory_fraction
        if share is not None and not 0 < share <= 1:
            raise InvalidArgumentError(
                f"kv_memory_fraction: wanted a share above 0 and at most 1, got {shown(share)}"
            )
        sizes = ("num_blocks", "kv_memory_bytes", "kv_memory_fraction")
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidArgumentError(f"{given[0]}: wanted this or {given[1]}, got both")
        if self.eager and self.compile:
            raise InvalidArgumentError("eager: wanted this or compile, got both")


def _check_watermark(share: float) -> None:
    if not 0 <= share < 1:
        raise InvalidArgumentError(
            f"watermark: wanted a share of at least 0 and below 1, got {shown(share)}"
        )


def _check_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidArgumentError(f"{name}: wanted at least 1, got {shown(value)}")
    if name == "max_num_batched_tokens" and value is not None and value > MAX_STEP_TOKENS:
        raise InvalidArgumentError(f"{name}: wanted at most {MAX_STEP_TOKENS}, got {shown(value)}")
