//! MULTI: four and eight programs on one cache, sized online, compared with sharing it and with the best sizes known
//! offline (an extension of thesis 5.7 to more than two programs).

use std::collections::BTreeMap;

use super::choices::{WINDOW_CYCLES, sizing_policy};
use super::pairs::{
    ColorCurves, ProgramInput, SoloWork, measure_color_curves, measure_solo, speed_costs,
};
use super::{COLORS, RunScale, chip_workload, colors_of_least_cost, fixed_plan_policy, thesis_job};
use crate::rates::speeds;
use crate::run_request;
use crate::steered;
use crate::work::{InstructionRange, WorkRun};
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, at_time_scale, greatest, least,
    list_or_none, mean,
};
use cachemate_core::{SplitMix64, Units};
use cachemate_report::figure::{Axis, Chart, ChartPoint, Mark, ReferenceLine, Series};
use cachemate_sim::metrics::weighted_speedup;

/// Mixes are drawn from these: the thesis's programs of chapter 4.
pub(crate) const PROGRAMS: [&str; 12] = [
    "mcf", "art", "vortex", "ammp", "applu", "twolf", "gzip", "vpr", "swim", "equake", "parser",
    "crafty",
];
/// From this cycle on the policy measures, decides and tries; it has to finish before the programs' work begins.
const FIRST_DECISION_CYCLE: u64 = 2_000_000;
/// Windows after the first decision, in which trials end before the programs' work begins.
const WINDOWS_BEFORE_WORK: u64 = 300;
/// Almost three times the lines of the L2; the thesis's ten times would take proportionally longer with eight programs.
const TRACE_ENTRIES: u64 = 40_000;

/// Weighted speed-ups for one mix.
struct SizedMix {
    programs: Vec<usize>,
    shared: f64,
    offline: f64,
    online: f64,
    online_shares: String,
}

impl SizedMix {
    fn gain_percent(&self) -> f64 {
        100.0 * (self.online / self.shared - 1.0)
    }
    /// The distance to the best known result: sizes from each program's solo curve, or sharing.
    fn percent_short_of_best(&self) -> f64 {
        100.0 * (1.0 - self.online / self.offline.max(self.shared))
    }
    fn name(&self) -> String {
        self.programs
            .iter()
            .map(|&index| PROGRAMS[index])
            .collect::<Vec<_>>()
            .join("+")
    }
}

/// Draws `count` of [`PROGRAMS`] by their positions, none twice.
pub(crate) fn draw_programs(generator: &mut SplitMix64, count: usize) -> Vec<usize> {
    let mut remaining: Vec<usize> = (0..PROGRAMS.len()).collect();
    let mut drawn_programs: Vec<usize> = (0..count)
        .map(|_| remaining.swap_remove(generator.draw_below(remaining.len() as u64) as usize))
        .collect();
    drawn_programs.sort_unstable();
    drawn_programs
}

/// The best partition of all colors for weighted speed-up, as contiguous index lists.
fn best_color_shares(solo_curves: &[&ColorCurves]) -> Vec<String> {
    let costs = solo_curves
        .iter()
        .map(|curves| speed_costs(&curves.demand_curve));
    let mut next_color = 0;
    let next_share = |colors: u32| {
        next_color += colors;
        format!("{}-{}", next_color - colors, next_color - 1)
    };
    colors_of_least_cost(costs)
        .into_iter()
        .map(next_share)
        .collect()
}

