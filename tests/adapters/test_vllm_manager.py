"""What vLLM's scheduler asks of kvcore's manager is right in memory, whatever happens."""

import random
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.adapters.vllm import blocks as vllm_blocks
from kvcore.adapters.vllm import events, lookahead, plugin, prompts, states
from kvcore.adapters.vllm import manager as vllm_manager
from kvcore.adapters.vllm.manager import Manager, Manager022
from kvcore.adapters.vllm.states import StateManager
from tests.adapters.vllm_world import (
    CHUNKS,
    DENSE,
    PIECES,
    PLAIN,
    STATES,
    WINDOWS,
    Request,
    World,
    manager_of,
)
from tests.adapters.vllm_world import settings as settings_of

GROUPS = {"plain": PLAIN, "windows": WINDOWS, "chunks": CHUNKS}
HYBRIDS = {"states": STATES, "pieces": PIECES, "dense": DENSE}


def live(dice, groups, kind=Manager, num_steps=60):
    """Let a random crowd of requests live over few blocks, and check what they read."""
    num_blocks = dice.choice([24, 30, 60])
    has_states = isinstance(groups[-1], kvcore.RecurrentState)
    drafting = not (has_states or kind is Manager022)
    recompute = dice.choice([0, 0, 1, 3]) if drafting else 0
    lookahead = dice.choice([0, 1, 3]) if drafting and not recompute else 0
    manager = manager_of(
        groups, num_blocks, kind, event_hashes="sha256", keep_fresh=True, recompute=recompute,
        lookahead=lookahead, enable_caching=not has_states or dice.random() < 0.9,
    )  # fmt: skip
    ahead = dice.random() < 0.5
    world = World(
        manager, ahead=ahead, budget=dice.choice([5, 16, 40]),
        defers=kind is not Manager022 and dice.random() < 0.3,
        num_drafts=0 if ahead or has_states else dice.choice([0, 2, 5]),
        looks_twice=dice.random() < 0.3, recompute=recompute, lookahead=lookahead,
    )  # fmt: skip
    manager.kv.events.max_hashes = dice.choice([2, 20, 10_000])
    told = set()
    heads = [[dice.randrange(2) for _ in range(dice.randrange(1, 18))] for _ in range(3)]
    for number in range(num_steps):
        if number < num_steps // 2 and dice.random() < 0.6:
            tail = [dice.randrange(3) for _ in range(dice.randrange(7, 12))]
            world.add(
                Request(
                    f"r{number}", dice.choice(heads) + tail, max_tokens=dice.randrange(1, 9),
                    salt=dice.choice([None, "a"]), lora=dice.choice([None, "a"]),
                    image=dice.choice([None, None, "cat", "dog"]),
                    limit=dice.choice([*[None] * 8, 0, 4, 9]),
                )
            )  # fmt: skip
        crowd = world.waiting + world.running
        if crowd and dice.random() < 0.1:
            world.abort(dice.choice(crowd))
        if dice.random() < 0.05:
            world.reset(preempts=dice.random() < 0.3)
        world.step()
        kvcore.check(manager.kv)
        if dice.random() < 0.3:
            fold(manager.take_events(), told)
    for _ in range(2_000):
        if not (world.waiting or world.running or world.flying):
            break
        world.step()
    else:
        pytest.fail(f"{len(world.waiting)} wait and {len(world.running)} run for ever")
    assert manager.kv.num_free_blocks == manager.kv.num_usable_blocks
    assert not manager.kv.leases.counts()
    assert not manager.kv.sequences
    fold(manager.take_events(), told)
    assert told == kvcore.fold((), manager.kv.snapshot())
    return world


def fold(events, told):
    """Bring an index up to date as one does that hears what vLLM says: stored, removed, cleared."""
    for event in events:
        if isinstance(event, kvcore.BlocksStored):
            told.update((event.group, name) for name in event.block_hashes)
        elif isinstance(event, kvcore.BlocksRemoved):
            told.difference_update((event.group, name) for name in event.block_hashes)
        else:
            told.clear()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@settings(max_examples=30)
@given(dice=st.randoms(use_true_random=False), kind=st.sampled_from([Manager, Manager022]))
def test_every_request_reads_what_its_own_tokens_have_written(groups, dice, kind):
    live(dice, groups, kind)


@pytest.mark.parametrize("groups", HYBRIDS.values(), ids=HYBRIDS)
@settings(max_examples=30)
@given(dice=st.randoms(use_true_random=False))
def test_every_step_begins_with_the_state_of_the_requests_own_tokens(groups, dice):
    live(dice, groups)


def test_prefixes_are_hit_and_requests_give_way_in_such_lives():
    worlds = [live(random.Random(seed), PLAIN) for seed in range(30)]
    assert sum(world.num_hits for world in worlds) > 200
    assert sum(world.num_deferred for world in worlds) > 5
    assert sum(world.num_accepted for world in worlds) > 100


