//! Draws co-runs from the seed, and measures them on the cycle-level machine.
//!
//! A model is easily right about the co-runs that its author had in mind, so those on which it is
//! judged are drawn, from a pool of sixteen programs that were chosen by their nature and not by
//! any co-run. But most pairs hardly slow each other down, and a model that predicts nothing would
//! be nearly right about them; so half of the co-runs that are measured have losses of 10 % or
//! more.
//!
//! For example, for each machine the seed draws pairs and groups of four on one cache, four
//! programs on two caches in all three pairings, and pairs with the cache divided in four ways. The
//! last two are plans, which are judged by how well the model ranks them.

use cachemate_core::SplitMix64;
use cachemate_core::{
    CacheId, CacheShare, GroupId, MachineSpec, Plan, ShareMember, TaskId, Units, WindowLength,
};
use cachemate_interval::PhasedProgram;
use cachemate_sim::machine::SimOptions;
use cachemate_sim::results::TaskResults;

use crate::phased_profile::{self, ProfilingLengths};
use crate::rates::ProgramRates;
use crate::run_request;
use crate::setup::{Workload, WorkloadJob, load_machine};
use crate::work::{FixedPlan, InstructionRange};
use crate::{ExperimentContext, Result};

/// A machine, with the number of co-runs drawn on it.
#[derive(Clone, Copy, Debug)]
pub struct MachineSetup {
    /// Name of a specification; overrides are allowed.
    pub machine: &'static str,
    /// Number of programs drawn from [`POOL`].
    pub programs: usize,
    /// Number of co-runs of two programs in one cache.
    pub pairs: usize,
    /// Number of groups of four in one cache.
    pub quartets: usize,
    /// Number of mixes of four programs on two caches, each in all three pairings.
    pub pairings: usize,
    /// Number of pairs in one cache, each divided in four ways.
    pub partitions: usize,
    /// Warm-up cycles of each solo run.
    pub warm_up_cycles: u64,
    /// Measured cycles. The instructions that a program executes in them when it runs alone are its work.
    pub measured_cycles: u64,
}

/// Programs that use a shared cache, and a few that do not, chosen by their nature and not by any co-run.
pub const POOL: [&str; 16] = [
    "mcf-2006",
    "milc",
    "lbm",
    "soplex",
    "sphinx",
    "omnetpp",
    "gcc",
    "libquantum",
    "art",
    "swim",
    "vpr",
    "twolf",
    "equake",
    "ammp",
    "gobmk",
    "namd",
];

/// The machines of the draw. The smaller ones are whole; of the largest one, a complex with a
/// quarter of its cache is used, because these programs cannot fill the whole cache within a
/// feasible length of simulation.
pub(super) fn setups(context: &ExperimentContext<'_>) -> Vec<MachineSetup> {
    let (warm_up_cycles, measured_cycles) = context.pick_by_length(
        (1_000_000, 1_000_000),
        (4_000_000, 6_000_000),
        (15_000_000, 15_000_000),
    );
    let pick_count = |full_count: usize, quick_count: usize| context.pick(quick_count, full_count);
    let common_setup = MachineSetup {
        machine: "opteron-2350",
        programs: pick_count(9, 5),
        pairs: pick_count(14, 4),
        quartets: pick_count(8, 2),
        pairings: 0,
        partitions: 0,
        warm_up_cycles,
        measured_cycles,
    };
    if context.sample {
        return vec![MachineSetup {
            programs: 2,
            pairs: 1,
            quartets: 0,
            ..common_setup
        }];
    }
    vec![
        common_setup,
        MachineSetup {
            machine: "xeon-x5365-4",
            quartets: 0,
            pairings: pick_count(5, 1),
            ..common_setup
        },
        MachineSetup {
            machine: "epyc-7742?caches.l3.size_bytes=4194304",
            quartets: pick_count(5, 1),
            pairs: pick_count(10, 2),
            partitions: pick_count(4, 1),
            ..common_setup
        },
        MachineSetup {
            machine: "pairs-04",
            programs: pick_count(8, 4),
            quartets: 0,
            pairs: pick_count(8, 2),
            pairings: pick_count(3, 1),
            ..common_setup
        },
    ]
}

