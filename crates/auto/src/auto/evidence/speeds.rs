//! Speed of each task and its waits, from the counters of recent windows.
//!
//! The weight of older windows halves every few windows, so that the influence of the past depends on time and not on
//! plans. Rates are ratios of sums, so short windows weigh less. A window in which a task was traced does not count
//! toward its speed. If a kind of phase recurs, its earlier speed is used until the speed is counted again.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    CacheLevel, CounterEvent, Observation, Plan, ProbeKind, StallCause, TaskId, TaskSample,
};
use cachemate_locality::profilers::AVERAGED;
use cachemate_papers::work_metric::WorkMetric;

use super::PATIENCE_WINDOWS;
use super::phases::PhaseId;

/// Speed of a task; `None` means not counted.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ObservedSpeed {
    pub cycles_per_instr: f64,
    pub misses_per_instr: Option<f64>,
    pub stall_cycles_per_miss: Option<f64>,
    pub references_per_instr: Option<f64>,
    /// Bytes to and from memory per miss, including prefetched lines.
    pub bytes_per_miss: Option<f64>,
    /// Cycles that a miss waits in the queue for memory.
    pub queue_cycles_per_miss: Option<f64>,
    /// Elapsed cycles per instruction, including time off the CPU.
    pub elapsed_cycles_per_instr: f64,
    pub remote_cycles_per_instr: Option<f64>,
    /// Share of one CPU on which the task runs or for which it waits.
    pub cpu_demand: f64,
    /// Whether the speed was counted in the present phase and under the plan in force, rather than recalled.
    pub is_current: bool,
    /// Number of windows in which it was counted so.
    pub windows: u32,
}

/// Decaying sums of an event and of the instructions during which it was counted.
#[derive(Clone, Copy, Default, Debug)]
struct DecayingRate {
    events: f64,
    instructions: f64,
}

#[derive(Clone, Default, Debug)]
struct DecayingSums {
    phase: u32,
    /// Kind of the phase, once known.
    kind: Option<u32>,
    /// Windows since the phase began, or since the plan changed for the task's cache.
    windows: u32,
    /// The first of these windows.
    first_window: u64,
    /// Number of changes of the plan for the task's cache so far.
    plan_number: u32,
    /// Whether the counts are those of an earlier plan, and are replaced in the next window.
    is_stale: bool,
    instructions: f64,
    cycles: f64,
    demanded_ns: f64,
    elapsed_ns: f64,
    misses: DecayingRate,
    references: DecayingRate,
    stalls: DecayingRate,
    remote_stalls: DecayingRate,
    queue_stalls: DecayingRate,
    read_bytes: DecayingRate,
    written_bytes: DecayingRate,
    on_cpu_ns: f64,
    reported_work: f64,
    reported_elapsed_ns: f64,
}

/// Factor by which the weight of a window decays in the next one.
const DECAY: f64 = 0.8;
/// The same factor for tasks whose phases are averaged: half of the weight is older than any of their phases.
const AVERAGED_DECAY: f64 = 0.95;

/// Number of windows of a phase after which its own counts outweigh recalled ones.
const OWN_COUNT_WINDOWS: u32 = 3;
/// The same number if phases are averaged: fewer windows may lack some of the phases.
const AVERAGED_COUNT_WINDOWS: u32 = 14;

/// Speeds of all tasks.
#[derive(Clone, Default, Debug)]
pub struct SpeedTracker {
    current_sums: BTreeMap<TaskId, DecayingSums>,
    /// The last counts of each kind of phase.
    sums_by_kind: BTreeMap<(TaskId, u32), DecayingSums>,
}

/// The cycles that wait for the memory behind the last level.
fn memory_stall_cycles(task: &TaskSample) -> Option<f64> {
    let causes = [
        StallCause::LocalMemory,
        StallCause::RemoteMemory,
        StallCause::BusQueue,
    ];
    let counts = causes.map(|cause| task.counts.get(CounterEvent::StallCycles(cause)));
    let is_counted = counts.iter().any(Option::is_some);
    is_counted.then(|| counts.into_iter().flatten().sum())
}

