#!/usr/bin/env python3
"""Writes the results of a lab run as one HTML page that loads nothing: each figure beside the model's, with its target.

Usage: lab/report.py [RESULT [PAGE]]    (by default target/lab/result.json and lab.html)
"""

import html
import json
import math
import sys

STYLE = """:root{color-scheme:light dark}body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}th,td{text-align:left;padding:.2rem .8rem;border-bottom:1px solid #8886;vertical-align:top}
.missed{color:#c33}.scroll{overflow-x:auto}circle{fill:#27c}path{stroke:#888;stroke-dasharray:4}text{fill:currentColor;font-size:12px}"""
WIDTH, HEIGHT, MARGIN = 640, 420, 48


def escaped(text):
    """The text as HTML; characters that control a terminal or the direction of writing appear as their numbers."""
    return html.escape("".join(c if c.isprintable() else f"\\u{{{ord(c):x}}}" for c in str(text)))


def number(text):
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def scatter(points, x_name, y_name, is_log):
    """Points of (x, y, title), and the dashed line on which both figures are equal."""
    scale = math.log10 if is_log else float
    ends = [scale(value) for x, y, _ in points for value in (x, y)]
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0
    at_x = lambda value: MARGIN + (value - low) / span * (WIDTH - 2 * MARGIN)
    at_y = lambda value: HEIGHT - MARGIN - (value - low) / span * (HEIGHT - 2 * MARGIN)
    circles = "".join(
        f'<circle cx="{at_x(scale(x)):.1f}" cy="{at_y(scale(y)):.1f}" r="4"><title>{escaped(title)}</title></circle>'
        for x, y, title in points
    )
    shown = (f"{10**low:.3g}", f"{10**high:.3g}") if is_log else (f"{low:.3g}", f"{high:.3g}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><path d="M{at_x(low):.1f} {at_y(low):.1f}L{at_x(high):.1f} '
        f'{at_y(high):.1f}"/>{circles}<text x="{MARGIN}" y="{HEIGHT - 8}">{x_name}: {shown[0]} to {shown[1]}</text>'
        f'<text x="{MARGIN}" y="16">{y_name}: {shown[0]} to {shown[1]}</text></svg>'
    )


def lead(result):
    if not result["ran"]:
        return f"Nothing was run: {result.get('reason') or 'no reason was recorded'}."
    counts = [sum(line["passed"] is passed for line in result["lines"]) for passed in (True, False, None)]
    facts = [f" {name.title()}: {result[name]}." for name in ("kernel", "commit", "command") if result.get(name)]
    return (
        f"All figures are of a modeled machine. Targets: {counts[0]} met, {counts[1]} missed; {counts[2]} figures without"
        f" one.{''.join(facts)}"
    )


def render(result):
    lines = result.get("lines", [])
    pairs = [(number(line["reported"]), number(line["modeled"]), line) for line in lines]
    pairs = [(x, y, line) for x, y, line in pairs if x is not None and y is not None]
    # Forecast slowdowns may be 0 or less.
    forecasts = [(x, y, line["title"]) for x, y, line in pairs if line["id"] == "forecast.pair"]
    figures = [(x, y, line["id"]) for x, y, line in pairs if line["id"] != "forecast.pair" and x > 0 and y > 0]

    parts = [f"<h1>Lab results</h1><p>{escaped(lead(result))}</p>"]
    if forecasts:
        parts.append("<h2>Forecast and measured slowdowns</h2><p>On the dashed line, the forecast is right.</p>")
        parts.append(scatter(forecasts, "forecast slowdown, percent", "measured, percent", False))
    if figures:
        parts.append("<h2>Reported and modeled</h2><p>Figures that are single numbers, each in its own unit.</p>")
        parts.append(scatter(figures, "reported", "modeled", True))
    for scenario in dict.fromkeys(line["id"].split(".")[0] for line in lines):
        rows = ""
        for line in lines:
            if line["id"].split(".")[0] == scenario:
                verdict = {True: "met", False: "missed", None: "–"}[line["passed"]]
                cells = [line["title"], line["reported"], line["modeled"], line["target"]]
                cells = "".join(f"<td>{escaped(cell)}</td>" for cell in cells)
                rows += f'<tr>{cells}<td class="{verdict}">{verdict}</td></tr>'
        heads = "".join(f"<th>{head}</th>" for head in ("figure", "reported", "modeled", "target", "verdict"))
        parts.append(
            f'<h2>{escaped(scenario)}</h2><div class="scroll" tabindex="0" role="region" aria-label="{escaped(scenario)}">'
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Lab results</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def main():
    source = sys.argv[1] if len(sys.argv) > 1 else "target/lab/result.json"
    page = sys.argv[2] if len(sys.argv) > 2 else "lab.html"
    try:
        with open(source, encoding="utf-8") as file:
            text = render(json.load(file))
        with open(page, "x", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"lab/report.py: {source}: expected the results of a lab run: {error!r}")


if __name__ == "__main__":
    main()
