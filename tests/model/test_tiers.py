"""Host memory and disk behind the engine's cache: the same tokens, found again, whatever fails."""

import errno
import io
import json
import shutil
import sys
import threading
import time
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path

import pytest
import torch
import xxhash

import backends
import kvcore
from kvcore.tiers import Folder, PeerSession
from model import EngineConfig, InvalidArgumentError, SamplingParams, Submission
from model.caches.host_memory import HostPool
from model.caches.tiers import PooledBlocks
from model.control.request import FinishReason
from model.control.submission import salted
from model.control.tier_transfers import TransferCosts
from model.engine import Engine
from model.trace import write_trace
from tests.hang import HANG_S
from tests.model.networks import build
from tests.model.recurrent_networks import engine_of

SYSTEM = [*b"you are an agent that works on files; "]
SIZES = {"num_blocks": 36, "block_size": 4, "swap_memory_bytes": 0, "disk_bytes": 1 << 30}
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def always_worth(monkeypatch):
    """Networks this small compute faster than they load: what is found is loaded all the same.

    A load is waited for on a machine that is busy too.
    """
    monkeypatch.setattr(TransferCosts, "is_worth", lambda *_: True)
    monkeypatch.setattr(TransferCosts, "deadline_s", lambda *_: 60.0)


@pytest.fixture(params=["read at once", "read late"])
def is_async(request):
    return request.param == "read late"


def make(kind="qwen3", seed=25, **sizes):
    sizes = {**SIZES, **sizes}
    if sizes.get("disk") is None:
        del sizes["disk_bytes"]
    sizes = {name: str(one) if isinstance(one, Path) else one for name, one in sizes.items()}
    return Engine(build(kind, seed), backends.get_backend("numba"), EngineConfig(**sizes))


def turns(num_agents=6, num_turns=3):
    """Agents in turn, each with its own growing context: several times the pool."""
    draw = torch.Generator().manual_seed(3)
    texts = [[*SYSTEM] for _ in range(num_agents)]
    for _ in range(num_turns):
        for text in texts:
            text.extend(torch.randint(97, 122, (13,), generator=draw).tolist())
            yield [*text]


def run(engine, prompts=None, **fields):
    """The tokens of prompts one after another."""
    told = []
    for prompt in turns() if prompts is None else prompts:
        [request] = engine.submit(Submission(prompt, GREEDY, **fields))
        while not request.is_finished:
            engine.step()
        told.append(request.output_tokens)
        kvcore.check(engine.kv)
        while engine.tiers is not None and engine.tiers._stores:
            engine.tiers.wait()
            engine.tend()
    return told


def drain(engine):
    """Wait until everything is stored."""
    while engine.tiers.is_busy:
        engine.tiers.wait()
        engine.tend()
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


