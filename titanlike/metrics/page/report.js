// Draws a report from the JSON in the page. No library and no request: everything is here.
// Order: numbers and elements; scales; one chart; the stacked chart; markers; the page.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const MARGIN = { top: 20, right: 16, bottom: 24, left: 58 };
const longest = Math.max(0, ...RUNS.map((run) => run.steps.length));
const state = { x: "step", log: false, share: false, smooth: longest > 150 ? 35 : 0, zoom: null, hidden: new Set(), hover: null };
const charts = [];

// ---- numbers and elements

const SVG = "http://www.w3.org/2000/svg";
function make(namespace, tag, attributes, children) {
  const node = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of (children || []).flat(3)) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const html = (tag, attributes, ...children) => make(null, tag, attributes, children);
const svg = (tag, attributes, ...children) => make(SVG, tag, attributes, children);

function si(value) {
  const size = Math.abs(value);
  if (size < 1e15) for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return trim(value / (unit === "k" ? 1e3 : limit)) + unit;
  }
  if (size >= 1e15 || (size !== 0 && size < 1e-3)) return value.toExponential(2).replace(/\.?0*e/, "e").replace("e-", "e−").replace("e+", "e");
  return trim(value);
}
const trim = (value) => String(+value.toPrecision(4));
const count = (value) => Math.round(value).toLocaleString("en-US");
const percent = (value) => +(100 * value).toFixed(100 * value < 10 ? 1 : 0) + "%";
function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024) return +value.toPrecision(3) + " " + unit;
    value /= 1024;
  }
  return +value.toPrecision(3) + " TiB";
}
function seconds(value) {
  if (value < 1e-3 && value > 0) return +(value * 1e6).toPrecision(3) + " µs";
  if (value < 1 && value > 0) return +(value * 1e3).toPrecision(3) + " ms";
  return +value.toPrecision(3) + " s";
}
function duration(value) {
  const pad = (number) => String(number).padStart(2, "0");
  const whole = Math.round(value);
  const days = Math.floor(whole / 86400), hours = Math.floor(whole / 3600) % 24, minutes = Math.floor(whole / 60) % 60;
  return (days ? days + "d " : "") + hours + ":" + pad(minutes) + ":" + pad(whole % 60);
}
const meshText = (mesh) => Object.entries(mesh).map(([axis, degree]) => axis + " " + degree).join(" · ");
const color = (run) => `var(--s${run % 8})`;
const dash = (run) => (run >= 8 ? "6 3" : null);  // more runs than colours: the next eight are dashed

// ---- scales

function xOf(run, index) {
  if (state.x === "step") return run.steps[index];
  if (state.x === "time") return run.elapsed[index];
  const tokens = run.columns.tokens;
  return tokens && !tokens.i ? tokens.v[index] : null;
}
function xOfStep(run, step) {  // where an event after `step` lies
  if (state.x === "step") return step;
  let low = 0, high = run.steps.length;
  while (low < high) { const middle = (low + high) >> 1; run.steps[middle] <= step ? (low = middle + 1) : (high = middle); }
  return low ? xOf(run, low - 1) : 0;
}
function xDomain() {
  if (state.zoom) return state.zoom;
  let low = Infinity, high = -Infinity;
  RUNS.forEach((run, number) => {
    if (state.hidden.has(number) || !run.steps.length) return;
    low = Math.min(low, xOf(run, 0) ?? Infinity);
    high = Math.max(high, xOf(run, run.steps.length - 1) ?? -Infinity);
  });
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}
const xFormat = (value) => (state.x === "time" ? duration(value) : si(value));

function ticks(low, high, target) {
  const rough = (high - low) / target, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const list = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) list.push(+(i * step).toPrecision(12));
  return list;
}
function byteTicks(low, high, target) {
  const unit = 1024 ** Math.max(0, Math.min(4, Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024))));
  return ticks(low / unit, high / unit, target).map((tick) => tick * unit);
}
function timeTicks(low, high, target) {
  const step = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400].find((s) => (high - low) / s <= target);
  if (!step) return ticks(low, high, target);
  if (high - low < 3) return ticks(low, high, target).filter(Number.isInteger);
  const list = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) list.push(value);
  return list;
}
function logTicks(low, high) {
  const list = [];
  const decades = Math.log10(high / low);
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of decades > 4 ? [1] : decades > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 4, 5, 6, 8]) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) list.push(value);
    }
  }
  return decades > 8 ? list.filter((_, i) => i % 2 === 0) : list.length < 2 ? ticks(low, high, 4) : list;
}
const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

