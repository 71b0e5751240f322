"""The flags that say how large the cache and a step are, and how one runs.

Several command lines have them.

Decides: their names, defaults and units. Does not know: what memory there is, what a block costs.
"""

import argparse
import re
from collections.abc import Callable

from model.control.config import PRIORITY_SPAN, WATERMARK, EngineConfig

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})(?:([KMGT])(?:i?B)?)?", re.ASCII)


def engine_config(flags: argparse.Namespace) -> EngineConfig:
    """The sizes that the flags of `add_sizes` say. O(1).

    Raises:
        InvalidArgumentError: a size is out of range.
    """
    return EngineConfig(
        num_blocks=flags.num_blocks,
        kv_memory_bytes=flags.kv_memory_bytes,
        kv_memory_fraction=flags.kv_memory_fraction,
        block_size=flags.block_size,
        enable_prefix_caching=flags.prefix_cache,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
        watermark=flags.watermark,
        priority_span=flags.priority_span,
        swap_memory_bytes=flags.swap_memory_bytes,
        eager=flags.eager,
        compile=flags.compile and not flags.eager,
        async_scheduling=flags.async_scheduling,
    )


def add_sizes(flag: Callable[..., object]) -> None:
    """Add the flags that `engine_config` reads. O(1)."""
    _add_cache(flag)
    _add_steps(flag)


def _add_cache(flag: Callable[..., object]) -> None:
    """Add what says how much memory there is for blocks, and of what size they are."""
    flag(
        "--num-blocks",
        type=int,
        metavar="N",
        help="blocks of the cache, block 0 included (default: as many as the prompts can use and "
        "memory allows)",
    )
    flag(
        "--kv-memory-bytes",
        type=num_bytes,
        metavar="SIZE",
        help="what the cache may take at most, such as 2GiB (default on a CPU: 1GiB)",
    )
    flag(
        "--kv-memory-fraction",
        type=float,
        metavar="F",
        help="the same as a share of the memory that is free (default on a GPU: 0.9)",
    )
    flag("--block-size", type=int, default=16, metavar="N", help="tokens a block (default: 16)")
    flag(
        "--swap-memory-bytes",
        type=num_bytes,
        metavar="SIZE",
        help="host memory for blocks of preempted requests; 0: compute them again (default: some, "
        "where that is cheaper)",
    )
    flag(
        "--no-prefix-cache",
        action="store_false",
        dest="prefix_cache",
        help="compute every prompt from its first token",
    )


def _add_steps(flag: Callable[..., object]) -> None:
    """Add what says how much a step takes, and who comes into it."""
    flag(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens a step (default: 2048)",
    )
    flag(
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="N",
        help="requests running at once (default: 64)",
    )
    flag(
        "--watermark",
        type=float,
        default=WATERMARK,
        metavar="F",
        help="share of the blocks that a start leaves free for those that run "
        f"(default: {WATERMARK})",
    )
    flag(
        "--priority-span",
        type=int,
        default=PRIORITY_SPAN,
        metavar="N",
        help=f"later requests that one level of priority overtakes (default: {PRIORITY_SPAN})",
    )


def add_execution(flag: Callable[..., object], *, compiles: bool) -> None:
    """Add the flags that say how a step runs, which `engine_config` reads too. O(1).

    Args:
        flag: adds one.
        compiles: whether the network is compiled where nobody says.
    """
    flag(
        "--eager",
        action="store_true",
        help="call the network's modules as they are: nothing captured, compiled or recorded",
    )
    default = "on" if compiles else "off"
    flag(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=compiles,
        help="on a GPU, compile the network's operations with torch.compile; on a CPU, run those "
        f"of a small one without its modules (default: {default})",
    )
    flag(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="plan and send a step before the tokens of the last one are read (default: on a GPU)",
    )


def num_bytes(text: str) -> int:
    """A size such as 1073741824, 512M or 2GiB; K, M, G and T are powers of 1024. O(text).

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"wanted bytes, such as 1073741824, 512M or 2GiB, got {text!r:.60}"
        )
    return int(found[1]) * _UNITS[found[2] or ""]
