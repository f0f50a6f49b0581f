//! Parks the program that uses most memory bandwidth while a promise is missed (Caladan's rule: Fried, Ruan, Ousterhout
//! and Belay, OSDI 2020).
//!
//! Problem: partitions divide a cache and not the path to memory, and interference changes faster than curves are
//! measured. Method: in every window in which a promise on a cache is missed, the program without a promise that reads
//! and writes most memory there is parked: it may run only on the last CPU of the cache, which it shares with the other
//! parked programs. When the promises have had a fifth to spare for ten windows, the program that was parked last is
//! released.
//!
//! Properties: two counters, no model. A program is never stopped, whereas Caladan takes all cores from one if it must,
//! so that a single aggressor keeps its bandwidth here. Without promises, nothing changes, and what is parked runs
//! again.

use cachemate_core::{CpuSet, Decision, Plan, Policy, ProcessId, Reason, View, WindowLength};
use serde::Deserialize;

use super::{ParameterError, ParameterRange, parse_parameters};
use crate::partition::partitioned_cache::{CacheProcess, movable_processes, tasks_of};
use crate::solo_speeds::{SoloSpeeds, promise_slack};

/// Parameters of `caladan`, which the policy's page explains.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// Part of every promise that must be to spare before a program is released.
    pub spare_from: f64,
    /// Number of windows in a row for which it must be to spare.
    pub calm_windows: u32,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 10_000_000,
            spare_from: 0.2,
            calm_windows: 10,
        }
    }
}

struct Caladan {
    parameters: Parameters,
    solo_speeds: SoloSpeeds,
    /// Parked processes, the one that was parked last at the end.
    parked: Vec<ProcessId>,
    calm_windows: u32,
}

impl Policy for Caladan {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });
        let mut reasons = Vec::new();
        self.solo_speeds.observe(view.observation);
        let processes = movable_processes(view);
        self.parked
            .retain(|process| processes.iter().any(|live| live.process == *process));
        let mut worst_of_all: Option<f64> = None;
        for cpus in view
            .last_level_domains()
            .iter()
            .filter(|cpus| cpus.count() > 1)
        {
            let here: Vec<&CacheProcess<'_>> = processes
                .iter()
                .filter(|process| process.runs_mostly_on(cpus))
                .collect();
            let slacks = here
                .iter()
                .filter(|process| process.is_promised())
                .filter_map(|process| promise_slack(view, process, &self.solo_speeds));
            let Some(worst) = slacks.reduce(f64::min) else {
                continue;
            };
            worst_of_all = Some(worst_of_all.map_or(worst, |other| other.min(worst)));
            if worst < 0.0 {
                self.park(&here, &mut reasons);
            }
        }

        if !processes.iter().any(CacheProcess::is_promised) {
            self.parked.clear();
        }
        let is_calm = worst_of_all.is_some_and(|worst| worst > self.parameters.spare_from);
        self.calm_windows = if is_calm { self.calm_windows + 1 } else { 0 };
        if self.calm_windows >= self.parameters.calm_windows
            && let Some(released) = self.parked.pop()
        {
            self.calm_windows = 0;
            let tasks = tasks_of(&processes, released);
            reasons.push(Reason::new(tasks, "{0} is released", Vec::new()));
        }
        self.confine(view, &processes, &mut plan);
        Decision::new(plan, reasons)
    }
}

impl Caladan {
    /// Parks the program without a promise that moves most bytes, unless all are parked.
    fn park(&mut self, here: &[&CacheProcess<'_>], reasons: &mut Vec<Reason>) {
        let aggressor = here
            .iter()
            .filter(|process| !process.is_promised())
            .filter(|process| !self.parked.contains(&process.process))
            .filter_map(|process| Some((*process, process.moved_bytes()?)))
            .reduce(|a, b| if b.1 > a.1 { b } else { a });
        let Some((process, bytes)) = aggressor.filter(|(_, bytes)| *bytes > 0.0) else {
            return;
        };
        self.parked.push(process.process);
        let text = "{0} uses most memory bandwidth beside a missed promise: parked";
        let numbers = vec![("moved_bytes".to_string(), bytes)];
        reasons.push(Reason::new(process.task_ids(), text, numbers));
    }

    /// Pins the parked programs to the last CPU of the cache on which they are.
    fn confine(&self, view: &View<'_>, processes: &[CacheProcess<'_>], plan: &mut Plan) {
        let domains = view.last_level_domains();
        for process in processes
            .iter()
            .filter(|process| self.parked.contains(&process.process))
        {
            for task in &process.tasks {
                let before = view.previous_plan.affinity.get(&task.task);
                let home = domains.iter().find(|cpus| {
                    task.cpu.is_some_and(|cpu| cpus.contains(cpu.0))
                        || task.cpu.is_none() && before.is_some_and(|mask| mask.intersects(cpus))
                });
                let last = home.and_then(|cpus| cpus.iter().last());
                if let Some(last) = last {
                    plan.affinity
                        .insert(task.task, std::iter::once(last).collect::<CpuSet>());
                }
            }
        }
    }
}

