"""How many blocks there are, and why.

Decides: the number of blocks, from what was asked for, from what is free and from what can be used;
and refuses, before anything is allocated, what would not fit.

| asked for | the cache may take |
|---|---|
| `num_blocks` | so many blocks, or it is refused |
| `kv_memory_bytes` | so many bytes, or it is refused |
| `kv_memory_fraction` | this share of what is free |
| nothing | on a GPU 0.9 of what is free, elsewhere 1 GiB or half of what is free |

What is free on a GPU is what the network and the largest step leave (`warm_up.py`); elsewhere what
the system and the process's control groups say. Where it is known how long all requests can become,
the cache is never larger than they can use. A draft model has as many blocks beside, so a block
costs what it takes in both.

Invariants: never fewer than two blocks, the null block and one more; never more than is free.

Does not know: tensors; who uses the blocks.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import kvcore
from model.caches.layout import CacheLayout
from model.control.config import EngineConfig
from model.errors import InvalidArgumentError

_GPU_FRACTION = 0.9
_CPU_BYTES = 1 << 30
_CPU_FRACTION = 0.5
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_ALL = "all that the requests can use"
_LEAST = "what the rank with the least memory has"
_UNUSABLE = 20  # of free bytes one in so many is left alone, whatever is asked for


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What was decided.

    Attributes:
        num_blocks: the null block included.
        block_size: tokens a block.
        kv_bytes: what the caches take.
        free_bytes: what was free for them; None: nobody says.
        reason: why it is so many.
    """

    num_blocks: int
    block_size: int
    kv_bytes: int
    free_bytes: int | None
    reason: str

    @property
    def holds_all(self) -> bool:
        """Whether all requests that are expected fit at once. O(1)."""
        return self.reason == _ALL

    def limited(self, num_blocks: int) -> "MemoryPlan":
        """The same with at most so many blocks. O(1)."""
        if self.num_blocks <= num_blocks:
            return self
        kv_bytes = self.kv_bytes // self.num_blocks * num_blocks
        return replace(self, num_blocks=num_blocks, kv_bytes=kv_bytes, reason=_LEAST)

    def describe(self, layout: CacheLayout, beside: CacheLayout | None = None) -> str:
        """One line for whoever started it. O(num_layers)."""
        free = "" if self.free_bytes is None else f" of {show_bytes(self.free_bytes)} free"
        drafts = "" if beside is None else f"; of the draft model {_layers(beside)}"
        return (
            f"KV cache: {self.num_blocks:,} blocks of {self.block_size} tokens, "
            f"{show_bytes(self.kv_bytes)}{free} ({self.reason}); {_layers(layout)}{drafts}"
        )


def plan_memory(
    config: EngineConfig,
    layout: CacheLayout,
    *,
    is_gpu: bool,
    free_bytes: int | None,
    beside: CacheLayout | None = None,
) -> MemoryPlan:
    """Decide how many blocks there are. O(num_layers + expected requests).

    Args:
        config: what was asked for.
        layout: what a block costs.
        is_gpu: whether the caches are in a GPU's memory.
        free_bytes: what is free for them; None: nobody says, and nothing is refused for it.
        beside: what a block of the draft model costs; None: there is none.

    Raises:
        InvalidArgumentError: it does not fit, or is too little for two blocks.
    """
    block_bytes = sum([one.kv_bytes(1, config.block_size) for one in (layout, beside) if one])
    most = None if free_bytes is None else free_bytes - free_bytes // _UNUSABLE
    if config.num_blocks is not None:
        num_blocks, reason = config.num_blocks, "as asked for"
        _check_fits("num_blocks", num_blocks, config.block_size, block_bytes, most)
    else:
        name, budget_bytes, reason = _budget(config, is_gpu=is_gpu, free_bytes=free_bytes)
        if config.kv_memory_bytes is not None and most is not None and budget_bytes > most:
            raise InvalidArgumentError(
                f"{name}: wanted at most {show_bytes(most)}, which can be had, "
                f"got {show_bytes(budget_bytes)}"
            )
        num_blocks = budget_bytes // block_bytes
        if num_blocks < 2:
            raise InvalidArgumentError(
                f"{name}: two blocks of {config.block_size} tokens take "
                f"{show_bytes(2 * block_bytes)}, and {show_bytes(budget_bytes)} are for them "
                f"({reason}): give more, or a smaller block_size"
            )
        useful = _useful_blocks(config, layout)
        if useful is not None and useful + 1 <= num_blocks:
            num_blocks, reason = useful + 1, _ALL
    return MemoryPlan(num_blocks, config.block_size, num_blocks * block_bytes, free_bytes, reason)


