//! Measurement of a change, on trial in blocks or monitored after it was applied.
//!
//! Speed is work a second of each process, by the best measure of work that it has ([`crate::work_metric`]). The stated
//! objective is compared: the forecast gives each process's speed under the old plan relative to its solo speed, the
//! measurement gives the change of it. Properties: a window counts once the plan has settled; a process that did not
//! run on both sides does not count.

use std::collections::BTreeMap;

use cachemate_core::{Observation, ProcessId};

use super::model::score::PlanObjective;
use crate::sequential_test::{BlockDesign, MIN_BLOCKS, SequentialTest, SequentialVerdict};
use crate::work_metric::{WorkMetric, metrics_of};

/// Work and time of processes, in all windows of a side.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkTotals {
    work: BTreeMap<(ProcessId, WorkMetric), f64>,
    pub elapsed_ns: f64,
}

impl WorkTotals {
    /// Takes a window in.
    pub fn add(&mut self, seen: &Observation) {
        for task in seen.tasks.iter().filter(|task| !task.exited) {
            for (work, count) in metrics_of(task, seen.span.elapsed_ns) {
                *self.work.entry((task.process, work)).or_insert(0.0) += count;
            }
        }
        self.elapsed_ns += seen.span.elapsed_ns as f64;
    }

    /// Speed of a process over that on another side, by the best measure that both have.
    fn relative_to(&self, other: &WorkTotals, process: ProcessId) -> Option<f64> {
        WorkMetric::BEST_FIRST.into_iter().find_map(|work| {
            let (mine, theirs) = (self.work.get(&(process, work))?, other.work.get(&(process, work))?);
            let ratio = (mine / self.elapsed_ns) / (theirs / other.elapsed_ns);
            (ratio.is_finite() && ratio > 0.0).then_some(ratio)
        })
    }
}

/// A process in the objective: its weight, and its forecast speed under the old plan relative to its solo speed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Weight {
    pub process: ProcessId,
    pub priority: f64,
    pub over_alone: f64,
}

/// Logarithm of the objective on one side over that on the other.
pub fn log_ratio(new: &WorkTotals, old: &WorkTotals, weights: &[Weight], objective: PlanObjective) -> Option<f64> {
    let mut changed = Vec::new();
    for weight in weights {
        // A process that did not run on both sides does not count.
        if let Some(ratio) = new.relative_to(old, weight.process) {
            changed.push((*weight, ratio));
        }
    }
    if changed.is_empty() {
        return None;
    }
    let (now, before) = if objective == PlanObjective::WorstSlowdown {
        let least = |of: &dyn Fn(&(Weight, f64)) -> f64| changed.iter().map(of).fold(f64::INFINITY, f64::min);
        (least(&|(weight, ratio)| weight.over_alone * ratio), least(&|(weight, _)| weight.over_alone))
    } else {
        let sum = |of: &dyn Fn(&(Weight, f64)) -> f64| changed.iter().map(of).sum::<f64>();
        let value = |weight: &Weight| weight.priority * weight.over_alone;
        (sum(&|(weight, ratio)| value(weight) * ratio), sum(&|(weight, _)| value(weight)))
    };
    let ratio = now / before;
    (ratio.is_finite() && ratio > 0.0).then(|| libm::log(ratio))
}

/// Windows after a change that do not count, and windows of a leg that do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LegLengths {
    pub warmup_windows: u32,
    pub leg_windows: u32,
}

impl LegLengths {
    /// Windows of the shortest trial that adopts a change.
    pub fn shortest_trial(self) -> u32 {
        MIN_BLOCKS as u32 * (4 * self.leg_windows + 2 * self.warmup_windows)
    }
}

/// A change on trial, in blocks.
#[derive(Clone, Debug)]
pub struct Trial {
    lengths: LegLengths,
    weights: Vec<Weight>,
    objective: PlanObjective,
    blocks: BlockDesign,
    evidence: SequentialTest,
    sides: [WorkTotals; 2],
    settling: u32,
    in_leg: u32,
    /// Phases of the tasks at the start of the block: a block in which one changed does not count.
    phases: Vec<u32>,
    pub windows: u32,
}

/// Blocks after which a trial ends undecided, and windows, because some blocks may not count.
const MAX_BLOCKS: usize = 12;
const MAX_TRIAL_WINDOWS: u32 = 300;

impl Trial {
    pub fn new(lengths: LegLengths, weights: Vec<Weight>, objective: PlanObjective, seed: u64) -> Self {
        let blocks = BlockDesign::new(seed);
        Trial {
            lengths,
            weights,
            objective,
            settling: lengths.warmup_windows,
            blocks,
            evidence: SequentialTest::default(),
            sides: [WorkTotals::default(), WorkTotals::default()],
            in_leg: 0,
            phases: Vec::new(),
            windows: 0,
        }
    }

    /// Is the new plan in force?
    pub fn is_new(&self) -> bool {
        self.blocks.is_new()
    }

    /// Mean logarithm of new over old and its error, so far.
    pub fn estimate(&self) -> Option<(f64, f64)> {
        self.evidence.mean()
    }