fn measure_mix(
    programs: &[usize],
    solo_by_program: &BTreeMap<usize, (SoloWork, ColorCurves)>,
    scale: RunScale,
    seed: u64,
) -> Result<SizedMix> {
    let jobs = programs
        .iter()
        .map(|&index| thesis_job(PROGRAMS[index], 1))
        .collect();
    let workload = chip_workload(jobs, programs.len() as u32, scale, seed)?;
    let members: Vec<&(SoloWork, ColorCurves)> = programs
        .iter()
        .map(|index| &solo_by_program[index])
        .collect();
    let solo_speeds: Vec<f64> = members.iter().map(|(solo, _)| solo.rate).collect();
    let work_ranges: Vec<InstructionRange> = members.iter().map(|(solo, _)| solo.work).collect();
    let curves: Vec<&ColorCurves> = members.iter().map(|(_, alone)| alone).collect();
    let run_speedup = |worked: &WorkRun| {
        weighted_speedup(&speeds(&worked.rates), &solo_speeds).unwrap_or(f64::NAN)
    };

    let shared_run = run_request::joint_run(&workload, &work_ranges, None)?;
    let offline_run = run_request::joint_run(
        &workload,
        &work_ranges,
        Some(&fixed_plan_policy(&workload, &best_color_shares(&curves))?),
    )?;
    let config = sizing_policy(
        &workload,
        TRACE_ENTRIES,
        FIRST_DECISION_CYCLE,
        WINDOW_CYCLES,
        "",
    );
    let online_run = steered::run_together_under(&workload, &work_ranges, config)?;
    let shares = online_run
        .decisions
        .last()
        .into_iter()
        .flat_map(|decision| &decision.plan.shares)
        .map(|share| match &share.units {
            Units::Colors { allowed, .. } => {
                format!("{} for {}", allowed.count(), share.members.len())
            }
            Units::Ways { mask } => format!("{} ways", mask.count()),
        });
    Ok(SizedMix {
        programs: programs.to_vec(),
        shared: run_speedup(&shared_run),
        offline: run_speedup(&offline_run),
        online: run_speedup(&online_run),
        online_shares: shares.collect::<Vec<_>>().join(", "),
    })
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    // The work of a full run is as long as the programs' phases. It begins when trials are over: beside an L3, one ends
    // after up to 250 windows (CP-2), and before that, a plan that is only on trial would be timed as if it was chosen.
    let warm_up_cycles = if context.sample {
        24_000_000
    } else {
        FIRST_DECISION_CYCLE + WINDOWS_BEFORE_WORK * WINDOW_CYCLES
    };
    let scale = RunScale {
        scale: context.pick(30_000, 5_000),
        warm_up_cycles,
        with_l3: true,
    };
    let colors: Vec<u32> = context.pick_by_length(
        vec![1, 4, COLORS],
        vec![1, 3, 6, 12, COLORS],
        (1..=COLORS).collect(),
    );
    // Mixes of four and of eight. A full run has seventeen per seed, so that three seeds make fifty; a quick run has
    // one of four per seed, and one of eight for every fourth seed.
    let seed_count = context.seeds.len();
    let mixes_by_size = context.pick(
        [(4, seed_count), (8, seed_count / 4)],
        [(4, 11 * seed_count), (8, 6 * seed_count)],
    );
    let mut mixes: Vec<(u64, Vec<usize>)> = Vec::new();
    for (count, mix_count) in mixes_by_size {
        for mix_index in 0..mix_count {
            let (seed, nth_of_seed) = (
                context.seeds[mix_index % seed_count],
                mix_index / seed_count,
            );
            let mut generator = SplitMix64::new(
                seed.wrapping_mul(1_000_003) + (count * 1_000 + nth_of_seed) as u64,
            );
            mixes.push((seed, draw_programs(&mut generator, count)));
        }
    }
    let needed_programs: Vec<usize> = (0..PROGRAMS.len())
        .filter(|index| mixes.iter().any(|(_, programs)| programs.contains(index)))
        .collect();
    let programs: Vec<ProgramInput> = needed_programs
        .iter()
        .map(|&index| (PROGRAMS[index], 1))
        .collect();
    let seed = context.seeds[0];
    let solos = context.run_all(&programs, |&program| {
        measure_solo(context, program, scale, seed)
    })?;
    let solo_inputs: Vec<(ProgramInput, SoloWork)> = programs
        .iter()
        .copied()
        .zip(solos.iter().copied())
        .collect();
    let curves = measure_color_curves(context, &solo_inputs, &colors, scale, seed)?;
    let solo_by_program: BTreeMap<usize, (SoloWork, ColorCurves)> = needed_programs
        .into_iter()
        .zip(solos.into_iter().zip(curves))
        .collect();
    let sized_mixes = context.run_all(&mixes, |(seed, programs)| {
        context.report_progress(&format!("{} programs, seed {}", programs.len(), *seed));
        measure_mix(programs, &solo_by_program, scale, *seed)
    })?;
    Ok(at_time_scale(
        scale.scale as f64,
        mix_findings(context, &mixes, &sized_mixes),
    ))
}

