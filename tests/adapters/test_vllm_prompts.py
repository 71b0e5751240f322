"""What vLLM says of a request becomes the identity of what it computes."""

import sys
from subprocess import run
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.adapters.vllm.prompts import (
    describe,
    embedding_items,
    feature_items,
    group_of,
    namespace_of,
)
from tests.adapters.vllm_world import Request

TEXTS = st.one_of(st.none(), st.text(min_size=1, max_size=4))


class Rows:
    """A tensor of rows, as far as it is asked."""

    def __init__(self, rows, dtype="float32"):
        self.rows, self.dtype, self.shape = rows, dtype, (len(rows), 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, part):
        return Rows(self.rows[part], self.dtype)


def bytes_of(rows):
    return bytes(rows.rows)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_two_requests_share_exactly_when_salt_and_adapter_are_the_same(salt, lora, salt2, lora2):
    one = namespace_of(Request("a", [1], salt=salt, lora=lora))
    two = namespace_of(Request("b", [1], salt=salt2, lora=lora2))
    assert (one == two) == ((salt, lora) == (salt2, lora2))


def test_an_adapter_that_is_loaded_anew_under_its_name_is_another():
    one, two = Request("a", [1], lora="sql"), Request("b", [1], lora="sql")
    two.lora_request.lora_int_id = 2
    assert namespace_of(one) != namespace_of(two)


def test_a_plain_request_is_its_tokens():
    prompt = describe(Request("a", [5, 6, 7]), 4, bytes_of)
    assert prompt.packed.tolist() == [5, 6, 7]
    assert (prompt.namespace, prompt.items) == (kvcore.DEFAULT_NAMESPACE, ())


def test_an_image_is_an_item_at_its_place_with_the_rows_that_are_embeddings():
    request = Request("a", range(9), image="cat")
    mask = SimpleNamespace(tolist=lambda: [True, False, True, True, True])
    request.mm_features[0].mm_position.is_embed = mask
    item = kvcore.MultimodalItem(b"cat", 2, 5, bytes([1, 0, 1, 1, 1]))
    assert describe(request, 4, bytes_of).items == (item,)
    assert feature_items(request.mm_features, 3) == ()


def test_a_placeholder_that_is_no_token_id_wraps_around():
    assert describe(Request("a", [1, -1, 2]), 4, bytes_of).packed.tolist() == [1, 2**32 - 1, 2]


@pytest.mark.parametrize(("offset", "length"), [(4, 3), (6, 9)], ids=["overlap", "beyond the end"])
def test_what_cannot_be_described_is_not_cached(offset, length):
    request = Request("a", range(9), image="film")
    place = SimpleNamespace(offset=offset, length=length, is_embed=None)
    request.mm_features.append(SimpleNamespace(identifier="sound", mm_position=place))
    assert describe(request, 4, bytes_of).namespace is None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 5))
def test_prompts_of_embeddings_share_the_blocks_that_are_the_same(rows, block_size):
    items = embedding_items(Rows(rows), None, block_size, bytes_of)
    other = embedding_items(Rows([*rows[:-1], 9]), None, block_size, bytes_of)
    assert [item.start for item in items] == list(range(0, len(rows), block_size))
    assert items[:-1] == other[:-1]
    assert items[-1].content != other[-1].content
    assert embedding_items(Rows(rows, "float16"), None, block_size, bytes_of)[0] != items[0]


def test_among_tokens_only_the_rows_of_embeddings_are_items():
    found = embedding_items(Rows([1] * 6), [True, True, True, False, True, True], 2, bytes_of)
    assert [(item.start, item.length, item.mask) for item in found] == [(2, 2, bytes([0, 1]))]


def spec(name, **fields):
    return type(name, (), {"block_size": 16, **fields})()


def test_groups_are_what_their_layers_see():
    assert group_of(spec("FullAttentionSpec")) == kvcore.FullAttention(16)
    assert group_of(spec("MLAAttentionSpec")) == kvcore.FullAttention(16)
    assert group_of(spec("SlidingWindowSpec", sliding_window=128)) == kvcore.SlidingWindow(128, 16)
    chunked = spec("ChunkedLocalAttentionSpec", attention_chunk_size=64)
    assert group_of(chunked) == kvcore.ChunkedLocal(64, 16)
    several = {"a": spec("FullAttentionSpec"), "b": spec("MLAAttentionSpec")}
    assert group_of(spec("UniformTypeKVCacheSpecs", kv_cache_specs=several)) == (
        kvcore.FullAttention(16)
    )


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (spec("MambaSpec"), "MambaSpec"),
        (spec("CrossAttentionSpec"), "CrossAttentionSpec"),
        (spec("SlidingWindowSpec", sliding_window=16), "a window of 16"),
        (spec("SlidingWindowSpec", sliding_window=64, extra_retained_tokens=2), "drafts"),
    ],
)
def test_what_kvcore_does_not_keep_is_said(refused, why):
    assert why in group_of(refused)


def test_kvcore_imports_neither_vllm_nor_an_adapter():
    ask = "import kvcore, sys; print([n for n in sys.modules if 'vllm' in n or 'adapters' in n])"
    assert run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout == (
        "[]\n"
    )
