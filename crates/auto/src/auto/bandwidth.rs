//! Less memory bandwidth for the programs that break a promise: by limits of bandwidth, or else by fewer CPUs.
//!
//! Problem: a partition keeps others out of a cache, and not off the path to memory behind it. A program that streams
//! through memory slows a service down there, whatever its share of the cache, and no model here forecasts by how much.
//! Method, a fixed rule without a model: while a promise is missed on a memory node, the program without a promise that
//! moves most bytes there is halved, and halved again, until the promise is met; then it gets back one step after the
//! other. A step with which the promise is missed is undone. It is not tried again for some time, which doubles with
//! each failure, and not before the service has saved what a trial costs it, so that it keeps its promise in the mean,
//! trials included. If limits down to the smallest do not bring the service a fiftieth nearer to its promise, they are
//! not the remedy: all are released for a while. Where the machine limits no bandwidth, the same rule counts CPUs: a
//! program that may run on half as many requests half as much, and programs with one thread share a CPU. These CPUs are
//! rather those of a cache in which no program with a promise runs, because the stream fills the cache that it runs in,
//! too.
//!
//! For example, a service may be 10 % slower than alone and is 35 % slower beside a stream. With 50 % the stream costs
//! it 18 %, with 30 % of its requests 8 %. After three calm windows the stream gets 40 %, with which the service is 13
//! % slower, so it goes back to 30 %, and 40 % is not tried again for 30 windows. Where the stream loses one of its two
//! CPUs instead and the service is 4 % slower with one and 79 % with both, four windows of a trial cost it as much as
//! fifty of the others save, and the second CPU waits for twice as many.
//!
//! Properties: pure; a promise whose state is not measured changes nothing; programs with a promise are never limited;
//! when the last promise has ended, nothing is limited. Limits of bandwidth are judged by this rule alone, because it
//! measures the promise after each of them; fewer CPUs are proposed to the verifier, which protects the others.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    BandwidthLimit, BandwidthSupport, CacheId, CounterEvent, CpuSet, GroupId, Plan, PlanItem,
    ProbeKind, ProcessId, Reason, ShareMember, TaskId, TaskSample, VerificationOutcome, View,
    solo_cycles,
};
use cachemate_papers::partition::partitioned_cache::{
    CacheProcess, movable_processes, processes_of,
};
use cachemate_papers::solo_speeds::{SoloSpeeds, mean_slowdown, promise_slack};
use serde::Deserialize;

/// Windows after a change that do not count, because caches and queues settle.
const SETTLING_WINDOWS: u32 = 1;
/// Windows whose mean decides whether a promise is missed.
const MISSED_WINDOWS: u32 = 2;
/// Windows whose mean decides whether a step back is taken.
const CALM_WINDOWS: u32 = 3;
/// Windows for which a level that failed is not tried again, at first and at most.
const RETRY_WINDOWS: (u64, u64) = (30, 480);
/// Smallest gain of the service's slack, in parts of its promise, for which the smallest limits stay.
const MIN_HELP: f64 = 0.02;
/// A step back, as a divisor of the level.
const STEP_DIVISOR: u32 = 8;
/// Windows in a row that do not count because of probes.
const MAX_DISTURBED_WINDOWS: u32 = 5;
/// Windows in which a step back that fails costs the service: until it shows, and until it is undone.
const TRIAL_WINDOWS: u32 = SETTLING_WINDOWS + MISSED_WINDOWS + SETTLING_WINDOWS;
/// Share of the largest traffic below which a program is no aggressor.
const MIN_TRAFFIC_SHARE: f64 = 0.05;

/// What the rule may take from aggressors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Levers {
    /// Nothing.
    Off,
    /// Bandwidth, where the machine can limit it.
    #[default]
    Limits,
    /// Bandwidth, and CPUs where the machine cannot limit bandwidth.
    LimitsOrCpus,
}

/// The quantity that the rule takes from an aggressor.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Lever {
    Bandwidth(BandwidthSupport),
    /// CPUs of its cache.
    Cpus,
}

impl Lever {
    fn min_level(&self) -> u32 {
        match self {
            Lever::Bandwidth(support) => support.min_level,
            Lever::Cpus => 1,
        }
    }

    fn halve(&self, level: u32) -> u32 {
        let half = level / 2;
        match self {
            Lever::Cpus => half.max(1),
            // Hardware rounds up, so half of a small level may be the level itself.
            Lever::Bandwidth(support) => {
                let nearest = support.nearest_level(half);
                if nearest < level {
                    nearest
                } else {
                    self.step_down(level)
                }
            }
        }
    }

    fn step_down(&self, level: u32) -> u32 {
        let lower = level.saturating_sub(self.step(level));
        match self {
            Lever::Cpus => lower.max(1),
            Lever::Bandwidth(support) => support.nearest_level(lower),
        }
    }

