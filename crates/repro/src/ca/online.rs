//! CA-6, CA-7: the policies online, against all possible schedules and against the default
//! scheduler.
//!
//! A policy's gain over the default scheduler depends on how bad the default's placement happened
//! to be, so one run of each says little. The default scheduler places by order of arrival and,
//! with one CPU-bound program per core, never moves a program. So only the order of arrival varies
//! from run to run (CA 2.1: "thread spawning order"); it is drawn from the seed.
//!
//! For example, four programs on two caches of two cores have three schedules, all of which are run
//! for CA-6. The best of them is therefore a measurement, and a policy that gains 9 % where the
//! best gains 10 has 90 % of what placement can give.

use std::collections::BTreeMap;

use cachemate_core::{CpuId, PipelineConfig, ProfilerConfig, SplitMix64, WindowLength};
use cachemate_report::figure::{Axis, BarChart, BarGroup};
use cachemate_sim::machine::SimOptions;
use cachemate_sim::results::TaskResults;

use super::{SECOND_SCALE, time_scale};
use crate::corun::{CoRunBench, CoRunMatrix, cpus_by_cache};
use crate::run_request;
use crate::seeded_runs::SeededRuns;
use crate::setup::{Workload, WorkloadJob, failed};
use crate::solo;
use crate::statistics::percent_of_gain;
use crate::steered;
use crate::work::{self, WorkRun};
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, at_time_scale, bar_groups,
    greatest, least, mean,
};

/// CA Table 2.
const PAPER_WORKLOADS: [[&str; 4]; 8] = [
    ["soplex", "sphinx", "gamess", "namd"],
    ["soplex", "mcf-2006", "gamess", "gobmk"],
    ["mcf-2006", "libquantum", "povray", "gamess"],
    ["mcf-2006", "omnetpp", "h264", "namd"],
    ["milc", "libquantum", "povray", "perl"],
    ["sphinx", "gcc", "namd", "gamess"],
    ["lbm", "milc", "sphinx", "gobmk"],
    ["lbm", "milc", "mcf-2006", "namd"],
];

/// Minimum time between decisions (CA 4.2): 10^9 cycles.
const WINDOW_CYCLES: u64 = 1_000_000_000;
/// Minimum number of instructions in a counter reading, before scaling. It is low enough that even the program with the
/// most misses yields a reading in every window of its slowest phase. With 100 million, mcf-2006 stayed unknown for
/// eight windows and counted as the mean.
const MIN_READING_INSTRUCTIONS: u64 = 5_000_000;
/// The paper's "only two chips out of four" (CA 5.1), which does not say which two. One in each socket is an inference
/// from 2.1.1: the mutual slowdowns of pairs add up to that of a schedule. On one bus they could not, because both
/// pairs of every schedule wait for the same memory.
const FOUR_CORE_MACHINE: &str = "xeon-x5365?cores_per_package=2";
/// Cycles to refill a cache after the first window, in which a policy moves programs.
const REFILL_CYCLES: u64 = 25_000_000;

/// The policy or oracle that chooses the placement.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum PlacementSource {
    Default,
    Di,
    /// DI with the paper's rates, which are those of the programs alone on the whole cache.
    DiWhole,
    Dio,
    /// DIO with lines read from memory as the rate, prefetched lines included.
    DioReads,
    /// The paper's optimum: the placement with the smallest sum of measured pairwise slowdowns.
    Optimal,
}

impl PlacementSource {
    pub(super) fn name(self) -> &'static str {
        match self {
            PlacementSource::Default => "default",
            PlacementSource::Di | PlacementSource::DiWhole => "di",
            PlacementSource::Dio | PlacementSource::DioReads => "dio",
            PlacementSource::Optimal => "best-by-matrix",
        }
    }
}

/// Slowdown of every job, in the order of the jobs.
pub(super) struct Slowdowns {
    pub(super) slowdowns_by_job: Vec<f64>,
    /// Number of moves of tasks to another CPU since the start of the run.
    move_count: f64,
    /// The programs that ran on the same cache for most of the time, as text.
    co_scheduled_programs: String,
}

