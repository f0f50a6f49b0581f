// Received windows in order, curves and matrices with their first window, and a series for each program.

// Windows that a live page remembers.
export const REMEMBERED = 1800;

export class Store {
  constructor() {
    this.clear();
  }

  // `remembered` windows are stored; a recording is stored whole.
  clear(remembered = REMEMBERED) {
    this.remembered = remembered;
    this.head = null;
    this.windows = [];
    this.series = new Map();
    this.curves = new Map();
    this.matrices = [];
    this.marks = [];
    this.names = new Map();
    this.probes = [];
  }

  // Adds a window. After a reconnection some arrive again; these are ignored.
  add(snapshot) {
    const last = this.windows[this.windows.length - 1];
    if (last && snapshot.window <= last.window) return false;
    this.windows.push(snapshot);
    const at = snapshot.at_s;
    for (const program of snapshot.programs) {
      this.names.set(program.program, program);
      program.promises = snapshot.promises.filter((promise) => promise.program === program.program);
      let series = this.series.get(program.program);
      if (!series) {
        series = { at: [], speed: [], slow: [], forecast: [], low: [], high: [], speedUnit: null };
        this.series.set(program.program, series);
      }
      const forecast = program.forecast_slowdown;
      series.at.push(at);
      series.speed.push(program.speed_per_s ?? null);
      series.slow.push(program.slowdown === undefined ? null : 100 * program.slowdown);
      series.forecast.push(forecast ? 100 * forecast.value : null);
      series.low.push(forecast ? 100 * forecast.low : null);
      series.high.push(forecast ? 100 * forecast.high : null);
      series.speedUnit = program.speed_unit ?? series.speedUnit;
    }
    this.keep(snapshot);
    for (const decision of snapshot.new_decisions) this.marks.push({ window: snapshot.window, at, decision });
    const cost = snapshot.probes.reduce((sum, probe) => sum + probe.cost_s, 0);
    const before = this.probes.length ? this.probes[this.probes.length - 1].total : 0;
    this.probes.push({ window: snapshot.window, cost, total: before + cost });
    if (this.windows.length > this.remembered) this.forget();
    return true;
  }

  // A window has only the curves and the matrix that changed; they apply until the next change.
  keep(snapshot) {
    for (const curve of snapshot.curves || []) {
      if (!this.curves.has(curve.program)) this.curves.set(curve.program, []);
      this.curves.get(curve.program).push({ window: snapshot.window, curve });
    }
    if (snapshot.matrix) this.matrices.push({ window: snapshot.window, matrix: snapshot.matrix });
  }

  forget() {
    const gone = this.windows.shift();
    this.probes.shift();
    while (this.marks.length && this.marks[0].window <= gone.window) this.marks.shift();
    for (const program of gone.programs) {
      const series = this.series.get(program.program);
      if (!series || series.at[0] !== gone.at_s) continue;
      for (const name of ["at", "speed", "slow", "forecast", "low", "high"]) series[name].shift();
      if (series.at.length === 0) {
        this.series.delete(program.program);
        this.curves.delete(program.program);
        this.names.delete(program.program);
      }
    }
    const first = this.windows[0].window;
    while (this.matrices.length > 1 && this.matrices[1].window <= first) this.matrices.shift();
    for (const kept of this.curves.values()) while (kept.length > 1 && kept[1].window <= first) kept.shift();
  }

  matrixAt(window) {
    return newestUpTo(this.matrices, window)?.matrix ?? null;
  }

  curveAt(program, window) {
    return newestUpTo(this.curves.get(program) || [], window)?.curve ?? null;
  }

  name(program) {
    return this.names.get(program)?.name ?? "#" + program;
  }

  // With the number that distinguishes it from others of its name.
  fullName(program) {
    const known = this.names.get(program);
    return known ? known.name + (known.pid !== undefined ? " (" + known.pid + ")" : " #" + program) : "#" + program;
  }
}

export function newestUpTo(list, window) {
  for (let at = list.length - 1; at >= 0; at -= 1) if (list[at].window <= window) return list[at];
  return null;
}
