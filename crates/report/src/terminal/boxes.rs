//! A plan as one box per cache, with the reasons below the boxes.

use super::TerminalStyle;
use crate::results::{CacheAssignment, PlanResult};
use crate::table::{Align, pad_text, text_width};
use crate::text::{format_fixed, format_number};

/// Draws as many boxes side by side as the terminal is wide, then the reasons by program, then the alternatives.
pub fn plan_boxes(plan: &PlanResult, style: TerminalStyle) -> String {
    let boxes: Vec<Vec<String>> = plan
        .caches
        .iter()
        .map(|cache| render_box(cache, &plan.unit, style))
        .collect();

    let mut text = String::new();
    let mut remaining_boxes = &boxes[..];
    while let Some(first) = remaining_boxes.first() {
        let mut used_width = text_width(&first[0]);
        let mut used_count = 1;
        while let Some(next_width) = remaining_boxes
            .get(used_count)
            .map(|lines| text_width(&lines[0]))
            .filter(|w| used_width + 2 + w <= style.width)
        {
            used_width += 2 + next_width;
            used_count += 1;
        }
        text.push_str(&join_side_by_side(&remaining_boxes[..used_count]));
        remaining_boxes = &remaining_boxes[used_count..];
    }
    text.push_str(&style.bold("why"));
    text.push('\n');
    for program in plan.caches.iter().flat_map(|cache| &cache.programs) {
        text.push_str(&indent(&program.reason, style.width));
    }
    text + &expectation_text(plan, style)
}

fn format_value(value: f64, unit: &str) -> String {
    if unit == "percent" {
        format!("{} % slower", format_fixed(value, 1))
    } else {
        format!("weight {}", format_number(value))
    }
}

fn render_box(cache: &CacheAssignment, unit: &str, style: TerminalStyle) -> Vec<String> {
    let head = format!("{} · CPUs {}", cache.cache, cache.cpus);
    let max_name_width = cache
        .programs
        .iter()
        .map(|p| text_width(&p.name))
        .max()
        .unwrap_or(0);

    let mut rows: Vec<(String, String)> = Vec::new();
    for program in &cache.programs {
        let mut cost = program
            .slowdown
            .map_or("not known".to_string(), |value| format_value(value, unit));
        cost += &program
            .interval
            .map_or(String::new(), |range| format!(" ({})", range.describe()));
        rows.push((pad_text(&program.name, max_name_width, Align::Left), cost));
    }
    if rows.is_empty() {
        rows.push(("idle".to_string(), String::new()));
    }

    let row_width = |row: &(String, String)| text_width(&row.0) + 2 + text_width(&row.1);
    let inner_width = rows
        .iter()
        .map(row_width)
        .max()
        .unwrap_or(0)
        .max(text_width(&head) + 2);
    let mut lines = vec![format!(
        "╭─ {} {}╮",
        style.bold(&head),
        "─".repeat(inner_width - text_width(&head) - 1)
    )];
    for (name, cost) in &rows {
        let blank = " ".repeat(inner_width - text_width(name) - text_width(cost));
        lines.push(format!("│ {name}{blank}{} │", style.faint(cost)));
    }
    lines.push(format!("╰{}╯", "─".repeat(inner_width + 2)));
    lines
}

fn join_side_by_side(boxes: &[Vec<String>]) -> String {
    let rows = boxes.iter().map(Vec::len).max().unwrap_or(0);
    let mut text = String::new();
    for row in 0..rows {
        let parts = boxes.iter().map(|lines| {
            lines
                .get(row)
                .cloned()
                .unwrap_or_else(|| " ".repeat(text_width(&lines[0])))
        });
        text.push_str(parts.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Wraps words to the width; the first line is indented less than the others.
fn indent(sentence: &str, width_limit: usize) -> String {
    let mut text = String::new();
    let mut line = " ".to_string();
    for word in sentence.split_whitespace() {
        if text_width(&line) + 1 + text_width(word) > width_limit.max(40) {
            text.push_str(&line);
            text.push('\n');
            line = "   ".to_string();
        }
        line.push(' ');
        line.push_str(word);
    }
    text + &line + "\n"
}

fn expectation_text(plan: &PlanResult, style: TerminalStyle) -> String {
    let expected = &plan.expected;
    let value_text = |v: Option<f64>| match (v, plan.unit.as_str()) {
        (None, _) => "not known".to_string(),
        (Some(v), "percent") => format!("{} %", format_fixed(v, 2)),
        (Some(v), _) => format_number(v),
    };
    let mut text = format!(
        "{}  this plan {}, best {}, random {}, worst {}\n",
        style.bold(plan.measure()),
        value_text(expected.plan),
        value_text(expected.best),
        value_text(expected.random),
        value_text(expected.worst)
    );
    let proof = match (plan.optimal, plan.gap) {
        (true, _) => format!("optimal under this model, proven ({})", plan.solver),
        (false, Some(gap)) => format!(
            "at most {} above the best ({})",
            value_text(Some(gap)),
            plan.solver
        ),
        (false, None) => format!("not proven to be the best ({})", plan.solver),
    };
    text.push_str(&style.faint(&proof));
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Alternatives, PlacementRow};
    use expect_test::expect;

    /// Does the picture show at a glance which programs share each cache, and the reasons?
    #[test]
    fn a_plans_picture_shows_caches_programs_and_reasons() {
        let placed = |name: &str, slowdown: Option<f64>, reason: &str| PlacementRow {
            name: name.into(),
            cpu: None,
            slowdown,
            interval: None,
            reason: reason.into(),
        };
        let cache = |index: u32, programs| CacheAssignment {
            cache: format!("L2 #{index}"),
            cpus: format!("{}-{}", 2 * index, 2 * index + 1),
            programs,
        };

        let plan = PlanResult {
            unit: "percent".into(),
            solver: "matching".into(),
            optimal: true,
            caches: vec![
                cache(
                    0,
                    vec![
                        placed(
                            "mcf",
                            Some(2.31),
                            "mcf keeps away from milc: it would lose 48.0 % beside it.",
                        ),
                        placed("gamess", None, "gamess is quiet."),
                    ],
                ),
                cache(1, vec![]),
            ],
            expected: Alternatives {
                plan: Some(2.3075),
                best: Some(2.3075),
                worst: Some(21.995),
                random: None,
            },
            ..PlanResult::default()
        };

        expect![[r#"
            ╭─ L2 #0 · CPUs 0-1 ───╮  ╭─ L2 #1 · CPUs 2-3 ─╮
            │ mcf     2.3 % slower │  │ idle               │
            │ gamess     not known │  ╰────────────────────╯
            ╰──────────────────────╯
            why
              mcf keeps away from milc: it would lose 48.0 % beside it.
              gamess is quiet.
            mean slowdown within caches  this plan 2.31 %, best 2.31 %, random not known, worst 22.00 %
            optimal under this model, proven (matching)
        "#]]
        .assert_eq(&plan_boxes(&plan, TerminalStyle::PLAIN));
    }
}
