"""What an index makes of another engine's events: of extra keys it knows only that they count."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore import wire

LORA = st.sampled_from([None, "sql", "chat"])
IMAGES = st.sampled_from([(), (), (("cat", 0),), (("dog", 0),), (("cat", -1), ("dog", 1))])
BLOCKS = st.lists(st.tuples(st.integers(0, 1), IMAGES), min_size=1, max_size=3)
PROMPTS = st.tuples(LORA, st.sampled_from([None, "red", "blue"]), BLOCKS)


def spelled(who, prompt):
    """A prompt as vLLM tells of it: extra keys are the adapter, images, and at first the salt."""
    lora, salt, blocks = prompt
    keys = []
    for place, (_, images) in enumerate(blocks):
        found = (*([lora] if lora else []), *images, *([salt] if salt and not place else []))
        keys.append(found or None)
    return wire.Stored(
        [repr((who, lora, salt, blocks[: end + 1])).encode() for end in range(len(blocks))],
        None, [token for token, _ in blocks], 1, lora_name=lora, medium="GPU",
        extra_keys=keys if any(keys) else None,
    )  # fmt: skip


@given(told=st.lists(st.tuples(st.sampled_from("pq"), PROMPTS), min_size=1, max_size=6))
def test_contents_of_another_engine_are_the_same_where_all_that_it_says_is(told):
    index, held = wire.Index(), {"p": set(), "q": set()}
    for who, prompt in told:
        event = spelled(who, prompt)
        index.apply(who, wire.decode(wire.encode(1.0, [event], 0, "map")))
        lora, salt, blocks = prompt
        held[who] |= {(lora, salt, *blocks[: end + 1]) for end in range(len(blocks))}
    stats = index.stats()
    assert stats.num_held == sum(map(len, held.values()))
    assert stats.num_contents == len(held["p"] | held["q"])
    for lora, _, blocks in [prompt for _, prompt in told]:
        tokens = [token for token, _ in blocks]
        plain = [(lora, None, *[(token, ()) for token in tokens[: end + 1]])
                 for end in range(len(tokens))]  # fmt: skip
        longest = {who: len([*takewhile(some.__contains__, plain)]) for who, some in held.items()}
        found = index.match(tokens, namespace=kvcore.Namespace(lora_name=lora))
        assert found == {who: length for who, length in longest.items() if length}


TOKENS = [1, 2, 3, 4]


def told_ahead(name, after, parent=None, tokens=TOKENS, **fields):
    """A block whose hash covers the tokens after it, as vLLM 0.33 tells of it."""
    return wire.Stored(
        [name], parent, tokens, len(tokens), medium="GPU", group_idx=0,
        kv_cache_spec_kind="full_attention", lookahead_token_ids=[after], **fields,
    )  # fmt: skip


def hits(index, *after):
    """What is held of the tokens where these follow."""
    return index.match([*TOKENS, *after]).get("p", 0)


def heard(*events):
    index = wire.Index()
    index.apply("p", wire.decode(wire.encode(1.0, events, 0, "map")))
    return index


def test_of_two_blocks_of_equal_tokens_each_is_hit_where_its_next_token_follows():
    told = told_ahead(100, [5]), told_ahead(200, [6])
    index = heard(*told)
    assert [hits(index, token, 9, 9, 9) for token in (5, 6, 7)] == [4, 4, 0]
    assert hits(index) == 0  # what follows is not known
    index = heard(*told, wire.Removed([100], "GPU", 0))
    assert [hits(index, token, 9, 9, 9) for token in (5, 6)] == [0, 4]
    index = heard(*told, wire.Removed([100], "GPU", 0), wire.Removed([200], "GPU", 0))
    assert hits(index, 6, 9) == index.stats().num_contents == 0


def test_a_block_follows_the_one_whose_next_token_it_begins_with():
    index = heard(
        told_ahead(100, [5, 5]), told_ahead(200, [6, 5]),
        told_ahead(101, [7, 7], parent=100, tokens=[5, 5, 5, 5]),
    )  # fmt: skip
    assert hits(index, 5, 5, 5, 5, 7, 7) == 8
    assert hits(index, 5, 5, 5, 5, 7) == hits(index, 5, 5, 5, 5, 7, 8) == 4
    assert hits(index, 6, 5, 5, 5, 7, 7) == 4


def test_an_image_after_a_block_is_no_token_that_follows_it():
    image = kvcore.MultimodalItem(b"cat", 4, 2)
    index = heard(told_ahead(100, [5]), told_ahead(101, [7], parent=100, tokens=[5, 5, 5, 5]))
    prompt = [*TOKENS, 5, 5, 5, 5, 7]
    assert index.match(prompt) == {"p": 8}
    assert index.match(prompt, items=[image]) == {}
    assert index.match(prompt, items=[kvcore.MultimodalItem(b"cat", 5, 2)]) == {"p": 4}
