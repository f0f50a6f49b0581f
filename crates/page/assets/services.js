// Services: who loses to whom, through the cache or by taking CPUs, as sentences and as a matrix of rows that lose and
// columns that cause.
import { el, percent, shade, DASH } from "./text.js";

let shown = "";

// Losses below this are not named as waiting.
const LEAST_WAITING = 0.01;
// Programs that a host does not report by name.
const UNMANAGED = "unmanaged programs";

export function showServices(services) {
  const key = JSON.stringify(services);
  if (key === shown) return;
  shown = key;
  const sentences = [worstOf(services, "cache_by", " slows ") || worstOf(services, "prevented", " is confined, and before slowed "), worstWaiting(services)];
  document.getElementById("culprit").textContent = sentences.filter(Boolean).join(" ") || absence(services);
  document.getElementById("services").replaceChildren(...(services.length ? [table(services)] : []));
}

// The sentence about the largest cache loss of a list of the services; undefined if there is none.
function worstOf(services, list, verb) {
  const losses = services.flatMap((service) => (service[list] || []).map((cause) => ({ service, cause })));
  losses.sort((a, b) => b.cause.percent - a.cause.percent);
  const worst = losses.find(({ cause }) => cause.percent > 0);
  return worst && "Cache: " + worst.cause.service + verb + worst.service.name + " by " + percent(worst.cause.percent / 100, true) + " (" + certainty(worst.cause) + ").";
}

// The sentence about the largest waiting loss; undefined if there is none.
function worstWaiting(services) {
  const waits = services.filter((service) => service.waiting_percent >= 100 * LEAST_WAITING);
  const worst = waits.sort((a, b) => b.waiting_percent - a.waiting_percent)[0];
  if (!worst) return undefined;
  const causes = (worst.waiting_by || []).slice(0, 3).map((cause) => (cause.service ?? UNMANAGED) + " " + percent(cause.share));
  return "Waiting: " + worst.name + " takes " + percent(worst.waiting_percent / 100) + " longer because it waits for CPUs (" + range(worst.waiting_range_percent) + ")" + (causes.length ? "; behind " + causes.join(", ") : "") + ".";
}

function range([low, high]) {
  return percent(low / 100, true) + " to " + percent(high / 100, true);
}

function certainty(cause) {
  return range(cause.range_percent) + ", " + cause.source + (cause.forecast_percent === null || cause.source === "forecast" ? "" : ", forecast " + percent(cause.forecast_percent / 100, true));
}

// Never empty without its reason.
function absence(services) {
  const unknown = services.find((service) => service.reason);
  if (services.length === 0) return "No service is managed: no rule of the configuration matches a program.";
  return unknown ? "No loss is known. " + unknown.name + ": " + unknown.reason + "." : "No loss was measured or forecast.";
}

function lossCell(loss, ends, source) {
  const cell = el("td", {}, loss === null ? DASH : percent(loss / 100, true) + (source ? " " + source : ""));
  if (ends) cell.title = range(ends);
  return cell;
}

// What a cause takes from a service, as the text of a cell, its explanation and its size.
function effectOf(service, name) {
  const cache = (service.cache_by || []).find((cause) => cause.service === name);
  const waiting = (service.waiting_by || []).find((cause) => (cause.service ?? UNMANAGED) === name && cause.percent >= 100 * LEAST_WAITING);
  const parts = [cache && percent(cache.percent / 100, true) + " cache, " + cache.source, waiting && percent(waiting.percent / 100, true) + " waiting"];
  const hints = [cache && certainty(cache), waiting && percent(waiting.share) + " of its waits"];
  return { text: parts.filter(Boolean).join("; ") || DASH, hint: hints.filter(Boolean).join("; "), size: Math.max(cache ? cache.percent : 0, waiting ? waiting.percent : 0) / 100, known: Boolean(cache || waiting) };
}

function table(services) {
  const names = services.flatMap((service) => [...(service.cache_by || []).map((cause) => cause.service), ...(service.waiting_by || []).filter((cause) => cause.percent >= 100 * LEAST_WAITING).map((cause) => cause.service ?? UNMANAGED)]);
  const causes = [...new Set(names)];
  const reasons = services.some((service) => service.reason) ? ["why the cache loss is unknown"] : [];
  const head = el("tr", {}, ...["service", "kind", "threads", "run time", "cache", "waiting", ...causes, ...reasons].map((name) => el("th", { scope: "col" }, name)));
  const rows = services.map((service) => {
    const cells = causes.map((name) => {
      const effect = effectOf(service, name);
      const cell = el("td", {}, effect.text);
      if (effect.known) {
        cell.title = effect.hint;
        shade(cell, effect.size);
      }
      return cell;
    });
    const last = reasons.map(() => el("td", { class: "soft why" }, service.reason || DASH));
    const row = el("tr", {}, el("th", { scope: "row" }, service.name), el("td", {}, service.kind), el("td", {}, String(service.tasks)),
      lossCell(service.run_time_percent, service.run_time_range_percent), lossCell(service.cache_percent, service.cache_range_percent, service.cache_source),
      lossCell(service.waiting_percent, service.waiting_range_percent), ...cells, ...last);
    if (service.reason) row.title = service.reason;
    return row;
  });
  return el("table", { class: "services" }, el("thead", {}, head), el("tbody", {}, ...rows));
}
