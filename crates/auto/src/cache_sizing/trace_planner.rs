//! Planning of the traces from which shares are sized.
//!
//! A process without a curve is traced at once, and in a later phase as soon as all logs are paid for. Phases of a few
//! seconds are not much longer than a log, and most of them are of a known kind, whose curve is recalled. Several
//! processes are traced at once, because a process that rarely misses takes long to fill its log, and must not delay
//! the others. Beyond the lines that a log touches again, its curve is an extrapolation. A log that was too short for
//! the whole cache is therefore recorded once more with more entries for each kind of phase, if waits for memory cost
//! its process enough. Properties: after the first log of each process, logs never cost more than the given share of
//! processor time.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{ProbeEvidence, ProbeId, ProbeKind, ProbeRequest, TaskId, TaskSample, View};
use cachemate_papers::partition::demand_curve::{ENTRIES_FACTOR, is_uncertain_at};
use cachemate_papers::partition::partitioned_cache::ProcessPhase;
use cachemate_papers::partition::partitioned_cache::{CacheProcess, PartitionedCache};
use cachemate_papers::probe_ledger::ProbeLedger;

use super::share_speeds::ShareSpeeds;

/// Maximum number of processes of one cache that are traced at once.
const TRACED_AT_ONCE: usize = 4;

/// The conditions of traces.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TraceTerms {
    pub entries: u32,
    pub includes_code: bool,
    /// Maximum processor time of a trace of this length.
    pub budget_ns: u64,
    /// Minimum share of its cycles that a process waits for memory, for a longer trace.
    pub min_gain: f64,
    /// Maximum share of processor time for traces beyond the first one of each process.
    pub max_share: f64,
}

impl TraceTerms {
    fn longer_entries(&self) -> u32 {
        self.entries.saturating_mul(ENTRIES_FACTOR)
    }
}

/// The last trace requested of a task, with the phase of its process at that time.
struct RequestedTrace {
    phase: ProcessPhase,
    probe: ProbeRequest,
    is_longer: bool,
    is_answered: bool,
}

/// The planner of traces; see the module's documentation.
#[derive(Default)]
pub struct TracePlanner {
    last_traces: BTreeMap<TaskId, RequestedTrace>,
    next_probe: u32,
    /// Tasks with the kinds of phases of which a longer trace was recorded.
    longer_traces: BTreeSet<(TaskId, u32)>,
    ledger: ProbeLedger,
}

impl TracePlanner {
    pub fn record_answers(&mut self, view: &View<'_>) {
        self.ledger.record_window(view);
        for result in &view.observation.probe_results {
            let ProbeEvidence::Trace { task, .. } = &result.evidence else {
                continue;
            };
            let trace = self.last_traces.get_mut(task);
            let Some(trace) =
                trace.filter(|trace| trace.probe.id == result.probe && result.complete)
            else {
                continue;
            };
            trace.is_answered = true;
            self.longer_traces.extend(
                trace
                    .phase
                    .kind
                    .filter(|_| trace.is_longer)
                    .map(|kind| (*task, kind)),
            );
        }
        let is_live = |task: TaskId| {
            view.observation
                .tasks
                .iter()
                .any(|sample| sample.task == task)
        };
        self.last_traces.retain(|task, _| is_live(*task));
        self.longer_traces.retain(|(task, _)| is_live(*task));
    }

    /// The trace requests for a few processes of one cache; a request stays the same until it is answered.
    pub fn request_traces(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        speeds: &ShareSpeeds,
        terms: &TraceTerms,
    ) -> Vec<ProbeRequest> {
        // Whether the trace of a process is a longer one; `None` if the process needs no trace.
        let needed_trace = |cache_process: &CacheProcess<'_>| {
            let has_curve = cache_process.has_curve(view);
            let needs_trace = if has_curve {
                self.needs_longer_trace(view, domain, cache_process, speeds, terms)
            } else {
                self.can_trace(cache_process, terms)
            };
            needs_trace.then_some(has_curve)
        };

