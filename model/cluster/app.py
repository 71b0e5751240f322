"""The application on Ray Serve: an ingress, and replicas that run the application of `model.serve`.

    serve run model.cluster.app:build replicas=2 model=Qwen/Qwen3-8B

Decides: the resources of a replica (with tensor parallelism, a placement group), when replicas are
added, and how often their health is checked.

Does not know: command lines, signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from model.cluster.args import parse_args
from model.cluster.config import ClusterOptions
from model.cluster.ingress import Ingress
from model.cluster.replica import Replica
from model.errors import UsageError

_MANY = 1_000_000  # concurrent requests: the engine itself refuses when too many wait
_OURS = "model.cluster.routing:EventRouter"
_RAYS = {
    "ray-power-of-two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "ray-prefix": "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter",  # its public module needs vLLM
}


def app_of(options: ClusterOptions) -> Any:  # noqa: ANN401  # Ray has no types
    """Return the application that Ray Serve runs for a command line.

    Raises:
        UsageError: the router of --router is not installed.
    """
    cluster, drain_s = options.cluster, options.serve.drain_timeout_s
    process = process_needs(options)
    sizes: dict[str, object] = {"num_replicas": cluster.replicas}
    if cluster.max_replicas is not None:
        sizes = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=cluster.replicas,
                max_replicas=cluster.max_replicas,
                look_back_period_s=15.0,
                upscale_delay_s=5.0,
                policy=AutoscalingPolicy(
                    policy_function="model.cluster.scaling:ByWaitingTokens",
                    policy_kwargs={"waiting_tokens": cluster.waiting_tokens},
                ),
            )
        }
    if options.model.tp > 1:
        sizes["placement_group_bundles"] = [process] * options.model.tp
        sizes["placement_group_strategy"] = "STRICT_PACK"
    replicas = serve.deployment(Replica).options(
        name="replica",
        ray_actor_options={"num_cpus": process["CPU"], "num_gpus": process.get("GPU", 0)},
        request_router_config=_router_of(options),
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        **sizes,
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return ingress.bind(replicas.bind(options), options)


def build(arguments: Mapping[str, str]) -> Any:  # noqa: ANN401  # Ray has no types
    """Return the application for `serve run` and for configuration files of Ray Serve.

    Args:
        arguments: flags of `python -m model.cluster` without their dashes, `tp=2` for `--tp 2`.

    Raises:
        UsageError: a flag or its value is wrong.
    """
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
    return app_of(parse_args(flags))


def process_needs(options: ClusterOptions) -> dict[str, float]:
    """Return the Ray resources of each process of a replica. O(1)."""
    needs = {"CPU": options.cluster.cpus_per_process}
    if options.model.backend != "numba" and ray.cluster_resources().get("GPU", 0):
        needs["GPU"] = 1
    return needs


def _router_of(options: ClusterOptions) -> RequestRouterConfig:
    cluster = options.cluster
    rays = _RAYS.get(cluster.router)
    if rays is not None:
        module, _, name = rays.partition(":")
        try:
            getattr(import_module(module), name)
        except ImportError as error:
            raise UsageError(f"--router {cluster.router}: Ray's needs more: {error}") from error
        return RequestRouterConfig(request_router_class=rays)
    return RequestRouterConfig(
        request_router_class=_OURS,
        request_router_kwargs={
            "policy": cluster.router,
            "running_weight": cluster.running_weight,
            "miss_weight": cluster.miss_weight,
            "block_size": options.engine.block_size,
        },
    )
