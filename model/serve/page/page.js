// The page: where its frames come from, which moment is shown, and what a pointer or a key asks.
// Text of prompts and tokens reaches the document as text nodes alone.

import { Chat } from "./chat.js";
import { Lanes, PoolMap, colour, drawChart, timeAt } from "./draw.js";
import { BadTrace, Recording, readTrace } from "./frames.js";
import { Refused, ask, events, setKey } from "./server.js";

const $ = (id) => document.getElementById(id);
const LIVE_SECONDS = 60; // shown of what is live
const KEPT_SECONDS = 900; // and kept

const map = new PoolMap($("map"));
const lanes = new Lanes($("lanes"));
const seen = { recording: null, isLive: false, isFollowing: true, isPlaying: false, time: 0,
  to: 0, lit: null, cursor: -1, isDirty: false, tipAsked: 0 };

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function fault(message) {
  $("fault").hidden = !message;
  $("fault").textContent = message ?? "";
}

function redraw() {
  if (seen.isDirty) return;
  seen.isDirty = true;
  requestAnimationFrame(() => {
    seen.isDirty = false;
    draw();
  });
}

function windowShown() {
  const { recording, isLive, isFollowing } = seen;
  if (!isLive) return { from: recording.start, to: Math.max(recording.end, recording.start + 1e-6) };
  if (isFollowing) seen.to = recording.end;
  if (seen.time > seen.to) seen.to = seen.time;
  if (seen.time < seen.to - LIVE_SECONDS) seen.to = seen.time + LIVE_SECONDS;
  return { from: Math.max(recording.start, seen.to - LIVE_SECONDS),
    to: Math.max(seen.to, recording.start + 5) };
}

function draw() {
  const { recording } = seen;
  if (recording === null || recording.length === 0) return;
  if (seen.isLive && seen.isFollowing) seen.time = recording.end;
  const index = recording.indexAt(seen.time);
  const pool = recording.at(index);
  const shown = { ...windowShown(), now: seen.time };
  if (seen.at && seen.at.frame !== index) refreshTip(pool, index);
  map.draw(pool, recording.numShown, seen);
  lanes.draw(recording, { ...shown, lit: seen.lit });
  drawChart($("chart"), recording, pool.head.num_blocks - 1, shown);
  drawNumbers(pool);
  const slider = $("slider");
  [slider.min, slider.max, slider.value] = [recording.start, recording.end, seen.time];
  $("clock").textContent = `${(seen.time - recording.start).toFixed(2)} s of `
    + `${(recording.end - recording.start).toFixed(1)}`;
  slider.setAttribute("aria-valuetext", `${$("clock").textContent}, frame ${index + 1} of `
    + `${recording.length}`);
  $("about-lanes").textContent = "thin: waiting or preempted · pale: prompt · full: writing"
    + (lanes.numHidden ? ` · ${lanes.numHidden} more rows do not fit` : "");
  if ($("list").open) drawTable(pool);
  document.documentElement.dataset.frame = index;
}

function drawNumbers(pool) {
  const { counts } = pool;
  const usable = pool.head.num_blocks - 1;
  const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
  const put = (name, value, more = "") => {
    $(`n-${name}`).replaceChildren(value, ...(more ? [element("small", "", more)] : []));
  };
  const many = (number) => number.toLocaleString("en");
  put("held", share(counts.used, usable), `${many(counts.used)} of ${many(usable)} blocks`);
  put("cached", many(pool.numCached));
  put("hit", share(counts.hit, counts.prompt), `of ${many(counts.prompt)} prompt tokens`);
  put("running", many(counts.running));
  put("waiting", many(counts.waiting));
  put("output", many(counts.output), `${many(Math.round(rate()))} a second`);
  put("steps", many(counts.steps));
  put("evicted", many(counts.evicted));
  put("preemptions", many(counts.preemptions));
  const tiers = Object.keys(counts).filter((name) => name.endsWith(" copies"));
  for (const one of document.querySelectorAll("#numbers .tier")) one.remove();
  for (const name of tiers) {
    const tier = name.slice(0, -" copies".length);
    $("numbers").append(element("div", "tier", element("dt", "", tier), element("dd", "",
      many(counts[name]), element("small", "", `${many(counts[`${tier} hits`] ?? 0)} loaded`))));
  }
  const { each } = map.layout;
  const { numShown } = seen.recording;
  const sizes = pool.head.groups.map((one) => one.block_size);
  $("about-map").textContent = `${many(usable)} blocks of ${[...new Set(sizes)].join(" and ")} tokens`
    + (each > 1 ? `, ${many(each)} a cell` : "")
    + (numShown < usable ? `; the first ${many(numShown)} are shown, no other was used` : "");
}

