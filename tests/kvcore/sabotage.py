"""Allocators with one bug each, every bug one that an engine has shipped.

The numbers after the names are rows of the corpus of real bugs (properties of P1 to P26 beside
them): a machine that does not catch them proves nothing.
"""

from dataclasses import dataclass, replace
from typing import Any

import kvcore
from kvcore import prefix
from kvcore.content_tree import ContentTree
from kvcore.groups import first_kept_block
from kvcore.items import cut_items
from kvcore.prefix import advance_to, distrust_from
from kvcore.retention import FOREVER, RetentionShelf
from tests.kvcore import machines

SABOTAGES = {}


@dataclass(frozen=True)
class Sabotage:
    """One planted bug: what it breaks, who must notice, and on which layer groups it shows."""

    make: Any
    machine: type
    properties: frozenset
    layouts: tuple


def sabotage(machine, *properties, layouts=("full",)):
    """Register a queue, pool or manager class (or factory) as a planted bug."""

    def register(make):
        SABOTAGES[make.__name__] = Sabotage(make, machine, frozenset(properties), layouts)
        return make

    return register


def managed(pool_class):
    """Return a factory of managers over a sabotaged pool."""

    def make(num_blocks, block_size, **options):
        manager = kvcore.KVCacheManager(num_blocks, block_size, **options)
        sizes = [group.block_size for group in manager.groups]
        manager.pool = pool_class(num_blocks, *sizes, log=manager.events)
        manager.leases = kvcore.LeaseBook(manager.pool)
        return manager

    make.__name__ = pool_class.__name__
    return make


def in_manager(*properties, layouts=("full",)):
    """Register a pool class as a planted bug that the manager's machine must notice."""

    def register(pool_class):
        sabotage(machines.ManagerMachine, *properties, layouts=layouts)(managed(pool_class))
        return pool_class

    return register


# The free queue.


@sabotage(machines.FreeQueueMachine, "P1")
class queue_counts_wrong_after_removal(kvcore.FreeQueue):  # vLLM #14283, PR #24228
    def remove(self, block):
        super().remove(block)
        self.length += 1


@sabotage(machines.FreeQueueMachine, "P1", "P3")
class queue_hands_out_its_sentinel(kvcore.FreeQueue):  # vLLM #42571
    def pop_front(self):
        block = self._head.next_free
        if block is self._tail:
            return block
        return super().pop_front()


@sabotage(machines.FreeQueueMachine, "P3", "P1")
class queue_takes_a_block_twice(kvcore.FreeQueue):  # vLLM #42571
    def push_back(self, block):
        block.prev_free = block.next_free = None
        super().push_back(block)


@sabotage(machines.FreeQueueMachine, "P15")
class queue_reuses_the_newest(kvcore.FreeQueue):
    def push_back(self, block):
        super().push_front(block)


@sabotage(machines.FreeQueueMachine, "P1")
class queue_forgets_the_way_back(kvcore.FreeQueue):
    def remove(self, block):
        after, before = block.next_free, block.prev_free
        super().remove(block)
        if before is not self._head:
            after.prev_free = self._head


# The pool, driven directly.


@sabotage(machines.PoolMachine, "P3")
class pool_accepts_a_negative_count(kvcore.BlockPool):  # vllm-ascend #14283
    def take(self, num_blocks):
        return super().take(max(0, num_blocks))


@sabotage(machines.PoolMachine, "P3", "P2")
class pool_accepts_a_double_free(kvcore.BlockPool):  # vLLM PR #3347, #42571
    def release(self, blocks):
        super().release([block for block in blocks if block.ref_count])


@sabotage(machines.PoolMachine, "P3", "P1", "P15")
class pool_frees_a_block_named_twice_twice(kvcore.BlockPool):  # vLLM #42571
    def release(self, blocks):
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count <= 0 and block.next_free is None:
                block.next_free = block
                self.empty_blocks.append(block)


@sabotage(machines.PoolMachine, "P4")
class pool_undoes_half_of_a_refused_release(kvcore.BlockPool):  # vLLM PR #24228
    def release(self, blocks):
        self._check_own(blocks)
        for block in blocks:
            if block.ref_count == 0:
                raise kvcore.DoubleFreeError("too late")
            super().release([block])


@sabotage(machines.PoolMachine, "P4")
class pool_takes_what_there_is_before_it_refuses(kvcore.BlockPool):  # vLLM PR #11565
    def take(self, num_blocks):
        if num_blocks > self.num_free_blocks:
            super().take(self.num_free_blocks)
            raise kvcore.OutOfBlocksError(num_blocks, 0)
        return super().take(num_blocks)


