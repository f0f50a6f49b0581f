//! CASC: confines threads with high miss rates to a few CPUs, so that they never all run at once (papers CASC).
//!
//! Problem: the miss rate of a shared cache is to be kept low without enumerating groups, and without making CPUs wait
//! for each other. Method: the partial-cache miss rate (PCMR) of every thread is measured in rows of co-running
//! threads. Every CPU gets a maximum PCMR ([`bucketization`]), and a thread may run on the CPUs whose
//! maximum it does not exceed.
//! 1. *Initial measurement*: n + 1 rows of n of the first n + 1 threads, each row without one of them.
//! 2. *New threads*. The literal form measures them on the cache's first CPU, beside known threads (secondary
//!    measurement). The better form measures several at a time, in rows like the initial ones that are completed with
//!    known threads. No estimate then rests on an earlier one, and new threads are measured as accurately as the first.
//! 3. *Row length* (better form): rows are measured again, twice as long, while the intervals of estimates are wider
//!    than `max_error`.
//! 4. *Repetition*: measurements are repeated if a thread's phase changed. They are also repeated if the cache's miss
//!    rate, relative to its initial deviation, drifts from the expected one for several windows. If configured, they
//!    are repeated in turn at fixed times.
//! 5. *Bucketization*, literal or better; the better form bounds the spread of run times, and distributes the CPUs for
//!    threads with high miss rates over the cores.
//!
//! Properties: threads need not run together, so CPUs are not synchronized. Every thread has a CPU. On machines with
//! several caches, each is handled separately. A thread without evidence keeps its CPUs.

mod bucketization;

use std::collections::BTreeMap;

use cachemate_core::{
    CacheId, CounterEvent, CounterScope, Decision, Plan, Policy, ProbeId, ProbeKind, ProbeRequest,
    Reason, TaskId, TaskSample, View, WindowLength,
};
use serde::Deserialize;

use super::{ParameterError, ParameterRange};
use crate::llc_placement::{LlcTasks, StickyPlacement};
use bucketization::{BucketThread, BucketizationRules, Buckets, bucketize};

/// The form of the algorithm.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CascForm {
    /// The form in the paper.
    Literal,
    /// A form that checks for idle CPUs inside the loop, weights rates by references, and measures new threads in rows.
    Better,
}

/// Parameters of `casc`. Times are nominal, and rates are in misses per 100 references.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    pub form: CascForm,
    pub threshold: f64,
    pub threshold_step: f64,
    pub runnable_per_cpu: u32,
    /// Collection time of each row: the paper's MIN_RUNLENGTH, plus a quarter for intervals that the profiler drops.
    pub row_ns: u64,
    pub settle_ns: u64,
    /// Maximum length of a row: the better form doubles rows up to it while estimates are less certain than
    /// `max_error`.
    pub max_row_ns: u64,
    pub max_error: f64,
    /// Maximum standard deviation of run times over their mean, for the better form.
    ///
    /// The default preserves nine tenths of the gain that is possible without a bound, and avoids a quarter of the
    /// worst slowdown (CASC-6). A value far above 1 is no bound.
    pub max_run_time_variation: Option<f64>,
    /// Relative drift of the observed miss rate from the expected one (0.5 is by half).
    pub drift_threshold: f64,
    /// Number of windows for which the drift must last.
    pub drift_windows: u32,
    /// Interval at which one thread at a time is measured again.
    pub remeasure_every_ns: Option<u64>,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 10_000_000,
            form: CascForm::Better,
            threshold: 15.0,
            threshold_step: 1.25,
            runnable_per_cpu: 1,
            row_ns: 2_500_000,
            settle_ns: 500_000,
            max_row_ns: 20_000_000,
            max_error: 5.0,
            max_run_time_variation: Some(0.7),
            drift_threshold: 0.5,
            drift_windows: 5,
            remeasure_every_ns: None,
        }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = super::parse_parameters(text)?;
        ParameterRange::Above(0.0).check([
            ("window_ns", parameters.window_ns as f64),
            ("runnable_per_cpu", f64::from(parameters.runnable_per_cpu)),
            ("row_ns", parameters.row_ns as f64),
            ("drift_threshold", parameters.drift_threshold),
            ("drift_windows", f64::from(parameters.drift_windows)),
            ("threshold", parameters.threshold),
        ])?;
        ParameterRange::Above(1.0).check([("threshold_step", parameters.threshold_step)])?;
        let variation = parameters.max_run_time_variation;
        ParameterRange::FromZeroUnlimited
            .check(variation.map(|bound| ("max_run_time_variation", bound)))?;
        Ok(parameters)
    }

    fn is_better_form(&self) -> bool {
        self.form == CascForm::Better
    }

    fn bucketization_rules(&self) -> BucketizationRules {
        BucketizationRules {
            is_better_form: self.is_better_form(),
            threshold: self.threshold,
            threshold_step: self.threshold_step,
            runnable_per_cpu: self.runnable_per_cpu,
            max_run_time_variation: self
                .max_run_time_variation
                .filter(|_| self.is_better_form()),
        }
    }
}