// The y range of the visible values. With `clip`, a few far outliers do not press the rest flat: they are cut off and
// marked at the border.
function yDomain(values, spec, log) {
  const usable = values.filter((value) => value !== null && Number.isFinite(value) && (!log || value > 0)).sort((a, b) => a - b);
  if (!usable.length) return [0, 1];
  let low = usable[0], high = usable[usable.length - 1];
  if (spec.clip && !log && usable.length > 8) {
    const typical = quantile(usable, 0.99);
    if (high > 2.5 * typical && typical > 0) high = typical * 1.4;
  }
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
  if (spec.zero) low = Math.min(low, 0);
  if (low === high) return spec.zero && high === 0 ? [0, 1] : [Math.min(low - Math.abs(low || 1) * 0.1, low), high + Math.abs(high || 1) * 0.1];
  const pad = (high - low) * 0.06;
  return [spec.zero ? low : low - pad, high + pad];
}

// ---- series

// The points of one column of one run: [x, mean, low, high, index into the run's steps]; null means not finite.
function points(run, name) {
  const column = run.columns[name];
  if (!column) return [];
  const list = [];
  for (let i = 0; i < column.v.length; i++) {
    const index = column.i ? column.i[i] : i, x = xOf(run, index);
    if (x !== null) list.push([x, column.v[i], column.lo ? column.lo[i] : column.v[i], column.hi ? column.hi[i] : column.v[i], index]);
  }
  return list;
}
// Half the width, in points, of the window that smooths.
const halfWindow = () => Math.round(0.1 * longest * (state.smooth / 100) ** 2);
// The mean over a window centred on each point, taken twice. It does not lag behind, since the window is symmetric and
// shrinks towards the ends. Values that are not finite are passed over.
function smoothed(list, half) {
  let values = list.map((point) => point[1]);
  for (let pass = 0; pass < 2; pass++) {
    const sums = [0], counts = [0];
    values.forEach((value, i) => { sums.push(sums[i] + (value ?? 0)); counts.push(counts[i] + (value === null ? 0 : 1)); });
    values = values.map((value, i) => {
      const reach = Math.min(half, i, values.length - 1 - i), from = i - reach, to = i + reach + 1;
      return value === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
    });
  }
  return list.map((point, i) => [point[0], values[i]]);
}
function path(list, x, y, accessor) {
  let text = "", pen = false;
  for (const point of list) {
    const value = accessor(point);
    if (value === null || Number.isNaN(y(value))) { pen = false; continue; }
    text += (pen ? "L" : "M") + x(point[0]).toFixed(1) + " " + y(value).toFixed(1);
    pen = true;
  }
  return text;
}
function visible(list, domain) {  // the points inside the domain and one neighbour on each side
  let first = list.findIndex((point) => point[0] >= domain[0]);
  if (first < 0) return [];
  let last = list.length - 1;
  while (last > 0 && list[last][0] > domain[1]) last--;
  return list.slice(Math.max(0, first - 1), last + 2);
}
// ---- a chart

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.key = html("div", { class: "key" });
    this.plot = html("div", { class: "plot" });
    this.tip = html("div", { class: "tip", role: "status" });
    const heading = html("header", {}, html("h3", { title: spec.help }, spec.title), spec.unit ? html("span", { class: "unit" }, spec.unit) : null, this.key);
    this.node = html("section", { class: "card chart" + (spec.wide ? " wide" : ""), "data-chart": spec.id }, heading, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.move(event));
    this.plot.addEventListener("pointerleave", () => { if (!this.drag) hover(null); });
    this.plot.addEventListener("pointerdown", (event) => this.press(event));
    this.plot.addEventListener("pointerup", (event) => this.release(event));
    this.plot.addEventListener("dblclick", () => { state.zoom = null; drawAll(); });
    charts.push(this);
  }

  draw() {
    this.width = Math.max(260, this.plot.clientWidth || 600);
    this.height = this.spec.height || 220;
    const domain = xDomain();
    this.inner = { width: this.width - MARGIN.left - MARGIN.right, height: this.height - MARGIN.top - MARGIN.bottom };
    this.x = (value) => MARGIN.left + ((value - domain[0]) / (domain[1] - domain[0])) * this.inner.width;
    this.xInverse = (pixel) => domain[0] + ((pixel - MARGIN.left) / this.inner.width) * (domain[1] - domain[0]);
    this.root = svg("svg", { viewBox: `0 0 ${this.width} ${this.height}`, height: this.height, role: "img", "aria-label": this.spec.title });
    const clip = "clip-" + this.spec.id.replace(/[^a-z0-9]/gi, "-");
    this.root.append(svg("defs", {}, svg("clipPath", { id: clip }, svg("rect", { x: MARGIN.left - 5, y: MARGIN.top - 2, width: this.inner.width + 10, height: this.inner.height + 4 }))));
    this.frame = svg("g", {});
    this.body = svg("g", { "clip-path": `url(#${clip})` });
    this.over = svg("g", {});
    this.cross = svg("g", {});
    this.root.append(this.frame, this.body, this.over, this.cross);
    this.drawBody(domain);
    this.drawMarkers(domain);
    this.plot.replaceChildren(this.root, this.tip);
  }

  axes(domain, [low, high], log) {
    const position = log
      ? (value) => (value > 0 ? MARGIN.top + (1 - Math.log(value / low) / Math.log(high / low)) * this.inner.height : NaN)
      : (value) => MARGIN.top + (1 - (value - low) / (high - low)) * this.inner.height;
    const right = MARGIN.left + this.inner.width, bottom = MARGIN.top + this.inner.height;
    for (const tick of log ? logTicks(low, high) : (this.spec.ticks || ticks)(low, high, this.height > 260 ? 6 : 4)) {
      const at = Math.round(position(tick)) + 0.5;
      if (at < MARGIN.top - 1 || at > bottom + 1) continue;
      this.frame.append(svg("line", { class: "gridline", x1: MARGIN.left, x2: right, y1: at, y2: at }));
      this.frame.append(svg("text", { x: MARGIN.left - 8, y: at + 3.5, "text-anchor": "end" }, this.spec.format(tick)));
    }
    this.frame.append(svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5 }));
    const target = Math.max(2, Math.floor(this.inner.width / 110));
    const list = state.x === "time" ? timeTicks(domain[0], domain[1], target) : ticks(domain[0], domain[1], target);
    for (const tick of list) {
      if (state.x === "step" && !Number.isInteger(tick)) continue;
      this.frame.append(svg("text", { x: this.x(tick), y: this.height - 7, "text-anchor": "middle" }, xFormat(tick)));
    }
    return position;
  }

  drawBody(domain) {
    const spec = this.spec, log = state.log && spec.log;
    this.series = [];
    const values = [];
    RUNS.forEach((run, number) => {
      if (state.hidden.has(number)) return;
      spec.lines.forEach((line, order) => {
        const all = points(run, line.name);
        if (!all.length) return;
        const half = line.smooth ? halfWindow() : 0;
        const soft = half ? visible(smoothed(all, half), domain) : null;
        const raw = visible(all, domain);
        for (const point of raw) if (point[0] >= domain[0] && point[0] <= domain[1]) values.push(point[2], point[3]);
        this.series.push({ run, number, line, order, raw, soft, all });
      });
    });
    const range = yDomain(values, spec, log);
    this.y = this.axes(domain, range, log);
    const top = MARGIN.top;
    for (const { run, number, line, raw, soft } of this.series) {
      const stroke = color(number), bucketed = raw.some((point) => point[2] !== point[3]);
      if (bucketed) {
        const upper = path(raw, this.x, this.y, (point) => point[3]);
        const lower = path([...raw].reverse(), this.x, this.y, (point) => point[2]);
        if (upper && lower) this.body.append(svg("path", { d: upper + lower.replace("M", "L") + "Z", fill: stroke, opacity: 0.22 }));
      }
      const shown = soft || raw;
      if (soft && !bucketed) this.body.append(svg("path", { d: path(raw, this.x, this.y, (p) => p[1]), fill: "none", stroke, "stroke-width": 1, opacity: 0.28 }));
      this.body.append(svg("path", {
        d: path(shown, this.x, this.y, (p) => p[1]), fill: "none", stroke, "stroke-width": line.thin ? 1.25 : 2, "stroke-linejoin": "round",
        "stroke-linecap": "round", "stroke-dasharray": line.dash || dash(number), opacity: line.faint || null,
      }));
      if (line.dots || raw.length < 3) {
        let last = -Infinity;  // dots that would touch are left out
        for (const point of raw) {
          if (this.x(point[0]) - last < 14) continue;
          last = this.x(point[0]);
          if (point[1] !== null && !Number.isNaN(this.y(point[1]))) this.body.append(svg("circle", { cx: this.x(point[0]), cy: this.y(point[1]), r: 3.4, fill: line.dots ? "var(--surface)" : stroke, stroke, "stroke-width": 2 }));
        }
      }
      if (spec.clip && !log) {  // what the range cut off
        for (const point of raw) {
          if (point[3] !== null && point[3] > range[1]) this.over.append(svg("path", { d: `M${this.x(point[0])} ${top - 3}l4 6h-8z`, fill: stroke }, svg("title", {}, this.spec.format(point[3]))));
        }
      }
    }
    if (spec.dropped) this.drawDropped(domain);
    this.drawNonfinite(domain);
    this.drawKey();
    if (!this.series.length) this.over.append(svg("text", { x: this.width / 2, y: this.height / 2, "text-anchor": "middle" }, "no values"));
  }

  drawDropped(domain) {  // steps that were run twice: what the first time gave
    RUNS.forEach((run, number) => {
      if (state.hidden.has(number) || state.x !== "step") return;
      for (const piece of run.dropped) {
        const inside = piece.filter((point) => point[0] >= domain[0] && point[0] <= domain[1]);
        this.body.append(svg("path", { d: path(inside, this.x, this.y, (p) => p[1]), fill: "none", stroke: "var(--ink-3)", "stroke-width": 1.2, "stroke-dasharray": "1.5 2.5", class: "dropped" }));
      }
    });
  }

  drawNonfinite(domain) {
    const wanted = new Set(this.spec.lines.map((line) => line.name)), bottom = MARGIN.top + this.inner.height;
    let labelled = -Infinity;
    RUNS.forEach((run, number) => {
      if (state.hidden.has(number)) return;
      for (const [step, name, value] of run.nonfinite) {
        const x = xOfStep(run, step);
        if (!wanted.has(name) || x < domain[0] || x > domain[1]) continue;
        const at = this.x(x);
        this.over.append(svg("path", { d: `M${at} ${bottom - 7}v7`, stroke: "var(--alarm)", "stroke-width": 2 }, svg("title", {}, `${name} is ${value} at step ${step}`)));
        if (at - labelled > 46) {
          this.over.append(svg("text", { class: "alarm", x: at, y: bottom - 10, "text-anchor": "middle" }, value === "nan" ? "NaN" : value.replace("inf", "∞")));
          labelled = at;
        }
      }
    });
  }

  drawKey() {
    if (this.spec.lines.length < 2) { this.key.replaceChildren(); return; }
    const single = RUNS.length === 1;
    this.key.replaceChildren(...this.spec.lines.filter((line) => this.series.some((s) => s.line === line)).map((line) => {
      const stroke = single ? color(0) : "var(--ink-2)";
      const sample = svg("svg", { width: 22, height: 10 }, svg("path", { d: "M1 5H21", stroke, "stroke-width": line.thin ? 1.25 : 2, "stroke-dasharray": line.dash || null, opacity: line.faint || null }), line.dots ? svg("circle", { cx: 11, cy: 5, r: 3.2, fill: "var(--surface)", stroke, "stroke-width": 2 }) : null);
      return html("span", {}, sample, line.label);
    }));
  }

  drawMarkers(domain) {
    const taken = [];  // [row, left, right] of the labels so far; mesh changes come first to a place
    for (const marker of markers()) {
      const value = xOfStep(marker.run, marker.step);
      const foreign = this.spec.run && this.spec.run !== marker.run;
      if (foreign || state.hidden.has(marker.number) || value === null || value < domain[0] || value > domain[1]) continue;
      const at = Math.round(this.x(value)) + 0.5, stroke = RUNS.length > 1 ? color(marker.number) : "var(--ink-2)";
      this.frame.append(svg("line", { class: "event", x1: at, x2: at, y1: MARGIN.top - 6, y2: MARGIN.top + this.inner.height, stroke, "stroke-width": marker.mesh ? 1.5 : 1, "stroke-dasharray": marker.mesh ? null : "3 3", opacity: markers().length > 10 ? 0.4 : 0.75 }, svg("title", {}, marker.text)));
      if (!this.spec.labels) continue;
      const width = marker.label.length * 6 + 8, flip = at + width > this.width - 4;
      const left = flip ? at - width : at, right = flip ? at : at + width;
      const row = [0, 1].find((row) => taken.every((other) => other[0] !== row || other[2] < left || other[1] > right));
      if (row === undefined) continue;
      taken.push([row, left, right]);
      this.over.append(svg("text", { class: "mark", x: at + (flip ? -4 : 4), y: MARGIN.top - 5 + row * 13, "text-anchor": flip ? "end" : "start" }, marker.label));
    }
  }

  // -- the pointer: a cross-hair over all charts, and zooming by dragging

  at(event) {
    const box = this.plot.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) * (this.width / box.width), MARGIN.left), MARGIN.left + this.inner.width);
  }
  press(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.drag = { from: this.at(event), brush: svg("rect", { class: "brush", y: MARGIN.top, height: this.inner.height }) };
    this.plot.setPointerCapture(event.pointerId);
    this.root.append(this.drag.brush);
  }
  move(event) {
    const at = this.at(event);
    if (this.drag) {
      this.drag.brush.setAttribute("x", Math.min(at, this.drag.from));
      this.drag.brush.setAttribute("width", Math.abs(at - this.drag.from));
    }
    hover({ chart: this, x: this.xInverse(at) });
  }
  release(event) {
    if (!this.drag) return;
    const [from, to] = [this.drag.from, this.at(event)].sort((a, b) => a - b);
    this.drag.brush.remove();
    this.drag = null;
    if (to - from > 6) { state.zoom = [this.xInverse(from), this.xInverse(to)]; drawAll(); }
  }

  rowsAt(value) {  // what the tip says: [colour, label, text]
    const rows = [];
    for (const { run, number, line, all } of this.series) {
      const point = nearest(all, value);
      const reach = (xDomain()[1] - xDomain()[0]) / 50;  // a run that has ended, or not begun, has nothing to say here
      if (!point || value > all[all.length - 1][0] + reach || value < all[0][0] - reach) continue;
      const sparse = run.columns[line.name].i ? ` at step ${count(run.steps[point[4]])}` : "";
      const label = (RUNS.length > 1 ? run.name + "  " : "") + (this.spec.lines.length > 1 ? line.label : "") + sparse;
      let text = point[1] === null ? "not finite" : this.spec.exact(point[1]);
      if (point[2] !== point[3] && point[1] !== null) text += ` (${this.spec.exact(point[2])} – ${this.spec.exact(point[3])})`;
      rows.push([color(number), label || this.spec.title, text]);
    }
    return rows;
  }

  showHover(hovering) {
    this.cross.replaceChildren();
    this.tip.style.visibility = "hidden";
    if (!hovering) return;
    const at = Math.round(this.x(hovering.x)) + 0.5;
    if (at < MARGIN.left || at > MARGIN.left + this.inner.width) return;
    this.cross.append(svg("line", { class: "cross", x1: at, x2: at, y1: MARGIN.top, y2: MARGIN.top + this.inner.height }));
    if (hovering.chart !== this) return;
    const rows = this.rowsAt(hovering.x);
    if (!rows.length) return;
    const body = rows.slice(0, 14).map(([fill, label, text]) => html("tr", {}, html("td", {}, html("span", { class: "swatch", style: `background:${fill}` }), label), html("td", {}, text)));
    this.tip.replaceChildren(html("div", { class: "at" }, this.where(hovering.x)), html("table", {}, html("tbody", {}, body)));
    const scale = this.plot.clientWidth / this.width, width = this.tip.offsetWidth;
    const left = at * scale + 14 + width > this.plot.clientWidth ? at * scale - width - 14 : at * scale + 14;
    this.tip.style.transform = `translate(${Math.max(0, left)}px, 24px)`;
    this.tip.style.visibility = "visible";
  }
  where(value) {
    if (state.x === "time") return duration(value) + " of training";
    return state.x === "tokens" ? si(value) + " tokens" : "step " + count(value);
  }
}