class SaltIgnored(Manager):
    """One tenant's salt is as good as another's."""

    def _open(self, request, *, skip_reading):
        salt, request.cache_salt = request.cache_salt, None
        try:
            return super()._open(request, skip_reading=skip_reading)
        finally:
            request.cache_salt = salt


class ImagesIgnored(Manager):
    """What stands under an image's placeholders does not count."""

    def _open(self, request, *, skip_reading):
        features, request.mm_features = request.mm_features, []
        try:
            return super()._open(request, skip_reading=skip_reading)
        finally:
            request.mm_features = features


class NothingHeld(Manager):
    """What this step reads for the last time is handed out in this step."""

    def _publish(self, seq, request, total):
        self._settle(seq, request, min(total, request.num_tokens))


class TableAfterwards(Manager):
    """A step is sent with the tables of the next one."""

    def get_blocks(self, request_id):
        self._admitted.clear()
        return super().get_blocks(request_id)


class LossIgnored(Manager):
    """Where events are lost, what is told afterwards is told as if they were not."""

    def take_events(self):
        return [event for event in self.kv.events.take() if type(event) is not kvcore.EventsLost]


class EndsEarly(Manager):
    """What only a step in flight reads is handed out when its request ends."""

    def pop_blocks_for_free(self, request):
        for _, lease in self._flying.pop(request.request_id, ()):
            lease.end()
        return super().pop_blocks_for_free(request)


class CountsAhead(Manager):
    """A step more than there is counts as computed."""

    def _settle(self, seq, request, stop):
        super()._settle(seq, request, min(stop + self.kv.block_size, request.num_tokens))


class StateNotHeld(StateManager):
    """A state that this step copies is handed out in this step."""

    def _hold(self, seq, request, settled, total, passed):
        pass


class StateBeforeItsColumn(StateManager):
    """The column of a state is that of the tokens before a step."""

    def _appended_states(self, state, computed, total):
        new = super()._appended_states(state, computed, total)
        return [column[::-1] for column in new]


class StatePiecesSwapped(StateManager):
    """A group of layers has another group's piece of a state that is hit."""

    def _blocks_of(self, seq, total=0):
        ids = super()._blocks_of(seq, total).get_block_ids()
        return vllm_blocks.Blocks([*ids[:-2], ids[-1], ids[-2]])


class DraftKvHit(Manager):
    """A draft model finds KV that was made from other tokens."""

    def __init__(self, settings):
        super().__init__(replace(settings, recompute=0))


class DraftKvOfAnyNextToken(Manager):
    """A draft model finds KV that was made from another next token."""

    def __init__(self, settings):
        super().__init__(replace(settings, lookahead=0))


class PrefixOfAnyFirstToken(Manager):
    """Where a draft model has read ahead, the first tokens of a prompt do not count."""

    def _prompt_of(self, request):
        prompt = super()._prompt_of(request)
        salt = prompt.namespace and prompt.namespace.salt[4 * self._ahead :]
        return replace(prompt, namespace=prompt.namespace and kvcore.Namespace(salt=salt))