    fn step_up(&self, level: u32) -> u32 {
        let higher = level.saturating_add(self.step(level));
        match self {
            Lever::Cpus => higher,
            Lever::Bandwidth(support) => support.nearest_level(higher),
        }
    }

    fn step(&self, level: u32) -> u32 {
        match self {
            Lever::Cpus => 1,
            Lever::Bandwidth(support) => support.step.max(level / STEP_DIVISOR),
        }
    }
}

/// A program that the rule may limit.
#[derive(Clone, PartialEq, Debug)]
struct Aggressor {
    process: ProcessId,
    cache: CacheId,
    lever: Lever,
    /// Bytes to and from memory in this window.
    bytes: f64,
    /// The level at which it is not limited.
    full_level: u32,
}

impl Aggressor {
    /// Whether it lives, and may be changed: all its threads for a limit of bandwidth, and one for fewer CPUs.
    fn can_be_limited(&self, view: &View<'_>) -> bool {
        let mut tasks = view
            .live_tasks()
            .filter(|task| task.process == self.process)
            .peekable();
        match self.lever {
            Lever::Bandwidth(_) => tasks.peek().is_some() && tasks.all(|task| !task.unmovable),
            Lever::Cpus => tasks.any(|task| !task.unmovable),
        }
    }
}

/// A limited program.
#[derive(Clone, PartialEq, Debug)]
struct Throttle {
    aggressor: Aggressor,
    level: u32,
    /// The level before a step back that has not proven itself yet.
    raised_from: Option<u32>,
    failure: Option<FailedLevel>,
    /// Whether the promise was met with this level.
    has_held: bool,
}

/// A level with which a promise was missed.
#[derive(Clone, Copy, PartialEq, Debug)]
struct FailedLevel {
    level: u32,
    retry_window: u64,
    /// Windows from the failure to the retry.
    windows: u64,
    /// Slack that a trial of it costs.
    cost: f64,
}

impl Throttle {
    /// Records that a promise is missed with this level; returns what a trial of it costs.
    fn record_failure(&mut self, window: u64, mean_slack: f64) -> f64 {
        let cost = -mean_slack * f64::from(TRIAL_WINDOWS);
        let before = self.failure.filter(|failure| failure.level <= self.level);
        let windows = before.map_or(RETRY_WINDOWS.0, |failure| {
            (2 * failure.windows).min(RETRY_WINDOWS.1)
        });
        self.failure = Some(FailedLevel {
            level: self.level,
            retry_window: window + windows,
            windows,
            cost,
        });
        cost
    }

    fn may_try(&self, level: u32, window: u64, saved_slack: f64) -> bool {
        self.failure.is_none_or(|failure| {
            level < failure.level || (window >= failure.retry_window && saved_slack >= failure.cost)
        })
    }
}

/// A pause after a failure, which doubles with each one.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Pause {
    /// The first window after it.
    until: u64,
    windows: u64,
}

impl Pause {
    fn begin(&mut self, window: u64) {
        self.windows = (2 * self.windows).clamp(RETRY_WINDOWS.0, RETRY_WINDOWS.1);
        self.until = window + self.windows;
    }
}

/// The promises and the limited programs of one memory node.
#[derive(Clone, PartialEq, Debug, Default)]
struct NodeThrottles {
    /// The processes with a promise that ran here last.
    promised: BTreeSet<ProcessId>,
    /// The program that was limited last is at the end.
    throttles: Vec<Throttle>,
    settling_windows: u32,
    slack_sum: f64,
    slack_windows: u32,
    /// Slack of all windows since a level last failed, less what its trial cost.
    saved_slack: f64,
    /// Slack before the first limit.
    unlimited_slack: f64,
    /// Decisions in a row that were put off because a limited program moved nothing.
    blind_decisions: u64,
    /// Nothing is limited, because limits did not help.
    pause: Pause,
}

/// The outcome of one window of the rule.
#[derive(Clone, Copy, PartialEq, Debug)]
enum RuleStep {
    Halved(ProcessId, u32),
    Raised(ProcessId, u32),
    /// A step back that has failed, or a level that no longer suffices.
    Lowered(ProcessId, u32),
    Released(ProcessId),
    /// All limits, because they did not help.
    ReleasedAll,
}

