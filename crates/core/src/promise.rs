//! Promises to programs, judged by measurements.
//!
//! A promise that is only forecast would be worth little, and one that nobody measured is not kept
//! either: neither a forecast nor the absence of a measurement is evidence. So a promise is judged
//! by comparing work per second under the plan with the same work alone on this machine. The speed
//! under the plan is counted over the windows since the plan last changed, and includes the time in
//! which the program waited to run, because its users wait as well. The solo speed comes from a
//! stored profile, from a measured solo interval, or from the model: the counted cycles per
//! instruction minus the counted waits that a program alone would not have. Both have intervals,
//! and the state follows from the interval of their ratio.
//!
//! For example, Redis is promised at most 5 %. It did 100,000 requests a second alone and 96,400
//! under the plan: 3.7 % slower, with an interval from 2.1 to 5.4 %. The value is within the
//! promise and the interval is not, so the promise is `likely` kept. At 6 to 9 % it is `broken`.
//!
//! Why not judge by the last window alone? Its noise is that of one reading, so that the state
//! would change every second without a cause.
//!
//! Without counts or a solo speed, the state is [`PromiseState::Unknown`] and names the missing
//! evidence. A policy can only add that a promise is infeasible, never that it is kept.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::{
    CacheLevel, CounterEvent, Decision, Estimate, Fact, FactSource, Goal, Observation, Plan,
    ProcessId, Profile, Profiles, RatioOfSums, Reason, ReasonKind, StallCause, TaskId, TaskSample,
    Topology,
};

/// The state of a promise.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PromiseState {
    /// The whole 95 % interval of the measurement is within the promise.
    Kept,
    /// The measured value is within the promise, but its interval is not.
    Likely,
    /// The measured value is outside the promise, but part of its interval is within.
    AtRisk,
    /// The whole interval is outside the promise.
    Broken,
    /// The measurements do not determine the state; [`PromiseReport::missing`] names the missing evidence.
    Unknown,
    /// The promise is not kept, and no plan known to the policy would keep it.
    Infeasible,
}

impl PromiseState {
    /// Every state, best first.
    pub const ALL: [PromiseState; 6] = [
        PromiseState::Kept,
        PromiseState::Likely,
        PromiseState::AtRisk,
        PromiseState::Broken,
        PromiseState::Unknown,
        PromiseState::Infeasible,
    ];

    /// The same words on every front end.
    pub fn describe(self) -> &'static str {
        match self {
            PromiseState::Kept => "kept",
            PromiseState::Likely => "likely",
            PromiseState::AtRisk => "at risk",
            PromiseState::Broken => "broken",
            PromiseState::Unknown => "unknown",
            PromiseState::Infeasible => "infeasible",
        }
    }
}

/// The quantity that a promise bounds, with its bound.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PromiseTerm {
    /// Run time over solo run time, minus one, is at most this.
    MaxSlowdown(f64),
    /// Work per second of each thread is at least this.
    MinRate(f64),
}

impl PromiseTerm {
    /// Certain (`Kept`, `Broken`) only if the whole interval is on one side of the limit.
    pub fn state_of(self, measured: Estimate) -> PromiseState {
        // Differences from the bound; a positive one is outside the promise.
        let (value, low, high) = match self {
            PromiseTerm::MaxSlowdown(max) => (
                measured.value - max,
                measured.low - max,
                measured.high - max,
            ),
            PromiseTerm::MinRate(min) => (
                min - measured.value,
                min - measured.high,
                min - measured.low,
            ),
        };

        match (low > 0.0, value > 0.0, high > 0.0) {
            (true, ..) => PromiseState::Broken,
            (false, true, _) => PromiseState::AtRisk,
            (false, false, true) => PromiseState::Likely,
            (false, false, false) => PromiseState::Kept,
        }
    }
}

/// The source of a solo speed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SoloBasis {
    /// A stored profile, or the simulator's ground truth.
    SoloProfile,
    /// An interval in which the program ran without the others.
    SoloInterval,
    /// The model: counted cycles minus counted waits that a program alone would not have.
    Model,
    /// Windows of the program's whole service with and without its co-runners, and the kernel's count of its waits.
    CoRunners,
}

