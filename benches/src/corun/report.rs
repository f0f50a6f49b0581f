//! Table, JSON and picture of forecast and measured slowdowns.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use cachemate_core::{MachineSpec, median, nearest_rank};
use cachemate_report::Table;
use cachemate_report::figure::{Axis, Chart, ChartPoint, Mark, Series};
use serde::Serialize;

use super::{CorunPair, CorunSolo, MAX_MEASURED_WIDTH, PercentInterval};

/// Goals: mean error and 90th percentile in points, rank correlation, and coverage of the 90 % intervals.
const MEAN_GOAL: f64 = 7.0;
const TAIL_GOAL: f64 = 18.0;
const RANK_GOAL: f64 = 0.7;
const COVERAGE_GOAL: (f64, f64) = (0.85, 0.95);

/// How forecasts compare with measurements.
#[derive(Clone, Debug, Serialize)]
pub struct CorunReport {
    host: String,
    kernel: String,
    processor: String,
    seed: u64,
    seconds: f64,
    summary: Option<CorunSummary>,
    /// Rounds, and those of them that are left out because the CPUs were on different caches, or were moved.
    rounds: usize,
    rounds_left_out: usize,
    /// Slowdowns on different caches.
    control: Option<CorunControl>,
    /// Pairs whose measured interval is too wide, or that were not reached.
    not_measurable: usize,
    /// Mean error and number of pairs by cause.
    by_cause: BTreeMap<&'static str, (f64, usize)>,
    alone: Vec<CorunSolo>,
    pairs: Vec<CorunPair>,
    /// The calibrated host that was forecast.
    machine: MachineSpec,
}

/// Errors over all measurable pairs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CorunSummary {
    pub pairs: usize,
    pub mean_error_points: f64,
    pub tail_error_points: f64,
    /// Kendall's tau-b between forecasts and measurements.
    pub rank_correlation: f64,
    /// Share of the pairs whose measured interval overlaps the forecast's.
    pub overlapping_share: f64,
    /// Share of the pairs whose measured value, itself uncertain, lies within the forecast's interval.
    pub value_share: f64,
    pub mean_measured_percent: f64,
}

/// Median slowdowns over the rounds in which the CPUs were on different caches. Programs that share nothing but memory
/// hardly slow each other down, so these tell the errors of measuring.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CorunControl {
    /// Pairs with enough such rounds.
    pub pairs: usize,
    pub mean_absolute_percent: f64,
    pub largest_absolute_percent: f64,
}

/// `None` if no pair has enough rounds on different caches.
fn control_of(pairs: &[CorunPair]) -> Option<CorunControl> {
    let slowdowns: Vec<f64> = pairs
        .iter()
        .filter_map(|pair| Some(pair.slowdown_apart()?.value.abs()))
        .collect();
    Some(CorunControl {
        pairs: slowdowns.len(),
        mean_absolute_percent: slowdowns.iter().sum::<f64>() / slowdowns.len() as f64,
        largest_absolute_percent: slowdowns.into_iter().reduce(f64::max)?,
    })
}

impl CorunPair {
    /// `None` if the interval is too wide to compare with.
    fn usable(&self) -> Option<PercentInterval> {
        self.measured
            .filter(|measured| measured.high - measured.low <= MAX_MEASURED_WIDTH)
    }

    fn error_points(&self) -> Option<f64> {
        Some((self.forecast.value - self.usable()?.value).abs())
    }
}

/// Summarizes the measurable pairs; `None` without any.
fn summarize(pairs: &[CorunPair]) -> Option<CorunSummary> {
    let usable: Vec<(PercentInterval, PercentInterval)> = pairs
        .iter()
        .filter_map(|pair| Some((pair.forecast, pair.usable()?)))
        .collect();
    let count = usable.len();
    let errors: Vec<f64> = usable
        .iter()
        .map(|(forecast, measured)| (forecast.value - measured.value).abs())
        .collect();
    let share_of = |is_held: fn(&PercentInterval, &PercentInterval) -> bool| {
        let held = usable
            .iter()
            .filter(|(forecast, measured)| is_held(forecast, measured));
        held.count() as f64 / count as f64
    };
    Some(CorunSummary {
        pairs: count,
        mean_error_points: errors.iter().sum::<f64>() / count.max(1) as f64,
        tail_error_points: nearest_rank(&errors, 0.9)?,
        rank_correlation: kendall(&usable),
        overlapping_share: share_of(|forecast, measured| {
            forecast.low <= measured.high && forecast.high >= measured.low
        }),
        value_share: share_of(|forecast, measured| {
            (forecast.low..=forecast.high).contains(&measured.value)
        }),
        mean_measured_percent: usable
            .iter()
            .map(|(_, measured)| measured.value)
            .sum::<f64>()
            / count as f64,
    })
}