/// A machine with the lengths of its runs.
pub(super) struct Testbed {
    bench: CoRunBench,
    /// Number of data accesses in the programs' solo profiles.
    profile_accesses: u64,
}

impl Testbed {
    pub(super) fn load(context: &ExperimentContext<'_>, machine: &str, scale: u64) -> Result<Self> {
        let (refill_cycles, measured_cycles) = context.pick_by_length(
            (2_000_000, 1_000_000),
            (10_000_000, 5_000_000),
            (REFILL_CYCLES, 25_000_000),
        );
        let mut bench = CoRunBench::load(
            machine,
            1,
            WINDOW_CYCLES / scale + refill_cycles,
            measured_cycles,
        )?;
        bench.options.scale = scale;
        Ok(Testbed {
            bench,
            profile_accesses: context.pick(2_000_000, 6_000_000),
        })
    }

    /// The cycles per instruction of every job relative to running alone, in the jobs' order. Where
    /// memory has several nodes, the programs restart on the caches that the policy chose, because
    /// the paper's experiment lasts three executions of the longest program (CA 5.1), and only a
    /// restarted program allocates its memory where it was bound.
    pub(super) fn measure_slowdowns(
        &self,
        source: PlacementSource,
        jobs: &[WorkloadJob],
        matrix: Option<&[Vec<f64>]>,
        seed: u64,
    ) -> Result<Slowdowns> {
        let topology = self.bench.machine.topology();
        let caches = cpus_by_cache(&topology)?;
        let mut order: Vec<usize> = (0..jobs.len()).collect();
        let mut work_run = self.run(source, jobs, matrix, seed)?;
        let has_one_node = topology
            .cpus
            .iter()
            .all(|cpu| cpu.memory_node == topology.cpus[0].memory_node);

        if source != PlacementSource::Default && !has_one_node {
            let default_run = self.run(PlacementSource::Default, jobs, None, seed)?;
            let main_caches = |run: &WorkRun| -> Vec<Option<usize>> {
                run.results
                    .tasks
                    .iter()
                    .map(|task| main_cache(task, &caches))
                    .collect()
            };
            order = restart_order(&main_caches(&default_run), &main_caches(&work_run));
            let ordered_matrix: Option<Vec<Vec<f64>>> = matrix.map(|rows| {
                order
                    .iter()
                    .map(|&i| order.iter().map(|&j| rows[i][j]).collect())
                    .collect()
            });
            work_run = self.run(
                source,
                &reorder(jobs, &order),
                ordered_matrix.as_deref(),
                seed,
            )?;
        }

        let ordered_jobs = reorder(jobs, &order);
        let speeds = work_run.rates.iter().map(|rates| rates.instr_per_cycle);
        let mut slowdowns_by_job = vec![0.0; jobs.len()];
        for (slowdown, &job) in self
            .slowdowns_of_speeds(&ordered_jobs, speeds)?
            .into_iter()
            .zip(&order)
        {
            slowdowns_by_job[job] = slowdown;
        }

        Ok(Slowdowns {
            slowdowns_by_job,
            move_count: work_run
                .results
                .tasks
                .iter()
                .map(|task| task.migrations)
                .sum::<u64>() as f64,
            co_scheduled_programs: describe_co_runners(
                &ordered_jobs,
                &caches,
                &work_run.results.tasks,
            ),
        })
    }

