//! Misses of tasks that had a partition to themselves: counted points of their curves.
//!
//! A log may be too short for large sizes, and the counts under the plan in force correct a curve only near the present
//! size. Without memory, a plan whose size was just counted is forecast again by the uncorrected curve, and two plans
//! alternate. Properties: points are of one phase, or of phases of one kind; exited tasks are forgotten.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::TaskId;

use super::speeds::CurrentPhase;

/// Misses per instruction by task, phase and bytes.
#[derive(Clone, Debug, Default)]
pub struct MeasuredSizes(BTreeMap<(TaskId, CurrentPhase), BTreeMap<u64, f64>>);

/// Returns the phase as a key: its number if its kind is unknown, and only its kind otherwise.
fn phase_key((number, kind): CurrentPhase) -> CurrentPhase {
    if kind.is_some() { (0, kind) } else { (number, None) }
}

impl MeasuredSizes {
    /// Keeps the live tasks, and drops points of phases without a kind that have passed.
    pub fn retain(&mut self, live_tasks: &BTreeSet<TaskId>, phase_of: impl Fn(TaskId) -> CurrentPhase) {
        let is_recurring = |task: TaskId, phase: CurrentPhase| phase.1.is_some() || phase == phase_key(phase_of(task));
        self.0.retain(|&(task, phase), _| live_tasks.contains(&task) && is_recurring(task, phase));
    }

    /// Records the misses per instruction with a partition of this size.
    pub fn record(&mut self, task: TaskId, phase: CurrentPhase, bytes: f64, misses_per_instr: f64) {
        self.0.entry((task, phase_key(phase))).or_default().insert(bytes as u64, misses_per_instr);
    }

    /// Returns the points of a task in this phase, as bytes and misses per instruction.
    pub fn points(&self, task: TaskId, phase: CurrentPhase) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.0.get(&(task, phase_key(phase))).into_iter().flatten().map(|(&bytes, &misses)| (bytes as f64, misses))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are points of a phase found in a later phase of the same kind, and never in another phase?
    #[test]
    fn points_belong_to_a_phase() {
        let (task, mut sizes) = (TaskId(1), MeasuredSizes::default());
        sizes.record(task, (3, Some(7)), 1024.0, 0.01);
        sizes.record(task, (4, None), 1024.0, 0.02);
        let points_of = |sizes: &MeasuredSizes, phase| sizes.points(task, phase).collect::<Vec<_>>();
        assert_eq!(points_of(&sizes, (9, Some(7))), [(1024.0, 0.01)]);
        assert_eq!(points_of(&sizes, (4, None)), [(1024.0, 0.02)]);
        assert_eq!((points_of(&sizes, (5, None)), points_of(&sizes, (4, Some(8)))), (vec![], vec![]));
        sizes.retain(&[task].into(), |_| (5, None));
        assert_eq!((points_of(&sizes, (4, None)), points_of(&sizes, (1, Some(7))).len()), (vec![], 1));
        sizes.retain(&BTreeSet::new(), |_| (5, None));
        assert_eq!(points_of(&sizes, (1, Some(7))), []);
    }
}
