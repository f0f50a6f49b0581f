//! Comparison of policies on one machine, from profiles: the result as data, and as one HTML page.
//!
//! The table comes first. The same timelines follow for each policy on the same scales: slowdowns, occupancies,
//! memory, locations, and decisions with their reasons.

use maud::{Markup, html};
use serde::Serialize;

use crate::figure::{
    Axis, Chart, ChartPoint, HeatMap, Lane, Mark, Series, TimelineChart, TimelineSpan,
};
use crate::html_page::{render_page, scroll_box};
use crate::results::{CacheSummary, HIGH_PERCENT};
use crate::text::{format_fixed, format_number, format_percent, value_or_dash};

/// `cachemate compare --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct WhatIfResult {
    /// The simulated machine.
    pub machine: String,
    /// The machine's contended cache.
    pub cache: CacheSummary,
    /// Nominal length of the run, in hours.
    pub hours: f64,
    /// Seed of all random draws in the runs.
    pub seed: u64,
    /// Outcomes of the policies in the order given; all policies run with the same machine, programs and seed.
    pub policies: Vec<PolicyOutcome>,
}

/// Outcome of a run under one policy.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PolicyOutcome {
    /// The policy, as given on the command line.
    pub policy: String,
    /// Whether the run completed; if not, the user stopped it, and the figures cover the time before the stop.
    pub complete: bool,
    /// Number of windows that the policy observed.
    pub windows: u64,
    /// Mean over programs of the slowdown: run time divided by the run time alone on a separate CPU and cache.
    pub mean_slowdown: Option<f64>,
    /// Largest slowdown of any program; `None` if no program has a slowdown.
    pub worst_slowdown: Option<f64>,
    /// Sum of the inverse slowdowns of all programs.
    pub weighted_speedup: Option<f64>,
    /// Instructions per second of all programs together, over the whole run.
    pub instructions_per_second: f64,
    /// Memory traffic of all nodes together, in both directions.
    pub memory_bytes_per_second: f64,
    /// Plans per hour that changed a placement, a partition or a time share.
    pub changes_per_hour: f64,
    /// Machine time that probes and page moves consumed.
    pub overhead_seconds: f64,
    /// Programs in the order given; the second copy of a name is `name 2`.
    pub programs: Vec<ProgramOutcome>,
    /// Figures over time.
    pub series: TimeSeries,
    /// Plans that changed something, in order of time.
    pub decisions: Vec<ReportedDecision>,
}

/// Outcome of one program under one policy.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProgramOutcome {
    /// Name of the program; the second copy of a name is `name 2`.
    pub name: String,
    /// Run time divided by the run time alone on a separate CPU and cache; `None` if no instruction was executed.
    pub slowdown: Option<f64>,
    /// The same ratio for time on CPU only, which reflects caches and memory but no waits for a CPU.
    pub slowdown_on_cpu: Option<f64>,
    /// Instructions per cycle on CPU; `None` if the program never ran.
    pub instr_per_cycle: Option<f64>,
    /// Misses of the contended cache per thousand instructions; `None` if no instruction was executed.
    pub mpki: Option<f64>,
}

/// Values over time, by program in the order of `programs`. Each value covers the interval that ends at its time.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct TimeSeries {
    /// End of each interval, from the start of the run.
    pub seconds: Vec<f64>,
    /// Slowdown by program and interval; `None` if the program did not run in it.
    pub slowdown: Vec<Vec<Option<f64>>>,
    /// Mean bytes that the program occupied in all contended caches, by program and interval; `None` if not observed.
    pub occupancy_bytes: Vec<Vec<Option<f64>>>,
    /// Contended cache on whose CPUs the program ran most, by program and interval.
    pub cache: Vec<Vec<Option<u32>>>,
    /// Utilization of memory, by memory node and interval.
    pub memory_busy_share: Vec<Vec<f64>>,
}

