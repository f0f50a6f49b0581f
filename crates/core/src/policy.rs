//! Decisions: the operator's goals, the input of a policy, and its answer with reasons.

use serde::{Deserialize, Serialize};

use crate::{
    Cache, CacheId, Capabilities, CpuId, CpuSet, Forecast, Observation, PartitionSupport, Plan, Predictor, ProcessId,
    Profiles, TaskId, TaskSample, Topology,
};

/// One reason, in a form that survives renaming: `{0}` in `text` is `tasks[0]`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Reason {
    /// The kind of reason, for programs; absent in a log line that only explains.
    #[serde(default, skip_serializing_if = "ReasonKind::is_plain")]
    pub kind: ReasonKind,
    /// The tasks that the text speaks of, in the order in which it numbers them.
    pub tasks: Vec<TaskId>,
    /// For people; names of tasks stand as `{0}`, `{1}` and so on.
    pub text: String,
    /// The numbers it rests on: name with its unit last, and value.
    pub numbers: Vec<(String, f64)>,
}

impl Reason {
    /// The text with a name in each task's place. Names are inserted in one pass and never read again, because a program
    /// can be called `{1}`.
    pub fn render<N: std::fmt::Display>(&self, name: impl Fn(TaskId) -> N) -> String {
        let mut rendered = String::with_capacity(self.text.len());
        let mut rest = self.text.as_str();
        while let Some(open) = rest.find('{') {
            let (before, from) = rest.split_at(open);
            rendered.push_str(before);
            let place = from[1..].split_once('}').and_then(|(at, after)| Some((at.parse::<usize>().ok()?, after)));
            match place.and_then(|(at, after)| Some((*self.tasks.get(at)?, after))) {
                Some((task, after)) => {
                    rendered.push_str(&name(task).to_string());
                    rest = after;
                }
                None => {
                    rendered.push('{');
                    rest = &from[1..];
                }
            }
        }
        rendered + rest
    }
}

/// The kind of a [`Reason`]. Programs use this and never the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReasonKind {
    /// An explanation of the plan.
    #[default]
    #[serde(alias = "plain")]
    Explanation,
    /// A plan made the programs slower and was rolled back.
    RolledBack,
    /// A plan was not tried, because it or several in a row made programs slower.
    #[serde(alias = "kept-out")]
    CoolingDown,
    /// A trial of new shares ended with a verdict.
    TrialVerdict,
    /// A cluster of threads that share data; its tasks are the cluster.
    ClusterFound,
    /// No plan that the policy knows meets the goal of the first task. The number `must_leave` says how many of the tasks
    /// that follow would have to leave.
    InfeasibleGoal,
}

impl ReasonKind {
    fn is_plain(&self) -> bool {
        *self == ReasonKind::Explanation
    }
}

/// How the effect of a plan is verified by measured speeds.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verification {
    /// The plan is applied at once. If the guard is on, speeds before and after the change are compared.
    #[default]
    BeforeAndAfter,
    /// The plan is proposed: the verifier tries it or monitors it, and answers with a [`ChangeVerdict`].
    Proposed(Box<ProposedChange>),
    /// The change that was proposed last stays with the verifier. With any other verification it is withdrawn.
    Pending,
    /// Two plans alternate, of which this is one. The trial has the verdict, and the guard protects goals only.
    Trial,
    /// A trial has ended in favor of this plan. The guard rolls it back only if it harms a process more than the others
    /// gain, by the windows of the trial, and compares later plans with it.
    Measured,
}

impl Verification {
    fn is_before_and_after(&self) -> bool {
        *self == Verification::BeforeAndAfter
    }
}

/// The measurement of a proposed change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VerificationMethod {
    /// The plan before and the new one alternate in blocks of legs, whose order is drawn from the seed.
    Trial {
        /// Windows at the start of a leg that do not count.
        warmup_windows: u32,
        /// Windows of a leg that count.
        leg_windows: u32,
        /// Seed of the order.
        seed: u64,
    },
    /// The new plan is applied, and speeds before and after are compared.
    Monitoring,
}

/// A value that combines the speeds of several processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SpeedObjective {
    /// The sum of speeds.
    Sum,
    /// The smallest of them.
    Slowest,
}