// Tokens a second around the moment that is shown.
function rate() {
  const { recording, time, isLive } = seen;
  const { points } = recording;
  const span = isLive ? 2 : Math.max(0.05, (recording.end - recording.start) / 20);
  const until = points.findLast((point) => point.t <= time);
  const since = points.findLast((point) => point.t <= time - span) ?? points[0];
  return until && until.t > since.t ? (until.output - since.output) / (until.t - since.t) : 0;
}

function drawTable(pool) {
  const held = pool.holders();
  $("rows").replaceChildren(...[...pool.requests.values()].map((one) => {
    const blocks = one.tables.flatMap((ids) => [...ids].filter((id) => id > 0));
    const shared = blocks.filter((id) => held.count[id] > 1).length;
    const cells = [`#${one.id}`, one.status, one.prompt, one.computed, one.total, blocks.length,
      shared, seen.recording.label(one.id)];
    return element("tr", "", ...cells.map((cell) => element("td", "", String(cell))));
  }));
}

// What a pointer or the keys are on.

function describeCell(pool, found) {
  if (found.count > 1) {
    const stop = found.block + found.count;
    const holders = pool.holders();
    let [held, shared, cached] = [0, 0, 0];
    for (let id = found.block; id < stop; id += 1) {
      held += holders.count[id] > 0;
      shared += holders.count[id] > 1;
      cached += pool.cached[id];
    }
    return [element("b", "", `Blocks ${found.block} to ${stop - 1}`), element("div", "quiet",
      `${held} held (${shared} of them shared), ${cached} cached`)];
  }
  return describeBlock(pool.block(found.block));
}

function describeBlock(block) {
  const parts = [element("b", "", `Block ${block.id}`), ` · ${block.state === "held"
    && block.holders.length > 1 ? `shared by ${block.holders.length}` : block.state}`];
  const who = block.holders.length || block.owner < 0 ? block.holders : [block.owner];
  if (who.length) {
    parts.push(element("div", "who", ...who.slice(0, 8).map((id) => {
      const dot = element("span", "dot");
      dot.style.background = colour(id);
      const label = seen.recording.label(id).replace(/\s+/g, " ");
      const text = `#${id}${label ? ` ${label}` : ""}`;
      return element("span", "", dot, block.state === "cached" ? `computed by ${text}` : text);
    }), ...(who.length > 8 ? [`and ${who.length - 8} more`] : [])));
  }
  if (block.state === "empty") return parts;
  const stop = block.start + (block.length ?? block.size);
  const hits = ["not hit yet", "hit once"][block.hits] ?? `hit ${block.hits} times`;
  const { groups } = seen.recording.head;
  parts.push(element("div", "quiet", `tokens ${block.start} to ${stop - 1} · ${hits}`
    + (groups.length > 1 ? ` · ${groups[block.group].kind}` : "")));
  const pieces = block.pieces
    ?? seen.recording.text(block.holders[0] ?? block.owner, block.start, stop);
  if (pieces.length) {
    parts.push(element("div", "pieces", ...pieces.map((text) => element("span", "",
      text.replace(/\n/g, "⏎\u200b").replace(/\t/g, "→") || "∅"))));
  } else if (block.note) parts.push(element("div", "quiet", block.note));
  return parts;
}

function showTip(parts, x, y) {
  const tip = $("tip");
  tip.replaceChildren(...parts);
  tip.hidden = false;
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  tip.style.left = `${Math.max(8, Math.min(x + 16, window.innerWidth - wide - 8))}px`;
  tip.style.top = `${y + 18 + tall > window.innerHeight ? Math.max(8, y - tall - 12) : y + 18}px`;
}

function point(found, x, y, { isKey = false } = {}) {
  const pool = seen.recording.at(seen.recording.indexAt(seen.time));
  seen.cursor = found.block;
  const block = found.count === 1 ? pool.block(found.block) : null;
  seen.lit = block?.holders.length ? new Set(block.holders) : null;
  redraw();
  seen.at = { found, x, y };
  showTip(describeCell(pool, found), x, y);
  if (isKey) $("spoken").textContent = $("tip").textContent;
  if (block && block.state !== "empty" && seen.isLive && seen.isFollowing) {
    askForBlock(block, x, y, isKey);
  }
}

