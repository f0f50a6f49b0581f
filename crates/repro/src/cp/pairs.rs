//! Measures pairs of programs at splits of the cache, sharing the cache, and alone: the data for
//! CP-2 to CP-4 and RM-4.
//!
//! The splits of one pair are compared with each other, so they must differ in nothing else. All
//! runs therefore time every program over the same work ([`crate::work`]): over the same time, a
//! split that makes a program faster would also show it in a later phase.
//!
//! For example, twolf executes 20 million instructions alone in 30 million cycles. In each split
//! its clock stops after these 20 million, while the other program runs on, because a program whose
//! neighbor has ended has the cache to itself.

use std::collections::BTreeSet;

use cachemate_core::{Plan, Profiles, TaskId, WindowLength};
use cachemate_papers::partition::demand_curve::DemandCurve;
use cachemate_pipeline::{forecast_plan, miss_penalty_of_machine};

use super::{
    COLORS, RunScale, chip_workload, colors_of_least_cost, fixed_plan_policy, split_shares,
    thesis_job,
};
use crate::run_request;
use crate::seeded_runs::SeededRuns;
use crate::setup::Workload;
use crate::work::InstructionRange;
use crate::{ExperimentContext, Result};

pub(crate) type ProgramPair = (&'static str, &'static str);

/// Thesis Figure 4.6; `warehouses` stands for SPECjbb. The text does not name the seventh pair, except that it contains
/// swim; twolf was taken, the other program whose curve the text calls unusual.
pub(crate) const PAIRS: [ProgramPair; 7] = [
    ("warehouses", "equake"),
    ("mcf", "art"),
    ("vortex", "art"),
    ("ammp", "applu"),
    ("twolf", "gzip"),
    ("vpr", "swim"),
    ("twolf", "swim"),
];
/// Pairs that sharing does not slow down (4.6.2).
pub(super) const CONTROL_PAIRS: [ProgramPair; 3] =
    [("gap", "parser"), ("apsi", "crafty"), ("vortex", "mesa")];
/// Minimum slowdown that counts as an effect of sharing; smaller ones are noise of frames and phases.
const MIN_COUNTED_SLOWDOWN: f64 = 0.05;

/// One pair under one seed; all rates in instructions per cycle, of the first and the second program.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct MeasuredPair {
    pub pair: ProgramPair,
    pub solo_rates: [f64; 2],
    pub shared_rates: [f64; 2],
    /// Number of colors of the first program, and the rates of both programs.
    pub rates_by_split: Vec<(u32, [f64; 2])>,
}

impl MeasuredPair {
    /// Rates relative to those under sharing, minus one.
    pub fn relative_gains(&self, rates: &[f64; 2]) -> [f64; 2] {
        [
            rates[0] / self.shared_rates[0] - 1.0,
            rates[1] / self.shared_rates[1] - 1.0,
        ]
    }
    pub fn gain_sum(&self, rates: &[f64; 2]) -> f64 {
        self.relative_gains(rates).iter().sum()
    }
    /// The sum of speeds relative to solo speed.
    pub fn weighted_speedup(&self, rates: &[f64; 2]) -> f64 {
        rates[0] / self.solo_rates[0] + rates[1] / self.solo_rates[1]
    }
    pub fn shared_speedup(&self) -> f64 {
        self.weighted_speedup(&self.shared_rates)
    }
    /// Rates at a split, or under sharing if `first_colors` is `None`; `None` if the split was not measured.
    pub fn rates_at(&self, first_colors: Option<u32>) -> Option<[f64; 2]> {
        let Some(first_colors) = first_colors else {
            return Some(self.shared_rates);
        };
        self.rates_by_split
            .iter()
            .find(|(split, _)| *split == first_colors)
            .map(|(_, rates)| *rates)
    }
    /// The split with the largest sum of gains.
    pub fn best_split(&self) -> &(u32, [f64; 2]) {
        let best_split = self
            .rates_by_split
            .iter()
            .max_by(|a, b| self.gain_sum(&a.1).total_cmp(&self.gain_sum(&b.1)));
        best_split.expect("every pair is measured at one split at least")
    }
    /// The slowdown from sharing, and the share of it that the best split recovers, for the
    /// programs that were slowed.
    pub fn recovered_shares(&self) -> Vec<(&'static str, f64, f64)> {
        let best_rates = self.best_split().1;
        let names = [self.pair.0, self.pair.1];
        let recovery_of = |index: usize| {
            let slowdown = 1.0 - self.shared_rates[index] / self.solo_rates[index];
            let remaining_loss = 1.0 - best_rates[index] / self.solo_rates[index];
            (slowdown >= MIN_COUNTED_SLOWDOWN).then(|| {
                (
                    names[index],
                    slowdown,
                    (slowdown - remaining_loss) / slowdown,
                )
            })
        };
        (0..2).filter_map(recovery_of).collect()
    }
}