impl SoloBasis {
    /// The name that users read.
    pub fn describe(self) -> &'static str {
        match self {
            SoloBasis::SoloProfile => "a solo profile",
            SoloBasis::SoloInterval => "a measured solo interval",
            SoloBasis::Model => "the model",
            SoloBasis::CoRunners => "the losses of its service to co-runners",
        }
    }
}

/// The evidence without which a promise cannot be judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MissingPromiseEvidence {
    /// Instructions and cycles of the program.
    Counters,
    /// The program's solo speed.
    SoloSpeed,
    /// Windows under the plan in force.
    Windows,
    /// Work: the program is not running.
    Work,
    /// A growing number in the file that counts the work.
    Report,
}

impl MissingPromiseEvidence {
    /// Names the missing evidence, and what would supply it.
    pub fn describe(self) -> &'static str {
        match self {
            MissingPromiseEvidence::Counters => {
                "its instructions are not counted on this machine; a program that reports its progress, or a host with a \
                 PMU, would tell"
            }
            MissingPromiseEvidence::SoloSpeed => {
                "its solo speed is not known; a stored profile, a solo interval, or stall counters with a miss curve would \
                 tell"
            }
            MissingPromiseEvidence::Windows => {
                "the plan in force is too new; some windows more will tell"
            }
            MissingPromiseEvidence::Work => "it does no work at present",
            MissingPromiseEvidence::Report => {
                "its progress_file has no growing number, and nothing else counts this work"
            }
        }
    }
}

/// One promise and its state after a window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PromiseReport {
    /// The process that has the promise.
    pub process: ProcessId,
    /// The thread with the most work, whose name represents the process.
    pub task: TaskId,
    /// The slowdown or rate that is promised.
    pub term: PromiseTerm,
    /// The state.
    pub state: PromiseState,
    /// The slowdown, or the work per second of each thread, with its 95 % interval; `None` if it was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<Estimate>,
    /// Source of the solo speed; `None` for rates, which need none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub basis: Option<SoloBasis>,
    /// Windows that were measured under the plan in force.
    pub windows: u32,
    /// The evidence without which the state is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<MissingPromiseEvidence>,
    /// Programs that would have to leave, if the promise is infeasible and the policy knows them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub must_leave: Vec<TaskId>,
    /// The best value that the policy can reach, in the unit of the term, if the promise is infeasible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_possible: Option<f64>,
}

impl PromiseReport {
    /// The windows that a measurement covers, because a loss of a single one is shown beside it.
    fn describe_windows(&self) -> String {
        match self.windows {
            0 | 1 => String::new(),
            windows => format!(", in {windows} windows"),
        }
    }

    /// A clause without a subject, such as `broken: 17.0 % slower than alone (15.0 to 19.0 %, in 12 windows),
    /// promised at most 5.0 %`.
    pub fn describe(&self, name: impl Fn(TaskId) -> String) -> String {
        let mut text = self.state.describe().to_string();
        let format_percent = |share: f64| format!("{:.1} %", 100.0 * share);
        match (self.term, self.measured) {
            (PromiseTerm::MaxSlowdown(max), Some(slowdown)) => {
                text += &format!(
                    ": {} slower than alone ({:.1} to {:.1} %{}), promised at most {}",
                    format_percent(slowdown.value),
                    100.0 * slowdown.low,
                    100.0 * slowdown.high,
                    self.describe_windows(),
                    format_percent(max)
                );
            }
            (PromiseTerm::MinRate(min), Some(rate)) => {
                text += &format!(
                    ": {:.4e} a second ({:.4e} to {:.4e}{}), promised at least {min:.4e}",
                    rate.value,
                    rate.low,
                    rate.high,
                    self.describe_windows()
                );
            }
            (PromiseTerm::MaxSlowdown(max), None) => {
                text += &format!(": promised at most {} slower", format_percent(max))
            }
            (PromiseTerm::MinRate(min), None) => {
                text += &format!(": promised at least {min:.4e} a second")
            }
        }
        if let Some(basis) = self.basis {
            text += &format!(", by {}", basis.describe());
        }
        if let Some(missing_evidence) = self.missing {
            text += &format!("; {}", missing_evidence.describe());
        }
        if self.state == PromiseState::Infeasible {
            match (self.term, self.best_possible) {
                (PromiseTerm::MaxSlowdown(_), Some(best)) => {
                    text += &format!("; the best plan reaches {}", format_percent(best))
                }
                (PromiseTerm::MinRate(_), Some(best)) => {
                    text += &format!("; the best plan reaches {best:.4e}")
                }
                (_, None) => {}
            }
            if !self.must_leave.is_empty() {
                let names: Vec<String> = self.must_leave.iter().map(|&task| name(task)).collect();
                text += &format!("; it needs {} to leave", names.join(" and "));
            }
        }
        text
    }
}