/// Number of windows to wait after a measurement without result.
const RETRY_WINDOWS: u32 = 64;

struct Casc {
    parameters: Parameters,
    placement: StickyPlacement,
    caches: BTreeMap<CacheId, CascCache>,
    next_probe: u32,
}

impl Policy for Casc {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });
        let mut reasons = Vec::new();
        let cores: BTreeMap<u32, u32> = view
            .topology
            .cpus
            .iter()
            .map(|cpu| (cpu.id.0, cpu.core))
            .collect();
        for domain in self.placement.place_tasks_by_cache(view) {
            let state = self.caches.entry(domain.cache).or_default();
            state.record_estimates(view, &domain, &self.parameters);
            state.advance_probes(view, &domain, &self.parameters, &mut self.next_probe);
            let cpus = spread_over_cores(&cores, &domain, &self.parameters);
            state.update_assignment(&domain, &cpus, &self.parameters, &mut reasons);
            state.observe_miss_rate(view, &domain, &self.parameters);
            state.write_plan(&domain, &cpus, &self.parameters, &mut plan);
        }

        Decision::new(plan, reasons)
    }
}

/// The cache's CPUs in the order in which bucketization fills them; the last ones get the threads with the highest miss
/// rates.
///
/// In the better form, neighbors in this order are on different cores. A thread that waits for memory leaves its core's
/// pipeline to its siblings. If all such threads were on one core, the other threads would compete for the remaining
/// cores.
fn spread_over_cores(
    cores: &BTreeMap<u32, u32>,
    domain: &LlcTasks<'_>,
    parameters: &Parameters,
) -> Vec<u32> {
    let cpus: Vec<(u32, u32)> = domain
        .cpus
        .iter()
        .map(|cpu| (cpu, cores.get(&cpu).copied().unwrap_or(cpu)))
        .collect();
    let rank_in_core = |at: usize| {
        cpus[..at]
            .iter()
            .filter(|(_, core)| *core == cpus[at].1)
            .count()
    };
    let mut ordered_cpus: Vec<usize> = (0..cpus.len()).collect();
    if parameters.is_better_form() {
        ordered_cpus.sort_by_key(|&index| rank_in_core(index));
    }

    ordered_cpus
        .into_iter()
        .map(|index| cpus[index].0)
        .collect()
}

