"""Layer groups, broken."""

import kvcore
from kvcore.content_tree import ContentTree
from kvcore.tables.groups import first_kept_block, serves
from kvcore.verbs.rewind import _computed_before, computed_after_cut, computed_in_sight
from kvcore.verbs.share import longest_servable
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import in_manager, patched, sabotage

WINDOWS = ("window", "full and window", "three")
UNEVEN = ("six before four", "uneven three")


def give_back(manager, table, before):
    manager.pool.release(table.before(before))
    table.forget(manager.pool.blocks[0], before)


@sabotage(machines.ManagerMachine, "P19", "P7", rows=(77,), layouts=WINDOWS)
class window_is_released_on_scheduled_tokens(kvcore.KVCacheManager):
    def reserve(self, seq, num_tokens):
        new = super().reserve(seq, num_tokens)
        for table in seq.tables:
            scheduled = seq.num_computed_tokens + num_tokens
            kept = first_kept_block(table.group, table.block_size, scheduled)
            unseen = min(kept, table.num_published)
            self.pool.release(table.before(unseen))
            table.forget(self.pool.blocks[0], unseen)
        return new


@sabotage(machines.ManagerMachine, "P19", "P15", "P16", layouts=WINDOWS)
class window_is_one_block_short(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        super().commit(seq, num_tokens)
        for table in seq.tables:
            if num_tokens and len(table.blocks) > table.num_null + 2:
                self.pool.release(table.before(table.num_null + 1))
                table.forget(self.pool.blocks[0], table.num_null + 1)


@sabotage(machines.ManagerMachine, "P2", "P18", "P9", "P3", rows=(28,), layouts=WINDOWS)
class window_goes_on_naming_what_it_gave_back(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        before = [(list(table.blocks), table.num_null) for table in seq.tables]
        super().commit(seq, num_tokens)
        for table, (blocks, num_null) in zip(seq.tables, before, strict=True):
            for place in range(num_null, table.num_null):
                table.blocks[place] = blocks[place]
                table.block_ids[place] = blocks[place].block_id
            table.num_null = num_null


@in_manager("P7", "P24", "P18", "P2", "P3", "P42", rows=(31,), layouts=WINDOWS)
class window_hits_what_it_gave_back(kvcore.BlockPool):
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        self.known = {}

    def path(self, namespace_key, packed, max_blocks, group, items=None):
        found = super().path(namespace_key, packed, max_blocks, group, items)
        for place, block in enumerate(found):
            end = (place + 1) * self.block_sizes[group] * 4
            key = (group, namespace_key, packed[:end], items and tuple(items[: place + 1]))
            found[place] = block or self.known.get(key)
            self.known[key] = found[place]
        return found


@in_manager("P7", "P24", "P18", "P1", "P2", "P3", "P10", rows=(66,), layouts=("full and window",))
class window_hits_the_blocks_of_another_group(kvcore.BlockPool):
    def path(self, namespace_key, packed, max_blocks, group, items=None):
        return super().path(namespace_key, packed, max_blocks, 0, items)


@in_manager("P7", "P24", "P18", "P10", rows=(75,), layouts=("window", "narrow window"))
class window_hits_by_place_and_not_by_content(kvcore.BlockPool):
    def path(self, namespace_key, packed, max_blocks, group, items=None):
        level, found = list(self.trees[group].roots()), []
        for _ in range(max_blocks):
            level = [
                child
                for node in level
                for child in (node.children or {0: node.last_child}).values()
                if child is not None
            ]
            there = [node.last_copy for node in level if node.last_copy is not None]
            if not there:
                break
            found.append(there[-1])
        return found


@in_manager("P24", rows=(96,), layouts=("full and window", "three", "chunked and full"))
class groups_never_agree_on_a_prefix(kvcore.BlockPool):
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        return super().match(namespace_key, packed, max_blocks - group, group, items)

    def path(self, namespace_key, packed, max_blocks, group, items=None):
        return super().path(namespace_key, packed, max_blocks - group, group, items)


@patched(longest_servable, "P24", rows=(96,), layouts=("full and window", "three"))
def groups_drop_a_block_on_every_pass(tables, paths, longest, step):
    return max(0, longest_servable(tables, paths, longest, step) - step * (len(tables) - 1))


@patched(longest_servable, "P24", "P7", "P19", "P14", "P18", "P9", rows=(74,), layouts=WINDOWS[1:])
def groups_hit_what_one_of_them_lacks(tables, paths, longest, step):
    return longest_servable(tables[:1], paths[:1], longest, step)


@in_manager("P24", "P6", "P10", rows=(44,), layouts=("full and wide blocks",))
class groups_cut_prompts_into_blocks_of_one_size(kvcore.BlockPool):
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        size = min(block_sizes)
        self.trees = tuple(ContentTree(size, group, log) for group in range(len(block_sizes)))


@patched(serves, "P29", layouts=("full and wide blocks", *UNEVEN))
def groups_keep_what_no_hit_can_use(group, place, common_size):
    return True


@patched(serves, "P15", "P6", "P24", layouts=("full and wide blocks", *UNEVEN))
def groups_keep_the_last_block_of_a_hit_alone(group, place, common_size):
    """Of a wide window there are several."""
    end = (place + 1) * group.block_size
    return isinstance(group, kvcore.FullAttention) or end % common_size == 0


@patched(computed_after_cut, "P7", "P14", "P15", "P16", "P9", "P10", layouts=UNEVEN)
def groups_are_asked_once_where_a_cut_may_stand(seq, num_tokens):
    """What one group gives up may leave another inside a block that others read."""
    computed = min(num_tokens, seq.num_computed_tokens)
    if computed == seq.num_computed_tokens:
        return computed
    for table in seq.tables:
        full, rest = divmod(computed, table.block_size)
        if rest and (table.blocks[full].node is not None or table.blocks[full].ref_count > 1):
            computed -= rest
    return computed_in_sight(seq, computed)


@patched(_computed_before, "P7", "P9", "P10", "P14", "P15", "P16", layouts=("full", *UNEVEN))
def groups_keep_in_part_what_another_reads(seq, sound, start):
    """What is sound of a block stays, even if others hold the block or hit it."""
    return computed_in_sight(seq, start)
