"""Where a draft model reads ahead, a prompt hits what vLLM's hashes say, and routers know it.

vLLM 0.33 hashes the next tokens with a block. The engine here is that rule alone: the blocks whose
tokens and next tokens were computed. The manager must hit what it hits, and `kvcore.wire`'s index,
which hears of the manager in vLLM's words, must say so.
"""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore import wire
from kvcore.adapters.vllm.events import Speller, Words
from kvcore.adapters.vllm.manager import Manager
from tests.adapters.vllm_world import PLAIN, WINDOWS, Request, World, manager_of

WORDS = Words(wire.Stored, wire.Removed, wire.Cleared, lambda name: wire.wire_hashes([name])[0])
KINDS = [[(0, "full_attention", None)], [(1, "sliding_window", 6)]]
SIZE = 4


class Engine:
    """The blocks that vLLM has hashed, each by all that its hash covers."""

    def __init__(self, lookahead):
        self.lookahead = lookahead
        self.hashed = set()

    def store(self, request):
        """Hash what is computed, as far as the KV of a draft model is final."""
        known = request.num_tokens
        final = min(request.num_computed_tokens - self.lookahead + 1, known - self.lookahead)
        for end in range(SIZE, final + 1, SIZE):
            self.hashed.add(self.name(request, end))

    def name(self, request, end):
        return request.cache_salt, tuple(request.all_token_ids[: end + self.lookahead])

    def hits(self, request):
        hits = 0
        while (
            hits + SIZE < request.num_tokens
            and hits + SIZE + self.lookahead <= request.num_tokens
            and self.name(request, hits + SIZE) in self.hashed
        ):
            hits += SIZE
        return hits


def compute(manager, request, count, hits=0, blocks=None):
    """Compute `count` tokens of a request in one step."""
    assert manager.allocate_slots(request, count, hits, blocks)
    request.num_computed_tokens = max(hits, request.num_computed_tokens) + count
    request.status.name = "RUNNING"


def compare(dice, kind=Manager):
    """Let requests follow each other, and compare what each hits; return how much that was."""
    lookahead, in_all = dice.randrange(1, SIZE + 1), 0
    manager, engine = manager_of(PLAIN, 400, kind, lookahead=lookahead), Engine(lookahead)
    head = [dice.randrange(2) for _ in range(14)]
    for number in range(25):
        tokens = head[: dice.randrange(lookahead + 1, 15)]
        tokens += [dice.randrange(2) for _ in range(dice.randrange(6))]
        request = Request(f"r{number}", tokens, salt=dice.choice([None, "a"]))
        request.resumable = dice.random() < 0.2
        manager.new_step_starts()
        limit = dice.choice([None, None, dice.randrange(20)])
        wanted = engine.hits(request)
        if limit is not None:
            wanted = min(wanted, limit - limit % SIZE)
        blocks, hits, _ = manager.get_computed_blocks(request, limit)
        assert hits == wanted, f"{tokens} hits {hits} of {limit}, wanted {wanted}"
        in_all += hits
        first = dice.randrange(1, len(tokens) - hits + 1)
        compute(manager, request, first, hits, blocks)
        if first < len(tokens) - hits:
            compute(manager, request, len(tokens) - hits - first)
        for _ in range(dice.randrange(10)):
            request.all_token_ids.append(dice.randrange(2))
            manager.cache_blocks(request, request.num_computed_tokens)
            compute(manager, request, 1)
        engine.store(request)
        manager.free(request)
        kvcore.check(manager.kv)
    return in_all


@settings(max_examples=40)
@given(dice=st.randoms(use_true_random=False))
def test_a_prompt_hits_what_the_engine_has_hashed_with_its_next_tokens(dice):
    compare(dice)


def test_in_such_crowds_much_is_hit():
    assert sum(compare(random.Random(seed)) for seed in range(20)) > 400


class FirstTokensIgnored(Manager):
    """What a prompt begins with does not count."""

    def _prompt_of(self, request):
        prompt = super()._prompt_of(request)
        salt = prompt.namespace.salt[4 * self._ahead :]
        self._prompts[request.request_id] = SimpleNamespace(
            packed=prompt.packed, items=(), namespace=kvcore.Namespace(salt=salt)
        )
        return self._prompts[request.request_id]


class LastBlockLeft(Manager):
    """The last block of a prompt is not hit though what follows it is known."""

    def _open(self, request, *, skip_reading):
        seq = super()._open(request, skip_reading=skip_reading)
        if seq.num_computed_tokens and seq.num_computed_tokens == seq.num_tokens:
            self.kv.truncate(seq, seq.num_tokens - 1)
            self.kv.extend(seq, request.all_token_ids[-1:])
        return seq


class ShortSighted(Manager):
    """One token is read ahead."""

    def __init__(self, settings):
        super().__init__(settings)
        self._ahead = 1


@pytest.mark.parametrize("kind", [FirstTokensIgnored, LastBlockLeft, ShortSighted])
def test_a_manager_that_looks_ahead_badly_is_found(kind):
    with pytest.raises(AssertionError):
        [compare(random.Random(seed), kind) for seed in range(50)]


