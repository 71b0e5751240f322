"""A client that costs little: streams completions from a server, so many at once, and times them.

Decides: what is sent, as `vllm bench serve` sends it: random tokens, `ignore_eos`, streams with
usage, the next request when one before it has ended. It runs as a process of its own, which reads
a job from stdin as JSON and writes what it measured to stdout.

Invariants: what is counted are the tokens of the usage that the server tells, and the events.

Does not know: the server.
"""

import asyncio
import json
import random
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass

_USAGE = b'"completion_tokens":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to send.

    Attributes:
        host, port: where to.
        num_requests: how many.
        concurrency: the most at once.
        input_len, output_len: tokens of each.
        vocab_size: prompts are drawn from so many tokens.
        seed: of the prompts.
        streams: whether answers are streamed.
    """

    host: str
    port: int
    num_requests: int = 256
    concurrency: int = 64
    input_len: int = 32
    output_len: int = 64
    vocab_size: int = 2048
    seed: int = 0
    streams: bool = True

    def prompts(self) -> list[list[int]]:
        """The prompts, the same for the same job. O(tokens)."""
        draw = random.Random(self.seed)  # noqa: S311  # a benchmark repeats
        return [
            [draw.randrange(1, self.vocab_size) for _ in range(self.input_len)]
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What came back.

    Attributes:
        duration_s: from the first request to the last byte.
        num_failed: answers that were not whole.
        num_tokens: tokens of all answers, as the server counts them.
        first_s: of each request, until the first bytes of its body.
    """

    duration_s: float
    num_failed: int
    num_tokens: int
    first_s: list[float]


class _Client(asyncio.Protocol):
    """One connection that sends one request after the other."""

    def __init__(self, todo: "deque[bytes]", loaded: "_Tally") -> None:
        self._todo = todo
        self._tally = loaded
        self._transport: asyncio.Transport | None = None
        self._sent_s = 0.0
        self._seen = b""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request. O(1)."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._next()

    def data_received(self, data: bytes) -> None:
        """Take what has come. O(data)."""
        if not self._seen:
            self._tally.first_s.append(time.perf_counter() - self._sent_s)
        # Only the end is looked at: it has the usage.
        self._seen = (self._seen + data)[-1024:]
        if self._seen.endswith(b"0\r\n\r\n") or (b"content-length" in self._seen.lower()):
            self._tally.take(self._seen)
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over. O(1)."""
        del exc
        if not self.gone.done():
            self.gone.set_result(None)

    def _next(self) -> None:
        if self._transport is None:
            return
        if not self._todo:
            self._transport.close()
            return
        self._seen = b""
        self._sent_s = time.perf_counter()
        self._transport.write(self._todo.popleft())


class _Tally:
    """What all connections have come to."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_whole = 0
        self.first_s: list[float] = []

    def take(self, tail: bytes) -> None:
        """Count one answer by its last bytes. O(1)."""
        _, found, rest = tail.rpartition(_USAGE)
        if found:
            self.num_tokens += int(rest.partition(b",")[0])
            self.num_whole += 1


def _requests(job: Job) -> "deque[bytes]":
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {job.host}\r\nContent-Type: application/json\r\n"
    )
    ready: deque[bytes] = deque()
    for prompt in job.prompts():
        asked: dict[str, object] = {
            "prompt": prompt,
            "max_tokens": job.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "repetition_penalty": 1.0,
        }
        if job.streams:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(asked).encode()
        ready.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return ready


async def run_load(job: Job) -> Loaded:
    """Send a job's requests and wait for all answers."""
    loop = asyncio.get_running_loop()
    todo, tally = _requests(job), _Tally()
    count = len(todo)
    began_s = time.perf_counter()
    made = [
        await loop.create_connection(lambda: _Client(todo, tally), job.host, job.port)
        for _ in range(min(job.concurrency, count))
    ]
    for _, client in made:
        await client.gone
    return Loaded(
        duration_s=time.perf_counter() - began_s,
        num_failed=count - tally.num_whole,
        num_tokens=tally.num_tokens,
        first_s=tally.first_s,
    )


if __name__ == "__main__":
    json.dump(asdict(asyncio.run(run_load(Job(**json.load(sys.stdin))))), sys.stdout)