    /// Takes in a window under the present leg's plan; `None` = the trial goes on.
    pub fn add(&mut self, seen: &Observation, phases: &[u32], min_gain: f64) -> Option<SequentialVerdict> {
        self.windows += 1;
        if self.windows > MAX_TRIAL_WINDOWS {
            return Some(SequentialVerdict::Undecided);
        }
        if self.windows == 1 {
            self.phases = phases.to_vec();
        }
        if self.settling > 0 {
            self.settling -= 1;
            return None;
        }
        let before = self.blocks.is_new();
        self.sides[usize::from(before)].add(seen);
        self.in_leg += 1;
        if self.in_leg < self.lengths.leg_windows {
            return None;
        }
        self.in_leg = 0;
        let over = self.blocks.next_leg();
        if self.blocks.is_new() != before {
            self.settling = self.lengths.warmup_windows;
        }
        if !over {
            return None;
        }
        let [old, new] = std::mem::take(&mut self.sides);
        if self.phases != phases {
            self.phases = phases.to_vec();
            return None;
        }
        self.evidence.add(log_ratio(&new, &old, &self.weights, self.objective)?);
        match self.evidence.verdict(min_gain) {
            SequentialVerdict::Undecided if self.evidence.blocks() < MAX_BLOCKS => None,
            said => Some(said),
        }
    }
}

/// Windows under the plan in force, before or after a change.
#[derive(Clone, Debug, Default)]
pub struct SpeedMonitor {
    recent: Vec<WorkTotals>,
    settling: u32,
}

/// Number of windows that are kept.
const RECENT: usize = 16;
/// With fewer windows there is no result.
const MIN_MONITORED: usize = 4;

/// A difference of logarithms with its error.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MeasuredLogRatio {
    pub log_ratio: f64,
    pub error: f64,
}

impl SpeedMonitor {
    /// Takes a window in.
    pub fn add(&mut self, seen: &Observation) {
        if self.settling > 0 {
            self.settling -= 1;
            return;
        }
        let mut done = WorkTotals::default();
        done.add(seen);
        if self.recent.len() == RECENT {
            self.recent.remove(0);
        }
        self.recent.push(done);
    }

    /// Are there enough windows to compare with?
    pub fn is_enough(&self) -> bool {
        self.recent.len() >= MIN_MONITORED
    }

    /// Does it hold all the windows that it can keep?
    pub fn is_full(&self) -> bool {
        self.recent.len() >= RECENT
    }

    /// The plan changes now; returns the windows before.
    pub fn changed(&mut self, warmup_windows: u32) -> SpeedMonitor {
        std::mem::replace(self, SpeedMonitor { recent: Vec::new(), settling: warmup_windows })
    }

    /// Speeds after the change over those before; `None` until both sides have enough windows.
    pub fn relative_to(
        &self,
        before: &SpeedMonitor,
        weights: &[Weight],
        objective: PlanObjective,
    ) -> Option<MeasuredLogRatio> {
        if self.recent.len() < MIN_MONITORED || before.recent.len() < MIN_MONITORED {
            return None;
        }
        let sum = |of: &[WorkTotals]| {
            let mut all = WorkTotals::default();
            for done in of {
                all.elapsed_ns += done.elapsed_ns;
                for (&what, work) in &done.work {
                    *all.work.entry(what).or_insert(0.0) += work;
                }
            }
            all
        };
        let old = sum(&before.recent);
        let value = |done: &WorkTotals| log_ratio(done, &old, weights, objective);
        let spread = |of: &[WorkTotals]| {
            let values: Vec<f64> = of.iter().filter_map(value).collect();
            let count = values.len() as f64;
            let mean = values.iter().sum::<f64>() / count;
            let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
            squares / (count - 1.0).max(1.0) / count
        };
        let log_ratio = log_ratio(&sum(&self.recent), &old, weights, objective)?;
        // Successive windows resemble each other: at an autocorrelation of 0.6 the error is twice as large.
        let error = 2.0 * libm::sqrt(spread(&self.recent) + spread(&before.recent));
        Some(MeasuredLogRatio { log_ratio, error })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::observation;
    use cachemate_core::{CounterEvent, EventCount, EventCounts};

    fn seen(instructions: u64) -> Observation {
        let mut seen = observation(0, 2);
        seen.span.elapsed_ns = 1_000;
        for task in &mut seen.tasks {
            task.counts = EventCounts(vec![EventCount {
                event: CounterEvent::Instructions,
                count: instructions,
                enabled_share: 1.0,
            }]);
        }
        seen
    }
    fn weights(of: &Observation) -> Vec<Weight> {
        of.tasks.iter().map(|task| Weight { process: task.process, priority: 1.0, over_alone: 0.5 }).collect()
    }

    /// Does a trial find a gain that exists, and none that does not?
    #[test]
    fn a_trial_finds_a_gain_that_exists() {
        let run = |gain: u64| {
            let lengths = LegLengths { warmup_windows: 1, leg_windows: 2 };
            let mut trial = Trial::new(lengths, weights(&seen(1)), PlanObjective::WeightedSpeedup, 3);
            (0..400).find_map(|window| {
                let more = if trial.is_new() { gain } else { 0 };
                trial.add(&seen(1_000_000 + 10_000 * more + 100 * (window * 7919 % 13)), &[0], 0.01)
            })
        };
        assert_eq!(run(5), Some(SequentialVerdict::Faster));
        assert_eq!(run(0), Some(SequentialVerdict::Negligible));
    }

    /// Is the effect of a change measured once enough windows have settled?
    #[test]
    fn the_effect_of_a_change_is_measured() {
        let mut watch = SpeedMonitor::default();
        (0..6).for_each(|window| watch.add(&seen(1_000 + window % 2)));
        let before = watch.changed(2);
        (0..5).for_each(|_| watch.add(&seen(500)));
        assert_eq!(watch.relative_to(&before, &weights(&seen(1)), PlanObjective::WeightedSpeedup), None);
        (0..2).for_each(|_| watch.add(&seen(900)));
        let estimate = watch.relative_to(&before, &weights(&seen(1)), PlanObjective::WeightedSpeedup).unwrap();
        assert!(estimate.log_ratio < -0.3 && estimate.error > 0.0, "{estimate:?}");
    }
}