pub(super) fn build(text: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters: Parameters = parse_parameters(text)?;
    ParameterRange::OneOrMore.check([
        ("window_ns", parameters.window_ns as f64),
        ("calm_windows", f64::from(parameters.calm_windows)),
    ])?;
    ParameterRange::FromZero.check([("spare_from", parameters.spare_from)])?;
    Ok(Box::new(Caladan {
        parameters,
        solo_speeds: SoloSpeeds::default(),
        parked: Vec::new(),
        calm_windows: 0,
    }))
}

#[cfg(test)]
mod tests {
    use cachemate_core::test_support::{
        NullPredictor, ViewFixture, capabilities_fixture, last_level_caches, observation_of,
    };
    use cachemate_core::{
        CacheLevel, CounterEvent, CpuId, EventCounts, Fact, Goal, Profile, RateFacts, TaskId,
        TaskSample,
    };

    use super::*;

    /// Runs a service that may be 10 % slower than alone beside two programs that move 5 and 50 bytes. Returns the CPUs
    /// of these two after each window; `slowdown` is that of the service with so many of them parked. The service exits
    /// before window `exit`.
    fn run(windows: u64, exit: u64, slowdown: fn(usize) -> f64) -> Vec<Vec<String>> {
        let topology = last_level_caches(1, 4, CacheLevel::L3, 16 << 20);
        let mut fixture = ViewFixture::new(topology, capabilities_fixture(&[]), 0);
        let solo = RateFacts {
            solo_instr_per_cycle: Some(Fact::oracle(1.0)),
            ..RateFacts::default()
        };
        fixture
            .profiles
            .insert(TaskId(0), Profile::default().with_rates(solo));

        let mut policy = build("calm_windows = 3", 1).unwrap();
        let mut parked = 0;
        let mut states = Vec::new();
        for window in 0..windows {
            let speed = 1.0 / (1.0 + slowdown(parked));
            let task = |index: u32| TaskSample {
                cpu: Some(CpuId(index)),
                on_cpu_ns: vec![(CpuId(index), 9)],
                counts: EventCounts::exact([
                    (CounterEvent::Instructions, (speed * 1e9) as u64),
                    (CounterEvent::Cycles, 1_000_000_000),
                    (
                        CounterEvent::MemoryReadBytes,
                        [1_000, 5, 50][index as usize],
                    ),
                ]),
                goal: (index == 0).then(|| Goal {
                    max_slowdown: Some(0.1),
                    ..Goal::default()
                }),
                ..TaskSample::new(TaskId(index), ProcessId(index))
            };

            let first_task = u32::from(window >= exit);
            fixture.observation = observation_of(window, 10_000_000, (first_task..3).map(task));
            let plan = fixture.decide(policy.as_mut(), &NullPredictor).plan;
            parked = plan.affinity.len();
            let describe = |(task, cpus): (&TaskId, &CpuSet)| format!("{}: {cpus}", task.0);
            states.push(plan.affinity.iter().map(describe).collect());
        }
        states
    }

    /// Is the program that moves most bytes parked first, the next one if that does not suffice, and the last one
    /// released when all is calm?
    #[test]
    fn the_largest_user_of_bandwidth_is_parked_first() {
        let states = run(3, 3, |parked| if parked >= 2 { 0.09 } else { 0.3 });
        assert_eq!(states[0], ["2: 3"]);
        assert_eq!(states[1], ["1: 3", "2: 3"]);
        assert_eq!(states[2], states[1]);
        let calm = run(5, 5, |parked| if parked == 0 { 0.3 } else { 0.01 });
        assert_eq!(calm[3], [] as [&str; 0], "{calm:?}");
    }

    /// Does a parked program run again when the program with the promise has ended?
    #[test]
    fn nothing_stays_parked_for_a_promise_that_has_ended() {
        let states = run(3, 2, |_| 0.3);
        assert!(!states[1].is_empty());
        assert_eq!(states[2], [] as [&str; 0], "{states:?}");
    }
}