impl DecayingRate {
    fn add(&mut self, events: Option<f64>, instructions: f64, decay: f64) {
        self.events *= decay;
        self.instructions *= decay;
        if let Some(events) = events {
            self.events += events;
            self.instructions += instructions;
        }
    }
    fn per_instr(self) -> Option<f64> {
        (self.instructions > 0.0).then(|| self.events / self.instructions)
    }
}

impl DecayingSums {
    /// The number of windows after which the counts describe the phase under the plan in force.
    fn needed_windows(&self) -> u32 {
        if self.kind == Some(AVERAGED) {
            AVERAGED_COUNT_WINDOWS
        } else {
            OWN_COUNT_WINDOWS
        }
    }

    fn decay(&self) -> f64 {
        if self.kind == Some(AVERAGED) {
            AVERAGED_DECAY
        } else {
            DECAY
        }
    }

    /// Adds a window. In one in which the task did not run, what it does on a CPU stays known, and what it asks of one
    /// and its work in a second become less.
    fn add_window(&mut self, task: &TaskSample, elapsed_ns: f64, instructions: f64, cycles: f64) {
        let ran_ns = task.ran_ns() as f64;
        let demanded_ns = ran_ns + task.run_queue_wait_ns.unwrap_or(0) as f64;
        let reported_elapsed_ns = task.progress.map_or(0.0, |_| elapsed_ns);
        let decay = self.decay();
        for (sum, addend) in [
            (&mut self.instructions, instructions),
            (&mut self.cycles, cycles),
            (&mut self.demanded_ns, demanded_ns),
            (&mut self.on_cpu_ns, ran_ns),
            (&mut self.elapsed_ns, elapsed_ns),
            (&mut self.reported_work, task.progress.unwrap_or(0.0)),
            (&mut self.reported_elapsed_ns, reported_elapsed_ns),
        ] {
            *sum = decay * *sum + addend;
        }
    }
}

impl SpeedTracker {
    /// Whether the averages of all tasks with averaged phases are over enough windows, or are no longer waited for: a
    /// task may sleep for hours.
    pub fn are_averages_current(&self, window: u64) -> bool {
        let mut averaged = self
            .current_sums
            .values()
            .filter(|sums| sums.kind == Some(AVERAGED));
        averaged.all(|sums| {
            sums.windows >= sums.needed_windows() || window >= sums.first_window + PATIENCE_WINDOWS
        })
    }

    pub fn retain(&mut self, live_tasks: &BTreeSet<TaskId>) {
        self.current_sums
            .retain(|task, _| live_tasks.contains(task));
        self.sums_by_kind
            .retain(|(task, _), _| live_tasks.contains(task));
    }