/// A plan that changed something.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ReportedDecision {
    /// Time of the decision, from the start of the run.
    pub seconds: f64,
    /// The plan's first reasons, with their programs.
    pub reason: String,
}

/// Maximum number of decisions that the page lists.
const MAX_DECISIONS: usize = 40;
/// Maximum number of programs drawn individually; if there are more, those that were slowed most are drawn.
const MAX_LINES: usize = 12;

impl WhatIfResult {
    /// Returns the HTML page.
    pub fn render_html(&self, title: &str) -> String {
        let body = html! {
            h1 { (title) }
            p.lead { (self.lead_text()) }
            (self.policies_section())
            (self.differences_section())
            (self.programs_section())
            (self.lines_section())
            (self.decisions_section())
            (self.method_section())
        };
        render_page(title, &body)
    }

    fn lead_text(&self) -> String {
        let program_count = self
            .policies
            .first()
            .map_or(0, |outcome| outcome.programs.len());
        let head = format!(
            "{program_count} programs on {} for {} simulated hours.",
            self.machine,
            format_number(self.hours)
        );
        let by_mean = |a: &&PolicyOutcome, b: &&PolicyOutcome| {
            let slowdown = |outcome: &PolicyOutcome| outcome.mean_slowdown.unwrap_or(f64::INFINITY);
            slowdown(a).total_cmp(&slowdown(b))
        };
        let best_outcome = self.policies.iter().min_by(by_mean);
        match best_outcome.and_then(|best| Some((best, best.mean_slowdown?))) {
            Some((best, mean)) if self.policies.len() > 1 => {
                let worst = self
                    .policies
                    .iter()
                    .filter(|outcome| outcome.mean_slowdown.is_some())
                    .max_by(by_mean);
                let worst = worst.unwrap_or(best);
                format!(
                    "{head} In the mean they take {} times as long as alone under '{}', the least, and {} times under '{}', the \
                     most.",
                    format_slowdown(mean),
                    best.policy,
                    value_or_dash(worst.mean_slowdown.map(format_slowdown)),
                    worst.policy
                )
            }
            Some((best, mean)) => {
                format!(
                    "{head} Under '{}' they take {} times as long as alone.",
                    best.policy,
                    format_slowdown(mean)
                )
            }
            None => head,
        }
    }

    fn policies_section(&self) -> Markup {
        html! {
            h2 { "Policies" }
            (scroll_box("Policies", &html! { table {
                thead { tr {
                    th { "policy" } th { "mean slowdown" } th { "worst" } th { "weighted speed-up" }
                    th { "10⁹ instr./s" } th { "memory GB/s" } th { "changes an hour" } th { "cost, s" } th { "windows" }
                } }
                tbody { @for outcome in &self.policies { tr {
                    td { (outcome.policy) @if !outcome.complete { " (stopped)" } }
                    td { (value_or_dash(outcome.mean_slowdown.map(format_slowdown))) }
                    td { (value_or_dash(outcome.worst_slowdown.map(format_slowdown))) }
                    td { (value_or_dash(outcome.weighted_speedup.map(format_number))) }
                    td { (format_number(outcome.instructions_per_second / 1e9)) }
                    td { (format_number(outcome.memory_bytes_per_second / 1e9)) }
                    td { (format_number(outcome.changes_per_hour)) }
                    td { (format_number(outcome.overhead_seconds)) }
                    td { (outcome.windows) }
                } } }
            } }))
            p.soft {
                "Slowdown: time over the time that the same instructions take alone on a CPU and cache of their own. Cost: time "
                "of programs that probes and page moves took."
            }
        }
    }

