//! A study as one HTML file that loads nothing, has a light and a dark mode, and is readable on a phone.
//!
//! The matrix of slowdowns comes first, then the plan and its reasons, then the evidence (classes, curves, method).

use cachemate_core::median;
use maud::{Markup, html};

use crate::figure::{Axis, Chart, ChartPoint, HeatMap, Series};
use crate::html_page::{render_page, scroll_box};
use crate::results::{
    CacheSummary, CostTable, CurvePoint, HIGH_PERCENT, PlanResult, ProgramSummary,
};
use crate::text::{
    format_count, format_fixed, format_number, format_percent, format_size, value_or_dash,
};

/// Content of the page; empty parts are left out.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StudyPage {
    /// Title of the page, and its heading.
    pub title: String,
    /// One or two sentences under the title.
    pub lead: String,
    /// The machine of the study.
    pub machine: String,
    /// The machine's contended cache.
    pub cache: CacheSummary,
    /// The programs of the study, in the order given.
    pub programs: Vec<ProgramSummary>,
    /// Curves, in the order of `programs`.
    pub curves: Vec<Vec<CurvePoint>>,
    /// Pairwise slowdowns by the model.
    pub matrix: CostTable,
    /// The best placement by the scheme; `None` if no plan was requested.
    pub plan: Option<PlanResult>,
    /// Method of measurement: pairs of a property and its text.
    pub method: Vec<(String, String)>,
}

impl CostTable {
    /// Rows lose, columns cause.
    pub fn heat_map(&self) -> HeatMap {
        let is_percent = self.unit == "percent";
        let largest_value = self
            .values
            .iter()
            .flatten()
            .flatten()
            .copied()
            .fold(0.0, f64::max);

        HeatMap {
            rows: self.names.clone(),
            columns: self.names.clone(),
            row_label: "suffers".into(),
            column_label: "beside".into(),
            values: self.values.clone(),
            decimals: is_percent.then_some(1),
            strongest_value: is_percent.then_some(largest_value.max(HIGH_PERCENT)),
            uses_root_scale: true,
            unit: if is_percent {
                "%".into()
            } else {
                String::new()
            },
            ..HeatMap::default()
        }
    }
}

impl StudyPage {
    /// A whole file, not a fragment.
    pub fn html(&self) -> String {
        let body = html! {
            h1 { (self.title) }
            p.lead { (self.lead) }
            (self.matrix_section())
            @if let Some(plan) = &self.plan { (plan_section(plan)) }
            (self.classes_section())
            (self.curves_section())
            (self.method_section())
        };
        render_page(&self.title, &body)
    }

    fn matrix_section(&self) -> Markup {
        if self.matrix.names.is_empty() {
            return html! {};
        }
        let unit = if self.matrix.unit == "percent" {
            "percent of its run time alone"
        } else {
            "a weight without a unit"
        };
        html! {
            h2 { "Pairwise slowdowns" }
            p.soft {
                "Each row is a program, each column the neighbor on the same cache; the number is what the row's program is "
                "expected to lose, in " (unit) ". Model: " (self.matrix.model) "."
            }
            (self.matrix.heat_map().inline())
        }
    }

    fn classes_section(&self) -> Markup {
        if self.programs.is_empty() {
            return html! {};
        }

        html! {
            h2 { "The programs" }
            p.soft {
                "Turtles hardly use the shared cache, sheep use it but do not mind losing it, rabbits mind, devils miss much "
                "and hurt the others."
            }

            (scroll_box("The programs", &html! { table {
                thead { tr {
                    th { "program" } th.l { "class" } th { "MPKI alone" } th { "accesses per 1000 instr." }
                    th { "on half the cache" } th { "hits lost with half" } th { "instructions" }
                } }

                tbody { @for program in &self.programs { tr {
                    td { (program.name) }
                    td.l { @if let Some(class) = &program.class { span.tag.(class.to_lowercase()) { (class) } } @else { "–" } }
                    td { (value_or_dash(program.solo_mpki.map(format_number))) }
                    td { (value_or_dash(program.accesses_per_kilo_instr.map(format_number))) }
                    td { (value_or_dash(program.half_cache_mpki.map(format_number))) }
                    td { (value_or_dash(program.lost_hits_share.map(|share| format_percent(share, 1)))) }
                    td { (value_or_dash(program.instructions.map(format_count))) }
                } } }
            } }))
        }
    }

    /// Misses per thousand instructions if `uses_mpki` is set, otherwise miss ratios in percent.
    fn program_series(&self, index: usize, uses_mpki: bool) -> Series {
        let name = &self.programs[index].name;

        let points = self.curves[index].iter().filter_map(|point| {
            let scale = if uses_mpki {
                point.mpki.filter(|_| point.miss_ratio > 0.0)? / point.miss_ratio
            } else {
                100.0
            };
            let y = if uses_mpki {
                point.mpki?
            } else {
                point.miss_ratio * 100.0
            };

            let interval = point.miss_ratio_error.map(|error| {
                (
                    (point.miss_ratio - error).max(0.0) * scale,
                    (point.miss_ratio + error) * scale,
                )
            });

            let unit = if uses_mpki { "MPKI" } else { "% misses" };
            let title = Some(format!(
                "{name}: {} {unit} with {}",
                format_number(y),
                format_size(point.bytes)
            ));
            Some(ChartPoint {
                x: point.bytes as f64,
                y,
                interval,
                title,
            })
        });

        Series {
            name: name.clone(),
            points: points.collect(),
            color: Some(index),
            ..Series::default()
        }
    }

