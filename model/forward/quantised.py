"""Quantised caches of float8 (e4m3): half the memory of bfloat16, and half of the bytes read.

An element stands for `stored * scale`. e4m3 has three mantissa bits, from 2**-6 to 448, and fewer
below; so a scale moves the numbers that a layer stores into that range.

Decides: the scales, one per KV head of a layer: from the largest number that it stores of a text of
tokens from the whole vocabulary, with room for twice that. User: `--kv-dtype fp8`.

Invariants: scales depend on the network alone, and never change once caches use them.

Does not know: how a backend stores and reads them (`backends`), which requests run.
"""

from typing import cast

import torch
from torch import Tensor

import backends
import kvcore
from model.attention.batch import BatchBuilder, StepTensors
from model.caches.kv_caches import Scales
from model.control.params import SamplingParams
from model.control.request import Request
from model.control.step import Chunk, Step
from model.forward.network import PagedNetwork

_DTYPE = torch.float8_e4m3fn
_LARGEST = 448.0
_ROOM = 2.0  # a layer may store larger numbers of other texts
_LEAST = 2.0**-20
_NUM_TOKENS = 256
_STRIDE = 7919  # a prime, so that the tokens spread over the whole vocabulary


def quantise(network: PagedNetwork, *, block_size: int, vocab_size: int) -> None:
    """Use caches of float8 from now on; none are allocated yet. One forward pass.

    Raises:
        UnsupportedModelError: the backend does not support them.
    """
    network.check_stores(_DTYPE)
    network.store_as(_DTYPE, _scales(network, _largest(network, block_size, vocab_size)))


def _largest(
    network: PagedNetwork, block_size: int, vocab_size: int
) -> list[tuple[Tensor, Tensor | None]]:
    """Return for each layer the largest numbers that it stores per KV head: keys and values."""
    groups = network.layout.groups(block_size)
    count = _NUM_TOKENS
    kv = kvcore.KVCacheManager(
        kvcore.peak_blocks(count, block_size, groups=groups, chunk=count) + 1,
        block_size,
        groups=groups,
    )
    tokens = [number * _STRIDE % vocab_size for number in range(count)]
    request = Request(0, tokens, SamplingParams(max_tokens=1))
    sequence = kv.open(tokens, namespace=None)
    request.start(sequence)
    kv.reserve(sequence, count)
    layout = network.layout
    builder = BatchBuilder(network.device, len(layout.chunks), layout.chunks)
    step = builder.build(Step((Chunk(request, 0, count, samples=True),)))
    network.allocate(kv.num_usable_blocks + 1, block_size)
    try:
        return _observe(network, step.to(network.device))
    finally:
        network.free()


def _observe(network: PagedNetwork, step: StepTensors) -> list[tuple[Tensor, Tensor | None]]:
    noting = _Noting(network.backend)
    network.logits(step, backend=cast("backends.Backend", noting))
    caches = network.caches.layers
    sources = [
        number if layer.reads is None else network.layout.numbers[layer.reads]
        for number, layer in enumerate(network.layout.layers)
    ]
    return [noting.largest[id(caches[source])] for source in sources]


def _scales(network: PagedNetwork, largest: list[tuple[Tensor, Tensor | None]]) -> Scales:
    def scale(most: Tensor) -> Tensor:
        return (most.float() * (_ROOM / _LARGEST)).clamp(min=_LEAST).to(network.device)

    return tuple((scale(key), None if value is None else scale(value)) for key, value in largest)


class _Noting:
    """A backend that notes the largest numbers that are stored."""

    def __init__(self, inner: backends.Backend) -> None:
        self._inner = inner
        self.largest: dict[int, tuple[Tensor, Tensor | None]] = {}  # by cache

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def store_kv(
        self, key: Tensor, value: Tensor | None, cache: backends.KVCache, slot_mapping: Tensor
    ) -> None:
        """Store and note. O(numbers)."""
        most = [None if part is None else part.abs().amax(dim=(0, 2)) for part in (key, value)]
        self.largest[id(cache)] = cast("tuple[Tensor, Tensor | None]", tuple(most))
        self._inner.store_kv(key, value, cache, slot_mapping)
