//! Decisions: the operator's goals, the input of a policy, and its output with reasons.
//!
//! A decision has to be explained to the owner of a program that was moved, and repeated from a
//! recording a year later. So everything that a policy may know is in the [`View`], and nothing
//! else is; and what it decides comes with a text and the tasks that it names ([`Reason`]), because
//! a reason that is made up from the plan afterward is a guess.
//!
//! For example, `dio` moves task 2 to CPUs 2-3, with a reason that has the place `{0}` for the name
//! of task 2. `explain` fills in the program's name, and a recording that is read on another host
//! the name that it had then. A name is never looked up in the text, because a program can be
//! called `{1}`.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::{
    Cache, CacheId, Capabilities, CpuId, CpuSet, Forecast, Observation, PartitionSupport, Plan,
    Predictor, ProcessId, Profiles, TaskId, TaskSample, Topology,
};

/// One reason, independent of task names: `{0}` in `text` stands for `tasks[0]`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Reason {
    /// The kind of reason, for programs that read it; missing in a log line that only explains.
    #[serde(default, skip_serializing_if = "ReasonKind::is_plain")]
    pub kind: ReasonKind,
    /// The tasks that the text mentions, in the order of its numbers.
    pub tasks: Vec<TaskId>,
    /// The text for users; `{0}`, `{1}` and so on stand for the names of tasks.
    pub text: String,
    /// The numbers that support the reason: name with its unit last, and value.
    pub numbers: Vec<(String, f64)>,
}

impl Reason {
    /// Builds an explanation of the plan.
    pub fn new(tasks: Vec<TaskId>, text: impl Into<String>, numbers: Vec<(String, f64)>) -> Self {
        Reason {
            kind: ReasonKind::Explanation,
            tasks,
            text: text.into(),
            numbers,
        }
    }

    /// Names are inserted in one pass and not expanded again, because a program can be called
    /// `{1}`.
    pub fn render<N: std::fmt::Display>(&self, name: impl Fn(TaskId) -> N) -> String {
        let mut output = String::with_capacity(self.text.len());
        let mut remaining_text = self.text.as_str();
        while let Some(open) = remaining_text.find('{') {
            let (literal_text, placeholder) = remaining_text.split_at(open);
            output.push_str(literal_text);
            let index_and_remaining = placeholder[1..]
                .split_once('}')
                .and_then(|(index, remaining)| Some((index.parse::<usize>().ok()?, remaining)));

            match index_and_remaining
                .and_then(|(index, remaining)| Some((*self.tasks.get(index)?, remaining)))
            {
                Some((task, remaining)) => {
                    output.push_str(&name(task).to_string());
                    remaining_text = remaining;
                }
                None => {
                    output.push('{');
                    remaining_text = &placeholder[1..];
                }
            }
        }

        output + remaining_text
    }
}

/// The kind of a [`Reason`]. Programs evaluate the kind, never the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReasonKind {
    /// An explanation of the plan.
    #[default]
    Explanation,
    /// A plan made the programs slower and was rolled back.
    RolledBack,
    /// A plan was not tried, because it, or several plans in a row, made programs slower.
    CoolingDown,
    /// A change was measured, with the given result.
    TrialVerdict,
    /// A cluster of threads that share data; the reason's tasks are its members.
    ClusterFound,
    /// No plan known to the policy meets the goal of the first task. The number `must_leave` gives how many of the
    /// following tasks would have to leave.
    InfeasibleGoal,
}

impl ReasonKind {
    fn is_plain(&self) -> bool {
        *self == ReasonKind::Explanation
    }
}

/// The way in which measured speeds verify the effect of a plan.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verification {
    /// The plan is applied at once. If the guard is on, speeds before and after the change are compared.
    #[default]
    BeforeAndAfter,
    /// The plan is proposed: the verifier monitors or confirms it, and returns a [`ChangeVerdict`].
    Proposed(Box<ProposedChange>),
    /// The last proposed change stays with the verifier. Any other verification withdraws it.
    Pending,
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
    /// The new plan is applied, and speeds before and after the change are compared: it is kept unless it is slower.
    Monitoring,
    /// As monitoring, but the plan is kept only if it is measured to be faster.
    Confirmation,
}

