//! GOALS: goals other than throughput: a floor for one program, fairness for all, in colors and in ways (thesis ch. 7:
//! quality of service).
//!
//! One program beside a greedy one, both measured online and sized by the policy; every program is timed over the same
//! stretch of its work. With a floor, the first program may be at most 5 % slower than alone; the cost to the other
//! program is listed beside it.

use cachemate_core::{CacheLevel, Goal, MachineSpec, WayPartitions};
use cachemate_report::figure::{Axis, BarChart, BarGroup};

use super::RunScale;
use super::choices::sizing_policy;
use super::pairs::{ProgramPair, SoloWork, measure_pair_solos, pair_on_chip};
use crate::run_request;
use crate::seeded_runs::SeededRuns;
use crate::steered;
use crate::{ExperimentContext, Finding, Result, ResultFigure, greatest, mean};

/// Pairs whose first program has the floor.
const PAIRS: [ProgramPair; 3] = [("vortex", "art"), ("twolf", "mcf"), ("parser", "gap")];
const FLOOR_SLOWDOWN: f64 = 0.05;
/// The policy starts measuring at this cycle and has decided before the stretches begin.
const FIRST_DECISION_CYCLE: u64 = 1_000_000;
const TRACE_ENTRIES: u64 = 20_000;
const DECISION_CYCLES: u64 = 200_000;

/// The way in which the cache is managed.
#[derive(Clone, Copy, PartialEq, Debug)]
enum CacheMode {
    Shared,
    /// Sized by the policy for an objective, with the floor or without, in colors or in ways.
    Sized {
        objective: &'static str,
        has_floor: bool,
        uses_ways: bool,
    },
}

const CACHE_MODES: [(&str, CacheMode); 5] = [
    ("shared", CacheMode::Shared),
    (
        "weighted speed-up",
        CacheMode::Sized {
            objective: "weighted-speedup",
            has_floor: false,
            uses_ways: false,
        },
    ),
    (
        "fairness",
        CacheMode::Sized {
            objective: "fairness",
            has_floor: false,
            uses_ways: false,
        },
    ),
    (
        "floor",
        CacheMode::Sized {
            objective: "weighted-speedup",
            has_floor: true,
            uses_ways: false,
        },
    ),
    (
        "floor, in ways",
        CacheMode::Sized {
            objective: "weighted-speedup",
            has_floor: true,
            uses_ways: true,
        },
    ),
];

/// Indices of a pair and of a cache mode.
type PairAndMode = (usize, usize);

/// The slowdowns of both programs relative to running alone, in percent.
fn measure_slowdowns(
    pair: ProgramPair,
    solo_work: [SoloWork; 2],
    cache_mode: CacheMode,
    scale: RunScale,
    seed: u64,
) -> Result<[f64; 2]> {
    let mut workload = pair_on_chip(pair, scale, seed, 0)?;
    let config = match cache_mode {
        CacheMode::Shared => None,
        CacheMode::Sized {
            objective,
            has_floor: floor,
            uses_ways: ways,
        } => {
            if floor {
                workload.jobs[0].goal = Some(Goal {
                    max_slowdown: Some(FLOOR_SLOWDOWN),
                    ..Goal::default()
                });
            }

            if ways {
                divide_in_ways(&mut workload.machine);
            }
            let parameters = format!("objective = '{objective}'\nconfirms = false");
            Some(sizing_policy(
                &workload,
                TRACE_ENTRIES,
                FIRST_DECISION_CYCLE,
                DECISION_CYCLES,
                &parameters,
            ))
        }
    };

    let work = solo_work.map(|solo| solo.work);
    let rates = match config {
        None => run_request::joint_run(&workload, &work, None)?.rates,
        Some(config) => steered::run_together_under(&workload, &work, config)?.rates,
    };
    Ok([0, 1].map(|index| 100.0 * (solo_work[index].rate / rates[index].instr_per_cycle - 1.0)))
}