    /// Runs the jobs, which arrive in this order, over the work that each does alone.
    fn run(
        &self,
        source: PlacementSource,
        jobs: &[WorkloadJob],
        matrix: Option<&[Vec<f64>]>,
        seed: u64,
    ) -> Result<WorkRun> {
        let options = SimOptions {
            seed,
            ..self.bench.options.clone()
        };
        let workload = self.bench.build_workload(options, jobs.to_vec());
        let policy_config = match source {
            PlacementSource::Default => None,
            _ => Some(self.policy_config(source, &workload, matrix)?),
        };

        let work_ranges = self.bench.solo_work(jobs)?;
        let work_run = match policy_config {
            None => run_request::joint_run(&workload, &work_ranges, None)?,
            Some(config) => steered::run_together_under(&workload, &work_ranges, config)?,
        };
        if let Some((job, _)) = jobs
            .iter()
            .zip(&work_run.rates)
            .find(|(_, rates)| !rates.finished)
        {
            let message = format!(
                "under '{}' it did not finish its work in {} times the time",
                source.name(),
                work::MAX_SOLO_TIME_MULTIPLE
            );
            return Err(failed(&job.name)(message));
        }
        Ok(work_run)
    }

    fn slowdowns_of_speeds(
        &self,
        jobs: &[WorkloadJob],
        co_run_speeds: impl Iterator<Item = f64>,
    ) -> Result<Vec<f64>> {
        let slowdown = |(job, speed): (&WorkloadJob, f64)| {
            Ok(self.bench.solo_rates(job)?.instr_per_cycle / speed)
        };
        jobs.iter().zip(co_run_speeds).map(slowdown).collect()
    }

    fn policy_config(
        &self,
        source: PlacementSource,
        workload: &Workload,
        matrix: Option<&[Vec<f64>]>,
    ) -> Result<PipelineConfig> {
        let last_level = workload
            .machine
            .last_level_cache()
            .ok_or_else(|| failed("machine")("no cache to share"))?
            .level;

        let profilers = match source {
            PlacementSource::Di | PlacementSource::DiWhole => {
                let profile_of_job = |job: &WorkloadJob| {
                    solo::profile_job(job, &workload.machine, self.profile_accesses)
                };
                let profiles = workload
                    .jobs
                    .iter()
                    .map(profile_of_job)
                    .collect::<Result<_, _>>()?;
                vec![ProfilerConfig::Oracle { profiles }]
            }
            PlacementSource::Dio | PlacementSource::DioReads => {
                let min_reading_instr = MIN_READING_INSTRUCTIONS / workload.options.scale;
                vec![ProfilerConfig::Counters {
                    level: last_level,
                    min_instructions: min_reading_instr as f64,
                }]
            }
            _ => Vec::new(),
        };

        let parameters = match (source, matrix) {
            (PlacementSource::DiWhole, _) => "recorded_on = \"whole\"".to_string(),
            (PlacementSource::DioReads, _) => "counted = \"memory-reads\"".to_string(),
            (_, Some(matrix)) => format!("slowdowns = {matrix:?}"),
            _ => String::new(),
        };
        let first_window = WindowLength::Cycles {
            cycles: WINDOW_CYCLES,
        };
        Ok(workload.pipeline(source.name(), &parameters, profilers, first_window))
    }
}

/// The jobs' numbers in an order of arrival in which the default scheduler puts each job on the
/// cache that a policy chose. `default_caches` are those of the first, second, ... arrival.
fn restart_order(default_caches: &[Option<usize>], chosen_caches: &[Option<usize>]) -> Vec<usize> {
    let mut waiting_jobs: Vec<usize> = (0..chosen_caches.len()).collect();
    let next_job_on = |cache: &Option<usize>| {
        let position = waiting_jobs
            .iter()
            .position(|&job| chosen_caches[job] == *cache);
        // A job that the policy moved in the middle can leave a cache one job short.
        waiting_jobs.remove(position.unwrap_or(0))
    };
    default_caches.iter().map(next_job_on).collect()
}

fn reorder(jobs: &[WorkloadJob], order: &[usize]) -> Vec<WorkloadJob> {
    order.iter().map(|&job| jobs[job].clone()).collect()
}