impl NodeThrottles {
    /// Lets the limits of programs that moved to another cache hold there. A limit whose quantity does not exist there
    /// ends. The result is true if a limit changes.
    fn follow(&mut self, aggressors: &[Aggressor]) -> bool {
        let mut has_changed = false;
        self.throttles.retain_mut(|throttle| {
            let old = &throttle.aggressor;
            let mut here = aggressors.iter().filter(|now| now.process == old.process);
            let Some(now) = here.next().filter(|now| now.cache != old.cache) else {
                return true;
            };

            has_changed = true;
            let full_level = match (old.lever, now.lever) {
                (Lever::Cpus, Lever::Cpus) => now.full_level,
                // Traffic under a limit does not tell what the program moves without one.
                (Lever::Bandwidth(before), Lever::Bandwidth(after))
                    if before.unit == after.unit =>
                {
                    now.full_level.max(old.full_level)
                }
                _ => return false,
            };
            throttle.aggressor = Aggressor {
                full_level,
                ..now.clone()
            };
            throttle.level = throttle.level.min(full_level);
            true
        });

        if has_changed {
            (self.slack_sum, self.slack_windows) = (0.0, 0);
            self.settling_windows = SETTLING_WINDOWS;
        }
        has_changed
    }

    /// Observes a window with the slack of the promise that is missed most, and changes at most one limit.
    fn observe(&mut self, slack: f64, aggressors: &[Aggressor], window: u64) -> Option<RuleStep> {
        self.saved_slack += slack;
        if self.settling_windows > 0 {
            self.settling_windows -= 1;
            return None;
        }

        self.slack_sum += slack;
        self.slack_windows += 1;
        let mean_slack = self.slack_sum / f64::from(self.slack_windows);
        let step = if mean_slack < 0.0 {
            if self.slack_windows < MISSED_WINDOWS {
                return None;
            }
            self.tighten(mean_slack, aggressors, window)
        } else {
            if self.slack_windows < CALM_WINDOWS {
                return None;
            }
            self.give_back(window)
        };

        match step {
            Some(_) => {
                (self.slack_sum, self.slack_windows) = (0.0, 0);
                self.settling_windows = SETTLING_WINDOWS;
            }
            // Old windows must not outweigh the present ones.
            None if self.slack_windows >= 2 * CALM_WINDOWS => {
                self.slack_sum *= 0.5;
                self.slack_windows /= 2;
            }
            None => {}
        }

        step
    }

    /// Observes a window in which a limit was only shown, and no longer shows it once the promise is kept without it.
    fn observe_shown(&mut self, slack: f64) -> Option<RuleStep> {
        self.slack_windows = if slack < 0.0 {
            0
        } else {
            self.slack_windows + 1
        };
        if self.slack_windows < CALM_WINDOWS {
            return None;
        }
        (self.slack_sum, self.slack_windows) = (0.0, 0);
        let released = self.throttles.pop()?;
        Some(RuleStep::Released(released.aggressor.process))
    }

    /// Undoes a step back that has not proven itself, or lowers one limit, or releases all if there is none to lower.
    fn tighten(
        &mut self,
        mean_slack: f64,
        aggressors: &[Aggressor],
        window: u64,
    ) -> Option<RuleStep> {
        if let Some(step) = self.undo_raise(mean_slack, window) {
            return Some(step);
        }
        if window < self.pause.until {
            return None;
        }
        match self.next_to_lower(aggressors) {
            Some(aggressor) => Some(self.lower(aggressor, mean_slack, window)),
            None => self.release_useless(mean_slack, aggressors, window),
        }
    }

    fn undo_raise(&mut self, mean_slack: f64, window: u64) -> Option<RuleStep> {
        let mut throttles = self.throttles.iter_mut();
        let throttle = throttles.find(|throttle| throttle.raised_from.is_some())?;
        self.saved_slack = -throttle.record_failure(window, mean_slack);
        throttle.level = throttle.raised_from.take().unwrap_or(throttle.level);
        let process = throttle.aggressor.process;
        Some(RuleStep::Lowered(process, throttle.level))
    }