// Time goes on under a pointer that rests.
function refreshTip(pool, index) {
  const { found, x, y } = seen.at;
  seen.at.frame = index;
  if (found.count > 1) {
    showTip(describeCell(pool, found), x, y);
    return;
  }
  const block = pool.block(found.block);
  seen.lit = block.holders.length ? new Set(block.holders) : null;
  const told = seen.told?.id === block.id && seen.told.owner === block.owner ? seen.told : {};
  showTip(describeBlock({ ...block, pieces: told.pieces, note: told.note }), x, y);
  const isDue = performance.now() - (seen.askedAt ?? 0) > 1000;
  if (isDue && block.state !== "empty" && seen.isLive && seen.isFollowing) {
    askForBlock(block, x, y, false);
  }
}

async function askForBlock(block, x, y, isKey) {
  seen.tipAsked += 1;
  seen.askedAt = performance.now();
  const number = seen.tipAsked;
  await new Promise((resolve) => { setTimeout(resolve, 80); });
  if (number !== seen.tipAsked) return;
  try {
    const told = await (await ask(`view/blocks/${block.id}`)).json();
    if (number !== seen.tipAsked) return;
    const known = { ...block, state: told.state, holders: told.holders, start: told.start,
      group: told.group, pieces: told.pieces, note: told.note, length: told.num_tokens || block.size,
      owner: told.holders[0] ?? block.owner };
    seen.told = known;
    showTip(describeBlock(known), x, y);
    if (isKey) $("spoken").textContent = $("tip").textContent;
  } catch (error) {
    if (error instanceof Refused && error.status === 401) lock();
  }
}

function pointAway() {
  seen.tipAsked += 1;
  [seen.lit, seen.cursor, seen.at] = [null, -1, null];
  $("tip").hidden = true;
  redraw();
}

function pointAtMap(event) {
  if (seen.recording === null || !seen.recording.length) return;
  const found = map.find(event.offsetX, event.offsetY, seen.recording.newest);
  if (found === null) pointAway();
  else if (found.block !== seen.cursor) point(found, event.clientX, event.clientY);
  else showTip([...$("tip").childNodes], event.clientX, event.clientY);
}

function moveOnMap(event) {
  if (seen.recording === null || map.layout === undefined) return;
  const { each, columns, cells } = map.layout;
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  if (event.key === "Escape") pointAway();
  if (!(event.key in steps)) return;
  event.preventDefault();
  const now = seen.cursor < 0 ? -1 : Math.floor((seen.cursor - 1) / each);
  const cell = now < 0 ? 0 : Math.max(0, Math.min(cells - 1, now + steps[event.key]));
  const { size } = map.layout;
  const box = $("map").getBoundingClientRect();
  const count = Math.min(each, seen.recording.head.num_blocks - 1 - cell * each);
  point({ block: cell * each + 1, count }, box.left + ((cell % columns) + 0.5) * size,
    box.top + (Math.floor(cell / columns) + 0.5) * size, { isKey: true });
}

// Which moment is shown.

function go(time) {
  const { recording } = seen;
  seen.time = Math.max(recording.start, Math.min(recording.end, time));
  follow(false);
  redraw();
}

function follow(isFollowing) {
  seen.isFollowing = isFollowing;
  $("follow").setAttribute("aria-pressed", String(isFollowing));
}

function play(isPlaying) {
  if (seen.isPlaying === isPlaying) return;
  seen.isPlaying = isPlaying;
  $("play").textContent = isPlaying ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", String(isPlaying));
  if (!isPlaying) return;
  if (seen.time >= seen.recording.end) go(seen.recording.start);
  let before = performance.now();
  const tick = (now) => {
    if (!seen.isPlaying) return;
    go(seen.time + ((now - before) / 1000) * Number($("speed").value));
    before = now;
    if (seen.time >= seen.recording.end) play(false); else requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}

function scrub(event) {
  if (seen.recording === null || event.buttons !== 1) return;
  const { from, to } = windowShown();
  play(false);
  go(timeAt(event.offsetX, event.target, from, to));
}

function stepFrames(event) {
  const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10,
    PageDown: -10 };
  if (!(event.key in steps) || seen.recording === null) return;
  event.preventDefault();
  const { recording } = seen;
  const index = recording.indexAt(seen.time) + steps[event.key];
  go(recording.frames[Math.max(0, Math.min(recording.length - 1, index))].t);
}

