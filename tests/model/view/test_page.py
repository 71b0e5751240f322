"""The page in a real browser: what it shows of a trace is what the trace says."""

import copy
import http.client
import itertools
import json
import random

import pytest

from tests.hang import HANG_S
from tests.model.view.conftest import CELL_COLOURS, kind, shown, simulated_trace
from tests.model.view.replay import Replay

STATE = """
const [record, order, done] = arguments;
import("/page/frames.js").then(({ readTrace }) => {
  const recording = readTrace(JSON.stringify({ kvcore: record }));
  done(order.map((index) => {
    const pool = recording.at(index);
    const tables = [];
    for (const one of pool.requests.values()) {
      one.tables.forEach((ids, group) => {
        if (ids.length) tables.push([one.id, group, [...ids]]);
      });
    }
    const holders = pool.holders();
    return { tables, cached: [...pool.cached], hits: [...pool.hits], counts: pool.counts,
      holders: [...holders.count], numCached: pool.numCached,
      requests: [...pool.requests.values()].map((one) => [one.id, one.status, one.computed,
        one.total]) };
  }));
}).catch((error) => done(String(error)));
"""
TRY_ALL = """
const [texts, done] = arguments;
import("/page/frames.js").then(({ readTrace, BadTrace }) => {
  done(texts.map((text) => {
    try {
      const recording = readTrace(text);
      for (let index = 0; index < recording.length; index += 5) recording.at(index).holders();
      return "read";
    } catch (error) {
      return error instanceof BadTrace ? `told: ${error.message}` : `fault: ${error.stack}`;
    }
  }));
});
"""


@pytest.fixture(scope="module")
def trace():
    return simulated_trace()


@pytest.fixture(scope="module")
def address(trace):
    with shown(trace) as url:
        yield url


@pytest.fixture
def viewed(page, address):
    page.open(address)
    page.wait_for("document.documentElement.dataset.frame")
    return page


def replayed(record, index):
    replay = Replay(record)
    for frame in record["frames"][: index + 1]:
        replay.apply(frame)
    return replay


@pytest.mark.parametrize("seed", [1, 2])
def test_every_moment_of_a_recording_is_what_the_frames_say_in_whatever_order_it_is_asked_for(
    viewed, seed
):
    record = simulated_trace(seed, num_steps=90)["kvcore"]
    order = list(range(len(record["frames"])))
    random.Random(seed).shuffle(order)
    answers = viewed.driver.execute_async_script(STATE, record, order)
    assert isinstance(answers, list), answers
    for index, state in zip(order, answers, strict=True):
        replay = replayed(record, index)
        _, statuses, progress, tables, cached, hits, counts = replay.state()
        told = {(number, group): ids for number, group, ids in state["tables"]}
        assert told == tables
        assert {n for n, is_cached in enumerate(state["cached"]) if is_cached} == cached
        assert {n: count for n, count in enumerate(state["hits"]) if count} == hits
        assert (state["counts"], state["numCached"]) == (counts, len(cached))
        assert {n: [status, *both] for n, status, *both in state["requests"]} == {
            n: [statuses[n], *progress[n]] for n in statuses
        }
        held = [block for table in tables.values() for block in table if block]
        assert state["holders"] == [held.count(n) for n in range(record["num_blocks"])]


