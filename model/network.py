"""The network on its paged caches: tensors of a step in, logits out.

Decides: that a network is switched to our attention, and what its layers store.

Invariants: the caches fit the layers exactly, because a probe measured them; a pass writes the
slots of its step and no others.

Does not know: requests, sampling, how many blocks there are and why, why a step looks as it does.
"""

import torch
from torch import Tensor

import backends
from model.attention import IMPLEMENTATION, PagedPass, probe_layers
from model.batch import StepTensors
from model.caches import KVCaches
from model.capture import Captured, capture
from model.errors import UnsupportedModelError
from model.layout import plan_layout
from model.loader import LoadedModel


class PagedNetwork:
    """A loaded model, its caches and the backend that works on them.

    Args:
        model: its attention is switched to the paged one, for as long as it lives.
        backend: where its caches are, and what runs on them.

    Raises:
        UnsupportedModelError: the network cannot run with a paged cache, or not on this backend.
    """

    def __init__(self, model: LoadedModel, backend: backends.Backend) -> None:
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
        self.caches = KVCaches((), ())
        self._captured: Captured | None = None

    @property
    def device(self) -> torch.device:
        """Where the step's tensors have to be. O(1)."""
        return self._backend.device

    @property
    def num_blocks(self) -> int:
        """Blocks of the caches, the null block included; 0 before there are any. O(1)."""
        return self.caches.storages[0].shape[0] if self.caches.storages else 0

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Have caches of so many blocks; those from before are freed first. O(their bytes).

        Raises:
            InvalidArgumentError: the device has not that much memory.
        """
        self.free()
        self.caches = KVCaches.allocate(self.layout, num_blocks, block_size, self.device)

    def free(self) -> None:
        """Have no caches. O(1)."""
        self.caches = KVCaches((), ())

    def capture(self) -> None:
        """Run the network's operations without its modules from now on: the same bits, sooner.

        Costs two traces and a few forward passes.

        Raises:
            UnsupportedModelError: it cannot be captured, and why; it runs as before.
        """
        self._captured = capture(self._network, self.device)

    def logits(self, step: StepTensors) -> Tensor:
        """Compute a step: write its keys and values, return [num_sampled, vocab_size]."""
        paged = PagedPass(self._backend, self.caches, self.layout, step.paged)
        with torch.inference_mode():
            if self._captured is not None:
                return self._captured.logits(
                    step.input_ids, step.position_ids, step.logit_rows, paged
                )
            output = self._network(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                use_cache=False,
                logits_to_keep=step.logit_rows,
                paged=paged,
            )
        logits: Tensor = output.logits[0]
        return logits
