"""Allocators that are wrong in one place, each as some engine once was.

Most are kvcore with one of its planted bugs (`tests/kvcore/sabotage`). The others are plain lists
with a bug that kvcore's own machines need not see: one of another kind of allocator, or one in what
an adapter returns.
"""
# ruff: noqa: N801  # a broken allocator's name is what it does wrong

from kvcore import testing
from kvcore.testing import EVERYTHING, Promise
from kvcore.testing.ghost import marked
from tests.kvcore.engines.dictionary import DictionaryAllocator, DictionaryRequest
from tests.kvcore.engines.ours import OurAllocator, OurStates, OurWindows
from tests.kvcore.sabotage import SABOTAGES

BROKEN = {}

PLANTED = {
    testing.RequestMachine: {
        "manager_accepts_a_stale_handle": {"P3"},
        "manager_hands_out_the_null_block": {"P1"},
        "manager_uses_hits_that_it_does_not_hold": {"P1", "P2", "P7", "P17"},
        "manager_forgets_what_stands_before_a_block": {"P1", "P7"},
        "manager_leaks_the_half_full_block_on_close": {"P2", "P5"},
        "manager_leaks_the_hits_of_what_ends_before_it_reserves": {"P2", "P5"},
        "manager_publishes_what_is_only_reserved": {"P7", "P9"},
        "manager_publishes_by_the_length_of_the_prompt": {"P7", "P9"},
        "manager_hits_the_whole_prompt": {"P14"},
        "manager_never_hits": {"P24"},
        "manager_releases_the_head_first": {"P15"},
        "manager_grants_a_block_and_does_not_say_so": {"P16"},
        "manager_swaps_duplicates_and_does_not_say_so": {"P16"},
        "leases_end_with_their_sequence": {"P1", "P17"},
        "leases_end_twice": {"P1", "P2", "P15", "P17", "crash"},
        "leases_end_and_keep_what_they_held": {"P2", "P5"},
        "events_forget_removals": {"P21"},
        "events_remove_with_the_first_copy": {"P21"},
    },
    testing.BranchMachine: {
        "manager_cuts_tokens_and_keeps_their_identity": {"P7"},
        "manager_forks_a_half_full_block_without_a_copy": {"P7", "P13"},
        "unknown_tokens_are_never_found_once_told": {"P15", "P24"},
        "unknown_tokens_survive_a_cut": {"P3"},
    },
    testing.ChurnMachine: {"manager_finds_what_was_evicted": {"P7", "P9"}},
    testing.TenantMachine: {
        "manager_ignores_the_namespace": {"P7"},
        "manager_says_reset_and_does_nothing": {"P22"},
        "manager_publishes_old_content_after_a_reset": {"P22"},
        "items_are_left_to_their_token_ids": {"P7"},
    },
    testing.GroupMachine: {
        "window_is_one_block_short": {"P19"},
        "groups_hit_what_one_of_them_lacks": {"P19"},
        "window_goes_on_naming_what_it_gave_back": {"P1"},
        "window_hits_the_blocks_of_another_group": {"P1", "P7"},
        "groups_never_agree_on_a_prefix": {"P24"},
        "window_hits_by_place_and_not_by_content": {"P7"},
    },
}
"""Planted bugs of kvcore, the machine to see each, and by which properties it may show."""


def planted(name, base, promises):
    """Return an adapter of kvcore with a planted bug; it runs inside its context `planted`."""
    bug = SABOTAGES[name]
    body = {"promises": promises, "make_manager": staticmethod(bug.make), "planted": bug.planted}
    return type(name, (base,), body)


for machine, bugs in PLANTED.items():
    for name, properties in bugs.items():
        base = OurWindows if machine is testing.GroupMachine else OurAllocator
        # Without EVENTS: else nearly every bug would be seen as a wrong event, P21.
        withheld = set() if name.startswith("events") else {Promise.EVENTS}
        cls = planted(name, base, base.promises - withheld)
        BROKEN[name] = (cls, properties, [machine])


def broken(*properties, machine=None):
    """Register an allocator, by which properties its bug may show, and where if not everywhere."""

    def register(cls):
        BROKEN[cls.__name__] = (cls, set(properties), [machine] if machine else testing.MACHINES)
        return cls

    return register


@broken("P2", "P5", machine=testing.GroupMachine)
class what_a_window_has_left_is_lost(OurWindows):
    """Its blocks leave the table, and never come back."""

    def commit(self, request, num_tokens):
        (table,) = request.seq.tables[1:]
        before, blocks = table.num_null, list(table.blocks)
        super().commit(request, num_tokens)
        self.kv.pool.hold(blocks[before : table.num_null])


@broken("P1", machine=testing.GroupMachine)
class both_groups_get_one_block(OurWindows):
    """The layers of a window write over those of full attention."""

    def block_tables(self, request):
        full, window = request.seq.block_tables
        return full, [id_ and full[index] for index, id_ in enumerate(window)]


