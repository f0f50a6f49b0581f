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
    /// By task and phase, the fewest misses that were counted on an undivided cache of this size, whoever shared it.
    undivided: BTreeMap<(TaskId, PhaseId), CountedSize>,
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

/// Windows from which on the count beside any co-runners bounds the misses with the whole cache.
const MIN_WINDOWS: u32 = 3;
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
        self.undivided.retain(|key, _| is_valid(key));
        self.shared.retain(|tasks, _| tasks.iter().all(is_valid));
    }

    /// Records the misses per instruction with a partition of this size, unless those of more windows are known.
    pub fn record(&mut self, task: TaskId, phase: PhaseId, bytes: f64, count: (f64, u32)) {
        let sizes = self.sizes.entry((task, phase_key(phase))).or_default();
        record_longest(sizes.entry(bytes as u64).or_default(), count);
    }

    /// Records the misses per instruction of some of these tasks while they share a cache of this size, likewise. The
    /// set that was recorded longest ago is forgotten if there are too many.
    pub fn record_shared(&mut self, bytes: f64, tasks: CoRunners, counts: &[(TaskId, (f64, u32))]) {
        if counts.is_empty() {
            return;
        }
        for &(task, phase) in &tasks {
            let count = counts.iter().find(|(other, _)| *other == task);
            let Some((_, (misses_per_instr, _))) =
                count.filter(|(_, (_, windows))| *windows >= MIN_WINDOWS)
            else {
                continue;
            };
            let counted = CountedSize {
                bytes,
                misses_per_instr: *misses_per_instr,
            };
            let fewest = self
                .undivided
                .entry((task, phase_key(phase)))
                .or_insert(counted);
            if counted.misses_per_instr < fewest.misses_per_instr {
                *fewest = counted;
            }
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

    /// The counts of a task in this phase, in rising order of size. Of an undivided cache, a task had no more than the
    /// whole, so the fewest misses counted there bound those with the whole: beyond the partitions, they say how much
    /// there is to be gained from more space.
    pub fn points(&self, task: TaskId, phase: PhaseId) -> Vec<CountedSize> {
        let key = (task, phase_key(phase));
        let sizes = self.sizes.get(&key).into_iter().flatten();
        let mut points: Vec<CountedSize> = sizes
            .map(|(&bytes, &(misses, _))| CountedSize {
                bytes: bytes as f64,
                misses_per_instr: misses,
            })
            .collect();
        if let Some((largest, whole)) = points.last().zip(self.undivided.get(&key))
            && whole.bytes > largest.bytes
            && whole.misses_per_instr < largest.misses_per_instr
        {
            points.push(*whole);
        }
        points
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
            sizes.record_shared(4096.0, tasks(kind), &[(TaskId(0), (0.01, 3))]);
            // The first set is met again all the time.
            sizes.record_shared(4096.0, tasks(0), &[(TaskId(1), (0.02, 3))]);
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

    /// Does a count beside others bound the misses with the whole cache, once a smaller partition was counted, and do
    /// counts of few windows, of other phases, or of more misses not?
    #[test]
    fn the_fewest_shared_misses_bound_those_with_the_whole_cache() {
        let (task, mut sizes) = (TaskId(1), MeasuredSizes::default());
        let kind = phase(3, Some(7));
        let beside = |other: u32| vec![(task, kind), (TaskId(other), phase(0, None))];
        sizes.record_shared(4096.0, beside(2), &[(task, (0.002, 3))]);
        sizes.record_shared(4096.0, beside(3), &[(task, (0.004, 9))]);
        sizes.record_shared(4096.0, beside(4), &[(task, (0.0, 2))]);
        assert_eq!(sizes.points(task, kind), []);
        sizes.record(task, kind, 1024.0, (0.01, 3));
        let rates = |sizes: &MeasuredSizes| -> Vec<(f64, f64)> {
            let points = sizes.points(task, kind).into_iter();
            points
                .map(|point| (point.bytes, point.misses_per_instr))
                .collect()
        };
        assert_eq!(rates(&sizes), [(1024.0, 0.01), (4096.0, 0.002)]);
        sizes.record(task, kind, 2048.0, (0.001, 3));
        assert_eq!(rates(&sizes), [(1024.0, 0.01), (2048.0, 0.001)]);
        assert_eq!(sizes.points(task, phase(3, Some(8))), []);
    }
}
