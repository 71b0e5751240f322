"""State machines: the allocator's verbs as rules, so that a failure reads as a program.

Each machine drives the real thing and a naive model side by side, compares all that can be seen
after every step, and checks that a refused call has changed nothing. `make_*` are the seams through
which a sabotaged part can be put in the real one's place.
"""

from tests.kvcore.machines.hybrid_rules import HybridMachine
from tests.kvcore.machines.manager import ManagerMachine
from tests.kvcore.machines.pool import PoolMachine
from tests.kvcore.machines.queue import FreeQueueMachine

__all__ = ["FreeQueueMachine", "HybridMachine", "ManagerMachine", "PoolMachine"]
