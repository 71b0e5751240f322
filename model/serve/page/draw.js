// Draws the map, the lanes and the charts on canvases. Everything that is drawn comes as arguments;
// nothing is kept but what a pointer needs to find again what it points at.

const styles = getComputedStyle(document.documentElement);
const css = (name) => styles.getPropertyValue(name).trim();

// Neighbouring numbers get hues far apart: steps of the golden angle.
export function colour(id, part = "") {
  const hue = (id * 137.508 + 250) % 360;
  return `oklch(${css(`--request${part}-l`)} ${css(`--request${part}-c`)} ${hue.toFixed(1)})`;
}

function start(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  }
  const ink = canvas.getContext("2d");
  ink.setTransform(ratio, 0, 0, ratio, 0, 0);
  ink.clearRect(0, 0, width, height);
  ink.font = `11px ${css("--font")}`;
  ink.textBaseline = "middle";
  return { ink, width, height };
}

// How many cells fit: squares of one block, or where those would be too small, of 2, 4, 8 ...
export function layMap(count, width, height) {
  let each = 1;
  for (;;) {
    const cells = Math.ceil(count / each);
    const size = Math.min(42, largestSquare(cells, width, height));
    if (size >= 7 || each >= count) {
      const columns = Math.max(1, Math.floor(width / size));
      return { each, cells, size, columns, gap: size >= 28 ? 3 : size >= 14 ? 2 : 1 };
    }
    each *= 2;
  }
}

function largestSquare(cells, width, height) {
  let size = Math.max(1, Math.floor(Math.sqrt((width * height) / cells)));
  while (size > 1 && Math.ceil(cells / Math.floor(width / size)) * size > height) size -= 1;
  return size;
}

