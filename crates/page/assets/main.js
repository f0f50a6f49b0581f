// The page: chooses the window and the program that are shown.
import { say, el, seconds, counted } from "./text.js";
import { Store } from "./store.js";
import { Boxes } from "./boxes.js";
import { Matrix } from "./matrix.js";
import { showServices } from "./services.js";
import { Strip, worstWindow } from "./strip.js";
import { Charts, bad } from "./charts.js";
import { showShares } from "./parts.js";
import { Lists, factsOf } from "./lists.js";
import { embeddedRecording, takeToken, login, Events } from "./source.js";

const byId = (id) => document.getElementById(id);
const MARKS_AT_MOST = 200;

class Page {
  constructor() {
    this.store = new Store();
    // Index of the window that is shown; null = always the newest.
    this.at = null;
    this.chosen = null;
    this.timer = null;
    this.spent = [];
    this.nameOf = (program) => this.store.fullName(program);
    const choose = (program) => this.choose(program);
    this.boxes = new Boxes(byId("caches"), choose);
    this.matrix = new Matrix(byId("matrix"), choose);
    this.charts = new Charts({ speed: byId("speed"), slow: byId("slow"), curve: byId("curve") }, (time) => this.goTo(time), () => this.render(true));
    this.lists = new Lists((mark) => this.explain(mark));
    this.strip = new Strip(byId("strip"), (at) => this.show(at));
    this.listen();
  }

