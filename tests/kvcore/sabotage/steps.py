"""Whole steps, and what is said of the blocks that they take, with one line changed each."""

from kvcore import lease as leases
from kvcore import sequence
from kvcore.tables.block_table import BlockTable
from kvcore.verbs import peaks, write
from kvcore.verbs import step as forward
from tests.kvcore.sabotage.registry import edited

# Room
edited(
    "step_takes_drafts_for_a_plain_decoder",
    forward._others,
    "if room > 1:",
    "if False:",
    "P14",
    "P15",
    "P13",
)
edited(
    "step_counts_room_from_the_last_token",
    forward._Change.plan,
    "total = done + reserved[place]",
    "total = here - 1 + reserved[place]",
    "P13",
    "P15",
)
edited(
    "step_makes_room_for_what_is_known",
    forward._Change.plan,
    "total = most = here + expected[place]",
    "total = most = here",
    "P13",
    "P15",
)
edited(
    "step_lets_a_sequence_pass_its_room",
    forward._Change.plan,
    "done > here or done > seq.num_reserved_tokens",
    "done > here",
    "P13",
)
edited(
    "step_asks_for_a_token_too_few",
    forward._Change.plan,
    "if total > seq.num_reserved_tokens",
    "if total > seq.num_reserved_tokens + 1",
    "P13",
    "P15",
)
edited(
    "step_reserves_without_a_limit",
    forward._Change.plan,
    "check_length(max(most, total), longest)",
    "check_length(most, longest)",
    "P13",
)
# Counting
edited(
    "step_counts_what_was_not_computed",
    forward._others,
    "columns.append((moves.computed, 1))",
    "pass",
    "P4",
    "P13",
    "P14",
    "P15",
)
edited(
    "step_counts_a_token_in_a_full_block",
    forward._Change.complete,
    "limit - 1 if",
    "limit if",
    "P14",
)
edited(
    "step_counts_where_several_tokens_are_not_computed",
    forward._Change.complete,
    "unknown - done == 1",
    "unknown - done >= 1",
    "P14",
)
edited(
    "step_counts_with_another_number_of_unknown_tokens",
    forward.step,
    "and seq.num_unknown_tokens == ahead",
    "",
    "P4",
    "P14",
    "P27",
)
edited(
    "step_forgets_which_sequences_do_not_decode",
    forward._one_each,
    "seqs[place].fast_decode_limit = 0",
    "pass",
    "P4",
    "P10",
    "P13",
    "P14",
    "P7",
)
# What is found, and when
edited(
    "step_publishes_a_full_block_late",
    forward._Change.publish,
    "settled < seq.next_boundary",
    "settled <= seq.next_boundary",
    "P9",
    "P6",
    "P14",
)
edited(
    "step_publishes_what_is_unknown",
    forward._Change.publish,
    "if dones[index] < settled:",
    "if True:",
    "P4",
    "P6",
    "P9",
    "P13",
)
edited(
    "step_resolves_after_it_has_published",
    forward._Change.publish,
    "settled = len(seq.packed)",
    "settled = (self.lengths or [len(seq.packed)])[index]",
    "P9",
    "P6",
    "P14",
)
# Tokens that are not known yet
edited(
    "step_appends_what_resolves",
    forward._Change.complete,
    "max(0, unknown - known[place])",
    "unknown",
    "P14",
    "P27",
    "P3",
)
edited(
    "step_gives_each_its_neighbours_tokens",
    forward._Change.join,
    "tokens[start : start + known[place]]",
    "tokens[: known[place]]",
    "P10",
)
edited(
    "step_gives_a_decoder_its_neighbours_token",
    forward._one_each,
    "tokens[place : place + moves.known[place]] = [0]",
    "pass",
    "P10",
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
edited("step_forgets_whose_blocks_are_new", forward._Change.settle, "self._assign()", "pass", "P24")
# Rows
edited("rows_miss_a_new_block", BlockTable.grow, "self.num_changes += 1", "pass", "P16")
edited("rows_miss_a_cut", BlockTable.cut, "self.num_changes += 1", "pass", "P16")
edited(
    "rows_stay_when_their_sequences_move",
    write.StepTables._arrange,
    "if source >= 0 and source != row:",
    "if False:",
    "P16",
)
edited(
    "rows_of_new_sequences_are_taken_for_written",
    write.StepTables._arrange,
    "-1 if source < 0 else old[source]",
    "seqs[0].tables[self._group].num_changes if source < 0 else old[source]",
    "P16",
)
edited(
    "rows_move_over_rows_that_are_still_to_move",
    write.StepTables._arrange,
    "bytes(self._bytes[: len(self._seqs) * width])",
    "self._bytes",
    "P16",
)
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
