"""Copies that are read out of the memory of another process, over NIXL as it is installed."""

import logging
import os
from pathlib import Path

import pytest

from kvcore import tiers
from tests.kvcore.tiers.peer_process import serve
from tests.kvcore.tiers.test_peers import (
    DEADLINE_S,
    WHOLE,
    another_process,
    asking,
    check,
    load,
    until,
)

pytest.importorskip("nixl._api", reason="NIXL is not installed: pip install nixl")


@pytest.fixture(scope="module")
def nixl():
    return tiers.Nixl(is_same_machine=True)


def num_listening(pid):
    """The TCP ports that a process listens on."""
    own = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in own for row in rows)


def test_a_prompt_is_read_out_of_the_memory_of_another_process(nixl):
    with another_process("127.0.0.1:0", "--nixl") as (process, address):
        kv, memory, made, tier = asking(address, memory=nixl)
        until(lambda: tier.stats.num_records == WHOLE)
        seq = load(kv, made)
        assert not tier.stats.faults
        assert seq.num_computed_tokens == 4 * WHOLE
        assert tier.num_by_transport == {"tcp": 0, "nixl": WHOLE}
        assert tier.stats.num_hits == WHOLE
        check(kv, memory, seq)
        assert num_listening(process.pid) == 1
        assert num_listening(os.getpid()) == 0
        made.close()


def test_a_peer_that_is_killed_before_its_answer_is_read_costs_nothing_but_the_load(nixl):
    with another_process("127.0.0.1:0", "--nixl", "--die", 3) as (dying, address):
        kv, memory, made, tier = asking(address, memory=nixl)
        until(lambda: tier.stats.num_records == WHOLE)
        seq = load(kv, made)
        assert seq.num_computed_tokens == 0
        assert dying.wait(DEADLINE_S) == -9
        assert 3 <= tier.stats.num_hits <= 4
        assert tier.stats.faults.total()
        check(kv, memory, seq)
        until(lambda: not tier.stats.is_enabled)
        kv.reset()
    num_read = tier.num_by_transport["nixl"]
    with another_process(address, "--nixl"):
        until(lambda: tier.stats.num_records == WHOLE)
        check(kv, memory, load(kv, made))
        assert tier.num_by_transport["nixl"] == num_read + WHOLE
        made.close()


@pytest.mark.parametrize("has_it", ["the server", "the client"])
def test_where_one_side_has_no_nixl_copies_are_sent(nixl, has_it):
    server = serve("127.0.0.1:0", memory=nixl if has_it == "the server" else None)
    kv, memory, made, tier = asking(server.address, memory=nixl if has_it == "the client" else None)
    until(lambda: tier.stats.num_records == WHOLE)
    check(kv, memory, load(kv, made))
    assert tier.num_by_transport == {"tcp": WHOLE, "nixl": 0}
    assert not tier.stats.faults
    made.close()
    server.close()


def test_memory_that_cannot_be_reached_costs_one_question_and_then_copies_are_sent(
    nixl, monkeypatch, caplog
):
    described = tiers.memory.NixlMemory.describe
    monkeypatch.setattr(
        tiers.memory.NixlMemory, "describe", lambda memory: b"0.0.0" + described(memory)[5:]
    )
    server = serve("127.0.0.1:0", memory=nixl)
    kv, memory, made, tier = asking(server.address, memory=nixl)
    until(lambda: tier.stats.num_records == WHOLE)
    check(kv, memory, load(kv, made))
    assert tier.num_by_transport == {"tcp": WHOLE, "nixl": 0}
    assert tier.stats.faults == {"foreign": 1}
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    made.close()
    server.close()


def test_no_more_is_read_than_is_shared(nixl):
    shared, reader = nixl.share(4096), nixl.reader(8192)
    reader.attach(shared.describe())
    with pytest.raises(tiers.LinkError, match="short"):
        reader.read(0, 8192, 0.0)
    with pytest.raises(tiers.LinkError, match="failed"):
        reader.attach(b"nothing")
    reader.close()
    shared.close()
