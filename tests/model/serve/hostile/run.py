"""Runs hostile requests against a server, and judges what came of them.

Decides: what is wrong. A status of 500 or more, an answer of no known form, a connection that the
server leaves open without a word, a stream that ends with an error of the server, a traceback in
its log; a request of the polite client that fails, or is delayed by more than 50 ms beyond load;
memory beyond a bound; a block, seat, stream, task, thread or socket that is left at the end.

What others do to the machine is no delay of the server: from the time of each request the seconds
are taken off that its event loop, its engine or the polite client were ready and had no core, but
no more than leaves what the first two have worked meanwhile.
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.bench.server import free_port, until_ready
from tests.model import vision
from tests.model.serve.hostile.attacks import KEY, POLITE, POLITE_KEY, attacks, raw

MOST_GROWN_BYTES = 1 << 30
READ_S, HOLD_S = 60, 1.0
PATIENCE_S = 3  # with an answer that is as large as can be
HOSTILE_SHARE = 4  # a hostile slice is so many times as long as a polite one
FLAGS = (
    "--num-blocks", "2000", "--max-num-seqs", "16", "--max-num-batched-tokens", "256",
    "--max-waiting", "300", "--max-loras", "2", "--grammar-token-s", "0.02",
    "--grammar-request-s", "0.1", "--allow-image-urls", "--image-url-timeout-s", "1",
    "--max-images", "4", "--max-image-pixels", "1000000", "--request-timeout-s", "5",
    "--api-key", KEY, "--api-key", POLITE_KEY, "--served-model-name", "tiny",
)  # fmt: skip
TEMPLATE = (
    "{% for tool in tools or () %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content or () %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}assistant:"
)
SERVER_ERRORS = re.compile(rb'"code": ?"(?:internal_error|engine_fault|numerical_error)"')
PLAIN = {b"Invalid HTTP request received.", b"Unsupported upgrade request.",
         b"Internal Server Error"}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        requests: how many hostile ones.
        seed: that they are drawn from.
        clients: at once.
        slice_s: seconds of polite load between hostile load.
        kind: of attacks; None: all.
        plants: bugs of `server.py`, joined by commas; "": none.
        slack_s: the most that a polite request may be delayed beyond load.
        log: the file for what the server says; None: one that is deleted.
    """

    requests: int
    seed: int = 0
    clients: int = 24
    slice_s: float = 5.0
    kind: str | None = None
    plants: str = ""
    slack_s: float = 0.05
    log: Path | None = None


@dataclass
class Result:
    """What came of a run; `wrong` is empty where all is well."""

    wrong: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __str__(self):
        told = Counter(self.wrong)
        wrong = [
            f"WRONG {text}" + f" ({count} times)" * (count > 1) for text, count in told.items()
        ]
        return "\n".join([*self.lines, *(wrong or ["nothing is wrong"])])