/// Tau-b: measurements whose intervals overlap are tied, because their order is not known.
fn kendall(pairs: &[(PercentInterval, PercentInterval)]) -> f64 {
    let (mut agreeing, mut forecast_orders, mut measured_orders) = (0.0, 0.0f64, 0.0f64);
    for (index, first) in pairs.iter().enumerate() {
        for second in &pairs[..index] {
            let is_tied = first.1.low <= second.1.high && second.1.low <= first.1.high;
            let measured_order = if is_tied {
                0.0
            } else {
                (first.1.value - second.1.value).signum()
            };
            let difference = first.0.value - second.0.value;
            let forecast_order = if difference.abs() < 0.05 {
                0.0
            } else {
                difference.signum()
            };
            agreeing += measured_order * forecast_order;
            measured_orders += measured_order.abs();
            forecast_orders += (forecast_order * measured_order).abs();
        }
    }
    agreeing / (measured_orders * forecast_orders).sqrt().max(1.0)
}

impl CorunReport {
    pub fn new(
        machine: MachineSpec,
        alone: Vec<CorunSolo>,
        pairs: Vec<CorunPair>,
        elapsed: Duration,
        seed: u64,
    ) -> Self {
        let read_line = |path: &str| {
            cachemate_files::read_text_limited(Path::new(path), 1 << 16)
                .unwrap_or_default()
                .trim()
                .to_string()
        };
        let processor = cachemate_files::read_text_limited(Path::new("/proc/cpuinfo"), 16 << 20)
            .unwrap_or_default()
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or(String::new(), |(_, name)| name.to_string());
        let mut errors: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
        for pair in &pairs {
            if let Some(error) = pair.error_points() {
                errors.entry(pair.cause).or_default().push(error);
            }
        }
        let mean = |errors: Vec<f64>| {
            (
                errors.iter().sum::<f64>() / errors.len() as f64,
                errors.len(),
            )
        };
        let rounds = pairs.iter().map(|pair| pair.rounds.len()).sum();
        let counted = pairs.iter().map(|pair| pair.counted_rounds().len());
        let rounds_left_out = rounds - counted.sum::<usize>();
        CorunReport {
            host: read_line("/proc/sys/kernel/hostname"),
            kernel: read_line("/proc/sys/kernel/osrelease"),
            processor,
            seed,
            seconds: elapsed.as_secs_f64(),
            summary: summarize(&pairs),
            rounds,
            rounds_left_out,
            control: control_of(&pairs),
            not_measurable: pairs.iter().filter(|pair| pair.usable().is_none()).count(),
            by_cause: errors
                .into_iter()
                .map(|(cause, errors)| (cause, mean(errors)))
                .collect(),
            alone,
            pairs,
            machine,
        }
    }

    /// Prints the result, and writes it below a directory if one is given.
    pub fn print(&self, is_json: bool, out: Option<&Path>) -> anyhow::Result<()> {
        let text = self.text();
        let json = serde_json::to_string_pretty(self)? + "\n";
        if let Some(dir) = out {
            for (name, content) in [
                ("corun.txt", text.as_str()),
                ("corun.json", json.as_str()),
                ("corun.svg", self.picture().as_str()),
            ] {
                let path = dir.join(name);
                std::fs::write(&path, content)
                    .with_context(|| format!("{}: cannot be written", path.display()))?;
            }
        }
        let mut output = std::io::stdout().lock();
        output.write_all(if is_json {
            json.as_bytes()
        } else {
            text.as_bytes()
        })?;
        Ok(())
    }

