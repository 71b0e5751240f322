"""A cheap load generator: streams completions from a server, with fixed concurrency or rate.

Decides: what is sent, as `vllm bench serve` sends it: random tokens, `ignore_eos`, streams with
usage, when each is due, or when one before it has ended. It runs as a process of its own, which
reads a job from stdin as JSON and writes what it measured to stdout.

A client is no part of what a server costs, but it runs on the same processors here: each piece that
wakes it costs the sender as much again, and it may take its turn from a thread that holds the
server's interpreter. So where requests are sent as fast as they are answered it takes no turn from
another when it wakes, and looks a moment after something has come; where they come in time, and
what counts is the first token, neither.

Invariants: what is counted are the tokens of the usage that the server tells, and the events.

Does not know: the server.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import selectors
import sys
import time
from dataclasses import asdict, dataclass, field

_PAUSE_S = 0.001
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_ANSWER = b'"choices":'
_USAGE = b'"completion_tokens":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to send.

    Attributes:
        host, port: where to.
        num_requests: how many.
        concurrency: the most at once.
        input_len, output_len: tokens of each.
        vocab_size: the number of token ids that prompts are drawn from.
        seed: of the prompts.
        streams: whether answers are streamed.
        due_s: when each is sent, from the begin; none: as soon as there is room.
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
    due_s: list[float] = field(default_factory=list)

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
        processor_s: of the processor, for all this.
        num_failed: answers that were not whole.
        num_tokens: tokens of all answers, as the server counts them.
        first_s: of each request, from when it was due until the first of its answer.
    """

    duration_s: float
    processor_s: float
    num_failed: int
    num_tokens: int
    first_s: list[float]


class _Unhurried(selectors.DefaultSelector):
    """Waits a little for more, once something has come."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What has come. O(sockets)."""
        ready = super().select(timeout)
        if not ready:
            return ready
        time.sleep(_PAUSE_S)
        return super().select(0)


class _Client(asyncio.Protocol):
    """One connection, which sends one request after the other."""

    def __init__(self, idle: "asyncio.Queue[_Client]", tally: "_Tally") -> None:
        self._idle = idle
        self._tally = tally
        self._transport: asyncio.Transport | None = None
        self._due_s = 0.0
        self._seen = b""
        self._has_begun = self._is_chunked = False
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there. O(1)."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def send(self, body: bytes, due_s: float, ended: "asyncio.Future[None]") -> None:
        """Send a request, whose time runs since it was due. O(body)."""
        self._seen, self._due_s, self._ended = b"", due_s, ended
        self._has_begun = self._is_chunked = False
        if self._transport is None or self._transport.is_closing():
            self._end()
        else:
            self._transport.write(body)

    def data_received(self, data: bytes) -> None:
        """Take what has come. O(data)."""
        self._seen += data
        if not self._has_begun and _ANSWER in self._seen:  # the head comes before there is a token
            self._has_begun = True
            self._tally.first_s.append(time.perf_counter() - self._due_s)
        if self._is_whole():
            self._tally.take(self._seen)
            self._end()
            self._idle.put_nowait(self)
        elif self._is_chunked:
            self._seen = self._seen[-1024:]  # only the end is looked at: it has the usage

    def _is_whole(self) -> bool:
        if self._is_chunked:
            return self._seen.endswith(b"0\r\n\r\n")
        head, end, body = self._seen.partition(b"\r\n\r\n")
        said = _LENGTH.search(head)
        if said is not None:
            return len(body) >= int(said[1])
        self._is_chunked = bool(end)
        return self._is_chunked and self._is_whole()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over. O(1)."""
        del exc
        self._end()

    def close(self) -> None:
        """Send nothing more. O(1)."""
        if self._transport is not None:
            self._transport.close()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


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


def _requests(job: Job) -> list[bytes]:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {job.host}\r\nContent-Type: application/json\r\n"
    )
    ready: list[bytes] = []
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
    """Send a job's requests when they are due, and wait for all answers."""
    loop = asyncio.get_running_loop()
    tally, bodies = _Tally(), _requests(job)
    idle: asyncio.Queue[_Client] = asyncio.Queue()
    clients: list[_Client] = []

    async def send(body: bytes, due_s: float) -> None:
        if idle.empty():
            _, client = await loop.create_connection(
                lambda: _Client(idle, tally), job.host, job.port
            )
            clients.append(client)
        else:
            client = idle.get_nowait()
        ended = loop.create_future()
        client.send(body, due_s, ended)
        await ended

    began_s, worked_s = time.perf_counter(), time.process_time()
    sending: set[asyncio.Task[None]] = set()
    for body, after_s in zip(bodies, job.due_s or [0.0] * len(bodies), strict=True):
        await asyncio.sleep(max(0.0, began_s + after_s - time.perf_counter()))
        if len(sending) >= job.concurrency:
            _, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
        due_s = began_s + after_s if job.due_s else time.perf_counter()
        sending.add(asyncio.create_task(send(body, due_s)))
    await asyncio.gather(*sending)
    for client in clients:
        client.close()
    return Loaded(
        duration_s=time.perf_counter() - began_s,
        processor_s=time.process_time() - worked_s,
        num_failed=len(bodies) - tally.num_whole,
        num_tokens=tally.num_tokens,
        first_s=tally.first_s,
    )


def _main() -> None:
    job = Job(**json.load(sys.stdin))
    if not job.due_s and sys.platform == "linux":
        with contextlib.suppress(OSError):  # where a process may not say how it is scheduled
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    kind = selectors.DefaultSelector if job.due_s else _Unhurried
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(kind())) as runner:
        json.dump(asdict(runner.run(run_load(job))), sys.stdout)


if __name__ == "__main__":
    _main()