def drawn(strategy, count, number):
    """That many values of a strategy, the same for the same seed."""
    found = []

    @seed(number)
    @settings(max_examples=count, database=None, phases=[Phase.generate], deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def draw(value):
        found.append(value)

    while len(found) < count:
        draw()
    return found[:count]


def make_model(folder):
    """A network of random weights that sees images, and has room for 2,048 tokens."""
    vision.save("Qwen2_5_VLConfig", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, change in (
        ("config.json", lambda told: told["text_config"].update(max_position_embeddings=2048)),
        ("generation_config.json", lambda told: told.update(eos_token_id=0)),
    ):
        told = json.loads((folder / name).read_text())
        change(told)
        (folder / name).write_text(json.dumps(told))


def make_adapters(folder):
    """Folders that no adapter should be read from, at least not for long."""
    for name in ("fifo", "endless", "loop", "deep", "config"):
        (folder / name).mkdir(parents=True)
    os.mkfifo(folder / "fifo" / "adapter_config.json")
    (folder / "endless" / "adapter_config.json").symlink_to("/dev/zero")
    (folder / "loop" / "adapter_config.json").symlink_to("adapter_config.json")
    (folder / "deep" / "adapter_config.json").write_text("[" * 1_000_000)
    told = {"peft_type": "LORA", "r": 10**9, "lora_alpha": 1e308, "target_modules": ".*(a+)+$"}
    (folder / "config" / "adapter_config.json").write_text(json.dumps(told))
    os.mkfifo(folder / "config" / "adapter_model.safetensors")


class Clients:
    """Hostile clients, each on a connection of its own."""

    def __init__(self, port, result):
        self.port, self.result = port, result
        self.statuses, self.kinds = Counter(), Counter()

    def _wrong(self, attack, what):
        self.result.wrong.append(f"{attack.kind}: {what}: {attack.make!r:.300}")

    async def send(self, attack):
        """Send one, and look at what comes back."""
        self.kinds[attack.kind] += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        answer = b""
        try:
            waits = self._write(writer, attack)
            if attack.then == "reset":
                await waits
            elif attack.then == "hold":
                writer.transport.pause_reading()
                await waits
                await asyncio.sleep(HOLD_S)
            else:
                writing = asyncio.ensure_future(waits)
                most = 100 if attack.then == "leave" else 1 << 30
                is_volume = attack.kind == "volume"
                async with asyncio.timeout(PATIENCE_S if is_volume else READ_S):
                    while len(answer) < most and (piece := await reader.read(1 << 20)):
                        answer += piece
                        if len(answer) > 1 << 25:
                            answer = answer[: 1 << 16]
                writing.cancel()
        except TimeoutError:
            if not is_volume and b"text/event-stream" not in answer:
                self._wrong(attack, f"no end after {READ_S} s, of {answer[:60]!r}")
        except OSError:
            self.statuses["connection ended"] += 1
        finally:
            writer.transport.abort()
        self._look(attack, answer)

    async def _write(self, writer, attack):
        with contextlib.suppress(OSError):
            for part in attack.make():
                if isinstance(part, float):
                    await asyncio.sleep(part)
                else:
                    writer.write(part)
                    await writer.drain()
            if writer.can_write_eof() and attack.kind == "wire":
                await asyncio.sleep(0.2)
                writer.write_eof()

    def _look(self, attack, answer):
        found = re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)
        self.statuses.update(int(status) for status in found)
        if any(status >= b"500" for status in found) or SERVER_ERRORS.search(answer):
            self._wrong(attack, answer[:400].replace(b"\r\n", b" ").decode(errors="replace"))
        if len(found) == 1 and b"400" <= found[0] < b"500" and attack.then == "read":
            head, _, body = answer.partition(b"\r\n\r\n")
            if b"application/json" in head and b"HEAD" not in repr(attack.make).encode():
                try:
                    assert json.loads(body)["error"]["message"]
                except (ValueError, KeyError, AssertionError):
                    self._wrong(attack, f"an error of no known form: {body[:200]!r}")


async def attack_with(plan, clients, hostile, polite):
    """Send all hostile requests, in slices of time, and polite ones between; when each slice began.

    A slice begins when all requests of the one before are over.
    """
    hostile, polite, slices = iter(hostile), itertools.cycle(polite), []

    async def client(requests, end_s):
        while time.monotonic() < end_s and (attack := next(requests, None)) is not None:
            await clients.send(attack)

    sent = -1
    while sent < clients.kinds.total() or slices[-1][1] is False:
        requests, began_s = (polite, hostile)[len(slices) % 2], time.monotonic()
        slices.append((began_s, requests is hostile))
        sent = clients.kinds.total()
        end_s = began_s + plan.slice_s * (HOSTILE_SHARE if requests is hostile else 1)
        await asyncio.gather(*[client(requests, end_s) for _ in range(plan.clients)])
    return slices


def rss_bytes(pid):
    """The memory that a process holds."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10


def counts_of(port):
    """What the server has left."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(raw("GET", "/left"))
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def left_at(port, pid):
    """All that can be left: counts, threads and open files."""
    process = Path(f"/proc/{pid}")
    return counts_of(port) | {"files": len([*(process / "fd").iterdir()])}


def settled(port, pid, before):
    """What is left once nothing changes any more, or after a while."""
    for _ in range(200):
        left = left_at(port, pid)
        if all(left[name] <= before[name] for name in before):
            break
        time.sleep(0.1)
    return left


class Canary:
    """A listener at home, to which no server of an attacker's URL should connect."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]

    def close(self):
        """Listen no more."""
        self._listener.close()

    def was_reached(self):
        """Whether someone has connected."""
        with contextlib.suppress(BlockingIOError):
            self._listener.accept()
            return True
        return False


def run(plan):
    """Carry out a plan."""
    result = Result()
    with tempfile.TemporaryDirectory() as work:
        folder, canary, port = Path(work), Canary(), free_port()
        make_model(folder / "model")
        make_adapters(folder / "adapters")
        every = attacks(canary.port, folder / "adapters")
        if plan.kind:
            every = every.filter(lambda attack: attack.kind == plan.kind)
        hostile = drawn(every, plan.requests, plan.seed)
        polite = drawn(POLITE, 200, plan.seed)
        command = [sys.executable, "-m", "tests.model.serve.hostile.server", "--port", str(port),
                   "--model", str(folder / "model"), *FLAGS]  # fmt: skip
        log = plan.log or folder / "log"
        environment = os.environ | {"HOSTILE_PLANTS": plan.plants, "NUMBA_NUM_THREADS": "1"}
        with (
            log.open("wb") as errors,
            subprocess.Popen(command, stderr=errors, env=environment) as server,
        ):
            try:
                until_ready(f"http://127.0.0.1:{port}", server, log)
                _attacked(plan, port, server.pid, hostile, polite, result)
            finally:
                server.terminate()
        _judge_log(log.read_text(errors="replace"), result)
        if server.returncode:
            result.wrong.append(f"the server ended with {server.returncode}")
        if canary.was_reached():
            result.wrong.append("the server has connected to an address at home")
        canary.close()
    return result


def _attacked(plan, port, pid, hostile, polite, result):
    clients = Clients(port, result)
    asyncio.run(_warm_up(clients, polite[:20]))
    before, memory = left_at(port, pid), [rss_bytes(pid)]
    command = [sys.executable, "-m", "tests.model.serve.hostile.polite", str(port), str(pid)]

    async def sampled():
        while True:
            memory.append(rss_bytes(pid))
            await asyncio.sleep(0.1)

    async def attacked():
        sampling = asyncio.ensure_future(sampled())
        try:
            return await attack_with(plan, clients, hostile, polite)
        finally:
            sampling.cancel()

    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as told:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=told) as beside:
            while not os.fstat(told.fileno()).st_size:  # it has to begin before the first slice
                time.sleep(0.05)
            slices = asyncio.run(attacked())
            beside.stdin.close()
        told.seek(0)
        seen = [json.loads(line) for line in told]
    took_s = time.monotonic() - began_s
    left = settled(port, pid, before)
    result.lines.append(
        f"{plan.requests} hostile requests from seed {plan.seed} in {took_s:.0f} s, by "
        f"{plan.clients} clients; {clients.kinds['polite']} polite ones between them"
    )
    told = ", ".join(f"{key} {count}" for key, count in sorted(clients.statuses.items(), key=str))
    result.lines.append(f"statuses: {told}")
    _judge_delays(seen, slices, plan.slack_s, result)
    _judge_memory(memory, result)
    result.lines.append(f"before: {before}\nleft: {left}")
    for name, count in left.items():
        if name == "ready":
            result.wrong.extend(["the server is not ready"] * (not count))
        elif count > before[name]:
            result.wrong.append(f"left at the end: {count} {name}, {before[name]} before")


async def _warm_up(clients, attacks_):
    for attack in attacks_:
        await clients.send(attack)
    clients.kinds.clear()
    clients.statuses.clear()


def own_s(seen):
    """What of a request's time is the server's own."""
    took_s = seen["took_s"]
    return max(took_s - seen["waited_s"], min(took_s, seen["worked_s"]))


def _judge_delays(seen, slices, slack_s, result):
    """Compare what the polite client waited in both kinds of slices."""
    begins = [began_s for began_s, _ in slices]
    for each in seen:
        each["slice"] = slices[max(0, bisect(begins, each["began_s"]) - 1)][1]
    for each in seen:
        if each["error"]:
            result.wrong.append(f"a polite request failed: {each['error']}")
    for kind in ("health", "tokens"):
        worst = {}
        for name, is_hostile in (("polite load", False), ("hostile load", True)):
            of_kind = [each for each in seen
                       if each["kind"] == kind and each["slice"] is is_hostile]  # fmt: skip
            own = sorted(map(own_s, of_kind))
            wall = sorted(each["took_s"] for each in of_kind)
            if not own:
                result.wrong.append(f"{kind}: no request beside {name}")
                return
            worst[is_hostile] = own[-1]
            parts = [_shown(own), _shown(wall)]
            result.lines.append(
                f"{kind}, {len(own)} beside {name}: median / 99 % / most {parts[0]}; with waiting "
                f"for a core {parts[1]}"
            )
        beyond = worst[True] - worst[False]
        result.lines.append(f"{kind}: delayed by at most {beyond * 1e3:.0f} ms beyond load")
        if beyond > slack_s:
            result.wrong.append(
                f"{kind}: a request was delayed by {beyond * 1e3:.0f} ms beyond load"
            )


def _shown(values):
    """The median, the 99th percentile and the largest of sorted times."""
    chosen = values[len(values) // 2], values[int(len(values) * 0.99)], values[-1]
    return " / ".join(f"{value * 1e3:.0f}" for value in chosen) + " ms"


def _judge_memory(memory, result):
    half = max(memory[: len(memory) // 2])
    result.lines.append(
        f"memory: {memory[0] >> 20} MiB at first, at most {half >> 20} MiB in the first half and "
        f"{max(memory) >> 20} MiB in all, {memory[-1] >> 20} MiB at the end"
    )
    if max(memory) > memory[0] + MOST_GROWN_BYTES:
        result.wrong.append(
            f"memory: wanted at most {MOST_GROWN_BYTES >> 20} MiB more than at first, got "
            f"{(max(memory) - memory[0]) >> 20}"
        )


def _judge_log(text, result):
    lags = re.findall(r"^lag: (.*), (.*) s of processors, in (.*)$", text, re.MULTILINE)
    for took, worked, where in sorted(lags, key=lambda lag: -float(lag[1]))[:8]:
        result.lines.append(f"no turn of the {took}, {worked} s of processors: {where}")
    for line in text.splitlines():
        if line.startswith("Traceback") or "this is a bug" in line or "never retrieved" in line:
            result.wrong.append(f"the server's log: {line}")
    if result.wrong:
        result.lines.append("the end of the server's log:\n" + text[-6000:])
