// Caches as boxes with programs in them. Elements are kept from window to window; a program that moves glides.
import { el, say, percent, size, counted } from "./text.js";

const NOWHERE = -1;
// Letters that a chip has room for, and those that a slowdown takes of them.
const CHIP_LETTERS = 18;
const SLOWDOWN_LETTERS = 8;

export class Boxes {
  constructor(root, choose) {
    this.root = root;
    this.choose = choose;
    this.boxes = new Map();
    this.chips = new Map();
    this.current = null;
    root.addEventListener("keydown", (event) => this.key(event));
    root.addEventListener("click", (event) => {
      const chip = event.target.closest(".chip");
      if (chip) this.choose(Number(chip.dataset.program));
    });
  }

  build(head) {
    this.root.replaceChildren();
    this.boxes.clear();
    this.chips.clear();
    const caches = head.caches.map((cache) => ({
      id: cache.cache,
      title: cache.level + " of CPUs " + cache.cpus,
      about: [cache.size_bytes ? size(cache.size_bytes) : null, "cache " + cache.cache].filter(Boolean).join(", "),
    }));
    caches.push({ id: NOWHERE, title: "not running", about: "asleep, or without processor time in this window" });
    for (const cache of caches) {
      const count = el("span", { class: "count" });
      const misses = el("span", { class: "misses" });
      const list = el("div", { class: "chips" });
      const box = el("div", { class: cache.id === NOWHERE ? "box away" : "box", role: "group", "aria-label": cache.title + ", " + cache.about },
        el("div", { class: "box-head" }, el("b", {}, cache.title), " ", el("span", { class: "soft" }, cache.about)), list,
        el("div", { class: "box-foot soft" }, count, " ", misses));
      this.boxes.set(cache.id, { box, list, count, misses });
      this.root.append(box);
    }
  }

  // `still` suppresses animation, as when the slider is dragged.
  show(snapshot, chosen, still) {
    const wanted = new Map();
    this.twins = new Map();
    for (const { name } of snapshot.programs) this.twins.set(name, (this.twins.get(name) || 0) + 1);
    for (const program of snapshot.programs) {
      const places = program.places.length ? program.places : [[NOWHERE, program.threads]];
      for (const [cache, threads] of places) {
        if (this.boxes.has(cache)) wanted.set(program.program + "/" + cache, { program, cache, threads });
      }
    }
    const moves = this.place(wanted, still);
    for (const [key, { program, cache, threads }] of wanted) this.dress(this.chips.get(key), program, cache, threads, chosen);
    this.foot(snapshot, wanted);
    this.oneTabStop();
    glide(moves);
  }

  // Removes, moves and creates chips; returns the chips that come from another box with their old positions.
  place(wanted, still) {
    const gone = [...this.chips].filter(([key]) => !wanted.has(key));
    const arrive = [...wanted].filter(([key]) => !this.chips.has(key));
    const moves = [];
    const free = new Map();
    // Positions are read before anything is changed, so that the browser lays out only once.
    for (const [key, chip] of gone) {
      const program = Number(key.split("/")[0]);
      if (!free.has(program)) free.set(program, []);
      free.get(program).push({ chip, from: still || arrive.length > 64 ? null : chip.root.getBoundingClientRect() });
      this.chips.delete(key);
    }
    for (const [key, { program, cache }] of arrive) {
      const moved = free.get(program.program)?.shift();
      const chip = moved ? moved.chip : makeChip(program.program);
      if (moved?.from) moves.push([chip.root, moved.from]);
      this.chips.set(key, chip);
      this.boxes.get(cache).list.append(chip.root);
    }
    for (const left of free.values()) left.forEach(({ chip }) => chip.root.remove());
    return moves;
  }