    /// Returns, for each program, the difference of each policy from the first one, and the policies' means over time
    /// on one axis.
    fn differences_section(&self) -> Markup {
        let Some((first, others)) = self
            .policies
            .split_first()
            .filter(|(_, other_policies)| !other_policies.is_empty())
        else {
            return html! {};
        };
        let slowdown =
            |outcome: &PolicyOutcome, index: usize| outcome.programs.get(index)?.slowdown;
        let percent_change = |outcome: &PolicyOutcome, index: usize| {
            let first_slowdown =
                slowdown(first, index).filter(|first_slowdown| *first_slowdown > 0.0)?;
            Some(100.0 * (slowdown(outcome, index)? / first_slowdown - 1.0))
        };
        let drawn_indices = self.drawn_programs();
        let changes: Vec<Vec<Option<f64>>> = drawn_indices
            .iter()
            .map(|&index| {
                others
                    .iter()
                    .map(|outcome| percent_change(outcome, index))
                    .collect()
            })
            .collect();
        let largest_change = changes
            .iter()
            .flatten()
            .flatten()
            .fold(0.0, |largest: f64, change| largest.max(change.abs()));
        let map = HeatMap {
            rows: drawn_indices
                .iter()
                .map(|&index| first.programs[index].name.clone())
                .collect(),
            columns: others
                .iter()
                .map(|outcome| outcome.policy.clone())
                .collect(),
            values: changes,
            row_label: "program".to_string(),
            column_label: format!("run time against '{}'", first.policy),
            unit: "%".to_string(),
            decimals: Some(1),
            strongest_value: Some(largest_change.max(HIGH_PERCENT)),
            uses_root_scale: true,
            ..HeatMap::default()
        };
        let unit = TimeUnit::from_hours(self.hours);
        let mean_series = |(index, outcome): (usize, &PolicyOutcome)| Series {
            name: outcome.policy.clone(),
            color: Some(index),
            ..outcome.series(0, &outcome.mean_slowdowns(), &unit)
        };
        let series: Vec<Series> = self.policies.iter().enumerate().map(mean_series).collect();
        let values = series
            .iter()
            .flat_map(|single| &single.points)
            .map(|point| point.y)
            .collect();
        let (axis, cut_off_value) = fitted_axis("times the time alone", values);
        let mean_chart = Chart {
            title: "Mean slowdown of the programs".to_string(),
            x: Axis::linear(unit.label),
            y: axis,
            series,
            size: Some((860.0, 300.0)),
            ..Chart::default()
        };
        html! {
            h2 { "Differences" }
            p.soft {
                "Change of each program's run time against policy '" (first.policy) "'. Blue is shorter, red is longer. "
                "Axes of slowdowns begin at the smallest value that occurs."
            }
            (map.inline())
            @if let Some(largest_value) = cut_off_value { p.soft { (cut_text(largest_value)) } }
            (mean_chart.inline())
        }
    }

    fn programs_section(&self) -> Markup {
        let Some(first) = self.policies.first() else {
            return html! {};
        };
        html! {
            h2 { "Programs" }
            (scroll_box("Programs", &html! { table {
                thead { tr { th { "slowdown of" } @for outcome in &self.policies { th { (outcome.policy) } } } }
                tbody { @for index in 0..first.programs.len() { tr {
                    td { (first.programs[index].name) }
                    @for outcome in &self.policies {
                        td { (value_or_dash(outcome.programs.get(index).and_then(|program| program.slowdown).map(format_slowdown))) }
                    }
                } } }
            } }))
        }
    }

    /// Programs to draw, in their order: all of them, or those that some policy slows down most.
    fn drawn_programs(&self) -> Vec<usize> {
        let program_count = self
            .policies
            .first()
            .map_or(0, |outcome| outcome.programs.len());
        let max_slowdown = |index: usize| {
            let slowdown = |outcome: &PolicyOutcome| {
                outcome
                    .programs
                    .get(index)
                    .and_then(|program| program.slowdown)
            };
            self.policies
                .iter()
                .filter_map(slowdown)
                .fold(0.0, f64::max)
        };
        let mut indices: Vec<usize> = (0..program_count).collect();
        indices.sort_by(|a, b| max_slowdown(*b).total_cmp(&max_slowdown(*a)).then(a.cmp(b)));
        indices.truncate(MAX_LINES);
        indices.sort_unstable();
        indices
    }

