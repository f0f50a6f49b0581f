//! Comparison of processes on both sides of a change, by their best common measure of speed.

use std::collections::BTreeMap;

use cachemate_core::{ProcessId, TaskSample, View, student_bound};
use cachemate_papers::work_metric::{WorkMetric, promised_work};

use super::like_windows::{WorkWindow, speed_difference};
use super::noise::{Difference, median_difference, standard_deviation};
use super::speeds::{ProcessSpeed, WindowSpeeds, live_processes};
use super::verdict::{GoalChange, ProcessChange, merged_goal};

/// A proxy is not used if it varies more than this from window to window (standard deviation of its logarithm).
const MAX_PROXY_DEVIATION: f64 = 0.25;
/// A goal counts as missed if the probability that noise explains it is at most this.
const MISSED_GOAL_PROBABILITY: f64 = 0.01;

/// Speed of a process relative to the baseline: sums of logarithms and of their variances over accepted changes.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct CumulativeSpeedup {
    pub log_ratio: f64,
    pub variance: f64,
}

/// The windows of one process on both sides of a change.
struct Sides<'a> {
    before: Vec<&'a ProcessSpeed>,
    after: Vec<&'a ProcessSpeed>,
}

impl<'a> Sides<'a> {
    fn both(&self) -> [&Vec<&'a ProcessSpeed>; 2] {
        [&self.before, &self.after]
    }
}

/// Every live process that was measured on both sides in its present phase, in order of arrival. `trial_windows`
/// is the number of windows before the change that are compared; earlier ones are used for the noise. A process whose
/// phases are averaged is compared over like windows, or over all windows if too few are alike.
pub fn process_changes<'a>(
    view: &View<'_>,
    windows_before: impl Iterator<Item = &'a WindowSpeeds> + Clone,
    windows_after: &'a [WindowSpeeds],
    trial_windows: usize,
) -> Vec<ProcessChange> {
    let mut threads_by_process: BTreeMap<ProcessId, Vec<&TaskSample>> = BTreeMap::new();
    for task in &view.observation.tasks {
        let threads = threads_by_process.entry(task.process).or_default();
        threads.push(task);
    }
    let change_of = |process: ProcessId| {
        let threads = threads_by_process.get(&process)?;
        let sides = windows_of_phase(process, windows_before.clone(), windows_after)?;
        let (metric, rates_before, rates_after) = WorkMetric::BEST_FIRST
            .iter()
            .find_map(|&work| common_metric(&sides, work))?;
        let difference = if has_averaged_phases(&sides) {
            difference_of_like_windows(&sides, metric)
                .or_else(|| difference_of_all_windows(&sides, metric))?
        } else {
            median_difference(&rates_before, &rates_after, trial_windows)?
        };
        let goal = merged_goal(threads);

        let change = ProcessChange {
            process,
            user: threads.first()?.user,
            metric,
            priority: if goal.priority.is_finite() && goal.priority > 0.0 {
                goal.priority
            } else {
                1.0
            },
            log_ratio: difference.value,
            standard_error: difference.standard_error,
            degrees_of_freedom: difference.degrees_of_freedom,
            goal_change: GoalChange::default(),
        };

        let limit = goal
            .max_slowdown
            .filter(|limit| limit.is_finite() && *limit >= 0.0);
        let slowdown_goal = limit.map_or(GoalChange::default(), |limit| {
            goal_change(&sides, &change, libm::log1p(limit))
        });
        let promised_rate = promised_log_rate(threads);
        let rate_goal = promised_rate.map_or(GoalChange::default(), |(metric, log_rate)| {
            rate_goal_change(&sides, metric, log_rate)
        });
        Some(ProcessChange {
            goal_change: slowdown_goal.combined_with(rate_goal),
            ..change
        })
    };

    live_processes(&view.observation.tasks)
        .into_iter()
        .filter_map(change_of)
        .collect()
}

