"""Whole steps, and what is said of the blocks that they take, with one line changed each."""

from kvcore import lease as leases
from kvcore import sequence
from kvcore.verbs import peaks
from kvcore.verbs import step as forward
from tests.kvcore.sabotage.registry import edited

# Room
edited(
    "step_takes_drafts_for_a_plain_decoder",
    forward.step,
    "reserved[index] < 2",
    "reserved[index] < 3",
    "P15",
)
edited(
    "step_counts_room_from_the_last_token",
    forward.step,
    "done + reserved[index]",
    "length - 1 + reserved[index]",
    "P13",
    "P15",
)
edited(
    "step_makes_room_for_what_is_told",
    forward.step,
    "length if reserved is None else",
    "len(seq.packed) if reserved is None else",
    "P15",
)
edited(
    "step_lets_a_sequence_pass_its_room",
    forward.step,
    "done <= length <= seq.num_reserved_tokens",
    "done <= length",
    "P13",
)
edited(
    "step_asks_for_a_token_too_few",
    forward.step,
    "total <= seq.num_reserved_tokens",
    "total <= seq.num_reserved_tokens + 1",
    "P15",
)
edited(
    "step_makes_room_for_two_groups",
    forward._num_missing,
    "in seq.tables:",
    "in seq.tables[:2]:",
    "P13",
    "P15",
)
edited(
    "step_reserves_without_a_limit",
    forward.reserve_step,
    "check_length(total, longest)",
    "pass",
    "P13",
)
# Drafts
edited(
    "step_counts_what_was_not_computed",
    forward.step,
    "count == more == 1",
    "more == 1",
    "P4",
    "P13",
    "P14",
)
# What is found, and when
edited(
    "step_publishes_a_full_block_late",
    forward.step,
    "done < seq.next_boundary or",
    "done <= seq.next_boundary or",
    "P9",
    "P6",
    "P14",
)
edited(
    "step_publishes_a_told_block_late",
    forward.step,
    "len(seq.packed) < seq.next_boundary)",
    "len(seq.packed) <= seq.next_boundary)",
    "P9",
    "P6",
    "P14",
)
edited(
    "step_commits_a_full_block_late",
    forward.commit_step,
    "computed < seq.next_boundary",
    "computed <= seq.next_boundary",
    "P9",
    "P6",
    "P15",
)
edited(
    "step_tells_a_full_block_late",
    forward.resolve_step,
    "len(seq.packed) >= seq.next_boundary",
    "len(seq.packed) > seq.next_boundary",
    "P9",
    "P6",
    "P15",
)
# Tokens that are not told yet
edited(
    "step_decodes_behind_unknown_tokens",
    forward._find_stop,
    " and not seq.num_unknown_tokens",
    "",
    "P14",
    "P27",
)
edited(
    "step_tells_each_its_neighbours_tokens",
    forward.resolve_step,
    "known[start : start + more]",
    "known[:more]",
    "P10",
)
edited(
    "step_decodes_where_a_token_is_unknown",
    forward._decode,
    "check_all_known(seq)",
    "pass",
    "P13",
    "P27",
)
# Windows
edited(
    "step_slides_a_group_by_another",
    sequence.KVSequence.find_limits,
    "due = min(due, table.next_pass(table.num_null))",
    "due = table.next_pass(table.num_null)",
    "P9",
    "P6",
    "P14",
)
edited("step_forgets_whose_blocks_are_new", forward._move, "_assign(pool, assigned)", "pass", "P24")
# What is said of blocks
edited(
    "outlook_forgets_what_is_unknown",
    peaks.blocks_still_taken,
    "chunk + seq.num_computed_tokens - settled",
    "chunk",
    "P13",
)
edited(
    "outlook_begins_at_the_computed_tokens",
    peaks.blocks_still_taken,
    "settled = seq.num_settled_tokens",
    "settled = seq.num_computed_tokens",
    "P13",
)
edited(
    "outlook_takes_again_what_others_hold",
    peaks.blocks_still_taken,
    "ref_count > 1]",
    "ref_count > 2]",
    "P13",
)
edited(
    "outlook_keeps_a_shared_tail",
    peaks._taken_with_a_load,
    "place < computed // table.block_size",
    "place <= computed // table.block_size",
    "P13",
)
edited(
    "outlook_knows_no_moment_of_the_load",
    peaks._taken_with_a_load,
    "max(_num_loaded(tables, computed, external), later - held)",
    "max(0, later - held)",
    "P13",
)
edited(
    "outlook_loads_what_no_query_sees",
    peaks._num_loaded,
    "table.first_loaded(computed, external)",
    "computed // table.block_size",
    "P13",
)
edited(
    "outlook_of_a_plan_revives_twice",
    peaks.blocks_to_take,
    "max(loaded, later - revived)",
    "max(loaded, later)",
    "P13",
)
edited(
    "leases_end_by_their_deadlines",
    leases.LeaseBook.due,
    "sorted(self._deadlines.due(step), key=_age)",
    "self._deadlines.due(step)",
    "P17",
)
edited("leases_end_the_newest_first", leases._age, "return lease", "return -lease", "P17")