/// Maximum number of windows in an interval.
const MAX_WINDOWS: usize = 30;
/// Minimum number of windows for a judgment.
const MIN_WINDOWS: usize = 3;
/// Error of a solo speed that comes without an interval, as a fraction.
const UNSTATED_ERROR: f64 = 0.03;
/// Smallest error of a measured slowdown, as a fraction.
const MIN_ERROR: f64 = 0.002;
/// The cost of a marginal miss, as bounds relative to the counted mean; it varies because overlap does.
const MARGINAL_COST: (f64, f64) = (0.6, 1.5);
/// A program that appears faster than its solo speed, by more than this and by more than the error, contradicts that
/// solo speed.
const CONTRADICTED_FROM: f64 = 0.01;
/// A program that runs for a smaller share of a window does too little work to be judged.
const MIN_CPU_SHARE: f64 = 0.01;

/// A solo speed as cycles per instruction.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SoloCycles {
    /// Cycles per instruction with their interval.
    pub cycles_per_instr: Estimate,
    /// The source.
    pub basis: SoloBasis,
}

/// The solo speed that a fact states, or else the model's; `None` if the counters do not suffice
/// for the model.
pub fn solo_cycles(
    task: &TaskSample,
    profile: &Profile,
    last_level: Option<(CacheLevel, u64)>,
) -> Option<SoloCycles> {
    if let Some(fact) = profile
        .rates
        .solo_instr_per_cycle
        .filter(|fact| fact.value > 0.0)
    {
        return Some(SoloCycles {
            cycles_per_instr: inverse_estimate(&fact),
            basis: solo_basis(fact.source),
        });
    }

    let (level, bytes) = last_level?;
    let cycles_per_instr = modeled_solo_cycles(task, profile, level, bytes)?;
    Some(SoloCycles {
        cycles_per_instr,
        basis: SoloBasis::Model,
    })
}

fn solo_basis(source: FactSource) -> SoloBasis {
    match source {
        FactSource::StoredProfile | FactSource::Oracle | FactSource::ExactTrace => {
            SoloBasis::SoloProfile
        }
        _ => SoloBasis::SoloInterval,
    }
}

fn inverse_estimate(fact: &Fact<f64>) -> Estimate {
    let half_width = UNSTATED_ERROR * fact.value;
    let (low, high) = fact
        .error
        .map_or((fact.value - half_width, fact.value + half_width), |ends| {
            (ends.low, ends.high)
        });
    Estimate {
        value: 1.0 / fact.value,
        low: 1.0 / high.max(fact.value),
        high: 1.0 / low.clamp(1e-9, fact.value),
    }
}

