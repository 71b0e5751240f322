"""Start replicas from a command line, and stop them.

Decides: what is checked before anything slow: the port is free, and Ray has the resources that the
replicas need. Ray gives up on its own proxy after a minute, which a busy machine exceeds, so the
wait for the proxy is here. The first SIGTERM or SIGINT drains, the second ends at once; in every
case what was started is stopped.

Does not know: what a replica does.
"""

import contextlib
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from model.cli.exits import Stopped
from model.cli.progress import say
from model.cli.signals import StopRequest
from model.cluster.app import app_of, process_needs
from model.cluster.config import ClusterOptions
from model.cluster.replica import REFUSED
from model.errors import ModelError, UsageError
from model.serve.listener import address_of, listen

_APP = "kvcore"
_LOOK_S = 0.2
_CONNECT_S = 5.0
_STORE_BYTES = 256 << 20  # messages between processes are small


class NotDeployedError(ModelError):
    """The replicas refuse their settings."""


class NotStartedError(OSError):
    """Ray or a deployment does not start, for a reason other than the input. Exit code 3."""


def run(options: ClusterOptions) -> int:
    """Serve until a signal ends it; the exit code.

    Raises:
        ModelError: the replicas refuse their settings, or the address is not available.
        NotStartedError: Ray does not start them.
        Stopped: a signal came before they were ready.
    """
    asked = StopRequest()
    asked.handle()
    with serving(options, asked) as address:
        say(f"{address}: ready")
        asked.wait()
        say("draining")
    return 0


@contextlib.contextmanager
def serving(options: ClusterOptions, asked: StopRequest) -> Iterator[str]:
    """Start replicas and yield their address; at the end of the block they drain and stop.

    Raises:
        ModelError: the replicas refuse their settings, or the address is not available.
        NotStartedError: Ray does not start them.
        Stopped: a signal came before they were ready.
    """
    with listen(options.serve) as free:  # Ray reports a port in use only in its log
        address = address_of(free, options.serve)
        host, port = free.getsockname()[:2]
    say(f"{address}: starting {options.cluster.replicas} replicas of {options.model.path}")
    _check_address(options.cluster.address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    _start_ray(options.cluster.address)
    asked.handle()  # Ray has installed its own handlers
    try:
        _check_resources(options)
        tls = {
            "ssl_certfile": options.serve.tls_certfile,
            "ssl_keyfile": options.serve.tls_keyfile,
        }
        http = {"host": host, "port": port, **{k: v for k, v in tls.items() if v is not None}}
        with _one_line("Ray Serve does not start"):
            with contextlib.suppress(TimeoutError):  # of its proxy, which is waited for below
                serve.start(http_options=HTTPOptions(**http), logging_config={"log_level": "ERROR"})
            with contextlib.suppress(TimeoutError):
                serve.run_many(
                    [serve.RunTarget(app_of(options), name=_APP)],
                    wait_for_applications_running=False,
                )
            asked.handle()
            _wait_until_ready(asked, options.cluster.start_timeout_s)
        yield address
    finally:
        with contextlib.suppress(Exception):  # whatever fails, the rest is stopped too
            serve.delete(_APP)
        if options.cluster.address is not None:
            serve.shutdown()
        ray.shutdown()


def _start_ray(address: str | None) -> None:
    """Start Ray on this machine, or join a running cluster."""
    if address is not None:
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"--address {address}: {error}") from error
        return
    # Ray's default is 15: any other program would run before the replicas.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with _one_line("Ray does not start on this machine"):
        ray.init(
            "local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=_STORE_BYTES,
        )


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Report an error of Ray, which may be a traceback of another process, by its last line."""
    try:
        yield
    except (ModelError, NotStartedError):
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else type(error).__name__
        raise NotStartedError(f"{what}: {reason}") from error


def _check_address(address: str | None) -> None:
    """Raise unless something listens at the address; Ray would try for minutes."""
    said = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address or "")
    if said is None:
        return
    try:
        socket.create_connection((said[1], int(said[2])), _CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:  # no name or number of a host and a port
        raise UsageError(f"--address {address}: wanted a Ray cluster's: {error}") from error


def _check_resources(options: ClusterOptions) -> None:
    """Raise unless Ray has the resources of all replicas; a cluster may still grow."""
    if options.cluster.address is not None:
        return
    there = ray.cluster_resources()
    for name, each in process_needs(options).items():
        wanted = each * options.model.tp * options.cluster.replicas
        if wanted > there.get(name, 0):
            flag = "--cpus-per-process" if name == "CPU" else "--tp"
            raise UsageError(
                f"--replicas {options.cluster.replicas}: wanted at most {there.get(name, 0):g} "
                f"{name}s, which this machine has, got {wanted:g} ({flag} for each process)"
            )


def _wait_until_ready(asked: StopRequest, timeout_s: float) -> None:
    """Wait until the replicas are ready, and at most `timeout_s` for Ray's proxy."""
    end_s = time.monotonic() + timeout_s
    while not asked.wait(_LOOK_S):
        status = serve.status()
        has_proxy = "HEALTHY" in status.proxies.values()
        found = status.applications.get(_APP)
        if found is not None:
            _check_application(found)
            if found.status == "RUNNING" and has_proxy:
                return
        if time.monotonic() > end_s and not (has_proxy and found is not None):
            raise NotStartedError(
                f"Ray Serve does not start: its proxy did not answer within {timeout_s:g} s "
                "(--start-timeout-s)"
            )
    raise Stopped(signal.SIGTERM, "before the replicas were ready")


def _check_application(found: Any) -> None:  # noqa: ANN401  # Ray has no types
    """Raise if the replicas have failed."""
    said = [found.message, *[each.message for each in found.deployments.values()]]
    for message in said:
        refusal = re.search(f"{REFUSED}(.*)", message)
        if refusal is not None:
            raise NotDeployedError(refusal.group(1))
    if found.status == "DEPLOY_FAILED":
        lines = max(said, key=len).strip().splitlines()  # the longest has the traceback
        raise NotStartedError(f"the replicas do not start: {lines[-1]}")
