"""The network on its paged caches: tensors of a step in, logits out.

Decides: that a network is switched to our attention, what its layers store, and how many blocks
there are.

Invariants: the caches fit the layers exactly, because a probe measured them; a pass writes the
    slots
of its step and no others.

Does not know: requests, sampling, why a step looks as it does.
"""

import torch
from torch import Tensor

import backends
from model.attention import IMPLEMENTATION, PagedPass, probe_layers
from model.batch import StepTensors
from model.caches import KVCaches, default_num_blocks, token_bytes
from model.errors import UnsupportedModelError
from model.loader import LoadedModel


class PagedNetwork:
    """A loaded model, its caches and the backend that works on them.

    Args:
        model: its attention is switched to the paged one, for as long as it lives.
        backend: where its caches are, and what runs on them.
        num_blocks: the null block included; None: as many as memory suggests.
        max_useful_blocks: where `num_blocks` is None, never more than this.
        block_size: tokens a block.

    Raises:
        UnsupportedModelError: the network cannot run with a paged cache, or not on this backend.
        InvalidArgumentError: there is not enough memory for that many blocks.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: backends.Backend,
        *,
        num_blocks: int | None,
        max_useful_blocks: int | None,
        block_size: int,
    ) -> None:
        self._network = model.network
        self._backend = backend
        self._network.set_attn_implementation(IMPLEMENTATION)
        shapes = probe_layers(self._network, backend.device)
        for layer, shape in enumerate(shapes):
            if shape.dtype not in backend.capabilities.dtypes:
                raise UnsupportedModelError(
                    f"backend {backend.name}: layer {layer} is {shape.dtype}, wanted one of "
                    f"{', '.join(map(str, backend.capabilities.dtypes))}"
                )
        if num_blocks is None:
            num_blocks = default_num_blocks(shapes, block_size, backend.device, max_useful_blocks)
        self.num_blocks = num_blocks
        self.token_bytes = token_bytes(shapes)
        self.caches = KVCaches.allocate(shapes, num_blocks, block_size, backend.device)

    @property
    def device(self) -> torch.device:
        """Where the step's tensors have to be. O(1)."""
        return self._backend.device

    def logits(self, step: StepTensors) -> Tensor:
        """Compute a step: write its keys and values, return [num_sampled, vocab_size]."""
        paged = PagedPass(self._backend, self.caches, step.paged)
        with torch.inference_mode():
            output = self._network(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                use_cache=False,
                logits_to_keep=step.logit_rows,
                paged=paged,
            )
        logits: Tensor = output.logits[0]
        return logits