    /// Observes a window, and forgets the counts of earlier phases. `is_replanned` returns whether the plan for a task's
    /// cache has changed since the last window. In such a window caches fill, so the counts under the new plan begin with
    /// the next one.
    pub fn observe(
        &mut self,
        observation: &Observation,
        previous_plan: &Plan,
        level: CacheLevel,
        phase_of: impl Fn(TaskId) -> PhaseId,
        is_replanned: impl Fn(TaskId) -> bool,
    ) {
        // During a solo interval, the task has other co-runners than usual, and the other tasks pause.
        if previous_plan
            .probes
            .iter()
            .any(|probe| matches!(probe.kind, ProbeKind::CoRunRows { .. }))
        {
            return;
        }

        let is_traced = |task: TaskId| {
            previous_plan.probes.iter().any(
                |probe| matches!(probe.kind, ProbeKind::MissTrace { task: traced_task, .. } if traced_task == task),
            )
        };

        let elapsed_ns = observation.span.elapsed_ns as f64;
        for task in observation
            .tasks
            .iter()
            .filter(|task| !task.exited && !is_traced(task.task))
        {
            let instructions_and_cycles = task
                .counts
                .get(CounterEvent::Instructions)
                .zip(task.counts.get(CounterEvent::Cycles));
            let Some((instructions, cycles)) =
                instructions_and_cycles.filter(|(i, c)| *i > 0.0 && *c > 0.0)
            else {
                if let Some(sums) = self.current_sums.get_mut(&task.task)
                    && !task.has_run()
                {
                    sums.add_window(task, elapsed_ns, 0.0, 0.0);
                }
                continue;
            };

            let sums = self.current_sums.entry(task.task).or_default();
            let PhaseId {
                number: phase_number,
                kind,
            } = phase_of(task.task);
            if sums.phase != phase_number {
                *sums = DecayingSums {
                    phase: phase_number,
                    plan_number: sums.plan_number,
                    ..DecayingSums::default()
                };
            }

            if sums.kind != kind {
                // Windows before this one may span two phases.
                if let Some(earlier_sums) =
                    kind.and_then(|kind| self.sums_by_kind.get(&(task.task, kind)))
                {
                    let is_stale =
                        earlier_sums.is_stale || earlier_sums.plan_number != sums.plan_number;
                    let plan_number = sums.plan_number;
                    *sums = DecayingSums {
                        phase: phase_number,
                        windows: 0,
                        plan_number,
                        is_stale,
                        ..earlier_sums.clone()
                    };
                }
                sums.kind = kind;
            }

            if is_replanned(task.task) {
                (sums.plan_number, sums.windows, sums.is_stale) = (sums.plan_number + 1, 0, true);
            } else if sums.is_stale {
                *sums = DecayingSums {
                    phase: phase_number,
                    kind,
                    plan_number: sums.plan_number,
                    ..DecayingSums::default()
                };
            }

            if sums.windows == 0 {
                sums.first_window = observation.window;
            }
            sums.windows += u32::from(!sums.is_stale);
            sums.add_window(task, elapsed_ns, instructions, cycles);

            let decay = sums.decay();
            let count = |event| task.counts.get(event);
            use CounterEvent::StallCycles;

            for (rate, events) in [
                (&mut sums.misses, count(CounterEvent::Misses(level))),
                (&mut sums.references, count(CounterEvent::References(level))),
                (&mut sums.stalls, memory_stall_cycles(task)),
                (
                    &mut sums.remote_stalls,
                    count(StallCycles(StallCause::RemoteCache)),
                ),
                (
                    &mut sums.queue_stalls,
                    count(StallCycles(StallCause::BusQueue)),
                ),
                (&mut sums.read_bytes, count(CounterEvent::MemoryReadBytes)),
                (
                    &mut sums.written_bytes,
                    count(CounterEvent::MemoryWriteBytes),
                ),
            ] {
                rate.add(events, instructions, decay);
            }

            if let Some(kind) = sums.kind {
                self.sums_by_kind.insert((task.task, kind), sums.clone());
            }
        }
    }

    /// The work per second; `None` until counted.
    pub fn work_per_second(&self, task: TaskId, metric: WorkMetric) -> Option<f64> {
        let sums = self.current_sums.get(&task)?;
        let (work_done, ns) = match metric {
            WorkMetric::Reported => (sums.reported_work, sums.reported_elapsed_ns),
            WorkMetric::Instructions => (sums.instructions, sums.elapsed_ns),
            WorkMetric::Proxy(_) => return None,
        };
        (ns > 0.0).then(|| work_done * 1e9 / ns)
    }

    /// References to the last level; `None` if they were not counted.
    pub fn references_per_instr(&self, task: TaskId) -> Option<f64> {
        self.current_sums.get(&task)?.references.per_instr()
    }

