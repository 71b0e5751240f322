"""What is computed beside the engine takes turns between clients, and stops when they leave."""

import asyncio
import random
import threading

import pytest

from model.load.text import pieces
from model.turns import ClientGoneError, Turns, in_turn


def asked(turns, client, work, has_left=lambda: False, *, is_long=False):
    """A task that has a piece of work done for a client."""

    async def run():
        turns.work_for(client, has_left)
        return await in_turn(work, is_long=is_long)

    return asyncio.ensure_future(run())


@pytest.mark.parametrize("is_long", [False, True])
def test_a_client_with_much_work_has_one_piece_done_before_that_of_another_one(is_long):
    done = []

    async def main():
        turns = Turns()
        many = [
            asked(turns, "many", lambda n=n: done.append(n), is_long=is_long) for n in range(50)
        ]
        other = asked(turns, "other", lambda: done.append("other"))
        await asyncio.gather(*many, other)
        assert turns.num_clients == 0

    asyncio.run(main())
    assert done.index("other") <= 3
    assert sorted(each for each in done if each != "other") == [*range(50)]


def test_no_two_long_pieces_of_one_client_run_at_once_and_those_of_two_clients_do():
    meeting, most, running = threading.Barrier(2, timeout=60), [0], [0]
    lock = threading.Lock()

    def alone():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        sum(range(10_000))
        with lock:
            running[0] -= 1

    async def main():
        turns = Turns()
        await asyncio.gather(*[asked(turns, "one", alone, is_long=True) for _ in range(30)])
        await asyncio.gather(*[asked(turns, one, meeting.wait, is_long=True) for one in "ab"])

    asyncio.run(main())
    assert most == [1]


def test_work_of_a_client_that_has_left_is_not_begun():
    left, done = [False], []  # short and long pieces wait apart from each other

    async def main():
        turns = Turns()

        def leave():
            done.append(0)
            left[0] = True

        first = asked(turns, "one", leave, lambda: left[0])
        others = [asked(turns, "one", lambda: done.append(1), lambda: left[0]) for _ in range(9)]
        await first
        for one in others:
            with pytest.raises(ClientGoneError):
                await one
        assert turns.num_clients == 0

    asyncio.run(main())
    assert done == [0]


def test_work_that_is_cancelled_while_it_waits_gives_its_turn_up():
    async def main():
        turns = Turns()
        first, second, third = (asked(turns, "one", lambda n=n: n) for n in range(3))
        second.cancel()
        assert await first == 0
        assert await third == 2
        assert turns.num_clients == 0

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_is_cancelled_while_a_thread_does_it_keeps_its_turn(fails):
    began, goes_on, done = threading.Event(), threading.Event(), []

    def work():
        began.set()
        goes_on.wait(60)
        done.append("first")
        if fails:
            raise ValueError("the client reads it no more")

    async def main():
        turns = Turns()
        first = asked(turns, "one", work, is_long=True)
        second = asked(turns, "one", lambda: done.append("second"), is_long=True)
        await asyncio.to_thread(began.wait, 60)
        first.cancel()
        await asked(turns, "other", lambda: done.append("other"), is_long=True)
        goes_on.set()
        await second
        assert first.cancelled()
        assert turns.num_clients == 0

    asyncio.run(main())
    assert done == ["other", "first", "second"]


def test_without_a_caller_work_is_done_at_once():
    async def main():
        return await in_turn(lambda: 1), await in_turn(lambda: 2, is_long=False)

    assert asyncio.run(main()) == (1, 2)


def decode(tokens):
    """A decoder of bytes, which leaves a space at the start out and special tokens."""
    text = bytes(token for token in tokens if token < 256).decode(errors="replace")
    return text.removeprefix(" ")


@pytest.mark.parametrize("size", [1, 3, 10, 64])
@pytest.mark.parametrize(
    "text",
    ["plain words and spaces ", "grüße 你好 \N{GRINNING FACE}\N{GRINNING FACE} ", "  a  " * 4],
)
def test_pieces_are_the_whole_text_wherever_they_are_cut(text, size):
    rng = random.Random(1)
    tokens = [*(text * 9).encode()]
    for _ in range(9):
        tokens.insert(rng.randrange(len(tokens)) if "ü" not in text else 0, 300)
    found = [*pieces(decode, tokens, size)]
    assert "".join(found) == decode(tokens)
    assert len(found) > 1


def test_pieces_are_of_bounded_size_whatever_the_tokens_are():
    asked_for = []

    def counting(tokens):
        asked_for.append(len(tokens))
        return decode(tokens)

    for tokens in ([0x80] * 5000, [300] * 5000, [*b"abc "] * 1250):
        asked_for.clear()
        assert "".join(pieces(counting, tokens, 100)) == decode(tokens)
        assert max(asked_for) <= 100 + 8 + 128
