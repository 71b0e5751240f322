"""How many blocks a request needs: arithmetic over layer groups.

Decides: what a request may come to hold at once. A group of full attention holds every token's
block; a group of windows or chunks those that the next tokens write or can see, and always the last
full one, as `kvcore` keeps it. Groups reach their peaks at different moments, so a sum of them is
an upper bound that a sequence alone never exceeds.

Invariants: more tokens or longer chunks never need fewer blocks, so chunks of one token need the
least.

Does not know: which blocks are free, who else runs.
"""

from collections.abc import Sequence

import kvcore


def peak_blocks(group: kvcore.LayerGroup, num_tokens: int, chunk: int = 1) -> int:
    """The most blocks that a group holds while `num_tokens` tokens are computed. O(1).

    Args:
        group: its block size filled in, as a manager's `groups` are.
        num_tokens: in all, at least 1.
        chunk: the most tokens computed in one step.
    """
    size = group.block_size
    whole = -(-num_tokens // size)
    if isinstance(group, kvcore.FullAttention):
        return whole
    # Of a chunk it sees at most as much as of a window of its size.
    sight = group.window if isinstance(group, kvcore.SlidingWindow) else group.chunk
    in_sight = -(-(sight + chunk - 2) // size) + 1
    with_last_full = -(-(chunk - 1) // size) + 2
    return min(whole, max(in_sight, with_last_full))


def needed_blocks(groups: Sequence[kvcore.LayerGroup], num_tokens: int, chunk: int = 1) -> int:
    """The most blocks that a sequence alone holds while it is computed. O(num_groups).

    Arguments as `peak_blocks`. A pool with that many free blocks is enough for it.
    """
    return sum([peak_blocks(group, num_tokens, chunk) for group in groups])


def missing_blocks(sequence: kvcore.KVSequence, num_tokens: int, chunk: int = 1) -> int:
    """Blocks that an open sequence still takes until it has computed `num_tokens`. O(num_groups).

    What a window group will give back on the way is taken again first, so blocks in hand count.
    """
    missing = 0
    for table in sequence.tables:
        room = -(-num_tokens // table.block_size) - len(table.block_ids)
        held = len(table.block_ids) - table.num_null
        missing += max(0, min(room, peak_blocks(table.group, num_tokens, chunk) - held))
    return missing
