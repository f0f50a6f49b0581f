//! The intervals of a probe in which some tasks wait, divided into those that are compared.

use std::collections::BTreeSet;

use cachemate_core::{RowInterval, TaskId, complete_rows};

use super::{add_counts, work_counts};

/// Intervals of one probe after the cache has filled. The probe's own threads keep every CPU awake, which changes the
/// cost of each wake-up, so an interval is compared with another one of the same probe, not with the windows before it.
#[derive(Default)]
pub(crate) struct ProbeRows<'a> {
    /// Intervals in which some of the tasks waited.
    pub(crate) partial: Vec<&'a RowInterval>,
    /// Intervals in which all tasks ran; empty if the probe had none.
    pub(crate) complete: Vec<&'a RowInterval>,
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
                &mut divided_rows.complete
            } else {
                &mut divided_rows.partial
            };
            side.push(row);
        }
        divided_rows
    }
}

/// The instructions and cycles of these tasks in these intervals.
pub(crate) fn counts_of_tasks(rows: &[&RowInterval], tasks: &BTreeSet<TaskId>) -> (f64, f64) {
    let counts = rows
        .iter()
        .flat_map(|row| row.tasks.iter().zip(&row.task_counts));
    let counts = counts
        .filter(|(task, _)| tasks.contains(task))
        .filter_map(|(_, counts)| work_counts(counts));
    counts.fold((0.0, 0.0), add_counts)
}
