//! Verdict of a change: are the programs, on the whole, slower than before?
//!
//! There are two questions, because a single one could be exploited. First, consider the mean over processes of the
//! logarithm of new over old speed, weighted by priority: is it lower by more than the smallest loss worth acting on,
//! and by more than noise? Second, apart from the mean: is any process slower by a tenth, and by more than *its own*
//! noise? If so, the objective is evaluated with significant changes only, and the change is kept only if the other
//! processes gained more than that process lost.
//!
//! Programs report their own speeds, so their influence is bounded. A process's ratio counts as a halving or a
//! doubling at most. One user's processes weigh no more than all others together. A process that is noisier than the
//! others counts less in the mean, unless its change exceeds its own noise. Floors come first
//! ([`cachemate_core::Goal::is_promised`]): a change that breaks more of them is worse, and one that restores some is
//! better, whatever the other gains and losses.

use std::collections::BTreeMap;

use cachemate_core::{
    CounterEvent, Goal, GuardObjective, ProcessId, TaskSample, median, student_bound,
};
use cachemate_papers::work_metric::WorkMetric;

/// Probability with which each of the two tests rolls back a change that has no effect.
const FALSE_ALARM_RATE: f64 = 0.01;
/// Larger ratios of speeds are clamped.
const MAX_LOG_RATIO: f64 = std::f64::consts::LN_2;
/// Values that differ by less count as equal.
const EQUALITY_TOLERANCE: f64 = 1e-6;
/// Smallest loss of a single process that is tested apart from the mean.
const MIN_HARMFUL_LOSS: f64 = 0.1;

/// Whether a process's goal was met before and after a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GoalChange {
    pub was_broken: bool,
    pub is_broken: bool,
}

/// Change of the speed of one process.
#[derive(Clone, PartialEq, Debug)]
pub struct ProcessChange {
    pub process: ProcessId,
    /// Owner of the process; `None` if unknown.
    pub user: Option<u32>,
    pub metric: WorkMetric,
    pub priority: f64,
    /// Natural logarithm of the speed after the change over the speed before.
    pub log_ratio: f64,
    pub standard_error: f64,
    pub degrees_of_freedom: f64,
    pub goal_change: GoalChange,
}

impl ProcessChange {
    fn clamped_log_ratio(&self) -> f64 {
        self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    }

    /// Whether the change is larger than noise, with a bound that is corrected for the number of tested processes.
    pub fn exceeds_noise(&self, tested_processes: usize) -> bool {
        self.log_ratio.abs() > self.noise_bound(tested_processes)
    }

    /// The size up to which noise may explain a change.
    fn noise_bound(&self, tested_processes: usize) -> f64 {
        let bound = student_bound(
            FALSE_ALARM_RATE / tested_processes.max(1) as f64,
            self.degrees_of_freedom,
        );
        bound * self.standard_error
    }
}

/// Result of a comparison.
#[derive(Clone, PartialEq, Debug)]
pub struct GuardVerdict {
    pub is_worse: bool,
    /// Weighted mean of the clamped logarithms of ratios, and its standard error.
    pub mean_log_ratio: f64,
    pub standard_error: f64,
    /// The process with the largest loss beyond noise, and its log ratio.
    pub worst_loss: Option<(ProcessId, f64)>,
    /// Whether any process lost more than the smallest loss worth acting on, beyond noise.
    pub has_losing_process: bool,
    /// Change in the number of missed goals.
    pub broken_goal_change: i64,
    /// Number of processes that report no work, and the proxy events by which they were compared.
    pub proxy_comparison: (usize, Vec<CounterEvent>),
}

impl GuardVerdict {
    /// The verdict under the objective. `min_loss` is the smallest loss of the mean that causes a roll-back, as a
    /// share.
    pub fn from_changes(
        changes: &[ProcessChange],
        objective: GuardObjective,
        min_loss: f64,
    ) -> Self {
        let (mean_log_ratio, standard_error, degrees_of_freedom) = weighted_mean(changes);
        let noise_bound = student_bound(FALSE_ALARM_RATE, degrees_of_freedom) * standard_error;
        let loss_threshold = libm::log1p(-min_loss.min(0.99));
        let is_mean_slower = mean_log_ratio < -noise_bound && mean_log_ratio < loss_threshold;
        let losers_below = |max_log_ratio: f64| {
            changes.iter().filter(move |change| {
                change.log_ratio < max_log_ratio && change.exceeds_noise(changes.len())
            })
        };
        let worst_loser =
            losers_below(libm::log1p(-MIN_HARMFUL_LOSS)).reduce(|largest_loss, change| {
                if change.log_ratio < largest_loss.log_ratio {
                    change
                } else {
                    largest_loss
                }
            });
        let is_loss_uncompensated = worst_loser.is_some()
            && significant_objective_value(changes, objective) <= EQUALITY_TOLERANCE;
        let broken_goal_change: i64 = changes
            .iter()
            .map(|change| change.goal_change)
            .map(GoalChange::broken_goal_change)
            .sum();

        // More goals are broken, or one process lost more than the others gained.
        let is_harmful = broken_goal_change > 0 || broken_goal_change == 0 && is_loss_uncompensated;
        GuardVerdict {
            is_worse: is_harmful || broken_goal_change == 0 && is_mean_slower,
            mean_log_ratio,
            standard_error,
            has_losing_process: losers_below(loss_threshold).next().is_some(),
            worst_loss: worst_loser.map(|change| (change.process, change.log_ratio)),
            broken_goal_change,
            proxy_comparison: proxy_events(changes),
        }
    }
}

