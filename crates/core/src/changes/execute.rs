//! Applies a list of changes, and undoes applied ones.

use std::collections::BTreeSet;

use super::{Change, ChangeId};
use crate::{PlanItem, RefusedItem};

/// A change that does not fit the current state.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot {change}: {mismatch}")]
pub struct StaleChange {
    /// The change, as text.
    pub change: String,
    /// The mismatch between the state and the change.
    pub mismatch: &'static str,
}

/// The outcome of one change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChangeOutcome<E> {
    /// The change was applied.
    Done,
    /// The change was tried, and failed with this error.
    Failed(E),
    /// The change was not tried, because the named change, on which it depends, failed.
    Skipped(ChangeId),
}

/// Applies a list in its order. Changes that depend on a failed one are skipped; all others are tried.
pub fn run<E>(
    changes: &[Change],
    mut apply: impl FnMut(&Change) -> Result<(), E>,
) -> Vec<ChangeOutcome<E>> {
    let mut outcomes: Vec<ChangeOutcome<E>> = Vec::with_capacity(changes.len());
    for change in changes {
        let failed_dependency = change.depends_on.iter().find_map(|&dependency| {
            match outcomes.get(dependency.0 as usize) {
                Some(ChangeOutcome::Failed(_)) => Some(dependency),
                Some(ChangeOutcome::Skipped(cause)) => Some(*cause),
                _ => None,
            }
        });
        outcomes.push(match failed_dependency {
            Some(cause) => ChangeOutcome::Skipped(cause),
            None => apply(change).map_or_else(ChangeOutcome::Failed, |()| ChangeOutcome::Done),
        });
    }
    outcomes
}

/// Each refused item of the plan comes with the first of its changes that failed, or the failed
/// change on which one of them depends. It occurs once.
pub fn refused_items(
    changes: &[Change],
    outcomes: &[ChangeOutcome<RefusedItem>],
) -> Vec<RefusedItem> {
    let mut reported_items: BTreeSet<PlanItem> = BTreeSet::new();
    let mut refusals = Vec::new();
    for (change, outcome) in changes.iter().zip(outcomes) {
        let cause = match outcome {
            ChangeOutcome::Done => continue,
            ChangeOutcome::Failed(refusal) => refusal,
            ChangeOutcome::Skipped(failed_id) => match outcomes.get(failed_id.0 as usize) {
                Some(ChangeOutcome::Failed(why)) => why,
                _ => continue,
            },
        };

        let items = change
            .items
            .iter()
            .filter(|item| reported_items.insert((*item).clone()));
        refusals.extend(items.map(|item| RefusedItem {
            item: item.clone(),
            ..cause.clone()
        }));
    }

    refusals
}

/// Inverses in reverse order, so that dependents are undone first. `applied` is some or all of one
/// list.
pub fn undo(applied: &[Change]) -> Vec<Change> {
    let mut undo_changes: Vec<Change> = Vec::with_capacity(applied.len());
    for (index, change) in applied.iter().rev().enumerate() {
        let dependents = applied.iter().rev().take(index).enumerate();
        let dependents =
            dependents.filter(|(_, later_change)| later_change.depends_on.contains(&change.id));
        let dependencies = dependents
            .map(|(position, _)| ChangeId(position as u32))
            .collect();
        let (id, items) = (ChangeId(index as u32), change.items.clone());
        undo_changes.push(Change {
            id,
            items,
            depends_on: dependencies,
            kind: change.kind.inverse(),
        });
    }
    undo_changes
}
