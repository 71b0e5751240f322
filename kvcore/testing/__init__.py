"""Our property tests, for your allocator: `check_allocator(MyAdapter)`.

An adapter maps eight verbs to the calls of another engine's allocator, and says what it promises
(`Allocator`, `Promise`). State machines then drive it beside a ghost of the GPU's memory and check,
from outside, that no block is handed out twice, that every hit is the request's own prefix, that
nothing leaks, and the other properties of docs/reference/properties.md that can be seen so. It
needs Hypothesis (`pip install 'kvcore[testing]'`); nothing else of kvcore imports it.
"""

try:
    from kvcore.testing.machine import AllocatorMachine
    from kvcore.testing.machines import (
        MACHINES,
        BranchMachine,
        ChurnMachine,
        GroupMachine,
        RequestMachine,
        TenantMachine,
        machines_for,
    )
    from kvcore.testing.run import allocator_tests, bound, check_allocator
    from kvcore.testing.shorten import replay
    from kvcore.testing.strategies import TENANTS, lengths, prompts
except ModuleNotFoundError as error:
    if error.name != "hypothesis":
        raise
    raise ImportError("kvcore.testing needs Hypothesis: pip install 'kvcore[testing]'") from error

from kvcore.testing.driver import Driver
from kvcore.testing.errors import AdapterError, BrokenError, CrashError, PropertyError
from kvcore.testing.ghost import Memory, Prefixes, Request
from kvcore.testing.protocol import (
    EVERYTHING,
    Allocator,
    Forks,
    Groups,
    KeepsStates,
    Leases,
    Promise,
    RecordsEvents,
    Resets,
    Resolves,
    Swaps,
    TakesItems,
    Truncates,
)
from kvcore.testing.serving import Chunk, Load, Plan, Scheduling, check_scheduler
from kvcore.testing.tiering import Ended, KilledError, Move, Tiering, check_tier

__all__ = [
    "EVERYTHING",
    "MACHINES",
    "TENANTS",
    "AdapterError",
    "Allocator",
    "AllocatorMachine",
    "BranchMachine",
    "BrokenError",
    "Chunk",
    "ChurnMachine",
    "CrashError",
    "Driver",
    "Ended",
    "Forks",
    "GroupMachine",
    "Groups",
    "KeepsStates",
    "KilledError",
    "Leases",
    "Load",
    "Memory",
    "Move",
    "Plan",
    "Prefixes",
    "Promise",
    "PropertyError",
    "RecordsEvents",
    "Request",
    "RequestMachine",
    "Resets",
    "Resolves",
    "Scheduling",
    "Swaps",
    "TakesItems",
    "TenantMachine",
    "Tiering",
    "Truncates",
    "allocator_tests",
    "bound",
    "check_allocator",
    "check_scheduler",
    "check_tier",
    "lengths",
    "machines_for",
    "prompts",
    "replay",
]
