"""The client suite against vLLM's server, with kvcore as its cache manager: same tests, by URL.

`python -m tests.model.serve.vllm_suite --vllm PYTHON`, where PYTHON is that of an environment with
vLLM and kvcore. `--plain` leaves vLLM's own manager. What does not apply is in `vllm_lacks.py`,
each with its reason. It exits with pytest's code.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from model.tiny import CHECKPOINT_DIR
from tests.bench.server import free_port, until_ready
from tests.model.serve.calls import TEMPLATE

HERE = Path(__file__).parent
SUITE = ("openai_client", "messages", "responses", "tools", "agents", "vllm_fields")
FLAGS = (
    "--served-model-name", "tiny", "--dtype", "float32", "--block-size", "32", "--max-model-len",
    "2048", "--gpu-memory-utilization", "0.2", "--enforce-eager", "--enable-auto-tool-choice",
    "--tool-call-parser", "hermes", "--enable-prompt-tokens-details", "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="a Python that has vLLM and kvcore")
    parser.add_argument("--plain", action="store_true", help="vLLM's own cache manager")
    given = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    told = os.environ | {
        "VLLM_PLUGINS": "" if given.plain else "kvcore",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(HERE.parents[2]),
    }
    with tempfile.TemporaryDirectory() as work:
        template, log = Path(work) / "template.jinja", Path(work) / "log"
        template.write_text(TEMPLATE)
        command = [
            given.vllm, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model",
            str(CHECKPOINT_DIR), "--port", str(port), "--chat-template", str(template), *FLAGS,
        ]  # fmt: skip
        with (
            log.open("wb") as out,
            subprocess.Popen(command, stdout=out, stderr=out, env=told) as server,
        ):
            try:
                until_ready(url, server, log)
                if ("is the KV cache manager" in log.read_text()) is given.plain:
                    sys.exit("the cache manager is not the one that was asked for")
                files = [str(HERE / f"test_{name}.py") for name in SUITE]
                return pytest.main(["-n", "0", "-q", "-rs", "--base-url", url, *files])
            finally:
                server.terminate()


if __name__ == "__main__":
    sys.exit(main())
