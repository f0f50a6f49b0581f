//! Verdict of a change: are the programs, on the whole, slower than before?
//!
//! There are two questions, because a single one could be exploited. First, consider the mean over processes of the
//! logarithm of new over old speed, weighted by priority: is it lower by more than the smallest loss worth acting on,
//! and by more than noise? Second, apart from the mean: is any process slower by a tenth, and by more than *its own*
//! noise? If so, the stated goal decides, counting certain changes only; the change is kept only if others gained more
//! than that process lost.
//!
//! Programs report their own speeds, so their influence is bounded. A process's ratio counts as a halving or a doubling
//! at most. One user's processes weigh no more than all others together. A process that is noisier than the others
//! counts less in the mean. Floors come first ([`cachemate_core::Goal::is_promised`]): a change that breaks more of
//! them is worse, and one that restores some is better, whatever the other gains and losses.

use cachemate_core::{CounterEvent, Goal, GuardObjective, ProcessId, TaskSample};

use super::noise::{median, student_bound};
use crate::work_metric::WorkMetric;

/// Each of the two questions may roll back one in a hundred changes without effect.
const FALSE_ALARMS: f64 = 0.01;
/// Larger ratios of speeds are clamped.
const MAX_LOG_RATIO: f64 = std::f64::consts::LN_2;
/// Values that differ by less count as equal.
const ALIKE: f64 = 1e-6;
/// A process that is slower by this share is considered separately.
const HARMED_FROM: f64 = 0.1;

/// Whether a process's goal was met before and after a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GoalChange {
    pub broken_before: bool,
    pub broken_after: bool,
}

/// Change of the speed of one process.
#[derive(Clone, PartialEq, Debug)]
pub struct ProcessChange {
    pub process: ProcessId,
    /// Owner of the process; `None` if unknown.
    pub user: Option<u32>,
    pub work: WorkMetric,
    pub priority: f64,
    /// Natural logarithm of the speed after the change over the speed before.
    pub log_ratio: f64,
    pub standard_error: f64,
    pub degrees_of_freedom: f64,
    pub floor: GoalChange,
}

impl ProcessChange {
    fn clamped_log_ratio(&self) -> f64 {
        self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    }

    /// Does the change exceed noise, if this many processes are tested?
    pub fn is_sure(&self, min_windows: usize) -> bool {
        let bound = student_bound(FALSE_ALARMS / min_windows.max(1) as f64, self.degrees_of_freedom);
        self.log_ratio.abs() > bound * self.standard_error
    }
}

/// Result of a comparison.
#[derive(Clone, PartialEq, Debug)]
pub struct GuardVerdict {
    pub worse: bool,
    /// Whether the change is worse for some process, whatever the mean: more goals are broken, or one process lost more
    /// than the others gained.
    pub is_harmful: bool,
    /// Weighted mean of the clamped logarithms of ratios, and its standard error.
    pub mean_log_ratio: f64,
    pub standard_error: f64,
    /// The process with the largest loss beyond noise, and its log ratio.
    pub harmed: Option<(ProcessId, f64)>,
    /// Whether any process lost more than the smallest loss worth acting on, beyond noise.
    pub any_process_lost: bool,
    /// Change in the number of missed goals.
    pub floors_broken: i64,
    /// Number of processes that report no work, and the proxy events by which they were compared.
    pub proxies: (usize, Vec<CounterEvent>),
}

impl GuardVerdict {
    /// Returns the verdict by the stated goal; `min_loss` is the smallest loss of the mean worth acting on, as a share.
    pub fn from_changes(changes: &[ProcessChange], objective: GuardObjective, min_loss: f64) -> Self {
        let (mean_log_ratio, standard_error, degrees) = noisy_mean(changes);
        let bound = student_bound(FALSE_ALARMS, degrees) * standard_error;
        let minimum = libm::log1p(-min_loss.min(0.99));
        let all_slower = mean_log_ratio < -bound && mean_log_ratio < minimum;
        let losers_below = |bound_below: f64| {
            changes.iter().filter(move |change| change.log_ratio < bound_below && change.is_sure(changes.len()))
        };
        let lost_most = losers_below(libm::log1p(-HARMED_FROM)).reduce(|largest_loss, change| {
            if change.log_ratio < largest_loss.log_ratio { change } else { largest_loss }
        });
        let not_made_up_for = lost_most.is_some() && sure_value(changes, objective) <= ALIKE;
        let floors_broken: i64 = changes.iter().map(|change| change.floor).map(GoalChange::newly_broken).sum();
        let is_harmful = floors_broken > 0 || floors_broken == 0 && not_made_up_for;
        GuardVerdict {
            worse: is_harmful || floors_broken == 0 && all_slower,
            is_harmful,
            mean_log_ratio,
            standard_error,
            any_process_lost: losers_below(minimum).next().is_some(),
            harmed: lost_most.map(|change| (change.process, change.log_ratio)),
            floors_broken,
            proxies: proxy_events(changes),
        }
    }
}

