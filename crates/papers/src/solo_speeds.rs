//! Estimates slowdowns relative to the solo speeds of programs.

use std::collections::BTreeMap;

use crate::partition::partitioned_cache::CacheProcess;
use crate::work_metric::{ServiceRate, WorkMetric, metrics_of};
use cachemate_core::{CounterEvent, Observation, ProbeEvidence, Profile, TaskId, TaskSample, View};

/// Solo work per second of each task, as measured by a probe, with the metric of that work.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SoloSpeeds(BTreeMap<TaskId, (WorkMetric, f64)>);

impl SoloSpeeds {
    /// Records the probe results of a window, and removes tasks that have exited.
    pub fn observe(&mut self, observation: &Observation) {
        for probe_result in &observation.probe_results {
            if let ProbeEvidence::NeighborSlowdown {
                task,
                task_alone_rate: Some(rate),
                rate_event: rate_of,
                ..
            } = probe_result.evidence
            {
                self.0.insert(
                    task,
                    (
                        rate_of.map_or(WorkMetric::Reported, WorkMetric::Proxy),
                        rate,
                    ),
                );
            }
        }
        if !self.0.is_empty() {
            let live_tasks = observation.live_tasks();
            self.0.retain(|task, _| live_tasks.contains(task));
        }
    }

    /// A task's slowdown: run time over solo run time, minus one. If a probe counted solo work, rates of that work are
    /// compared; otherwise, instructions per cycle are compared, if the profile has the solo value. `None` if neither
    /// is known.
    pub fn slowdown_over_solo(
        &self,
        task: &TaskSample,
        elapsed_ns: u64,
        profile: &Profile,
    ) -> Option<f64> {
        let ran_ns = task.ran_ns();
        let slowdown_by_work =
            self.0
                .get(&task.task)
                .filter(|_| ran_ns > 0)
                .and_then(|(metric, solo_rate)| {
                    let (_, count) = metrics_of(task, elapsed_ns)
                        .find(|(task_metric, _)| task_metric == metric)?;
                    Some(solo_rate * ran_ns as f64 / 1e9 / count - 1.0)
                });

        let solo_instr_per_cycle = profile.rates.solo_instr_per_cycle.map(|solo| solo.value);
        slowdown_by_work.or_else(|| {
            solo_instr_per_cycle
                .zip(instr_per_cycle(task))
                .map(|(solo, current_instr_per_cycle)| solo / current_instr_per_cycle - 1.0)
        })
    }
}

/// Smallest limit of a slowdown by which a slack is divided.
const MIN_LIMIT: f64 = 0.001;

/// The mean slowdown of tasks, weighted by their run time: a thread that hardly ran says little about its program.
/// `None` if none of those that ran has a known slowdown.
pub fn mean_slowdown(
    tasks: &[&TaskSample],
    slowdown_of: impl Fn(&TaskSample) -> Option<f64>,
) -> Option<f64> {
    let running = tasks.iter().filter(|task| task.has_run());
    let slowdowns: Vec<(f64, f64)> = running
        .filter_map(|task| Some((slowdown_of(task)?, task.ran_ns() as f64)))
        .collect();
    let total_ns: f64 = slowdowns.iter().map(|(_, ran_ns)| ran_ns).sum();
    let shares = slowdowns
        .iter()
        .map(|(slowdown, ran_ns)| slowdown * (ran_ns / total_ns));
    let mean = shares.sum::<f64>();
    (total_ns > 0.0 && mean.is_finite()).then_some(mean)
}

/// The part of a process's promise that is to spare in this window, as a mean over its threads by run time: of the
/// limit of its slowdown or, if it has none, of its rate of work. Negative if the promise is missed; `None` if there is
/// no promise or no measure of it.
pub fn promise_slack(
    view: &View<'_>,
    cache_process: &CacheProcess<'_>,
    solo_speeds: &SoloSpeeds,
) -> Option<f64> {
    let goal = cache_process.goal();
    if let Some(limit) = goal.max_slowdown {
        let elapsed_ns = view.observation.span.elapsed_ns;
        let slowdown_of = |task: &TaskSample| {
            let profile = view.profiles.get(&task.task)?;
            solo_speeds.slowdown_over_solo(task, elapsed_ns, profile)
        };
        let mean = mean_slowdown(&cache_process.tasks, slowdown_of)?;
        return Some(1.0 - mean / limit.max(MIN_LIMIT));
    }

    let min_rate = goal.min_rate?;
    let rate = ServiceRate::measure(view.observation, &cache_process.tasks)?.rate_per_s;
    Some(rate / min_rate - 1.0)
}

/// The instructions per cycle while on the processor; `None` if either was not counted.
pub fn instr_per_cycle(task: &TaskSample) -> Option<f64> {
    let positive_count = |event| task.counts.get(event).filter(|count| *count > 0.0);
    Some(positive_count(CounterEvent::Instructions)? / positive_count(CounterEvent::Cycles)?)
}
