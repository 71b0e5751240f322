"""Known ends of cached prefixes, and what is reused first, with one line changed each."""

from kvcore.eviction.idle_blocks import IdleBlocks
from kvcore.tables import ends
from kvcore.tables.ends import Ends
from kvcore.verbs import ends as seen
from kvcore.verbs import states
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import edited

WINDOWS = ("window", "full and window", "three")
CHATS = ("take_turns", "go_on_side_by_side", "open", "run", "close")


def wrong(name, original, old, new, *properties, layouts=WINDOWS):
    name = f"ends_{name}"
    edited(name, original, old, new, *properties, layouts=layouts, near=CHATS)


wrong(
    "of_prompts_are_forgotten",
    ends.is_within,
    "start <= place < stop",
    "False",
    "P42",
)
wrong(
    "are_of_no_account",
    IdleBlocks.sort_out,
    "self.put_first(spare, num_known)",
    "pass",
    "P42",
)
wrong(
    "of_sequences_are_forgotten",
    IdleBlocks.need,
    "self._set_end(block, self.num_ends)",
    "pass",
    "P42",
)
wrong(
    "inside_a_block_need_its_window",
    Ends.last_hit,
    "end = num_tokens // self.unit * self.unit",
    "end = num_tokens",
    "P42",
)
wrong(
    "of_a_draft_model_need_no_more",
    Ends.last_hit,
    "if self.recompute:",
    "if False:",
    "P42",
)
wrong(
    "of_older_turns_stay_known",
    seen.learn_ends,
    "sight.older += _superseded(table, ends, path[:first], windows)",
    "pass",
    "P42",
)


def state(name, original, old, new, *properties):
    layouts = ("full and state", "full, window, state")
    machine = machines.HybridMachine
    edited(f"ends_{name}", original, old, new, *properties, machine=machine, layouts=layouts)


state(
    "of_states_are_of_no_account",
    states.StateMove._sort_out,
    "self.spare += pieces",
    "pass",
    "P42",
)
state(
    "of_states_are_forgotten",
    states.StateMove._sort_out,
    "if ends is not None and num_tokens in ends.lengths(only_branches=self._only_branches):",
    "if False:",
    "P42",
)