@sabotage(machines.PoolMachine, "P3")
class pool_frees_the_null_block(kvcore.BlockPool):  # UCM PR #1053, vLLM R11
    def _check_own(self, blocks):
        super()._check_own([block for block in blocks if block is not self.blocks[0]])

    def release(self, blocks):
        self._check_own(blocks)
        super().release([block for block in blocks if block is not self.blocks[0]])


@sabotage(machines.PoolMachine, "P1", "P2", "P15")
class pool_revives_without_leaving_the_queue(kvcore.BlockPool):  # vLLM R2
    def hold(self, blocks):
        free = [block for block in dict.fromkeys(blocks) if block.ref_count == 0]
        super().hold(blocks)
        for block in free:
            self.free_queue.push_back(block)


@sabotage(machines.PoolMachine, "P6", "P7", "P11")
class pool_forgets_all_copies_with_the_first(kvcore.BlockPool):  # vLLM R5
    def take(self, num_blocks):
        nodes = [block.node for block in self.free_blocks()][:num_blocks]
        taken = super().take(num_blocks)
        for node in nodes:
            while node is not None and node.first_copy is not None:
                self.trees[0].detach(node.first_copy)
        return taken


class NoTree(ContentTree):
    def detach(self, block):
        pass


@sabotage(machines.PoolMachine, "P6", "P7", "P11")
class pool_hands_out_blocks_with_their_content(kvcore.BlockPool):  # nano-vllm #163, kvcached #362
    def take(self, num_blocks):
        trees, self.trees = self.trees, (NoTree(1),)
        try:
            return super().take(num_blocks)
        finally:
            self.trees = trees


# The manager over a sabotaged pool.


@in_manager("P1", "P18", "P15")
class manager_hands_out_the_null_block(kvcore.BlockPool):  # vLLM PR #19330
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        self.empty_blocks.append(self.blocks[0])


@in_manager("P7", "P10", "P6")
class manager_finds_what_was_evicted(kvcore.BlockPool):  # vLLM PR #4764
    def take(self, num_blocks):
        stale = [(block, block.node) for block in self.free_blocks()][:num_blocks]
        taken = super().take(num_blocks)
        for block, node in stale:
            if node is not None:
                block.node, node.first_copy, node.last_copy = node, block, block
        return taken


@in_manager("P2", "P7", "P1", "P13")
class manager_uses_hits_that_it_does_not_hold(kvcore.BlockPool):  # vLLM PR #10507
    def hold(self, blocks):
        pass


@in_manager("P7", "P10")
class manager_ignores_the_namespace(kvcore.BlockPool):  # vLLM #3264, #44701
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        for root in self.trees[0].roots():
            hits = super().match(root.tokens, packed, max_blocks, group, items)
            if hits:
                return hits
        return []


class CollidingTree(ContentTree):
    """Compares one token of a block instead of all."""

    @staticmethod
    def _child(node, tokens):
        for child in [*(node.children or {}).values(), node.last_child]:
            if child is not None and child.tokens[:4] == tokens[:4]:
                return child
        return None


@in_manager("P7", "P10")
class manager_trusts_a_digest_that_collides(kvcore.BlockPool):  # vllm-mlx PR #444
    def __init__(self, num_blocks, *block_sizes, log=None):
        super().__init__(num_blocks, *block_sizes, log=log)
        self.trees = (CollidingTree(*block_sizes),)


@in_manager("P7", "P10")
class manager_forgets_what_stands_before_a_block(kvcore.BlockPool):  # vLLM PR #12621's shape
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        hits = []
        size = self.block_sizes[0] * 4
        for start in range(0, max_blocks * size, size):
            tokens = packed[start : start + size]
            same = [n for n in self.trees[0].nodes() if n.tokens == tokens and n.first_copy]
            if not same:
                break
            hits.append(same[-1].first_copy)
        return hits


@in_manager("P14")
class manager_hits_the_whole_prompt(kvcore.BlockPool):  # nano-vllm #144
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        whole = len(packed) // (self.block_sizes[0] * 4) if items is None else max_blocks
        return super().match(namespace_key, packed, whole, group, items)


@in_manager("P24")
class manager_never_hits(kvcore.BlockPool):  # LMCache #2979: a silent 0 %
    def match(self, namespace_key, packed, max_blocks, group=0, items=None):
        return []