/// The terms on which a policy proposes a plan.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProposedChange {
    /// The method by which the change is measured.
    pub method: VerificationMethod,
    /// Forecast gain, as a fraction of the sum of speeds.
    pub forecast_gain: f64,
    /// Smallest gain that justifies the change, as a fraction.
    pub min_gain: f64,
    /// Processes that count, with their weighted speeds under the old plan, in any unit.
    pub speeds: Vec<(ProcessId, f64)>,
    /// Processes whose goals are the reason for the change, because the old plan misses them by more. If one of them
    /// is measured to be faster, other processes may pay for it.
    pub goal_processes: Vec<ProcessId>,
}

/// A difference of logarithms with its standard error.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MeasuredLogRatio {
    /// Logarithm of the sum of speeds under the new plan over that under the old one.
    pub log_ratio: f64,
    /// Standard error of `log_ratio`.
    pub error: f64,
}

/// The result of a verification.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum VerificationOutcome {
    /// The plan is not slower, or was to be confirmed and is faster: it is kept.
    NotSlower,
    /// The plan is slower, harms a program, or was to be confirmed and is not faster: the old plan is restored.
    Slower,
    /// No process ran long enough both before and after the change, the plan is only a proposal, or nothing can be
    /// taken back: the plan is kept.
    NotMeasured,
    /// Tasks or phases changed: the plan is kept.
    Interrupted,
    /// The plan was not applied, because it is on cooldown or because there is no reference to compare it with.
    Refused,
}

/// The verdict on the last change.
#[derive(Clone, PartialEq, Debug)]
pub struct ChangeVerdict {
    /// The result.
    pub outcome: VerificationOutcome,
    /// The plan that the verifier keeps, from which the policy continues.
    pub plan: Plan,
    /// The forecast gain, if the change was proposed.
    pub forecast_gain: Option<f64>,
    /// The measured change; `None` if nothing was measured.
    pub measured: Option<MeasuredLogRatio>,
}

/// Verdicts of the verifier, as policies query them. By default there are none.
pub trait Verdicts {
    /// `None` unless a verdict was reached since the last decision.
    fn latest(&self) -> Option<&ChangeVerdict> {
        None
    }

    /// If false, [`Verdicts::excludes`] need not be asked.
    fn has_failed_plans(&self) -> bool {
        false
    }

    /// A plan on cooldown, itself or as the image of a failed plan on identical caches.
    /// `replacement` is the plan that would replace it: if that is an image as well, only the
    /// failed plan itself is excluded.
    fn excludes(&self, _plan: &Plan, _replacement: &Plan, _view: &View<'_>) -> bool {
        false
    }

    /// True while no plan is tried because earlier ones failed.
    fn is_paused(&self, _window: u64) -> bool {
        false
    }
}

/// The absence of verdicts, for use without a verifier.
impl Verdicts for () {}

/// A plan with its reasons, and the forecast on which the choice is based.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Decision {
    /// The complete desired state, not a difference.
    pub plan: Plan,
    /// Reasons that explain at least what is new in the plan; may be empty.
    pub reasons: Vec<Reason>,
    /// The policy's own forecast of the plan. The loop moves it to [`crate::WindowRecord::forecast`] and compares it
    /// with the next window. `None` if the policy has no model, in which case the reference predictor forecasts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// The way in which the plan is verified.
    #[serde(default, skip_serializing_if = "Verification::is_before_and_after")]
    pub verification: Verification,
}

impl Decision {
    /// Builds a decision without a forecast of its own, verified by comparison with the state before.
    pub fn new(plan: Plan, reasons: Vec<Reason>) -> Self {
        Decision {
            plan,
            reasons,
            forecast: None,
            verification: Verification::default(),
        }
    }
}

/// The operator's goal for a task (configured, not measured).
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Goal {
    /// Relative weight of its slowdown; 1.0 by default.
    pub priority: f64,
    /// Maximum slowdown relative to its solo speed (0.05 = 5 %).
    pub max_slowdown: Option<f64>,
    /// Minimum work per second: the work that the task reports, or instructions if no thread of its process reports
    /// work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_rate: Option<f64>,
    /// Whether only reported work counts for the rate, because the rule names the file that counts it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_rate_reported: bool,
}

impl Default for Goal {
    fn default() -> Self {
        Goal {
            priority: 1.0,
            max_slowdown: None,
            min_rate: None,
            is_rate_reported: false,
        }
    }
}

impl Goal {
    /// A priority alone promises nothing.
    pub fn is_promised(&self) -> bool {
        self.max_slowdown.is_some() || self.min_rate.is_some()
    }