PLANTED = {
    DraftKvOfAnyNextToken: PLAIN, PrefixOfAnyFirstToken: PLAIN,
    StateNotHeld: DENSE, StateBeforeItsColumn: STATES,
    StatePiecesSwapped: PIECES, DraftKvHit: PLAIN,
    SaltIgnored: PLAIN, ImagesIgnored: PLAIN, NothingHeld: WINDOWS, TableAfterwards: CHUNKS,
    CountsAhead: PLAIN, LossIgnored: PLAIN, EndsEarly: WINDOWS,
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_a_planted_bug_is_found(kind):
    for seed in range(200):
        try:
            live(random.Random(seed), PLANTED[kind], kind)
        except (AssertionError, kvcore.KVCoreError, IndexError):
            return
    pytest.fail("all was well")


def hits_within(groups, limit, **about):
    """Return how much a prompt of 17 tokens hits of its twin, within a limit."""
    manager = manager_of(groups)
    world = World(manager, budget=100)
    world.add(Request("a", range(17), **about))
    for _ in range(6):
        world.step()
    hits = manager.get_computed_blocks(Request("b", range(17), **about), limit)[1]
    manager.new_step_starts()
    assert manager.kv.num_free_blocks == manager.kv.num_usable_blocks
    return hits


@pytest.mark.parametrize(
    ("groups", "about", "wanted"),
    [(PLAIN, {}, [0, 0, 4, 8, 16]), (WINDOWS, {}, [0, 0, 4, 8, 16]),
     (STATES, {}, [0, 0, 0, 0, 16]), (PLAIN, {"image": "cat"}, [0, 0, 0, 0, 16])],
    ids=["plain", "windows", "states", "images"],
)  # fmt: skip
def test_no_more_is_hit_than_is_wanted(groups, about, wanted):
    assert [hits_within(groups, limit, **about) for limit in (0, 3, 4, 11, 16)] == wanted
    assert hits_within(groups, None, **about) == 16


@pytest.mark.parametrize("groups", [PLAIN, WINDOWS], ids=["plain", "windows"])
def test_a_block_is_known_by_vllms_hash_while_it_can_be_hit(groups):
    """As vLLM asks that keeps outputs beside the tokens, by its own hashes of two tokens each."""
    manager = manager_of(groups, num_blocks=12, hash_block_size=2)
    pool, group = manager.block_pool, manager.coordinator.full_attention_group_id
    request = Request("a", range(9))
    request.block_hashes = [bytes([place]) for place in range(4)]
    assert pool.get_cached_block(b"\1", [group]) is None
    assert manager.allocate_slots(request, 9, 0, manager.get_computed_blocks(request)[0])
    ids = manager.get_block_ids("a")[group]
    found = [pool.get_cached_block(name, [group]) for name in request.block_hashes]
    assert [one and one[0].block_id for one in found] == [None, ids[0], None, ids[1]]
    manager.free(request)
    assert pool.get_cached_block(b"\3", [group])
    other = Request("b", range(50, 59))
    other.block_hashes = [bytes([place]) for place in range(10, 14)]
    while pool.get_cached_block(b"\1", [group]):  # until others have taken its block
        other.all_token_ids = [token + 9 for token in other.all_token_ids]
        manager.new_step_starts()
        assert manager.allocate_slots(other, 9, 0, manager.get_computed_blocks(other)[0])
        manager.free(other)
    assert pool.get_cached_block(b"\x0b", [group])
    assert manager.reset_prefix_cache()
    assert pool.get_cached_block(b"\x0b", [group]) is None


def test_a_prompt_is_hit_in_the_step_that_computes_it():
    manager = manager_of()
    world = World(manager, budget=100)
    for name in "ab":
        world.add(Request(name, range(9)))
    world.step()
    assert manager.get_block_ids("a") == ([1, 2, 3],)
    assert manager.get_block_ids("b") == ([1, 2, 4],)


def test_a_state_is_hit_in_the_step_after_the_one_that_writes_it():
    manager = manager_of(STATES)
    first, second = Request("a", range(9)), Request("b", range(9))
    manager.new_step_starts()
    blocks, *_ = manager.get_computed_blocks(first)
    assert manager.allocate_slots(first, 8, 0, blocks)
    blocks, hits, _ = manager.get_computed_blocks(second)
    assert hits == 8
    assert manager.allocate_slots(second, 1, hits, blocks) is None
    manager.new_step_starts()
    blocks, hits, _ = manager.get_computed_blocks(second)
    assert hits == 8
    appended = manager.allocate_slots(second, 1, hits, blocks)
    (kv, (none, read, write)) = manager.get_block_ids("b")
    assert appended.get_block_ids() == ([kv[2]], [write])
    assert (none, read) == (0, manager.get_block_ids("a")[1][-1])


def test_a_state_is_kept_for_the_next_turn_until_what_can_be_hit_would_be_evicted():
    manager = manager_of(STATES, num_blocks=11)
    first = Request("a", range(3), max_tokens=20)
    assert manager.allocate_slots(first, 3)
    first.status.name = "RUNNING"
    for length in range(4, 11):  # two blocks of KV behind the prompt, and a state after each
        first.num_computed_tokens = length - 1
        first.all_token_ids.append(length)
        assert manager.allocate_slots(first, 1)
    seq = manager._running["a"]
    assert (seq.state.kept_at, manager.kv.num_free_blocks) == (8, 5)
    cached = Request("b", range(50, 59))
    assert manager.allocate_slots(cached, 9)
    assert (seq.state.kept_at, manager.kv.num_free_blocks) == (8, 1)
    manager.free(cached)  # two blocks of it can be hit, and three are empty
    assert manager.allocate_slots(Request("c", range(70, 82)), 12)
    assert seq.state.kept_at == 0
    assert manager.kv.num_evicted_blocks == 0


@pytest.mark.parametrize(("caching", "columns"), [(True, [0, 0, 1]), (False, [1])])
def test_without_prefix_caching_a_state_stays_in_one_column(caching, columns):
    manager = manager_of(STATES, enable_caching=caching)
    request = Request("a", range(12), max_tokens=9)
    assert manager.allocate_slots(request, 12)
    assert manager.get_block_ids("a")[1] == columns
    request.num_computed_tokens, request.status.name = 12, "RUNNING"
    request.all_token_ids.append(1)
    assert manager.allocate_slots(request, 1).get_block_ids()[1] == [5] * caching


def test_what_a_look_up_found_is_let_go_where_the_request_is_not_admitted():
    manager = manager_of()
    world = World(manager, budget=100)
    world.add(Request("a", range(9), max_tokens=1))
    world.step()
    assert manager.get_computed_blocks(Request("b", range(9)))[1] == 8
    assert manager.kv.num_free_blocks == manager.kv.num_usable_blocks - 2
    manager.new_step_starts()
    assert manager.kv.num_free_blocks == manager.kv.num_usable_blocks


def test_blocks_of_a_request_that_ends_in_flight_are_deferred():
    manager = manager_of()
    one = Request("a", range(9))
    assert manager.allocate_slots(one, 9) is not None
    blocks = manager.pop_blocks_for_free(one)
    assert manager.get_block_ids("a") == ([],)
    assert manager.kv.num_free_blocks == manager.kv.num_usable_blocks - 3
    manager.block_pool.free_blocks(reversed(blocks))
    assert manager.kv.num_free_blocks == manager.kv.num_usable_blocks


def test_a_watermark_stays_free_beside_others_and_for_who_is_alone_it_does_not():
    manager = manager_of(num_blocks=5, watermark_blocks=2)
    assert manager.allocate_slots(Request("a", range(12)), 12) is None
    assert manager.allocate_slots(Request("a", range(12)), 12, has_scheduled_reqs=False)


def test_nothing_is_hit_without_caching_nor_by_who_skips_it():
    blind = manager_of(enable_caching=False)
    seeing = manager_of()
    for manager in (blind, seeing):
        first = Request("a", range(9))
        assert manager.allocate_slots(first, 9) is not None
        second = Request("b", range(9))
        second.skip_reading_prefix_cache = manager is seeing
        assert manager.get_computed_blocks(second)[1] == 0
        assert manager.allocate_slots(second, 9) is not None
        assert manager.get_block_ids("b") == ([4, 5, 6],)
    assert seeing.estimate_cached_tokens(first), blind.estimate_cached_tokens(first) == (8, 0)


def test_a_next_turn_with_an_image_is_another_content_than_with_another_image():
    manager = manager_of()
    found = []
    for image in ("cat", "dog"):
        one = Request(f"{image}{len(found)}", range(6), max_tokens=0)
        one.num_computed_tokens = manager.get_computed_blocks(one)[1]
        manager.allocate_slots(one, 6 - one.num_computed_tokens, one.num_computed_tokens)
        one.num_computed_tokens = 6
        one.all_token_ids += range(8)
        later = Request("", range(7), image=image).mm_features
        later[0].mm_position.offset = 7
        one.mm_features += later
        manager.allocate_slots(one, 8)
        manager.free(one)
        whole = Request("whole", [*range(6), *range(8), 5])
        whole.mm_features = later
        found.append(manager.get_computed_blocks(whole)[1])
        manager.new_step_starts()
    assert found == [12, 12]
    whole.mm_features = Request("", range(7), image="bird").mm_features
    whole.mm_features[0].mm_position.offset = 7
    assert manager.get_computed_blocks(Request("again", range(6)))[1] == 4
    manager._prompts.clear()
    assert manager.get_computed_blocks(whole)[1] == 4


@pytest.mark.parametrize("kinds", GROUPS.values(), ids=GROUPS)
@given(begins=st.lists(st.integers(0, 5), min_size=1, max_size=4), found=st.booleans())
def test_blocks_are_common_that_all_running_requests_have(kinds, begins, found):
    manager = manager_of(kinds, 60, Manager022)
    for number, begin in enumerate(begins):
        one = Request(f"r{number}", [*range(4 * begin), *range(50 + number, 60)])
        blocks, hits = manager.get_computed_blocks(one)
        assert manager.allocate_slots(one, one.num_tokens - hits, hits, blocks) is not None
    if found:
        manager.get_computed_blocks(Request("waits", range(30)))  # holds what it hits
    tables = [manager.get_block_ids(f"r{number}") for number in range(len(begins))]
    told = manager.get_num_common_prefix_blocks("r0")
    for sees, count, group in zip(kinds, told, zip(*tables, strict=True), strict=True):
        leading = sum(1 for _ in takewhile(lambda ids: len({*ids}) == 1, zip(*group, strict=False)))
        assert count <= leading
        assert count == leading or type(sees) is not kvcore.FullAttention


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("wanted", [0, 8])
def test_a_request_is_admitted_with_what_was_found_or_with_nothing_of_it(groups, wanted):
    manager = manager_of(groups)
    first = Request("a", range(30))
    assert manager.allocate_slots(first, 30) is not None
    manager.free(first)
    second = Request("b", range(30))
    blocks, hits, _ = manager.get_computed_blocks(second)
    assert hits > 8
    if wanted:
        with pytest.raises(kvcore.InvalidArgumentError, match=f"wanted the {hits} .* got 8"):
            manager.allocate_slots(second, 30 - wanted, wanted, blocks)
        assert manager.kv.num_free_blocks == manager.kv.num_usable_blocks
    else:
        assert manager.allocate_slots(second, 30, 0, blocks) is not None
        held = [set(table.block_ids) for table in manager._running["b"].tables]
        assert manager._running["b"].num_cached_tokens == 0
        for ids, mine in zip(blocks.get_block_ids(), held, strict=True):
            assert not set(ids) & mine - {0}


def test_a_connectors_tokens_are_refused():
    with pytest.raises(kvcore.InvalidArgumentError, match="num_external_computed_tokens=4"):
        manager_of().allocate_slots(Request("a", range(9)), 5, num_external_computed_tokens=4)


def test_nothing_of_vllm_is_imported_but_by_the_engine():
    for module in (vllm_blocks, events, lookahead, vllm_manager, plugin, prompts, states):
        assert "vllm" not in vars(module)


class Stats:
    """Counts look-ups as vLLM's does."""

    def __init__(self):
        self.reset, self.seen = False, []

    def record(self, num_tokens, num_hits, preempted):
        self.seen.append((num_tokens, num_hits, preempted))


class Heard:
    """Notes what a collector hears."""

    def __init__(self):
        self.of = {"evicted": [], "allocated": [], "accessed": []}
        self.num_resets = 0

    def on_block_evicted(self, block):
        self.of["evicted"].append(block.block_id)

    def on_block_allocated(self, block):
        self.of["allocated"].append(block.block_id)

    def on_block_accessed(self, block):
        self.of["accessed"].append(block.block_id)

    def reset(self):
        self.num_resets += 1


def test_look_ups_are_counted_when_a_request_is_admitted_and_handed_out_once():
    manager = manager_of(new_stats=Stats)
    first, second, third = (Request(name, range(9)) for name in "abc")
    second.num_preemptions, third.skip_reading_prefix_cache = 1, True
    assert manager.log_stats
    for one, hits in ((first, 0), (second, 8), (third, 0)):
        manager.record_prefix_cache_stats(one, hits)
    counted = manager.make_prefix_cache_stats()
    assert counted.seen == [(9, 0, False), (9, 8, True)]
    manager.record_prefix_cache_stats(first, 4)
    assert counted.seen == [(9, 0, False), (9, 8, True)]
    assert manager.make_prefix_cache_stats().seen == [(9, 4, False)]
    silent = manager_of()
    silent.record_prefix_cache_stats(first, 0)
    assert not silent.log_stats
    assert silent.make_prefix_cache_stats() is None


def test_022_counts_each_look_up_when_it_is_made():
    manager = manager_of(kind=Manager022, new_stats=Stats)
    one = Request("a", range(9))
    assert manager.get_computed_blocks(one)[1] == 0
    assert manager.make_prefix_cache_stats().seen == [(9, 0, False)]


def test_where_nothing_is_cached_no_prefix_is_looked_up():
    manager = manager_of(enable_caching=False)
    assert not manager.prefix_cache_lookup_enabled(Request("a", range(9)))
    assert manager.allocate_slots(one := Request("a", range(9)), 9)
    assert manager.estimate_cached_tokens(one) == 0


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_reset_is_refused_while_a_request_holds_blocks_and_changes_nothing(groups):
    heard = Heard()
    manager = manager_of(groups, new_stats=Stats, collector=heard)
    one = Request("a", range(30))
    manager.allocate_slots(one, 30)
    assert not manager.reset_prefix_cache()
    assert (heard.num_resets, manager.prefix_cache_stats.reset) == (0, False)
    found = manager.get_computed_blocks(Request("b", range(30)))[1]
    assert found == 24 if len(groups) > 1 and groups is CHUNKS else found == 28
    one.num_computed_tokens = 30
    manager.free(one)
    assert manager.get_computed_blocks(Request("b", range(30)))[1] == found
    assert manager.reset_prefix_cache()  # what a look-up found does not hold it up
    assert (heard.num_resets, manager.prefix_cache_stats.reset) == (1, True)
    assert manager.get_computed_blocks(Request("b", range(30)))[1] == 0


@pytest.mark.parametrize("groups", [PLAIN, WINDOWS], ids=["plain", "windows"])
def test_room_is_made_for_drafts_and_never_past_the_longest_request(groups):
    manager = manager_of(groups, 200)
    one = Request("a", range(10), max_tokens=300)

    def sizes():
        return {len(ids) for ids in manager.get_block_ids("a")}

    manager.allocate_slots(one, 10, num_lookahead_tokens=3)
    assert sizes() == {4}
    one.num_computed_tokens = 10
    manager.new_step_starts()
    assert manager.allocate_slots(one, 1, num_lookahead_tokens=5).get_block_ids()[0] == []
    assert manager.allocate_slots(one, 1, num_lookahead_tokens=6).get_block_ids()[0] != []
    assert sizes() == {5}
    one.all_token_ids += [7] * 180
    manager.allocate_slots(one, 180)
    one.num_computed_tokens = 190
    manager.allocate_slots(one, 9, num_lookahead_tokens=1)
    assert sizes() == {50}
    manager.allocate_slots(one, 9, num_lookahead_tokens=9)
    assert sizes() == {50}
    other = Request("b", range(199))
    assert manager.allocate_slots(other, 199, num_lookahead_tokens=9) is not None
    assert {len(ids) for ids in manager.get_block_ids("b")} == {50}


def test_a_block_is_findable_in_the_step_that_fills_it_and_not_before():
    manager = manager_of()
    one = Request("a", range(6))

    def findable():
        found = manager.get_computed_blocks(Request("b", [*one.all_token_ids, 9]))[1]
        manager.new_step_starts()
        assert found == manager.estimate_cached_tokens(one)
        return found

    manager.allocate_slots(one, 3)
    assert findable() == 0
    one.num_computed_tokens = 3
    manager.allocate_slots(one, 1)
    assert findable() == 4
    one.num_computed_tokens = 4
    manager.allocate_slots(one, 2 + 3)  # with three drafts, of which nothing is known
    assert findable() == 4
    one.num_computed_tokens = 6
    one.all_token_ids += [1, 1]
    manager.cache_blocks(one, 7)
    assert findable() == 4
    manager.cache_blocks(one, 8)
    assert findable() == 8
    manager.cache_blocks(Request("unknown", range(9)), 8)
    assert findable() == 8


@pytest.mark.parametrize("groups", [WINDOWS, CHUNKS], ids=["windows", "chunks"])
def test_what_a_request_with_windows_has_computed_is_findable_when_it_has_ended(groups):
    manager = manager_of(groups)
    one = Request("a", range(7))
    manager.allocate_slots(one, 7)
    for token in range(9):
        one.num_computed_tokens = one.num_tokens
        one.all_token_ids.append(token)
        manager.new_step_starts()
        manager.allocate_slots(one, 1)
    one.num_computed_tokens = one.num_tokens
    manager.free(one)
    assert manager.get_computed_blocks(Request("b", [*one.all_token_ids, 9]))[1] == 16


def test_a_step_is_sent_with_what_its_window_sees_though_it_is_let_go_after_it():
    manager = manager_of(WINDOWS)
    one = Request("a", range(30))
    manager.allocate_slots(one, 30)
    now = manager.get_block_ids("a")
    assert 0 not in now[1]
    manager.take_new_block_ids()
    assert manager.get_block_ids("a")[1][:6] == [0] * 6
    assert manager.get_block_ids("a")[0] == now[0]
    assert manager.get_block_ids("unknown") == ([], [])


def test_what_only_a_step_in_flight_sees_is_given_back_when_that_is_over():
    manager = manager_of(WINDOWS)
    one = Request("a", range(30), max_tokens=9)
    manager.allocate_slots(one, 14)
    held = []
    for computed, flying in ((14, 14), (22, 16), (30, 15), (31, 1), (31, 0)):
        one.num_computed_tokens, one.num_in_flight_tokens = computed, flying
        if computed == 30:
            one.all_token_ids += [5, 5]
        manager.new_step_starts()
        manager.allocate_slots(one, min(8, one.num_tokens - computed))
        held.append(len(manager._flying["a"]))
    assert held == [2, 3, 2, 0, 0]
    assert not manager.kv.leases.counts()


def test_a_whole_request_must_fit_as_vllm_counts_it_where_that_is_wanted():
    def fits(num_tokens, *, wanted=True, caps=(None, None), held=0, **options):
        manager = Manager(replace(settings_of(WINDOWS, 21), caps=caps))
        if held:
            manager.allocate_slots(Request("held", range(held)), held)
        one = Request("a", range(100, 100 + num_tokens))
        return manager.allocate_slots(one, 4, full_sequence_must_fit=wanted, **options) is not None

    assert fits(40)
    assert not fits(41)
    assert fits(41, wanted=False)
    assert fits(60, caps=(None, 5))
    assert not fits(61, caps=(None, 5))
    assert fits(8, caps=(None, 5), held=32)
    assert not fits(9, caps=(None, 5), held=32)
    assert fits(400, caps=(10, 10))


def test_blocks_that_are_reserved_or_the_watermark_stay_free():
    def made(reserved, watermark, *, status="WAITING", alone=False, size=8):
        manager = manager_of(num_blocks=11, watermark_blocks=watermark)
        one = Request("a", range(4 * size))
        one.status.name = status
        return manager.allocate_slots(
            one, 4 * size, reserved_blocks=reserved, has_scheduled_reqs=not alone
        )

    assert made(2, 0)
    assert not made(3, 0)
    assert made(0, 2)
    assert not made(0, 3)
    assert made(1, 1)
    assert not made(1, 2)
    assert made(1, 2, alone=True)
    assert made(2, 3, status="RUNNING")
    assert not made(3, 3, alone=True)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("reserved", [0, 1])
def test_what_look_ups_hold_gives_way_to_a_request_that_needs_it(reserved, wanted):
    manager = manager_of(num_blocks=8)
    first = Request("a", range(12))
    manager.allocate_slots(first, 12)
    first.num_computed_tokens = 12
    manager.free(first)
    assert manager.get_computed_blocks(Request("b", range(13)))[1] == 12
    large = Request("c", range(50, 70))
    options = {"full_sequence_must_fit": wanted, "reserved_blocks": reserved}
    assert manager.allocate_slots(large, 20, **options)
    assert not manager._found
    assert manager.allocate_slots(Request("d", range(80, 93)), 13) is None


def test_a_second_look_up_of_a_request_takes_the_place_of_the_first():
    manager = manager_of()
    first = Request("a", range(9))
    manager.allocate_slots(first, 9)
    second = Request("b", range(13))
    free = manager.kv.num_free_blocks
    assert [manager.get_computed_blocks(second)[1] for _ in range(3)] == [8, 8, 8]
    assert len(manager.kv.sequences) == 2
    second.all_token_ids.append(3)  # it may have more tokens by then
    blocks, hits, _ = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 14 - hits, hits, blocks) is not None
    assert manager._running["b"].num_tokens == 14
    assert manager.kv.num_free_blocks == free - 2


