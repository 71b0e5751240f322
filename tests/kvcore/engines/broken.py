"""Allocators that are wrong in one place, each as some engine once was."""
# ruff: noqa: N801  # a broken allocator's name is what it does wrong

from kvcore import testing
from kvcore.testing import EVERYTHING, Promise
from kvcore.testing.ghost import marked
from tests.kvcore.engines.dictionary import (
    DictionaryAllocator,
    DictionaryLease,
    DictionaryRequest,
)

BROKEN = {}


def broken(*properties, machine=None):
    """Register an allocator, by which properties its bug may show, and where if not everywhere."""

    def register(cls):
        BROKEN[cls.__name__] = (cls, set(properties), [machine] if machine else testing.MACHINES)
        return cls

    return register


@broken("P3", "P4")
class accepts_a_second_free(DictionaryAllocator):
    """The block is in the free list twice, and will be handed out twice."""

    def finish(self, request):
        table = [*request.table]
        self.release(request.table)
        request.is_open = False
        request.table = table


@broken("P1", "P4")
class accepts_a_second_free_where_misuse_is_not_refused(accepts_a_second_free):
    """What a second finish does is seen even where no exception is promised."""

    promises = EVERYTHING - {Promise.STRICT}

    def release(self, table):
        for block_id in reversed(table):
            self.refs[block_id] -= 1
            if self.refs[block_id] <= 0:
                self.free.append(block_id)


@broken("P1")
class hands_out_the_null_block(DictionaryAllocator):
    """It was set aside, and got into the free list nevertheless."""

    def start(self, num_blocks, block_size):
        usable = super().start(num_blocks, block_size)
        self.free[-1] = 0
        return usable


@broken("P1")
class hands_out_a_sentinel(DictionaryAllocator):
    """The end of the free list is taken for a block."""

    def take(self, count):
        taken = super().take(count)
        return [-1 if block_id and not self.free else block_id for block_id in taken]


@broken("P7", "P9")
class keeps_the_name_of_an_evicted_block(DictionaryAllocator):
    """The block is somebody else's, and still found under its old content."""

    def forget(self, block_id):
        pass


@broken("P1", "P2", "P7", "P17")
class does_not_hold_what_it_hits(DictionaryAllocator):
    """Hits stay in the free list: the next request takes them, perhaps this one itself."""

    def hold(self, table):
        for block_id in table:
            self.refs[block_id] += 1


@broken("P7", machine=testing.TenantMachine)
class ignores_the_tenant(DictionaryAllocator):
    """The salt never gets into the key."""

    def key(self, request, index):
        return super().key(request, index)[1]


@broken("P1", "P7")
class ignores_what_stands_before_a_block(DictionaryAllocator):
    """The key is the block's own tokens, not its prefix."""

    def key(self, request, index):
        return request.tenant, super().key(request, index)[1][-self.block_size :]


@broken("P2", "P5")
class leaks_on_abort(DictionaryAllocator):
    """Blocks that were reserved and not yet computed are forgotten at the end."""

    def finish(self, request):
        self.check_open(request)
        self.release(request.table[: self.blocks(request.computed)])
        request.table, request.is_open = [], False


@broken("P2", "P5")
class leaks_between_look_up_and_use(DictionaryAllocator):
    """A request that ends before its first step never lets go of its hits."""

    def begin(self, tokens, tenant):
        request, cached = super().begin(tokens, tenant)
        request.used = False
        return request, cached

    def reserve(self, request, num_tokens):
        request.used = True
        return super().reserve(request, num_tokens)

    def finish(self, request):
        if request.is_open and not getattr(request, "used", True):
            request.table = []
        super().finish(request)


@broken("P7", "P9")
class publishes_what_is_only_reserved(DictionaryAllocator):
    """Others hit a block whose KV nobody has written yet."""

    def reserve(self, request, num_tokens):
        new = super().reserve(request, num_tokens)
        if new is not None:
            self.publish(request, min(request.computed + num_tokens, len(request.tokens)))
        return new


@broken("P14")
class hits_the_whole_prompt(DictionaryAllocator):
    """No token is left to compute, where the prompt fills its last block."""

    def look_up(self, request):
        request.tokens.append(0)
        found = super().look_up(request)
        request.tokens.pop()
        return found


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
class says_reset_and_does_nothing(DictionaryAllocator):
    """Old KV is hit after a change of weights."""

    def reset(self):
        return True


@broken("P22", machine=testing.TenantMachine)
class publishes_old_content_after_a_reset(DictionaryAllocator):
    """A request that lived through the reset goes on publishing."""

    def publish(self, request, num_tokens):
        request.epoch = self.epoch
        super().publish(request, num_tokens)


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
class never_hits(DictionaryAllocator):
    """The feature is on, and nothing is found: no test of isolation notices."""

    def look_up(self, request):
        return []


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


@broken("P15")
class releases_the_head_first(DictionaryAllocator):
    """The shared beginning goes before the tail that needs it."""

    def release(self, table):
        super().release(table[::-1])


@broken("P16")
class grants_a_block_and_does_not_say_so(DictionaryAllocator):
    """The runner's copy of the table is one block short."""

    def reserve(self, request, num_tokens):
        new = super().reserve(request, num_tokens)
        return new[1:] if new is not None and len(new) > 1 else new