/// Tasks of one cache, with their measurements and assignment.
#[derive(Default)]
struct CascCache {
    task_rates: BTreeMap<TaskId, TaskRate>,
    /// Tasks whose measurement must be repeated.
    stale_tasks: Vec<TaskId>,
    pending_probes: Vec<OpenProbe>,
    row_ns: u64,
    wait_windows: u32,
    assignment: Option<BucketAssignment>,
    rate_monitor: MissRateMonitor,
    last_remeasurement_ns: u64,
    next_remeasured: usize,
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct TaskRate {
    pcmr: f64,
    /// Half-width of the PCMR's interval.
    half_width: f64,
    refs_rate: Option<f64>,
    /// Whether the profiles contain the estimate; false from a phase change until the thread is measured again.
    is_current: bool,
}

/// A probe without a final answer, and the tasks that it measures.
struct OpenProbe {
    probe: ProbeRequest,
    tasks: Vec<TaskId>,
}

/// The last assignment of maximum PCMRs to CPUs, and its input.
struct BucketAssignment {
    threads: Vec<(TaskId, Option<BucketThread>)>,
    buckets: Buckets,
}

/// Monitor of the logarithmic deviation of the observed miss rate from the expected one.
#[derive(Default)]
struct MissRateMonitor {
    /// Deviations in the first windows after an assignment, which later windows are compared with.
    usual_deviations: Vec<f64>,
    drifted_windows: u32,
}

impl CascCache {
    /// Records the estimates of the profiles, and drops exited tasks.
    fn record_estimates(
        &mut self,
        view: &View<'_>,
        domain: &LlcTasks<'_>,
        parameters: &Parameters,
    ) {
        let is_in_domain = |task: &TaskId| domain.tasks.iter().any(|sample| sample.task == *task);
        self.task_rates.retain(|task, _| is_in_domain(task));
        self.stale_tasks.retain(is_in_domain);

        for sample in &domain.tasks {
            let Some(profile) = view.profiles.get(&sample.task) else {
                continue;
            };
            let old_rate = self.task_rates.get_mut(&sample.task);
            let rates = &profile.rates;
            let Some(pcmr) = rates
                .pcmr
                .map(|fact| fact.estimate())
                .filter(|pcmr| pcmr.value.is_finite())
            else {
                if let Some(old_rate) = old_rate {
                    old_rate.is_current = false;
                }
                continue;
            };
            let speed = rates
                .observed_instr_per_cycle
                .or(rates.solo_instr_per_cycle);
            let refs = rates.llc_refs_per_mega_instr.zip(speed);
            let refs_rate = refs
                .map(|(refs, speed)| refs.value * speed.value)
                .filter(|rate| *rate > 0.0);
            let half_width = 0.5 * (pcmr.high - pcmr.low);
            // The reference rate changes constantly, so the rate at which the PCMR was measured is kept.
            let same_measurement = old_rate
                .filter(|old_rate| old_rate.pcmr == pcmr.value && old_rate.refs_rate.is_some());
            let refs_rate = same_measurement.map_or(refs_rate, |old_rate| old_rate.refs_rate);
            self.task_rates.insert(
                sample.task,
                TaskRate {
                    pcmr: pcmr.value,
                    half_width,
                    refs_rate,
                    is_current: true,
                },
            );
        }
        self.schedule_remeasurement(view, domain, parameters);
    }

    /// If configured, schedules one thread after the other for a new measurement.
    fn schedule_remeasurement(
        &mut self,
        view: &View<'_>,
        domain: &LlcTasks<'_>,
        parameters: &Parameters,
    ) {
        let now_ns = view.observation.span.end_ns();
        let is_due = parameters
            .remeasure_every_ns
            .is_some_and(|every| now_ns >= self.last_remeasurement_ns.saturating_add(every));
        if is_due
            && self.pending_probes.is_empty()
            && self.unmeasured_tasks(domain).is_empty()
            && !domain.tasks.is_empty()
        {
            self.stale_tasks
                .push(domain.tasks[self.next_remeasured % domain.tasks.len()].task);
            (self.next_remeasured, self.last_remeasurement_ns) = (self.next_remeasured + 1, now_ns);
        }
    }

    fn is_current(&self, task: TaskId) -> bool {
        self.task_rates
            .get(&task)
            .is_some_and(|rate| rate.is_current)
            && !self.stale_tasks.contains(&task)
    }

    fn unmeasured_tasks(&self, domain: &LlcTasks<'_>) -> Vec<TaskId> {
        domain
            .tasks
            .iter()
            .map(|sample| sample.task)
            .filter(|&task| !self.is_current(task))
            .collect()
    }