def test_a_request_whose_tokens_have_grown_since_its_look_up_is_looked_up_again():
    manager = manager_of()
    manager.allocate_slots(first := Request("a", range(9)), 9)
    first.num_computed_tokens = 9
    manager.free(first)
    second = Request("b", range(9))
    blocks, hits, _ = manager.get_computed_blocks(second)
    second.all_token_ids += [5, 5, 5, 5]
    assert manager.allocate_slots(second, 13 - hits, hits, blocks) is not None
    assert manager._running["b"].num_computed_tokens == 12
    assert manager.get_block_ids("b")[0][:2] == blocks.get_block_ids()[0]


def test_a_request_is_described_once_until_it_runs():
    asked = []
    manager = manager_of(bytes_of=lambda rows: asked.append(1) or b"rows")
    one = Request("a", range(9))
    one.prompt_embeds = Rows([1] * 9)
    for _ in range(3):
        manager.get_computed_blocks(one)
    assert len(asked) == 3  # of three blocks
    manager.allocate_slots(one, 9)
    assert not manager._prompts
    other = Request("b", range(9))
    manager.get_computed_blocks(other)
    manager.free(other)
    assert not manager._prompts
    assert not manager._found


class Rows(list):
    """Embeddings, as far as they are asked."""

    dtype, shape = "f", (9, 4)

    def __getitem__(self, place):
        return Rows(list.__getitem__(self, place))


