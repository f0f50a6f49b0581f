//! Are the programs worse off than before, all in all?
//!
//! Two questions, since one alone can be played with. First, the mean over processes of the logarithm of new over old
//! speed, weighted by priority: is it lower by more than the smallest loss worth acting on, and by more than noise? Second,
//! apart from the mean: is any process slower by a tenth, and by more than *its own* noise? Then the stated goal judges, by
//! what is known for sure alone; the change stays only if others gained more than that process lost.
//!
//! Speeds are what programs say of themselves, so none is believed without bounds. A process' ratio counts as a halving
//! or a doubling at most. One user's processes weigh no more than all others' together. A process that is noisier than
//! the others counts less in the mean. Floors come first ([`cachemate_core::Goal::is_promised`]): a change that
//! breaks more of them is worse, one that mends some is better, whatever the others gain or lose.

use cachemate_core::{CounterEvent, Goal, GuardObjective, ProcessId, TaskSample};

use super::noise::{median, student_bound};
use crate::work_metric::WorkMetric;

/// One change in a hundred that changes nothing may be taken back by each of the two questions.
const FALSE_ALARMS: f64 = 0.01;
/// Larger ratios of speeds are not believed.
const BELIEVED_LOG_RATIO: f64 = std::f64::consts::LN_2;
/// Values that differ by less are alike.
const ALIKE: f64 = 1e-6;
/// A process that is slower by this share is asked about by itself.
const HARMED_FROM: f64 = 0.1;

/// Did a process keep what it was promised?
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Floor {
    pub broken_before: bool,
    pub broken_after: bool,
}

/// One process before and after.
#[derive(Clone, PartialEq, Debug)]
pub struct ProcessChange {
    pub process: ProcessId,
    /// Its owner; `None` = not known.
    pub user: Option<u32>,
    pub work: WorkMetric,
    pub priority: f64,
    /// Natural logarithm of speed after over speed before.
    pub log_ratio: f64,
    pub standard_error: f64,
    pub degrees_of_freedom: f64,
    pub floor: Floor,
}

impl ProcessChange {
    fn believed(&self) -> f64 {
        self.log_ratio.clamp(-BELIEVED_LOG_RATIO, BELIEVED_LOG_RATIO)
    }

    /// Is the change more than noise, if so many processes are asked?
    fn is_sure(&self, asked: usize) -> bool {
        let bound = student_bound(FALSE_ALARMS / asked.max(1) as f64, self.degrees_of_freedom);
        self.log_ratio.abs() > bound * self.standard_error
    }
}

/// What a comparison says.
#[derive(Clone, PartialEq, Debug)]
pub struct GuardVerdict {
    pub worse: bool,
    /// Weighted mean of the logarithms of the ratios that are believed, and its standard error.
    pub mean_log_ratio: f64,
    pub standard_error: f64,
    /// The process that lost most beyond noise, and its log ratio.
    pub harmed: Option<(ProcessId, f64)>,
    /// Did any process lose more than the smallest loss worth acting on, beyond noise?
    pub somebody_lost: bool,
    /// Change in the number of broken promises.
    pub floors_broken: i64,
    /// Kinds of events by which processes were judged that report no work, and how many processes.
    pub proxies: (usize, Vec<CounterEvent>),
}

impl GuardVerdict {
    /// The judgment by the stated goal; `loss_at_least` is the smallest loss of the mean worth acting on, as a share.
    pub fn of(changes: &[ProcessChange], objective: GuardObjective, loss_at_least: f64) -> Self {
        let (mean_log_ratio, standard_error, degrees) = noisy_mean(changes);
        let bound = student_bound(FALSE_ALARMS, degrees) * standard_error;
        let least = libm::log1p(-loss_at_least.min(0.99));
        let all_slower = mean_log_ratio < -bound && mean_log_ratio < least;
        let lost =
            |than: f64| changes.iter().filter(move |change| change.log_ratio < than && change.is_sure(changes.len()));
        let lost_most = lost(libm::log1p(-HARMED_FROM))
            .reduce(|most, change| if change.log_ratio < most.log_ratio { change } else { most });
        let not_made_up_for = lost_most.is_some() && sure_value(changes, objective) <= ALIKE;
        let floors_broken: i64 = changes.iter().map(|change| change.floor).map(Floor::newly_broken).sum();
        let worse = floors_broken > 0 || floors_broken == 0 && (all_slower || not_made_up_for);
        GuardVerdict {
            worse,
            mean_log_ratio,
            standard_error,
            somebody_lost: lost(least).next().is_some(),
            harmed: lost_most.map(|change| (change.process, change.log_ratio)),
            floors_broken,
            proxies: stood_in(changes),
        }
    }
}