fn mix_findings(
    context: &ExperimentContext<'_>,
    mixes: &[(u64, Vec<usize>)],
    sized_mixes: &[SizedMix],
) -> Vec<Finding> {
    let per_seed = |metric: &dyn Fn(&[&SizedMix]) -> f64| -> Vec<(u64, f64)> {
        let seeds = context.seeds.iter().map(|&seed| {
            let seed_mixes: Vec<&SizedMix> = mixes
                .iter()
                .zip(sized_mixes)
                .filter(|((at, _), _)| *at == seed)
                .map(|(_, mix)| mix)
                .collect();
            (seed, seed_mixes)
        });
        seeds
            .filter(|(_, seed_mixes)| !seed_mixes.is_empty())
            .map(|(seed, seed_mixes)| (seed, metric(&seed_mixes)))
            .collect()
    };

    let mean_over = |mixes: &[&SizedMix], metric: fn(&SizedMix) -> f64| {
        mean(mixes.iter().map(|mix| metric(mix)))
    };
    let worst_gain = least(sized_mixes.iter().map(SizedMix::gain_percent));
    let worst_shortfall = greatest(sized_mixes.iter().map(SizedMix::percent_short_of_best));
    let losing_mixes = sized_mixes
        .iter()
        .filter(|mix| mix.gain_percent() < -1.0)
        .map(|mix| format!("{} ({:+.1} %)", mix.name(), mix.gain_percent()));

    let points = sized_mixes.iter().flat_map(|mix| {
        let gain_percent = |value: f64| [100.0 * (value / mix.shared - 1.0)];
        [
            DataPoint::from_values(
                "online",
                format!("{} [{}]", mix.name(), mix.online_shares),
                gain_percent(mix.online),
            ),
            DataPoint::from_values("offline", mix.name(), gain_percent(mix.offline)),
        ]
    });
    let points: Vec<DataPoint> = points.collect();

    let note = format!(
        "{} mixes of four and eight from twelve programs, one chip with as many cores, objective weighted speed-up, L3 on. \
         Best = the better of sharing and of the exact solver's sizes from curves of each program alone, as measured. Worst \
         gain {worst_gain:+.1} %, farthest from the best {worst_shortfall:.1} %. Worse than -1 %: {}.",
        sized_mixes.len(),
        list_or_none(losing_mixes),
    );
    vec![
        Finding::declared(
            "multi-short-of-best",
            &per_seed(&|seed_mixes| mean_over(seed_mixes, SizedMix::percent_short_of_best)),
        )
        .with_points(points)
        .with_note(note)
        .with_figure(draw_mixes_figure(sized_mixes)),
        Finding::declared(
            "multi-mean-gain",
            &per_seed(&|seed_mixes| mean_over(seed_mixes, SizedMix::gain_percent)),
        ),
        // The worst of all mixes, instead of the mean of each seed's worst.
        Finding::declared("multi-worst-gain", &[(context.seeds[0], worst_gain)]),
    ]
}

fn draw_mixes_figure(sized_mixes: &[SizedMix]) -> ResultFigure {
    let mix_series = |count: usize| {
        let mixes_of_size = sized_mixes.iter().filter(|mix| mix.programs.len() == count);
        let point = |mix: &SizedMix| ChartPoint {
            title: Some(mix.name()),
            ..ChartPoint::new(100.0 * (mix.offline / mix.shared - 1.0), mix.gain_percent())
        };
        let name = format!("{count} programs");
        Series {
            name,
            points: mixes_of_size.map(point).collect(),
            mark: Mark::Points,
            ..Series::default()
        }
    };

    let chart = Chart {
        title: "Weighted speed-up over sharing: sized online against sized offline".to_string(),
        x: Axis::linear("gain of the sizes known offline, %"),
        y: Axis::linear("gain of the sizes found online, %"),
        series: vec![mix_series(4), mix_series(8)],
        references: vec![ReferenceLine::Y {
            label: "shared".to_string(),
            level: 0.0,
        }],
        ..Chart::default()
    };
    ResultFigure::chart("multi-mixes", &chart)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are mixes drawn without duplicates, and equal for equal seeds?
    #[test]
    fn mixes_are_drawn_without_copies() {
        for count in [4, 8] {
            let mix = draw_programs(&mut SplitMix64::new(7), count);
            assert_eq!(mix, draw_programs(&mut SplitMix64::new(7), count));
            assert!(mix.windows(2).all(|pair| pair[0] < pair[1]) && mix.len() == count);
        }
    }

    /// Is a mix compared with the better of sharing and the best sizes known offline?
    #[test]
    fn a_mix_is_compared_with_the_better_of_sharing_and_best_sizes() {
        let sample_mix = |shared, offline, online| SizedMix {
            programs: vec![0],
            shared,
            offline,
            online,
            online_shares: String::new(),
        };
        assert!((sample_mix(2.0, 2.5, 2.0).percent_short_of_best() - 20.0).abs() < 1e-9);
        assert_eq!(sample_mix(2.0, 1.5, 2.0).percent_short_of_best(), 0.0);
        assert!((sample_mix(2.0, 1.5, 2.2).gain_percent() - 10.0).abs() < 1e-9);
    }
}