def test_a_collector_hears_of_blocks_that_are_handed_out_and_of_hits():
    heard = Heard()
    manager = manager_of(WINDOWS, collector=heard)
    first = Request("a", range(25))
    manager.allocate_slots(first, 25)
    fresh = [block for ids in manager.get_block_ids("a") for block in ids]
    assert heard.of == {"evicted": fresh, "allocated": fresh, "accessed": []}
    first.num_computed_tokens = 25
    manager.free(first)
    second = Request("b", range(26))
    blocks, hits, _ = manager.get_computed_blocks(second)
    assert hits == 24
    manager.allocate_slots(second, 2, hits, blocks)
    found = [block for ids in blocks.get_block_ids() for block in ids if block]
    assert heard.of["accessed"] == found
    assert not manager.take_new_block_ids()


def test_fresh_blocks_are_named_once_and_hits_are_not():
    manager = manager_of(keep_fresh=True)
    manager.allocate_slots(first := Request("a", range(9)), 9)
    assert manager.take_new_block_ids() == manager.get_block_ids("a")[0]
    first.num_computed_tokens = 9
    first.all_token_ids += range(4)
    manager.allocate_slots(first, 4)
    second = Request("b", range(11))
    blocks, hits, _ = manager.get_computed_blocks(second)
    manager.allocate_slots(second, 3, hits, blocks)
    assert manager.take_new_block_ids() == [
        manager.get_block_ids("a")[0][3], manager.get_block_ids("b")[0][2]
    ]  # fmt: skip
    assert manager.take_new_block_ids() == []


