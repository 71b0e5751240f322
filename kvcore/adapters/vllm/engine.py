"""kvcore in the engine of vLLM: everything that imports names of vLLM is here.

Decides which engines kvcore serves: those whose layers see all, a window or their own chunk, or
keep a recurrent state. All others keep vLLM's own manager, and one line in the log says why.

vLLM has no hook for this: `Plugin` puts a function where vLLM's scheduler looks for the manager's
class, and around two others: where the scheduler is told its configuration, and where the engine
takes the hashing of prompts, which kvcore does not need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import FunctionType
from typing import Any, Final

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched import scheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.utils import tensor_data

import kvcore
from kvcore.adapters.vllm.events import Kind, Speller, Words
from kvcore.adapters.vllm.manager import Manager, Manager022, Settings
from kvcore.adapters.vllm.plugin import LOGGER, minor_version
from kvcore.adapters.vllm.prompts import groups_of, is_state
from kvcore.adapters.vllm.states import StateManager

WORDS: Final = Words(BlockStored, BlockRemoved, AllBlocksCleared, maybe_convert_block_hash)

_ARGUMENTS: Final = frozenset({
    "dcp_world_size", "enable_caching", "enable_kv_cache_events", "hash_block_size",
    "kv_cache_config", "log_stats", "max_model_len", "metrics_collector", "pcp_world_size",
    "use_eagle",
})  # fmt: skip
"""The arguments of vLLM's manager that every version has."""

logger = logging.getLogger(LOGGER)