    /// The program that moves most bytes among those whose limit is not the smallest; the first of equal ones. A
    /// program that moves little beside the largest is none of them.
    fn next_to_lower<'a>(&self, aggressors: &'a [Aggressor]) -> Option<&'a Aggressor> {
        let can_be_lowered = |aggressor: &&Aggressor| {
            let mut throttles = self.throttles.iter();
            let throttle = throttles.find(|t| t.aggressor.process == aggressor.process);
            throttle.is_none_or(|throttle| throttle.level > aggressor.lever.min_level())
        };
        let largest = aggressors.iter().map(|a| a.bytes).fold(0.0, f64::max);
        let candidates = aggressors
            .iter()
            .filter(|aggressor| aggressor.bytes >= MIN_TRAFFIC_SHARE * largest)
            .filter(can_be_lowered);
        candidates.reduce(|a, b| if b.bytes > a.bytes { b } else { a })
    }

    /// Releases all limits if limits down to the smallest have not helped.
    fn release_useless(
        &mut self,
        mean_slack: f64,
        aggressors: &[Aggressor],
        window: u64,
    ) -> Option<RuleStep> {
        let has_helped = mean_slack - self.unlimited_slack >= MIN_HELP;
        if self.throttles.is_empty() || has_helped || self.awaits_evidence(aggressors) {
            return None;
        }
        self.throttles.clear();
        self.pause.begin(window);
        Some(RuleStep::ReleasedAll)
    }

    /// Lowers the limit of a program: by one step if its level held until now, and otherwise by a half.
    fn lower(&mut self, aggressor: &Aggressor, mean_slack: f64, window: u64) -> RuleStep {
        self.blind_decisions = 0;
        if self.throttles.is_empty() {
            self.unlimited_slack = mean_slack;
        }
        let mut throttles = self.throttles.iter();
        let index = throttles.position(|t| t.aggressor.process == aggressor.process);
        let mut throttle = match index {
            Some(index) => self.throttles.remove(index),
            None => Throttle {
                aggressor: aggressor.clone(),
                level: aggressor.full_level,
                raised_from: None,
                failure: None,
                has_held: false,
            },
        };

        let has_held = std::mem::take(&mut throttle.has_held);
        self.saved_slack = -throttle.record_failure(window, mean_slack);
        let Aggressor { process, lever, .. } = throttle.aggressor;
        let step = if has_held {
            throttle.level = lever.step_down(throttle.level);
            RuleStep::Lowered(process, throttle.level)
        } else {
            throttle.level = lever.halve(throttle.level);
            RuleStep::Halved(process, throttle.level)
        };
        self.throttles.push(throttle);
        step
    }

    /// Whether a limited program that moved nothing in this window may still be lowered, so that limits down to the
    /// smallest were not tried. Such a program is waited for as long as a failed level.
    fn awaits_evidence(&mut self, aggressors: &[Aggressor]) -> bool {
        let is_unseen = |throttle: &Throttle| {
            let Aggressor { process, lever, .. } = throttle.aggressor;
            let is_seen = aggressors.iter().any(|now| now.process == process);
            throttle.level > lever.min_level() && !is_seen
        };
        self.blind_decisions = if self.throttles.iter().any(is_unseen) {
            self.blind_decisions + 1
        } else {
            0
        };
        (1..RETRY_WINDOWS.0).contains(&self.blind_decisions)
    }

    /// Takes a step back: of the program that was limited last, unless its next level is known to fail.
    fn give_back(&mut self, window: u64) -> Option<RuleStep> {
        for throttle in &mut self.throttles {
            throttle.has_held = true;
        }

        if let Some(index) = self.throttles.iter().position(|t| t.raised_from.is_some()) {
            let throttle = &mut self.throttles[index];
            throttle.raised_from = None;
            if throttle.level >= throttle.aggressor.full_level {
                let released = self.throttles.remove(index);
                return Some(RuleStep::Released(released.aggressor.process));
            }
        }

        let next_level = |throttle: &Throttle| {
            let next = throttle.aggressor.lever.step_up(throttle.level);
            next.min(throttle.aggressor.full_level)
        };
        let throttle =
            self.throttles.iter_mut().rev().find(|throttle| {
                throttle.may_try(next_level(throttle), window, self.saved_slack)
            })?;
        let level = next_level(throttle);
        throttle.raised_from = Some(throttle.level);
        throttle.level = level;
        Some(RuleStep::Raised(throttle.aggressor.process, level))
    }
}

/// The rule on all memory nodes.
#[derive(Default)]
pub struct BandwidthGuard {
    solo_speeds: SoloSpeeds,
    by_node: BTreeMap<u32, NodeThrottles>,
    /// Programs whose limit the machine refused.
    refused: BTreeMap<ProcessId, Pause>,
    narrowed: BTreeMap<TaskId, NarrowedTask>,
    /// CPUs that the last plan gave to limited tasks.
    narrowed_cpus: CpuSet,
    /// Processes with a promise for which CPUs were taken in this window.
    goal_processes: Vec<ProcessId>,
    /// Windows in a row in which probes disturbed the programs.
    disturbed_windows: u32,
}

/// A task that has or had fewer CPUs because of its process's limit. A plan to which the verifier returns may still
/// have any of the CPU sets that this rule gave it.
#[derive(Debug, Default)]
struct NarrowedTask {
    /// The CPU sets that the rule gave it, the last one at the end.
    given: Vec<CpuSet>,
    /// The CPUs that it would have otherwise.
    before: Option<CpuSet>,
}

/// Number of CPU sets that are remembered for a task.
const MAX_GIVEN_SETS: usize = 16;

impl NarrowedTask {
    fn record(&mut self, cpus: &CpuSet) {
        self.given.retain(|given| given != cpus);
        if self.given.len() == MAX_GIVEN_SETS {
            self.given.remove(0);
        }
        self.given.push(cpus.clone());
    }
}

