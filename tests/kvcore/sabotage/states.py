"""Recurrent states, with one line changed each: part of these bugs engines have shipped."""

from kvcore import KVSequence
from kvcore.content_tree import ContentTree, find_pieces, lost_contents
from kvcore.events import EventLog
from kvcore.manager import KVCacheManager
from kvcore.tables import state_table
from kvcore.tables.state_table import StateTable
from kvcore.verbs import load, peaks, rewind, share, states
from kvcore.verbs import step as forward
from kvcore.verbs.states import StateMove
from tests.kvcore.machines import HybridMachine
from tests.kvcore.machines.hybrid import HYBRIDS
from tests.kvcore.sabotage.registry import edited

STATE_BLOCKS = getattr(KVSequence.state_blocks, "fget", None)  # a compiled property has none

ALL = tuple(HYBRIDS)
PIECES = ("full and three pieces",)
WINDOW = ("full, window, state",)


LIFE = ("open", "run", "close")
NEAR = {  # the rules that are near a bug; in their order a first one that fits its name
    "of_unknown_tokens_go_to_a_fork": ("open", "run_ahead", "fork", "close_all"),
    "of_unknown": (*LIFE, "expect_some"),
    "are_loaded": ("open", "begin_load", "commit_load"),
    "of_a_load": ("open", "begin_load", "commit_load"),
    "leak_when_a_load": ("open", "run", "begin_load", "commit_load"),
    "leak_when_they": (*LIFE, "fail_load", "fail_blocks"),
    "are_dropped": (*LIFE, "decode", "pass_a_boundary", "drop_kept_state"),
    "that_are_bad": ("open", "run", "fork", "fail_blocks"),
    "are_not_published": (*LIFE, "truncate", "decode"),
    "are_forgotten": ("open", "close", "run_ahead"),
    "are_not_wanted_on_the_grid": LIFE,
    "are_freed": (*LIFE, "pass_a_boundary"),
    "are_taken": (*LIFE, "truncate", "pass_a_boundary"),
    "that_are_kept_are_written": (*LIFE, "pass_a_boundary"),
    "that_are_kept": (*LIFE, "pass_a_boundary"),
    "go_back_further": (*LIFE, "pass_a_boundary", "truncate"),
    "are_not_looked_for": (*LIFE, "truncate", "decode"),
    "of_another_position": (*LIFE, "truncate", "pass_a_boundary"),
    "resume": (*LIFE, "truncate", "pass_a_boundary"),
    "are_written_while": ("open", "run", "reserve_some", "lease", "commit_some"),
    "are_not_wanted_in_a_fork": ("open", "fork", "run"),
    "are_not_wanted": (*LIFE, "decode", "part"),
    "pieces": (*LIFE, "churn", "part", "lease"),
    "are_retained": (*LIFE, "tick"),
    "that_are_optional": (*LIFE, "decode"),
    "of_a_fork": (*LIFE, "fork"),
    "are_not_leased": (*LIFE, "lease"),
    "keep_what_saw": ("open", "speculate"),
    "": (*LIFE, "reserve_some", "decode", "truncate", "fork", "part", "churn", "foresee_a_prompt"),
}


def wrong(name, original, old, new, *properties, layouts=ALL):
    near = next(rules for first, rules in NEAR.items() if name.startswith(first))
    about = {"machine": HybridMachine, "layouts": layouts, "near": near}
    edited(f"states_{name}", original, old, new, *properties, **about)


# A state of other tokens
wrong(
    "keep_what_saw_rejected_drafts",
    states.find_resume,
    "if limit == seq.num_computed_tokens and not",
    "if not",
    "P31",
    "P34",
)
wrong(
    "resume_behind_a_cut",
    states.find_resume,
    "table.kept_at <= limit",
    "table.kept_at <= seq.num_computed_tokens",
    "P34",
)
wrong(
    "begin_with_what_a_former_holder_has_left",
    STATE_BLOCKS,
    "for block in state.read]",
    "for block in state.read or state.write]",
    "P35",
)
wrong(
    "are_taken_from_the_table_of_another_group",
    states._find_state,
    "count, table.number, encoded",
    "count, 0, encoded",
    "P31",
    "P34",
    "P18",
)
wrong(
    "of_another_position_are_read",
    states._find_state,
    "return (place + 1) * size",
    "return count * size",
    "P31",
    "P34",
)
wrong(
    "are_published_for_the_block_before",
    StateMove._advance,
    "self._publish(self._read, done)",
    "self._publish(self._read, max(size, done - size))",
    "P31",
    "P32",
    "P24",
)
wrong(
    "of_unknown_tokens_go_to_a_fork",
    share.share_computed,
    "find_resume(pool, parent, computed)",
    "computed, parent.state.read",
    "P31",
    "P34",
    "P13",
)
wrong(
    "go_back_with_the_tokens_alone", rewind._go_back, "resume(state, pieces)", "pass", "P31", "P2"
)
wrong(
    "pieces_are_read_in_another_order",
    STATE_BLOCKS,
    "for block in state.read]",
    "for block in reversed(state.read)]",
    "P31",
    layouts=PIECES,
)
wrong(
    "are_found_with_other_pieces_than_their_own",
    states.publish_state,
    "pool.attach(pieces,",
    "pool.attach(pieces[:1] + pieces[:0:-1],",
    "P31",
    layouts=PIECES,
)