/// The number of the cache on which a task ran longest.
fn main_cache(task: &TaskResults, caches: &[Vec<CpuId>]) -> Option<usize> {
    let cycles_on = |cpus: &[CpuId]| -> u64 {
        task.on_cpu_cycles
            .iter()
            .filter(|(cpu, _)| cpus.contains(cpu))
            .map(|(_, cycles)| cycles)
            .sum()
    };
    (0..caches.len()).max_by_key(|&index| cycles_on(&caches[index]))
}

/// Describes which programs ran longest on the same cache.
fn describe_co_runners(
    jobs: &[WorkloadJob],
    caches: &[Vec<CpuId>],
    tasks: &[TaskResults],
) -> String {
    let programs_on_cache = |cache_index: usize| {
        let jobs_on_cache = jobs
            .iter()
            .zip(tasks)
            .filter(|(_, task)| main_cache(task, caches) == Some(cache_index));
        jobs_on_cache
            .map(|(job, _)| job.kernel.as_str())
            .collect::<Vec<&str>>()
            .join(" + ")
    };
    (0..caches.len())
        .map(programs_on_cache)
        .collect::<Vec<String>>()
        .join(", ")
}

/// The programs of a workload, `copies` of each, with different inputs.
pub(super) fn workload_jobs(workload: usize, copies: u64, input_seed: u64) -> Vec<WorkloadJob> {
    let copy_of = |copy: u64, name: &&str| WorkloadJob {
        name: format!("{name}-{copy}"),
        ..WorkloadJob::new(name, input_seed * 100 + copy)
    };
    (0..copies)
        .flat_map(|nth| {
            PAPER_WORKLOADS[workload]
                .iter()
                .map(move |name| copy_of(nth, name))
        })
        .collect()
}

pub(super) fn shuffle_arrivals(jobs: &[WorkloadJob], seed: u64) -> Vec<WorkloadJob> {
    let mut jobs = jobs.to_vec();
    SplitMix64::new(seed).shuffle(&mut jobs);
    jobs
}

/// The pairwise slowdowns of the jobs, in the order of the jobs.
fn pair_costs_by_job(matrix: &CoRunMatrix, workload: usize, jobs: &[WorkloadJob]) -> Vec<Vec<f64>> {
    let position_in_workload = |job: &WorkloadJob| {
        PAPER_WORKLOADS[workload]
            .iter()
            .position(|name| *name == job.kernel)
            .unwrap_or(0)
    };
    let workload_positions = jobs
        .iter()
        .map(position_in_workload)
        .collect::<Vec<usize>>();
    matrix.pair_costs(&workload_positions).cost
}

pub(super) fn percent_above(time: f64, base: f64) -> f64 {
    100.0 * (time / base - 1.0)
}

pub(super) fn workload_name(workload: usize) -> String {
    format!("workload {}", workload + 1)
}

/// The figures of a workload: mean run times in percent above the best schedule's, then moves.
const FIGURES: [&str; 8] = [
    "di",
    "dio",
    "random",
    "worst",
    "di by rates on a share of the cache",
    "dio by memory reads",
    "moves by di",
    "moves by dio",
];
/// Number of these figures that are drawn.
const DRAWN_FIGURE_COUNT: usize = 6;
/// The figures that have a target: the policies as the paper has them, and by other rates.
const JUDGED_FIGURES: [(&str, usize); 4] = [
    ("DI", 0),
    ("DI by rates on a share of the cache", 4),
    ("DIO", 1),
    ("DIO by what is read from memory", 5),
];

/// [`FIGURES`] by workload of [`PAPER_WORKLOADS`] and seed.
type FourCoreRuns = SeededRuns<usize, WorkloadFigures>;

