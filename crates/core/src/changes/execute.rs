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
pub fn run<E>(changes: &[Change], mut make: impl FnMut(&Change) -> Result<(), E>) -> Vec<ChangeOutcome<E>> {
    let mut outcomes: Vec<ChangeOutcome<E>> = Vec::with_capacity(changes.len());
    for change in changes {
        let failed = change.depends_on.iter().find_map(|&needed| match outcomes.get(needed.0 as usize) {
            Some(ChangeOutcome::Failed(_)) => Some(needed),
            Some(ChangeOutcome::Skipped(because)) => Some(*because),
            _ => None,
        });
        outcomes.push(match failed {
            Some(because) => ChangeOutcome::Skipped(because),
            None => make(change).map_or_else(ChangeOutcome::Failed, |()| ChangeOutcome::Done),
        });
    }
    outcomes
}

/// The refused items of the plan: for each, the first of its changes that failed, or the failed change on which one of
/// them depends. Each item occurs once.
pub fn refused_items(changes: &[Change], outcomes: &[ChangeOutcome<RefusedItem>]) -> Vec<RefusedItem> {
    let mut reported: BTreeSet<PlanItem> = BTreeSet::new();
    let mut lines = Vec::new();
    for (change, outcome) in changes.iter().zip(outcomes) {
        let cause = match outcome {
            ChangeOutcome::Done => continue,
            ChangeOutcome::Failed(why) => why,
            ChangeOutcome::Skipped(because) => match outcomes.get(because.0 as usize) {
                Some(ChangeOutcome::Failed(why)) => why,
                _ => continue,
            },
        };
        let items = change.items.iter().filter(|item| reported.insert((*item).clone()));
        lines.extend(items.map(|item| RefusedItem { item: item.clone(), ..cause.clone() }));
    }
    lines
}

/// The list that undoes the applied changes, which are some or all of one list: their inverses in reverse order, so
/// that dependents are undone first.
pub fn undo(applied: &[Change]) -> Vec<Change> {
    let mut undone: Vec<Change> = Vec::with_capacity(applied.len());
    for (index, change) in applied.iter().rev().enumerate() {
        let dependents = applied.iter().rev().take(index).enumerate();
        let dependents = dependents.filter(|(_, later)| later.depends_on.contains(&change.id));
        let dependencies = dependents.map(|(place, _)| ChangeId(place as u32)).collect();
        let (id, items) = (ChangeId(index as u32), change.items.clone());
        undone.push(Change { id, items, depends_on: dependencies, kind: change.kind.inverse() });
    }
    undone
}
