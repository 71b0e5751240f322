"""Text out of tokens, piece by piece, for any bytes and any cut."""

from hypothesis import given
from hypothesis import strategies as st

from model.text import TextStream
from tests.model.networks import ByteCodec

decode = ByteCodec().decode


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


def test_nothing_is_decoded_before_somebody_looks():
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
