// Frames, live or recorded, as docs/reference/trace-format.md spells them: checked, applied, kept, found again.
// Nothing here draws. What comes from outside is checked before anything of it is used.

export class BadTrace extends Error {}

const STATUSES = ["waiting", "running", "preempted", "stop", "length", "aborted", "error"];
const COUNTS = ["used", "running", "waiting", "prompt", "hit", "output", "evicted", "preemptions",
  "steps"];
const MAX_BLOCKS = 2 ** 24;
const MAX_ENTRIES = 4_000_000; // of a live recording, in numbers kept
const MAX_COPIES_BYTES = 192 * 2 ** 20;

function wanted(is, what, got) {
  if (!is) {
    let shown = JSON.stringify(got);
    if (shown === undefined) shown = "nothing";
    throw new BadTrace(`${what}, got ${shown.length > 60 ? `${shown.slice(0, 60)} …` : shown}`);
  }
}

const isCount = (n) => Number.isSafeInteger(n) && n >= 0;
const isId = (n) => isCount(n) && n < 2 ** 31;
const isObject = (v) => typeof v === "object" && v !== null && !Array.isArray(v);

export function checkHead(head) {
  wanted(isObject(head), "wanted an object with the key “kvcore”", head);
  wanted(head.version === 1, "version: wanted 1", head.version);
  const blocks = head.num_blocks;
  wanted(isCount(blocks) && blocks >= 2 && blocks <= MAX_BLOCKS,
    `num_blocks: wanted 2 to ${MAX_BLOCKS}`, blocks);
  wanted(Array.isArray(head.groups) && head.groups.length > 0, "groups: wanted some", head.groups);
  for (const group of head.groups) {
    wanted(isObject(group) && typeof group.kind === "string" && isCount(group.block_size)
      && group.block_size > 0, "groups: wanted a kind and a block_size each", group);
  }
  return head;
}

function flat(frame, name, size) {
  const list = frame[name] ?? [];
  wanted(Array.isArray(list) && list.length % size === 0, `${name}: wanted ${size} each`, list);
  return list;
}

// Says what is wrong with a frame, or returns how many entries it has.
function checkFrame(frame, head, before) {
  wanted(isObject(frame), "wanted an object", frame);
  wanted(typeof frame.t === "number" && frame.t >= before, `t: wanted at least ${before}`, frame.t);
  wanted(isObject(frame.counts), "counts: wanted an object", frame.counts);
  for (const name of COUNTS) {
    wanted(isCount(frame.counts[name]), `counts: wanted a number of ${name}`, frame.counts[name]);
  }
  wanted(flat(frame, "begun", 3).every(isId), "begun: wanted ids and numbers", frame.begun);
  wanted(Object.values(frame.counts).every(isCount), "counts: wanted numbers", frame.counts);
  const labels = flat(frame, "labels", 2);
  wanted(labels.every((one, i) => (i % 2 ? typeof one === "string" : isId(one))),
    "labels: wanted ids and texts", labels);
  const status = flat(frame, "status", 2);
  for (let i = 0; i < status.length; i += 2) {
    wanted(isId(status[i]) && STATUSES.includes(status[i + 1]), "status: wanted id and word",
      status.slice(i, i + 2));
  }
  wanted(flat(frame, "progress", 3).every(isCount), "progress: wanted numbers", frame.progress);
  let entries = status.length + (frame.progress ?? []).length;
  for (const table of flat(frame, "tables", 1)) entries += checkTable(table, head);
  for (const name of ["cached", "hits"]) {
    const runs = flat(frame, name, 3);
    wanted(runs.every(isCount), `${name}: wanted numbers`, runs);
    for (let i = 0; i < runs.length; i += 3) {
      wanted(runs[i] + runs[i + 1] <= head.num_blocks,
        `${name}: wanted block ids below ${head.num_blocks}`, runs.slice(i, i + 3));
    }
    entries += runs.length;
  }
  return entries;
}

function checkTable(table, head) {
  const [id, group, first, runs] = Array.isArray(table) ? table : [];
  wanted(isId(id) && isCount(group) && group < head.groups.length && isCount(first)
    && Array.isArray(runs) && runs.length % 2 === 0 && runs.every(isCount),
  "tables: wanted id, group, entry, runs", table);
  let entries = 0;
  for (let i = 0; i < runs.length; i += 2) {
    wanted(runs[i] === 0 || runs[i] + runs[i + 1] <= head.num_blocks,
      `tables: wanted block ids below ${head.num_blocks}`, runs.slice(i, i + 2));
    entries += runs[i + 1];
    wanted(first + entries <= MAX_BLOCKS, "tables: wanted no longer ones", first + entries);
  }
  return runs.length + 3;
}

