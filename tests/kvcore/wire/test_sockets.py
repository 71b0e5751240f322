"""Publishers and subscribers over real sockets: what arrives, what is refused, what is left."""

import contextlib
import io
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

import kvcore
from kvcore import wire
from kvcore.wire.__main__ import _say
from tests.hang import HANG_S as PATIENCE_S

ROOT = Path(__file__).parents[3]
ANYWHERE = "tcp://127.0.0.1:*"


def until(true):
    """Wait until something is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := true()):
        if time.monotonic() > deadline:
            pytest.fail("waited in vain")
        threading.Event().wait(0.002)
    return found


def manager(num_blocks=64):
    return kvcore.KVCacheManager(num_blocks, 2, record_events="xxh3-128")


def serve(kv, tokens):
    seq = kv.open(tokens)
    kv.reserve(seq, len(tokens) - seq.num_computed_tokens)
    kv.commit(seq, len(tokens) - seq.num_computed_tokens)
    kv.close(seq)


@pytest.fixture
def kv():
    return manager()


@pytest.fixture
def publisher(kv):
    with wire.Publisher(kv, ANYWHERE, ANYWHERE) as opened:
        yield opened


def follow(*publishers, **options):
    sources = {
        str(place): wire.Source(each.endpoint, each.replay) for place, each in enumerate(publishers)
    }
    return wire.Subscriber(sources, **options)


def test_what_is_published_is_found(kv, publisher):
    with follow(publisher) as follower:
        serve(kv, [1, 2, 3, 4, 5])
        publisher.publish()
        assert until(lambda: follower.match([1, 2, 3, 4, 9, 9])) == {"0": 4}
        serve(kv, [1, 2, 7, 8])
        publisher.publish()
        until(lambda: follower.match([1, 2, 7, 8]) == {"0": 4})
        assert follower.status()["0"].met.num_lost == 0


def test_who_comes_late_is_told_all_while_the_engine_sleeps(kv):
    serve(kv, [1, 2, 3, 4])
    with wire.Publisher(kv, ANYWHERE, ANYWHERE) as publisher, follow(publisher) as follower:
        assert until(lambda: follower.match([1, 2, 3, 4])) == {"0": 4}
        assert publisher.stats().num_snapshots == 0


def test_where_the_buffer_is_too_short_the_owner_is_woken_for_a_snapshot(kv):
    wanted = threading.Event()
    with wire.Publisher(kv, ANYWHERE, ANYWHERE, replay_bytes=0, wake=wanted.set) as publisher:
        for first in range(0, 40, 2):
            serve(kv, [first, first + 1])
            publisher.publish()
        until(lambda: publisher.stats().num_batches == 20)
        with follow(publisher) as follower:
            assert wanted.wait(PATIENCE_S)
            publisher.publish()
            until(lambda: follower.match([0, 1]) == {"0": 2})
            until(lambda: follower.match([38, 39]) == {"0": 2})
        assert publisher.stats().num_snapshots >= 1


@pytest.mark.parametrize("replay_bytes", [0, 400, 4000])
def test_an_idle_publisher_without_wake_answers_a_late_reader(kv, replay_bytes):
    with wire.Publisher(kv, ANYWHERE, ANYWHERE, replay_bytes=replay_bytes) as publisher:
        for first in range(0, 200, 2):
            serve(kv, [first, first + 1])
            publisher.publish()
            until(lambda first=first: publisher.stats().num_batches == first // 2 + 1)
        with follow(publisher) as follower:
            true = {
                name for run in kv.snapshot().stored for name in wire.wire_hashes(run.block_hashes)
            }
            until(lambda: follower.index.held_hashes("0") == true)
        stats = publisher.stats()
        assert 0 < stats.num_snapshots * max(replay_bytes // 2, 60) < stats.num_bytes


def test_a_publisher_that_nobody_can_ask_takes_no_snapshots(kv):
    with wire.Publisher(kv, ANYWHERE, replay_bytes=0) as publisher:
        for first in range(0, 40, 2):
            serve(kv, [first, first + 1])
            publisher.publish()
        until(lambda: publisher.stats().num_batches == 20)
        assert publisher.stats().num_snapshots == 0


def test_a_history_that_keeps_its_snapshot_answers_all_and_forgets_what_is_older():
    history = wire.History(5, 100, b"base", keep_base=True)
    for number in range(5, 25):
        history.add(b"%10d" % number)
        assert history.is_base_old == (number >= 10)
        for wanted in (0, number + 7):
            assert [sent.sequence for sent in history.since(wanted)] == [*range(4, number + 1)]
    history.rebase(b"later")
    assert [sent.sequence for sent in history.since(0)] == [24]
    assert [sent.sequence for sent in history.since(15)] == [*range(15, 25)]
    assert [sent.sequence for sent in history.since(14)] == [24]
    assert not history.is_base_old


def test_a_publisher_that_takes_anothers_place_is_followed(kv):
    serve(kv, [1, 2, 3, 4])
    first = wire.Publisher(kv, ANYWHERE, ANYWHERE)
    with follow(first, ask_after_s=0.1) as follower:
        until(lambda: follower.match([1, 2]) == {"0": 2})
        first.close()
        other = manager()
        serve(other, [5, 6])
        with wire.Publisher(other, first.endpoint, first.replay):
            until(lambda: follower.match([5, 6]) == {"0": 2})
            assert follower.match([1, 2]) == {}


def test_a_publisher_that_answers_no_more_is_forgotten(kv):
    serve(kv, [1, 2])
    publisher = wire.Publisher(kv, ANYWHERE, ANYWHERE)
    with follow(publisher, ask_after_s=0.05, forget_after_s=0.2) as follower:
        until(lambda: follower.match([1, 2]) == {"0": 2})
        publisher.close()
        until(lambda: follower.match([1, 2]) == {})
        assert not follower.status()["0"].is_known


def test_publishers_come_and_go(kv, publisher):
    serve(kv, [1, 2])
    publisher.publish()
    with wire.Subscriber({}) as follower:
        follower.add("new", wire.Source(publisher.endpoint, publisher.replay))
        until(lambda: follower.match([1, 2]) == {"new": 2})
        follower.remove("new")
        until(lambda: follower.match([1, 2]) == {})
        until(lambda: follower.status() == {})
    with pytest.raises(wire.ClosedError):
        follower.add("new", wire.Source(publisher.endpoint))


def raw(context, kind, endpoint):
    opened = context.socket(kind)
    opened.linger = 0
    opened.rcvtimeo = PATIENCE_S * 1000
    opened.connect(endpoint)
    return opened


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.mark.parametrize("wanted", [bytes(8), b"snapshot"])
def test_the_start_and_a_snapshot_are_answered_alike(kv, publisher, context, wanted):
    serve(kv, [1, 2])
    publisher.publish()
    until(lambda: publisher.stats().num_batches == 1)
    with raw(context, zmq.REQ, publisher.replay) as asking:
        asking.send(wanted)
        _, sequence, payload = asking.recv_multipart()
        assert wire.decode(payload).begins_anew
        assert int.from_bytes(sequence, "big") == publisher.stats().last_sequence - 1


@pytest.mark.parametrize(("form", "topic"), [("map", [b"kv@me"]), ("array", [])])
def test_a_replay_is_what_was_sent_under_its_topic_and_ends(kv, context, form, topic):
    with wire.Publisher(kv, ANYWHERE, ANYWHERE, topic="kv@me", form=form) as publisher:
        for first in (0, 2, 4):
            serve(kv, [first, first + 1])
            publisher.publish()
        until(lambda: publisher.stats().num_batches == 3)
        last = publisher.stats().last_sequence
        with raw(context, zmq.DEALER, publisher.replay) as asking:
            asking.send_multipart((b"", (last - 1).to_bytes(8, "big")))
            answer = [asking.recv_multipart() for _ in range(3)]
    numbers = [last - 1, last]
    assert [frames[:-1] for frames in answer[:2]] == [
        [b"", *topic, number.to_bytes(8, "big")] for number in numbers
    ]
    assert answer[2] == [b"", *[b"" for _ in topic], wire.END, b""]


def answered(asking):
    """The numbers of an answer, and its payloads, up to its end."""
    found = []
    while (frames := asking.recv_multipart())[-2] != wire.END:
        found.append((int.from_bytes(frames[-2], "big"), frames[-1]))
    return found


def test_each_request_is_answered_once_however_many_wait_for_a_snapshot(kv, context):
    wanted = threading.Event()
    with wire.Publisher(kv, ANYWHERE, ANYWHERE, replay_bytes=0, wake=wanted.set) as publisher:
        first, second, third = [raw(context, zmq.DEALER, publisher.replay) for _ in range(3)]

        def ask(*askers):
            """Let the snapshot be outdated, and take another for those who ask."""
            before = publisher.stats()
            for place in range(2):
                serve(kv, [before.num_batches + place] * 2)
                publisher.publish()
            until(lambda: publisher.stats().num_batches == before.num_batches + 2)
            wanted.clear()
            for asking in askers:
                asking.send_multipart((b"", bytes(8)))
                assert wanted.wait(PATIENCE_S)
            until(lambda: len(publisher._asking) == len(askers))
            publisher.publish()
            last = publisher.stats().last_sequence
            for asking in askers:
                [(number, payload)] = answered(asking)
                assert number == last
                assert wire.decode(payload).begins_anew
            return last

        with first, second, third:
            ask(first, second)
            last = ask(third)
            for asking in (first, second, third):
                asking.send_multipart((b"", last.to_bytes(8, "big")))
                assert [number for number, _ in answered(asking)] == [last]
            until(lambda: publisher.stats().num_replays == 6)
            assert (publisher.stats().num_snapshots, publisher.stats().num_refused) == (2, 0)


def test_a_publisher_counts_what_it_has_sent(kv, publisher, context):
    with raw(context, zmq.DEALER, publisher.replay) as asking:
        serve(kv, [1, 2])
        publisher.publish()
        publisher.publish()  # nothing has changed
        serve(kv, [3, 4])
        publisher.publish()
        until(lambda: publisher.stats().num_batches == 2)
        last = publisher.stats().last_sequence
        asking.send_multipart((b"", (last - 1).to_bytes(8, "big")))
        sent = answered(asking)
    assert [number for number, _ in sent] == [last - 1, last]
    until(lambda: publisher.stats().num_replays == 1)
    assert publisher.stats() == wire.PublisherStats(
        last_sequence=last, num_batches=2, num_bytes=sum(len(payload) for _, payload in sent),
        num_replays=1, num_snapshots=0, num_overflows=0, num_refused=0,
    )  # fmt: skip


def test_requests_that_are_none_are_refused_and_the_next_is_answered(kv, publisher, context):
    with raw(context, zmq.DEALER, publisher.replay) as asking:
        for frames in ([b"x"], [b"", b"1234567"], [b"", bytes(8), b""], [b"x", bytes(8)]):
            asking.send_multipart(frames)
        asking.send_multipart((b"", bytes(8)))
        assert len(asking.recv_multipart()) == 4
    until(lambda: publisher.stats().num_refused == 4)


def test_an_oversized_request_cuts_off_who_sent_it_and_nobody_else(kv, publisher, context):
    with raw(context, zmq.DEALER, publisher.replay) as hostile:
        hostile.send_multipart((b"", bytes(10_000)))
        with raw(context, zmq.REQ, publisher.replay) as asking:
            asking.send(bytes(8))
            assert asking.recv_multipart()


@pytest.mark.parametrize("topic", [[], [b"kv@me"]])
def test_an_engines_own_answers_are_read_with_a_topic_and_without(context, topic):
    batches = [
        wire.encode(1.0 + number, [wire.Stored([number], parent, [number, 7], 2)], 0, "map")
        for number, parent in enumerate([None, 0, 1])
    ]
    with context.socket(zmq.PUB) as live, context.socket(zmq.ROUTER) as answers:
        for each in (live, answers):
            each.linger = 0
            each.rcvtimeo = PATIENCE_S * 1000
            each.bind(ANYWHERE)
        source = wire.Source(*[each.last_endpoint.decode() for each in (live, answers)], "kv@")
        with wire.Subscriber({"e": source}) as follower:
            client, _, wanted = answers.recv_multipart()
            assert wanted == bytes(8)
            for number, payload in enumerate(batches):
                sequence = number.to_bytes(8, "big")
                answers.send_multipart([client, b"", b"other", sequence, batches[0]])
                answers.send_multipart([client, b"", *topic, sequence, payload])
            answers.send_multipart([client, b"", *[b"" for _ in topic], wire.END, b""])
            assert until(lambda: follower.match([0, 7, 1, 7, 2, 7]).get("e") == 6)
            assert follower.status()["e"].met.num_malformed == 0


class Engine:
    """Numbers its batches from 0, publishes the last of them, and answers as often as it is asked.

    Args:
        tokens: of a batch each.
        time: of the first batch.
    """

    def __init__(self, tokens, time, endpoint=ANYWHERE, replay=ANYWHERE):
        self.batches = [
            wire.encode(time + place, [wire.Stored([token], None, [token] * 2, 2)], 0, "map")
            for place, token in enumerate(tokens)
        ]
        self.context = zmq.Context()
        self.live, self.answers = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.num_asked = 0
        for each, address in ((self.live, endpoint), (self.answers, replay)):
            each.bind(address)
        self.source = wire.Source(
            *[each.last_endpoint.decode() for each in (self.live, self.answers)]
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.destroy(linger=0)

    def until(self, true):
        until(lambda: self.speak() or true())

    def speak(self):
        self.answer()
        last = len(self.batches) - 1
        self.live.send_multipart([b"", last.to_bytes(8, "big"), self.batches[last]])

    def answer(self):
        while self.answers.poll(0):
            client, _, wanted = self.answers.recv_multipart()
            self.num_asked += 1
            first = int.from_bytes(wanted, "big")
            for number, payload in enumerate(self.batches[first:], first):
                self.answers.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            self.answers.send_multipart([client, b"", wire.END, b""])


def test_an_engine_that_restarts_at_0_is_not_taken_for_the_one_before():
    """The first that is heard of it has just the number that was to come next."""
    with Engine([1], 1.0) as first:
        follower = wire.Subscriber({"e": first.source}, ask_after_s=9.0)
        first.until(lambda: follower.match([1, 1]) == {"e": 2})
    source = first.source
    with follower, Engine([2, 3], 5.0, source.endpoint, source.replay) as second:
        second.until(lambda: follower.match([3, 3]) == {"e": 2})
        second.until(lambda: follower.match([2, 2]) == {"e": 2})
        assert follower.match([1, 1]) == {}


class Hostile:
    """Publishes whatever it is told to."""

    def __init__(self, context):
        self.socket = context.socket(zmq.PUB)
        self.socket.linger = 0
        self.socket.bind(ANYWHERE)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send_until(self, frames, true):
        def sent():
            self.socket.send_multipart(frames)
            return true()

        return until(sent)


MALFORMED = {
    "one frame": [b"hello"],
    "no number": [b"", b"", b"\x92\x01\x90"],
    "a number too short": [b"", bytes(4), b"\x92\x01\x90"],
    "no batch": [b"", bytes(8), b"\xff"],
    "nothing": [b"", bytes(8), b""],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages_are_counted_and_the_next_is_read(context, name):
    hostile = Hostile(context)
    with hostile.socket, wire.Subscriber({"h": wire.Source(hostile.endpoint)}) as follower:
        met = follower._links["h"].follower.stats
        hostile.send_until(MALFORMED[name], lambda: met.num_malformed > 0)
        event = wire.Stored([1], None, [7, 8], 2)
        good = [b"", bytes(8), wire.encode(1.0, [event], None, "array")]
        hostile.send_until(good, lambda: follower.match([7, 8]) == {"h": 2})


def test_an_oversized_message_is_not_read(context):
    hostile = Hostile(context)
    source = {"h": wire.Source(hostile.endpoint)}
    with (
        hostile.socket,
        wire.Subscriber(
            source, max_message_bytes=1000, ask_after_s=0.1, forget_after_s=0.2
        ) as follower,
    ):
        large = wire.encode(1.0, [wire.Stored([1], None, [7] * 600, 600)], None, "map")
        for _ in range(5):
            hostile.socket.send_multipart([b"", bytes(8), large + bytes(2000)])
        small = wire.encode(2.0, [wire.Stored([2], None, [8, 8], 2)], None, "map")
        hostile.send_until([b"", bytes(8), small], lambda: follower.match([8, 8]))
        assert follower.match([7] * 600) == {}


def threads():
    return {each.name for each in threading.enumerate() if each.name.startswith("kvcore-")}


def test_a_port_in_use_is_an_error_that_names_it_and_leaves_nothing(kv, publisher):
    before = threads()
    for argument, options in [
        ("endpoint", {"endpoint": publisher.endpoint}),
        ("replay", {"endpoint": ANYWHERE, "replay": publisher.endpoint}),
    ]:
        with pytest.raises(wire.EndpointError, match=f"{argument}.*{publisher.endpoint}.*in use"):
            wire.Publisher(manager(), **options)
    assert threads() == before


@pytest.mark.parametrize("endpoint", ["", "5557", "tcp://127.0.0.1", "carrier://pigeon", 5557])
def test_an_address_that_is_none_is_an_error(endpoint):
    before = threads()
    with pytest.raises(wire.EndpointError, match="endpoint: wanted"):
        wire.Publisher(manager(), endpoint)
    with pytest.raises(wire.EndpointError, match="endpoint: wanted"):
        wire.Subscriber({"a": wire.Source(endpoint)})
    assert threads() == before


def test_a_subscriber_that_was_told_of_a_replay_address_that_is_none_still_closes():
    before = threads()
    subscriber = wire.Subscriber({})
    with pytest.raises(wire.EndpointError, match="replay: wanted"):
        subscriber.add("a", wire.Source("tcp://127.0.0.1:9", "5557"))
    subscriber.close()
    assert threads() == before


@pytest.mark.parametrize(
    "options", [{"rank": -1}, {"rank": "0"}, {"first_sequence": 0}, {"replay_bytes": -1}]
)
def test_numbers_that_cannot_be_are_refused(kv, options):
    with pytest.raises(kvcore.InvalidArgumentError, match=f"{next(iter(options))}: wanted"):
        wire.Publisher(kv, ANYWHERE, **options)


def test_a_manager_without_events_is_refused():
    with pytest.raises(kvcore.InvalidArgumentError, match="record_events"):
        wire.Publisher(kvcore.KVCacheManager(8, 2), ANYWHERE)


def test_closing_ends_the_thread_and_frees_the_port(kv):
    publisher = wire.Publisher(kv, ANYWHERE, ANYWHERE)
    publisher.close()
    publisher.close()
    assert not publisher._transport.is_running
    with pytest.raises(wire.ClosedError):
        publisher.publish()
    wire.Publisher(manager(), publisher.endpoint, publisher.replay).close()


def test_batches_that_wait_too_long_give_way_to_a_snapshot(kv, monkeypatch):
    monkeypatch.setattr("kvcore.wire.publisher.MAX_WAITING", 0)
    with wire.Publisher(kv, ANYWHERE, ANYWHERE) as publisher, follow(publisher) as follower:
        serve(kv, [1, 2])
        publisher.publish()  # the last before the engine is idle
        assert publisher.stats().num_overflows == 1
        until(lambda: follower.match([1, 2]) == {"0": 2})
        assert publisher.stats().num_batches == 1


def test_events_that_the_log_gave_up_give_way_to_a_snapshot(kv):
    kv.events.max_hashes = 1
    with wire.Publisher(kv, ANYWHERE, ANYWHERE) as publisher, follow(publisher) as follower:
        for first in range(0, 200, 2):
            serve(kv, [first, first + 1])
        publisher.publish()
        until(lambda: follower.match([198, 199]) == {"0": 2})
        names = {
            name for run in kv.snapshot().stored for name in wire.wire_hashes(run.block_hashes)
        }
        assert follower.index.held_hashes("0") == names


def test_the_command_follows_and_ends(kv, publisher):
    serve(kv, [1, 2, 3, 4])
    publisher.publish()
    command = [sys.executable, "-m", "kvcore.wire", publisher.endpoint, publisher.replay]
    out = subprocess.run(
        [*command, "--every", "0.5", "--lines", "2"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    ).stdout  # fmt: skip
    assert re.search(
        r"^known, silent for .* s: 2 contents; 2 batches, 0 gaps, 0 lost", out, re.MULTILINE
    )


def test_the_command_says_unknown_of_a_publisher_that_answers_and_has_nothing_to_tell(context):
    def answer():
        client, *_ = answers.recv_multipart()
        answers.send_multipart([client, b"", b"", wire.END, b""])

    with context.socket(zmq.PUB) as live, context.socket(zmq.ROUTER) as answers:
        for each in (live, answers):
            each.linger = 0
            each.rcvtimeo = PATIENCE_S * 1000
            each.bind(ANYWHERE)
        endpoint, replay = [each.last_endpoint.decode() for each in (live, answers)]
        with wire.Subscriber({"publisher": wire.Source(endpoint, replay)}) as follower:
            assert not follower.status()["publisher"].was_heard
            answer()
            until(lambda: follower.status()["publisher"].was_heard)
            written = io.StringIO()
            with contextlib.redirect_stdout(written):
                assert _say(follower, endpoint)
    assert re.match("unknown, silent for .* s: 0 contents; 0 batches", written.getvalue())


class FailingIndex(wire.Index):
    """Cannot apply what one publisher sends, or cannot forget it either."""

    fails = frozenset({"apply"})

    def apply(self, publisher, batch):
        super().apply(publisher, batch)
        if publisher == "bad" and batch.time == 2.0:
            raise KeyError(publisher)

    def forget(self, publisher):
        super().forget(publisher)
        if publisher == "bad" and "forget" in self.fails:
            raise KeyError(publisher)


@pytest.mark.parametrize("fails", [{"apply"}, {"apply", "forget"}])
def test_what_cannot_be_applied_ends_its_publisher_and_no_other(context, monkeypatch, fails):
    monkeypatch.setattr(FailingIndex, "fails", fails)
    monkeypatch.setattr("kvcore.wire.subscriber.Index", FailingIndex)
    bad, good = Hostile(context), Hostile(context)

    def batch(number, token):
        event = wire.Stored([number], None, [token, token], 2)
        return [b"", bytes(8), wire.encode(float(number), [event], None, "map")]

    sources = {"bad": wire.Source(bad.endpoint), "good": wire.Source(good.endpoint)}
    with bad.socket, good.socket, wire.Subscriber(sources) as follower:
        bad.send_until(batch(1, 7), lambda: follower.match([7, 7]) == {"bad": 2})
        bad.send_until(batch(2, 8), lambda: follower.status()["bad"].met.num_failed)
        good.send_until(batch(1, 9), lambda: follower.match([9, 9]) == {"good": 2})
        assert follower.match([7, 7]) == follower.match([8, 8]) == {}
        bad.send_until(batch(3, 6), lambda: follower.match([6, 6]) == {"bad": 2})
        follower.remove("bad")
        until(lambda: "bad" not in follower.status())
        follower.add("new", wire.Source(good.endpoint))
        until(lambda: "new" in follower.status())
        assert follower.match([9, 9]) == {"good": 2}


def test_the_command_says_that_nobody_serves_an_endpoint():
    command = [sys.executable, "-m", "kvcore.wire", "ipc:///nowhere/at-all", "--lines", "1"]
    done = subprocess.run(
        [*command, "--every", "0.1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch("nothing heard from ipc:///nowhere/at-all for 0.. s\n", done.stdout)


def test_the_command_refuses_an_address_that_is_none():
    command = [sys.executable, "-m", "kvcore.wire", "here"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "endpoint: wanted" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nothing_of_it_is_imported_with_kvcore():
    code = "import sys, kvcore; print({'zmq', 'msgspec', 'kvcore.wire'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
