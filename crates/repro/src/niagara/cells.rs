//! Comparisons over L2 sizes and seeds: every figure that a comparison reports, as points, charts and text.

use cachemate_report::figure::{Axis, Chart, ChartPoint, Series};
use serde::{Deserialize, Serialize};

use super::{NiagaraPolicy, NiagaraResult, NiagaraSetting, TIME_SCALE, ThreadMix, measure};
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultFigure, ResultTarget, ResultVerdict, mean};

/// One setting's outcome under one policy.
#[derive(Serialize, Deserialize)]
pub struct Cell {
    pub l2_kb: u64,
    pub seed: u64,
    pub measured: NiagaraResult,
}

/// Runs every size and seed under one policy.
pub fn run_cells(
    context: &ExperimentContext<'_>,
    mix: ThreadMix,
    policy: &NiagaraPolicy,
    sizes: &[u64],
) -> Result<Vec<Cell>, ReproError> {
    let settings: Vec<(u64, u64)> =
        sizes.iter().flat_map(|&l2_kb| context.seeds.iter().map(move |&seed| (l2_kb, seed))).collect();
    context.run_all(&settings, |&(l2_kb, seed)| {
        context.report_progress(&format!("{policy:?} at {l2_kb} KB, seed {seed}"));
        Ok(Cell {
            l2_kb,
            seed,
            measured: measure(&NiagaraSetting { mix, ..NiagaraSetting::new(l2_kb, seed, context) }, policy)?,
        })
    })
}

/// A figure that is read from a comparison.
pub type ResultMetric = fn(&NiagaraResult) -> f64;

/// The figures that every comparison reports.
pub const METRICS: [(&str, ResultMetric); 21] = [
    ("throughput gain %", |m| 100.0 * m.gain.throughput_gain),
    ("of which mix %", |m| 100.0 * m.gain.mix_gain),
    ("of which contention %", |m| 100.0 * m.gain.contention_gain),
    ("busy share %", |m| 100.0 * m.busy_share),
    ("busy gain %", |m| 100.0 * m.gain.busy_gain),
    ("L2 miss ratio %", |m| 100.0 * m.miss_ratio),
    ("L2 miss ratio, default %", |m| 100.0 * m.default_miss_ratio),
    ("L2 miss ratio change %", |m| 100.0 * m.misses_change),
    ("weighted speed-up change %", |m| 100.0 * (m.scores.weighted_speedup / m.default_scores.weighted_speedup - 1.0)),
    ("harmonic mean change %", |m| 100.0 * (m.scores.harmonic_mean / m.default_scores.harmonic_mean - 1.0)),
    ("worst slowdown", |m| m.scores.worst_slowdown),
    ("worst slowdown, default", |m| m.default_scores.worst_slowdown),
    ("run time variation %", |m| 100.0 * m.variation),
    ("run time variation, default %", |m| 100.0 * m.default_variation),
    ("share of CPU time: art %", |m| 100.0 * m.art_share),
    ("least share of CPU time, of the mean %", |m| 100.0 * m.least_share),
    ("least share of CPU time, default, of the mean %", |m| 100.0 * m.default_least_share),
    ("of contention: waiting for the core's issue slot %", |m| 100.0 * m.contention_at.issue),
    ("of contention: misses and hits %", |m| 100.0 * m.contention_at.misses),
    ("of contention: queues of L2 and memory %", |m| 100.0 * m.contention_at.queues),
    ("of contention: switches, faults and interrupts %", |m| 100.0 * m.contention_at.system),
];

/// Mean, minimum and maximum over seeds of every metric at every size.
pub fn metric_points(name: &str, cells: &[Cell], sizes: &[u64]) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for (metric, value_of) in METRICS {
        for &size in sizes {
            let values: Vec<f64> =
                cells.iter().filter(|cell| cell.l2_kb == size).map(|cell| value_of(&cell.measured)).collect();
            points.push(DataPoint::from_values(format!("{name}: {metric}"), format!("{size} KB"), &values));
        }
    }
    points
}