export class PoolMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.hatches = new Map();
  }

  // `count`: how many blocks are drawn, from the first; `lit`: the requests whose blocks stand out,
  // null: all; `cursor`: a block, its cell has a frame.
  draw(pool, count, { lit = null, cursor = -1 } = {}) {
    const { ink, width, height } = start(this.canvas);
    this.layout = layMap(count, width, height);
    const { each, cells, size, columns, gap } = this.layout;
    Object.assign(this.canvas.dataset, { each, cells, size, columns });
    const holders = pool.holders();
    this.palette = { empty: css("--empty"), cached: css("--cached"), ink: css("--ink") };
    const side = size - gap;
    for (let cell = 0; cell < cells; cell += 1) {
      const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
      if (each === 1) this.drawBlock(ink, pool, holders, cell + 1, x, y, side, lit);
      else this.drawMany(ink, pool, holders, cell * each + 1, each, x, y, side, lit);
    }
    if (cursor > 0) {
      const cell = Math.floor((cursor - 1) / each);
      ink.strokeStyle = this.palette.ink;
      ink.lineWidth = 2;
      ink.strokeRect((cell % columns) * size + 1, Math.floor(cell / columns) * size + 1,
        side - 2, side - 2);
    }
  }

  drawBlock(ink, pool, holders, block, x, y, side, lit) {
    const held = holders.count[block];
    const corner = side >= 9 ? Math.min(5, side / 6) : 0;
    const box = () => {
      ink.beginPath();
      ink.roundRect(x, y, side, side, corner);
    };
    box();
    if (held === 0) {
      ink.globalAlpha = lit ? 0.4 : 1;
      ink.fillStyle = pool.cached[block] ? this.palette.cached : this.palette.empty;
      ink.fill();
    } else {
      const by = lit ? holderAmong(pool, holders, block, lit) : holders.first[block];
      ink.globalAlpha = by < 0 ? 0.16 : 1;
      const first = by < 0 ? holders.first[block] : by;
      const filled = holders.filled[block];
      ink.fillStyle = colour(first, filled < 1 ? "-soft" : "");
      ink.fill();
      if (filled > 0 && filled < 1) {
        ink.save();
        ink.clip();
        ink.fillStyle = colour(first);
        ink.fillRect(x, y + side * (1 - filled), side, side * filled);
        ink.restore();
      }
      if (held > 1) {
        box();
        ink.fillStyle = this.hatch(ink, side);
        ink.fill();
      }
    }
    if (side >= 22 && pool.hits[block] > 0 && (held || pool.cached[block])) {
      ink.fillStyle = held ? css("--on-request") : this.palette.ink;
      ink.textAlign = "center";
      ink.globalAlpha *= 0.75;
      const times = `${pool.hits[block]}×`;
      if (ink.measureText(times).width < side - 2) {
        ink.fillText(times, x + side / 2, y + side / 2 + 0.5);
      }
    }
    ink.globalAlpha = 1;
  }

  // A cell of many blocks: from the bottom up what is held, by its two largest holders, and cached.
  drawMany(ink, pool, holders, from, each, x, y, side, lit) {
    const stop = Math.min(from + each, pool.head.num_blocks);
    const counts = new Map();
    let [cached, held, shared] = [0, 0, 0];
    for (let block = from; block < stop; block += 1) {
      if (holders.count[block] > 0) {
        held += 1;
        shared += holders.count[block] > 1 ? 1 : 0;
        const first = holders.first[block];
        counts.set(first, (counts.get(first) ?? 0) + 1);
      } else cached += pool.cached[block];
    }
    const scale = side / (stop - from);
    ink.fillStyle = this.palette.empty;
    ink.fillRect(x, y, side, side);
    let bottom = y + side;
    const bar = (count, style, alpha) => {
      ink.globalAlpha = alpha;
      ink.fillStyle = style;
      ink.fillRect(x, bottom - count * scale, side, count * scale);
      bottom -= count * scale;
      ink.globalAlpha = 1;
    };
    const largest = [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
    const [[one, ofOne] = [0, 0]] = largest;
    const [, [other] = [one]] = largest;
    bar(ofOne, colour(one), !lit || lit.has(one) ? 1 : 0.2);
    bar(held - ofOne, colour(other), !lit || lit.has(other) ? 1 : 0.2);
    if (shared * 2 > held) {
      ink.fillStyle = this.hatch(ink, side);
      ink.fillRect(x, bottom, side, y + side - bottom);
    }
    bar(cached, this.palette.cached, lit ? 0.4 : 1);
  }

  hatch(ink, side) {
    const ratio = window.devicePixelRatio || 1;
    const step = side >= 20 ? 9 : side >= 9 ? 6 : 4;
    const key = `${step} ${ratio} ${css("--hatch")}`;
    if (!this.hatches.has(key)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = Math.round(step * ratio);
      const pen = tile.getContext("2d");
      pen.scale(tile.width / step, tile.width / step);
      pen.strokeStyle = css("--hatch");
      pen.lineWidth = step / 3.4;
      for (const shift of [-step, 0, step]) {
        pen.beginPath();
        pen.moveTo(shift - 1, step + 1);
        pen.lineTo(shift + step + 1, -1);
        pen.stroke();
      }
      const pattern = ink.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(step / tile.width));
      this.hatches.set(key, pattern);
    }
    return this.hatches.get(key);
  }

  // The first block of the cell at a point, and how many it has; null outside.
  find(x, y, pool) {
    if (this.layout === undefined) return null;
    const { each, cells, size, columns } = this.layout;
    const [column, row] = [Math.floor(x / size), Math.floor(y / size)];
    const cell = row * columns + column;
    if (column < 0 || column >= columns || row < 0 || cell >= cells) return null;
    const block = cell * each + 1;
    return { block, count: Math.min(each, pool.head.num_blocks - block) };
  }
}

// One of some requests that holds a block; -1: none of them does.
function holderAmong(pool, holders, block, some) {
  const [first, second] = [holders.first[block], holders.second[block]];
  if (some.has(first)) return first;
  if (some.has(second)) return second;
  if (holders.count[block] <= 2) return -1;
  return [...some].find((id) => pool.requests.get(id)?.tables.some((ids) => ids.includes(block)))
    ?? -1;
}