impl BandwidthGuard {
    /// A plan without the limits and the narrowed CPUs of this rule, which later plans would otherwise keep.
    pub fn remove_from(&self, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        plan.bandwidth.clear();
        for (task, NarrowedTask { given, before }) in &self.narrowed {
            let cpus = plan.affinity.get(task);
            if cpus.is_some_and(|cpus| given.contains(cpus)) {
                match before {
                    Some(cpus) => _ = plan.affinity.insert(*task, cpus.clone()),
                    None => _ = plan.affinity.remove(task),
                }
            }
        }
        plan
    }

    /// Observes the verdict on fewer CPUs: what was rolled back is not tried again for a while.
    pub fn observe_verdict(&mut self, outcome: VerificationOutcome, window: u64) {
        let is_rejected = matches!(
            outcome,
            VerificationOutcome::Slower | VerificationOutcome::Refused
        );
        if !is_rejected {
            return;
        }
        for node in self.by_node.values_mut() {
            let count = node.throttles.len();
            node.throttles
                .retain(|throttle| throttle.aggressor.lever != Lever::Cpus);
            if node.throttles.len() < count {
                node.pause.begin(window);
            }
        }
    }

    /// Ends the limits of programs and of promises that have ended, and those that the machine has refused. Every
    /// window needs this, also while another change is measured, because the limit of a process that has ended makes
    /// the whole plan invalid. `view` has the plan with the limits. Returns whether a limit ended.
    pub fn drop_ended(&mut self, view: &View<'_>) -> bool {
        let cpus_by_node = node_cpus(view);
        let count = |by_node: &BTreeMap<u32, NodeThrottles>| -> usize {
            by_node.values().map(|node| node.throttles.len()).sum()
        };
        let count_before = count(&self.by_node);
        let refused_now = refused_processes(view);
        for process in &refused_now {
            let pause = self.refused.entry(*process).or_default();
            pause.begin(view.observation.window);
        }
        self.refused
            .retain(|process, _| view.live_tasks().any(|task| task.process == *process));
        if self.by_node.is_empty() {
            return false;
        }

        let promised = promised_processes(view);
        for (node, throttles) in &mut self.by_node {
            // A service without a request in this window is still where it ran last.
            let has_left = |process: &CacheProcess<'_>| {
                let mut nodes = cpus_by_node.iter();
                nodes.any(|(other, cpus)| other != node && process.runs_mostly_on(cpus))
            };
            throttles.promised.retain(|process| {
                let process = promised.iter().find(|other| other.process == *process);
                process.is_some_and(|process| !has_left(process))
            });
            throttles.throttles.retain(|Throttle { aggressor, .. }| {
                aggressor.can_be_limited(view) && !refused_now.contains(&aggressor.process)
            });
        }

