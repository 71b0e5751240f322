"""The command line of replicas: what means nothing is refused before anything is started."""

import importlib
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from model.cli import start
from model.cluster.args import parse_args
from model.errors import InvalidArgumentError, UsageError
from model.forward import lora
from model.load import loader
from model.serve import args as serve_args
from tests.hang import HANG_S

_ROOT = Path(__file__).parents[3]


def run(*flags):
    """The command as a user gives it, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "model.cluster", *flags],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_flags_become_settings():
    options = parse_args(["--replicas", "3", "--router", "power-of-two", "--tp", "2"])
    assert (options.cluster.replicas, options.cluster.router) == (3, "power-of-two")
    assert options.model.tp == 2
    assert options.engine.record_events
    assert options.serve.served_model_name == ("tiny",)


def test_requests_call_a_model_of_the_hub_by_its_id_and_a_folder_by_its_last_part(tmp_path):
    for parse in (parse_args, serve_args.parse_args):
        for path, name in (("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), (str(tmp_path), tmp_path.name)):
            assert parse(["--model", path]).serve.served_model_name == (name,)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-events", "tcp://*:5557"], "--kv-events has no meaning here"),
        (["--router", "best"], "--router: wanted"),
        (["--replicas", "0"], "--replicas: wanted"),
    ],
)
def test_a_flag_that_cannot_be_is_told_by_its_name(flags, words):
    with pytest.raises(UsageError, match=words):
        parse_args(flags)


def test_fewer_replicas_at_most_than_at_least_are_refused():
    with pytest.raises(InvalidArgumentError, match="max_replicas: wanted at least 3"):
        parse_args(["--replicas", "3", "--max-replicas", "2"])


def test_what_replicas_load_by_name_is_there():
    assert callable(start.make_engine)
    assert callable(start.follow)
    assert callable(loader.load_codec)
    sources = [path.read_text() for path in (_ROOT / "model/cluster").glob("*.py")]
    named = {name for text in sources for name in re.findall(r'import_module\("(.*?)"\)', text)}
    assert callable(lora.read_versions)
    assert named == {"model.cli.start", "model.forward.lora", "model.load.loader", "ray.serve"}


def test_a_port_in_use_is_one_line_before_ray_is_started():
    pytest.importorskip("ray", reason="Ray is not installed: .[cluster]")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run("--port", port)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        f"error: --host 127.0.0.1 --port {port}: Address already in use"
    ]


@pytest.mark.parametrize(
    "address", ["a..b:6379", f"{'a' * 64}.b:6379", "127.0.0.1:99999", f"127.0.0.1:{'9' * 5000}"]
)
def test_an_address_that_cannot_be_is_told_by_its_flag(address):
    pytest.importorskip("ray", reason="Ray is not installed: .[cluster]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Ray imports warns
        session = importlib.import_module("model.cluster.session")
    with pytest.raises(UsageError, match=r"--address .*: wanted a Ray cluster's: "):
        session._check_address(address)


def test_a_cluster_that_nobody_serves_is_one_line():
    pytest.importorskip("ray", reason="Ray is not installed: .[cluster]")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ended = run("--port", "0", "--address", address)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[1:] == [
        f"error: --address {address}: wanted a Ray cluster's: [Errno 111] Connection refused"
    ]


def test_replicas_share_the_folder_of_a_disk_and_no_address():
    assert parse_args(["--disk", "kv"]).engine.shares_disk
    with pytest.raises(UsageError, match=r"^--serve-kv has no meaning here"):
        parse_args(["--disk", "kv", "--serve-kv", "127.0.0.1:9000"])