    /// Ends completed measurements and requests the next ones.
    fn advance_probes(
        &mut self,
        view: &View<'_>,
        domain: &LlcTasks<'_>,
        parameters: &Parameters,
        next_probe: &mut u32,
    ) {
        let is_in_domain = |task: &TaskId| domain.tasks.iter().any(|sample| sample.task == *task);
        let is_complete = |id: ProbeId| view.observation.has_completed(id);
        let (ended_probes, still_pending): (Vec<OpenProbe>, Vec<OpenProbe>) =
            std::mem::take(&mut self.pending_probes)
                .into_iter()
                .partition(|open_probe| {
                    let id = open_probe.probe.id;
                    is_complete(id)
                        || view.observation.applied.has_refused_probe(id)
                        || !open_probe.tasks.iter().all(is_in_domain)
                });
        self.pending_probes = still_pending;
        for probe in ended_probes {
            self.judge(&probe, is_complete(probe.probe.id), parameters);
        }

        self.wait_windows = self.wait_windows.saturating_sub(1);
        let is_crowded = domain.tasks.len() > domain.cpus.count() as usize;
        if self.wait_windows > 0 || !is_crowded {
            return;
        }

        // The literal form measures a thread again like a new one, beside threads of known PCMR (CASC 5.3.4).
        let current_count = domain
            .tasks
            .iter()
            .filter(|sample| self.is_current(sample.task))
            .count();
        if parameters.is_better_form() || current_count + 1 < domain.cpus.count() as usize {
            self.request_rows(domain, parameters, next_probe);
        } else {
            self.request_newcomer_rows(domain, parameters, next_probe);
        }
    }

    /// Accepts a measurement that is accurate enough; otherwise, repeats it with longer rows.
    fn judge(&mut self, open_probe: &OpenProbe, is_complete: bool, parameters: &Parameters) {
        let is_accurate = |task: &TaskId| {
            self.task_rates
                .get(task)
                .is_some_and(|rate| rate.is_current && rate.half_width <= parameters.max_error)
        };
        let are_all_current = open_probe.tasks.iter().all(|task| {
            self.task_rates
                .get(task)
                .is_some_and(|rate| rate.is_current)
        });

        self.stale_tasks
            .retain(|task| !open_probe.tasks.contains(task));
        let max_row_ns = if parameters.is_better_form() {
            parameters.max_row_ns
        } else {
            parameters.row_ns
        };
        let doubled_row_ns = (2 * self.row_ns).min(max_row_ns.max(parameters.row_ns));
        if !is_complete {
            // The probe was refused, or one of its threads exited.
            self.wait_windows = if are_all_current { 0 } else { 2 };
        } else if !open_probe.tasks.iter().all(is_accurate) && doubled_row_ns > self.row_ns {
            self.row_ns = doubled_row_ns;
            self.stale_tasks.extend(open_probe.tasks.iter().copied());
        } else {
            self.row_ns = 0;
            self.wait_windows = if are_all_current { 0 } else { RETRY_WINDOWS };
        }
    }

    /// Requests rows that each leave out one of n + 1 threads: unmeasured threads, completed with measured ones.
    fn request_rows(
        &mut self,
        domain: &LlcTasks<'_>,
        parameters: &Parameters,
        next_probe: &mut u32,
    ) {
        let mut measured_tasks = self.unmeasured_tasks(domain);
        if measured_tasks.is_empty() || !self.pending_probes.is_empty() {
            return;
        }

        let max_tasks = domain.cpus.count() as usize + 1;
        if !parameters.is_better_form() && self.task_rates.is_empty() {
            measured_tasks = domain.tasks.iter().map(|sample| sample.task).collect();
        }
        let other_tasks: Vec<TaskId> = domain
            .tasks
            .iter()
            .map(|sample| sample.task)
            .filter(|task| !measured_tasks.contains(task))
            .collect();
        measured_tasks.extend(other_tasks);
        measured_tasks.truncate(max_tasks);
        self.row_ns = self.row_ns.max(parameters.row_ns);

        let row_without = |left_out_task: &TaskId| {
            measured_tasks
                .iter()
                .copied()
                .filter(|task| task != left_out_task)
                .collect::<Vec<TaskId>>()
        };
        let rows: Vec<Vec<TaskId>> = measured_tasks.iter().map(row_without).collect();
        let probe_kind = ProbeKind::CoRunRows {
            cache: domain.cache,
            total_ns: self.row_ns,
            settle_ns: parameters.settle_ns,
            boost: true,
            rows,
        };

        let budget_ns = (self.row_ns + parameters.settle_ns)
            .saturating_mul((max_tasks * max_tasks) as u64)
            .saturating_mul(4);
        let probe = ProbeRequest {
            id: ProbeId(*next_probe),
            kind: probe_kind,
            budget_ns,
        };
        *next_probe += 1;
        self.pending_probes.push(OpenProbe {
            probe,
            tasks: measured_tasks,
        });
    }