/// Memory bandwidths in bytes per cycle: a quarter of the chip's peak, half of that, and the bandwidth that STREAM
/// reaches (from the machine's file).
pub const BANDWIDTHS: [f64; 3] = [6.4, 3.2, 1.3];

/// One policy at 192 KB for several memory bandwidths (the papers limit it but do not state it): points and a figure.
pub fn measure_bandwidth_sweep(
    context: &ExperimentContext<'_>,
    mix: ThreadMix,
    policy: &NiagaraPolicy,
    figure: &str,
    name: &str,
) -> Result<(Vec<DataPoint>, ResultFigure), ReproError> {
    let settings: Vec<(f64, u64)> =
        BANDWIDTHS.iter().flat_map(|&bytes| context.seeds.iter().map(move |&seed| (bytes, seed))).collect();
    let results = context.run_all(&settings, |&(bytes_per_cycle, seed)| {
        context.report_progress(&format!("{name}, memory {bytes_per_cycle} bytes a cycle, seed {seed}"));
        measure(
            &NiagaraSetting { mix, bytes_per_cycle: Some(bytes_per_cycle), ..NiagaraSetting::new(192, seed, context) },
            policy,
        )
    })?;
    let mut points = Vec::new();
    for (metric, value_of) in METRICS {
        for bytes_per_cycle in BANDWIDTHS {
            let results_at_bandwidth = settings.iter().zip(&results).filter(|((at, _), _)| *at == bytes_per_cycle);
            let values: Vec<f64> = results_at_bandwidth.map(|(_, result)| value_of(result)).collect();
            points.push(DataPoint::from_values(
                format!("{name} over bandwidth: {metric}"),
                format!("{bytes_per_cycle}"),
                &values,
            ));
        }
    }
    let series_line = |metric: &str| {
        let series = format!("{name} over bandwidth: {metric}");
        let own_points = points.iter().filter(|point| point.series == series);
        let chart_point = |point: &DataPoint| {
            Some(ChartPoint {
                interval: point.low.zip(point.high),
                ..ChartPoint::new(point.at.parse().ok()?, point.value?)
            })
        };
        Series { name: metric.to_string(), points: own_points.filter_map(chart_point).collect(), ..Series::default() }
    };
    let chart = Chart {
        title: format!("{name} at 192 KB over the bandwidth of memory"),
        x: Axis::log("bytes a cycle"),
        y: Axis::linear("%"),
        series: ["throughput gain %", "of which contention %", "L2 miss ratio change %"].map(series_line).into(),
        ..Chart::default()
    };
    Ok((points, ResultFigure::chart(figure, &chart)))
}

/// One value per seed: the worst over all sizes.
fn worst_by_seed(cells: &[Cell], metric: ResultMetric, combine_worst: fn(f64, f64) -> f64) -> Vec<(u64, f64)> {
    let mut seeds: Vec<u64> = cells.iter().map(|cell| cell.seed).collect();
    seeds.sort_unstable();
    seeds.dedup();
    let mean_of_seed = |seed: u64| {
        let values: Vec<f64> =
            cells.iter().filter(|cell| cell.seed == seed).map(|cell| metric(&cell.measured)).collect();
        // If a value is missing at one size, there is no worst value.
        let is_complete = values.iter().all(|value| value.is_finite());
        values.into_iter().reduce(combine_worst).filter(|_| is_complete).unwrap_or(f64::NAN)
    };
    seeds.into_iter().map(|seed| (seed, mean_of_seed(seed))).collect()
}

/// One form of a policy at every size, with the points of all forms.
#[derive(Clone, Copy)]
pub struct SizeSweep<'a> {
    pub cells: &'a [Cell],
    pub sizes: &'a [u64],
    pub points: &'a [DataPoint],
}

