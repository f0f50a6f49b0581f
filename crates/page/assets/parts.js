// Ways and colors as bars: one row for each share, one cell for each unit; then limits of memory bandwidth as sentences.
import { el, svg, size, percent, indices, counted } from "./text.js";

export function showShares(root, shares, limits, caches, nameOf) {
  const levels = new Map(caches.map((cache) => [cache.cache, cache]));
  const groups = new Map();
  for (const share of shares) {
    const key = unitOf(share) + "/" + share.cache;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(share);
  }
  const figures = [...groups.values()].map((parts) => figure(parts, levels.get(parts[0].cache), nameOf));
  const sentences = limits.map((limit) => {
    const place = nameOfCache(levels.get(limit.cache), limit.cache);
    const text = namesOf(limit, nameOf) + ": at most " + limit.limit + " of the memory bandwidth of " + place;
    return el("p", { class: "soft" }, text);
  });
  root.replaceChildren(...figures, ...sentences);
}

function nameOfCache(cache, id) {
  return cache ? cache.level + " " + id : "cache " + id;
}

function namesOf(group, nameOf) {
  return group.programs.map(nameOf).join(", ") || "no program";
}

function unitOf(share) {
  return share.ways === null ? "colors" : "ways";
}

function figure(parts, cache, nameOf) {
  const unit = unitOf(parts[0]);
  const all = parts[0].unit_count || 1 + Math.max(0, ...parts.flatMap((part) => indices(part[unit])));
  const title = nameOfCache(cache, parts[0].cache) + ", " + counted(all, unit.replace(/s$/, ""));
  const rows = parts.map((part, at) => {
    const held = new Set(indices(part[unit]));
    const cells = [];
    for (let unitAt = 0; unitAt < all; unitAt += 1) {
      cells.push(svg("rect", { x: unitAt + 0.06, y: 0, width: 0.88, height: 1, class: held.has(unitAt) ? "held f" + (at % 8) : "free" }));
    }
    const names = namesOf(part, nameOf);
    const facts = [unit + " " + part[unit], part.occupancy_bytes === null ? null : "occupies " + size(part.occupancy_bytes),
      part.allowed_page_share === null ? null : percent(part.allowed_page_share) + " of its pages have allowed colors"].filter(Boolean).join(", ");
    const bar = svg("svg", { viewBox: "0 0 " + all + " 1", preserveAspectRatio: "none", role: "img", "aria-label": names + ": " + facts, class: "bar-of-units" }, ...cells);
    return el("div", { class: "part" }, el("b", {}, names), bar, el("span", { class: "soft" }, facts));
  });
  return el("figure", { class: "parts" }, el("figcaption", {}, title), ...rows);
}