@pytest.mark.parametrize("where", ["host", "disk", "both"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_trace_of_several_pools_gives_the_tokens_of_no_tiers(kind, where, is_async, tmp_path):
    named = {
        "host_memory_bytes": 1 << 24 if where != "disk" else None,
        "disk": tmp_path if where != "host" else None,
    }
    engine = make(kind, async_scheduling=is_async, sanitize=True, **named)
    assert run(engine) == run(make(kind, num_blocks=400))
    drain(engine)
    assert engine.tiers.stats.num_loaded_tokens > 200
    assert engine.tiers.stats.num_late_loads == engine.tiers.stats.num_failed_loads == 0
    engine.end()


@pytest.mark.parametrize(
    "kind", [pytest.param("Qwen3_5TextConfig", marks=pytest.mark.slow), "JambaConfig"]
)
def test_states_are_loaded_like_blocks(kind, tmp_path):
    texts = [*turns(3, 3)]
    wanted = [one.request.output_tokens for one in engine_of(kind).generate(texts, GREEDY)]
    for num_loads in (0, 1):
        engine = engine_of(kind, disk=str(tmp_path), max_num_batched_tokens=16)
        assert run(engine, texts) == wanted
        engine.end()
        assert engine.tiers.stats.num_loads >= num_loads
        assert engine.tiers.stats.num_failed_loads == 0


def test_many_at_once_with_chunks_samples_and_preemptions_give_the_same(is_async, tmp_path):
    prompts, sampling = [*turns(8, 2)], replace(GREEDY, max_tokens=20)
    small = make(
        disk=tmp_path,
        async_scheduling=is_async,
        max_num_batched_tokens=16,
        host_memory_bytes=50_000,
    )
    for _ in range(2):
        got = small.generate(prompts, sampling)
        large = make(num_blocks=400).generate(prompts, sampling)
        assert [g.request.output_tokens for g in got] == [o.request.output_tokens for o in large]
    assert small.stats.num_preemptions > 0
    assert small.tiers.stats.num_loads > 0
    samples = small.submit(Submission(prompts[0], replace(sampling, n=3)))
    while small.has_unfinished:
        small.step()
    assert len({tuple(request.output_tokens) for request in samples}) == 1
    drain(small)


def test_a_new_process_finds_what_the_last_one_stored(tmp_path):
    prompt = [*turns(1, 3)][-1]
    first = make(disk=tmp_path)
    wanted = run(first, [prompt])
    first.end()
    second = make(disk=tmp_path)
    [request] = second.submit(Submission(prompt, GREEDY))
    outputs = second.step()
    assert request.sequence is None  # it waits, and computes nothing meanwhile
    while second.has_unfinished:
        outputs += second.step()
    assert [request.output_tokens] == wanted
    assert request.num_loaded_tokens == request.num_cached_tokens == (len(prompt) - 1) // 4 * 4
    assert second.stats.num_hit_tokens == request.num_cached_tokens


@pytest.mark.parametrize(
    "other",
    [{"seed": 26}, {"kind": "llama"}, {"block_size": 8}, {"batch_invariant": True}],
    ids=["other weights", "another network", "another block size", "batch invariant"],
)
def test_copies_of_another_meaning_are_a_miss(other, tmp_path):
    prompts = [*turns(1, 3)]
    first = make(disk=tmp_path)
    run(first, prompts)
    first.end()
    second = make(disk=tmp_path, **other)
    kind, seed = other.pop("kind", "qwen3"), other.pop("seed", 25)
    assert run(second, prompts) == run(make(kind, seed, **other), prompts)
    assert second.tiers.stats.num_loads == 0
    assert second.tiers.tiers.tiers[0].stats.faults["foreign"] > 0


def test_a_salt_finds_only_its_own_copies(tmp_path):
    prompt = [*turns(1, 3)][-1]
    first = make(disk=tmp_path)
    run(first, [prompt], namespace=salted("one"))
    first.end()
    second = make(disk=tmp_path)
    for salt, num_loads in (("", 0), ("two", 0), ("one", 1)):
        run(second, [prompt], namespace=salted(salt))
        assert second.tiers.stats.num_loads == num_loads


def test_an_image_finds_only_its_own_copies(tmp_path):
    prompt = [*turns(1, 3)][-1]
    items = [kvcore.MultimodalItem(bytes([n] * 16), 8, 8) for n in range(2)]
    first = make(disk=tmp_path)
    run(first, [prompt], items=items[:1])
    first.end()
    second = make(disk=tmp_path)
    [request] = second.submit(Submission(prompt, GREEDY, items=items[1:]))
    while second.has_unfinished:
        second.step()
    assert request.num_loaded_tokens == 8  # those before it
    second.kv.reset()
    second.end()


def segments(path):
    return sorted((path / "kvcore-tier").glob("*.kvseg"))


def test_a_corrupted_folder_is_computed_again(tmp_path):
    prompts = [*turns(2, 3)]
    first = make(disk=tmp_path)
    wanted = run(first, prompts)
    first.end()
    for path in segments(tmp_path):
        data = bytearray(path.read_bytes())
        for place in range(5000, len(data), 9000):
            data[place] ^= 1
        path.write_bytes(data)
    second = make(disk=tmp_path)
    assert run(second, prompts) == wanted
    stats = second.tiers.tiers.tiers[0].stats
    assert sum(stats.faults.values()) > 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_is_full_or_fails_costs_nothing_but_its_copies(code, tmp_path, monkeypatch):
    wanted = run(make())
    engine = make(disk=tmp_path)

    def fail(*_):
        raise OSError(code, "injected")

    monkeypatch.setattr(Folder, "write", fail)
    assert run(engine) == wanted
    drain(engine)
    assert not engine.tiers.stats.num_loads


def test_a_folder_that_is_removed_while_running_costs_nothing_but_its_copies(tmp_path):
    prompts = [*turns()]
    engine = make(disk=tmp_path / "cache")
    got = run(engine, prompts[:9])
    shutil.rmtree(tmp_path / "cache")
    assert got + run(engine, prompts[9:]) == run(make(), prompts)
    drain(engine)


@pytest.fixture
def held(monkeypatch):
    """Loads that do not go on before `held.set()`."""
    event, load = threading.Event(), PooledBlocks.load

    def wait(self, job, mark):
        event.wait(HANG_S)
        load(self, job, mark)

    monkeypatch.setattr(PooledBlocks, "load", wait)
    yield event
    event.set()


def restarted(tmp_path, prompts, **sizes):
    """An engine whose folder has what these prompts need, and their tokens."""
    first = make(disk=tmp_path)
    wanted = run(first, prompts)
    first.end()
    return make(disk=tmp_path, **sizes), wanted


def test_a_request_that_ends_while_it_waits_gives_everything_back(held, tmp_path, is_async):
    prompts = [*turns(2, 2)]
    engine, wanted = restarted(tmp_path, prompts, async_scheduling=is_async)
    [request] = engine.submit(Submission(prompts[-1], GREEDY))
    engine.step()
    assert request in engine.tiers
    assert request.sequence is None
    assert engine.kv.num_free_blocks < engine.kv.num_usable_blocks
    assert engine.abort(request)
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    kvcore.check(engine.kv)
    held.set()
    assert run(engine, prompts) == wanted


def test_those_behind_a_request_that_waits_go_on(held, tmp_path):
    prompts = [*turns(1, 2)]
    engine, wanted = restarted(tmp_path, prompts, max_num_seqs=1)
    [waits] = engine.submit(Submission(prompts[-1], GREEDY))
    engine.step()
    assert waits in engine.tiers
    assert run(engine, [[*b"something else"]]) == run(make(), [[*b"something else"]])
    assert not waits.is_finished
    held.set()
    while engine.has_unfinished:
        engine.step()
    assert [waits.output_tokens] == wanted[-1:]
    assert waits.num_loaded_tokens > 0


def test_a_load_that_never_comes_is_computed(held, tmp_path, monkeypatch):
    prompts = [*turns(1, 2)]
    engine, wanted = restarted(tmp_path, prompts)
    monkeypatch.setattr(TransferCosts, "deadline_s", lambda *_: 0.05)
    assert run(engine, prompts) == wanted
    assert (engine.tiers.stats.num_late_loads, engine.tiers.stats.num_loads) == (2, 0)
    held.set()
    engine.end()


def test_a_running_request_takes_the_blocks_of_a_load_behind_it(held, tmp_path):
    prompts = [*turns(2, 2)]
    engine, wanted = restarted(tmp_path, prompts, num_blocks=34)
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    [first] = engine.submit(Submission([*b"first"], long))
    [behind] = engine.submit(Submission(prompts[-1], GREEDY))
    engine.step()
    assert behind in engine.tiers
    while not first.is_finished:
        engine.step()
    assert first.num_preemptions == 0
    held.set()
    while engine.has_unfinished:
        engine.step()
    assert [behind.output_tokens] == wanted[-1:]


def test_a_step_that_fails_leaves_nothing_on_its_way(held, tmp_path, monkeypatch):
    prompts = [*turns(1, 2)]
    engine, wanted = restarted(tmp_path, prompts)
    engine.submit(Submission(prompts[-1], GREEDY))
    engine.step()
    engine.submit(Submission([*b"something else"], GREEDY))
    monkeypatch.setattr(engine._runner, "send", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert not engine.has_unfinished
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    monkeypatch.undo()
    held.set()
    assert run(engine, prompts) == wanted


@pytest.mark.parametrize("what", ["its logits", "a step"])
def test_a_failure_costs_no_copies_of_before(what, tmp_path, monkeypatch, is_async):
    """Those of others, stored before, are loaded; those of the failure are not."""
    prompts = [*turns(2, 2)]
    engine = make(disk=tmp_path, host_memory_bytes=1 << 24, async_scheduling=is_async)
    wanted = [run(engine, [each], namespace=salted(str(n))) for n, each in enumerate(prompts)]
    drain(engine)
    bad = [*b"a prompt of which nothing may be found any more"]
    [request] = engine.submit(Submission(bad, GREEDY))
    engine.step()
    with monkeypatch.context() as patch:
        if what == "a step":
            patch.setattr(engine._runner, "send", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        else:
            logits = engine.network.logits
            patch.setattr(engine.network, "logits", lambda step: logits(step) * torch.nan)
            while engine.has_unfinished:
                engine.step()
            assert request.finish_reason is FinishReason.ERROR
    for tier in engine.tiers.tiers.tiers:
        assert tier.stats.num_records > 0
    assert wanted == [
        run(engine, [each], namespace=salted(str(n))) for n, each in enumerate(prompts)
    ]
    if what == "its logits" or is_async:  # of a step that was read, what it wrote is right
        [again] = engine.submit(Submission(bad, GREEDY))
        while engine.has_unfinished:
            engine.step()
        assert again.num_loaded_tokens == again.num_cached_tokens == 0
        assert engine.tiers.stats.num_loads >= len(prompts) // 2
    engine.end()


@pytest.mark.parametrize("batch_bytes", [1, 1 << 20], ids=["a block at once", "all at once"])
def test_batches_of_any_size_move_the_same_bytes(batch_bytes, tmp_path, monkeypatch):
    sizes = []

    def moved(move, pool, block_ids, host_ids):
        sizes.append(len(block_ids))
        return move(pool, block_ids, host_ids)

    monkeypatch.setattr(HostPool, "batch_bytes", batch_bytes)
    for name in ("load", "store"):
        monkeypatch.setattr(HostPool, name, partialmethod(partial(moved, getattr(HostPool, name))))
    engine = make(disk=tmp_path, sanitize=True)
    assert run(engine) == run(make())
    drain(engine)
    assert engine.tiers.stats.num_loaded_tokens > 200
    assert engine.tiers.stats.num_failed_loads == 0
    assert (max(sizes) == 1) == (batch_bytes == 1)


def test_a_folder_has_one_process_and_replicas_a_folder_each(tmp_path):
    first = make(disk=tmp_path / "a")
    with pytest.raises(InvalidArgumentError, match=r"^disk: .* is in use by another process$"):
        make(disk=tmp_path / "a")
    first.end()
    replicas = [make(disk=tmp_path / "b", shares_disk=True) for _ in range(2)]
    assert sorted(one.name for one in (tmp_path / "b").iterdir()) == ["replica-0", "replica-1"]
    for one in replicas:
        one.end()


def test_bad_input_names_its_setting(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)  # as if it were not installed
    (tmp_path / "file").touch()
    for fields, wanted in [
        ({"disk": tmp_path / "file"}, "^disk: .*cannot be used: Not a directory"),
        ({"disk": tmp_path, "disk_bytes": 100}, "^disk_bytes: wanted a capacity of at least"),
        ({"host_memory_bytes": 100}, "^host_memory_bytes: wanted room for a copy of"),
        ({"host_memory_bytes": 0}, "^host_memory_bytes: "),
        ({"disk": tmp_path, "enable_prefix_caching": False}, "^disk: wanted prefix caching"),
        ({"peer": ("here",)}, "^peer: wanted HOST:PORT, got 'here'$"),
        ({"peer": ("10.0.0.1:9",)}, r"^peer: wanted an address on this machine .*--kv-secret PATH"),
        ({"disk": tmp_path, "serve_kv": "0.0.0.0:9"}, "^serve_kv: wanted an address on this mach"),
        ({"serve_kv": "127.0.0.1:0"}, "^serve_kv: has no effect without host_memory_bytes or disk"),
        ({"peer": ("a:1",), "kv_secret": tmp_path / "file"}, "^kv_secret: wanted a file of at lea"),
        ({"peer": ("a:1",), "kv_secret": tmp_path / "none"}, "^kv_secret: .*No such file"),
        ({"kv_transport": "tcp"}, "^kv_transport: has no effect without peer or serve_kv"),
        ({"peer": ("[::1]:1",), "kv_transport": "nixl"}, r"^kv_transport: wanted NIXL \(pip inst"),
    ]:
        with pytest.raises(InvalidArgumentError, match=wanted):
            make(**fields)


def test_another_version_is_refused_in_a_line(tmp_path):
    engine, _ = restarted(tmp_path, [[*SYSTEM]])
    engine.end()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[8] = 9
    data[24:32] = xxhash.xxh3_64_intdigest(bytes(data[:24])).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(InvalidArgumentError, match=r"^disk: the folder has segments of version 9"):
        make(disk=tmp_path)


def test_without_tiers_nothing_is_watched():
    engine = make()
    assert engine.tiers is None
    assert engine.kv.pool.watcher is None


def test_a_trace_has_what_each_tier_has_and_what_was_loaded(tmp_path):
    prompts = [*turns(2, 2)]
    engine, _ = restarted(tmp_path, prompts, host_memory_bytes=1 << 24)
    recorder = engine.record()
    recorder.record_pool(engine.model.codec.decode)
    run(engine, prompts)
    engine.end()
    out = io.StringIO()
    write_trace(out, recorder)
    trace = json.loads(out.getvalue())
    tiers = engine.tiers.tiers.tiers
    last = trace["kvcore"]["frames"][-2]["counts"]
    assert {name for name in last if "copies" in name} == {"host copies", "disk copies"}
    told = [event["args"] for event in trace["traceEvents"] if event["name"] == "copies loaded"]
    assert told[-1] == {tier.name: tier.stats.num_hits for tier in tiers}
    assert last["disk hits"] == told[-1]["disk"] > 0


@pytest.fixture
def peers():
    """Two engines, of which the second loads from the first, which has computed the prompts."""
    made = []

    def begin(prompts, **sizes):
        first = make(host_memory_bytes=1 << 26, serve_kv="127.0.0.1:0")
        made.append(first)
        wanted = run(first, prompts)
        drain(first)
        second = make(peer=(first.tiers.server.address,), **sizes)
        made.append(second)
        [*_, peer] = second.tiers.tiers.tiers
        records = first.tiers.tiers.tiers[0].stats.num_records
        until(lambda: peer.stats.num_records == records)
        return first, second, wanted

    yield begin
    for engine in made:
        engine.end()


def until(is_true):
    end_s = time.monotonic() + HANG_S
    while not is_true():
        assert time.monotonic() < end_s
        threading.Event().wait(0.002)


@pytest.mark.parametrize("kind", ["alone", "behind host memory"])
def test_what_a_peer_has_computed_is_loaded_and_gives_the_same_tokens(kind, peers, is_async):
    sizes = {} if kind == "alone" else {"host_memory_bytes": 1 << 24}
    prompts = [*turns(3, 3)]
    first, second, wanted = peers(prompts, async_scheduling=is_async, sanitize=True, **sizes)
    assert run(second, prompts) == wanted
    assert second.tiers.stats.num_loads > 0
    assert second.tiers.stats.num_failed_loads == second.tiers.stats.num_late_loads == 0
    served = first.tiers.server.stats.num_served
    assert served == second.tiers.tiers.tiers[-1].stats.num_hits > 0
    if sizes:
        drain(second)
        second.empty_cache(enable_caching=True)  # its host memory, too: and the peer is not asked
        assert run(second, prompts) == wanted
        assert first.tiers.server.stats.num_served == served


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_copies_of_a_peer_are_read_over_nixl_where_both_have_it(transport, peers):
    pytest.importorskip("nixl._api", reason="NIXL is not installed: pip install nixl")
    prompts = [*turns(3, 3)]
    first, second, wanted = peers(prompts, kv_transport=transport)
    assert run(second, prompts) == wanted
    stats = first.tiers.server.stats
    assert stats.num_read == (stats.num_served if transport == "auto" else 0)
    assert second.tiers.tiers.tiers[-1].stats.num_hits == stats.num_served > 0


def test_a_peer_that_goes_away_costs_nothing_but_its_copies(peers):
    prompts = [*turns(3, 3)]
    first, second, wanted = peers(prompts)
    got = run(second, prompts[:4])
    first.end()
    assert got + run(second, prompts[4:]) == wanted
    drain(second)


def test_a_peer_that_does_not_answer_is_given_up_at_the_deadline(peers, monkeypatch):
    answers, copy = threading.Event(), PeerSession.copy

    def late(self, question):
        answers.wait(HANG_S)
        return copy(self, question)

    monkeypatch.setattr(PeerSession, "copy", late)
    prompts = [*turns(1, 2)]
    _, second, wanted = peers(prompts)
    monkeypatch.setattr(TransferCosts, "deadline_s", lambda *_: 0.05)
    assert run(second, prompts[-1:]) == wanted[-1:]
    assert (second.tiers.stats.num_late_loads, second.tiers.stats.num_loads) == (1, 0)
    answers.set()
