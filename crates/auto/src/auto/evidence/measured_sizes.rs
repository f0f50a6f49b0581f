//! Misses of tasks that had a partition to themselves: counted points of their curves.
//!
//! A log may be too short for large sizes, and the counts under the plan in force correct a curve only near the present
//! size. Without this memory the search oscillates: it forecasts a size that it has just measured from the uncorrected
//! curve again. Properties: points are of one phase, or of phases of one kind; exited tasks are forgotten.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::TaskId;

use super::phases::PhaseId;

/// Tasks that share a cache, each with its phase.
pub type CoRunners = Vec<(TaskId, PhaseId)>;

/// Counted misses per instruction, each with the number of windows in which they were counted.
#[derive(Clone, Debug, Default)]
pub struct MeasuredSizes {
    /// By task, phase and bytes of the partition that the task had to itself.
    sizes: BTreeMap<(TaskId, PhaseId), BTreeMap<u64, (f64, u32)>>,
    /// By the tasks that shared an undivided cache.
    shared: BTreeMap<CoRunners, SharedCounts>,
    /// Number of records of shared caches so far.
    record_count: u64,
}

/// The counts of tasks that shared a cache.
#[derive(Clone, Debug, Default)]
struct SharedCounts {
    /// The number of the last record.
    last_record: u64,
    counts: BTreeMap<TaskId, (f64, u32)>,
}

/// The misses of a task that had a partition of this size to itself.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CountedSize {
    pub bytes: f64,
    pub misses_per_instr: f64,
}

/// Largest number of sets of co-runners that are stored: tasks with several kinds of phases have as many sets as
/// combinations of kinds.
const MAX_SHARED_SETS: usize = 256;

/// Number of windows after which more of them make a count no more certain, because counts decay.
const MAX_WINDOWS: u32 = 20;

/// The phase as a key: its number if its kind is unknown, and only its kind otherwise.
pub fn phase_key(phase: PhaseId) -> PhaseId {
    if phase.kind.is_some() {
        PhaseId { number: 0, ..phase }
    } else {
        phase
    }
}

fn record_longest(stored: &mut (f64, u32), (misses, windows): (f64, u32)) {
    let windows = windows.min(MAX_WINDOWS);
    if windows >= stored.1 {
        *stored = (misses, windows);
    }
}

impl MeasuredSizes {
    /// Keeps the live tasks, and drops points of phases without a kind that have passed.
    pub fn retain(&mut self, live_tasks: &BTreeSet<TaskId>, phase_of: impl Fn(TaskId) -> PhaseId) {
        let is_valid = |&(task, phase): &(TaskId, PhaseId)| {
            let has_passed = phase.kind.is_none() && phase != phase_key(phase_of(task));
            live_tasks.contains(&task) && !has_passed
        };
        self.sizes.retain(|key, _| is_valid(key));
        self.shared.retain(|tasks, _| tasks.iter().all(is_valid));
    }

    /// Records the misses per instruction with a partition of this size, unless those of more windows are known.
    pub fn record(&mut self, task: TaskId, phase: PhaseId, bytes: f64, count: (f64, u32)) {
        let sizes = self.sizes.entry((task, phase_key(phase))).or_default();
        record_longest(sizes.entry(bytes as u64).or_default(), count);
    }

    /// Records the misses per instruction of some of these tasks while they share a cache, likewise. The set that was
    /// recorded longest ago is forgotten if there are too many.
    pub fn record_shared(&mut self, tasks: CoRunners, counts: &[(TaskId, (f64, u32))]) {
        if counts.is_empty() {
            return;
        }
        self.record_count += 1;
        let shared = self.shared.entry(tasks).or_default();
        shared.last_record = self.record_count;
        for &(task, count) in counts {
            record_longest(shared.counts.entry(task).or_default(), count);
        }

        if self.shared.len() > MAX_SHARED_SETS {
            let oldest = self.shared.iter().min_by_key(|(_, set)| set.last_record);
            if let Some(tasks) = oldest.map(|(tasks, _)| tasks.clone()) {
                self.shared.remove(&tasks);
            }
        }
    }

    /// The misses per instruction of these tasks while they share a cache, as far as they were counted.
    pub fn shared_misses(&self, tasks: &CoRunners) -> impl Iterator<Item = (TaskId, f64)> + '_ {
        self.shared
            .get(tasks)
            .into_iter()
            .flat_map(|shared| &shared.counts)
            .map(|(task, (misses, _))| (*task, *misses))
    }

    /// The counts of a task in this phase, in rising order of size.
    pub fn points(&self, task: TaskId, phase: PhaseId) -> Vec<CountedSize> {
        let points = self
            .sizes
            .get(&(task, phase_key(phase)))
            .into_iter()
            .flatten();
        points
            .map(|(&bytes, &(misses, _))| CountedSize {
                bytes: bytes as f64,
                misses_per_instr: misses,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(number: u32, kind: Option<u32>) -> PhaseId {
        PhaseId { number, kind }
    }

    /// Are the newest sets of co-runners stored, and no more of them than a bound?
    #[test]
    fn is_the_number_of_sets_of_co_runners_bounded() {
        let mut sizes = MeasuredSizes::default();
        let tasks = |kind: u32| {
            vec![
                (TaskId(0), phase(0, Some(kind))),
                (TaskId(1), phase(0, Some(0))),
            ]
        };
        let known = |sizes: &MeasuredSizes, kind| sizes.shared_misses(&tasks(kind)).count();
        let sets = MAX_SHARED_SETS as u32 + 9;
        for kind in 0..sets {
            sizes.record_shared(tasks(kind), &[(TaskId(0), (0.01, 3))]);
            // The first set is met again all the time.
            sizes.record_shared(tasks(0), &[(TaskId(1), (0.02, 3))]);
        }
        assert_eq!(sizes.shared.len(), MAX_SHARED_SETS);
        assert_eq!(
            [0, 1, 9, 10, sets - 1].map(|kind| known(&sizes, kind)),
            [2, 0, 0, 1, 1]
        );
    }

    /// Are points of a phase found in a later phase of the same kind, and never in another phase? Do fewer windows
    /// never replace more?
    #[test]
    fn points_are_found_only_in_phases_of_the_same_kind() {
        let (task, mut sizes) = (TaskId(1), MeasuredSizes::default());
        sizes.record(task, phase(3, Some(7)), 1024.0, (0.01, 9));
        sizes.record(task, phase(3, Some(7)), 1024.0, (0.09, 3));
        sizes.record(task, phase(4, None), 1024.0, (0.02, 3));
        let points_of =
            |sizes: &MeasuredSizes, (number, kind)| sizes.points(task, phase(number, kind));
        let counted = |misses_per_instr| CountedSize {
            bytes: 1024.0,
            misses_per_instr,
        };
        assert_eq!(points_of(&sizes, (9, Some(7))), [counted(0.01)]);
        assert_eq!(points_of(&sizes, (4, None)), [counted(0.02)]);
        assert_eq!(
            (
                points_of(&sizes, (5, None)),
                points_of(&sizes, (4, Some(8)))
            ),
            (vec![], vec![])
        );
        sizes.retain(&[task].into(), |_| phase(5, None));
        assert_eq!(
            (
                points_of(&sizes, (4, None)),
                points_of(&sizes, (1, Some(7))).len()
            ),
            (vec![], 1)
        );
        sizes.retain(&BTreeSet::new(), |_| phase(5, None));
        assert_eq!(points_of(&sizes, (1, Some(7))), []);
    }
}