def test_a_step_ends_with_nothing_held_for_look_ups():
    manager = manager_of()
    manager.allocate_slots(first := Request("a", range(9)), 9)
    first.num_computed_tokens = 9
    manager.free(first)
    for end in (manager.new_step_starts, manager.take_new_block_ids):
        manager.get_computed_blocks(Request("b", range(9)))
        assert manager.usage > 0
        end()
        assert manager.usage == 0


def test_a_deferred_request_gives_back_what_its_steps_still_see_when_told():
    manager = manager_of(WINDOWS)
    one = Request("a", range(30))
    manager.allocate_slots(one, 30)
    used = manager.usage
    one.num_in_flight_tokens = one.num_computed_tokens = 30
    leases = manager.pop_blocks_for_free(one)
    assert manager.usage == used
    assert manager.pop_blocks_for_free(one) == []
    manager.block_pool.free_blocks(reversed(leases))
    assert manager.usage == 0


def test_blocks_are_shown_as_vllm_shows_them():
    blocks = vllm_blocks.Blocks(([1, 0], [5]))
    assert blocks.get_block_ids() == ([1, 0], [5])
    assert blocks.get_block_ids(group_ids=[1]) == ([5],)
    assert blocks.get_block_ids(allow_none=True) == ([1, 0], [5])
    assert [[one.is_null for one in group] for group in blocks.blocks] == [[False, True], [False]]
    empty = blocks.new_empty()
    assert empty.get_block_ids() == ([], [])
    assert empty.get_block_ids(allow_none=True) is None
    assert vllm_blocks.Blocks(([], [5])).get_block_ids(allow_none=True) == ([], [5])
    blocks.get_block_ids()[0].append(9)
    assert blocks.get_block_ids() == ([1, 0], [5])


