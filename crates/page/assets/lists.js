// Decisions, alarms, turns, probes, journal, ground truth: lists that are rebuilt only if they changed.
import { el, number, percent, seconds, counted, DASH } from "./text.js";
import { isBroken } from "./boxes.js";
import { bad } from "./charts.js";

const SHOWN = 40;
// Maximum of each kind: alarms stand above everything else and must not push it off the screen.
const ALARMS = 3;

export class Lists {
  constructor(explain) {
    this.explain = explain;
    this.keys = new Map();
  }

  // Rebuilds the children of an element if `key` differs from last time.
  fill(id, key, build) {
    if (this.keys.get(id) === key) return;
    this.keys.set(id, key);
    document.getElementById(id).replaceChildren(...build());
  }

  decisions(id, marks, window) {
    const upTo = marks.filter((mark) => mark.window <= window).slice(-SHOWN).reverse();
    const key = upTo.length + "/" + (upTo[0]?.window ?? "") + "/" + (upTo[0]?.decision.reason ?? "") + "/" + (upTo[upTo.length - 1]?.window ?? "");
    this.fill(id, key, () => upTo.length === 0 ? [el("li", { class: "soft" }, "None yet.")] : upTo.map((mark) => {
      const button = el("button", { type: "button", class: bad(mark.decision.kind) ? "link warn" : "link" },
        el("span", { class: "when" }, seconds(mark.at)), " ", mark.decision.reason);
      button.addEventListener("click", () => this.explain(mark));
      return el("li", {}, button);
    }));
  }

  alarms(snapshot, marks) {
    const alarms = [];
    const daemon = snapshot.daemon;
    if (daemon?.config_error) alarms.push(["configuration not reloaded", daemon.config_error]);
    const recent = marks.filter((mark) => bad(mark.decision.kind) && mark.window <= snapshot.window && mark.window > snapshot.window - 10).reverse();
    for (const mark of recent.slice(0, ALARMS)) alarms.push([mark.decision.kind === "rolled-back" ? "rolled back" : "on cooldown", mark.decision.reason]);
    if (recent.length > ALARMS) alarms.push(["rolled back", "and " + counted(recent.length - ALARMS, "other") + " in the last ten windows; see the list of decisions"]);
    const promises = snapshot.promises.filter((promise) => isBroken(promise.state)).map((promise) => ["promise " + promise.state.replace("-", " "), promise.text]);
    alarms.push(...promises.slice(0, ALARMS));
    if (promises.length > ALARMS) alarms.push(["promises", counted(promises.length - ALARMS, "other") + " broken or at risk"]);
    const observing = (text) => text.includes("observing only");
    const { refused } = snapshot;
    const errors = refused.filter((text) => !observing(text));
    for (const text of errors.slice(0, ALARMS)) alarms.push(["refused", text]);
    if (errors.length > ALARMS) alarms.push(["refused", "and " + counted(errors.length - ALARMS, "other")]);
    if (refused.some(observing)) alarms.push(["observing only", counted(refused.filter(observing).length, "change") + " of the plan would be made in mode act"]);
    for (const text of snapshot.overridden.slice(0, ALARMS)) alarms.push(["changed by another program", text]);
    for (const { text } of snapshot.pending.slice(0, ALARMS)) alarms.push(["in progress", text]);
    this.fill("alarms", JSON.stringify(alarms), () => alarms.map(([title, text]) =>
      el("p", { class: title === "in progress" || title === "observing only" ? "note" : "note warn" }, el("b", {}, title), " ", text)));
  }

  turns(gangs, nameOf) {
    document.getElementById("s-turns").hidden = !gangs.length;
    this.fill("turns", JSON.stringify(gangs), () => gangs.map((gang) =>
      el("li", {}, "CPUs " + gang.cpus + ", " + seconds(gang.slice_ns / 1e9) + " each: " + gang.programs.map((turn) => turn.map(nameOf).join(" + ")).join(", then "))));
  }

