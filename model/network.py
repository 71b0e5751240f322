"""The network on its paged caches: tensors of a step in, logits out.

Decides: that a network is switched to our attention, what its layers store, and how many blocks
there are.

Invariants: the caches fit the layers exactly, because a probe measured them; a pass writes the
slots of its step and no others.

Does not know: requests, sampling, why a step looks as it does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import backends
from model.attention import IMPLEMENTATION, PagedPass, probe_layers
from model.batch import StepTensors
from model.caches import KVCaches
from model.errors import UnsupportedModelError
from model.layout import plan_layout
from model.loader import LoadedModel
from model.memory import default_num_blocks
from model.needs import needed_blocks


class PagedNetwork:
    """A loaded model, its caches and the backend that works on them.

    Args:
        model: its attention is switched to the paged one, for as long as it lives.
        backend: where its caches are, and what runs on them.
        num_blocks: the null block included; None: as many as memory suggests.
        expected_lengths: where `num_blocks` is None, never more than such requests can use.
        block_size: tokens a block.
        max_num_batched_tokens: the most tokens in one step.

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
        expected_lengths: Sequence[int] | None,
        block_size: int,
        max_num_batched_tokens: int,
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
        self.layout = plan_layout(shapes)
        if num_blocks is None:
            useful = None
            if expected_lengths is not None:
                groups = self.layout.groups(block_size)
                useful = sum(
                    needed_blocks(groups, length, max_num_batched_tokens)
                    for length in expected_lengths
                )
            num_blocks = default_num_blocks(self.layout, block_size, backend.device, useful)
        self.num_blocks = num_blocks
        self.caches = KVCaches.allocate(self.layout, num_blocks, block_size, backend.device)

    @property
    def device(self) -> torch.device:
        """Where the step's tensors have to be. O(1)."""
        return self._backend.device

    def logits(self, step: StepTensors) -> Tensor:
        """Compute a step: write its keys and values, return [num_sampled, vocab_size]."""
        paged = PagedPass(self._backend, self.caches, self.layout, step.paged)
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
