//! INTERVAL-8: a nominal day under `auto`. Is any service disturbed often at steady load, and do memory or the time of
//! a decision grow while programs come and go?
//!
//! Method: drawn mixes on the interval machine, with the guard. At steady load, each change of a process's CPUs, gangs
//! or shares counts, by minutes. In the other run, programs arrive and exit at random all day; memory and processor
//! time are compared between parts of the day.

use std::collections::BTreeMap;

use cachemate_core::{MachineSpec, Observation, Plan, ProcessId, ShareMember, SplitMix64, TaskId};
use cachemate_interval::{IntervalJob, Options};

use super::conformance::resident_bytes;
use super::speed::cpu_seconds;
use super::whatif::start_interval_machine;
use crate::auto::MACHINES;
use crate::auto::draw::{MixFamily, draw_mix_jobs};
use crate::setup::{failed, load_machine};
use crate::{DataPoint, ExperimentContext, Finding, Result};

const SECOND_NS: u64 = 1_000_000_000;
const MINUTE_NS: u64 = 60 * SECOND_NS;
const HOUR_NS: u64 = 60 * MINUTE_NS;
/// Mean time between two arrivals, and mean life of a program that runs alone. Five programs are there on average.
const MEAN_INTERARRIVAL_NS: f64 = 120e9;
const MEAN_SOLO_LIFE_SECONDS: f64 = 600.0;
/// Number of parts of the day. The first is left out of comparisons, because memory is filled then.
const PARTS: u64 = 5;
/// Families without phases and arrivals that some mechanism speeds up.
const STEADY_FAMILIES: [MixFamily; 5] = [
    MixFamily::Sharing,
    MixFamily::Contention,
    MixFamily::Overcommitted,
    MixFamily::Space,
    MixFamily::Crossed,
];

/// Measurements of one run.
#[derive(Debug, Default)]
struct DayRun {
    windows: u64,
    changes: ChangeCounts,
    /// Seconds of processor time and windows by part of the day, with resident memory at its end.
    parts: Vec<(f64, u64, Option<f64>)>,
}

impl DayRun {
    /// The processor time of a window in the last part relative to the second; `None` if the host
    /// does not report it.
    fn time_ratio(&self) -> Option<f64> {
        let seconds_per_window = |part: &(f64, u64, Option<f64>)| part.0 / part.1.max(1) as f64;
        let (second, last) = (self.parts.get(1)?, self.parts.last()?);
        (second.0 > 0.0).then(|| seconds_per_window(last) / seconds_per_window(second))
    }

    /// The growth of resident memory from the first part's end to the day's; `None` if the host
    /// does not report it.
    fn grown_bytes(&self) -> Option<f64> {
        Some(self.parts.last()?.2? - self.parts.first()?.2?)
    }
}

/// Changes of what a plan says about each process.
#[derive(Debug, Default)]
struct ChangeCounts {
    previous: BTreeMap<ProcessId, String>,
    minute: u64,
    in_minute: BTreeMap<ProcessId, u64>,
    worst_minute: u64,
    total: u64,
}

impl ChangeCounts {
    fn add_window(&mut self, observation: &Observation, plan: &Plan) {
        let minute = observation.span.start_ns / MINUTE_NS;
        if minute != self.minute {
            self.in_minute.clear();
            self.minute = minute;
        }

        let mut tasks_by_process: BTreeMap<ProcessId, Vec<TaskId>> = BTreeMap::new();
        for task in observation.tasks.iter().filter(|task| !task.exited) {
            tasks_by_process
                .entry(task.process)
                .or_default()
                .push(task.task);
        }

        let current = tasks_by_process
            .iter()
            .map(|(&process, tasks)| (process, describe_part(plan, process, tasks)));
        let current: BTreeMap<ProcessId, String> = current.collect();
        for (process, part) in &current {
            if self
                .previous
                .get(process)
                .is_some_and(|previous| previous != part)
            {
                let count = self.in_minute.entry(*process).or_default();
                *count += 1;
                self.worst_minute = self.worst_minute.max(*count);
                self.total += 1;
            }
        }
        self.previous = current;
    }
}

