//! AV-2 (Table 2): the share of bits of the next vector that the last vector predicts, compared with a prediction of
//! all zeros. AV-6 (Figure 2): activity of the L1 data cache over time and sets, as pictures. Both use the nine
//! programs alone.

use cachemate_core::SuperSetCount;
use cachemate_locality::activity::LastVectorPredictor;
use cachemate_report::figure::{Axis, BarChart, HeatMap, Shade};

use super::bits::{CELLS, Thresholds, combine_samples};
use super::samples::{ActivitySample, sample_workload};
use super::{MACHINE, PROGRAMS, SUPER_SETS};
use crate::seeded_runs::SeededRuns;
use crate::setup::{Workload, WorkloadJob};
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, at_time_scale, bar_groups, mean,
};

/// Table 2, in the order of the six cells.
const PAPER_ACCURACY_PERCENT: [f64; 6] = [82.3, 93.6, 94.9, 90.3, 93.8, 94.6];
/// Table 2 uses samples of 100 M cycles, the pictures use samples of 5 M.
const SAMPLES_TOGETHER: usize = 20;
/// The text names gzip and perlbmk. It does not say which the other two are, so one that chases pointers and one that
/// streams were taken.
const PICTURED_PROGRAMS: [&str; 4] = ["gzip", "perl", "mcf", "equake"];
/// Number of samples from the start of the long run.
const PICTURED_SAMPLE_COUNT: usize = 160;

/// Samples of each program alone.
type SoloSamples = SeededRuns<&'static str, Vec<ActivitySample>>;

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let (scale, long_samples) = context.pick((200, 10), (50, 16));
    context.report_progress("9 programs alone");
    let inputs = |program, seed| (program, seed, scale, long_samples);
    let runs = context.run_cases(&PROGRAMS, inputs, sample_program)?;
    let findings = [
        predictability_finding(context, &runs),
        activity_finding(context, &runs),
    ];
    Ok(at_time_scale(scale as f64, findings))
}

fn sample_program(
    _: &ExperimentContext<'_>,
    &(program, seed, scale, long_samples): &(&str, u64, u64, u64),
) -> Result<Vec<ActivitySample>> {
    let jobs = vec![WorkloadJob::new(program, 10 * seed)];
    let mut workload = Workload::from_machine_name(MACHINE, jobs, seed)?;
    workload.options.scale = scale;
    let (samples, _) = sample_workload(
        workload,
        SAMPLES_TOGETHER as u64,
        SAMPLES_TOGETHER as u64 * long_samples,
    )?;
    Ok(samples)
}

/// Correctly predicted bits of one program in percent: by the last value, and by zero.
struct PredictionRates {
    by_last_value: [Option<f64>; 6],
    by_zero: [Option<f64>; 6],
}

fn score_predictions(samples: &[ActivitySample], thresholds: Thresholds) -> PredictionRates {
    let thresholds = thresholds.scaled_by(SAMPLES_TOGETHER as f64);
    let mut last_value_predictors: [LastVectorPredictor; 6] = Default::default();
    let (mut zero_bit_counts, mut total_bits) = ([0u32; 6], 0u32);
    for (long_sample_index, short_samples) in samples.chunks_exact(SAMPLES_TOGETHER).enumerate() {
        let Some(activity) = combine_samples(short_samples.iter().map(|sample| &sample.tasks[0]))
        else {
            continue;
        };
        for (cell, vector) in thresholds.vectors_of(&activity).into_iter().enumerate() {
            // The first vector has no predecessor, so neither prediction counts it.
            zero_bit_counts[cell] += if long_sample_index > 0 {
                SUPER_SETS - vector.count()
            } else {
                0
            };
            last_value_predictors[cell].push(vector, SUPER_SETS);
        }
        total_bits += if long_sample_index > 0 { SUPER_SETS } else { 0 };
    }

    PredictionRates {
        by_last_value: std::array::from_fn(|cell| {
            last_value_predictors[cell]
                .predictability()
                .map(|share| 100.0 * share)
        }),
        by_zero: zero_bit_counts.map(|zeros| {
            (total_bits > 0).then(|| 100.0 * f64::from(zeros) / f64::from(total_bits))
        }),
    }
}

