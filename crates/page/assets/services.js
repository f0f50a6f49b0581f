// Services: who loses to whom, as a sentence and as a matrix of rows that lose and columns that cause.
import { el, percent, shade, DASH } from "./text.js";

let shown = "";

export function showServices(services) {
  const key = JSON.stringify(services);
  if (key === shown) return;
  shown = key;
  const worst = worstOf(services, "slowed_by", " slows ") || worstOf(services, "prevented", " is confined, and before slowed ");
  document.getElementById("culprit").textContent = worst || absence(services);
  document.getElementById("services").replaceChildren(...(services.length ? [table(services)] : []));
}

// The sentence about the largest loss of a list of the services; undefined if there is none.
function worstOf(services, list, verb) {
  const losses = services.flatMap((service) => (service[list] || []).map((cause) => ({ service, cause })));
  losses.sort((a, b) => b.cause.loss.value - a.cause.loss.value);
  const worst = losses.find(({ cause }) => cause.loss.value > 0);
  return worst && worst.cause.service + verb + worst.service.name + " by " + percent(worst.cause.loss.value, true) + " (" + certainty(worst.cause) + ").";
}

function certainty(cause) {
  const range = percent(cause.loss.low, true) + " to " + percent(cause.loss.high, true);
  return range + ", " + cause.source + (cause.forecast === undefined || cause.source === "forecast" ? "" : ", forecast " + percent(cause.forecast, true));
}

// Never empty without its reason.
function absence(services) {
  const unknown = services.find((service) => service.reason);
  if (services.length === 0) return "No service is managed: no rule of the configuration matches a program.";
  return unknown ? "No loss is known. " + unknown.name + ": " + unknown.reason + "." : "No loss was measured or forecast.";
}

function table(services) {
  const causes = [...new Set(services.flatMap((service) => (service.slowed_by || []).map((cause) => cause.service)))];
  const reasons = causes.length === 0 && services.some((service) => service.reason) ? ["why unknown"] : [];
  const head = el("tr", {}, ...["service", "kind", "threads", "slowdown", ...causes, ...reasons].map((name) => el("th", { scope: "col" }, name)));
  const rows = services.map((service) => {
    const slowdown = service.slowdown ? percent(service.slowdown.value, true) + " " + service.source : DASH;
    const cells = causes.map((name) => {
      const cause = (service.slowed_by || []).find((one) => one.service === name);
      const cell = el("td", {}, cause ? percent(cause.loss.value, true) + " " + cause.source : DASH);
      if (cause) {
        cell.title = certainty(cause);
        shade(cell, cause.loss.value);
      }
      return cell;
    });
    const last = reasons.map(() => el("td", { class: "soft" }, service.reason || DASH));
    const row = el("tr", {}, el("th", { scope: "row" }, service.name), el("td", {}, service.kind), el("td", {}, String(service.tasks)), el("td", {}, slowdown), ...cells, ...last);
    if (service.reason) row.title = service.reason;
    return row;
  });
  return el("table", { class: "services" }, el("thead", {}, head), el("tbody", {}, ...rows));
}
