// Formatted numbers, and elements built without markup, so that a program's name is always plain text.

export function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Sets a text only if it differs, which saves layouts.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Slowdowns of 50 % or more have the full color.
const FULL = 0.5;

// Colors a cell of a matrix: red is a loss, blue a gain; null was not measured.
export function shade(cell, value) {
  const heat = value === null ? 0 : Math.sqrt(Math.min(1, Math.abs(value) / FULL));
  cell.style.setProperty("--heat", (100 * heat).toFixed(0) + "%");
  cell.className = value === null ? "none" : (value < 0 ? "cool" : "hot") + (heat > 0.75 ? " full" : "");
}

export const DASH = "–";

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}

export function percent(value, signed) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const shown = 100 * value;
  const text = Math.abs(shown) >= 9999 ? shown.toExponential(1) : shown.toFixed(Math.abs(shown) < 9.95 ? 1 : 0);
  return (signed && shown > 0 ? "+" : "") + text.replace(/^-(0(\.0)?)$/, "$1") + " %";
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return DASH;
  for (const [unit, one] of [["G", 2 ** 30], ["M", 2 ** 20], ["K", 2 ** 10]]) {
    if (bytes >= one) return Number((bytes / one).toFixed(2)) + unit;
  }
  return String(bytes);
}

export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value >= 3600) return Math.floor(value / 3600) + " h " + Math.floor((value % 3600) / 60) + " min";
  if (value >= 60) return Math.floor(value / 60) + " min " + Math.floor(value % 60) + " s";
  if (value >= 1) return Number(value.toFixed(1)) + " s";
  if (value >= 1e-3) return Number((value * 1e3).toPrecision(3)) + " ms";
  return value === 0 ? "0 s" : Number((value * 1e6).toPrecision(3)) + " µs";
}

export function counted(count, one) {
  return count + " " + one + (count === 1 ? "" : "s");
}

// `0-3,8` as numbers; malformed parts are skipped.
export function indices(text) {
  const indices = [];
  for (const part of (text || "").split(",")) {
    const [low, high] = part.split("-").map(Number);
    if (part === "" || !Number.isInteger(low)) continue;
    for (let at = low; at <= (Number.isInteger(high) ? Math.min(high, low + 4095) : low); at += 1) indices.push(at);
  }
  return indices;
}
