"""Runs steps on the device: moves blocks, computes logits, draws tokens.

Decides: which tensors a step is built in, and whether its pass is replayed from a CUDA graph.

Invariants: all work of a step runs on one stream, in order: stores, loads, the forward pass, the
draws; a step may be sent before the tokens of the previous one are read, because they are read on
the device. A buffer is never written while a copy from it may be running: two steps in flight have
different buffers.

Does not know: how requests are scheduled, what a token is used for.
"""

import dataclasses
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvcore import CopyOrder
from model.attention.batch import BatchBuilder, StepTensors, chosen_ids
from model.caches.swap import BlockMover
from model.control.request import Request
from model.control.step import FORWARD, PREPARE, SAMPLE, Flight, Step, StepWatch, rows_behind
from model.errors import ModelError
from model.forward.cuda_graphs import CudaGraphs, Passed
from model.forward.image_encoder import ImageEncoder
from model.forward.network import PagedNetwork
from model.forward.sanitized import SanitizedBackend
from model.forward.warm_up import Prepared
from model.sample.prompt_scores import score_prompts
from model.sample.request_sampler import RequestSampler

_num_scored = operator.attrgetter("num_scored")


def _places(
    sampling: Sequence[Request], drafted: Sequence[tuple[Request, tuple[int, ...]]]
) -> list[int]:
    """Return for each row the number of drafts of its request before it."""
    behind = [place for _, drafts in drafted for place in range(1, len(drafts) + 1)]
    return [0] * len(sampling) + behind


class StepRunner:
    """Sends steps to the device of one network.

    Args:
        network: computes the logits.
        mover: moves blocks.
        sampler: draws the tokens.
        max_sampled: the most rows of a step whose successor is sent before its tokens are read.
        is_async: True if steps are sent before the tokens of the previous one are read.
        sanitizer: the backend, if it checks each step.
        drawn: a shared buffer for drawn tokens; None: a new buffer.
        images: the network's vision tower; None: it takes no images.

    Attributes:
        is_async: as above.
    """

    def __init__(
        self,
        network: PagedNetwork,
        mover: BlockMover,
        sampler: RequestSampler,
        *,
        max_sampled: int,
        is_async: bool,
        sanitizer: SanitizedBackend | None = None,
        drawn: Tensor | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self._network = network
        self._sanitizer = sanitizer
        self._mover = mover
        self._sampler = sampler
        self._images = images
        chunks, worth = network.layout.chunks, network.shared_worth()
        has_states = bool(network.layout.states)
        self._builders = [
            BatchBuilder(network.device, len(chunks), chunks, worth, has_states=has_states)
            for _ in range(1 + is_async)
        ]
        self.is_async = is_async
        if drawn is None:
            drawn = torch.zeros(max_sampled, dtype=torch.int64, device=network.device)
        self._drawn = drawn
        self._graphs: CudaGraphs | None = None

    @property
    def drawn(self) -> Tensor:
        """The tokens of the last step on the device: int64 [max_sampled]. O(1)."""
        return self._drawn

    def use(self, prepared: Prepared) -> None:
        """Run as prepared from now on. O(1)."""
        self._graphs = prepared.graphs
        draws = None if prepared.graphs is None else prepared.graphs.draws
        self._sampler.use(draws)

    def can_defer_read(self, sampling: Sequence[Request]) -> bool:
        """Return True if the next step may be sent before these requests get their tokens. O(1)."""
        return self.is_async and len(sampling) <= len(self._drawn)

    def copy(self, orders: Sequence[CopyOrder]) -> None:
        """Copy blocks, before whatever a later step does. O(their bytes)."""
        if self._sanitizer is not None:
            self._sanitizer.begin_copies(orders, self._network.caches)
        self._mover.copy(orders)

    def discard(self, request: Request) -> None:
        """Keep nothing of a request that has ended. O(1)."""
        self._sampler.discard(request)

    def encode_images(self, step: Step) -> Mapping[Request, ModelError]:
        """Run the vision tower for the images of a step, before `send`. A pass for each new image.

        Returns:
            The requests that it failed for, and why.
        """
        return {} if self._images is None else self._images.encode(step.chunks)

    def send(
        self,
        step: Step,
        sampling: tuple[Request, ...],
        before: Flight | None,
        watch: StepWatch,
    ) -> Flight:
        """Run a step; on a GPU this returns before it is done. One forward pass.

        Args:
            step: planned by the scheduler.
            sampling: the requests that get a token, in the order of the step's logits.
            before: the previous step, if its tokens have not been read.
            watch: notified when tensors are built and when the pass is sent.
        """
        if self._sanitizer is not None:
            self._sanitizer.begin_transfers(step, self._network.caches)
        if step.stores or step.loads:
            self._mover.transfer(step.stores, step.loads)
        if not step.chunks:
            return Flight((), self._sampler.draw(torch.empty(0), ()))
        self._builders.append(self._builders.pop(0))
        tensors = self._builders[0].build(step, {} if before is None else before.rows())
        if self._sanitizer is not None:
            network = self._network
            self._sanitizer.begin_step(step, tensors, network.caches, network.layout)
        if self._images is not None:
            tensors = self._images.prepared(step.chunks, tensors)
        if self._network.adapters is not None:
            slots = self._network.adapters.slots(step.chunks)
            tensors = dataclasses.replace(tensors, adapter_slots=slots)
        watch.done(PREPARE)
        with watch.on_device(FORWARD):
            num_scored = sum(map(_num_scored, step.chunks))
            passed = self._pass(tensors, may_replay=not num_scored and tensors.images is None)
        watch.done(FORWARD)
        newest = dict if before is None else before.read
        drafted = tuple([(chunk.request, chunk.drafts) for chunk in step.chunks if chunk.drafts])
        rows = (*sampling, *rows_behind(drafted)) if drafted else sampling
        with watch.on_device(SAMPLE):
            logits, scored = passed.logits, None
            if num_scored:  # their rows are the last
                scored = score_prompts(step.chunks, logits[-num_scored:])
                logits = logits[:-num_scored]
            drawn = self._sampler.draw(
                logits,
                rows,
                passed.most_likely,
                newest,
                passed.place,
                _places(sampling, drafted) if drafted else (),
            )
            if self.can_defer_read(sampling):
                self._drawn[: len(sampling)].copy_(drawn.tokens)
        return Flight(sampling, drawn, drafted, scored)

    def _pass(self, tensors: StepTensors, *, may_replay: bool) -> Passed:
        graphs = self._graphs if may_replay else None
        bucket = None if graphs is None else graphs.bucket_of(tensors)
        if graphs is not None and bucket is not None:
            return graphs.replay(tensors, bucket)
        tensors = tensors.to(self._network.device)
        if tensors.sources is not None:
            ids = chosen_ids(tensors.input_ids, tensors.sources, self._drawn)
            tensors = dataclasses.replace(tensors, input_ids=ids, sources=None)
        return Passed(self._network.logits(tensors))