  // Whole percentages: smaller changes are noise, and every changed text costs a layout.
  dress(chip, program, cache, threads, chosen) {
    const many = threads > 1 ? " ×" + threads : "";
    const name = this.label(program, CHIP_LETTERS - (program.slowdown === undefined ? 0 : SLOWDOWN_LETTERS) - many.length) + many;
    const promise = promiseState(program);
    const slow = program.slowdown;
    const forecast = program.forecast_slowdown?.value;
    const shown = wholePercent(slow);
    const expected = wholePercent(forecast);
    const look = "chip" + (program.observed_only ? " fixed" : "") + (slow >= 0.1 ? " hurt" : "") + (promise ? (isBroken(promise) ? " broken" : promise === "unknown" ? " open" : " kept") : "") + (slow === undefined ? " unknown" : "");
    const pressed = chosen === program.program;
    const dressed = [name, shown, expected, look, pressed].join("|");
    if (chip.dressed === dressed) return;
    chip.dressed = dressed;
    say(chip.name, name);
    say(chip.slow, shown);
    // A doubling of run time fills the bar.
    chip.bar.style.transform = "scaleX(" + share(slow) + ")";
    chip.line.style.transform = "translateX(" + (forecast === undefined ? -101 : 98 * share(forecast)) + "%)";
    if (chip.root.className !== look) chip.root.className = look;
    chip.root.setAttribute("aria-pressed", String(pressed));
    const where = cache === NOWHERE ? "not running" : "in cache " + cache;
    // It begins with what the chip shows, which voice control listens to, and has the rest of a name that was cut.
    const full = this.label(program, Infinity);
    chip.root.setAttribute("aria-label", [name + (slow === undefined ? "" : " " + shown + " slowdown"), name === full + many ? null : full, counted(threads, "thread"), where,
      slow === undefined ? "slowdown not measured" : null,
      forecast === undefined ? null : "forecast " + expected, promise ? "promise " + promise : null, program.observed_only ? "only observed" : null].filter(Boolean).join(", "));
  }

  // Programs of the same name are distinguished by their numbers, for which a long name is cut.
  label(program, letters) {
    const { name, pid } = program;
    if (this.twins.get(name) === 1) return name;
    const number = pid === undefined ? " #" + program.program : " (" + pid + ")";
    return (name.length + number.length > letters ? name.slice(0, Math.max(3, letters - number.length - 1)) + "…" : name) + number;
  }

  foot(snapshot, wanted) {
    const counts = new Map();
    for (const { cache } of wanted.values()) counts.set(cache, (counts.get(cache) || 0) + 1);
    const ratios = new Map((snapshot.caches || []).map((cache) => [cache.cache, cache]));
    for (const [id, box] of this.boxes) {
      const count = counts.get(id) || 0;
      say(box.count, count ? counted(count, "program") : "idle");
      const ratio = ratios.get(id);
      const misses = [ratio?.miss_ratio == null ? null : percent(ratio.miss_ratio) + " misses",
        ratio?.forecast_miss_ratio == null ? null : "forecast " + percent(ratio.forecast_miss_ratio)].filter(Boolean);
      say(box.misses, misses.length ? "· " + misses.join(", ") : "");
      if (id === NOWHERE) box.box.hidden = count === 0;
    }
  }

  oneTabStop() {
    if (this.current && this.current.isConnected) return;
    this.current = this.root.querySelector(".chip");
    if (this.current) this.current.tabIndex = 0;
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const here = event.target.closest(".chip");
    if (!step || !here) return;
    const all = [...this.root.querySelectorAll(".chip")].filter((chip) => chip.offsetParent !== null);
    const next = all[(all.indexOf(here) + step + all.length) % all.length];
    here.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    this.current = next;
    event.preventDefault();
    event.stopPropagation();
  }
}

export function isBroken(state) {
  return state === "broken" || state === "at-risk" || state === "infeasible";
}

// The worst state of a program's promises; null if there are none.
function promiseState(program) {
  const states = (program.promises || []).map((promise) => promise.state);
  return states.find(isBroken) ?? states.find((state) => state === "unknown") ?? states[0] ?? null;
}

function wholePercent(value) {
  if (value === undefined) return "";
  const shown = Math.round(100 * value);
  return (shown > 0 ? "+" : "") + (Math.abs(shown) > 9999 ? shown.toExponential(1) : shown) + " %";
}

function share(value) {
  return value === undefined ? 0 : Math.min(1, Math.max(0, Math.round(100 * value) / 100));
}

function makeChip(program) {
  const name = el("span", { class: "name" });
  const slow = el("span", { class: "slow" });
  const bar = el("span", { class: "fill" });
  const line = el("span", { class: "line" });
  const root = el("button", { class: "chip", type: "button", tabindex: "-1", "data-program": program },
    name, slow, el("span", { class: "gauge", "aria-hidden": "true" }, bar, line));
  return { root, name, slow, bar, line, dressed: null };
}

// Animates from the old to the new positions (first, last, invert, play); all are read before any chip is moved.
function glide(moves) {
  if (moves.length === 0 || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const ends = moves.map(([chip]) => chip.getBoundingClientRect());
  moves.forEach(([chip, from], at) => {
    const by = "translate(" + (from.left - ends[at].left) + "px," + (from.top - ends[at].top) + "px)";
    chip.animate([{ transform: by, zIndex: 2 }, { transform: "none", zIndex: 2 }], { duration: 450, easing: "ease-in-out" });
  });
}
