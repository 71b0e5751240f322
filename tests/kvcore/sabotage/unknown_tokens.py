"""Tokens that are told later, broken."""

import kvcore
from kvcore.sequence import check_all_known, check_expected
from kvcore.tables.groups import first_kept_block
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import patched, sabotage

WINDOWS = ("window", "full and window", "six and four")


@sabotage(machines.ManagerMachine, "P27", "P9", rows=(68, 72))
class unknown_tokens_are_published_as_zeros(kvcore.KVCacheManager):
    """What is computed is visible, whether its tokens are known or not."""

    def commit(self, seq, num_tokens):
        super().commit(seq, num_tokens)
        unknown, length = seq.num_unknown_tokens, len(seq.packed)
        if unknown:
            seq.packed.extend([0] * unknown)
            seq.num_unknown_tokens = 0
            super().commit(seq, 0)
            del seq.packed[length:]
            seq.num_unknown_tokens = unknown


@sabotage(machines.ManagerMachine, "P27", "P9", "P24")
class unknown_tokens_are_never_found_once_told(kvcore.KVCacheManager):
    def resolve(self, seq, tokens, *, start=None):
        self._check_open(seq)
        check_expected(seq, len(tokens), start)
        seq.packed.extend(tokens)
        seq.num_unknown_tokens -= len(tokens)


@sabotage(machines.ManagerMachine, "P27", "P14")
class unknown_tokens_survive_a_cut(kvcore.KVCacheManager):
    def truncate(self, seq, num_tokens):
        unknown = seq.num_unknown_tokens
        super().truncate(seq, num_tokens)
        seq.num_unknown_tokens = unknown


@sabotage(machines.ManagerMachine, "P27", "P7", "P9", "P10", "P13", "P14", "P15")
class unknown_tokens_are_guessed_for_a_fork(kvcore.KVCacheManager):
    """The child gets what its parent has computed, as if it were told."""

    def fork(self, seq):
        unknown = seq.num_unknown_tokens
        seq.packed.extend([0] * unknown)
        seq.num_unknown_tokens = 0
        try:
            return super().fork(seq)
        finally:
            del seq.packed[len(seq.packed) - unknown :]
            seq.num_unknown_tokens = unknown


@sabotage(machines.ManagerMachine, "P27")
class unknown_tokens_are_told_to_the_wrong_place(kvcore.KVCacheManager):
    """What was sampled before a cut is taken for what is expected after it."""

    def resolve(self, seq, tokens, *, start=None):
        super().resolve(seq, tokens)

    def resolve_step(self, seqs, tokens, *, num_resolved=None, starts=None):
        super().resolve_step(seqs, tokens, num_resolved=num_resolved)


@patched(check_all_known, "P27", "P10", "P9")
def unknown_tokens_are_overtaken_by_known_ones(seq):
    pass


@sabotage(machines.ManagerMachine, "P27", "P4")
class unknown_tokens_are_told_to_half_a_step(kvcore.KVCacheManager):
    """The first sequences of a step have heard theirs when a later one is refused."""

    def resolve_step(self, seqs, tokens, *, num_resolved=None, starts=None):
        done = 0
        for index, seq in enumerate(seqs):
            count = 1 if num_resolved is None else num_resolved[index]
            start = None if starts is None else starts[index]
            self.resolve(seq, tokens[done : done + count], start=start)
            done += count


@sabotage(machines.ManagerMachine, "P19", rows=(77,), layouts=WINDOWS)
class unknown_tokens_slide_a_window(kvcore.KVCacheManager):
    """A window gives back what drafts do not see, before it is known whether they stay."""

    def commit(self, seq, num_tokens):
        super().commit(seq, num_tokens)
        for table in seq.tables:
            kept = first_kept_block(table.group, table.block_size, seq.num_computed_tokens)
            if kept > table.num_null:
                self.pool.release(table.before(kept))
                table.forget(self.pool.null, kept)
