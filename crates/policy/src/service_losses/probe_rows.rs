//! The intervals of a probe in which some tasks wait, divided into those that are compared.

use std::collections::BTreeSet;

use cachemate_core::{RowInterval, TaskId};

/// Intervals of one probe after the cache has filled. The probe's own threads keep every CPU awake, which changes the cost
/// of each wake-up, so an interval is compared with another one of the same probe, not with the windows before it.
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
        let all_tasks: BTreeSet<TaskId> = rows.iter().flat_map(|row| row.tasks.iter().copied()).collect();
        let is_filling = |index: usize| {
            let has_same_tasks =
                |other: Option<&RowInterval>| other.is_some_and(|other| other.tasks == rows[index].tasks);
            index == 0 || !has_same_tasks(rows.get(index - 1)) && has_same_tasks(rows.get(index + 1))
        };
        let has_partial = rows.iter().any(|row| row.tasks.len() < all_tasks.len());
        let settled_rows = rows.iter().enumerate().filter(|(index, _)| !is_filling(*index)).map(|(_, row)| row);
        let (complete, partial) = settled_rows.partition(|row| has_partial && row.tasks.len() == all_tasks.len());
        ProbeRows { partial, complete }
    }
}