    fn text(&self) -> String {
        let mut table = Table::from_header(
            "program | beside | > forecast % | > 90 % | > measured % | > 90 % | > error | cause",
        );
        let range =
            |interval: PercentInterval| format!("{:.0} to {:.0}", interval.low, interval.high);
        for pair in &self.pairs {
            let (measured, measured_range) = pair.measured.map_or_else(
                || ("-".to_string(), "not reached".to_string()),
                |measured| (format!("{:.1}", measured.value), range(measured)),
            );
            let error = pair
                .error_points()
                .map_or("-".to_string(), |error| format!("{error:.1}"));
            table.add_row([
                pair.program.clone(),
                pair.beside.clone(),
                format!("{:.1}", pair.forecast.value),
                range(pair.forecast),
                measured,
                measured_range,
                error,
                pair.cause.to_string(),
            ]);
        }
        let mut text = format!(
            "{} ({}, Linux {}), seed {}, {:.0} s\n{}",
            self.host,
            self.processor,
            self.kernel,
            self.seed,
            self.seconds,
            table.text()
        );
        text += &format!(
            "{} pairs are not measurable here (interval wider than {MAX_MEASURED_WIDTH} points, or not reached)\n",
            self.not_measurable
        );
        text += &self.solo_text();
        for (cause, (error, count)) in &self.by_cause {
            text += &format!("{cause}: mean error {error:.1} points over {count} pairs\n");
        }
        match &self.summary {
            None => {
                text += "no pair could be measured: too little time, or other work on this host\n"
            }
            Some(summary) => text += &summary.text(),
        }
        if self.rounds_left_out > 0 {
            text += &format!(
                "{} of {} rounds are left out: a hypervisor ran the CPUs on different caches, or moved them\n",
                self.rounds_left_out, self.rounds
            );
        }
        if let Some(control) = &self.control {
            text += &format!(
                "control, on different caches: slowdowns of {} pairs are {:.1} % in the mean, at most {:.1} %\n",
                control.pairs, control.mean_absolute_percent, control.largest_absolute_percent
            );
        }
        text
    }

    /// Programs alone, and the mean error of their cycles per instruction.
    fn solo_text(&self) -> String {
        let mut table = Table::from_header(
            "program alone | > million instructions | > CPI forecast | > CPI measured | > error",
        );
        let mut errors = Vec::new();
        for solo in &self.alone {
            let error = solo
                .measured
                .map(|measured| 100.0 * (solo.forecast / measured - 1.0));
            errors.extend(error.map(f64::abs));
            table.add_row([
                solo.program.clone(),
                format!("{:.0}", 1e-6 * solo.instructions),
                format!("{:.2}", solo.forecast),
                solo.measured
                    .map_or("-".to_string(), |measured| format!("{measured:.2}")),
                error.map_or("-".to_string(), |error| format!("{error:+.0} %")),
            ]);
        }
        let summary = median(&errors).map_or(String::new(), |error| {
            format!("cycles per instruction alone: median error {error:.0} %\n")
        });
        table.text() + &summary
    }

    /// Forecasts against measurements; a point on the diagonal is right.
    fn picture(&self) -> String {
        let mut by_cause: BTreeMap<&str, Vec<ChartPoint>> = BTreeMap::new();
        let mut highest = 1.0f64;
        for pair in &self.pairs {
            let Some(measured) = pair.usable() else {
                continue;
            };
            highest = highest.max(pair.forecast.value).max(measured.value);
            by_cause.entry(pair.cause).or_default().push(ChartPoint {
                interval: Some((measured.low, measured.high)),
                title: Some(format!(
                    "{} beside {}: forecast {:.1} %, measured {:.1} %",
                    pair.program, pair.beside, pair.forecast.value, measured.value
                )),
                ..ChartPoint::new(pair.forecast.value, measured.value)
            });
        }
        let mut series: Vec<Series> = by_cause
            .into_iter()
            .map(|(cause, points)| Series {
                name: cause.to_string(),
                points,
                mark: Mark::Points,
                ..Series::default()
            })
            .collect();
        series.push(Series {
            name: "equal".to_string(),
            points: vec![ChartPoint::new(0.0, 0.0), ChartPoint::new(highest, highest)],
            is_dashed: true,
            ..Series::default()
        });
        Chart {
            title: format!("Slowdowns of pairs on {}", self.processor),
            x: Axis::linear("forecast, percent"),
            y: Axis::linear("measured, percent"),
            series,
            ..Chart::default()
        }
        .svg()
    }
}