    /// Requests a measurement of every new thread beside all known ones, again whenever more threads are known.
    fn request_newcomer_rows(
        &mut self,
        domain: &LlcTasks<'_>,
        parameters: &Parameters,
        next_probe: &mut u32,
    ) {
        let current_tasks: Vec<TaskId> = domain
            .tasks
            .iter()
            .map(|sample| sample.task)
            .filter(|&task| self.is_current(task))
            .collect();
        let newcomer_and_peers = |open_probe: &OpenProbe| match &open_probe.probe.kind {
            ProbeKind::PairedRows { task, peers, .. } => Some((*task, peers.clone())),
            _ => None,
        };

        let newcomers = self.unmeasured_tasks(domain);
        self.pending_probes.retain(|open_probe| {
            newcomer_and_peers(open_probe)
                .is_some_and(|(task, peers)| newcomers.contains(&task) && peers == current_tasks)
        });
        if current_tasks.len() + 1 < domain.cpus.count() as usize {
            return;
        }

        for &task in &newcomers {
            if self
                .pending_probes
                .iter()
                .any(|open_probe| open_probe.tasks == [task])
            {
                continue;
            }

            let probe_kind = ProbeKind::PairedRows {
                cache: domain.cache,
                task,
                peers: current_tasks.clone(),
                total_ns: parameters.row_ns,
            };
            let probe = ProbeRequest {
                id: ProbeId(*next_probe),
                kind: probe_kind,
                budget_ns: parameters.row_ns.saturating_mul(1_000),
            };
            *next_probe += 1;
            self.pending_probes.push(OpenProbe {
                probe,
                tasks: vec![task],
            });
        }

        self.row_ns = parameters.row_ns;
    }

    fn tasks_with_rates(&self, domain: &LlcTasks<'_>) -> Vec<(TaskId, Option<BucketThread>)> {
        let bucket_thread = |sample: &&TaskSample| {
            let rate = self.task_rates.get(&sample.task);
            (
                sample.task,
                rate.map(|rate| BucketThread {
                    pcmr: rate.pcmr,
                    refs_rate: rate.refs_rate,
                }),
            )
        };
        domain.tasks.iter().map(bucket_thread).collect()
    }

