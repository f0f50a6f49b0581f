//! Runs divided into samples: the activity of every task in every super set, and the machine's speed in the same time.

use cachemate_core::{
    CacheLevel, CounterEvent, CounterScope, Machine, Observation, Plan, ProbeEvidence, ProbeId,
    ProbeKind, ProbeRequest,
};
use cachemate_core::{SuperSetCount, TaskId, WindowLength};
use cachemate_sim::results::RunResults;
use serde::{Deserialize, Serialize};

use super::{MACHINE, SAMPLE_CYCLES, SUPER_SETS};
use crate::setup::{Workload, failed};
use crate::{ReproError, Result};

pub(super) const LEVELS: [CacheLevel; 3] = [
    CacheLevel::L1Data,
    CacheLevel::L1Instruction,
    CacheLevel::L2,
];

/// Counts of one task in one sample, in the order of [`LEVELS`].
pub(super) type TaskActivity = [Vec<SuperSetCount>; 3];

#[derive(Serialize, Deserialize)]
pub(super) struct ActivitySample {
    /// Instructions of all contexts per cycle.
    pub instr_per_cycle: f64,
    /// Activity in the order of the jobs.
    pub tasks: Vec<TaskActivity>,
}

/// Grouping of sets into super sets: runs of neighbors (AV 2.2, Figure 2) or sets with equal low bits (AV 4.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SuperSets {
    pub is_contiguous: bool,
    pub super_sets: usize,
}

impl SuperSets {
    pub fn fold_sets(self, level_counts: &TaskActivity) -> TaskActivity {
        level_counts.each_ref().map(|sets| {
            let mut counts = vec![
                SuperSetCount {
                    accesses: 0,
                    misses: 0
                };
                self.super_sets
            ];
            for (index, set) in sets.iter().enumerate() {
                let super_set_index = if self.is_contiguous {
                    index * self.super_sets / sets.len()
                } else {
                    index % self.super_sets
                };
                counts[super_set_index].accesses += set.accesses;
                counts[super_set_index].misses += set.misses;
            }

            counts
        })
    }
}

/// Like [`sample_workload`], with a count for every set of every level.
pub(super) fn sample_by_set(
    workload: Workload,
    warm_up: u64,
    sample_count: u64,
) -> Result<(Vec<ActivitySample>, RunResults)> {
    let super_set_count = |level: CacheLevel| {
        workload
            .machine
            .caches
            .iter()
            .find(|cache| cache.level == level)
            .map(|cache| cache.size_bytes / u64::from(cache.ways * cache.line_bytes))
    };
    let level_error = || failed(MACHINE)("a level that the paper watches is missing");
    let mut set_counts_by_level = [0; 3];
    for (count, level) in set_counts_by_level.iter_mut().zip(LEVELS) {
        *count = super_set_count(level).ok_or_else(level_error)? as u32;
    }
    sample_with_options(workload, warm_up, sample_count, set_counts_by_level)
}

/// Runs a workload with one single-threaded job per context for `warm_up` samples that are dropped and `sample_count`
/// that are returned. Every level is watched all the time.
pub(super) fn sample_workload(
    workload: Workload,
    warm_up: u64,
    sample_count: u64,
) -> Result<(Vec<ActivitySample>, RunResults)> {
    sample_with_options(workload, warm_up, sample_count, [SUPER_SETS; 3])
}

fn sample_with_options(
    workload: Workload,
    warm_up: u64,
    sample_count: u64,
    super_sets: [u32; 3],
) -> Result<(Vec<ActivitySample>, RunResults)> {
    let cycles = SAMPLE_CYCLES / workload.options.scale;
    let jobs = workload.jobs.len();
    let workload = workload.with_length(warm_up * cycles, sample_count * cycles);
    let mut machine = workload.build_machine()?;
    let task_ids: Vec<TaskId> = (0..jobs as u32).map(TaskId).collect();
    let mut plan = Plan::idle(WindowLength::Cycles {
        cycles: SAMPLE_CYCLES,
    });
    plan.probes = (0u32..)
        .zip(LEVELS)
        .zip(super_sets)
        .map(|((id, level), sets)| super_set_probe(id, level, &task_ids, sets))
        .collect();
    let applied = machine.apply(&plan).map_err(failed("activity probes"))?;
    if let Some(refused) = applied.refused.first() {
        return Err(ReproError::Failed(
            "activity probes".to_string(),
            refused.message.clone(),
        ));
    }

    let mut samples = Vec::new();
    let mut sample_index = 0;
    while let Some(observation) = machine.observe().map_err(failed("sampled run"))? {
        sample_index += 1;
        // The end of the run may cut the last window short.
        if sample_index > warm_up
            && observation
                .span
                .elapsed_cycles
                .is_some_and(|elapsed| elapsed * 10 >= cycles * 9)
        {
            samples.push(sample_from_observation(&observation, jobs, super_sets));
        }
    }
    Ok((samples, machine.collect_results()))
}

fn super_set_probe(id: u32, level: CacheLevel, tasks: &[TaskId], super_sets: u32) -> ProbeRequest {
    let probe_kind = ProbeKind::SuperSets {
        tasks: tasks.to_vec(),
        level,
        super_sets,
    };
    ProbeRequest {
        id: ProbeId(id),
        kind: probe_kind,
        budget_ns: u64::MAX / 4,
    }
}

fn sample_from_observation(
    observation: &Observation,
    jobs: usize,
    super_sets: [u32; 3],
) -> ActivitySample {
    // A watched task without a sample made no access at that level, because it ran on its context all the time.
    let empty_activity = || {
        super_sets.map(|count| {
            vec![
                SuperSetCount {
                    accesses: 0,
                    misses: 0
                };
                count as usize
            ]
        })
    };
    let mut tasks: Vec<TaskActivity> = (0..jobs).map(|_| empty_activity()).collect();
    for probe_result in &observation.probe_results {
        if let ProbeEvidence::Activity {
            task,
            level,
            super_sets,
            ..
        } = &probe_result.evidence
            && let Some(level_index) = LEVELS.iter().position(|other| other == level)
        {
            tasks[task.0 as usize][level_index].clone_from(super_sets);
        }
    }

    let on_cpus = observation
        .shared_counts
        .iter()
        .filter(|(scope, _)| matches!(scope, CounterScope::Cpu(_)));
    let instructions: f64 = on_cpus
        .filter_map(|(_, counts)| counts.get(CounterEvent::Instructions))
        .sum();
    ActivitySample {
        instr_per_cycle: instructions / observation.span.elapsed_cycles.unwrap_or(1).max(1) as f64,
        tasks,
    }
}