def test_the_face_of_the_pool_counts_what_is_held():
    manager = manager_of(num_blocks=11)
    assert (manager.block_pool.num_gpu_blocks, manager.usage) == (11, 0.0)
    manager.allocate_slots(Request("a", range(12)), 12)
    assert manager.block_pool.get_num_free_blocks() == 7
    assert manager.usage == pytest.approx(0.3)
    assert manager.take_kv_cache_block_copies() == ([], [])
    assert manager.take_boundary_state_offloads() == {}
    assert manager.take_events() == []


def test_where_blocks_are_too_few_nothing_has_changed():
    manager = manager_of(num_blocks=4)
    one = Request("a", range(12))
    manager.allocate_slots(one, 6)
    one.num_computed_tokens = 6
    assert manager.allocate_slots(one, 12) is None
    assert manager.estimate_cached_tokens(one) == 4
    assert manager.allocate_slots(Request("b", range(50, 70)), 20) is None
    assert len(manager.kv.sequences) == 1
    with pytest.raises(kvcore.InvalidArgumentError, match="num_new_tokens=0"):
        manager.allocate_slots(Request("c", range(9)), 0)


def test_reserved_blocks_are_not_counted_twice_where_a_whole_request_must_fit():
    manager = manager_of(num_blocks=11)
    options = {"full_sequence_must_fit": True, "reserved_blocks": 2}
    assert manager.allocate_slots(Request("a", range(40)), 4, **options) is not None