    /// Runs bucketization if it is due, and explains a new assignment.
    fn update_assignment(
        &mut self,
        domain: &LlcTasks<'_>,
        ordered_cpus: &[u32],
        parameters: &Parameters,
        reasons: &mut Vec<Reason>,
    ) {
        let threads = self.tasks_with_rates(domain);
        let bucket_threads: Vec<BucketThread> =
            threads.iter().filter_map(|(_, thread)| *thread).collect();
        let cpus = domain.cpus.count() as usize;
        if bucket_threads.len() < cpus || threads.len() <= cpus {
            self.assignment = None;
            return;
        }
        if self
            .assignment
            .as_ref()
            .is_some_and(|assigned| !self.is_due(assigned, &threads, parameters))
        {
            return;
        }

        let buckets = bucketize(&bucket_threads, cpus, &parameters.bucketization_rules());
        let mut numbers = vec![
            (
                "expected_misses_per_100_refs".to_string(),
                buckets.miss_rate,
            ),
            (
                "threshold_misses_per_100_refs".to_string(),
                buckets.threshold,
            ),
        ];

        let max_by_cpu = ordered_cpus.iter().zip(&buckets.max_pcmr);
        numbers.extend(max_by_cpu.map(|(cpu, &max_pcmr)| {
            (
                format!("cpu_{cpu}_max_pcmr_per_100_refs"),
                f64::from(max_pcmr),
            )
        }));
        let text =
            "every CPU accepts threads up to its highest miss rate; this is their expected joint miss rate".to_string();
        reasons.push(Reason::new(Vec::new(), text, numbers));

        for (index, thread) in threads.iter().enumerate() {
            let Some(bucket_thread) = thread.1 else {
                continue;
            };
            let admitted_cpus = (0..cpus)
                .filter(|&cpu| buckets.can_admit(cpu, bucket_thread.pcmr))
                .count();
            let previously_admitted_cpus = self.assignment.as_ref().map(|assignment| {
                (0..cpus)
                    .filter(|&cpu| assignment.buckets.can_admit(cpu, bucket_thread.pcmr))
                    .count()
            });
            if admitted_cpus < cpus && previously_admitted_cpus != Some(admitted_cpus) {
                let text = format!(
                    "{{0}} is confined to {admitted_cpus} of {cpus} CPUs, because it misses much on a share of the cache"
                );
                let numbers = vec![("pcmr_misses_per_100_refs".to_string(), bucket_thread.pcmr)];
                reasons.push(Reason::new(vec![threads[index].0], text, numbers));
            }
        }
        self.rate_monitor = MissRateMonitor::default();
        self.assignment = Some(BucketAssignment { threads, buckets });
    }

    /// Whether bucketization is due. After a new thread's measurement, the literal form requires that the thread has
    /// the largest PCMR or that the threshold is not met (4.3.1).
    fn is_due(
        &self,
        assignment: &BucketAssignment,
        threads: &[(TaskId, Option<BucketThread>)],
        parameters: &Parameters,
    ) -> bool {
        if assignment.threads == threads {
            return false;
        }
        let same_tasks = threads
            .iter()
            .map(|(task, _)| task)
            .eq(assignment.threads.iter().map(|(task, _)| task));
        if parameters.is_better_form() || !same_tasks {
            return true;
        }

        let largest_pcmr = |threads: &[(TaskId, Option<BucketThread>)]| {
            threads
                .iter()
                .filter_map(|(_, thread)| Some(thread.as_ref()?.pcmr))
                .fold(f64::NEG_INFINITY, f64::max)
        };
        largest_pcmr(threads) > largest_pcmr(&assignment.threads)
            || assignment.buckets.miss_rate > parameters.threshold
    }

    /// Compares the cache's miss rate with the expected one while no measurement runs.
    fn observe_miss_rate(
        &mut self,
        view: &View<'_>,
        domain: &LlcTasks<'_>,
        parameters: &Parameters,
    ) {
        if self.assignment.is_none() || !self.pending_probes.is_empty() {
            self.rate_monitor = MissRateMonitor::default();
            return;
        }
        let Some((observed, expected)) = self
            .observed_rate(view, domain)
            .zip(self.expected_miss_rate(domain, parameters))
        else {
            return;
        };
        let log_deviation = libm::log((observed + 1.0) / (expected.max(0.0) + 1.0));
        let window_count = parameters.drift_windows as usize;
        if self.rate_monitor.usual_deviations.len() < window_count {
            self.rate_monitor.usual_deviations.push(log_deviation);
            return;
        }

        let mean_deviation =
            self.rate_monitor.usual_deviations.iter().sum::<f64>() / window_count as f64;
        let is_drifted =
            (log_deviation - mean_deviation).abs() > libm::log(1.0 + parameters.drift_threshold);
        self.rate_monitor.drifted_windows = if is_drifted {
            self.rate_monitor.drifted_windows + 1
        } else {
            0
        };
        if self.rate_monitor.drifted_windows >= parameters.drift_windows {
            self.rate_monitor = MissRateMonitor::default();
            self.stale_tasks = domain.tasks.iter().map(|sample| sample.task).collect();
        }
    }

