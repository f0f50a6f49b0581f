//! The intervals of a probe in which some tasks wait, divided into those that are compared.

use std::collections::BTreeSet;

use cachemate_core::{CounterEvent, EventCounts, RowInterval, TaskId, complete_rows};

/// Intervals of one probe after the cache has filled. The probe's own threads keep every CPU awake, which changes the
/// cost of each wake-up, so an interval is compared with another one of the same probe, not with the windows before it.
#[derive(Default)]
pub(crate) struct ProbeRows<'a> {
    /// Intervals in which some of the tasks waited.
    pub(crate) with_pause: Vec<&'a RowInterval>,
    /// Intervals in which all tasks ran; empty if the probe had none.
    pub(crate) without_pause: Vec<&'a RowInterval>,
}

impl<'a> ProbeRows<'a> {
    /// Divides the intervals. The cache fills during the first one of each group of equal ones, which is left out.
    pub(crate) fn new(rows: &'a [RowInterval]) -> Self {
        let is_complete = complete_rows(
            &rows
                .iter()
                .map(|row| row.tasks.as_slice())
                .collect::<Vec<_>>(),
        );
        let is_filling = |index: usize| {
            let has_same_tasks = |other: Option<&RowInterval>| {
                other.is_some_and(|other| other.tasks == rows[index].tasks)
            };
            index == 0
                || !has_same_tasks(rows.get(index - 1)) && has_same_tasks(rows.get(index + 1))
        };
        let mut divided_rows = ProbeRows::default();
        for (index, row) in rows
            .iter()
            .enumerate()
            .filter(|(index, _)| !is_filling(*index))
        {
            let side = if is_complete[index] {
                &mut divided_rows.without_pause
            } else {
                &mut divided_rows.with_pause
            };
            side.push(row);
        }
        divided_rows
    }
}

/// Instructions and cycles that were counted together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CountedWork {
    pub instructions: f64,
    pub cycles: f64,
}

impl CountedWork {
    /// `None` unless both were counted.
    pub fn from_counts(counts: &EventCounts) -> Option<CountedWork> {
        Some(CountedWork {
            instructions: counts.get(CounterEvent::Instructions)?,
            cycles: counts.get(CounterEvent::Cycles)?,
        })
    }

    /// The work of these tasks in these intervals.
    pub fn of_tasks(rows: &[&RowInterval], tasks: &BTreeSet<TaskId>) -> CountedWork {
        rows.iter()
            .flat_map(|row| row.tasks.iter().zip(&row.task_counts))
            .filter(|(task, _)| tasks.contains(task))
            .filter_map(|(_, counts)| CountedWork::from_counts(counts))
            .fold(CountedWork::default(), CountedWork::plus)
    }

    pub fn plus(self, other: CountedWork) -> CountedWork {
        CountedWork {
            instructions: self.instructions + other.instructions,
            cycles: self.cycles + other.cycles,
        }
    }

    /// `None` if nothing ran.
    pub fn instr_per_cycle(self) -> Option<f64> {
        (self.instructions > 0.0 && self.cycles > 0.0).then(|| self.instructions / self.cycles)
    }
}