def follow(dice, groups, ahead_of_events=None):
    """Let a crowd live over few blocks; after each step an index says what is hit."""
    lookahead = dice.choice([0, 1, 1, 2, 3])
    told = lookahead if ahead_of_events is None else ahead_of_events(lookahead)
    speller = Speller(WORDS, KINDS, told)
    manager = manager_of(
        groups, dice.choice([12, 20, 60]), event_hashes="sha256", lookahead=lookahead, spell=speller
    )
    manager.kv.events.max_hashes = dice.choice([3, 1000])
    world, index = World(manager, budget=dice.choice([5, 40]), lookahead=lookahead), wire.Index()
    prompts, in_all = [], 0
    for number in range(30):
        if len(world.waiting) < 3:
            tokens = [dice.randrange(2) for _ in range(dice.randrange(5, 18))]
            lora = dice.choice([None, None, "sql"])
            world.add(Request(f"r{number}", tokens, max_tokens=dice.randrange(1, 9), lora=lora))
            prompts = [*prompts[-5:], (tokens, lora)]
        if dice.random() < 0.05:
            world.reset()
        world.step()
        payload = wire.encode(1.0, manager.take_events(), 0, dice.choice(["map", "array"]))
        batch = wire.decode(payload)
        assert not batch.num_malformed
        index.apply("p", batch)
        for tokens, lora in prompts:
            space = kvcore.Namespace(lora_name=lora)
            probe = Request("probe", [*tokens, *([] if lookahead else [0])], lora=lora)
            hits = manager.get_computed_blocks(probe)[1]
            manager.free(probe)
            found = index.match(tokens, namespace=space).get("p", 0)
            assert found == hits, f"of {tokens} the manager has {hits}, the index says {found}"
            in_all += hits
    return in_all


@pytest.mark.parametrize("groups", [PLAIN, WINDOWS], ids=["plain", "windows"])
@settings(max_examples=30)
@given(dice=st.randoms(use_true_random=False))
def test_an_index_that_hears_vllms_words_says_what_is_hit(groups, dice):
    follow(dice, groups)


@pytest.mark.parametrize("ahead", [lambda _: 0, lambda count: 1 if count else 0])
def test_events_that_say_other_next_tokens_are_found(ahead):
    with pytest.raises(AssertionError):
        [follow(random.Random(seed), PLAIN, ahead) for seed in range(50)]


def told_of(prompt, lookahead, **about):
    """Compute a prompt; return its events in vLLM's words."""
    manager = manager_of(
        PLAIN, event_hashes="sha256", lookahead=lookahead, spell=Speller(WORDS, KINDS, lookahead)
    )
    request = Request("r", prompt, **about)
    compute(manager, request, len(prompt), 0, manager.get_computed_blocks(request)[0])
    return manager.take_events()


def test_an_event_has_the_tokens_of_its_blocks_and_the_next_ones():
    [event] = told_of(range(11), 2, salt="red", lora="sql")
    assert event.token_ids == [*range(8)]
    assert event.lookahead_token_ids == [[4, 5], [8, 9]]
    assert event.parent_block_hash is None
    assert (event.lora_name, event.lora_id) == ("sql", 1)
    assert event.extra_keys == [("sql", "red"), ("sql",)]


def test_a_block_depends_on_the_images_of_its_next_tokens():
    [event] = told_of(range(14), 2, image="cat")  # at the positions 2 to 6
    assert event.lookahead_token_ids == [[4, 5], [8, 9], [12, 13]]
    assert event.extra_keys == [(("cat", 2),), (("cat", -2),), None]
    [event] = told_of(range(14), 1, image="cat")
    assert event.extra_keys == [(("cat", 2),), (("cat", -2),), None]
    assert told_of(range(14), 3, image="cat") == []  # it stands among the first three tokens


def test_an_event_that_follows_another_has_the_tokens_that_it_begins_with():
    speller = Speller(WORDS, KINDS, 1)
    manager = manager_of(PLAIN, event_hashes="sha256", lookahead=1, spell=speller)
    request = Request("r", range(5))
    compute(manager, request, 5, 0, manager.get_computed_blocks(request)[0])
    [first] = manager.take_events()
    for token in range(5, 10):
        request.all_token_ids.append(token)
        compute(manager, request, 1)
    [second] = manager.take_events()
    assert (first.token_ids, first.lookahead_token_ids) == ([0, 1, 2, 3], [[4]])
    assert (second.token_ids, second.lookahead_token_ids) == ([4, 5, 6, 7], [[8]])
    assert second.parent_block_hash == first.block_hashes[0]


def test_a_token_of_a_streamed_input_that_is_replaced_was_read_ahead_by_one_block():
    manager = manager_of(PLAIN, lookahead=1)

    def hits(*tokens):
        probe = Request("probe", tokens)
        found = manager.get_computed_blocks(probe)[1]
        manager.free(probe)
        return found

    session = Request("session", [1, 2, 3])
    session.resumable = True
    compute(manager, session, 3, 0, manager.get_computed_blocks(session)[0])
    for token in (4, 5):
        session.all_token_ids.append(token)
        manager.cache_blocks(session, session.num_computed_tokens)
        if token == 4:
            compute(manager, session, 1)
    assert hits(1, 2, 3, 4, 5, 100) == 4
    session.all_token_ids[4:] = [42, 43, 44, 45, 46]  # the next input, in the place of the 5
    compute(manager, session, 5)
    assert hits(*session.all_token_ids) == 0  # its KV was made from the 5
    assert hits(1, 2, 3, 4, 5, 100) == 4
    manager.free(session)
    session.num_computed_tokens = 0
    compute(manager, session, 9, 0, manager.get_computed_blocks(session)[0])
    assert hits(*session.all_token_ids) == 8
    assert hits(1, 2, 3, 4, 42, 100) == hits(1, 2, 3, 4, 5, 100) == 4