/// The findings of CA-6: four programs on two caches. The optimum is the best of the three
/// schedules, all of which are run.
pub(super) fn four_core_results(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    // A quick run of all eight takes three minutes, more than half of the budget of all quick runs together.
    let workloads: Vec<usize> = context.pick_by_length(vec![0], vec![0, 1], (0..8).collect());
    context.report_progress(&format!(
        "{} workloads, every schedule and two policies",
        workloads.len()
    ));
    let runs = measure_at_scale(context, time_scale(context), &workloads)?;
    let mut points = figure_points(&runs, &workloads, "");
    if !context.quick {
        context.report_progress(&format!(
            "the same at a time scale of 1/{SECOND_SCALE}, first seed"
        ));
        let first_seed = ExperimentContext {
            seeds: vec![context.seeds[0]],
            ..*context
        };
        let rerun = measure_at_scale(&first_seed, SECOND_SCALE, &workloads)?;
        let suffix = format!(", scale 1/{SECOND_SCALE}");
        points.extend(figure_points(&rerun, &workloads, &suffix));
    }

    Ok(at_time_scale(
        time_scale(context) as f64,
        four_core_findings(&runs, points),
    ))
}

fn measure_at_scale(
    context: &ExperimentContext<'_>,
    scale: u64,
    workloads: &[usize],
) -> Result<FourCoreRuns> {
    let testbed = Testbed::load(context, FOUR_CORE_MACHINE, scale)?;
    context.run_unstored_cases(workloads, |workload, seed| {
        measure_workload(&testbed, workload, seed)
    })
}

fn figure_points(runs: &FourCoreRuns, workloads: &[usize], suffix: &str) -> Vec<DataPoint> {
    let point = |workload: usize, figure: usize| {
        let series = format!("{}{suffix}", FIGURES[figure]);
        runs.point(workload, series, workload_name(workload), |run| {
            run.values[figure]
        })
    };
    workloads
        .iter()
        .flat_map(|&workload| (0..FIGURES.len()).map(move |figure| point(workload, figure)))
        .collect()
}

fn four_core_findings(runs: &FourCoreRuns, points: Vec<DataPoint>) -> Vec<Finding> {
    let drawn_figures = &FIGURES[..DRAWN_FIGURE_COUNT];
    let bars = BarChart {
        title: "Mean run time above the best schedule's, four cores".into(),
        y: Axis::linear("percent"),
        series: drawn_figures.iter().map(|name| name.to_string()).collect(),
        groups: bar_groups(&points, drawn_figures),
        ..BarChart::default()
    };
    let missed_runs = runs
        .iter()
        .filter(|(_, run)| run.values[0] > 2.0 || run.values[1] > 2.0);
    let missed_texts: Vec<String> = missed_runs
        .map(|((workload, _), run)| format!("{}: {}", workload_name(*workload), run.summary))
        .collect();
    let mut note = "Two chips out of four, one in each socket: an inference, since the paper does not say which. \
                Optimal = best of the three schedules, each run with its programs fixed; random = their mean. All runs time the \
                same instructions of each program, after the policy's first window and a refill of the caches. \
                Programs arrive in an order drawn from the seed; the policies begin with what the default scheduler made \
                of it. Moves = tasks that went to another CPU; a swap is two."
        .to_string();
    if !missed_texts.is_empty() {
        note += &format!(" More than 2 % above: {}.", missed_texts.join("; "));
    }

    let mut findings = JUDGED_FIGURES.map(|(policy, figure)| {
        let worst_workload = runs.greatest_per_seed(|run| run.values[figure]);
        Finding::declared_for("ca-6-above-optimal", &[policy], &worst_workload).require_every_seed()
    });
    findings[0].points = points;
    findings[0].note = note;
    findings[0].figures = vec![ResultFigure::bars("ca-6-four-cores", &bars)];
    findings.into()
}

struct WorkloadFigures {
    /// In the order of [`FIGURES`].
    values: [f64; 8],
    /// Description of the best pairs, and of the pairs that the policies form.
    summary: String,
}

