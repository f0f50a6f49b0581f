//! INTERVAL-1: does every policy of the registry behave well for 10 000 windows? No task may starve, plans must
//! settle, and memory must not grow.
//!
//! Method: ten programs on four CPUs with two caches, all on the interval machine, each with phases of minutes; three
//! come and go. Every policy decides 10 000 windows of its own length, without the guard, so that its own behavior is
//! tested. A task starves if it is runnable but does not run for ten seconds of nominal time (`interval-1-wait`).

use std::collections::BTreeMap;

use cachemate_core::{MachineSpec, SplitMix64, TaskId};
use cachemate_interval::{IntervalJob, Options, PhasedProgram, closed_form};
use cachemate_pipeline::POLICIES;

use super::speed::cpu_seconds;
use super::whatif::{plans_differ, start_interval_machine};
use crate::setup::{failed, load_machine};
use crate::{DataPoint, ExperimentContext, Finding, Result};

const MACHINE: &str = "xeon-x5365-4";

/// Measured behavior of one policy.
#[derive(Clone, Debug)]
struct PolicyBehavior {
    policy: &'static str,
    windows: u64,
    hours: f64,
    changes: u64,
    /// Longest time in nominal seconds for which some task was runnable but did not run.
    longest_wait_seconds: f64,
    /// The smallest ratio of a task's processor time to its fair share, over lives of ten seconds or more.
    least_share: f64,
    /// CPU time in ms of one window, including machine and profilers; `None` if the host does not report it.
    ms_per_window: Option<f64>,
    /// Growth of resident memory in bytes, from a fifth of the windows to the end; `None` if the host does not report
    /// it.
    grown_bytes: Option<f64>,
}

/// Runs every policy of the registry, and checks its behavior.
pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let windows = context.pick(500, 10_000);
    let seed = context.seeds[0];
    // Policies run one after another, because memory is measured for the whole process.
    let mut behaviors = Vec::new();
    for entry in POLICIES.entries() {
        context.check_not_stopped()?;
        context.report_progress(&format!("INTERVAL-1: {}, {windows} windows", entry.name));
        behaviors.push(measure_behavior(entry.name, windows, seed, &|| {
            context.check_not_stopped().is_ok()
        })?);
        context.check_not_stopped()?;
    }
    Ok(conformance_findings(&behaviors, seed))
}

fn conformance_findings(behaviors: &[PolicyBehavior], seed: u64) -> Vec<Finding> {
    let max_over_policies =
        |metric: &dyn Fn(&PolicyBehavior) -> f64| behaviors.iter().map(metric).fold(0.0, f64::max);
    let policy_points = |series: &str, metric: &dyn Fn(&PolicyBehavior) -> f64| -> Vec<DataPoint> {
        behaviors
            .iter()
            .map(|behavior| DataPoint::from_values(series, behavior.policy, [metric(behavior)]))
            .collect()
    };

    let longest_wait = |behavior: &PolicyBehavior| behavior.longest_wait_seconds;
    let changes_per_hour = |behavior: &PolicyBehavior| behavior.changes as f64 / behavior.hours;
    let changes_per_100_windows =
        |behavior: &PolicyBehavior| 100.0 * behavior.changes as f64 / behavior.windows as f64;
    let ms_per_window = |behavior: &PolicyBehavior| behavior.ms_per_window.unwrap_or(f64::NAN);
    let grown_mib =
        |behavior: &PolicyBehavior| behavior.grown_bytes.unwrap_or(f64::NAN) / 1048576.0;
    // A host that does not tell memory or time gives no finding about them, rather than one that is met.
    let has_memory = behaviors
        .iter()
        .all(|behavior| behavior.grown_bytes.is_some());
    let has_time = behaviors
        .iter()
        .all(|behavior| behavior.ms_per_window.is_some());
    let ours_finding = |name: &str, value: f64| Finding::declared(name, &[(seed, value)]);
    let windows = behaviors
        .iter()
        .map(|behavior| behavior.windows)
        .min()
        .unwrap_or(0);
    let note = format!(
        "{} policies, {windows} windows each, on the interval machine at nominal time",
        behaviors.len()
    );
    let mut findings = vec![
        ours_finding("interval-1-wait", max_over_policies(&longest_wait))
            .with_points(
                [
                    policy_points("longest wait", &longest_wait),
                    policy_points("least share", &|behavior| behavior.least_share),
                ]
                .concat(),
            )
            .with_note(note.clone()),
        ours_finding(
            "interval-1-changes",
            max_over_policies(&changes_per_100_windows),
        )
        .with_points(
            [
                policy_points("changes an hour", &changes_per_hour),
                policy_points("changes, % of windows", &changes_per_100_windows),
            ]
            .concat(),
        )
        .with_note(note.clone()),
    ];
    if has_memory {
        let finding = ours_finding("interval-1-memory", max_over_policies(&grown_mib))
            .with_points(policy_points("gained", &grown_mib))
            .with_note(note.clone());
        findings.push(finding);
    }
    if has_time {
        let finding = ours_finding("interval-1-time", max_over_policies(&ms_per_window))
            .with_points(policy_points("a window", &ms_per_window))
            .with_note(note);
        findings.push(finding);
    }
    findings
}