// The pool and its requests at one moment.
export class Pool {
  constructor(head) {
    this.head = head;
    this.reach = 0; // the largest block id that was ever held or cached
    this.forget();
  }

  forget() {
    const count = this.head.num_blocks;
    this.time = 0;
    this.counts = Object.fromEntries(COUNTS.map((name) => [name, 0]));
    this.requests = new Map(); // unfinished ones
    this.cached = new Uint8Array(count);
    this.hits = new Uint32Array(count);
    this.owner = new Int32Array(count).fill(-1); // who had it last, and where in its table
    this.place = new Int32Array(count);
    this.numCached = 0;
  }

  copy() {
    const other = Object.create(Pool.prototype);
    Object.assign(other, this);
    for (const name of ["cached", "hits", "owner", "place"]) other[name] = this[name].slice();
    other.requests = new Map();
    for (const [id, one] of this.requests) {
      other.requests.set(id, { ...one, tables: [...one.tables] }); // tables are never written to
    }
    return other;
  }

  get bytes() {
    return this.head.num_blocks * 13 + this.requests.size * 200;
  }

  request(id) {
    let one = this.requests.get(id);
    if (one === undefined) {
      one = { id, prompt: 0, sample: 0, status: "waiting", computed: 0, total: 0,
        tables: this.head.groups.map(() => new Uint32Array(0)) };
      this.requests.set(id, one);
    }
    return one;
  }

  apply(frame) {
    if (frame.whole) this.forget();
    this.time = frame.t;
    this.counts = frame.counts;
    const { begun = [], status = [] } = frame;
    for (let i = 0; i < begun.length; i += 3) {
      Object.assign(this.request(begun[i]), { prompt: begun[i + 1], sample: begun[i + 2] });
    }
    for (let i = 0; i < status.length; i += 2) this.request(status[i]).status = status[i + 1];
    const progress = frame.progress ?? [];
    for (let i = 0; i < progress.length; i += 3) {
      const one = this.request(progress[i]);
      [one.computed, one.total] = [progress[i + 1], progress[i + 2]];
    }
    for (const table of frame.tables ?? []) this.applyTable(table);
    const { cached = [], hits = [] } = frame;
    for (let i = 0; i < cached.length; i += 3) {
      if (cached[i + 2]) this.reach = Math.max(this.reach, cached[i] + cached[i + 1] - 1);
      for (let id = cached[i]; id < cached[i] + cached[i + 1]; id += 1) {
        this.numCached += cached[i + 2] - this.cached[id];
        this.cached[id] = cached[i + 2];
      }
    }
    for (let i = 0; i < hits.length; i += 3) {
      this.hits.fill(hits[i + 2], hits[i], hits[i] + hits[i + 1]);
    }
    for (let i = 0; i < status.length; i += 2) {
      if (isEnded(status[i + 1])) this.requests.delete(status[i]);
    }
  }

  applyTable([id, group, first, runs]) {
    const one = this.request(id);
    let length = first;
    for (let i = 1; i < runs.length; i += 2) length += runs[i];
    const ids = new Uint32Array(length);
    ids.set(one.tables[group].subarray(0, first));
    let at = first;
    for (let i = 0; i < runs.length; i += 2) {
      if (runs[i] > 0) this.reach = Math.max(this.reach, runs[i] + runs[i + 1] - 1);
      for (let n = 0; n < runs[i + 1]; n += 1, at += 1) {
        const block = runs[i] === 0 ? 0 : runs[i] + n;
        ids[at] = block;
        if (this.owner[block] < 0 || !this.holds(this.owner[block], block)) {
          this.owner[block] = id;
          this.place[block] = at * this.head.groups.length + group;
        }
      }
    }
    one.tables[group] = ids;
  }

  holds(id, block) {
    const one = this.requests.get(id);
    if (one === undefined) return false;
    const groups = this.head.groups.length;
    const place = this.place[block];
    return one.tables[place % groups][Math.floor(place / groups)] === block;
  }

  // For every block its first two holders (-1: none) and how many there are.
  holders() {
    const count = this.head.num_blocks;
    const found = { first: new Int32Array(count).fill(-1), second: new Int32Array(count).fill(-1),
      count: new Uint16Array(count), filled: new Float32Array(count) };
    for (const one of this.requests.values()) {
      one.tables.forEach((ids, group) => {
        const size = this.head.groups[group].block_size;
        for (let at = 0; at < ids.length; at += 1) {
          const block = ids[at];
          if (block === 0) continue;
          if (found.count[block] === 0) found.first[block] = one.id;
          else if (found.count[block] === 1) found.second[block] = one.id;
          found.count[block] += 1;
          found.filled[block] = Math.max(found.filled[block],
            Math.min(1, Math.max(0, (one.computed - at * size) / size)));
        }
      });
    }
    return found;
  }

