"""Host memory, disk and peers behind the KV caches of one network: where the bytes of a block are.

Decides: what the bytes of a copy mean, so that copies of other weights, another layout, dtype,
quantisation or part of a network are never loaded; which tiers there are. `host_memory.py` moves
the bytes.

Invariants: a load has returned only when its bytes are in its blocks; a store never keeps bytes
that were read after its blocks were released (`kvcore.tiers` sees to that).

Does not know: which requests wait, what a content is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, final

import torch
import xxhash
from torch import Tensor, nn

import kvcore
from kvcore.tiers import (
    DiskTier,
    HostTier,
    LinkError,
    LoadJob,
    MemoryLink,
    Nixl,
    PeerServer,
    PeerTier,
    StoreJob,
    Tier,
    TierError,
    TierInUseError,
    TierManager,
    is_loopback,
    parse_address,
)
from model.caches.host_memory import HostPool
from model.caches.kv_caches import Scales
from model.caches.layout import CacheLayout
from model.caches.memory import host_free_bytes, show_bytes
from model.control.config import EngineConfig
from model.control.tier_transfers import TierRanks, TierTransfers, TransferCosts
from model.errors import InvalidArgumentError

_MAX_JOB_BYTES: Final = 256 << 20
_LEAST_SECRET_BYTES: Final = 16
_NO_MEANING: Final = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})

_log = logging.getLogger(__name__)

Began = Callable[[kvcore.Lease], None]
"""Is told that the blocks of a load will be written."""


def open_tiers(
    config: EngineConfig,
    network: nn.Module,
    layout: CacheLayout,
    scales: Scales,
    kv: kvcore.KVCacheManager,
    device: PooledBlocks,
    ranks: TierRanks | None = None,
) -> TierTransfers:
    """Open the tiers that a configuration asks for. Reads all weights once, for their digest.

    Of several ranks each has an equal share of the bytes, and a folder in that of the disk.

    Args:
        config: has tiers.
        network: as loaded.
        layout: of the caches.
        scales: of quantised caches.
        kv: allocates the blocks.
        device: has the blocks.
        ranks: those that share the network, which call this together; None: it is whole.

    Raises:
        InvalidArgumentError: a tier, or their server, cannot start; it names the setting.
    """
    _check_host_memory(config)
    num_shares = 1 if ranks is None else ranks.size
    block_bytes = layout.kv_bytes(1, config.block_size)
    most = max(1, min(kv.num_usable_blocks // 8, _MAX_JOB_BYTES // block_bytes))
    secret = _secret_of(config)
    meaning = meaning_of_blocks(config, network, layout, scales, ranks)
    for path in _paths(config, ranks):
        tiers: list[Tier] = []
        if config.host_memory_bytes is not None:
            tiers.append(HostTier(max(1, config.host_memory_bytes // num_shares)))
        if path is not None:
            tiers.append(DiskTier(path, max(1, config.disk_bytes // num_shares)))
        tiers += [
            PeerTier(address, secret=secret, memory=_memory_at("peer", address, config))
            for address in config.peer
        ]
        found = _started(
            config,
            kv,
            tiers,
            device.pool,
            ranks,
            block_bytes=block_bytes,
            meaning=meaning,
            max_store_blocks=most,
        )
        if found is not None:
            server = _serve(config, found, secret)
            costs = TransferCosts(block_bytes)
            transfers = TierTransfers(found, device, costs, None, server, ranks)
            for tier in found.keeping:
                if tier.in_blocks:
                    found.probe(tier)  # the first one may compile
                transfers.measure(tier)
            return transfers
    raise InvalidArgumentError("disk: no folder is left")


def _started(
    config: EngineConfig,
    kv: kvcore.KVCacheManager,
    tiers: Sequence[Tier],
    pool: HostPool,
    ranks: TierRanks | None,
    **sizes: Any,  # noqa: ANN401  # as `TierManager` takes them
) -> TierManager | None:
    """Start tiers; None: another process has their folder, on one of the ranks at least.

    Raises:
        InvalidArgumentError: they cannot start, or there are no other folders to try.
    """
    found: TierManager | None = None
    try:
        sizes["batch_bytes"] = pool.batch_bytes
        found = TierManager(kv, tiers, pool, is_shard=ranks is not None, **sizes)
    except TierInUseError as error:
        if not config.shares_disk:
            raise _refused(error) from error
    except TierError as error:
        raise _refused(error) from error
    if ranks is None or all(map(any, ranks.all_gather(bytes([found is not None])))):
        return found
    if found is not None:
        found.close()
    return None


def _serve(config: EngineConfig, tiers: TierManager, secret: bytes) -> PeerServer | None:
    """Serve the copies, if that is asked for."""
    if config.serve_kv is None:
        return None
    try:
        server = PeerServer(tiers, secret, _memory_at("serve_kv", config.serve_kv, config))
    except InvalidArgumentError:
        tiers.close()
        raise
    try:
        server.listen(config.serve_kv)
    except TierError as error:
        tiers.close()
        raise InvalidArgumentError(str(error)) from None
    _log.info("KV is served to peers at %s", server.address)
    return server


def _memory_at(name: str, address: str, config: EngineConfig) -> MemoryLink | None:
    """What reads the memory of peers at an address; None: copies are sent.

    Raises:
        InvalidArgumentError: it is wanted, and cannot be had.
    """
    is_here = is_loopback(parse_address(name, address)[0])
    if config.kv_transport == "tcp" or (config.kv_transport == "auto" and not is_here):
        return None
    try:
        return Nixl(is_same_machine=is_here)
    except LinkError as error:
        if config.kv_transport == "nixl":
            raise InvalidArgumentError(
                f"kv_transport: wanted NIXL (pip install nixl), got {error.__cause__}"
            ) from error
    return None


def _secret_of(config: EngineConfig) -> bytes:
    """What peers have to know; without a file they are all on this machine, and it is nothing.

    Raises:
        InvalidArgumentError: an address is none, or of another machine without a secret; the file
            cannot be read, or is too short.
    """
    for name, addresses in (("peer", config.peer), ("serve_kv", (config.serve_kv,))):
        for address in filter(None, addresses):
            try:
                host, _ = parse_address(name, address)
            except kvcore.InvalidArgumentError as error:
                raise InvalidArgumentError(str(error)) from None
            if config.kv_secret is None and not is_loopback(host):
                raise InvalidArgumentError(
                    f"{name}: wanted an address on this machine (127.0.0.1), or a secret "
                    f"(--kv-secret PATH), got {address!r}"
                )
    if config.kv_secret is None:
        return b""
    try:
        secret = Path(config.kv_secret).read_bytes().strip()
    except OSError as error:
        raise InvalidArgumentError(f"kv_secret: {config.kv_secret}: {error.strerror}") from None
    if len(secret) < _LEAST_SECRET_BYTES:
        raise InvalidArgumentError(
            f"kv_secret: wanted a file of at least {_LEAST_SECRET_BYTES} bytes, got {len(secret)}"
        )
    return secret


def meaning_of_blocks(
    config: EngineConfig,
    network: nn.Module,
    layout: CacheLayout,
    scales: Scales,
    ranks: TierRanks | None = None,
) -> Mapping[str, str | int]:
    """What the bytes of a block mean: equal only where they may be exchanged. Reads all weights.

    What a rank computes depends on the parts of all ranks.
    """
    settings: Any = getattr(network, "config", None)
    about = {} if settings is None else settings.to_dict()
    kept = {name: about[name] for name in sorted(about) if name not in _NO_MEANING}
    parts = [part for pair in scales for part in pair if part is not None]
    meaning: dict[str, str | int] = {
        "weights": _digest([*network.state_dict().items()]),
        "network": xxhash.xxh3_128_hexdigest(repr(kept).encode()),
        "layout": repr(layout),
        "scales": _digest([(str(number), part) for number, part in enumerate(parts)]),
        "byte order": sys.byteorder,
        "batch invariant": int(config.batch_invariant),
        "rank": 0,
        "ranks": 1,
    }
    if ranks is not None:
        parts_of_all = ranks.all_gather(xxhash.xxh3_128_digest(repr(meaning).encode()))
        whole = xxhash.xxh3_128_hexdigest(b"".join(parts_of_all))
        meaning |= {"whole": whole, "rank": ranks.rank, "ranks": ranks.size}
    return meaning


def _digest(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """The digest of tensors with their names, dtypes and shapes. O(their bytes)."""
    found = xxhash.xxh3_128()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        found.update(content.numpy().data)
    return found.hexdigest()


def _check_host_memory(config: EngineConfig) -> None:
    asked, free_bytes = config.host_memory_bytes, host_free_bytes()
    if asked is not None and free_bytes is not None and asked > free_bytes:
        raise InvalidArgumentError(
            f"host_memory_bytes: wanted at most {show_bytes(free_bytes)}, the free memory, got "
            f"{show_bytes(asked)}"
        )


def _paths(config: EngineConfig, ranks: TierRanks | None) -> Iterator[str | None]:
    """The folders to try, in order."""
    if config.disk is None:
        yield None
        return
    own = "" if ranks is None else f"rank-{ranks.rank}"
    if not config.shares_disk:
        yield str(Path(config.disk, own))
        return
    for number in count():
        yield str(Path(config.disk, f"replica-{number}", own))


def _refused(error: TierError) -> InvalidArgumentError:
    tier, _, reason = str(error).partition(": ")
    setting = "host_memory_bytes" if tier == "host tier" else "disk"
    if setting == "disk" and reason.startswith("wanted a capacity"):
        setting = "disk_bytes"
    return InvalidArgumentError(f"{setting}: {reason}")


@final
class PooledBlocks:
    """Runs jobs, which move blocks to and from host memory.

    Args:
        pool: moves them.
        began: is called with the lease of each load when it begins.
    """

    def __init__(self, pool: HostPool, began: Began) -> None:
        self.pool = pool
        self._began = began

    def mark(self) -> object:
        """See `TierDevice.mark`."""
        return self.pool.mark()

    def began(self, job: LoadJob) -> None:
        """See `TierDevice.began`."""
        self._began(job.lease)

    def load(self, job: LoadJob, mark: object) -> None:
        """See `TierDevice.load`."""
        self.pool.wait_for(mark, to_host=False)
        job.run()

    def store(self, job: StoreJob, mark: object) -> None:
        """See `TierDevice.store`."""
        self.pool.wait_for(mark, to_host=True)
        job.run()

    def gave_up(self) -> None:
        """See `TierDevice.gave_up`."""
        self.pool.hold_back()