@broken("P31", machine=testing.GroupMachine)
class reads_the_state_of_its_neighbour(OurStates):
    """The slots of another row of the batch."""

    def states(self, request):
        reads, writes, held = super().states(request)
        others = [seq.state.read for seq in self.kv.sequences.values() if seq is not request.seq]
        other = next((state for state in others if state and reads), None)
        return reads if other is None else [b.block_id for b in other], writes, held


@broken("P31", "P33", machine=testing.GroupMachine)
class writes_over_a_state_that_others_find(OurStates):
    """A step updates its state in place, published or not."""

    def states(self, request):
        reads, writes, held = super().states(request)
        return reads, reads or writes, held


@broken("P31", machine=testing.GroupMachine)
class reads_the_first_piece_alone(OurStates):
    """The layers of the other pieces start from what was there."""

    def states(self, request):
        reads, writes, held = super().states(request)
        return reads[:1], writes, held


@broken("P31", machine=testing.GroupMachine)
class starts_from_zeros_after_a_hit(OurStates):
    """The prefix hits, and its state is forgotten."""

    def states(self, request):
        reads, writes, held = super().states(request)
        seq = request.seq
        is_hit = seq.num_computed_tokens == seq.num_cached_tokens
        return [] if is_hit else reads, writes, held


@broken("P24", machine=testing.GroupMachine)
class keeps_states_and_never_finds_one(OurStates):
    """The feature is on, and hits are 0 %, without a word."""

    def begin(self, tokens, tenant):
        request, _ = super().begin(tokens, tenant)
        self.kv.close(request.seq)
        request.seq = self.kv.open(tokens, namespace=request.space, skip_reading=True)
        return request, 0


@broken("P2", "P5", machine=testing.GroupMachine)
class the_state_before_is_lost(OurStates):
    """A step that writes its state elsewhere never gives the old one back."""

    def commit(self, request, num_tokens):
        before = list(request.seq.state.read)
        super().commit(request, num_tokens)
        if before and before != request.seq.state.read:
            self.kv.pool.hold([block for block in before if block.node is not None])


@broken("P7", machine=testing.TenantMachine)
class ignores_the_tenant(DictionaryAllocator):
    """The salt never gets into the key."""

    def key(self, request, index):
        return super().key(request, index)[1]


@broken("P13", "P14")
class takes_a_block_more_at_a_full_one(DictionaryAllocator):
    """Off by one, and only at exact multiples of a block."""

    def blocks(self, num_tokens):
        return num_tokens // self.block_size + 1


@broken("P13", "P14")
class takes_a_block_less_at_a_new_one(DictionaryAllocator):
    """The first token of a block is thought to fit into the block before."""

    def reserve(self, request, num_tokens):
        more = request.computed and (request.computed + num_tokens) % self.block_size == 1
        return super().reserve(request, num_tokens - bool(more and num_tokens))


@broken("P22", machine=testing.TenantMachine)
class refuses_a_reset_at_rest(DictionaryAllocator):
    """It waits for a quiet moment that it does not recognize."""

    def reset(self):
        return False


@broken("P1")
class counts_hits_as_free(DictionaryAllocator):
    """A hit that only this request holds is capacity still."""

    def num_free_blocks(self):
        cached = {b for b in self.content if self.refs[b] == 1}
        return len(self.free) + len(cached)


@broken("P13")
class refuses_the_last_block(DictionaryAllocator):
    """One block is free, one is needed, and it says no."""

    def has_room(self, missing):
        return missing == 0 or missing < len(self.free)


@broken("P4")
class takes_what_there_is_before_it_refuses(DictionaryAllocator):
    """A refused call has emptied the pool."""

    def has_room(self, missing):
        if missing > len(self.free):
            self.take(len(self.free))
            return False
        return True


class LooksUpOnly(DictionaryAllocator):
    """Looks up at `begin`, and holds at the first `reserve`, as several engines do."""

    promises = EVERYTHING - {Promise.HOLD}

    def begin_with(self, tokens, tenant, items):
        request = DictionaryRequest([*tokens], tenant, self.epoch, items=tuple(items))
        request.found = self.look_up(request)
        request.computed = len(request.found) * self.block_size
        return request, request.computed

    def reserve(self, request, num_tokens):
        self.check_open(request)
        self.check_count(num_tokens)
        if request.found:
            revived = sum(self.refs[b] == 0 for b in request.found)
            missing = self.blocks(request.computed + num_tokens) - len(request.found)
            if not self.has_room_for(missing, revived):
                return None
            self.hold(request.found)
            request.table, request.found = request.found, []
        return super().reserve(request, num_tokens)

    def fork(self, request):
        forked = super().fork(request)
        if forked is not None:
            forked[0].found = []
        return forked

    def has_room_for(self, missing, revived):
        return missing + revived <= len(self.free)