function nearest(list, value) {
  let best = null;
  let low = 0, high = list.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (best === null || Math.abs(list[middle][0] - value) < Math.abs(best[0] - value)) best = list[middle];
    list[middle][0] < value ? (low = middle + 1) : (high = middle - 1);
  }
  return best;
}

// ---- where the time goes: phases stacked, for one run

class StackChart extends Chart {
  drawBody(domain) {
    const { run, number } = this.spec;
    this.series = [];
    const off = state.hidden.has(number);
    this.node.hidden = off;
    if (off) { this.y = this.axes(domain, [0, 1], false); return; }
    const phases = DATA.phases.filter((phase) => run.columns[`time/${phase}_s`]);
    // Steps that share a few pixels share a column, which shows their mean.
    const columns = [], sums = {}, slots = Math.max(1, Math.floor(this.inner.width / 3));
    const index = new Map();
    for (const phase of phases) {
      sums[phase] = 0;
      const column = run.columns[`time/${phase}_s`];
      for (let i = 0; i < column.v.length; i++) {
        const row = column.i ? column.i[i] : i, x = xOf(run, row);
        if (x === null || column.v[i] === null || x < domain[0] || x > domain[1]) continue;
        const slot = Math.min(slots - 1, Math.floor(((x - domain[0]) / (domain[1] - domain[0])) * slots));
        if (!index.has(slot)) index.set(slot, { first: x, last: x, rows: new Set(), sum: {} });
        const entry = index.get(slot);
        entry.first = Math.min(entry.first, x);
        entry.last = Math.max(entry.last, x);
        entry.rows.add(row);
        entry.sum[phase] = (entry.sum[phase] || 0) + column.v[i];
        sums[phase] += column.v[i];
      }
    }
    for (const slot of [...index.keys()].sort((a, b) => a - b)) {
      const entry = index.get(slot), total = phases.reduce((sum, phase) => sum + (entry.sum[phase] || 0), 0);
      if (total > 0) columns.push({ ...entry, total: total / entry.rows.size, share: total });
    }
    this.columns = columns;
    const range = state.share ? [0, 1] : yDomain(columns.map((column) => column.total), { zero: true, clip: true }, false);
    const format = this.spec.format;
    this.spec.format = state.share ? percent : seconds;
    this.y = this.axes(domain, range, false);
    this.spec.format = format;
    const bottom = MARGIN.top + this.inner.height;
    columns.forEach((column, i) => {
      // A column reaches half way to its neighbours; the outermost ones are as wide on both sides.
      const before = columns[i - 1], after = columns[i + 1];
      const gapLeft = before ? (column.first - before.last) / 2 : after ? (after.first - column.last) / 2 : (domain[1] - domain[0]) / 4;
      const gapRight = after ? (after.first - column.last) / 2 : gapLeft;
      const widest = Math.max((domain[1] - domain[0]) / 40, 0);
      const left = Math.round(Math.max(MARGIN.left, this.x(column.first - Math.min(gapLeft, widest))));
      const right = Math.round(Math.min(MARGIN.left + this.inner.width, this.x(column.last + Math.min(gapRight, widest))));
      const gap = right - left > 8 ? 1 : 0;
      let base = 0;
      for (const phase of phases) {
        const value = (column.sum[phase] || 0) / (state.share ? column.share : column.rows.size);
        const top = Math.max(this.y(base + value), MARGIN.top - 2), low = Math.min(this.y(base), bottom);
        if (low - top > 0.05) this.body.append(svg("rect", { class: "part", x: left, y: top.toFixed(2), width: Math.max(1, right - left - gap), height: (low - top).toFixed(2), fill: `var(--p-${phase})` }));
        base += value;
      }
      if (!state.share && column.total > range[1]) this.over.append(svg("path", { d: `M${(left + right) / 2} ${MARGIN.top - 4}l4 6h-8z`, fill: "var(--ink-2)" }, svg("title", {}, seconds(column.total))));
    });
    const whole = Object.values(sums).reduce((a, b) => a + b, 0);
    this.key.replaceChildren(...phases.filter((phase) => sums[phase] > 0).map((phase) => html("span", { title: (DATA.names[`time/${phase}_s`] || {}).meaning }, html("span", { class: "box", style: `background:var(--p-${phase})` }), phase.replaceAll("_", " ") + " ", html("b", {}, percent(sums[phase] / whole)))));
  }
  rowsAt(value) {
    const column = (this.columns || []).reduce((best, c) => (!best || Math.abs((c.first + c.last) / 2 - value) < Math.abs((best.first + best.last) / 2 - value) ? c : best), null);
    if (!column) return [];
    const rows = DATA.phases.filter((phase) => column.sum[phase]).map((phase) => [`var(--p-${phase})`, phase.replaceAll("_", " "), `${seconds(column.sum[phase] / column.rows.size)}  ${percent(column.sum[phase] / column.share)}`]);
    return [...rows.reverse(), ["transparent", "in all", seconds(column.total)]];
  }
}