fn measure_workload(testbed: &Testbed, workload: usize, seed: u64) -> Result<WorkloadFigures> {
    let jobs = shuffle_arrivals(&workload_jobs(workload, 1, seed), seed);
    let cpus: Vec<CpuId> = cpus_by_cache(&testbed.bench.machine.topology())?
        .into_iter()
        .flatten()
        .collect();
    let options = SimOptions {
        seed,
        ..testbed.bench.options.clone()
    };

    let mut times_and_pairs: Vec<(f64, String)> = Vec::new();
    for partner in 1..4 {
        let remaining_jobs: Vec<usize> = (1..4).filter(|&index| index != partner).collect();
        let job_order = [0, partner, remaining_jobs[0], remaining_jobs[1]];
        let pinned_jobs: Vec<(WorkloadJob, CpuId)> = job_order
            .iter()
            .zip(&cpus)
            .map(|(&job, &cpu)| (jobs[job].clone(), cpu))
            .collect();
        let ordered_jobs: Vec<WorkloadJob> =
            pinned_jobs.iter().map(|(job, _)| job.clone()).collect();
        let speeds = testbed
            .bench
            .run_with_options(options.clone(), &pinned_jobs)?;

        let names: Vec<&str> = ordered_jobs.iter().map(|job| job.kernel.as_str()).collect();
        let pairs_text = format!("{} + {}, {} + {}", names[0], names[1], names[2], names[3]);
        let times = testbed.slowdowns_of_speeds(
            &ordered_jobs,
            speeds.iter().map(|rates| rates.instr_per_cycle),
        )?;
        times_and_pairs.push((mean(&times), pairs_text));
    }

    times_and_pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let best_pairs = &times_and_pairs[0].1;
    let schedule_times: Vec<f64> = times_and_pairs.iter().map(|(time, _)| *time).collect();
    let best_time = schedule_times[0];
    let excess_of =
        |slowdowns: &Slowdowns| percent_above(mean(&slowdowns.slowdowns_by_job), best_time);
    let slowdowns_under =
        |source: PlacementSource| testbed.measure_slowdowns(source, &jobs, None, seed);
    let (di, di_whole, dio, dio_reads) = (
        slowdowns_under(PlacementSource::Di)?,
        slowdowns_under(PlacementSource::DiWhole)?,
        slowdowns_under(PlacementSource::Dio)?,
        slowdowns_under(PlacementSource::DioReads)?,
    );
    let describe_scheme = |name: &str, slowdowns: &Slowdowns| {
        format!(
            "{name} {:.1} % above with {} after {} moves",
            excess_of(slowdowns),
            slowdowns.co_scheduled_programs,
            slowdowns.move_count
        )
    };
    let second_best_excess = percent_above(schedule_times[1], best_time);
    Ok(WorkloadFigures {
        summary: format!(
            "seed {seed}, best {best_pairs} (the next {second_best_excess:.1} % above), {}, {}, {}",
            describe_scheme("DI", &di),
            describe_scheme("DIO", &dio),
            describe_scheme("DIO by reads", &dio_reads)
        ),
        values: [
            excess_of(&di_whole),
            excess_of(&dio),
            percent_above(mean(&schedule_times), best_time),
            percent_above(schedule_times[2], best_time),
            excess_of(&di),
            excess_of(&dio_reads),
            di.move_count,
            dio.move_count,
        ],
    })
}

/// Number of orders of arrival of CA-8's one workload in a quick run. By its order, the default scheduler puts two of
/// four intensive programs on each bus in 36 of 70 cases, where little is to be gained; three orders are all of this
/// kind in one run of seven.
pub(super) const QUICK_ORDERS: u64 = 12;
/// Number of orders of arrival of each workload of CA-7 in a quick run: sixteen draws per machine.
const QUICK_ORDERS_PER_WORKLOAD: u64 = 2;
pub(super) const EIGHT_CORES: [&str; 2] = ["xeon-x5365", "opteron-2350"];

/// The policies and the oracle of CA-7, which are compared with the default scheduler.
const COMPARED_SOURCES: [PlacementSource; 3] = [
    PlacementSource::DiWhole,
    PlacementSource::Dio,
    PlacementSource::Optimal,
];

/// Mean slowdowns by machine of [`EIGHT_CORES`], workload and placement.
type EightCoreRuns = SeededRuns<(usize, usize, PlacementSource), f64>;