fn measure_behavior(
    policy: &'static str,
    windows: u64,
    seed: u64,
    should_continue: &dyn Fn() -> bool,
) -> Result<PolicyBehavior> {
    let spec = load_machine(MACHINE)?;
    let options = Options {
        seed,
        ..Options::default()
    };
    let (machine, pipeline) =
        start_interval_machine(&spec, options, draw_jobs(&spec, seed), policy, false)?;

    let mut wait_monitor = WaitMonitor::default();
    let (mut window_count, mut change_count, mut previous_plan, mut early_resident_bytes) =
        (0, 0, None, None);
    let start_cpu_seconds = cpu_seconds();
    let machine = pipeline
        .run(machine, |_, record| {
            window_count += 1;
            wait_monitor.add_window(&record.observation, spec.cpus());
            change_count += u64::from(
                previous_plan
                    .as_ref()
                    .is_some_and(|previous| plans_differ(previous, &record.decision.plan)),
            );
            previous_plan = Some(record.decision.plan);
            if window_count == windows / 5 {
                early_resident_bytes = resident_bytes();
            }
            window_count < windows && should_continue()
        })
        .map_err(failed(policy))?;
    Ok(PolicyBehavior {
        policy,
        windows: window_count,
        hours: machine.now_ns() as f64 / 3.6e12,
        changes: change_count,
        longest_wait_seconds: wait_monitor.longest_ns as f64 / 1e9,
        least_share: wait_monitor.least_share(),
        ms_per_window: start_cpu_seconds
            .zip(cpu_seconds())
            .map(|(began, now)| 1e3 * (now - began) / window_count.max(1) as f64),
        grown_bytes: early_resident_bytes
            .zip(resident_bytes())
            .map(|(resident_before, now)| now - resident_before),
    })
}

/// Waiting times of all tasks.
#[derive(Default)]
struct WaitMonitor {
    /// By task: current wait, life, time on a processor, and fair time.
    tasks: BTreeMap<TaskId, (u64, f64, f64, f64)>,
    longest_ns: u64,
    min_fair_share_ratio: Option<f64>,
}

impl WaitMonitor {
    fn add_window(&mut self, observation: &cachemate_core::Observation, cpus: u32) {
        let elapsed_ns = observation.span.elapsed_ns;
        let fair_share = (f64::from(cpus) / observation.tasks.len().max(1) as f64).min(1.0);
        for task in &observation.tasks {
            let task_times = self.tasks.entry(task.task).or_default();
            let run_ns = task.ran_ns();
            task_times.0 = if run_ns > 0 {
                0
            } else {
                task_times.0 + elapsed_ns
            };
            task_times.1 += elapsed_ns as f64;
            task_times.2 += run_ns as f64;
            task_times.3 += fair_share * elapsed_ns as f64;
            self.longest_ns = self.longest_ns.max(task_times.0);
            if task.exited {
                self.end_task(task.task);
            }
        }
    }

    fn end_task(&mut self, task: TaskId) {
        if let Some((_, life_ns, ran_ns, fair_ns)) = self.tasks.remove(&task)
            && life_ns >= 1e10
        {
            self.min_fair_share_ratio = Some(
                self.min_fair_share_ratio
                    .unwrap_or(f64::INFINITY)
                    .min(ran_ns / fair_ns),
            );
        }
    }