    fn curves_section(&self) -> Markup {
        let drawn_indices: Vec<usize> = (0..self.programs.len().min(self.curves.len()))
            .filter(|&index| !self.curves[index].is_empty())
            .collect();
        if drawn_indices.is_empty() {
            return html! {};
        }

        let has_mpki = drawn_indices
            .iter()
            .all(|&index| self.curves[index].iter().all(|point| point.mpki.is_some()));
        let label = if has_mpki {
            "misses per 1000 instructions"
        } else {
            "misses, % of accesses"
        };
        let series: Vec<Series> = drawn_indices
            .iter()
            .map(|&at| self.program_series(at, has_mpki))
            .collect();

        let cache_bytes = self.cache.size_bytes as f64;
        let size_mark = || crate::figure::ReferenceLine::X {
            label: format!(
                "{} {}",
                format_size(self.cache.size_bytes),
                self.cache.level
            ),
            position: cache_bytes,
        };
        let combined_chart = Chart {
            x: Axis::bytes("cache to itself"),
            y: spread_axis(label, &series),
            series: series.clone(),
            references: vec![size_mark()],
            size: Some((860.0, 400.0)),
            ..Chart::default()
        };

        let single_chart = |single: Series| Chart {
            title: single.name.clone(),
            x: Axis::bytes(""),
            series: vec![single],
            references: vec![crate::figure::ReferenceLine::X {
                label: String::new(),
                position: cache_bytes,
            }],
            size: Some((320.0, 190.0)),
            ..Chart::default()
        };

        html! {
            h2 { "Miss-rate curves" }
            p.soft { "How often each program misses with a cache of the given size to itself. Rest the pointer on a point for its value." }
            (combined_chart.inline())
            details open[series.len() <= 12] {
                summary { "Each on its own scale" }
                div.small { @for single in series { (single_chart(single).inline()) } }
            }
        }
    }

    fn method_section(&self) -> Markup {
        let cache = &self.cache;
        let commands: Vec<(&str, &str)> = self
            .programs
            .iter()
            .filter_map(|p| Some((p.name.as_str(), p.command.as_deref()?)))
            .collect();

        html! {
            h2 { "How it was measured" }
            dl.how {
                @if !self.machine.is_empty() {
                    dt { "planned for" }
                    dd {
                        (self.machine) ": " (cache.instances) " × " (cache.level) " of " (format_size(cache.size_bytes)) ", "
                        (cache.ways) "-way, " (cache.line_bytes) "-byte lines, " (cache.cpus_each) " CPUs each"
                    }
                }
                @for (subject, description) in &self.method { dt { (subject) } dd { (description) } }
            }
            @if !commands.is_empty() {
                details {
                    summary { "What was run" }
                    dl.how { @for (name, command) in commands { dt { (name) } dd { code { (command) } } } }
                }
            }
        }
    }
}

/// Logarithmic if the largest program would otherwise flatten all others.
fn spread_axis(label: &str, series: &[Series]) -> Axis {
    let peak_of = |single: &Series| {
        single
            .points
            .iter()
            .map(|point| point.y)
            .fold(0.0, f64::max)
    };
    let peaks: Vec<f64> = series.iter().map(peak_of).collect();
    let Some(median_peak) = median(&peaks) else {
        return Axis::linear(label);
    };

    let highest_peak = peaks.iter().copied().fold(0.0, f64::max);
    if highest_peak <= 8.0 * median_peak || median_peak <= 0.0 {
        return Axis::linear(label);
    }

    let shown_values = series
        .iter()
        .flat_map(|single| &single.points)
        .map(|point| point.y)
        .filter(|y| *y > highest_peak / 1e5);
    Axis::log(label).with_range(
        shown_values.fold(highest_peak, f64::min) / 1.3,
        highest_peak * 1.3,
    )
}

fn render_cost(value: Option<f64>, unit: &str) -> String {
    match (value, unit) {
        (None, _) => "not known".to_string(),
        (Some(value), "percent") => format!("{} %", format_fixed(value, 1)),
        (Some(value), _) => format_number(value),
    }
}

/// Class of a bar, which selects a color by the size of the loss. Only percentages have a color scale.
fn severity(value: Option<f64>, unit: &str) -> &'static str {
    match value {
        Some(value) if unit == "percent" && value >= HIGH_PERCENT => "high",
        Some(value) if unit == "percent" && value >= 5.0 => "middle",
        _ => "low",
    }
}

