"""Steps, halves of steps and single verbs, each of which forgets what the others rely on."""

import kvcore
from kvcore.verbs import rewind
from kvcore.verbs import step as forward
from tests.kvcore.sabotage.registry import unaided

MANAGER = kvcore.KVCacheManager
COUNTS = "P7", "P13", "P14", "P15"

unaided(
    "mixed_commit_lets_a_step_count_on",
    MANAGER.commit,
    "known.fast_decode_limit = 0",
    "pass",
    *COUNTS,
)
unaided(
    "mixed_append_lets_a_step_count_on",
    MANAGER.append,
    "seq.fast_decode_limit = 0",
    "pass",
    *COUNTS,
)
unaided(
    "mixed_extend_lets_a_step_count_on",
    MANAGER.extend,
    "seq.fast_decode_limit = 0",
    "pass",
    *COUNTS,
)
unaided(
    "mixed_expect_lets_a_step_count_on",
    MANAGER.expect,
    "seq.fast_decode_limit = 0",
    "pass",
    *COUNTS,
)
unaided(
    "mixed_cut_lets_a_step_count_on",
    rewind.cut_tables,
    "seq.next_boundary = seq.fast_decode_limit = 0",
    "seq.next_boundary = 0",
    *COUNTS,
)
unaided(
    "mixed_refused_half_leaves_tokens_expected",
    forward._undo_half,
    "seq.num_unknown_tokens = num_known",
    "pass",
    "P4",
)
unaided(
    "mixed_refused_half_leaves_tokens_known",
    forward._undo_half,
    "del seq.packed[len(seq.packed) - num_known :]",
    "pass",
    "P4",
)
unaided(
    "mixed_refused_half_leaves_tokens_computed",
    forward._undo_half,
    "seq.num_computed_tokens -= 1 - num_known",
    "pass",
    "P4",
)
unaided(
    "mixed_refused_step_leaves_tokens_known",
    forward.step,
    "seqs[place].packed.pop()",
    "pass",
    "P4",
)
unaided(
    "mixed_refused_step_leaves_tokens_computed",
    forward.step,
    "seqs[place].num_computed_tokens -= 1",
    "pass",
    "P4",
)
unaided(
    "mixed_refused_step_forgets_up_to_where_to_count",
    forward.step,
    "seqs[place].fast_decode_limit = limits[number]",
    "pass",
    "P4",
)
unaided(
    "mixed_half_is_read_where_none_was_sent",
    forward._half_decode,
    "0 < limit >= seq.num_computed_tokens and seq.num_unknown_tokens == 1",
    "0 < limit >= seq.num_computed_tokens",
    "P4",
    "P10",
    "P14",
    "P27",
)
unaided(
    "mixed_half_counts_past_its_block",
    forward._half_decode,
    "done < seq.fast_decode_limit and",
    "seq.fast_decode_limit and",
    "P6",
    "P9",
    *COUNTS,
)