    fn least_share(mut self) -> f64 {
        let remaining_tasks: Vec<TaskId> = self.tasks.keys().copied().collect();
        remaining_tasks
            .into_iter()
            .for_each(|task| self.end_task(task));
        self.min_fair_share_ratio.unwrap_or(f64::NAN)
    }
}

/// The resident memory of this process; `None` on a host without `/proc`.
pub(super) fn resident_bytes() -> Option<f64> {
    let text =
        cachemate_files::read_text_limited(std::path::Path::new("/proc/self/statm"), 4096).ok()?;
    let pages: f64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4096.0)
}

/// Streams, and working sets that fit or do not fit, with phases of one to four minutes; three jobs end and start
/// again.
fn draw_jobs(spec: &MachineSpec, seed: u64) -> Vec<IntervalJob> {
    let cache_lines = spec.last_level_cache().map_or(0.0, |cache| {
        cache.size_bytes as f64 / f64::from(cache.line_bytes)
    });
    let line_bytes = spec
        .last_level_cache()
        .map_or(64.0, |cache| f64::from(cache.line_bytes));
    let mut generator = SplitMix64::new(seed);

    let mut job = |index: usize| {
        let phases = (0..4).map(|_| {
            let mut phase = match generator.draw_below(4) {
                0 => closed_form::stream_phase(
                    line_bytes,
                    cache_lines,
                    0.002 + 0.02 * generator.draw_unit(),
                ),
                1 => closed_form::uniform_phase(
                    line_bytes,
                    cache_lines,
                    cache_lines * (0.05 + 0.2 * generator.draw_unit()),
                    0.02,
                ),
                _ => closed_form::uniform_phase(
                    line_bytes,
                    cache_lines,
                    cache_lines * (0.4 + generator.draw_unit()),
                    0.01 + 0.01 * generator.draw_unit(),
                ),
            };
            phase.instructions = Some(spec.hertz as f64 * (60.0 + 180.0 * generator.draw_unit()));
            phase
        });

        let phases = phases.collect();
        let program = PhasedProgram {
            phases,
            repeats_from: Some(0),
            ..PhasedProgram::endless_program(
                format!("p{index}"),
                stream_phase(line_bytes, cache_lines),
            )
        };

        let job_ends = index % 3 == 2;
        IntervalJob {
            instructions: job_ends
                .then(|| spec.hertz as f64 * (20.0 + 100.0 * generator.draw_unit())),
            restarts: job_ends,
            ..IntervalJob::new(program)
        }
    };

    (0..10).map(&mut job).collect()
}

/// The phase that [`PhasedProgram::steady_program`] takes, if its phases are replaced at once.
fn stream_phase(line_bytes: f64, cache_lines: f64) -> cachemate_interval::ProgramPhase {
    closed_form::stream_phase(line_bytes, cache_lines, 0.01)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_interval::IntervalMachine;

    /// Does the monitor detect a task that waits, and its share of a fair share?
    #[test]
    fn the_monitor_detects_a_waiting_task_and_its_share() {
        let mut machine = {
            let spec = cachemate_spec::load_machine(MACHINE).unwrap();
            let mut jobs = draw_jobs(&spec, 1);
            jobs.truncate(6);
            jobs.iter_mut()
                .for_each(|job| job.pinned = Some([0].into_iter().collect()));
            IntervalMachine::new(&spec, Options::default(), jobs).unwrap()
        };

        let mut watch = WaitMonitor::default();
        for _ in 0..40 {
            let mut observation = cachemate_core::Machine::observe(&mut machine)
                .unwrap()
                .unwrap();
            observation.tasks[0].on_cpu_ns.clear();
            watch.add_window(&observation, 4);
        }
        assert!(
            (39_000_000_000..=40_000_000_000).contains(&watch.longest_ns),
            "{}",
            watch.longest_ns
        );
        assert_eq!(watch.least_share(), 0.0);
    }

    /// Is a run counted exactly, and does no task starve under a policy that changes nothing and one that places tasks
    /// in turn (`repro INTERVAL-1` runs every policy, which takes too long for a test)?
    #[test]
    fn a_run_is_counted_exactly_and_no_task_starves() {
        for policy in ["default", "round-robin"] {
            let conduct = measure_behavior(policy, 3, 1, &|| true).unwrap();
            assert_eq!(conduct.windows, 3, "{policy}");
            assert!(conduct.longest_wait_seconds < 10.0, "{conduct:?}");
        }
    }
}