// ---- resumes and mesh changes

let markerCache = null;
function markers() {
  if (markerCache) return markerCache;
  markerCache = [];
  RUNS.forEach((run, number) => {
    let mesh = null;
    for (const event of run.events) {
      if (event.event !== "resume" && event.event !== "start") continue;
      const changed = mesh && event.mesh && meshText(mesh) !== meshText(event.mesh);
      if (event.event === "resume") {
        const axes = changed ? Object.keys({ ...mesh, ...event.mesh }).filter((axis) => mesh[axis] !== event.mesh[axis]) : [];
        const change = axes.map((axis) => `${axis} ${mesh[axis] ?? 1} → ${event.mesh[axis] ?? 1}`).join(", ");
        const again = event.dropped_steps ? `, ${event.dropped_steps} steps run again` : "";
        markerCache.push({ run, number, step: event.step, mesh: Boolean(changed), label: change || "resume", text: `${run.name}: resumed after step ${event.step}${change ? ", " + change : ""}${again}` });
      }
      mesh = event.mesh || mesh;
    }
  });
  return markerCache.sort((a, b) => b.mesh - a.mesh || a.step - b.step);
}

// ---- the page

function hover(hovering) {
  state.hover = hovering;
  for (const chart of charts) if (chart.x && !chart.node.hidden) chart.showHover(hovering);
}
function drawAll() {
  for (const chart of charts) chart.draw();
  document.getElementById("reset").hidden = !state.zoom;
}

