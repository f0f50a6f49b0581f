//! Comparisons over L2 sizes and seeds: every figure that a comparison reports, as points, charts and text.

use cachemate_report::figure::{Axis, Chart, Series};

use super::{NiagaraPolicy, NiagaraResult, NiagaraSetting, TIME_SCALE, ThreadMix, measure};
use crate::seeded_runs::SeededRuns;
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, ResultTarget, ResultVerdict,
    line_through, mean,
};

/// Comparisons by case and seed; most often, a case is an L2 size in KB.
pub type Cells<C = u64> = SeededRuns<C, NiagaraResult>;

/// Runs every size and seed under one policy.
pub fn run_cells(
    context: &ExperimentContext<'_>,
    mix: ThreadMix,
    policy: &NiagaraPolicy,
    sizes: &[u64],
) -> Result<Cells> {
    context.run_unstored_cases(sizes, |l2_kb, seed| {
        context.report_progress(&format!("{policy:?} at {l2_kb} KB, seed {seed}"));
        measure(
            &NiagaraSetting {
                mix,
                ..NiagaraSetting::new(l2_kb, seed, context)
            },
            policy,
        )
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
    ("weighted speed-up change %", |m| {
        100.0 * (m.scores.weighted_speedup / m.default_scores.weighted_speedup - 1.0)
    }),
    ("harmonic mean change %", |m| {
        100.0 * (m.scores.harmonic_mean / m.default_scores.harmonic_mean - 1.0)
    }),
    ("worst slowdown", |m| m.scores.worst_slowdown),
    ("worst slowdown, default", |m| {
        m.default_scores.worst_slowdown
    }),
    ("run time variation %", |m| 100.0 * m.variation),
    ("run time variation, default %", |m| {
        100.0 * m.default_variation
    }),
    ("share of CPU time: art %", |m| 100.0 * m.art_share),
    ("least share of CPU time, of the mean %", |m| {
        100.0 * m.least_share
    }),
    ("least share of CPU time, default, of the mean %", |m| {
        100.0 * m.default_least_share
    }),
    ("of contention: waiting for the core's issue slot %", |m| {
        100.0 * m.contention_at.issue
    }),
    ("of contention: misses and hits %", |m| {
        100.0 * m.contention_at.misses
    }),
    ("of contention: queues of L2 and memory %", |m| {
        100.0 * m.contention_at.queues
    }),
    ("of contention: switches, faults and interrupts %", |m| {
        100.0 * m.contention_at.system
    }),
];

/// Mean, minimum and maximum over seeds of every metric in every case.
pub fn metric_points<C: Copy + PartialEq>(
    name: &str,
    cells: &Cells<C>,
    cases: &[C],
    label: impl Fn(C) -> String,
) -> Vec<DataPoint> {
    let points_of_metric = |(metric, value_of): (&str, ResultMetric)| {
        let series = format!("{name}: {metric}");
        cases
            .iter()
            .map(|&case| cells.point(case, &series, label(case), value_of))
            .collect::<Vec<DataPoint>>()
    };
    METRICS.into_iter().flat_map(points_of_metric).collect()
}

pub fn size_label(l2_kb: u64) -> String {
    format!("{l2_kb} KB")
}

/// Memory bandwidths in bytes per cycle: a quarter of the chip's peak, half of that, and the bandwidth that STREAM
/// reaches (from the machine's file).
pub const BANDWIDTHS: [f64; 3] = [6.4, 3.2, 1.3];

/// One policy at 192 KB for several memory bandwidths (the papers limit it but do not state it):
/// points and a figure.
pub fn measure_bandwidth_sweep(
    context: &ExperimentContext<'_>,
    mix: ThreadMix,
    policy: &NiagaraPolicy,
    figure: &str,
    policy_name: &str,
) -> Result<(Vec<DataPoint>, ResultFigure)> {
    let results = context.run_unstored_cases(&BANDWIDTHS, |bytes_per_cycle, seed| {
        context.report_progress(&format!(
            "{policy_name}, memory {bytes_per_cycle} bytes a cycle, seed {seed}"
        ));
        measure(
            &NiagaraSetting {
                mix,
                bytes_per_cycle: Some(bytes_per_cycle),
                ..NiagaraSetting::new(192, seed, context)
            },
            policy,
        )
    })?;

    let name = format!("{policy_name} over bandwidth");
    let points = metric_points(&name, &results, &BANDWIDTHS, |bytes| bytes.to_string());
    let series_line = |metric: &str| Series {
        name: metric.to_string(),
        ..line_through(&points, &format!("{name}: {metric}"))
    };
    let chart = Chart {
        title: format!("{policy_name} at 192 KB over the bandwidth of memory"),
        x: Axis::log("bytes a cycle"),
        y: Axis::linear("%"),
        series: [
            "throughput gain %",
            "of which contention %",
            "L2 miss ratio change %",
        ]
        .map(series_line)
        .into(),
        ..Chart::default()
    };
    Ok((points, ResultFigure::chart(figure, &chart)))
}

/// One form of a policy at every size, with the points of all forms.
#[derive(Clone, Copy)]
pub struct SizeSweep<'a> {
    pub cells: &'a Cells,
    pub sizes: &'a [u64],
    pub points: &'a [DataPoint],
}

impl SizeSweep<'_> {
    /// The finding of a metric at the size where it is worst, which every seed must meet, declared
    /// under a name for some labels. The note names the sizes that miss the target.
    pub fn worst_size_finding(&self, name: &str, labels: &[&str], metric: ResultMetric) -> Finding {
        let target = Finding::declared(name, &[]).target;
        let is_met = |value: f64| target.judge_value(Some(value)) != Some(ResultVerdict::Missed);
        let combine_worst = if matches!(target, ResultTarget::AtMost { .. }) {
            f64::max
        } else {
            f64::min
        };
        let worst_of_seed = |results: &[&NiagaraResult]| {
            let values: Vec<f64> = results.iter().map(|result| metric(result)).collect();
            // If a value is missing at one size, there is no worst value.
            let is_complete = values.iter().all(|value| value.is_finite());
            values
                .into_iter()
                .reduce(combine_worst)
                .filter(|_| is_complete)
                .unwrap_or(f64::NAN)
        };

        Finding::declared_for(name, labels, &self.cells.per_seed(worst_of_seed))
            .require_every_seed()
            .with_note(describe_shortfall(
                self.sizes.iter().map(|&kb| (kb, self.mean_at(kb, metric))),
                is_met,
            ))
            .with_points(self.points.to_vec())
            .with_time_scale(TIME_SCALE as f64)
    }

    /// Adds the parts of the throughput gain to the note of its finding.
    pub fn with_gain_parts(&self, finding: Finding) -> Finding {
        let note = format!("{} {}.", finding.note, self.describe_gain_parts());
        finding.with_note(note)
    }

    /// Mean over seeds at one size.
    fn mean_at(&self, l2_kb: u64, metric: ResultMetric) -> f64 {
        mean(self.cells.values(l2_kb, metric))
    }

    /// The parts of a throughput gain as text, by size.
    fn describe_gain_parts(&self) -> String {
        let describe_size = |&size: &u64| {
            let [mix, contention, busy] =
                [1, 2, 4].map(|metric| self.mean_at(size, METRICS[metric].1));
            format!("{size} KB: mix {mix:+.1} %, contention {contention:+.1} %, busy {busy:+.1} %")
        };
        let mut texts: Vec<String> = self.sizes.iter().map(describe_size).collect();
        for ((l2_kb, seed), result) in self
            .cells
            .iter()
            .filter(|(_, result)| !result.never_ran.is_empty())
        {
            texts.push(format!(
                "{l2_kb} KB, seed {seed}: never ran: {}",
                result.never_ran.join(", ")
            ));
        }
        texts.join("; ")
    }
}

pub fn size_chart(
    name: &str,
    title: &str,
    y: &str,
    points: &[DataPoint],
    series: &[&str],
) -> ResultFigure {
    let chart = Chart {
        title: title.to_string(),
        x: Axis::log("L2, KB"),
        y: Axis::linear(y),
        series: series
            .iter()
            .map(|series| line_through(points, series))
            .collect(),
        ..Chart::default()
    };
    ResultFigure::chart(name, &chart)
}

/// A sentence with the sizes at which a target is missed.
pub fn describe_shortfall(
    values_by_size: impl Iterator<Item = (u64, f64)>,
    is_met: impl Fn(f64) -> bool,
) -> String {
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
