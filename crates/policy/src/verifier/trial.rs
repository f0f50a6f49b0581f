//! A trial of a proposed change: the previous and the new plan alternate in blocks.
//!
//! Speed is the work per second of each process, by the best measure of work that it has ([`crate::work_metric`]). The
//! stated objective is compared: the policy gives each process's weighted speed under the old plan, and the measurement
//! gives its change. Properties: a window counts only after the leg has settled; a process that did not run on both
//! sides does not count.

use std::collections::BTreeMap;

use cachemate_core::{MeasuredLogRatio, Observation, ProcessId, ProposedChange, SpeedObjective, VerificationMethod};

use crate::sequential_test::{BlockDesign, MIN_BLOCKS, SequentialTest, SequentialVerdict};
use crate::work_metric::{WorkMetric, metrics_of};

/// Work and time of processes, over all windows of a side.
#[derive(Clone, Debug, Default, PartialEq)]
struct WorkTotals {
    work: BTreeMap<(ProcessId, WorkMetric), f64>,
    elapsed_ns: f64,
}

impl WorkTotals {
    /// Adds a window.
    fn add(&mut self, observation: &Observation) {
        for task in observation.tasks.iter().filter(|task| !task.exited) {
            for (work, count) in metrics_of(task, observation.span.elapsed_ns) {
                *self.work.entry((task.process, work)).or_insert(0.0) += count;
            }
        }
        self.elapsed_ns += observation.span.elapsed_ns as f64;
    }

    /// Returns the speed of a process relative to another side, by the best measure that both have.
    fn speed_ratio_to(&self, other_side: &WorkTotals, process: ProcessId) -> Option<f64> {
        WorkMetric::BEST_FIRST.into_iter().find_map(|work| {
            let (own_work, other_work) = (self.work.get(&(process, work))?, other_side.work.get(&(process, work))?);
            let ratio = (own_work / self.elapsed_ns) / (other_work / other_side.elapsed_ns);
            (ratio.is_finite() && ratio > 0.0).then_some(ratio)
        })
    }
}

/// Returns the logarithm of the objective after a change over that before it, from the ratio of each process's speeds.
/// A process without a ratio does not count.
pub fn log_ratio(change: &ProposedChange, ratio: impl Fn(ProcessId) -> Option<f64>) -> Option<f64> {
    let changed_speeds: Vec<(f64, f64)> =
        change.speeds.iter().filter_map(|&(process, speed)| Some((speed, ratio(process)?))).collect();
    if changed_speeds.is_empty() {
        return None;
    }
    let objective_value = |speeds: &mut dyn Iterator<Item = f64>| match change.objective {
        SpeedObjective::Slowest => speeds.fold(f64::INFINITY, f64::min),
        SpeedObjective::Sum => speeds.sum(),
    };
    let changed_objective = objective_value(&mut changed_speeds.iter().map(|(speed, ratio)| speed * ratio));
    let ratio = changed_objective / objective_value(&mut changed_speeds.iter().map(|(speed, _)| *speed));
    (ratio.is_finite() && ratio > 0.0).then(|| libm::log(ratio))
}

/// Returns the number of windows of the shortest trial that can adopt a change.
pub fn min_trial_windows(warmup_windows: u32, leg_windows: u32) -> u32 {
    MIN_BLOCKS as u32 * (4 * leg_windows + 2 * warmup_windows)
}

/// A change on trial, in blocks.
#[derive(Clone, Debug)]
pub struct Trial {
    warmup_windows: u32,
    leg_windows: u32,
    blocks: BlockDesign,
    sequential_test: SequentialTest,
    sides: [WorkTotals; 2],
    settling_windows: u32,
    windows_in_leg: u32,
    pub window_count: u32,
}

/// Number of blocks after which a trial ends undecided, and number of windows, because some blocks may not count.
const MAX_BLOCKS: usize = 12;
const MAX_TRIAL_WINDOWS: u32 = 300;

impl Trial {
    /// Starts a trial; `None` if the change is monitored instead.
    pub fn from_method(method: VerificationMethod) -> Option<Self> {
        let VerificationMethod::Trial { warmup_windows, leg_windows, seed } = method else { return None };
        Some(Trial {
            warmup_windows,
            leg_windows,
            settling_windows: warmup_windows,
            blocks: BlockDesign::new(seed),
            sequential_test: SequentialTest::default(),
            sides: [WorkTotals::default(), WorkTotals::default()],
            windows_in_leg: 0,
            window_count: 0,
        })
    }

    /// Returns whether the new plan is in force.
    pub fn is_new_plan_in_force(&self) -> bool {
        self.blocks.is_new()
    }

    /// Returns the new over the old objective, so far.
    pub fn measured_log_ratio(&self) -> Option<MeasuredLogRatio> {
        self.sequential_test.mean().map(|(log_ratio, error)| MeasuredLogRatio { log_ratio, error })
    }

    /// Adds a window under the present leg's plan; `None` if the trial continues.
    pub fn add(&mut self, observation: &Observation, change: &ProposedChange) -> Option<SequentialVerdict> {
        self.window_count += 1;
        if self.window_count > MAX_TRIAL_WINDOWS {
            return Some(SequentialVerdict::Undecided);
        }
        if self.settling_windows > 0 {
            self.settling_windows -= 1;
            return None;
        }
        let is_new_side = self.blocks.is_new();
        self.sides[usize::from(is_new_side)].add(observation);
        self.windows_in_leg += 1;
        if self.windows_in_leg < self.leg_windows {
            return None;
        }
        self.windows_in_leg = 0;
        let is_block_complete = self.blocks.next_leg();
        if self.blocks.is_new() != is_new_side {
            self.settling_windows = self.warmup_windows;
        }
        if !is_block_complete {
            return None;
        }
        let [old, new] = std::mem::take(&mut self.sides);
        self.sequential_test.add(log_ratio(change, |process| new.speed_ratio_to(&old, process))?);
        match self.sequential_test.reach_verdict(change.min_gain) {
            SequentialVerdict::Undecided if self.sequential_test.blocks() < MAX_BLOCKS => None,
            verdict => Some(verdict),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::observation_fixture;
    use cachemate_core::{CounterEvent, EventCounts, Plan, WindowLength};

    fn observation_with(instructions: u64) -> Observation {
        let mut observation = observation_fixture(0, 2);
        observation.span.elapsed_ns = 1_000;
        for task in &mut observation.tasks {
            task.counts = EventCounts::exact([(CounterEvent::Instructions, instructions)]);
        }
        observation
    }
    /// Does a trial find a gain that exists, and find none if there is none?
    #[test]
    fn a_trial_finds_a_gain_that_exists() {
        let run = |gain: u64| {
            let method = VerificationMethod::Trial { warmup_windows: 1, leg_windows: 2, seed: 3 };
            let change = ProposedChange {
                method,
                old: Plan::idle(WindowLength::Time { ns: 1 }),
                forecasts: Default::default(),
                forecast_gain: 0.05,
                min_gain: 0.01,
                objective: SpeedObjective::Sum,
                goal_processes: Vec::new(),
                speeds: observation_with(1).tasks.iter().map(|task| (task.process, 0.5)).collect(),
            };
            let mut trial = Trial::from_method(method).unwrap();
            (0..400).find_map(|window| {
                let gain_percent = if trial.is_new_plan_in_force() { gain } else { 0 };
                trial.add(&observation_with(1_000_000 + 10_000 * gain_percent + 100 * (window * 7919 % 13)), &change)
            })
        };
        assert_eq!(run(5), Some(SequentialVerdict::Faster));
        assert_eq!(run(0), Some(SequentialVerdict::Negligible));
    }
}
