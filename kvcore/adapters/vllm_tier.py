"""kvcore's disk tier as a secondary tier of vLLM's `TieringOffloadingSpec` (vLLM 0.32).

    {"type": "kvcore", "module_path": "kvcore.adapters.vllm_tier", "path": PATH, "capacity": SIZE}

Decides: what the bytes of a chunk mean, which threads read and write, and what a reset forgets. A
chunk is a row of vLLM's host memory: one block hash's KV of one group, of all layers and workers.

Invariants: a chunk is served only if its block hash, group, meaning, length and checksum fit; every
other record is a miss and is counted. The scheduler's thread does no input or output. After
`drain_jobs` and after `shutdown` no thread touches vLLM's memory.

When vLLM resets its connector, because weights change, the model keeps its name: every record is
forgotten then. A tier hears of a reset through its detector of back-pressure, which is reset too.

Does not know: blocks of the GPU; what vLLM's block hashes cover: tokens, salt, adapter, images.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvcore.arguments import as_int
from kvcore.errors import InvalidArgumentError
from kvcore.tiers import DiskTier, Key, key_of, meaning_of

FAULTS: Final = "vllm:kv_offload_tiering_kvcore_faults"
"""The counter of records that were not served or not written, by `kind`."""

_KEY_BYTES: Final = 36
_OTHER_HASHES: Final = "kvcore: nothing is stored: wanted --prefix-caching-hash-algo sha256_cbor"
_SIZE: Final = re.compile(r"(\d+) ?([KMGT]iB|)")
_UNITS: Final = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_WEIGHT_FILES: Final = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"}

logger = init_logger(f"vllm.{__name__}")


class NoPressure(BackpressureDetector):  # type: ignore[misc]  # vLLM ships no types
    """The detector where none is configured: every store is welcome."""

    def should_store(self, num_blocks: int) -> bool:  # noqa: ARG002
        """Return that it is to be carried out."""
        return True

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """Note nothing."""

    def is_under_pressure(self) -> bool:
        """Return that it is not."""
        return False

    def reset(self) -> None:
        """Forget nothing."""


class DiskTierManager(SecondaryTierManager):  # type: ignore[misc]  # vLLM ships no types
    """A folder that keeps chunks over restarts, within a capacity.

    Args:
        offloading_spec: vLLM's configuration of offloading.
        primary_kv_view: vLLM's host memory: [num_chunks, bytes of a chunk].
        tier_type: the name that the configuration gives it, for metrics.
        path: the folder; each data parallel replica has one of its own in it.
        capacity: the most bytes that the files take, for each replica: a number, or "100GiB".
        weights: names the weights where the model's name does not: a revision, say. Of a local
            model the names, sizes and times of its files count too.
        locality: "LOCAL" or "REMOTE", for requests that name tiers.
        backpressure_detector: vLLM's own, if it is configured.

    Raises:
        InvalidArgumentError: an option has a value that it cannot have.
        TierError: the folder cannot be used, or the capacity is too small.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        path: str | os.PathLike[str],
        capacity: int | str,
        weights: str = "",
        locality: str | None = None,
        backpressure_detector: Any = None,  # noqa: ANN401
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = None if locality is None else Locality(locality)
        parallel = offloading_spec.config.parallel
        if parallel.data_parallel_size > 1:
            path = Path(path) / f"replica-{parallel.data_parallel_index}"
        self.disk = DiskTier(path, bytes_of(capacity))
        self.disk.start(
            meaning_of(fields_of(offloading_spec, self._block_size_bytes, weights)),
            self._block_size_bytes,
        )
        detector: Any = NoPressure() if backpressure_detector is None else backpressure_detector
        detector.reset = self._hear_of(detector.reset)
        self._bp_detector = detector
        self._rows = primary_kv_view.cast("B")
        self._loads = ThreadPoolExecutor(1, "kvcore-tier-load")  # waits for no store
        self._stores = ThreadPoolExecutor(1, "kvcore-tier-store")
        self._running: dict[int, Future[JobResult]] = {}
        self._reported: dict[str, int] = {}
        logger.info("kvcore: %s: %d chunks are there", path, self.disk.stats.num_records)

    def _hear_of(self, reset: Callable[[], None]) -> Callable[[], None]:
        """Return a reset of the detector that forgets every record as well."""

        def both() -> None:
            self.disk.clear()
            reset()

        return both

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:  # noqa: ANN401, ARG002
        """Return whether a chunk is there. O(1), without input or output."""
        found = self.disk.contains(_key_of(key))
        return LookupResult.HIT if found else LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:  # noqa: ANN401, ARG002
        """Note that chunks were used. O(keys)."""
        for key in reversed([*keys]):  # a prefix outlives what continues it
            self.disk.touch(_key_of(key))

    def submit_store(self, job_metadata: Any) -> None:  # noqa: ANN401
        """Write chunks in the background. O(1)."""
        epoch = self.disk.epoch

        def store(key: Key, row: memoryview) -> bool:
            if len(key) != _KEY_BYTES:
                logger.warning_once(_OTHER_HASHES)
                return False
            return self.disk.put(key, row, 0, epoch)

        self._submit(self._stores, job_metadata, store)

    def submit_load(self, job_metadata: Any) -> None:  # noqa: ANN401
        """Read chunks in the background. O(1)."""

        def load(key: Key, row: memoryview) -> bool:
            payload = self.disk.get(key, len(row))
            if payload is None:
                return False
            row[:] = payload
            return True

        self._submit(self._loads, job_metadata, load)

    def _submit(
        self,
        threads: ThreadPoolExecutor,
        job: Any,  # noqa: ANN401
        move: Callable[[Key, memoryview], bool],
    ) -> None:
        # The last first: a prefix is to outlive what continues it.
        rows = [*zip(job.keys, job.chunk_ids.tolist(), strict=True)][::-1]
        self._running[job.job_id] = threads.submit(self._move, job.job_id, rows, move)

    def _move(
        self, job_id: int, rows: list[tuple[bytes, int]], move: Callable[[Key, memoryview], bool]
    ) -> JobResult:
        """Move the rows of one job; those that could be moved are named. O(bytes)."""
        began, size, moved = time.monotonic(), self._block_size_bytes, []
        for key, number in rows:
            row = self._rows[number * size : (number + 1) * size]
            if len(row) == size and move(_key_of(key), row):
                moved.append(key)
        return JobResult(
            job_id=job_id,
            success=len(moved) == len(rows),
            successful_keys=tuple(moved) or None,
            transfer_time=time.monotonic() - began,
            transfer_bytes=len(moved) * size,
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what has ended since the last call, done or not. O(jobs that run)."""
        ended = [job_id for job_id, job in self._running.items() if job.done()]
        return [_result_of(job_id, self._running.pop(job_id)) for job_id in ended]

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ANN401, ARG002
        """Have new chunks offloaded as they are computed."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait for all that runs. O(bytes under way)."""
        wait(self._running.values())

    def shutdown(self) -> None:
        """Finish what runs, drop what waits, and let go of the folder and of vLLM's memory."""
        for threads in (self._loads, self._stores):
            threads.shutdown(wait=True, cancel_futures=True)
        self.disk.close()
        self._rows.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """Return the metrics that vLLM does not have."""
        about = "Records that kvcore's tier did not serve or did not write, by kind."
        return {FAULTS: OffloadingCounterMetadata(documentation=about, labelnames=("kind",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the faults since the last call. O(kinds)."""
        stats = OffloadingConnectorStats()
        for kind, count in [*self.disk.stats.faults.items()]:
            new = count - self._reported.get(kind, 0)
            if new:
                stats.increase_counter(FAULTS, new, (kind,))
            self._reported[kind] = count
        return None if stats.is_empty() else stats


def fields_of(offloading_spec: Any, row_bytes: int, weights: str) -> dict[str, str | int]:  # noqa: ANN401
    """Return what the bytes of a chunk depend on. O(files of the model)."""
    config = offloading_spec.config
    parallel = config.parallel
    groups = [(group.tokens_per_block, *group.layer_names) for group in config.groups]
    return {
        "engine": f"vllm {vllm.__version__} {current_platform.device_type}",
        "model": config.model.name,
        "weights": weights,
        "files": _files_of(Path(config.model.name)),
        "dtype": config.model.dtype,
        "layout": f"{config.kv_cache_layout} canonical={config.canonical_layout} "
        f"replicated={config.replicated_layout}",
        "groups": repr(groups),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "block_bytes": config.worker_kv_bytes_per_block,
        "row_bytes": row_bytes,
        "ranks": f"{parallel.world_size} tp={parallel.tp_size} pp={parallel.pp_size} "
        f"pcp={parallel.pcp_size} dcp={parallel.dcp_size}",
    }


def _files_of(folder: Path) -> str:
    """Return names, sizes and times of a model's files; nothing if it is not a local folder."""
    if not folder.is_dir():
        return ""
    found = [(path.name, path.stat()) for path in folder.iterdir() if path.suffix in _WEIGHT_FILES]
    return repr(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


def bytes_of(capacity: int | str) -> int:
    """Return a capacity in bytes: a number, or a text such as "100GiB".

    Raises:
        InvalidArgumentError: it is neither, or not positive.
    """
    match = _SIZE.fullmatch(capacity) if isinstance(capacity, str) else None
    if match:
        capacity = int(match[1]) << _UNITS[match[2]]
    if isinstance(capacity, str):
        raise InvalidArgumentError(f'capacity: wanted a number or "100GiB", got {capacity!r}')
    return as_int("capacity", capacity, 1)


def _key_of(key: bytes) -> Key:
    """Return the key of a chunk; of another length than 36 where vLLM's hash is not sha256."""
    return key_of(get_offload_group_idx(key), get_offload_block_hash(key))


def _result_of(job_id: int, job: Future[JobResult]) -> JobResult:
    """Return what came of a job; one that raised has moved nothing that may be used."""
    error = job.exception()
    if error is None:
        return job.result()
    logger.warning("kvcore: a transfer failed: %s", error)
    return JobResult(job_id=job_id, success=False)


kvcore = DiskTierManager
"""The class that `"type": "kvcore"` names."""