fn describe_part(plan: &Plan, process: ProcessId, tasks: &[TaskId]) -> String {
    let cpus: Vec<_> = tasks.iter().map(|task| plan.affinity.get(task)).collect();
    let has_own_task =
        |gang: &cachemate_core::Gang| gang.members.iter().any(|(task, _)| tasks.contains(task));
    let gangs: Vec<_> = plan
        .gangs
        .iter()
        .filter(|schedule| schedule.gangs.iter().any(has_own_task))
        .collect();
    let is_own = |member: &ShareMember| match member {
        ShareMember::Process(owner) => *owner == process,
        ShareMember::Task(task) => tasks.contains(task),
    };
    let shares = plan
        .shares
        .iter()
        .filter(|share| share.members.iter().any(is_own));
    let units: Vec<_> = shares.map(|share| (share.cache, &share.units)).collect();
    format!("{cpus:?} {gangs:?} {units:?}")
}

fn run_day(
    spec: &MachineSpec,
    jobs: Vec<IntervalJob>,
    seed: u64,
    length_ns: u64,
    should_continue: &dyn Fn() -> bool,
) -> Result<DayRun> {
    let options = Options {
        seed,
        length_ns: Some(length_ns),
        ..Options::default()
    };
    let (machine, pipeline) = start_interval_machine(spec, options, jobs, "auto", true)?;
    let mut day = DayRun::default();
    let mut cpu_at_last_window = cpu_seconds();

    pipeline
        .run(machine, |_, record| {
            day.windows += 1;
            day.changes
                .add_window(&record.observation, &record.decision.plan);
            let end_ns = record.observation.span.start_ns + record.observation.span.elapsed_ns;
            let part_index = (end_ns.saturating_sub(1) * PARTS / length_ns).min(PARTS - 1) as usize;
            while day.parts.len() <= part_index {
                day.parts.push((0.0, 0, None));
            }

            let now = cpu_seconds();
            let part = &mut day.parts[part_index];
            part.0 += cpu_at_last_window
                .zip(now)
                .map_or(0.0, |(before, now)| now - before);
            part.1 += 1;
            part.2 = resident_bytes();
            cpu_at_last_window = now;
            should_continue()
        })
        .map_err(failed("auto"))?;

    Ok(day)
}