function segmented(label, options, get, set) {
  const buttons = options.map(([value, text]) => html("button", { type: "button", "aria-pressed": String(get() === value), onclick: () => {
    set(value);
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === value)));
    drawAll();
  } }, text));
  return html("label", {}, label, html("span", { class: "seg" }, buttons));
}

function runTable() {
  const head = [["run"], ["steps", 1], ["tokens", 1], ["loss", 1], ["validation loss", 1], ["best", 1], ["tokens/s", 1], ["peak memory", 1], ["training time", 1], ["resumes", 1], ["mesh"]];
  const show = (value, format) => (value === null || value === undefined ? html("span", { class: "muted" }, "–") : typeof value === "string" ? html("span", { class: "alarm" }, value) : format(value));
  const loss = (value) => value.toPrecision(5);
  const body = RUNS.map((run, number) => {
    const s = run.summary;
    const cells = [[s.step, count], [s.tokens, si], [s.loss, loss], [s.val_loss, loss], [s.best_val_loss, loss], [s.tokens_per_s, count], [s.memory_bytes, bytes], [s.seconds, duration], [s.resumes, count]];
    const toggle = () => { state.hidden.has(number) ? state.hidden.delete(number) : state.hidden.add(number); row.classList.toggle("off"); drawAll(); };
    const row = html("tr", { onclick: RUNS.length > 1 ? toggle : () => {} },
      html("td", {}, html("span", { class: "swatch", style: `background:${color(number)}` }), run.name),
      cells.map(([value, format]) => html("td", { class: "num" }, show(value, format))), html("td", {}, s.mesh ? meshText(s.mesh) : "–"));
    return row;
  });
  const hint = RUNS.length > 1 ? "Click a row to hide or show the run." : null;
  return html("div", { class: "card scroll", title: hint }, html("table", { class: "runs" }, html("thead", {}, html("tr", {}, head.map(([text, num]) => html("th", { class: num ? "num" : null }, text)))), html("tbody", {}, body)));
}