def test_the_map_paints_every_block_as_it_is(viewed, trace):
    frames = trace["kvcore"]["frames"]
    for index in (0, 7, len(frames) // 2, len(frames) - 2, len(frames) - 1):
        viewed.show_frame(index, frames[index]["t"])
        replay = replayed(trace["kvcore"], index)
        held = {block for table in replay.held().values() for block in table}
        wanted = [
            "held" if n in held else "cached" if replay.cached.get(n) else "empty"
            for n in range(1, trace["kvcore"]["num_blocks"])
        ]
        assert [kind(colour) for colour in viewed.run(CELL_COLOURS)] == wanted
        used = replay.counts["used"]
        assert f"{used} of {trace['kvcore']['num_blocks'] - 1} blocks" in viewed.text("n-held")
        assert viewed.text("n-running") == str(replay.counts["running"])


def test_a_pointer_learns_who_holds_a_block_which_tokens_it_has_and_how_often_it_was_hit(
    viewed, trace
):
    record = trace["kvcore"]
    index, replay, block = next(
        (index, replay, block)
        for index in range(10, len(record["frames"]))
        for replay in [replayed(record, index)]
        for block in range(1, record["num_blocks"])
        if replay.hits.get(block) and sum(block in ids for ids in replay.held().values()) == 2
    )
    viewed.show_frame(index, record["frames"][index]["t"])
    viewed.press("map", *["\ue014"] * block)  # the arrow to the right
    text = viewed.text("tip")
    holders = sorted({n for (n, _), ids in replay.held().items() if block in ids})
    assert f"Block {block} · shared by {len(holders)}" in text
    assert all(f"#{number}" in text for number in holders)
    hits = replay.hits[block]
    assert ("hit once" if hits == 1 else f"hit {hits} times") in text
    (_, group), ids = next((place, ids) for place, ids in replay.held().items() if block in ids)
    start = ids.index(block) * record["groups"][group]["block_size"]
    assert f"tokens {start} to {start + 1}" in text
    assert viewed.text("spoken") == text
    viewed.press("map", "\ue00c")  # Escape
    assert not viewed.is_shown("tip")


def test_no_text_of_a_trace_becomes_markup(viewed, trace):
    last = len(trace["kvcore"]["frames"]) - 2
    viewed.show_frame(last, trace["kvcore"]["frames"][last]["t"])
    seen = ""
    viewed.run("document.getElementById('list').open = true")
    for _ in range(trace["kvcore"]["num_blocks"] - 1):
        viewed.press("map", "\ue014")
        seen += viewed.text("tip")
    assert "<img src=x onerror=hacked()>" in seen
    assert viewed.run("return document.querySelectorAll('main img, #tip img, script').length") == 1
    assert viewed.run("return typeof window.hacked") == "undefined"


def test_a_name_of_a_file_becomes_no_markup(page, trace):
    with shown(trace, "<b onclick=x>&.json") as url:
        page.open(url)
        page.wait_for("document.documentElement.dataset.frame")
        assert page.text("source").startswith("<b onclick=x>&.json: ")


def test_the_page_asks_no_other_server_and_runs_nothing_that_is_not_its_own(viewed, address):
    names = viewed.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(names) > 5
    assert all(name.startswith(address) for name in names)
    viewed.run(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        "document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'http://127.0.0.1:9/x.png';"
        "document.body.append(i)"
    )
    assert viewed.run("return window.hacked") is None
    said = viewed.faults()
    assert len(said) == 2
    assert all("Content Security Policy" in text for text in said)


def test_keys_move_the_slider_frame_by_frame_and_play_goes_to_the_end(viewed, trace):
    frames = trace["kvcore"]["frames"]
    viewed.show_frame(3, frames[3]["t"])
    viewed.press("slider", "\ue014", "\ue014", "\ue012")
    viewed.wait_for("document.documentElement.dataset.frame === '4'")
    assert "frame 5 of" in viewed.find("slider").get_attribute("aria-valuetext")
    viewed.run("document.getElementById('speed').value = '16'")
    viewed.press("play", "\ue007")
    viewed.wait_for(f"document.documentElement.dataset.frame === '{len(frames) - 1}'")
    viewed.wait_for("document.getElementById('play').textContent === 'Play'")


def test_the_table_lists_the_requests_of_the_moment(viewed, trace):
    record = trace["kvcore"]
    index = next(i for i in range(20, 60) if replayed(record, i).counts["running"] > 1)
    viewed.show_frame(index, record["frames"][index]["t"])
    viewed.run("document.getElementById('list').open = true")
    viewed.wait_for("document.querySelectorAll('#rows tr').length")
    rows = viewed.run(
        "return [...document.querySelectorAll('#rows tr')].map((row) =>"
        "  [...row.children].slice(0, 5).map((cell) => cell.textContent))"
    )
    beginnings, statuses, progress, *_ = replayed(record, index).state()
    assert sorted(rows) == sorted(
        [f"#{n}", statuses[n], str(beginnings[n][0][0]), *map(str, progress[n])] for n in statuses
    )


def test_both_colour_schemes_are_legible(viewed):
    """Text against what it stands on: a contrast of 4.5, as WCAG AA wants it."""
    for scheme in ("light", "dark"):
        viewed.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        colours = viewed.run(
            """
            const style = getComputedStyle(document.documentElement);
            const pen = document.createElement("canvas").getContext("2d");
            return Object.fromEntries(["ink", "quiet", "page", "card", "empty", "accent",
              "on-accent", "bad", "bad-page"].map((name) => {
              pen.fillStyle = style.getPropertyValue(`--${name}`);
              pen.fillRect(0, 0, 1, 1);
              return [name, [...pen.getImageData(0, 0, 1, 1).data]];
            }));
            """
        )
        for text, ground in (
            ("ink", "page"), ("ink", "card"), ("ink", "empty"), ("quiet", "page"),
            ("quiet", "card"), ("on-accent", "accent"), ("bad", "bad-page"),
        ):  # fmt: skip
            assert contrast(colours[text], colours[ground]) >= 4.5, (scheme, text, ground)
    viewed.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def contrast(one, other):
    def light(colour):
        parts = [value / 255 for value in colour[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    return max(light(one), light(other)) / min(light(one), light(other))


def test_a_pool_of_a_million_blocks_is_shown_many_blocks_a_cell(page, trace):
    counts = trace["kvcore"]["frames"][0]["counts"] | {"disk copies": 1234, "disk hits": 5}
    million = {
        "version": 1, "num_blocks": 1_000_001,
        "groups": [{"kind": "FullAttention", "block_size": 16}],
        "frames": [
            {"t": 0, "whole": True, "counts": counts, "begun": [0, 9, 0],
             "status": [0, "running"], "tables": [[0, 0, 0, [1, 300_000]]],
             "cached": [500_001, 500_000, 1], "progress": [0, 4_800_000, 4_800_000]},
            {"t": 1, "counts": counts, "status": [0, "stop"], "tables": [[0, 0, 0, []]],
             "cached": [1, 300_000, 1]},
        ],
    }  # fmt: skip
    with shown({"traceEvents": [], "kvcore": million}) as url:
        page.open(url)
        page.wait_for("document.documentElement.dataset.frame === '0'")
        each = int(page.find("map").get_attribute("data-each"))
        kinds = [kind(colour) for colour in page.run(CELL_COLOURS)]
        tiers = page.run("return [...document.querySelectorAll('.tier')].map((t) => t.innerText)")
    assert [" ".join(tier.split()) for tier in tiers] == ["disk 1,2345 loaded"]
    assert each > 100
    assert len(kinds) == -(-1_000_000 // each)
    edges = [name for name, _ in itertools.groupby(kinds)]
    assert edges == ["held", "empty", "cached"]
    assert kinds.count("held") == pytest.approx(300_000 / each, abs=1)


def test_a_map_shows_the_blocks_that_were_used_and_opens_where_most_are(page, trace):
    counts = trace["kvcore"]["frames"][0]["counts"]
    large = {
        "version": 1, "num_blocks": 16_385,
        "groups": [{"kind": "FullAttention", "block_size": 16}],
        "frames": [
            {"t": 0, "whole": True, "counts": counts | {"used": 3}, "begun": [0, 9, 0],
             "status": [0, "running"], "tables": [[0, 0, 0, [1, 3]]], "progress": [0, 48, 48]},
            {"t": 1, "counts": counts | {"used": 70}, "tables": [[0, 0, 3, [4, 67]]]},
            {"t": 2, "counts": counts | {"used": 0}, "status": [0, "stop"],
             "tables": [[0, 0, 0, []]], "cached": [1, 70, 1]},
        ],
    }  # fmt: skip
    with shown({"traceEvents": [], "kvcore": large}) as url:
        page.open(url)
        page.wait_for("document.documentElement.dataset.frame === '1'")
        kinds = [kind(colour) for colour in page.run(CELL_COLOURS)]
        about = page.find("about-map").text
    assert kinds == ["held"] * 70 + ["empty"] * 58
    assert "the first 128 are shown" in about


BROKEN = {
    "nothing": ("", "not JSON"),
    "not JSON": ('{"kvcore": ', "not JSON"),
    "a number": ("7", "no trace that --trace has written"),
    "another program's trace": ('{"traceEvents": []}', "holds no KV cache blocks"),
    "another version": ('{"kvcore": {"version": 2}}', "version: wanted 1, got 2"),
    "no frames": (
        '{"kvcore": {"version": 1, "num_blocks": 9, "groups": [{"kind": "x", "block_size": 1}]}}',
        "frames: wanted some, got nothing",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_trace_is_one_clear_line_and_the_page_goes_on(viewed, tmp_path, name):
    text, message = BROKEN[name]
    path = tmp_path / "broken.json"
    path.write_text(text)
    viewed.find("file").send_keys(str(path))
    viewed.wait_for("!document.getElementById('fault').hidden")
    line = viewed.text("fault")
    assert message in line
    assert line.startswith("broken.json: ")
    assert "\n" not in line
    assert viewed.is_shown("view")  # the trace from before
    path.write_text(json.dumps(simulated_trace(9, 5)))
    viewed.find("file").send_keys(str(path))
    viewed.wait_for("document.getElementById('fault').hidden")


def mutations(document, count, seed):
    """Traces with one value somewhere in them replaced, left out or doubled."""
    draw = random.Random(seed)
    for _ in range(count):
        broken = copy.deepcopy(document)
        place = broken["kvcore"]
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw.choice(keys)
            if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.1:
                break
            place = place[key]
        wrong = draw.choice([None, -1, 2**40, 1.5, "x", [], {}, [[]], True, "delete", "double"])
        if wrong == "delete":
            del place[key]
        elif wrong == "double" and isinstance(place, list):
            place.append(place[key])
        else:
            place[key] = wrong
        yield json.dumps(broken)


def test_whatever_is_wrong_in_a_trace_is_told_and_never_a_fault(viewed):
    document = simulated_trace(6, 12)
    answers = viewed.driver.execute_async_script(TRY_ALL, list(mutations(document, 400, 1)))
    assert [answer for answer in answers if answer.startswith("fault")] == []
    told = [answer for answer in answers if answer.startswith("told")]
    assert len(told) > 150
    assert all("\n" not in answer and len(answer) < 300 for answer in told)
    assert len({answer.split(":")[2] for answer in told if answer.count(":") > 2}) > 5


def test_the_server_of_a_trace_knows_its_own_name_alone(address):
    """A page elsewhere whose name was made to point here gets nothing."""
    port = int(address.rstrip("/").rpartition(":")[2])
    for host, path, status in (
        (f"127.0.0.1:{port}", "/view/trace", 200),
        (f"localhost:{port}", "/page/page.js", 200),
        (f"evil.example:{port}", "/view/trace", 421),
        (f"evil.example:{port}", "/", 421),
        (f"127.0.0.1:{port}", "/page/../../../pyproject.toml", 404),
        (f"127.0.0.1:{port}", "/page//etc/passwd", 404),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        assert (answer.status, bool(answer.read())) == (status, True)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        connection.close()