@in_manager("P15")
class manager_releases_the_head_first(kvcore.BlockPool):  # vLLM #42948
    def release(self, blocks):
        super().release(blocks[::-1])


# The manager itself.


@sabotage(machines.ManagerMachine, "P2", "P5", "P15")
class manager_leaks_the_last_block_on_close(kvcore.KVCacheManager):  # TRT-LLM PR #15018
    def close(self, seq):
        self._check_open(seq)
        for table in seq.tables:
            del table.blocks[-1:]
        super().close(seq)


@sabotage(machines.ManagerMachine, "P9", "P6", "P7")
class manager_publishes_what_is_only_reserved(kvcore.KVCacheManager):  # TGI PR #2489, vLLM R10
    def reserve(self, seq, num_tokens):
        new = super().reserve(seq, num_tokens)
        if seq.namespace_key is not None:
            computed = seq.num_computed_tokens
            room = len(seq.tables[0].blocks) * self.block_size
            seq.num_computed_tokens = min(len(seq.packed), room)
            advance_to(self.pool, seq, seq.num_computed_tokens)
            seq.num_computed_tokens = computed
        return new


def keep_the_cut_block(manager, seq, num_tokens):
    """Cut a sequence and go on writing in the block that the cut goes through."""
    for table in seq.tables:
        left = table.cut(-(-num_tokens // table.block_size))
        manager.pool.release(left[::-1])
    del seq.packed[num_tokens:]
    seq.items = cut_items(seq.items, num_tokens)
    seq.num_computed_tokens = min(seq.num_computed_tokens, num_tokens)
    seq.num_cached_tokens = min(seq.num_cached_tokens, num_tokens)


@sabotage(machines.ManagerMachine, "P7", "P10", "P9", "P6", "P16")
class manager_cuts_tokens_and_keeps_their_identity(kvcore.KVCacheManager):  # vLLM #49377
    def truncate(self, seq, num_tokens):
        if seq.is_open and 0 < num_tokens <= seq.num_tokens:
            keep_the_cut_block(self, seq, num_tokens)
        else:
            super().truncate(seq, num_tokens)


@sabotage(machines.ManagerMachine, "P7", "P14", "P16")
class manager_overwrites_what_a_fork_shares(kvcore.KVCacheManager):
    def truncate(self, seq, num_tokens):
        if seq.is_open and seq.namespace_key is None and 0 < num_tokens <= seq.num_tokens:
            keep_the_cut_block(self, seq, num_tokens)
        else:
            super().truncate(seq, num_tokens)


@sabotage(machines.ManagerMachine, "P10")
class manager_names_blocks_by_tokens_long_gone(kvcore.KVCacheManager):  # vLLM #49377
    def truncate(self, seq, num_tokens):
        chain, seq.chain = seq.chain, None
        super().truncate(seq, num_tokens)
        seq.chain = chain


@sabotage(machines.ManagerMachine, "P13", "P4")
class manager_counts_hits_as_free_room(kvcore.KVCacheManager):  # vLLM PR #6849
    def plan(self, tokens, **options):
        return replace(super().plan(tokens, **options), num_revived_blocks=0)


@sabotage(machines.ManagerMachine, "P13")
class manager_says_there_is_room_for_one_more(kvcore.KVCacheManager):  # nano-vllm PR #66
    def can_reserve(self, seq, num_tokens):
        missing = seq.tables[0].num_missing(self._room_wanted(seq, num_tokens))
        return missing <= self.pool.num_free_blocks + 1


@sabotage(machines.ManagerMachine, "P16")
class manager_grants_a_block_and_does_not_say_so(kvcore.KVCacheManager):  # vllm-rbln PR #662
    def reserve(self, seq, num_tokens):
        (new,) = super().reserve(seq, num_tokens)
        return (new[1:] if num_tokens == 1 else new,)


@sabotage(machines.ManagerMachine, "P3")
class manager_accepts_a_stale_handle(kvcore.KVCacheManager):  # vLLM #37076, R4
    def _check_open(self, seq):
        if seq.owner is self and not seq.is_open:
            return
        super()._check_open(seq)

    def close(self, seq):
        if seq.is_open:
            super().close(seq)


@sabotage(machines.ManagerMachine, "P18", "P7", "P15", "P16")
class manager_forks_a_half_full_block_without_a_copy(kvcore.KVCacheManager):
    def fork(self, seq):
        child, orders = super().fork(seq)
        for order in orders:
            child.tables[0].block_ids[-1] = order.src
        return child, ()


@sabotage(machines.ManagerMachine, "P22", "P6", "P9")
class manager_publishes_old_content_after_a_reset(kvcore.KVCacheManager):  # SkyRL PR #1824
    def reset(self, *, canonical_order=False):
        keys = {number: seq.namespace_key for number, seq in self.sequences.items()}
        report = super().reset(canonical_order=canonical_order)
        for number, key in keys.items():
            self.sequences[number].namespace_key = key
        return report


@sabotage(machines.ManagerMachine, "P22")
class manager_says_reset_and_does_nothing(kvcore.KVCacheManager):  # vLLM #9744
    def reset(self, *, canonical_order=False):
        return kvcore.ResetReport(0, 0, 0)


# Leases and loads.


class ForgetfulBook(kvcore.LeaseBook):
    """Counts one lease a block, as a flag would."""

    def begin(self, blocks, kind, owner, max_steps):
        leased = {b.block_id for lease in self.active.values() for b in lease.blocks}
        fresh = [block for block in blocks if block.block_id not in leased]
        return super().begin(fresh, kind, owner, max_steps)


class CarelessBook(kvcore.LeaseBook):
    """Ends a lease as often as it is told to."""

    def end(self, lease_id):
        lease = self.active.get(lease_id)
        ended = super().end(lease_id)
        if lease is not None:
            lease.is_active = True
            self.active[lease_id] = lease
            lease.blocks = [block for block in lease.blocks if block.ref_count]
        return ended


class EndlessBook(kvcore.LeaseBook):
    """Knows no deadline."""

    def expire(self):
        return ()


def with_book(book_class):
    def make(num_blocks, block_size, **options):
        manager = kvcore.KVCacheManager(num_blocks, block_size, **options)
        manager.leases = book_class(manager.pool)
        return manager

    return make


for book, name in (
    (ForgetfulBook, "leases_are_a_flag"),  # vLLM #46240, #43226
    (CarelessBook, "leases_end_twice"),  # vLLM #46240
    (EndlessBook, "leases_never_expire"),  # vLLM #46283
):
    maker = with_book(book)
    maker.__name__ = name
    sabotage(machines.ManagerMachine, "P17", "P20", "P15", "P2", "P3")(maker)


@sabotage(machines.ManagerMachine, "P17", "P2", "P20")
class leases_hold_nothing(kvcore.KVCacheManager):  # vLLM PR #45357, PR #32255
    def lease(self, seq, kind="step", **options):
        lease = super().lease(seq, kind, **options)
        self.pool.release(lease.blocks)
        return lease


@sabotage(machines.ManagerMachine, "P7", "P9", "P14", "P16")
class loads_fail_for_one_sequence_only(kvcore.KVCacheManager):  # vLLM PR #19330
    def fail_load(self, seq, num_tokens):
        if not 0 <= num_tokens <= seq.num_computed_tokens:
            return super().fail_load(seq, num_tokens)
        return distrust_from(self.pool, seq, num_tokens, [seq])


@sabotage(machines.ManagerMachine, "P7", "P9", "P14")
class loads_fail_without_the_copies_of_forks(kvcore.KVCacheManager):
    def fail_load(self, seq, num_tokens):
        if not 0 <= num_tokens <= seq.num_computed_tokens:
            return super().fail_load(seq, num_tokens)
        numbers = {block.block_id for block in prefix._doubtful(seq, num_tokens)}
        for number in sorted(numbers):
            self.pool.forget(self.pool.blocks[number])
        hit = [other for other in self.sequences.values() if prefix._has_any(other, numbers)]
        for other in hit:
            prefix._compute_again(self.pool, other, numbers)
        return tuple(hit)


# Retention.


def with_shelf(shelf_class):
    def make(num_blocks, block_size, **options):
        manager = kvcore.KVCacheManager(num_blocks, block_size, **options)
        manager.pool.shelf = shelf_class()
        return manager

    return make


class DeafShelf(RetentionShelf):
    def keep(self, block, wishes):
        pass


class ClingingShelf(RetentionShelf):
    def expire(self, now):
        return super().expire(now) if now == FOREVER else []


class ForgetfulShelf(RetentionShelf):
    """Remembers the strongest wish alone, so what is below it may outlive its prefix."""

    def keep(self, block, wishes):
        super().keep(block, wishes)
        if block.block_id in self.kept:
            self.kept[block.block_id] = self.kept[block.block_id][:1]


for shelf, name in (
    (DeafShelf, "retention_is_ignored"),
    (ClingingShelf, "retention_never_ends"),
    (ForgetfulShelf, "retention_forgets_the_weaker_wish"),
):
    maker = with_shelf(shelf)
    maker.__name__ = name
    sabotage(machines.ManagerMachine, "P15")(maker)


@in_manager("P15")
class retention_keeps_a_range_without_its_prefix(kvcore.BlockPool):
    def keep(self, block, wishes):
        if block.node.parent.parent is not None:
            super().keep(block, wishes)


# Identity of items, and events.


@sabotage(machines.ManagerMachine, "P7", "P10", "P24", "P21")
class items_are_ignored(kvcore.KVCacheManager):  # vLLM PR #17378, SGLang #2151
    def _new_sequence(self, packed, key, items):
        return super()._new_sequence(packed, key, ())


@sabotage(machines.ManagerMachine, "P7", "P10", "P24", "P21")
class items_are_known_by_content_alone(kvcore.KVCacheManager):  # vLLM PR #36708, #56655
    def _described(self, tokens, namespace, items):
        packed, key, checked = super()._described(tokens, namespace, items)
        return packed, key, tuple(replace(item, mask=None) for item in checked)


class SilentLog(kvcore.EventLog):
    def removed(self, node, group):
        pass


class NamespaceBlindLog(kvcore.EventLog):
    def _name(self, node, group):
        if node.parent is None:
            node.name = kvcore.digest(b"", "xxh3-128")
        else:
            self._name(node.parent, group)
        return super()._name(node, group)


def with_log(log_class):
    def make(num_blocks, block_size, **options):
        manager = kvcore.KVCacheManager(num_blocks, block_size, **options)
        if manager.events is not None:
            manager.events = log_class([g.block_size for g in manager.groups], "xxh3-128")
            manager.pool._log = manager.events
            for tree in manager.pool.trees:
                tree._log = manager.events
        return manager

    return make


for log, name in (
    (SilentLog, "events_forget_removals"),
    (NamespaceBlindLog, "events_ignore_the_namespace"),  # SGLang #24568, llm-d-kv-cache #47
):
    maker = with_log(log)
    maker.__name__ = name
    sabotage(machines.ManagerMachine, "P21")(maker)


@in_manager("P21")
class events_remove_with_the_first_copy(kvcore.BlockPool):  # vLLM R5
    def take(self, num_blocks):
        for block in list(self.free_blocks())[:num_blocks]:
            if self._log is not None and block.node is not None and len(block.node.copies()) > 1:
                self._log.removed(block.node, block.group)
        return super().take(num_blocks)


# Layer groups.

WINDOWS = ("window", "full and window", "three")


@sabotage(machines.ManagerMachine, "P19", "P7", layouts=WINDOWS)
class window_is_released_on_scheduled_tokens(kvcore.KVCacheManager):  # vLLM PR #47728
    def reserve(self, seq, num_tokens):
        new = super().reserve(seq, num_tokens)
        for table in seq.tables:
            scheduled = seq.num_computed_tokens + num_tokens
            kept = first_kept_block(table.group, table.block_size, scheduled)
            self.pool.release(table.forget(self.pool.blocks[0], min(kept, table.num_published)))
        return new


@sabotage(machines.ManagerMachine, "P19", "P15", "P16", layouts=WINDOWS)
class window_is_one_block_short(kvcore.KVCacheManager):
    def commit(self, seq, num_tokens):
        super().commit(seq, num_tokens)
        for table in seq.tables:
            if num_tokens and len(table.blocks) > table.num_null + 2:
                self.pool.release(table.forget(self.pool.blocks[0], table.num_null + 1))


@in_manager("P7", "P24", "P18", "P1", "P2", layouts=("full and window",))
class window_hits_the_blocks_of_another_group(kvcore.BlockPool):  # vLLM #55600
    def path(self, namespace_key, packed, max_blocks, group, items=None):
        return super().path(namespace_key, packed, max_blocks, 0, items)


@in_manager("P24", layouts=("full and window", "three", "chunked and full"))
class groups_never_agree_on_a_prefix(kvcore.BlockPool):  # vLLM #51771: a silent 0 %
    def path(self, namespace_key, packed, max_blocks, group, items=None):
        return super().path(namespace_key, packed, max_blocks - group, group, items)