# Found where no pass ended, or by halves
wrong(
    "are_published_inside_a_block",
    StateMove._advance,
    "is_end = done % size == 0 and",
    "is_end = done >= size and",
    "P31",
    "P32",
    "P34",
)
wrong(
    "of_unknown_tokens_are_published",
    StateMove._advance,
    "is_end and known >= done and",
    "is_end and",
    "P31",
    "P32",
    "P6",
    "P3",  # with items the contents of its block are one too few
)
wrong(
    "of_unknown_tokens_are_published_at_the_end",
    states.publish_kept,
    "table.kept_at > len(seq.packed)",
    "False",
    "P31",
    "P32",
    "P6",
)
wrong(
    "are_loaded_by_halves",
    load.join,
    "seq.state, load.blocks[-1], load.num_tokens)",
    "seq.state, load.blocks[-1][:1], load.num_tokens)",
    "P32",
    layouts=PIECES,
)
wrong(
    "of_a_load_are_found_at_any_token",
    load.join,
    "load.num_tokens % seq.state.block_size == 0",
    "load.num_tokens >= seq.state.block_size",
    "P31",
    "P32",
)
wrong(
    "lose_their_last_piece_first",
    StateTable.blocks,
    "for block in pieces]",
    "for block in reversed(pieces)]",
    "P32",
    layouts=PIECES,
)
wrong(
    "miss_a_piece",
    find_pieces,
    "range(1, count)",
    "range(1, count - 1)",
    "P32",
    "P18",
    layouts=PIECES,
)
wrong(
    "pieces_have_one_key",
    state_table.piece_keys,
    "[number.to_bytes",
    "[(1).to_bytes",
    "P32",
    layouts=PIECES,
)

# Written although others read
wrong("are_written_when_shared", state_table.is_writable, "pieces[0].ref_count == 1", "True", "P33")
wrong(
    "are_written_when_published",
    state_table.is_writable,
    " and pieces[0].node is None",
    "",
    "P33",
)
wrong(
    "are_written_where_they_are_just_published",
    StateMove._reserve,
    "is_writable(self._read) and not is_due",
    "is_writable(self._read)",
    "P33",
    "P36",
)
wrong(
    "are_written_under_a_fork",
    share.share_computed,
    "if mine.write is mine.read:",
    "if False:",
    "P33",
)
wrong(
    "are_written_while_they_are_sent_away",
    KVCacheManager.lease,
    'kind != "step"',
    'kind == ""',
    "P33",
)
wrong(
    "that_are_kept_are_written_when_shared",
    StateMove._advance,
    "if is_writable(self._kept):",
    "if self._kept:",
    "P33",
)