impl CorunSummary {
    fn text(&self) -> String {
        let verdict = |is_met: bool| if is_met { "met" } else { "missed" };
        format!(
            "{} measurable pairs, mean slowdown {:.1} %\n\
             mean error {:.1} points (goal {MEAN_GOAL}: {})\n\
             90th percentile {:.1} points (goal {TAIL_GOAL}: {})\n\
             rank correlation {:.2} (goal {RANK_GOAL}: {})\n\
             90 % intervals overlap {:.0} % of the measured ones (goal 85 to 95: {}), and hold {:.0} % of the measured values\n",
            self.pairs,
            self.mean_measured_percent,
            self.mean_error_points,
            verdict(self.mean_error_points <= MEAN_GOAL),
            self.tail_error_points,
            verdict(self.tail_error_points <= TAIL_GOAL),
            self.rank_correlation,
            verdict(self.rank_correlation >= RANK_GOAL),
            100.0 * self.overlapping_share,
            verdict((COVERAGE_GOAL.0..=COVERAGE_GOAL.1).contains(&self.overlapping_share)),
            100.0 * self.value_share,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(value: f64, half_width: f64) -> PercentInterval {
        PercentInterval {
            value,
            low: value - half_width,
            high: value + half_width,
        }
    }

    fn pair(forecast: f64, measured: Option<PercentInterval>) -> CorunPair {
        CorunPair {
            program: "a".to_string(),
            beside: "b".to_string(),
            forecast: interval(forecast, 3.0),
            measured,
            rounds: Vec::new(),
            are_apart: Vec::new(),
            cause: "cache",
        }
    }

    /// Do errors, ranks and coverage follow from the measurable pairs only, and does the text say how many were not?
    #[test]
    fn only_measurable_pairs_count() {
        let pairs = vec![
            pair(10.0, Some(interval(12.0, 1.0))),
            pair(20.0, Some(interval(40.0, 1.0))),
            pair(0.0, Some(interval(0.0, 1.0))),
            pair(500.0, Some(interval(0.0, 30.0))),
            pair(500.0, None),
        ];
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let report = CorunReport::new(machine, Vec::new(), pairs, Duration::from_secs(1), 1);
        let summary = report.summary.unwrap();
        assert_eq!((summary.pairs, report.not_measurable), (3, 2));
        assert!((summary.mean_error_points - 22.0 / 3.0).abs() < 1e-9);
        assert!((summary.tail_error_points - 20.0).abs() < 1e-9);
        assert!((summary.rank_correlation - 1.0).abs() < 1e-9);
        assert!((summary.overlapping_share - 2.0 / 3.0).abs() < 1e-9);
        assert!((summary.value_share - 2.0 / 3.0).abs() < 1e-9);
        let text = report.text();
        assert!(
            text.contains("2 pairs are not measurable") && text.contains("missed"),
            "{text}"
        );
        assert!(report.picture().starts_with("<svg"));
    }

    /// Does the text say how many rounds are left out?
    #[test]
    fn rounds_that_are_left_out_are_told() {
        let time = |user_s| super::super::ProcessTime {
            user_s,
            system_s: 0.0,
        };
        let mut moved = pair(50.0, Some(interval(20.0, 4.0)));
        for index in 0..12 {
            moved.rounds.push([time(1.0), time(1.5)]);
            moved.are_apart.push(Some(index % 2 == 1));
        }
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let report = CorunReport::new(machine, Vec::new(), vec![moved], Duration::from_secs(1), 1);
        let text = report.text();
        assert!(text.contains("6 of 12 rounds are left out"), "{text}");
        assert!(text.contains("of 1 pairs are 50.0 % in the mean"), "{text}");
    }
}
