"""Load for a server with OpenAI's completions, and what its clients wait for.

Decides: that each request is a stream over one connection, on a thread, and that a time is taken
when a line of an event is read. The threads share one core: above some thousand tokens a second use
a load generator of several processes, such as guidellm.

Does not know: which server it is, flags.
"""

import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from model.cli.bars import bar
from model.cli.measured import COMMON_TOKENS, Report
from model.cli.options import LoadOptions
from model.errors import UsageError, shown

_TIMEOUT_S = 600


@dataclass(slots=True)
class _Answer:
    """The answer to a request: the times of its pieces, and its tokens, or the error."""

    sent_s: float
    piece_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""


class _Client:
    """A client of one server.

    Raises:
        UsageError: the address is not valid.
    """

    def __init__(self, asked: LoadOptions) -> None:
        split = urlsplit(asked.base_url)
        if split.scheme not in {"http", "https"} or not split.hostname:
            raise UsageError(f"--base-url: wanted http://HOST:PORT, got {shown(asked.base_url)}")
        is_safe = split.scheme == "https"
        self._kind = http.client.HTTPSConnection if is_safe else http.client.HTTPConnection
        self._host, self._port = split.hostname, split.port
        self._root = split.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if asked.api_key is not None:
            self._headers["Authorization"] = f"Bearer {asked.api_key}"

    def model_name(self) -> str:
        """Return the first model that the server lists.

        Raises:
            UsageError: there is no such server, or it lists none.
        """
        try:
            with self._asked("GET", "/v1/models", None) as answer:
                return str(json.loads(answer.read())["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise UsageError(f"--base-url: no server lists its models there: {error}") from error

    def stream(self, body: dict[str, object]) -> _Answer:
        """Send a request and read its stream to the end."""
        answer = _Answer(time.perf_counter())
        try:
            with self._asked("POST", "/v1/completions", body) as lines:
                if lines.status != http.client.OK:
                    answer.error = f"{lines.status} {lines.read(300).decode(errors='replace')}"
                for line in lines if not answer.error else ():
                    self._take(line, answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer.error = str(error) or type(error).__name__
        return answer

    def _take(self, line: bytes, answer: _Answer) -> None:
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line.removeprefix(b"data: "))
        if event.get("error"):
            answer.error = shown(event["error"])
        if event.get("usage"):
            answer.num_tokens = event["usage"]["completion_tokens"]
        if event.get("choices"):
            answer.piece_s.append(time.perf_counter())

    def _asked(
        self, method: str, path: str, body: dict[str, object] | None
    ) -> http.client.HTTPResponse:
        connection = self._kind(self._host, self._port, timeout=_TIMEOUT_S)
        content = None if body is None else json.dumps(body)
        headers = {**self._headers, "Connection": "close"}
        connection.request(method, self._root + path, content, headers)
        return connection.getresponse()  # which closes the connection at its end


def send_load(asked: LoadOptions) -> Report:
    """Send all requests, and wait for their ends.

    Raises:
        UsageError: there is no such server, or no request was answered.
    """
    client, draw = _Client(asked), random.Random(0)  # noqa: S311  # prompts
    name = asked.served_model_name or client.model_name()
    bodies = [
        {
            "model": name,
            "prompt": draw.choices(range(COMMON_TOKENS), k=asked.input_len),
            "max_tokens": asked.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(asked.num_prompts)
    ]
    began_s, done = time.perf_counter(), threading.Lock()
    with (
        bar("requests", asked.num_prompts) as advance,
        ThreadPoolExecutor(asked.max_concurrency, "load") as threads,
    ):

        def send(body: dict[str, object]) -> _Answer:
            answer = client.stream(body)
            with done:
                advance()
            return answer

        sent = []
        for body in bodies:
            sent.append(threads.submit(send, body))
            if asked.request_rate is not None:
                time.sleep(draw.expovariate(asked.request_rate))
        answers = [each.result() for each in sent]
    return _report(asked, answers, time.perf_counter() - began_s)


def _report(asked: LoadOptions, answers: list[_Answer], seconds: float) -> Report:
    good = [one for one in answers if not one.error and one.piece_s]
    if not good:
        raise UsageError(f"--base-url: no request was answered: {answers[0].error or 'no text'}")
    report = Report()
    report.lines.append(
        f"serve: {len(good)} of {len(answers)} requests answered, each {asked.input_len} tokens in "
        f"and {asked.output_len} out"
    )
    report.values |= {"completed": len(good), "failed": len(answers) - len(good)}
    failed = [one.error for one in answers if one not in good]
    report.lines += [f"failed: {failed[0]}"] if failed else []
    num_out = sum(one.num_tokens for one in good)
    report.add_rates(
        seconds,
        {
            "requests": len(good),
            "tokens": num_out + asked.input_len * len(good),
            "output tokens": num_out,
        },
    )
    report.add_times("ttft_ms", "first token", [one.piece_s[0] - one.sent_s for one in good])
    report.add_times(
        "tpot_ms",
        "a token after it",
        [
            (one.piece_s[-1] - one.piece_s[0]) / (one.num_tokens - 1)
            for one in good
            if one.num_tokens > 1
        ],
    )
    report.add_times(
        "itl_ms",
        "between two pieces",
        [
            later - before
            for one in good
            for before, later in zip(one.piece_s, one.piece_s[1:], strict=False)
        ],
    )
    report.add_times("e2el_ms", "the whole", [one.piece_s[-1] - one.sent_s for one in good])
    return report