/// A program with its work, alone on the whole cache.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct SoloWork {
    pub rate: f64,
    pub work: InstructionRange,
}

/// A program's name and the seed of its input.
pub(crate) type ProgramInput = (&'static str, u64);

/// Inputs of a pair; two copies of one program have different inputs.
pub(crate) fn pair_inputs(pair: ProgramPair, seed: u64) -> [ProgramInput; 2] {
    [(pair.0, seed), (pair.1, seed + 1_000)]
}

/// A program alone on the chip, and the work over which all runs time it.
pub(crate) fn measure_solo(
    context: &ExperimentContext<'_>,
    (program, input): ProgramInput,
    scale: RunScale,
    seed: u64,
) -> Result<SoloWork> {
    context.report_progress(&format!("{program} alone, seed {seed}"));
    let workload = chip_workload(vec![thesis_job(program, input)], 2, scale, seed)?;
    let (work, rates) = run_request::solo_run(&workload)?;
    Ok(SoloWork {
        rate: rates.instr_per_cycle,
        work,
    })
}

/// Solo runs of both programs of pairs, by the pair's position and seed.
pub(crate) type PairSolos = SeededRuns<usize, [SoloWork; 2]>;

pub(crate) fn measure_pair_solos(
    context: &ExperimentContext<'_>,
    pairs: &[ProgramPair],
    scale: RunScale,
) -> Result<PairSolos> {
    let indices: Vec<usize> = (0..pairs.len()).collect();
    context.run_unstored_cases(&indices, |pair, seed| {
        let [first, second] = pair_inputs(pairs[pair], seed);
        Ok([
            measure_solo(context, first, scale, seed)?,
            measure_solo(context, second, scale, seed)?,
        ])
    })
}

/// Measured pairs, by the pair's position and seed.
pub(crate) type ChipPairRuns = SeededRuns<usize, MeasuredPair>;

/// Measures pairs under sharing, and at the splits that are requested for the pair at a position.
/// The offset is added to the machine's seed, which determines the frames.
pub(crate) fn measure_pairs(
    context: &ExperimentContext<'_>,
    pairs: &[ProgramPair],
    solos: &PairSolos,
    scale: RunScale,
    frame_seed_offset: u64,
    requested_splits: impl Fn(usize) -> BTreeSet<u32>,
) -> Result<ChipPairRuns> {
    let mut runs: Vec<(usize, Option<u32>)> = Vec::new();
    for pair in 0..pairs.len() {
        let splits = requested_splits(pair).into_iter().map(Some);
        runs.extend(
            std::iter::once(None)
                .chain(splits)
                .map(|split| (pair, split)),
        );
    }
    let rates = context.run_unstored_cases(&runs, |(pair, split), seed| {
        let (first, second) = pairs[pair];
        context.report_progress(&format!("{first}+{second} at {split:?}, seed {seed}"));

        let workload = pair_on_chip(pairs[pair], scale, seed, frame_seed_offset)?;
        let plan = split
            .map(|first_colors| fixed_plan_policy(&workload, &split_shares(first_colors)))
            .transpose()?;
        let work = solos.result(pair, seed).map(|solo| solo.work);
        let rates = run_request::joint_run(&workload, &work, plan.as_ref())?.rates;
        Ok([rates[0].instr_per_cycle, rates[1].instr_per_cycle])
    })?;

    let indices: Vec<usize> = (0..pairs.len()).collect();
    context.run_unstored_cases(&indices, |pair, seed| {
        let own_splits = runs.iter().filter(|(run_pair, _)| *run_pair == pair);
        let rates_by_split =
            own_splits.filter_map(|&(_, split)| Some((split?, *rates.get((pair, split), seed)?)));
        Ok(MeasuredPair {
            pair: pairs[pair],
            solo_rates: solos.result(pair, seed).map(|solo| solo.rate),
            shared_rates: *rates.result((pair, None), seed),
            rates_by_split: rates_by_split.collect(),
        })
    })
}

pub(crate) fn pair_on_chip(
    pair: ProgramPair,
    scale: RunScale,
    seed: u64,
    frame_seed_offset: u64,
) -> Result<Workload> {
    let jobs = pair_inputs(pair, seed)
        .map(|(program, input)| thesis_job(program, input))
        .to_vec();
    chip_workload(jobs, 2, scale, seed + frame_seed_offset)
}

/// Rates of a program alone, with each number of colors.
pub(crate) struct ColorCurves {
    pub demand_curve: DemandCurve,
    /// Cycles per thousand instructions in which the program stalls on data beyond the first level.
    pub stalls_per_kilo_instr: Vec<f64>,
}

/// The speeds relative to the whole cache as costs, with 1, 2, ... colors.
pub(super) fn speed_costs(curve: &DemandCurve) -> Vec<f64> {
    let cycles = curve.cycles_per_instr.iter();
    cycles
        .map(|cycles| -curve.whole_cache_cycles() / cycles)
        .collect()
}

/// The rates of each program alone, measured with each number of colors.
pub(crate) fn measure_color_curves(
    context: &ExperimentContext<'_>,
    programs: &[(ProgramInput, SoloWork)],
    colors: &[u32],
    scale: RunScale,
    seed: u64,
) -> Result<Vec<ColorCurves>> {
    let runs: Vec<((ProgramInput, SoloWork), u32)> = programs
        .iter()
        .flat_map(|&program| colors.iter().map(move |&colors| (program, colors)))
        .collect();
    let metrics_by_run = context.run_all(&runs, |&(((program, input), solo), colors)| {
        context.report_progress(&format!(
            "{program} alone with {colors} colors, seed {seed}"
        ));
        let workload = chip_workload(vec![thesis_job(program, input)], 2, scale, seed)?;
        let plan = fixed_plan_policy(&workload, &[format!("0-{}", colors - 1)])?;
        let rates = run_request::joint_run(&workload, &[solo.work], Some(&plan))?.rates[0];
        Ok([
            rates.misses_per_kilo_instr,
            1.0 / rates.instr_per_cycle,
            rates.data_stalls_per_kilo_instr,
        ])
    })?;

    Ok(metrics_by_run
        .chunks(colors.len())
        .map(|row| interpolate_curves(colors, row))
        .collect())
}

/// The values for every number of colors, interpolated linearly between the measured ones.
fn interpolate_curves(colors: &[u32], color_metrics: &[[f64; 3]]) -> ColorCurves {
    let value_at_colors = |color_count: u32, metric: usize| {
        let upper_index = colors
            .partition_point(|&measured| measured < color_count)
            .min(colors.len() - 1);
        let lower_index =
            upper_index.saturating_sub(usize::from(colors[upper_index] > color_count));
        let interpolated_share = f64::from(color_count.saturating_sub(colors[lower_index]))
            / f64::from((colors[upper_index] - colors[lower_index]).max(1));
        color_metrics[lower_index][metric]
            + interpolated_share.min(1.0)
                * (color_metrics[upper_index][metric] - color_metrics[lower_index][metric])
    };

    let metric_curve = |metric: usize| {
        (1..=COLORS)
            .map(|color_count| value_at_colors(color_count, metric))
            .collect::<Vec<f64>>()
    };
    let demand_curve = DemandCurve {
        misses_per_kilo_instr: metric_curve(0),
        cycles_per_instr: metric_curve(1),
    };
    ColorCurves {
        demand_curve,
        stalls_per_kilo_instr: metric_curve(2),
    }
}

/// Forecast for a pair from the curves of each program alone; speeds are relative to solo runs on the whole cache.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct PairForecast {
    pub shared_speeds: [f64; 2],
    /// Number of colors of the first program at the best split, and the speeds of both programs there.
    pub best_first_colors: u32,
    pub best_split_speeds: [f64; 2],
}

