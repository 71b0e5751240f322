"""Memory of a process out of which peers read copies themselves, over NIXL.

Decides: how that memory is made, described to a peer and read. Questions, answers and proofs stay
on the link (`link.py`); only payloads go this way, and the reader of one compares its checksum.
NIXL is NVIDIA's transfer library, https://github.com/ai-dynamo/nixl: it moves bytes over RDMA,
shared memory or TCP, whatever UCX finds on both sides. Between two processes of one machine UCX
uses shared memory only, so it listens nowhere; between machines it listens on ports that ask for
no proof, see docs/how-to/transfers.md.

Invariants: a read has a deadline; memory is freed after all that might still write in it; a failure
of the package is a `LinkError`, whatever it raised.

Does not know: tiers, keys, what a payload means.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import logging
import mmap
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

from kvcore.tiers.link import LinkError

_DESCRIPTION: Final = struct.Struct("<16sQQ")  # version of NIXL, address, bytes; then metadata
# Without its own handling of errors UCX takes shared memory alone: this side has deadlines instead.
_SAME_MACHINE: Final = {"engine_config": "TLS=shm", "ucx_error_handling_mode": "none"}
_POLL_S: Final = 50e-6
_log = logging.getLogger(__name__)


class SharedMemory(Protocol):
    """Memory of this process that peers may read."""

    def describe(self) -> bytes:
        """Return what a peer needs to read it. O(1)."""
        ...

    def write(self, offset: int, payload: bytes | memoryview) -> None:
        """Put a payload there. O(its bytes)."""
        ...

    def progress(self) -> None:
        """Do this side's part of reads that are under way; called again and again until then.

        Raises:
            LinkError: it cannot.
        """
        ...

    def close(self) -> None:
        """Share it no more. Must not raise."""
        ...


class MemoryReader(Protocol):
    """Reads the memory of a peer. After an error it has to be closed."""

    def attach(self, description: bytes) -> None:
        """Read from the memory that is described from now on.

        Raises:
            LinkError: "foreign": it is of another version; "failed": it cannot be reached.
        """
        ...

    def read(self, offset: int, size: int, deadline_s: float) -> memoryview:
        """Return bytes of the memory. O(size).

        Raises:
            LinkError: "late", "failed", or "short": the memory ends before.
        """
        ...

    def close(self) -> None:
        """Read no more; a read that waits on another thread fails. Must not raise."""
        ...


class MemoryLink(Protocol):
    """Makes both ends.

    Attributes:
        name: for reports.
    """

    name: str

    def share(self, size: int) -> SharedMemory:
        """Share memory of `size` bytes.

        Raises:
            LinkError: it cannot.
        """
        ...

    def reader(self, largest: int) -> MemoryReader:
        """Return what reads payloads of at most `largest` bytes.

        Raises:
            LinkError: there is none.
        """
        ...


@final
class Nixl:
    """The NIXL package that is installed here.

    Args:
        is_same_machine: peers are on this machine: shared memory only, and no ports.

    Raises:
        LinkError: it is not installed, or cannot be loaded.
    """

    name = "NIXL"

    def __init__(self, *, is_same_machine: bool) -> None:
        with _failures("loaded"):
            self._api: Any = importlib.import_module("nixl._api")
            self._version = importlib.metadata.version("nixl").encode()[:16].ljust(16, b"\0")
        printed = logging.getLogger("nixl")  # it writes to standard output, where texts belong
        printed.handlers.clear()
        printed.propagate = True
        printed.setLevel(logging.WARNING)
        self._options = _SAME_MACHINE if is_same_machine else {}

    def share(self, size: int) -> NixlMemory:
        """See `MemoryLink.share`. Takes about a second."""
        return NixlMemory(self._api, self._version, self._options, size)

    def reader(self, largest: int) -> NixlReader:
        """See `MemoryLink.reader`. Takes about a second."""
        return NixlReader(NixlMemory(self._api, self._version, self._options, largest))


@final
class NixlMemory:
    """Memory that NIXL knows, and the agent that knows it; see `Nixl`.

    Attributes:
        address: where it is.
        size: its bytes.
        version: of NIXL.
        agent: NIXL's; None once it is closed. Held by one thread at a time, under `lock`.
        lock: see above.
    """

    def __init__(self, api: Any, version: bytes, options: dict[str, str], size: int) -> None:  # noqa: ANN401
        self.size, self.version = size, version
        self.lock = threading.Lock()
        self._content = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._content))
        with _failures("started"):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self.agent: Any = api.nixl_agent(uuid.uuid4().hex, config)
            self.agent.create_backend("UCX", options)
            self.agent.register_memory([(self.address, size, 0, "")], "DRAM")

    def describe(self) -> bytes:
        """See `SharedMemory.describe`."""
        with self.lock, _failures("described"):
            metadata: bytes = self.agent.get_agent_metadata()
        return _DESCRIPTION.pack(self.version, self.address, self.size) + metadata

    def write(self, offset: int, payload: bytes | memoryview) -> None:
        """See `SharedMemory.write`."""
        self._content[offset : offset + len(payload)] = payload

    def taken(self, size: int) -> memoryview:
        """Return a copy of the first bytes. O(size)."""
        return memoryview(self._content[:size])

    def progress(self) -> None:
        """See `SharedMemory.progress`."""
        with self.lock, _failures("waited for"):
            self.agent.get_new_notifs()

    def close(self) -> None:
        """See `SharedMemory.close`. The memory is freed with this object, after the agent."""
        with self.lock:
            self.agent = None


@final
class NixlReader:
    """Reads the memory of a peer; see `Nixl`."""

    def __init__(self, memory: NixlMemory) -> None:
        self._memory = memory
        self._peer = ""
        self._address = self._size = 0
        self._is_closed = False

    def attach(self, description: bytes) -> None:
        """See `MemoryReader.attach`."""
        memory = self._memory
        with memory.lock, _failures("connected"):
            version, address, size = _DESCRIPTION.unpack_from(description)
            if version != memory.version:
                raise LinkError("foreign")
            if self._peer:
                peer, self._peer = self._peer, ""
                memory.agent.remove_remote_agent(peer)
            name = memory.agent.add_remote_agent(description[_DESCRIPTION.size :])
            self._peer = name.decode() if isinstance(name, bytes) else name
            self._address, self._size = address, size

    def read(self, offset: int, size: int, deadline_s: float) -> memoryview:
        """See `MemoryReader.read`."""
        memory = self._memory
        if offset + size > self._size or size > memory.size:
            raise LinkError("short")
        with memory.lock, _failures("read"):
            agent = memory.agent
            here = agent.get_xfer_descs([(memory.address, size, 0)], "DRAM")
            there = agent.get_xfer_descs([(self._address + offset, size, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, self._peer)
            state = agent.transfer(handle)
            while state == "PROC":
                if self._is_closed or time.monotonic() >= deadline_s:
                    raise LinkError("late")
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise LinkError("failed")
            agent.release_xfer_handle(handle)
            return memory.taken(size)

    def close(self) -> None:
        """See `MemoryReader.close`."""
        self._is_closed = True
        self._memory.close()


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Have whatever the package raises be a failure of the link."""
    try:
        yield
    except LinkError:
        raise
    except Exception as error:  # the package's errors have no common base
        _log.debug("NIXL cannot be %s", what, exc_info=True)
        raise LinkError("failed") from error