/// Counted cycles per instruction, minus the waits of misses beyond those that the curve has for
/// the whole cache, minus the queueing that others cause. The program's own part of the queueing is
/// not counted, so the interval ranges from none of it to all of it.
fn modeled_solo_cycles(
    task: &TaskSample,
    profile: &Profile,
    level: CacheLevel,
    bytes: u64,
) -> Option<Estimate> {
    let event_count = |event| task.counts.get(event);
    let instructions = event_count(CounterEvent::Instructions).filter(|&count| count > 0.0)?;
    let cycles_per_instr = event_count(CounterEvent::Cycles)? / instructions;
    let misses_per_instr = event_count(CounterEvent::Misses(level))? / instructions;
    let queue_cycles_per_instr =
        event_count(CounterEvent::StallCycles(StallCause::BusQueue)).unwrap_or(0.0) / instructions;
    let memory = [StallCause::LocalMemory, StallCause::RemoteMemory].into_iter();
    let memory_stalls: Vec<f64> = memory
        .filter_map(|cause| event_count(CounterEvent::StallCycles(cause)))
        .collect();
    if memory_stalls.is_empty() {
        return None;
    }

    let stall_cycles_per_instr = memory_stalls.iter().sum::<f64>() / instructions;
    let curve = profile.locality.misses_per_kilo_instr.get(&level)?;
    let solo_mpki = curve
        .value
        .iter()
        .rfind(|(size, _)| *size <= bytes)
        .or(curve.value.first())?
        .1;

    // Misses beyond those with the whole cache, as a fraction of all misses.
    let excess_share = |whole_mpki: f64| {
        if misses_per_instr > 0.0 {
            (1.0 - whole_mpki / 1000.0 / misses_per_instr).clamp(0.0, 1.0)
        } else {
            0.0
        }
    };
    let (least_share, middle_share, largest_share) = (
        excess_share(solo_mpki.high),
        excess_share(solo_mpki.value),
        excess_share(solo_mpki.low),
    );
    let solo_cost_estimate = |share: f64, cost: f64, queue_share: f64| {
        (cycles_per_instr
            - share * stall_cycles_per_instr * cost
            - queue_share.max(share) * queue_cycles_per_instr)
            .max(0.05 * cycles_per_instr)
    };
    Some(Estimate {
        value: solo_cost_estimate(middle_share, 1.0, 0.5),
        low: solo_cost_estimate(largest_share, MARGINAL_COST.1, 1.0),
        high: solo_cost_estimate(least_share, MARGINAL_COST.0, 0.0),
    })
}

/// Numerator and denominator of a promise's ratio in one window; they are summed over windows, so that a short window
/// has little weight. For a slowdown, they are the time that the process ran or waited to run and the solo time of its
/// work; for a rate, the work and the seconds of its threads.
#[derive(Clone, Copy, PartialEq, Debug)]
struct JudgedWindow {
    amount: f64,
    reference: Estimate,
    /// Whether the amount is reported work; windows with different measures are not added.
    is_reported: bool,
}

#[derive(Clone, Debug, Default)]
struct PromiseHistory {
    /// The latest windows under the plan in force; `None` for a window that was not judged.
    windows: VecDeque<Option<JudgedWindow>>,
    basis: Option<SoloBasis>,
    /// The reason why the most recent unjudged window was not judged.
    missing_evidence: Option<MissingPromiseEvidence>,
    infeasibility: Option<InfeasiblePromise>,
}

/// The policy's statement that no plan keeps a promise.
#[derive(Clone, Debug)]
struct InfeasiblePromise {
    must_leave: Vec<TaskId>,
    best_possible: Option<f64>,
}

/// Judges every promise, window by window; see the module documentation.
#[derive(Clone, Debug, Default)]
pub struct PromiseTracker {
    /// By process; the flag is true for the promise of a rate.
    histories: BTreeMap<(ProcessId, bool), PromiseHistory>,
    /// Windows that do not count yet, because caches refill after a plan change.
    settling_windows: u32,
}

/// Windows that do not count after a plan change.
const SETTLING_WINDOWS: u32 = 1;