/// Whether a process whose phases are averaged has no like windows on the two sides, so that more windows are needed.
pub fn needs_like_windows<'a>(
    processes: &[ProcessId],
    windows_before: impl Iterator<Item = &'a WindowSpeeds> + Clone,
    windows_after: &'a [WindowSpeeds],
) -> bool {
    let lacks_windows = |process: &ProcessId| {
        let sides = windows_of_phase(*process, windows_before.clone(), windows_after)
            .filter(has_averaged_phases)?;
        let metric = WorkMetric::BEST_FIRST
            .into_iter()
            .find(|&work| common_metric(&sides, work).is_some())?;
        Some(difference_of_like_windows(&sides, metric).is_none())
    };
    processes
        .iter()
        .any(|process| lacks_windows(process).unwrap_or(false))
}

/// The windows of a process before and after the change that are in the phase of its last window; `None` if it has no
/// window after the change.
fn windows_of_phase<'a>(
    process: ProcessId,
    mut windows_before: impl Iterator<Item = &'a WindowSpeeds>,
    windows_after: &'a [WindowSpeeds],
) -> Option<Sides<'a>> {
    let phase = windows_after
        .iter()
        .rev()
        .find_map(|window| window.get(&process))?
        .phase;
    let process_speeds =
        |windows: &mut dyn Iterator<Item = &'a WindowSpeeds>| -> Vec<&'a ProcessSpeed> {
            windows
                .filter_map(|window| window.get(&process))
                .filter(|speed| speed.phase.is_comparable(phase))
                .collect()
        };

    Some(Sides {
        before: process_speeds(&mut windows_before),
        after: process_speeds(&mut windows_after.iter()),
    })
}

fn has_averaged_phases(sides: &Sides<'_>) -> bool {
    sides
        .both()
        .iter()
        .all(|side| !side.is_empty() && side.iter().all(|speed| speed.has_averaged_phases()))
}

/// The windows of both sides by their work, with the incoming accesses by which like windows are found.
fn work_windows(sides: &Sides<'_>, metric: WorkMetric) -> [Vec<WorkWindow>; 2] {
    sides.both().map(|side| {
        let work_window = |speed: &&ProcessSpeed| {
            Some(WorkWindow {
                work_per_s: libm::exp(*speed.log_rates.get(&metric)?),
                incoming_per_instr: speed.incoming_per_instr,
            })
        };
        side.iter().filter_map(work_window).collect()
    })
}

/// The difference over the same work; `None` unless each side has most of its work in common with the other. A program
/// whose phases are averaged is in another phase in each window, so a few windows do not represent all phases.
fn difference_of_like_windows(sides: &Sides<'_>, metric: WorkMetric) -> Option<Difference> {
    if sides
        .both()
        .into_iter()
        .flatten()
        .any(|speed| speed.incoming_per_instr.is_none())
    {
        return None;
    }
    let [before, after] = work_windows(sides, metric);
    speed_difference(&after, &before)?;
    // Without two windows of one phase, the noise is unknown.
    speed_difference(&before, &after).filter(|difference| difference.standard_error.is_finite())
}

/// Whatever the phases of the windows.
fn difference_of_all_windows(sides: &Sides<'_>, metric: WorkMetric) -> Option<Difference> {
    let mut windows = work_windows(sides, metric);
    for window in windows.iter_mut().flatten() {
        window.incoming_per_instr = None;
    }
    speed_difference(&windows[0], &windows[1])
}

/// The logarithms of one kind of work on both sides, if it measures speed on both. Work that is counted only
/// occasionally does not, and a proxy must be steady before the change.
fn common_metric(
    sides: &Sides<'_>,
    metric: WorkMetric,
) -> Option<(WorkMetric, Vec<f64>, Vec<f64>)> {
    let countable_log_rates = |side: &Vec<&ProcessSpeed>| {
        let logs: Vec<f64> = side
            .iter()
            .filter_map(|speed| speed.log_rates.get(&metric).copied())
            .collect();
        (logs.len() >= 2 && 2 * logs.len() > side.len()).then_some(logs)
    };
    let (rates_before, rates_after) = (
        countable_log_rates(&sides.before)?,
        countable_log_rates(&sides.after)?,
    );
    (!matches!(metric, WorkMetric::Proxy(_))
        || standard_deviation(&rates_before) <= MAX_PROXY_DEVIATION)
        .then_some((metric, rates_before, rates_after))
}