        self.by_node.retain(|node, throttles| {
            cpus_by_node.contains_key(node) && !throttles.promised.is_empty()
        });
        count(&self.by_node) < count_before
    }

    /// Observes a window in which no other change was being measured, and applies the rule on every memory node.
    /// The result is true if a limit changes.
    pub fn observe(&mut self, view: &View<'_>, levers: Levers, reasons: &mut Vec<Reason>) -> bool {
        self.goal_processes.clear();
        self.solo_speeds.observe(view.observation);
        if levers == Levers::Off {
            return false;
        }

        // A promise that is missed beside probes in every window is missed all the same.
        self.disturbed_windows = match is_disturbed(view) {
            true => self.disturbed_windows + 1,
            false => 0,
        };
        if (1..MAX_DISTURBED_WINDOWS).contains(&self.disturbed_windows) {
            return false;
        }

        let mut has_changed = false;
        let window = view.observation.window;
        let all_promised = promised_processes(view);
        if all_promised.is_empty() {
            return false;
        }
        let processes = movable_processes(view);

        for (node, cpus) in node_cpus(view) {
            let promised = all_promised.iter();
            let promised: Vec<&CacheProcess<'_>> = promised
                .filter(|process| process.runs_mostly_on(&cpus))
                .collect();
            if promised.is_empty() {
                continue;
            }

            let mut throttles = self.by_node.remove(&node).unwrap_or_default();
            throttles
                .promised
                .extend(promised.iter().map(|process| process.process));
            let slacks = promised.into_iter().filter_map(|process| {
                let slack = promise_slack(view, process, &self.solo_speeds);
                Some((
                    process.process,
                    slack.or_else(|| modeled_slack(view, process))?,
                ))
            });
            let worst = slacks.reduce(|a, b| if b.1 < a.1 { b } else { a });
            if let Some((victim, slack)) = worst {
                let mut aggressors = aggressors(view, &processes, &cpus);
                if levers != Levers::LimitsOrCpus {
                    aggressors.retain(|aggressor| aggressor.lever != Lever::Cpus);
                }
                aggressors.retain(|aggressor| {
                    let pause = self.refused.get(&aggressor.process);
                    pause.is_none_or(|pause| window >= pause.until)
                });
                has_changed |= throttles.follow(&aggressors);
                // What is only shown has no effect that a further step could follow.
                let is_shown =
                    view.observation.applied.is_only_proposed && !throttles.throttles.is_empty();
                let step = if is_shown {
                    throttles.observe_shown(slack)
                } else {
                    throttles.observe(slack, &aggressors, window)
                };
                has_changed |= step.is_some();

                if let Some(step) = step {
                    self.explain(step, (victim, slack), &throttles, &processes, view, reasons);
                }
            }
            self.by_node.insert(node, throttles);
        }

        has_changed
    }

    fn explain(
        &mut self,
        step: RuleStep,
        (victim, slack): (ProcessId, f64),
        throttles: &NodeThrottles,
        processes: &[CacheProcess<'_>],
        view: &View<'_>,
        reasons: &mut Vec<Reason>,
    ) {
        let process = match step {
            RuleStep::Halved(process, _)
            | RuleStep::Raised(process, _)
            | RuleStep::Lowered(process, _)
            | RuleStep::Released(process) => Some(process),
            RuleStep::ReleasedAll => None,
        };
        let throttle = throttles
            .throttles
            .iter()
            .find(|throttle| Some(throttle.aggressor.process) == process);
        let is_cpus = throttle.is_some_and(|t| t.aggressor.lever == Lever::Cpus);
        if is_cpus && matches!(step, RuleStep::Halved(..) | RuleStep::Lowered(..)) {
            self.goal_processes.push(victim);
        }

        let amount = |level: u32| match throttle.map(|throttle| throttle.aggressor.lever) {
            Some(Lever::Bandwidth(support)) => {
                format!("{} of memory bandwidth", support.unit.describe(level))
            }
            _ => format!("{level} CPUs"),
        };
        let victim_task = view.live_tasks().find(|task| task.process == victim);
        let mut tasks: Vec<TaskId> = victim_task.into_iter().map(|task| task.task).collect();
        let of_process = processes
            .iter()
            .find(|other| Some(other.process) == process);
        tasks.extend(of_process.into_iter().flat_map(CacheProcess::task_ids));

        let text = match step {
            RuleStep::Halved(_, level) => format!(
                "{{0}} misses its promise beside {{1}}, which moves most bytes and gets {}",
                amount(level)
            ),
            RuleStep::Raised(_, level) => {
                format!(
                    "{{0}} keeps its promise, so {{1}} gets {} again",
                    amount(level)
                )
            }
            RuleStep::Lowered(_, level) => format!(
                "{{0}} misses its promise with more for {{1}}, which gets {}",
                amount(level)
            ),
            RuleStep::Released(_) => "{0} keeps its promise, so {1} is not limited".to_string(),
            RuleStep::ReleasedAll => {
                "{0} gained nothing from limits of bandwidth: they are released".to_string()
            }
        };
        reasons.push(Reason::new(tasks, text, vec![("slack".to_string(), slack)]));
    }

    /// The processes with a promise for which this window takes CPUs from others.
    pub fn take_goal_processes(&mut self) -> Vec<ProcessId> {
        std::mem::take(&mut self.goal_processes)
    }

    /// Replaces the limits of a plan, and narrows the CPUs of programs that no limit can reach.
    pub fn write_into_plan(&mut self, view: &View<'_>, plan: &mut Plan) {
        plan.bandwidth.clear();
        let live_tasks = view.observation.live_tasks();
        self.narrowed.retain(|task, _| live_tasks.contains(task));
        for (task, narrowed) in &mut self.narrowed {
            narrowed.before = plan.affinity.get(task).cloned();
            // CPUs that another mechanism gives it are no longer this rule's.
            let NarrowedTask { given, before } = narrowed;
            given.retain(|cpus| Some(cpus) != before.as_ref());
        }
        let old_cpus = std::mem::take(&mut self.narrowed_cpus);
        let throttles = self.by_node.values().flat_map(|node| &node.throttles);

        for throttle in throttles.filter(|throttle| throttle.aggressor.can_be_limited(view)) {
            let Aggressor {
                process,
                cache,
                lever,
                full_level,
                ..
            } = throttle.aggressor;
            if throttle.level >= full_level {
                continue;
            }

            match lever {
                Lever::Bandwidth(_) => {
                    plan.bandwidth.push(BandwidthLimit {
                        group: GroupId(plan.bandwidth.len() as u32),
                        members: vec![ShareMember::Process(process)],
                        cache,
                        level: throttle.level,
                    });
                }
                Lever::Cpus => {
                    let online = view.topology.online_last_levels();
                    let Some((_, cache_cpus)) = online.iter().find(|(id, _)| *id == cache) else {
                        continue;
                    };
                    let mut nodes = node_cpus(view).into_values();
                    let Some(cpus) = nodes.find(|cpus| cpus.intersects(cache_cpus)) else {
                        continue;
                    };
                    let narrowed = spare_cpus(view, &cpus, &old_cpus, throttle.level);
                    let tasks = view
                        .movable_tasks()
                        .filter(|task| task.process == process && !task.exited);

                    for task in tasks {
                        let before = plan.affinity.get(&task.task).cloned();
                        // Another mechanism has sent the task to another node.
                        if before.as_ref().is_some_and(|mask| !mask.intersects(&cpus)) {
                            continue;
                        }
                        plan.affinity.insert(task.task, narrowed.clone());
                        let record = self.narrowed.entry(task.task).or_default();
                        record.record(&narrowed);
                        record.before = before;
                        self.narrowed_cpus.extend(narrowed.iter());
                    }
                }
            }
        }
    }
}