    fn lines_section(&self) -> Markup {
        let drawn_indices = self.drawn_programs();
        let program_count = self
            .policies
            .first()
            .map_or(0, |outcome| outcome.programs.len());
        let unit = TimeUnit::from_hours(self.hours);
        let slowdowns = |outcome: &PolicyOutcome| outcome.series.slowdown.clone();
        let megabytes = |outcome: &PolicyOutcome| -> Vec<Vec<Option<f64>>> {
            let row = |row: &Vec<Option<f64>>| {
                row.iter()
                    .map(|bytes| bytes.map(|bytes| bytes / 1048576.0))
                    .collect()
            };
            outcome.series.occupancy_bytes.iter().map(row).collect()
        };
        html! {
            h2 { "Slowdown" }
            @if drawn_indices.len() < program_count { p.soft { "The " (drawn_indices.len()) " of " (program_count) " programs that are slowed most." } }
            (self.charts("times the time alone", &unit, &drawn_indices, &slowdowns))
            h2 { "Occupancy of the shared caches" }
            p.soft { "Sampled at the ends of windows, at which one of the gangs that take turns is running." }
            (self.charts("MiB", &unit, &drawn_indices, &megabytes))
            h2 { "Memory" }
            @for outcome in &self.policies { (outcome.memory_chart(&unit).inline()) }
            h2 { "Caches of the programs" }
            @for outcome in &self.policies { (outcome.cache_timeline(&unit, &drawn_indices).inline()) }
        }
    }

    /// Returns one chart per policy, all on the same scale.
    fn charts(
        &self,
        label: &str,
        unit: &TimeUnit,
        drawn_indices: &[usize],
        metric: &dyn Fn(&PolicyOutcome) -> Vec<Vec<Option<f64>>>,
    ) -> Markup {
        let rows: Vec<Vec<Vec<Option<f64>>>> = self.policies.iter().map(metric).collect();
        let drawn_values = |rows: &Vec<Vec<Option<f64>>>| -> Vec<f64> {
            drawn_indices
                .iter()
                .filter_map(|&index| rows.get(index))
                .flatten()
                .flatten()
                .copied()
                .collect()
        };
        let (axis, cut_off_value) =
            fitted_axis(label, rows.iter().flat_map(drawn_values).collect());
        let chart = |(outcome, rows): (&PolicyOutcome, &Vec<Vec<Option<f64>>>)| Chart {
            title: outcome.policy.clone(),
            x: Axis::linear(unit.label),
            y: axis.clone(),
            series: drawn_indices
                .iter()
                .filter_map(|&index| Some(outcome.series(index, rows.get(index)?, unit)))
                .collect(),
            size: Some((860.0, 300.0)),
            ..Chart::default()
        };
        html! {
            @if let Some(largest_value) = cut_off_value { p.soft { (cut_text(largest_value)) } }
            @for policy_outcome in self.policies.iter().zip(&rows) { (chart(policy_outcome).inline()) }
        }
    }

    fn decisions_section(&self) -> Markup {
        html! {
            h2 { "Decisions" }
            @for outcome in &self.policies {
                details open[outcome.decisions.len() <= 12] {
                    summary { (outcome.policy) ": " (outcome.decisions.len()) " plans that changed something" }
                    dl.how { @for decision in outcome.decisions.iter().take(MAX_DECISIONS) {
                        dt { (format_number(decision.seconds)) " s" }
                        dd { (decision.reason) }
                    } }
                    @if outcome.decisions.len() > MAX_DECISIONS {
                        p.soft { "and " (outcome.decisions.len() - MAX_DECISIONS) " more" }
                    }
                }
            }
        }
    }

