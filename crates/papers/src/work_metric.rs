//! Measures the speed of a task by the best metric available.
//!
//! Problem: most programs report no work, and most virtual machines count no instructions, so the effect of a decision
//! cannot be measured directly. Method: reported work comes first, instructions second. Otherwise, events that a
//! program makes at a characteristic rate may be a proxy, such as system calls or page faults. Context switches may
//! not: a task with less processor time is switched *more* often, so a loss would look like a gain. Properties: a proxy
//! is always declared as one ([`WorkMetric::Proxy`]). It applies only if there are enough events, and only to a task
//! that wants a processor most of the time, because something else sets the pace of a task that sleeps.

use cachemate_core::{CounterEvent, Observation, TaskSample};

/// Minimum number of events in a window. The relative noise is one over the root of the count, a tenth at this number;
/// with fewer events, it is too large.
pub const MIN_EVENTS: f64 = 100.0;
/// Minimum fraction of the window for which a task must run or wait to run. With less, something other than its speed
/// sets its pace.
pub const MIN_CPU_DEMAND: f64 = 0.5;

/// The quantity by which a speed is measured.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum WorkMetric {
    /// Work in the task's own unit.
    Reported,
    /// Counted instructions.
    Instructions,
    /// An event that is not work, but that a working program makes at a characteristic rate.
    Proxy(CounterEvent),
}

impl WorkMetric {
    /// All metrics, the best first.
    pub const BEST_FIRST: [WorkMetric; 4] = [
        WorkMetric::Reported,
        WorkMetric::Instructions,
        WorkMetric::Proxy(CounterEvent::SystemCalls),
        WorkMetric::Proxy(CounterEvent::PageFaults),
    ];

    /// The name of the unit.
    pub fn describe(self) -> &'static str {
        match self {
            WorkMetric::Reported => "work reported",
            WorkMetric::Instructions => "instructions",
            WorkMetric::Proxy(CounterEvent::SystemCalls) => "system calls",
            WorkMetric::Proxy(CounterEvent::PageFaults) => "page faults",
            WorkMetric::Proxy(CounterEvent::ContextSwitches) => "waits",
            WorkMetric::Proxy(_) => "events",
        }
    }

    /// The amount in a window; `None` if it was not counted.
    pub fn count(self, task: &TaskSample) -> Option<f64> {
        match self {
            WorkMetric::Reported => task.progress,
            WorkMetric::Instructions => task.counts.get(CounterEvent::Instructions),
            WorkMetric::Proxy(event) => task.counts.get(event),
        }
    }
}

/// The metrics of a task in a window of `elapsed_ns` with their positive values, the best first.
pub fn metrics_of(
    task: &TaskSample,
    elapsed_ns: u64,
) -> impl Iterator<Item = (WorkMetric, f64)> + '_ {
    let ran_ns = task.ran_ns();
    let demanded_ns = ran_ns.saturating_add(task.run_queue_wait_ns.unwrap_or(0));
    let wants_cpu = demanded_ns as f64 >= MIN_CPU_DEMAND * elapsed_ns as f64 && elapsed_ns > 0;

    WorkMetric::BEST_FIRST
        .into_iter()
        .filter_map(move |metric| {
            let is_measure = |count: &f64| match metric {
                WorkMetric::Proxy(_) => wants_cpu && *count >= MIN_EVENTS,
                _ => *count > 0.0,
            };
            metric
                .count(task)
                .filter(is_measure)
                .map(|count| (metric, count))
        })
}

/// The metric of a task's promised rate: reported work if the task reports any, and otherwise instructions. `None` if
/// another thread of the task's process reports work on its behalf.
pub fn promised_work<'a>(
    task: &TaskSample,
    samples: impl IntoIterator<Item = &'a TaskSample>,
) -> Option<WorkMetric> {
    let mut live_siblings = samples
        .into_iter()
        .filter(|sibling| sibling.process == task.process && !sibling.exited);
    match task.progress {
        Some(_) => Some(WorkMetric::Reported),
        None => (!live_siblings.any(|sibling| sibling.progress.is_some()))
            .then_some(WorkMetric::Instructions),
    }
}

/// The rate of promised work per client in a window.
pub struct ServiceRate {
    /// Number of threads that ran and whose work was counted.
    pub clients: usize,
    /// Work per second of each, in the mean.
    pub rate_per_s: f64,
}

impl ServiceRate {
    /// Measures the rate of these tasks; `None` if none of them ran, or their work was not counted.
    pub fn measure(observation: &Observation, tasks: &[&TaskSample]) -> Option<Self> {
        let work_of_task = |task: &&&TaskSample| match promised_work(task, &observation.tasks)? {
            WorkMetric::Reported => task.progress,
            _ => task.counts.get(CounterEvent::Instructions),
        };
        let work: Vec<f64> = tasks
            .iter()
            .filter(|task| task.has_run())
            .filter_map(|task| work_of_task(&task))
            .collect();
        let seconds = observation.span.elapsed_ns as f64 / 1e9;
        let clients = work.len();
        let rate_per_s = work.iter().sum::<f64>() / clients as f64 / seconds;
        rate_per_s.is_finite().then_some(ServiceRate {
            clients,
            rate_per_s,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{CpuId, EventCounts, ProcessId, TaskId};

    fn task_fixture(
        ran_ns: u64,
        counts: &[(CounterEvent, u64)],
        progress: Option<f64>,
    ) -> TaskSample {
        TaskSample {
            on_cpu_ns: vec![(CpuId(0), ran_ns)],
            run_queue_wait_ns: Some(100),
            counts: EventCounts::exact(counts.iter().copied()),
            progress,
            ..TaskSample::new(TaskId(0), ProcessId(0))
        }
    }

    /// Does reported work come first, and does a proxy apply only to a busy task with enough events?
    #[test]
    fn a_proxy_applies_to_busy_tasks_only() {
        let calls = [
            (CounterEvent::SystemCalls, 500),
            (CounterEvent::PageFaults, 7),
        ];
        let kinds = |task: &TaskSample| {
            metrics_of(task, 1000)
                .map(|(work, _)| work)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            kinds(&task_fixture(900, &calls, None)),
            [WorkMetric::Proxy(CounterEvent::SystemCalls)]
        );
        assert_eq!(
            kinds(&task_fixture(400, &calls, None)),
            [WorkMetric::Proxy(CounterEvent::SystemCalls)],
            "waiting to run counts"
        );
        assert_eq!(
            kinds(&task_fixture(300, &calls, None)),
            [],
            "a sleeper is paced by something else"
        );
        assert_eq!(
            kinds(&task_fixture(900, &calls, Some(3.0)))[0],
            WorkMetric::Reported
        );
        assert_eq!(
            kinds(&task_fixture(
                900,
                &[(CounterEvent::ContextSwitches, 500)],
                None
            )),
            []
        );
    }

    /// Is a promised rate counted in reported work, in instructions if no thread of the process reports, and not at all
    /// if another thread reports for all?
    #[test]
    fn a_promised_rate_counts_reported_work_or_instructions() {
        let (mut first, silent) = (
            task_fixture(900, &[], Some(0.0)),
            TaskSample {
                task: TaskId(1),
                ..task_fixture(900, &[], None)
            },
        );
        let samples = [first.clone(), silent.clone()];
        assert_eq!(
            samples.each_ref().map(|work| promised_work(work, &samples)),
            [Some(WorkMetric::Reported), None]
        );
        first.progress = None;
        let samples = [first, silent];
        assert_eq!(
            samples.each_ref().map(|work| promised_work(work, &samples)),
            [Some(WorkMetric::Instructions); 2]
        );
    }
}