    /// The speed of a task; `None` until the task has run in a window in which its events were counted.
    pub fn observed_speed(&self, task: TaskId) -> Option<ObservedSpeed> {
        let sums = self
            .current_sums
            .get(&task)
            .filter(|sums| sums.instructions > 0.0)?;
        let misses = sums.misses.per_instr();
        let ratio_to_misses = |sum: DecayingRate| {
            sum.per_instr()
                .zip(misses.filter(|&rate| rate > 1e-7))
                .map(|(a, b)| a / b)
        };

        Some(ObservedSpeed {
            cycles_per_instr: sums.cycles / sums.instructions,
            misses_per_instr: misses,
            stall_cycles_per_miss: ratio_to_misses(sums.stalls),
            references_per_instr: sums.references.per_instr(),
            bytes_per_miss: ratio_to_misses(sums.read_bytes)
                .map(|bytes| bytes + ratio_to_misses(sums.written_bytes).unwrap_or(0.0)),
            queue_cycles_per_miss: ratio_to_misses(sums.queue_stalls),
            elapsed_cycles_per_instr: sums.cycles / sums.instructions * sums.elapsed_ns
                / sums.on_cpu_ns.max(1.0),
            remote_cycles_per_instr: sums.remote_stalls.per_instr(),
            cpu_demand: (sums.demanded_ns / sums.elapsed_ns.max(1.0)).clamp(0.02, 1.0),
            is_current: sums.windows >= sums.needed_windows(),
            windows: sums.windows,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::observation_fixture;
    use cachemate_core::{CpuId, EventCount, EventCounts, WindowLength};

    /// 1000 instructions and these counts.
    fn counts_fixture(counts: &[(CounterEvent, u64)]) -> EventCounts {
        let readings = [(CounterEvent::Instructions, 1000)]
            .into_iter()
            .chain(counts.iter().copied());
        EventCounts(
            readings
                .map(|(event, count)| EventCount {
                    event,
                    count,
                    enabled_share: 1.0,
                })
                .collect(),
        )
    }

    fn phase(number: u32, kind: Option<u32>) -> PhaseId {
        PhaseId { number, kind }
    }

    /// Are rates ratios of counts, dropped at a change of phase, and missing if nothing was counted?
    #[test]
    fn rates_are_ratios_of_counts() {
        let mut observation = observation_fixture(0, 2);
        observation.tasks[0].counts = counts_fixture(&[
            (CounterEvent::Cycles, 3000),
            (CounterEvent::Misses(CacheLevel::L3), 10),
            (CounterEvent::StallCycles(StallCause::LocalMemory), 1000),
        ]);
        let (mut speeds, plan) = (
            SpeedTracker::default(),
            Plan::idle(WindowLength::Time { ns: 1 }),
        );
        speeds.observe(
            &observation,
            &plan,
            CacheLevel::L3,
            |_| phase(0, None),
            |_| false,
        );
        let (measured_task, unmeasured_task) =
            (observation.tasks[0].task, observation.tasks[1].task);
        let speed = speeds.observed_speed(measured_task).unwrap();
        assert_eq!(
            (speed.cycles_per_instr, speed.misses_per_instr),
            (3.0, Some(0.01))
        );
        assert_eq!(
            (speed.stall_cycles_per_miss, speed.remote_cycles_per_instr),
            (Some(100.0), None)
        );
        assert_eq!(speeds.observed_speed(unmeasured_task), None);
        observation.tasks[0].counts.0[1].count = 9000;
        speeds.observe(
            &observation,
            &plan,
            CacheLevel::L3,
            |_| phase(1, None),
            |_| false,
        );
        assert_eq!(
            speeds
                .observed_speed(measured_task)
                .unwrap()
                .cycles_per_instr,
            9.0
        );
    }

    /// Does a phase of a known kind have a speed at once, marked as recalled until the phase was counted long enough?
    #[test]
    fn a_recurring_phase_has_its_speed_at_once() {
        let mut observation = observation_fixture(0, 1);
        let task = observation.tasks[0].task;
        let (mut speeds, plan) = (
            SpeedTracker::default(),
            Plan::idle(WindowLength::Time { ns: 1 }),
        );
        let mut window = |cycles: u64, (number, kind): (u32, Option<u32>)| {
            observation.tasks[0].counts = counts_fixture(&[(CounterEvent::Cycles, cycles)]);
            speeds.observe(
                &observation,
                &plan,
                CacheLevel::L3,
                |_| phase(number, kind),
                |_| false,
            );
            let speed = speeds.observed_speed(task).unwrap();
            (speed.cycles_per_instr, speed.is_current)
        };
        (0..5).for_each(|_| assert_eq!(window(3000, (0, Some(0))).0, 3.0));
        assert_eq!(window(5000, (1, None)).0, 5.0, "its kind is unknown");
        for _ in 0..5 {
            window(9000, (1, Some(1)));
        }
        window(6000, (2, None));
        let (recalled, is_of_now) = window(3000, (2, Some(0)));
        assert_eq!((recalled, is_of_now), (3.0, false));
        window(3000, (2, Some(0)));
        assert!(window(3000, (2, Some(0))).1);
    }

    /// After a change of plans, do counts begin anew with the first whole window under the new plan?
    #[test]
    fn counts_begin_anew_with_the_first_window_of_a_new_plan() {
        let mut observation = observation_fixture(0, 1);
        let task = observation.tasks[0].task;
        let (mut speeds, plan) = (
            SpeedTracker::default(),
            Plan::idle(WindowLength::Time { ns: 1 }),
        );
        let mut window = |cycles: u64, is_replanned: bool| {
            observation.tasks[0].counts = counts_fixture(&[(CounterEvent::Cycles, cycles)]);
            speeds.observe(
                &observation,
                &plan,
                CacheLevel::L3,
                |_| phase(0, Some(AVERAGED)),
                |_| is_replanned,
            );
            let speed = speeds.observed_speed(task).unwrap();
            (libm::round(speed.cycles_per_instr), speed.is_current)
        };
        (1..14).for_each(|_| assert!(!window(3000, false).1, "phases may be missing"));
        assert_eq!(window(3000, false), (3.0, true));
        assert!(!window(9000, true).1, "the cache fills");
        assert_eq!(window(5000, false), (5.0, false));
    }

    /// Does a program that sleeps lose its demand for a CPU and its work in a second, and keep its speed?
    #[test]
    fn a_program_that_sleeps_loses_its_demand_for_a_cpu() {
        let mut observation = observation_fixture(0, 1);
        let task = observation.tasks[0].task;
        let (mut speeds, plan) = (
            SpeedTracker::default(),
            Plan::idle(WindowLength::Time { ns: 1 }),
        );
        let mut observe = |observation: &Observation| {
            speeds.observe(
                observation,
                &plan,
                CacheLevel::L3,
                |_| phase(0, None),
                |_| false,
            );
            let speed = speeds.observed_speed(task).unwrap();
            let work = speeds.work_per_second(task, WorkMetric::Instructions);
            (speed.cpu_demand, speed.cycles_per_instr, work.unwrap())
        };
        observation.tasks[0].counts = counts_fixture(&[(CounterEvent::Cycles, 3000)]);
        observation.tasks[0].on_cpu_ns = vec![(CpuId(0), 900_000_000)];
        let (mut busy_demand, mut busy_work) = (0.0, 0.0);
        for _ in 0..10 {
            (busy_demand, _, busy_work) = observe(&observation);
        }
        observation.tasks[0].counts = EventCounts::default();
        observation.tasks[0].on_cpu_ns.clear();
        let (mut demand, mut cycles_per_instr, mut work) = (1.0, 0.0, 1.0);
        for _ in 0..20 {
            (demand, cycles_per_instr, work) = observe(&observation);
        }
        assert!(demand < 0.05 && busy_demand > 0.5, "{busy_demand} {demand}");
        assert!((cycles_per_instr - 3.0).abs() < 1e-9);
        assert!(work < 0.05 * busy_work, "{busy_work} {work}");
    }
}
