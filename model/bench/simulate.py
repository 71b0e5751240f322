"""The engine without a network: the real schedule and the real cache, tokens out of the air.

Decides: what takes the place of the network: a token that depends on the request and its length
alone, drawn in no time. Blocks, hits, preemptions and the order of requests are the real ones.

Invariants: the same requests give the same steps; after every plan a sample of the pool is kept.

Does not know: torch, time, text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import kvcore
from model.control.config import SchedulerConfig
from model.control.params import SamplingParams
from model.control.request import Request
from model.control.scheduler import Scheduler

_VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The pool while a step runs.

    Attributes:
        num_running: requests that hold blocks.
        num_used_slots: slots of the blocks in use.
        num_idle_slots: those of them that hold no token, this step's tokens counted as there.
    """

    num_running: int
    num_used_slots: int
    num_idle_slots: int


@dataclass(frozen=True, slots=True)
class SimulatedOutput:
    """One token of one request; it says nothing."""

    request: Request
    token_ids: tuple[int, ...] = (0,)

    def take_text(self) -> str:
        """No text. O(1)."""
        return ""


class Simulation:
    """Takes requests and runs steps as an engine does, with one group of full attention.

    Args:
        kv: the cache.
        limits: of a step.
    """

    def __init__(self, kv: kvcore.KVCacheManager, limits: SchedulerConfig) -> None:
        self.samples: list[PoolSample] = []
        self.scheduler = Scheduler(kv, limits)
        self._kv = kv
        self._next_id = 0

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt. O(prompt).

        Raises:
            RequestTooLongError: it could never finish here.
        """
        request = Request(self._next_id, prompt, params)
        self.scheduler.add(request)
        self._next_id += 1
        return request

    def abort(self, request: Request) -> bool:
        """End a request now; whether it was unfinished. O(num_unfinished)."""
        return self.scheduler.abort(request)

    def step(self) -> list[SimulatedOutput]:
        """Run one step. O(num_running)."""
        step = self.scheduler.schedule()
        sampling = [chunk.request for chunk in step.chunks if chunk.samples]
        planned = {chunk.request.request_id: chunk.num_tokens for chunk in step.chunks}
        self._take_sample(planned)
        sampled = {request.request_id: _next_token(request) for request in sampling}
        self.scheduler.update(step, sampled)
        return [SimulatedOutput(request) for request in sampling]

    def _take_sample(self, planned: dict[int, int]) -> None:
        running = self.scheduler.running
        idle = 0
        for request in running:
            sequence = request.running_sequence
            room = len(sequence.tables[0].block_ids) * self._kv.block_size
            written = request.num_computed_tokens + planned.get(request.request_id, 0)
            idle += room - written
        used = self._kv.num_usable_blocks - self._kv.num_free_blocks
        self.samples.append(PoolSample(len(running), used * self._kv.block_size, idle))


def _next_token(request: Request) -> int:
    return (request.request_id * 7919 + request.num_tokens) % _VOCAB_SIZE
