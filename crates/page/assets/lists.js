// Decisions, alarms, turns, probes, journal, truth: lists that are made anew only where they changed.
import { el, number, percent, seconds, counted, DASH } from "./text.js";
import { bad } from "./charts.js";

const SHOWN = 40;
// Of each kind: what is wrong stands above everything else, and must not push it away.
const ALARMS = 3;

export class Lists {
  constructor(explain) {
    this.explain = explain;
    this.made = new Map();
  }

  // Makes the children of an element where `key` is another one than last time.
  fill(id, key, make) {
    if (this.made.get(id) === key) return;
    this.made.set(id, key);
    document.getElementById(id).replaceChildren(...make());
  }

  decisions(id, marks, window) {
    const upTo = marks.filter((mark) => mark.window <= window).slice(-SHOWN).reverse();
    const key = upTo.length + "/" + (upTo[0]?.window ?? "") + "/" + (upTo[0]?.decision.words ?? "") + "/" + (upTo[upTo.length - 1]?.window ?? "");
    this.fill(id, key, () => upTo.length === 0 ? [el("li", { class: "soft" }, "None yet.")] : upTo.map((mark) => {
      const button = el("button", { type: "button", class: bad(mark.decision.kind) ? "link warn" : "link" },
        el("span", { class: "when" }, seconds(mark.at)), " ", mark.decision.words);
      button.addEventListener("click", () => this.explain(mark));
      return el("li", {}, button);
    }));
  }

  alarms(snapshot, marks) {
    const told = [];
    const daemon = snapshot.daemon;
    if (daemon?.config_error) told.push(["configuration not reloaded", daemon.config_error]);
    const recent = marks.filter((mark) => bad(mark.decision.kind) && mark.window <= snapshot.window && mark.window > snapshot.window - 10).reverse();
    for (const mark of recent.slice(0, ALARMS)) told.push([mark.decision.kind === "rolled-back" ? "taken back" : "kept out", mark.decision.words]);
    if (recent.length > ALARMS) told.push(["taken back", "and " + counted(recent.length - ALARMS, "other") + " in the last ten windows, in the list of decisions"]);
    const observing = (words) => words.includes("observing only");
    const refused = snapshot.refused || [];
    const real = refused.filter((words) => !observing(words));
    for (const words of real.slice(0, ALARMS)) told.push(["refused", words]);
    if (real.length > ALARMS) told.push(["refused", "and " + counted(real.length - ALARMS, "other")]);
    if (refused.some(observing)) told.push(["observing only", counted(refused.filter(observing).length, "change") + " of the plan would be made; nothing is changed"]);
    for (const words of (snapshot.overridden || []).slice(0, ALARMS)) told.push(["changed by somebody else", words]);
    for (const words of (snapshot.pending || []).slice(0, ALARMS)) told.push(["under way", words]);
    this.fill("alarms", JSON.stringify(told), () => told.map(([what, words]) =>
      el("p", { class: what === "under way" || what === "observing only" ? "note" : "note warn" }, el("b", {}, what), " ", words)));
  }

  turns(gangs, nameOf) {
    document.getElementById("s-turns").hidden = !gangs.length;
    this.fill("turns", JSON.stringify(gangs), () => gangs.map((gang) =>
      el("li", {}, "CPUs " + gang.cpus + ", " + seconds(gang.slice_s) + " each: " + gang.turns.map((turn) => turn.map(nameOf).join(" + ")).join(", then "))));
  }

  probes(probes, snapshot, nameOf) {
    const upTo = probes.filter((probe) => probe.window <= snapshot.window);
    const total = upTo.length ? upTo[upTo.length - 1].total : 0;
    const share = snapshot.at_s > 0 ? total / snapshot.at_s : 0;
    const daemon = snapshot.daemon;
    const now = (snapshot.probes || []).map((probe) => probe.what + (probe.program === undefined ? "" : " for " + nameOf(probe.program)) + ": " + seconds(probe.cost_s));
    const lines = ["Probes took " + seconds(total) + " of processor time so far, " + percent(share) + " of one CPU.",
      daemon ? "The daemon with its probes took " + percent(daemon.cpu_share) + " of one CPU." : null,
      snapshot.changes_s === undefined ? null : "The changes of this window took " + seconds(snapshot.changes_s) + "."].filter(Boolean);
    this.fill("probes", lines.concat(now).join("\n"), () => [...lines.map((line) => el("p", {}, line)), now.length ? el("ul", { class: "list" }, ...now.map((line) => el("li", {}, line))) : null].filter(Boolean));
  }

  journal(lines) {
    document.getElementById("s-journal").hidden = lines === undefined;
    if (lines === undefined) return;
    this.fill("journal", JSON.stringify(lines), () => lines.length === 0 ? [el("li", { class: "soft" }, "Nothing: nothing is changed.")]
      : lines.slice(0, 200).map((line) => el("li", {}, line.what + ": ", el("code", {}, line.original))));
  }

  truth(truth, snapshot, nameOf) {
    document.getElementById("s-truth").hidden = !truth;
    if (!truth) return;
    const believed = new Map(snapshot.programs.map((program) => [program.program, program]));
    const rows = truth.programs.map((real) => {
      const belief = believed.get(real.program) || {};
      return [nameOf(real.program), number(real.instr_per_cycle), number(belief.instr_per_cycle), number(real.misses_per_kilo_instr), number(belief.misses_per_kilo_instr), percent(real.by_others_share)];
    });
    this.fill("truth", JSON.stringify(rows), () => {
      const head = ["program", "IPC, true", "IPC, seen", "MPKI, true", "MPKI, seen", "misses by others"];
      const table = el("table", {}, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col" }, text)))),
        el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((text, at) => el(at ? "td" : "th", at ? {} : { scope: "row" }, text))))));
      const most = [...truth.evicted].filter(([by, of]) => by !== of).sort((a, b) => b[2] - a[2]).slice(0, 8);
      return [el("p", { class: "soft" }, "True: over the whole run, as the simulated machine counts it (" + truth.source + "). Seen: in this window, as the policy saw it."),
        el("div", { class: "scroll" }, table), el("ul", { class: "list" }, ...most.map(([by, of, lines]) => el("li", {}, nameOf(by) + " evicted " + lines + " lines of " + nameOf(of))))];
    });
  }

  numbers(decision) {
    return (decision.numbers || []).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name.replaceAll("_", " ")), el("td", {}, number(value))));
  }
}

export function factsOf(program, head) {
  if (!program) return "not there in this window";
  const places = program.places.map(([cache, threads]) => "cache " + cache + (threads > 1 ? " (" + counted(threads, "thread") + ")" : ""));
  const rows = [[places.length ? "below" : "", places.join(", ") || "not running"], ["processor time", program.cpu_share === undefined ? null : number(program.cpu_share) + " CPUs"], ["allowed", program.allowed ? "CPUs " + program.allowed : null],
    ["instructions a cycle", number(program.instr_per_cycle)], ["misses per 1000 instructions", number(program.misses_per_kilo_instr)],
    ["slowdown", percent(program.slowdown, true)], ["forecast", percent(program.forecast_slowdown?.value, true)],
    ["intensity", number(program.intensity)], ["sensitivity", percent(program.sensitivity, true)],
    ["may lose", program.degradation_at_most === undefined ? null : percent(program.degradation_at_most)],
    ["at least a second", number(program.rate_at_least)], ["moved", program.fixed ? "never" : null]];
  return rows.filter(([, value]) => value !== null && value !== DASH).map(([what, value]) => (what + " " + value).trim()).join(" · ");
}