// Where frames come from.

function show(recording, { isLive, about }) {
  play(false);
  fault("");
  const time = isLive ? recording.start : recording.fullest;
  Object.assign(seen, { recording, isLive, time, lit: null, cursor: -1, at: null });
  $("tip").hidden = true;
  follow(isLive);
  $("view").hidden = false;
  $("follow").hidden = !isLive;
  $("chat").hidden = !isLive;
  $("source").textContent = about;
  redraw();
}

function openTrace(text, name) {
  try {
    const recording = readTrace(text);
    seen.stop?.abort();
    show(recording, { isLive: false, about: `${name}: ${recording.length} frames` });
  } catch (error) {
    if (!(error instanceof BadTrace)) throw error;
    fault(`${name}: ${error.message}`);
    if (seen.recording === null) $("source").textContent = "nothing to show";
  }
}

function lock() {
  $("lock").hidden = false;
  $("key").focus();
}

async function live(about) {
  const stop = new AbortController();
  seen.stop = stop;
  let recording = null;
  let pause = 500;
  while (!stop.signal.aborted) {
    try {
      const answer = await ask("view/frames", { signal: stop.signal });
      for await (const { event, data } of events(answer)) {
        if (stop.signal.aborted) return;
        pause = 500;
        if (event === "head") {
          const head = JSON.parse(data);
          if (recording === null || recording.head.num_blocks !== head.num_blocks) {
            recording = new Recording(head, { keep: KEPT_SECONDS });
            show(recording, { isLive: true, about });
          }
          $("source").textContent = about;
        } else if (event === "frame") {
          recording.push(JSON.parse(data));
          redraw();
        }
      }
      $("source").textContent = `${about} · the server has closed the stream; trying again`;
    } catch (error) {
      if (stop.signal.aborted) return;
      if (error instanceof Refused && error.status === 401) {
        lock();
        await new Promise((resolve) => { seen.unlocked = resolve; });
        continue;
      }
      $("source").textContent = `${about} · ${error.message}; trying again`;
    }
    await new Promise((resolve) => { setTimeout(resolve, pause); });
    pause = Math.min(10_000, pause * 2);
  }
}

async function begin() {
  let source;
  try {
    source = await (await ask("page/source")).json();
  } catch {
    $("source").textContent = "no server here: open a trace";
    return;
  }
  if (source.kind === "trace") {
    try {
      openTrace(await (await ask("view/trace")).text(), String(source.name));
    } catch (error) {
      fault(error.message);
    }
  } else {
    seen.chat = new Chat(String(source.model), lock);
    $("chat").hidden = false;
    live(`live: ${source.model}`);
  }
}

$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (file) openTrace(await file.text(), file.name);
  $("file").value = "";
});
$("lock").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key").value = "";
  $("lock").hidden = true;
  seen.unlocked?.();
});
$("map").addEventListener("pointermove", pointAtMap);
$("map").addEventListener("pointerleave", pointAway);
$("map").addEventListener("keydown", moveOnMap);
$("map").addEventListener("blur", pointAway);
for (const id of ["lanes", "chart"]) {
  $(id).addEventListener("pointerdown", (event) => {
    $(id).setPointerCapture(event.pointerId);
    scrub(event);
  });
  $(id).addEventListener("pointermove", scrub);
}
$("lanes").addEventListener("pointermove", (event) => {
  const id = lanes.find(event.offsetX, event.offsetY);
  seen.lit = id < 0 ? null : new Set([id]);
  redraw();
  const lane = seen.recording?.lanes.get(id);
  if (lane === undefined) $("tip").hidden = true;
  else {
    showTip([element("b", "", `#${id} `), seen.recording.label(id).replace(/\s+/g, " "),
      element("div", "quiet", `${lane.prompt} prompt tokens, ${Math.max(0, lane.total - lane.prompt)}`
        + ` written${lane.why ? ` · ${lane.why}` : ""}`)], event.clientX, event.clientY);
  }
});
$("lanes").addEventListener("pointerleave", pointAway);
$("slider").addEventListener("input", () => {
  play(false);
  go(Number($("slider").value));
});
$("slider").addEventListener("keydown", stepFrames);
$("play").addEventListener("click", () => play(!seen.isPlaying));
$("follow").addEventListener("click", () => {
  follow(!seen.isFollowing);
  redraw();
});
$("list").addEventListener("toggle", redraw);
new ResizeObserver(redraw).observe($("view"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
begin();
