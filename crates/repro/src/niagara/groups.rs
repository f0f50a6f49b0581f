//! Groups of threads that run together on the machine, and their measured rates: the truth for estimates.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheLevel, CounterEvent, Decision, EventCounts, Plan, Policy, ProbeEvidence, ProbeId,
    ProbeKind, ProbeRequest, RowInterval, SplitMix64, TaskId, View, WindowLength, WindowRecord,
};
use cachemate_pipeline::Pipeline;

use super::{CONTEXT_COUNT, shared_l2};
use crate::Result;
use crate::setup::{Workload, failed, run_under};

/// The probe that co-schedules the groups.
pub const GROUPS_PROBE_ID: ProbeId = ProbeId(1_000);

/// A request for measurements; times are nominal.
#[derive(Clone, Copy, Debug)]
pub struct GroupRequest {
    /// Length of CASC's rows, which come first with nine threads each; `None` for no rows.
    pub rows_ns: Option<u64>,
    /// Number of watched locations of each thread for reuse times, which come first; `None` if there are none.
    pub locations: Option<u32>,
    pub group_count: u64,
    pub group_ns: u64,
}

/// Measures single threads first and then random groups of eight, until the last group has been measured.
pub fn measure_groups(mut workload: Workload, request: GroupRequest) -> Result<Vec<WindowRecord>> {
    workload.warm_up_cycles = 0;
    workload.measured_cycles = 4_000_000_000;
    let cache = shared_l2(&workload).ok_or_else(|| failed("groups")("no shared cache"))?;
    let policy = GroupProbePolicy {
        request,
        cache,
        seed: workload.options.seed,
        first_probes: Vec::new(),
        unanswered_probes: Vec::new(),
        group_probe: None,
    };
    let config = workload.pipeline(
        "first-then-groups",
        "",
        Vec::new(),
        WindowLength::Time { ns: 100_000_000 },
    );
    let pipeline = Pipeline::with_policy(config, Box::new(policy));
    let mut records = Vec::new();
    let on_window = |_: &mut _, record: WindowRecord| {
        let is_complete = record.observation.has_completed(GROUPS_PROBE_ID);
        records.push(record);
        !is_complete
    };
    run_under(workload.build_machine()?, pipeline, on_window).map_err(failed("groups"))?;
    Ok(records)
}

struct GroupProbePolicy {
    request: GroupRequest,
    cache: cachemate_core::CacheId,
    seed: u64,
    first_probes: Vec<ProbeRequest>,
    /// The first probes that have no result yet.
    unanswered_probes: Vec<ProbeId>,
    group_probe: Option<ProbeRequest>,
}

impl Policy for GroupProbePolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: 10_000_000 });
        let tasks: Vec<TaskId> = view
            .observation
            .tasks
            .iter()
            .map(|task| task.task)
            .collect();
        if self.first_probes.is_empty() {
            self.request_first_probes(&tasks);
        }

        self.unanswered_probes
            .retain(|id| !view.observation.has_completed(*id));
        if self.unanswered_probes.is_empty() && self.group_probe.is_none() {
            self.group_probe = Some(self.request_groups(&tasks));
        }
        plan.probes = self
            .group_probe
            .clone()
            .map_or_else(|| self.first_probes.clone(), |probe| vec![probe]);
        Decision::new(plan, Vec::new())
    }
}

impl GroupProbePolicy {
    fn request_first_probes(&mut self, tasks: &[TaskId]) {
        let mut probes = Vec::new();
        if let Some(rows_ns) = self.request.rows_ns {
            for block in tasks.chunks(CONTEXT_COUNT + 1) {
                let without_task = |omitted_task: &TaskId| {
                    block
                        .iter()
                        .copied()
                        .filter(|task| task != omitted_task)
                        .collect()
                };
                probes.push(self.rows_probe(block.iter().map(without_task).collect(), rows_ns));
            }
        }
        if let Some(locations) = self.request.locations {
            probes.extend(
                tasks
                    .iter()
                    .map(|&task| ProbeKind::ReuseTimes { task, locations }),
            );
        }
        let probe_request = |(index, probe_kind)| ProbeRequest {
            id: ProbeId(index as u32),
            kind: probe_kind,
            budget_ns: u64::MAX / 1_000_000_000,
        };
        self.first_probes = probes.into_iter().enumerate().map(probe_request).collect();
        self.unanswered_probes = self.first_probes.iter().map(|probe| probe.id).collect();
    }

