"""`python -m tests.model.serve.hostile.floods`: a polite client beside floods of another.

Starts a server with the tiny model and two API keys. For each flood, several requests of one client
are sent at once, and then the other client asks for one token, again and again until the flood is
over. The table has the processor time of the server from sending such a request to its answer: the
median and the most of all of them. Processor time, so that other work on the machine counts little.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from model.tiny import CHECKPOINT_DIR
from tests.bench.server import free_port, until_ready
from tests.model.serve.hostile.attacks import CHAT, KEY, POLITE_KEY, TEXT, raw

WORDS = ("the", "function", "open", "returns", "a", "file", "object", "with", "text", "lines")
IMAGE = "data:image/png;base64," + "A" * 4_000_000


def words(count, number=0):
    """A text of words, another one for each number."""
    return " ".join(random.Random(number).choices(WORDS, k=count))


def picture(url=IMAGE):
    return {"type": "image_url", "image_url": {"url": url}}


def schema(number, size=60):
    fields = {
        f"field_{number}_{each}": {"enum": [f"{number} {each} {value}" for value in range(10)]}
        for each in range(size)
    }
    return {"type": "object", "properties": fields, "required": [*fields],
            "additionalProperties": False}  # fmt: skip


def _chat(content, **more):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}


def _prompt(count):
    return lambda number: (TEXT, {"prompt": words(count, number), "max_tokens": 1})


def _stream(number):
    return TEXT, {"prompt": words(20, number), "max_tokens": 400, "stream": True,
                  "ignore_eos": True}  # fmt: skip


FLOODS = {
    "nothing": (0, None, None),
    "prompts of 1,000 words": (32, _prompt(1000), None),
    "prompts of 300 words": (64, _prompt(300), None),
    "8 prompts in each of 16 requests": (
        16, lambda n: (TEXT, {"prompt": [words(500, 8 * n + k) for k in range(8)],
                              "max_tokens": 1}), None),
    "prompts with log-probabilities": (
        16, lambda n: (TEXT, {"prompt": words(1000, n), "max_tokens": 1, "echo": True,
                              "logprobs": 5}), None),
    "answers with log-probabilities": (
        16, lambda n: (TEXT, {"prompt": words(20, n), "max_tokens": 300, "logprobs": 20,
                              "ignore_eos": True}), None),
    "images of 3 MB": (32, lambda _: (CHAT, _chat([picture()])), None),
    "images of 3 MB as messages": (
        32, lambda _: ("/v1/messages", _chat([{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "A" * 4_000_000}}])), None),
    "images of 3 MB as responses": (
        32, lambda _: ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": IMAGE}]}]}), None),
    "/detokenize of 900,000 ids": (
        4, lambda n: ("/detokenize", {"tokens": [n + 5] * 900_000}), None),
    "/detokenize, client gone": (
        4, lambda n: ("/detokenize", {"tokens": [n + 5] * 900_000}), 0.3),
    "/tokenize of 1 MB": (8, lambda n: ("/tokenize", {"prompt": words(200_000, n)}), None),
    "/tokenize of 1 MB, client gone": (
        8, lambda n: ("/tokenize", {"prompt": words(200_000, n)}), 0.2),
    "/tokenize that fits": (16, lambda n: ("/tokenize", {"prompt": words(3_000, n)}), None),
    "chats of 16,000 messages": (
        8, lambda _: (CHAT, {"messages": [{"role": "user", "content": "x"}] * 16_000}), None),
    "count_tokens of 16,000 messages": (
        8, lambda _: ("/v1/messages/count_tokens",
                      {"messages": [{"role": "user", "content": "x"}] * 16_000}), None),
    "schemas": (
        16, lambda n: (CHAT, _chat("x", response_format={"type": "json_schema", "json_schema": {
            "name": "x", "schema": schema(n)}})), None),
    "schemas, client gone": (
        16, lambda n: (CHAT, _chat("x", response_format={"type": "json_schema", "json_schema": {
            "name": "x", "schema": schema(100 + n)}})), 0.2),
    "logit_bias": (
        32, lambda n: (TEXT, {"prompt": "x", "max_tokens": 20, "ignore_eos": True,
                              "logit_bias": {str(k): 1 for k in range(300)}}), None),
    "stop strings": (
        32, lambda n: (TEXT, {"prompt": "x", "max_tokens": 200, "ignore_eos": True,
                              "stop": [chr(65 + k) * 60 for k in range(16)]}), None),
    "bad words": (
        16, lambda n: (TEXT, {"prompt": "x", "max_tokens": 20, "ignore_eos": True,
                              "bad_words": [f"{n} {k}" for k in range(500)]}), None),
    "cancelled streams": (64, _stream, 0.05),
    "streams": (64, _stream, None),
    "bodies that are no JSON": (16, lambda _: (TEXT, b"[" * 4_000_000), None),
    "bodies of a wrong type": (
        16, lambda _: (TEXT, {"prompt": {"x": "y" * 4_000_000}}), None),
    "prompts that are too long": (16, lambda n: (TEXT, {"prompt": [5] * 1_000_000}), None),
    "texts that are too long": (16, lambda n: (TEXT, {"prompt": "x" * 4_000_000}), None),
    "n of 64": (4, lambda n: (TEXT, {"prompt": words(300, n), "max_tokens": 30, "n": 64}), None),
}  # fmt: skip
"""Name: how many requests, what each is, and the seconds until its client leaves."""


def cpu_s(pid):
    """The processor time of a process, of threads that have ended too."""
    return time.clock_gettime((~pid << 3) | 2)


async def sent(port, request, *, leaves_s=None):
    """Send a request; its answer, as far as it was read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(request)
        async with asyncio.timeout(leaves_s):
            await writer.drain()
            return await reader.read()
    except (TimeoutError, OSError):
        return b""
    finally:
        writer.transport.abort()