    /// Highest priority, and the strictest of each promise.
    #[must_use]
    pub fn merged_with(self, other: Goal) -> Goal {
        let stricter_of =
            |a: Option<f64>, b: Option<f64>, stricter: fn(f64, f64) -> f64| match (a, b) {
                (Some(a), Some(b)) => Some(stricter(a, b)),
                (a, b) => a.or(b),
            };
        Goal {
            priority: self.priority.max(other.priority),
            max_slowdown: stricter_of(self.max_slowdown, other.max_slowdown, f64::min),
            min_rate: stricter_of(self.min_rate, other.min_rate, f64::max),
            is_rate_reported: self.is_rate_reported || other.is_rate_reported,
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
    /// The profile of each task after that window, including facts recalled from earlier.
    pub profiles: &'a Profiles,
    /// The plan of the window before, without temporary pins of the verifier. A policy without new evidence keeps its
    /// masks, gangs and shares. On a host that only observes it is a proposal ([`View::plan_in_force`]).
    pub previous_plan: &'a Plan,
    /// The predictor for "what if" questions.
    pub predictor: &'a dyn Predictor,
    /// Verdicts on earlier decisions; `&()` if there is no verifier.
    pub verdicts: &'a dyn Verdicts,
}

impl<'a> View<'a> {
    /// Where a policy continues from: the plan of the verdict, or else the previous one. A policy
    /// that starts here follows every roll-back.
    pub fn plan_to_keep(&self) -> &'a Plan {
        self.verdicts
            .latest()
            .map_or(self.previous_plan, |verdict| &verdict.plan)
    }

    /// The plan under which the window ran: the previous one, unless that was only proposed. Evidence
    /// belongs to this plan, and a policy's own proposal continues from [`View::plan_to_keep`].
    pub fn plan_in_force(&self) -> Cow<'a, Plan> {
        let applied = &self.observation.applied;
        if !applied.is_only_proposed {
            return Cow::Borrowed(self.previous_plan);
        }
        Cow::Owned(Plan {
            affinity: applied.affinity.clone(),
            weights: applied.weights.clone(),
            gangs: applied.gangs.clone(),
            shares: applied
                .shares
                .iter()
                .map(|active_share| active_share.share.clone())
                .collect(),
            bandwidth: applied.bandwidth.clone(),
            penalties: applied.penalties.clone(),
            probes: self.previous_plan.probes.clone(),
            window: self.previous_plan.window,
        })
    }

    /// CPUs that can run tasks now; hotplug changes them between windows.
    pub fn online(&self) -> CpuSet {
        self.topology.online()
    }

    /// Tasks in order of arrival, which is how ties are broken.
    pub fn live_tasks(&self) -> impl Iterator<Item = &'a TaskSample> {
        self.observation.tasks.iter().filter(|task| !task.exited)
    }

    /// Tasks whose CPUs and shares may be changed, in order of arrival.
    pub fn movable_tasks(&self) -> impl Iterator<Item = &'a TaskSample> {
        self.live_tasks().filter(|task| !task.unmovable)
    }

    /// Sets of online CPUs that share a last-level cache ([`Topology::last_level_domains`]).
    pub fn last_level_domains(&self) -> Vec<CpuSet> {
        self.topology.last_level_domains()
    }

    /// `None` if the CPU has no cache.
    pub fn last_level_cache_of(&self, cpu: CpuId) -> Option<&'a Cache> {
        self.topology.last_level_cache_of(cpu)
    }

    /// A cache can be partitioned by ways, by colors, in both ways, or not at all.
    pub fn partitions_of(&self, cache: CacheId) -> impl Iterator<Item = &'a PartitionSupport> {
        self.capabilities.partitions_of(cache)
    }
}

/// A policy decides which tasks share a cache. It is pure: it reads no clock, does no I/O, and uses only seeded
/// randomness.
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

    /// Is a name that looks like a placeholder left unchanged, and so is a placeholder without a task?
    #[test]
    fn placeholders_in_task_names_are_not_expanded() {
        let text = "{0} beside {1}, {9}, {x} and {".to_string();
        let reason = Reason {
            text,
            tasks: vec![TaskId(0), TaskId(1)],
            ..Reason::default()
        };
        let names = ["{1}", "{0}"];
        assert_eq!(
            reason.render(|task| names[task.0 as usize]),
            "{1} beside {0}, {9}, {x} and {"
        );
    }
}