const LEFT = 0;
export const RIGHT = 54; // room for what the lines at the right edge say

export function timeAt(x, canvas, from, to) {
  return from + ((x - LEFT) / (canvas.clientWidth - LEFT - RIGHT)) * (to - from);
}

export class Lanes {
  constructor(canvas) {
    this.canvas = canvas;
    this.shown = [];
  }

  // The rows that something stands in between two times, packed.
  draw(recording, { from, to, now, lit = null }) {
    const { ink, width, height } = start(this.canvas);
    const scale = (width - LEFT - RIGHT) / Math.max(1e-9, to - from);
    const lanes = [...recording.lanes.values()].filter((one) => one.end >= from && one.begin <= to);
    const rows = [...new Set(lanes.map((one) => one.row))].sort((a, b) => a - b);
    const tall = Math.max(3, Math.min(22, Math.floor(height / Math.max(1, rows.length))));
    const places = new Map(rows.map((row, index) => [row, index * tall]));
    this.shown = [];
    this.numHidden = Math.max(0, rows.length - Math.floor((height + 1) / tall));
    for (const lane of lanes) {
      const y = places.get(lane.row);
      if (y + tall > height + 1) continue;
      const end = Math.min(lane.end, to, recording.end);
      ink.globalAlpha = !lit || lit.has(lane.id) ? 1 : 0.2;
      lane.spans.forEach((span, index) => {
        const until = Math.min(index + 1 < lane.spans.length ? lane.spans[index + 1].from : end, end);
        const [x0, x1] = [LEFT + (Math.max(span.from, from) - from) * scale,
          LEFT + (until - from) * scale];
        if (x1 > LEFT && until > from) this.drawSpan(ink, lane, span.kind, x0, y, x1 - x0, tall);
      });
      const [x0, x1] = [LEFT + (Math.max(lane.begin, from) - from) * scale, LEFT + (end - from) * scale];
      this.shown.push({ id: lane.id, x0, x1, y, tall });
      const runs = lane.spans.find((span) => span.kind === "prefill" || span.kind === "decode");
      const name = Math.max(x0, LEFT + ((runs?.from ?? Infinity) - from) * scale);
      if (tall >= 13 && x1 - name > 26) this.drawName(ink, recording, lane, name, y, x1 - name, tall);
    }
    ink.globalAlpha = 1;
    drawCursor(ink, LEFT + (now - from) * scale, height);
  }

  drawSpan(ink, lane, kind, x, y, wide, tall) {
    const inside = Math.max(2, tall - (tall > 8 ? 3 : 1));
    ink.fillStyle = colour(lane.id, kind === "decode" ? "" : "-soft");
    const width = Math.max(1, wide);
    if (kind === "waiting" || kind === "preempted") {
      const thin = kind === "waiting" ? 2 : Math.max(2, inside / 3);
      ink.fillStyle = kind === "waiting" ? css("--faint") : colour(lane.id, "-soft");
      ink.fillRect(x, y + inside / 2 - thin / 2, width, thin);
    } else {
      ink.fillRect(x, y, width, inside);
    }
  }

  drawName(ink, recording, lane, x, y, wide, tall) {
    ink.save();
    ink.beginPath();
    ink.rect(x, y, wide - 4, tall);
    ink.clip();
    ink.fillStyle = css("--on-request");
    const label = recording.label(lane.id).replace(/\s+/g, " ");
    ink.fillText(`#${lane.id}${label ? `  ${label}` : ""}`, x + 5, y + (tall - 3) / 2 + 0.5);
    ink.restore();
  }

  find(x, y) {
    const lane = this.shown.findLast((one) => x >= one.x0 - 2 && x <= one.x1 + 2 && y >= one.y
      && y < one.y + one.tall);
    return lane === undefined ? -1 : lane.id;
  }
}