/// The findings of CA-7: each workload doubled, on both machines (CA 5.1 and Figures 8 and 9: "for
/// the eight-core experiments we created eight-thread workloads by doubling the corresponding
/// four-thread workloads").
pub(super) fn eight_core_results(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let machines = &EIGHT_CORES[..context.pick_by_length(1, 2, 2)];
    let workloads: Vec<usize> = context.pick_by_length(vec![1], (0..8).collect(), (0..8).collect());
    let orders = ExperimentContext {
        seeds: arrival_seeds(
            context,
            QUICK_ORDERS_PER_WORKLOAD,
            context.seeds.len() as u64,
        ),
        ..*context
    };
    let mut benches = Vec::new();
    let mut cases = Vec::new();
    for (at, machine) in machines.iter().enumerate() {
        let testbed = Testbed::load(context, machine, time_scale(context))?;
        let mut matrices = BTreeMap::new();
        for &workload in &workloads {
            context.report_progress(&format!("{machine}, {}", workload_name(workload)));
            // Both copies of a program share one row; running beside the other copy costs the same as beside itself.
            let jobs = workload_jobs(workload, 1, 1);
            let matrix = CoRunMatrix::measure(context, &testbed.bench, &jobs, true)?;
            matrices.insert(workload, matrix);
            cases.push((at, workload, PlacementSource::Default));
            cases.extend(COMPARED_SOURCES.map(|source| (at, workload, source)));
        }
        benches.push((testbed, matrices));
    }

    let runs = orders.run_unstored_cases(&cases, |(at, workload, source), seed| {
        let (testbed, matrices) = &benches[at];
        // With one order for all workloads, all of them would have their intensive programs at the same places.
        let jobs = shuffle_arrivals(
            &workload_jobs(workload, 2, 1),
            seed * PAPER_WORKLOADS.len() as u64 + workload as u64,
        );
        let pair_costs = (source == PlacementSource::Optimal)
            .then(|| pair_costs_by_job(&matrices[&workload], workload, &jobs));
        let slowdowns = testbed.measure_slowdowns(source, &jobs, pair_costs.as_deref(), seed)?;
        Ok(mean(&slowdowns.slowdowns_by_job))
    })?;
    Ok(at_time_scale(
        time_scale(context) as f64,
        eight_core_findings(&orders.seeds, machines, &workloads, &runs),
    ))
}

/// Seeds of the orders of arrival. The default scheduler keeps the placement that the order gave it, so a single order
/// shows one of many: in 16 of 70, no two of four intensive programs share a cache.
pub(super) fn arrival_seeds(
    context: &ExperimentContext<'_>,
    quick_count: u64,
    full_count: u64,
) -> Vec<u64> {
    let order_count =
        context.pick_by_length(1, quick_count.max(context.seeds.len() as u64), full_count);
    (0..order_count).map(|nth| context.seeds[0] + nth).collect()
}