fn predictability_finding(context: &ExperimentContext<'_>, runs: &SoloSamples) -> Finding {
    // By seed, by vector: mean over programs of (last value, zero).
    let mut accuracy_by_seed: Vec<[(f64, f64); 6]> = Vec::new();

    let mut points = Vec::new();
    for &seed in &context.seeds {
        let activities = runs.of_seed(seed).flatten().map(|sample| &sample.tasks[0]);
        let thresholds = Thresholds::mean_of(activities);
        let program_accuracy: Vec<PredictionRates> = runs
            .of_seed(seed)
            .map(|samples| score_predictions(samples, thresholds))
            .collect();
        accuracy_by_seed.push(std::array::from_fn(|cell| {
            let mean_over_programs = |value: &dyn Fn(&PredictionRates) -> Option<f64>| {
                mean(program_accuracy.iter().filter_map(value))
            };
            (
                mean_over_programs(&|predicted| predicted.by_last_value[cell]),
                mean_over_programs(&|predicted| predicted.by_zero[cell]),
            )
        }));
        if seed == context.seeds[0] {
            for (program, prediction_rates) in PROGRAMS.into_iter().zip(&program_accuracy) {
                let cells = CELLS.iter().zip(prediction_rates.by_last_value);
                points.extend(
                    cells.map(|(cell, share)| DataPoint::from_values(program, *cell, share)),
                );
            }
        }
    }
    let cell_values = |cell: usize, value: fn(&(f64, f64)) -> f64| {
        accuracy_by_seed
            .iter()
            .map(|cells| value(&cells[cell]))
            .collect::<Vec<f64>>()
    };
    let series = ["last value", "always zero", "last value, paper"];
    for (cell, name) in CELLS.iter().enumerate() {
        let values = [
            cell_values(cell, |pair| pair.0),
            cell_values(cell, |pair| pair.1),
            vec![PAPER_ACCURACY_PERCENT[cell]],
        ];
        points.extend(
            series
                .iter()
                .zip(values)
                .map(|(series, values)| DataPoint::from_values(*series, *name, values)),
        );
    }
    let bars = BarChart {
        title: "Bits of the next vector predicted".to_string(),
        y: Axis::linear("% of bits").with_range(0.0, 100.0),
        groups: bar_groups(&points, &series),
        series: series.map(str::to_string).to_vec(),
        ..BarChart::default()
    };
    let figure = ResultFigure::bars("av-2-predictability", &bars);
    let mean_of = |cells: &[(f64, f64); 6]| mean(cells.map(|pair| pair.0));
    let per_seed = context.with_seeds(accuracy_by_seed.iter().map(mean_of));
    let mean_zero_percent = mean(
        accuracy_by_seed
            .iter()
            .map(|cells| mean(cells.map(|pair| pair.1))),
    );
    Finding::declared("av-2-predicted-bits", &per_seed)
    .with_points(points)
    .with_note(format!(
        "Always predicting zero is right for {mean_zero_percent:.1} % in the mean; every cell stands beside it in the figure. Thresholds as \
         in AV-1: the mean count over the nine programs."
    ))
    .with_figure(figure)
}

fn activity_finding(context: &ExperimentContext<'_>, runs: &SoloSamples) -> Finding {
    let concentration = |samples: &Vec<ActivitySample>| {
        mean_concentration(samples.iter().map(|sample| &sample.tasks[0][0]))
    };
    let pictured_samples = |seed: u64| {
        PROGRAMS
            .into_iter()
            .filter(|program| PICTURED_PROGRAMS.contains(program))
            .filter_map(move |program| Some((program, runs.get(program, seed)?)))
    };
    let mean_concentration_of =
        |seed: u64| mean(pictured_samples(seed).filter_map(|(_, samples)| concentration(samples)));
    let mut finding = Finding::declared(
        "av-6-heat-maps",
        &context.values_by_seed(mean_concentration_of),
    );
    for program in PROGRAMS {
        let shares: Vec<f64> = runs.of_case(program).filter_map(concentration).collect();
        finding.points.push(DataPoint::from_values(
            "share of the busiest quarter, %",
            program,
            &shares,
        ));
    }
    for (program, samples) in pictured_samples(context.seeds[0]) {
        finding.figures.push(draw_activity_map(program, samples));
    }
    finding.with_note(
        "Dark is high activity here, light low (the paper's colors are the other way round).",
    )
}

/// The percent of all accesses in the busiest quarter of the super sets, averaged over samples.
fn mean_concentration<'a>(samples: impl Iterator<Item = &'a Vec<SuperSetCount>>) -> Option<f64> {
    let share = |sample: &Vec<SuperSetCount>| {
        let mut counts: Vec<u64> = sample.iter().map(|super_set| super_set.accesses).collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let total: u64 = counts.iter().sum();
        let busiest_accesses: u64 = counts.iter().take(counts.len() / 4).sum();
        (total > 0).then(|| 100.0 * busiest_accesses as f64 / total as f64)
    };
    let shares: Vec<f64> = samples.filter_map(share).collect();
    (!shares.is_empty()).then(|| mean(&shares))
}

fn draw_activity_map(program: &str, samples: &[ActivitySample]) -> ResultFigure {
    let samples = &samples[..samples.len().min(PICTURED_SAMPLE_COUNT)];
    let accesses_by_sample = |super_set: u32| -> Vec<Option<f64>> {
        let busiest_count = |sample: &ActivitySample| {
            sample.tasks[0][0]
                .get(super_set as usize)
                .map(|count| count.accesses as f64)
        };
        samples.iter().map(busiest_count).collect()
    };

    let map = HeatMap {
        title: format!("{program}: accesses to the L1 data cache by super set"),
        rows: (0..SUPER_SETS)
            .map(|super_set| super_set.to_string())
            .collect(),
        columns: (0..samples.len())
            .map(|sample| sample.to_string())
            .collect(),
        row_label: "super set".to_string(),
        column_label: "sample (5 M cycles at the papers' scale)".to_string(),
        values: (0..SUPER_SETS).map(accesses_by_sample).collect(),
        shade: Shade::Gray,
        unit: "accesses".to_string(),
        hides_numbers: true,
        ..HeatMap::default()
    };
    ResultFigure::heat_map(format!("av-6-{program}"), &map)
}