/// One program that was drawn for a machine.
#[derive(Clone, PartialEq, Debug)]
pub struct ProfiledProgram {
    /// Name of the program's kernel.
    pub name: String,
    /// Seed of its input and layout.
    pub seed: u64,
    /// Solo profile, by phase.
    pub profile: PhasedProgram,
    /// Instructions that the program executes alone in the measured cycles; runs are compared over them.
    pub work: InstructionRange,
    /// Solo rates over `work`.
    pub alone: ProgramRate,
}

/// Measured rates of a program on the cycle-level machine.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ProgramRate {
    /// Instructions per cycle over its work.
    pub instr_per_cycle: f64,
    /// Demand misses of the contended cache over its work.
    pub misses_per_instr: f64,
    /// Queueing cycles per instruction over the whole run, because the readings do not record the reason for a wait.
    pub queue_cycles_per_instr: f64,
}

/// The kind of a co-run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CoRunKind {
    /// Two programs in one cache.
    Pair,
    /// Four programs in one cache.
    Four,
    /// A plan of the mix with this number.
    Plan(u32),
}

/// One co-run on the cycle-level machine.
#[derive(Clone, PartialEq, Debug)]
pub struct CoRun {
    /// Kind of the co-run, by which it is scored.
    pub kind: CoRunKind,
    /// Program (its position in the draw) and CPU of each job.
    pub jobs: Vec<(usize, u32)>,
    /// Number of ways of each job in the first cache, counted from the lowest; empty if the cache is not divided.
    pub ways: Vec<u32>,
    /// Memory traffic as a share of the bandwidth of the narrowest part.
    pub busy_share: f64,
    /// Rates by job.
    pub rates: Vec<ProgramRate>,
    /// Whether all programs finished their work. Other runs are not scored.
    pub finished: bool,
}

/// All measurements on one machine.
#[derive(Clone, PartialEq, Debug)]
pub struct MachineTruth {
    /// Name as in [`MachineSetup::machine`].
    pub machine: String,
    /// Programs in the order of the draw.
    pub programs: Vec<ProfiledProgram>,
    /// Runs: pairs, fours, then plans.
    pub runs: Vec<CoRun>,
}

/// Draws the co-runs and runs them.
///
/// # Errors
/// The machine is unknown, a run fails, or the user interrupts.
pub fn measure(
    context: &ExperimentContext<'_>,
    setup: &MachineSetup,
    seed: u64,
) -> Result<MachineTruth> {
    let machine = load_machine(setup.machine)?;
    let mut generator = SplitMix64::new(seed ^ u64::from(machine.cores()) << 32 ^ machine.hertz);
    let mut names = POOL.to_vec();
    generator.shuffle(&mut names);
    names.truncate(setup.programs);
    let jobs: Vec<WorkloadJob> = names
        .iter()
        .enumerate()
        .map(|(index, name)| WorkloadJob::new(name, seed * 1_000 + index as u64))
        .collect();
    context.report_progress(&format!("{}: {} programs alone", setup.machine, jobs.len()));
    let programs = context.run_all(&jobs, |job| profile_job(job, &machine, setup))?;
    let measure_requested = |requested: &[CoRun]| {
        context.report_progress(&format!("{}: {} co-runs", setup.machine, requested.len()));
        context.run_all(requested, |run| {
            measure_together(run, &jobs, &programs, &machine, setup)
        })
    };
    let mut runs = select_half_losing(
        draw_pairs(&mut generator, setup, &machine),
        setup.pairs,
        measure_requested,
        |run| loses_speed(run, &programs),
    )?;
    let losing_jobs = runs
        .iter()
        .filter(|run| loses_speed(run, &programs))
        .map(|run| run.jobs.clone())
        .collect();

    runs.extend(measure_requested(&draw_larger_runs(
        &mut generator,
        setup,
        &machine,
        losing_jobs,
    ))?);
    Ok(MachineTruth {
        machine: setup.machine.to_string(),
        programs,
        runs,
    })
}