impl GoalChange {
    /// Combines two goals of a process: the result is broken if either goal is broken.
    pub fn combined_with(self, other: GoalChange) -> GoalChange {
        GoalChange {
            was_broken: self.was_broken || other.was_broken,
            is_broken: self.is_broken || other.is_broken,
        }
    }

    pub fn broken_goal_change(self) -> i64 {
        i64::from(self.is_broken) - i64::from(self.was_broken)
    }
}

/// The objective's value, counting only changes that exceed their own noise.
fn significant_objective_value(changes: &[ProcessChange], objective: GuardObjective) -> f64 {
    let significant_log_ratio = |change: &ProcessChange| {
        if change.exceeds_noise(changes.len()) {
            change.clamped_log_ratio()
        } else {
            0.0
        }
    };

    match objective {
        GuardObjective::WorstProcessSpeed => changes
            .iter()
            .map(significant_log_ratio)
            .fold(0.0, f64::min),
        GuardObjective::MeanLogSpeed => {
            let weights = normalized_weights(changes, |_| 1.0);
            changes
                .iter()
                .zip(&weights)
                .map(|(change, weight)| weight * significant_log_ratio(change))
                .sum()
        }
    }
}

/// The mean over processes, its standard error and degrees of freedom (Welch 1947). Noisier processes count less,
/// unless their changes, as far as they count, exceed their own noise: a certain gain must weigh as much as a certain
/// loss.
fn weighted_mean(changes: &[ProcessChange]) -> (f64, f64, f64) {
    let errors: Vec<f64> = changes.iter().map(|change| change.standard_error).collect();
    let median_error = median(&errors).unwrap_or(f64::NAN);
    let precision_factor = |change: &ProcessChange| {
        if change.clamped_log_ratio().abs() > change.noise_bound(changes.len()) {
            return 1.0;
        }
        let relative_error = change.standard_error / median_error;
        if relative_error.is_nan() {
            1.0
        } else {
            1.0 / (1.0 + relative_error * relative_error)
        }
    };
    let weights = normalized_weights(changes, precision_factor);
    let mean = changes
        .iter()
        .zip(&weights)
        .map(|(change, weight)| weight * change.clamped_log_ratio())
        .sum();

    let variance_shares = changes
        .iter()
        .zip(&weights)
        .map(|(change, weight)| (weight * change.standard_error).powi(2));
    let (mut variance, mut squared_share_sum) = (0.0, 0.0);
    for (variance_share, change) in variance_shares.zip(changes) {
        variance += variance_share;
        squared_share_sum += variance_share * variance_share / change.degrees_of_freedom;
    }
    let degrees_of_freedom = if squared_share_sum > 0.0 {
        variance * variance / squared_share_sum
    } else {
        f64::MAX
    };
    (mean, libm::sqrt(variance), degrees_of_freedom)
}

/// Weights that add up to one: priority times the given factor, with at most half of the total for one of several
/// users.
fn normalized_weights(
    changes: &[ProcessChange],
    factor: impl Fn(&ProcessChange) -> f64,
) -> Vec<f64> {
    let mut weights: Vec<f64> = changes
        .iter()
        .map(|change| change.priority * factor(change))
        .collect();
    let weight_sum: f64 = weights.iter().sum();
    let mut user_weights: BTreeMap<Option<u32>, f64> = BTreeMap::new();
    for (change, weight) in changes.iter().zip(&weights) {
        *user_weights.entry(change.user).or_insert(0.0) += weight;
    }

    // At most one user can have more than half.
    let mut majority = user_weights.into_iter();
    if let Some((user, user_weight)) =
        majority.find(|(_, weight)| *weight > weight_sum / 2.0 && *weight < weight_sum)
    {
        let weight_factor = (weight_sum - user_weight) / user_weight;
        changes
            .iter()
            .zip(&mut weights)
            .filter(|(change, _)| change.user == user)
            .for_each(|(_, weight)| *weight *= weight_factor);
    }

    let weight_sum: f64 = weights.iter().sum();
    if weight_sum > 0.0 {
        weights.iter_mut().for_each(|weight| *weight /= weight_sum);
    }
    weights
}

fn proxy_events(changes: &[ProcessChange]) -> (usize, Vec<CounterEvent>) {
    let events = changes.iter().filter_map(|change| match change.metric {
        WorkMetric::Proxy(event) => Some(event),
        _ => None,
    });
    let mut distinct_events: Vec<CounterEvent> = events.clone().collect();
    distinct_events.sort_unstable();
    distinct_events.dedup();
    (events.count(), distinct_events)
}

/// The strictest goal and the highest priority among a process's threads.
pub fn merged_goal(threads: &[&TaskSample]) -> Goal {
    let goals = threads.iter().filter_map(|thread| thread.goal);
    goals.reduce(Goal::merged_with).unwrap_or_default()
}