async def flooded(port, pid, name, rounds):
    """What the polite client's requests took, in seconds of the server's processors."""
    count, make, leaves_s = FLOODS[name]
    hostile = [_raw(*make(number), KEY) for number in range(count)]
    took, statuses = [], {}
    for _ in range(rounds):
        flood = [asyncio.ensure_future(sent(port, one, leaves_s=leaves_s)) for one in hostile]
        asked = 0
        await asyncio.sleep(0.02)
        while asked < 2 or (asked < 40 and not all(one.done() for one in flood)):
            body = {"prompt": f"The open() {random.random()}", "max_tokens": 1}
            before = cpu_s(pid)
            answer = await sent(port, _raw(TEXT, body, POLITE_KEY))
            took.append(cpu_s(pid) - before)
            assert b" 200 " in answer[:20], answer[:400]
            asked += 1
        for answer in await asyncio.gather(*flood):
            status = answer[9:12].decode() or "left"
            statuses[status] = statuses.get(status, 0) + 1
    return took, statuses


def _raw(path, fields, key):
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return raw("POST", path, body, key=key)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="floods whose names have this in them")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="further flags of the server, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        log, port = Path(work) / "log", free_port()
        command = [sys.executable, "-m", "model.serve", "--model", str(CHECKPOINT_DIR)]
        command += ["--port", str(port), "--api-key", KEY, "--api-key", POLITE_KEY, *options.flags]
        with log.open("wb") as errors, subprocess.Popen(command, stderr=errors) as server:
            try:
                until_ready(f"http://127.0.0.1:{port}", server, log)
                for name in ["nothing", *filter(lambda one: options.only in one, FLOODS)]:
                    took, statuses = asyncio.run(flooded(port, server.pid, name, options.rounds))
                    middle, most = (1000 * each for each in (statistics.median(took), max(took)))
                    told = f"{name:34} {middle:6.0f} {most:6.0f} ms of {len(took):3}, {statuses}"
                    sys.stdout.write(f"{told}\n")
                    sys.stdout.flush()
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