impl PairForecast {
    /// An operator's choice for weighted speed-up: colors of the first program; `None` to leave the
    /// cache shared, because dividing it is expected to gain less than 1 %. Sharing is the present
    /// state, so its value (the sum of speeds relative to running alone) is measured in a run of
    /// the pair and not forecast.
    pub fn choose_split(&self, weighted_speedup_shared: f64) -> Option<u32> {
        let best_split_speedup: f64 = self.best_split_speeds.iter().sum();
        (best_split_speedup / weighted_speedup_shared - 1.0 >= 0.01)
            .then_some(self.best_first_colors)
    }
}

/// Forecasts by the exact solver with the predictor; `None` if the predictor gives no forecast.
pub(super) fn forecast_split(
    workload: &Workload,
    demand_curves: [&DemandCurve; 2],
) -> Option<PairForecast> {
    let costs = demand_curves.map(speed_costs);
    let colors = colors_of_least_cost(costs.clone());
    let topology = workload.machine.topology();
    let cache = topology.last_level_caches().next()?;
    let (level, size_bytes) = (cache.level, cache.size_bytes?);
    let profile = |(program_index, demand_curve): (usize, &&DemandCurve)| {
        (
            TaskId(program_index as u32),
            demand_curve.to_profile(level, size_bytes),
        )
    };
    let profiles: Profiles = demand_curves.iter().enumerate().map(profile).collect();
    let predictor = miss_penalty_of_machine(&workload.machine);
    let shared_forecast = forecast_plan(
        &topology,
        &profiles,
        &predictor,
        &Plan::idle(WindowLength::Time { ns: 1 }),
    );
    let shared_speed = |index: u32| {
        Some(
            1.0 / (1.0
                + shared_forecast
                    .tasks
                    .get(&TaskId(index))?
                    .degradation?
                    .value),
        )
    };
    let split_speed = |side: usize| -costs[side][colors[side] as usize - 1];
    Some(PairForecast {
        shared_speeds: [shared_speed(0)?, shared_speed(1)?],
        best_first_colors: colors[0],
        best_split_speeds: [split_speed(0), split_speed(1)],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured_pair() -> MeasuredPair {
        MeasuredPair {
            pair: ("a", "b"),
            solo_rates: [1.0, 0.5],
            shared_rates: [0.8, 0.5],
            rates_by_split: vec![(4, [0.7, 0.5]), (12, [0.96, 0.49])],
        }
    }

    /// Do gains, the best split and the recovered share equal those of a pair computed manually?
    #[test]
    fn a_pairs_gains_equal_those_computed_manually() {
        let pair = measured_pair();
        assert_eq!(pair.best_split().0, 12);
        let gains = pair.relative_gains(&pair.best_split().1);
        assert!((gains[0] - 0.2).abs() < 1e-12 && (gains[1] + 0.02).abs() < 1e-12);
        let recovered = pair.recovered_shares();
        assert_eq!(recovered.len(), 1, "b was not slowed");
        assert!((recovered[0].1 - 0.2).abs() < 1e-12 && (recovered[0].2 - 0.8).abs() < 1e-12);
    }

    /// Does the chosen split give space to programs that it speeds up, and leave the cache shared if it would not help?
    #[test]
    fn space_is_given_to_programs_that_it_speeds_up() {
        let workload = chip_workload(
            Vec::new(),
            2,
            RunScale {
                scale: 1_000,
                warm_up_cycles: 0,
                with_l3: true,
            },
            1,
        )
        .unwrap();
        let flat = interpolate_curves(&[1, 16], &[[10.0, 2.0, 0.0]; 2]);
        let steep = interpolate_curves(
            &[1, 8, 16],
            &[[40.0, 6.0, 0.0], [2.0, 1.1, 0.0], [0.0, 1.0, 0.0]],
        );
        let choose_for = |a: &ColorCurves, b: &ColorCurves, shared: f64| {
            forecast_split(&workload, [&a.demand_curve, &b.demand_curve])
                .unwrap()
                .choose_split(shared)
        };
        assert_eq!(choose_for(&steep, &flat, 1.6), Some(15));
        assert_eq!(choose_for(&flat, &steep, 1.6), Some(1));
        assert_eq!(choose_for(&flat, &flat, 2.0), None);
        assert_eq!(
            choose_for(&steep, &flat, 1.99),
            None,
            "sharing was measured to be as good"
        );
    }

    /// Do lines between measured numbers of colors pass through the measured points?
    #[test]
    fn lines_pass_through_the_measured_points() {
        let alone = interpolate_curves(
            &[1, 4, 16],
            &[[8.0, 2.0, 90.0], [2.0, 1.0, 0.0], [2.0, 1.0, 0.0]],
        );
        assert_eq!(
            alone.demand_curve.misses_per_kilo_instr[..5],
            [8.0, 6.0, 4.0, 2.0, 2.0]
        );
        assert_eq!(
            (
                alone.demand_curve.units(),
                alone.demand_curve.whole_cache_cycles()
            ),
            (16, 1.0)
        );
        assert_eq!(alone.stalls_per_kilo_instr[..4], [90.0, 60.0, 30.0, 0.0]);
    }
}