/// The sides on which a slowdown goal was certainly missed. Speeds relative to solo decide if they are known.
/// Otherwise, a slowdown by more than the goal allows misses it, since a program is taken never to run faster than alone.
fn goal_change(sides: &Sides<'_>, change: &ProcessChange, log_limit: f64) -> GoalChange {
    let is_missed = |side: &Vec<&ProcessSpeed>| {
        let logs: Vec<f64> = side
            .iter()
            .filter_map(|speed| speed.log_over_solo)
            .collect();
        // Compared with the solo speed, which has no noise here.
        let difference = median_difference(&vec![0.0; logs.len()], &logs, logs.len())?;
        let t_bound = student_bound(MISSED_GOAL_PROBABILITY, difference.degrees_of_freedom);
        Some(difference.value + t_bound * difference.standard_error < -log_limit)
    };

    match (is_missed(&sides.before), is_missed(&sides.after)) {
        (Some(was_broken), Some(broken_after)) => GoalChange {
            was_broken,
            is_broken: broken_after,
        },
        _ => {
            let t_bound = student_bound(MISSED_GOAL_PROBABILITY, change.degrees_of_freedom);
            let is_broken = change.log_ratio + t_bound * change.standard_error < -log_limit;
            GoalChange {
                was_broken: false,
                is_broken,
            }
        }
    }
}

/// The sum of the rates promised to a process's threads, as a logarithm, and the work that they count.
fn promised_log_rate(threads: &[&TaskSample]) -> Option<(WorkMetric, f64)> {
    let (mut rate_sum, mut promised_metric) = (0.0, None);
    for task in threads.iter().filter(|task| !task.exited && task.has_run()) {
        let Some(min_rate) = task.goal.and_then(|goal| goal.min_rate) else {
            continue;
        };
        let Some(metric) = promised_work(task, threads.iter().copied()) else {
            continue;
        };
        rate_sum += min_rate;
        promised_metric = Some(metric);
    }
    promised_metric
        .filter(|_| rate_sum > 0.0 && f64::is_finite(rate_sum))
        .map(|metric| (metric, libm::log(rate_sum)))
}

/// The sides on which the rate was certainly below the promised one. A side without counts is not.
fn rate_goal_change(sides: &Sides<'_>, metric: WorkMetric, log_rate: f64) -> GoalChange {
    let is_missed = |side: &Vec<&ProcessSpeed>| {
        let logs: Vec<f64> = side
            .iter()
            .filter_map(|speed| speed.log_rates.get(&metric).copied())
            .collect();
        let difference = median_difference(&vec![log_rate; logs.len()], &logs, logs.len())?;
        let t_bound = student_bound(MISSED_GOAL_PROBABILITY, difference.degrees_of_freedom);
        Some(difference.value + t_bound * difference.standard_error < 0.0)
    };
    let is_certainly_missed = |side: &Vec<&ProcessSpeed>| is_missed(side).unwrap_or(false);
    GoalChange {
        was_broken: is_certainly_missed(&sides.before),
        is_broken: is_certainly_missed(&sides.after),
    }
}

/// The changes relative to the baseline: each change plus the total so far.
pub fn changes_from_baseline(
    changes: &[ProcessChange],
    totals: &BTreeMap<ProcessId, CumulativeSpeedup>,
) -> Vec<ProcessChange> {
    let with_total = |change: &ProcessChange| {
        let total = totals.get(&change.process).copied().unwrap_or_default();
        let variance = change.standard_error * change.standard_error + total.variance;
        ProcessChange {
            log_ratio: change.log_ratio + total.log_ratio,
            standard_error: libm::sqrt(variance),
            ..change.clone()
        }
    };
    changes.iter().map(with_total).collect()
}