/// Draws programs that arrive and exit at random for `length_ns`.
fn draw_arrivals(spec: &MachineSpec, seed: u64, length_ns: u64) -> Vec<IntervalJob> {
    let mut generator = SplitMix64::new(seed);
    let programs = draw_mix_jobs(spec, MixFamily::Contention, seed, length_ns).unwrap_or_default();
    let (mut jobs, mut start_ns) = (Vec::new(), 0.0);
    while !programs.is_empty() && start_ns < length_ns as f64 {
        let job = &programs[jobs.len() % programs.len()];
        let solo_cycles = job.program.phases[0]
            .points
            .last()
            .map_or(1.0, |point| point.cycles_per_instr);
        let seconds = generator.draw_exponential(MEAN_SOLO_LIFE_SECONDS);
        jobs.push(IntervalJob {
            name: format!("{}-{}", job.name, jobs.len()),
            start_ns: start_ns as u64,
            instructions: Some((spec.hertz as f64 * seconds / solo_cycles).max(1.0)),
            ..job.clone()
        });
        start_ns += generator.draw_exponential(MEAN_INTERARRIVAL_NS);
    }

    jobs
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let (seed, hours) = (context.seeds[0], context.pick(2, 24));
    let length_ns = hours * HOUR_NS;
    let spec = load_machine(MACHINES[0])?;
    let should_continue = || context.check_not_stopped().is_ok();
    let (mut worst_minute, mut steady_points) = (0, Vec::new());
    for family in STEADY_FAMILIES {
        context.report_progress(&format!(
            "INTERVAL-8: {hours} hours at steady load, {}",
            family.name()
        ));
        let Some(jobs) = draw_mix_jobs(&spec, family, seed, length_ns) else {
            continue;
        };
        let changes = run_day(&spec, jobs, seed, length_ns, &should_continue)?.changes;
        context.check_not_stopped()?;
        worst_minute = worst_minute.max(changes.worst_minute);

        steady_points.push(DataPoint::from_values(
            "changes of all services",
            family.name(),
            [changes.total as f64],
        ));
        let worst_changes = [changes.worst_minute as f64];
        steady_points.push(DataPoint::from_values(
            "changes in the worst minute",
            family.name(),
            worst_changes,
        ));
    }

    context.report_progress(&format!("INTERVAL-8: {hours} hours of arrivals"));
    let arriving_jobs = draw_arrivals(&spec, seed, length_ns);
    let job_count = arriving_jobs.len();
    let restless_day = run_day(&spec, arriving_jobs, seed, length_ns, &should_continue)?;
    context.check_not_stopped()?;
    let (windows, changes) = (restless_day.windows, restless_day.changes.total);
    let note = format!(
        "{job_count} programs in {windows} windows on {}, {changes} changes of processes",
        spec.name
    );
    let finding = |name: &str, value: f64| Finding::declared(name, &[(seed, value)]);
    let grown_mib = restless_day.grown_bytes().map(|bytes| bytes / 1_048_576.0);
    let by_host = [
        ("interval-8-memory", grown_mib),
        ("interval-8-time", restless_day.time_ratio()),
    ];
    let by_host = by_host
        .into_iter()
        .filter_map(|(name, value)| Some(finding(name, value?).with_note(note.clone())));
    let changes = finding("interval-8-changes", worst_minute as f64).with_points(steady_points);
    Ok(std::iter::once(changes).chain(by_host).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a run of `auto` end after its length, with each part of it measured, and does a steady load disturb no
    /// process more than once a minute?
    #[test]
    fn a_steady_load_disturbs_no_process_twice_a_minute() {
        let spec = cachemate_spec::load_machine(MACHINES[0]).unwrap();
        let jobs = draw_mix_jobs(&spec, MixFamily::Sharing, 1, HOUR_NS).unwrap();
        let day = run_day(&spec, jobs, 1, 3 * MINUTE_NS, &|| true).unwrap();
        assert!(
            day.windows >= 180 && day.parts.len() == PARTS as usize,
            "{day:?}"
        );
        assert!(
            day.changes.total > 0 && day.changes.worst_minute <= 1,
            "{:?}",
            day.changes
        );
    }

    /// Do programs arrive until the end, and is each change of a process counted in its minute?
    #[test]
    fn changes_are_counted_by_process_and_minute() {
        let spec = cachemate_spec::load_machine(MACHINES[0]).unwrap();
        let jobs = draw_arrivals(&spec, 3, HOUR_NS);
        assert!(
            (10..60).contains(&jobs.len()) && jobs.iter().all(|job| job.start_ns < HOUR_NS),
            "{}",
            jobs.len()
        );
        let mut observation = cachemate_core::test_support::observation_of(
            0,
            SECOND_NS,
            (0..2).map(|id| cachemate_core::TaskSample::new(TaskId(id), ProcessId(id))),
        );
        let mut plan = Plan::idle(cachemate_core::WindowLength::Time { ns: SECOND_NS });
        let mut counts = ChangeCounts::default();
        for (second, cpu) in [(0, 0), (1, 1), (2, 0), (59, 0), (60, 1), (61, 1)] {
            observation.span.start_ns = second * SECOND_NS;
            plan.affinity.insert(TaskId(1), [cpu].into_iter().collect());
            counts.add_window(&observation, &plan);
        }
        assert_eq!((counts.total, counts.worst_minute), (3, 2));
    }
}