impl PromiseTracker {
    /// Observes a window that ran under `current_plan`, and the decision that followed it, and reports every promise.
    pub fn observe(
        &mut self,
        observation: &Observation,
        profiles: &Profiles,
        topology: &Topology,
        current_plan: &Plan,
        decision: &Decision,
    ) -> Vec<PromiseReport> {
        let is_promised =
            |task: &&TaskSample| !task.exited && task.goal.is_some_and(|goal| goal.is_promised());
        if !observation.tasks.iter().any(|task| is_promised(&task)) {
            self.histories.clear();
            return Vec::new();
        }

        let last_levels = topology
            .last_level_caches()
            .filter_map(|cache| Some((cache.level, cache.size_bytes?)));
        let last_level = last_levels.max_by_key(|(_, bytes)| *bytes);
        let is_counted = self.settling_windows == 0 && observation.applied.pending.is_empty();
        self.settling_windows = self.settling_windows.saturating_sub(1);

        let mut reports = Vec::new();
        let mut processes: Vec<ProcessId> = Vec::new();
        for first_task in observation.tasks.iter().filter(is_promised) {
            if processes.contains(&first_task.process) {
                continue;
            }

            processes.push(first_task.process);
            let threads: Vec<&TaskSample> = observation
                .tasks
                .iter()
                .filter(|task| task.process == first_task.process && !task.exited)
                .collect();
            let goal = threads
                .iter()
                .filter_map(|task| task.goal)
                .reduce(|a, b| a.merged_with(b))
                .unwrap_or_default();

            let busiest_task = threads
                .iter()
                .fold(
                    first_task,
                    |a, b| if b.ran_ns() > a.ran_ns() { b } else { a },
                )
                .task;
            let terms = [
                goal.max_slowdown.map(PromiseTerm::MaxSlowdown),
                goal.min_rate.map(PromiseTerm::MinRate),
            ];

            for term in terms.into_iter().flatten() {
                let is_rate = matches!(term, PromiseTerm::MinRate(_));
                let judgment = if is_rate {
                    measure_work_rate(&threads, goal, observation).map(|window| (window, None))
                } else {
                    estimate_slowdown(&threads, observation, profiles, last_level)
                };

                let history = self
                    .histories
                    .entry((first_task.process, is_rate))
                    .or_default();
                match judgment {
                    Ok((window, basis)) => history.add_judged(window, basis, is_counted),
                    Err(missing) => history.add_unjudged(missing, is_counted),
                }
                history.record_infeasibility(&decision.reasons, &threads);
                reports.push(history.build_report(first_task.process, busiest_task, term));
            }
        }

        self.histories
            .retain(|(process, _), _| processes.contains(process));
        let is_in_force = !observation.applied.is_only_proposed;
        if is_in_force && !current_plan.has_same_placement(&decision.plan) {
            self.settling_windows = SETTLING_WINDOWS;
            self.histories
                .values_mut()
                .for_each(|history| history.windows.clear());
        }
        reports
    }
}