    fn observed_rate(&self, view: &View<'_>, domain: &LlcTasks<'_>) -> Option<f64> {
        let level = view
            .topology
            .caches
            .iter()
            .find(|cache| cache.id == domain.cache)?
            .level;
        let (_, counts) = view
            .observation
            .shared_counts
            .iter()
            .find(|(scope, _)| *scope == CounterScope::Cache(domain.cache))?;
        let references = counts
            .get(CounterEvent::References(level))
            .filter(|&references| references > 0.0)?;
        Some(100.0 * counts.get(CounterEvent::Misses(level))? / references)
    }

    /// The miss rate that the tasks' PCMRs and their run times in this window predict.
    fn expected_miss_rate(&self, domain: &LlcTasks<'_>, parameters: &Parameters) -> Option<f64> {
        let (mut weighted_sum, mut weight_sum) = (0.0, 0.0);
        for sample in &domain.tasks {
            let run_ns = sample.ran_ns();
            if run_ns == 0 {
                continue;
            }
            let task_rate = self.task_rates.get(&sample.task)?;
            let rate = task_rate
                .refs_rate
                .filter(|_| parameters.is_better_form())
                .unwrap_or(1.0);
            weighted_sum += run_ns as f64 * rate * task_rate.pcmr;
            weight_sum += run_ns as f64 * rate;
        }
        (weight_sum > 0.0).then(|| weighted_sum / weight_sum)
    }

    fn write_plan(
        &self,
        domain: &LlcTasks<'_>,
        cpus: &[u32],
        parameters: &Parameters,
        plan: &mut Plan,
    ) {
        let first_cpu: cachemate_core::CpuSet = cpus.first().copied().into_iter().collect();
        // New threads wait on the first CPU once enough threads are known to measure them (CASC 4.2.2.2).
        let awaits_secondary_measurement = !parameters.is_better_form()
            && self.task_rates.len() + 1 >= cpus.len()
            && domain.tasks.len() > cpus.len();

        for sample in &domain.tasks {
            let allowed_cpus = match (self.task_rates.get(&sample.task), &self.assignment) {
                (Some(rate), Some(assignment)) => {
                    let admits_thread = |cpu: &usize| assignment.buckets.can_admit(*cpu, rate.pcmr);
                    (0..cpus.len())
                        .filter(admits_thread)
                        .map(|cpu| cpus[cpu])
                        .collect()
                }
                (None, _) if awaits_secondary_measurement => first_cpu.clone(),
                _ => domain.cpus.clone(),
            };

            // A PCMR above all maximums of the literal form's last assignment restricts the thread to the CPUs with the
            // highest maximum.
            let allowed_cpus = if allowed_cpus.is_empty() {
                self.most_permissive_cpus(cpus)
            } else {
                allowed_cpus
            };
            plan.affinity.insert(sample.task, allowed_cpus);
        }

        plan.probes.extend(
            self.pending_probes
                .iter()
                .map(|open_probe| open_probe.probe.clone()),
        );
    }

    fn most_permissive_cpus(&self, cpus: &[u32]) -> cachemate_core::CpuSet {
        let Some(assignment) = &self.assignment else {
            return cpus.iter().copied().collect();
        };
        let max_pcmr = assignment.buckets.max_pcmr.iter().copied().max();
        cpus.iter()
            .zip(&assignment.buckets.max_pcmr)
            .filter(|(_, max)| Some(**max) == max_pcmr)
            .map(|(cpu, _)| *cpu)
            .collect()
    }
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters = Parameters::parse(parameters)?;
    Ok(Box::new(Casc {
        parameters,
        placement: StickyPlacement::default(),
        caches: BTreeMap::new(),
        next_probe: 0,
    }))
}

#[cfg(test)]
mod tests;