/// Whether a probe in force stops programs, or slows one with a promise.
fn is_disturbed(view: &View<'_>) -> bool {
    let promised: BTreeSet<(TaskId, ProcessId)> = view
        .live_tasks()
        .filter(|task| task.goal.is_some_and(|goal| goal.is_promised()))
        .map(|task| (task.task, task.process))
        .collect();
    let is_promised = |task: TaskId| promised.iter().any(|(other, _)| *other == task);

    view.previous_plan
        .probes
        .iter()
        .any(|probe| match &probe.kind {
            ProbeKind::CoRunRows { .. }
            | ProbeKind::PairedRows { .. }
            | ProbeKind::Neighbor { .. } => true,
            ProbeKind::MissTrace { task, .. }
            | ProbeKind::ReuseTimes { task, .. }
            | ProbeKind::PrimeProbe { task, .. } => is_promised(*task),
            ProbeKind::AccessSamples { processes, .. } => promised
                .iter()
                .any(|(_, process)| processes.contains(process)),
            ProbeKind::SuperSets { .. } | ProbeKind::PingPong { .. } => false,
        })
}

/// So many CPUs of a memory node for limited programs: not those on which programs with a promise ran, nor others of
/// their caches, which would be filled; rather those that limited programs have already, and the last ones.
fn spare_cpus(view: &View<'_>, cpus: &CpuSet, old_cpus: &CpuSet, count: u32) -> CpuSet {
    let is_promised = |task: &&TaskSample| task.goal.is_some_and(|goal| goal.is_promised());
    let times = view.live_tasks().filter(is_promised);
    let busy_cpus: CpuSet = times
        .flat_map(|task| &task.on_cpu_ns)
        .filter(|(_, ns)| *ns * 10 > view.observation.span.elapsed_ns)
        .map(|(cpu, _)| cpu.0)
        .collect();

    let caches = view.topology.online_last_levels();
    let promised_caches = caches
        .iter()
        .filter(|(_, cpus)| cpus.intersects(&busy_cpus));
    let promised_cpus: CpuSet = promised_caches.flat_map(|(_, cpus)| cpus.iter()).collect();
    let mut candidates: Vec<u32> = cpus.iter().collect();
    candidates.sort_by_key(|&cpu| {
        let is_beside_promise = (busy_cpus.contains(cpu), promised_cpus.contains(cpu));
        (
            is_beside_promise,
            !old_cpus.contains(cpu),
            std::cmp::Reverse(cpu),
        )
    });
    candidates.into_iter().take(count as usize).collect()
}

/// The online CPUs of each memory node.
fn node_cpus(view: &View<'_>) -> BTreeMap<u32, CpuSet> {
    let mut nodes: BTreeMap<u32, CpuSet> = BTreeMap::new();
    for cpu in view.topology.cpus.iter().filter(|cpu| cpu.online) {
        nodes.entry(cpu.memory_node).or_default().insert(cpu.id.0);
    }
    nodes
}

/// Live processes with a promise, also those that must not be moved.
fn promised_processes<'a>(view: &'a View<'_>) -> Vec<CacheProcess<'a>> {
    let mut processes = processes_of(view.live_tasks());
    processes.retain(CacheProcess::is_promised);
    processes
}