def host_free_bytes() -> int | None:
    """Memory that this process can still take; None where nobody says. Reads a few small files.

    On Linux the least of what the kernel calls available and what each control group leaves, caches
    that it can drop not counted; elsewhere the machine's whole memory.
    """
    found = [*_linux_available(), *cgroup_rooms(_MEMBERSHIP, _CGROUPS)]
    if found:
        return max(0, min(found))
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def show_bytes(num_bytes: int) -> str:
    """A size as people read it. O(1)."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _check_fits(
    name: str, num_blocks: int, block_size: int, block_bytes: int, most: int | None
) -> None:
    if most is not None and num_blocks * block_bytes > most:
        raise InvalidArgumentError(
            f"{name}: {num_blocks} blocks of {block_size} tokens take "
            f"{show_bytes(num_blocks * block_bytes)}, and {show_bytes(most)} can be had"
        )


def _budget(config: EngineConfig, *, is_gpu: bool, free_bytes: int | None) -> tuple[str, int, str]:
    """The setting that decides, the bytes it gives, and the reason in words."""
    if config.kv_memory_bytes is not None:
        return "kv_memory_bytes", config.kv_memory_bytes, "as asked for"
    if config.kv_memory_fraction is not None or is_gpu:
        name = "kv_memory_fraction"
        if free_bytes is None:
            raise InvalidArgumentError(f"{name}: nobody says here what is free: give bytes")
        share = config.kv_memory_fraction or _GPU_FRACTION
        return name, int(free_bytes * share), f"{share:g} of what is free"
    if free_bytes is not None and free_bytes * _CPU_FRACTION < _CPU_BYTES:
        share = int(free_bytes * _CPU_FRACTION)
        return "kv_memory_bytes", share, f"{_CPU_FRACTION:g} of what is free, as nothing was said"
    return "kv_memory_bytes", _CPU_BYTES, "as nothing was said"


def _useful_blocks(config: EngineConfig, layout: CacheLayout) -> int | None:
    if config.expected_lengths is None:
        return None
    groups = layout.groups(config.block_size)
    chunk = config.max_num_batched_tokens
    return sum(
        kvcore.peak_blocks(length, config.block_size, groups=groups, chunk=chunk)
        for length in config.expected_lengths
    )


def _layers(layout: CacheLayout) -> str:
    counts: dict[tuple[int, int], int] = {}
    for layer in layout.layers:
        kind = (layer.chunk or 0, layer.window or 0)
        counts[kind] = counts.get(kind, 0) + 1
    parts = [f"{count} layers see {_seen(*kind)}" for kind, count in sorted(counts.items())]
    groups = len(layout.windows)
    return ", ".join(parts) + (f", in {groups} groups" if groups > 1 else "")


def _seen(chunk: int, window: int) -> str:
    if window:
        return f"the last {window} tokens"
    return f"their chunk of {chunk} tokens" if chunk else "all"


def _linux_available() -> Iterator[int]:
    for line in _lines(Path("/proc/meminfo")):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def cgroup_rooms(membership: Path, root: Path) -> Iterator[int]:
    """What each control group of a process leaves, of both versions of the interface.

    Args:
        membership: the process's list of groups, as /proc/self/cgroup.
        root: where the groups are, as /sys/fs/cgroup.
    """
    for line in _lines(membership):
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cached = root, "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        group = base / name.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            limits = _lines(folder / limit)
            if limits and limits[0].isdigit():
                stat = dict(row.split() for row in _lines(folder / "memory.stat") if " " in row)
                used = int(_lines(folder / usage)[0]) - int(stat.get(cached, 0))
                yield int(limits[0]) - used


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
