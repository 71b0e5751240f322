"""Text out of tokens, piece by piece, for any bytes and any cut."""

from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from model.load.text import TextStream
from model.tiny import CHECKPOINT_DIR
from tests.model.conftest import byte_tokenizer
from tests.model.networks import ByteCodec

decode = ByteCodec().decode


def byte_fallback():
    """A vocabulary as Llama 2's: words with their space in front, and bytes for what is none."""
    words = {"<unk>": 0, "\u2581": 257, "\u2581the": 258, "a": 259, "\u20ac": 260, "\u2581b": 261}
    pieces = {**words, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))  # noqa: S106
    space = (decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse())
    tokenizer.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


TOKENIZERS = {
    "tiny": Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json")),
    "bytes": byte_tokenizer().backend_tokenizer,
    "byte fallback": byte_fallback(),
}


def opened(name, stop=()):
    tokenizer = TOKENIZERS[name]
    step = partial(DecodeStream(skip_special_tokens=True).step, tokenizer)
    return TextStream(partial(tokenizer.decode, skip_special_tokens=True), stop, step)


def whole(name, tokens):
    return TOKENIZERS[name].decode(tokens, skip_special_tokens=True)


def taken(stream, tokens, looks):
    """What is taken of a text, looked at after these tokens, and at its end."""
    pieces = []
    for number, token in enumerate(tokens):
        stream.add(token)
        if number in looks:
            pieces.append(stream.take())
    return [*pieces, finish(stream)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), looks=st.sets(st.integers(0, 30)))
def test_a_librarys_stream_gives_the_text_of_all_tokens_at_once(name, data, looks):
    """Whatever the tokens are, where bytes stand for themselves; else of any text that there is."""
    size = TOKENIZERS[name].get_vocab_size()
    if name == "byte fallback":
        characters = data.draw(st.lists(st.text(min_size=1, max_size=1) | st.integers(257, 262)))
        tokens = [
            token
            for one in characters
            for token in ([one] if isinstance(one, int) else [b + 1 for b in one.encode()])
        ]
    else:
        tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    pieces = taken(opened(name), tokens, looks)
    assert "".join(pieces) == whole(name, tokens)
    if "\ufffd" not in pieces[-1]:
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


@given(tokens=st.lists(st.integers(0, 262), max_size=30), looks=st.sets(st.integers(0, 30)))
@example(tokens=[99, 246, 223, 258, 256], looks=set(range(5)))
def test_bytes_that_are_no_text_end_no_text(tokens, looks):
    """The library's stream raises on these: what was shown before is not how it goes on."""
    pieces = taken(opened("byte fallback"), tokens, looks)
    assert taken(opened("byte fallback"), tokens, set()) == [whole("byte fallback", tokens)]
    if whole("byte fallback", tokens).isascii():
        assert "".join(pieces) == whole("byte fallback", tokens)


@given(text=st.text("abc ", max_size=30), stop=st.text("abc", min_size=1, max_size=3))
def test_a_librarys_stream_stops_where_the_text_does(text, stop):
    tokens = TOKENIZERS["tiny"].encode(text, add_special_tokens=False).ids
    shown = "".join(pieces_of(opened("tiny", (stop,)), tokens))
    assert shown == whole("tiny", tokens).partition(stop)[0]


def push(stream, token):
    stream.add(token)
    return stream.take()


def finish(stream):
    stream.close()
    return stream.take()


def pieces_of(stream, tokens):
    pieces = []
    for token in tokens:
        pieces.append(push(stream, token))
        if stream.is_stopped:
            return pieces
    return [*pieces, finish(stream)]


def expected_pieces(text):
    """One a byte: nothing until a character's last byte, then the character; and no rest."""
    pieces = []
    for character in text:
        pieces += [""] * (len(character.encode()) - 1) + [character]
    return [*pieces, ""]


@given(text=st.text())
def test_the_pieces_are_the_text_and_none_ends_inside_a_character(text):
    pieces = pieces_of(TextStream(decode), text.encode())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert pieces == expected_pieces(text)


@given(tokens=st.lists(st.integers(0, 260)), looks=st.sets(st.integers(0, 30)))
def test_the_text_does_not_depend_on_when_it_is_looked_at(tokens, looks):
    stream, taken = TextStream(decode), []
    for number, token in enumerate(tokens):
        stream.add(token)
        if number in looks:
            taken.append(stream.take())
            if decode(tokens).isascii():
                assert "".join(taken) == decode(tokens[: number + 1])
    assert "".join([*taken, finish(stream)]) == decode(tokens)


def test_nothing_is_decoded_before_the_text_is_taken():
    calls = []
    stream = TextStream(lambda tokens: calls.append(len(tokens)) or decode(tokens))
    for byte in b"some words":
        stream.add(byte)
    assert calls == []
    assert stream.take() == "some words"
    assert len(calls) == 2
    stopping = TextStream(lambda tokens: calls.append(len(tokens)) or decode(tokens), ("E",))
    stopping.add(ord("E"))
    assert stopping.is_stopped


@given(tokens=st.lists(st.integers(0, 260)))
def test_the_pieces_are_what_decoding_at_once_gives_for_broken_bytes_too(tokens):
    assert "".join(pieces_of(TextStream(decode), tokens)) == decode(tokens)


@given(
    pieces=st.lists(st.text("abc", min_size=1, max_size=4), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_complete_stop_string_however_it_is_cut(pieces, stop):
    text = "".join(pieces)
    stream = TextStream(lambda tokens: "".join(pieces[i] for i in tokens), tuple(stop))
    shown = "".join(pieces_of(stream, range(len(pieces))))
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert stream.is_stopped == bool(found)
    assert shown == stream.text == (text[: min(found)[1]] if found else text)


def test_what_may_begin_a_stop_string_is_held_until_it_does_not():
    stream = TextStream(decode, ("END",))
    assert [push(stream, byte) for byte in b"xEN.EEND!"] == [
        *("x", "", "", "EN."),
        *("", "E", "", "", ""),
    ]
    assert (stream.text, finish(stream)) == ("xEN.E", "")


def test_what_is_held_at_the_end_is_shown():
    stream = TextStream(decode, ("END",))
    assert [push(stream, byte) for byte in b"xEN"] == ["x", "", ""]
    assert finish(stream) == "EN"


def test_a_character_of_three_tokens_comes_with_the_last():
    stream = TextStream(decode)
    assert [push(stream, byte) for byte in "a\u20acb".encode()] == ["a", "", "", "\u20ac", "b"]


def test_a_broken_character_at_the_end_is_shown_as_such():
    stream = TextStream(decode)
    assert [push(stream, byte) for byte in b"a\xe2\x82"] == ["a", "", ""]
    assert finish(stream) == "\ufffd"
