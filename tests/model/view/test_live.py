"""The page of a running server: what its readers are told is what the engine has."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

import kvcore
from model import EngineConfig, SamplingParams, Submission
from model.async_engine import AsyncEngine
from model.engine import Engine
from model.host import Host
from model.serve import live
from model.serve.config import ServeConfig
from model.serve.live import PoolFeed
from tests.hang import HANG_S as DEADLINE_S
from tests.model.networks import build
from tests.model.reference import ReferenceBackend
from tests.model.serve.conftest import Served
from tests.model.view.conftest import CELL_COLOURS, kind
from tests.model.view.replay import Replay

KEY = "an-api-key-that-is-hard-to-guess"
PROMPT = "one prompt that both of them share, "


@pytest.fixture(scope="module")
def make_engine():
    network = build("qwen3", 25)

    def make():
        sizes = EngineConfig(num_blocks=40, block_size=4, max_num_seqs=4)
        return Engine(network, ReferenceBackend(), sizes)

    return make


@contextmanager
def serving(make_engine, **settings):
    config = ServeConfig(port=0, served_model_name="small", **settings)
    with Served(AsyncEngine(make_engine), config) as served:
        yield served


@pytest.fixture(scope="module")
def served(make_engine):
    with serving(make_engine) as running:
        yield running


class Reader:
    """Reads `/view/frames` as the page does."""

    def __init__(self, served, key=None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=served.url, timeout=DEADLINE_S, headers=headers)
        self.replay, self.head = None, None

    def __enter__(self):
        self.stream = self.client.stream("GET", "/view/frames")
        self.answer = self.stream.__enter__()
        assert self.answer.status_code == 200, self.answer.read()
        self.lines = self.answer.iter_lines()
        return self

    def __exit__(self, *_):
        self.answer.close()
        self.client.close()

    def read(self):
        """The next event; it is applied."""
        event = data = None
        for line in self.lines:
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
            elif data is not None:
                break
        assert data is not None, "the stream has ended"
        if event == "head":
            self.head, self.replay = data, Replay(data)
        else:
            self.replay.apply(data)
        return data

    def read_until(self, condition):
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            self.read()
            if self.replay is not None and self.replay.time_s is not None and condition():
                return
        raise AssertionError("it did not come about")


def complete(served, prompt, max_tokens=40, **fields):
    body = {"model": "small", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body | fields, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_readers_see_what_the_engine_has_whenever_they_come(served):
    with Reader(served) as early, ThreadPoolExecutor() as pool:
        early.read_until(lambda: True)
        work = [pool.submit(complete, served, PROMPT + end) for end in ("a", "b", "cc")]
        assert [one.result()["usage"]["completion_tokens"] for one in work] == [40] * 3
        num_steps = served.call(lambda engine: engine.stats.num_steps)
        early.read_until(lambda: early.replay.counts["steps"] == num_steps)
        early.read()
        with Reader(served) as late:
            late.read_until(lambda: True)
            states = served.call(lambda engine: kvcore.pool_map(engine.kv))
            for reader in (early, late):
                assert reader.head["num_blocks"] == 40
                assert reader.replay.held() == {}
                cached = {n for n, state in reader.replay.cached.items() if state}
                assert cached == {n for n, s in enumerate(states) if s == kvcore.CACHED}
            assert {n for n in early.replay.hits if early.replay.hits[n]} == {
                n for n in late.replay.hits if late.replay.hits[n]
            }


def test_nothing_is_sampled_without_a_viewer(served, monkeypatch):
    looks = []
    look = PoolFeed._look

    def counted(feed, engine, **settings):
        looks.append(feed)
        return look(feed, engine, **settings)

    monkeypatch.setattr(PoolFeed, "_look", counted)
    complete(served, PROMPT, 8)
    assert looks == []
    with Reader(served) as reader:
        reader.read_until(lambda: True)
    (feed,) = set(looks)
    served.wait_for(lambda: feed.num_viewers == 0 and feed._watch is None)
    served.call(lambda _: None)  # what was asked before it is done
    count = len(looks)
    complete(served, PROMPT, 8)
    assert len(looks) == count


def test_a_block_tells_who_holds_it_and_which_text_it_has(served):
    complete(served, "0123456789", 6)
    states = served.call(lambda engine: kvcore.pool_map(engine.kv))
    told = [
        httpx.get(f"{served.url}/view/blocks/{number}").json()
        for number, state in enumerate(states)
        if state == kvcore.CACHED
    ]
    assert ["0", "1", "2", "3"] in [block["pieces"] for block in told]
    assert all(block["state"] == "cached" and block["holders"] == [] for block in told)
    for wrong, status in (("40", 404), ("-1", 404), (str(2**70), 404), ("x", 400)):
        answer = httpx.get(f"{served.url}/view/blocks/{wrong}")
        assert (answer.status_code, "error" in answer.json()) == (status, True)


def test_a_held_block_names_the_requests_that_hold_it(make_engine):
    engine = make_engine()
    pair = engine.submit(Submission("held, held", SamplingParams(max_tokens=9, n=2)))
    while len(engine.running) < 2:
        engine.step()
    shared = pair[0].running_sequence.block_table[0]
    report, holders = live._report(engine, shared)
    assert (holders, report.num_holders) == ([one.request_id for one in pair], 2)
    assert live._is_open(report)
    own = pair[1].running_sequence.block_table[-1]
    assert live._report(engine, own)[1] == [pair[1].request_id]


def test_what_was_sent_with_a_salt_is_never_shown(served):
    def salted(engine):
        engine.kv.reset()
        secret = engine.kv.open([9] * 5, namespace=kvcore.Namespace(salt=b"tenant"))
        engine.kv.reserve(secret, 5)
        engine.kv.commit(secret, 5)
        engine.kv.close(secret)
        return kvcore.pool_map(engine.kv).index(kvcore.CACHED)

    block = served.call(salted)
    told = httpx.get(f"{served.url}/view/blocks/{block}").json()
    assert (told["state"], told["pieces"], told["num_tokens"]) == ("cached", [], 4)
    assert "not shown" in told["note"]
    served.call(lambda engine: engine.kv.reset())


@pytest.mark.parametrize(
    ("settings", "shows"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),  # noqa: S104  # that is the case
        ({"host": "gpu.example"}, False),
        ({"api_keys": ("a",), "host": "0.0.0.0"}, True),  # noqa: S104
        ({"api_keys": ("a", "a")}, True),
        ({"api_keys": ("a", "b")}, False),
    ],
)
def test_texts_are_shown_where_all_who_can_ask_are_one(settings, shows):
    assert live._are_one(ServeConfig(**settings)) is shows


class Immediate:
    """An engine that runs a call at once."""

    def __init__(self, engine):
        self.engine = engine
        self.host = Host()
        self.calls = 0

    async def call(self, run):
        self.calls += 1
        return run(self.engine)


def parsed(event):
    return [json.loads(line[6:]) for line in event.splitlines() if line.startswith("data: ")]


def test_a_slow_reader_misses_frames_and_gets_the_whole_pool_after_them(make_engine):
    engine = make_engine()

    async def run():
        feed = PoolFeed(Immediate(engine), shows_texts=True, period_s=0.0)
        quick, slow = feed.events(), feed.events()
        first = await anext(quick)
        slow_first = await anext(slow)
        assert len(parsed(first)) == len(parsed(slow_first)) == 2
        replay = Replay(parsed(first)[0])
        replay.apply(parsed(first)[1])
        requests = [
            engine.add_request("abcdefgh" * n, SamplingParams(max_tokens=30)) for n in (1, 2)
        ]
        for _ in range(3 * live._MAX_PENDING):
            if engine.has_unfinished:
                engine.step()
            else:
                requests.append(engine.add_request("xyz" * len(requests)))
            replay.apply(parsed(await anext(quick))[-1])
        assert max(viewer.pending.qsize() for viewer in feed._viewers) <= live._MAX_PENDING
        late = Replay(replay.head)
        while late.time_s is None or late.time_s < replay.time_s:
            for document in parsed(await anext(slow)):
                if "t" in document:
                    late.apply(document)
        while replay.time_s < late.time_s:
            replay.apply(parsed(await anext(quick))[-1])
        assert late.state() == replay.state()
        first, second = [request.request_id for request in requests[:2]]
        assert replay.labels[first] == "abcdefgh"
        assert replay.labels[second] == ("abcdefgh" * 2)
        await quick.aclose()
        await slow.aclose()
        assert (feed.num_viewers, feed._watch) == (0, None)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


class Like:
    """A module with other functions in some places, for one reader alone."""

    def __init__(self, module, **others):
        self.__dict__.update(vars(module) | others)


def test_looks_that_take_long_are_seldom(make_engine, monkeypatch):
    engine = make_engine()

    async def run():
        source = Immediate(engine)
        feed = PoolFeed(source, shows_texts=False, period_s=0.0)
        waits, has_waited = [], asyncio.Event()

        async def sleep(seconds):
            waits.append(seconds)
            has_waited.set()
            await asyncio.sleep(0)

        clock = iter(range(10**6))  # each look takes a second
        monkeypatch.setattr(live, "asyncio", Like(asyncio, sleep=sleep))
        monkeypatch.setattr(live, "time", Like(time, perf_counter=lambda: next(clock)))
        reader = feed.events()
        await anext(reader)
        await has_waited.wait()
        await reader.aclose()
        assert set(waits) == {live._SHARE}

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_so_many_may_watch_and_no_more(served, monkeypatch):
    monkeypatch.setattr(live, "_MAX_VIEWERS", 1)
    with Reader(served) as reader:
        reader.read()
        answer = httpx.get(f"{served.url}/view/frames", timeout=DEADLINE_S)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "too_many_viewers"
        assert "Retry-After" in answer.headers


def test_a_reader_that_watches_does_not_keep_the_server_from_its_end(make_engine):
    with serving(make_engine) as running, Reader(running) as reader:
        reader.read()
        running.run(running.engine.drain(1.0))
        with pytest.raises(AssertionError, match="has ended"):
            reader.read_until(lambda: False)
        assert httpx.get(f"{running.url}/view/frames").status_code == 503


def test_the_page_follows_a_running_server_and_talks_to_it(page, served):
    served.call(lambda engine: engine.kv.reset())
    page.open(served.url)
    page.wait_for("document.documentElement.dataset.frame")
    assert page.text("source") == "live: small"
    page.run("document.getElementById('mode').value = 'text'")
    hostile = "<img src=x onerror=hacked()>"
    page.press("prompt", hostile)
    page.press("send", "\ue007")
    page.wait_for("document.querySelector('#talk .note')")
    assert page.text("talk").startswith(hostile + hostile)  # what was asked, then it goes on
    assert "tokens in" in page.text("talk")
    assert page.run("return document.querySelectorAll('#talk img').length") == 0
    page.wait_for("Number(document.getElementById('n-output').textContent.split(' ')[0]) > 0"
                  " || document.getElementById('n-cached').textContent !== '0'")  # fmt: skip
    states = served.call(lambda engine: kvcore.pool_map(engine.kv))
    page.wait_for(
        f"document.getElementById('n-cached').textContent === '{states.count(kvcore.CACHED)}'"
    )
    kinds = [kind(colour) for colour in page.run(CELL_COLOURS)]
    assert kinds == [("empty", "cached", "held")[state] for state in states[1:]]
    block = states.index(kvcore.CACHED)
    page.press("map", *["\ue014"] * block)
    page.wait_for("document.querySelectorAll('#tip .pieces span').length === 4")


@pytest.mark.parametrize("width", [320, 390, 700, 1200])
def test_nothing_lies_off_a_page_of_any_width(page, served, width):
    """Each control can be seen and pressed; a table that is wider scrolls by itself."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open(served.url)
        page.wait_for("!document.getElementById('follow').hidden")
        page.run("document.getElementById('list').open = true")
        off = page.run(
            "return [...document.querySelectorAll('body *')].filter(e => e.offsetParent"
            " && !e.closest('table') && (e.getBoundingClientRect().right > innerWidth + 1"
            " || e.getBoundingClientRect().left < -1)).map(e => e.tagName + e.id)"
        )
        assert off == []
        wide = "document.documentElement.scrollWidth"
        assert page.run(f"return {wide}") <= width
        page.find("follow").click()
        assert page.find("follow").get_attribute("aria-pressed") == "false"
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_asks_for_the_key_and_keeps_it_nowhere(page, make_engine):
    with serving(make_engine, api_keys=(KEY,)) as locked:
        page.open(locked.url)
        page.wait_for("!document.getElementById('lock').hidden")
        page.press("key", "wrong", "\ue007")
        page.wait_for(
            "!document.getElementById('lock').hidden && !document.getElementById('key').value"
        )
        page.press("key", KEY, "\ue007")
        page.wait_for("document.documentElement.dataset.frame")
        assert not page.is_shown("lock")
        kept = page.run(
            "return JSON.stringify([localStorage, sessionStorage, document.cookie, location.href,"
            " document.documentElement.outerHTML, document.getElementById('key').value,"
            " performance.getEntries().map((one) => one.name)])"
        )
        assert KEY not in kept
        said = page.faults()
        assert said
        assert all("401" in text for text in said)
        page.open("about:blank")  # its stream ends before the server does


def test_the_page_needs_no_key_but_what_it_shows_does(make_engine):
    with serving(make_engine, api_keys=(KEY,)) as locked:
        for path, status in (
            ("/", 200), ("/page/page.js", 200), ("/page/source", 200), ("/page/nothing", 404),
            ("/view/frames", 401), ("/view/blocks/1", 401),
        ):  # fmt: skip
            answer = httpx.get(locked.url + path)
            assert answer.status_code == status, path
        assert "default-src 'none'" in httpx.get(locked.url).headers["Content-Security-Policy"]
        with Reader(locked, KEY) as reader:
            reader.read()
            assert reader.head["shows_texts"] is True