    fn method_section(&self) -> Markup {
        html! {
            h2 { "How it was found" }
            dl.how {
                dt { "machine" } dd {
                    (self.machine) ": " (self.cache.instances) " × " (self.cache.level) " of "
                    (crate::text::format_size(self.cache.size_bytes)) ", " (self.cache.cpus_each) " CPUs each"
                }
                dt { "programs" } dd { "profiles, each measured or recorded alone" }
                dt { "method" } dd {
                    "the interval machine: occupancies, bandwidth and turns by theory, nothing fitted on programs that ran "
                    "together (docs/simulators/interval.md states the accuracy)"
                }
                dt { "seed" } dd { (self.seed) }
            }
        }
    }
}

/// Values that exceed the 95th percentile by this factor are cut off.
const OUTLIER_FACTOR: f64 = 2.0;

/// Returns an axis from the smallest to the largest value, and the largest value if it is cut off. One outlier would
/// otherwise flatten every line.
fn fitted_axis(label: &str, mut values: Vec<f64>) -> (Axis, Option<f64>) {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    let (smallest_value, largest_value) = (
        values.first().copied().unwrap_or(0.0),
        values.last().copied().unwrap_or(0.0),
    );
    let percentile_95 = values
        .get(values.len() * 19 / 20)
        .copied()
        .unwrap_or(largest_value);
    let cut_off_value = Some(largest_value)
        .filter(|most| percentile_95 > 0.0 && *most > OUTLIER_FACTOR * percentile_95);
    let upper_end = if cut_off_value.is_some() {
        1.2 * percentile_95
    } else {
        largest_value
    };
    // Without a minimum range, nearly equal values would look different.
    let margin = (0.05 * (upper_end - smallest_value)).max(0.01 * upper_end.abs());
    let low = if smallest_value >= 0.0 {
        (smallest_value - margin).max(0.0)
    } else {
        smallest_value - margin
    };
    let high = if upper_end + margin > low {
        upper_end + margin
    } else {
        low + 1.0
    };
    (Axis::linear(label).with_range(low, high), cut_off_value)
}

/// Returns a slowdown with as many decimals as a reader compares.
fn format_slowdown(slowdown: f64) -> String {
    format_fixed(slowdown, 2)
}

fn cut_text(largest_value: f64) -> String {
    format!(
        "Lines that reach the upper end are cut off there; the largest value is {}.",
        format_number(largest_value)
    )
}

/// The unit of a page's time axis.
struct TimeUnit {
    label: &'static str,
    seconds: f64,
}

impl TimeUnit {
    fn from_hours(hours: f64) -> Self {
        match hours {
            hours if hours > 3.0 => TimeUnit {
                label: "hours",
                seconds: 3600.0,
            },
            hours if hours > 0.05 => TimeUnit {
                label: "minutes",
                seconds: 60.0,
            },
            _ => TimeUnit {
                label: "seconds",
                seconds: 1.0,
            },
        }
    }
}

impl PolicyOutcome {
    /// Returns the means over the programs that run in each interval.
    fn mean_slowdowns(&self) -> Vec<Option<f64>> {
        let mean = |index: usize| {
            let running_slowdowns: Vec<f64> = self
                .series
                .slowdown
                .iter()
                .filter_map(|row| *row.get(index)?)
                .collect();
            (!running_slowdowns.is_empty())
                .then(|| running_slowdowns.iter().sum::<f64>() / running_slowdowns.len() as f64)
        };
        (0..self.series.seconds.len()).map(mean).collect()
    }

    fn series(&self, index: usize, row: &[Option<f64>], unit: &TimeUnit) -> Series {
        let point = |(seconds, value): (&f64, &Option<f64>)| {
            ChartPoint::new(seconds / unit.seconds, value.unwrap_or(f64::NAN))
        };
        let name = self
            .programs
            .get(index)
            .map_or_else(String::new, |program| program.name.clone());
        let points = self.series.seconds.iter().zip(row).map(point).collect();
        Series {
            name,
            points,
            mark: Mark::Line,
            color: Some(index),
            ..Series::default()
        }
    }

