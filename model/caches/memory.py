"""How many blocks the KV cache has, and why.

Decides: the number of blocks, from the settings, the free memory and what the requests can use;
refuses what does not fit before anything is allocated.

| setting | the cache may take |
|---|---|
| `num_blocks` | that many blocks, or it is refused |
| `kv_memory_bytes` | that many bytes, or it is refused |
| `kv_memory_fraction` | this share of the free memory |
| none | on a GPU 0.9 of the free memory, on a CPU 1 GiB or half of the free memory |

Free memory on a GPU is what the network and the largest step leave (`forward/warm_up.py`); on a CPU
what the system and the process's control groups report. If all lengths are known, the cache is
never larger than the requests can use. A draft model has the same number of blocks of its own, so a
block costs what it takes in both.

Invariants: never fewer than two blocks, the null block and one more, and those of one state if the
network keeps states; never more than is free.

Does not know: tensors, which sequences use the blocks.
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
_UNUSABLE = 20  # 1 / 20 of the free bytes is never used


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The decision.

    Attributes:
        num_blocks: the null block included.
        block_size: tokens per block.
        kv_bytes: of the caches.
        free_bytes: what was free for them; None: unknown.
        reason: for the number of blocks, in words.
    """

    num_blocks: int
    block_size: int
    kv_bytes: int
    free_bytes: int | None
    reason: str

    @property
    def holds_all(self) -> bool:
        """Whether all expected requests fit at once. O(1)."""
        return self.reason == _ALL

    def limited(self, num_blocks: int) -> "MemoryPlan":
        """The same with at most `num_blocks` blocks. O(1)."""
        if self.num_blocks <= num_blocks:
            return self
        kv_bytes = self.kv_bytes // self.num_blocks * num_blocks
        return replace(self, num_blocks=num_blocks, kv_bytes=kv_bytes, reason=_LEAST)

    def describe(self, layout: CacheLayout, beside: CacheLayout | None = None) -> str:
        """One line for the user. O(num_layers)."""
        free = "" if self.free_bytes is None else f" of {show_bytes(self.free_bytes)} free"
        drafts = "" if beside is None else f"; draft model's {_layers(beside)}"
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
        config: the settings.
        layout: the cost of a block.
        is_gpu: whether the caches are in GPU memory.
        free_bytes: for the caches; None: unknown, and nothing is refused for it.
        beside: the cost of a block of the draft model; None: no draft model.

    Raises:
        InvalidArgumentError: it does not fit, or is too little for two blocks and a state.
    """
    block_bytes = sum([one.kv_bytes(1, config.block_size) for one in (layout, beside) if one])
    most = None if free_bytes is None else free_bytes - free_bytes // _UNUSABLE
    least = 2 + layout.blocks_per_state(config.block_size)
    if config.num_blocks is not None:
        num_blocks, reason = config.num_blocks, "as asked for"
        if num_blocks < least and layout.states:
            raise InvalidArgumentError(
                f"num_blocks: wanted at least {least}, because a sequence's state takes "
                f"{least - 2} blocks of {config.block_size} tokens, got {num_blocks}: pass a "
                f"larger --num-blocks"
            )
        if most is not None and num_blocks * block_bytes > most:
            raise InvalidArgumentError(
                f"num_blocks: {num_blocks} blocks of {config.block_size} tokens take "
                f"{show_bytes(num_blocks * block_bytes)}, and {show_bytes(most)} are free"
            )
    else:
        name, budget_bytes, reason = _budget(config, is_gpu=is_gpu, free_bytes=free_bytes)
        if config.kv_memory_bytes is not None and most is not None and budget_bytes > most:
            raise InvalidArgumentError(
                f"{name}: wanted at most {show_bytes(most)}, the usable free memory, "
                f"got {show_bytes(budget_bytes)}"
            )
        num_blocks = budget_bytes // block_bytes
        if num_blocks < least:
            raise InvalidArgumentError(
                f"{name}: {'two' if least == 2 else least} blocks of {config.block_size} tokens "
                f"take {show_bytes(least * block_bytes)}, the cache has {show_bytes(budget_bytes)} "
                f"({reason}): pass a larger --kv-memory-bytes or a smaller --block-size"
            )
        useful = _useful_blocks(config, layout)
        if useful is not None and useful + 1 <= num_blocks:
            num_blocks, reason = useful + 1, _ALL
    return MemoryPlan(num_blocks, config.block_size, num_blocks * block_bytes, free_bytes, reason)


def host_free_bytes() -> int | None:
    """Memory that this process can still allocate; None if unknown. Reads a few small files.

    On Linux the least of what the kernel calls available and what each control group leaves,
    without caches that can be dropped; on other systems the memory of the machine.
    """
    found = [*_linux_available(), *cgroup_rooms(_MEMBERSHIP, _CGROUPS)]
    if found:
        return max(0, min(found))
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def show_bytes(num_bytes: int) -> str:
    """A size for people to read. O(1)."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _budget(config: EngineConfig, *, is_gpu: bool, free_bytes: int | None) -> tuple[str, int, str]:
    """The setting that decides, its bytes, and the reason in words."""
    if config.kv_memory_bytes is not None:
        return "kv_memory_bytes", config.kv_memory_bytes, "as asked for"
    if config.kv_memory_fraction is not None or is_gpu:
        name = "kv_memory_fraction"
        if free_bytes is None:
            raise InvalidArgumentError(
                f"{name}: free memory is unknown on this system: pass --kv-memory-bytes"
            )
        share = config.kv_memory_fraction or _GPU_FRACTION
        return name, int(free_bytes * share), f"{share:g} of the free memory"
    if free_bytes is not None and free_bytes * _CPU_FRACTION < _CPU_BYTES:
        share = int(free_bytes * _CPU_FRACTION)
        return "kv_memory_bytes", share, f"{_CPU_FRACTION:g} of the free memory, by default"
    return "kv_memory_bytes", _CPU_BYTES, "default"


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
    counts: dict[tuple[int, int, int], int] = {}
    own = [layer for layer in layout.own_layers if layer.reads is None]
    for layer in own:
        rate = 0 if layer.entries is None else layer.entries.rate
        kind = (layer.chunk or 0, layer.window or 0, rate)
        counts[kind] = counts.get(kind, 0) + 1
    parts = [f"{count} {_attention(*kind)}" for kind, count in sorted(counts.items())]
    groups, readers = len(layout.windows), len(layout.own_layers) - len(own)
    recurrent = len({state.key.layer for state in layout.states})
    parts += [f"{readers} shared-KV"] if readers else []
    kept = show_bytes(layout.state_bytes)
    parts += [f"{recurrent} recurrent with {kept} a state"] if recurrent else []
    return f"layers: {', '.join(parts)}" + (f"; in {groups} layer groups" if groups > 1 else "")


def _attention(chunk: int, window: int, rate: int) -> str:
    if window:
        compressed = f" and compressed, {rate} tokens a key" if rate else ""
        return f"sliding-window of {window} tokens{compressed}"
    return f"chunked-local of {chunk} tokens" if chunk else "full-attention"


def _linux_available() -> Iterator[int]:
    for line in _lines(Path("/proc/meminfo")):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def cgroup_rooms(membership: Path, root: Path) -> Iterator[int]:
    """What each control group of a process leaves, for both versions of the interface.

    Args:
        membership: the process's list of groups, like /proc/self/cgroup.
        root: of the groups, like /sys/fs/cgroup.
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
