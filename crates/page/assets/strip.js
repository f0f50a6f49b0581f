// The strip: the losses of the services that lose most, over all windows, and the worst moment.
import { el, svg, percent, seconds } from "./text.js";

const ROWS = 6;
const COLUMNS = 120;
// Losses of 100 % or more have the full color.
const FULL_LOSS = 1;
// Smaller losses are no moment to show.
const LEAST_LOSS = 0.01;

// The run time that a service's users feel to be added; a forecast if nothing was measured.
function lossOf(service) {
  const loss = service.run_time_percent ?? service.cache_percent;
  return loss === null ? null : loss / 100;
}

// Index of the window with the largest loss of a service; null if there is none worth showing.
export function worstWindow(windows) {
  let worst = null;
  let most = LEAST_LOSS;
  windows.forEach((snapshot, at) => {
    for (const service of snapshot.services || []) {
      const loss = lossOf(service);
      if (loss !== null && loss > most) [worst, most] = [at, loss];
    }
  });
  return worst;
}

export class Strip {
  constructor(element, goTo) {
    this.element = element;
    this.goTo = goTo;
    this.drawn = "";
  }

  show(windows, at) {
    const key = windows.length + " " + (windows[0]?.window ?? 0) + " " + (windows[windows.length - 1]?.window ?? 0);
    if (key !== this.drawn) this.draw(windows);
    this.drawn = key;
    const share = windows.length > 1 ? at / (windows.length - 1) : 0;
    for (const mark of this.element.querySelectorAll(".now")) mark.setAttribute("x", (share * (COLUMNS - 1)).toFixed(2));
  }

  draw(windows) {
    const columns = Math.min(COLUMNS, windows.length);
    const columnOf = (at) => Math.min(columns - 1, Math.floor((at * columns) / windows.length));
    const rows = new Map();
    windows.forEach((snapshot, at) => {
      for (const service of snapshot.services || []) {
        const loss = lossOf(service);
        if (loss === null) continue;
        if (!rows.has(service.name)) rows.set(service.name, { most: 0, cells: new Array(columns).fill(null) });
        const row = rows.get(service.name);
        row.most = Math.max(row.most, loss);
        const before = row.cells[columnOf(at)];
        if (before === null || loss > before.loss) row.cells[columnOf(at)] = { loss, at };
      }
    });
    const worst = [...rows].filter(([, row]) => row.most > LEAST_LOSS).sort((a, b) => b[1].most - a[1].most).slice(0, ROWS);
    this.element.replaceChildren(...worst.map(([name, row]) => this.row(name, row, columns, windows)));
    this.element.closest("section").hidden = worst.length === 0;
  }

  row(name, row, columns, windows) {
    const width = COLUMNS / columns;
    const cells = row.cells.map((cell, column) => {
      if (!cell) return null;
      const heat = Math.sqrt(Math.min(1, Math.max(0, cell.loss) / FULL_LOSS));
      const part = svg("rect", { x: (column * width).toFixed(2), y: 0, width: width.toFixed(2), height: 10, class: "loss", "fill-opacity": heat.toFixed(2) });
      part.append(svg("title", {}, seconds(windows[cell.at].at_s) + ": " + percent(cell.loss, true)));
      part.addEventListener("click", () => this.goTo(cell.at));
      return part;
    });
    const picture = svg("svg", { viewBox: "0 0 " + COLUMNS + " 10", preserveAspectRatio: "none", role: "img", "aria-label": "Run time that " + name + " lost over time, at most " + percent(row.most, true) },
      svg("rect", { x: 0, y: 0, width: COLUMNS, height: 10, class: "calm" }), ...cells.filter(Boolean), svg("rect", { x: 0, y: 0, width: 0.6, height: 10, class: "now" }));
    return el("div", { class: "lost" }, el("span", { class: "who" }, name), picture, el("span", { class: "most" }, percent(row.most, true)));
  }
}
