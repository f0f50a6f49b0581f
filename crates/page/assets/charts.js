// Speed, slowdown and curve of the selected program, by uPlot. A chart is built once for each kind of content.
import { number, size } from "./text.js";

// Cached, because reading a color makes the browser compute styles at once.
const colors = new Map();

function color(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
}

function axes(x, y) {
  const common = { stroke: color("--muted"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
  return [{ ...common, values: (_, ticks) => ticks.map(x), size: 34 }, { ...common, values: (_, ticks) => ticks.map(y), size: 58 }];
}

// `1:05` minutes, `2:00:00` hours; below ten seconds with a decimal where it has one.
function clock(value) {
  if (value < 60) return Number(value.toFixed(2)) + " s";
  const pad = (part) => String(Math.floor(part)).padStart(2, "0");
  return value < 3600 ? Math.floor(value / 60) + ":" + pad(value % 60) : Math.floor(value / 3600) + ":" + pad((value % 3600) / 60) + ":" + pad(value % 60);
}

function lineOf(label, stroke, dash) {
  return { label, stroke: color(stroke), width: 2, dash, points: { size: 5 }, spanGaps: false };
}

// More windows than this are drawn as means inside the band from the least to the greatest value of each bucket.
const BUCKETS = 300;

const least = (values) => Math.min(...values);
const most = (values) => Math.max(...values);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// Rows of values and their reductions, over the windows within `range`; null is the whole run.
export function envelope(at, rows, range) {
  const inside = (time) => !range || (time >= range[0] && time <= range[1]);
  const first = Math.max(0, at.findIndex(inside));
  const last = at.findLastIndex(inside) + 1;
  const size = Math.max(1, Math.ceil((last - first) / BUCKETS));
  const times = [];
  const columns = rows.map(() => []);
  for (let from = first; from < last; from += size) {
    const to = Math.min(last, from + size);
    times.push(at[Math.floor((from + to - 1) / 2)]);
    rows.forEach(([values, reduce], row) => {
      const known = values.slice(from, to).filter((value) => value !== null);
      columns[row].push(known.length ? reduce(known) : null);
    });
  }
  return [times, ...columns];
}

// An edge of a band. Each chart needs its own, because uPlot writes into it.
const edge = () => ({ stroke: "transparent", points: { show: false } });

export class Charts {
  constructor(roots, atTime, again) {
    this.roots = roots;
    this.atTime = atTime;
    this.plots = {};
    this.marks = [];
    this.now = null;
    this.kind = "";
    // Times between which the charts show the run; null = all.
    this.range = null;
    this.whole = [0, 0];
    this.again = again;
    addEventListener("resize", () => this.resize());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      colors.clear();
      this.forget();
      again();
    });
  }

  // Everything is rebuilt, because the colors changed.
  forget() {
    for (const plot of Object.values(this.plots)) plot.destroy();
    this.plots = {};
  }

  width(name) {
    return Math.max(200, Math.floor(this.roots[name].clientWidth));
  }

  resize() {
    for (const [name, plot] of Object.entries(this.plots)) plot.setSize({ width: this.width(name), height: 190 });
  }

  // Shows so many times the range around the shown window; the whole run where that is shorter.
  zoom(factor) {
    const [from, to] = this.range ?? this.whole;
    const half = (factor * (to - from)) / 2;
    const middle = Math.min(Math.max(this.now ?? to, this.whole[0] + half), this.whole[1] - half);
    this.setRange(2 * half >= this.whole[1] - this.whole[0] ? null : [middle - half, middle + half]);
  }

  setRange(range) {
    this.range = range;
    this.again();
  }

  rangeText() {
    return this.range ? clock(this.range[0]) + " to " + clock(this.range[1]) : "whole run; drag across a chart to zoom";
  }

  // Vertical lines at decisions and at the shown window.
  linesPlugin() {
    return { hooks: { draw: (plot) => {
      const { ctx } = plot;
      const { left, top, width, height } = plot.bbox;
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, top, width, height);
      ctx.clip();
      for (const [at, stroke, dash] of [...this.marks.map((mark) => [mark.at, color(bad(mark.decision.kind) ? "--hot" : "--band"), [3, 3]]), [this.now, color("--ink"), []]]) {
        if (at === null) continue;
        const x = Math.round(plot.valToPos(at, "x", true)) + 0.5;
        ctx.strokeStyle = stroke;
        ctx.setLineDash(dash);
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
      }
      ctx.restore();
    } } };
  }

  overTime(name, data, series, bands, y) {
    const plot = this.plots[name];
    if (plot) {
      plot.setData(data);
      return;
    }
    const made = new uPlot({
      width: this.width(name), height: 190, series: [{}, ...series], axes: axes(clock, y),
      scales: { x: { time: false } }, legend: { show: series.length > 3, live: false }, cursor: { y: false, drag: { x: true, y: false, setScale: false } },
      bands, padding: [8, 20, 0, 0],
      plugins: [this.linesPlugin()], hooks: { setSelect: [(selected) => this.select(selected)] },
    }, data, this.roots[name]);
    made.over.addEventListener("dblclick", () => this.setRange(null));
    made.over.addEventListener("click", () => {
      // The end of a drag is no click.
      const isDrag = this.selecting;
      this.selecting = false;
      if (isDrag) return;
      if (made.cursor.idx !== null && made.cursor.idx !== undefined) this.atTime(made.data[0][made.cursor.idx]);
    });
    this.plots[name] = made;
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    this.selecting = true;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.setRange(range);
  }

  // `series` of the chosen program, its curve, the marks that name it, the time at which one looks.
  show(program, series, curve, marks, now, cacheBytes) {
    this.marks = marks;
    this.now = now;
    if (this.kind !== program) this.forget();
    this.kind = program;
    const { at } = series;
    this.whole = [at[0], at[at.length - 1]];
    this.overTime("speed", envelope(at, [[series.speed, least], [series.speed, most], [series.speed, mean]], this.range),
      [edge(), edge(), lineOf("speed", "--s0")], [{ series: [2, 1], fill: color("--s0") + "44" }], number);
    // If neither misses nor probes are measured, there is nothing to draw.
    const known = [series.slow, series.forecast].some((values) => values.some((value) => value !== null));
    this.roots.slow.parentElement.hidden = !known;
    if (known) this.overTime("slow", envelope(at, [[series.low, least], [series.high, most], [series.slow, least], [series.slow, most], [series.forecast, mean], [series.slow, mean]], this.range),
      [edge(), edge(), edge(), edge(), lineOf("forecast", "--s0", [6, 4]), lineOf("measured", "--s1")],
      [{ series: [2, 1], fill: color("--grid") }, { series: [4, 3], fill: color("--s1") + "44" }], number);
    this.curve(curve, cacheBytes);
  }

  curve(curve, cacheBytes) {
    this.roots.curve.parentElement.hidden = !curve;
    if (!curve) return;
    const data = [0, 2, 3, 1].map((at) => curve.points.map((point) => point[at]));
    if (this.curveShown === curve && this.plots.curve) return;
    this.curveShown = curve;
    if (this.plots.curve) {
      this.plots.curve.setData(data);
      return;
    }
    const faint = { stroke: color("--s2"), width: 0.5, points: { show: false } };
    this.plots.curve = new uPlot({
      width: this.width("curve"), height: 190,
      series: [{}, { label: "low", ...faint }, { label: "high", ...faint }, { label: "misses", stroke: color("--s2"), width: 2, points: { size: 5 } }],
      bands: [{ series: [2, 1], fill: color("--grid") }], axes: axes((value) => size(value), number),
      padding: [8, 20, 0, 0], scales: { x: { time: false, distr: 3, log: 2 }, y: { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.05 : 1] } },
      legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
      plugins: [{ hooks: { draw: (plot) => wholeCache(plot, cacheBytes) } }],
    }, data, this.roots.curve);
  }
}

export function bad(kind) {
  return kind === "rolled-back" || kind === "cooling-down";
}

function wholeCache(plot, bytes) {
  if (!bytes) return;
  const x = Math.round(plot.valToPos(bytes, "x", true)) + 0.5;
  plot.ctx.save();
  plot.ctx.strokeStyle = color("--band");
  plot.ctx.setLineDash([3, 3]);
  plot.ctx.beginPath();
  plot.ctx.moveTo(x, plot.bbox.top);
  plot.ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
  plot.ctx.stroke();
  plot.ctx.restore();
}