/// Takes `count` of the runs in their order, of which at most half lose nothing (one, if no program loses). If most
/// lost little, a forecast of no loss would always be nearly right.
fn select_half_losing(
    candidates: Vec<CoRun>,
    count: usize,
    mut measure_runs: impl FnMut(&[CoRun]) -> Result<Vec<CoRun>>,
    is_losing: impl Fn(&CoRun) -> bool,
) -> Result<Vec<CoRun>> {
    let (mut kept_losing_runs, mut unaffected_runs) = (Vec::new(), Vec::new());
    for chunk in candidates.chunks(count.max(1)) {
        if kept_losing_runs.len() + unaffected_runs.len().min(count / 2) >= count {
            break;
        }
        let (losing_runs, unaffected): (Vec<CoRun>, Vec<CoRun>) = measure_runs(chunk)?
            .into_iter()
            .partition(|run| is_losing(run));
        kept_losing_runs.extend(losing_runs);
        unaffected_runs.extend(unaffected);
    }

    unaffected_runs.truncate(kept_losing_runs.len().max(1).min(count / 2));
    kept_losing_runs.truncate(count - unaffected_runs.len());
    kept_losing_runs.extend(unaffected_runs);
    Ok(kept_losing_runs)
}

/// Minimum slowdown, as a share, for a run to count as losing speed.
const LOSS: f64 = 0.1;

fn loses_speed(run: &CoRun, programs: &[ProfiledProgram]) -> bool {
    let is_slower = |(&(program, _), rate): (&(usize, u32), &ProgramRate)| {
        programs[program].alone.instr_per_cycle >= (1.0 + LOSS) * rate.instr_per_cycle
    };
    run.jobs.iter().zip(&run.rates).any(is_slower)
}

fn profile_job(
    job: &WorkloadJob,
    machine: &MachineSpec,
    setup: &MachineSetup,
) -> Result<ProfiledProgram> {
    let mut workload = Workload {
        machine: machine.clone(),
        options: SimOptions::default(),
        jobs: vec![job.clone().with_cpus([0].into_iter().collect())],
        warm_up_cycles: setup.warm_up_cycles,
        measured_cycles: setup.measured_cycles,
    };
    workload.options.seed = job.seed;
    let (work, rates) = run_request::solo_run(&workload)?;
    let joint_run = run_request::joint_run(&workload, &[work], None)?;
    let solo_rate = ProgramRate {
        instr_per_cycle: rates.instr_per_cycle,
        ..program_rate(&joint_run.rates[0], &joint_run.results.tasks[0])
    };

    // A co-runner may take twice as long as this program, which must keep running until then.
    let until_instr = (work.to_instr + 0.5 * (work.to_instr - work.from_instr)) as u64;
    let phase_instr = (until_instr / 48).max(200_000);
    let lengths = ProfilingLengths {
        until_instr,
        phase_instr,
        reading_cycles: 100_000,
    };
    let profile = phased_profile::measure_profile(job, machine, &workload.options, lengths)?;
    let (name, seed) = (job.name.clone(), job.seed);
    Ok(ProfiledProgram {
        name,
        seed,
        profile,
        work,
        alone: solo_rate,
    })
}

fn program_rate(work_rates: &ProgramRates, results: &TaskResults) -> ProgramRate {
    ProgramRate {
        instr_per_cycle: work_rates.instr_per_cycle,
        misses_per_instr: work_rates.misses_per_kilo_instr / 1000.0,
        queue_cycles_per_instr: results.stall_cycles.queue / results.instructions.max(1) as f64,
    }
}

/// A co-run that has not been measured.
pub(super) fn build_co_run(
    kind: CoRunKind,
    jobs: Vec<(usize, u32)>,
    ways_by_job: Vec<u32>,
) -> CoRun {
    CoRun {
        kind,
        jobs,
        ways: ways_by_job,
        busy_share: 0.0,
        rates: Vec::new(),
        finished: false,
    }
}