/// The terms on which a policy proposes a plan.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProposedChange {
    /// How it is measured.
    pub method: VerificationMethod,
    /// The plan before, with all tasks pinned to their places: tasks stay where a plan has put them, so a trial against
    /// a plan without places would compare the new places with themselves.
    pub old: Plan,
    /// Forecasts of the old and the new plan.
    pub forecasts: [Forecast; 2],
    /// Forecast gain, as a share of the objective.
    pub forecast_gain: f64,
    /// Smallest gain that justifies the change, as a share.
    pub min_gain: f64,
    /// The objective by which speeds are compared.
    pub objective: SpeedObjective,
    /// Processes that count, with their weighted speeds under the old plan, in any unit.
    pub speeds: Vec<(ProcessId, f64)>,
}

/// A difference of logarithms with its standard error.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MeasuredLogRatio {
    /// Logarithm of the objective under the new plan over that under the old one.
    pub log_ratio: f64,
    /// Its standard error.
    pub error: f64,
}

/// The result of a verification.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum VerificationOutcome {
    /// A trial found the plan faster: it is kept.
    Faster,
    /// A trial did not: the plan before is restored.
    NotFaster,
    /// The monitored plan is not slower: it is kept.
    NotSlower,
    /// The plan is slower, or harms a program: the plan before is restored.
    Slower,
    /// No process ran long enough on both sides of the change: the plan is kept.
    NotMeasured,
    /// Tasks or phases changed: a trial is over, and a monitored plan is kept.
    Interrupted,
    /// The plan was not applied, because it is on cooldown or there is nothing to compare it with.
    Refused,
}

/// The verdict on the last change.
#[derive(Clone, PartialEq, Debug)]
pub struct ChangeVerdict {
    /// The result.
    pub outcome: VerificationOutcome,
    /// The plan that the verifier keeps, from which the policy continues.
    pub plan: Plan,
    /// Forecast of that plan, if it was proposed with one.
    pub forecast: Option<Forecast>,
    /// Gain as it was forecast, if the change was proposed.
    pub forecast_gain: Option<f64>,
    /// The measured change; `None` = nothing was measured.
    pub measured: Option<MeasuredLogRatio>,
}

/// Verdicts of the verifier, as policies ask for them.
pub trait Verdicts {
    /// The verdict that was reached since the last decision.
    fn latest(&self) -> Option<&ChangeVerdict>;

    /// Have plans failed, so that [`Verdicts::excludes`] may be true?
    fn has_failed_plans(&self) -> bool;

    /// Is a plan on cooldown, by itself or as the image of a failed one on like caches? `instead` is the plan that
    /// would be in its place: if that is an image as well, only the failed plan itself is excluded.
    fn excludes(&self, plan: &Plan, instead: &Plan, view: &View<'_>) -> bool;

    /// Is no plan tried in this window, because plans have failed?
    fn is_paused(&self, window: u64) -> bool;
}

/// Verdicts without a verifier: none.
impl Verdicts for () {
    fn latest(&self) -> Option<&ChangeVerdict> {
        None
    }

    fn has_failed_plans(&self) -> bool {
        false
    }

    fn excludes(&self, _: &Plan, _: &Plan, _: &View<'_>) -> bool {
        false
    }

    fn is_paused(&self, _: u64) -> bool {
        false
    }
}

/// A plan with its reasons, and the forecast that it was chosen by.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Decision {
    /// The whole desired state, not a difference.
    pub plan: Plan,
    /// At least enough to explain what is new in the plan; empty = nothing to say.
    #[serde(alias = "why")]
    pub reasons: Vec<Reason>,
    /// The policy's own forecast of the plan, which the loop moves to [`crate::WindowRecord::forecast`] and compares
    /// with the next window; `None` = the policy has no model, and the reference predictor forecasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// How the plan is verified.
    #[serde(default, skip_serializing_if = "Verification::is_before_and_after")]
    pub verification: Verification,
}

impl Decision {
    /// A decision without a forecast of its own, to be compared with the state before.
    pub fn new(plan: Plan, reasons: Vec<Reason>) -> Self {
        Decision { plan, reasons, forecast: None, verification: Verification::default() }
    }
}