class Plugin:
    """The connection of vLLM with kvcore in one process.

    Attributes:
        own_manager: vLLM's class of managers.
        own_hasher: vLLM's maker of hashers.
        made: the manager that kvcore puts in its place.
        keeps_hashes: True if the engine that is being made keeps outputs by vLLM's block hashes.
        left: why the engine that is being made keeps vLLM's own manager, if its configuration
            says so.
        serves: True if the engine that was made last is served by kvcore.
    """

    def __init__(self) -> None:
        self.own_manager: Callable[..., Any] = scheduler.KVCacheManager
        self.own_hasher: Callable[..., Any] = core.get_request_block_hasher
        self.made = Manager022 if minor_version() == "0.22" else Manager
        self.left: str | None = None
        self.keeps_hashes = False
        self.serves = False

    def install(self) -> None:
        """Put it where vLLM looks."""
        begin = Scheduler.__init__

        @wraps(begin)
        def noted(self_: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            self.left = _answered(left_by, vllm_config)
            outputs = getattr(vllm_config, "aux_output_config", None)  # not in 0.22
            self.keeps_hashes = bool(getattr(outputs, "enabled", False))
            try:
                begin(self_, vllm_config, *args, **kwargs)
            finally:
                self.left = None

        Scheduler.__init__ = noted
        scheduler.KVCacheManager = self.manager
        core.get_request_block_hasher = self.hasher

    def manager(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Make the manager of an engine: kvcore's, or vLLM's own."""
        made = self.left or _answered(settings_of, kv_cache_config, *args, **kwargs)
        self.serves = isinstance(made, Settings)
        if isinstance(made, Settings):
            how = "Python" if isinstance(kvcore.KVCacheManager.open, FunctionType) else "compiled"
            logger.info("kvcore %s (%s) is the KV cache manager", kvcore.__version__, how)
            has_states = isinstance(made.groups[-1], kvcore.RecurrentState)
            return (StateManager if has_states else self.made)(made)
        logger.warning("kvcore leaves the KV cache to vLLM's own manager: %s", made)
        return self.own_manager(kv_cache_config, *args, **kwargs)

    def hasher(self, *args: Any, **kwargs: Any) -> Callable[..., list[Any]]:  # noqa: ANN401
        """Make what hashes prompts as they arrive: kvcore compares content, and needs none."""
        make = self.own_hasher if self.keeps_hashes or not self.serves else _no_hasher
        made: Callable[..., list[Any]] = make(*args, **kwargs)
        return made


def _answered(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Return what a question to vLLM's objects gives: a reason, if one has another shape."""
    try:
        return ask(*args, **kwargs)
    except (AttributeError, KeyError, TypeError) as error:
        return f"what it says of itself has moved ({error!r})"


def _no_hasher(*args: Any, **kwargs: Any) -> Callable[..., list[Any]]:  # noqa: ANN401, ARG001
    return _no_hashes


def _no_hashes(request: Any) -> list[Any]:  # noqa: ANN401, ARG001
    return []


def left_by(vllm_config: Any) -> str | None:  # noqa: ANN401
    """Return why an engine of this configuration keeps vLLM's own manager; None: it need not."""
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector"
    if vllm_config.scheduler_config.policy == "priority":
        # A request preempted in the pass that scheduled it has published blocks that are never
        # computed. Withdrawing them would take them from a twin too, whose table the worker has.
        return "priorities"
    return None


def settings_of(*args: Any, **kwargs: Any) -> Settings | str:  # noqa: ANN401
    """Return the settings of an engine's manager, or the reason why kvcore does not serve it.

    The arguments are those of vLLM's `KVCacheManager`.
    """
    bound = signature(KVCacheManager).bind(*args, **kwargs)
    bound.apply_defaults()
    told = bound.arguments
    kv_cache_config, max_model_len = told["kv_cache_config"], told["max_model_len"]
    specs = tuple(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    if not specs:
        return "a model without a KV cache"
    interval = getattr(kv_cache_config, "prefix_cache_retention_interval", None)
    found = groups_of(specs, are_dense=interval is None)
    if isinstance(found, str):
        return found
    groups, places = found
    has_states = isinstance(groups[-1], kvcore.RecurrentState)
    lookahead = told.get("num_prefill_lookahead") or 0
    ahead = told.get("num_hash_lookahead_tokens") or 0
    refused = {
        "drafts of hidden states, or recurrent states, in vLLM 0.22": minor_version() == "0.22"
        and (told["use_eagle"] or has_states),
        "several MTP modules whose last cached block is not computed again": lookahead
        > max(1, ahead)
        and not told["use_eagle"],
        "recurrent states whose hashes look ahead": ahead and has_states,
        "hashes that look further ahead than a block": ahead
        > min(getattr(group, "block_size", ahead) for group in groups),
        "recurrent states found between the ends of blocks (prefix_match_unit)": has_states
        and told["enable_caching"]
        and told["hash_block_size"] != told["scheduler_block_size"],
        "context parallelism": told["dcp_world_size"] > 1 or told["pcp_world_size"] > 1,
        "an interval at which windows and states are retained": interval,
        "a host-resident KV cache": any(
            getattr(group, "host_resident", False) for group in kv_cache_config.kv_cache_groups
        ),
        "windows that are recomputed": any(
            getattr(spec, "prefix_replay_tokens", 0) for spec in specs
        ),
    }
    for reason, applies in refused.items():
        if applies:
            return reason
    return Settings(
        num_blocks=kv_cache_config.num_blocks,
        groups=groups,
        places=places,
        specs=specs,
        caps=_caps_of(specs, told),
        max_model_len=max_model_len,
        enable_caching=told["enable_caching"],
        recompute=max(1, lookahead) if told["use_eagle"] else 0,
        lookahead=ahead,
        hash_block_size=told["hash_block_size"],
        watermark_blocks=int(told.get("watermark", 0.0) * kv_cache_config.num_blocks),
        event_hashes="sha256" if told["enable_kv_cache_events"] else None,
        keep_fresh=kv_cache_config.needs_kv_cache_zeroing,
        bytes_of=tensor_data,
        new_stats=PrefixCacheStats if told["log_stats"] else None,
        spell=Speller(WORDS, _kinds_of(specs, places, len(groups)), ahead),
        collector=told["metrics_collector"],
    )


def _caps_of(specs: tuple[Any, ...], told: dict[str, Any]) -> tuple[int | None, ...]:
    """Return for each group with attention the most blocks that a request may ask for, if any."""
    max_model_len = told["max_model_len"]
    in_flight = told.get("max_in_flight_tokens", told.get("max_num_batched_tokens"))
    in_flight = in_flight or max_model_len
    return tuple(
        spec.max_admission_blocks_per_request(in_flight, max_model_len)
        if hasattr(spec, "max_admission_blocks_per_request")
        else None
        for spec in specs
        if not is_state(spec)
    )


def _kinds_of(specs: tuple[Any, ...], places: tuple[int, ...], num_groups: int) -> list[list[Kind]]:
    """Return the index, kind and window of vLLM's groups for each group of kvcore, for events."""
    kinds: list[list[Kind]] = [[] for _ in range(num_groups)]
    for index, (spec, place) in enumerate(zip(specs, places, strict=True)):
        kind, window = get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)
        kinds[min(place, num_groups - 1)].append((index, kind, window))
    return kinds


def install() -> None:
    """Make kvcore the KV cache manager of the engines of this process, once.

    Raises:
        ImportError: vLLM's manager has none of an argument that is needed here.
    """
    if missing := _ARGUMENTS - set(signature(KVCacheManager).parameters):
        raise ImportError(f"KVCacheManager takes no {', '.join(sorted(missing))}")
    if not isinstance(getattr(scheduler.KVCacheManager, "__self__", None), Plugin):
        Plugin().install()
