//! Schedules by miss counters (AV 5.2), as the baseline for activity vectors.
//!
//! Problem: plain counters show how busy a task is, so does it help to know *where* in the cache it is busy? Method:
//! the penalty of two tasks is the product of their counted misses per thousand instructions, relative to the mean of
//! all tasks. A sum would give all pairings the same total. [`crate::coschedule`] defines forms and scores. If rates
//! are not counted, the recorded rates on the whole cache are used. In the form `set`, running a task that did not run
//! before costs its extra misses, relative to the misses of the mean task per sample and weighted like a penalty of two
//! mean tasks.
//!
//! Properties: only a miss counter is needed. If all tasks are alike, every penalty is the same, and the schedule is a
//! plain round robin.

use std::collections::BTreeMap;

use cachemate_core::{CounterEvent, Decision, Policy, Profile, TaskId, TaskSample, View};
use serde::Deserialize;

use super::{ParameterError, ParameterRange};
use crate::cache_reload_cost::ReloadCosts;
use crate::coschedule::{CoRunCost, CoScheduleForm, CoScheduler, MAX_LAG_SAMPLES};

/// Parameters of `counter-driven`, read from TOML.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub form: CoScheduleForm,
    /// Length of a sample, in nanoseconds.
    pub window_ns: u64,
    /// Penalty of two tasks that both have the mean miss rate.
    pub penalty_weight: f64,
    /// Cost of each sample that the task has run.
    pub sample_weight: f64,
    /// Maximum lag of a task, as in `activity-vector`.
    pub max_lag_samples: f64,
}

impl Default for Parameters {
    fn default() -> Self {
        // Equal to the penalty in `activity-vector` if two tasks share half of the 32 super sets.
        Parameters {
            form: CoScheduleForm::Replacement,
            window_ns: 100_000_000,
            penalty_weight: 16.0,
            sample_weight: 4.0,
            max_lag_samples: MAX_LAG_SAMPLES,
        }
    }
}

struct CounterDriven {
    penalty_weight: f64,
    scheduler: CoScheduler,
    reload_costs: ReloadCosts,
}

/// Misses of each task, relative to the mean of all tasks.
struct RelativeMisses<'a> {
    penalty_weight: f64,
    relative_mpki: BTreeMap<TaskId, f64>,
    reload_costs: &'a ReloadCosts,
    /// Misses of the mean task in a sample; 0 if none were counted.
    misses_per_sample: f64,
}

fn misses_per_kilo_instr(profile: &Profile) -> Option<f64> {
    let recorded_mpki = profile
        .misses_per_kilo_instr()
        .and_then(|curve| curve.last())
        .map(|(_, misses)| misses.value);
    profile
        .rates
        .observed_misses_per_kilo_instr
        .map(|misses| misses.value)
        .or(recorded_mpki)
}

impl Policy for CounterDriven {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let live_tasks = view
            .observation
            .tasks
            .iter()
            .filter(|task| !task.exited)
            .map(|task| task.task);

        let task_and_mpki =
            |task: TaskId| Some((task, misses_per_kilo_instr(view.profiles.get(&task)?)?));
        let rates: Vec<(TaskId, f64)> = live_tasks.filter_map(task_and_mpki).collect();
        let mean_mpki = rates.iter().map(|(_, rate)| rate).sum::<f64>() / rates.len().max(1) as f64;
        let relative_rate = |rate: f64| {
            if mean_mpki > 0.0 {
                rate / mean_mpki
            } else {
                0.0
            }
        };
        let relative_mpki = rates
            .into_iter()
            .map(|(task, rate)| (task, relative_rate(rate)))
            .collect();

        self.observe_refills(view);
        let (penalty_weight, reload_costs) = (self.penalty_weight, &self.reload_costs);
        // The order of arrival is used for the same reason as in `activity_vector`.
        let samples = view
            .observation
            .tasks
            .iter()
            .filter_map(|task| reload_costs.misses_per_sample(task.task));
        let (sum, count) = samples.fold((0.0, 0.0), |(sum, count), misses| {
            (sum + misses, count + 1.0)
        });
        let misses_per_sample = if count > 0.0 { sum / count } else { 0.0 };
        self.scheduler.decide(
            view,
            &RelativeMisses {
                penalty_weight,
                relative_mpki,
                reload_costs,
                misses_per_sample,
            },
        )
    }
}

impl CounterDriven {
    fn observe_refills(&mut self, view: &View<'_>) {
        let Some(last_level) = view
            .topology
            .last_level()
            .filter(|_| self.scheduler.form == CoScheduleForm::Set)
        else {
            return;
        };
        let miss_count = |task: &TaskSample| {
            Some((
                task.task,
                task.counts.get(CounterEvent::Misses(last_level))?,
            ))
        };

        let miss_counts = view
            .observation
            .tasks
            .iter()
            .filter_map(miss_count)
            .collect();
        self.reload_costs.observe(
            &view.observation.tasks,
            view.observation.span.elapsed_ns,
            &miss_counts,
        );
    }
}

impl CoRunCost for RelativeMisses<'_> {
    fn has_evidence(&self, task: TaskId) -> bool {
        self.relative_mpki.contains_key(&task)
    }
    fn penalty(&self, first_task: TaskId, other_task: TaskId) -> f64 {
        let rate_of_task = |task| self.relative_mpki.get(&task).copied();
        rate_of_task(first_task)
            .zip(rate_of_task(other_task))
            .map_or(0.0, |(first_rate, other_rate)| {
                self.penalty_weight * first_rate * other_rate
            })
    }
    fn solo_cost(&self, _: TaskId) -> f64 {
        0.0
    }
    fn reload_cost(&self, task: TaskId) -> f64 {
        match self.reload_costs.reload_misses(task) {
            Some(misses) if self.misses_per_sample > 0.0 => {
                self.penalty_weight * misses / self.misses_per_sample
            }
            _ => 0.0,
        }
    }
    fn must_stay(&self, task: TaskId) -> bool {
        self.reload_costs.needs_second_sample(task)
    }
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parsed_parameters: Parameters = super::parse_parameters(parameters)?;
    ParameterRange::OneOrMore.check([("window_ns", parsed_parameters.window_ns as f64)])?;
    ParameterRange::FromZeroUnlimited
        .check([("max_lag_samples", parsed_parameters.max_lag_samples)])?;
    let Parameters {
        penalty_weight,
        sample_weight,
        ..
    } = parsed_parameters;
    ParameterRange::Above(0.0).check([
        ("penalty_weight", penalty_weight),
        ("sample_weight", sample_weight),
    ])?;
    let scheduler = CoScheduler::new(
        parsed_parameters.form,
        parsed_parameters.window_ns,
        sample_weight,
        parsed_parameters.max_lag_samples,
    );
    Ok(Box::new(CounterDriven {
        penalty_weight,
        scheduler,
        reload_costs: ReloadCosts::default(),
    }))
}