  listen() {
    byId("slider").addEventListener("input", (event) => this.show(Number(event.target.value), true));
    byId("first").addEventListener("click", () => this.show(0));
    byId("back").addEventListener("click", () => this.step(-1));
    byId("forth").addEventListener("click", () => this.step(1));
    byId("live").addEventListener("click", () => this.show(null));
    byId("worst").addEventListener("click", () => this.show(worstWindow(this.store.windows)));
    byId("play").addEventListener("click", () => this.play());
    byId("decision-close").addEventListener("click", () => byId("decision").close());
    byId("closer").addEventListener("click", () => this.charts.zoom(0.5));
    byId("wider").addEventListener("click", () => this.charts.zoom(2));
    byId("enter").addEventListener("submit", (event) => {
      event.preventDefault();
      this.unlock(byId("token").value.trim());
    });
    addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    // A dialog that has just closed keeps the focus until the next frame.
    const target = event.target.closest("dialog:not([open])") ? document.body : event.target;
    const typing = target.closest("input:not([type=range]), dialog");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const onSlider = target.closest("input[type=range]");
    const onButton = target.closest("button");
    const act = { Home: () => this.show(0), End: () => this.show(null), ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1),
      " ": onButton ? null : () => this.play(), Escape: () => this.choose(null) }[event.key];
    if (!act || (onSlider && event.key !== " " && event.key !== "Escape")) return;
    act();
    event.preventDefault();
  }

  // ---- sources of windows

  async start() {
    if (document.getElementById("head")) say(byId("state"), "reading the recording");
    const recording = await embeddedRecording().catch((error) => ({ error }));
    if (recording?.error) {
      say(byId("state"), "the recording in this page cannot be read: " + recording.error.message);
      return;
    }
    if (recording) {
      this.head(recording.head, Infinity);
      recording.windows.forEach((snapshot) => this.store.add(snapshot));
      say(byId("state"), recording.head.cut_off ? "incomplete recording: " + recording.head.cut_off : "recording");
      this.marks();
      // The worst moment, or else the newest window: in the first one there are no measurements yet.
      this.show(worstWindow(this.store.windows));
      return;
    }
    const token = takeToken();
    if (token) this.unlock(token);
    else this.connect();
  }

  async unlock(token) {
    const status = await login(token).catch(() => 0);
    say(byId("refusal"), status === 401 ? "The token is wrong." : status === 200 ? "" : "No answer from the daemon.");
    byId("enter").hidden = status === 200;
    if (status === 200) this.connect();
  }

  connect() {
    say(byId("state"), "connecting");
    this.events = new Events({
      state: (text) => say(byId("state"), text),
      head: (head) => this.head(head),
      soFar: (soFar) => this.soFar(soFar),
      window: (snapshot) => this.window(snapshot),
      locked: () => {
        say(byId("state"), "locked");
        byId("enter").hidden = false;
        byId("token").focus();
      },
    });
  }

  // After a restart of the daemon, everything starts from the beginning.
  head(head, remembered) {
    if (this.store.head && this.store.head.run === head.run && this.store.head.source === head.source) return;
    this.store.clear(remembered);
    this.store.head = head;
    this.at = null;
    const summary = head.policy + (head.parameters ? " (" + head.parameters.replace(/\s+/g, " ") + ")" : "") + " on " + counted(head.cpus, "CPU") + ", " + counted(head.caches.length, "last-level cache") + (head.guarded ? "" : ", without roll-back");
    say(byId("summary"), (head.source === "live" ? "" : head.source + ": ") + summary);
    document.title = "cachemate: " + (head.source === "live" ? head.policy : head.source);
    this.boxes.build(head);
  }

  soFar(soFar) {
    this.store.keep({ window: soFar.window, curves: soFar.curves, matrix: soFar.matrix });
  }

  window(snapshot) {
    const begin = performance.now();
    const before = this.store.windows.length;
    if (!this.store.add(snapshot)) return;
    // The oldest window was dropped: the shown window stays the same.
    if (this.at !== null && this.store.windows.length === before) this.at = Math.max(0, this.at - 1);
    if (snapshot.new_decisions.length) this.marks();
    this.bounds();
    if (this.at === null) this.render(false);
    else this.at = Math.min(this.at, this.store.windows.length - 1);
    this.recordCost(begin);
  }

  // Records the time of script and layout of an update, for measurements.
  recordCost(begin) {
    void document.body.offsetHeight;
    this.spent.push(performance.now() - begin);
    if (this.spent.length > 600) this.spent.shift();
  }

  // ---- choice of the window

  show(at, still) {
    const last = this.store.windows.length - 1;
    this.at = at === null || last < 0 ? null : Math.max(0, Math.min(last, at));
    this.bounds();
    this.render(Boolean(still));
  }

  step(by) {
    this.show((this.at ?? this.store.windows.length - 1) + by);
  }

  goTo(time) {
    const at = this.store.windows.findIndex((snapshot) => snapshot.at_s >= time - 1e-9);
    if (at >= 0) this.show(at);
  }

  play() {
    if (this.timer !== null) {
      clearInterval(this.timer);
      this.timer = null;
    } else {
      if (this.at === null || this.at === this.store.windows.length - 1) this.show(0);
      this.timer = setInterval(() => {
        if (this.at === null || this.at >= this.store.windows.length - 1) this.play();
        else this.step(1);
      }, 500);
    }
    byId("play").setAttribute("aria-pressed", String(this.timer !== null));
    say(byId("play"), this.timer === null ? "Play" : "Pause");
  }

  bounds() {
    const { windows } = this.store;
    const slider = byId("slider");
    slider.max = Math.max(0, windows.length - 1);
    slider.value = this.at ?? windows.length - 1;
    byId("live").setAttribute("aria-pressed", String(this.at === null));
  }

  marks() {
    const { windows, marks } = this.store;
    const first = windows[0]?.window ?? 0;
    const span = Math.max(1, (windows[windows.length - 1]?.window ?? 1) - first);
    // One mark for each window: its decisions are shown together.
    const last = new Map(marks.map((mark) => [mark.window, mark]));
    byId("marks").replaceChildren(...[...last.values()].slice(-MARKS_AT_MOST).map((mark) => {
      const button = el("button", { type: "button", tabindex: "-1", class: bad(mark.decision.kind) ? "mark warn" : "mark", title: seconds(mark.at) + ": " + mark.decision.reason, "aria-label": seconds(mark.at) + ": " + mark.decision.reason });
      button.style.left = (100 * (mark.window - first) / span).toFixed(2) + "%";
      button.addEventListener("click", () => this.explain(mark));
      return button;
    }));
  }

  // ---- rendering

  choose(program) {
    this.chosen = program === this.chosen ? null : program;
    this.render(true);
    if (this.chosen !== null) byId("detail").scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  explain(mark) {
    const at = this.store.windows.findIndex((snapshot) => snapshot.window === mark.window);
    if (at >= 0) this.show(at);
    const all = this.store.marks.filter((other) => other.window === mark.window);
    say(byId("decision-title"), "Window " + mark.window + ", after " + seconds(mark.at));
    byId("decision-texts").replaceChildren(...all.map((one) => el("span", { class: one === mark ? "one" : "one soft" }, one.decision.reason)));
    byId("decision-numbers").replaceChildren(...this.lists.numbers(mark.decision));
    byId("decision").showModal();
  }

  render(still) {
    const { store } = this;
    const snapshot = store.windows[this.at ?? store.windows.length - 1];
    if (!snapshot) return;
    say(byId("clock"), "window " + snapshot.window + ", " + seconds(snapshot.at_s) + (snapshot.daemon ? (snapshot.daemon.acting ? ", acting" : ", observing only") : ""));
    byId("slider").setAttribute("aria-valuetext", "window " + snapshot.window + ", " + seconds(snapshot.at_s));
    this.strip.show(store.windows, this.at ?? store.windows.length - 1);
    showServices(snapshot.services);
    this.boxes.show(snapshot, this.chosen, still);
    this.matrix.show(store.matrixAt(snapshot.window), this.nameOf);
    const { shares, bandwidth_limits: limits } = snapshot;
    byId("s-shares").hidden = shares.length + limits.length === 0;
    const key = JSON.stringify([shares, limits]);
    if (key !== this.sharesShown) showShares(byId("shares"), shares, limits, store.head.caches, this.nameOf);
    this.sharesShown = key;
    this.lists.decisions("decisions", store.marks, snapshot.window);
    this.lists.alarms(snapshot, store.marks);
    this.lists.turns(snapshot.gangs, this.nameOf);
    this.lists.probes(store.probes, snapshot, this.nameOf);
    this.lists.journal(snapshot.journal);
    this.lists.truth(store.head.truth, snapshot, this.nameOf);
    this.detail(snapshot);
  }

  detail(snapshot) {
    const { store, chosen } = this;
    const series = store.series.get(chosen);
    byId("detail").hidden = chosen === null || !series;
    if (byId("detail").hidden) return;
    const program = snapshot.programs.find((one) => one.program === chosen);
    say(byId("h-detail"), store.fullName(chosen));
    say(byId("facts"), factsOf(program, store.head));
    say(byId("c-speed"), series.speedUnit ? "Speed: " + series.speedUnit + " per second" : "Speed: not counted");
    const curve = store.curveAt(chosen, snapshot.window);
    say(byId("c-curve"), curve ? "Misses per 1000 instructions by size of " + curve.level + " (" + curve.source + ")" : "");
    const named = store.marks.filter((mark) => mark.decision.programs.includes(chosen));
    this.charts.show(chosen, series, curve, named, snapshot.at_s, store.head.caches[0]?.size_bytes);
    say(byId("range"), this.charts.rangeText());
    this.lists.decisions("reasons", named, snapshot.window);
  }
}

const page = new Page();
// For tests; the page holds no secrets.
window.cachemate = page;
page.start();