# Never found
wrong(
    "are_published_in_no_namespace",
    states.publish_state,
    'seq.namespace_key or b""',
    'b""',
    "P32",
    "P24",
)
wrong(
    "are_not_published_where_the_step_evicts_them",
    StateMove.publish,
    "num_tokens, taken)",
    "num_tokens)",
    "P24",
    layouts=("full and state",),
)
wrong(
    "hit_one_block_less",
    share.find_prefix,
    "content, longest // size, state.number",
    "content, max(0, longest // size - 1), state.number",
    "P24",
)
wrong(
    "hit_where_they_lack",
    share.find_prefix,
    "longest_servable(together, [*paths, path],",
    "longest_servable(tables, paths,",
    "P24",
    "P34",
)
wrong(
    "are_wanted_behind_the_last_token",
    StateTable.begin,
    "ends.add((num_tokens - 1) // size",
    "ends.add(num_tokens // size",
    "P24",
    "P34",
)
wrong(
    "are_not_wanted_where_the_next_look_up_ends",
    KVCacheManager.open,
    "if again and",
    "if False and",
    "P24",
    "P42",
)
wrong(
    "hit_what_a_draft_model_computes_again",
    share.find_prefix,
    "rest = max(0, longest - recompute)",
    "rest = longest",
    "P24",
)
wrong("are_dropped_and_leak", states.drop_kept, "pool.give_back(table.kept)", "pass", "P2", "P36")
wrong(
    "are_dropped_while_a_step_reads_them",
    states.drop_kept,
    "if table.kept is not table.read:",
    "if True:",
    "P2",
    "P18",
    "P31",
    "P33",
    "P35",
    "P36",
)
wrong(
    "are_not_wanted_where_prompts_part",
    share.share_cached,
    "[*seq.state.wanted, junction, *sight.branches]",
    "seq.state.wanted",
    "P24",
)
wrong(
    "are_not_wanted_where_the_caller_wants_them",
    share.share_cached,
    "[*seq.state.wanted, junction, *sight.branches]",
    "[junction]",
    "P24",
)
wrong(
    "are_not_wanted_on_the_grid",
    StateTable.is_wanted,
    "if every and",
    "if False and",
    "P24",
    "P34",
)
wrong(
    "are_passed_over_by_chunks",
    StateTable.next_stop,
    "self.wanted[place] if place < len(self.wanted) else NEVER",
    "NEVER",
    "P24",
    "P34",
)
wrong(
    "are_not_wanted_in_a_fork",
    share.share_computed,
    "mine.wanted, state",
    "[], state",
    "P24",
    "P34",
)
wrong(
    "that_are_kept_go_with_the_sequence",
    states.publish_kept,
    "not table.kept or",
    "True or",
    "P24",
)
wrong(
    "are_forgotten_until_their_tokens_are_known",
    StateMove.__init__,
    "if self._kept and is_known",
    "if False and is_known",
    "P24",
    "P34",
)
wrong(
    "move_while_steps_are_counted",
    StateTable.next_due,
    "if self.write and self.write is not self.read:",
    "if False:",
    "P34",
    "P31",
)

# Going back
wrong(
    "go_back_further_than_they_must",
    states.find_resume,
    "if cached > number:",
    "if cached:",
    "P34",
    "P24",
)
wrong(
    "are_not_looked_for_at_the_last_boundary",
    states._find_state,
    "range(len(path) - 1, -1, -1)",
    "range(len(path) - 2, -1, -1)",
    "P34",
)
wrong(
    "resume_where_a_window_is_gone",
    states.find_resume,
    "for its in seq.tables:",
    "for its in ():",
    "P34",
    "P19",
    layouts=WINDOW,
)
wrong(
    "that_are_bad_are_read_again",
    rewind._first_invalid,
    "first = min(first, length - 1)",
    "pass",
    "P31",
    "P9",
)

# Leaks
wrong("leak_when_a_load_joins", load.join, "states_until(seq, None) + ", "", "P2")
wrong(
    "leak_when_they_are_set_back",
    rewind._take_from_all,
    "released += without(seq.state, state)",
    "pass",
    "P2",
)
wrong("of_a_fork_are_not_held", share.share_computed, "= state[:]", "= []", "P2")
wrong(
    "are_freed_while_they_are_written",
    StateMove._release,
    "pieces is self._read or pieces is self._write or",
    "pieces is self._read or",
    "P2",
    "P33",
)
wrong(
    "are_not_leased",
    rewind.blocks_to_lease,
    "states + ",
    "",
    "P17",
)

# Blocks and what is said of them
wrong(
    "are_not_planned",
    share.planned,
    "num_new += state.group.num_blocks\n",
    "pass\n",
    "P13",
)
wrong(
    "are_planned_once",
    peaks.num_state_blocks,
    "(2 if is_inside or is_loaded else 1)",
    "1",
    "P13",
)
wrong("are_not_missing", StateTable.num_missing, "return 0 if", "return 0 if True or", "P13")
wrong(
    "that_are_optional_are_waited_for",
    forward._Change.take,
    "if optional and",
    "if False and",
    "P36",
)
wrong(
    "are_said_to_have_room",
    StateTable.room,
    "NEVER if self.write else num_computed",
    "NEVER",
    "P3",
    "P13",
    "P36",
    "P34",
)

# Events and retention
wrong("pieces_are_stored_events", ContentTree._note_stored, "not node.is_piece()", "True", "P21")
wrong("pieces_are_removed_events", lost_contents, " or node.is_piece()", "", "P21")
wrong("pieces_are_in_a_snapshot", EventLog.snapshot, "if node.is_piece():", "if False:", "P21")
wrong("are_not_retained", states.publish_state, "if seq.retention:", "if False:", "P15")
wrong(
    "are_retained_by_one_piece",
    states.publish_state,
    "for block in pieces if",
    "for block in pieces[:1] if",
    "P15",
    layouts=PIECES,
)
wrong(
    "are_retained_by_the_first_request_alone",
    share.kept_hits,
    "for block in seq.state.read]",
    "for block in ()]",
    "P15",
)