/// The operator's goal for a task (configuration, not measurement).
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Goal {
    /// Relative weight of its slowdown; 1.0 by default.
    pub priority: f64,
    /// Maximum slowdown over its solo speed (0.05 = 5 %).
    #[serde(alias = "degradation_at_most")]
    pub max_slowdown: Option<f64>,
    /// Minimum work per second: the work that the task reports, or instructions if no thread of its process reports
    /// any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(alias = "rate_at_least")]
    pub min_rate: Option<f64>,
}

impl Default for Goal {
    /// A task without a goal.
    fn default() -> Self {
        Goal { priority: 1.0, max_slowdown: None, min_rate: None }
    }
}

impl Goal {
    /// Does the goal set a minimum speed?
    pub fn is_promised(&self) -> bool {
        self.max_slowdown.is_some() || self.min_rate.is_some()
    }

    /// Both together: the highest priority and the strictest of each promise.
    #[must_use]
    pub fn with(self, other: Goal) -> Goal {
        let strictest = |a: Option<f64>, b: Option<f64>, value: fn(f64, f64) -> f64| match (a, b) {
            (Some(a), Some(b)) => Some(value(a, b)),
            (a, b) => a.or(b),
        };
        Goal {
            priority: self.priority.max(other.priority),
            max_slowdown: strictest(self.max_slowdown, other.max_slowdown, f64::min),
            min_rate: strictest(self.min_rate, other.min_rate, f64::max),
        }
    }
}

/// The input of a policy.
pub struct View<'a> {
    /// CPUs and caches of the machine.
    pub topology: &'a Topology,
    /// The abilities of the machine.
    pub capabilities: &'a Capabilities,
    /// The window that has just ended.
    pub observation: &'a Observation,
    /// The profile of each task after that window, with what is recalled from earlier.
    pub profiles: &'a Profiles,
    /// The plan of the window before, without temporary pins of the verifier; without evidence its allowed, gangs and
    /// shares stay.
    pub previous_plan: &'a Plan,
    /// Predictor that answers "what if".
    pub predictor: &'a dyn Predictor,
    /// Verdicts on earlier decisions; `&()` = there is no verifier.
    pub verdicts: &'a dyn Verdicts,
}

impl<'a> View<'a> {
    /// The plan from which a policy continues: that of a verdict, or else the previous one.
    pub fn plan_to_keep(&self) -> &'a Plan {
        self.verdicts.latest().map_or(self.previous_plan, |verdict| &verdict.plan)
    }

    /// CPUs that are online.
    pub fn online(&self) -> CpuSet {
        self.topology.online()
    }

    /// Tasks that have not exited, in order of arrival.
    pub fn live_tasks(&self) -> impl Iterator<Item = &'a TaskSample> {
        self.observation.tasks.iter().filter(|task| !task.exited)
    }

    /// Tasks that may be given other places and shares, in order of arrival.
    pub fn movable_tasks(&self) -> impl Iterator<Item = &'a TaskSample> {
        self.live_tasks().filter(|task| !task.unmovable)
    }

    /// Sets of online CPUs that share a last-level cache each ([`Topology::last_level_domains`]).
    pub fn last_level_domains(&self) -> Vec<CpuSet> {
        self.topology.last_level_domains()
    }

    /// The last-level cache behind a CPU.
    pub fn last_level_of(&self, cpu: CpuId) -> Option<&'a Cache> {
        self.topology.last_level_of(cpu)
    }

    /// The ways in which a cache can be partitioned; empty if there is none.
    pub fn partitions_of(&self, cache: CacheId) -> impl Iterator<Item = &'a PartitionSupport> {
        self.capabilities.partitions_of(cache)
    }
}

/// A policy decides which tasks share a cache. It is pure: no clock, no I/O, and only seeded randomness.
pub trait Policy {
    /// Decides the next plan. The loop calls it once per window, in order; the policy may keep state between calls.
    fn decide(&mut self, view: &View<'_>) -> Decision;
}

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        (**self).decide(view)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a name that looks like a place in the text left as it is, and so is a place without a task?
    #[test]
    fn names_in_reasons_are_not_read_again() {
        let text = "{0} beside {1}, {9}, {x} and {".to_string();
        let reason = Reason { text, tasks: vec![TaskId(0), TaskId(1)], ..Reason::default() };
        let names = ["{1}", "{0}"];
        assert_eq!(reason.render(|task| names[task.0 as usize]), "{1} beside {0}, {9}, {x} and {");
    }
}
