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