        let needed_traces: Vec<(&CacheProcess<'_>, bool)> = domain
            .processes
            .iter()
            .filter_map(|cache_process| Some((cache_process, needed_trace(cache_process)?)))
            .take(TRACED_AT_ONCE)
            .collect();
        needed_traces
            .into_iter()
            .map(|(process, is_longer)| self.request_trace(process, is_longer, terms))
            .collect()
    }

    /// Whether a process was never traced, its trace has begun, or another one is paid for.
    fn can_trace(&self, cache_process: &CacheProcess<'_>, terms: &TraceTerms) -> bool {
        let was_traced = |task: &&TaskSample| self.last_traces.contains_key(&task.task);
        !cache_process.tasks.iter().any(was_traced)
            || self.pending_trace(cache_process, false).is_some()
            || self.ledger.excess_ns(terms.max_share) <= 0.0
    }

    /// Whether the curve of a process is uncertain at the size of the whole cache, its misses cost it enough, and a
    /// longer trace is paid for or has begun.
    fn needs_longer_trace(
        &self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        cache_process: &CacheProcess<'_>,
        speeds: &ShareSpeeds,
        terms: &TraceTerms,
    ) -> bool {
        let Some((kind, bytes)) = cache_process.phase.kind.zip(domain.cache.size_bytes) else {
            return false;
        };
        let is_uncertain = |task: &&TaskSample| {
            let profile = view.profiles.get(&task.task);
            let curve = profile.and_then(|profile| profile.misses_per_kilo_instr());
            curve.is_some_and(|curve| is_uncertain_at(curve, bytes as f64))
        };
        let is_recorded = |task: &&TaskSample| self.longer_traces.contains(&(task.task, kind));
        if !cache_process.tasks.iter().any(is_uncertain)
            || cache_process.tasks.iter().any(is_recorded)
        {
            return false;
        }

        let stall_share = speeds
            .measured_speed(cache_process.process)
            .and_then(|speed| speed.stall_share());
        let is_worthwhile = stall_share.is_none_or(|share| share >= terms.min_gain);
        let is_paid = |entry_ns: f64| {
            self.ledger.excess_ns(terms.max_share) + f64::from(terms.longer_entries()) * entry_ns
                <= 0.0
        };
        self.pending_trace(cache_process, true).is_some()
            || is_worthwhile && self.ledger.entry_ns.is_some_and(is_paid)
    }

    /// The unanswered trace of this length that was requested in the present phase of a process, if any.
    fn pending_trace(
        &self,
        cache_process: &CacheProcess<'_>,
        is_longer: bool,
    ) -> Option<&ProbeRequest> {
        let is_pending = |trace: &&RequestedTrace| {
            (trace.phase.number, trace.is_longer, trace.is_answered)
                == (cache_process.phase.number, is_longer, false)
        };
        let mut traces = cache_process
            .tasks
            .iter()
            .filter_map(|task| self.last_traces.get(&task.task));
        traces.find(is_pending).map(|trace| &trace.probe)
    }

    fn request_trace(
        &mut self,
        cache_process: &CacheProcess<'_>,
        is_longer: bool,
        terms: &TraceTerms,
    ) -> ProbeRequest {
        if let Some(pending_trace) = self.pending_trace(cache_process, is_longer) {
            return pending_trace.clone();
        }

        // The thread that ran longest represents its process.
        let busiest_task = cache_process
            .tasks
            .iter()
            .reduce(|a, b| if b.ran_ns() > a.ran_ns() { b } else { a });
        let task = busiest_task.unwrap_or(&cache_process.tasks[0]).task;
        let (entries, budget_ns) = if is_longer {
            (
                terms.longer_entries(),
                terms.budget_ns.saturating_mul(ENTRIES_FACTOR.into()),
            )
        } else {
            (terms.entries, terms.budget_ns)
        };
        let kind = ProbeKind::MissTrace {
            task,
            entries,
            includes_code: terms.includes_code,
        };
        let probe = ProbeRequest {
            id: ProbeId(self.next_probe),
            kind,
            budget_ns,
        };

        self.next_probe += 1;
        let trace = RequestedTrace {
            phase: cache_process.phase,
            probe: probe.clone(),
            is_longer,
            is_answered: false,
        };
        self.last_traces.insert(task, trace);
        probe
    }
}
