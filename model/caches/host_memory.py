"""Host memory for blocks: a second pool beside the caches, page-locked where a GPU copies.

Decides: how it is allocated, once, before the first request: the system gives the pages to several
threads at a time, then the driver locks all of them in one call; how blocks move between it and the
caches: in one call of the backend, on streams of their own that wait for the steps sent before, so
no step waits for them.

Invariants: a move has ended when what its call has returned is called; what was freed is not
touched any more.

Does not know: which blocks, what they hold.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
from torch import Tensor

import backends
from model.caches.memory import show_bytes

if TYPE_CHECKING:  # not loaded where there are no tiers
    from kvcore.tiers import Wait

_PAGE_BYTES: Final = 4096
_THREADS: Final = 8
_STEP_BYTES: Final = 4 << 30  # between reports
_BATCH_BYTES: Final = 128 << 20
_CPU_BATCH_BYTES: Final = 32 << 20  # as fast; the first moves wait for the system's pages too
_cuda: Any = torch.cuda  # its runtime has no types
_log = logging.getLogger(__name__)


def allocate_host(num_blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    """Allocate uint8 [num_blocks, block_bytes], page-locked for a GPU: about 4 GB a second there.

    Memory that cannot be page-locked is used as it is, with a warning.

    Raises:
        MemoryError: the system has too little address space.
    """
    size = max(1, num_blocks * block_bytes)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise MemoryError(f"{show_bytes(size)} of host memory cannot be allocated") from error
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults
    content = np.frombuffer(pages, np.uint8)
    found = torch.from_numpy(content)
    if device.type == "cuda":
        _lock_pages(found, device)
    return found[: num_blocks * block_bytes].view(num_blocks, block_bytes)


def _lock_pages(memory: Tensor, device: torch.device) -> None:
    """Have the system allocate all pages of memory, and the driver lock them, or warn."""
    content, size = memory.numpy(), memory.numel()
    began_s = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as threads:
        for begin in range(0, size, _STEP_BYTES):
            part = content[begin : begin + _STEP_BYTES : _PAGE_BYTES]
            list(threads.map(lambda each: each.fill(0), np.array_split(part, _THREADS)))
            if begin:
                done = show_bytes(begin)
                _log.info("host memory: %s of %s are allocated", done, show_bytes(size))
    code = int(_cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
    if code:
        with suppress(RuntimeError):
            torch.zeros(1, device=device)  # takes the error that the call has left behind
        _log.warning(
            "host memory: %s cannot be page-locked (CUDA error %d): copies to and from the GPU "
            "take several times as long, and steps wait for them (ulimit -l, or fewer bytes)",
            show_bytes(size),
            code,
        )
    else:
        took_s = time.monotonic() - began_s
        _log.info("host memory: %s are page-locked, in %.1f s", show_bytes(size), took_s)


@final
class HostPool:
    """Moves blocks between the caches and host memory: a `kvcore.tiers.HostMover`.

    Args:
        backend: moves bytes.
        storages: all memory of the caches, see `KVCaches.storages`.
        lock: held while blocks are read or written; None: none is needed.
    """

    def __init__(
        self,
        backend: backends.Backend,
        storages: Sequence[Tensor],
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._backend = backend
        self._storages = storages
        self._lock = nullcontext() if lock is None else lock
        self._device = storages[0].device
        self._block_bytes = sum([storage.shape[1] for storage in storages])
        self._host = torch.empty(0, dtype=torch.uint8)
        self._is_free = False
        self._turns = Lock(), Lock()  # of moves to host memory and from it
        self._torch: Any = None
        self._streams: tuple[Any, Any] = (None, None)
        if self._device.type != "cpu":
            self._torch = torch.get_device_module(self._device)
            self._streams = self._torch.Stream(), self._torch.Stream()

    @property
    def batch_bytes(self) -> int:
        """The bytes to move in one call: a job that is cancelled waits for it. O(1)."""
        return _CPU_BATCH_BYTES if self._device.type == "cpu" else _BATCH_BYTES

    def mark(self) -> Any:  # noqa: ANN401 - an event of the device
        """Return what has been sent to the device so far, for `wait_for`. O(1)."""
        if self._torch is None:
            return None
        event = self._torch.Event()
        event.record(self._torch.current_stream())
        return event

    def wait_for(self, mark: object, *, to_host: bool) -> None:
        """Have moves of a direction come after a mark. O(1)."""
        if self._torch is not None:
            self._streams[not to_host].wait_event(mark)

    def hold_back(self) -> None:
        """Have what is sent from now on come after the moves from host memory. O(1)."""
        if self._torch is not None:
            self._torch.current_stream().wait_stream(self._streams[1])

    def allocate(self, num_blocks: int) -> memoryview:
        """Allocate blocks of host memory, one behind the other."""
        self._host = torch.empty(0, dtype=torch.uint8)  # what was freed goes first
        self._host = allocate_host(num_blocks, self._block_bytes, self._device)
        self._is_free = False
        return self._host.numpy().reshape(-1).data

    def store(self, block_ids: Sequence[int], host_ids: Sequence[int]) -> Wait:
        """Begin to copy blocks to blocks of host memory. O(blocks); on a CPU O(bytes)."""
        return self._move(block_ids, host_ids, to_host=True)

    def load(self, host_ids: Sequence[int], block_ids: Sequence[int]) -> Wait:
        """Begin to copy blocks of host memory to blocks. O(blocks); on a CPU O(bytes)."""
        return self._move(block_ids, host_ids, to_host=False)

    def _move(self, block_ids: Sequence[int], host_ids: Sequence[int], *, to_host: bool) -> Wait:
        on_stream = self._torch and self._torch.stream(self._streams[not to_host])
        moves = torch.tensor([*zip(block_ids, host_ids, strict=True)], dtype=torch.int64)
        found = torch.empty(len(moves), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        with self._turns[not to_host], self._lock, on_stream or nullcontext():
            if self._is_free:
                raise RuntimeError("the host memory was freed")
            sums = torch.empty(len(moves), dtype=torch.int64, device=self._device)
            try:
                self._backend.move_blocks(self._storages, self._host, moves, sums, to_host=to_host)
                found.copy_(sums, non_blocking=True)
            except Exception:  # some copies may be on their way, of blocks that are used again
                self._end_moves(to_host=to_host)
                raise
            mark = self.mark()
            if mark is not None and not isinstance(self._lock, nullcontext):
                mark.synchronize()

        def wait() -> list[int]:
            if mark is not None:
                mark.synchronize()
            return found.tolist()

        return wait

    def _end_moves(self, *, to_host: bool) -> None:
        """Wait for all moves of a direction."""
        if self._torch is not None:
            self._streams[not to_host].synchronize()

    def sums(self, host_ids: Sequence[int]) -> Sequence[int]:
        """Return the sums of blocks of host memory. O(bytes)."""
        sizes = [storage.shape[1] for storage in self._storages]
        return [backends.block_sum(torch.split(self._host[one], sizes)) for one in host_ids]

    def free(self) -> None:
        """Free the host memory, after the moves that are under way."""
        with self._turns[0], self._turns[1]:
            self._is_free = True
            for to_host in (True, False):
                self._end_moves(to_host=to_host)
            if self._host.numel() and self._host.is_pinned():
                _cuda.cudart().cudaHostUnregister(self._host.data_ptr())