/// Time that a process ran or waited to run in one window, and the solo time of its work. Both are
/// sums over threads, so that each thread is weighted by the time that its work takes. A thread
/// that only waits has work that takes no time alone. The basis is `None` if no thread ran.
fn estimate_slowdown(
    threads: &[&TaskSample],
    observation: &Observation,
    profiles: &Profiles,
    last_level: Option<(CacheLevel, u64)>,
) -> Result<(JudgedWindow, Option<SoloBasis>), MissingPromiseEvidence> {
    let min_demand_ns = MIN_CPU_SHARE * observation.span.elapsed_ns.max(1) as f64;
    let task_demand_ns =
        |task: &TaskSample| (task.ran_ns() + task.run_queue_wait_ns.unwrap_or(0)) as f64;

    let (mut demand_ns, mut solo_ns, mut basis) = (0.0, Estimate::exact(0.0), None);
    for task in threads
        .iter()
        .filter(|task| task_demand_ns(task) >= min_demand_ns)
    {
        demand_ns += task_demand_ns(task);
        if !task.has_run() {
            continue;
        }
        let event_count = |event| task.counts.get(event).filter(|count| *count > 0.0);
        let (Some(instructions), Some(cycles)) = (
            event_count(CounterEvent::Instructions),
            event_count(CounterEvent::Cycles),
        ) else {
            return Err(MissingPromiseEvidence::Counters);
        };

        let solo = profiles
            .get(&task.task)
            .and_then(|profile| solo_cycles(task, profile, last_level));
        let Some(solo) = solo else {
            return Err(MissingPromiseEvidence::SoloSpeed);
        };

        let ns_per_cycle = task.ran_ns() as f64 / cycles;
        let solo_work_ns = |cycles_per_instr: f64| instructions * cycles_per_instr * ns_per_cycle;
        solo_ns.value += solo_work_ns(solo.cycles_per_instr.value);
        solo_ns.low += solo_work_ns(solo.cycles_per_instr.low);
        solo_ns.high += solo_work_ns(solo.cycles_per_instr.high);
        // The basis of a process is the weakest one of its threads.
        basis = match (basis, solo.basis) {
            (Some(SoloBasis::Model), _) => basis,
            (_, basis) => Some(basis),
        };
    }

    if demand_ns == 0.0 {
        return Err(MissingPromiseEvidence::Work);
    }
    // The process was faster than alone by more than the error, so the solo speed belongs to other work.
    if demand_ns < (1.0 - CONTRADICTED_FROM) * solo_ns.low {
        return Err(MissingPromiseEvidence::SoloSpeed);
    }

    Ok((
        JudgedWindow {
            amount: demand_ns,
            reference: solo_ns,
            is_reported: false,
        },
        basis,
    ))
}

/// Work per second of each working thread in one window: reported work, or instructions if no
/// thread reports any and the goal accepts them.
fn measure_work_rate(
    threads: &[&TaskSample],
    goal: Goal,
    observation: &Observation,
) -> Result<JudgedWindow, MissingPromiseEvidence> {
    let seconds = observation.span.elapsed_ns.max(1) as f64 / 1e9;
    let has_reports = threads.iter().any(|task| task.progress.is_some());
    if goal.is_rate_reported && !has_reports {
        return Err(MissingPromiseEvidence::Report);
    }

    let work_of = |task: &&TaskSample| {
        if has_reports {
            task.progress
        } else {
            task.counts.get(CounterEvent::Instructions)
        }
    };
    let work_counts: Vec<f64> = threads.iter().filter_map(work_of).collect();
    if work_counts.is_empty() {
        return Err(MissingPromiseEvidence::Counters);
    }
    let reference = Estimate::exact(work_counts.len() as f64 * seconds);
    Ok(JudgedWindow {
        amount: work_counts.iter().sum(),
        reference,
        is_reported: has_reports,
    })
}

impl PromiseHistory {
    fn add_judged(&mut self, window: JudgedWindow, basis: Option<SoloBasis>, is_counted: bool) {
        let is_model = basis == Some(SoloBasis::Model);
        if is_model && self.basis.is_some_and(|known| known != SoloBasis::Model) {
            // Once a solo speed turned out to belong to other work, the model is no evidence for this work.
            return self.add_unjudged(MissingPromiseEvidence::SoloSpeed, is_counted);
        }
        let has_better_basis = self.basis == Some(SoloBasis::Model) && basis.is_some() && !is_model;
        let has_other_measure = self
            .judged_windows()
            .any(|earlier| earlier.is_reported != window.is_reported);
        if has_better_basis || has_other_measure {
            self.windows.clear();
        }
        self.basis = basis.or(self.basis);
        self.push(Some(window), is_counted);
    }

    fn add_unjudged(&mut self, missing_evidence: MissingPromiseEvidence, is_counted: bool) {
        self.missing_evidence = Some(missing_evidence);
        self.push(None, is_counted);
    }

    fn push(&mut self, window: Option<JudgedWindow>, is_counted: bool) {
        if is_counted {
            self.windows.push_back(window);
            if self.windows.len() > MAX_WINDOWS {
                self.windows.pop_front();
            }
        }
    }

    fn judged_windows(&self) -> impl Iterator<Item = &JudgedWindow> {
        self.windows.iter().flatten()
    }