  // Who holds a block, and which of whose tokens it has, as far as the frames say.
  block(id) {
    const by = [...this.requests.values()].filter((one) => one.tables.some((t) => t.includes(id)));
    const groups = this.head.groups.length;
    const group = this.place[id] % groups;
    const size = this.head.groups[group].block_size;
    const start = Math.floor(this.place[id] / groups) * size;
    const state = by.length ? "held" : this.cached[id] ? "cached" : "empty";
    return { id, state, holders: by.map((one) => one.id), hits: this.hits[id], group, size,
      owner: state === "empty" ? -1 : this.owner[id], start };
  }
}

export const isEnded = (status) => STATUSES.indexOf(status) >= 3;

// Frames in order, any moment of them, and what charts and lanes show of all.
export class Recording {
  constructor(head, { keep = Infinity } = {}) {
    this.head = checkHead(head);
    this.keepSeconds = keep;
    this.frames = [];
    this.sizes = [];
    this.copies = []; // [{index, pool}]: the pool before frame `index`
    this.points = []; // {t, used, cached, prompt, hit, output} a frame
    this.lanes = new Map(); // id -> {id, row, label, prompt, spans: [{from, kind}], end}
    this.rows = []; // the lane that was put into a row last
    this.texts = null; // id -> tokens
    this.words = null; // token -> text
    this.newest = new Pool(head);
    this.current = { index: -1, pool: new Pool(head) };
    this.entries = 0;
  }

  get length() {
    return this.frames.length;
  }

  get start() {
    return this.frames.length ? this.frames[0].t : 0;
  }

  get end() {
    return this.newest.time;
  }

  // How many blocks a map shows: all that were ever used, rounded up so that it seldom changes.
  get numShown() {
    const rounded = 2 ** Math.ceil(Math.log2(Math.max(64, this.newest.reach)));
    return Math.min(this.head.num_blocks - 1, rounded);
  }

  // When most blocks are held for the first time.
  get fullest() {
    return this.points.reduce((most, one) => (one.used > most.used ? one : most)).t;
  }

  push(frame) {
    const before = frame?.whole || !this.frames.length ? 0 : this.newest.time;
    const size = checkFrame(frame, this.head, before) + 20;
    if (frame.whole && this.frames.length) this.clearFrames(frame.t);
    wanted(this.frames.length || frame.whole, "wanted the first frame whole", frame.t);
    if (this.frames.length % this.stride() === 0) {
      this.copies.push({ index: this.frames.length, pool: this.newest.copy() });
    }
    this.frames.push(frame);
    this.sizes.push(size);
    this.entries += size;
    this.newest.apply(frame);
    this.remember(frame);
    while (this.isTooLong()) this.dropOldest();
  }

  stride() {
    const room = Math.max(4, Math.floor(MAX_COPIES_BYTES / this.newest.bytes));
    return Math.max(64, Math.ceil(8192 / room));
  }

  clearFrames(time) {
    [this.frames, this.sizes, this.copies, this.entries] = [[], [], [], 0];
    this.current = { index: -1, pool: new Pool(this.head) };
    this.points = this.points.filter((point) => point.t < time).slice(-4096);
  }

  isTooLong() {
    return this.keepSeconds < Infinity && this.copies.length > 2
      && (this.entries > MAX_ENTRIES || this.end - this.frames[this.copies[1].index].t
        > this.keepSeconds);
  }

  dropOldest() {
    const count = this.copies[1].index;
    this.copies.shift();
    this.frames.splice(0, count);
    this.entries -= this.sizes.splice(0, count).reduce((a, b) => a + b, 0);
    for (const copy of this.copies) copy.index -= count;
    this.current = { index: -1, pool: new Pool(this.head) };
    const from = this.frames[0].t;
    this.points = this.points.filter((point) => point.t >= from);
    for (const [id, lane] of this.lanes) if (lane.end < from) this.lanes.delete(id);
  }

  // The pool after frame `index`.
  at(index) {
    if (index >= this.length - 1) return this.newest;
    if (this.current.index > index || this.current.index < 0
      || index - this.current.index > this.stride()) {
      const copy = this.copies.findLast((one) => one.index <= index);
      this.current = { index: copy.index - 1, pool: copy.pool.copy() };
    }
    while (this.current.index < index) {
      this.current.index += 1;
      this.current.pool.apply(this.frames[this.current.index]);
    }
    return this.current.pool;
  }