def test_a_request_that_must_fit_counts_no_hits_and_no_more_than_the_longest():
    manager = manager_of(WINDOWS, 120)
    options = {"full_sequence_must_fit": True}
    assert manager.allocate_slots(Request("a", range(400)), 4, **options) is not None
    manager = manager_of(num_blocks=11)
    first = Request("b", range(21))
    manager.allocate_slots(first, 21)  # keeps 6 of 10 blocks
    second = Request("c", range(36))
    blocks, hits, _ = manager.get_computed_blocks(second)
    assert hits == 20
    assert manager.allocate_slots(second, 4, hits, blocks, **options) is not None


def test_a_running_request_with_windows_leaves_what_is_reserved():
    manager = manager_of(WINDOWS, 13)
    one = Request("a", range(30))
    one.status.name = "RUNNING"
    manager.allocate_slots(one, 8)
    one.num_computed_tokens = 8
    assert manager.allocate_slots(one, 4, reserved_blocks=9) is None
    assert manager.allocate_slots(one, 4, reserved_blocks=4) is not None


def test_windows_publish_a_chunk_at_once_and_a_decoded_token_with_the_next():
    manager = manager_of(WINDOWS)
    one = Request("a", range(6))
    manager.allocate_slots(one, 6)
    assert manager.estimate_cached_tokens(one) == 4
    one.num_computed_tokens = 6
    one.all_token_ids += [1, 1]
    manager.new_step_starts()
    manager.allocate_slots(one, 2)
    assert manager.estimate_cached_tokens(one) == 8
    for known in range(9, 14):
        one.num_computed_tokens = known - 1
        one.all_token_ids.append(1)
        manager.new_step_starts()
        manager.allocate_slots(one, 1)
        computed = (known - 1) // 4 * 4  # what this step computes is told in the next one
        assert manager.estimate_cached_tokens(one) == computed
    manager.free(one)
    assert manager.get_block_ids("a") == ([], [])
    manager.allocate_slots(two := Request("b", range(60, 70)), 10)
    manager.free(two)
    assert manager.get_block_ids("b") == ([], [])