fn eight_core_findings(
    seeds: &[u64],
    machines: &[&str],
    workloads: &[usize],
    runs: &EightCoreRuns,
) -> Vec<Finding> {
    // The gains over the default scheduler in percent, by seed.
    let gains = |machine: usize, workload: usize, source: PlacementSource| -> Vec<f64> {
        let default_times = runs.of_case((machine, workload, PlacementSource::Default));
        default_times
            .zip(runs.of_case((machine, workload, source)))
            .map(|(default_time, time)| percent_above(*default_time, *time))
            .collect()
    };
    // The mean over workloads, by seed.
    let mean_gains = |machine: usize, source: PlacementSource| -> Vec<f64> {
        (0..seeds.len())
            .map(|seed| mean(workloads.iter().map(|&at| gains(machine, at, source)[seed])))
            .collect()
    };

    let mut points = Vec::new();
    let mut figures = Vec::new();
    let mut means_of_policies = Vec::new();
    for (at, machine) in machines.iter().enumerate() {
        let mut groups = Vec::new();
        for &workload in workloads {
            let values = COMPARED_SOURCES.map(|source| gains(at, workload, source));
            let label = format!("{machine}, {}", workload_name(workload));
            points.extend(
                COMPARED_SOURCES
                    .iter()
                    .zip(&values)
                    .map(|(source, values)| {
                        DataPoint::from_values(source.name(), label.clone(), values)
                    }),
            );
            let means = values.map(|values| mean(&values));
            means_of_policies.extend(&means[..2]);
            groups.push(BarGroup {
                name: workload_name(workload),
                bars: means.map(Into::into).to_vec(),
            });
        }
        let figure = BarChart {
            title: format!("Mean speed-up over the default scheduler, {machine}"),
            y: Axis::linear("percent"),
            series: COMPARED_SOURCES
                .map(|source| source.name().to_string())
                .to_vec(),
            groups,
            ..BarChart::default()
        };
        figures.push(ResultFigure::bars(format!("ca-7-{machine}"), &figure));
    }

    let ratio_of_machine = |machine: usize| {
        let [di, dio, optimal] = COMPARED_SOURCES.map(|source| mean(mean_gains(machine, source)));
        percent_of_gain(dio.min(di), optimal)
    };
    let ratios: Vec<f64> = (0..machines.len()).map(ratio_of_machine).collect();
    points.extend(machines.iter().zip(&ratios).map(|(machine, &ratio)| {
        DataPoint::from_values(
            "the lesser of DI's and DIO's mean gain over the optimal's, %",
            *machine,
            [ratio],
        )
    }));
    points.extend(machines.iter().enumerate().map(|(index, machine)| {
        DataPoint::from_values(
            "the optimal's mean gain over workloads, %",
            *machine,
            mean_gains(index, PlacementSource::Optimal),
        )
    }));

    let single_value_finding =
        |name: &str, value: f64| Finding::declared(name, &[(seeds[0], value)]).over_seeds(seeds);
    let mut findings = vec![
        single_value_finding("ca-7-best-workload", greatest(&means_of_policies))
            .with_points(points)
            .with_note(
                "Means over seeds (orders of arrival and frames) first, then the best and the least over workloads and \
                both policies. Optimal = the assignment with the least sum of measured pair slowdowns, run. Where that \
                loses: 100 if the policies lose no more, else 0.",
            ),
        single_value_finding("ca-7-share-of-optimal", least(&ratios)),
        single_value_finding("ca-7-least-gain", least(&means_of_policies)),
    ];
    findings[0].figures = figures;
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a restart put every job on the cache where the policy ran it, whatever cache the n-th arrival gets?
    #[test]
    fn restarted_jobs_start_on_the_caches_that_the_policy_chose() {
        let (default_caches, chosen_caches) = ([0, 1, 0, 1].map(Some), [0, 0, 1, 1].map(Some));
        assert_eq!(restart_order(&default_caches, &chosen_caches), [0, 2, 1, 3]);
        assert_eq!(restart_order(&chosen_caches, &default_caches), [0, 2, 1, 3]);
        assert_eq!(
            restart_order(&chosen_caches, &[0, 0, 0, 1].map(Some)),
            [0, 1, 3, 2]
        );
    }

    /// Do orders of arrival differ, and do they contain the same programs?
    #[test]
    fn orders_of_arrival_differ_and_contain_the_same_programs() {
        let programs = workload_jobs(1, 2, 1);
        let job_names = |jobs: &[WorkloadJob]| {
            jobs.iter()
                .map(|job| job.name.clone())
                .collect::<Vec<String>>()
        };
        let (first, second) = (
            job_names(&shuffle_arrivals(&programs, 1)),
            job_names(&shuffle_arrivals(&programs, 2)),
        );
        assert_ne!(first, second);
        let sorted_names = |mut names: Vec<String>| {
            names.sort();
            names
        };
        assert_eq!(sorted_names(first), sorted_names(second));
        assert_eq!(sorted_names(job_names(&programs)).len(), 8);
    }
}