impl GoalChange {
    /// Combines two floors: a goal is missed if either is.
    pub fn combined_with(self, other: GoalChange) -> GoalChange {
        GoalChange {
            broken_before: self.broken_before || other.broken_before,
            broken_after: self.broken_after || other.broken_after,
        }
    }

    pub fn newly_broken(self) -> i64 {
        i64::from(self.broken_after) - i64::from(self.broken_before)
    }
}

/// Returns the objective's value, counting only changes that exceed their own noise.
fn sure_value(changes: &[ProcessChange], objective: GuardObjective) -> f64 {
    let sure_log_ratio =
        |change: &ProcessChange| if change.is_sure(changes.len()) { change.clamped_log_ratio() } else { 0.0 };
    match objective {
        GuardObjective::WorstProcessSpeed => changes.iter().map(sure_log_ratio).fold(0.0, f64::min),
        GuardObjective::MeanLogSpeed => {
            let weights = normalized_weights(changes, |_| 1.0);
            changes.iter().zip(&weights).map(|(change, weight)| weight * sure_log_ratio(change)).sum()
        }
    }
}

/// Returns the mean over processes, its standard error and degrees of freedom (Welch 1947); noisier processes count
/// less.
fn noisy_mean(changes: &[ProcessChange]) -> (f64, f64, f64) {
    let errors: Vec<f64> = changes.iter().map(|change| change.standard_error).collect();
    let usual = median(&errors);
    let precision_factor = |change: &ProcessChange| {
        let noisier = change.standard_error / usual;
        if noisier.is_nan() { 1.0 } else { 1.0 / (1.0 + noisier * noisier) }
    };
    let weights = normalized_weights(changes, precision_factor);
    let mean = changes.iter().zip(&weights).map(|(change, weight)| weight * change.clamped_log_ratio()).sum();
    let variance_shares = changes.iter().zip(&weights).map(|(change, weight)| (weight * change.standard_error).powi(2));
    let (mut variance, mut of_variance) = (0.0, 0.0);
    for (variance_share, change) in variance_shares.zip(changes) {
        variance += variance_share;
        of_variance += variance_share * variance_share / change.degrees_of_freedom;
    }
    let degrees = if of_variance > 0.0 { variance * variance / of_variance } else { f64::MAX };
    (mean, libm::sqrt(variance), degrees)
}

/// Returns weights that add up to one: by priority and the given factor, with at most half for one user among several.
fn normalized_weights(changes: &[ProcessChange], factor: impl Fn(&ProcessChange) -> f64) -> Vec<f64> {
    let mut weights: Vec<f64> = changes.iter().map(|change| change.priority * factor(change)).collect();
    let total: f64 = weights.iter().sum();
    for change in changes {
        let is_same_user = |process_change: &ProcessChange| process_change.user == change.user;
        let user_weight: f64 = changes
            .iter()
            .zip(&weights)
            .filter(|(process_change, _)| is_same_user(process_change))
            .map(|(_, weight)| weight)
            .sum();
        // At most one user can have more than half.
        if user_weight > total / 2.0 && user_weight < total {
            let fewer = (total - user_weight) / user_weight;
            changes
                .iter()
                .zip(&mut weights)
                .filter(|(process_change, _)| is_same_user(process_change))
                .for_each(|(_, weight)| *weight *= fewer);
            break;
        }
    }
    let total: f64 = weights.iter().sum();
    if total > 0.0 {
        weights.iter_mut().for_each(|weight| *weight /= total);
    }
    weights
}

fn proxy_events(changes: &[ProcessChange]) -> (usize, Vec<CounterEvent>) {
    let events = changes.iter().filter_map(|change| match change.work {
        WorkMetric::Proxy(event) => Some(event),
        _ => None,
    });
    let mut distinct_events: Vec<CounterEvent> = events.clone().collect();
    distinct_events.sort_unstable();
    distinct_events.dedup();
    (events.count(), distinct_events)
}

/// Returns the strictest goal and the highest priority among a process's threads.
pub fn goal_of(process: ProcessId, tasks: &[TaskSample]) -> Goal {
    let goals = tasks.iter().filter(|task| task.process == process).filter_map(|task| task.goal);
    goals.reduce(Goal::merged_with).unwrap_or_default()
}