impl SizeSweep<'_> {
    /// The finding of a metric at the size where it is worst, which every seed must meet. The note names the sizes that
    /// miss the target.
    pub fn worst_size_finding(
        &self,
        id: &str,
        title: &str,
        paper: &str,
        metric: ResultMetric,
        target: ResultTarget,
    ) -> Finding {
        let is_met = |value: f64| target.judge_value(Some(value)) != Some(ResultVerdict::Missed);
        let combine_worst = if matches!(target, ResultTarget::AtMost { .. }) { f64::max } else { f64::min };
        Finding::new(id, title, paper, "%", target, &worst_by_seed(self.cells, metric, combine_worst))
            .require_every_seed()
            .with_note(describe_shortfall(means_by_size(self.cells, self.sizes, metric).into_iter(), is_met))
            .with_points(self.points.to_vec())
            .with_time_scale(TIME_SCALE as f64)
    }

    /// Adds the parts of the throughput gain to the note of its finding.
    pub fn with_gain_parts(&self, finding: Finding) -> Finding {
        let note = format!("{} {}.", finding.note, describe_gain_parts(self.cells, self.sizes));
        finding.with_note(note)
    }
}

/// A chart over L2 sizes, one line per series.
pub fn size_chart(name: &str, title: &str, y: &str, points: &[DataPoint], series: &[&str]) -> ResultFigure {
    let series_line = |name: &&str| {
        let own_points = points.iter().filter(|point| point.series == **name);
        let chart_point = |point: &DataPoint| {
            let size = point.at.trim_end_matches(" KB").parse().ok()?;
            Some(ChartPoint { interval: point.low.zip(point.high), ..ChartPoint::new(size, point.value?) })
        };
        Series { name: (*name).to_string(), points: own_points.filter_map(chart_point).collect(), ..Series::default() }
    };
    let chart = Chart {
        title: title.to_string(),
        x: Axis::log("L2, KB"),
        y: Axis::linear(y),
        series: series.iter().map(series_line).collect(),
        ..Chart::default()
    };
    ResultFigure::chart(name, &chart)
}

/// A sentence with the sizes at which a target is missed.
pub fn describe_shortfall(values_by_size: impl Iterator<Item = (u64, f64)>, is_met: impl Fn(f64) -> bool) -> String {
    let short_sizes: Vec<String> = values_by_size
        .filter(|&(_, value)| !is_met(value))
        .map(|(size, value)| format!("{size} KB ({value:.1} %)"))
        .collect();
    if short_sizes.is_empty() {
        "Every size meets it.".to_string()
    } else {
        format!("Short at {}.", short_sizes.join(", "))
    }
}

/// Means over seeds, by size.
fn means_by_size(cells: &[Cell], sizes: &[u64], metric: ResultMetric) -> Vec<(u64, f64)> {
    let mean_at_size = |size: u64| {
        let values: Vec<f64> =
            cells.iter().filter(|cell| cell.l2_kb == size).map(|cell| metric(&cell.measured)).collect();
        mean(&values)
    };
    sizes.iter().map(|&size| (size, mean_at_size(size))).collect()
}

/// The parts of a throughput gain as text, by size.
fn describe_gain_parts(cells: &[Cell], sizes: &[u64]) -> String {
    let describe_size = |&size: &u64| {
        let mean_gain = |metric: usize| means_by_size(cells, &[size], METRICS[metric].1)[0].1;
        format!("{size} KB: mix {:+.1} %, contention {:+.1} %, busy {:+.1} %", mean_gain(1), mean_gain(2), mean_gain(4))
    };
    let mut size_texts: Vec<String> = sizes.iter().map(describe_size).collect();
    let incomplete_cells = cells.iter().filter(|cell| !cell.measured.never_ran.is_empty());
    let cell_text = |cell: &Cell| {
        format!("{} KB, seed {}: never ran: {}", cell.l2_kb, cell.seed, cell.measured.never_ran.join(", "))
    };
    size_texts.extend(incomplete_cells.map(cell_text));
    size_texts.join("; ")
}