/// Programs on the first cores of one cache.
fn place_on_one_cache(programs: &[usize], machine: &MachineSpec) -> Vec<(usize, u32)> {
    programs
        .iter()
        .enumerate()
        .map(|(index, &program)| (program, index as u32 * machine.contexts_per_core))
        .collect()
}

fn draw_pairs(
    generator: &mut SplitMix64,
    setup: &MachineSetup,
    machine: &MachineSpec,
) -> Vec<CoRun> {
    let pairs_with =
        |first_program: usize| (first_program + 1..setup.programs).map(move |b| [first_program, b]);
    let mut all_pairs: Vec<[usize; 2]> = (0..setup.programs).flat_map(pairs_with).collect();
    generator.shuffle(&mut all_pairs);
    all_pairs
        .iter_mut()
        .for_each(|pair| generator.shuffle(pair));

    all_pairs
        .iter()
        .map(|pair| {
            build_co_run(
                CoRunKind::Pair,
                place_on_one_cache(pair, machine),
                Vec::new(),
            )
        })
        .collect()
}

/// Groups, pairings and partitions. Partitions are of pairs that lose by sharing, if there are enough.
fn draw_larger_runs(
    generator: &mut SplitMix64,
    setup: &MachineSetup,
    machine: &MachineSpec,
    losing_pairs: Vec<Vec<(usize, u32)>>,
) -> Vec<CoRun> {
    let mut runs = Vec::new();
    let cores_per_cache = machine
        .last_level_cache()
        .map_or(1, |cache| cache.shared_by_cores);
    let contexts = machine.contexts_per_core;
    let ways = machine.last_level_cache().map_or(1, |cache| cache.ways);
    let mut draw_programs = |count: usize| {
        let mut order: Vec<usize> = (0..setup.programs).collect();
        generator.shuffle(&mut order);
        order.truncate(count);
        order
    };
    for _ in 0..setup.quartets {
        runs.push(build_co_run(
            CoRunKind::Four,
            place_on_one_cache(&draw_programs(4), machine),
            Vec::new(),
        ));
    }

    for mix in 0..setup.pairings {
        let mix_programs = draw_programs(4);
        let second_cache_cpu = cores_per_cache * contexts;
        for program_order in [[0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2]] {
            let cpus = [0, contexts, second_cache_cpu, second_cache_cpu + contexts];
            let jobs = program_order
                .iter()
                .zip(cpus)
                .map(|(&position, cpu)| (mix_programs[position], cpu))
                .collect();
            runs.push(build_co_run(CoRunKind::Plan(mix as u32), jobs, Vec::new()));
        }
    }

    let mut remaining_pairs = losing_pairs.into_iter();
    for mix in 0..setup.partitions {
        let jobs = remaining_pairs
            .next()
            .unwrap_or_else(|| place_on_one_cache(&draw_programs(2), machine));
        let mix_number = (setup.pairings + mix) as u32;
        runs.push(build_co_run(
            CoRunKind::Plan(mix_number),
            jobs.clone(),
            Vec::new(),
        ));
        for first_ways in [ways / 8, ways / 2, ways - ways / 8] {
            runs.push(build_co_run(
                CoRunKind::Plan(mix_number),
                jobs.clone(),
                vec![first_ways, ways - first_ways],
            ));
        }
    }
    runs
}

/// A plan with each task's ways of the first contended cache, from the lowest on, and its CPU.
fn ways_plan(machine: &MachineSpec, run: &CoRun) -> Plan {
    let cache = machine
        .topology()
        .caches
        .iter()
        .find(|cache| cache.last_level)
        .map_or(CacheId(0), |cache| cache.id);

    let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000_000 });
    let mut first_way = 0;
    for (index, (&count, &(_, cpu))) in run.ways.iter().zip(&run.jobs).enumerate() {
        plan.affinity
            .insert(TaskId(index as u32), [cpu].into_iter().collect());
        plan.shares.push(CacheShare {
            group: GroupId(index as u32),
            members: vec![ShareMember::Task(TaskId(index as u32))],
            cache,
            units: Units::Ways {
                mask: (first_way..first_way + count).collect(),
            },
        });
        first_way += count;
    }

    plan
}