function eventTable() {
  const rows = [];
  RUNS.forEach((run, number) => run.events.forEach((event) => {
    const { event: kind, step, wall_time: time, mesh, ...rest } = event;
    const details = [mesh ? meshText(mesh) : null, ...Object.entries(rest).map(([key, value]) => `${key.replaceAll("_", " ")} ${typeof value === "object" ? JSON.stringify(value) : typeof value === "number" && !Number.isInteger(value) ? si(value) : value}`)].filter(Boolean).join(", ");
    rows.push(html("tr", {}, RUNS.length > 1 ? html("td", {}, html("span", { class: "swatch", style: `background:${color(number)}` }), run.name) : null, html("td", {}, typeof time === "number" ? new Date(time * 1000).toISOString().slice(0, 19).replace("T", " ") : "–"), html("td", { class: "num" }, count(step ?? 0)), html("td", {}, kind), html("td", { class: "wrap" }, details)));
  }));
  if (!rows.length) return null;
  const head = [RUNS.length > 1 ? html("th", {}, "run") : null, html("th", {}, "time (UTC)"), html("th", { class: "num" }, "after step"), html("th", {}, "event"), html("th", {}, "")];
  return [html("h2", {}, "Events"), html("div", { class: "card scroll" }, html("table", {}, html("thead", {}, html("tr", {}, head)), html("tbody", {}, rows.slice(0, 500))))];
}

