// Pairwise slowdowns: two tables, forecast and measured.
import { el, say, percent, shade, DASH } from "./text.js";

export class Matrix {
  constructor(root, choose) {
    this.root = root;
    this.shown = null;
    root.addEventListener("click", (event) => {
      const name = event.target.closest("[data-program]");
      if (name) choose(Number(name.dataset.program));
    });
  }

  show(matrix, nameOf) {
    if (this.shown === matrix && matrix !== null) return;
    const same = this.shown && matrix && this.shown.programs.join() === matrix.programs.join();
    this.shown = matrix;
    const known = matrix && [...matrix.forecast, ...matrix.measured].some((row) => row.some((value) => value !== null));
    if (!known) {
      this.cells = null;
      this.root.replaceChildren(el("p", { class: "soft" }, "No pair of programs has been forecast or measured yet."));
      return;
    }
    if (!same || !this.cells) this.build(matrix, nameOf);
    this.fill("forecast", matrix, nameOf);
    this.fill("measured", matrix, nameOf);
  }

  build(matrix, nameOf) {
    this.cells = { forecast: [], measured: [] };
    const tables = ["forecast", "measured"].map((which) => {
      const names = matrix.programs.map(nameOf);
      const head = el("tr", {}, el("td", {}), ...names.map((name) => el("th", { scope: "col", title: name }, el("span", {}, name))));
      const rows = matrix.programs.map((program, at) => {
        const cells = names.map(() => el("td", {}));
        this.cells[which].push(cells);
        return el("tr", {}, el("th", { scope: "row" }, el("button", { type: "button", class: "link", "data-program": program, title: names[at] }, names[at])), ...cells);
      });
      const table = el("table", { class: "matrix" }, el("caption", {}, which === "forecast" ? "Forecast" : "Measured"), el("thead", {}, head), el("tbody", {}, ...rows));
      return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Pairwise slowdowns, " + which }, table);
    });
    this.root.replaceChildren(el("div", { class: "pair" }, ...tables));
  }

  fill(which, matrix, nameOf) {
    this.cells[which].forEach((cells, row) => cells.forEach((cell, column) => {
      const value = matrix[which][row][column];
      const text = value === null ? (row === column ? "" : DASH) : percent(value).replace(" %", "");
      if (cell.textContent === text && cell.dataset.done) return;
      cell.dataset.done = "1";
      say(cell, text);
      shade(cell, value);
      const windows = which === "measured" && value !== null ? " (" + matrix.windows[row][column] + " windows)" : "";
      cell.title = row === column ? "" : nameOf(matrix.programs[row]) + " beside " + nameOf(matrix.programs[column]) + ": " + percent(value, true) + windows;
    }));
  }
}