@broken("P16")
class replaces_duplicates_in_silence(DictionaryAllocator):
    """A block of equal content takes the place of the request's own; the runner is not told."""

    def publish(self, request, num_tokens):
        for index in range(num_tokens // self.block_size):
            mine, key = request.table[index], self.key(request, index)
            for other in [b for b, held in self.content.items() if held == key and b != mine]:
                self.hold([other])
                self.release([mine])
                request.table[index] = other
                break
        super().publish(request, num_tokens)


@broken("P7", machine=testing.BranchMachine)
class cuts_tokens_and_keeps_their_identity(DictionaryAllocator):
    """A published block is overwritten in its place, and found as what it was."""

    def computed_after_cut(self, request, computed):
        return computed

    def publish(self, request, num_tokens):
        before = dict(self.content)
        super().publish(request, num_tokens)
        self.content.update(before)


@broken("P7", "P24", machine=testing.BranchMachine)
class names_blocks_by_tokens_long_gone(DictionaryAllocator):
    """The list of names only grows: after a cut, new content gets the old name."""

    def key(self, request, index):
        names = request.__dict__.setdefault("names", {})
        return names.setdefault(index, super().key(request, index))


@broken("P7", "P13", machine=testing.BranchMachine)
class forks_a_half_full_block_without_a_copy(DictionaryAllocator):
    """Two beams write into one block."""

    def fork(self, request):
        child = DictionaryAllocator.begin(self, [0], "")[0]
        child.tokens, child.tenant = [*request.tokens], request.tenant
        child.epoch, child.computed = request.epoch, request.computed
        child.table = request.table[: self.blocks(request.computed)]
        self.hold(child.table)
        return child, []


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


@broken("P7")
class publishes_expected_tokens_as_zeros(DictionaryAllocator):
    """What is computed is found, whether anybody was told its tokens or not."""

    def settled(self, request):
        return request.computed

    def key(self, request, index):
        end = (index + 1) * self.block_size
        return request.tenant, tuple([*request.tokens, *[0] * request.unknown][:end])


@broken("P24")
class never_finds_what_is_told_later(DictionaryAllocator):
    """A block is published when it is computed, or never."""

    def resolve(self, request, token):
        if not request.unknown:
            raise ValueError("nobody expects a token")
        request.tokens.append(token)
        request.unknown -= 1


@broken("P3", "P4")
class takes_a_token_that_was_cut_for_one_more(DictionaryAllocator):
    """The sampled token of a step that was taken back joins nevertheless."""

    def resolve(self, request, token):
        if request.unknown:
            super().resolve(request, token)
        else:
            self.append(request, token)


@broken("P7", "P9", machine=testing.RequestMachine)
class takes_a_part_for_the_whole(DictionaryAllocator):
    """What the step was to compute is published, however much of it was computed."""

    promises = EVERYTHING - {Promise.CHUNK}

    def settled(self, request):
        room = min(len(request.table) * self.block_size, len(request.tokens))
        return min(room, len(request.tokens) - request.unknown)


@broken("P7", machine=testing.TenantMachine)
class ignores_the_items(DictionaryAllocator):
    """The same placeholders, another picture."""

    def key(self, request, index):
        return request.tenant, tuple(request.tokens[: (index + 1) * self.block_size])


@broken("P7", machine=testing.TenantMachine)
class sees_an_item_only_where_it_begins(DictionaryAllocator):
    """What follows in the next block has the key of plain placeholders, or of a shorter one."""

    def key(self, request, index):
        items = [(name, start, 1) for name, start, _ in request.items]
        marks = marked(request.tokens, items)
        return request.tenant, tuple(marks[: (index + 1) * self.block_size])


@broken("P1", "P17", machine=testing.RequestMachine)
class a_lease_ends_with_its_request(DictionaryAllocator):
    """The transfer in flight reads what another request writes."""

    def lease(self, request):
        return DictionaryLease([])


@broken("P1", "P2", "P15", "P17", "crash", machine=testing.RequestMachine)
class a_second_end_of_a_lease_frees_again(DictionaryAllocator):
    """A late completion takes a block from somebody else."""

    def end_lease(self, lease):
        for block_id in lease.table:
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                self.free.append(block_id)


@broken("P2", "P5", machine=testing.RequestMachine)
class leaks_what_was_leased(DictionaryAllocator):
    """The end of a transfer is noted, and nothing is let go."""

    def end_lease(self, lease):
        pass


@broken("P21")
class tells_of_no_eviction(DictionaryAllocator):
    """The index outside believes in blocks that are long gone."""

    def take_events(self):
        return [event for event in super().take_events() if event[0] == "stored"]


@broken("P21")
class tells_that_a_copy_is_the_last(DictionaryAllocator):
    """One of two blocks of a content is evicted; the index forgets a content that is hit."""

    def forget(self, block_id):
        key = self.content.get(block_id)
        super().forget(block_id)
        if key in self.told and key in self.content.values():
            self.told.remove(key)
            self.lost = [*getattr(self, "lost", ()), ("removed", key)]

    def take_events(self):
        lost, self.lost = getattr(self, "lost", []), []
        kept = set(self.content.values())
        told = [event for event in super().take_events() if event not in lost]
        return [event for event in told if event[1] not in {key for _, key in lost} & kept] + lost


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