function drawCursor(ink, x, height) {
  ink.fillStyle = css("--ink");
  ink.globalAlpha = 0.75;
  ink.fillRect(x - 0.75, 0, 1.5, height);
  ink.globalAlpha = 1;
}

// Hit tokens of prompt tokens over the last part of the shown time; null where no prompt began.
function hitRates(points, span) {
  let back = 0;
  let last = null;
  return points.map((point) => {
    while (points[back].t < point.t - span) back += 1;
    const before = back ? points[back - 1] : { prompt: 0, hit: 0 };
    const asked = point.prompt - before.prompt;
    if (asked > 0) last = (point.hit - before.hit) / asked;
    return last;
  });
}

export function drawChart(canvas, recording, usable, { from, to, now }) {
  const { ink, width, height } = start(canvas);
  const [top, bottom] = [6, height - 16];
  const scale = (width - LEFT - RIGHT) / Math.max(1e-9, to - from);
  const x = (t) => LEFT + (t - from) * scale;
  const y = (share) => bottom - share * (bottom - top);
  ink.fillStyle = ink.strokeStyle = css("--rule");
  for (const share of [0, 0.5, 1]) ink.fillRect(LEFT, Math.round(y(share)), width - LEFT - RIGHT, 1);
  drawTimes(ink, { from, to, origin: recording.start }, x, bottom, height, width - RIGHT);
  const all = recording.points;
  if (!all.length) return;
  const first = Math.max(0, all.findIndex((point) => point.t >= from) - 1);
  const points = all.slice(first).filter((point) => point.t <= to);
  ink.save();
  ink.beginPath();
  ink.rect(LEFT, 0, width - LEFT - RIGHT, height);
  ink.clip();
  const area = (share, style) => {
    ink.beginPath();
    ink.moveTo(x(points[0].t), y(0));
    points.forEach((point, index) => {
      ink.lineTo(x(point.t), y(share(point)));
      const next = index + 1 < points.length ? points[index + 1].t : Math.min(to, recording.end);
      ink.lineTo(x(next), y(share(point)));
    });
    ink.lineTo(x(Math.min(to, recording.end)), y(0));
    ink.fillStyle = style;
    ink.fill();
  };
  if (points.length) {
    area((p) => (p.used + p.cached) / usable, css("--cached"));
    area((p) => p.used / usable, css("--held"));
    drawRate(ink, points, hitRates(points, (to - from) / 8), x, y, Math.min(to, recording.end));
  }
  ink.restore();
  drawCursor(ink, x(now), bottom);
  ink.textAlign = "left";
  ink.fillStyle = css("--quiet");
  ink.fillText("100 %", width - RIGHT + 8, top + 3);
  ink.fillText("0", width - RIGHT + 8, bottom - 3);
}

function drawRate(ink, points, rates, x, y, end) {
  ink.beginPath();
  let isOn = false;
  points.forEach((point, index) => {
    if (rates[index] === null) return;
    if (isOn) ink.lineTo(x(point.t), y(rates[index])); else ink.moveTo(x(point.t), y(rates[index]));
    isOn = true;
    if (index + 1 === points.length) ink.lineTo(x(end), y(rates[index]));
  });
  ink.lineWidth = 2;
  ink.lineJoin = "round";
  ink.strokeStyle = css("--rate");
  ink.stroke();
}

function drawTimes(ink, { from, to, origin }, x, bottom, height, right) {
  const rough = (to - from) / 8;
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1e-6)));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? rough;
  ink.fillStyle = css("--quiet");
  ink.textAlign = "center";
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  for (let n = Math.ceil((from - origin) / step); origin + n * step <= to; n += 1) {
    const t = origin + n * step;
    if (x(t) < 12 || x(t) > right - 10) continue;
    ink.fillRect(x(t), bottom, 1, 4);
    ink.fillText(`${(n * step).toFixed(digits)} s`, x(t), height - 5);
  }
}