/// Multiple of the second largest value beyond which a bar is cut, so that it does not flatten the others.
const MAX_BAR_RATIO: f64 = 4.0;

/// Renders a bar whose length is proportional to the value. The largest of `all_values` has the length `max_rem`; if it
/// dwarfs all others, the scale ends at [`MAX_BAR_RATIO`] times the second largest, and the bar has an open end.
fn cost_bar(value: Option<f64>, all_values: &[f64], max_rem: f64, unit: &str) -> Markup {
    let mut sorted: Vec<f64> = all_values
        .iter()
        .copied()
        .filter(|value| *value > 0.0)
        .collect();
    sorted.sort_by(f64::total_cmp);
    let largest = sorted.pop().unwrap_or(0.0);
    let scale = largest.min(MAX_BAR_RATIO * sorted.last().copied().unwrap_or(largest));
    let value_share = value
        .filter(|value| *value > 0.0 && scale > 0.0)
        .map_or(0.0, |value| value / scale);
    let end = if value_share > 1.0 { " open" } else { "" };
    let class = format!("bar {}{end}", severity(value, unit));
    html! { span class=(class) style=(format!("width:{:.2}rem", value_share.min(1.0) * max_rem)) {} }
}

fn plan_section(plan: &PlanResult) -> Markup {
    let programs = || plan.caches.iter().flat_map(|cache| &cache.programs);
    let slowdowns: Vec<f64> = programs().filter_map(|program| program.slowdown).collect();
    let bar = |value: Option<f64>| cost_bar(value, &slowdowns, 3.0, &plan.unit);

    html! {
        h2 { "The plan" }
        p.soft {
            (proof_text(plan))
            @if plan.covers_machine {
                " Slowdowns are forecasts with all programs running at once, so that caches wait for each other's memory "
                "traffic; 90 % intervals are in brackets."
            }
            @if plan.unit == "percent" { " Bars are blue below 5 %, yellow below 20 % and red from there." }
            " A bar with an open end is longer than shown."
        }
        div.cards { @for cache in &plan.caches { div.card {
            // A long list breaks between two CPUs.
            h3 { (cache.cache) " " span { "CPUs " @for part in cache.cpus.split_inclusive(',') { (part) wbr; } } }
            @if cache.programs.is_empty() { p.soft { "idle" } }
            @for program in &cache.programs { div.row {
                b { (program.name) }
                span.cost { (bar(program.slowdown)) (render_cost(program.slowdown, &plan.unit))
                    @if let Some(range) = program.interval { " " span.range { "(" (range.describe()) ")" } }
                }
            } }
        } } }
        h2 { "Why" }
        dl.why { @for program in programs() { dt { (program.name) } dd { (program.reason) } } }
        h2 { "Against the alternatives" }
        (alternatives_table(plan))
    }
}

fn proof_text(plan: &PlanResult) -> String {
    match (plan.optimal, plan.gap) {
        (true, _) => format!(
            "Optimal under the model {}, proven ({}).",
            plan.model, plan.solver
        ),
        (false, Some(gap)) => {
            format!(
                "By scheme {}; at most {} above the best ({}).",
                plan.model,
                render_cost(Some(gap), &plan.unit),
                plan.solver
            )
        }
        (false, None) => format!(
            "By scheme {}; not proven to be the best ({}).",
            plan.model, plan.solver
        ),
    }
}

fn alternatives_table(plan: &PlanResult) -> Markup {
    let expected = &plan.expected;
    let rows = [
        ("this plan", expected.plan),
        ("the best", expected.best),
        ("a random one, on average", expected.random),
        ("the worst", expected.worst),
    ];
    let costs: Vec<f64> = rows.iter().filter_map(|row| row.1).collect();
    html! {
        (scroll_box("Against the alternatives", &html! { table.alt style="min-width:0" {
            thead { tr { th { "assignment" } th { (plan.measure()) } td {} } }
            tbody { @for (name, value) in rows { tr {
                td { (name) }
                td { (render_cost(value, &plan.unit)) }
                td.l { (cost_bar(value, &costs, 5.5, &plan.unit)) }
            } } }
        } }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a long bar cut and marked before it flattens the others, and are bars of similar values proportional?
    #[test]
    fn a_long_bar_does_not_flatten_the_others() {
        let bar =
            |value: f64, all: &[f64]| cost_bar(Some(value), all, 3.0, "percent").into_string();
        let uneven = [1.0, 2.0, 300.0];
        assert!(
            bar(300.0, &uneven).contains("bar high open")
                && bar(300.0, &uneven).contains("width:3.00rem")
        );
        assert!(
            bar(2.0, &uneven).contains("class=\"bar low\"")
                && bar(2.0, &uneven).contains("width:0.75rem")
        );
        assert!(bar(150.0, &[150.0, 300.0]).contains("width:1.50rem"));
        assert!(
            cost_bar(None, &uneven, 3.0, "percent")
                .into_string()
                .contains("width:0.00rem")
        );
    }
}