impl Floor {
    /// Broken where either is.
    pub fn or(self, other: Floor) -> Floor {
        Floor {
            broken_before: self.broken_before || other.broken_before,
            broken_after: self.broken_after || other.broken_after,
        }
    }

    fn newly_broken(self) -> i64 {
        i64::from(self.broken_after) - i64::from(self.broken_before)
    }
}

/// The objective's value of the changes that are more than noise, each by its own; the others count as none.
fn sure_value(changes: &[ProcessChange], objective: GuardObjective) -> f64 {
    let sure = |change: &ProcessChange| if change.is_sure(changes.len()) { change.believed() } else { 0.0 };
    match objective {
        GuardObjective::WorstProcessSpeed => changes.iter().map(sure).fold(0.0, f64::min),
        GuardObjective::MeanLogSpeed => {
            let weights = weights(changes, |_| 1.0);
            changes.iter().zip(&weights).map(|(change, weight)| weight * sure(change)).sum()
        }
    }
}

/// Mean over processes, its standard error and degrees of freedom (Welch 1947); noisier ones count less.
fn noisy_mean(changes: &[ProcessChange]) -> (f64, f64, f64) {
    let errors: Vec<f64> = changes.iter().map(|change| change.standard_error).collect();
    let usual = median(&errors);
    let precise = |change: &ProcessChange| {
        let noisier = change.standard_error / usual;
        if noisier.is_nan() { 1.0 } else { 1.0 / (1.0 + noisier * noisier) }
    };
    let weights = weights(changes, precise);
    let mean = changes.iter().zip(&weights).map(|(change, weight)| weight * change.believed()).sum();
    let parts = changes.iter().zip(&weights).map(|(change, weight)| (weight * change.standard_error).powi(2));
    let (mut variance, mut of_variance) = (0.0, 0.0);
    for (part, change) in parts.zip(changes) {
        variance += part;
        of_variance += part * part / change.degrees_of_freedom;
    }
    let degrees = if of_variance > 0.0 { variance * variance / of_variance } else { f64::MAX };
    (mean, libm::sqrt(variance), degrees)
}

/// Weights that sum to one: by priority and the given factor, one user's at most half where several run.
fn weights(changes: &[ProcessChange], factor: impl Fn(&ProcessChange) -> f64) -> Vec<f64> {
    let mut weights: Vec<f64> = changes.iter().map(|change| change.priority * factor(change)).collect();
    let total: f64 = weights.iter().sum();
    for change in changes {
        let mine = |other: &ProcessChange| other.user == change.user;
        let own: f64 = changes.iter().zip(&weights).filter(|(other, _)| mine(other)).map(|(_, weight)| weight).sum();
        // At most one user has more than half.
        if own > total / 2.0 && own < total {
            let fewer = (total - own) / own;
            changes.iter().zip(&mut weights).filter(|(other, _)| mine(other)).for_each(|(_, weight)| *weight *= fewer);
            break;
        }
    }
    let total: f64 = weights.iter().sum();
    if total > 0.0 {
        weights.iter_mut().for_each(|weight| *weight /= total);
    }
    weights
}

fn stood_in(changes: &[ProcessChange]) -> (usize, Vec<CounterEvent>) {
    let events = changes.iter().filter_map(|change| match change.work {
        WorkMetric::Proxy(event) => Some(event),
        _ => None,
    });
    let mut kinds: Vec<CounterEvent> = events.clone().collect();
    kinds.sort_unstable();
    kinds.dedup();
    (events.count(), kinds)
}

/// The strictest promise and the highest priority among a process' threads.
pub fn goal_of(process: ProcessId, tasks: &[TaskSample]) -> Goal {
    let goals = tasks.iter().filter(|task| task.process == process).filter_map(|task| task.goal);
    goals.reduce(Goal::with).unwrap_or_default()
}