    fn request_groups(&self, tasks: &[TaskId]) -> ProbeRequest {
        let mut generator = SplitMix64::new(self.seed);
        let mut draw_group = || {
            let mut shuffled = tasks.to_vec();
            generator.shuffle(&mut shuffled);
            shuffled.truncate(CONTEXT_COUNT);
            shuffled
        };
        let groups = (0..self.request.group_count)
            .map(|_| draw_group())
            .collect();
        ProbeRequest {
            id: GROUPS_PROBE_ID,
            kind: self.rows_probe(groups, self.request.group_ns),
            budget_ns: u64::MAX / 1_000_000_000,
        }
    }

    fn rows_probe(&self, rows: Vec<Vec<TaskId>>, total_ns: u64) -> ProbeKind {
        ProbeKind::CoRunRows {
            cache: self.cache,
            rows,
            total_ns,
            settle_ns: 500_000,
            boost: true,
        }
    }
}

/// Sums of misses and references.
#[derive(Clone, Copy, Debug, Default)]
pub struct MissSums {
    pub misses: f64,
    pub references: f64,
    /// Misses of the L1 instruction cache, which are also references.
    pub code_misses: f64,
    pub ns: f64,
}

impl MissSums {
    fn add_counts(&mut self, counts: &EventCounts, ns: u64) {
        self.misses += counts
            .get(CounterEvent::Misses(CacheLevel::L2))
            .unwrap_or(f64::NAN);
        self.references += counts
            .get(CounterEvent::References(CacheLevel::L2))
            .unwrap_or(f64::NAN);
        self.code_misses += counts
            .get(CounterEvent::Misses(CacheLevel::L1Instruction))
            .unwrap_or(0.0);
        self.ns += ns as f64;
    }
    pub fn misses_per_100_references(&self) -> f64 {
        100.0 * self.misses / self.references
    }
}

/// Intervals of the groups, or of the rows before them, without cold starts.
fn measured_intervals(
    records: &[WindowRecord],
    of_groups: bool,
) -> impl Iterator<Item = &RowInterval> {
    let probe_results = records
        .iter()
        .flat_map(|record| &record.observation.probe_results);
    let row_intervals = probe_results
        .filter(move |probe_result| (probe_result.probe == GROUPS_PROBE_ID) == of_groups)
        .filter_map(|answer| match &answer.evidence {
            ProbeEvidence::Rows(rows) => Some(rows),
            _ => None,
        });
    row_intervals
        .flatten()
        .filter(|interval| interval.span.elapsed_ns >= 200_000)
}

/// The cache references and misses of every group.
pub fn sums_by_group(records: &[WindowRecord]) -> BTreeMap<Vec<TaskId>, MissSums> {
    let mut sums_by_members: BTreeMap<Vec<TaskId>, MissSums> = BTreeMap::new();
    for interval in measured_intervals(records, true) {
        sums_by_members
            .entry(interval.tasks.clone())
            .or_default()
            .add_counts(&interval.cache_counts, interval.span.elapsed_ns);
    }
    sums_by_members
}

/// The counts of every thread, in the groups or in the rows.
pub fn sums_by_task(records: &[WindowRecord], of_groups: bool) -> BTreeMap<TaskId, MissSums> {
    let mut sums_by_task: BTreeMap<TaskId, MissSums> = BTreeMap::new();
    for interval in measured_intervals(records, of_groups) {
        for (task, counts) in interval.tasks.iter().zip(&interval.task_counts) {
            sums_by_task
                .entry(*task)
                .or_default()
                .add_counts(counts, interval.span.elapsed_ns);
        }
    }
    sums_by_task
}
