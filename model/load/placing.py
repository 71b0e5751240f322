"""Places the weights of a network on its device.

Decides: that weights go to a GPU through two page-locked buffers. The weights that Transformers
reads are files in memory; from such memory the driver copies with one thread, page by page, and
waits for each copy. Here all threads of PyTorch fill one buffer while the GPU reads the other.

Does not know: where weights come from.
"""

import torch
from torch import Tensor, nn

_BUFFER_BYTES = 16 << 20


def place(network: nn.Module, device: torch.device) -> None:
    """Move a network, as `nn.Module.to` does. O(its bytes)."""
    if device.type == "cuda":
        place_parameters(network, device, _BUFFER_BYTES)
    nn.Module.to(network, device)


def place_parameters(network: nn.Module, device: torch.device, buffer_bytes: int) -> None:
    """Move those parameters that are plain tensors of the host. O(their bytes).

    Args:
        network: its other tensors stay.
        device: where to.
        buffer_bytes: of each of two buffers.
    """
    buffers = _Buffers(device, buffer_bytes)
    for parameter in network.parameters():
        own = parameter.data
        if type(parameter) is nn.Parameter and own.device.type == "cpu" and own.is_contiguous():
            placed = torch.empty_like(own, device=device)
            whole, there = (each.view(-1).view(torch.uint8) for each in (own, placed))
            for start in range(0, len(whole), buffer_bytes):
                end = start + buffer_bytes
                buffers.send(whole[start:end], there[start:end])
            parameter.data = placed
    buffers.wait()


class _Buffers:
    """Two buffers on the host, each with an event that its last copy is over."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._is_gpu = device.type == "cuda"
        self._pairs = [
            (torch.empty(size, dtype=torch.uint8, pin_memory=self._is_gpu), self._event())
            for _ in range(2)
        ]

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._is_gpu else None  # type: ignore[no-untyped-call]

    def send(self, part: Tensor, target: Tensor) -> None:
        """Copy bytes; on a GPU this returns before they are there."""
        self._pairs.reverse()
        buffer, is_free = self._pairs[0]
        if is_free is not None:
            is_free.synchronize()
        filled = buffer[: len(part)].copy_(part)
        target.copy_(filled, non_blocking=True)
        if is_free is not None:
            is_free.record()

    def wait(self) -> None:
        """Wait until all bytes are there."""
        for _, is_free in self._pairs:
            if is_free is not None:
                is_free.synchronize()
