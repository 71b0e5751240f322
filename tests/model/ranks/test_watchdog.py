"""A process that is gone is noticed by the others, whatever they wait for."""

import contextlib
import queue
import socket
import subprocess
import sys
import threading

import pytest

from model.errors import RankLostError
from model.ranks import ranks
from model.ranks.ranks import LOST, Watchdog, meet
from tests.hang import HANG_S

GONE = "rank {} of the processes that share the network is gone"


class Minded:
    """A watchdog to some other processes, and their ends of it."""

    def __init__(self, *ranks, grace_s=0.0):
        self.ended = threading.Event()
        pairs = {rank: socket.socketpair() for rank in ranks}
        self.others = {rank: theirs for rank, (_, theirs) in pairs.items()}
        for each in self.others.values():
            each.settimeout(HANG_S)
        mine = {rank: mine for rank, (mine, _) in pairs.items()}
        self.watchdog = Watchdog(mine, self.ended.set, grace_s)

    def said_to(self, rank):
        return int.from_bytes(self.others[rank].recv(4), "little", signed=True)

    def join(self):
        self.watchdog._thread.join(HANG_S)
        assert not self.watchdog._thread.is_alive()

    def close(self):
        for each in self.others.values():
            each.close()
        self.join()


@pytest.fixture
def mind():
    """Makes them, and sees to their end."""
    with contextlib.ExitStack() as made:
        yield lambda *ranks, **how: made.enter_context(contextlib.closing(Minded(*ranks, **how)))


def test_the_end_of_another_process_is_one_line_that_names_it_and_ends_this_one(mind, capsys):
    minded = mind(1, 2)
    assert not minded.ended.is_set()
    minded.others[2].close()
    assert minded.ended.wait(HANG_S)
    minded.join()
    assert capsys.readouterr().err == f"error: {GONE.format(2)}\n"
    assert minded.said_to(1) == 2
    assert minded.others[1].recv(4) == b""
    error = minded.watchdog.loss()
    assert (str(error), error.was_told) == (GONE.format(2), True)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_loss_is_told_to_what_has_clients_which_has_longer_to_end(mind, monkeypatch, is_late):
    monkeypatch.setattr(ranks, "_TELLING_S", 0.0)
    minded, told = mind(1, grace_s=0.0 if is_late else HANG_S), queue.Queue()
    if not is_late:
        minded.watchdog.when_lost(told.put)
    minded.others[1].close()
    assert minded.ended.wait(HANG_S)
    if is_late:
        minded.watchdog.when_lost(told.put)
    error = told.get(timeout=HANG_S)
    assert (str(error), error.was_told, told.empty()) == (GONE.format(1), True, True)


def test_what_the_first_process_has_told_is_not_told_again(mind, capsys):
    minded = mind(0)
    minded.others[0].sendall((3).to_bytes(4, "little"))
    assert minded.ended.wait(HANG_S)
    minded.join()
    assert capsys.readouterr().err == ""
    assert str(minded.watchdog.loss()) == GONE.format(3)


def test_a_process_that_fails_by_itself_says_why_and_the_others_only_end(mind, capsys):
    failing, other = mind(0), mind(0)
    first = Watchdog({1: failing.others.pop(0), 2: other.others.pop(0)}, lambda: None, 0.0)
    failing.watchdog.fail()
    for each in (first, other.watchdog):
        each._thread.join(HANG_S)
        assert str(each.loss()) == GONE.format(1)
    assert other.ended.is_set()
    assert capsys.readouterr().err == ""


def test_a_disarmed_watchdog_ends_no_process_and_says_that_its_own_ends(mind, capsys):
    minded = mind(1, grace_s=HANG_S)
    minded.watchdog.disarm()
    minded.watchdog.disarm()
    assert minded.said_to(1) == -1
    minded.others[1].close()
    minded.join()
    assert not minded.ended.is_set()
    assert capsys.readouterr().err == ""


def test_processes_that_end_in_order_are_not_lost(mind, capsys):
    minded = mind(1, 2)
    for each in minded.others.values():
        each.sendall((-1).to_bytes(4, "little", signed=True))
        each.close()
    minded.join()
    assert not minded.ended.is_set()
    assert capsys.readouterr().err == ""


def test_a_collective_that_fails_while_all_are_there_is_told_by_its_error(mind, monkeypatch):
    monkeypatch.setattr(ranks, "_NOTICE_S", 0.0)
    minded = mind(1)
    error = minded.watchdog.loss()
    assert (str(error), error.was_told) == (LOST, False)
    assert not minded.ended.is_set()


def test_the_first_process_meets_all_others_and_no_stranger(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    said = [queue.Queue() for _ in range(2)]
    made = {}

    def first(message):
        with socket.create_connection(("localhost", message[0]), HANG_S) as stranger:
            stranger.sendall(b"x" * 16)
        for each in said:
            each.put(message)

    def other(rank):
        made[rank] = meet(rank, 3, lambda _: said[rank - 1].get(timeout=HANG_S))

    threads = [threading.Thread(target=other, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    found = meet(0, 3, first)
    for thread in threads:
        thread.join(HANG_S)
    assert set(found) == {1, 2}
    for rank, connection in found.items():
        assert connection.getpeername() == made[rank][0].getsockname()
        connection.close()
        made[rank][0].close()


def test_a_first_process_that_is_not_there_is_told():
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RankLostError, match="do not meet"):
        meet(1, 2, lambda _: (port, bytes(16)))


def test_a_process_that_waits_in_vain_leaves_with_one_line():
    code = (
        "import socket, threading; from model.ranks.ranks import Watchdog;"
        "a, b = socket.socketpair(); Watchdog({1: a}, grace_s=0.0); b.close();"
        "threading.Event().wait()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (3, f"error: {GONE.format(1)}\n")