    fn memory_chart(&self, unit: &TimeUnit) -> Chart {
        let node_series = |(node, row): (usize, &Vec<f64>)| {
            let row: Vec<Option<f64>> = row.iter().map(|share| Some(100.0 * share)).collect();
            Series {
                name: format!("node {node}"),
                color: Some(node),
                ..self.series(0, &row, unit)
            }
        };
        let max_share = self
            .series
            .memory_busy_share
            .iter()
            .flatten()
            .copied()
            .fold(0.0, f64::max);
        Chart {
            title: format!(
                "{}: at most {} of what memory passes",
                self.policy,
                format_percent(max_share, 0)
            ),
            x: Axis::linear(unit.label),
            y: Axis::linear("busy, %").with_range(0.0, 100.0),
            series: self
                .series
                .memory_busy_share
                .iter()
                .enumerate()
                .map(node_series)
                .collect(),
            size: Some((860.0, 220.0)),
            ..Chart::default()
        }
    }

    /// Returns a lane per program that shows the cache on which it ran; consecutive intervals on one cache form one
    /// span.
    fn cache_timeline(&self, unit: &TimeUnit, drawn_indices: &[usize]) -> TimelineChart {
        let caches = self
            .series
            .cache
            .iter()
            .flatten()
            .flatten()
            .max()
            .map_or(0, |last_cache| last_cache + 1);
        let lane = |&index: &usize| {
            let mut spans: Vec<TimelineSpan> = Vec::new();
            let mut span_start = 0.0;
            for (seconds, cache) in self
                .series
                .seconds
                .iter()
                .zip(self.series.cache.get(index).into_iter().flatten())
            {
                let span_end = seconds / unit.seconds;
                if let Some(cache) = cache {
                    match spans
                        .last_mut()
                        .filter(|last| last.kind_index == *cache as usize && last.end == span_start)
                    {
                        Some(last) => last.end = span_end,
                        None => spans.push(TimelineSpan {
                            start: span_start,
                            end: span_end,
                            kind_index: *cache as usize,
                            detail: String::new(),
                        }),
                    }
                }
                span_start = span_end;
            }
            Lane {
                name: self
                    .programs
                    .get(index)
                    .map_or_else(String::new, |program| program.name.clone()),
                spans,
            }
        };
        TimelineChart {
            title: self.policy.clone(),
            x_axis: Axis::linear(unit.label),
            kinds: (0..caches).map(|cache| format!("cache {cache}")).collect(),
            lanes: drawn_indices.iter().map(lane).collect(),
            marks: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_outcome(policy: &str, slowdown: f64) -> PolicyOutcome {
        let program = |name: &str| ProgramOutcome {
            name: name.to_string(),
            slowdown: Some(slowdown),
            slowdown_on_cpu: Some(slowdown),
            instr_per_cycle: Some(1.0),
            mpki: None,
        };
        PolicyOutcome {
            policy: policy.to_string(),
            complete: true,
            windows: 3,
            mean_slowdown: Some(slowdown),
            worst_slowdown: Some(slowdown),
            weighted_speedup: Some(2.0 / slowdown),
            instructions_per_second: 1e9,
            memory_bytes_per_second: 1e9,
            changes_per_hour: 4.0,
            overhead_seconds: 0.0,
            programs: vec![program("a<b>"), program("c")],
            series: TimeSeries {
                seconds: vec![10.0, 20.0, 30.0],
                slowdown: vec![vec![Some(1.0), None, Some(slowdown)]; 2],
                occupancy_bytes: vec![vec![Some(1e6); 3]; 2],
                cache: vec![
                    vec![Some(0), Some(0), Some(1)],
                    vec![None, Some(1), Some(1)],
                ],
                memory_busy_share: vec![vec![0.2, 0.3, 0.4]],
            },
            decisions: vec![ReportedDecision {
                seconds: 12.0,
                reason: "apart & quiet".to_string(),
            }],
        }
    }

    fn sample_result() -> WhatIfResult {
        let cache = CacheSummary {
            level: "L3".to_string(),
            instances: 2,
            ..CacheSummary::default()
        };
        let policies = vec![sample_outcome("default", 1.5), sample_outcome("dio", 1.2)];
        WhatIfResult {
            machine: "m".to_string(),
            cache,
            hours: 1.0,
            seed: 1,
            policies,
        }
    }

    /// Does the page name the better policy first, escape program names, and load nothing?
    #[test]
    fn the_page_names_the_better_policy_and_loads_nothing() {
        let html = sample_result().render_html("What if");
        assert!(
            html.contains("they take 1.20 times as long as alone under 'dio'"),
            "{html}"
        );
        assert!(
            html.contains("a&lt;b&gt;")
                && !html.contains("a<b>")
                && html.contains("apart &amp; quiet")
        );
        assert!(
            !html.contains("http://") || !html.replace("http://www.w3.org", "").contains("http://")
        );
        assert!(!html.contains("<script") && !html.contains("<link"));
    }

    /// Do consecutive intervals on one cache form one span, and intervals without a place none?
    #[test]
    fn consecutive_intervals_on_one_cache_form_one_span() {
        let lanes = sample_result().policies[0]
            .cache_timeline(
                &TimeUnit {
                    label: "s",
                    seconds: 1.0,
                },
                &[0, 1],
            )
            .lanes;
        let spans = |index: usize| {
            lanes[index]
                .spans
                .iter()
                .map(|s| (s.start, s.end, s.kind_index))
                .collect::<Vec<_>>()
        };
        assert_eq!(spans(0), [(0.0, 20.0, 0), (20.0, 30.0, 1)]);
        assert_eq!(spans(1), [(10.0, 30.0, 1)]);
    }

    /// Does one outlier leave the other values legible, do spread values stay whole, and does the axis begin where the
    /// data does?
    #[test]
    fn the_axis_fits_the_data() {
        let mut values: Vec<f64> = (0..100)
            .map(|index| 2.0 + f64::from(index) / 100.0)
            .collect();
        let (axis, cut_off_at) = fitted_axis("", values.clone());
        let (low, high) = axis.range.unwrap();
        assert!(
            (1.9..2.0).contains(&low) && (2.99..3.1).contains(&high) && cut_off_at.is_none(),
            "{low} {high} {cut_off_at:?}"
        );
        values.push(260.0);
        let (axis, cut_off_at) = fitted_axis("", values);
        let (_, high) = axis.range.unwrap();
        assert!(
            (3.0..5.0).contains(&high) && cut_off_at == Some(260.0),
            "{high} {cut_off_at:?}"
        );
        let (low, high) = fitted_axis("", vec![f64::NAN]).0.range.unwrap();
        assert!(low < high, "{low} {high}");
    }

    /// Is each program's change against the first policy on the page, as a number with its sign, and absent with a
    /// single policy?
    #[test]
    fn each_programs_difference_is_on_the_page_with_its_sign() {
        let mut page = sample_result();
        let html = page.render_html("What if");
        assert!(
            html.contains("run time against &#39;default&#39;")
                || html.contains("run time against 'default'"),
            "{html}"
        );
        assert!(html.contains("-20.0"), "1.2 against 1.5: {html}");
        page.policies.truncate(1);
        assert!(!page.render_html("What if").contains("Differences"));
    }

    /// Among many programs, are those drawn that some policy slows down most, in their order?
    #[test]
    fn the_most_slowed_programs_are_drawn() {
        let mut page = sample_result();
        for outcome in &mut page.policies {
            let program = outcome.programs[0].clone();
            let outcome_of = |index: usize| ProgramOutcome {
                slowdown: Some(1.0 + (index % 7) as f64),
                ..program.clone()
            };
            outcome.programs = (0..30).map(outcome_of).collect();
        }
        let drawn = page.drawn_programs();
        assert_eq!(drawn.len(), MAX_LINES);
        assert!(
            drawn.is_sorted() && drawn.iter().all(|index| index % 7 >= 4),
            "{drawn:?}"
        );
    }
}