function configTable() {
  if (!DATA.config.length) return null;
  const several = RUNS.length > 1, differing = DATA.config.filter((row) => row.differs);
  const line = (row) => html("tr", { class: several && row.differs ? "differs" : null }, html("td", {}, html("code", {}, row.key)), row.values.map((value) => html("td", { class: "wrap" }, value === null ? html("span", { class: "muted" }, "–") : html("code", {}, value))));
  const table = (rows) => html("div", { class: "card scroll" }, html("table", {}, several ? html("thead", {}, html("tr", {}, html("th", {}, "key"), RUNS.map((run, number) => html("th", {}, html("span", { class: "swatch", style: `background:${color(number)}` }), run.name)))) : null, html("tbody", {}, rows.map(line))));
  return [
    several ? html("h2", {}, "What differs in the configs") : null,
    several ? (differing.length ? table(differing) : html("p", { class: "muted" }, "Nothing.")) : null,
    html("details", {}, html("summary", {}, several ? "All keys" : "Config"), table(DATA.config)),
  ];
}

// Names like activation_rms/layers.3 share a chart when there are several, first to last from faint to full; of many, eight.
function families(names) {
  const found = new Map();
  for (const name of names) {
    const family = name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : name;
    if (!found.has(family)) found.set(family, []);
    found.get(family).push(name);
  }
  return [...found].flatMap(([family, members]) => {
    if (members.length < 3) return members.map((name) => [name, [[name, ""]]]);
    members.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const shown = members.length <= 8 ? members : [...Array(8).keys()].map((i) => members[Math.round(i * (members.length - 1) / 7)]);
    return [[family + "/", shown.map((name) => [name, name.slice(family.length + 1) || "all"])]];
  });
}