    /// Enough windows, and at least half of all, so that a promise is not judged by only the
    /// measurable part of the work.
    fn has_enough_windows(&self) -> bool {
        let judged_count = self.judged_windows().count();
        judged_count >= MIN_WINDOWS && 2 * judged_count >= self.windows.len()
    }

    /// Takes the policy's statement about one of the threads, if there is one.
    fn record_infeasibility(&mut self, reasons: &[Reason], threads: &[&TaskSample]) {
        let is_own = |reason: &&Reason| {
            reason.kind == ReasonKind::InfeasibleGoal
                && reason
                    .tasks
                    .first()
                    .is_some_and(|task| threads.iter().any(|thread| thread.task == *task))
        };

        if let Some(reason) = reasons.iter().find(is_own) {
            let reason_number = |name: &str| {
                reason
                    .numbers
                    .iter()
                    .find(|(key, _)| key == name)
                    .map(|(_, value)| *value)
            };
            self.infeasibility = Some(InfeasiblePromise {
                must_leave: reason.tasks[1..]
                    .iter()
                    .take(reason_number("must_leave").map_or(0, |n| n as usize))
                    .copied()
                    .collect(),
                best_possible: reason_number("forecast_slowdown")
                    .or_else(|| reason_number("forecast_rate_per_s")),
            });
        }
    }

    /// Ratio over all windows with its 95 % interval, which combines the spread of the windows and
    /// the error of the solo speed.
    fn measured_value(&self, term: PromiseTerm) -> Option<Estimate> {
        let windows: Vec<(f64, f64)> = self
            .judged_windows()
            .map(|window| (window.amount, window.reference.value))
            .collect();
        let RatioOfSums { ratio, half_width } = RatioOfSums::new(&windows)?;
        let amount: f64 = windows.iter().map(|(amount, _)| amount).sum();
        let sum_of_references = |end_of: fn(&Estimate) -> f64| {
            self.judged_windows()
                .map(|window| end_of(&window.reference))
                .sum::<f64>()
        };

        let (offset, scale) = match term {
            PromiseTerm::MaxSlowdown(_) => (1.0, 1.0),
            PromiseTerm::MinRate(_) => (0.0, ratio.abs()),
        };
        let half_width = half_width.max(MIN_ERROR * scale);
        Some(Estimate {
            value: ratio - offset,
            low: amount / sum_of_references(|reference| reference.high) - offset - half_width,
            high: amount / sum_of_references(|reference| reference.low) - offset + half_width,
        })
    }

    fn judge(&self, measured: Option<Estimate>, term: PromiseTerm) -> PromiseState {
        let Some(measured) = measured.filter(|_| self.has_enough_windows()) else {
            return PromiseState::Unknown;
        };
        term.state_of(measured)
    }

    fn build_report(
        &mut self,
        process: ProcessId,
        task: TaskId,
        term: PromiseTerm,
    ) -> PromiseReport {
        let measured = self.measured_value(term);
        let measured_state = self.judge(measured, term);
        if matches!(measured_state, PromiseState::Kept | PromiseState::Likely) {
            self.infeasibility = None;
        }
        let state = match &self.infeasibility {
            Some(_) => PromiseState::Infeasible,
            None => measured_state,
        };
        let is_unknown = measured_state == PromiseState::Unknown;
        let infeasible = self.infeasibility.as_ref();

        PromiseReport {
            process,
            task,
            term,
            state,
            measured,
            basis: self.basis,
            windows: self.windows.len() as u32,
            missing: is_unknown.then(|| {
                match self.windows.contains(&None) || self.windows.is_empty() {
                    true => self
                        .missing_evidence
                        .unwrap_or(MissingPromiseEvidence::Windows),
                    false => MissingPromiseEvidence::Windows,
                }
            }),
            must_leave: infeasible
                .map_or_else(Vec::new, |infeasible| infeasible.must_leave.clone()),
            best_possible: infeasible.and_then(|infeasible| infeasible.best_possible),
        }
    }
}

#[cfg(test)]
mod tests;