/// The processes whose limit in the last plan the machine has refused; one that it only rounds is in force.
fn refused_processes(view: &View<'_>) -> BTreeSet<ProcessId> {
    let applied = &view.observation.applied;
    if applied.is_only_proposed {
        return BTreeSet::new();
    }
    let is_refused = |limit: &&BandwidthLimit| {
        let item = PlanItem::Bandwidth(limit.group, limit.cache);
        let mut in_force = applied.bandwidth.iter();
        applied.refused.iter().any(|refused| refused.item == item)
            && !in_force.any(|other| (other.group, other.cache) == (limit.group, limit.cache))
    };
    let limits = view.previous_plan.bandwidth.iter().filter(is_refused);
    let process_of = |member: &ShareMember| match member {
        ShareMember::Process(process) => Some(*process),
        ShareMember::Task(_) => None,
    };
    limits
        .flat_map(|limit| limit.members.iter().filter_map(process_of))
        .collect()
}

/// Programs without a promise that use the memory of these CPUs.
fn aggressors(view: &View<'_>, processes: &[CacheProcess<'_>], cpus: &CpuSet) -> Vec<Aggressor> {
    let caches = view.topology.online_last_levels();
    let elapsed_s = view.observation.span.elapsed_ns as f64 / 1e9;

    let unmovable_processes: BTreeSet<ProcessId> = view
        .live_tasks()
        .filter(|task| task.unmovable)
        .map(|task| task.process)
        .collect();

    let describe = |process: &CacheProcess<'_>| {
        let (cache, cache_cpus) = caches
            .iter()
            .find(|(_, cache_cpus)| process.runs_mostly_on(cache_cpus))?;
        let moved_bytes = process.moved_bytes();
        let bytes = moved_bytes.or_else(|| missed_bytes(process, view))?;
        let lever = view
            .capabilities
            .bandwidth_of(*cache)
            .map_or(Lever::Cpus, |support| Lever::Bandwidth(*support));

        let running_threads = process.tasks.iter().filter(|task| task.has_run()).count() as u32;
        let full_level = match lever {
            // A program with one thread gives way by sharing its CPU with the others that are limited.
            Lever::Cpus => running_threads.clamp(2, cache_cpus.count().max(2)),
            Lever::Bandwidth(support) => {
                let level = match support.unit.bytes_per_second() {
                    // Without counted traffic, the level that the program has now is unknown, so it is not limited:
                    // misses on demand may be a fifth of its traffic, and half of them a tenth.
                    Some(unit) => support.nearest_level(
                        libm::ceil(moved_bytes? / elapsed_s.max(1e-9) / unit)
                            .min(f64::from(u32::MAX)) as u32,
                    ),
                    None => support.max_level,
                };
                level.max(support.min_level + 1)
            }
        };
        Some(Aggressor {
            process: process.process,
            cache: *cache,
            lever,
            bytes,
            full_level,
        })
    };

    processes
        .iter()
        .filter(|process| !process.is_promised() && process.runs_mostly_on(cpus))
        .filter_map(describe)
        .filter(|aggressor| {
            // All of them have a thread that may be moved, which suffices for fewer CPUs.
            let is_movable = !unmovable_processes.contains(&aggressor.process);
            aggressor.bytes > 0.0 && (aggressor.lever == Lever::Cpus || is_movable)
        })
        .collect()
}

/// The slack of a promised slowdown by the model of the solo speed; `None` if the counters do not suffice for it.
fn modeled_slack(view: &View<'_>, process: &CacheProcess<'_>) -> Option<f64> {
    let max_slowdown = process.goal().max_slowdown?;
    let last_levels = view.topology.last_level_caches();
    let last_level = last_levels
        .filter_map(|cache| Some((cache.level, cache.size_bytes?)))
        .max_by_key(|(_, bytes)| *bytes);
    let slowdown = |task: &TaskSample| {
        let profile = view.profiles.get(&task.task)?;
        let solo = solo_cycles(task, profile, last_level)?;
        let count = |event| task.counts.get(event).filter(|count| *count > 0.0);
        let cycles = count(CounterEvent::Cycles)? / count(CounterEvent::Instructions)?;
        Some(cycles / solo.cycles_per_instr.value - 1.0)
    };
    let mean = mean_slowdown(&process.tasks, slowdown)?;
    (max_slowdown > 0.0).then(|| 1.0 - mean / max_slowdown)
}

/// The lines that missed the last level, as bytes; `None` if misses were not counted.
fn missed_bytes(process: &CacheProcess<'_>, view: &View<'_>) -> Option<f64> {
    let level = view.topology.last_level()?;
    let mut caches = view.topology.last_level_caches();
    let line_bytes = f64::from(caches.next()?.line_bytes.unwrap_or(64));
    let misses = |task: &&TaskSample| task.counts.get(CounterEvent::Misses(level));
    let misses = process.tasks.iter().filter_map(misses);
    Some(line_bytes * misses.reduce(|sum, count| sum + count)?)
}

#[cfg(test)]
mod tests;
