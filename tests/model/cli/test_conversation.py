"""A conversation in the terminal is what the engine answers to its history."""

import io
import os
import select
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model
from kvcore.tiers import DiskTier, meaning_of
from model.chat import parse_args
from model.cli.conversation import Answer, Conversation, converse
from model.cli.exits import Stopped
from model.errors import InvalidArgumentError
from model.tiny import CHECKPOINT_DIR

GREEDY = model.SamplingParams(max_tokens=5)
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def engine():
    llm = model.LLM(str(CHECKPOINT_DIR), num_blocks=200, block_size=BLOCK_SIZE, eager=True)
    return llm.engine


def ignore(_):
    pass


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.sampled_from(["A tuple is", "list.append(x)", "x", "é"]), min_size=1, max_size=4),
    st.sampled_from([None, "Speak."]),
)
def test_a_turn_is_answered_as_the_whole_history_would_be_and_found_in_the_cache(
    engine, lines, system
):
    talk, before = Conversation(engine, GREEDY, system), 0
    for number, line in enumerate(lines, 1):
        pieces = []
        answer = talk.ask(line, pieces.append)
        *history, last = talk.messages
        assert last == {"role": "assistant", "content": answer.text}
        assert "".join(pieces) == answer.text
        assert [one["content"] for one in history if one["role"] == "user"] == lines[:number]
        assert [one["content"] for one in history if one["role"] == "system"] == [system] * (
            system is not None
        )
        prompt = engine.model.codec.encode_chat(history)
        (alone,) = engine.generate([prompt], GREEDY)
        assert answer.text == alone.text
        assert answer.num_prompt_tokens == len(prompt)
        assert answer.num_cached_tokens >= before // BLOCK_SIZE * BLOCK_SIZE
        before = len(prompt)


def test_an_answer_that_is_stopped_stays_in_the_history_as_far_as_it_was_shown(engine):
    pieces = []

    class Stop:
        def __bool__(self):
            return len("".join(pieces)) > 3

    talk = Conversation(engine, model.SamplingParams(max_tokens=100))
    answer = talk.ask("A list is", pieces.append, Stop())
    assert answer.num_tokens < 20
    assert talk.messages[-1]["content"] == answer.text == "".join(pieces)
    assert not engine.has_unfinished
    assert talk.ask("more", ignore).num_prompt_tokens > answer.num_prompt_tokens


def test_a_message_that_cannot_be_answered_changes_nothing(engine):
    talk = Conversation(engine, GREEDY)
    talk.ask("A list is", ignore)
    before = [*talk.messages]
    with pytest.raises(InvalidArgumentError):
        talk.ask("word " * 5000, ignore)
    assert talk.messages == before
    assert talk.ask("x", ignore).text


def test_an_answer_ends_where_the_models_length_does(engine):
    talk = Conversation(engine, model.SamplingParams(max_tokens=10**6, ignore_eos=True))
    line = "word " * 300
    answer = talk.ask(line, ignore)
    assert answer.num_prompt_tokens + answer.num_tokens == engine.max_model_len


class Recorded:
    """A conversation that says a fixed thing."""

    def __init__(self):
        self.asked = []

    def ask(self, text, show, stop=None):
        self.asked.append(text)
        if text == "bad":
            raise InvalidArgumentError("prompt: wanted another")
        show(f"<{text}\x1b>")
        return Answer(text, 2, 30, 16, "too slow" if text == "slow" else None)

    def clear(self):
        self.asked.append("cleared")


def test_lines_are_messages_but_for_clear_and_exit(capsys):
    talk, out = Recorded(), io.StringIO()
    lines = io.StringIO(" hello \n\n/clear\nbad\nslow\n/exit\nnot read\n")
    converse(talk, lines, out, reports=True)
    assert talk.asked == ["hello", "cleared", "bad", "slow"]
    assert out.getvalue() == "<hello\\x1b>\n\n<slow\\x1b>\n"
    err = capsys.readouterr().err
    assert "error: prompt: wanted another; /clear forgets the conversation\n" in err
    assert "error: too slow\n" in err
    assert "prefix cache hits: 16 of 30 prompt tokens\n" in err


def test_the_end_of_the_input_ends_the_conversation():
    talk = Recorded()
    converse(talk, io.StringIO("one"), io.StringIO())
    assert talk.asked == ["one"]


def test_defaults_suit_a_conversation_and_flags_change_them():
    assert parse_args([]).params.repetition_penalty > 1
    assert parse_args(["--temperature", "0", "--system", "Be brief."]).params.temperature == 0
    assert parse_args(["--system", "Be brief."]).chat.system == "Be brief."


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_stops_an_answer_and_sigterm_the_conversation_which_is_stored(tmp_path, forks):
    command = ["-m", "model", "chat", "--max-tokens", "1500", "--temperature", "0"]
    with forks.start(
        *[*command, "--no-ignore-eos", "--num-blocks", "200", "--eager", "--disk", tmp_path],
        is_open=True,
    ) as process:
        out = ""
        for number in (signal.SIGINT, signal.SIGTERM):
            process.stdin.write("A list is " * 9 + "\n")
            assert select.select([process.stdout], [], [], 60)[0]
            process.send_signal(number)
            out = out or process.stdout.readline()
        err = process.stderr.read()
        assert process.wait() == 128 + signal.SIGTERM
    assert 0 < len(out) < 3000
    assert err.endswith("terminated: the conversation has ended\n")
    assert "the tiny model only continues texts" in err
    tier = DiskTier(tmp_path, 1 << 30)
    tier.start(meaning_of({}), 1 << 16)
    assert tier.stats.faults["foreign"] > 0  # whole records, of a network


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_signal_ends_the_wait_for_a_line():
    class Lines(io.StringIO):
        def readline(self):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        converse(Recorded(), Lines(), io.StringIO())
    assert stopped.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
