//! Runs cut into samples: what every task did in every super set, and how fast the machine was meanwhile.

use cachemate_core::{Event, Evidence, Level, Machine, Observation, Place, Plan, Probe, ProbeId, ProbeWhat};
use cachemate_core::{SuperSetCount, TaskId, Window};
use cachemate_sim::results::RunResults;

use super::{SAMPLE_CYCLES, SUPER_SETS};
use crate::ReproError;
use crate::setup::{Workload, failed};

pub(super) const LEVELS: [Level; 3] = [Level::L1Data, Level::L1Instruction, Level::L2];

/// Counts of one task in one sample, in the order of [`LEVELS`].
pub(super) type Activity = [Vec<SuperSetCount>; 3];

pub(super) struct Sample {
    /// Instructions of all contexts per cycle.
    pub instr_per_cycle: f64,
    /// In the order of the jobs.
    pub tasks: Vec<Activity>,
}

/// Runs a workload of as many single-threaded jobs as contexts for `warm_up` samples that are not kept and `kept` that
/// are. Every level is watched all the time.
pub(super) fn sampled(workload: Workload, warm_up: u64, kept: u64) -> Result<(Vec<Sample>, RunResults), ReproError> {
    let cycles = SAMPLE_CYCLES / workload.options.scale;
    let jobs = workload.jobs.len();
    let workload = workload.lasting(warm_up * cycles, kept * cycles);
    let mut machine = workload.simulated()?;
    let tasks: Vec<TaskId> = (0..jobs as u32).map(TaskId).collect();
    let mut plan = Plan::idle(Window::Cycles { cycles: SAMPLE_CYCLES });
    plan.probes = (0u32..).zip(LEVELS).map(|(id, level)| probe(id, level, &tasks)).collect();
    let applied = machine.apply(&plan).map_err(failed("activity probes"))?;
    if let Some(refused) = applied.refused.first() {
        return Err(ReproError::Failed("activity probes".to_string(), refused.said.clone()));
    }
    let mut samples = Vec::new();
    let mut nth = 0;
    while let Some(seen) = machine.observe().map_err(failed("sampled run"))? {
        nth += 1;
        // The last window may be cut short by the end of the run.
        if nth > warm_up && seen.span.elapsed_cycles.is_some_and(|elapsed| elapsed * 10 >= cycles * 9) {
            samples.push(sample(&seen, jobs));
        }
    }
    Ok((samples, machine.results()))
}

fn probe(id: u32, level: Level, tasks: &[TaskId]) -> Probe {
    let what = ProbeWhat::Activity { tasks: tasks.to_vec(), level, super_sets: SUPER_SETS };
    Probe { id: ProbeId(id), what, budget_ns: u64::MAX / 4 }
}

fn sample(seen: &Observation, jobs: usize) -> Sample {
    // A watched task of which nothing is told made no access at that level: it ran on its context all the time.
    let none = || vec![SuperSetCount { accesses: 0, misses: 0 }; SUPER_SETS as usize];
    let mut tasks: Vec<Activity> = (0..jobs).map(|_| [none(), none(), none()]).collect();
    for answer in &seen.answers {
        if let Evidence::Activity { task, level, super_sets, .. } = &answer.evidence
            && let Some(at) = LEVELS.iter().position(|other| other == level)
        {
            tasks[task.0 as usize][at].clone_from(super_sets);
        }
    }
    let on_cpus = seen.places.iter().filter(|(place, _)| matches!(place, Place::Cpu(_)));
    let instructions: f64 = on_cpus.filter_map(|(_, counts)| counts.get(Event::Instructions)).sum();
    Sample { instr_per_cycle: instructions / seen.span.elapsed_cycles.unwrap_or(1).max(1) as f64, tasks }
}