@broken("P4")
class admits_hits_without_counting_them(LooksUpOnly):
    """Hits that sit in the free list are counted as room as well, and held before the check."""

    def has_room_for(self, missing, revived):
        return missing <= len(self.free)


@broken("P12")
class takes_new_blocks_before_it_holds_its_hits(LooksUpOnly):
    """A request's own allocation evicts what it is about to use."""

    def reserve(self, request, num_tokens):
        found = [*request.found]
        missing = self.blocks(request.computed + num_tokens) - len(found)
        revived = sum(self.refs[b] == 0 for b in found)
        if not (request.is_open and found and self.has_room_for(missing, revived)):
            return super().reserve(request, num_tokens)
        new = self.take(missing)
        self.hold(found)
        request.table, request.found = found + new, []
        return new


@broken("P24")
class forgets_all_copies_with_the_first(DictionaryAllocator):
    """Two blocks hold one content; one is evicted, and neither is found any more."""

    def forget(self, block_id):
        key = self.content.get(block_id)
        for other in [b for b, held in self.content.items() if held == key]:
            super().forget(other)


@broken("P15")
class reuses_the_newest(DictionaryAllocator):
    """A stack, where a queue was promised."""

    def take(self, count):
        self.free.reverse()
        taken = super().take(count)
        self.free.reverse()
        return taken


@broken("P7", "P24", machine=testing.BranchMachine)
class names_blocks_by_tokens_long_gone(DictionaryAllocator):
    """The list of names only grows: after a cut, new content gets the old name."""

    def key(self, request, index):
        names = request.__dict__.setdefault("names", {})
        return names.setdefault(index, super().key(request, index))


@broken("P18", machine=testing.BranchMachine)
class forks_share_one_list(DictionaryAllocator):
    """The table of the child is the table of its parent: what one appends, the other has."""

    def fork(self, request):
        forked = super().fork(request)
        if forked is not None and not forked[1] and len(forked[0].table) == len(request.table):
            forked[0].table = request.table
        return forked


@broken("P3")
class accepts_a_negative_count(DictionaryAllocator):
    """Room for minus one token, thank you."""

    def check_count(self, number):
        pass


@broken("P3")
class guards_with_an_assert(DictionaryAllocator):
    """`python -O` removes it."""

    def check_open(self, request):
        if not request.is_open:
            raise AssertionError("this request has ended")


@broken("crash")
class raises_where_there_is_no_space(DictionaryAllocator):
    """It asks whether there is room, and takes no notice of the answer."""

    def has_room(self, missing):
        return True


@broken("P7", machine=testing.BranchMachine)
class publishes_expected_tokens_as_zeros(DictionaryAllocator):
    """What is computed is found, whether its tokens are known or not."""

    def settled(self, request):
        return request.computed

    def key(self, request, index):
        end = (index + 1) * self.block_size
        return request.tenant, tuple([*request.tokens, *[0] * request.unknown][:end])


@broken("P7", machine=testing.TenantMachine)
class sees_an_item_only_where_it_begins(DictionaryAllocator):
    """What follows in the next block has the key of plain placeholders, or of a shorter one."""

    def key(self, request, index):
        items = [(name, start, 1) for name, start, _ in request.items]
        marks = marked(request.tokens, items)
        return request.tenant, tuple(marks[: (index + 1) * self.block_size])


@broken("P21", machine=testing.TenantMachine)
class tells_nothing_of_a_reset(DictionaryAllocator):
    """Everything is forgotten, and the index outside is not told."""

    def reset(self):
        done = super().reset()
        self.told = set()
        return done


@broken("P16", machine=testing.RequestMachine)
class forgets_to_copy_a_half_full_block_out(DictionaryAllocator):
    """Only whole blocks go to the host."""

    def swap_out(self, request):
        return super().swap_out(request)[: request.computed // self.block_size]


@broken("P16", machine=testing.RequestMachine)
class copies_back_in_the_wrong_order(DictionaryAllocator):
    """The last of the host's blocks goes into the first of the new ones."""

    def swap_in(self, request):
        copies = super().swap_in(request)
        return copies and [(len(request.table) - 1 - index, to) for index, to in copies]


@broken("P7", machine=testing.RequestMachine)
class forgets_a_copy_back_from_the_host(DictionaryAllocator):
    """The first block is taken for a hit, and nothing is copied into it."""

    def swap_in(self, request):
        copies = super().swap_in(request)
        return copies and copies[1:]


@broken("P13", machine=testing.RequestMachine)
class stays_out_although_there_is_room(DictionaryAllocator):
    """It waits until twice the blocks are free."""

    def swap_in(self, request):
        if len(self.free) < 2 * self.blocks(request.computed):
            return None
        return super().swap_in(request)
