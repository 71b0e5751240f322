"""The last block of an answer, or the state after it, is lost before the next turn looks for it."""

from kvcore.verbs import states
from kvcore.verbs import step as forward
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import unaided

unaided(
    "turns_lose_the_blocks_of_an_answer",
    forward._Change.publish,
    "if full > table.num_published and key is not None:",
    "if full > table.num_published and key and settled <= getattr(seq.state, 'prompt', settled):",
    "P9",
    "P24",
    machine=machines.HybridMachine,
)
unaided(
    "turns_lose_the_state_at_the_end_of_an_answer",
    states.publish_kept,
    "if table.kept_at > len(seq.packed):",
    "if table.kept_at >= len(seq.packed):",
    "P24",
    machine=machines.HybridMachine,
)
unaided(
    "turns_lose_the_state_after_an_answer",
    states.StateMove._advance,
    "done >= table.prompt or table.is_wanted(done)",
    "table.is_wanted(done)",
    "P24",
    "P34",
    "P36",
    machine=machines.HybridMachine,
)