fn measure_together(
    run: &CoRun,
    jobs: &[WorkloadJob],
    programs: &[ProfiledProgram],
    machine: &MachineSpec,
    setup: &MachineSetup,
) -> Result<CoRun> {
    let has_way_split = !run.ways.is_empty();
    // A program pinned to a CPU cannot be given a share, so the plan itself places it on its CPU.
    let job = |&(program, cpu): &(usize, u32)| {
        let pinned_cpus = (!has_way_split).then(|| [cpu].into_iter().collect());
        WorkloadJob {
            pinned: pinned_cpus,
            ..jobs[program].clone()
        }
    };
    let workload = Workload {
        machine: machine.clone(),
        options: SimOptions {
            seed: jobs[run.jobs[0].0].seed,
            ..SimOptions::default()
        },
        jobs: run.jobs.iter().map(job).collect(),
        warm_up_cycles: setup.warm_up_cycles,
        measured_cycles: setup.measured_cycles,
    };

    let work: Vec<InstructionRange> = run
        .jobs
        .iter()
        .map(|&(program, _)| programs[program].work)
        .collect();
    let way_plan = has_way_split.then(|| FixedPlan {
        plan: ways_plan(machine, run),
        first_window: WindowLength::Cycles { cycles: 10_000 },
    });
    let joint_run = run_request::joint_run(&workload, &work, way_plan.as_ref())?;

    let narrowest_bandwidth = |node: f64| match machine.memory.package_bus_bytes_per_cycle {
        Some(bus) => {
            (bus * f64::from(machine.packages) / f64::from(machine.memory.nodes)).min(node)
        }
        None => node,
    };
    let max_bytes = narrowest_bandwidth(machine.memory.bytes_per_cycle);
    let max_busy_share = joint_run
        .results
        .memory
        .iter()
        .map(|node| node.bytes_per_cycle / max_bytes)
        .fold(0.0, f64::max);

    Ok(CoRun {
        busy_share: max_busy_share,
        rates: joint_run
            .rates
            .iter()
            .zip(&joint_run.results.tasks)
            .map(|(rates, task)| program_rate(rates, task))
            .collect(),
        finished: joint_run.rates.iter().all(|rates| rates.finished),
        ..run.clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do half of the runs lose whatever is drawn first, and is no unnecessary run measured?
    #[test]
    fn at_least_half_of_the_runs_lose() {
        let numbered_plan =
            |number: u32| build_co_run(CoRunKind::Plan(number), Vec::new(), Vec::new());
        let plan_number = |run: &CoRun| {
            if let CoRunKind::Plan(number) = run.kind {
                number
            } else {
                u32::MAX
            }
        };

        let draw_plans = |losing: fn(u32) -> bool| {
            let mut measured_count = 0;
            let chosen_runs = select_half_losing(
                (0..20).map(numbered_plan).collect(),
                4,
                |chunk| {
                    measured_count += chunk.len();
                    Ok(chunk.to_vec())
                },
                |run| losing(plan_number(run)),
            );
            (
                chosen_runs
                    .unwrap()
                    .iter()
                    .map(plan_number)
                    .collect::<Vec<u32>>(),
                measured_count,
            )
        };
        assert_eq!(draw_plans(|_| true), (vec![0, 1, 2, 3], 4));
        assert_eq!(draw_plans(|number| number % 2 == 1), (vec![1, 3, 0, 2], 4));
        assert_eq!(
            draw_plans(|number| number % 8 == 5),
            (vec![5, 13, 0, 1], 16),
            "others wait until two have lost"
        );
        assert_eq!(
            draw_plans(|number| number == 7),
            (vec![7, 0], 20),
            "no more others than losing ones"
        );
        assert_eq!(
            draw_plans(|_| false),
            (vec![0], 20),
            "one, where nobody loses"
        );
    }
}
