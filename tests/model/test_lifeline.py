"""A process that is gone is noticed by the others, whatever they wait for."""

import queue
import socket
import subprocess
import sys
import threading

import pytest

from model.device.lifeline import LOST, Lifeline, meet
from model.errors import RankLostError

_S = 10.0


def lifeline(grace_s):
    ours, theirs = socket.socketpair()
    ended = threading.Event()
    return Lifeline([ours], ended.set, grace_s), theirs, ended


def test_the_end_of_another_process_ends_this_one():
    line, theirs, ended = lifeline(0)
    assert not ended.is_set()
    theirs.close()
    assert ended.wait(_S)
    line._thread.join(_S)


def test_a_process_that_was_let_go_ends_nobody():
    line, theirs, ended = lifeline(_S)
    line.let_go()
    theirs.close()
    line._thread.join(_S)
    assert not line._thread.is_alive()
    assert not ended.is_set()


def test_the_first_process_meets_all_others_and_no_stranger(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    said = [queue.Queue() for _ in range(2)]
    made = {}

    def first(message):
        with socket.create_connection(("localhost", message[0]), _S) as stranger:
            stranger.sendall(b"x" * 16)
        for each in said:
            each.put(message)

    def other(rank):
        made[rank] = meet(rank, 3, lambda _: said[rank - 1].get(timeout=_S))

    threads = [threading.Thread(target=other, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    found = meet(0, 3, first)
    for thread in threads:
        thread.join(_S)
    assert len(found) == 2
    ours = {connection.getpeername() for connection in found}
    assert ours == {made[rank][0].getsockname() for rank in (1, 2)}
    for connection in (*found, *made[1], *made[2]):
        connection.close()


def test_a_first_process_that_is_not_there_is_told():
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RankLostError, match="do not meet"):
        meet(1, 2, lambda _: (port, bytes(16)))


def test_a_process_that_waits_in_vain_leaves_with_one_line():
    code = (
        "import socket, threading; from model.device.lifeline import Lifeline;"
        "a, b = socket.socketpair(); Lifeline([a], grace_s=0.0); b.close();"
        "threading.Event().wait()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (3, f"error: {LOST}\n")