function buildCharts() {
  const has = (name) => RUNS.some((run) => run.columns[name]);
  const help = (name) => (DATA.names[name] || {}).meaning;
  const drawn = new Set(["tokens", "step_time_s", "tokens_per_s_per_rank", "memory/current_min_bytes", "memory/peak_min_bytes"]);
  const main = html("div", { class: "grid" });
  const add = (spec, Kind) => {
    (spec.lines || []).forEach((line) => drawn.add(line.name));
    if (Kind || spec.lines.some((line) => has(line.name))) main.append(new (Kind || Chart)({ format: si, exact: si, lines: [], ...spec }).node);
  };
  const digits = (value) => value.toPrecision(6);
  add({ id: "loss", title: "Loss", unit: "nats/token", help: help("loss"), wide: true, height: 340, log: true, clip: true, labels: true, dropped: true, exact: digits,
    lines: [{ name: "loss", label: "training", smooth: true }, { name: "val_loss", label: "validation", dots: true, thin: true }] });
  add({ id: "grad_norm", title: "Gradient norm", unit: "before clipping", help: help("grad_norm"), log: true, clip: true, zero: true, lines: [{ name: "grad_norm", label: "", thin: true }] });
  add({ id: "lr", title: "Learning rate", help: help("lr"), zero: true, lines: [{ name: "lr", label: "" }] });
  add({ id: "throughput", title: "Throughput", unit: "tokens/s", help: help("tokens_per_s"), zero: true, exact: count, lines: [{ name: "tokens_per_s", label: "", smooth: true }] });
  add({ id: "memory", title: "Memory", unit: "of the rank with most", zero: true, ticks: byteTicks, format: bytes, exact: bytes, lines: [{ name: "memory/peak_max_bytes", label: "peak" }, { name: "memory/current_max_bytes", label: "now", thin: true, dash: "3 2" }] });
  const mfu = { title: "Model FLOP utilisation", zero: true, format: percent, exact: percent };
  if (has("mfu/matmul")) add({ ...mfu, id: "mfu", unit: "against the datasheet peak", lines: [{ name: "mfu/matmul", label: "", smooth: true }] });
  else add({ ...mfu, id: "mfu", unit: "against the measured matmul peak", lines: [{ name: "mfu/measured", label: "", smooth: true }] });
  add({ id: "tflops", title: "Model TFLOP/s per rank", help: help("tflops_per_rank"), zero: true, lines: [{ name: "tflops_per_rank", label: "", smooth: true }] });
  RUNS.forEach((run, number) => {
    const own = DATA.phases.map((phase) => `time/${phase}_s`).filter((name) => run.columns[name]);
    own.forEach((name) => drawn.add(name));
    if (own.length) add({ id: "time-" + number, title: "Where the time goes", unit: RUNS.length > 1 ? run.name : "per step, rank 0", wide: RUNS.length === 1, height: 260, run, number, lines: [] }, StackChart);
  });
  const rest = [...new Set(RUNS.flatMap((run) => Object.keys(run.columns)))].filter((name) => !drawn.has(name)).sort();
  const more = html("div", { class: "grid" });
  const entry = (name) => DATA.names[name] || DATA.names[Object.keys(DATA.names).find((known) => known.includes("<") && known.startsWith(name.slice(0, name.indexOf("/") + 1) + "<"))] || {};
  const sparse = (name) => RUNS.every((run) => !run.columns[name] || run.columns[name].v.length < 40);
  for (const [title, members] of families(rest).slice(0, 80)) {
    const lines = members.map(([name, label], i) => ({ name, label, thin: members.length > 1, dots: members.length === 1 && sparse(name), faint: members.length > 1 ? (0.3 + 0.7 * i / (members.length - 1)).toFixed(2) : null }));
    more.append(new Chart({ id: title, title, unit: entry(members[0][0]).unit, help: entry(members[0][0]).meaning, format: si, exact: si, log: true, clip: true, height: 180, lines }).node);
  }
  return [main, rest.length ? [html("h2", {}, "More"), more] : null];
}

function build() {
  const page = document.getElementById("page"), empty = !longest;
  const title = RUNS.map((run) => run.name).join(", ");
  const notes = [];
  const bucket = Math.max(...RUNS.map((run) => run.bucket));
  if (bucket > 1) notes.push(`Each point stands for up to ${bucket} steps: a line is their mean, the band their minimum and maximum.`);
  for (const run of RUNS) if (run.nonfinite_count) notes.push(`${run.name}: ${count(run.nonfinite_count)} values are not finite, the first at step ${run.nonfinite[0][0]} (${run.nonfinite[0][1]}).`);
  const again = RUNS.filter((run) => run.dropped.length).map((run) => run.name);
  if (again.length) notes.push("Dotted grey: steps of a process that died, which were run again after the resume.");
  const smoothing = html("input", { type: "range", min: 0, max: 100, value: state.smooth, "aria-label": "smoothing", oninput: (event) => { state.smooth = +event.target.value; width.textContent = halfWindow() ? `± ${halfWindow() * bucket} steps` : "off"; drawAll(); } });
  const width = html("span", { class: "width" }, halfWindow() ? `± ${halfWindow() * bucket} steps` : "off");
  const tokens = RUNS.every((run) => !run.steps.length || (run.columns.tokens && !run.columns.tokens.i));
  const controls = html("div", { class: "controls" },
    segmented("x", [["step", "steps"], ...(tokens ? [["tokens", "tokens"]] : []), ["time", "time"]], () => state.x, (value) => { state.x = value; state.zoom = null; }),
    segmented("y", [[false, "linear"], [true, "log"]], () => state.log, (value) => { state.log = value; }),
    segmented("time", [[false, "seconds"], [true, "share"]], () => state.share, (value) => { state.share = value; }),
    html("label", {}, "smoothing", smoothing, width),
    html("button", { type: "button", class: "plain", id: "reset", hidden: true, onclick: () => { state.zoom = null; drawAll(); } }, "whole run"),
    html("span", { class: "hint" }, "drag to zoom, double-click for the whole run"));
  page.replaceChildren(
    html("h1", {}, title),
    html("p", { class: "sub" }, `titanlike run report, made ${document.body.dataset.made}`, notes.map((note) => [html("br"), note])),
    runTable(), controls,
    ...(empty ? [html("div", { class: "card empty" }, "No step has been logged yet.")] : buildCharts().flat(2).filter(Boolean)),
    ...(eventTable() || []), ...(configTable() || []).filter(Boolean),
    html("footer", {}, "Names, units and formulas: docs/metrics.md."));
  drawAll();
  document.documentElement.dataset.ready = "true";
}

build();
let width = window.innerWidth;
window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); } });