  // The last frame at or before a time.
  indexAt(time) {
    let [low, high] = [0, this.length];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.frames[middle].t <= time) low = middle; else high = middle;
    }
    return low;
  }

  remember(frame) {
    const { used, prompt, hit, output, running } = frame.counts;
    const cached = this.newest.numCached;
    this.points.push({ t: frame.t, used, cached, prompt, hit, output, running });
    const { begun = [], labels = [] } = frame;
    for (let i = 0; i < begun.length; i += 3) {
      this.lane(begun[i], frame.t, begun[i + 1]);
    }
    for (let i = 0; i < labels.length; i += 2) {
      const lane = this.lanes.get(labels[i]);
      if (lane !== undefined) lane.label = labels[i + 1];
    }
    const ended = new Map();
    const { status = [], progress = [] } = frame;
    for (let i = 0; i < status.length; i += 2) {
      if (isEnded(status[i + 1])) ended.set(status[i], status[i + 1]);
      else this.continueLane(status[i], frame.t);
    }
    for (let i = 0; i < progress.length; i += 3) {
      this.continueLane(progress[i], frame.t, progress[i + 2]);
    }
    for (const [id, why] of ended) this.endLane(this.lanes.get(id), frame.t, why);
    if (frame.whole) {
      for (const lane of this.lanes.values()) {
        if (!this.newest.requests.has(lane.id)) this.endLane(lane, frame.t, "");
      }
    }
  }

  continueLane(id, time, total) {
    const lane = this.lanes.get(id);
    if (lane === undefined) return;
    if (total !== undefined) lane.total = total;
    const one = this.newest.requests.get(id);
    if (one === undefined) return;
    let kind = one.status;
    if (kind === "running") kind = one.computed < one.prompt ? "prefill" : "decode";
    if (lane.spans.at(-1)?.kind !== kind) lane.spans.push({ from: time, kind });
  }

  endLane(lane, time, why) {
    if (lane !== undefined && lane.end === Infinity) [lane.end, lane.why] = [time, why];
  }

  lane(id, time, tokens) {
    if (this.lanes.has(id)) return;
    let row = this.rows.findIndex((last) => last.end <= time);
    if (row < 0) row = this.rows.length;
    const lane = { id, row, begin: time, end: Infinity, why: "", label: "", prompt: tokens,
      total: tokens, spans: [] };
    this.rows[row] = lane;
    this.lanes.set(id, lane);
  }

  // What a request is called: its label, or how its text begins.
  label(id) {
    const lane = this.lanes.get(id);
    if (lane?.label) return lane.label;
    return this.text(id, 0, 12).join("").slice(0, 48);
  }

  // Some of a request's tokens as pieces of text; none where they were not recorded.
  text(id, start, stop) {
    const tokens = this.texts?.get(id) ?? [];
    return tokens.slice(start, stop).map((token) => this.words.get(token) ?? `‹${token}›`);
  }
}

// A trace file's text as a recording. Throws BadTrace with one line.
export function readTrace(text) {
  let document;
  try {
    document = JSON.parse(text);
  } catch (error) {
    throw new BadTrace(`This file is no trace: it is not JSON (${error.message}).`);
  }
  if (!isObject(document) || document.kvcore === undefined) {
    throw new BadTrace(isObject(document) && Array.isArray(document.traceEvents)
      ? "The trace holds no KV cache blocks; write a new one with `model.run --trace`."
      : "This file is no trace that --trace has written.");
  }
  const record = document.kvcore;
  try {
    const recording = new Recording(record);
    wanted(Array.isArray(record.frames) && record.frames.length, "frames: wanted some",
      record.frames);
    record.frames.forEach((frame, number) => {
      try {
        recording.push(frame);
      } catch (error) {
        if (error instanceof BadTrace) throw new BadTrace(`frame ${number}: ${error.message}`);
        throw error;
      }
    });
    readTexts(recording, record);
    return recording;
  } catch (error) {
    if (error instanceof BadTrace) throw new BadTrace(`This trace is broken: ${error.message}`);
    throw error;
  }
}

function readTexts(recording, { texts = {}, words = {} }) {
  wanted(isObject(texts) && isObject(words), "texts and words: wanted objects", texts);
  recording.texts = new Map();
  recording.words = new Map();
  for (const [id, tokens] of Object.entries(texts)) {
    wanted(Array.isArray(tokens) && tokens.every(isCount), "texts: wanted token ids", tokens);
    recording.texts.set(Number(id), tokens);
  }
  for (const [token, text] of Object.entries(words)) {
    wanted(typeof text === "string", "words: wanted text", text);
    recording.words.set(Number(token), text);
  }
}