/// Gives the machine cache allocation by ways in the L2, instead of a kernel that colors pages.
fn divide_in_ways(machine: &mut MachineSpec) {
    machine.pages.colors = None;
    machine
        .caches
        .iter_mut()
        .filter(|cache| cache.level == CacheLevel::L2)
        .for_each(|cache| {
            cache.way_partitions = Some(WayPartitions {
                groups: 4,
                min_ways: 1,
                contiguous: true,
            });
        });
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let scale = RunScale {
        scale: context.pick(30_000, 15_000),
        warm_up_cycles: 12_000_000,
        with_l3: true,
    };
    let pairs = context.pick(&PAIRS[..1], &PAIRS);
    let solos = measure_pair_solos(context, pairs, scale)?;
    let cases: Vec<PairAndMode> = (0..pairs.len())
        .flat_map(|pair| (0..CACHE_MODES.len()).map(move |mode| (pair, mode)))
        .collect();
    let slowdowns = context.run_unstored_cases(&cases, |(pair_index, mode_index), seed| {
        let (pair, mode) = (pairs[pair_index], CACHE_MODES[mode_index].1);
        context.report_progress(&format!("{}+{}, {mode:?}, seed {seed}", pair.0, pair.1));
        measure_slowdowns(pair, *solos.result(pair_index, seed), mode, scale, seed)
    })?;
    Ok(vec![goals_finding(context, pairs, &slowdowns, scale)])
}

fn goals_finding(
    context: &ExperimentContext<'_>,
    pairs: &[ProgramPair],
    slowdowns: &SeededRuns<PairAndMode, [f64; 2]>,
    scale: RunScale,
) -> Finding {
    let has_floor = |mode: usize| {
        matches!(
            CACHE_MODES[mode].1,
            CacheMode::Sized {
                has_floor: true,
                ..
            }
        )
    };
    let per_seed = context.values_by_seed(|seed| {
        let runs = slowdowns
            .iter()
            .filter(|(((_, mode), own_seed), _)| *own_seed == seed && has_floor(*mode));
        greatest(runs.map(|(_, row)| row[0]))
    });

    let (mut points, mut groups, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    for (pair_index, pair) in pairs.iter().enumerate() {
        let series = [
            format!("{} (has the floor), % slower than alone", pair.0),
            format!("{} beside it", pair.1),
        ];
        let mean_of = |mode: usize, program: usize| {
            mean(slowdowns.values((pair_index, mode), |row| row[program]))
        };

        for (mode, (name, _)) in CACHE_MODES.iter().enumerate() {
            points.extend([0, 1].map(|nth| {
                slowdowns.point((pair_index, mode), &series[nth], *name, |row| row[nth])
            }));
            let bars = [0, 1].map(|program| mean_of(mode, program).into()).to_vec();
            groups.push(BarGroup {
                name: format!("{}+{}: {name}", pair.0, pair.1),
                bars,
            });

            if has_floor(mode) {
                costs.push(format!(
                    "{} {:+.1} points ({name})",
                    pair.1,
                    mean_of(mode, 1) - mean_of(0, 1)
                ));
            }
        }
    }

    let bars = BarChart {
        title: "Slower than alone: shared, and under what operators ask for".to_string(),
        y: Axis::linear("slower than alone, %"),
        series: vec!["first".to_string(), "second".to_string()],
        groups,
        references: vec![("floor".to_string(), 100.0 * FLOOR_SLOWDOWN)],
        ..BarChart::default()
    };

    Finding::declared("goals-floor", &per_seed)
    .with_points(points)
    .with_time_scale(scale.scale as f64)
    .with_note(format!(
        "Sized online from traces. What the floors cost those beside them, against sharing: {}. Logs hold fetches of code: vortex' data \
         hardly asks for space, its code does (alone: 19 % slower with 4 of 16 colors, 4 % with 8).",
        costs.join(", "),
    ))
    .with_figure(ResultFigure::bars("goals", &bars))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is the machine with ways a valid machine, and do its shares consist of ways?
    #[test]
    fn the_machine_with_ways_can_be_built() {
        let scale = RunScale {
            scale: 60_000,
            warm_up_cycles: 0,
            with_l3: true,
        };
        let mut workload = pair_on_chip(("vortex", "art"), scale, 1, 0).unwrap();
        divide_in_ways(&mut workload.machine);
        workload.machine.check().unwrap();
        let topology = workload.machine.topology();
        let machine = workload.with_length(0, 1_000).build_machine().unwrap();
        let capabilities = cachemate_core::Machine::capabilities(&machine);
        let last = topology.last_level_caches().next().unwrap().id;
        let is_last_level_ways = |(cache, partition): &(_, _)| {
            *cache == last && matches!(partition, cachemate_core::PartitionSupport::Ways { .. })
        };
        assert!(capabilities.partitions.iter().any(is_last_level_ways));
    }
}
