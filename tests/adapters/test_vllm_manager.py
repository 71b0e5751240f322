"""What vLLM's scheduler asks of kvcore's manager is right in memory, whatever happens."""

import random
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.adapters import vllm_manager
from kvcore.adapters.vllm_manager import Manager, Manager022
from tests.adapters.vllm_world import CHUNKS, PLAIN, WINDOWS, Request, World, manager_of

GROUPS = {"plain": PLAIN, "windows": WINDOWS, "chunks": CHUNKS}


def live(dice, groups, kind=Manager, num_steps=60):
    """Let a random crowd of requests live over few blocks, and check what they read."""
    num_blocks = dice.choice([24, 30, 60])
    manager = manager_of(groups, num_blocks, kind, event_names="sha256")
    world = World(
        manager, ahead=dice.random() < 0.5, budget=dice.choice([5, 16, 40]),
        defers=kind is not Manager022 and dice.random() < 0.3,
    )  # fmt: skip
    manager.kv.events.max_names = dice.choice([2, 20, 10_000])
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
                )
            )  # fmt: skip
        crowd = world.waiting + world.running
        if crowd and dice.random() < 0.05:
            world.abort(dice.choice(crowd))
        if dice.random() < 0.05:
            manager.reset_prefix_cache()
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
            told.update((event.group, name) for name in event.names)
        elif isinstance(event, kvcore.BlocksRemoved):
            told.difference_update((event.group, name) for name in event.names)
        else:
            told.clear()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@settings(max_examples=30)
@given(dice=st.randoms(use_true_random=False), kind=st.sampled_from([Manager, Manager022]))
def test_every_request_reads_what_its_own_tokens_have_written(groups, dice, kind):
    live(dice, groups, kind)


def test_prefixes_are_hit_and_requests_give_way_in_such_lives():
    worlds = [live(random.Random(seed), PLAIN) for seed in range(20)]
    assert sum(world.num_hits for world in worlds) > 200
    assert sum(world.num_deferred for world in worlds) > 20


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


PLANTED = {
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


def test_a_prompt_is_hit_in_the_step_that_computes_it():
    manager = manager_of()
    world = World(manager, budget=100)
    for name in "ab":
        world.add(Request(name, range(9)))
    world.step()
    assert manager.get_block_ids("a") == ([1, 2, 3],)
    assert manager.get_block_ids("b") == ([1, 2, 4],)


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


def test_nothing_of_vllm_is_imported_by_the_manager():
    assert "vllm" not in vars(vllm_manager)