  probes(probes, snapshot, nameOf) {
    const upTo = probes.filter((probe) => probe.window <= snapshot.window);
    const total = upTo.length ? upTo[upTo.length - 1].total : 0;
    const share = snapshot.at_s > 0 ? total / snapshot.at_s : 0;
    const daemon = snapshot.daemon;
    const now = snapshot.probes.map((probe) => probe.kind + (probe.program === undefined ? "" : " for " + nameOf(probe.program)) + ": " + seconds(probe.cost_s));
    // A recording has no processor times of the daemon, so the durations of its probes stand in.
    const lines = [daemon ? "The daemon, its probes and its guardian took " + percent(daemon.cpu_share) + " of one CPU."
      : "Probes were in progress for " + seconds(total) + " so far, " + percent(share) + " of the elapsed time. They wait during most of it; recordings have no processor times, which a running daemon's page shows.",
      snapshot.changes_s === undefined ? null : "The changes of this window took " + seconds(snapshot.changes_s) + "."].filter(Boolean);
    this.fill("probes", lines.concat(now).join("\n"), () => [...lines.map((line) => el("p", {}, line)), now.length ? el("ul", { class: "list" }, ...now.map((line) => el("li", {}, line))) : null].filter(Boolean));
  }

  journal(lines) {
    document.getElementById("s-journal").hidden = lines === undefined;
    if (lines === undefined) return;
    this.fill("journal", JSON.stringify(lines), () => lines.length === 0 ? [el("li", { class: "soft" }, "Nothing has been changed.")]
      : lines.slice(0, 200).map((line) => el("li", {}, line.object + ": ", el("code", {}, line.original))));
  }

  truth(truth, snapshot, nameOf) {
    document.getElementById("s-truth").hidden = !truth;
    if (!truth) return;
    const observed = new Map(snapshot.programs.map((program) => [program.program, program]));
    const rows = truth.programs.map((real) => {
      const estimate = observed.get(real.program) || {};
      return [nameOf(real.program), number(real.instr_per_cycle), number(estimate.instr_per_cycle), number(real.mpki), number(estimate.mpki), percent(real.evicted_by_others_share)];
    });
    this.fill("truth", JSON.stringify(rows), () => {
      const head = ["program", "IPC, modeled", "IPC, observed", "MPKI, modeled", "MPKI, observed", "misses on lines that others evicted"];
      const table = el("table", {}, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col" }, text)))),
        el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((text, at) => el(at ? "td" : "th", at ? {} : { scope: "row" }, text))))));
      const most = [...truth.evicted].filter(([by, of]) => by !== of).sort((a, b) => b[2] - a[2]).slice(0, 8);
      return [el("p", { class: "soft" }, "Modeled: over the whole run, as counted by the simulated machine (" + truth.source + "). Observed: by the policy, in this window."),
        el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of modeled and observed figures" }, table), el("ul", { class: "list" }, ...most.map(([by, of, lines]) => el("li", {}, nameOf(by) + " evicted " + lines + " lines of " + nameOf(of))))];
    });
  }

  numbers(decision) {
    return (decision.numbers || []).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name.replaceAll("_", " ")), el("td", {}, number(value))));
  }
}

export function factsOf(program, head) {
  if (!program) return "absent from this window";
  const caches = program.places.map(([cache, threads]) => "cache " + cache + (threads > 1 ? " (" + counted(threads, "thread") + ")" : ""));
  const rows = [[caches.length ? "below" : "", caches.join(", ") || "not running"], ["processor time", program.cpu_share === undefined ? null : number(program.cpu_share) + " CPUs"], ["allowed", program.allowed ? "CPUs " + program.allowed : null],
    ["instructions a cycle", number(program.instr_per_cycle)], ["misses per 1000 instructions", number(program.mpki)],
    ["slowdown", percent(program.slowdown, true)], ["forecast", percent(program.forecast_slowdown?.value, true)],
    ["intensity", number(program.intensity)], ["sensitivity", percent(program.sensitivity, true)],
    ["maximum slowdown", program.max_slowdown === undefined ? null : percent(program.max_slowdown)],
    ["minimum rate per second", number(program.min_rate)], ["promise", (program.promises || []).map((promise) => promise.text).join("; ") || null], ["moved", program.observed_only ? "never" : null]];
  return rows.filter(([, value]) => value !== null && value !== DASH).map(([name, value]) => (name + " " + value).trim()).join(" · ");
}
