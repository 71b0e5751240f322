"""Plans, room and lengths, broken."""

from dataclasses import replace

import kvcore
from tests.kvcore import machines
from tests.kvcore.sabotage.groups import WINDOWS
from tests.kvcore.sabotage.registry import sabotage


@sabotage(machines.ManagerMachine, "P13", rows=(49,))
class plan_counts_hits_as_free_room(kvcore.KVCacheManager):
    def plan(self, tokens, **options):
        return replace(super().plan(tokens, **options), num_revived_blocks=0)


@sabotage(machines.ManagerMachine, "P13", "P24", "P20", rows=(50,))
class plan_remembers_its_first_answer(kvcore.KVCacheManager):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.answers = {}

    def plan(self, tokens, *, namespace=kvcore.DEFAULT_NAMESPACE, items=(), **options):
        answer = super().plan(tokens, namespace=namespace, items=items, **options)
        about = (tuple(tokens), namespace, tuple(items), *options.values())
        return self.answers.setdefault(about, answer)


@sabotage(machines.ManagerMachine, "P13", rows=(53,))
class plan_knows_of_no_hits(kvcore.KVCacheManager):
    def plan(self, tokens, **options):
        plan = super().plan(tokens, **options)
        needed = -(-len(tokens) // self.block_size)
        return replace(plan, num_cached_tokens=0, num_new_blocks=needed)


@sabotage(machines.ManagerMachine, "P13", rows=(54,))
class plan_counts_a_hit_too_many(kvcore.KVCacheManager):
    def plan(self, tokens, **options):
        plan = super().plan(tokens, **options)
        hits = -(-plan.num_cached_tokens // self.block_size) * self.block_size
        more = hits + self.block_size if hits else 0
        return replace(plan, num_cached_tokens=min(len(tokens), more))


@sabotage(machines.ManagerMachine, "P13", rows=(61,))
class plan_sizes_without_the_last_token(kvcore.KVCacheManager):
    def plan(self, tokens, **options):
        plan = super().plan(tokens, **options)
        blocks = -(-(len(tokens) - 1) // self.block_size)
        return replace(plan, num_new_blocks=blocks - plan.num_cached_tokens // self.block_size)


@sabotage(machines.ManagerMachine, "P13", rows=(99,))
class plan_looks_at_the_first_block_only(kvcore.KVCacheManager):
    def plan(self, tokens, **options):
        plan = super().plan(tokens, **options)
        return replace(plan, num_new_blocks=min(1, plan.num_new_blocks))


@sabotage(machines.ManagerMachine, "P13", layouts=WINDOWS)
class plan_in_chunks_counts_all_at_once(kvcore.KVCacheManager):
    def plan(self, tokens, *, chunk=None, **options):
        return super().plan(tokens, **options)


@sabotage(machines.ManagerMachine, "P13", layouts=WINDOWS)
class plan_in_chunks_takes_again_what_others_hold(kvcore.KVCacheManager):
    """A block that a window has passed is not free while another sequence holds it."""

    def plan(self, tokens, *, chunk=None, **options):
        plan = super().plan(tokens, chunk=chunk, **options)
        if chunk is None or not plan.num_cached_tokens:
            return plan
        alone = kvcore.peak_blocks(len(tokens), self.block_size, groups=self.groups, chunk=chunk)
        return replace(plan, num_new_blocks=alone - plan.num_revived_blocks)


@sabotage(machines.ManagerMachine, "P4", "P2", rows=(14,))
class plan_holds_what_it_finds(kvcore.KVCacheManager):
    def plan(self, tokens, **options):
        plan = super().plan(tokens, **options)
        for blocks in plan.found:
            self.pool.hold(blocks)
        return plan


@sabotage(machines.ManagerMachine, "P13", rows=(59,))
class manager_says_there_is_room_for_one_more(kvcore.KVCacheManager):
    def can_reserve(self, seq, num_tokens):
        missing = seq.tables[0].num_missing(self._room_wanted(seq, num_tokens))
        return missing <= self.pool.num_free_blocks + 1


@sabotage(machines.ManagerMachine, "P14", rows=(60,))
class manager_makes_room_past_the_longest_sequence(kvcore.KVCacheManager):
    def _room_wanted(self, seq, num_tokens):
        longest, self.max_model_len = self.max_model_len, None
        try:
            return super()._room_wanted(seq, num_tokens)
        finally:
            self.max_model_len = longest


@sabotage(machines.ManagerMachine, "P4", rows=(48,))
class manager_keeps_a_hold_when_it_refuses(kvcore.KVCacheManager):
    def reserve(self, seq, num_tokens):
        self._room_wanted(seq, num_tokens)
        touched = [block for table in seq.tables for block in table.blocks[table.num_null :]]
        self.pool.hold(touched)
        new = super().reserve(seq, num_tokens)
        self.pool.release(touched)
        return new


@sabotage(machines.ManagerMachine, "P4", rows=(17, 55))
class manager_grows_half_a_step_before_it_refuses(kvcore.KVCacheManager):
    def reserve_step(self, seqs, num_tokens):
        for seq, count in zip(seqs, num_tokens, strict=True):
            self._room_wanted(seq, count)
        grown = [self.reserve(seq, count) for seq, count in zip(seqs, num_tokens, strict=True)]
        return tuple(
            kvcore.Growth(index, group, ids)
            for index, tables in enumerate(grown)
            for group, ids in enumerate(tables)
            if ids
        )
