"""A peer over TCP: another process that serves, is killed, has other weights, or is none at all."""

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

import kvcore
from kvcore import tiers
from kvcore.tiers import peer as peer_module
from kvcore.tiers import peer_server
from tests.hang import HANG_S as DEADLINE_S
from tests.kvcore.tiers.kills import ROOT
from tests.kvcore.tiers.peer_process import BLOCK_BYTES, PROMPT, SECRET, begin, compute, serve

WHOLE = len(PROMPT) // 4


@contextmanager
def another_process(address, *args):
    command = [sys.executable, "-m", "tests.kvcore.tiers.peer_process", address, *map(str, args)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def until(is_true):
    """Wait, because another thread or process will see to it."""
    end_s = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < end_s
        threading.Event().wait(0.002)


def asking(address, *, secret=SECRET, weights="9f3c", further=(), memory=None):
    """A manager with a peer, and the peer."""
    tier = tiers.PeerTier(address, secret=secret, memory=memory)
    return *begin([*further, tier], weights), tier


def load(kv, made, namespace=kvcore.DEFAULT_NAMESPACE):
    """The sequence of the prompt, with what could be loaded of it."""
    seq = kv.open(PROMPT, namespace=namespace)
    job = made.begin_load(seq)
    if job is not None:
        job.run()
        made.finish_load(job)
    return seq


def check(kv, memory, seq):
    """Compute the rest; every block has what the prompt has."""
    compute(kv, memory, seq)
    assert [memory.blocks[one][0] for one in seq.block_table[:WHOLE]] == [*range(WHOLE)]
    kv.close(seq)
    kvcore.check(kv)


def test_a_prompt_that_another_process_has_computed_is_loaded():
    host = tiers.HostTier(1 << 26)
    with another_process("127.0.0.1:0") as (_, address):
        kv, memory, made, tier = asking(address, further=[host])
        until(lambda: tier.stats.num_records == WHOLE)
        seq = load(kv, made)
        assert seq.num_computed_tokens == 4 * WHOLE
        assert made.find(seq).num_tokens == 4 * WHOLE
        check(kv, memory, seq)
        assert (tier.stats.num_hits, tier.stats.read_bytes) == (WHOLE, WHOLE * BLOCK_BYTES)
        assert host.stats.num_records == WHOLE  # it has them too now
        assert not tier.stats.faults
        made.close()


def test_a_peer_that_is_killed_in_the_middle_of_an_answer_costs_nothing_but_the_load():
    with another_process("127.0.0.1:0", "--die", 3) as (dying, address):
        kv, memory, made, tier = asking(address)
        until(lambda: tier.stats.num_records == WHOLE)
        seq = load(kv, made)
        assert seq.num_computed_tokens == 0
        assert dying.wait(DEADLINE_S) == -9
        assert tier.stats.num_hits == 3
        assert tier.stats.faults["torn"] + tier.stats.faults["failed"] > 0
        check(kv, memory, seq)
        until(lambda: not tier.stats.is_enabled)
        kv.reset()  # the pool forgets, so that it has to be loaded once more
    with another_process(address):
        until(lambda: tier.stats.num_records == WHOLE)
        check(kv, memory, load(kv, made))
        assert tier.stats.num_hits == 3 + WHOLE
        made.close()


@pytest.mark.parametrize(
    ("fields", "fault"),
    [({"secret": b"another"}, "refused"), ({"weights": "other"}, "foreign")],
    ids=["another secret", "other weights"],
)
def test_a_process_with_another_secret_or_meaning_hears_nothing(fields, fault, caplog):
    server = serve("127.0.0.1:0")
    _, _, made, tier = asking(server.address, **fields)
    until(lambda: tier.stats.faults[fault] > 1)
    assert tier.stats.num_records == 0
    assert server.stats.num_refused > 0
    assert server.stats.num_served == 0
    assert len(caplog.records) == 1  # said once
    made.close()
    server.close()


def test_what_has_a_salt_stays_in_its_process():
    server = serve("127.0.0.1:0")
    kv, _, made, tier = asking(server.address)
    until(lambda: tier.stats.num_records == WHOLE)  # of twice as many
    seq = load(kv, made, kvcore.Namespace(salt=b"tenant"))
    assert seq.num_computed_tokens == tier.stats.num_hits == server.stats.num_missing == 0
    made.close()
    server.close()


def test_a_reset_on_either_side_forgets_what_the_peer_had():
    server = serve("127.0.0.1:0")
    kv, _, made, tier = asking(server.address)
    until(lambda: tier.stats.num_records == WHOLE)
    kv.reset()
    assert load(kv, made).num_computed_tokens == 0
    made.close()
    _, _, made, tier = asking(server.address)
    until(lambda: tier.stats.num_records == WHOLE)
    server.manager.kv.reset()
    until(lambda: tier.stats.num_records == 0 and tier.epoch == 1)
    made.close()
    server.close()


@pytest.mark.parametrize(("says", "fault"), [(b"", "late"), (b"HTTP/1.1 400\r\n" * 9, "foreign")])
def test_something_else_at_the_address_is_a_miss(says, fault, monkeypatch):
    monkeypatch.setattr(peer_module, "_HANDSHAKE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tier = tiers.PeerTier(f"127.0.0.1:{listener.getsockname()[1]}", has_thread=False)
        tier.start(tiers.meaning_of({}), 1)
        with ThreadPoolExecutor(1) as other:
            accepted = other.submit(listener.accept)
            accepted.add_done_callback(lambda done: done.result()[0].sendall(says))
            assert not tier.hear()
        accepted.result()[0].close()
        assert tier.stats.faults == {fault: 1}
        tier.close()


def test_a_stranger_that_sends_anything_is_hung_up_on():
    server = serve("127.0.0.1:0")
    host, port = tiers.parse_address("", server.address)
    with socket.create_connection((host, port)) as stranger:
        stranger.settimeout(DEADLINE_S)
        welcome = stranger.recv(1000)
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(200))
        assert len(welcome) == 40
        with suppress(ConnectionResetError):
            assert not stranger.recv(1000)
    until(lambda: server.stats.num_connections == 0)
    server.close()


def test_silent_connections_keep_no_peer_out(monkeypatch):
    monkeypatch.setattr(peer_server, "_HANDSHAKE_S", 60.0)
    server = serve("127.0.0.1:0")
    at = tiers.parse_address("", server.address)
    _, _, before, known = asking(server.address)
    until(lambda: known.stats.num_records == WHOLE)
    with ExitStack() as silent:
        for _ in range(2 * peer_server._MAX_CONNECTIONS):
            silent.enter_context(socket.create_connection(at))
        until(lambda: server.stats.num_connections == peer_server._MAX_CONNECTIONS)
        kv, memory, made, tier = asking(server.address)
        until(lambda: tier.stats.num_records == WHOLE)
        check(kv, memory, load(kv, made))
        assert tier.stats.num_hits == WHOLE
        assert known.stats.is_enabled  # it had shown that it is one, so it has not been closed
        assert server.stats.num_connections == peer_server._MAX_CONNECTIONS
    before.close()
    made.close()
    until(lambda: server.stats.num_connections == 0)
    server.close()


def test_a_peer_that_forgets_all_again_and_again_is_left_alone(monkeypatch):
    """Each time, loads that run here are given up, those of other tiers too."""
    monkeypatch.setattr(
        tiers.PeerSession, "news", lambda _: tiers.link.encode_news([], [], is_new=True)
    )
    server = serve("127.0.0.1:0")
    _, _, made, tier = asking(server.address)
    until(lambda: tier.stats.faults["stale"] == 2)
    assert tier.epoch == peer_module._MAX_RESETS + 2  # each of the last two ended a connection
    assert tier._pause_s(0) == 4.0
    made.close()
    server.close()


def test_a_manager_with_nothing_but_a_peer_stores_nothing():
    kv, memory, made, _ = asking("127.0.0.1:1")
    seq = kv.open(PROMPT)
    compute(kv, memory, seq)
    assert made.begin_store() is None
    assert not made.find(seq).num_copies["peer 127.0.0.1:1"]
    made.close()


@pytest.mark.parametrize(
    "text", ["", "9000", "host", "host:", ":9000", "a:70000", "a b:1", "::1:9"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(kvcore.InvalidArgumentError, match=r"^peer: wanted HOST:PORT, got "):
        tiers.PeerTier(text)


def test_addresses_are_on_this_machine_or_not():
    for text, host, is_here in [
        ("[::1]:9", "::1", True),
        ("localhost:1", "localhost", True),
        ("127.9.9.9:1", "127.9.9.9", True),
        ("10.0.0.1:1", "10.0.0.1", False),
        ("[::]:1", "::", False),
        ("node-1:1", "node-1", False),
    ]:
        assert tiers.parse_address("peer", text) == (host, int(text.split(":")[-1]))
        assert tiers.is_loopback(host) == is_here


def test_an_address_in_use_is_refused_in_one_line():
    server = serve("127.0.0.1:0")
    with pytest.raises(tiers.TierError, match=r"^serve_kv: cannot listen on .*in use$"):
        serve(server.address)
    server.close()
